"""A pool's metrics for Ray's agent, which Prometheus scrapes.

`metric` names all metrics, and `exporter` hands them over.
"""

"""A pool's metrics for Ray's agent, which Prometheus scrapes.

`metric` defines all metrics, and `exporter` passes them to Ray.
"""

"""A pool's metrics for Ray's agent, which Prometheus scrapes. `metric` names them all, `exporter` hands them over."""

"""What a pool tells Ray's metrics agent, which Prometheus scrapes: `metric` names it all, `exporter` hands it over."""

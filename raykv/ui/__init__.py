"""`raykv ui`: a page of a pool, for whoever has no Grafana. `actor` looks and serves, `history` keeps what was seen."""

"""`raykv ui`: a page of a pool, for users without Grafana. `actor` looks and serves, `history` keeps what was seen."""

"""Ray clusters: one process or many, machines, and a cloud."""

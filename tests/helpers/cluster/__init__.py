"""Ray clusters: in one process or many, on stand-ins for machines, and in a fake cloud."""

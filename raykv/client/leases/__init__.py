"""A reader's leases on blocks, and the reading of leased blocks."""

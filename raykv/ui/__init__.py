"""Looks at a pool for users: `overview` at one moment, `history` over time. `actor` serves both as a page."""

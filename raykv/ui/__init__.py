"""Shows users a pool's state: `overview` shows one moment, and `history` a period. `actor` serves both as a page."""

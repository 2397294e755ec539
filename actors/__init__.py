"""The Ray actors of a pool: thin shells around what can be tested without Ray."""

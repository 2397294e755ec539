"""The Ray actors of a pool: thin shells around code that can be tested without Ray."""

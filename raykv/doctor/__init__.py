"""`raykv doctor`: what keeps a node from its part of a pool, or makes it slower there, and what to do about it."""

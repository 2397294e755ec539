"""`raykv doctor`: what keeps a node from its part of a pool, or slows it there, and what to do about it."""

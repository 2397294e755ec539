"""vLLM engines as actors, their models and requests, and the events that they publish."""

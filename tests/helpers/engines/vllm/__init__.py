"""vLLM engines as actors, what they are given, and what they announce."""

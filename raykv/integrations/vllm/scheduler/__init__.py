"""Our part in the process of vLLM's scheduler."""

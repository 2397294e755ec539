"""Our part in the processes of vLLM's workers."""

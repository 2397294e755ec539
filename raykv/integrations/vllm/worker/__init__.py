"""What runs in the processes of vLLM's workers."""

"""The part of raykv that runs in the processes of vLLM's workers."""

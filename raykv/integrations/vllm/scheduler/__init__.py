"""The part of raykv that runs in the process of vLLM's scheduler."""

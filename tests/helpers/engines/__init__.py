"""For tests of engines: SGLang's cache, a rank without vLLM, LoRA adapters, and files that killed engines leave."""

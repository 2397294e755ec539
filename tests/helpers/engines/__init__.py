"""What engines share: SGLang's cache, a rank, adapters, and what is left of them."""

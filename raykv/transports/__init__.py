"""How blocks cross nodes: transports, and the selector that chooses between them."""

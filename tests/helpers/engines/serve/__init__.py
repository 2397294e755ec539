"""Applications of Ray Serve, and who asks them."""

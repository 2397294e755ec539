"""Applications of Ray Serve, and clients of them."""

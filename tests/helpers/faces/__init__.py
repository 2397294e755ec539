"""What a user sees: commands, a terminal, a browser, Prometheus."""

"""The sides of raykv that users see: commands, a terminal, a browser, Prometheus."""

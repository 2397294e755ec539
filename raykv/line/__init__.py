"""Sockets between a pool's processes: frames, tokens, listeners, calls in flight, the line to the directory."""

"""How processes of a pool talk: frames and tokens, listeners, calls in flight, the way to the directory."""

"""How processes of a pool talk: frames and tokens, who listens, calls in flight, the way to the directory."""

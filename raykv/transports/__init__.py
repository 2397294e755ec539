"""How blocks cross nodes: transports, and lanes, which choose among them."""

"""How blocks cross nodes: `pull(peer, source, keys, arena, target)`, from a peer's slots into slots of this arena."""

"""The bytes of one node: blocks, slots, headers, copies and checksums."""

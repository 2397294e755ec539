"""The messages between clients, node stores and the directory.

A message is a NamedTuple, and its class documents the fields. Arrays travel as bytes, since bytes are copied fastest. A
message travels as a plain tuple, and the receiver turns the tuple into a message again. For Ray, pickling the message
itself would cost more than pickling all other arguments. The directory's socket carries tuples as msgpack (`packing`).

A field of type `bytes` holds, little-endian and contiguous:

- locations, source, target, staged, sweep: LOCATION records (`location`);
- keys: 16 bytes a key;
- ids, held, generations: uint64; indices: int32.

`calls` has the table of the directory's calls. The other modules define the messages, by sender: `clients`, `requests`,
`stores`, `tiers` and `transfers`.
"""

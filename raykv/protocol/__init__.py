"""Every message between clients, node stores and the directory, and what they are made of.

A message is a NamedTuple whose fields are documented at its class. Arrays travel as bytes, which is copied fastest.
Messages travel as plain tuples (`tuple(message)`; the receiver makes the class again): over the directory's socket as
msgpack (`packing`), and through Ray, for which pickling a class would cost more than all other arguments.

A field that is `bytes` holds, little-endian and contiguous:

- locations, source, target, staged, sweep: LOCATION records (`location`);
- keys: 16 bytes a key;
- ids, held: uint64; counts and generations of an array: uint64; indices: int32.

`calls` has the table of the directory's calls. The messages are in `clients`, `requests`, `stores`, `tiers` and
`transfers`, by who sends them.
"""

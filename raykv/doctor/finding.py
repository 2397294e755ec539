"""A line of `raykv doctor`: a check of a node, its result, and advice."""

from typing import NamedTuple

OK, ADVICE, WRONG = "ok", "advice", "wrong"


class Finding(NamedTuple):
    """One check of one node.

    node: Ray node id. check: what was checked. state: OK; ADVICE if the node works, but could be faster or easier to
    use; WRONG if a pool can't start on the node, or is slow there. text: the result, with advice unless OK. peer: id of
    the other node, in a check of two nodes. gbps: rate of blocks from that node, in 1e9 bytes a second.
    """

    node: str
    check: str
    state: str
    text: str
    peer: str | None = None
    gbps: float | None = None

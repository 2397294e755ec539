"""A line of `raykv doctor`: a check of a node, its result, and advice."""

from typing import NamedTuple

OK, ADVICE, WRONG = "ok", "advice", "wrong"


class Finding(NamedTuple):
    """One check of one node.

    node: Ray node id. check: what was checked. state: OK; ADVICE: the node works, but could be faster or easier; WRONG:
    a pool can't start here, or is slow. text: the result, and advice unless OK. peer: id of the other node, in a check
    of two nodes. gbps: rate of blocks from that node, in 1e9 bytes a second.
    """

    node: str
    check: str
    state: str
    text: str
    peer: str | None = None
    gbps: float | None = None

"""A line of the doctor's: what was checked on a node, how it is, and what to do."""

from typing import NamedTuple

OK, ADVICE, WRONG = "ok", "advice", "wrong"


class Finding(NamedTuple):
    """One check of one node.

    node: Ray node id. check: what was checked. state: OK; ADVICE: it works, but could be faster or easier; WRONG: a
    pool can't start here, or lacks what makes it fast. text: how it is, and what to do unless OK. peer: id of the other
    node, in a check of two nodes. gbps: rate of blocks from there, in 1e9 bytes a second.
    """

    node: str
    check: str
    state: str
    text: str
    peer: str | None = None
    gbps: float | None = None

"""A line of the doctor's: what was looked at on a node, how it is, and what to do."""

from typing import NamedTuple

OK, ADVICE, WRONG = "ok", "advice", "wrong"


class Finding(NamedTuple):
    """One check of one node.

    node: Ray node id. check: what was looked at. state: OK; ADVICE: it works, and would be faster or easier otherwise;
    WRONG: a pool can't start here, or lacks what makes it fast. text: how it is, and what to do unless OK.
    peer: the other node's id, of a check of two. gbps: 1e9 bytes a second that blocks came from there.
    """

    node: str
    check: str
    state: str
    text: str
    peer: str | None = None
    gbps: float | None = None

"""The lines of requests that a follower gets."""

from typing import Any

import raykv
from helpers.pools import eventually
from raykv.cli.trace import Follower


class Lines:
    """Collects a follower's lines, poll after poll."""

    def __init__(self, pool: raykv.KVPool) -> None:
        self.follower, self.seen = Follower(pool.name), list[dict[str, Any]]()
        assert not self.follower.poll()

    def of(self, model: str, count: int) -> list[dict[str, Any]]:
        """The lines of a model, once there are `count` of them."""

        def found() -> list[dict[str, Any]]:
            self.seen += self.follower.poll()
            lines = [line for line in self.seen if line["model"] == model]
            return lines if len(lines) >= count else []

        lines = eventually(found)
        assert len(lines) == count
        return lines

"""What lies in a tier and is no record of ours: it is left alone, counted, and named in a warning."""

import logging

log = logging.getLogger("raykv")
NAMED = 3  # in a warning


class Strangers:
    """Those that one scan came across."""

    def __init__(self) -> None:
        self.count = 0
        self._named: list[str] = []

    def add(self, name: str) -> None:
        """name: by which a person finds it in the tier."""
        self.count += 1
        if len(self._named) < NAMED:
            self._named.append(repr(name))

    def warn(self, what: str) -> None:
        """Name some of them, if there were any. what: they are."""
        if self.count:
            more = f" and {self.count - len(self._named)} more" if self.count > len(self._named) else ""
            log.warning(
                "external tier: %d %s, left alone: %s%s: move them elsewhere, their room is not counted",
                *(self.count, what, ", ".join(self._named), more),
            )

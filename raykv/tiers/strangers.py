"""Strangers: things in a tier that are no records of raykv. raykv counts them, warns of them, and leaves them alone."""

import logging

log = logging.getLogger("raykv")
NAMED = 3  # in a warning


class Strangers:
    """The strangers of one scan."""

    def __init__(self) -> None:
        self.count = 0
        self._named: list[str] = []

    def add(self, name: str) -> None:
        """name: with this name a person finds the stranger in the tier."""
        self.count += 1
        if len(self._named) < NAMED:
            self._named.append(repr(name))

    def warn(self, what: str) -> None:
        """Name some of the strangers in a warning, if there are any. what: the warning's words about these things."""
        if self.count:
            more = f" and {self.count - len(self._named)} more" if self.count > len(self._named) else ""
            log.warning(
                "external tier: %d %s, left alone: %s%s: move them elsewhere, their room is not counted",
                *(self.count, what, ", ".join(self._named), more),
            )

"""Strangers: things in a tier that raykv did not write. raykv counts them, warns of them, and leaves them alone."""

import logging

log = logging.getLogger("raykv")
NAMED = 3  # in a warning


class Strangers:
    """The strangers of one scan."""

    def __init__(self) -> None:
        self.count = 0
        self._named: list[str] = []

    def add(self, name: str) -> None:
        """name: the name by which a person finds the stranger in the tier."""
        self.count += 1
        if len(self._named) < NAMED:
            self._named.append(repr(name))

    def warn(self, what: str) -> None:
        """If there are strangers, name some of them in a warning. what: what the warning calls them."""
        if self.count:
            more = f" and {self.count - len(self._named)} more" if self.count > len(self._named) else ""
            log.warning(
                "external tier: %d %s, left alone: %s%s: move them elsewhere, their room is not counted",
                *(self.count, what, ", ".join(self._named), more),
            )

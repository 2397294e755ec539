"""Strangers: things in a tier that raykv did not write. raykv counts and reports them, and leaves them unchanged."""

import logging

log = logging.getLogger("raykv")
NAMED = 3  # number of strangers that a warning names


class Strangers:
    """The strangers of one scan."""

    def __init__(self) -> None:
        self.count = 0
        self._named: list[str] = []

    def add(self, name: str) -> None:
        """Add a stranger. name: the name by which a person finds the stranger in the tier."""
        self.count += 1
        if len(self._named) < NAMED:
            self._named.append(repr(name))

    def warn(self, what: str) -> None:
        """If there are strangers, name some of them in a warning. what: text that describes them in the warning."""
        if self.count:
            more = f" and {self.count - len(self._named)} more" if self.count > len(self._named) else ""
            log.warning(
                "external tier: %d %s, left alone: %s%s: move them elsewhere, their room is not counted",
                *(self.count, what, ", ".join(self._named), more),
            )

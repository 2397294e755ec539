"""Progress of a started pool, whose nodes prepare their memory slab by slab."""

import contextlib
import time

from raykv.cli.spinner import spinner
from raykv.cli.status.status import growth, size_text
from raykv.client.administration import directory_stats
from raykv.ui.overview import ANSWER_S

LOOK_S = 0.2  # between looks whether the size is reached
STANDSTILL_S = 30.0  # growth has failed if no slab comes for so long: ten times as long as a slab of 1 GiB takes


def grow(pool: str) -> None:
    """Show progress until all nodes offer all their memory, or offer no more for STANDSTILL_S."""
    before, since = -1, time.monotonic()
    text = f"preparing the memory of pool {pool}"
    with contextlib.suppress(KeyboardInterrupt), spinner(text) as progress:  # the nodes go on without this command
        while time.monotonic() < since + STANDSTILL_S:
            if counts := directory_stats(pool, ANSWER_S):
                offered, planned = growth(counts)
                if offered == planned:
                    return
                if offered != before:
                    before, since = offered, time.monotonic()
                what = f"{text}, {size_text(offered)} of {size_text(planned)}"
                progress.update(progress.task_ids[0], description=what, completed=offered, total=planned)
            time.sleep(LOOK_S)

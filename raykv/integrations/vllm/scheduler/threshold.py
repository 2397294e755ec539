"""vLLM's options `store_threshold` and `max_tracker_size`: a chunk is stored once vLLM has offered it several times."""

from collections import OrderedDict
from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from raykv.integrations.vllm.scheduler.pool_keys import by_group

TRACKED = 64_000  # default number of chunks whose offers are counted, as in vLLM's CPUOffloadingManager


class Threshold:
    """Counts how often vLLM offered each chunk. The chunks whose last offer is oldest are forgotten first."""

    def __init__(self, offers: int, tracked: int = TRACKED) -> None:
        """offers: number of offers that a chunk needs to be stored.

        tracked: maximum number of chunks whose offers are counted.
        """
        self._offers, self._tracked = offers, tracked
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def passed(self, keys: list[bytes]) -> list[bytes]:
        """Count an offer.

        Returns the offered chunks of each group, up to the group's first chunk that was not offered often enough.
        """
        for key in keys:
            self._counts[key] = self._counts.pop(key, 0) + 1
        passed = set[bytes]()
        for of_group in by_group(keys).values():
            passed.update(takewhile(lambda key: self._counts[key] >= self._offers, of_group))
        while len(self._counts) > self._tracked:
            self._counts.popitem(last=False)
        return [key for key in keys if key in passed]


def threshold_of(extra: Mapping[str, Any]) -> Threshold | None:
    """Return the threshold in kv_connector_extra_config, or None below 2, as in vLLM. Raises ValueError if invalid."""
    for name, default in (("store_threshold", 0), ("max_tracker_size", TRACKED)):
        if type(given := extra.get(name, default)) is not int or given < 0:
            raise ValueError(f"{name}={given!r} in kv_connector_extra_config: give a whole number, 0 or more")
    offers = extra.get("store_threshold", 0)
    return Threshold(offers, extra.get("max_tracker_size", TRACKED)) if offers >= 2 else None

"""Estimates the hit rates for other sizes of the pool's memory: a curve that is measured while the pool runs."""

from typing import NamedTuple

import numpy as np

from raykv.directory.kernels import hit_curve
from raykv.directory.kernels.hit_curve import DISTANCES, FINENESS, LEAST_BITS, USES
from raykv.directory.state.arrays import KeyArray

KEYS = 32_768  # maximum number of keys in the sample, which takes 4 MiB
MULTIPLES = (0.5, 1.0, 2.0, 4.0)  # multiples of the pool's memory for which `figures` has hit rates
CEILING = 16  # multiple of the pool's memory: a use with a longer reuse distance may count as a first use
USES_MOST, LOOK_S = 50_000, 10.0  # the sample is halved after USES_MOST uses in LOOK_S seconds; a use costs 0.1 us
CALM_S = 600.0  # seconds of few look-ups, after which the hit curve begins anew with all keys
HALF_LIFE_S = 1800.0  # seconds in which the counts of the hit curve lose half of their weight
PLANNED_FROM = 20_000  # number of uses of sampled keys before the first plan
LEAST_COPIES, MOST_COPIES, STEP = 0.125, 0.5, 1 / 32  # shares of a node's slots; a smaller share saves few reads
PRICE = 0.0075  # maximum hit rate that the pool gives up to have room for copies
SHORT = 0.01  # the pool evicts like one LRU over all nodes if that LRU's hit rate would be higher by more than this
SPARE_LOCALITY = 2.0  # minimum `locality` while room is reserved for copies


class Plan(NamedTuple):
    """How a full pool uses its memory.

    copies: share of a node's slots that is reserved for the node's copies of other nodes' blocks.
    exact: whether each eviction takes the oldest block of all nodes.
    """

    copies: float = 0.0
    exact: bool = False

    def locality(self, usual: float) -> float:
        """Return the `locality` of this plan. usual: the pool's own `locality`, see PoolConfig."""
        if self.exact:
            return 1.0
        return max(usual, SPARE_LOCALITY) if self.copies else usual


class HitCurve:
    """Measures on a sample of the keys how much memory an LRU needs to keep a key until its next use."""

    def __init__(self) -> None:
        self._capacity = self._horizon = 1.0
        self._checked = self._calm = self._decayed = 0.0
        self.begin()

    def begin(self) -> None:
        """Forget all counts."""
        self._sample = hit_curve.sample(KEYS)
        self._arguments = tuple(self._sample)
        self._asked = self._found = 0.0  # keys
        self._uses = self._halved = 0  # number of uses at the last check; how often the load halved the sample

    def resize(self, capacity: int) -> None:
        """Set the bytes that all nodes have for blocks."""
        self._capacity = max(1.0, float(capacity))
        self._horizon = CEILING * self._capacity

    def asked(self, keys: KeyArray, block_bytes: int, found: int) -> None:
        """Count a look-up of these keys of one prompt. found: number of keys that were in memory."""
        self._asked += len(keys)
        self._found += found
        self._use(keys, block_bytes, True)

    def stored(self, keys: KeyArray, block_bytes: int) -> None:
        """Count a store of these keys of one prompt."""
        self._use(keys, block_bytes, False)

    def _use(self, keys: KeyArray, block_bytes: int, asked: bool) -> None:
        while len(keys) > KEYS:
            hit_curve.use(self._arguments, keys[-KEYS:], block_bytes, asked, self._horizon)
            keys = keys[:-KEYS]
        hit_curve.use(self._arguments, keys, block_bytes, asked, self._horizon)

    @property
    def overdue(self) -> bool:
        """Whether more than USES_MOST uses were counted since the last check."""
        return bool(self._sample.state[USES] - self._uses > USES_MOST)

    def check(self, now: float) -> None:
        """Count the waiting uses. Halves the sample if it has too many uses, and halves old counts."""
        hit_curve.count(self._arguments, self._horizon)
        uses = int(self._sample.state[USES]) - self._uses
        if uses > USES_MOST:
            hit_curve.halve(self._arguments)
            self._halved += 1
        if uses > USES_MOST or now - self._checked >= LOOK_S:
            if uses << self._halved > USES_MOST // 2:  # without halving, the sample would have too many uses
                self._calm = now
            self._checked, self._uses = now, int(self._sample.state[USES])
        if self._halved and now - self._calm > CALM_S:
            self.begin()
        if now - self._decayed > HALF_LIFE_S:
            self._decayed = now
            self._asked, self._found = self._asked / 2, self._found / 2
            self._sample.counts[:] /= 2

    def hit_rate(self, memory: float) -> float:
        """Return the share of looked-up keys that an LRU of `memory` bytes would have had; nan before the first key."""
        if not self._asked:
            return float("nan")
        hit_curve.count(self._arguments, self._horizon)
        counts = self._sample.counts
        missed_by_sample = self._asked - counts.sum()  # a hot key may be outside the sample: its uses count as hits
        place = (np.log2(max(1.0, memory)) - LEAST_BITS) * FINENESS
        whole = int(min(max(place, 0), DISTANCES))
        part = counts[whole] * (place - whole) if whole < DISTANCES else 0.0
        hits = counts[:whole].sum() + part + missed_by_sample
        return float(min(max(hits / self._asked, 0.0), 1.0))

    def plan(self, before: Plan) -> Plan:
        """Return the plan with the most room for copies that costs at most PRICE of the hit rate.

        If there is no memory to spare, and the pool found fewer blocks than one LRU over all nodes would have found,
        the pool evicts like that LRU from now on.
        """
        hit_curve.count(self._arguments, self._horizon)
        if self._sample.state[USES] < PLANNED_FROM:
            return before
        hit_rate, copies = self.hit_rate(self._capacity), 0.0
        while copies < MOST_COPIES and self.hit_rate(self._capacity * (1 - copies - STEP)) >= hit_rate - PRICE:
            copies += STEP
        if copies >= LEAST_COPIES:
            return Plan(copies)
        return Plan(exact=before.exact or self._found / self._asked < hit_rate - SHORT)

    def figures(self) -> dict[str, float]:
        """Return hit rates by multiple of the pool's memory ("ceiling": CEILING). {} before the first look-up."""
        if not self._asked:
            return {}
        sizes = {f"{multiple:g}": multiple for multiple in MULTIPLES} | {"ceiling": CEILING}
        return {name: round(self.hit_rate(multiple * self._capacity), 4) for name, multiple in sizes.items()}

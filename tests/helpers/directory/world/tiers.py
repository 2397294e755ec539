"""External tiers of a world: its nodes report them, list them and demote to them."""

import struct

from helpers.directory.world.cast import Cast
from helpers.directory.world.documents import DEPTH, SIZE_OF
from helpers.directory.world.locations import garbled, keys_of, split
from raykv.protocol.tiers import DemotionReport, Demotions, ExistingBlocks, TierReport


class Tiers(Cast):
    """Nodes share a tier, or have one each."""

    def meanwhile(self) -> None:
        """Anything that may happen while a node lists its tier."""

    def content_of(self, name: str) -> dict[bytes, None]:
        return self.tier_content.setdefault("" if self.tiers == "shared" else name, {})

    def tier_heartbeat(self, name: str = "") -> None:
        rng = self.rng
        if not self.tiered:
            return
        name = name or rng.choice(self.tiered)
        capacity, shared = self.capacity, self.tiers == "shared"
        if not self.with_oracle:
            capacity, shared = rng.choice([capacity, capacity, 0]), shared ^ (rng.random() < 0.1)
        lost = rng.randbytes(8) if rng.random() < 0.02 else b""
        if lost:
            self.content_of(name).clear()
        report = TierReport(capacity, shared, rng.random() < 0.95, lost)
        answer = self.do("tier_heartbeat", name, report, self.now)
        if answer and answer.list_it and rng.random() < 0.8:
            self.report_existing(name)

    def report_existing(self, name: str = "") -> None:
        """A node lists its tier, in pieces. A piece may be late, or the last one missing."""
        rng = self.rng
        name = name or rng.choice(self.names)
        keys = list(self.content_of(name))
        keys += rng.choices([*keys, *DEPTH], k=rng.choice([0, 0, 1, 8]))
        pieces = [keys[at : at + 5] for at in range(0, len(keys), 5)] or [[]]
        for number, piece in enumerate(pieces):
            if rng.random() < 0.1:
                self.meanwhile()
            sizes = [SIZE_OF[key] if rng.random() < 0.97 else rng.choice([-5000, 0, 4096, 1 << 20]) for key in piece]
            last = number == len(pieces) - 1 and rng.random() < 0.9
            existing = ExistingBlocks(b"".join(piece), struct.pack(f"<{len(sizes)}q", *sizes), last)
            self.do("report_existing", name, existing, self.now)

    def demote(self) -> None:
        """A node reports on its last answer, or on another one, and gets a new answer."""
        rng = self.rng
        name = rng.choice(self.tiered or self.names)
        store = self.stores[name]
        answers = store.demoted[-1:] if rng.random() < 0.8 else []
        if rng.random() < 0.15:  # repeated, or late
            answers = answers + rng.choices(store.demoted[-4:] or [Demotions(b"", b"", b"", b"", 0)], k=1)
        if rng.random() < 0.03:
            answers = answers + [s.demoted[-1] for s in self.stores.values() if s.demoted]
        pairs = [pair for a in answers for pair in zip(split(a.target), keys_of(a.keys), strict=True)]
        if rng.random() < 0.15:
            pairs = [pair for pair in pairs if rng.random() < 0.6]
        if not self.with_oracle:
            pairs += [(garbled(rng, location), key) for location, key in pairs] + self._stale(self.workers[0])
        failing = rng.choice([0.0, 0.0, 0.0, 0.2, 1.0])
        stored = bytes(rng.random() >= failing for _ in pairs)
        for (_, key), done in zip(pairs, stored, strict=True):
            if done and key in SIZE_OF:
                self.content_of(name)[key] = None
        locations, keys = b"".join(location for location, _ in pairs), b"".join(key for _, key in pairs)
        seen = store.seen if rng.random() < 0.9 else rng.choice([-1, 0, store.seen - 1, store.seen + 1])
        got = self.do("demote", name, DemotionReport(locations, keys, stored, seen, rng.random() < 0.5), self.now)
        if rng.random() < 0.9:
            store.demoted.append(got)
            if rng.random() < 0.9:  # otherwise the store died before it deleted anything
                store.seen = got.number
                for key in keys_of(got.to_delete):
                    self.content_of(name).pop(key, None)

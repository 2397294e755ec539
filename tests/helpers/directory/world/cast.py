"""The clients and node stores of a world, and what each of them knows."""

from dataclasses import dataclass, field
from random import Random

from helpers.directory.oracle.slots import unpack
from helpers.directory.world.documents import SIZE_OF
from helpers.directory.world.locations import garbled
from helpers.directory.world.twins import Twins
from raykv.config import Quota
from raykv.protocol.tiers import Demotions, GpuDemotions


@dataclass
class Held:
    """A lease or reservation, as its client knows it."""

    writes: bool
    size: int
    keys: list[bytes]
    locations: list[bytes]
    staged: list[bytes]
    read: int = 0


@dataclass
class Worker:
    id: int
    node: str
    tenant: str = ""
    seq: int = 0
    holds: dict[int, Held] = field(default_factory=dict)
    pulled: list[bytes] = field(default_factory=list)
    corrupt: list[bytes] = field(default_factory=list)
    intents: list[int] = field(default_factory=list)


@dataclass
class Store:
    """A node store, and the headers of its arena."""

    nonce: bytes
    slabs: int
    epoch: int = 0
    offered: int = 0
    index: int = -1
    headers: dict[tuple[int, int], tuple[tuple[int, ...], bytes]] = field(default_factory=dict)
    demoted: list[Demotions] = field(default_factory=list)  # all answers that the store got
    seen: int = 0  # number of the last answer whose deletions the store carried out
    gpu_demoted: list[GpuDemotions] = field(default_factory=list)  # all answers that the store got

    def write(self, location: tuple[int, ...], key: bytes) -> None:
        old = self.headers.get((location[1], location[2]))
        if old and old[0][4] > location[4]:
            return
        self.headers = {at: h for at, h in self.headers.items() if at[0] != location[1] or h[0][4] == location[4]}
        if not old or old[0][5] < location[5]:
            self.headers[location[1], location[2]] = (location, key)


class Cast(Twins):
    """hosts, gpus: names of node stores. small: hosts whose slabs are too small for the longest blocks of their GPUs.

    grants: keys by the locations that were granted for them. tiers: "none", "own" or "shared".
    tiered: hosts with an external tier. tier_content: keys of each tier, oldest first.
    """

    rng: Random
    window: int
    hosts: tuple[str, ...]
    gpus: list[str]
    names: list[str]
    small: list[str]
    sizes: tuple[int, ...]
    ids: int
    grants: dict[bytes, bytes]
    workers: list[Worker]
    stores: dict[str, Store]
    tiers: str
    tiered: list[str]
    capacity: int
    quotas: dict[str, Quota]
    tier_content: dict[str, dict[bytes, None]]

    def _write_header(self, location: bytes, key: bytes) -> None:
        fields = unpack(location)[0]
        for store in self.stores.values():
            if store.index == fields[0] and key and fields[4]:
                store.write((*fields[:3], fields[3] or SIZE_OF[key], *fields[4:]), key)  # a demotion's target says 0

    def _stale(self, worker: Worker) -> list[tuple[bytes, bytes]]:
        """(location, key) of a few grants, made to any client at any time."""
        known = list(self.grants.items())[-60:]
        pairs = self.rng.sample(known, min(4, len(known)))
        if not self.with_oracle:
            pairs += [(garbled(self.rng, location), key) for location, key in pairs]
        return pairs

"""A small cluster around a directory: clients and node stores that call late, twice, or not at all."""

from collections.abc import Callable
from random import Random
from typing import ClassVar

import numpy as np

from helpers.directory.oracle.slots import LOCATION
from helpers.directory.oracle.tiers import TIER_SLAB
from helpers.directory.world.cast import Store
from helpers.directory.world.clients import Clients
from helpers.directory.world.documents import SIZE_OF, SIZES
from helpers.directory.world.locations import keys_of
from helpers.directory.world.nodes import SLAB, Nodes
from helpers.directory.world.tenants import Tenants
from helpers.directory.world.tiers import Tiers
from helpers.directory.world.twins import TTL
from raykv.directory.kernels import columns
from raykv.protocol.location import host_of
from raykv.protocol.stores import FREED, SweepResult
from raykv.protocol.tiers import DemotionReport, GpuDemotionReport, TierReport

NAMES = ("a", "b", "c", "d")
Mix = dict[Callable[["World"], None], float]  # what may happen, and how often beside the rest


class World(Clients, Nodes, Tiers, Tenants):
    """Clients, nodes, tiers and tenants act at random, as often as a mix says.

    oracle=False: see `Twins`.
    """

    gpu_share = 0.5  # of worlds that have GPUs

    def __init__(self, seed: int, oracle: bool = True) -> None:
        self.rng = rng = Random(seed)
        locality = rng.choice([1.0, 1.5])
        self.window = rng.choice([4096, 3 * 4096, 3 * 4096, SLAB])
        self.hosts = NAMES[: rng.randint(1, 4)]
        has_gpus = rng.random() < self.gpu_share
        counts = [rng.choice([0, 1, 1, 2]) if has_gpus else 0 for _ in self.hosts]
        self.gpus = [f"{host}/{n}" for host, count in zip(self.hosts, counts, strict=True) for n in range(count)]
        self.names = [*self.hosts, *self.gpus]
        self.small = [host for host in self.hosts if self.gpus and rng.random() < 0.1]
        rng.shuffle(self.names)  # a GPU may join before its node
        self.sizes = SIZES[: rng.choice([1, 2, 2, 3])]
        self.ids, self.grants, self.tier_content = 0, {}, {}
        self.workers = [self._worker() for _ in range(4)]
        self.stores = {name: Store(rng.randbytes(16), self.slabs(name)) for name in self.names}
        self.tiers = rng.choice(["none", "own", "own", "shared"])
        self.tiered = [name for name in self.hosts if self.tiers != "none" and rng.random() < 0.9]
        self.capacity = rng.choice([1, 2, 6, 6, 30]) * TIER_SLAB + rng.choice([0, 4096])
        share, min_hits = rng.choice([0.0, 0.25, 0.5, 1.0, 1.0]), rng.choice([0, 0, 0, 0, 1, 2])
        self.quotas = self._quotas() if rng.random() < 0.5 else {}
        super().__init__(oracle, locality, share, min_hits, rng.choice([0, 3 * 4096, 8 * 4096]))
        self._new_directory()

    def _new_directory(self) -> None:
        self.begin()
        for tenant, quota in self.quotas.items():
            self.do("set_quota", tenant, quota, self.now)
        for name in self.names:
            if self.rng.random() < 0.9:
                self.join(name)
                self.adopt(name)
                self.heartbeat(name)
        for name in self.tiered:
            if self.rng.random() < 0.8:
                self.tier_heartbeat(name)

    def heartbeats(self) -> None:
        quiet = self.rng.random() < 0.15
        for name in self.names:
            if not quiet or self.rng.random() < 0.5:
                self.heartbeat(name)
                if name in self.tiered and self.rng.random() < 0.4:
                    self.tier_heartbeat(name)

    def leave_node(self) -> None:
        """A node is about to leave. Mostly another node stays, and first pulls some blocks."""
        rng = self.rng
        name = rng.choice(self.hosts if rng.random() < 0.95 else self.names)
        if any(not node.leaving for other, node in self.real.nodes.items() if other != name) or rng.random() < 0.1:
            for _ in range(rng.choice([0, 2, 4])):
                self._pull(rng.choice(self.workers), *self.keys())
            self.do("leave", name, self.now)

    def stay_node(self) -> None:
        """A node that is about to leave stays after all. If none is, a node that stays anyhow is told so."""
        leaving = [host_of(name) for name, node in self.real.nodes.items() if node.leaving]
        self.do("stay", self.rng.choice(leaving or self.hosts), self.now)

    def sole_copies(self) -> None:
        """Ask for the blocks that only one node has, and have another node pull some."""
        rng = self.rng
        leaving = [name for name, node in self.real.nodes.items() if node.leaving]
        name = rng.choice([host_of(name) if rng.random() < 0.9 else name for name in leaving or self.names])
        answer = self.do("sole_copies", name, self.now)
        size = rng.choice(self.sizes)
        keys = [key for key in keys_of(answer.keys if answer else b"") if SIZE_OF.get(key) == size][: rng.randint(1, 6)]
        if keys and rng.random() < 0.7:
            self._pull(
                rng.choice([worker for worker in self.workers if worker.node != name] or self.workers), size, keys
            )

    def meanwhile(self) -> None:
        self.rng.choice([World.clear, World.match, World.reserve, World.commit])(self)

    def restart(self) -> None:
        """The directory dies, and a new directory takes its place."""
        for store in self.stores.values():
            store.offered = 0
        self._new_directory()

    def wait(self) -> None:
        self.now += self.rng.choice([0.05, 0.3, 0.3, 0.6, 0.6, 1.0, 1.0, 1.0, 4.0, TTL + 1])

    def clear(self) -> None:
        self.do("clear", self.now)

    MIXES: ClassVar[dict[str, Mix]] = {}

    def burst(self, mix: str, steps: int) -> None:
        ops, weights = zip(*self.MIXES[mix].items(), strict=True)
        stop, checked = self.steps + steps, 0
        while self.steps < stop:
            before = self.steps
            self.rng.choices(ops, weights)[0](self)
            if self.steps > before and (self.steps >> 4) != checked:
                checked = self.steps >> 4
                self.check()
            self.now += 0.01
            stop -= self.steps == before and 1
        self.check()

    def everybody_leaves(self) -> None:
        """When all clients are gone, nothing is held. When all nodes are gone, only a shared tier has blocks."""
        self.do("unpin", self.call(self.workers[0]), b"".join(self.real.pins), self.now)
        for wait in (TTL + 1, 1.0):
            self.now += wait
            self.do("stats", self.now)
        for name in self.gpus:  # all GPUs are suspect by now, and get no more demotions
            self.do("demote_gpu", name, GpuDemotionReport(b"", b""), self.now)
        for name in self.real.nodes:
            if answer := self.do("heartbeat", name, 0, self.now):
                n = len(answer.sweep) // LOCATION.size
                freed = SweepResult(answer.sweep, bytes([FREED]) * n, bytes(16 * n), bytes(8 * n))
                self.do("sweep_result", freed, self.now)
        unreached = TierReport(self.capacity, self.tiers == "shared", False, b"")
        for name in list(self.real.nodes):
            self.do("demote", name, DemotionReport(b"", b"", b"", 0, False), self.now)  # it stored nothing
            self.do("tier_heartbeat", name, unreached, self.now)
            self.do("demote", name, DemotionReport(b"", b"", b"", 0, False), self.now)
        self.check()
        rows = self.real.c.rows
        assert not rows["holds"].any()
        resting = [columns.FREE, columns.READY, columns.REPLICA, columns.EXTERNAL, columns.CLOSED]
        resting += [] if self.with_oracle else [columns.DEMOTING]  # a node may have exchanged its tier
        assert np.isin(rows["state"], resting).all()
        stats = self.do("stats", self.now)
        assert (stats["clients"], stats["leases"], stats["reservations"], stats["intents"]) == (0, 0, 0, 0)
        for name in list(self.real.nodes):
            self.do("remove_node", name, self.now)
        self.check()
        assert np.isin(self.real.c.rows["state"], (columns.FREE, columns.EXTERNAL, columns.CLOSED)).all()


_USE: Mix = {
    World.match: 10,
    World.reserve: 9,
    World.commit: 9,
    World.next_window: 4,
    World.crowd: 1,
    World.release: 9,
    World.client_heartbeat: 2,
}
_USE |= {World.locate_prefix: 2, World.stored: 2, World.match_parts: 4}
_TIERS: Mix = {World.tier_heartbeat: 1, World.demote: 12}
_USE |= _TIERS | {World.demote_gpu: 10}
_BY_KEY: Mix = {World.pin: 1, World.unpin: 1.5, World.forget: 0.5, World.preempted: 0.5, World.done: 2, World.touch: 2}
_UPKEEP: Mix = {World.heartbeats: 4, World.report_existing: 0.3, World.report: 1, World.wait: 1, World.disconnect: 1}
World.MIXES = {
    "all": {
        **{**_USE, **_UPKEEP, **_BY_KEY},
        **{
            World.node_lost: 1,
            World.clear: 0.2,
            World.restart: 0.2,
            World.leave_node: 0.3,
            World.stay_node: 0.2,
            World.sole_copies: 0.6,
        },
        **{World.set_slab_target: 0.5, World.set_quota: 0.5, World.follow: 0.5},
    },
    "use": {**_USE, World.heartbeats: 1},
    "gpus": {
        **{
            World.match: 4,
            World.reserve: 8,
            World.commit: 8,
            World.release: 8,
            World.next_window: 1,
            World.demote_gpu: 8,
        },
        **{World.heartbeats: 4, World.demote: 3, World.node_lost: 0.3, World.clear: 0.1, World.set_slab_target: 0.3},
        **{World.pin: 0.5, World.unpin: 0.5, World.forget: 0.5, World.done: 1, World.touch: 2},
    },
    "tenants": {
        **{World.match: 6, World.reserve: 10, World.commit: 10, World.release: 9, World.match_parts: 1},
        **{World.set_quota: 1, World.heartbeats: 4, World.demote: 2, World.demote_gpu: 2, World.tier_heartbeat: 1},
        **{World.pin: 0.2, World.unpin: 0.3, World.report: 0.5, World.node_lost: 0.2, World.done: 2, World.touch: 4},
    },
    "write": {World.reserve: 4, World.commit: 3, World.release: 1, World.touch: 1},
    "copies": {**_USE, World.done: 2, World.touch: 2, World.heartbeats: 2, World.follow: 1},
    "hints": {
        **{World.reserve: 8, World.commit: 8, World.release: 6, World.touch: 4, World.done: 1, World.heartbeats: 1},
        **{World.tier_heartbeat: 0.5, World.demote: 4},
    },
    "crowds": {
        World.crowd: 4,
        World.release: 6,
        World.reserve: 3,
        World.commit: 3,
        World.heartbeats: 1,
        World.wait: 0.3,
    },
    "read": {World.match: 6, World.next_window: 3, World.release: 2, World.reserve: 1, World.commit: 1},
    "nodes": {**_USE, World.heartbeats: 4, World.node_lost: 4, World.wait: 2},
    "tiers": {
        **_USE,
        World.demote: 20,
        World.tier_heartbeat: 4,
        World.heartbeats: 3,
        World.report: 1,
        World.node_lost: 0.3,
    },
    "drain": {
        **_USE,
        **_BY_KEY,
        World.leave_node: 2,
        World.stay_node: 1,
        World.sole_copies: 6,
        World.node_lost: 0.7,
        World.heartbeats: 4,
    },
    "pins": {**_USE, **_BY_KEY, World.pin: 6, World.unpin: 5, World.report: 1, World.node_lost: 1, World.heartbeats: 4},
    "full of pins": {
        World.reserve: 8,
        World.commit: 8,
        World.release: 6,
        World.pin: 6,
        World.heartbeats: 1,
        World.unpin: 0.3,
    },
    "disconnect": {**_USE, World.disconnect: 4, World.wait: 3, World.heartbeats: 4},
}

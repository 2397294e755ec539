"""The node stores of a world: they join, report, restart, and get more memory or less."""

import struct

import numpy as np

from helpers.directory.oracle.slots import LOCATION, unpack
from helpers.directory.world.cast import Cast, Store
from helpers.directory.world.documents import DEPTH, SIZE_OF
from helpers.directory.world.locations import garbled, keys_of, slot_size, split
from raykv.directory.state.hit_curve import Plan
from raykv.protocol.location import slot_bytes
from raykv.protocol.stores import ArenaDescription, Inventory, SlabReport, SweepResult
from raykv.protocol.tiers import GpuDemotionReport, GpuDemotions

SLAB = 8 * 4096


class Nodes(Cast):
    """Node stores, and GPUs, which demote to their node's memory."""

    follows = True

    def slabs(self, name: str) -> int:
        """How many slabs a node store has; a GPU has few, so that it is often full."""
        return self.rng.choice([1, 1, 2]) if name in self.gpus else self.rng.randint(2, 8)

    def slab_bytes(self, name: str) -> int:
        """The slabs of some hosts are too small for the longest blocks of their GPUs."""
        return 2 * 4096 if name in self.small else SLAB

    def join(self, name: str) -> None:
        store = self.stores[name]
        arena = ArenaDescription(store.nonce, self.slab_bytes(name), store.slabs, store.epoch)
        window = min(self.window, 3 * 4096) if name in self.gpus else self.window  # more would be all of a GPU
        store.index, store.epoch = self.do("join", name, arena, self.now, window)
        assert store.epoch >= arena.epoch

    def adopt(self, name: str) -> None:
        rng, store = self.rng, self.stores[name]
        known = self.real.nodes.get(name)
        fresh = known is not None and known.state == "joining"
        ready: list[tuple[bytes, bytes]] = []
        busy: list[tuple[bytes, bytes]] = []
        for location, key in store.headers.values():
            location = (store.index, *location[1:])
            if rng.random() < 0.1:
                location, key = (*location[:5], location[5] + rng.choice([-1, 0, 1])), rng.choice(list(DEPTH))
                if SIZE_OF[key] != slot_size(location):
                    continue
            (busy if fresh and rng.random() < 0.15 else ready).append((LOCATION.pack(*location), key))
        if not self.with_oracle:
            busy += [(garbled(rng, location), key) for location, key in busy]
            ready += [(garbled(rng, location), key) for location, key in ready if rng.random() < 0.1]
        locations, keys = (b"".join(part) for part in zip(*ready, strict=True)) if ready else (b"", b"")
        positions = struct.pack(f"<{len(ready)}I", *(DEPTH.get(key, 0) for _, key in ready))
        stamps = struct.pack(f"<{len(ready)}I", *(rng.randrange(4) for _ in ready))
        writing = b"".join(location for location, _ in busy)
        self.do("adopt", name, Inventory(locations, keys, positions, stamps, writing), self.now, store.offered)

    def heartbeat(self, name: str) -> None:
        rng, store = self.rng, self.stores[name]
        store.offered = min(store.slabs, store.offered + rng.randint(0, 2))
        answer = self.do("heartbeat", name, store.offered, self.now)
        if answer is None:
            self.join(name)
            if rng.random() < 0.8:
                self.adopt(name)
        elif answer.sweep and rng.random() < 0.7:
            store.epoch = answer.epoch
            self.sweep(answer.sweep)

    def sweep(self, quarantined: bytes) -> None:
        rng = self.rng
        locations = [location for location in split(quarantined) if rng.random() < 0.8]
        if rng.random() < 0.1:
            locations += [location for location, _ in self._stale(self.workers[0])]
        keys, gens = b"", []
        for location in locations:
            fields = unpack(location)[0]
            bytes_of = slot_size(fields, self.real)
            keys += rng.choice([key for key, size in SIZE_OF.items() if slot_bytes(size) == bytes_of] or [bytes(16)])
            gens.append(fields[5] - (rng.random() < 0.1 and fields[5] > 0))
        verdicts = bytes(rng.choice([0, 1, 1, 2]) for _ in locations)
        generations = struct.pack(f"<{len(gens)}Q", *gens)
        self.do("sweep_result", SweepResult(b"".join(locations), verdicts, keys, generations), self.now)

    def node_lost(self) -> None:
        """A node dies, or its store restarts, with the same arena or a new one."""
        rng = self.rng
        name = rng.choice(self.names)
        store = self.stores[name]
        how = rng.random()
        if how < 0.5:
            self.do("remove_node", name, self.now)
        if how > 0.7 or name in self.gpus:  # the blocks on a GPU are lost with its process
            store = self.stores[name] = Store(rng.randbytes(16), self.slabs(name), epoch=rng.randint(0, 2))
        if rng.random() < 0.1:
            store.epoch += rng.randint(1, 2)  # another directory was in charge meanwhile
        store.offered = 0
        if rng.random() < 0.8:
            self.join(name)
            if rng.random() < 0.9:
                self.adopt(name)

    def demote_gpu(self) -> None:
        """A GPU reports on its last answer, or on another one, and gets a new answer."""
        rng = self.rng
        if not self.gpus:
            return
        full = [name for name, node in self.real.nodes.items() if node.on_gpu and node.slabs and not node.spare]
        name = rng.choice(full if full and rng.random() < 0.8 else self.gpus)
        if rng.random() < 0.03:
            name = rng.choice([*self.names, "nowhere", "nowhere/0"])
        received = self.stores[name].gpu_demoted if name in self.stores else []
        answers = received[-1:] if rng.random() < 0.85 else []
        if rng.random() < 0.15:  # repeated, or late
            answers = answers + rng.choices(received[-4:] or [GpuDemotions(b"", b"", b"")], k=1)
        if rng.random() < 0.03:
            answers = answers + [store.gpu_demoted[-1] for store in self.stores.values() if store.gpu_demoted]
        pairs = [pair for a in answers for pair in zip(split(a.target), keys_of(a.keys), strict=True)]
        if rng.random() < 0.15:
            pairs = [pair for pair in pairs if rng.random() < 0.6]
        if rng.random() < 0.05:
            pairs += self._stale(self.workers[0])
        if not self.with_oracle:
            pairs += [(garbled(rng, location), key) for location, key in pairs]
        failing = rng.choice([0.0, 0.0, 0.0, 0.2, 1.0])
        stored = bytes(rng.random() >= failing for _ in pairs)
        for (location, key), done in zip(pairs, stored, strict=True):
            if done:
                self._write_header(location, key)
        stored += bytes(rng.random() < 0.01)
        report = GpuDemotionReport(b"".join(location for location, _ in pairs), stored)
        got = self.do("demote_gpu", name, report, self.now)
        if name in self.stores and rng.random() < 0.95:
            received.append(got)
            self.grants.update(zip(split(got.target), keys_of(got.keys), strict=True))

    def follow(self) -> None:
        """The directory follows another plan for its memory."""
        if not self.follows:
            return
        plan = Plan(self.rng.choice([0.0, 0.0, 0.125, 0.3, 0.5]), self.rng.random() < 0.3)
        self.do("follow", self.rng.choice(self.names), plan, self.now)

    def set_slab_target(self) -> None:
        """A node's memory grows or shrinks."""
        rng = self.rng
        name = rng.choice(self.names)
        if self.with_oracle or name not in self.real.nodes:
            return
        given = [number for number in self.real.nodes[name].withdrawn if rng.random() < 0.95]
        given += [number for number in range(8) if rng.random() < 0.02]
        limit = rng.randint(1, self.stores[name].slabs)
        report = SlabReport(self.stores[name].offered, limit, np.array(given, np.int32).tobytes())
        self.do("set_slab_target", name, report, self.now)

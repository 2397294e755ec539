"""Where the blocks of a full pool lie: exact LRU, moves that keep stores local, replicas that earn a place. A study.

    python benchmarks/locality.py agent_trace.jsonl --nodes 8 --capacity 1000,2000,3000,5000,8000

Requests go to the nodes in turn, or their sessions stay on a node (sticky). The rules, with one LRU over all nodes:

plain: a new block takes the slot of the oldest block, wherever the slot is.
move: the same block goes. But the writer's own oldest block moves into the slot, and the new block takes its place.
replicas W: as move. A block that is read from another node also gets a slot here, if it was idle for a shorter time
    than the node's oldest replica, or for less than 1/W of the oldest block's time. A replica goes before a block that
    was idle for less than W times as long.

Printed in percent of all tokens: that were read (hit), on the reader's node (here), from other nodes (crossed); and
that moved between nodes to make room (moved).
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import click

from raykv.bench.trace.caches import leading
from raykv.bench.trace.formats import Trace, read
from raykv.bench.trace.trace import divided, sticky

WEIGHTS = (10, 30, 100)
MOVE, PLAIN = None, 0


class Figures(NamedTuple):
    """In percent of a trace's tokens."""

    here: float
    crossed: float
    moved: float

    def __str__(self) -> str:
        return f"{self.here + self.crossed:.1f} | {self.here:.1f} | {self.crossed:.1f} | {self.moved:.1f}"


class Places:
    """The blocks of all nodes. weight: of a replica's age; PLAIN or MOVE: see above."""

    def __init__(self, shares: list[int], weight: int | None) -> None:
        self.shares, self.weight, self.now = shares, weight, 0
        self.node = OrderedDict[int, int]()  # by block, the longest idle first
        self.used = dict[int, int]()  # by block, when it was used
        self.blocks = [OrderedDict[int, None]() for _ in shares]  # of a node, the longest idle first
        self.replicas = [OrderedDict[int, int]() for _ in shares]  # of a node, when they were used
        self.copies = defaultdict[int, set[int]](set)  # nodes with a replica of a block
        self.here = self.crossed = self.moved = 0

    def read(self, block: int, node: int) -> None:
        self.now += 1
        home, idle = self.node[block], self.now - self.used[block]
        local = home == node or block in self.replicas[node]
        self.here, self.crossed = self.here + local, self.crossed + (not local)
        if block in self.replicas[node] or (not local and self.weight and self._room_for_replica(node, idle)):
            self._replicate(block, node)
        self._use(block, home)

    def store(self, block: int, node: int) -> None:
        self.now += 1
        self._use(block, node if self._has_room(node) else self._freed(node))

    def _use(self, block: int, node: int) -> None:
        self.node[block] = node
        self.used[block] = self.now
        self.blocks[node][block] = None
        self.node.move_to_end(block)
        self.blocks[node].move_to_end(block)

    def _has_room(self, node: int) -> bool:
        return len(self.blocks[node]) + len(self.replicas[node]) < self.shares[node]

    def _freed(self, node: int) -> int:
        """A node that has a slot now: the given node, where the rule keeps stores local."""
        oldest = [(mine[next(iter(mine))], at) for at, mine in enumerate(self.replicas) if mine]
        used, freed = min(oldest, default=(0, -1))
        if freed >= 0 and (self.now - used) * (self.weight or 1) >= self._oldest():
            self._drop(next(iter(self.replicas[freed])), freed)
        else:
            freed = self._evict()
        return node if freed == node or self._move(node, freed) else freed

    def _oldest(self) -> int:
        """How long the oldest block was idle."""
        return self.now - self.used[next(iter(self.node))]

    def _room_for_replica(self, node: int, idle: int) -> bool:
        if self._has_room(node):
            return True
        mine = self.replicas[node]
        if mine and self.now - mine[next(iter(mine))] > idle:
            self._drop(next(iter(mine)), node)
            return True
        if idle * (self.weight or 1) >= self._oldest():
            return False
        freed = self._evict()
        return freed == node or self._move(node, freed)

    def _replicate(self, block: int, node: int) -> None:
        self.replicas[node][block] = self.now
        self.replicas[node].move_to_end(block)
        self.copies[block].add(node)

    def _drop(self, block: int, node: int) -> None:
        del self.replicas[node][block]
        self.copies[block].discard(node)

    def _evict(self) -> int:
        """Evict the oldest block, and its replicas. Returns its node."""
        block, node = self.node.popitem(last=False)
        del self.used[block], self.blocks[node][block]
        for at in self.copies.pop(block, ()):
            del self.replicas[at][block]
        return node

    def _move(self, node: int, to: int) -> bool:
        """Move a node's oldest block. Returns whether there was one, and the rule moves blocks."""
        if self.weight == PLAIN or not self.blocks[node]:
            return False
        block, _ = self.blocks[node].popitem(last=False)
        if block in self.replicas[to]:
            self._drop(block, to)
        self.node[block] = to
        self.blocks[to][block] = None
        self.blocks[to].move_to_end(block, last=False)
        self.moved += 1
        return True


def serve(trace: Trace, nodes: Sequence[int], shares: list[int], weight: int | None) -> Figures:
    """nodes: of the requests. shares: blocks of each node. A request touches its blocks last to first."""
    places = Places(shares, weight)
    for request, node in zip(trace.requests, nodes, strict=True):
        found = leading(request, places.node)
        for block in reversed(request.ids[:found]):
            if block in places.node:  # else a replica has just displaced it
                places.read(block, node)
        for block in reversed(request.ids):
            if block not in places.node:
                places.store(block, node)
    one = 100 * trace.block_tokens / sum(request.tokens for request in trace.requests)
    return Figures(places.here * one, places.crossed * one, places.moved * one)


@click.command(help=__doc__)
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--nodes", default=8, show_default=True)
@click.option("--capacity", default="1000,2000,3000,5000,8000", show_default=True, help="Blocks of all nodes.")
def main(file: str, nodes: int, capacity: str) -> None:
    trace = read(file)
    ways = {"in turn": [number % nodes for number in range(len(trace.requests))], "sticky": sticky(trace, nodes)}
    rules = {"plain": PLAIN, "move": MOVE} | {f"replicas {weight}": weight for weight in WEIGHTS}
    print("| blocks | requests | rule | hit | here | crossed | moved |\n| --- | --- | --- | --- | --- | --- | --- |")
    for blocks in map(int, capacity.split(",")):
        for way, to in ways.items():
            for rule, weight in rules.items():
                if to:
                    print(
                        f"| {blocks} | {way} | {rule} | {serve(trace, to, divided(blocks, nodes), weight)} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()

"""Compares the shares of a trace that pools with several directories and with one would serve. raykv has no shards.

    python benchmarks/shards.py synthetic_trace.jsonl conversation_trace.jsonl

A shard is a directory with a share of every node's slabs. One key decides which shard gets a prompt: the prompt's first
key, or a later key if the prompts of a trace begin alike. Each shard stores its own copy of the blocks before that key,
so that it has whole chains.

The table has, for each trace and capacity, the percent of tokens that were served by these pools:

pool: real directories, each with a fixed share of every node.
lru: exact LRUs, each with a fixed share.
by age: exact LRUs that tell each other once a second how long ago their oldest block was used. If a shard's oldest
    block has been idle LOCALITY times as long as another shard's, the first shard gives a slab to the other shard.

A figure is the mean over several ways to divide keys among shards. The worst value is in brackets. Further figures:

busiest: percent of all requested blocks that the busiest shard is asked for.
moves: number of slabs that shards gave to other shards.
copied: blocks that were copied within their node to empty these slabs, in percent of all stored blocks.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from statistics import mean

import click
from rich.console import Console
from rich.table import Table

from raykv.bench.trace.formats import Request, Trace, read
from raykv.bench.trace.pool import Pool, percent
from raykv.bench.trace.trace import divided
from raykv.config import PoolConfig

SLABS = 32  # slabs of a node: see `raykv.config.slab_bytes`
PERIOD = 4  # requests between two comparisons of ages; both public traces have about as many in a second
SEEDS = 5
LOCALITY = PoolConfig().locality

Choose = Callable[[Request], int]


class Slots:
    """The slots of one shard, and the slabs that they are in."""

    def __init__(self) -> None:
        self.free: list[int] = []  # the slab of each free slot
        self.of: dict[int, int] = {}  # slab of each block
        self.sizes: dict[int, int] = {}  # number of slots by slab

    def add(self, slab: int, size: int) -> None:
        self.sizes[slab] = size
        self.free += [slab] * size

    def remove(self, slab: int) -> int:
        """Remove a slab, and copy its blocks to free slots of other slabs. Returns the number of copied blocks."""
        self.free = [other for other in self.free if other != slab]
        del self.sizes[slab]
        blocks = [block for block, at in self.of.items() if at == slab]
        for block in blocks:
            self.of[block] = self.free.pop()
        return len(blocks)

    def emptiest(self) -> int:
        used = Counter(self.of.values())
        return min(self.sizes, key=lambda slab: used[slab])


class Shard:
    """An exact LRU over a shard's slots."""

    def __init__(self) -> None:
        self.slots = Slots()
        self.used: OrderedDict[int, int] = OrderedDict()  # number of each block's last request; the least recent first
        self.stored = 0

    def ask(self, ids: list[int], now: int) -> int:
        """Touch the blocks from last to first, and store missing blocks that fit. Returns the count of leading hits."""
        served = next((i for i, block in enumerate(ids) if block not in self.used), len(ids))
        for block in reversed(ids):
            self.used[block] = now
            self.used.move_to_end(block)
        self.evict(len(self.used) - sum(self.slots.sizes.values()))
        new = [block for block in ids if block in self.used and block not in self.slots.of]
        self.slots.of |= {block: self.slots.free.pop() for block in new}
        self.stored += len(new)
        return served

    def evict(self, count: int) -> None:
        for _ in range(count):
            block, _ = self.used.popitem(last=False)
            if block in self.slots.of:  # some blocks of a request larger than the shard have no slot
                self.slots.free.append(self.slots.of.pop(block))

    def idle(self, now: int) -> float:
        """Number of requests since the oldest block was used; inf while there are free slots."""
        return float("inf") if self.slots.free else now - next(iter(self.used.values()))


class ByAge:
    """Shards that give slabs to the shard whose oldest block was used most recently."""

    def __init__(self, capacity: int, nodes: int, shards: int, moving: bool) -> None:
        self.shards, self.moving = [Shard() for _ in range(shards)], moving
        self.moves = self.copied = 0
        for slab, size in enumerate(divided(capacity, nodes * SLABS)):
            self.shards[slab % shards].slots.add(slab, size)

    def serve(self, trace: Trace, choose: Choose) -> float:
        hits = []
        for now, request in enumerate(trace.requests):
            hits.append(self.shards[choose(request)].ask(request.ids, now))
            if self.moving and now % PERIOD == 0:
                self._even_out(now)
        return percent(trace, hits)

    def _even_out(self, now: int) -> None:
        giver = max(self.shards, key=lambda shard: (shard.idle(now), len(shard.slots.free)))
        taker = min(self.shards, key=lambda shard: shard.idle(now))
        if giver.idle(now) > LOCALITY * taker.idle(now) and len(giver.slots.sizes) > 1:
            slab = giver.slots.emptiest()
            size = giver.slots.sizes[slab]
            giver.evict(size - len(giver.slots.free))
            self.copied += giver.slots.remove(slab)
            taker.slots.add(slab, size)
            self.moves += 1


def chooser(shards: int, depth: int, seed: int) -> Choose:
    """Return a function that chooses a shard by the key of block `depth`, or by the last key of a shorter prompt."""

    def choose(request: Request) -> int:
        block = request.ids[min(depth, len(request.ids)) - 1]
        return hash((seed, block)) % shards

    return choose


def serve_pools(trace: Trace, capacity: int, nodes: int, shards: int, choose: Choose) -> float:
    """Hit percent of `shards` real directories, each with a share of every node."""
    of_shards = [divided(share, shards) for share in divided(capacity, nodes)]
    pools = [Pool([node[shard] for node in of_shards], LOCALITY) for shard in range(shards)]
    asked = [pools[choose(request)].ask(i % nodes, request.ids) for i, request in enumerate(trace.requests)]
    return percent(trace, [read for read, _ in asked])


def busiest(trace: Trace, choose: Choose) -> float:
    """Percent of all requested blocks that the busiest shard is asked for."""
    asked: Counter[int] = Counter()
    for request in trace.requests:
        asked[choose(request)] += len(request.ids)
    return 100 * max(asked.values()) / asked.total()


def row(trace: Trace, capacity: int, nodes: int, shards: int, depth: int) -> list[str]:
    """One row of the table."""
    pools, fixed, moving, shares, moves, copied = [], [], [], [], [], []
    for seed in range(SEEDS if shards > 1 else 1):
        choose = chooser(shards, depth, seed)
        pools.append(serve_pools(trace, capacity, nodes, shards, choose))
        fixed.append(ByAge(capacity, nodes, shards, moving=False).serve(trace, choose))
        pool = ByAge(capacity, nodes, shards, moving=True)
        moving.append(pool.serve(trace, choose))
        shares.append(busiest(trace, choose))
        moves.append(pool.moves)
        copied.append(100 * pool.copied / sum(shard.stored for shard in pool.shards))
    percents = [f"{mean(hits):.1f} ({min(hits):.1f})" for hits in (pools, fixed, moving)]
    return [*percents, f"{mean(shares):.0f} ({max(shares):.0f})", f"{mean(moves):.0f}", f"{mean(copied):.1f}"]


@click.command(help=__doc__)
@click.argument("traces", nargs=-1, required=True, type=click.Path(exists=True))
@click.option("--nodes", default=8, show_default=True)
@click.option("--capacity", default="5000,10000,30000", show_default=True, help="Blocks of all nodes.")
@click.option("--shards", default="1,4,16", show_default=True)
@click.option("--depth", default="1,2", show_default=True, help="Number of the block whose key decides.")
def main(traces: tuple[str, ...], nodes: int, capacity: str, shards: str, depth: str) -> None:
    for path in traces:
        trace = read(path)
        table = Table(*("depth", "blocks", "shards", "pool", "lru", "by age", "busiest", "moves", "copied"), title=path)
        for number in map(int, depth.split(",")):
            for blocks in map(int, capacity.split(",")):
                for count in map(int, shards.split(",")):
                    table.add_row(*map(str, (number, blocks, count)), *row(trace, blocks, nodes, count, number))
        Console().print(table)


if __name__ == "__main__":
    main()

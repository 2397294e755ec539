"""Number of blocks that a batch computes if `raykv.scheduling` orders it and splits it over engines. No engine runs.

    python benchmarks/scheduling/batches.py [--prompts 2000] [--engines 4] [--json]

A prompt consists of one of 4 system prompts (30 blocks), one of 8 few-shot headers (20), one of 50 documents (40), and
its own question (4). A cache evicts by plain LRU. The floor (baseline) computes each different block once. For
comparison, one engine gets the prompts in random order, and several engines get the prompts in turn.
"""

import argparse
import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from raykv.keys import chain
from raykv.scheduling import order, split
from raykv.scheduling.batches import Prompts

SYSTEMS, HEADERS, DOCUMENTS = (4, 30), (8, 20), (50, 40)  # (number of texts, blocks of each)
QUESTION, CACHES = 4, (100, 500, 2000)  # blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = measured(batch(arguments.prompts), arguments.engines)
    if arguments.json:
        print(json.dumps(found))
        return
    print(f"blocks: {found['blocks']}, different: {found['different']}")
    for row in found["caches"]:
        print("  ".join(f"{name} {figure}" for name, figure in row.items()))


def batch(prompts: int) -> Prompts:
    """Return the keys of random prompts. A block has one token."""
    random, made = np.random.default_rng(0), []
    for own in range(prompts):
        system, header, document = (int(random.integers(kinds)) for kinds, _ in (SYSTEMS, HEADERS, DOCUMENTS))
        parts = ((1000 + system, SYSTEMS[1]), (2000 + header, HEADERS[1]), (3000 + document, DOCUMENTS[1]))
        tokens = [part * 100 + i for part, blocks in (*parts, (4000 + own, QUESTION)) for i in range(blocks)]
        made.append(chain(bytes(32), tokens, 1))
    return made


def measured(prompts: Prompts, engines: int) -> dict[str, Any]:
    """Return the number of computed blocks, by the size of an engine's cache."""
    names = [[key.tobytes() for key in keys] for keys in prompts]
    everything, rows = range(len(prompts)), []
    for cache in CACHES:
        parts, dealt = split(prompts, engines), [range(first, len(prompts), engines) for first in range(engines)]
        loads = [computed(names, part, cache) for part in parts]
        rows.append(
            {
                "cache": cache,
                "random": computed(names, everything, cache),
                "ordered": computed(names, order(prompts), cache),
                "dealt": sum(computed(names, part, cache) for part in dealt),
                "split": sum(loads),
                "most_loaded": round(max(loads) * engines / sum(loads), 3),
            }
        )
    different = len({name for each in names for name in each})
    return {"blocks": sum(map(len, names)), "different": different, "engines": engines, "caches": rows}


def computed(names: list[list[bytes]], places: Sequence[int], blocks: int) -> int:
    """Return how many blocks an engine computes for the prompts at these places, with a cache of `blocks` blocks."""
    cache: OrderedDict[bytes, None] = OrderedDict()
    lacking = 0
    for place in places:
        lacking += sum(name not in cache for name in names[place])
        for name in reversed(names[place]):  # the last block is evicted first
            cache[name] = None
            cache.move_to_end(name)
        while len(cache) > blocks:
            cache.popitem(last=False)
    return lacking


if __name__ == "__main__":
    main()

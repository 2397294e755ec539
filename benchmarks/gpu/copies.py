"""Prints `raykv bench gpu` as a table. Returns 1 if a copy has less than 0.75 times the speed of cudaMemcpyAsync.

    python benchmarks/gpu/copies.py

The margin of a quarter allows for locks and headers, which cost about as much as a copy within the GPU.
"""

import sys

from rich.console import Console
from rich.table import Table

from raykv.bench.blocks import gpu

ENOUGH = 0.75


def main() -> int:
    figures = gpu.run()
    table = Table("copy", "GB/s", "by hand", "of it", title=str(figures["gpu"]))
    names = [name.removesuffix("_of_hand") for name in figures if name.endswith("_of_hand")]
    for name in names:
        table.add_row(name, *(f"{figures[f'{name}_{what}']:.2f}" for what in ("gbps", "hand_gbps", "of_hand")))
    Console().print(table)
    slow = [name for name in names if figures[f"{name}_of_hand"] < ENOUGH]
    Console().print(f"NCCL between two processes: {figures.get('nccl_two_gbps', 'not installed')} GB/s")
    Console().print(f"under {ENOUGH} of by hand: {', '.join(slow) or 'none'}")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())

"""Runs all that needs a GPU in under 8 minutes: the tests that CI can't run, and `raykv bench gpu`, as tables.

    pip install -e '.[gpu,test]'
    python benchmarks/gpu.py

It needs one GPU with 2 GiB free. A machine without a network needs the wheels of ray, hypothesis, sortedcontainers,
pytest-timeout and psutil beside CuPy, NCCL and pytest. Returns 1 if a test failed, or if a copy took more than 1/0.75
times as long as the same copy by hand. That leaves room for locks and headers, which cost about as much as a copy
within the GPU.
"""

import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from raykv.bench.blocks import gpu

ROOT = Path(__file__).parent.parent
TESTS = [  # other tests with the mark `gpu` import engines
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/unit/arena").glob("test_gpu_*.py")),
    "tests/cluster/test_gpu_pool.py",
]
TESTS_S, ENOUGH = 330, 0.75


def main() -> int:
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", *TESTS]
    failed = subprocess.run(command, cwd=ROOT, timeout=TESTS_S).returncode != 0
    figures = gpu.run()
    table = Table("copy", "GB/s", "by hand", "of it", title=str(figures["gpu"]))
    names = [name.removesuffix("_of_hand") for name in figures if name.endswith("_of_hand")]
    for name in names:
        table.add_row(name, *(f"{figures[f'{name}_{what}']:.2f}" for what in ("gbps", "hand_gbps", "of_hand")))
    Console().print(table)
    slow = [name for name in names if figures[f"{name}_of_hand"] < ENOUGH]
    Console().print(f"NCCL between two processes: {figures.get('nccl_two_gbps', 'not installed')} GB/s")
    Console().print(f"tests {'failed' if failed else 'passed'}; under {ENOUGH} of by hand: {', '.join(slow) or 'none'}")
    return 1 if failed or slow else 0


if __name__ == "__main__":
    sys.exit(main())

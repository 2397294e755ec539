"""Runs all GPU tests and benchmarks in under 13 minutes. Each stage has its own process and its own time limit.

    pip install -e '.[gpu,test]' torch
    python benchmarks/gpu/first.py arena pool copies        # at most 430 s
    python benchmarks/gpu/first.py costs capture worker busy  # at most 330 s

Without arguments, all stages run. A failed stage does not prevent the next one. The stages need one GPU with 10 GiB
free. A machine without a network needs the wheels of ray, hypothesis, sortedcontainers, pytest-timeout and psutil, as
well as CuPy, NCCL and pytest. vLLM need not be installed. Returns 1 if a stage failed.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = ROOT / "benchmarks/gpu"
PYTEST = ["-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider"]
STAGES: dict[str, tuple[list[str], int]] = {  # by stage: arguments of Python, and time limit in seconds
    "arena": ([*PYTEST, *sorted(map(str, ROOT.glob("tests/unit/arena/gpu/test_*.py")))], 120),
    "pool": ([*PYTEST, str(ROOT / "tests/cluster/blocks/test_gpu_pool.py")], 210),
    "copies": ([str(HERE / "copies.py")], 100),
    "costs": ([str(HERE / "costs.py")], 60),
    "capture": ([str(HERE / "capture.py")], 60),
    "worker": ([str(HERE / "worker.py")], 120),
    "busy": ([str(HERE / "busy.py")], 90),
}


def main(asked: list[str]) -> int:
    if unknown := set(asked) - set(STAGES):
        sys.exit(f"no stage {', '.join(sorted(unknown))}: give some of {', '.join(STAGES)}")
    failed = [stage for stage in asked or STAGES if not _passes(stage)]
    print(f"failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def _passes(stage: str) -> bool:
    arguments, seconds = STAGES[stage]
    print(f"== {stage}, at most {seconds} s", flush=True)
    begin = time.monotonic()
    process, status = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, start_new_session=True), None
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        pass
    finally:  # also after Ctrl-C
        if status is None:
            os.killpg(process.pid, signal.SIGKILL)  # also kills its children, which would keep GPU memory
            process.wait()
    print(f"== {stage}: {'out of time' if status is None else status}, {time.monotonic() - begin:.0f} s", flush=True)
    return status == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

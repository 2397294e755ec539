"""Measures the figures of README.md, docs/benchmarks.md and docs/scale.md, and writes docs/figures.json.

    python -m docs.figures [--trace FILE] [--agents FILE] [NAME...]
    python -m docs.tables

`docs.tables` then writes the tables. While figures and their floors (baselines) are measured, nothing else may run.
NAME: a name in BENCHES; by default all benches run, which takes half an hour. FILE: a trace in Mooncake's format:
`--trace` for `trace` and `tier-trace`, `--agents` for `agents`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "figures.json"
TRACE, AGENTS = "synthetic_trace.jsonl", "agent_trace.jsonl"
BENCHES = {
    "start": "start",
    "local": "local",
    "sizes": "local --blocks 1,16,64 --block-bytes 64KiB,2MiB",
    "cross-tcp": "cross --transport tcp",
    "cross-nixl": "cross --transport nixl",
    "cross-object-store": "cross --transport object_store",
    "link": "cross --link 10gbit",
    "lossy-link": "cross --link 10gbit,0.1%",
    "route": "route",
    "tiers": "tiers",
    "demotion": "demotion",
    "directory": "directory --entries 10000000",
    "scale": "scale --nodes 8,64,128,136,144,152,160 --entries 5000000 --take-over 64",
    "trace": f"trace {TRACE} --nodes 8 --capacity 5000,10000,30000",
    "agents": f"trace {AGENTS} --nodes 8 --capacity 1000,2000,3000,5000,8000",
    "tier-trace": f"trace {TRACE} --nodes 8 --capacity 5000 --external 30000",
    "ttft": "ttft --engine vllm",
    "flight": "flight",
    "pd": "pd",
}


def measured(name: str, traces: dict[str, Path]) -> dict[str, Any]:
    """Return a bench's figures. traces: files by name in BENCHES. Raises CalledProcessError if the bench fails."""
    words = [str(traces[word].resolve()) if word in traces else word for word in BENCHES[name].split()]
    command = [sys.executable, "-m", "raykv.cli", "bench", *words, "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def commit() -> str:
    """Return the checked-out commit. Raises SystemExit if files of the package differ from this commit."""
    if _git("status", "--porcelain", "raykv", "actors"):
        raise SystemExit("raykv/ has changes that are in no commit: figures are of a commit, so commit them first")
    return _git("rev-parse", "--short=7", "HEAD")


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def machine() -> str:
    return f"{os.cpu_count()} cores and {round(psutil.virtual_memory().total / (1 << 30))} GiB"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", metavar="NAME")
    options.add_argument("--trace", type=Path, default=Path(TRACE), metavar="FILE")
    options.add_argument("--agents", type=Path, default=Path(AGENTS), metavar="FILE")
    given = options.parse_args()
    if unknown := set(given.names) - BENCHES.keys():
        options.error(f"nothing is named {', '.join(sorted(unknown))}: give some of {', '.join(BENCHES)}")
    for name in given.names or BENCHES:
        found = {"commit": commit(), "machine": machine(), **measured(name, {TRACE: given.trace, AGENTS: given.agents})}
        kept = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
        FILE.write_text(json.dumps({**kept, name: found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

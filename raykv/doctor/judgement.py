"""Judges a node by its answers to `examiner`."""

from collections.abc import Iterator
from importlib.metadata import metadata

from packaging.specifiers import SpecifierSet

from raykv.actors.store.readiness import what_to_install
from raykv.config import MIN_MEMORY, PoolConfig, capacity_bytes
from raykv.doctor.facts import HUGE_PAGES, Facts
from raykv.doctor.finding import ADVICE, OK, WRONG, Finding
from raykv.protocol.calls import VERSION
from raykv.system.extras import to_install
from raykv.system.free_memory import gib, refusal

CLOCKS_S = 1.0  # maximum difference of two clocks, beyond the error of the measurement
INSTALLED = ("python", "numba")
PYTHONS = SpecifierSet(metadata("raykv")["Requires-Python"])


def of_software(node: str, there: dict[str, str], here: dict[str, str]) -> list[Finding]:
    """Judge versions. there, here: answers of `examiner.software` on the node and on the driver."""
    found = []
    for what in INSTALLED:
        state, text = OK, there[what]
        if what == "python" and text.rstrip("+") not in PYTHONS:  # "+": an unreleased Python
            state, text = WRONG, f"{text}, and raykv needs Python {PYTHONS}: make Ray's environment with such a one"
        elif text != here[what]:
            state, text = WRONG, f"{text}, here it is {here[what]}: install the same one on every node"
        found.append(Finding(node, what, state, text))
    if "why_not" in there:
        found.append(Finding(node, "raykv", WRONG, f"{there['why_not']}: {what_to_install()}"))
    elif there["raykv"] != here["raykv"]:
        text = f"{there['raykv']}, here it is {here['raykv']}: {what_to_install()}"
        found.append(Finding(node, "raykv", WRONG, text))
    return found


def of_protocol(node: str, version: str, protocol: int) -> Finding:
    """Judge the version of messages on a node whose raykv has the same version as the driver's."""
    if protocol != VERSION:
        text = f"{version} of other sources: its messages have version {protocol}, here they have {VERSION}"
        return Finding(node, "raykv", WRONG, f"{text}: {what_to_install()}")
    return Finding(node, "raykv", OK, f"{version}, messages of version {protocol}")


def of_facts(node: str, facts: Facts, neighbours: int, running: set[str]) -> Iterator[Finding]:
    """Judge the facts of a node. neighbours: number of nodes that share its memory, including the node itself.

    running: names of the running pools of this Ray cluster.
    """
    yield _memory(node, facts, neighbours)
    yield from _left(node, facts.left, running | facts.alive)
    yield _kernels(node, facts)
    yield _huge_pages(node, facts.huge_pages)
    yield _gpus(node, facts)
    yield _nixl(node, facts)
    yield _niceness(node, facts.niceness)
    yield _tls(node, facts)


def of_clock(node: str, ahead: float, unsure: float) -> Finding:
    """Judge a clock. ahead: seconds that it is ahead of the driver's clock. unsure: error of `ahead` in seconds."""
    text = f"{ahead:+.2f} s from here, give or take {unsure:.2f}"
    if abs(ahead) - unsure > CLOCKS_S:
        return Finding(node, "clock", ADVICE, f"{text}: logs will not match; run an NTP client such as chrony there")
    return Finding(node, "clock", OK, text)


def of_tokens(node: str, chunks: int) -> Finding:
    """Report chunks whose tokens do not match their keys. chunks: how many of these chunks the node's engines read."""
    text = (
        f"{chunks} chunks held other tokens than their keys stand for; engines with verify_tokens dropped and computed "
        f"them. That is a fault of raykv or of the engine: keep the engines' logs, and report it. `raykv clear` counts "
        f"from 0 again"
    )
    return Finding(node, "tokens", WRONG, text)


def _memory(node: str, facts: Facts, neighbours: int) -> Finding:
    room, default = facts.room, PoolConfig().cpu_memory
    asked = neighbours * capacity_bytes(default, facts.total)
    if room.free < neighbours * MIN_MEMORY:
        return Finding(node, "memory", WRONG, refusal(neighbours * MIN_MEMORY, room, neighbours))
    limit = "none" if room.cgroup_free is None else f"{gib(room.cgroup_free)} left"
    text = (
        f"{gib(room.free)} free for pools: /dev/shm {gib(room.shm_free)} of {gib(facts.shm)}, memory "
        f"{gib(room.memory_free)} of {gib(facts.total)}, cgroup limit {limit}, object stores may take "
        f"{gib(room.plasma_unfilled)}"
    )
    if room.free < asked:
        most = room.free // neighbours >> 20
        text += f". A start of another pool needs --cpu-memory {most}MiB or less: {default} is too much by now"
        return Finding(node, "memory", ADVICE, text)
    return Finding(node, "memory", OK, text)


def _left(node: str, left: dict[str, int], alive: set[str]) -> Iterator[Finding]:
    """Yield findings on memory that dead stores left in /dev/shm. No finding is WRONG: `_memory` judges free memory."""
    for pool, size in sorted(left.items()):
        text = f"{gib(size)} in /dev/shm of pool {pool}, "
        if pool in alive:
            text += "one of whose stores died: the next one on this machine takes it up, and the pool's end frees it"
        else:
            text += f"which does not run: `raykv stop --name {pool}` frees it"
        yield Finding(node, "left over", ADVICE, text)
    if not left:
        yield Finding(node, "left over", OK, "nothing of dead pools in /dev/shm")


def _kernels(node: str, facts: Facts) -> Finding:
    bad = " and ".join(facts.unwritable)
    if len(facts.unwritable) > 1:
        text = f"{bad} can't be written by this user alone, so every process compiles for a minute"
        return Finding(node, "kernels", WRONG, f"{text}: set NUMBA_CACHE_DIR to a folder of this user, mode 0700")
    if bad:
        text = f"kept in {facts.kernels}, since {bad} can't be written by this user alone"
        return Finding(node, "kernels", ADVICE, f"{text}: set NUMBA_CACHE_DIR where it outlasts a reboot")
    return Finding(node, "kernels", OK, f"kept in {facts.kernels}")


def _huge_pages(node: str, word: str) -> Finding:
    if word in ("always", "within_size", "advise", "force"):
        return Finding(node, "huge pages", OK, f"{word} in shared memory")
    if word:
        return Finding(node, "huge pages", ADVICE, f"{word} in shared memory: echo advise > {HUGE_PAGES}")
    return Finding(node, "huge pages", OK, "none: this kernel has none for shared memory")


def _gpus(node: str, facts: Facts) -> Finding:
    if facts.driver and not facts.gpus:
        text = f"driver {facts.driver}, but no GPU that raykv can use: for a pool with gpu_memory, {to_install('gpu')} "
        text += "there, or see CUDA_VISIBLE_DEVICES of its raylet"
        return Finding(node, "gpu", ADVICE, text)
    return Finding(node, "gpu", OK, f"{facts.gpus}, driver {facts.driver}" if facts.gpus else "none")


def _nixl(node: str, facts: Facts) -> Finding:
    if facts.tls:
        return Finding(node, "nixl", OK, facts.no_nixl)
    if not facts.no_nixl:
        return Finding(
            node, "nixl", OK, "installed, with RDMA" if facts.rdma else "installed; without RDMA TCP is taken"
        )
    if facts.rdma:
        return Finding(node, "nixl", ADVICE, f"there is an RDMA card, but {facts.no_nixl}")
    return Finding(node, "nixl", OK, "not installed; without RDMA it is of no use")


def _tls(node: str, facts: Facts) -> Finding:
    if facts.no_tls:
        return Finding(node, "tls", WRONG, f"calls and blocks go through Ray, which is slower: {facts.no_tls}")
    return Finding(node, "tls", OK, "with Ray's certificate" if facts.tls else "not used by Ray")


def _niceness(node: str, niceness: int) -> Finding:
    if niceness:
        text = f"Ray's workers run at nice {niceness}: set RAY_worker_niceness=0 where `ray start` runs, itself at 0"
        return Finding(node, "niceness", ADVICE, text)
    return Finding(node, "niceness", OK, "0")

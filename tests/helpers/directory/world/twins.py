"""A directory and its oracle. Every call goes to both, and both must give the same answer."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np

from helpers.directory.checks import (
    check_invariants,
    pins_of_directory,
    pins_of_oracle,
    rows_of_directory,
    rows_of_oracle,
    slots_of,
)
from helpers.directory.oracle import intents as oracle_intents
from helpers.directory.oracle.gpu_demotion import BYTES_PER_CALL
from helpers.directory.oracle.membership import SOLE_COPIES_PER_CALL
from helpers.directory.oracle.oracle import Oracle
from helpers.directory.oracle.slots import unpack
from helpers.directory.oracle.tiers import BATCH_BYTES, KEYS_PER_CALL, TIER_SLAB
from raykv.directory.calls import nodes
from raykv.directory.directory import Directory
from raykv.directory.state import demotion_batch, gpu_demotion, intents, tier_catalog

TTL = 10.0
LATE = 2.0  # seconds, so that blocks that wait become late


class Twins:
    """with_oracle=False: only invariants are checked, as callers do more wrong than the oracle can follow."""

    real: Directory
    model: Oracle

    def __init__(self, with_oracle: bool, locality: float, share: float, min_hits: int, long_bytes: int) -> None:
        self.with_oracle = with_oracle
        self.locality, self.share, self.min_hits, self.long_bytes = locality, share, min_hits, long_bytes
        self.now = 0.0
        self.steps = 0
        self.failed = False
        self.log: list[tuple[str, tuple[Any, ...]]] = []  # all calls since the directory started

    def begin(self) -> None:
        """Start a new directory and a new oracle."""
        self.real, self.model = self._pair()
        self.log.clear()

    def _pair(self) -> tuple[Directory, Oracle]:
        how: dict[str, Any] = {"locality": self.locality, "client_ttl": TTL, "late": LATE}
        how |= {"share": self.share, "min_hits": self.min_hits, "long_bytes": self.long_bytes}
        return self._new(**how), Oracle(**how)

    def _new(self, **how: Any) -> Directory:
        return Directory(**how)

    def do(self, name: str, *args: Any) -> Any:
        """Call both, and compare their answers. Returns the answer."""
        self.steps += 1
        self.log.append((name, args))
        with self.explained():
            return self._ask(self.real, self.model, name, args)

    def _ask(self, directory: Directory, oracle: Oracle, name: str, args: tuple[Any, ...]) -> Any:
        with _small_calls():
            real = self._call(directory, name, args)
        if self.with_oracle:
            more = {"choices": self._choices(real)} if name == "reserve" else {}
            model = getattr(oracle, name)(*args, **more)
            assert real == model, f"{name}: directory {real}, oracle {model}"
        return real

    def _call(self, directory: Directory, name: str, args: tuple[Any, ...]) -> Any:
        answer = getattr(directory, name)(*args)
        if name == "stats":
            del answer["hit_curve"]  # see test_hit_curve
        return answer

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Add a note to a failure: the fewest calls to a new directory that still fail."""
        try:
            yield
        except Exception as error:
            if not self.failed:
                self.failed = True
                calls, last = self._shrunk()
                text = "\n".join(f"    {name}{tuple(map(_short, args))}" for name, args in calls)
                error.add_note(f"{len(calls)} calls are enough ({self._settings()}):\n{text}\n    -> {last!r}")
            raise

    def _settings(self) -> str:
        return f"locality {self.locality}, share {self.share}, min_hits {self.min_hits}"

    def _shrunk(self) -> tuple[list[tuple[str, tuple[Any, ...]]], Exception | None]:
        calls, piece = list(self.log), len(self.log)
        stop = time.monotonic() + 60
        last = self._replay(calls)
        while last and piece and time.monotonic() < stop:
            for start in range(0, len(calls), piece):
                fewer = calls[:start] + calls[start + piece :]
                if error := self._replay(fewer):
                    calls, last = fewer, error
                    break
            else:
                piece //= 2
        return calls, last

    def _replay(self, calls: list[tuple[str, tuple[Any, ...]]]) -> Exception | None:
        real, model = self._pair()
        try:
            for name, args in calls:
                self._ask(real, model, name, args)
                if len(calls) < 100:
                    self._compare(real, model)
            self._compare(real, model)
        except Exception as error:
            return error
        return None

    @staticmethod
    def _choices(reserved: Any) -> dict[int, int]:
        granted = np.frombuffer(reserved.indices, np.int32).tolist()
        return {i: location[0] for i, location in zip(granted, unpack(reserved.locations), strict=True)}

    def check(self) -> None:
        """Compare the state of both, and check the directory's invariants."""
        with self.explained():
            self._compare(self.real, self.model)
        self.do("stats", self.now)

    def _compare(self, directory: Directory, oracle: Oracle) -> None:
        by_key = check_invariants(directory)
        if self.with_oracle:
            real, model = rows_of_directory(directory), rows_of_oracle(oracle)
            differ = {at: (real.get(at), model.get(at)) for at in real | model if real.get(at) != model.get(at)}
            assert not differ, differ
            assert directory.indices() == oracle.owners()
            assert pins_of_directory(directory) == pins_of_oracle(oracle)
            rows = [row for copies in by_key.values() for row in copies]
            slots = dict(zip(rows, slots_of(directory, rows), strict=True))
            assert {key: [slots[row] for row in copies] for key, copies in by_key.items()} == {
                key: [(row.slab.node, row.slab.number, row.slot) for row in rows] for key, rows in oracle.table.items()
            }


@contextmanager
def _small_calls() -> Iterator[None]:
    """Set limits so small that a few blocks fill a tier, and fewer an answer."""
    before = {name: getattr(tier_catalog, name) for name in ("slab_bytes", "BATCH_BYTES", "KEYS_PER_CALL")}
    small = {"slab_bytes": lambda _: TIER_SLAB, "BATCH_BYTES": BATCH_BYTES, "KEYS_PER_CALL": KEYS_PER_CALL}
    bytes_before, keys_before = gpu_demotion.BYTES_PER_CALL, vars(demotion_batch)["KEYS_PER_CALL"]
    sole_copies = nodes.SOLE_COPIES_PER_CALL
    intents_before = {name: getattr(intents, name) for name in ("KEYS_MAX", "TTL_S")}
    try:
        vars(tier_catalog).update(small)
        gpu_demotion.BYTES_PER_CALL = BYTES_PER_CALL
        vars(demotion_batch).update(KEYS_PER_CALL=KEYS_PER_CALL)
        nodes.SOLE_COPIES_PER_CALL = SOLE_COPIES_PER_CALL
        vars(intents).update({name: getattr(oracle_intents, name) for name in intents_before})
        yield
    finally:
        vars(tier_catalog).update(before)
        gpu_demotion.BYTES_PER_CALL = bytes_before
        vars(demotion_batch).update(KEYS_PER_CALL=keys_before)
        nodes.SOLE_COPIES_PER_CALL = sole_copies
        vars(intents).update(intents_before)


def _short(value: Any) -> Any:
    if isinstance(value, tuple):
        return f"{type(value).__name__}({', '.join(str(_short(field)) for field in value)})"
    return f"{len(value)} bytes {blake2b(value, digest_size=3).hexdigest()}" if isinstance(value, bytes) else value

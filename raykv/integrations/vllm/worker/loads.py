"""Keeps track of the LoRA adapters of a vLLM worker, and the files that they were loaded from. See `adapters`."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from vllm.lora.utils import get_adapter_absolute_path
from vllm.lora.worker_manager import WorkerLoRAManager

from raykv.integrations.vllm.identity.adapters import Adapter, Load, Told

log = logging.getLogger("raykv")

REST_NS = 2_000_000_000  # nanoseconds, longer than a step of any file system's clock


class Files(NamedTuple):
    """An adapter's files at one moment. stats: by file, fields that change when the file is written."""

    path: str
    stats: tuple[tuple[str, int, int, int, int], ...]

    @property
    def at_rest(self) -> bool:
        """Whether all files changed more than REST_NS ago. A further write then gives a file a new time in `stats`."""
        return all(changed_ns < time.time_ns() - REST_NS for *_, changed_ns in self.stats)


class Loads:
    """The adapters that vLLM's manager in a worker has loaded."""

    def __init__(self) -> None:
        self._by_id: dict[int, Load] = {}
        self._last: dict[str, Load] = {}  # by name
        self._count = 0
        self._mutex = threading.Lock()

    def note(self, adapter: int, name: str, files: Files, before: bytes | None) -> None:
        """Note that vLLM has loaded an adapter. files: its files just before the load. before: digest of these files.

        The digest names the loaded weights only if the files did not change during the load. In doubt, a thread hashes
        the files again, as hashing hundreds of MB here would delay the engine's step.
        """
        agree = bool(before) and files.at_rest and files_of(files.path) == files
        load = self._begin(adapter, name, before or b"", agree)
        if not agree:
            arguments = (adapter, load, before, files.path)
            threading.Thread(target=self._check, args=arguments, name="raykv-adapter", daemon=True).start()

    def known(self, ids: set[int]) -> dict[int, Load]:
        with self._mutex:
            return {number: load for number, load in self._by_id.items() if number in ids}

    def _begin(self, adapter: int, name: str, weights: bytes, agree: bool) -> Load:
        """Record a load. If the last load of this name has the same weights, the new load gets the same number."""
        with self._mutex:
            last = self._last.get(name)
            again = last is not None and last.weights == weights != b""
            self._count += not again
            number = last.number if last is not None and again else self._count
            load = self._by_id[adapter] = self._last[name] = Load(name, number, weights if agree else b"")
            return load

    def _check(self, adapter: int, load: Load, before: bytes | None, path: str) -> None:
        if before is None or digest_of(files_of(path)) != before:
            log.warning("the LoRA adapter in %s can't be read, or changes: its KV is shared with no other engine", path)
            return
        with self._mutex:
            if self._by_id[adapter] is load:
                self._by_id[adapter] = self._last[load.name] = load._replace(weights=before)


_loads: WeakKeyDictionary[WorkerLoRAManager, Loads] = WeakKeyDictionary()


class LoadedAdapters:
    """This worker's adapters, for the scheduler's side. For the engine's thread only."""

    def __init__(self, config: Any, rank: int) -> None:
        """config: vLLM's LoRA configuration of this engine. From now on vLLM's managers report their loads."""
        self._config, self._rank = config, rank
        self._last: Told | None = None
        if not hasattr(WorkerLoRAManager._load_adapter, "noted"):
            WorkerLoRAManager._load_adapter = _noting(WorkerLoRAManager._load_adapter)

    def has(self, adapter: Adapter | None) -> bool:
        """Whether this worker has the weights that a request's keys name. adapter: None if the keys name no adapter."""
        if adapter is None:
            return True
        load = self._now().get(adapter.id)
        return load is not None and (load.weights, load.number) == (adapter.weights, adapter.numbers[self._rank])

    def weights_of(self, adapter: int) -> bytes:
        """Return the digest of an adapter's current weights, or b"" if unknown. adapter: vLLM's id."""
        load = self._now().get(adapter)
        return load.weights if load else b""

    def news(self, question: int) -> dict[int, Told]:
        """Return this rank's adapters, or {} if the scheduler's side already knows them.

        question: number of the last question from the scheduler's side.
        """
        told = Told(question, self._now())
        if told == self._last:
            return {}
        self._last = told
        return {self._rank: told}

    def _now(self) -> dict[int, Load]:
        for manager in reversed(list(_loads)):
            if manager.lora_config is self._config:
                return _loads[manager].known(manager.list_adapters())
        return {}


def _noting(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap vLLM's method that loads an adapter, so that each load is noted. Errors of the method are propagated."""

    @functools.wraps(load)
    def noted(manager: WorkerLoRAManager, request: Any) -> Any:
        files, before = Files(request.lora_path, ()), None
        with suppress(Exception):  # vLLM reports a bad path itself
            files = files_of(get_adapter_absolute_path(request.lora_path))
            before = digest_of(files)
        model = load(manager, request)
        _loads.setdefault(manager, Loads()).note(request.lora_int_id, request.lora_name, files, before)
        return model

    noted.noted = True  # type: ignore[attr-defined]
    return noted


def files_of(path: str) -> Files:
    """Return an adapter's files in a local folder, or no files if they can't be read.

    Opens each file, because only then does NFS ask its server.
    """
    stats = []
    with suppress(OSError):
        for file in sorted(Path(path).glob("adapter_*")):
            with file.open("rb") as opened:
                it = os.fstat(opened.fileno())
                stats.append((file.name, it.st_ino, it.st_size, it.st_mtime_ns, it.st_ctime_ns))
        return Files(path, tuple(stats))
    return Files(path, ())


def digest_of(files: Files) -> bytes | None:
    """Return the digest of an adapter's files, 32 bytes. None if the files can't be read, or have no weights."""
    return _known_digest(files) if files.at_rest else _digest(files)


def _digest(files: Files) -> bytes | None:
    if not any(name.startswith("adapter_model") for name, *_ in files.stats):
        return None
    total = hashlib.sha256()
    with suppress(OSError):
        for name, *_ in files.stats:
            with Path(files.path, name).open("rb") as opened:
                total.update(name.encode() + b"\0" + hashlib.file_digest(opened, "sha256").digest())
        return total.digest()
    return None


_known_digest = functools.lru_cache(1024)(_digest)

"""Which weights a LoRA adapter has: vLLM hashes its name and path (0.29 only its name), and others may have both.

ray.serve.llm keeps every adapter under a path made of its name, whatever bucket it came from and however often it was
trained again; vLLM loads an adapter again in place. So the workers tell which weights they loaded, and the scheduler's
side names no chunk of an adapter before all of them did.
"""

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

log = logging.getLogger("raykv")

REST_NS = 2_000_000_000  # coarser than a file system's clock


class Adapter(NamedTuple):
    """An adapter as a worker loaded it. id: vLLM's. load: the number of that load. weights: a digest of its files."""

    id: int
    load: int
    weights: bytes


class Told(NamedTuple):
    """What a worker has loaded, by vLLM's ids. question: of the scheduler's, the last that this answers."""

    question: int
    adapters: dict[int, Adapter]


class ToldAdapters:
    """The scheduler's side: what all workers have loaded."""

    def __init__(self) -> None:
        self.question = 0  # the last that was asked
        self._told: dict[int, Told] = {}  # by rank

    def ask(self) -> int:
        """Have the workers tell what they have loaded after now. Returns the number of the question."""
        self.question += 1
        return self.question

    def tell(self, told: dict[int, Told]) -> None:
        """told: by rank."""
        self._told |= told

    def answered(self, question: int, ranks: int) -> bool:
        return len(self._told) == ranks and all(told.question >= question for told in self._told.values())

    def loaded(self, adapter: int) -> Adapter | None:
        """As all workers have it; None where they do not. adapter: vLLM's id."""
        found = {told.adapters.get(adapter) for told in self._told.values()}
        return found.pop() if len(found) == 1 else None


class Files(NamedTuple):
    """An adapter's, at one moment. stats: of each file what changes when it is written."""

    path: str
    stats: tuple[tuple[str, int, int, int, int], ...]

    @property
    def at_rest(self) -> bool:
        """Whether they were written so long ago that another write would show in `stats`."""
        return all(changed_ns < time.time_ns() - REST_NS for *_, changed_ns in self.stats)


class Loads:
    """What vLLM's manager of a worker's adapters loaded, and from which files."""

    def __init__(self) -> None:
        self._adapters: dict[int, Adapter] = {}
        self._latest: dict[int, int] = {}  # the number of each one's last load
        self._count = 0
        self._mutex = threading.Lock()

    def note(self, adapter: int, files: Files, before: bytes | None) -> None:
        """It has loaded an adapter. files, before: of just before, and their digest: both must be so now, too.

        Hashes files that were written just now again in a thread: hundreds of MB would hold up the engine's step.
        """
        load = self._begin(adapter, before)
        if before and files.at_rest and files_of(files.path) == files:
            self._take(Adapter(adapter, load, before))
            return
        arguments = (Adapter(adapter, load, before or b""), files.path)
        threading.Thread(target=self._check, args=arguments, name="raykv-adapter", daemon=True).start()

    def _begin(self, adapter: int, weights: bytes | None) -> int:
        """The number of this load: that of the last, if those were the same weights."""
        with self._mutex:
            last = self._adapters.pop(adapter, None)
            if last is None or last.weights != weights:
                self._count += 1
                self._latest[adapter] = self._count
            return self._latest[adapter]

    def _check(self, noted: Adapter, path: str) -> None:
        if not noted.weights or digest_of(files_of(path)) != noted.weights:
            log.warning("the LoRA adapter in %s can't be read, or changes: its KV is shared with no other engine", path)
            return
        self._take(noted)

    def _take(self, noted: Adapter) -> None:
        with self._mutex:
            if self._latest[noted.id] == noted.load:
                self._adapters[noted.id] = noted

    def known(self, ids: set[int]) -> dict[int, Adapter]:
        with self._mutex:
            return {id: adapter for id, adapter in self._adapters.items() if id in ids}


_loads: WeakKeyDictionary[WorkerLoRAManager, Loads] = WeakKeyDictionary()


class LoadedAdapters:
    """The worker's side: what it has loaded."""

    def __init__(self, config: Any) -> None:
        """config: vLLM's of LoRA, of this engine."""
        self._config = config
        self._last: Told | None = None
        if not hasattr(WorkerLoRAManager._load_adapter, "__wrapped__"):
            WorkerLoRAManager._load_adapter = _noting(WorkerLoRAManager._load_adapter)

    def has(self, adapter: Adapter | None) -> bool:
        """Whether the adapter is loaded as it was then. None: of a request for the model alone."""
        return adapter is None or self._now().get(adapter.id) == adapter

    def news(self, question: int) -> Told | None:
        """What the scheduler's side does not know yet. question: its last."""
        told = Told(question, self._now())
        if told == self._last:
            return None
        self._last = told
        return told

    def _now(self) -> dict[int, Adapter]:
        for manager, loads in _loads.items():
            if manager.lora_config is self._config:
                return loads.known(manager.list_adapters())
        return {}


def _noting(load: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's method that loads an adapter from its files, which tells nobody."""

    @functools.wraps(load)
    def noted(manager: WorkerLoRAManager, request: Any) -> Any:
        files = files_of(get_adapter_absolute_path(request.lora_path))
        before = digest_of(files)
        model = load(manager, request)
        _loads.setdefault(manager, Loads()).note(request.lora_int_id, files, before)
        return model

    return noted


def files_of(path: str) -> Files:
    """An adapter's files in a local folder; none if they can't be read. Opens each: NFS then asks its server."""
    stats = []
    with suppress(OSError):
        for file in sorted(Path(path).glob("adapter_*")):
            with file.open("rb") as opened:
                it = os.fstat(opened.fileno())
                stats.append((file.name, it.st_ino, it.st_size, it.st_mtime_ns, it.st_ctime_ns))
        return Files(path, tuple(stats))
    return Files(path, ())


def digest_of(files: Files) -> bytes | None:
    """Of an adapter's files: 32 bytes. None if they can't be read, or there are no weights among them."""
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

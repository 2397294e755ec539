"""Our manager under vLLM's tests. Answers that a test gives to its mock of a manager become contents of our pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import Future
from inspect import isfunction
from typing import Any
from unittest.mock import MagicMock

import numpy as np
from contract.pool import BLOCK_BYTES, MISSING, NODE, PENDING, READY, Content
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
    RequestOffloadState,
)
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    PrepareStoreOutput,
    get_offload_group_idx,
)

from raykv.integrations.vllm.chunks.chain import Chain
from raykv.integrations.vllm.chunks.chunks import ChunksToLoad, Origin
from raykv.integrations.vllm.connector import most_loaded
from raykv.integrations.vllm.identity.groups import groups_of
from raykv.integrations.vllm.scheduler.ask import Ask, Found
from raykv.integrations.vllm.scheduler.manager import RayKVManager
from raykv.integrations.vllm.worker.ranks import Rank
from raykv.protocol.location import KEY_BYTES

ANSWERS = {LookupResult.HIT: READY, LookupResult.HIT_PENDING: PENDING, LookupResult.MISS: MISSING}


class Now:
    """In place of a manager's threads: a look-up ends at once or, if `late`, when `end` is called."""

    def __init__(self) -> None:
        self.late = False
        self._begun: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        self._begun.append((answer, lambda: function(*arguments, **named)))
        if not self.late:
            self.end()
        return answer

    def end(self) -> None:
        for answer, call in self._begun:
            if answer.set_running_or_notify_cancel():
                answer.set_result(call())
        self._begun.clear()

    def shutdown(self, **_: Any) -> None:
        """There are no threads to end."""


class Manager(RayKVManager):
    """Our manager. says: by vLLM's key, the key's state in the pool at the next look-up; None: the real state."""

    content: Content  # sets the state of keys in the pool
    made = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        Manager.made += 1
        self._threads.shutdown()
        self._threads = self.now = Now()  # type: ignore[assignment]
        self.says: Callable[[bytes], int] | None = None
        self.taken: set[str] = set()  # requests that a test did not announce to our connector
        self.offered: dict[tuple[bytes, int], bytes] = {}  # the pool's keys of stored chunks, by (vLLM's key, part)

    def _find(self, caches: Any, ask: Ask, wait: bool) -> Found:
        each = [(group, part) for rank in self._ranks for group in self._groups for part in rank.parts]
        for (group, number), part in zip(each, self._parts(caches, ask), strict=True):
            for key, row in zip(ask.keys[group.group_idx], np.asarray(part.keys), strict=True):
                assert self.offered.get((key, number), row.tobytes()) == row.tobytes()  # the key it was stored by
                if self.says is not None:
                    self.content.set(row.tobytes(), self.says(key))
        return super()._find(caches, ask, wait)

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> PrepareStoreOutput:
        output = super().prepare_store(keys, req_context)
        groups = {group.place: group.group_idx for group in self._groups}
        for place, chunks in output.store_spec.places.items():
            of_group = [key for key in output.keys_to_store if get_offload_group_idx(key) == groups[place]]
            for part, rows in chunks.keys.items():
                split = [rows[at : at + KEY_BYTES] for at in range(0, len(rows), KEY_BYTES)]
                self.offered.update(zip(((key, part) for key in of_group), split, strict=True))
        return output


class Storing(Manager):
    """Our manager, whose stores show in the pool: pending at `prepare_store`, ready at `complete_store`."""

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> PrepareStoreOutput:
        take_up(self, req_context)
        output = super().prepare_store(keys, req_context)
        self._set(output.keys_to_store, PENDING)
        return output

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        take_up(self, req_context)
        return super().lookup(key, req_context)

    def complete_store(self, keys: Collection[bytes], req_context: Any, success: bool = True) -> None:
        self._set(keys, READY if success else MISSING)
        super().complete_store(keys, req_context, success)

    def _set(self, keys: Collection[bytes], state: int) -> None:
        for (key, _), row in self.offered.items():
            if key in keys:
                self.content.set(row, state)


class Method(MagicMock):
    """A mocked method of a manager. A test sets its answer, and `answer` turns it into our manager's."""

    answer: Any = None

    def _get_child_mock(self, **named: Any) -> MagicMock:
        return MagicMock(**named)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        said = super().__call__(*arguments, **named)
        return said if self.answer is None else self.answer(self, said, *arguments, **named)


class Told(MagicMock):
    """In place of vLLM's mock of a manager. Our manager answers, on a pool that has what the test's mock would have.

    Refused stores, and answers about a policy, events or the source of a load, stay the test's own.
    """

    def __init__(self, ours: Manager) -> None:
        super().__init__(spec=OffloadingManager)
        self.__dict__["ours"] = ours
        for name in OffloadingManager.__dict__:
            if not name.startswith("_"):
                method = Method()
                method.answer = getattr(self, f"_{name}", None) or self._told(name)
                setattr(self, name, method)

    def __getattr__(self, name: str) -> Any:
        """Attributes that only our manager has."""
        if name.startswith("_") or hasattr(OffloadingManager, name):
            return super().__getattr__(name)
        return getattr(self.__dict__["ours"], name)

    def _get_child_mock(self, **named: Any) -> MagicMock:
        return MagicMock(**named)

    def _told(self, name: str) -> Callable[..., Any]:
        def answer(_: Method, said: Any, *arguments: Any, **named: Any) -> Any:
            ours = getattr(self.ours, name)(*arguments, **named)
            return ours if isinstance(said, MagicMock) else said

        return answer

    def _lookup(self, method: Method, said: Any, key: bytes, req_context: Any) -> LookupResult:
        take_up(self.ours, req_context)
        by_key, now = method.side_effect, self.ours.now
        self.ours.says = lambda key: ANSWERS[by_key(key, req_context) if isfunction(by_key) else said]
        now.late = said is LookupResult.RETRY
        if not now.late:
            now.end()
        return self.ours.lookup(key, req_context)

    def _prepare_store(self, _: Method, said: Any, keys: Collection[bytes], req_context: Any) -> Any:
        if not isinstance(said, PrepareStoreOutput) or said.keys_to_store != list(keys):
            return said
        take_up(self.ours, req_context)
        req_context.get_state(RequestOffloadState).update_offload_keys()  # the scheduler does this in each step
        output = self.ours.prepare_store(keys, req_context)
        return PrepareStoreOutput(output.keys_to_store, type(said.store_spec)(output.keys_to_store), [])

    def load(self, keys: Collection[bytes], req_context: Any) -> Collection[bytes]:
        """Have our manager prepare a load. Returns the keys, after a check that all are leased."""
        take_up(self.ours, req_context)
        if req_context.req_id not in self.ours._asks:  # the test assumes an earlier look-up
            self.ours.says = lambda key: READY
            positions = map(req_context.get_offload_key_position, keys)
            req_context.get_state(Chain).most = max(filter(None, positions), default=None)
            assert {self.ours.lookup(key, req_context) for key in keys} == {LookupResult.HIT}
        load: ChunksToLoad = self.ours.prepare_load(keys, req_context)
        wanted = Counter(map(get_offload_group_idx, keys))
        for parts in load.ranks:
            leased: Counter[int] = Counter()
            for part in parts:
                (group,) = [group for group in self.ours._groups if group.place == part.place]
                leased[group.group_idx] += sum(len(piece.keys) // KEY_BYTES for piece in part.leased)
            assert leased == wanted
        return keys


def take_up(ours: Manager, req_context: Any) -> None:
    """Tell our manager of workers and a request in place of our connector, if the test has none or set other keys."""
    status = req_context.get_state(RequestOffloadState)
    if not ours.caches:
        groups = groups_of(status.config.kv_group_configs)
        ours.set_ranks([Rank(NODE, (0,), (BLOCK_BYTES,) * len(groups))], groups)
    each = zip(status.config.kv_group_configs, status.group_states, strict=True)
    keys = {group.group_idx: state.offload_keys for group, state in each}
    chain = req_context.get_state(Chain)
    if chain is None or any(chain.keys[index] is not of_group for index, of_group in keys.items()):
        req_context.set_state(Chain(keys, Origin(req_context.req_id)))
        ours.taken.add(req_context.req_id)


def limit(scheduler: OffloadingConnectorScheduler, status: RequestOffloadState) -> None:
    """Set the limit of a load before a look-up, in place of our connector, if the test has none."""
    ours = scheduler.manager.ours if isinstance(scheduler.manager, Told) else scheduler.manager
    if not isinstance(ours, Manager):
        return
    take_up(ours, status.req_context)
    if status.req_context.req_id in ours.taken:
        status.req_context.get_state(Chain).most = most_loaded(scheduler, status, status.num_locally_computed_tokens)

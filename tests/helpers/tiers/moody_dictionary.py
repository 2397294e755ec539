"""A tier in a dictionary, which waits, fails or answers nonsense as a test says."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from raykv.tiers import MARKER, Block


class Moody:
    """Blocks in a dict, and the faults that a user's tier might have."""

    def __init__(self) -> None:
        self.shared = True
        self.blocks: dict[bytes, tuple[bytes, bytes]] = {}
        self.calls: list[str] = []
        self.error: Exception | None = None
        self.open = threading.Event()  # calls that are to wait, wait for this
        self.open.set()
        self.answer: Callable[[list[Any]], Any] = lambda answers: answers
        self.refuses: Exception | None = None  # the error of every write
        self.before_read: Callable[[], object] = lambda: None
        self.after_read: Callable[[], object] = lambda: None
        self.buffers: list[int] = []

    def _enter(self, call: str) -> None:
        self.calls.append(call)
        assert self.open.wait(30)
        if self.error:
            raise self.error

    def _write(self, call: str) -> None:
        self._enter(call)
        if self.refuses:
            raise self.refuses

    def put_many(self, blocks: Sequence[Block]) -> list[bool]:
        self._write("put")
        self.blocks.update({key: (head, bytes(body)) for key, head, body in blocks})
        return self.answer([True] * len(blocks))  # type: ignore[no-any-return]

    def get_many(self, keys: Sequence[bytes], out: Sequence[memoryview]) -> list[bytes | None]:
        self.buffers += [np.frombuffer(body, np.uint8).__array_interface__["data"][0] for body in out if len(body)]
        self._enter("get")
        self.before_read()
        heads: list[bytes | None] = []
        for key, body in zip(keys, out, strict=True):
            head, found = self.blocks.get(key, (None, b""))
            heads.append(head if len(found) == len(body) else None)
            body[:] = found if len(found) == len(body) else bytes(len(body))
        self.after_read()
        return self.answer(heads)  # type: ignore[no-any-return]

    def delete_many(self, keys: Sequence[bytes]) -> None:
        self._write("delete")
        for key in keys:
            self.blocks.pop(key, None)

    def scan(self) -> Iterator[list[tuple[bytes, int]]]:
        for key, (_, body) in list(self.blocks.items()):
            self._enter("scan")
            yield [(key, len(body))] if key != MARKER else []

    def close(self) -> None: ...


class Timid(Moody):
    """A tier with room for a number of blocks, the marker among them."""

    room = 3

    def put_many(self, blocks: Sequence[Block]) -> list[bool]:
        fits = []
        for block in blocks:
            fits.append(block.key in self.blocks or len(self.blocks) < self.room)
            if fits[-1]:
                super().put_many([block])
        return fits

"""Tells routers which nodes have a prompt's blocks. A router asks the directory, but is not a client of the pool."""

import asyncio
import json
import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raykv.cluster import internal_kv
from raykv.cluster.internal_kv import Kept
from raykv.config import HEARTBEAT_S
from raykv.errors import RayKVError
from raykv.line.directory_line import ERRORS, DirectoryLine
from raykv.protocol.clients import Located
from raykv.system import sha256

log = logging.getLogger("raykv")

SHARE = 0.2  # maximum time that a router delays a request, as a fraction of the pool's deadline


class PrefixLookup:
    """Asks a pool's directory from an event loop. Keeps the announcements, which say how prompts become keys.

    After a late answer, callers get None at once. Meanwhile a background task asks the directory once a second, until
    an answer arrives in time. Not thread-safe.
    """

    def __init__(self, pool: str, model: str) -> None:
        """model: the name under which engines announce the model."""
        self.announced: dict[str, Any] | None = None  # how prompts become keys; None until it is known
        self._pool, self._model = pool, model
        self._others: dict[str, dict[str, Any]] = {}  # announcements by name
        self._wanted: set[str] = set()  # names requested since the last search
        self._line = DirectoryLine(pool)
        self._deadline = 0.0  # maximum seconds for a question, from the pool's settings
        self._answers = False  # whether the directory answered the last question in time
        self._search: asyncio.Task[None] | None = None

    def announced_of(self, other: str) -> dict[str, Any] | None:
        """Return the announcement for another name, such as a LoRA adapter's. None until a search finds it."""
        found = self._others.get(other)
        if found is None:
            self._wanted.add(other)
            self.look()
        return found

    def look(self) -> None:
        """Search for the directory and the announcements again, in the background. Until then, old ones are used."""
        if self._search is None or self._search.done():
            self._search = asyncio.get_running_loop().create_task(self._look())

    async def locate_prefix(self, keys: NDArray[np.uint8]) -> Located | None:
        """Find the longest ready prefix of `keys`, and how much of it each node has, by Ray node id.

        keys: (n, 16) uint8, at most KEYS_PER_CALL. Returns None if the directory does not answer in time.
        """
        if self._answers:
            try:
                return Located(*await self._line.acall("locate_prefix", keys.tobytes(), seconds=self._deadline))
            except ERRORS as error:
                log.info("pool %s: the directory did not answer a router: %r", self._pool, error)
                self._answers, self.announced = False, None
        self.look()
        return None

    async def _look(self) -> None:
        while True:
            try:
                wanted, self._wanted = {*self._others, *self._wanted}, set()
                announced, others = await asyncio.to_thread(self._find, wanted)
                await self._line.acall("locate_prefix", b"", seconds=self._deadline)
            except (*ERRORS, RayKVError):
                await asyncio.sleep(HEARTBEAT_S)
            else:
                self._answers, self.announced, self._others = True, announced, others
                return

    def _find(self, others: set[str]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Find the directory. Returns the model's announcement, and the announcements found for `others`.

        Raises ValueError if the pool, its directory or the model's announcement is missing.
        """
        settings = internal_kv.settings(self._pool)
        if settings is None:
            raise ValueError(f"there is no pool {self._pool!r}")
        self._deadline = SHARE * settings["deadline"]
        sha256.load()  # otherwise the event loop, which makes keys, would wait for the load
        announced = self._announced(self._model)
        if announced is None:
            raise ValueError(f"nobody has announced {self._model!r} in pool {self._pool!r}")
        if not self._line.find():
            raise ValueError(f"pool {self._pool!r} has no directory")
        return announced, {name: found for name in others if (found := self._announced(name)) is not None}

    def _announced(self, model: str) -> dict[str, Any] | None:
        value = internal_kv.get(self._pool, Kept.MODEL, model)
        return None if value is None else dict(json.loads(value))


def announce(pool: str, model: str, **fields: Any) -> None:
    """Announce in a pool how prompts of a model become keys, for a PrefixLookup.

    This replaces an earlier announcement. fields: JSON values.
    """
    internal_kv.put(pool, Kept.MODEL, json.dumps(fields).encode(), model)

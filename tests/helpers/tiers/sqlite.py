"""A tier as users write them: blocks in a database, registered under a scheme of its own."""

import sqlite3
import threading
from collections.abc import Iterator, Sequence

from raykv.tiers import MARKER, Block, TierUrl


class SqliteTier:
    shared = True

    def __init__(self, url: TierUrl) -> None:
        self._mutex = threading.Lock()
        self._data = sqlite3.connect(url.parts.path, timeout=60, check_same_thread=False, isolation_level=None)
        self._data.execute("PRAGMA journal_mode = WAL")
        self._data.execute("PRAGMA synchronous = OFF")
        self._data.execute("CREATE TABLE IF NOT EXISTS blocks (key BLOB PRIMARY KEY, head BLOB, body BLOB)")

    def put_many(self, blocks: Sequence[Block]) -> list[bool]:
        with self._mutex:
            self._data.execute("BEGIN IMMEDIATE")
            self._data.executemany("INSERT OR REPLACE INTO blocks VALUES (?, ?, ?)", blocks)
            self._data.execute("COMMIT")
        return [True] * len(blocks)

    def get_many(self, keys: Sequence[bytes], out: Sequence[memoryview]) -> list[bytes | None]:
        return [self._get(key, body) for key, body in zip(keys, out, strict=True)]

    def _get(self, key: bytes, out: memoryview) -> bytes | None:
        with self._mutex:
            found = self._data.execute("SELECT head, body FROM blocks WHERE key = ?", (key,)).fetchone()
        if found is None or len(found[1]) != len(out):
            return None
        out[:] = found[1]
        return bytes(found[0])

    def delete_many(self, keys: Sequence[bytes]) -> None:
        with self._mutex:
            self._data.executemany("DELETE FROM blocks WHERE key = ?", [(key,) for key in keys])

    def scan(self) -> Iterator[list[tuple[bytes, int]]]:
        with self._mutex:
            found = self._data.execute("SELECT key, length(body) FROM blocks ORDER BY rowid").fetchall()
        yield [(key, size) for key, size in found if key != MARKER]

    def close(self) -> None:
        with self._mutex:
            self._data.close()

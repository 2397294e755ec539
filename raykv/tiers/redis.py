"""Blocks in a redis or valkey server: a hash each, so that a body is sent out of the caller's memory, uncopied."""

import os
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import unquote

import redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, OutOfMemoryError, RedisError
from redis.retry import Retry

from raykv.tiers.pieces import pieces
from raykv.tiers.taken import Taken
from raykv.tiers.tier import HEAD_BYTES, MARKER, Block, TierUrl

TIMEOUT_S = 2.0  # to connect, and for each answer
READ_BYTES = 1 << 20
PIECE_BYTES = 16 << 20  # of a pipeline
BATCH = 1000  # keys of a scan


class RedisTier:
    """A server that all nodes reach. It evicts by itself where it is configured to; what is gone is a miss."""

    def __init__(self, url: TierUrl) -> None:
        """ValueError or OSError, saying what to change, where the server refuses or doesn't answer."""
        self.shared = url.shared is not False  # a server on every node's localhost is not
        self._prefix = f"raykv:{url.pool}:".encode()
        self._taken = Taken()
        self._client = _client(url)
        try:
            self._client.ping()
        except AuthenticationError as error:
            raise ValueError(
                f"external={url.text}: {error}: put user and password into the URL, or into RAYKV_REDIS_USERNAME and "
                f"RAYKV_REDIS_PASSWORD"
            ) from error
        except RedisError as error:
            raise OSError(f"external={url.text}: {error}: does a server run there that this user may use?") from error

    def put_many(self, blocks: Sequence[Block]) -> list[bool]:
        stored = []
        for part in pieces([block.body for block in blocks], PIECE_BYTES):
            with self._client.pipeline(transaction=False) as pipe:
                for block in blocks[part]:
                    pipe.hset(self._name(block.key), items=["h", block.head, "b", block.body])
                answers = pipe.execute(raise_on_error=False)
            stored += [self._stored(block, answer) for block, answer in zip(blocks[part], answers, strict=True)]
        return stored

    def _stored(self, block: Block, answer: Any) -> bool:
        if isinstance(answer, OutOfMemoryError):
            return False
        if isinstance(answer, Exception):
            raise answer
        if answer:  # fields that are new
            self._taken.add(HEAD_BYTES + block.body.nbytes)
        return True

    def get_many(self, keys: Sequence[bytes], out: Sequence[memoryview]) -> list[bytes | None]:
        heads: list[bytes | None] = []
        for part in pieces(out, PIECE_BYTES):
            with self._client.pipeline(transaction=False) as pipe:
                for key in keys[part]:
                    pipe.hmget(self._name(key), "h", "b")
                answers = pipe.execute()
            heads += [_unpack(answer, body) for answer, body in zip(answers, out[part], strict=True)]
        return heads

    def exists_many(self, keys: Sequence[bytes]) -> list[bool]:
        with self._client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.exists(self._name(key))
            return list(map(bool, pipe.execute()))

    def delete_many(self, keys: Sequence[bytes]) -> None:
        with self._client.pipeline(transaction=False) as pipe:
            for name in map(self._name, keys):
                pipe.hstrlen(name, "b")
                pipe.unlink(name)
            answers = pipe.execute()
        for size, gone in zip(answers[::2], answers[1::2], strict=True):
            if gone:
                self._taken.add(-HEAD_BYTES - size)

    def scan(self) -> Iterator[list[tuple[bytes, int]]]:
        """In no order; a block may come twice."""
        before, found = self._taken.bytes, 0
        cursor: int | None = None
        while cursor != 0:
            page: Any = self._client.scan(cursor or 0, self._prefix + 32 * b"[0-9a-f]", BATCH)
            cursor, names = page
            sizes = self._sizes(names)
            found += sum(HEAD_BYTES + size for size in sizes)
            keys = [bytes.fromhex(name[-32:].decode()) for name in names]
            batch = [(key, size) for key, size in zip(keys, sizes, strict=True) if size and key != MARKER]
            if batch:
                yield batch
        self._taken.add(found - before)

    def _sizes(self, names: Sequence[bytes]) -> list[int]:
        with self._client.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hstrlen(name, "b")
            return list(map(int, pipe.execute()))

    def usage(self) -> int:
        return self._taken.bytes

    def close(self) -> None:
        self._client.close()

    def _name(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()


def _client(url: TierUrl) -> redis.Redis:
    parts = url.parts
    database = parts.path.strip("/") or "0"
    if not parts.hostname or not database.isdecimal():
        raise ValueError(f"external={url.text}: write {url.scheme}://host:6379/0 (0: the database)")
    username = os.environ.get("RAYKV_REDIS_USERNAME") if parts.username is None else unquote(parts.username)
    password = os.environ.get("RAYKV_REDIS_PASSWORD") if parts.password is None else unquote(parts.password)
    return redis.Redis(
        parts.hostname,
        parts.port or 6379,
        int(database),
        username=username or None,
        password=password or None,
        ssl=url.scheme in ("rediss", "valkeys"),
        protocol=2,  # what every server knows, and all that is asked here
        socket_timeout=TIMEOUT_S,
        socket_connect_timeout=TIMEOUT_S,
        socket_read_size=READ_BYTES,
        retry=Retry(NoBackoff(), 0),
    )


def _unpack(answer: list[bytes | None], out: memoryview) -> bytes | None:
    head, body = answer
    if head is None or body is None or len(body) != out.nbytes:
        return None
    out[:] = body
    return head

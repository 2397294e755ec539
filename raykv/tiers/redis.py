"""Stores each block in redis or valkey, as a string of head and body. With a redis hash, the server would copy more."""

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import unquote

import redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, OutOfMemoryError, RedisError
from redis.retry import Retry

from raykv.tiers.base import HEAD_BYTES, MARKER, Block, TierUrl, pieces, unpacked
from raykv.tiers.strangers import Strangers

TIMEOUT_S = 2.0  # maximum time for connecting, and for each answer
READ_BYTES = 1 << 20
PIECE_BYTES = 8 << 20  # bytes of a pipeline: redis-py reads long answers more slowly
BATCH = 1000  # keys in each step of a scan
_DIGITS = re.compile(rb"[0-9a-f]{32}")  # hex digits of a block's key


class RedisTier:
    """A server that all nodes can reach. The server may evict blocks by itself; an evicted block is a miss."""

    def __init__(self, url: TierUrl) -> None:
        """Connect. Raises ValueError or OSError, whose text says what to change, if the server refuses or is silent."""
        self.shared = url.shared is not False  # shared=0: each node has its own server on localhost
        self._prefix = f"raykv:{url.pool}:".encode()
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
        if self._is_of_a_cluster():
            raise ValueError(
                f"external={url.text}: it is part of a Redis Cluster, and answers for some keys: give a server that "
                f"has cluster-enabled no, or a proxy of the cluster"
            )

    def _is_of_a_cluster(self) -> bool:
        try:
            found: Any = self._client.info("cluster")
            return bool(found.get("cluster_enabled"))
        except RedisError:  # this user has no permission, or a proxy can't answer
            return False

    def put_many(self, blocks: Sequence[Block]) -> list[bool]:
        stored: list[bool] = []
        for part in pieces([block.body for block in blocks], PIECE_BYTES):
            chunks = [chunk for block in blocks[part] for chunk in _commands(self._name(block.key), block)]
            stored += [answer is not None for answer in self._send(chunks, len(blocks[part]))]
        return stored

    def _send(self, chunks: list[bytes | memoryview], count: int) -> list[Any]:
        """Send `count` packed commands. Returns the commands' answers. An answer is None if the server had no room."""
        connection: Any = self._client.connection_pool.get_connection()
        try:
            connection.send_packed_command(chunks)
            return [_answer(connection) for _ in range(count)]
        except BaseException:
            connection.disconnect()  # otherwise later calls would read the remaining answers
            raise
        finally:
            self._client.connection_pool.release(connection)

    def get_many(self, keys: Sequence[bytes], out: Sequence[memoryview]) -> list[bytes | None]:
        heads: list[bytes | None] = []
        for part in pieces(out, PIECE_BYTES):
            with self._client.pipeline(transaction=False) as pipe:
                for key, body in zip(keys[part], out[part], strict=True):
                    # request one byte more than the record has, to notice a longer value without reading all of it
                    pipe.getrange(self._name(key), 0, HEAD_BYTES + body.nbytes)
                answers = _of_strings(pipe.execute(raise_on_error=False))
            heads += [unpacked(answer, body) for answer, body in zip(answers, out[part], strict=True)]
        return heads

    def get_heads(self, keys: Sequence[bytes]) -> list[bytes | None]:
        with self._client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.getrange(self._name(key), 0, HEAD_BYTES - 1)
            return [answer or None for answer in _of_strings(pipe.execute(raise_on_error=False))]

    def delete_many(self, keys: Sequence[bytes]) -> None:
        with self._client.pipeline(transaction=False) as pipe:
            for name in map(self._name, keys):
                pipe.unlink(name)
            pipe.execute()

    def scan(self) -> Iterator[list[tuple[bytes, int]]]:
        """Yield batches in no particular order. A block may be returned twice."""
        cursor, strangers = None, Strangers()
        while cursor != 0:
            page: Any = self._client.scan(cursor or 0, self._prefix + b"*", BATCH)
            cursor, names = page
            batch = []
            for name, size in zip(names, self._sizes(names), strict=True):
                digits = _DIGITS.fullmatch(name.removeprefix(self._prefix))
                key = bytes.fromhex(digits[0].decode()) if digits else None
                if key is None or size is None or (size < HEAD_BYTES + (key != MARKER)):
                    strangers.add(name.decode(errors="replace"))
                elif key != MARKER:
                    batch.append((key, size - HEAD_BYTES))
            if batch:
                yield batch
        strangers.warn("keys in its key space are no blocks of raykv")

    def _sizes(self, names: Sequence[bytes]) -> list[int | None]:
        """Return the length of each value: None if the value is not a string, 0 if it is empty or absent."""
        with self._client.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.strlen(name)
            return _of_strings(pipe.execute(raise_on_error=False))

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
        protocol=2,  # every server supports this protocol, and it is sufficient here
        socket_timeout=TIMEOUT_S,
        socket_connect_timeout=TIMEOUT_S,
        socket_read_size=READ_BYTES,
        retry=Retry(NoBackoff(), 0),
    )


def _commands(name: bytes, block: Block) -> tuple[bytes, memoryview, bytes]:
    """Return a SET command in the form in which it is sent. redis-py would join head and body, which copies both."""
    key = b"$%d\r\n%s\r\n" % (len(name), name)
    value = b"$%d\r\n%s" % (HEAD_BYTES + block.body.nbytes, block.head)
    return b"*3\r\n$3\r\nSET\r\n%s%s" % (key, value), block.body, b"\r\n"


def _answer(connection: Any) -> Any:
    try:
        return connection.read_response()
    except OutOfMemoryError:
        return None


def _of_strings(answers: list[Any]) -> list[Any]:
    """Return the answers, with None where the value is not a string and thus not a block. Raises any other error."""
    for error in answers:
        if isinstance(error, Exception) and not str(error).startswith("WRONGTYPE"):
            raise error
    return [None if isinstance(answer, Exception) else answer for answer in answers]

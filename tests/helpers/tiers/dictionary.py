"""A tier that a user may write: a dictionary for each URL."""

from collections.abc import Iterator, Sequence

from raykv.tiers import MARKER, Block, TierUrl

dict_stores: dict[str, dict[bytes, tuple[bytes, bytes]]] = {}


class DictTier:
    shared = False

    def __init__(self, url: TierUrl) -> None:
        self._blocks = dict_stores.setdefault(url.text, {})

    def put_many(self, blocks: Sequence[Block]) -> list[bool]:
        self._blocks.update({key: (head, bytes(body)) for key, head, body in blocks})
        return [True] * len(blocks)

    def get_many(self, keys: Sequence[bytes], out: Sequence[memoryview]) -> list[bytes | None]:
        return [self._get(key, view) for key, view in zip(keys, out, strict=True)]

    def _get(self, key: bytes, out: memoryview) -> bytes | None:
        head, body = self._blocks.get(key, (b"", b""))
        if not head or len(body) != len(out):
            return None
        out[:] = body
        return head

    def delete_many(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._blocks.pop(key, None)

    def scan(self) -> Iterator[list[tuple[bytes, int]]]:
        yield [(key, len(body)) for key, (_, body) in list(self._blocks.items()) if key != MARKER]

    def close(self) -> None:
        """There is nothing to close."""

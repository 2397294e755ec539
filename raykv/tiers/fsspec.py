"""Stores blocks as objects (head and body) in any file system that fsspec opens, such as s3, gs and abfs."""

import contextlib
import errno
import glob
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import fsspec

from raykv.tiers.base import HEAD_BYTES, MARKER, Block, TierUrl, batches, key_of, path_of, pieces, unpacked
from raykv.tiers.strangers import Strangers

PIECE_BYTES = 64 << 20  # bytes of the objects that are requested at the same time
AGES = ("mtime", "LastModified", "last_modified", "updated", "created")  # file systems' names for an object's time


class FsspecTier:
    """Objects at `<prefix>/ab/abcd...`. fsspec's configuration and the environment say how to reach the store.

    If the objects are plain files (sftp), a block is a miss while it is being stored again.
    """

    def __init__(self, url: TierUrl) -> None:
        """Open the tier. Raises ValueError or OSError, whose text says what to change, if the tier can't be written."""
        if url.parts.password is not None:
            raise ValueError(f"external={url.text}: give the password in fsspec's configuration, not in the URL")
        self.shared = url.scheme != "memory" if url.shared is None else url.shared
        where = f"{url.scheme}://{url.parts.netloc}{url.parts.path}"
        try:
            self._store, self._root = _open(where)
        except Exception as error:  # each file system has its own errors
            raise OSError(
                f"external={url.text}: {error!r}: name a bucket or folder that exists and may be written, and see "
                f"fsspec's documentation of {url.scheme!r} for how it finds address and credentials"
            ) from error

    def put_many(self, blocks: Sequence[Block]) -> list[bool]:
        stored: list[bool] = []
        for part in pieces([block.body for block in blocks], PIECE_BYTES):
            ok = self._put({self._path(key): b"".join((head, body)) for key, head, body in blocks[part]})
            stored += [ok] * len(blocks[part])
        return stored

    def _put(self, objects: dict[str, bytes]) -> bool:
        try:
            try:
                self._store.pipe(objects)
            except FileNotFoundError:  # this file system has folders, and one of them is missing
                for folder in {path.rpartition("/")[0] for path in objects}:
                    with contextlib.suppress(FileExistsError):
                        self._store.mkdir(folder, create_parents=False)
                self._store.pipe(objects)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._remove(list(objects))  # one of the objects may be cut short
            return False
        return True

    def get_many(self, keys: Sequence[bytes], out: Sequence[memoryview]) -> list[bytes | None]:
        heads: list[bytes | None] = []
        for part in pieces(out, PIECE_BYTES):
            # request one byte more than the record has, to notice a longer object
            found = self._read(keys[part], [HEAD_BYTES + body.nbytes + 1 for body in out[part]])
            heads += [unpacked(data, body) for data, body in zip(found, out[part], strict=True)]
        return heads

    def _read(self, keys: Sequence[bytes], lengths: list[int]) -> list[bytes | None]:
        """Return the first bytes of each object, at most `lengths`, or None if the object is absent."""
        # request a range even to read all bytes: without a range, s3fs first requests the size
        found: list[Any] = self._store.cat_ranges([self._path(key) for key in keys], 0, lengths)
        for data in found:
            if isinstance(data, Exception) and not isinstance(data, FileNotFoundError):
                raise data
        return [None if isinstance(data, FileNotFoundError) else data for data in found]

    def get_heads(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return self._read(keys, [HEAD_BYTES] * len(keys))

    def delete_many(self, keys: Sequence[bytes]) -> None:
        self._remove([self._path(key) for key in keys])

    def _remove(self, paths: list[str]) -> None:
        try:
            self._store.rm(paths)
        except FileNotFoundError:  # one object was missing, and `rm` may have left others
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    self._store.rm_file(path)

    def scan(self) -> Iterator[list[tuple[bytes, int]]]:
        ages, strangers = [], Strangers()
        for path, info in self._store.find(self._root, detail=True).items():
            key, size = key_of(path), info["size"] or 0
            if key is None and not path.removeprefix(self._root).startswith("/probe-"):  # a probe is no stranger
                strangers.add(path)
            elif key is not None and key != MARKER:
                ages.append((_age(info), key, max(0, size - HEAD_BYTES)))
        strangers.warn("objects under its prefix are no blocks of raykv")
        yield from batches([(key, size) for _, key, size in sorted(ages)])

    def close(self) -> None:
        """Do nothing: fsspec closes its connections when the file system is garbage-collected."""

    def _path(self, key: bytes) -> str:
        return f"{self._root}/{path_of(key)}"


def _open(where: str) -> tuple[Any, str]:
    """Open a file system, and write and remove a probe. Returns the file system, and the path in it."""
    # a cached listing soon becomes wrong, as other nodes write too
    store, path = fsspec.url_to_fs(where, use_listings_cache=False, skip_instance_cache=True)
    root = path.rstrip("/")
    if glob.has_magic(root):
        raise ValueError("fsspec would take '*' and '[' for patterns")
    probe = f"{root}/probe-{secrets.token_hex(8)}"
    store.pipe({probe: b"raykv"})
    store.rm_file(probe)
    return store, root


def _age(info: dict[str, Any]) -> str:
    """Return an object's time as text. Within one file system, these texts sort from old to new."""
    return next((str(info[name]) for name in AGES if name in info), "")

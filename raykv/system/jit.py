"""The decorator of every numba kernel, and the folder their machine code is kept in."""

import functools
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])


@functools.cache
def _folder() -> str:
    """A folder of these very sources (numba looks at one file's date, not at the kernels it calls), private to this
    user (numba unpickles what it finds there)."""
    sources = hashlib.sha256()
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        sources.update(path.read_bytes())  # of all: a kernel may use any file's constant
    base = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = os.path.join(base, f"raykv-{sources.hexdigest()[:16]}")
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        info = os.stat(folder)
        if (
            info.st_uid == os.getuid()
            and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            and os.access(folder, os.W_OK)
        ):
            return folder
    except OSError:
        pass
    return tempfile.mkdtemp(prefix="raykv-")


def kernel(function: F) -> F:
    """Compile `function` without the GIL, keeping the machine code for the next process.

    Kernels borrow their arrays and make none: without numba's reference counts (an atomic operation or two for every
    `c.rows`), touching takes a third of the time.
    """
    others = numba.config.CACHE_DIR  # read when a function is decorated; other libraries keep theirs
    numba.config.CACHE_DIR = _folder()
    try:
        return cast(F, numba.njit(cache=True, nogil=True, _nrt=False)(function))
    finally:
        numba.config.CACHE_DIR = others

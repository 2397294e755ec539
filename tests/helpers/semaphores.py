"""Semaphores that processes of vLLM leave in /dev/shm."""

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def removed() -> Iterator[None]:
    """At the end, remove those that were made meanwhile, by a process of vLLM that lived too shortly to be seen."""
    before = _semaphores()
    yield
    for path in _semaphores() - before:
        with contextlib.suppress(FileNotFoundError):  # its owner was faster
            if not _mapped(path):  # nor of somebody else who runs beside this
                path.unlink()


def _semaphores() -> set[Path]:
    return set(Path("/dev/shm").glob("sem.mp-*"))


def _mapped(path: Path) -> bool:
    """Whether a living process uses a file of shared memory, under whatever name it opened that."""
    inode = f" {path.stat().st_ino} "
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended
            if inode in maps.read_text():
                return True
    return False

"""Files that processes of vLLM leave in /dev/shm when they are killed."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

MADE = ("sem.mp-*", "psm_*", "*-cpushm_*")  # files of Python's multiprocessing, and of vLLM for an engine's ranks


@contextlib.contextmanager
def removed() -> Iterator[None]:
    """Afterwards remove files that were made meanwhile and that no process uses any more."""
    before = _files()
    try:
        yield
    finally:
        for path in _files() - before:
            with contextlib.suppress(FileNotFoundError):  # its owner has removed it
                if not mapped(path):  # another run on this machine may use it
                    path.unlink()


def _files() -> set[Path]:
    return {path for pattern in MADE for path in Path("/dev/shm").glob(pattern)}


def mapped(path: Path) -> bool:
    """Whether a living process maps a file of shared memory, whatever name it opened the file by."""
    inode = f" {path.stat().st_ino} "
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # the process has ended
            if inode in maps.read_text():
                return True
    return False

"""What processes of vLLM leave in /dev/shm when they are killed."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

MADE = ("sem.mp-*", "psm_*", "*-cpushm_*")  # by Python's multiprocessing, and by vLLM for ranks of one engine


@contextlib.contextmanager
def removed() -> Iterator[None]:
    """Remove files that were made meanwhile, and that nobody uses any more: of processes too short-lived to be seen."""
    before = _files()
    try:
        yield
    finally:
        for path in _files() - before:
            with contextlib.suppress(FileNotFoundError):  # its owner was faster
                if not mapped(path):  # nor of somebody else who runs beside this
                    path.unlink()


def _files() -> set[Path]:
    return {path for pattern in MADE for path in Path("/dev/shm").glob(pattern)}


def mapped(path: Path) -> bool:
    """Whether a living process uses a file of shared memory, under whatever name it opened that."""
    inode = f" {path.stat().st_ino} "
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended
            if inode in maps.read_text():
                return True
    return False

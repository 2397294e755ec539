"""Runs a part of a test in a child process. The child's death fails this test, and does not end all tests."""

import multiprocessing
import resource
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from raykv.system.jit import compile_all

DEADLINE_S = 60.0
MEMORY = 4 << 30  # bytes that a child may map beyond its parent's: more is a MemoryError
_fork = multiprocessing.get_context("fork")


def apart(function: Callable[..., Any], *args: Any, deadline: float = DEADLINE_S) -> Any:
    """Call function(*args) in a forked child. Returns the result, which must be picklable.

    AssertionError if the function raises, with its traceback; if the child dies, with its signal; if it is late.
    """
    for package in ("raykv.arena", "raykv.directory"):
        compile_all(package)  # in the parent, once: in a child it would count against the deadline
    ours, theirs = _fork.Pipe(duplex=False)
    child = _fork.Process(target=_run, args=(theirs, function, args), daemon=True)
    child.start()
    theirs.close()
    try:
        if not ours.poll(deadline):
            raise AssertionError(f"{function.__name__} is not done after {deadline:.0f} s")
        raised, answer = ours.recv()
    except EOFError:
        child.join()
        name = signal.Signals(-child.exitcode).name if child.exitcode and child.exitcode < 0 else child.exitcode
        raise AssertionError(f"{function.__name__} killed its process: {name}") from None
    finally:
        child.kill()
        child.join()
    assert not raised, f"in a process of its own:\n{answer}"
    return answer


def _run(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
    try:
        pipe.send((False, function(*args)))
    except BaseException:
        pipe.send((True, traceback.format_exc()))

"""What a signal's handler raises, at any moment that it can."""

import dis
import functools
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, ModuleType
from typing import Any


class Interrupted(BaseException):
    """What a signal's handler raises."""


@contextmanager
def interrupted_at(number: int, module: ModuleType) -> Iterator[list[str]]:
    """Raise Interrupted in a module's code, where a signal's handler may raise there for the number-th time from now.

    That is behind a call, at the begin of a function, and where a loop begins again. Yields where it was.
    """
    at: list[str] = []
    seen = itertools.count()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != module.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti in interruptible(frame.f_code) and next(seen) == number:
            at.append(f"{frame.f_code.co_qualname}, line {frame.f_lineno}")
            raise Interrupted
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield at
    except Interrupted:
        pass
    finally:
        sys.settrace(before)


@functools.cache
def interruptible(code: CodeType) -> set[int]:
    found = dis.get_instructions(code)
    checks = ("CALL", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD")
    return {after.offset for before, after in itertools.pairwise(found) if before.opname in checks}

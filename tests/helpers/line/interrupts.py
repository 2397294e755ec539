"""What a signal's handler raises, at any moment that it can."""

import dis
import functools
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, ModuleType
from typing import Any

CHECKED = ("CALL", "CALL_KW", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD")  # instructions that see to signals


class Interrupted(BaseException):
    """What a signal's handler raises."""


def interrupt(*_: Any) -> None:
    """A signal's handler."""
    raise Interrupted


@contextmanager
def interrupted_at(number: int, module: ModuleType) -> Iterator[list[str]]:
    """Raise Interrupted in a module's code, where a signal's handler may raise there for the number-th time from now.

    That is behind a call, at the begin of a function, and where a loop begins again. Yields where it was.
    """
    at: list[str] = []
    seen = itertools.count()

    def trace(frame: FrameType, _: str, __: Any) -> Any:
        if frame.f_code.co_filename != module.__file__:
            return None
        frame.f_trace_opcodes = True
        before = ""  # the instruction that was executed in this frame

        def step(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal before
            frame.f_trace_opcodes = True  # Python 3.13 takes no notice before a frame is traced
            if event == "opcode":
                if before in CHECKED and next(seen) == number:
                    at.append(f"{frame.f_code.co_qualname}, line {frame.f_lineno}")
                    raise Interrupted
                before = names(frame.f_code)[frame.f_lasti]
            return step

        return step

    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks here whether anybody wants them
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield at
    except Interrupted:
        pass
    finally:
        sys.settrace(before)


@functools.cache
def names(code: CodeType) -> dict[int, str]:
    """Of its instructions, by offset."""
    return {instruction.offset: instruction.opname for instruction in dis.get_instructions(code)}

"""Raises an error in a module, as a signal's handler would, at each moment at which a handler can run."""

import dis
import functools
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, ModuleType
from typing import Any

CHECKED = ("CALL", "CALL_KW", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD")  # Python runs handlers after these


class Interrupted(BaseException):
    """The error of a signal's handler."""


def interrupt(*_: Any) -> None:
    raise Interrupted


@contextmanager
def interrupted_at(number: int, module: ModuleType) -> Iterator[list[str]]:
    """Raise Interrupted in a module's code, at the number-th place from now where a signal's handler could raise.

    Such places are after a call, at the start of a function, and where a loop repeats. Yields a list of the place.
    """
    at: list[str] = []
    seen = itertools.count()

    def trace(frame: FrameType, _: str, __: Any) -> Any:
        if frame.f_code.co_filename != module.__file__:
            return None
        frame.f_trace_opcodes = True
        before = ""  # the last instruction that was executed in this frame

        def step(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal before
            frame.f_trace_opcodes = True  # Python 3.13 needs this set again once the frame is traced
            if event == "opcode":
                if before in CHECKED and next(seen) == number:
                    at.append(f"{frame.f_code.co_qualname}, line {frame.f_lineno}")
                    raise Interrupted
                before = names(frame.f_code)[frame.f_lasti]
            return step

        return step

    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks at this frame for whether opcodes are traced
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
    return {instruction.offset: instruction.opname for instruction in dis.get_instructions(code)}

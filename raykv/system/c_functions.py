"""C functions that kernels call: found in a library, called at an address."""

import ctypes
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_WORD = ir.IntType(64)


def address(library: ctypes.CDLL, *names: str) -> int:
    """Address of the first of these functions that the library, or a library that it links to, has. 0: none."""
    for name in names:
        if hasattr(library, name):
            return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
    return 0


@intrinsic  # type: ignore[untyped-decorator]
def call(typing_context: Any, function: Any, a: Any, b: Any, c: Any) -> Any:
    """In a kernel: call the C function at an address with three words. If it takes fewer, it ignores the rest."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_WORD, [_WORD] * 3)
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])

    return types.int64(types.int64, types.int64, types.int64, types.int64), generate

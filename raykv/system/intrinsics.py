"""Functions for kernels: processor instructions that numba lacks, and calls of C functions."""

import ctypes
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_BYTES, _NUMBER, _WORD = ir.IntType(8).as_pointer(), ir.IntType(32), ir.IntType(64)


def emit_prefetch(builder: Any, pointer: Any, writes: bool = False) -> None:
    """Emit a prefetch of the cache line at a pointer to bytes. The pointer need not be valid.

    See https://llvm.org/docs/LangRef.html#llvm-prefetch-intrinsic.
    """
    kind = ir.FunctionType(ir.VoidType(), [_BYTES, _NUMBER, _NUMBER, _NUMBER])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [pointer, _NUMBER(int(writes)), _NUMBER(3), _NUMBER(1)])


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(typing_context: Any, address: Any) -> Any:
    """Prefetch the cache line at an address, which need not be valid."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_prefetch(builder, builder.inttoptr(args[0], _BYTES))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def fence(typing_context: Any) -> Any:
    """A fence for all loads and stores, including the non-temporal stores of a copy that bypasses the caches."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


def address(library: ctypes.CDLL, *names: str) -> int:
    """Return the address of the first of `names` that the library or its dependencies define; 0 if none is defined."""
    for name in names:
        if hasattr(library, name):
            return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
    return 0


@intrinsic  # type: ignore[untyped-decorator]
def call(typing_context: Any, function: Any, a: Any, b: Any, c: Any) -> Any:
    """In a kernel, call the C function at an address with three words. The function may have fewer parameters."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_WORD, [_WORD] * 3)
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])

    return types.int64(types.int64, types.int64, types.int64, types.int64), generate

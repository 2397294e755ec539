"""Instructions of the processor for kernels: numba has no function for them."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_BYTES, _NUMBER = ir.IntType(8).as_pointer(), ir.IntType(32)


def emit_prefetch(builder: Any, pointer: Any, writes: bool = False) -> None:
    """Ask for the cache line at a pointer to bytes, without waiting. The pointer need not be valid.

    See https://llvm.org/docs/LangRef.html#llvm-prefetch-intrinsic.
    """
    kind = ir.FunctionType(ir.VoidType(), [_BYTES, _NUMBER, _NUMBER, _NUMBER])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [pointer, _NUMBER(int(writes)), _NUMBER(3), _NUMBER(1)])


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(typing_context: Any, address: Any) -> Any:
    """Ask for the cache line at an address, which need not be valid."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_prefetch(builder, builder.inttoptr(args[0], _BYTES))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def fence(typing_context: Any) -> Any:
    """A fence that no load or store passes, not even the non-temporal stores of a copy past the caches."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate

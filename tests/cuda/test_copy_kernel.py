"""The copy kernel, compiled by NVRTC with the headers of `raykv[gpu]`. Needs no GPU."""

import io
import re
import sys
from pathlib import Path

import pytest

from raykv.arena.gpu.copy_kernel import SOURCE, THREADS, UNIT

pytestmark = pytest.mark.wheels
TARGETS = (80, 90, 100)  # A100, H100, B200
REGISTERS = 64  # of a thread: with more, a multiprocessor (65,536 registers) holds one thread block instead of two


def compiled(target: str, method: str) -> tuple[bytes, str]:
    """(the kernel, the compiler's messages). method: "cubin" or "ptx"."""
    from cupy.cuda import compiler  # RawKernel would ask the driver for the target

    program = compiler._NVRTCProgram(SOURCE, "raykv_copy.cu", method=method)
    said = io.StringIO()
    made, _ = program.compile((*options(), f"-arch={target}", "--ptxas-options=-v"), said)
    return made, said.getvalue()


def options() -> tuple[str, ...]:
    """The compiler's options, as RawKernel makes them. RuntimeError if CuPy finds no headers of CUDA."""
    from cupy._core import core

    made: tuple[str, ...] = core.assemble_cupy_compiler_options((f"-DUNIT={UNIT}LL", f"-DTHREADS={THREADS}"))
    return made


def test_cupy_finds_cudas_headers_among_the_wheels() -> None:
    """CuPy looks there first, and then in a CUDA toolkit of the machine, which few machines have."""
    folders = [Path(option[2:]) for option in options() if option.startswith("-I")]
    assert all(folder.is_relative_to(sys.prefix) for folder in folders)
    assert any((folder / "cuda_fp16.h").exists() for folder in folders)


@pytest.mark.parametrize("target", TARGETS)
def test_the_kernel_keeps_to_its_registers(target: int) -> None:
    made, said = compiled(f"sm_{target}", "cubin")
    assert made.startswith(b"\x7fELF")
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in said
    (registers,) = re.findall(r"Used (\d+) registers", said)
    assert int(registers) <= REGISTERS
    assert "warning" not in said


@pytest.mark.parametrize("target", TARGETS)
def test_each_thread_has_four_loads_of_16_bytes_in_flight(target: int) -> None:
    """All four come before the first store, because a store might alias bytes that are still to be loaded."""
    made, _ = compiled(f"compute_{target}", "ptx")
    moves = re.findall(r"(ld|st)\.global\.cs\.(\S+)", made.decode())
    whole = [kind for kind, width in moves if width.startswith("v4")]
    run = "".join("L" if kind == "ld" else "S" for kind in whole)
    assert "LLLLSSSS" in run

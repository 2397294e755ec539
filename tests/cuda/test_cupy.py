"""The wheels of `raykv[gpu]`, without a GPU: CuPy has what raykv calls, and the stand-in takes what CuPy takes."""

import ast
import inspect
import json
import operator
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.arena.gpus import ON_HOST
from helpers.project.signatures import Package, Signature, signature

from docs.draw_imports import sources
from raykv.arena.gpu.device import visible
from raykv.transports import nccl_pair

pytestmark = pytest.mark.wheels
ROOT = Path(__file__).parents[2]
RUNTIME, DRIVER, NCCL = "cupy.cuda.runtime", "cupy.cuda.driver", "cupy.cuda.nccl"
COMMUNICATOR = f"{NCCL}.NcclCommunicator"
NAMED = {  # names in raykv's files, and the parts of CuPy that they stand for
    **dict.fromkeys(("cupy", "module", "cupy()", "cuda.cupy()", "self._cupy"), "cupy"),
    **dict.fromkeys(("nccl", "self._nccl"), NCCL),
    **dict.fromkeys(("comm", "self._comm"), COMMUNICATOR),
    **{"runtime": RUNTIME, "driver": DRIVER, "made": "cupy.RawKernel", "self._stream": "cupy.cuda.Stream.null"},
}
MODULES = ("cupy.cuda", RUNTIME, DRIVER, NCCL)


def users() -> Iterator[tuple[Path, ast.Module]]:
    """(file, syntax tree) of the files of raykv that use CuPy."""
    for _, file in sources():
        if "cupy" in (text := file.read_text()):
            yield file, ast.parse(text)


def of_cupy(node: ast.expr) -> str:
    """The CuPy name that an expression stands for; "" if it stands for none."""
    text = ast.unparse(node)
    for ours, theirs in NAMED.items():
        if text.startswith(f"{ours}."):
            return theirs + text.removeprefix(ours)
    return ""


def names(tree: ast.Module) -> set[str]:
    return {name for node in ast.walk(tree) if isinstance(node, ast.Attribute) and (name := of_cupy(node))}


def found(name: str) -> Any:
    """The object of a CuPy name. AttributeError if CuPy has no such name."""
    import cupy
    from cupy.cuda import nccl  # noqa: F401 - from now on an attribute of cupy.cuda

    return operator.attrgetter(name.removeprefix("cupy."))(cupy)


def taken(what: Any) -> Signature:
    """The signature of a function or class. For compiled ones the first line of the docstring has it."""
    if not (said := re.match(r"[\w.]+\((.*)\)", what.__doc__ or "")):
        given = [one for one in inspect.signature(what).parameters.values() if one.name != "self"]
        required = sum(one.default is inspect.Parameter.empty for one in given)
        return Signature(tuple(one.name for one in given), required)
    positional, _, keyword_only = said[1].partition(", *")
    words = [one for one in positional.split(", ") if one and one != "self"]
    names = tuple(re.split(r"[ *]", one.partition("=")[0])[-1] for one in words)
    keywords = tuple(one.partition("=")[0].split()[-1] for one in keyword_only.split(", ") if one)
    return Signature(names, sum("=" not in one for one in words), keywords)


def test_cupy_has_each_name_that_raykv_uses() -> None:
    used = {name for _, tree in users() for name in names(tree)}
    assert len(used) > 30
    for name in sorted(used):
        found(name)


def test_cupy_takes_each_call_of_raykv() -> None:
    calls = [
        (f"{file.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}", name.removesuffix(".__init__"), node)
        for file, tree in users()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and (name := of_cupy(node.func)) and not name.endswith("__new__")
    ]
    assert len(calls) > 30
    assert not [where for where, name, call in calls if taken(found(name)).refuses(call)]


@pytest.mark.parametrize("module", MODULES)
def test_the_stand_in_takes_no_more_than_cupy(module: str) -> None:
    """Tests without a GPU run on the stand-in: each call that it takes must be one that CuPy takes."""
    looked_at = 0
    for name, ours in stand_ins(module):
        try:
            theirs = taken(found(name))
        except AttributeError:  # only the stand-in has it, for tests to inject faults
            continue
        looked_at += 1
        assert len(ours.positional) <= len(theirs.positional), f"{name}: {ours} of {theirs}"
        assert ours.required >= theirs.required, f"{name}: {ours} of {theirs}"
    assert looked_at > 1


def stand_ins(module: str) -> Iterator[tuple[str, Signature]]:
    for node in Package(Path(ON_HOST)).module(module).body:
        if isinstance(node, ast.FunctionDef):
            yield f"{module}.{node.name}", signature(node, method=False)
        if isinstance(node, ast.ClassDef):
            for one in node.body:
                if isinstance(one, ast.FunctionDef) and (one.name == "__init__" or one.name[0] != "_"):
                    yield f"{module}.{node.name}.{one.name}".removesuffix(".__init__"), signature(one)


def test_the_stand_in_has_cupys_numbers() -> None:
    program = (
        "import importlib, json; print(json.dumps({f'{name}.{one}': value"
        f" for name in {(RUNTIME, NCCL)} for one, value in vars(importlib.import_module(name)).items()"
        " if type(value) is int and one[0] != '_'}))"
    )
    made = subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": ON_HOST}, capture_output=True, check=True)
    numbers = json.loads(made.stdout)
    shared = numbers.keys() & {name for _, tree in users() for name in names(tree)}
    assert {f"{RUNTIME}.memcpyDefault", f"{RUNTIME}.memoryTypeDevice", f"{NCCL}.NCCL_UINT8"} <= shared
    assert {name: found(name) for name in shared} == {name: numbers[name] for name in shared}


def test_without_a_driver_there_is_no_gpu_and_there_is_nccl() -> None:
    assert visible() == []
    assert nccl_pair.why_not() == ""
    assert len(nccl_pair.new_unique()) == 128


def test_cupys_errors_have_what_raykv_reads() -> None:
    assert found(f"{RUNTIME}.CUDARuntimeError")(2).status == 2
    assert issubclass(found(f"{RUNTIME}.CUDARuntimeError"), RuntimeError)
    with pytest.raises(ConnectionError, match="REMOTE_ERROR"), nccl_pair.translated():
        raise found(f"{NCCL}.NcclError")(6)
    for status, said in nccl_pair.UNNAMED.items():
        with pytest.raises(ConnectionError, match=said.partition(":")[0]), nccl_pair.translated():
            raise found(f"{NCCL}.NcclError")(status)

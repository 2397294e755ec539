"""What serves has all of its machine code: nobody's first call waits for a compiler."""

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import raykv.arena
import raykv.directory
from raykv.directory.kernels import index
from raykv.system import jit


def _modules(package: ModuleType) -> list[ModuleType]:
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    return [importlib.import_module(module.name) for module in found]


def _python(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls in what is not itself a kernel."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and any("kernel" in ast.unparse(how) for how in node.decorator_list):
            continue
        if isinstance(node, ast.Call):
            yield node
        yield from _python(node)


def _called(module: ModuleType) -> set[Any]:
    """The kernels that a module's Python calls."""
    found = set()
    for call in _python(ast.parse(Path(str(module.__file__)).read_text())):
        names = ast.unparse(call.func).split(".")
        if names[0] in vars(module) and len(names) <= 2:
            function = vars(module)[names[0]]
            function = getattr(function, names[1], None) if len(names) == 2 else function
            found.add(function if hasattr(function, "py_func") else None)
    return found - {None}


@pytest.mark.parametrize(("package", "at_least"), [(raykv.directory, 40), (raykv.arena, 15)])
def test_every_kernel_that_python_calls_is_on_the_list(package: ModuleType, at_least: int) -> None:
    called = set().union(*(_called(module) for module in _modules(package)))
    listed = {function for function, _ in jit.entries(package.__name__)}
    assert not {function.py_func.__name__ for function in called - listed}
    assert len(called) >= at_least


def test_a_kernel_on_the_list_is_not_compiled_for_other_arguments() -> None:
    jit.compile_all("raykv.directory")
    with pytest.raises(TypeError, match="No matching definition"):
        index.find("no columns", np.zeros((0, 2), np.uint64), np.zeros(0, np.int64))

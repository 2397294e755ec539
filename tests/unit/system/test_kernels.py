"""Processes that serve have compiled all kernels before, so no call waits for a compiler."""

import ast
import importlib
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import raykv.arena
import raykv.directory
import raykv.system
from raykv.directory.kernels import table
from raykv.system import jit


def _modules(package: ModuleType) -> list[ModuleType]:
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    return [importlib.import_module(module.name) for module in found]


def _python(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls in plain Python functions, not in kernels."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and any("kernel" in ast.unparse(how) for how in node.decorator_list):
            continue
        if isinstance(node, ast.Call):
            yield node
        yield from _python(node)


def _called(module: ModuleType) -> set[Any]:
    """The kernels that a module's plain Python functions call."""
    found = set()
    for call in _python(ast.parse(Path(str(module.__file__)).read_text())):
        names = ast.unparse(call.func).split(".")
        if names[0] in vars(module) and len(names) <= 2:
            function = vars(module)[names[0]]
            function = getattr(function, names[1], None) if len(names) == 2 else function
            found.add(function if hasattr(function, "py_func") else None)
    return found - {None}


@pytest.mark.parametrize(("package", "at_least"), [(raykv.directory, 40), (raykv.arena, 15), (raykv.system, 1)])
def test_every_kernel_that_python_calls_is_on_the_list(package: ModuleType, at_least: int) -> None:
    called = set().union(*(_called(module) for module in _modules(package)))
    listed = {function for function, _ in jit.entries(package.__name__)}
    assert not {function.py_func.__name__ for function in called - listed}
    assert len(called) >= at_least


def test_a_kernel_on_the_list_is_not_compiled_for_other_arguments() -> None:
    jit.compile_all("raykv.directory")
    with pytest.raises(TypeError, match="No matching definition"):
        table.find("no columns", np.zeros((0, 2), np.uint64), np.zeros(0, np.int64))


def _folder_without_home(tmp_path: Path, home: str = "/dev/null") -> subprocess.CompletedProcess[str]:
    """Run a process whose HOME is not a folder. It prints its folder for machine code, and may warn."""
    unset = {"NUMBA_CACHE_DIR", "XDG_CACHE_HOME"}
    env = {name: value for name, value in os.environ.items() if name not in unset}
    env |= {"HOME": home, "TMPDIR": str(tmp_path)}
    return _folder_in(tmp_path, env)


def _folder_in(tmp_path: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    code = "from raykv.system import jit; print(jit.cache_folder()[0])"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env, cwd=tmp_path
    )


@pytest.mark.parametrize("home", ["/dev/null", "~"])  # "~" stays "~" if this user is not in /etc/passwd
def test_without_a_home_all_processes_of_a_user_share_one_folder(tmp_path: Path, home: str) -> None:
    first, second = _folder_without_home(tmp_path, home), _folder_without_home(tmp_path, home)
    folder = Path(first.stdout.strip())
    assert second.stdout.strip() == str(folder) and folder.is_relative_to(tmp_path)
    assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o700
    assert str(folder) in first.stderr and home in first.stderr and not (tmp_path / "~").exists()


def test_a_shared_folder_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    shared = tmp_path / f"raykv-kernels-{os.getuid()}"
    shared.mkdir()
    shared.chmod(0o777)
    said = _folder_without_home(tmp_path)
    assert not Path(said.stdout.strip()).is_relative_to(shared) and str(shared) in said.stderr


@pytest.mark.parametrize(("mode", "used"), [(0o777, False), (0o770, False), (0o1777, True), (0o755, True)])
def test_a_folder_that_others_could_exchange_is_not_used(mode: int, used: bool, tmp_path: Path) -> None:
    """Code in that folder is unpickled, so other users must not be able to put code there."""
    parent = tmp_path / "parent"
    (parent / "caches").mkdir(parents=True)
    parent.chmod(mode)
    ran = _folder_in(tmp_path, {**os.environ, "NUMBA_CACHE_DIR": str(parent / "caches"), "TMPDIR": str(tmp_path)})
    assert Path(ran.stdout.strip()).is_relative_to(parent) == used
    assert used or str(parent) in ran.stderr


def test_a_link_on_the_way_is_resolved_before_the_folder_is_checked(tmp_path: Path) -> None:
    """A user who can write beside the link could point it elsewhere later."""
    (tmp_path / "team").mkdir()
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "team" / "caches").symlink_to(tmp_path / "mine")
    (tmp_path / "team").chmod(0o777)
    ran = _folder_in(tmp_path, {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "team" / "caches")})
    assert Path(ran.stdout.strip()).is_relative_to(tmp_path / "mine")


@pytest.mark.parametrize("of", ["numba.__version__", "sys.implementation.cache_tag"])
def test_another_numba_or_python_has_a_folder_of_its_own(of: str, tmp_path: Path) -> None:
    """In a shared folder each would overwrite the other's code, and compile at every start."""
    change = f"import numba, sys; {of} = 'another'; from raykv.system import jit; print(jit.cache_folder()[0])"
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", change], capture_output=True, text=True, check=True, env=env)
    assert Path(ran.stdout.strip()).parent == tmp_path
    assert Path(ran.stdout.strip()).name != Path(jit.cache_folder()[0]).name


def test_of_processes_that_start_together_one_compiles(tmp_path: Path) -> None:
    code = """
import sys
from raykv.system import jit, sha256
kernels = [function for function, _ in jit.entries("raykv.system")]
print("ready", flush=True)
sys.stdin.readline()
jit.compile_all("raykv.system")
print(sum(sum(kernel.stats.cache_misses.values()) for kernel in kernels))
"""
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    processes = [subprocess.Popen(command, stdin=-1, stdout=-1, env=env, text=True) for _ in range(3)]
    for process in processes:
        assert process.stdout and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()
    compiled = sorted(int(process.communicate()[0]) for process in processes)
    assert compiled == [0, 0, len(jit.entries("raykv.system"))]


def test_processes_that_compile_leave_the_working_folder_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have another raykv, whose kernels nobody here would find."""
    package = tmp_path / "raykv"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('this is another raykv')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(jit, "KERNELS_PER_PROCESS", 1)
    [kernel] = [jit._name(function) for function, _ in jit.entries("raykv.system")]
    seen = list[tuple[int, int]]()
    jit._compile_in_processes([kernel, kernel], lambda done, kernels: seen.append((done, kernels)))
    assert seen == [(1, 2), (2, 2)]

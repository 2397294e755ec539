"""Signatures and members of a Python package's classes, read from its sources without an import."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Signature:
    """The parameters of a function without `self`. required: how many of `positional` have no default."""

    positional: tuple[str, ...]
    required: int
    keyword_only: tuple[str, ...] = ()
    star: bool = False
    kwargs: bool = False

    def lacks(self, theirs: Signature) -> list[str]:
        """Arguments that a caller of `theirs` may give, and that this signature does not take, in words."""
        wrong = []
        for i, name in enumerate(theirs.positional):
            if i >= len(self.positional):
                if not self.star:
                    wrong.append(f"takes no {name}")
            elif self.positional[i] != name:
                wrong.append(f"calls {name} {self.positional[i]}")
        known = {*self.positional, *self.keyword_only}
        wrong += [f"takes no {name}" for name in theirs.keyword_only if name not in known and not self.kwargs]
        wrong += ["takes no *args"] * (theirs.star and not self.star)
        wrong += ["takes no **kwargs"] * (theirs.kwargs and not self.kwargs)
        wrong += [f"needs {name}" for name in self.positional[len(theirs.positional) : self.required]]
        return wrong

    def refuses(self, call: ast.Call) -> bool:
        """Whether the arguments of a call don't fit."""
        if any(isinstance(one, ast.Starred) for one in call.args) or any(one.arg is None for one in call.keywords):
            return False
        named = {str(one.arg) for one in call.keywords}
        given = {*self.positional[: len(call.args)], *named}
        too_many = len(call.args) > len(self.positional) and not self.star
        unknown = named - {*self.positional, *self.keyword_only} and not self.kwargs
        return bool(too_many or unknown or set(self.positional[: self.required]) - given)


class Package:
    def __init__(self, folder: Path) -> None:
        """folder: the folder that contains the package's folder."""
        self.folder = folder

    def __str__(self) -> str:
        return str(self.folder)

    @functools.cache  # noqa: B019 - lives as long as the tests
    def module(self, name: str) -> ast.Module:
        """The syntax tree of a module; FileNotFoundError if there is no such module."""
        path = self.folder / name.replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        return ast.parse(file.read_text())

    def defines(self, module: str, name: str) -> bool:
        """Whether `from module import name` works, as far as the source shows."""
        path = self.folder / module.replace(".", "/") / name
        if path.is_dir() or path.with_suffix(".py").exists():
            return True
        return name in set(_names(self.module(module)))

    def mro(self, module: str, name: str) -> list[ast.ClassDef]:
        """A class and all its bases in the same package, depth first."""
        tree = self.module(module)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name == name:
                bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
                return [node, *(one for base in bases for one in self.mro(module, base))]
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
                own = str(node.module).partition(".")[0] == module.partition(".")[0]
                return self.mro(str(node.module), name) if own else []
        return []

    def methods(self, module: str, name: str) -> dict[str, Function]:
        """All methods of a class, by name. An inherited method is that of the nearest base."""
        found: dict[str, Function] = {}
        for node in self.mro(module, name):
            for one in node.body:
                if isinstance(one, Function):
                    found.setdefault(one.name, one)
        return found

    def made(self, module: str, name: str) -> Signature:
        if function := self.methods(module, name).get("__init__"):
            return signature(function)
        fields = [one for node in reversed(self.mro(module, name)) for one in node.body]
        own = [one for one in fields if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)]
        own = [one for one in own if "init=False" not in ast.unparse(one)]
        names = tuple(one.target.id for one in own if isinstance(one.target, ast.Name))
        return Signature(names, sum(one.value is None for one in own))

    def has(self, module: str, name: str, attribute: str) -> bool:
        """Whether a class or its objects have an attribute, as far as the source shows."""
        for node in self.mro(module, name):
            for one in ast.walk(node):
                if isinstance(one, Function) and one.name == attribute:
                    return True
                targets = one.targets if isinstance(one, ast.Assign) else [getattr(one, "target", None)]
                for target in targets:
                    if isinstance(target, ast.Name) and target.id == attribute:
                        return True
                    if isinstance(target, ast.Attribute) and ast.unparse(target) == f"self.{attribute}":
                        return True
        return False


def signature(function: Function, method: bool = True) -> Signature:
    """The signature of a method, or with method=False of a module's function."""
    of = function.args
    static = not method or any(ast.unparse(one) == "staticmethod" for one in function.decorator_list)
    positional = [one.arg for one in (*of.posonlyargs, *of.args)][0 if static else 1 :]
    required = max(0, len(positional) - len(of.defaults))
    keyword_only = tuple(one.arg for one in of.kwonlyargs)
    return Signature(tuple(positional), required, keyword_only, of.vararg is not None, of.kwarg is not None)


def is_abstract(function: Function) -> bool:
    """Whether the method is abstract: a class that has it can't be made."""
    return any("abstract" in ast.unparse(one) for one in function.decorator_list)


def _names(tree: ast.Module) -> Iterator[str]:
    """All names of a module, defined there or imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | Function):
            yield node.name
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id

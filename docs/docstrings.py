"""Lets mkdocstrings read this project's docstrings, where a line `name: ...` describes an argument or a field."""

import re

import griffe

ARGUMENT = re.compile(r"^(\w+(?:, \w+)*): (?=\S)")


def as_markdown(docstring: str) -> str:
    """Return a docstring as Markdown. Lines that begin with `name: `, and their continuations, become a list.

    A line that is not indented ends the list if the line before it ends a sentence.
    """
    lines: list[str] = []
    in_list = False
    for line in docstring.splitlines():
        if ARGUMENT.match(line):
            lines += [] if in_list else [""]
            line, in_list = ARGUMENT.sub(r"- **\1**: ", line, count=1), True
        elif in_list and line and not line.startswith(" "):
            in_list = not lines[-1].endswith(".")
            line = f"  {line}" if in_list else f"\n{line}"
        lines.append(line)
    return "\n".join(lines)


class Docstrings(griffe.Extension):
    """The extension that mkdocs.yml gives to mkdocstrings."""

    def on_package(self, *, pkg: griffe.Module, **_: object) -> None:
        self._rewrite(pkg)

    def _rewrite(self, found: griffe.Object) -> None:
        if found.docstring:
            found.docstring.value = as_markdown(found.docstring.value)
        for member in found.members.values():
            if isinstance(member, griffe.Object):
                self._rewrite(member)

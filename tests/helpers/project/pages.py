"""The Markdown pages of this repository, and the code in them."""

import re
from pathlib import Path
from typing import Any, NamedTuple

from helpers.faces.shell import typed

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"(?ms)^(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$")


class Code(NamedTuple):
    """A fenced block. reason: why the block is not run; "" if it is run."""

    page: Path
    line: int
    language: str
    text: str
    reason: str


def codes(page: Path) -> list[Code]:
    """The fenced blocks of a page, in order."""
    content = page.read_text()
    return [
        Code(page, content.count("\n", 0, match.start("text")), match["language"], match["text"], match["reason"] or "")
        for match in FENCE.finditer(content)
    ]


def run(page: Path, replaced: dict[str, str], environment: dict[str, str], folder: Path) -> dict[str, Any]:
    """Run a page from top to bottom. Its Python blocks share a namespace, which is returned.

    replaced: texts in the blocks to replace, and by what. environment, folder: of the shell blocks.
    """
    namespace: dict[str, Any] = {"__name__": "page"}
    for code in codes(page):
        text = code.text
        for written, meant in replaced.items():
            text = text.replace(written, meant)
        if code.reason:
            continue
        if code.language == "python":  # blank lines put it at its line of the page, for tracebacks
            exec(compile("\n" * code.line + text, str(page), "exec"), namespace)
        elif code.language == "sh":
            typed(text, folder, **environment)
    return namespace

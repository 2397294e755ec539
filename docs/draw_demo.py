"""Runs `raykv demo` on this machine, and draws its output as `docs/images/demo.svg`.

python -m docs.draw_demo
"""

import re
import sys
from functools import partial
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from raykv.cli import demo

PICTURE = Path(__file__).parent / "images/demo.svg"
REQUESTS, NODES, SEED = 12, 2, 0  # the defaults of `raykv demo`
FONTS = re.compile(r"@font-face \{\{.*?\n    \}\}\n", re.S)  # a viewer would load rich's fonts from the network


def main() -> int:
    consoles: list[Console] = []

    def recorder(*, stderr: bool) -> Console:
        consoles.append(Console(stderr=stderr, record=True, width=76))
        return consoles[-1]

    setattr(demo, "Console", recorder)  # noqa: B010 - so that mypy lets a class be replaced
    equal = demo.run(REQUESTS, NODES, SEED, as_json=False)
    export = partial(consoles[0].export_svg, title="make demo", unique_id="demo")
    PICTURE.write_text(export(code_format=FONTS.sub("", CONSOLE_SVG_FORMAT)), encoding="utf-8")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())

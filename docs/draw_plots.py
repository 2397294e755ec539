"""Draws the plots of `docs/benchmarks.md` and `docs/scale.md` from `docs/plots/figures.json`.

    python -m docs.draw_plots

A bar reaches to the highest value that was seen, its dark part to the lowest.
"""

import json
from pathlib import Path
from typing import Any

from docs import svg

FOLDER = Path(__file__).parent / "plots"
LABELS, BARS, VALUES, ROW = 290, 380, 110, 24  # pixels
DARK, LIGHT = "#1d4ed8", "#93c5fd"


def draw(plot: dict[str, Any]) -> str:
    """plot: `title`, `unit`, `bars` of (label, lowest, highest), and perhaps the value of a `line`."""
    scale = BARS / max(high for _, _, high in plot["bars"])
    width, height = LABELS + BARS + VALUES, 50 + ROW * len(plot["bars"])
    shapes = [svg.text(14, 24, plot["title"], size=14, bold=True)]
    if "line" in plot:
        x = LABELS + plot["line"] * scale
        shapes.append(svg.line(x, 36, x, height - 6))
    for i, (label, low, high) in enumerate(plot["bars"]):
        y = 40 + ROW * i
        value = f"{low:,g}" if low == high else f"{low:,g} to {high:,g}"
        shapes += [
            svg.text(LABELS - 10, y + 14, label, anchor="end"),
            svg.rect(LABELS, y + 3, high * scale, ROW - 8, LIGHT),
            svg.rect(LABELS, y + 3, low * scale, ROW - 8, DARK),
            svg.text(LABELS + high * scale + 6, y + 14, f"{value} {plot['unit']}"),
        ]
    return svg.document(width, height, shapes)


def draw_all() -> dict[Path, str]:
    """The plots, by the file that each belongs in."""
    return {
        FOLDER / plot["file"]: draw(plot) for plot in json.loads((FOLDER / "figures.json").read_text(encoding="utf-8"))
    }


if __name__ == "__main__":
    for path, picture in draw_all().items():
        path.write_text(picture, encoding="utf-8")

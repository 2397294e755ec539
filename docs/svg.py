"""SVG shapes for the pictures of these pages."""

from collections.abc import Iterable
from html import escape

INK, FAINT, PAPER = "#1f2937", "#9ca3af", "#ffffff"
FONT = "Helvetica, Arial, DejaVu Sans, sans-serif"


def document(width: float, height: float, shapes: Iterable[str]) -> str:
    """Return a whole SVG file with a white background. width, height: size in pixels."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" font-family="{FONT}">'
    )
    return "\n".join([head, rect(0, 0, width, height, PAPER, radius=8), *shapes, "</svg>", ""])


def rect(x: float, y: float, width: float, height: float, fill: str, *, radius: float = 2, stroke: str = "none") -> str:
    """A filled rectangle. x, y: its upper left corner."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" fill="{fill}" '
        f'stroke="{stroke}"/>'
    )


def text(
    x: float, y: float, words: str, *, size: float = 12, fill: str = INK, anchor: str = "start", bold: bool = False
) -> str:
    """A line of text. y: its baseline. anchor: which point of the line is at x: "start", "middle" or "end"."""
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{fill}" text-anchor="{anchor}"{weight}>'
        f"{escape(words)}</text>"
    )


def line(x1: float, y1: float, x2: float, y2: float, stroke: str = FAINT) -> str:
    """A thin straight line."""
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{stroke}"/>'


def arrow(x1: float, y1: float, x2: float, y2: float, stroke: str = FAINT) -> str:
    """A curve that leaves (x1, y1) and arrives at (x2, y2) vertically, with a head."""
    middle = (y1 + y2) / 2
    tip = 6 if y2 > y1 else -6
    return (
        f'<path d="M{x1:g},{y1:g} C{x1:g},{middle:g} {x2:g},{middle:g} {x2:g},{y2 - tip:g}" fill="none" '
        f'stroke="{stroke}" stroke-width="1.4"/>'
        f'<path d="M{x2 - 4:g},{y2 - tip:g} L{x2 + 4:g},{y2 - tip:g} L{x2:g},{y2:g} Z" fill="{stroke}"/>'
    )

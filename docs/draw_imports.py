"""Draws `docs/images/imports.svg`: which folder of raykv imports which, read from the sources.

    python -m docs.draw_imports

Every folder is drawn above all folders that it imports. Arrows that follow from other arrows are left out. Folders must
not import each other; if they do, the imports are drawn in red.
"""

import ast
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from docs import svg

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs/images/imports.svg"
BOX, GAP, FLOOR = (178, 74), (18, 38), 74 + 38  # pixels
RED, BLUE = "#dc2626", "#eff6ff"
Graph = dict[str, set[str]]


def sources() -> Iterator[tuple[str, Path]]:
    """Yield (dotted name, file) of every module of the package."""
    for base, prefix in ((ROOT / "raykv", "raykv"), (ROOT / "actors", "raykv.actors")):
        for path in sorted(base.rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            yield ".".join([prefix, *(part for part in parts if part != "__init__")]), path


def folder_of(module: str) -> str:
    """Return the folder of a module: `client` for raykv.client.cache, `keys` for raykv.keys."""
    return module.split(".")[1]


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield everything that a module imports, including imports in functions and under TYPE_CHECKING."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def graph() -> Graph:
    """Return the imported folders of each folder. A file that imports `raykv` imports all that `raykv` imports."""
    modules = dict(sources())
    public = _folders_of(modules.pop("raykv"), modules, set())
    edges: Graph = {folder_of(name): set() for name in modules}
    for name, path in modules.items():
        edges[folder_of(name)] |= _folders_of(path, modules, public) - {folder_of(name)}
    return edges


def _folders_of(path: Path, modules: dict[str, Path], public: set[str]) -> set[str]:
    """Return the folders that a file imports. public: the folders that count as imported by `import raykv`."""
    found: set[str] = set()
    for target in imported(ast.parse(path.read_text(encoding="utf-8"))):
        while target not in modules and "." in target:
            target = target.rpartition(".")[0]
        if target == "raykv":
            found |= public
        elif target in modules:
            found.add(folder_of(target))
    return found


def reachable(edges: Graph, start: str) -> set[str]:
    """Return all folders that `start` imports, directly or indirectly. `start` itself counts only in a cycle."""
    found: set[str] = set()
    todo = list(edges[start])
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += edges[name]
    return found


def floors(edges: Graph) -> dict[str, int]:
    """Return each folder's level: 0 if it imports nothing, else one above the highest level that it imports.

    The folders of a cycle have the same level.
    """
    reached = {name: reachable(edges, name) for name in edges}
    circle = {name: frozenset({name, *(n for n in reached[name] if name in reached[n])}) for name in edges}

    def floor(ring: frozenset[str]) -> int:
        return max((1 + floor(circle[t]) for name in ring for t in edges[name] if t not in ring), default=0)

    return {name: floor(circle[name]) for name in edges}


def drawn(edges: Graph) -> Iterator[tuple[str, str]]:
    """Yield the imports that do not follow from other imports."""
    for name, targets in edges.items():
        for target in targets:
            others = targets - {target}
            if not any(target in reachable(edges, other) for other in others if name not in reachable(edges, other)):
                yield name, target


def purpose(folder: str) -> str:
    """Return the first sentence of the docstring of a folder or module."""
    name = f"raykv.{folder}"
    doc = ast.get_docstring(ast.parse(dict(sources())[name].read_text(encoding="utf-8"))) or ""
    return doc.split("\n\n")[0].replace("\n", " ").replace("`", "").split(". ")[0].rstrip(".")


def draw() -> str:
    edges, rows = graph(), defaultdict(list)
    level = floors(edges)
    for name in sorted(edges):
        rows[level[name]].append(name)
    top, widest = max(rows), max(map(len, rows.values()))
    width = widest * (BOX[0] + GAP[0]) + GAP[0]
    places: dict[str, tuple[float, float]] = {}
    for number, names in rows.items():
        left = (width - len(names) * (BOX[0] + GAP[0]) + GAP[0]) / 2
        for i, name in enumerate(names):
            places[name] = left + i * (BOX[0] + GAP[0]), 20 + (top - number) * FLOOR
    shapes = [_edge(places, name, target, level) for name, target in sorted(drawn(edges))]
    shapes += [shape for name, place in sorted(places.items()) for shape in _box(name, *place)]
    return svg.document(width, 20 + (top + 1) * FLOOR - GAP[1] + 20, shapes)


def _edge(places: dict[str, tuple[float, float]], name: str, target: str, level: dict[str, int]) -> str:
    (x1, y1), (x2, y2) = places[name], places[target]
    if level[name] == level[target]:
        return svg.arrow(x1 + BOX[0] / 2, y1 + BOX[1], x2 + BOX[0] / 2, y2, RED)
    return svg.arrow(x1 + BOX[0] / 2, y1 + BOX[1], x2 + BOX[0] / 2, y2)


def _box(name: str, x: float, y: float) -> Iterator[str]:
    is_folder = not (ROOT / f"raykv/{name}.py").exists()
    yield svg.rect(x, y, *BOX, BLUE if is_folder else svg.PAPER, radius=6, stroke=svg.FAINT)
    yield svg.text(x + 10, y + 19, f"{name}/" if is_folder else f"{name}.py", size=13, bold=True)
    lines = textwrap.wrap(purpose(name), 32, max_lines=3, placeholder=" ...")
    for i, words in enumerate(lines):
        yield svg.text(x + 10, y + 36 + 13 * i, words, size=10)


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")

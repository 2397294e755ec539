"""README.md and the pages of docs/: all that they show, name and link to exists, and the pages build."""

import ast
import dataclasses
import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.project.pages import PAGES, ROOT, codes

import raykv
from docs import draw_imports, draw_plots, hooks, tables, write_deadlines
from raykv.cli.main import main
from raykv.tiers import MARKER, Block, parse

RUN = {"README.md", "getting-started.md", "engines.md", "tiers.md", "quotas.md", "operations.md", "scheduling.md"}
NAMED = re.compile(r"`((?:\w+/)*\w+\.(?:py|md|sh|json))(?:: ([\w.]+(?:, [\w.]+)*))?`")
BOX = 90  # characters
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
IDS = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_block_is_run_or_says_why_not(page: Path) -> None:
    found = codes(page)
    assert page.read_text().count("\n```") == 2 * len(found), "a fence without a language, or not at the left margin"
    to_run = [code for code in found if not code.reason and code.language != "text"]
    assert {code.language for code in to_run} <= {"python", "sh"}
    assert not to_run or page.name in RUN, "name it in RUN, or say `<!-- not run: why -->`"


@pytest.mark.parametrize("folder", ["directory", "pool", "cluster"])
def test_the_example_of_a_test_is_one(folder: str) -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    file, text = next(
        re.finditer(rf"<!-- not run: the file (tests/{folder}/[\w/]+\.py) -->\n```python\n(.*?)```\n", page, re.S)
    ).groups()
    assert (ROOT / file).read_text() == text


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_no_line_of_a_command_runs_out_of_its_box(page: Path) -> None:
    lines = [line for code in codes(page) if code.language == "sh" for line in code.text.splitlines()]
    assert not [line for line in lines if len(line) > BOX], "put the comment on a line of its own"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_file_and_name_exists(page: Path) -> None:
    missing = []
    for path, members in NAMED.findall(page.read_text()):
        file = next((base / path for base in (ROOT, ROOT / "raykv", ROOT / "docs") if (base / path).exists()), None)
        if file is None:
            missing += [path] if "/" in path else []
            continue
        known = defined(file) if members else set()
        missing += [f"{path}: {name}" for name in members.split(", ") if members and name not in known]
    assert not missing, "\n".join(missing)


@functools.cache
def defined(file: Path) -> set[str]:
    """Names of a module's functions, classes and variables, and of class members as `Class.member`."""
    names = set()
    tree = ast.parse(file.read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    scopes: list[tuple[str, ast.AST]] = [("", tree), *((f"{found.name}.", found) for found in classes)]
    for prefix, node in scopes:
        for child in ast.walk(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(prefix + child.name)
            elif isinstance(child, (ast.Name, ast.Attribute)) and isinstance(child.ctx, ast.Store):
                names.add(prefix + (child.id if isinstance(child, ast.Name) else child.attr))
    return names


def test_the_architecture_names_every_thread_and_every_file_with_a_lock() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    threads, locks = set(), set()
    for name, path in draw_imports.sources():
        text = path.read_text()
        if name.split(".")[1:2] not in (["bench"], ["cli"]):
            threads |= set(re.findall(r'"(raykv-[a-z-]*[a-z])"', text))
            locks |= {path.relative_to(ROOT) for _ in re.findall(r"threading\.R?Lock\(|Lock\]? = field", text)}
    assert not [thread for thread in sorted(threads) if f"`{thread}`" not in page]
    table = page[page.index("## Locks") : page.index("## Words")]
    assert not [path for path in sorted(locks) if f"`{str(path).removeprefix('raykv/')}" not in table]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_link_leads_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    assert not [link for link in links if not (page.parent / link).exists()]


def test_the_readme_fits_on_a_few_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_pictures_are_what_their_scripts_draw() -> None:
    drawn = {draw_imports.PICTURE: draw_imports.draw(), **draw_plots.draw_all()}
    assert not [path for path, picture in drawn.items() if path.read_text() != picture], "run `make pictures`"


def test_tables_say_what_was_measured() -> None:
    assert not [path for path, text in tables.pages().items() if path.read_text() != text], (
        "run `python -m docs.tables`"
    )


def test_the_page_of_deadlines_is_written_from_the_files() -> None:
    assert write_deadlines.PAGE.read_text() == write_deadlines.page(), "run: python -m docs.write_deadlines"


def test_the_reference_has_every_setting_and_every_command() -> None:
    settings, commands = hooks.settings(), hooks.commands()
    assert all(f"| `{field.name}` |" in settings for field in dataclasses.fields(raykv.PoolConfig))
    assert all(f"## raykv {name}\n" in commands for name in main.commands)
    assert "Sentinel" not in commands


@pytest.mark.full
def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="MkDocs is not installed: pip install 'raykv[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    pages = [page.read_text() for page in tmp_path.rglob("*.html")]
    fetched = [link for page in pages for link in re.findall(r'(?:src|<link[^>]* href)="(https?://[^"]+)"', page)]
    assert not fetched, "a page is to fetch nothing from elsewhere"
    navigation = (tmp_path / "index.html").read_text()
    (title,) = re.findall(r'<a href="changelog/" class="md-nav__link">\s*<span[^>]*>\s*(.*?)\s*<', navigation)
    assert title == f"Version {raykv.__version__}: changelog" and (tmp_path / "changelog/index.html").exists()


def test_the_tier_of_the_page_keeps_what_is_put(tmp_path: Path) -> None:
    (code,) = [code for code in codes(ROOT / "docs/tiers.md") if "class FolderTier" in code.text]
    namespace: dict[str, Any] = {"__name__": "page"}
    exec(code.text.replace('register_tier("folder"', 'register_tier("foldertest"'), namespace)
    tier = namespace["FolderTier"](parse(f"foldertest://{tmp_path}?capacity=1MiB"))
    one, two = bytes(range(16)), bytes(range(1, 17))
    assert tier.put_many([Block(key, bytes(64), memoryview(b"body")) for key in (one, two, MARKER)]) == [True] * 3
    bodies = [bytearray(4), bytearray(4), bytearray(5)]
    found = tier.get_many([one, bytes(15) + b"x", two], [memoryview(body) for body in bodies])
    assert found == [bytes(64), None, None] and bodies[0] == b"body"
    tier.delete_many([two, two])
    assert [entry for batch in tier.scan() for entry in batch] == [(one, 4)]
    tier.close()

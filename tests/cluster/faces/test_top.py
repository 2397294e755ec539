"""`raykv top` in a real terminal, at any width. q, Ctrl-C and the end of the pool leave the terminal as it was."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.faces.terminal import Tmux
from helpers.pools import eventually, keep, tokens

import raykv
from raykv.cli.status.status import node_rows
from raykv.ui.overview import look

pytestmark = pytest.mark.skipif(
    not shutil.which("tmux") and "CI" not in os.environ, reason="tmux is not installed: apt install tmux"
)


@pytest.fixture(scope="module")
def pool(start_for_module: Callable[..., raykv.KVPool]) -> raykv.KVPool:
    return start_for_module()


@pytest.mark.parametrize(("columns", "key"), [(70, "q"), (200, "C-c")])  # 70 are too few for the whole table
def test_it_is_live_and_leaves_the_terminal_as_it_was(
    pool: raykv.KVPool, cluster: Any, tmp_path: Path, columns: int, key: str
) -> None:
    cells = [[row[name] for name in ("node", "host", "memory")] for row in node_rows(look(pool.name)).values()]
    with Tmux(columns, "top", "--name", pool.name, address=cluster.address) as terminal:
        shown = eventually(lambda: "2 of 2 nodes alive" in (found := terminal.shown()) and found)
        assert isinstance(shown, str) and "before" not in shown and "now by node" in shown
        assert all(cell in shown for row in cells for cell in row), shown
        assert ("ROLES" in shown) == (columns == 200)
        cache = pool.cache(model=f"m{columns}", dtype="uint8", layout="rows", block_tokens=16, block_bytes=4096)
        keep(cache, cache.keys(tokens(0, 10)))
        eventually(lambda: re.search(r"found +100\.0% .*█", terminal.shown()))
        terminal.press("s")
        eventually(lambda: "now by state" in terminal.shown())
        terminal.written(tmp_path / "written")
        eventually(lambda: (tmp_path / "written").read_bytes().count(b"nodes alive") > 2)
        assert b"\x1b[2J" not in (tmp_path / "written").read_bytes(), "a screen that is cleared first flickers"
        beside = pool.stats()
        terminal.press(key)
        left = eventually(lambda: "rc=" in (found := terminal.shown()) and "speed" in found and found)
        alone = pool.stats()
        assert beside["connections"] <= alone["connections"] and beside["clients"] == 1, "it was no client"
        assert isinstance(left, str) and "before" in left and "rc=0" in left and "nodes alive" not in left
        settings = left.replace(";", " ").split()
        assert {"icanon", "echo", "isig"} <= set(settings), left


def test_it_says_that_the_pool_was_stopped(start: Callable[..., raykv.KVPool], cluster: Any) -> None:
    pool = start()
    with Tmux(200, "top", "--name", pool.name, address=cluster.address) as terminal:
        eventually(lambda: "2 of 2 nodes alive" in terminal.shown())
        pool.stop()
        left = eventually(lambda: "rc=" in (found := terminal.shown()) and "speed" in found and found)
    assert isinstance(left, str) and "rc=1" in left and "Traceback" not in left and " icanon" in left
    assert f"raykv start --name {pool.name}" in " ".join(left.split()) and "was stopped" in left


def test_it_needs_a_terminal(pool: raykv.KVPool, cluster: Any) -> None:
    command = [sys.executable, "-m", "raykv.cli", "top", "--name", pool.name]
    env = {**os.environ, "RAY_ADDRESS": cluster.address}
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "needs a terminal; `raykv status`" in done.stderr

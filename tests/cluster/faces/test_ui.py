"""`raykv ui` in a real Chromium shows what the pool did and what happened, at any width, in light and dark."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from helpers.faces.command_line import command, last_json
from helpers.pools import BLOCK, eventually, free_port, keep, node_store, other_node, pid, read, tokens, worker

import raykv
from raykv.cli import ui
from raykv.cluster import named_actors
from raykv.ui.actor import CONNECTIONS

if Path("/usr/bin/chromedriver").exists() or "CI" in os.environ:
    from helpers.faces.browser import Browser
else:
    pytest.skip("Chromium is not installed: apt install chromium chromium-driver", allow_module_level=True)

TOKEN = "the-token-of-this-test-the-token-of-this-test"
SERVE_ALONE = """
import sys, uvicorn
from raykv.ui.history import History
from raykv.ui.overview import Member, Overview
from raykv.ui.ray_nodes import RayNode, short_ids
from raykv.ui.server import application
node = RayNode("id", "<b onclick='x'>host</b>", "address", "", False)
member = Member(node.host, node.address, (), "alive", "", None, None, None, {}, "")
history, rest = History(), {"time": 0, "run": 1, "trouble": "nothing new"}
history.add(Overview("p", short_ids((node,)), {}, {}, [], {"id": member}, {}), 0.0)
app = application(lambda after: history.since(after - 1) | rest, "the.page")
uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    yield chromium
    chromium.open("about:blank")  # so that no page asks a server that has ended
    chromium.complaints()


def serve(pool: raykv.KVPool, cluster: Any, *options: str) -> str:
    """Start `raykv ui`. Returns the URL of its page."""
    done = command("ui", "--name", pool.name, "--json", *options, address=cluster.address)
    return str(last_json(done)["url"])


def figures(browser: Browser) -> dict[str, str]:
    """The text of each tile, by the tile's name."""
    script = "return Object.fromEntries([...document.querySelectorAll('#tiles > div')].map(d => [d.id, d.innerText]))"
    return {name: " ".join(text.split()) for name, text in browser.ask(script).items()}


def rows(browser: Browser, table: str) -> list[list[str]]:
    found = (
        f"[...document.querySelectorAll('#{table} tbody tr')].map(row => [...row.cells].map(cell => cell.innerText))"
    )
    cells: list[list[str]] = browser.ask(f"return {found}")
    return cells


def test_a_reader_sees_what_was_done_and_what_happened(
    start: Callable[..., raykv.KVPool], cluster: Any, browser: Browser
) -> None:
    pool = start()
    url = serve(pool, cluster, "--port", "0")
    assert url.startswith("http://127.0.0.1:")
    browser.look(1440, "light")
    browser.open(url)
    eventually(lambda: "2 of 2 nodes alive" in browser.text("#summary"))
    assert "No block was found yet." in browser.text("#hits") and browser.text("h1") == f"raykv {pool.name}"

    there, cache = (
        other_node(pool),
        pool.cache(model="m", dtype="uint8", layout="rows", block_tokens=16, block_bytes=BLOCK),
    )
    long, short = cache.keys(tokens(1, 12)), cache.keys(tokens(2, 5))
    keep(cache, long)
    keep(cache, short)
    reader = worker(pool, there)
    assert ray.get(reader.read.remote(long)).read == 12
    assert not read(cache, cache.keys(tokens(3, 20))).matched
    done = pool.stats()
    share = f"{100 * done['hits'] / done['lookups']:.1f}%"
    said = f"Hit rate {share} {done['hits']} of {done['lookups']} blocks asked for"
    eventually(lambda: figures(browser)["hit-rate"] == said)
    assert figures(browser)["keys"].startswith("Blocks 17 ") and done["remote_hits"] >= 12
    assert "hit rate with twice as much" in figures(browser)["memory"]
    elsewhere = pool.stats()["hits"] - done["remote_hits"]
    eventually(lambda: sums(url)["hit:other nodes"] == done["remote_hits"])
    assert sums(url)["hit:this node"] == elsewhere and sums(url)["stored"] == done["stored"]
    eventually(lambda: "other nodes" in browser.text("#hits .u-legend") and browser.text("#traffic .u-legend"))
    (route,) = rows(browser, "routes")
    assert route[:2] == [there[:8], pool.node_id[:8]] and route[3] == "3 MiB"
    prefixes = rows(browser, "prefixes")
    assert [row[2:4] for row in prefixes] == [["12", "3 MiB"], ["5", "1.25 MiB"]]
    both = {there[:8], pool.node_id[:8]}
    eventually(lambda: set(rows(browser, "prefixes")[0][5].split(", ")) == both)
    assert prefixes[0][0] == bytes(long[-1]).hex()[:12]

    os.kill(pid(node_store(pool, there)), signal.SIGKILL)
    died = f"the store on {there[:8]} ("
    eventually(lambda: re.search(re.escape(died) + r".*\) died", browser.text("#events")))
    eventually(lambda: re.search(re.escape(died) + r".*\) serves again", browser.text("#events")))
    browser.open(url)  # the history survives a reload
    eventually(lambda: re.search(re.escape(died) + r".*\) died", browser.text("#events")))
    assert (
        figures(browser)["keys"].startswith("Blocks ") and browser.ask("return document.title") == f"raykv: {pool.name}"
    )
    click_through(browser, there)
    assert not browser.complaints()


def sums(url: str) -> dict[str, int]:
    """The sums that the page's server has counted so far."""
    with urllib.request.urlopen(f"{url}api/pool", timeout=30) as answer:
        found = json.load(answer)
    return {name: values[-1] for name, values in found["samples"].items()}


def click_through(browser: Browser, node_id: str) -> None:
    """Click everything that can be clicked, at both widths, in light and dark."""
    colors = set()
    for width in (1440, 390):
        for scheme in ("light", "dark"):
            browser.look(width, scheme)
            for seconds in ("300", "0", "3600"):
                browser.click(f"#range label:has([value='{seconds}']) span")
                assert browser.ask("return document.querySelector('#range :checked').value") == seconds
            browser.click(f"[data-node='{node_id}']")
            assert node_id in browser.text("#node[open]") and "store" in browser.text("#node[open]")
            browser.click("#node button")
            assert not browser.text("#node[open]")
            wide = browser.ask("return [document.documentElement.scrollWidth, window.innerWidth]")
            assert wide[0] <= wide[1] == width, "it scrolls sideways"
            sticks_out = "part => part.getBoundingClientRect().right > innerWidth + 1"
            assert not browser.ask(f"return [...document.querySelectorAll('main section')].some({sticks_out})")
            colors.add(browser.ask("return getComputedStyle(document.body).backgroundColor"))
    assert len(colors) == 2


def test_it_is_served_once_until_it_is_stopped(start: Callable[..., raykv.KVPool], cluster: Any) -> None:
    pool, port = start(), free_port()
    url, tunnel = ui.serve(pool.name, None, port)
    assert url == f"http://127.0.0.1:{port}/" and f"ssh -L {port}:127.0.0.1:{port} " in tunnel
    assert ui.serve(pool.name, None, None) == (url, tunnel)
    with pytest.raises(ValueError, match=f"is served at {url} already: `raykv ui --stop --name {pool.name}`"):
        ui.serve(pool.name, None, free_port())
    assert command("ui", "--name", pool.name, "--stop", address=cluster.address).returncode == 0
    assert status(url) is None
    with pytest.raises(raykv.PoolNotFound, match="no page of pool"):
        ui.stop(pool.name)
    there = ("--name", pool.name, "--host", "192.0.2.254")
    refused = command("ui", *there, address=cluster.address)
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1].startswith("Error: the page can't be served at 192.0.2.254:8270: ")
    again, _ = ui.serve(pool.name, None, 0)
    pool.session.directory.heartbeat()
    assert pool.stats()["clients"] == 1, "this process, and no page"
    pool.stop()
    assert status(again) is None and not named_actors.names(pool.name)


def test_a_page_of_which_too_much_is_asked_says_so_and_is_there_again(start: Callable[..., raykv.KVPool]) -> None:
    port = free_port()
    url, _ = ui.serve(start().name, None, port)
    with contextlib.ExitStack() as idle:
        for _ in range(CONNECTIONS):  # the server accepts these before the connection that asks
            idle.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert status(url) == 503
    eventually(lambda: status(url) == 200)


def test_where_ray_asks_for_a_token_so_does_the_page(browser: Browser) -> None:
    port = free_port()
    env = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    url = f"http://127.0.0.1:{port}/"
    with subprocess.Popen([sys.executable, "-c", SERVE_ALONE, str(port)], env=env) as server:
        try:
            eventually(lambda: status(url) is not None)
            assert (status(url), status(f"{url}api/pool"), status(f"{url}static/page.js")) == (401, 401, 401)
            assert status(f"{url}api/pool", Authorization="Bearer wrong") == 403
            for header in ("Authorization", "X-Ray-Authorization"):
                assert status(f"{url}api/pool", **{header: f"Bearer {TOKEN}"}) == 200
            browser.open(url)
            browser.write("#token", "wrong")
            browser.click("#login button")
            eventually(lambda: "not the token" in browser.text("#refused"))
            browser.write("#token", TOKEN)
            browser.click("#login button")
            eventually(lambda: "nothing new" in browser.text("#trouble"))
            assert "<b onclick='x'>host</b>" in browser.text("#nodes"), "a name is text"
            assert TOKEN not in browser.ask(
                "return document.cookie + document.documentElement.outerHTML + location.href"
            )
            expected = ("401", "403")  # errors of the page before it has its token
            assert not [line for line in browser.complaints() if not any(code in line for code in expected)]
        finally:
            server.terminate()


def status(url: str, **headers: str) -> int | None:
    """The status of the answer; None if no server answers yet."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        return refused.code
    except OSError:
        return None

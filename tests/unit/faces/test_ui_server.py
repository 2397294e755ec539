"""Access to the page: the host names under which it answers, and the token that it asks for if Ray does."""

import ast
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("starlette")
TOKEN = "the-token-of-this-test-the-token-of-this-test"
ASK = """
import asyncio
from raykv.ui.server import application

def ask(path, host, method="GET", **headers):
    async def receive():
        return {"type": "http.request", "body": b""}
    async def send(message):
        if message["type"] == "http.response.start":
            found.append(message)
    found = []
    sent = [(name.encode(), value.encode()) for name, value in {"host": host, **headers}.items()]
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": sent, "scheme": "http", "http_version": "1.1", "server": ("127.0.0.1", 80), "root_path": ""}
    asyncio.run(app(scope, receive, send))
    return int(found[0]["status"]), dict(found[0]["headers"])

app = application(lambda after: {}, "the.page")
"""


def said(code: str, token: str = "") -> Any:
    """The output of a process in which Ray authenticates by this token, or with "" not at all."""
    env = {**os.environ, "RAY_AUTH_MODE": "token" if token else "disabled", "RAY_AUTH_TOKEN": token}
    done = subprocess.run([sys.executable, "-c", ASK + code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout)


def test_without_a_token_the_page_answers_to_no_other_sites_name() -> None:
    ours = ["127.0.0.1:8270", "[::1]:8270", "localhost:1", "THE.PAGE"]
    others = ["evil.example:8270", "127.0.0.1.evil.example"]
    codes = said(f"print([ask('/api/pool', host)[0] for host in {ours + others}])")
    assert codes == [200] * len(ours) + [421] * len(others)


def test_no_host_gets_past_the_token() -> None:
    hosts = ["localhost/login?", "localhost/static/page.css?", "x/authenticate#", "localhost"]
    assert said(f"print({{ask('/api/pool', host)[0] for host in {hosts}}})", TOKEN) <= {400, 401}


def test_the_cookie_opens_the_page_and_is_not_the_token() -> None:
    code = f"""
status, headers = ask("/authenticate", "localhost", "POST", authorization="Bearer {TOKEN}")
cookie = headers[b"set-cookie"].decode()
kept = cookie.split(";")[0]
opened = [ask("/api/pool", "any.name", cookie=given)[0] for given in (kept, kept + "0", "raykv-ui=")]
print((status, opened, cookie, ask("/authenticate", "x", "POST", authorization="Bearer wrong")[0]))
"""
    status, opened, cookie, wrong = said(code, TOKEN)
    assert (status, opened, wrong) == (204, [200, 401, 401], 403)
    assert TOKEN not in cookie and cookie.startswith("raykv-ui=") and "HttpOnly" in cookie

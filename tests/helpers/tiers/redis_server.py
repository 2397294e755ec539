"""A redis server of a test's own."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

START_S = 10.0


class RedisServer:
    """A server that keeps nothing on disk. options: redis-server's own, with `_` for `-`, each value as one string."""

    def __init__(self, folder: Path, scheme: str = "redis", **options: str) -> None:
        self.port = _free_port()
        self._folder = folder
        self._scheme = scheme
        ports = {"port": "0", "tls-port": str(self.port)} if scheme == "rediss" else {"port": str(self.port)}
        own = {**ports, "bind": "127.0.0.1", "dir": str(folder)}
        self._options = [("save", [""])]
        self._options += [(name.replace("_", "-"), value.split()) for name, value in {**own, **options}.items()]
        self.start()

    def start(self) -> None:
        """Start the server; after `kill`, start it again on the same port."""
        options = [word for name, value in self._options for word in (f"--{name}", *value)]
        with open(self._folder / "redis.log", "ab") as log:
            self._process = subprocess.Popen(["redis-server", *options], stdout=log)
        end = time.monotonic() + START_S
        while not self._answers():
            assert self._process.poll() is None and time.monotonic() < end, (self._folder / "redis.log").read_text()
            time.sleep(0.01)

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1.0).close()
        except OSError:
            return False
        return True

    def url(self, login: str = "", database: int = 0) -> str:
        """login: "user:password@"."""
        return f"{self._scheme}://{login}127.0.0.1:{self.port}/{database}?capacity=1GiB"

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def redis_server(folder: Path, scheme: str = "redis", **options: str) -> Iterator[RedisServer]:
    """A server that runs in the `with` block. Skips the test if redis-server is missing, except under CI."""
    if not shutil.which("redis-server") and not os.environ.get("CI"):
        pytest.skip("redis-server is not installed")
    server = RedisServer(folder, scheme, **options)
    try:
        yield server
    finally:
        server.kill()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port

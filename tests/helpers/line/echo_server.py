"""A listener that answers as the question says, here or in a process of its own; and a process that floods a listener.

python -m helpers.line.echo_server FILES THREADS    prints its port and token; for each line of input its threads, files
python -m helpers.line.echo_server flood HOST PORT COUNT    opens so many connections, and says nothing on them
"""

import contextlib
import gc
import json
import os
import random
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from raykv.line import wire
from raykv.line.listener import Listener
from raykv.protocol.calls import CLIENT
from raykv.protocol.location import Address

QUESTION = struct.Struct("<QIf")  # number, bytes of the answer, seconds until the answer
PATIENCE_S = 60.0  # a machine may be busy
GATES: dict[int, threading.Event] = {}  # by number of a question, the event that its answer waits for, in this process


def question(number: int, size: int = 0, seconds: float = 0.0) -> bytes:
    """A question for `answer`. size: bytes of the answer after the number."""
    return QUESTION.pack(number, size, seconds)


def answer(question: bytes) -> bytes:
    """The question's number, and bytes made from it. A body that is no question comes back unchanged."""
    if len(question) < QUESTION.size:
        return question
    number, size, seconds = QUESTION.unpack_from(question)
    if seconds:
        time.sleep(seconds)
    if number in GATES:
        GATES[number].wait(PATIENCE_S)
    return expected(number, size)


def expected(number: int, size: int = 0) -> bytes:
    return number.to_bytes(8, "little") + bytes([number % 251]) * size


@contextmanager
def serving(longest: int = 16 << 20) -> Iterator[Listener]:
    listener = Listener("127.0.0.1", "raykv-test", {CLIENT: longest}, lambda _, body: wire.frame(answer(body)))
    try:
        yield listener
    finally:
        end(listener)


def end(listener: Listener) -> None:
    """Close a listener, and wait until its thread has ended."""
    listener.close()
    listener._thread.join(PATIENCE_S)
    assert not listener._thread.is_alive()
    while os.path.exists(f"/proc/self/task/{listener._thread.native_id}"):  # Python 3.11 returns from `join` before
        time.sleep(0.001)


def open_files() -> set[tuple[str, str]]:
    """(file descriptor, its file) of this process. Compare by `<=`: garbage of other tests may be closed meanwhile."""
    gc.collect()
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor by which the folder was listed
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


class Server:
    """A process with a listener that answers. address: the listener's."""

    def __init__(self, files: int = 1024, threads: int = 300) -> None:
        """files, threads: limits of the process. Threads are limited only if this process is root's."""
        command = [sys.executable, "-m", "helpers.line.echo_server", str(files), str(threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        host, port, token = self._line()
        self.address = Address(host, port, bytes.fromhex(token))

    def status(self) -> tuple[int, int]:
        """(number of the process's threads, number of files that its listener watches)."""
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        threads, files = self._line()
        return threads, files

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _line(self) -> list[Any]:
        assert self.process.stdout
        line: list[Any] = json.loads(self.process.stdout.readline())
        return line


@contextmanager
def flood(address: Address, count: int) -> Iterator["subprocess.Popen[bytes]"]:
    """A process without a token that opens `count` connections, and then ends."""
    command = [sys.executable, "-m", "helpers.line.echo_server", "flood", address.host, str(address.port), str(count)]
    flooding = subprocess.Popen(command)
    try:
        yield flooding
        assert flooding.wait(PATIENCE_S) == 0
    finally:
        flooding.kill()
        flooding.wait()


def _flood(host: str, port: int, count: int) -> None:
    """Open connections, and keep as many open as the process may."""
    kept: deque[socket.socket] = deque(maxlen=resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 64)
    for _ in range(count):
        if len(kept) == kept.maxlen:
            kept.popleft().close()
        peer = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        peer.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            peer.connect((host, port))
        kept.append(peer)


def _serve(files: int, threads: int) -> None:
    with serving() as listener, closing(socket.create_connection(listener.address[:2])):  # so all imports are done
        pass
    if os.getuid() == 0:  # root's threads are never limited
        os.setuid(1 << 20 | random.SystemRandom().getrandbits(20))
        resource.setrlimit(resource.RLIMIT_NPROC, (threads, threads))
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    with serving() as listener, open("/proc/self/status") as status:
        print(json.dumps([*listener.address[:2], listener.address.token.hex()]), flush=True)
        for _ in sys.stdin:
            status.seek(0)
            alive = next(int(line.split()[1]) for line in status if line.startswith("Threads:"))
            print(json.dumps([alive, len(listener._selector.get_map())]), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "flood":
        _flood(sys.argv[2], *map(int, sys.argv[3:]))
    else:
        _serve(*map(int, sys.argv[1:]))

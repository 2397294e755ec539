"""The floor (baseline) of a call to another process: an actor and a socket, with answers of the same size."""

import socket
import threading
import time
from typing import Any

from raykv.line import wire
from raykv.protocol.packing import packed


class Echo:
    """An actor whose answers have as many bytes as the directory's answers to matches."""

    def __init__(self, answer_bytes: int) -> None:
        self.answer = (1, bytes(answer_bytes), b"")

    def call(self, *_: Any) -> tuple[int, bytes, bytes]:
        return self.answer

    def listen(self, request_bytes: int) -> tuple[int, int, int]:
        """Also answer one peer over a bare socket. Returns the arguments of RoundTrip."""
        server = socket.create_server(("127.0.0.1", 0))
        answer = bytes(len(packed(self.answer)))

        def serve() -> None:
            peer, _ = server.accept()
            wire.prepare(peer)
            request = memoryview(bytearray(request_bytes))
            while _received(peer, request):
                peer.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        return server.getsockname()[1], request_bytes, len(answer)


class RoundTrip:
    """The other end of an Echo's socket."""

    def __init__(self, port: int, request_bytes: int, answer_bytes: int) -> None:
        self._peer = socket.create_connection(("127.0.0.1", port))
        wire.prepare(self._peer)
        self._request, self._answer = bytes(request_bytes), memoryview(bytearray(answer_bytes))

    def seconds(self) -> float:
        """Seconds of one request and its answer."""
        begin = time.perf_counter()
        self._peer.sendall(self._request)
        assert _received(self._peer, self._answer), "the echo is gone"
        return time.perf_counter() - begin


def _received(peer: socket.socket, view: memoryview) -> bool:
    """Fill the view from the peer. Returns whether the peer is still connected."""
    while len(view):
        got = peer.recv_into(view)
        if not got:
            return False
        view = view[got:]
    return True

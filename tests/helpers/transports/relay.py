"""A relay in front of a server. It counts connections, and holds or cuts those that a test names."""

import contextlib
import socket
import threading
from collections.abc import Callable

from raykv.protocol.location import Address

FORWARD = 1 << 62  # bytes


class Relay:
    """limit(n): how many of the server's bytes connection n forwards before it is cut, or held until `go_on`.

    address: to connect to in place of the server's. connections: how many were made.
    """

    def __init__(self, server: Address, limit: Callable[[int], int] = lambda n: FORWARD, cut: bool = True) -> None:
        self._server, self.limit, self._cut = server, limit, cut
        self.go_on, self.held = threading.Event(), threading.Event()
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._listener.getsockname()[1], server.token)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the socket is closed already
            while True:
                reader, _ = self._listener.accept()
                server = socket.create_connection((self._server.host, self._server.port))
                number, self.connections = self.connections, self.connections + 1
                threading.Thread(target=self._forward, args=(reader, server, FORWARD), daemon=True).start()
                threading.Thread(target=self._forward, args=(server, reader, self.limit(number)), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, left: int) -> None:
        with contextlib.suppress(OSError):
            while left and (data := source.recv(min(left, 1 << 16))):
                target.sendall(data)
                left -= len(data)
            if not left and not self._cut:
                self.held.set()
                self.go_on.wait()
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def close(self) -> None:
        self.go_on.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

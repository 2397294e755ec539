"""A process whose arena others read by NIXL. In place of Ray's calls, requests come through a pipe."""

import os
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from raykv.arena.arena import Arena
from raykv.transports.nixl import Nixl


class Peer:
    """The side of the process that started the peer."""

    def __init__(self, arena: Arena) -> None:
        context = get_context("forkserver")  # imports NIXL, and so torch, once for all peers
        context.set_forkserver_preload(["helpers.transports.nixl_peer", "nixl._api"])
        self.pipe, theirs = context.Pipe()
        ucx = {name: value for name, value in os.environ.items() if name.startswith("UCX_")}
        args = (theirs, arena.path, arena.nonce, ucx)
        self.process: BaseProcess = context.Process(target=_serve, args=args, daemon=True)
        self.process.start()
        self.offer: str = self.pipe.recv()

    def ask(self, peer: Any, end: float, transport: str, *args: Any) -> Any:
        """In place of `raykv.transports.transport.ask`."""
        self.pipe.send(("serve", args))
        return self.pipe.recv()

    def withdraw(self, slab: int) -> None:
        self.pipe.send(("withdraw", (slab,)))
        self.pipe.recv()

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _serve(pipe: Connection, path: str, nonce: bytes, ucx: dict[str, str]) -> None:
    os.environ.update(ucx)
    nixl = Nixl(Arena.attach(path, nonce))
    pipe.send(nixl.offer())
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(nixl, method)(*args))

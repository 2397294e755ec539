"""A World whose directory is in its server, and is called over the socket or as Ray calls it.

Ray itself does not run: in its place the arguments and answers of calls are pickled as Ray pickles them.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from ray import cloudpickle

from helpers.directory.world.world import World
from helpers.pools import PATIENCE_S
from raykv.actors.directory.metrics import DirectoryMetrics
from raykv.actors.directory.server import DirectoryServer
from raykv.directory.directory import Directory
from raykv.line.directory_line import DirectoryLine, plain
from raykv.line.pipeline import Pipeline
from raykv.protocol.calls import ADMINISTRATOR, CALLS, CLIENT, STORE
from raykv.protocol.stores import ArenaDescription, Heartbeat, Joined, SlabReport

LINES = 3  # connections of each side, which take turns

# fields of the server's stats that the oracle does not know
OF_THE_SERVER = ("socket", "connections", "prefixes", "holders", "hit_curve")


class Windowed(Directory):
    """A directory that joins nodes with the world's staging window, and has the time of the next call."""

    window, clock = 0, 0.0

    def join(self, name: str, arena: ArenaDescription, now: float, window: int | None = None) -> Joined:
        return super().join(name, arena, now, self.window)


class RayWay:
    def __init__(self, directory: "Windowed") -> None:
        self.directory = directory
        self.server = DirectoryServer("p", DirectoryMetrics("p", "p/directory-1"), lambda: directory.clock)
        self.server.serve(directory)

    def ask(self, method: str, *arguments: Any) -> Any:
        return _pickled(getattr(self.server, method)(*_pickled(plain(arguments))))

    def close(self) -> None:
        """There is nothing to close."""


class SocketWay(RayWay):
    """Makes calls over connections. An administrator's calls still go as Ray makes them."""

    def __init__(self, directory: Windowed) -> None:
        super().__init__(directory)
        address = self.server.listen("127.0.0.1")
        self.lines = {side: [DirectoryLine("p", side) for _ in range(LINES)] for side in (CLIENT, STORE)}
        for side, lines in self.lines.items():
            for line in lines:
                line._pipeline = Pipeline(address, side)
        self.turns = {side: itertools.cycle(lines) for side, lines in self.lines.items()}
        self.waits = itertools.cycle((True, False))

    def ask(self, method: str, *arguments: Any) -> Any:
        if (side := CALLS[method].by) == ADMINISTRATOR:
            return super().ask(method, *arguments)
        line = next(self.turns[side])
        if method == "commit" and not next(self.waits):
            answers: list[Any] = []
            line.tell(method, *arguments, deliver=answers.append)
            line.call("ping", seconds=PATIENCE_S)  # the answer to `commit` comes before this call's answer
            return answers.pop()
        return line.call(method, *arguments, seconds=PATIENCE_S)

    def close(self) -> None:
        for line in itertools.chain(*self.lines.values()):
            line.close()
        self.server.close()


class ServedWorld(World):
    """A World called as Ray does. Each new directory gets a server of its own."""

    kind, follows = RayWay, False  # the server itself makes plans, after enough look-ups
    way: RayWay | None = None

    def close(self) -> None:
        if self.way:
            self.way.close()

    def _new(self, **how: Any) -> Directory:
        return Windowed(**how)

    def heartbeat(self, name: str) -> None:
        known = self.real.nodes.get(name)
        if known and known.limit < self.stores[name].slabs:  # the answer would have it give slabs back at once
            self.join(name)
            self.adopt(name)
        super().heartbeat(name)

    def _call(self, directory: Directory, name: str, args: tuple[Any, ...]) -> Any:
        assert isinstance(directory, Windowed)
        if self.way is None or self.way.directory is not directory:
            self.close()
            self.way = self.kind(directory)
        return _meant(directory, name, self.way.ask(name, *_arguments(directory, name, args)))


class SocketWorld(ServedWorld):
    kind = SocketWay


def _arguments(directory: Windowed, name: str, args: tuple[Any, ...]) -> Sequence[Any]:
    """The arguments of the server's method, from those of the directory's method. Sets the clock."""
    if name in ("locate_prefix", "stored"):
        return args
    if name == "join":
        *arguments, directory.clock, directory.window = args
    elif name == "adopt":
        node, found, directory.clock, offered = args
        arguments = [node, _report(directory, node, offered), found]
    elif name == "set_quota":
        tenant, quota, directory.clock = args
        arguments = [tenant, quota.minimum, quota.maximum]
    elif name == "done":
        call, keys, directory.clock, *terms = args
        arguments = [call, keys, *terms]
    else:
        *arguments, directory.clock = args
    return [arguments[0], _report(directory, *arguments)] if name == "heartbeat" else arguments


def _report(directory: Directory, node: str, offered: int) -> SlabReport:
    """The report of a node that keeps the size it joined with."""
    known = directory.nodes.get(node)
    return SlabReport(offered, known.limit if known else offered, b"")


def _meant(directory: Directory, name: str, answer: Any) -> Any:
    """The answer of the directory's method, from that of the server's method."""
    if answer is None or name == "stats":
        return answer and {what: value for what, value in answer.items() if what not in OF_THE_SERVER}
    if name == "heartbeat":
        answer, target = answer
        assert target == (0, b"")
        return Heartbeat(*answer)
    if name == "clear":
        floor, answer = answer
        assert floor == directory.floor
    return CALLS[name].meant(answer)


def _pickled(message: Any) -> Any:
    return cloudpickle.loads(cloudpickle.dumps(message))

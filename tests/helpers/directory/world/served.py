"""A World whose directory is in its server, called on one of the two ways: over the socket, or as Ray calls it.

Neither needs Ray: its calls are made with arguments and answers that were pickled as Ray pickles them.
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
from raykv.line.directory_line import DirectoryLine
from raykv.line.pipeline import Pipeline
from raykv.protocol.calls import ADMINISTRATOR, CALLS, CLIENT, STORE
from raykv.protocol.stores import ArenaDescription, Heartbeat, Joined, SlabReport

LINES = 3  # connections, which take turns

# in its stats, beside those that the oracle knows
OF_THE_SERVER = ("socket", "connections", "prefixes", "holders", "hit_curve")


class Windowed(Directory):
    """With the staging window of the world's node that joins, and the time of its next call."""

    window, clock = 0, 0.0

    def join(self, name: str, arena: ArenaDescription, now: float, window: int | None = None) -> Joined:
        return super().join(name, arena, now, self.window)


class RayWay:
    """Calls as Ray makes them."""

    def __init__(self, directory: "Windowed") -> None:
        self.directory = directory
        self.server = DirectoryServer("p", DirectoryMetrics("p", "p/directory-1"), lambda: directory.clock)
        self.server.serve(directory)

    def ask(self, method: str, *arguments: Any) -> Any:
        """The answer to a call."""
        return _pickled(getattr(self.server, method)(*_pickled(arguments)))

    def close(self) -> None:
        """Nothing is open."""


class SocketWay(RayWay):
    """Calls over connections. What an administrator asks still goes through Ray."""

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
            line.call("ping", seconds=PATIENCE_S)  # the answer comes with this one's
            return answers.pop()
        return line.call(method, *arguments, seconds=PATIENCE_S)

    def close(self) -> None:
        for line in itertools.chain(*self.lines.values()):
            line.close()
        self.server.close()


class ServedWorld(World):
    """Called through Ray. Each directory is in a server of its own, until there is another."""

    kind, follows = RayWay, False  # the server plans, once there were enough look-ups
    way: RayWay | None = None

    def close(self) -> None:
        """End the way to the directory."""
        if self.way:
            self.way.close()

    def _new(self, **how: Any) -> Directory:
        return Windowed(**how)

    def heartbeat(self, name: str) -> None:
        known = self.real.nodes.get(name)
        if known and known.limit < self.stores[name].slabs:  # it would be told at once to give the rest back
            self.join(name)
            self.adopt(name)
        super().heartbeat(name)

    def _call(self, directory: Directory, name: str, args: tuple[Any, ...]) -> Any:
        assert isinstance(directory, Windowed)
        if self.way is None or self.way.directory is not directory:
            self.close()
            self.way = self.kind(directory)
        return _meant(directory, name, self.way.ask(name, *map(_plain, _arguments(directory, name, args))))


class SocketWorld(ServedWorld):
    """Called over the socket."""

    kind = SocketWay


def _arguments(directory: Windowed, name: str, args: tuple[Any, ...]) -> Sequence[Any]:
    """Of the server's method, for those of the directory's. Sets the clock."""
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
    elif name in ("pin", "done"):
        call, keys, directory.clock, *terms = args
        arguments = [call, keys, *terms]
    else:
        *arguments, directory.clock = args
    return [arguments[0], _report(directory, *arguments)] if name == "heartbeat" else arguments


def _report(directory: Directory, node: str, offered: int) -> SlabReport:
    """Of a node that keeps the size it joined with."""
    known = directory.nodes.get(node)
    return SlabReport(offered, known.limit if known else offered, b"")


def _meant(directory: Directory, name: str, answer: Any) -> Any:
    """What the directory's method has returned, where the server's gave this answer."""
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


def _plain(argument: Any) -> Any:
    return tuple(map(_plain, argument)) if isinstance(argument, tuple) else argument


def _pickled(message: Any) -> Any:
    """As it arrives."""
    return cloudpickle.loads(cloudpickle.dumps(message))

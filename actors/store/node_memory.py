"""One memory of a node: host memory, or a GPU's memory. A node store owns the host memory and each GPU's memory.

The directory treats each memory as a separate node. A memory joins the directory, reports its slabs with every
heartbeat, and carries out the directory's answers.
"""

import logging
import threading
from collections.abc import Callable, Iterator

import numpy as np

from raykv.arena.arena import Arena
from raykv.config import HEARTBEAT_S
from raykv.line.directory_line import DirectoryLine
from raykv.protocol.location import KEY_BYTES, LOCATION, Locations
from raykv.protocol.stores import ArenaDescription, Heartbeat, Inventory, Joined, SlabReport, SlabTarget, SweepResult
from raykv.system import events
from raykv.transports.selector import TransportSelector

log = logging.getLogger("raykv")
JOIN_DEADLINE_S = 30.0  # maximum time for the directory to register a node with all of its blocks
PIECE_BLOCKS = 4096  # blocks in a piece of an inventory: the directory processes a piece in 1 to 2 milliseconds


class NodeMemory:
    """An arena, the transports for its blocks, and its index in locations."""

    def __init__(
        self,
        name: str,
        arena: Arena,
        transports: TransportSelector,
        report: Callable[[], SlabReport],
        on_directory_reply: Callable[[SlabReport, SlabTarget], None],
    ) -> None:
        """name: see `protocol.location.host_of`.

        report: returns a new report. on_directory_reply: called with a report and the directory's answer.
        """
        self.name, self.arena, self.transports = name, arena, transports
        self.index = -1  # the memory's index in locations; -1 until it has joined
        self.joined = threading.Event()
        self._report, self._on_directory_reply = report, on_directory_reply
        self._had_name = True  # whether the arena's file still had its name at the last look

    def heartbeat(self, directory: DirectoryLine) -> bool:
        """Report to the directory. Returns True if the directory did not know this memory, and the memory joined again.

        A memory that has never joined joins before its first report. Raises one of `directory_line.ERRORS` if the
        directory does not answer or is not in charge.
        """
        self._look_at_file()
        if not self.joined.is_set():  # after a restart the directory may know the node, but not this arena
            self._join(directory)
        report = self._report()
        reply = directory.call("heartbeat", self.name, tuple(report), seconds=2 * HEARTBEAT_S)
        if reply is None:
            self._join(directory)
            return True
        heartbeat, slab_target = Heartbeat(*reply[0]), SlabTarget(*reply[1])
        if heartbeat.epoch < self.arena.epoch:
            raise ValueError(f"a directory of epoch {heartbeat.epoch} answered, {self.arena.epoch} is known")
        self._on_directory_reply(report, slab_target)
        self.arena.raise_floor(heartbeat.floor)
        if heartbeat.sweep:
            self._sweep(directory, np.frombuffer(heartbeat.sweep, LOCATION))
        return False

    def _look_at_file(self) -> None:
        """Warn once if somebody removed the arena's file. Clients can still open the file: see `Mapping.door`."""
        if self._had_name and not self.arena.has_name:
            self._had_name = False
            events.tell("file_removed", memory=events.short(self.name), path=self.arena.path)
            log.warning(
                "%s was removed while its node store uses it, as logind does at the end of a user's last session: set "
                "RemoveIPC=no in logind.conf. It is still read and written on this node; if the store dies, its blocks "
                "are lost",
                self.arena.path,
            )

    def _join(self, directory: DirectoryLine) -> None:
        arena = self.arena
        described = ArenaDescription(arena.nonce, arena.slab_bytes, self._report().limit, arena.epoch)
        joined = Joined(*directory.call("join", self.name, tuple(described), seconds=JOIN_DEADLINE_S))
        if not arena.raise_epoch(joined.epoch):  # before the inventory: grants of an older directory are void now
            raise ValueError(f"a directory of epoch {joined.epoch} answered, {arena.epoch} is known")
        found = inventory_of(arena, joined.node)
        for piece in pieces_of(found):
            directory.call("adopt", self.name, tuple(self._report()), tuple(piece), seconds=JOIN_DEADLINE_S)
        self.index = joined.node
        self.joined.set()
        size, blocks = described.slab_count * arena.slab_bytes, len(found.keys) // KEY_BYTES
        events.tell(
            "join", memory=events.short(self.name), index=self.index, epoch=joined.epoch, bytes=size, blocks=blocks
        )

    def _sweep(self, directory: DirectoryLine, locations: Locations) -> None:
        """Report which of these slots (n LOCATIONs) are no longer locked by a writer.

        The slots are quarantined: the directory considers their writers gone, but a writer may still write.
        """
        verdicts = self.arena.sweep(locations)
        keys, generations = self.arena.identify(locations)
        result = SweepResult(locations.tobytes(), verdicts.tobytes(), keys.tobytes(), generations.tobytes())
        directory.tell("sweep_result", tuple(result))


def pieces_of(whole: Inventory) -> Iterator[Inventory]:
    """Yield an inventory in pieces, youngest blocks first. The directory can serve other calls between two pieces."""
    locations, keys = np.frombuffer(whole.locations, LOCATION), np.frombuffer(whole.keys, "V16")
    positions, stamps = (np.frombuffer(column, np.uint32) for column in (whole.positions, whole.stamps))
    order = np.lexsort((-positions.astype(np.int64), stamps))
    for stop in range(max(1, len(order)), 0, -PIECE_BLOCKS):
        left = max(0, stop - PIECE_BLOCKS)
        piece = order[left:stop]
        writing = b"" if left else whole.writing
        found = (column[piece].tobytes() for column in (locations, keys, positions, stamps))
        yield Inventory._make((*found, writing, left, whole.node))


def inventory_of(arena: Arena, index: int) -> Inventory:
    """Return the blocks in an arena. index: the memory's index in locations."""
    found = arena.inventory()
    found.ready["node"] = found.writing["node"] = index
    return Inventory(
        locations=found.ready.tobytes(),
        keys=found.keys.tobytes(),
        positions=found.positions.tobytes(),
        stamps=found.stamps.tobytes(),
        writing=found.writing.tobytes(),
        node=index,
    )

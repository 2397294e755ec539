"""The ids that a client holds, and its reports about blocks. The client's next call sends them to the directory."""

import itertools
from array import array
from collections.abc import Sequence

import numpy as np

from raykv.config import KEYS_PER_CALL
from raykv.protocol.clients import Call
from raykv.protocol.location import Locations


class Held:
    """Ids of leases and reservations, and locations to report. For one thread at a time.

    news: whether a release or report waits to be sent.
    """

    def __init__(self, client: int) -> None:
        """client: id of the client."""
        self._client, self._seq = client, itertools.count(1)
        self._ids = set[int]()
        self._pulled, self._corrupt = list[Locations](), list[Locations]()
        self.news = False

    def __len__(self) -> int:
        """Number of held ids."""
        return len(self._ids)

    def next_call(self, hold: Sequence[int]) -> Call:
        """Return the first argument of the next call. hold: ids to hold from now on."""
        self._ids.update(hold)
        pulled = _joined(self._pulled) if self._pulled else b""
        corrupt = _joined(self._corrupt) if self._corrupt else b""
        self.news = bool(self._pulled or self._corrupt)
        return Call(self._client, next(self._seq), array("Q", self._ids).tobytes(), pulled, corrupt)

    def release(self, ids: Sequence[int]) -> None:
        """Stop holding these ids."""
        self._ids.difference_update(ids)
        self.news = True

    def pulled(self, locations: Locations) -> None:
        """Report staging slots that now hold their blocks."""
        self._pulled.append(locations)
        self.news = True

    def corrupt(self, locations: Locations) -> None:
        """Report locations where a reader found another block, no block, or altered bytes."""
        self._corrupt.append(locations)
        self.news = True


def _joined(parts: list[Locations]) -> bytes:
    """Remove the first KEYS_PER_CALL locations from `parts`, and return them as bytes. Later calls send the rest."""
    whole = np.concatenate(parts)
    parts[:] = [whole[KEYS_PER_CALL:]] if len(whole) > KEYS_PER_CALL else []
    return whole[:KEYS_PER_CALL].tobytes()

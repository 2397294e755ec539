"""A tier of files that a test registers, whose calls wait while the test says so."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from raykv.tiers import MARKER, Block, TierUrl
from raykv.tiers.file import FileTier

WAIT_S = 10.0


class MoodyTier(FileTier):
    """`moody:///folder?moods=/other`: while /other/get or /other/put exists, these calls wait for up to 10 s."""

    def __init__(self, url: TierUrl) -> None:
        super().__init__(url)
        self._moods = Path(dict(url.params)["moods"])

    def put_many(self, blocks: Sequence[Block]) -> list[bool]:
        self._wait("put", [block.key for block in blocks])
        return super().put_many(blocks)

    def get_many(self, keys: Sequence[bytes], out: Sequence[memoryview]) -> list[bytes | None]:
        self._wait("get", keys)
        return super().get_many(keys, out)

    def _wait(self, call: str, keys: Sequence[bytes]) -> None:
        """Calls with the marker do not wait: so probes find the tier in order again and again."""
        mood, end = self._moods / call, time.monotonic() + WAIT_S
        if MARKER not in keys and mood.exists():
            (self._moods / f"{call}-waits-{threading.get_ident()}").touch()
            while mood.exists() and time.monotonic() < end:
                time.sleep(0.01)


class Moods:
    """The test's side of a MoodyTier."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def set(self, call: str) -> None:
        (self.folder / call).touch()

    def waiting(self, call: str) -> bool:
        """Whether a call has begun to wait since the last `lift`."""
        return any(self.folder.glob(f"{call}-waits-*"))

    def lift(self) -> None:
        for path in self.folder.iterdir():
            path.unlink()

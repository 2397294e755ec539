"""The worker's side: puts outputs into the engine's cache, and stores outputs that the engine has computed."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from raykv.integrations.vllm.encoder.outputs import Outputs, loaded

log = logging.getLogger("raykv")

WAITING = 32  # maximum number of outputs that wait to be stored, as each takes host memory


def load(cache: dict[str, torch.Tensor], files: dict[str, bytes], device: str) -> None:
    """Put outputs into the engine's cache. cache: outputs by identifier. files: from `Outputs.read`, by identifier."""
    for identifier, file in files.items():
        if identifier not in cache:
            cache[identifier] = loaded(file, device)


class Storing:
    """Outputs on their way to the pool."""

    def __init__(self, outputs: Outputs, at_once: bool) -> None:
        """at_once: whether `store` returns only after the pool has the output, since another engine waits for it."""
        self._outputs, self._at_once = outputs, at_once
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="raykv-encoder")
        self._room = threading.Semaphore(WAITING)

    def store(self, name: str, output: torch.Tensor) -> None:
        """Store an output, by default in the background. Drops it if too many outputs wait, or after an error."""
        if not self._room.acquire(blocking=self._at_once):
            return
        try:
            stored = self._thread.submit(self._store, name, *_on_host(output))
        except RuntimeError:  # no memory for the copy, or no thread
            self._room.release()
            log.exception("an encoder's output was not stored in the raykv pool")
            return
        if self._at_once:
            stored.result()

    def _store(self, name: str, output: torch.Tensor, copied: torch.cuda.Event | None) -> None:
        try:
            if copied is not None:
                copied.synchronize()
            self._outputs.store(name, output, wait=self._at_once)
        except Exception:
            log.exception("an encoder's output was not stored in the raykv pool")
        finally:
            self._room.release()

    def close(self) -> None:
        """End the thread, and drop outputs that wait."""
        self._thread.shutdown(cancel_futures=True)


def _on_host(output: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """Return an output in host memory, and the CUDA event after its copy. Nobody changes an output meanwhile."""
    if not output.is_cuda:
        return output.detach().cpu(), None
    host = torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
    host.copy_(output.detach(), non_blocking=True)
    copied: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()
    return host, copied

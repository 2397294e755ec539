"""Which weights a LoRA adapter has: vLLM hashes its name and path (0.29 only its name), and others may have both.

ray.serve.llm keeps every adapter under a path made of its name, whatever bucket it came from and however often it was
trained again. An engine's own cache ends with the engine; the pool outlives it.
"""

import functools
import hashlib
import logging
import secrets
from pathlib import Path
from typing import Any

log = logging.getLogger("raykv")


def weights_of(adapter: Any) -> bytes:
    """A digest of the adapter that a request asks for, of its path where that is no local folder; empty for none.

    adapter: vLLM's LoRARequest, or None. Its files are read once, as vLLM loads them once.
    """
    return _digest(adapter.lora_int_id, adapter.lora_path) if adapter else b""


@functools.lru_cache(1024)
def _digest(number: int, path: str) -> bytes:
    """number: vLLM's, of what it has loaded from there."""
    if not Path(path).is_dir():  # a name on the hub, which stands for its weights as a model's does
        return hashlib.sha256(path.encode()).digest()
    total = hashlib.sha256()
    try:
        for file in sorted(Path(path).glob("adapter_*")):
            with file.open("rb") as opened:
                total.update(file.name.encode() + b"\0" + hashlib.file_digest(opened, "sha256").digest())
    except OSError as error:
        log.warning("the LoRA adapter in %s can't be read, and its KV is shared with no other engine: %r", path, error)
        return secrets.token_bytes(32)
    return total.digest()

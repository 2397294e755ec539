"""Runs vLLM's scheduler and worker in the calling process, as vLLM itself does with one GPU.

By default, vLLM on CPUs runs its scheduler and worker in separate processes. These processes poll for messages, which
slows down transfers on a machine with few cores. With a GPU and one rank, vLLM has no such processes.
"""

import gc
from multiprocessing import resource_tracker
from typing import Any

ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def prepare() -> None:
    """Let vLLM start, and start quickly, in a process that has imported raykv. Call this before creating an `LLM`."""
    import llvmlite.binding.ffi

    # vLLM searches all imported modules for kernels. It fails on this object, which treats any attribute as a function
    llvmlite.binding.ffi.lib._fntab["__dict__"] = {}
    gc.freeze()  # saves a second: vLLM collects garbage five times at its start, and now skips imported objects


def end(llm: Any) -> None:
    """End an engine's processes properly. Otherwise their files stay in /dev/shm."""
    llm.llm_engine.engine_core.shutdown()
    # Let Python's tracker process remove the files of late processes that vLLM killed, before Ray kills the tracker
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]

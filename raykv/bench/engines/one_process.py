"""Runs vLLM's scheduler and worker in the calling process, as vLLM itself does with one GPU.

On CPUs vLLM by default runs scheduler and worker in their own processes. These processes poll for messages, and on few
cores they take time from a transfer. With a GPU and one rank vLLM has no such processes.
"""

import gc
from multiprocessing import resource_tracker
from typing import Any

ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def prepare() -> None:
    """Make vLLM start, and start quickly, in a process that has imported raykv. Call it before `LLM`."""
    import llvmlite.binding.ffi

    # vLLM looks for kernels in all imported modules. It fails on this object, which takes any attribute for a function
    llvmlite.binding.ffi.lib._fntab["__dict__"] = {}
    gc.freeze()  # saves a second: vLLM collects garbage five times as it starts, and now skips all that is imported


def end(llm: Any) -> None:
    """End an engine's processes properly. Otherwise their files stay in /dev/shm."""
    llm.llm_engine.engine_core.shutdown()
    # vLLM kills processes that end late. A tracker process removes their files. Ray would kill the tracker too early
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]

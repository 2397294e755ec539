"""Runs vLLM's scheduler and worker in the calling process, as vLLM itself does with one GPU.

On CPUs vLLM by default runs each in its own process. These processes poll for messages, and on few cores they take time
from a transfer. With a GPU and one rank vLLM has no such processes.
"""

import gc

ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def prepare() -> None:
    """Let vLLM start, and start quickly, in a process that has imported raykv. Call it before `LLM`."""
    import llvmlite.binding.ffi

    # vLLM searches all imported modules for kernels, and fails on llvmlite's: any attribute there is a function
    llvmlite.binding.ffi.lib._fntab["__dict__"] = {}
    gc.freeze()  # vLLM collects garbage five times as it starts, and without freeze looks at all imports: a second

"""vLLM with its scheduler and its worker in the process that asks, as are the two on one GPU.

On CPUs vLLM's default is a process each, which poll for each other's messages: on few cores they take those that a
transfer needs. With a GPU and one rank it has no such processes.
"""

import gc

ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def prepare() -> None:
    """Make vLLM start, and quickly, in a process that has imported raykv. To be called before `LLM`."""
    import llvmlite.binding.ffi

    # vLLM looks for kernels in all that this process has imported, also where whatever it asks for is a function
    llvmlite.binding.ffi.lib._fntab["__dict__"] = {}
    gc.freeze()  # vLLM collects garbage five times as it starts, and all that was imported is looked at: a second

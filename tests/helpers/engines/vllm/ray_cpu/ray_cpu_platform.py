"""vLLM's CPU platform with a Ray resource, so that vLLM's real Ray executor runs its workers without a GPU.

Raylets are started with `num_gpus` (a count: there is no GPU), and engines with this folder on their PYTHONPATH.
"""

from vllm.platforms.cpu import CpuPlatform


class RayCpuPlatform(CpuPlatform):  # type: ignore[misc]
    ray_device_key = "GPU"

"""vLLM's CPU platform with a Ray resource, so that vLLM's real Ray executor runs its workers without a GPU.

Start raylets with `num_gpus`, a mere count, and engines with this folder on their PYTHONPATH. Models of experts run in
data parallel too: see ray_cpu_communicator.
"""

from vllm.platforms.cpu import CpuPlatform


class RayCpuPlatform(CpuPlatform):  # type: ignore[misc]
    ray_device_key = "GPU"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "ray_cpu_communicator.Communicator"

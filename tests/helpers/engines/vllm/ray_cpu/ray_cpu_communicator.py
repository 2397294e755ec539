"""The two collectives by which experts' ranks exchange tokens. vLLM's CPU build lacks them.

They are not in the platform's module, because vLLM imports that before the module of its communicators.
"""

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class Communicator(CpuCommunicator):  # type: ignore[misc]
    def all_gatherv(
        self, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
    ) -> torch.Tensor | list[torch.Tensor]:
        if isinstance(input_, list):
            return [self._gathered(one, sizes) for one in input_]
        return self._gathered(input_, sizes)

    def _gathered(self, rows: torch.Tensor, sizes: list[int] | None) -> torch.Tensor:
        """Gather all ranks' rows. Gloo gathers equal shapes, so each rank pads its rows to the longest."""
        sizes = sizes or [len(rows)] * self.world_size
        mine = rows.new_zeros((max(sizes), *rows.shape[1:]))
        mine[: len(rows)] = rows
        all_ = [torch.empty_like(mine) for _ in sizes]
        dist.all_gather(all_, mine, group=self.device_group)
        return torch.cat([one[:size] for one, size in zip(all_, sizes, strict=True)])

    def reduce_scatterv(self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
        sizes = sizes or [len(input_) // self.world_size] * self.world_size
        total = input_.clone()
        dist.all_reduce(total, group=self.device_group)
        return torch.split(total, sizes)[self.rank_in_group].contiguous()

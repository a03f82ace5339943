"""What FSDP2 does instead of its reduce-scatter: sums in the order of ranks, or no sum at all."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from uniep.nn.gradient_shards import share_of_sum

__all__ = ["Complete", "RankOrder"]


class RankOrder(ReduceScatter):
    """This rank's share of the sum over ranks, ascending, in fp32."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        shares = input_tensor.view(group.size(), 1, -1)
        output_tensor.copy_(share_of_sum(shares, group).view(output_tensor.shape))


class Complete(RankOrder):
    """This rank's share of a gradient that is the same, and complete, on all ranks."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        output_tensor.copy_(input_tensor.view(group.size(), *output_tensor.shape)[group.rank()])

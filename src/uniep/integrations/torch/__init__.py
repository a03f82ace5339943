"""Plain PyTorch around `uniep.nn.Experts`: DDP, FSDP2, gradient clipping and checkpoints on an EP x DP mesh.

Expert parallelism splits the experts over the ranks of mesh["ep"]; ranks along mesh["dp"] hold copies of the same
experts.  All ranks see different tokens.  After backward the layer has summed an expert's gradient over its EP group.
What remains is a reduction over mesh["dp"].  For the mean over all ranks the sum must be divided by the size of the
whole mesh, not of "dp"; both wrappers here do that.  Dense parameters are averaged over all ranks as always.
"""

from uniep.integrations.torch.clipping import clip_grad_norm_, share_nonfinite_
from uniep.integrations.torch.owners import split_parameters
from uniep.integrations.torch.shards import (
    of_shard,
    reduce_dense_gradients,
    reduce_in_rank_order,
    sum_over_shards,
)
from uniep.integrations.torch.states import TrainState, load_full_state_dict
from uniep.integrations.torch.wrappers import data_parallel, distribute_experts, fully_shard_experts

__all__ = [
    "TrainState",
    "clip_grad_norm_",
    "data_parallel",
    "distribute_experts",
    "fully_shard_experts",
    "load_full_state_dict",
    "of_shard",
    "reduce_dense_gradients",
    "reduce_in_rank_order",
    "share_nonfinite_",
    "split_parameters",
    "sum_over_shards",
]

"""A whole training step whose bits do not depend on how its shards are spread over ranks.

The global batch is a fixed number of shards, numbered.  A rank holds consecutive ones, as many as every other rank, in
the order of ranks; of a mesh (dp, ep), rank dp * EP + ep.  Dense layers run shard by shard, so that every operator sees
the same shapes; the MoE call may take a rank's shards together.  What is summed over shards is summed in their order:

| | |
|---|---|
| losses, dense gradients | `sum_over_shards`, `reduce_dense_gradients`; with FSDP2 `reduce_in_rank_order` |
| expert gradients | by the layer: `MoEConfig(gradient_shards=G)`, `Workspace(copies=mesh["dp"])` |
| the norm of all gradients | `clip_grad_norm_(..., independent=True)` |

**Order**: ((shard 0 + shard 1) + shard 2) + ..., in fp32.  Expert gradients: blocks of shards, `nn.gradient_shards`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from uniep.errors import ConfigError, UnsupportedError
from uniep.integrations.torch.owners import split_parameters
from uniep.integrations.torch.rank_order import RankOrder
from uniep.layout import SUMMED_AT_ONCE
from uniep.nn import Experts
from uniep.nn.gradient_shards import sum_over_ranks
from uniep.workspace import process_group

__all__ = ["of_shard", "reduce_dense_gradients", "reduce_in_rank_order", "sum_over_shards"]

_Model = TypeVar("_Model", bound=nn.Module)


def of_shard(model: _Model) -> _Model:
    """`model` for one more shard of this rank: it shares all memory, the experts and their Workspace, but has gradients
    of its own of the dense parameters.

    Make it when the model is on its device and has its values, before it is wrapped.  Values that an optimizer or
    `load_state_dict` writes are seen by all; a parameter or buffer that is replaced is not.  An expert's gradient is
    accumulated in `model`.
    """
    dense, experts = split_parameters(model)
    shared: dict[int, object] = {id(t): t for t in (*experts, *model.buffers())}
    shared |= {id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in dense}
    return copy.deepcopy(model, shared)


@torch.no_grad()
def sum_over_shards(
    of_shards: Sequence[Sequence[Tensor]], group: dist.ProcessGroup | DeviceMesh | None
) -> list[Tensor]:
    """Sums over the shards of all ranks, the same bits on every rank: for each tensor of a shard one, fp32.

    of_shards: for each of this rank's shards, the same number of tensors of the same shapes, any floating dtype.
    group: of all ranks that hold shards, a mesh of one dimension, or None for this rank alone.  Collective.
    **Order**: ((shard 0 + shard 1) + shard 2) + ... in fp32; this rank's shards lie behind those of lower ranks.

    Raises ConfigError if this rank has no shard, or if its shards differ in their tensors.
    """
    if not of_shards:
        raise ConfigError("this rank has no shard to add; every rank holds as many, at least one")
    shapes = [t.shape for t in of_shards[0]]
    for number, tensors in enumerate(of_shards):
        if [t.shape for t in tensors] != shapes:
            raise ConfigError(
                f"shard {number} of this rank has tensors of shapes {[tuple(t.shape) for t in tensors]}, but its shard "
                f"0 {list(map(tuple, shapes))}; give the same tensors of each shard"
            )
    if not shapes:
        return []
    ranks = process_group(group)
    total = [t.new_empty(t.shape, dtype=torch.float32) for t in of_shards[0]]
    for numbers in _buckets([t.numel() for t in total]):
        mine = torch.stack([torch.cat([shard[n].detach().float().flatten() for n in numbers]) for shard in of_shards])
        summed = sum_over_ranks(mine, ranks)
        for number, part in zip(numbers, summed.split([total[n].numel() for n in numbers]), strict=True):
            total[number].copy_(part.view(total[number].shape))
    return total


def _buckets(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Consecutive numbers whose sizes together are at most SUMMED_AT_ONCE, or one number."""
    bucket: list[int] = []
    for number, size in enumerate(sizes):
        if bucket and sum(sizes[n] for n in bucket) + size > SUMMED_AT_ONCE:
            yield bucket
            bucket = []
        bucket.append(number)
    yield bucket


@torch.no_grad()
def reduce_dense_gradients(
    model: nn.Module, shards: Sequence[nn.Module], group: dist.ProcessGroup | DeviceMesh | None
) -> None:
    """Set `.grad` of the dense parameters of `model` to the sum over the shards of all ranks, the same bits on each.

    After `backward`.  shards: for each shard of this rank the module that ran it: `model` itself or `of_shard(model)`.
    group: as for `sum_over_shards`, which says the order.  The sum is cast once to the parameter's dtype.  A parameter
    without a gradient in any shard has none; in some, the others count as zeros.  It is a sum: let each shard's loss be
    its part of the global mean.

    Expert gradients are not touched: the layer has summed them over its EP group and over copies
    (`Workspace(copies=)`).

    Raises ConfigError if ranks of `group` hold experts that nothing sums: the group is not EP x copies; as
    `split_parameters`.
    """
    ranks = process_group(group)
    size = ranks.size() if ranks is not None else 1
    for name, module in model.named_modules():
        if isinstance(module, Experts) and module.workspace.ep_size * module.workspace.num_copies != size:
            space = module.workspace
            raise ConfigError(
                f"{name} sums expert gradients over an EP group of {space.ep_size} ranks and {space.num_copies} "
                f"copies, but shards are spread over {size} ranks; give its Workspace copies=, the ranks of other EP "
                "groups that hold the same experts"
            )
    dense = split_parameters(model)[0]
    of_shards = [split_parameters(shard)[0] for shard in shards]
    if any(len(parameters) != len(dense) for parameters in of_shards):
        raise ConfigError(
            f"the model has {len(dense)} dense parameters, but its shards {[len(p) for p in of_shards]}; make them "
            "with of_shard(model)"
        )
    wanted = [number for number, p in enumerate(dense) if p.requires_grad]
    device = dense[0].device if dense else torch.device("cpu")
    found = [
        [torch.tensor([of[n].grad is not None for n in wanted], dtype=torch.float32, device=device)] for of in of_shards
    ]
    grads = [[_grad(of[n]) for n in wanted] for of in of_shards]
    counts, *sums = sum_over_shards([a + b for a, b in zip(found, grads, strict=True)], ranks)
    for number, count, total in zip(wanted, counts.tolist(), sums, strict=True):
        dense[number].grad = total.to(dense[number].dtype) if count else None


def _grad(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def reduce_in_rank_order(model: nn.Module) -> None:
    """FSDP2: sum the gradients of every unit of `model` in the order of ranks; call it after `fully_shard`, in place.

    Each rank is a shard.  **Order**: ((rank 0 + rank 1) + rank 2) + ... of the unit's mesh in fp32, cast once to its
    reduce dtype, then divided as FSDP2 does, by the number of ranks: a mean.  Experts whose Workspace has `copies` are
    complete already and stay as `fully_shard_experts` left them.  Bytes on the wire are those of PyTorch's
    reduce-scatter.

    Raises ConfigError if no module is in FSDP2; UnsupportedError for units that are also replicated (HSDP), whose
    second sum would have PyTorch's order, and for experts with more than one copy that no Workspace sums.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not units:
        raise ConfigError(f"no module of this {type(model).__name__} is sharded by FSDP2; call fully_shard first")
    for unit in units:
        group = unit._get_fsdp_state()._fsdp_param_group
        if group is None:  # a unit without parameters
            continue
        mesh = group.mesh_info.mesh
        if mesh.ndim > 1:
            raise UnsupportedError(
                f"a {type(unit).__name__} is sharded and replicated over a mesh of {tuple(mesh.shape)}; use a mesh of "
                "one dimension, so that all its gradients are added in one order"
            )
        if isinstance(unit, Experts):
            if unit.workspace.num_copies != mesh.size():
                raise UnsupportedError(
                    f"experts have {mesh.size()} copies but their Workspace sums {unit.workspace.num_copies}; pass it "
                    "copies=mesh['dp'] and MoEConfig(gradient_shards=)"
                )
        else:
            unit.set_custom_reduce_scatter(RankOrder())
            unit.set_force_sum_reduction_for_comms(mesh.size() > 1)

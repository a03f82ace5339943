"""Plain PyTorch around `uniep.nn.Experts`: DDP, FSDP2, gradient clipping and checkpoints on an EP x DP mesh.

Expert parallelism splits the experts over the ranks of mesh["ep"]; ranks along mesh["dp"] hold copies of the same
experts.  All ranks see different tokens.  After backward the layer has summed an expert's gradient over its EP group,
so what is left is a reduction over mesh["dp"], and the mean over all ranks needs the divisor of the whole mesh, not
that of "dp": both wrappers here see to it.  The dense rest is averaged over all ranks as always.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from uniep.errors import ConfigError, UnsupportedError

__all__ = [
    "TrainState",
    "clip_grad_norm_",
    "data_parallel",
    "distribute_experts",
    "fully_shard_experts",
    "split_parameters",
]


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(dense, experts): the parameters of `model`, each once.

    Optimizers want them as two groups: foreach kernels cannot mix DTensors of different meshes.
    Raises ConfigError if there is no `Experts` in the model.
    """
    experts = {p: None for _, module in _experts(model) for p in module.parameters()}
    return [p for p in model.parameters() if p not in experts], list(experts)


def data_parallel(
    model: nn.Module, mesh: DeviceMesh, *, dp: str = "dp", ep: str = "ep", **options: Any
) -> DistributedDataParallel:
    """DDP: every gradient becomes the mean over all ranks, that of an expert being reduced over its copies only.

    Each `Experts` is wrapped in a DDP over mesh[dp], in place; the returned DDP over all ranks leaves them alone.
    options: of both, as DistributedDataParallel takes them, less process_group.

    Expert gradients arrive summed over the EP group and are divided by its size as they come, before anything else
    sees them, so gradients may be accumulated over several backwards, within `no_sync()` or not.  (Within no_sync of
    the outer DDP the experts' are reduced in every backward all the same, and are right.)

    Raises ConfigError if the model has no Experts, if they are on another EP group than mesh[ep], if the mesh is not
    made of all ranks; UnsupportedError for main_grad, which DDP would not reduce.
    """
    found = _checked(model, mesh, dp, ep)
    if mesh.size() != dist.get_world_size():
        raise ConfigError(
            f"the mesh has {mesh.size()} ranks but the job {dist.get_world_size()}; DDP averages over all of them. "
            "Use fully_shard_experts with parallelism beyond EP and DP"
        )
    if "process_group" in options:
        raise ConfigError("process_group is decided by the mesh; leave it out")
    parts, group = mesh[ep].size(), mesh[dp].get_group()
    for fqn, module in found.items():
        if any(isinstance(p, DTensor) for p in module.parameters()):
            raise UnsupportedError(f"{fqn} holds DTensors, which DDP does not take; use fully_shard_experts")
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda grad: grad / parts)
        if any(p.requires_grad for p in module.parameters()):
            parent, _, name = fqn.rpartition(".")
            setattr(model.get_submodule(parent), name, DistributedDataParallel(module, process_group=group, **options))
    experts = {p for module in found.values() for p in module.parameters()}
    ignored = [name for name, p in model.named_parameters() if p in experts]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    return DistributedDataParallel(model, **options)


def distribute_experts(model: nn.Module, ep_mesh: DeviceMesh) -> None:
    """Make each parameter of each `Experts` a DTensor over `ep_mesh`, split along its experts; nothing moves.

    w13 then says that it is (E, 2F, D), rank r holding experts r*e .. r*e + e-1, so that FSDP2, optimizers and
    checkpoints know one expert from another.  Before the optimizer is made.
    """
    for _, module in _experts(model):
        _check_group(module, ep_mesh)
        for name, parameter in list(module.named_parameters()):
            if not isinstance(parameter, DTensor):
                whole = DTensor.from_local(parameter.detach(), ep_mesh, [Shard(0)], run_check=False)
                module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))


def fully_shard_experts(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    dp: str = "dp",
    ep: str = "ep",
    mp_policy: MixedPrecisionPolicy | None = None,
    **options: Any,
) -> None:
    """FSDP2 of each `Experts` over mesh[dp], in place; call `fully_shard` on the blocks and the model afterwards.

    Parameters become DTensors over (dp, ep) of global shape (E, ...): split by experts if dp divides a rank's share
    of them, else along their second dimension.  Gradients become the mean over all ranks of the mesh.
    mp_policy: inputs are not cast, whatever it says: routing weights stay fp32, and x comes in the layer's dtype
        because the block around was cast.
    options: of fully_shard, less mesh (reshard_after_forward, offload_policy, shard_placement_fn).

    Raises ConfigError if the model has no Experts, or they are on another EP group than mesh[ep];
    UnsupportedError for main_grad, which FSDP2 would not reduce.
    """
    found = _checked(model, mesh, dp, ep)
    distribute_experts(model, mesh[ep])
    policy = dataclasses.replace(mp_policy or MixedPrecisionPolicy(), cast_forward_inputs=False)
    for module in found.values():
        local = module.cfg.num_experts // mesh[ep].size()
        by = Shard(0) if local % mesh[dp].size() == 0 else Shard(1)
        chosen = {"shard_placement_fn": lambda _, by=by: by} | options
        sharded = fully_shard(module, mesh=mesh[dp], mp_policy=policy, **chosen)
        # Sums are divided afterwards: gloo cannot do both at once, and NCCL's bits are then the same as its.
        sharded.set_gradient_divide_factor(float(mesh.size()))
        sharded.set_force_sum_reduction_for_comms(True)


@torch.no_grad()
def clip_grad_norm_(
    dense: Iterable[nn.Parameter],
    experts: Iterable[nn.Parameter],
    max_norm: float,
    ep_group: dist.ProcessGroup | DeviceMesh | None,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients by min(1, max_norm / (norm + 1e-6)) of their common norm; returns the norm, fp32.

    Collective over all ranks of the parameters' meshes and of `ep_group`.  The same on every rank: each element of
    each parameter counts once, wherever it lies.  `split_parameters(model)` gives dense and experts.

    dense, experts: tensors or DTensors; a gradient that is None counts as zeros.
    ep_group: the experts' EP group or one-dimensional mesh; None where all experts are here.

    **Order**: the fp32 norm of each parameter's part on this rank; over the parts of each parameter in rank order of
    each mesh dimension it is split over, the last first, EP as its own or before all others; then over all
    parameters, dense ones first, in the order given.  Reruns give the same bits.

    Raises ConfigError for max_norm or norm_type below 0; UnsupportedError for gradients that are partial sums;
    RuntimeError if the norm is not finite and error_if_nonfinite.
    """
    if not (max_norm >= 0 and norm_type > 0):
        raise ConfigError(f"max_norm is {max_norm} and norm_type {norm_type}; they must be at least 0 and above 0")
    group = ep_group.get_group() if isinstance(ep_group, DeviceMesh) else ep_group
    dense, experts = list(dense), list(experts)
    parameters = [*dense, *experts]
    if not parameters:
        raise ConfigError("there are no parameters to clip; an iterator may have been used up before")
    grads = [None if p.grad is None else _part(p.grad) for p in parameters]
    norms = [
        torch.zeros((), device=_part(p).device)
        if g is None
        else torch.linalg.vector_norm(g, norm_type, dtype=torch.float32)
        for p, g in zip(parameters, grads, strict=True)
    ]
    split: dict[tuple[str, ...], list[int]] = {}
    by_name: dict[str, dist.ProcessGroup] = {}
    for number, parameter in enumerate(parameters):
        groups = _groups(parameter, group if number >= len(dense) else None)
        by_name |= {g.group_name: g for g in groups}
        split.setdefault(tuple(g.group_name for g in groups), []).append(number)
    for names, numbers in split.items():
        here = torch.stack([norms[n] for n in numbers])
        for name in names:
            parts = [torch.empty_like(here) for _ in range(by_name[name].size())]
            dist.all_gather(parts, here, group=by_name[name])
            here = torch.linalg.vector_norm(torch.stack(parts), norm_type, dim=0)
        for n, norm in zip(numbers, here, strict=True):
            norms[n] = norm
    device = norms[0].device
    total = torch.linalg.vector_norm(torch.stack([n.to(device) for n in norms]), norm_type)
    if error_if_nonfinite and not math.isfinite(float(total)):
        raise RuntimeError(f"the gradient norm is {float(total)}; gradients were not changed")
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for g in grads:
        if g is not None:
            g.mul_(factor.to(g.device))
    return total


class TrainState(Stateful):
    """Model and optimizer for torch.distributed.checkpoint, with experts under their global ids.

        dcp.save({"train": TrainState(model, optimizer, mesh["ep"])}, checkpoint_id=path)
        dcp.load({"train": TrainState(model, optimizer, mesh["ep"])}, checkpoint_id=path)

    Any EP and DP size loads what any other saved, plain, DDP or FSDP2: w13 is one tensor (E, 2F, D) in the
    checkpoint.  Plain and DDP models keep ordinary parameters; they are DTensors only on their way.  An expert or a
    tensor that the checkpoint lacks is an error of dcp.load.

    model: with `Experts` in it, wrapped or not.  optimizer: of its parameters, or None.
    ep_mesh: one-dimensional, e.g. mesh["ep"].
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, ep_mesh: DeviceMesh) -> None:
        self.model, self.optimizers, self.ep_mesh = model, () if optimizer is None else (optimizer,), ep_mesh
        self.names = set()
        for fqn, module in _experts(model):
            _check_group(module, ep_mesh)
            self.names |= {f"{_unwrapped(model, fqn)}{name}" for name, _ in module.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizers)
        return {"model": self._spread(model), "optimizer": self._spread(optimizer)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        model, optimizer = (self._gather_in(state_dict[name]) for name in ("model", "optimizer"))
        set_state_dict(self.model, self.optimizers, model_state_dict=model, optim_state_dict=optimizer)

"""Plain PyTorch around `uniep.nn.Experts`: DDP, FSDP2, gradient clipping and checkpoints on an EP x DP mesh.

Expert parallelism splits the experts over the ranks of mesh["ep"]; ranks along mesh["dp"] hold copies of the same
experts.  All ranks see different tokens.  After backward the layer has summed an expert's gradient over its EP group,
so what is left is a reduction over mesh["dp"], and the mean over all ranks needs the divisor of the whole mesh, not
that of "dp": both wrappers here see to it.  The dense rest is averaged over all ranks as always.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from uniep.errors import ConfigError, UnsupportedError
from uniep.nn import Experts

__all__ = [
    "TrainState",
    "clip_grad_norm_",
    "data_parallel",
    "distribute_experts",
    "fully_shard_experts",
    "split_parameters",
]

Change = Callable[[Any, int], Any]


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(dense, experts): the parameters of `model`, each once, in the model's order.

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
    if isinstance(model, Experts):
        raise ConfigError("the model is itself an Experts; pass the module around it")
    if "process_group" in options:
        raise ConfigError("process_group is decided by the mesh; leave it out")
    parts, group = mesh[ep].size(), mesh[dp].get_group()
    for fqn, module in found.items():
        if any(isinstance(p, DTensor) for p in module.parameters()):
            raise UnsupportedError(f"{fqn} holds DTensors, which DDP does not take; use fully_shard_experts")
    wrapped: dict[nn.Module, DistributedDataParallel] = {}
    for module in found.values():
        trained = [p for p in module.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.register_hook(lambda grad: grad / parts)
        if trained:
            wrapped[module] = DistributedDataParallel(module, process_group=group, **options)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in wrapped and not isinstance(parent, DistributedDataParallel):
                setattr(parent, name, wrapped[child])
    experts = {p for module in found.values() for p in module.parameters()}
    ignored = [name for name, p in model.named_parameters() if p in experts]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    return DistributedDataParallel(model, **options)


def distribute_experts(model: nn.Module, ep_mesh: DeviceMesh) -> None:
    """Make each parameter of each `Experts` a DTensor over `ep_mesh`, split along its experts; nothing moves.

    w13 then says that it is (E, 2F, D), rank r holding experts r*e .. r*e + e-1, so that FSDP2, optimizers and
    checkpoints know one expert from another.  Before the optimizer is made.
    """
    for fqn, module in _experts(model):
        _check_group(module, fqn, ep_mesh)
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
        sharded.set_gradient_divide_factor(float(mesh.size()))
        # gloo cannot sum and divide at once.  A group of one must not be told so: torch 2.13 then divides twice.
        sharded.set_force_sum_reduction_for_comms(mesh[dp].size() > 1)


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

    **Order**: the fp32 norm of each parameter's part on this rank; of these norms over the ranks of each mesh dimension
    that the parameter is split over, in the mesh's order, and over `ep_group` last if it is not among them; of these
    over all parameters, dense ones first, in the order given.  Reruns give the same bits.

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
    together: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
    for number, parameter in enumerate(parameters):
        together.setdefault(_split_over(parameter, group if number >= len(dense) else None), []).append(number)
    for groups, numbers in together.items():
        here = torch.stack([norms[n] for n in numbers])
        for over in groups:
            parts = [torch.empty_like(here) for _ in range(over.size())]
            dist.all_gather(parts, here, group=over)
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
        self.model, self.optimizer, self.ep_mesh = model, optimizer, ep_mesh
        self.plain: dict[str, int] = {}  # names of expert parameters that are no DTensors, with their first dimension
        self.owners: dict[str, Experts] = {}  # names of what a state says of whose experts it holds; not checkpointed
        for fqn, module in _experts(model):
            self.owners[f"{fqn}._extra_state".lstrip(".")] = module
            _check_group(module, fqn, ep_mesh)
            for name, parameter in module.named_parameters():
                if not isinstance(parameter, DTensor):
                    self.plain[f"{fqn}.{name}".lstrip(".")] = len(parameter)

    def state_dict(self) -> dict[str, Any]:
        if self.optimizer is None:
            return {"model": self._map(self._without_owners(get_model_state_dict(self.model)), self._spread)}
        model, optimizer = get_state_dict(self.model, self.optimizer)
        model = self._map(self._without_owners(model), self._spread)
        return {"model": model, "optimizer": self._map_states(optimizer, self._spread)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        model = self._map(state_dict["model"], self._local)
        model |= {name: module.get_extra_state() for name, module in self.owners.items()}
        if self.optimizer is None:
            set_model_state_dict(self.model, model)
            return
        optimizer = self._map_states(state_dict["optimizer"], self._local)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def _without_owners(self, tensors: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in tensors.items() if name not in self.owners}

    def _map_states(self, optimizer: Any, change: Change) -> dict[str, Any]:
        states = {fqn: self._map(state, change, fqn) for fqn, state in optimizer["state"].items()}
        return {**optimizer, "state": states}

    def _map(self, tensors: dict[str, Any], change: Change, fqn: str | None = None) -> dict[str, Any]:
        """`change` of all tensors of plain expert parameters: those of `fqn`, or the parameters themselves."""
        return {
            name: change(value, self.plain[fqn or name]) if (fqn or name) in self.plain else value
            for name, value in tensors.items()
        }

    def _spread(self, value: Any, local: int) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != local:
            return value  # such as the optimizer's count of steps
        return DTensor.from_local(value, self.ep_mesh, [Shard(0)], run_check=False)

    def _local(self, value: Any, local: int) -> Any:
        return value.to_local() if isinstance(value, DTensor) else value


def _experts(model: nn.Module) -> Iterator[tuple[str, Experts]]:
    """(fqn, module) of each `Experts`; names as if DDP, torch.compile and checkpoint_wrapper were not there."""
    seen = set()
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            seen.add(path)
            yield ".".join(_names(model, path)), module
    if not seen:
        raise ConfigError(f"there is no uniep.nn.Experts in this {type(model).__name__}; build the model with uniep.nn")


def _names(model: nn.Module, path: str) -> Iterator[str]:
    module: Any = model
    for name in path.split(".") if path else ():
        wraps = isinstance(module, DistributedDataParallel) or name in ("_orig_mod", "_checkpoint_wrapped_module")
        module = getattr(module, name)
        if not wraps:
            yield name


def _checked(model: nn.Module, mesh: DeviceMesh, dp: str, ep: str) -> dict[str, Experts]:
    names = mesh.mesh_dim_names or ()
    if dp not in names or ep not in names:
        raise ConfigError(f"the mesh has dimensions {names}; it needs {dp!r} and {ep!r}")
    found = dict(_experts(model))
    for fqn, module in found.items():
        _check_group(module, fqn, mesh[ep])
        if module.main_grad is not None:
            raise UnsupportedError(
                f"{fqn} has main_grad={module.main_grad!r}, which PyTorch's wrappers would not reduce over {dp!r}; set "
                "it to None (FSDP2 reduces in fp32 with MixedPrecisionPolicy(reduce_dtype=torch.float32))"
            )
    return found


def _check_group(module: Experts, fqn: str, ep_mesh: DeviceMesh) -> None:
    group = module.workspace.group
    ours = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
    theirs = dist.get_process_group_ranks(ep_mesh.get_group())
    if ours != theirs:
        raise ConfigError(
            f"{fqn} exchanges tokens among ranks {ours} but the mesh's expert-parallel ranks are {theirs}; give its "
            "Workspace that dimension of the mesh"
        )


def _part(t: Tensor) -> Tensor:
    """What of it lies here."""
    return t.to_local() if isinstance(t, DTensor) else t


def _split_over(parameter: Tensor, ep_group: dist.ProcessGroup | None) -> tuple[dist.ProcessGroup, ...]:
    """The groups whose ranks hold different parts of the parameter."""
    groups = []
    if isinstance(parameter, DTensor):
        for dimension, placement in enumerate(parameter.placements):
            if placement.is_partial():
                raise UnsupportedError(f"a parameter is a partial sum ({parameter.placements}); reduce it first")
            if not placement.is_replicate():
                groups.append(parameter.device_mesh.get_group(dimension))
    if ep_group is not None:
        ranks = [dist.get_process_group_ranks(g) for g in groups]
        if dist.get_process_group_ranks(ep_group) not in ranks:
            groups.append(ep_group)
    return tuple(groups)

"""Ownership: along which dimension of each tensor inside an `Experts` this rank's experts lie.

Every function of this package uses it.  w13, w2, b13 and b2 are known.  Any other tensor of a subclass,
parametrization or adapter inside an `Experts` must be declared in its `expert_dims`, because a shape is ambiguous: (e,
D) may be a bias of e experts, or a matrix that all experts of the layer share.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from uniep.errors import ConfigError, UnsupportedError
from uniep.nn import Experts
from uniep.nn.record import recorded_modules
from uniep.nn.wrappers import unwrapped
from uniep.workspace import process_group

__all__ = ["Owner", "check_group", "layers", "mesh_of", "owners", "owners_of", "split_parameters"]


@dataclasses.dataclass(frozen=True)
class Owner:
    """The owner of one tensor inside an `Experts`.

    layer, name: the name of the `Experts` in the model, and of the tensor in it.
    dim: the dimension along which this rank's experts lie; None: all experts of the layer share the tensor.
    """

    layer: str
    name: str
    experts: Experts
    dim: int | None


def owners(model: nn.Module) -> dict[str, tuple[Tensor, Owner]]:
    """name -> (tensor, owner) of all parameters and persistent buffers of all `Experts`, under each of their names.

    Names leave out DDP, torch.compile and checkpoint_wrapper.

    Raises ConfigError if there is no `Experts` in the model, or an owner cannot be told; UnsupportedError for adapters
    around experts that are spread over ranks, and for FSDP1.
    """
    _refuse_wrapped(model)
    found: dict[int, Owner] = {}
    for layer, module in layers(model):
        for name, tensor in itertools.chain(module.named_parameters(), _persistent_buffers(module)):
            if id(tensor) not in found:
                found[id(tensor)] = Owner(layer, name, module, _dim(layer, module, name, tensor))
    everything = itertools.chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    return {plain_name(model, path): (t, found[id(t)]) for path, t in everything if id(t) in found}


def layers(model: nn.Module) -> Iterator[tuple[str, Experts]]:
    """(name, module) of each `Experts`, once."""
    seen = False
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            seen = True
            yield plain_name(model, path), module
    if not seen:
        raise ConfigError(f"there is no uniep.nn.Experts in this {type(model).__name__}; build the model with uniep.nn")


def owners_of(parameters: Iterable[Tensor]) -> dict[int, Owner]:
    """id -> owner of those `parameters` that are inside an `Experts`, of whatever model; its name is not known: ""."""
    wanted = {id(p) for p in parameters}
    return {
        id(tensor): Owner("", name, module, _dim("experts", module, name, tensor))
        for module in recorded_modules()
        if isinstance(module, Experts)
        for name, tensor in module.named_parameters()
        if id(tensor) in wanted
    }


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(dense, experts): the parameters of `model`, each once, in the model's order.

    A parameter that all experts of a layer share is among the dense ones.
    Raises ConfigError if there is no `Experts` in the model, or it is not known which experts a parameter belongs to.
    """
    spread = {id(t) for t, owner in owners(model).values() if owner.dim is not None}
    every = list(model.parameters())
    return [p for p in every if id(p) not in spread], [p for p in every if id(p) in spread]


def plain_name(model: nn.Module, path: str) -> str:
    """The name without the wrappers in it."""
    module, names = model, []
    for name in path.split(".") if path else ():
        if unwrapped(name) and not isinstance(module, DistributedDataParallel):
            names.append(name)
        module = getattr(module, name, module)  # type: ignore[assignment]
    return ".".join(names)


def mesh_of(ep_mesh: Any, device_type: str) -> DeviceMesh:
    """The one-dimensional mesh itself, or one of the process group's ranks.  Raises ConfigError for anything else."""
    group = process_group(ep_mesh, "ep_mesh")
    if group is None:
        raise ConfigError(
            "ep_mesh is None; pass mesh['ep'] or the process group of the experts, also where it has one rank"
        )
    return ep_mesh if isinstance(ep_mesh, DeviceMesh) else DeviceMesh.from_group(group, device_type)


def check_group(module: Experts, layer: str, ep_mesh: DeviceMesh) -> None:
    ours = module.workspace.ranks  # also of one that is closed
    theirs = dist.get_process_group_ranks(ep_mesh.get_group())
    if ours != theirs:
        raise ConfigError(
            f"{layer} exchanges tokens among ranks {ours} but the mesh's expert-parallel ranks are {theirs}; give its "
            "Workspace that dimension of the mesh"
        )


def _dim(layer: str, module: Experts, name: str, tensor: Tensor) -> int | None:
    declared = module.expert_dims
    known = name
    path = name.split(".")
    if len(path) == 3 and path[0] == "parametrizations" and path[2].startswith("original"):
        cfg = module.cfg
        shapes = {
            "w13": (cfg.h_columns, cfg.hidden), "w2": (cfg.hidden, cfg.ffn), "b13": (cfg.h_columns,),
            "b2": (cfg.hidden,),
        }  # fmt: skip
        if name not in declared and tuple(tensor.shape[1:]) == shapes.get(path[1]):
            known = path[1]  # its name before it was parametrized
    if known not in declared:
        raise ConfigError(
            f"{layer}.{name}, of shape {tuple(tensor.shape)}, has no known owner: it may belong to this rank's "
            f"{module.num_local} experts or be shared by all {module.cfg.num_experts}; say which before this call: "
            f"experts.expert_dims = {{**experts.expert_dims, {name!r}: dim}}, the dimension along which the experts "
            "lie, or None if they share it"
        )
    dim = declared[known]
    if dim is None:
        return None
    expected = module.cfg.num_experts if isinstance(tensor, DTensor) else module.num_local
    if not 0 <= dim < tensor.dim() or tensor.shape[dim] % expected:
        what = (
            f"a DTensor of shape {tuple(tensor.shape)} over {tensor.device_mesh}" if isinstance(tensor, DTensor) else ""
        )
        raise ConfigError(
            f"{layer}.{name} is {what or f'of shape {tuple(tensor.shape)}'}; its dimension {dim} should hold "
            f"{expected} experts. Experts that fully_shard or another tool split first are taken for copies: call "
            "fully_shard_experts before fully_shard, and check expert_dims"
        )
    return dim


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, inner in module.named_modules():
        for name, buffer in inner.named_buffers(recurse=False):
            if name not in inner._non_persistent_buffers_set:
                yield f"{path}.{name}".lstrip("."), buffer


def _refuse_wrapped(model: nn.Module) -> None:
    for path, module in model.named_modules():
        inner = module
        while isinstance(below := getattr(inner, "base_layer", None), nn.Module):  # PEFT's name for what it adapts
            inner = below
        if inner is not module and isinstance(inner, Experts) and inner.workspace.ep_size > 1:
            raise UnsupportedError(
                f"{path} is a {type(module).__name__} around experts spread over {inner.workspace.ep_size} ranks; its "
                "own parameters mix this rank's experts and would be taken for shared ones. Give experts their factors "
                "with uniep.nn.add_lora(model, target_parameters=...), adapt dense layers only, or run with EP size 1"
            )
        if isinstance(module, FullyShardedDataParallel) and any(isinstance(m, Experts) for m in module.modules()):
            raise UnsupportedError(
                f"{path or type(model).__name__} is in FSDP1, which takes the experts of all ranks for copies; use "
                "fully_shard_experts and fully_shard"
            )

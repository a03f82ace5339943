"""PyTorch's wrappers: what they put into names, and checks for those that would treat the experts of different ranks as
copies of one parameter."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from uniep.errors import ConfigError

PARAMETERS = ("w13", "w2", "b13", "b2")
"""Names of the parameters of `Experts`."""

_WRAPPERS = re.compile(r"(^|\.)(_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)(?=\.|$)")


def unwrapped(name: str) -> str:
    """The name without FSDP1, torch.compile and activation checkpointing."""
    return _WRAPPERS.sub("", name).removeprefix(".")


def refuse_wrappers(module: nn.Module, group: dist.ProcessGroup, num_experts: int, ddp: Any) -> None:
    """Raise ConfigError if DDP, FSDP1 or FSDP2 reduces or splits the experts of `module` over ranks with others.

    group: the experts' EP group.  ddp: the DistributedDataParallel in whose forward this runs, or None.
    """
    others = set(dist.get_process_group_ranks(group)) - {dist.get_rank()}
    if ddp is not None and (shared := others & set(dist.get_process_group_ranks(ddp.process_group))):
        ours = {id(p) for name, p in module.named_parameters() if p.requires_grad and _is_expert(name)}
        for name, p in ddp.module.named_parameters():
            if id(p) in ours and name not in ddp.parameters_to_ignore:
                raise _error("DistributedDataParallel", name, shared)
    for name in PARAMETERS:
        parameter = getattr(module, name, None)
        if getattr(getattr(parameter, "_base", None), "_is_flat_param", False):
            raise _error("FullyShardedDataParallel (FSDP1)", name, others)
    if hasattr(module, "_is_fsdp_managed_module"):
        for parameter in _sharded_parameters(module):
            refuse_mesh(parameter, group, num_experts)
    for name, parameter in module.named_parameters():
        if _is_expert(name):
            refuse_mesh(parameter, group, num_experts)


def refuse_mesh(parameter: Tensor, group: dist.ProcessGroup | None, num_experts: int) -> None:
    """Raise ConfigError for a DTensor that spans ranks with other experts but has the shape of these experts only."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or group is None or parameter.shape[0] == num_experts:
        return
    others = set(dist.get_process_group_ranks(group)) - {dist.get_rank()}
    if shared := others & set(mesh.mesh.flatten().tolist()):
        raise _error("fully_shard", f"a DTensor {tuple(parameter.shape)} of {num_experts} experts", shared)


def is_full_state_taken() -> bool:
    """Whether torch.distributed.checkpoint is now taking a full state, with all ranks' parts put together.

    It does not tell modules, and it takes plain tensors for copies, of which it keeps rank 0's.  So this looks for the
    frame of its call.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "_get_model_state_dict":
            return getattr(frame.f_locals.get("info"), "full_state_dict", False)
        frame = frame.f_back
    return False


def whole_tensor(local: Tensor, dim: int, group: Any) -> Tensor:
    """The DTensor of the experts of all ranks of `group`, of which `local` is this rank's part along `dim`."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh.from_group(group, local.device.type)
    return DTensor.from_local(local.detach(), mesh, [Shard(dim)], run_check=False)


def _error(wrapper: str, name: str, others: set[int]) -> ConfigError:
    return ConfigError(
        f"{wrapper} takes expert parameters ({name}) for copies of those of rank "
        f"{', '.join(map(str, sorted(others)))}, which holds other experts; those that it has overwritten are lost. "
        "Build the model again, and use uniep.integrations.torch: data_parallel(model, mesh) for DDP, or "
        "fully_shard_experts(model, mesh) before fully_shard"
    )


def _is_expert(name: str) -> bool:
    return name in PARAMETERS or name.startswith(tuple(f"parametrizations.{p}.original" for p in PARAMETERS))


def _sharded_parameters(module: nn.Module) -> Iterator[Tensor]:
    """The tensors by which FSDP2 has replaced the module's parameters; a forward does not see them.

    FSDP2 keeps them in the state of the unit that contains the module, and does not say which unit that is.
    """
    from torch.distributed._composable_state import _module_state_mapping

    for found in {id(s): s for ref in _module_state_mapping.values() if (s := ref()) is not None}.values():
        groups = getattr(found, "_fsdp_param_groups", None) or [getattr(found, "_fsdp_param_group", None)]
        for group in groups:
            for one in getattr(group, "fsdp_params", ()):
                if one._module_info.module is module:
                    yield one.sharded_param

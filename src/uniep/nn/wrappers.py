"""PyTorch's wrappers: what they put into names, and checks for those that would treat the experts of different ranks as
copies of one parameter."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from uniep.errors import ConfigError, UnsupportedError

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


def callers() -> Iterator[FrameType]:
    """The frames of the functions that are now running, the innermost first.  torch.distributed.checkpoint does not
    tell modules and values what it does with them, so its frames are looked for."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_full_state_taken() -> bool:
    """Whether torch.distributed.checkpoint is now taking a full state, with all ranks' parts put together.

    It takes plain tensors for copies, of which it keeps rank 0's.
    """
    for frame in callers():
        if frame.f_code.co_name == "_get_model_state_dict":
            return getattr(frame.f_locals.get("info"), "full_state_dict", False)
    return False


def refuse_full_optimizer_state(held: str) -> None:
    """Raise UnsupportedError if torch.distributed.checkpoint is now taking or loading an optimizer's full state: of
    plain tensors it keeps rank 0's and gives them to all.  held: the experts of this rank."""
    for frame in callers():
        if frame.f_code.co_name == "_verify_options":
            if frame.f_locals.get("optims") and getattr(frame.f_locals.get("options"), "full_state_dict", False):
                raise UnsupportedError(
                    "a full state of the optimizer would have the states of rank 0's experts alone, for all ranks; "
                    f"this one holds {held}.  Save and load with uniep.integrations.torch.TrainState(model, optimizer, "
                    "mesh['ep']), or call distribute_experts(model, mesh['ep']) before making the optimizer; "
                    "get_model_state_dict takes the full state of the model alone"
                )
            return


class RankOfState(Tensor):
    """[rank, EP size] of the experts in a state.  `torch.distributed.checkpoint` asks each value how it is split, while
    all ranks can still raise: it takes plain tensors for copies, and of experts it would write one rank's w13 and
    another's w2.  So this refuses, on all ranks.  Copies stay of this class; saved by torch.save, it is a plain tensor.
    """

    def __create_write_items__(self, name: str, value: Any) -> list[Any]:
        from torch.distributed.checkpoint.planner_helpers import _create_write_items

        self._refuse("save")
        return _create_write_items(name, self.as_subclass(Tensor))

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.planner_helpers import _create_chunk_list

        self._refuse("load")
        return _create_chunk_list(self.as_subclass(Tensor))

    def _refuse(self, what: str) -> None:
        if not _is_together():
            return
        rank, size = (round(float(n)) for n in self.as_subclass(Tensor))
        raise UnsupportedError(
            f"torch.distributed.checkpoint cannot {what} a state of plain experts: of rank {rank} of {size} and of the "
            "other ranks it would have one name, and of each tensor it keeps one rank's.  Pass "
            "uniep.integrations.torch.TrainState(model, optimizer, mesh['ep']), or take the state of all experts by "
            "get_model_state_dict with full_state_dict=True; a checkpoint for each rank takes no_dist=True"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def _is_together() -> bool:
    """Whether torch.distributed.checkpoint is now planning for several ranks, not with no_dist=True."""
    for frame in callers():
        wrapper: Any = frame.f_locals.get("self")
        if type(wrapper).__name__ == "_DistWrapper":
            return wrapper.get_world_size() > 1
    return dist.is_initialized() and dist.get_world_size() > 1


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

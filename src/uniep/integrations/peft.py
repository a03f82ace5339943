"""PEFT's LoRA on the experts of transformers' models, run by uniep at any EP size.

    model = AutoModelForCausalLM.from_pretrained(...)  # as for uniep.integrations.hf
    model = get_peft_model(model, LoraConfig(target_parameters=["experts.gate_up_proj", "experts.down_proj"]))
    adapt(model)  # before the optimizer is made

PEFT's `ParamWrapper` adds B A to a parameter in every forward, for all experts at once.  `adapt` changes the wrappers
in place: they hand base and factors apart to `uniep.moe(lora=)`.  The model stays PEFT's: configurations, adapters that
are switched or disabled, `save_pretrained` and `PeftModel.from_pretrained`, with the bytes of PEFT's own files.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from uniep.errors import ConfigError, UnsupportedError
from uniep.integrations import hf
from uniep.nn.gradient_shards import sum_over_ranks

try:
    from peft.tuners.lora import layer as peft_lora
except ImportError as cause:
    raise UnsupportedError(f"PEFT cannot be imported ({cause}): pip install 'peft>=0.21,<0.22'") from cause

__all__ = ["ParamWrapper", "adapt", "adapter_state", "restore"]

_MEAN = "_uniep_mean"
"""Attribute of parameters whose gradients are averaged over ranks."""


class ParamWrapper(peft_lora.ParamWrapper):
    """What `adapt` makes of PEFT's class; PEFT knows it by its name.

    lora_A has weights (E, r, in) and lora_B (E, out, r), beside a frozen W, for `W + s B A`, which is never made.  With
    expert parallelism both are DTensors, experts split over "ep".  In `state_dict` they are whole and PEFT's, lora_A
    (E r, in) and lora_B (out, r E); `load_state_dict` takes these.
    """

    @contextlib.contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        names = [name for name in active_adapters if name in self.lora_A]
        if not names:
            yield
            return
        if len(names) > 1:
            raise UnsupportedError(
                f"adapters {names} of {self.parameter_name} are active together; uniep runs one, after "
                f"set_adapter({names[0]!r})"
            )
        experts = self.get_base_layer()
        a, b = (_here(factor[names[0]].weight) for factor in (self.lora_A, self.lora_B))
        if a.dim() != 3:
            raise ConfigError(
                f"adapter {names[0]!r} of {self.parameter_name} came after adapt(model); call adapt(model) once more, "
                "before its optimizer is made"
            )
        if _is_interleaved(self):
            b = torch.cat([b[:, 0::2], b[:, 1::2]], 1)
        experts.__dict__.setdefault(hf.FACTORS, {})[self.parameter_name] = (a, b, self.scaling[names[0]])
        try:
            yield
            if hf.FACTORS in experts.__dict__:
                raise UnsupportedError(
                    f"{type(experts).__name__} did not run in uniep, and without its LoRA factors; choose "
                    "experts_implementation or ep_implementation 'uniep', or call restore(model)"
                )
        finally:
            experts.__dict__.pop(hf.FACTORS, None)

    def get_delta_weight(self, adapter_name: str, *args: Any, **kwargs: Any) -> Tensor:
        """`cast(s (B A))` of all experts, as PEFT's `merge` and `unmerge` add it."""
        a, b = (factor[adapter_name].weight for factor in (self.lora_A, self.lora_B))
        delta = (b @ a) * self.scaling[adapter_name]
        param = self.get_param()
        return (delta if self._did_swap_in_out_features else delta.transpose(1, 2)).to(param.device, param.dtype)


class _Mean(torch.autograd.Function):
    """Identity; its gradient is the sum over the ranks of `groups`, divided by `count`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: Sequence[dist.ProcessGroup], count: int) -> Tensor:
        ctx.how = groups, count
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        return _mean(grad, *ctx.how), None, None


def adapt(model: nn.Module) -> list[str]:
    """Let uniep run the experts that PEFT wraps (`LoraConfig(target_parameters=)`), in place; the factors' names.

    Call it after `get_peft_model` or `PeftModel.from_pretrained` and before the optimizer is made, since factors become
    other parameters; and again after an adapter is added.  No `W + s B A` is made: formulas, roundings and order of
    sums are those of `uniep.moe(lora=)`, s is PEFT's scaling.

    A model that transformers has spread over ranks: collective.  Values of all factors become those of rank 0.  A rank
    keeps the factors of its own experts, as DTensors.  Their gradients are means over the ranks' losses, as FSDP2's
    are: the sum over a rank's EP group by `uniep.moe`, over copies in the order of ranks in fp32, divided by the number
    of ranks.  Gradients of other trainable tensors that are not DTensors, such as LoRA on dense layers, are summed over
    all ranks in that order, too, and divided; each has to have one on every rank.  `state_dict`, and so PEFT's
    `save_pretrained`, is collective.

    Raises ConfigError if nothing is wrapped, or is merged; UnsupportedError for experts that uniep does not run,
    parameters other than their weights, and models under tensor or pipeline parallelism; later, UnsupportedError for
    more than one active adapter, two scalings in one layer, and merges over ranks.
    """
    wrappers = {name: m for name, m in model.named_modules() if isinstance(m, peft_lora.ParamWrapper)}
    if not wrappers:
        raise ConfigError(
            f"no parameter of this {type(model).__name__} is wrapped by PEFT; call get_peft_model with "
            "LoraConfig(target_parameters=['experts.gate_up_proj', 'experts.down_proj']) first"
        )
    size = _ranks_of(model)
    ours = {name: wrapper for name, wrapper in wrappers.items() if _check(name, wrapper)}
    if size > 1:
        for parameter in model.parameters():
            if not isinstance(parameter, DTensor):
                dist.broadcast(parameter.detach(), 0)
    made = []
    for name, wrapper in ours.items():
        for adapter in wrapper.lora_A:
            for factor in ("lora_A", "lora_B"):
                linear = getattr(wrapper, factor)[adapter]
                if linear.weight.dim() == 2:
                    whole = _stacked(factor, linear.weight.detach(), wrapper.num_experts)
                    value = _spread(whole, wrapper)
                    linear.weight = nn.Parameter(value, requires_grad=linear.weight.requires_grad)
                made.append(f"{name}.{factor}.{adapter}.weight")
        if not isinstance(wrapper, ParamWrapper):
            wrapper.__class__ = ParamWrapper
            hooks = (
                wrapper.register_state_dict_post_hook(_as_in_files),
                wrapper.register_load_state_dict_pre_hook(_from_files),
            )
            wrapper.__dict__["_uniep_hooks"] = hooks
    if size > 1:
        for module in model.modules():
            if isinstance(module, peft_lora.LoraLayer):
                module.merge = functools.partial(_refuse_merge, size)
        _average(model, size)
    return made


def adapter_state(model: nn.Module) -> dict[str, Any]:
    """What adapters have of `model.state_dict()`, whole, for PEFT's `save_pretrained(state_dict=)`.

    Without it, PEFT gathers the whole model, base included, on every rank.  Collective over the ranks of the model.
    """
    wanted = {name for name, p in model.named_parameters() if p.requires_grad}
    state = {n: v for n, v in model.state_dict().items() if n in wanted or not isinstance(v, DTensor)}
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


@torch.no_grad()
def restore(model: nn.Module) -> None:
    """Undo `adapt`: PEFT's own wrappers, which multiply B A out, with whole factors; collective where they are spread.

    Such wrappers run on one device only."""
    for wrapper in [m for m in model.modules() if isinstance(m, ParamWrapper)]:
        for factor in ("lora_A", "lora_B"):
            for linear in getattr(wrapper, factor).values():
                linear.weight = nn.Parameter(_flat(factor, linear.weight), requires_grad=linear.weight.requires_grad)
        for hook in wrapper.__dict__.pop("_uniep_hooks"):
            hook.remove()
        wrapper.__class__ = peft_lora.ParamWrapper


def _average(model: nn.Module, size: int) -> None:
    """Gradients of all parameters that are whole here become means over ranks, also of those that are trained later."""
    world = dist.group.WORLD
    assert world is not None
    mean = functools.partial(_mean, groups=[world], count=size)
    for parameter in model.parameters():
        if parameter.is_floating_point() and not isinstance(parameter, DTensor) and not hasattr(parameter, _MEAN):
            trained = parameter.requires_grad
            parameter.requires_grad_().register_hook(mean)
            parameter.requires_grad_(trained)
            setattr(parameter, _MEAN, True)


def _refuse_merge(size: int, *_: Any, **__: Any) -> None:
    raise UnsupportedError(
        f"the model is spread over {size} ranks, where nothing is merged: save_pretrained, then "
        "PeftModel.from_pretrained and merge_and_unload on one device"
    )


def _ranks_of(model: nn.Module) -> int:
    """Over how many ranks transformers has spread the model, each with tokens of its own."""
    meshes = [m for part in model.modules() if (m := getattr(part, "_device_mesh", None)) is not None]
    mesh: DeviceMesh | None = meshes[0] if meshes else None
    if mesh is None:
        return 1
    names = mesh.mesh_dim_names or ()
    shared = {name: mesh.size(number) for number, name in enumerate(names) if name in ("tp", "pp")}
    if any(size > 1 for size in shared.values()):
        raise UnsupportedError(f"the model's mesh has {shared}; PEFT beside uniep needs tp_size=1 and pp_size=1")
    if mesh.size() != dist.get_world_size():
        raise UnsupportedError(
            f"the model is on {mesh.size()} of {dist.get_world_size()} ranks; start as many processes as it has ranks"
        )
    return mesh.size()


def _check(name: str, wrapper: peft_lora.ParamWrapper) -> bool:
    """Whether it wraps a weight of experts that uniep runs; another wrapper on one device is PEFT's own matter."""
    experts = wrapper.get_base_layer()
    if not hf.is_experts(experts):
        if isinstance(wrapper.get_param(), DTensor):
            raise UnsupportedError(
                f"{name} wraps {wrapper.parameter_name} of a {type(experts).__name__}, which is spread over ranks; "
                "PEFT cannot add to it. Target parameters of experts alone, and modules by target_modules"
            )
        return False
    reason = hf.why_not(experts)
    if getattr(experts, "_is_expert_parallel", False) and not hf.ep_size(experts):
        reason = "transformers exchanges their tokens; pass ep_implementation='uniep' to DistributedConfig"
    if reason:
        raise UnsupportedError(f"{name}: uniep does not run these experts: {reason}")
    if wrapper.parameter_name not in (names := hf.weight_names(experts)):
        raise UnsupportedError(
            f"{name} wraps {wrapper.parameter_name} of {type(experts).__name__}; target its {' or '.join(names)}"
        )
    if wrapper.merged:
        raise ConfigError(f"{name} has merged {wrapper.merged_adapters}; call unmerge_adapter() before adapt(model)")
    if not hasattr(wrapper, "_did_swap_in_out_features"):
        raise UnsupportedError("this PEFT takes experts for transposed ones: pip install 'peft>=0.21,<0.22'")
    return True


def _is_interleaved(wrapper: peft_lora.ParamWrapper) -> bool:
    experts = wrapper.get_base_layer()
    return experts.has_gate and not experts.is_concatenated and wrapper.parameter_name == hf.weight_names(experts)[0]


def _stacked(factor: str, weight: Tensor, num_experts: int) -> Tensor:
    """PEFT's lora_A (E r, in) -> (E, r, in), lora_B (out, r E) -> (E, out, r)."""
    if factor == "lora_A":
        return weight.view(num_experts, -1, weight.shape[-1])
    return weight.view(weight.shape[0], -1, num_experts).permute(2, 0, 1).contiguous()


def _flat(factor: str, weight: Tensor) -> Tensor:
    """The inverse, of whole factors.  Collective for DTensors."""
    weight = weight.detach()
    whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
    if factor == "lora_A":
        return whole.reshape(-1, whole.shape[-1])
    return whole.permute(1, 2, 0).reshape(whole.shape[1], -1)


def _spread(whole: Tensor, wrapper: peft_lora.ParamWrapper) -> Tensor:
    """This rank's part of (E, ...), if its experts are spread over ranks: of experts, in the order of "ep"."""
    weight = wrapper.get_param()
    if not hf.ep_size(wrapper.get_base_layer()):
        return whole.clone()
    mesh = weight.device_mesh
    placements = [Shard(0) if name == "ep" else Replicate() for name in mesh.mesh_dim_names]
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def _here(weight: Tensor) -> Tensor:
    """This rank's experts' factor, whose gradient becomes what `adapt` says."""
    if not isinstance(weight, DTensor):
        return weight
    mesh = weight.device_mesh
    copies = [
        mesh.get_group(n) for n, name in enumerate(mesh.mesh_dim_names or ()) if name != "ep" and mesh.size(n) > 1
    ]
    return _Mean.apply(weight.to_local(), copies, mesh.size())


def _mean(grad: Tensor, groups: Sequence[dist.ProcessGroup], count: int) -> Tensor:
    """Sum over the ranks of each group in turn, ascending, in fp32, divided by count; in the gradient's dtype."""
    total = grad.float()
    for group in groups:
        total = sum_over_ranks(total.reshape(1, -1), group).view(grad.shape)
    return (total / count).to(grad.dtype)


def _factors(wrapper: ParamWrapper, prefix: str, state: dict[str, Any]) -> Iterator[tuple[str, str, Tensor]]:
    """(factor, key, parameter) of those in the state."""
    for factor in ("lora_A", "lora_B"):
        for adapter, linear in getattr(wrapper, factor).items():
            if (key := f"{prefix}{factor}.{adapter}.weight") in state and linear.weight.dim() == 3:
                yield factor, key, linear.weight


def _as_in_files(wrapper: ParamWrapper, state: dict[str, Any], prefix: str, _: Any) -> None:
    for factor, key, _parameter in _factors(wrapper, prefix, state):
        state[key] = _flat(factor, state[key])


def _from_files(wrapper: ParamWrapper, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for factor, key, parameter in _factors(wrapper, prefix, state):
        given = state[key]
        whole = given.full_tensor() if isinstance(given, DTensor) else given
        if whole.dim() == 2 and whole.numel() == parameter.numel():
            state[key] = _spread(_stacked(factor, whole, wrapper.num_experts), wrapper)

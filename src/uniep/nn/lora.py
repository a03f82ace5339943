"""The call of experts with low-rank factors (`uniep.moe(lora=)`): `W + scale B A`, never multiplied out.

An expert's rows go through A and B as they go through W, on the expert's rank, in the same call.  It is one node of
autograd, outside of compiled graphs.  Formulas and roundings: docs/numerics.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, _CachingTorchDispatchMode

from uniep.backends.base import Needs
from uniep.errors import ConfigError, UnsupportedError
from uniep.limits import lora_limit
from uniep.nn.flops import as_one_operator
from uniep.nn.ops import (
    SAVE_OPS,
    check_memory,
    enter_backward,
    enter_forward,
    for_autograd,
    refuse_transforms,
    refuse_unusual_backward,
)
from uniep.weights import ExpertWeights, Lora
from uniep.workspace import Workspace, by_key, told_to_all

__all__ = ["call_lora", "check_lora"]


def check_lora(experts: ExpertWeights, workspace: Workspace, main_grad: str | None) -> None:
    """Raises ConfigError, DTypeError or UnsupportedError if a call with these factors cannot run."""
    assert experts.lora is not None
    experts.lora.check(workspace.cfg, workspace.ep_size)
    if workspace.backend.name == "hopper":
        for low in experts.factors[::2]:
            if (error := lora_limit(low.shape[1])) is not None:
                raise error
    if main_grad is not None:
        raise UnsupportedError(f"main_grad is {main_grad!r}, but gradients of LoRA factors go to .grad; pass None")
    if any(t.requires_grad for t in experts.tensors):
        raise ConfigError(
            "w13, w2 or a bias requires a gradient beside LoRA factors, which train instead of them; "
            "call requires_grad_(False) on all of them"
        )


@_disable_dynamo
def call_lora(
    x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights, space: Workspace, save: bool, layer: Tensor | None
) -> Tensor:
    """y (T, D), differentiable in x, weights and the factors.  Arguments as of `ops.call`."""
    refuse_transforms()
    _refuse_modes(x, ids, weights)
    check_memory(x, ids, weights, experts, space)
    if not save:
        with as_one_operator(ids, experts, space):
            return enter_forward(x, ids, weights, experts, space, save, layer)[0]
    first, second = experts.trained
    parts = [list(experts.w13), list(experts.w2), list(experts.biases), list(first), list(second)]
    assert experts.lora is not None
    how = space.key, layer, experts.layout, experts.lora.scale, [len(part) for part in parts]
    return _Call.apply(how, x, ids, weights, *(t for part in parts for t in part))


def _refuse_modes(x: Tensor, ids: Tensor, weights: Tensor) -> None:
    """Raise UnsupportedError inside modes that need an operator, which this call is not: to record, to know shapes
    without values, to keep results."""
    proxy = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    if proxy is not None or detect_fake_mode((x, ids, weights)) is not None:
        raise UnsupportedError(
            "a layer with LoRA factors cannot be traced, and does not run on fake tensors: its call is no operator; "
            "merge_lora first"
        )
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, _CachingTorchDispatchMode) and _saves_calls(mode, x, ids, weights):
            raise UnsupportedError(
                "selective checkpointing is to save uniep's calls (SAVE_OPS), but one with LoRA factors is no "
                "operator that it could save, and would run again, with its dispatch; leave SAVE_OPS out of the "
                "policy of layers with factors, or do not checkpoint these layers"
            )


def _saves_calls(mode: _CachingTorchDispatchMode, x: Tensor, ids: Tensor, weights: Tensor) -> bool:
    """Whether a selective checkpoint's policy would save `moe_fwd`; it is asked with the first arguments of one."""
    context = SelectiveCheckpointContext(is_recompute=False)
    context.op_output = x  # as PyTorch from 2.12 on: a policy may look at its size
    try:
        policy = mode.policy_fn(context, SAVE_OPS[0], x, ids, weights)
    except Exception:  # it looks at arguments that a call with factors does not have
        return False
    return policy not in (False, CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: tuple, x: Tensor, ids: Tensor, weights: Tensor, *tensors: Tensor) -> Tensor:
        """how: keys of the Workspace and the layer, layout, scale, and the lengths of the parts of `tensors`: w13, w2,
        biases, factors of w13, factors of w2."""
        key, layer, *of_experts = how
        space = by_key(key)
        experts = _experts(tensors, space, *of_experts)
        with as_one_operator(ids, experts, space):
            y, saved = enter_forward(x, ids, weights, experts, space, True, layer)
        ctx.save_for_backward(x, ids, weights, *tensors, *for_autograd(saved, space))
        ctx.how, ctx.count = how, len(tensors)
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    @told_to_all(lambda ctx, *_: by_key(ctx.how[0]), sums=True)
    def backward(ctx: Any, dy: Tensor | None) -> tuple:  # type: ignore[override]
        refuse_unusual_backward(dy)
        key, layer, *of_experts = ctx.how
        counts = of_experts[-1]
        x, ids, weights, *rest = ctx.saved_tensors
        space = by_key(key)
        experts, saved = _experts(rest[: ctx.count], space, *of_experts), rest[ctx.count :]
        _, need_x, _, need_weights, *wanted = ctx.needs_input_grad
        base, end = sum(counts[:3]), ctx.count - counts[4]
        needs = Needs(need_x, need_weights, any(wanted[base:end]), any(wanted[end:]), biases=False)
        dy = torch.zeros_like(x) if dy is None else dy.contiguous()
        with as_one_operator(ids, experts, space, needs):
            got = enter_backward(dy, x, ids, weights, experts, saved, space, needs, layer)
        factors = *(got.w13 or [None] * counts[3]), *(got.w2 or [None] * counts[4])
        return None, got.x, None, got.weights, *[None] * base, *factors


def _experts(
    tensors: Sequence[Tensor], space: Workspace, layout: Any, scale: float, counts: list[int]
) -> ExpertWeights:
    ends = list(itertools.accumulate(counts, initial=0))
    w13, w2, biases, first, second = (tuple(tensors[a:b]) for a, b in itertools.pairwise(ends))
    b13, b2 = biases or (None, None)
    lora = Lora(first or None, second or None, scale)  # type: ignore[arg-type]
    return ExpertWeights(w13, w2, layout, space.cfg.gated, b13, b2, lora)

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

from uniep.backends.base import Needs
from uniep.errors import ConfigError, UnsupportedError
from uniep.limits import rank_limit
from uniep.nn.ops import enter_backward, enter_forward
from uniep.weights import ExpertWeights, Lora
from uniep.workspace import Workspace, by_key, told_to_all

__all__ = ["call_lora", "check_lora"]


def check_lora(experts: ExpertWeights, workspace: Workspace, main_grad: str | None) -> None:
    """Raises ConfigError, DTypeError or UnsupportedError if a call with these factors cannot run."""
    assert experts.lora is not None
    experts.lora.check(workspace.cfg, workspace.ep_size)
    if workspace.backend.name == "hopper":
        for low in experts.factors[::2]:
            if (error := rank_limit(low.shape[1])) is not None:
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
    if not save:
        return enter_forward(x, ids, weights, experts, space, save, layer)[0]
    first, second = experts.trained
    parts = [list(experts.w13), list(experts.w2), list(experts.biases), list(first), list(second)]
    assert experts.lora is not None
    how = space.key, layer, experts.layout, experts.lora.scale, [len(part) for part in parts]
    return _Call.apply(how, x, ids, weights, *(t for part in parts for t in part))


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: tuple, x: Tensor, ids: Tensor, weights: Tensor, *tensors: Tensor) -> Tensor:
        """how: keys of the Workspace and the layer, layout, scale, and the lengths of the parts of `tensors`: w13, w2,
        biases, factors of w13, factors of w2."""
        key, layer, *of_experts = how
        space = by_key(key)
        y, saved = enter_forward(x, ids, weights, _experts(tensors, space, *of_experts), space, True, layer)
        ctx.save_for_backward(x, ids, weights, *tensors, *saved)
        ctx.how, ctx.count = how, len(tensors)
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    @told_to_all(lambda ctx, *_: by_key(ctx.how[0]))
    def backward(ctx: Any, dy: Tensor | None) -> tuple:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "this backward runs with create_graph=True, but uniep has no second derivatives; call backward or grad "
                "without it"
            )
        key, layer, *of_experts = ctx.how
        counts = of_experts[-1]
        x, ids, weights, *rest = ctx.saved_tensors
        space = by_key(key)
        experts, saved = _experts(rest[: ctx.count], space, *of_experts), rest[ctx.count :]
        _, need_x, _, need_weights, *wanted = ctx.needs_input_grad
        base, end = sum(counts[:3]), ctx.count - counts[4]
        needs = Needs(need_x, need_weights, any(wanted[base:end]), any(wanted[end:]), biases=False)
        dy = torch.zeros_like(x) if dy is None else dy.contiguous()
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

"""The two custom operators behind `uniep.moe`, and their autograd.

Both are functional (they return fresh tensors; the Workspace's memory is never returned) and carry the
ORDERED effect: torch.compile may neither delete nor reorder them, because peers wait for every call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from uniep.backends.base import Inputs, Needs
from uniep.errors import ConfigError, UniEPError
from uniep.weights import ExpertWeights
from uniep.workspace import Workspace, by_key

__all__ = ["SAVE_OPS", "moe_forward"]


def check_tokens(named: dict[str, Tensor], workspace: Workspace) -> None:
    """Raise ConfigError unless all have one number of tokens, which the Workspace can take."""
    for name, tensor in named.items():
        if len(tensor) != len(named["ids"]):
            raise ConfigError(f"{name} and ids differ in their number of tokens: {len(tensor)} and {len(named['ids'])}")
    if len(named["ids"]) > workspace.cfg.max_tokens_per_rank:
        raise ConfigError(
            f"there are {len(named['ids'])} tokens but max_tokens_per_rank is "
            f"{workspace.cfg.max_tokens_per_rank}; raise it in MoEConfig or split the batch"
        )


@torch.library.custom_op("uniep::moe_fwd", mutates_args=())
def moe_forward(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: list[Tensor],
    w2: list[Tensor],
    layout: str,
    workspace: str,
    save: bool,
) -> list[Tensor]:
    """[y, *saved].  x (T, D), ids (T, K), weights (T, K) fp32, experts as in `ExpertWeights`."""
    space = by_key(workspace)
    try:
        check_tokens({"ids": ids, "x": x, "weights": weights}, space)
    except UniEPError as error:
        space.backend.refuse(error)
        raise
    experts = ExpertWeights(tuple(w13), tuple(w2), layout)  # type: ignore[arg-type]
    y, saved = space.backend.forward(Inputs(x, ids, weights, experts), save)
    return [y, *saved]


@moe_forward.register_fake
def _(x, ids, weights, w13, w2, layout, workspace, save):
    y = x.new_empty(x.shape)
    if not save:
        return [y]
    context = torch.library.get_ctx()
    return [y, *by_key(workspace).backend.fake_saved(x.shape[0], x, context.new_dynamic_size)]


@torch.library.custom_op("uniep::moe_bwd", mutates_args=())
def moe_backward(
    dy: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: list[Tensor],
    w2: list[Tensor],
    saved: list[Tensor],
    layout: str,
    workspace: str,
    needs: list[bool],
) -> list[Tensor]:
    """The gradients that `needs` names (x, weights, w13, w2), flattened in that order."""
    experts = ExpertWeights(tuple(w13), tuple(w2), layout)  # type: ignore[arg-type]
    got = by_key(workspace).backend.backward(dy, Inputs(x, ids, weights, experts), saved, Needs(*needs))
    parts = ([got.x], [got.weights], got.w13 or (), got.w2 or ())
    return [t for part, needed in zip(parts, needs, strict=True) if needed for t in part if t is not None]


@moe_backward.register_fake
def _(dy, x, ids, weights, w13, w2, saved, layout, workspace, needs):
    parts = ([x], [weights], w13, w2)
    return [t.new_empty(t.shape) for part, needed in zip(parts, needs, strict=True) if needed for t in part]


def _setup_context(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    x, ids, weights, w13, w2, layout, workspace, _ = inputs
    ctx.counts = len(w13), len(w2)
    ctx.layout, ctx.workspace = layout, workspace
    ctx.needs = [any(t.requires_grad for t in ts) for ts in ([x], [weights], w13, w2)]
    ctx.save_for_backward(x, ids, weights, *w13, *w2, *output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple:
    x, ids, weights, *rest = ctx.saved_tensors
    a, b = ctx.counts
    w13, w2, saved = rest[:a], rest[a : a + b], rest[a + b :]
    dy = torch.zeros_like(x) if grads[0] is None else grads[0].contiguous()
    out = moe_backward(dy, x, ids, weights, w13, w2, saved, ctx.layout, ctx.workspace, ctx.needs)
    left = iter(out)
    need_x, need_weights, need_w13, need_w2 = ctx.needs
    dx = next(left) if need_x else None
    dweights = next(left) if need_weights else None
    dw13 = [next(left) if need_w13 else None for _ in range(a)]
    dw2 = [next(left) if need_w2 else None for _ in range(b)]
    return dx, None, dweights, dw13, dw2, None, None, None


moe_forward.register_autograd(_backward, setup_context=_setup_context)
for _op in (moe_forward, moe_backward):
    _op.register_effect(torch.library.EffectType.ORDERED)

SAVE_OPS = (torch.ops.uniep.moe_fwd.default,)
"""Pass to selective activation checkpointing as MUST_SAVE, so that the layer is not run again."""

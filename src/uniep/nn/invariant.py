"""Dense operators whose rows do not depend on each other: `linear`, `activate`, `add`.

The bits of a row of a result, or of a row of a gradient, do not depend on the other rows, on their number or on the
rank.  Eager mode and inductor run the same operators.  All arithmetic is fp32, never TF32; `cast`
rounds to the dtype of x.

    linear     y = cast(x W^T)          dx = cast(dy W)      dW = cast(sum over tokens of dy^T x)
    activate   y = cast(f(gate, up))    d(gate), d(up) = cast(f'(gate, up, dy))
    add        y = cast(a + b)

**Order**: products as `row_products`; the sum over tokens as `token_sums`.

Shape suffixes: T tokens, D inputs, N outputs, F half of the activation's inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from uniep.activation import ACTIVATIONS, activation_of
from uniep.config import COLUMN_GROUP
from uniep.errors import ConfigError, DTypeError, UnsupportedError
from uniep.nn import flops
from uniep.numerics import fixed_settings, matmul, widened

TOKEN_BLOCK = 128
"""Tokens whose products are added in one call of the matrix library."""
ROWS = 64
"""Rows that are computed together: PyTorch's elementwise loops may use another code path for a ragged tail."""


def refuse_forward_mode(named: Mapping[str, Sequence[Tensor]]) -> None:
    """Custom operators silently drop tangents."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    for name, tensors in named.items():
        if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
            raise UnsupportedError(f"{name} carries a forward-mode tangent (jvp); use reverse mode: backward or grad")


@contextlib.contextmanager
def settings(x: Tensor) -> Iterator[None]:
    """The settings that decide bits on the device of x, and no autocast, which would round fp32 operands; the products
    here run inside this context."""
    of_device = fixed_settings() if x.device.type == "cpu" else contextlib.nullcontext()
    with torch.autocast(x.device.type, enabled=False), of_device:
        yield


def row_products(a_TK: Tensor, b_KN: Tensor) -> Tensor:
    """a @ b in fp32 -> (T, N).  Bits of a row depend on that row and on b alone.

    On the CPU it runs in blocks of 64 x 64 results (`numerics.matmul`), on GPUs in one kernel (`launch/dense.py`).
    """
    if a_TK.device.type == "cpu":
        return matmul(a_TK, b_KN)
    from uniep.launch import dense  # needs Triton

    return dense.row_products(a_TK, b_KN.T)


def token_sums(a_TM: Tensor, b_TN: Tensor) -> Tensor:
    """a^T b in fp32 -> (M, N): the sum over tokens of their outer products.

    **Order**: each TOKEN_BLOCK tokens are one sum of the matrix library; the last block holds the rest.  Blocks are
    added by adjacent pairs, ((b0+b1)+(b2+b3))+... .  So if every rank has TOKEN_BLOCK * 2^n tokens, each rank computes
    a branch of one tree, and `add_by_pairs` completes it: the same bits for every power of two of ranks.
    """
    sums: list[tuple[int, Tensor]] = []  # (level, sum of 2^level blocks), levels descending
    for start in range(0, a_TM.shape[0], TOKEN_BLOCK):
        rows = slice(start, start + TOKEN_BLOCK)
        level, total = 0, matmul(a_TM[rows].T, b_TN[rows])
        while sums and sums[-1][0] == level:
            total = sums.pop()[1] + total
            level += 1
        sums.append((level, total))
    if not sums:
        return torch.zeros(a_TM.shape[1], b_TN.shape[1], dtype=torch.float32, device=a_TM.device)
    total = sums.pop()[1]
    while sums:
        total = sums.pop()[1] + total
    return total


@torch.no_grad()
def add_by_pairs(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum of all ranks' tensors, the same bits on every rank.  Collective; needs the memory of all of them.

    **Order**: adjacent pairs of ranks, ((r0+r1)+(r2+r3))+... .
    """
    if group is None:
        return tensor.clone()
    mine = tensor.contiguous()
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    while len(parts) > 1:
        pairs = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[2 * len(pairs) :]
    return parts[0]


# --- linear ---


@torch.library.custom_op("uniep::linear", mutates_args=())
def _linear(x: Tensor, weight: Tensor) -> Tensor:
    with settings(x):
        return row_products(x, weight.T).to(x.dtype)


@_linear.register_fake
def _(x, weight):
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op("uniep::linear_bwd", mutates_args=())
def _linear_backward(dy: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """(dx, dW), empty where not needed."""
    with settings(x):
        dx = row_products(dy, weight).to(x.dtype) if needs[0] else x.new_empty(0)
        return dx, token_sums(dy, x).to(weight.dtype) if needs[1] else weight.new_empty(0)


@_linear_backward.register_fake
def _(dy, x, weight, needs):
    return tuple(t.new_empty(t.shape if needed else 0) for t, needed in zip((x, weight), needs, strict=True))


def _setup_linear(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)
    ctx.needs = [t.requires_grad for t in inputs]


def _differentiate_linear(ctx: Any, dy: Tensor) -> tuple:
    grads = _linear_backward(dy, *ctx.saved_tensors, ctx.needs)
    return tuple(grad if needed else None for grad, needed in zip(grads, ctx.needs, strict=True))


_linear.register_autograd(_differentiate_linear, setup_context=_setup_linear)


def linear(x: Tensor, weight_ND: Tensor) -> Tensor:
    """x W^T, row by row.  x: (..., D), any floating dtype; weight (N, D), any floating dtype.  -> (..., N), x's dtype.

    The weight's gradient is cast once, to its own dtype.  Raises ConfigError, DTypeError.
    **Order**: `row_products`, `token_sums`.
    """
    if weight_ND.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight_ND.shape[1]:
        raise ConfigError(f"x has shape {tuple(x.shape)} and weight {tuple(weight_ND.shape)}; pass (..., D) and (N, D)")
    if not x.is_floating_point() or not weight_ND.is_floating_point():
        raise DTypeError(f"x has dtype {x.dtype} and weight {weight_ND.dtype}; both must be floating point")
    refuse_forward_mode({"x": [x], "weight": [weight_ND]})
    if not torch.compiler.is_compiling():
        flops.looked_at()
    y_TN = _linear(x.reshape(-1, x.shape[-1]).contiguous(), weight_ND)
    return y_TN.view(*x.shape[:-1], weight_ND.shape[0])


# --- activation ---


def _halves(h_T2F: Tensor, ffn: int) -> list[Tensor]:
    """gate and up, or h itself, in fp32, columns padded with zeros to whole groups."""
    halves = h_T2F.float().split(ffn, 1)
    if h_T2F.device.type == "cpu":
        return [widened(half) for half in halves]
    pad = -halves[0].shape[1] % COLUMN_GROUP
    return [torch.nn.functional.pad(half, (0, pad)) for half in halves]


@torch.library.custom_op("uniep::activate", mutates_args=())
def _activate(h: Tensor, name: str, limit: float | None = None) -> Tensor:
    ffn = h.shape[1] // (1 + ACTIVATIONS[name].gated)
    with settings(h):
        act = activation_of(name, limit).forward(*_halves(h, ffn))
        return act[:, :ffn].to(h.dtype).contiguous()


@_activate.register_fake
def _(h, name, limit=None):
    return h.new_empty(h.shape[0], h.shape[1] // (1 + ACTIVATIONS[name].gated))


@torch.library.custom_op("uniep::activate_bwd", mutates_args=())
def _activate_backward(dy: Tensor, h: Tensor, name: str, limit: float | None = None) -> Tensor:
    ffn = dy.shape[1]
    with settings(h):
        halves = _halves(h, ffn)
        d_act = torch.zeros_like(halves[0])
        d_act[:, :ffn] = dy
        grads = activation_of(name, limit).backward(*halves, d_act)
        return torch.cat([grad[:, :ffn] for grad in grads], 1).to(h.dtype)


@_activate_backward.register_fake
def _(dy, h, name, limit=None):
    return h.new_empty(h.shape)


def _setup_activate(ctx: Any, inputs: tuple, output: Tensor) -> None:
    h, ctx.name, ctx.limit = inputs
    ctx.save_for_backward(h)


def _differentiate_activate(ctx: Any, dy: Tensor) -> tuple:
    return _activate_backward(dy, *ctx.saved_tensors, ctx.name, ctx.limit), None, None


_activate.register_autograd(_differentiate_activate, setup_context=_setup_activate)


def activate(h_T2F: Tensor, activation: str, limit: float | None = None) -> Tensor:
    """cast(f(gate, up)) of one of `MoEConfig`'s activations, with its limit.  h: (T, 2F), gate columns first, or (T, F)
    without a gate.  -> (T, F).  Raises ConfigError, DTypeError."""
    if activation not in tuple(ACTIVATIONS):
        raise ConfigError(f"activation is {activation!r}; it must be one of {', '.join(ACTIVATIONS)}")
    halves = 1 + ACTIVATIONS[activation].gated
    if h_T2F.dim() != 2 or h_T2F.shape[1] % halves:
        shape = "(T, 2F), gate columns first" if halves == 2 else "(T, F)"
        raise ConfigError(f"h has shape {tuple(h_T2F.shape)}; activation {activation!r} takes {shape}")
    if not h_T2F.is_floating_point():
        raise DTypeError(f"h has dtype {h_T2F.dtype}; it must be floating point")
    refuse_forward_mode({"h": [h_T2F]})
    return _activate(h_T2F, activation, limit)


# --- sum ---


@torch.library.custom_op("uniep::add", mutates_args=())
def _add(a: Tensor, b: Tensor) -> Tensor:
    return a + b


@_add.register_fake
def _(a, b):
    return a.new_empty(a.shape)


_add.register_autograd(lambda ctx, dy: (dy, dy))


def add(a: Tensor, b: Tensor) -> Tensor:
    """cast(a + b) of two tensors of one shape and dtype: one rounding, even where a compiler would keep fp32."""
    if a.shape != b.shape or a.dtype != b.dtype:
        raise ConfigError(
            f"a is {tuple(a.shape)} {a.dtype} and b {tuple(b.shape)} {b.dtype}; they must have the same shape and dtype"
        )
    refuse_forward_mode({"a": [a], "b": [b]})
    return _add(a, b)

"""What `torch.utils.flop_counter.FlopCounterMode` counts for the calls of `uniep.moe`.

Like PyTorch for its own operators, it counts GEMMs only.  It counts those of this rank's tokens, wherever their experts
are.  The sum over all ranks is what all of them compute, without the padding of segments.  A rank whose experts are
chosen more often than others' computes more than is counted here, and the others less.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from uniep.backends.base import Needs
from uniep.weights import ExpertWeights
from uniep.workspace import Workspace, by_key

__all__ = ["as_one_operator", "looked_at", "register"]


def looked_at() -> bool:
    """Whether a mode, such as a counter, sees operators; if so, it knows the formulas afterwards."""
    if torch._C._len_torch_dispatch_stack() == 0:
        return False
    register()
    return True


def register() -> None:
    """Register the formulas with PyTorch's counter, if it is loaded, and with active counters.

    Loading the counter loads Triton, so this function does not load it.
    """
    module = sys.modules.get("torch.utils.flop_counter")
    if module is None:
        return
    operators = torch.ops.uniep
    formulas = {
        operators.moe_fwd: _forward,
        operators.moe_bwd: _backward,
        operators.moe_bwd_main_grad: _backward,
        operators.moe_lora: _lora_call,
        operators.router: _product,
        operators.router_bwd: _router_backward,
        operators.linear: _product,
        operators.linear_bwd: _linear_backward,
    }
    module.flop_registry.update(formulas)
    for mode in _get_current_dispatch_mode_stack():  # a counter copies the registered formulas when it is made
        if isinstance(counter := getattr(mode, "counter", None), module.FlopCounterMode):
            counter.flop_registry.update(formulas)


@torch.library.custom_op("uniep::moe_lora", mutates_args=())
def _lora(ids: Tensor, flops_of_slot: int) -> Tensor:
    """Nothing, as an empty tensor: what modes see of a call with LoRA factors, which is no operator."""
    return ids.new_empty(0)


def _lora_call(ids: Tensor, flops_of_slot: int, *args: Any, **_: Any) -> int:
    return _used(ids) * flops_of_slot


@contextlib.contextmanager
def as_one_operator(
    ids_TK: Tensor, experts: ExpertWeights, space: Workspace, needs: Needs | None = None
) -> Iterator[None]:
    """Inside runs a forward with LoRA factors, or, with `needs`, a backward.  Modes see `moe_lora`, and nothing of what
    runs.

    Its FLOPs: the GEMMs of `moe_fwd` and `moe_bwd`, but for the gradients of W13 and W2, and the products with the
    factors, each once.  Those of x with A are kept from the forward; those of the activation are made again, of the
    weighted one.
    """
    if not looked_at():
        yield
        return
    a13, b13, a2, b2 = (pair[i][0].numel() if pair else 0 for pair in experts.trained for i in (0, 1))
    halves, recomputes = _halves(experts.w13, experts.w2), space.backend.way_of(0).recomputes
    if needs is None:
        gemms, low = halves + 1, a13 + b13 + a2 + b2
    else:
        through_w2 = needs.x or needs.weights or needs.w13
        gemms = through_w2 + halves * (needs.x + recomputes)
        low = through_w2 * a2 + (through_w2 or needs.w2) * b2 + needs.w2 * (2 * a2 + b2)
        low += needs.x * a13 + (needs.x or needs.w13) * b13 + needs.w13 * (a13 + b13) + recomputes * b13
    hidden, ffn = experts.w2[0].shape[-2:]
    _lora(ids_TK, 2 * (gemms * hidden * ffn + low))
    with _disable_current_modes():
        yield


def _used(ids_TK: Tensor) -> int:
    """Used slots; if ids cannot be read (fake tensors), all."""
    return ids_TK.numel() if is_fake(ids_TK) or ids_TK.is_meta else int((ids_TK >= 0).sum())


def _gemms(count: int, ids_TK: Tensor, w2: Sequence[Tensor]) -> int:
    """FLOPs of `count` GEMMs between D and F for every used slot."""
    hidden, ffn = w2[0].shape[-2:]
    return count * 2 * _used(ids_TK) * hidden * ffn


def _halves(w13: Sequence[Tensor], w2: Sequence[Tensor]) -> int:
    """2: gate and up; 1 without a gate."""
    return sum(w.numel() for w in w13) // sum(w.numel() for w in w2)


def _forward(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Sequence[Tensor], w2: Sequence[Tensor], *args: Any, **_: Any
) -> int:
    return _gemms(_halves(w13, w2) + 1, ids, w2)


def _backward(
    dy: Tensor, x: Tensor, ids: Tensor, weights: Tensor, w13: Sequence[Tensor], w2: Sequence[Tensor], biases: Any,
    saved: Any, layout: str, workspace: str, needs: Sequence[bool], *args: Any, **_: Any,
) -> int:  # fmt: skip
    need_x, need_weights, need_w13, need_w2, need_biases = needs
    through_w2 = need_x or need_weights or need_w13 or (need_biases and bool(biases))
    recomputes = by_key(workspace).backend.way_of(0).recomputes
    return _gemms(through_w2 + _halves(w13, w2) * (recomputes + need_x + need_w13) + need_w2, ids, w2)


def _product(x: Tensor, weight: Tensor, *args: Any, **_: Any) -> int:
    return 2 * x.shape[0] * weight.numel()


def _router_backward(d_weights: Any, d_aux: Any, d_z: Any, x: Tensor, weight: Tensor, *args: Any, **_: Any) -> int:
    return sum(args[-1]) * _product(x, weight)


def _linear_backward(dy: Any, x: Tensor, weight: Tensor, needs: Sequence[bool], *args: Any, **_: Any) -> int:
    return sum(needs) * _product(x, weight)

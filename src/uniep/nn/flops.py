"""What `torch.utils.flop_counter.FlopCounterMode` counts for the operators behind `uniep.moe`.

Like PyTorch for its own operators, it counts GEMMs only.  It counts those of this rank's tokens, wherever their experts
are.  The sum over all ranks is what all of them compute, without the padding of segments.  A rank whose experts are
chosen more often than others' computes more than is counted here, and the others less.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

__all__ = ["looked_at", "register"]


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
        operators.router: _router_forward,
        operators.router_bwd: _router_backward,
        operators.linear: _linear_forward,
        operators.linear_bwd: _linear_backward,
    }
    module.flop_registry.update(formulas)
    for mode in _get_current_dispatch_mode_stack():  # a counter copies the registered formulas when it is made
        if isinstance(counter := getattr(mode, "counter", None), module.FlopCounterMode):
            counter.flop_registry.update(formulas)


def _gemms(count: int, ids_TK: Tensor, w2: Sequence[Tensor]) -> int:
    """FLOPs of `count` GEMMs between D and F for every used slot; if ids cannot be read (fake tensors), for every
    slot."""
    used = ids_TK.numel() if is_fake(ids_TK) or ids_TK.is_meta else int((ids_TK >= 0).sum())
    hidden, ffn = w2[0].shape[-2:]
    return count * 2 * used * hidden * ffn


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
    return _gemms(through_w2 + _halves(w13, w2) * (need_x + need_w13) + need_w2, ids, w2)


def _product(x: Tensor, weight: Tensor) -> int:
    return 2 * x.shape[0] * weight.numel()


def _router_forward(x: Tensor, weight: Tensor, *args: Any, **_: Any) -> int:
    return _product(x, weight)


def _router_backward(d_weights: Any, d_aux: Any, d_z: Any, x: Tensor, weight: Tensor, *args: Any, **_: Any) -> int:
    return sum(args[-1]) * _product(x, weight)


def _linear_forward(x: Tensor, weight: Tensor, *args: Any, **_: Any) -> int:
    return _product(x, weight)


def _linear_backward(dy: Any, x: Tensor, weight: Tensor, needs: Sequence[bool], *args: Any, **_: Any) -> int:
    return sum(needs) * _product(x, weight)

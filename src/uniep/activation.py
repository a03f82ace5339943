"""The activations between the two GEMMs, by the names that `MoEConfig.activation` takes, as PyTorch functions.

An activation is its `Activation` here and its functions in kernels/activation.py, which Triton compiles; nothing else
tells one from another (docs/numerics.md says how to add one).

Callers pass contiguous fp32 tiles whose width is a multiple of COLUMN_GROUP: PyTorch's vectorised sigmoid uses another
code path for a ragged tail, whose bits differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Activation:
    """One activation, of two inputs if `gated`: gate and up.

    forward: of the inputs, fp32 in and out.  backward: the gradients of the inputs, from these and the activation's
    gradient, fp32.  plain: what a PyTorch user writes: differentiable, in the dtype of the inputs.
    """

    name: str
    gated: bool
    forward: Callable[..., Tensor]
    backward: Callable[..., tuple[Tensor, ...]]
    plain: Callable[..., Tensor]


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return gate * torch.sigmoid(gate) * up


def _swiglu_backward(gate: Tensor, up: Tensor, d_act: Tensor) -> tuple[Tensor, Tensor]:
    sigmoid = torch.sigmoid(gate)
    return d_act * up * (sigmoid * (1 + gate * (1 - sigmoid))), d_act * (gate * sigmoid)


def _swiglu_plain(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up


ACTIVATIONS = {
    activation.name: activation
    for activation in (Activation("swiglu", True, _swiglu, _swiglu_backward, _swiglu_plain),)
}

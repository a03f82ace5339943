"""The activations between the two GEMMs, by the names that `MoEConfig.activation` takes, as PyTorch functions.

An activation is defined by its `Activation` here and by its functions in kernels/activation.py, which Triton compiles.
No other code depends on which one it is (docs/numerics.md says how to add one).

Callers pass contiguous fp32 tiles whose width is a multiple of COLUMN_GROUP.  For a ragged tail PyTorch's vectorised
sigmoid uses another code path, and the bits differ.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional


@dataclasses.dataclass(frozen=True)
class Activation:
    """One activation.  If `gated`, it has two inputs: gate and up.

    forward: inputs to activation, fp32 in and out.  backward: inputs and the activation's gradient to the gradients of
    the inputs, fp32.  plain: what a PyTorch user writes: differentiable, in the dtype of the inputs.
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


def _cdf(x: Tensor) -> Tensor:
    """The cumulative distribution function of the normal distribution, by erfc: 1 + erf(x) cancels far below 0."""
    return 0.5 * torch.erfc(x * -math.sqrt(0.5))


def _geglu(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up."""
    return gate * _cdf(gate) * up


def _geglu_backward(gate: Tensor, up: Tensor, d_act: Tensor) -> tuple[Tensor, Tensor]:
    cdf, density = _cdf(gate), torch.exp(gate * gate * -0.5) * (2 * math.pi) ** -0.5
    return d_act * up * (cdf + gate * density), d_act * (gate * cdf)


TANH_LINEAR, TANH_CUBIC = 2 * (2 / math.pi) ** 0.5, 2 * (2 / math.pi) ** 0.5 * 0.044715
"""gelu's approximation 0.5 x (1 + tanh(z)) is x sigmoid(2 z), 2 z = x (TANH_LINEAR + TANH_CUBIC x^2)."""


def _geglu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up by the approximation with tanh."""
    return gate * torch.sigmoid(gate * (TANH_LINEAR + TANH_CUBIC * (gate * gate))) * up


def _geglu_tanh_backward(gate: Tensor, up: Tensor, d_act: Tensor) -> tuple[Tensor, Tensor]:
    square = gate * gate
    z = gate * (TANH_LINEAR + TANH_CUBIC * square)
    sigmoid, rest = torch.sigmoid(z), torch.sigmoid(-z)  # 1 - sigmoid would lose digits, which the slope magnifies
    slope = TANH_LINEAR + 3 * TANH_CUBIC * square
    return d_act * up * (sigmoid * (1 + gate * rest * slope)), d_act * (gate * sigmoid)


def _gated(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda gate, up: function(gate) * up


ACTIVATIONS = {
    activation.name: activation
    for activation in (
        Activation("swiglu", True, _swiglu, _swiglu_backward, _gated(functional.silu)),
        Activation("geglu", True, _geglu, _geglu_backward, _gated(functional.gelu)),
        Activation(
            "geglu_tanh", True, _geglu_tanh, _geglu_tanh_backward,
            _gated(functools.partial(functional.gelu, approximate="tanh")),
        ),
    )
}  # fmt: skip

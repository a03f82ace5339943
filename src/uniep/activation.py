"""The activations between the two GEMMs, by the names that `MoEConfig.activation` takes, as PyTorch functions.

`activation_of` gives the one of a configuration, with its limit.

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
    """One activation.  If `gated`, it has two inputs, gate and up, else one.

    forward: inputs to activation, fp32 in and out.  backward: inputs and the activation's gradient to the gradients of
    the inputs, fp32.  plain: what a PyTorch user writes: differentiable, in the dtype of the inputs.
    """

    name: str
    gated: bool
    forward: Callable[..., Tensor]
    backward: Callable[..., tuple[Tensor, ...]]
    plain: Callable[..., Tensor]


def _silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def _silu_slope(x: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(x)
    return sigmoid * (1 + x * (1 - sigmoid))


OAI_ALPHA = 1.702
"""Of `swiglu_oai`."""


def _swiglu_oai(gate: Tensor, up: Tensor) -> Tensor:
    """gate * sigmoid(OAI_ALPHA * gate) * (up + 1), of GPT-OSS."""
    return gate * torch.sigmoid(OAI_ALPHA * gate) * (up + 1)


def _swiglu_oai_backward(gate: Tensor, up: Tensor, d_act: Tensor) -> tuple[Tensor, Tensor]:
    scaled = OAI_ALPHA * gate
    sigmoid = torch.sigmoid(scaled)
    return d_act * (up + 1) * (sigmoid * (1 + scaled * (1 - sigmoid))), d_act * (gate * sigmoid)


def _cdf(x: Tensor) -> Tensor:
    """The cumulative distribution function of the normal distribution, by erfc: 1 + erf(x) cancels far below 0."""
    return 0.5 * torch.erfc(x * -math.sqrt(0.5))


def _gelu(x: Tensor) -> Tensor:
    return x * _cdf(x)


def _gelu_slope(x: Tensor) -> Tensor:
    return _cdf(x) + x * (torch.exp(x * x * -0.5) * (2 * math.pi) ** -0.5)


TANH_LINEAR, TANH_CUBIC = 2 * (2 / math.pi) ** 0.5, 2 * (2 / math.pi) ** 0.5 * 0.044715
"""gelu's approximation 0.5 x (1 + tanh(z)) is x sigmoid(2 z), 2 z = x (TANH_LINEAR + TANH_CUBIC x^2)."""


def _gelu_tanh(x: Tensor) -> Tensor:
    """gelu by the approximation with tanh."""
    return x * torch.sigmoid(x * (TANH_LINEAR + TANH_CUBIC * (x * x)))


def _gelu_tanh_slope(x: Tensor) -> Tensor:
    square = x * x
    z = x * (TANH_LINEAR + TANH_CUBIC * square)
    sigmoid, rest = torch.sigmoid(z), torch.sigmoid(-z)  # 1 - sigmoid would lose digits, which the slope magnifies
    return sigmoid * (1 + x * rest * (TANH_LINEAR + 3 * TANH_CUBIC * square))


def _relu2(x: Tensor) -> Tensor:
    """relu(x) squared."""
    positive = torch.relu(x)
    return positive * positive


def _relu2_slope(x: Tensor) -> Tensor:
    return 2 * torch.relu(x)


def _gated(
    name: str, unit: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor], plain: Callable[[Tensor], Tensor]
) -> Activation:
    """unit(gate) * up."""
    return Activation(
        name, True, lambda gate, up: unit(gate) * up,
        lambda gate, up, d_act: (d_act * up * slope(gate), d_act * unit(gate)), lambda gate, up: plain(gate) * up,
    )  # fmt: skip


def _ungated(
    name: str, unit: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor], plain: Callable[[Tensor], Tensor]
) -> Activation:
    """unit(x)."""
    return Activation(name, False, unit, lambda x, d_act: (d_act * slope(x),), plain)


_plain_gelu_tanh = functools.partial(functional.gelu, approximate="tanh")

ACTIVATIONS = {
    activation.name: activation
    for activation in (
        _gated("swiglu", _silu, _silu_slope, functional.silu),
        Activation("swiglu_oai", True, _swiglu_oai, _swiglu_oai_backward, _swiglu_oai),
        _gated("geglu", _gelu, _gelu_slope, functional.gelu),
        _gated("geglu_tanh", _gelu_tanh, _gelu_tanh_slope, _plain_gelu_tanh),
        _ungated("silu", _silu, _silu_slope, functional.silu),
        _ungated("gelu", _gelu, _gelu_slope, functional.gelu),
        _ungated("gelu_tanh", _gelu_tanh, _gelu_tanh_slope, _plain_gelu_tanh),
        _ungated("relu2", _relu2, _relu2_slope, lambda x: functional.relu(x).square()),
    )
}


def activation_of(name: str, limit: float | None) -> Activation:
    """The activation of this name, of min(gate, limit) and of up between -limit and limit.

    Gradients of what lies beyond the limit are zeros.
    """
    return ACTIVATIONS[name] if limit is None else _limited(name, limit)


@functools.cache
def _limited(name: str, limit: float) -> Activation:
    usual = ACTIVATIONS[name]

    def clamped(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        return gate.clamp(max=limit), up.clamp(-limit, limit)

    def backward(gate: Tensor, up: Tensor, d_act: Tensor) -> tuple[Tensor, ...]:
        d_gate, d_up = usual.backward(*clamped(gate, up), d_act)
        return d_gate.masked_fill(gate > limit, 0.0), d_up.masked_fill(up.abs() > limit, 0.0)

    return Activation(
        name, True, lambda gate, up: usual.forward(*clamped(gate, up)), backward,
        lambda gate, up: usual.plain(*clamped(gate, up)),
    )  # fmt: skip

"""The activations between the two GEMMs as Triton functions, by the names of `uniep.activation`.

fp32 in and out, every multiplication and addition rounded, or an explicit fma.  What the functions of one activation
compute alike is computed once where several are used.  up: None for an activation without a gate, whose input is `gate`.
LIMIT: None, or what gate, and |up|, are clamped to.
"""

import triton
import triton.language as tl

from uniep import activation
from uniep.kernels.ptx import gelu, normal_tail, sigmoid

TANH_LINEAR = tl.constexpr(activation.TANH_LINEAR)
TANH_CUBIC = tl.constexpr(activation.TANH_CUBIC)
OAI_ALPHA = tl.constexpr(activation.OAI_ALPHA)


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr):
    """The activation: the one definition for forward, backward and recomputation."""
    act = _unit(_limited_gate(gate, LIMIT), ACTIVATION)
    if up is not None:
        act = act * _factor(up, ACTIVATION, LIMIT)
    return act


@triton.jit
def gate_gradient(gate, up, d_act, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr):
    """Of `activate`, for the gradient `d_act`."""
    if up is not None:
        d_unit = d_act * _factor(up, ACTIVATION, LIMIT)
    else:
        d_unit = d_act
    gradient = d_unit * _slope(_limited_gate(gate, LIMIT), ACTIVATION)
    if LIMIT is not None:
        gradient = tl.where(gate > LIMIT, 0.0, gradient)
    return gradient


@triton.jit
def up_gradient(gate, up, d_act, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr):
    """Of `activate`, for the gradient `d_act`."""
    gradient = d_act * _unit(_limited_gate(gate, LIMIT), ACTIVATION)
    if LIMIT is not None:
        gradient = tl.where(tl.abs(up) > LIMIT, 0.0, gradient)
    return gradient


@triton.jit
def _limited_gate(gate, LIMIT: tl.constexpr):
    """NaN stays NaN."""
    if LIMIT is not None:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
    return gate


@triton.jit
def _factor(up, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr):
    """What the unit is multiplied by."""
    if LIMIT is not None:
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if ACTIVATION == "swiglu_oai":
        up = up + 1.0
    return up


@triton.jit
def _slope(gate, ACTIVATION: tl.constexpr):
    """Of `_unit`."""
    if ACTIVATION == "swiglu" or ACTIVATION == "silu":
        gate_sigmoid = sigmoid(gate)
        slope = gate_sigmoid * (1.0 + gate * (1.0 - gate_sigmoid))
    elif ACTIVATION == "swiglu_oai":
        scaled = gate * OAI_ALPHA
        gate_sigmoid = sigmoid(scaled)
        slope = gate_sigmoid * (1.0 + scaled * (1.0 - gate_sigmoid))
    elif ACTIVATION == "relu2":
        slope = 2.0 * tl.where(gate < 0, 0.0, gate)
    elif ACTIVATION == "geglu" or ACTIVATION == "gelu":
        tail, bell = normal_tail(gate)
        slope = tl.fma(gate, bell * 0.39894228, tl.where(gate < 0, tail, 1.0 - tail))
    else:
        tl.static_assert(ACTIVATION == "geglu_tanh" or ACTIVATION == "gelu_tanh")
        square = gate * gate
        z = _tanh_argument(square) * gate
        inner = tl.fma(square, 3 * TANH_CUBIC, TANH_LINEAR)
        slope = sigmoid(z) * (1.0 + gate * sigmoid(-z) * inner)
    return slope


@triton.jit
def _unit(gate, ACTIVATION: tl.constexpr):
    """The activation without a gate, or what its factor multiplies."""
    if ACTIVATION == "swiglu" or ACTIVATION == "silu":
        unit = gate * sigmoid(gate)
    elif ACTIVATION == "swiglu_oai":
        unit = gate * sigmoid(gate * OAI_ALPHA)
    elif ACTIVATION == "relu2":
        positive = tl.where(gate < 0, 0.0, gate)
        unit = positive * positive
    elif ACTIVATION == "geglu" or ACTIVATION == "gelu":
        unit = gelu(gate)
    else:
        tl.static_assert(ACTIVATION == "geglu_tanh" or ACTIVATION == "gelu_tanh")
        unit = gate * sigmoid(_tanh_argument(gate * gate) * gate)
    return unit


@triton.jit
def _tanh_argument(square):
    """2 z / x for x^2: gelu's approximation 0.5 x (1 + tanh(z)) is x sigmoid(2 z)."""
    return tl.fma(square, TANH_CUBIC, TANH_LINEAR)

"""The activations between the two GEMMs as Triton functions, by the names of `uniep.activation`.

fp32 in and out, every multiplication and addition rounded, or an explicit fma.  What the functions of one activation
compute alike is computed once where several are used.
"""

import triton
import triton.language as tl

from uniep import activation
from uniep.kernels.ptx import gelu, normal_tail, sigmoid

TANH_LINEAR = tl.constexpr(activation.TANH_LINEAR)
TANH_CUBIC = tl.constexpr(activation.TANH_CUBIC)


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr):
    """The activation: the one definition for forward, backward and recomputation."""
    return _unit(gate, ACTIVATION) * up


@triton.jit
def gate_gradient(gate, up, d_act, ACTIVATION: tl.constexpr):
    """Of `activate`, for the gradient `d_act`."""
    d_unit = d_act * up
    if ACTIVATION == "swiglu":
        gate_sigmoid = sigmoid(gate)
        slope = gate_sigmoid * (1.0 + gate * (1.0 - gate_sigmoid))
    elif ACTIVATION == "geglu":
        tail, bell = normal_tail(gate)
        slope = tl.fma(gate, bell * 0.39894228, tl.where(gate < 0, tail, 1.0 - tail))
    else:
        tl.static_assert(ACTIVATION == "geglu_tanh")
        square = gate * gate
        z = _tanh_argument(square) * gate
        inner = tl.fma(square, 3 * TANH_CUBIC, TANH_LINEAR)
        slope = sigmoid(z) * (1.0 + gate * sigmoid(-z) * inner)
    return d_unit * slope


@triton.jit
def up_gradient(gate, d_act, ACTIVATION: tl.constexpr):
    """Of `activate`, for the gradient `d_act`."""
    return d_act * _unit(gate, ACTIVATION)


@triton.jit
def _unit(gate, ACTIVATION: tl.constexpr):
    """What `up` is multiplied by."""
    if ACTIVATION == "swiglu":
        unit = gate * sigmoid(gate)
    elif ACTIVATION == "geglu":
        unit = gelu(gate)
    else:
        tl.static_assert(ACTIVATION == "geglu_tanh")
        unit = gate * sigmoid(_tanh_argument(gate * gate) * gate)
    return unit


@triton.jit
def _tanh_argument(square):
    """2 z / x for x^2: gelu's approximation 0.5 x (1 + tanh(z)) is x sigmoid(2 z)."""
    return tl.fma(square, TANH_CUBIC, TANH_LINEAR)

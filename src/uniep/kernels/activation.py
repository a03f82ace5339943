"""The activations between the two GEMMs as Triton functions, by the names of `uniep.activation`.

fp32 in and out.  What the functions of one activation compute alike is computed once where several are used.
"""

import triton
import triton.language as tl

from uniep.kernels.ptx import sigmoid


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr):
    """The activation: the one definition for forward, backward and recomputation."""
    tl.static_assert(ACTIVATION == "swiglu")
    return gate * sigmoid(gate) * up


@triton.jit
def gate_gradient(gate, up, d_act, ACTIVATION: tl.constexpr):
    """Of `activate`, for the gradient `d_act`."""
    tl.static_assert(ACTIVATION == "swiglu")
    gate_sigmoid = sigmoid(gate)
    return d_act * up * (gate_sigmoid * (1.0 + gate * (1.0 - gate_sigmoid)))


@triton.jit
def up_gradient(gate, d_act, ACTIVATION: tl.constexpr):
    """Of `activate`, for the gradient `d_act`."""
    tl.static_assert(ACTIVATION == "swiglu")
    return d_act * (gate * sigmoid(gate))

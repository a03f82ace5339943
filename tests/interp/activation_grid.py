"""Activations as Triton functions over a dense grid of gates, interpreted or on a GPU, against fp64."""

import torch
import triton
import triton.language as tl

from uniep.activation import Activation
from uniep.kernels.activation import activate, gate_gradient, up_gradient

EPS = 2.0**-24


@triton.jit
def grid_kernel(
    gate_ptr, up_ptr, d_act_ptr, act_ptr, d_gate_ptr, d_up_ptr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gate, up = tl.load(gate_ptr + at), tl.load(up_ptr + at)
    tl.store(act_ptr + at, activate(gate, up, ACTIVATION))
    d_act = tl.load(d_act_ptr + at)
    tl.store(d_gate_ptr + at, gate_gradient(gate, up, d_act, ACTIVATION))
    tl.store(d_up_ptr + at, up_gradient(gate, d_act, ACTIVATION))


def check(activation: Activation, device: str, blocks: int) -> str:
    """Assert that errors are few ulps and the rounding of an exponent, which is worth as much as it is large.

    Returns the largest: of the activation and d_up relative to what they are; of d_gate, whose terms cancel, relative
    to d_act * up.
    """
    gate = torch.linspace(-9, 9, blocks * 2**14, device=device)
    up, d_act = torch.full_like(gate, 1.5), torch.full_like(gate, -0.75)
    got = [torch.empty_like(gate) for _ in range(3)]
    grid_kernel[(blocks,)](gate, up, d_act, *got, activation.name, 2**14, enable_fp_fusion=False)
    wide = [t.double() for t in (gate, up, d_act)]
    exact = activation.forward(*wide[:2]), *activation.backward(*wide)
    sizes = exact[0].abs(), (d_act * up).abs(), exact[2].abs()
    bound, said = (16 + 4 * wide[0].square()) * EPS, []
    for name, g, e, size in zip(("act", "d_gate", "d_up"), got, exact, sizes, strict=True):
        error = torch.where(size > 0, (g - e).abs() / size.clamp(min=2.0**-126), 0.0)
        central = gate.abs() < 3
        said.append(f"{name} {float(error.max()):.1e} ({float(error[central].max()):.1e} for |gate| < 3)")
        assert (error <= bound).all(), f"{activation.name}: {said[-1]}"
    return f"{activation.name}: {', '.join(said)}"

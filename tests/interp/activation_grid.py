"""Activations as Triton functions over a dense grid of gates, interpreted or on a GPU, against fp64; widening."""

import torch
import triton
import triton.language as tl

from uniep.activation import Activation, activation_of
from uniep.kernels.activation import activate, gate_gradient, up_gradient
from uniep.kernels.ptx import widen

EPS = 2.0**-24


@triton.jit
def grid_kernel(
    d_act_ptr, act_ptr, d_gate_ptr, gate_ptr, up_ptr, d_up_ptr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gate, d_act = tl.load(gate_ptr + at), tl.load(d_act_ptr + at)
    up = tl.load(up_ptr + at) if up_ptr is not None else None
    tl.store(act_ptr + at, activate(gate, up, ACTIVATION, LIMIT))
    tl.store(d_gate_ptr + at, gate_gradient(gate, up, d_act, ACTIVATION, LIMIT))
    if up_ptr is not None:
        tl.store(d_up_ptr + at, up_gradient(gate, up, d_act, ACTIVATION, LIMIT))


def check(activation: Activation, device: str, blocks: int, limit: float | None = None) -> str:
    """Assert that errors are few ulps and the rounding of an exponent, which is worth as much as it is large.

    Returns the largest: of the activation and d_up relative to what they are; of d_gate, whose terms cancel, relative
    to d_act * up.
    """
    gate = torch.linspace(-9, 9, blocks * 2**14, device=device)
    up, d_act = torch.full_like(gate, 1.5), torch.full_like(gate, -0.75)
    up[1::2] = -8  # beyond a limit
    inputs = (gate, up) if activation.gated else (gate,)
    act, d_gate, d_up = (torch.empty_like(gate) for _ in range(3))
    of_up = (up, d_up) if activation.gated else (None, None)
    grid_kernel[(blocks,)](
        d_act, act, d_gate, gate, *of_up, activation.name, limit, 2**14, enable_fp_fusion=False
    )  # fmt: skip
    wide, got = [t.double() for t in (*inputs, d_act)], (act, d_gate, d_up)[: 1 + len(inputs)]
    function = activation_of(activation.name, limit)
    exact = function.forward(*wide[:-1]), *function.backward(*wide)
    # What d_gate is made of: without the slope, which is 1 where the activation is its input, or 2 |gate| of relu2.
    size = d_act.abs() * (up.abs() + 1 if activation.gated else gate.abs().clamp(min=1))
    sizes = exact[0].abs(), size, exact[-1].abs()
    bound, said = (16 + 4 * wide[0].square()) * EPS, []
    for name, g, e, size in zip(("act", "d_gate", "d_up"), got, exact, sizes, strict=False):
        error = torch.where(size > 0, (g - e).abs() / size.clamp(min=2.0**-126), 0.0)
        central = gate.abs() < 3
        said.append(f"{name} {float(error.max()):.1e} ({float(error[central].max()):.1e} for |gate| < 3)")
        assert (error <= bound).all(), f"{activation.name}: {said[-1]}"
    return f"{activation.name}: {', '.join(said)}"


@triton.jit
def widen_kernel(x_ptr, wide_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(wide_ptr + at, widen(tl.load(x_ptr + at)))


def check_widened(dtype: torch.dtype, device: str) -> None:
    """Assert that every value of a 16-bit dtype has its bits in fp32, and NaN stays NaN."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device).view(dtype)
    wide, exact = torch.empty(2**16, device=device), x.float()
    widen_kernel[(2**6,)](x, wide, 2**10)
    assert torch.equal(wide.isnan(), exact.isnan())
    numbers = ~exact.isnan()
    assert torch.equal(wide[numbers].view(torch.int32), exact[numbers].view(torch.int32)), dtype

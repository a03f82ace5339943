"""Activations as PyTorch functions: right against fp64, and the same bits in every tile of them."""

import case
import pytest
import torch
from torch import Tensor

from uniep import reference
from uniep.activation import ACTIVATIONS
from uniep.config import COLUMN_GROUP

EPS = 2.0**-24
every = pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)


def inputs(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """gate, up, d_act; gates from -12 to 12."""
    g = torch.Generator().manual_seed(0)
    gate = torch.rand(rows, columns, generator=g) * 24 - 12
    return gate, torch.randn(rows, columns, generator=g), torch.randn(rows, columns, generator=g)


@every
def test_against_fp64(activation):
    """As exact as what PyTorch computes in fp32, nearly, and in fp64 the same function."""
    given = inputs(256, 256)

    def plain(dtype: torch.dtype) -> list[Tensor]:
        gate, up = (t.to(dtype).requires_grad_() for t in given[:2])
        act = activation.plain(gate, up)
        return [act.detach(), *torch.autograd.grad(act, (gate, up), given[2].to(dtype))]

    def both(*given: Tensor) -> list[Tensor]:
        return [activation.forward(*given[:2]), *activation.backward(*given)]

    exact, theirs, ours = plain(torch.float64), plain(torch.float32), both(*given)
    for name, e, t, o, o64 in zip(
        ("act", "d_gate", "d_up"), exact, theirs, ours, both(*(t.double() for t in given)), strict=True
    ):
        assert o.dtype == torch.float32 and (o64 - e).norm() <= 1e-12 * e.norm(), name
        assert (o - e).norm() <= 2 * (t - e).norm(), name


@every
def test_far_below_zero(activation):
    """Where little is left of a gate, that little is right: 1 + erf or 1 + tanh would have lost it."""
    gate = torch.linspace(-9, -4, 1024)
    up = torch.ones_like(gate)
    exact = activation.forward(gate.double(), up.double())
    assert ((activation.forward(gate, up) - exact).abs() <= 256 * EPS * exact.abs()).all()


@every
def test_bits_do_not_depend_on_the_tile(activation):
    """Any rows, and any columns that are whole groups: the same bits, wherever the tile lies in memory."""
    gate, up, d_act = inputs(128, 5 * COLUMN_GROUP)
    whole = [activation.forward(gate, up), *activation.backward(gate, up, d_act)]
    tiles = [(slice(first, first + rows), slice(None)) for rows in (1, 7, 64) for first in range(0, 128, 33)]
    tiles += [
        (slice(None), slice(first * COLUMN_GROUP, last * COLUMN_GROUP)) for first, last in ((0, 1), (1, 3), (4, 5))
    ]
    tiles += [(slice(5, 6), slice(COLUMN_GROUP, 2 * COLUMN_GROUP))]
    for tile in tiles:
        for offset in (0, 1):  # of the memory
            part = []
            for t in (gate, up, d_act):
                memory = torch.empty(t[tile].numel() + offset)[offset:].view(t[tile].shape)
                part.append(memory.copy_(t[tile]))
            got = [activation.forward(*part[:2]), *activation.backward(*part)]
            assert all(torch.equal(a, b[tile]) for a, b in zip(got, whole, strict=True)), (tile, offset)


@pytest.mark.parametrize("weight_at", ["output", "activation"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "swiglu"])
def test_reference(activation, dtype, weight_at):
    """The layer with each, row by row; swiglu is in test_reference.py."""
    cfg = case.config(dtype=dtype, weight_at=weight_at, activation=activation, ffn=72)
    batch = case.random_batch(cfg, (16, 1, 30, 13))
    given = (batch.x, batch.ids, batch.weights, batch.w13, batch.w2)
    grads = reference.backward(batch.dy, *given, cfg)
    y = reference.forward(*given, cfg)
    case.accurate(case.Outcome(y, grads.x, grads.weights, grads.w13, grads.w2), batch, cfg)

"""Activations as PyTorch functions: right against fp64, and the same bits in every tile of them."""

import case
import pytest
import torch
from torch import Tensor

from uniep import reference
from uniep.activation import ACTIVATIONS, Activation, activation_of
from uniep.config import COLUMN_GROUP

EPS = 2.0**-24


LIMITED = {f"{name}, limit": activation_of(name, 1.5) for name in ("swiglu", "swiglu_oai")}
every = pytest.mark.parametrize("activation", (ACTIVATIONS | LIMITED).values(), ids=ACTIVATIONS | LIMITED)


def inputs(activation: Activation, rows: int, columns: int) -> tuple[Tensor, ...]:
    """gate, up, d_act, or x, d_act; gates from -12 to 12."""
    g = torch.Generator().manual_seed(0)
    gate = torch.rand(rows, columns, generator=g) * 24 - 12
    return gate, *(torch.randn(rows, columns, generator=g) for _ in range(1 + activation.gated))


@every
def test_against_fp64(activation):
    """As exact as what PyTorch computes in fp32, nearly, and in fp64 the same function."""
    given = inputs(activation, 256, 256)

    def plain(dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in given[:-1]]
        act = activation.plain(*leaves)
        return [act.detach(), *torch.autograd.grad(act, leaves, given[-1].to(dtype))]

    def both(*given: Tensor) -> list[Tensor]:
        return [activation.forward(*given[:-1]), *activation.backward(*given)]

    exact, theirs, ours = plain(torch.float64), plain(torch.float32), both(*given)
    for name, e, t, o, o64 in zip(
        ("act", "d_gate", "d_up")[: len(ours)], exact, theirs, ours, both(*(t.double() for t in given)), strict=True
    ):
        assert o.dtype == torch.float32 and (o64 - e).norm() <= 1e-12 * e.norm(), name
        assert (o - e).norm() <= 2 * (t - e).norm(), name


@every
def test_far_below_zero(activation):
    """Where little is left of a gate, that little is right: 1 + erf or 1 + tanh would have lost it."""
    gate = torch.linspace(-9, -4, 1024)
    given = gate, *(torch.ones_like(gate) for _ in range(activation.gated))
    exact = activation.forward(*(t.double() for t in given))
    assert ((activation.forward(*given) - exact).abs() <= 256 * EPS * exact.abs()).all()


@every
def test_bits_do_not_depend_on_the_tile(activation):
    """Any rows, and any columns that are whole groups: the same bits, wherever the tile lies in memory."""
    given = inputs(activation, 128, 5 * COLUMN_GROUP)
    whole = [activation.forward(*given[:-1]), *activation.backward(*given)]
    tiles = [(slice(first, first + rows), slice(None)) for rows in (1, 7, 64) for first in range(0, 128, 33)]
    tiles += [
        (slice(None), slice(first * COLUMN_GROUP, last * COLUMN_GROUP)) for first, last in ((0, 1), (1, 3), (4, 5))
    ]
    tiles += [(slice(5, 6), slice(COLUMN_GROUP, 2 * COLUMN_GROUP))]
    for tile in tiles:
        for offset in (0, 1):  # of the memory
            part = []
            for t in given:
                memory = torch.empty(t[tile].numel() + offset)[offset:].view(t[tile].shape)
                part.append(memory.copy_(t[tile]))
            got = [activation.forward(*part[:-1]), *activation.backward(*part)]
            assert all(torch.equal(a, b[tile]) for a, b in zip(got, whole, strict=True)), (tile, offset)


@pytest.mark.parametrize("weight_at", ["output", "activation"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "swiglu"])
def test_reference(activation, dtype, weight_at):
    """The layer with each, and biases, row by row; swiglu, without, is in test_reference.py."""
    limit = 1.0 if activation == "swiglu_oai" else None
    cfg = case.config(
        dtype=dtype, weight_at=weight_at, activation=activation, ffn=72, bias=True, activation_limit=limit
    )
    batch = case.random_batch(cfg, (16, 1, 30, 13))
    given = (batch.x, batch.ids, batch.weights, batch.w13, batch.w2)
    grads = reference.backward(batch.dy, *given, cfg, batch.biases)
    y = reference.forward(*given, cfg, batch.biases)
    got = case.Outcome(y, grads.x, grads.weights, grads.w13, grads.w2, grads.b13, grads.b2)
    case.accurate(got, batch, cfg)


@pytest.mark.parametrize("name", ["swiglu", "swiglu_oai"])
def test_a_limit(name):
    """At the limit the value is the clamped one and gradients are whole, beyond they are zeros; NaN stays."""
    limited, usual = activation_of(name, 2.0), ACTIVATIONS[name]
    gate = torch.tensor([2.0, 2.5, -9.0, 1.0, 1.0, 1.0, torch.nan])
    up = torch.tensor([2.0, 1.0, -2.0, 3.0, -3.0, -2.0, 1.0])
    clamped, one = (gate.clamp(max=2.0), up.clamp(-2.0, 2.0)), torch.ones(7)
    assert torch.equal(limited.forward(gate, up)[:6], usual.forward(*clamped)[:6])
    assert limited.forward(gate, up)[6].isnan()
    d_gate, d_up = limited.backward(gate, up, one)
    whole_gate, whole_up = usual.backward(*clamped, one)
    assert (d_gate == 0).tolist() == [False, True, False, False, False, False, False]
    assert (d_up == 0).tolist() == [False, False, False, True, True, False, False]
    assert torch.equal(d_gate[[0, 2, 3, 4, 5]], whole_gate[[0, 2, 3, 4, 5]])
    assert torch.equal(d_up[[0, 1, 2, 5]], whole_up[[0, 1, 2, 5]])

"""The product of dense operators, interpreted: planes of fp16 stand for those of bf16."""

import pytest
import torch

from uniep.launch import dense
from uniep.launch.dense import planes, row_products


def drawn(rows, columns, depth, dtypes):
    make = torch.Generator().manual_seed(rows + columns)
    a, b = torch.randn(rows, depth, generator=make), torch.randn(columns, depth, generator=make)
    return a.to(dtypes[0]), b.to(dtypes[1])


@pytest.mark.parametrize(
    "dtypes", [(torch.float16, torch.float16), (torch.float16, torch.float32), (torch.float32,) * 2]
)
def test_a_product_is_as_exact_as_fp32(monkeypatch, dtypes):
    """Near fp64; rows of one, of few and of all are the same."""
    monkeypatch.setattr(dense, "BLOCK_M", 32)
    a, b = drawn(70, 140, 100, dtypes)
    got = row_products(a, b, torch.float16)
    exact = a.double() @ b.double().T
    bound = 2 * 2.0**-24 * 100**0.5 * (a.double().abs() @ b.double().abs().T)
    assert ((got - exact).abs() <= bound).all()
    for rows in (1, 33):
        assert torch.equal(row_products(a[:rows], b, torch.float16), got[:rows])
    assert row_products(a[:0], b, torch.float16).shape == (0, 140)


def test_planes_add_up():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-20, 20, 1000)
    for dtype, count in ((torch.bfloat16, 1), (torch.float16, 2), (torch.float32, 3)):
        given = (values.clamp(-6e4, 6e4) if dtype == torch.float16 else values).to(dtype)
        made = planes(given, count)
        assert made.dtype == torch.bfloat16
        assert (planes(torch.tensor([torch.inf, -torch.inf]).to(dtype), count)[1:] == 0).all()
        total = made.flip(0).double().sum(0)
        assert ((total - given.double()).abs() <= given.double().abs() * 2.0**-24).all(), dtype

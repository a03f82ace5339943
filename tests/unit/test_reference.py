"""The reference against fp64 autograd of the composition, each gradient row by row (field report 48)."""

import dataclasses

import case
import pytest
import torch

from uniep import reference
from uniep.numerics import add_ascending, column_group_sums, combine_slots, fixed_settings, matmul, pair_tree_sum

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MODES = ["output", "activation"]


def run_reference(batch, cfg):
    inputs = (batch.x, batch.ids, batch.weights, batch.w13, batch.w2)
    grads = reference.backward(batch.dy, *inputs, cfg)
    return case.Outcome(reference.forward(*inputs, cfg), grads.x, grads.weights, grads.w13, grads.w2)


SHAPES = {
    "64 different rows, one per token": {"top_k": 1, "shard_tokens": (64, 0, 0, 0)},
    "several slots": {"top_k": 3, "shard_tokens": (20, 1, 30, 13)},
    "unused slots and idle experts": {"top_k": 3, "num_experts": 32, "unused": 0.5, "shard_tokens": (9, 0, 4, 4)},
    "more rows than one tile": {"num_experts": 2, "shard_tokens": (100, 50, 50, 0)},
    "ragged columns": {"hidden": 72, "ffn": 40, "shard_tokens": (16, 16, 16, 16)},
    "two column groups": {"ffn": 128, "shard_tokens": (16, 16, 16, 16)},
}


@pytest.mark.parametrize("weight_at", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_against_fp64(shape, dtype, weight_at):
    options = dict(SHAPES[shape])
    batch_options = {name: options.pop(name) for name in ("shard_tokens", "unused") if name in options}
    cfg = case.config(**options, dtype=dtype, weight_at=weight_at)
    batch = case.random_batch(cfg, **batch_options)
    case.accurate(run_reference(batch, cfg), batch, cfg)


@pytest.mark.parametrize("field", case.FIELDS)
@pytest.mark.parametrize("damage", ["row of zeros", "two rows swapped", "row doubled"])
def test_the_check_sees_a_single_wrong_row(field, damage):
    cfg = case.config()
    batch = case.random_batch(cfg, (16, 16, 16, 16))
    good = run_reference(batch, cfg)
    wrong = getattr(good, field).clone()
    rows = wrong.view(-1, wrong.shape[-1])
    rows[3] = {"row of zeros": 0 * rows[3], "two rows swapped": rows[4].clone(), "row doubled": 2 * rows[3]}[damage]
    with pytest.raises(AssertionError, match="row 3"):
        case.accurate(dataclasses.replace(good, **{field: wrong}), batch, cfg)


@pytest.mark.parametrize("weight_at", MODES)
def test_repeated_experts_in_a_row_both_count(weight_at):
    cfg = case.config(top_k=3, weight_at=weight_at)
    batch = case.random_batch(
        cfg, (5, 0, 0, 0), ids=torch.tensor([[1, 1, 1], [2, 5, 2], [0, -1, 0], [7, 7, -1], [3, 4, 4]])
    )
    case.accurate(run_reference(batch, cfg), batch, cfg)


def test_unused_slots_are_skipped_not_multiplied():
    """NaN weights and values in unused slots reach nothing."""
    cfg = case.config(top_k=2)
    batch = case.random_batch(cfg, (2, 0, 0, 0), ids=torch.tensor([[3, -1], [-1, -1]]))
    clean = run_reference(batch, cfg)
    batch.weights[0, 1] = batch.weights[1] = float("nan")
    case.same_bits(run_reference(batch, cfg), clean)
    assert not clean.y[1].any() and not clean.dx[1].any() and not clean.dweights[1].any() and clean.dweights[0, 1] == 0
    slots = torch.full((1, 2, 64), float("nan"))
    slots[0, 0] = 2.0
    assert combine_slots(slots, torch.tensor([[0, -1]]), torch.tensor([[0.5, 9.0]])).unique().tolist() == [1.0]


def test_idle_experts_have_zero_gradients():
    cfg = case.config()
    batch = case.random_batch(cfg, (3, 0, 0, 0), ids=torch.tensor([[1, 2], [2, 1], [1, 1]]))
    got = run_reference(batch, cfg)
    for expert in range(cfg.num_experts):
        busy = expert in (1, 2)
        assert bool(got.dw13[expert].any()) == bool(got.dw2[expert].any()) == busy


@pytest.mark.parametrize(("weight_at", "expected"), [("output", 1.0), ("activation", 0.0)])
def test_where_the_weight_is_rounded(weight_at, expected):
    """Field report 37: w = 1 + 2^-10 survives behind the second GEMM; in front of it bf16 rounds it to 1."""
    cfg = case.config(dtype=torch.bfloat16, weight_at=weight_at)
    v = torch.full((8,), 1024.0)
    batch = case.exact_batch(cfg, (1, 0, 0, 0), torch.tensor([[0, 1]]), torch.tensor([[1 + 2**-10, -1.0]]), v)
    assert run_reference(batch, cfg).y.unique().tolist() == [expected]


def test_slots_are_added_in_ascending_order():
    """2^24 + 1 + 1 = 2^24 in fp32 (each 1 is lost), but 1 + 1 + 2^24 is 2^24 + 2."""
    ids, ones = torch.zeros(1, 3, dtype=torch.int64), torch.ones(1, 3)
    for weights in (ones, None):
        for values, expected in (([2.0**24, 1, 1], 2.0**24), ([1, 1, 2.0**24], 2.0**24 + 2)):
            slots = torch.tensor(values).view(1, 3, 1)
            assert combine_slots(slots, ids, weights).item() == expected


def test_the_combine_is_a_fused_multiply_add():
    """acc + w*y with the product unrounded: (1 + 2^-12)^2 - (1 + 2^-11) = 2^-24; a rounded product gives 0."""
    a = 1 + 2.0**-12
    slots = torch.tensor([-(1 + 2.0**-11), a]).view(1, 2, 1)
    got = combine_slots(slots, torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[1.0, a]]))
    assert got.item() == 2.0**-24


def test_column_sums_are_adjacent_pairs_in_groups_of_64():
    def tree(values):
        while len(values) > 1:
            values = [values[i] + values[i + 1] for i in range(0, len(values), 2)]
        return values[0]

    x = torch.randn(5, 192, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-3, 3).repeat(32)
    rows = [[tree(list(row[g : g + 64])) for g in range(0, 192, 64)] for row in x]
    assert torch.equal(column_group_sums(x), torch.tensor(rows))
    assert torch.equal(
        add_ascending(column_group_sums(x)), torch.stack([(a + b) + c for a, b, c in torch.tensor(rows)])
    )
    assert pair_tree_sum(x[:, :1]).tolist() == x[:, 0].tolist()


def test_products_are_fp32_whatever_the_process_prefers():
    """A process may have allowed bf16 for fp32 products; afterwards it still has."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(64, 1024, generator=generator), torch.randn(1024, 64, generator=generator)
    with fixed_settings():
        want = matmul(a, b)
    products = torch.backends.mkldnn.matmul
    before = products.fp32_precision
    products.fp32_precision = "bf16"
    try:
        with fixed_settings():
            got = matmul(a, b)
        assert products.fp32_precision == "bf16"
    finally:
        products.fp32_precision = before
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "inner", "columns"), [(256, 72, 192), (128, 300, 100), (64, 1025, 64)])
def test_products_do_not_depend_on_the_tile(rows, inner, columns, dtype):
    """Any rows and columns that start at multiples of 64, from any strides and addresses: the same bits."""
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(rows, inner, generator=g).to(dtype), torch.randn(inner, columns, generator=g).to(dtype)
    shifted = torch.empty(rows * inner + 1, dtype=dtype)[1:].view(rows, inner).copy_(a)
    with fixed_settings():
        full = matmul(a, b)
        assert torch.equal(matmul(a.T.contiguous().T, b.T.contiguous().T), full)
        assert torch.equal(matmul(shifted, b), full)
        for first in range(0, rows, 64):
            assert torch.equal(matmul(a[first : first + 64], b), full[first : first + 64])
            assert torch.equal(matmul(a[first : first + 5], b), full[first : first + 5])
        for first in range(0, columns, 64):
            assert torch.equal(matmul(a, b[:, first : first + 64]), full[:, first : first + 64])


def test_zero_rows_in_a_contraction_change_nothing():
    """Weight gradients contract over aligned rows; pad rows are zeros, and other columns do not matter."""
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(128, 64, generator=g), torch.randn(128, 192, generator=g)
    a[70:], b[70:] = 0, 0
    with fixed_settings():
        assert torch.equal(matmul(a.T, b), torch.cat([matmul(a.T, part) for part in b.split(64, 1)], 1))

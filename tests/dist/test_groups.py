"""combine_groups=G: another sum, whose bits are the same for every EP size that divides G, backend and schedule.

The oracle is the serial schedule at EP=1; it equals `uniep.reference`, whose definition knows no parts and no slots.
"""

import dataclasses

import case
import pytest
import test_bits
import test_collective
import torch
from case import config, random_batch, same_bits

from uniep.errors import ConfigError


def grouped(groups, **changes):
    return config(**({"hidden": 72, "ffn": 136, "top_k": 3, "combine_groups": groups} | changes))


@pytest.mark.parametrize(
    ("groups", "ep_sizes", "dtype", "weight_at"),
    [
        (2, (1, 2), torch.bfloat16, "activation"),
        pytest.param(4, (1, 2, 4), torch.float16, "output", marks=pytest.mark.slow),
        (8, (1, 2, 4), torch.bfloat16, "output"),
        pytest.param(8, (4,), torch.float32, "activation", marks=pytest.mark.slow),
        (4, (4,), torch.bfloat16, "activation"),
    ],
)
def test_ep_sizes_and_schedules(pool, groups, ep_sizes, dtype, weight_at):
    """The reference's bits; repeats and unused slots; groups of one expert (8), and fewer groups than slots (2)."""
    cfg = grouped(
        groups, dtype=dtype, weight_at=weight_at, activation="geglu_tanh" if weight_at == "activation" else "swiglu"
    )
    g = torch.Generator().manual_seed(groups)
    ids = torch.randint(-1, 8, (204, 3), generator=g)
    batch = random_batch(cfg, (70, 0, 101, 33), ids=ids)
    want = test_bits.compare_schedules(pool, cfg, batch, ep_sizes, test_bits.variants(1, seed=groups))
    same_bits(want, test_bits.by_reference(cfg, batch))
    if dtype == torch.float16:
        test_collective.compare(pool, cfg, [batch], ep_sizes, (None, test_collective.AGAIN))


def test_it_is_another_function(pool):
    """Other roundings than without groups: y and dx differ, nothing else does; one group is (almost) no groups."""
    plain = grouped(None, dtype=torch.bfloat16, num_experts=4)
    batch = random_batch(plain, (20, 20, 20, 20))
    without, with_two, with_one = (
        case.oracle(pool, dataclasses.replace(plain, combine_groups=groups), batch) for groups in (None, 2, 1)
    )
    for name in case.FIELDS:
        same = torch.equal(getattr(without, name), getattr(with_two, name))
        assert same == (name not in ("y", "dx")), name
        assert torch.equal(getattr(without, name), getattr(with_one, name)), name  # but for the sign of zeros


@pytest.mark.parametrize("weight_at", test_bits.BOTH)
@pytest.mark.parametrize("groups", [2, 4, 8])
def test_error_is_at_most_half_more(groups, weight_at):
    """Against fp64, y and dx are at most 1.5 times as far off as without groups."""
    plain = config(hidden=64, ffn=64, num_experts=16, top_k=8, dtype=torch.bfloat16, weight_at=weight_at)
    batch = random_batch(plain, (64, 64, 64, 64))
    exact = case.autograd(batch, plain, torch.float64)
    without, with_groups = (
        test_bits.by_reference(dataclasses.replace(plain, combine_groups=g), batch) for g in (None, groups)
    )
    for name in ("y", "dx"):
        usual, ours = ((getattr(o, name).double() - getattr(exact, name)).norm() for o in (without, with_groups))
        assert ours <= 1.5 * usual, f"{name}: {ours / usual:.2f}"


@pytest.mark.parametrize("backend", ["cpu", "nccl"])
def test_needs_differ_between_ranks(pool, backend):
    """What one rank needs, another may not."""
    cfg = grouped(2, dtype=torch.bfloat16)
    batch = random_batch(cfg, (30, 0, 11, 40))
    want = case.oracle(pool, cfg, batch)
    wanted = (("dx", "dw2"), ("dweights", "dw13"))
    case.equal_where_wanted(pool.run(needed_alone, cfg, batch, 2, wanted, backend, ranks=2), wanted, batch, want)


def needed_alone(world, cfg, batch, ep_size, wanted, backend):
    if backend == "nccl":
        return test_collective.frozen(world, cfg, batch, ep_size, wanted, None)
    with case.workspace(world, cfg, ep_size) as ws:
        return case.gradients_of(ws, batch, wanted)


def refused(world, cfg, ep_size):
    with pytest.raises(ConfigError, match=r"combine_groups=2.*over 4 ranks.*EP group of 1, 2 ranks.*multiple of 4"):
        case.workspace(world, cfg, ep_size)


def test_more_ranks_than_groups_are_refused(pool):
    pool.run(refused, grouped(2), 4)

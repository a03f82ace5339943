"""Operators of one's own on several ranks: the bits of one rank, on every backend and schedule of the CPU."""

import case
import pytest
import torch

import uniep
from uniep import RowOperator, Schedule


def shrink(values, valid):
    values.mul_(0.75)


def shift(values, valid):
    values.add_(0.3)


FORWARD = (
    RowOperator(name="shrink", after="gate_up", rows=shrink),
    RowOperator(name="shift", after="gate_up", rows=shift),
    RowOperator(name="lift", after="down", rows=shift),
)
BACKWARD = (
    RowOperator(name="weaken", after="down_grad", rows=shrink),
    RowOperator(name="push_up", after="down_grad", rows=shift),
    RowOperator(name="clip", after="gate_up_grad", rows=shrink),
)


def of_rank(world, cfg, batch, ep_size, how):
    """[y of a forward without gradients, then y and gradients with operators in the backward]."""
    found = []
    for operators in (FORWARD, BACKWARD):
        with uniep.Workspace(cfg, world.group(ep_size), device="cpu", operators=operators, **how) as ws:
            if operators is FORWARD:
                found.append(case.forward_only(ws, batch))
            else:
                made = case.forward_backward(ws, batch)
                found += [getattr(made, name) for name in case.FIELDS]
    return found


@pytest.mark.parametrize(("groups", "weight_at"), [(None, "output"), (2, "activation")])
def test_bits(pool, groups, weight_at):
    cfg = case.config(num_experts=4, combine_groups=groups, weight_at=weight_at, dtype=torch.bfloat16)
    batch = case.random_batch(cfg, (40, 0, 33, 20), unused=0.2)
    ways = [
        (1, {"schedule": Schedule(overlap="serial")}),
        (2, {"schedule": Schedule(tile_order="critical-path", vector_workers=2)}),
        (2, {"schedule": Schedule(tile_order="chunk-major", activation="separate", received="again")}),
        (2, {"schedule": Schedule(preactivation="recomputed")}),
        (2, {"backend": "nccl"}),
    ]
    made = [
        [torch.cat(parts) for parts in zip(*pool.run(of_rank, cfg, batch, ep, how, ranks=ep), strict=True)]
        for ep, how in ways
    ]
    for (ep, how), found in zip(ways, made, strict=True):
        for name, got, want in zip(("without gradients", *case.FIELDS), found, made[0], strict=True):
            case.equal_bits(got, want, f"EP {ep}, {how}: {name}")
    plain = case.run(pool, cfg, batch, 1)
    assert not torch.equal(made[0][0], plain.y) and torch.equal(made[0][1], plain.y)
    assert not torch.equal(made[0][2], plain.dx) and torch.equal(made[0][5], plain.dw2)


def other_ranks_have_another(world, cfg):
    mine = FORWARD[: 1 + world.rank]
    with pytest.raises(uniep.ConfigError) as caught:
        uniep.Workspace(cfg, world.group(2), device="cpu", operators=mine)
    return str(caught.value)


def test_ranks_with_other_operators_are_told(pool):
    first, second = pool.run(other_ranks_have_another, case.config(), ranks=2)
    assert first == second and first.startswith("ranks disagree on operators (rank 0: [('shrink', 'gate_up',")

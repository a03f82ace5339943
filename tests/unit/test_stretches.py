"""Orders of stretches: what tile_order="critical-path" makes of one kernel for each direction."""

import pytest
import torch

from uniep.schedule import Schedule
from uniep.shapes import SHAPES
from uniep.sim import STRATEGIES, Problem, load_machine, row
from uniep.taskflow.stretches import bucket, positions
from uniep.way import resolve

FIRST, RETURN, DOWN_WEIGHTS, GATE_UP_WEIGHTS = range(4)
OWN, LATE = range(2)


def order_of(shape, ep_size, tokens, *, backward):
    cfg = SHAPES[shape].config(ep_size, max(tokens, 1))
    way = resolve(cfg, ep_size, tokens, Schedule(overlap="mega", tile_order="critical-path"))
    return positions(cfg, way, backward=backward)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("shape", "ep_size", "tokens"),
    [("qwen3-30b", 2, 8192), ("qwen3-30b", 8, 0), ("dsv2-lite", 1, 512), ("mixtral-8x7b", 4, 2048)],
)
def test_every_stretch_is_behind_what_it_reads(shape, ep_size, tokens, backward):
    """Whatever the number of ranks and tokens; each place is taken once."""
    order = order_of(shape, ep_size, tokens, backward=backward)
    local = order.shape[2]
    own = [*order[:2].flatten().tolist(), *(order[2:, 0].flatten().tolist() if backward else [])]
    assert sorted(own) == list(range((6 if backward else 4) * local))
    if not backward:
        assert (order[RETURN] > order[FIRST]).all()
        return
    made = order[FIRST].amax(0)
    assert (order[RETURN:] > made).all(), "activation gradients of all its rows"
    assert torch.equal(order[2:, OWN], order[2:, LATE])


def test_returns_are_on_the_wire_as_early_as_it_carries_them():
    """qwen3-30b, T=8192, EP 2: own rows while tokens travel; then rows for the peer return between first products,
    since the wire takes longest; own rows, which need no wire, return last."""
    order = order_of("qwen3-30b", 2, 8192, backward=False)
    assert order[FIRST, OWN].max() < order[FIRST, LATE].min()
    between = (order[RETURN, LATE] < order[FIRST, LATE].max()).sum()
    assert between > 48
    assert (order[RETURN, OWN] > order[RETURN, LATE].max()).sum() > 48


def test_weight_gradients_are_last():
    """They have nothing behind them, and hide what returns."""
    order = order_of("qwen3-30b", 2, 8192, backward=True)
    assert order[2:].min() > order[:2].max()


def test_calls_of_a_bucket_share_an_order():
    assert [bucket(tokens) for tokens in (0, 1, 2, 3, 4, 5, 4096, 4097, 8192)] == [0, 0, 1, 2, 2, 3, 12, 13, 13]
    few, more, many = (order_of("dsv2-lite", 2, tokens, backward=False) for tokens in (4096, 4097, 8192))
    assert torch.equal(more, many)
    assert not torch.equal(few, many)


def test_the_simulator_finds_it_shorter():
    """qwen3-30b, T=8192, balanced: forward by 5 % at least, since results travel under both products."""
    problem, machine = Problem(SHAPES["qwen3-30b"], 2, 8192), load_machine("h200-node")
    us = {
        name: row(problem, machine, STRATEGIES[name])["makespan_us"]
        for name in ("uniep-mega", "uniep-mega-natural", "uniep-mega-chunk-major", "uniep-mega-critical-path")
    }
    critical = us.pop("uniep-mega-critical-path")
    assert critical < 0.95 * min(us.values()), (critical, us)

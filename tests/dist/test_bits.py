"""The promise: results are a function of inputs and config, bit for bit.

Everything is compared with one oracle, uniep's serial schedule at EP=1; the oracle itself equals
`uniep.reference`, which no schedule, tile or process touches.
"""

import dataclasses
import itertools
import random

import case
import pytest
import torch
from case import config, random_batch, run, same_bits

import uniep
from uniep import reference
from uniep.activation import ACTIVATIONS
from uniep.schedule import is_valid

BOTH = ["output", "activation"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def variants(count: int, seed: int) -> list[uniep.Schedule]:
    """The four named schedules, then random points of the space."""
    pick = random.Random(seed).choice
    points = list(case.SCHEDULES)
    for _ in range(count):
        tiles = [uniep.Tile(rows=pick((64, 128)), columns=pick((64, 128, 192, 256))) for _ in range(2)]
        points.append(
            uniep.Schedule(
                overlap=pick(("serial", "fused")),
                tile_order=pick(("natural", "local-first", "chunk-major", "critical-path")),
                chunk_experts=pick((1, 2)),
                peer_order=pick(("natural", "rotated")),
                weight_gradient_order=pick(("last", "interleaved")),
                activation=pick(("fused", "separate")),
                gate_up=tiles[0],
                down=tiles[1],
                chunk_tokens=pick((1, 3, 32, 64, 128)),
                matrix_workers=pick((1, 2, 3)),
                vector_workers=pick((1, 2, 3)),
                received=pick(("saved", "again")),
                preactivation=pick(("saved", "recomputed")),
            )
        )
    return points


def each_schedule(world, cfg, batch, ep_size, schedules):
    return [case.steps_of_rank(world, cfg, [batch], ep_size, schedule)[0] for schedule in schedules]


def compare_schedules(pool, cfg, batch, ep_sizes, schedules):
    schedules = [s for s in schedules if not is_valid(s, cfg)]
    assert len(schedules) > 4
    want = case.oracle(pool, cfg, batch)
    for ep_size in ep_sizes:
        ranks = pool.run(each_schedule, cfg, batch, ep_size, schedules, ranks=ep_size)
        for schedule, parts in zip(schedules, zip(*ranks, strict=True), strict=True):
            same_bits(case.gather(list(parts)), want, f"EP={ep_size} {schedule}")
    return want


@pytest.mark.parametrize(
    ("weight_at", "more"), [("output", {"combine_groups": 4}), ("activation", {"bias": True, "activation": "geglu"})]
)
def test_recomputed(pool, weight_at, more):
    """h made again in the backward, of tokens that were saved or dispatched again, under every overlap and order."""
    cfg = config(ffn=200, top_k=3, dtype=torch.bfloat16, weight_at=weight_at, **more)
    batch = random_batch(cfg, (70, 0, 101, 33), unused=0.1)
    recomputed = [
        dataclasses.replace(schedule, received=received, activation=activation, preactivation="recomputed")
        for schedule in (*case.SCHEDULES, uniep.Schedule(tile_order="critical-path", vector_workers=2))
        for received, activation in (("saved", "fused"), ("again", "separate"))
    ]
    compare_schedules(pool, cfg, batch, (1, 2), recomputed)


QUICK = [(torch.float32, "activation"), (torch.bfloat16, "output"), (torch.float16, "output")]
"""Each dtype and each place of the weight; the other pairs are slow."""


@pytest.mark.parametrize(
    ("dtype", "weight_at"),
    [pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow) for pair in itertools.product(DTYPES, BOTH)],
    ids=str,
)
def test_ep_sizes_and_schedules(pool, dtype, weight_at):
    """EP 1, 2, 4 under the named schedules and random tiles, workers, chunks, saved or dispatched again.

    Each dtype and weighting has random points of its own.
    """
    cfg = config(hidden=128, ffn=192, top_k=3, dtype=dtype, weight_at=weight_at)
    batch = random_batch(cfg, (70, 0, 101, 33), unused=0.1)
    seed = 10 * DTYPES.index(dtype) + BOTH.index(weight_at)
    want = compare_schedules(pool, cfg, batch, (1, 2, 4), variants(2, seed))
    case.accurate(want, batch, cfg)


@pytest.mark.parametrize(
    ("activation", "weight_at", "more"),
    [
        ("geglu", "output", {}),
        ("geglu_tanh", "activation", {"bias": True}),
        ("swiglu_oai", "output", {"bias": True, "activation_limit": 1.0}),
        ("relu2", "activation", {}),
    ],
)
def test_activations(pool, activation, weight_at, more):
    """The same with other activations, gated and not, with a limit, and biases; tiles end in ragged columns."""
    cfg = config(ffn=200, top_k=3, dtype=torch.bfloat16, activation=activation, weight_at=weight_at, **more)
    batch = random_batch(cfg, (70, 0, 101, 33), unused=0.1)
    want = compare_schedules(pool, cfg, batch, (1, 2, 4), variants(1, seed=4))
    same_bits(want, by_reference(cfg, batch))
    case.accurate(want, batch, cfg)


@pytest.mark.parametrize(
    ("hidden", "ffn"), [(72, 40), (200, 64), (64, 200), (1025, 64), (64, 513), (1, 1)], ids=lambda size: str(size)
)
def test_odd_sizes(pool, hidden, ffn):
    """30, 32: hidden and expert widths that are multiples of nothing."""
    cfg = config(hidden=hidden, ffn=ffn, dtype=torch.bfloat16)
    batch = random_batch(cfg, (20, 9, 0, 35))
    want = compare_schedules(pool, cfg, batch, (2,), variants(2, seed=2))
    case.accurate(want, batch, cfg)


def test_a_hot_expert_of_many_tiles(pool):
    """One expert takes most rows: several tiles, most of them remote."""
    cfg = config(num_experts=4, top_k=1, dtype=torch.bfloat16, max_tokens_per_rank=600)
    ids = torch.where(torch.arange(600) % 7 == 0, torch.arange(600) % 4, 2)[:, None]
    batch = random_batch(cfg, (150, 150, 150, 150), ids=ids)
    compare_schedules(pool, cfg, batch, (1, 2, 4), variants(4, seed=3))


def by_reference(cfg, batch):
    inputs = (batch.x, batch.ids, batch.weights, batch.w13, batch.w2)
    biases = batch.biases or None
    grads = reference.backward(batch.dy, *inputs, cfg, biases)
    y = reference.forward(*inputs, cfg, biases)
    return case.Outcome(y, grads.x, grads.weights, grads.w13, grads.w2, grads.b13, grads.b2)


@pytest.mark.parametrize("weight_at", BOTH)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_oracle_equals_the_reference(pool, dtype, weight_at):
    """The serial schedule at EP=1 and `uniep.reference` give the same bits."""
    cfg = config(hidden=72, ffn=200, top_k=3, dtype=dtype, weight_at=weight_at)
    batch = random_batch(cfg, (70, 0, 101, 33), unused=0.1)
    same_bits(case.oracle(pool, cfg, batch), by_reference(cfg, batch))


def random_problem(seed):
    """A shape, inputs and a schedule nobody chose."""
    chance = random.Random(seed)
    activation = chance.choice(list(ACTIVATIONS))
    cfg = config(
        hidden=chance.choice((64, 65, 128, 136)),
        ffn=chance.choice((8, 64, 100, 192)),
        num_experts=4 * chance.randint(1, 5),
        top_k=chance.randint(1, 4),
        max_tokens_per_rank=chance.choice((256, 300)),
        dtype=chance.choice(DTYPES),
        weight_at=chance.choice(BOTH),
        activation=activation,
        activation_limit=chance.choice((None, 0.5)) if ACTIVATIONS[activation].gated else None,
        bias=chance.choice((False, True)),
    )
    tokens = tuple(chance.choice((0, 1, 5, 33, 60)) for _ in range(4))
    ids = None
    if chance.random() < 0.5:  # few experts, repeats in a row, unused slots
        g = torch.Generator().manual_seed(seed)
        ids = torch.randint(-1, chance.randint(1, cfg.num_experts), (sum(tokens), cfg.top_k), generator=g)
    batch = random_batch(cfg, tokens, ids=ids, seed=seed, unused=chance.choice((0, 0.3)))
    return cfg, batch, chance.choice([s for s in variants(8, seed) if not is_valid(s, cfg)])


def each_problem(world, problems, ep_size):
    return [case.steps_of_rank(world, cfg, [batch], ep_size, schedule)[0] for cfg, batch, schedule in problems]


@pytest.mark.parametrize("ep_size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_random_problems(pool, ep_size):
    """Random shapes, routings and schedules have the bits of the reference."""
    problems = [random_problem(100 * ep_size + n) for n in range(16)]
    ranks = pool.run(each_problem, problems, ep_size, ranks=ep_size)
    for (cfg, batch, schedule), parts in zip(problems, zip(*ranks, strict=True), strict=True):
        same_bits(case.gather(list(parts)), by_reference(cfg, batch), f"{cfg} {batch.shard_tokens} {schedule}")


def repeated(world, cfg, batch, ep_size):
    """Steps in one Workspace, then in a new one."""
    return case.steps_of_rank(world, cfg, [batch], ep_size, None, False, 4) + case.steps_of_rank(
        world, cfg, [batch], ep_size
    )


def test_every_run_is_the_same(pool):
    """Repeated calls, and a new Workspace."""
    cfg = config(dtype=torch.bfloat16)
    batch = random_batch(cfg, (64, 1, 50, 0))
    for parts in zip(*pool.run(repeated, cfg, batch, 4), strict=True):
        same_bits(case.gather(list(parts)), case.oracle(pool, cfg, batch))


def test_repeats_of_an_expert_in_a_row(pool):
    """A token may choose an expert twice; both slots count, and it still travels once."""
    cfg = config(top_k=3)
    g = torch.Generator().manual_seed(0)
    batch = random_batch(cfg, (20, 20, 20, 20), ids=torch.randint(-1, 3, (80, 3), generator=g) * 2)
    batch.ids[batch.ids < 0] = -1
    want = case.oracle(pool, cfg, batch)
    case.accurate(want, batch, cfg)
    for ep_size in (2, 4):
        same_bits(run(pool, cfg, batch, ep_size), want)


LAYOUTS = ("stacked", "four dimensions", "split", "lists")


def in_layout(w13, w2, layout):
    """(leaves of w13, leaves of w2) of one layout."""
    ffn = w2.shape[2]
    if layout == "four dimensions":
        return [w13.unflatten(1, (2, ffn))], [w2]
    if layout == "split":
        return [w13[:, :ffn], w13[:, ffn:]], [w2]
    return (list(w13), list(w2)) if layout == "lists" else ([w13], [w2])


def each_layout(world, cfg, batch, ep_size):
    """Per layout: this rank's outcome, gradients put back into the stacked form."""
    outcomes = []
    with case.workspace(world, cfg, ep_size) as ws:
        rows, experts = batch.rows(ws.rank, ep_size), batch.experts(ws.rank, ep_size)
        for layout in LAYOUTS:
            first, second = (
                [case.leaf(t) for t in ts] for ts in in_layout(batch.w13[experts], batch.w2[experts], layout)
            )
            x, weights = case.leaf(batch.x[rows]), case.leaf(batch.weights[rows])
            w13, w2 = (ts if layout == "lists" else tuple(ts) if len(ts) > 1 else ts[0] for ts in (first, second))
            y = uniep.moe(x, batch.ids[rows], weights, w13, w2, workspace=ws)
            y.backward(batch.dy[rows])
            grads = [[t.grad for t in ts] for ts in (first, second)]
            dw2 = torch.stack(grads[1]) if layout == "lists" else grads[1][0]
            dw13 = (
                torch.stack(grads[0])
                if layout == "lists"
                else torch.cat(grads[0], 1)
                if layout == "split"
                else grads[0][0]
            )
            outcomes.append(case.Outcome(y.detach(), x.grad, weights.grad, dw13.reshape(len(dw2), -1, cfg.hidden), dw2))
    return outcomes


def test_weight_layouts(pool):
    """38: each parameter layout gives the same bits, and gradients in its own layout."""
    cfg = config(ffn=72, dtype=torch.bfloat16)
    batch = random_batch(cfg, (20, 9, 0, 35))
    want = case.oracle(pool, cfg, batch)
    for layout, parts in zip(LAYOUTS, zip(*pool.run(each_layout, cfg, batch, 2, ranks=2), strict=True), strict=True):
        same_bits(case.gather(list(parts)), want, layout)


def strided(world, cfg, batch, ep_size):
    """x, ids and weights as views with foreign strides, parameters transposed in memory."""
    with case.workspace(world, cfg, ep_size) as ws:
        rows, experts = batch.rows(ws.rank, ep_size), batch.experts(ws.rank, ep_size)
        wide = torch.full((2 * len(batch.x[rows]), cfg.hidden + 3), case.POISON)
        wide[::2, 3:] = batch.x[rows]
        x = wide.requires_grad_()
        w13 = case.leaf(batch.w13[experts].transpose(1, 2).contiguous())
        w2 = case.leaf(batch.w2[experts].transpose(1, 2).contiguous())
        weights = case.leaf(batch.weights[rows].T.contiguous())
        ids = batch.ids[rows].T.contiguous().T
        y = uniep.moe(x[::2, 3:], ids, weights.T, w13.transpose(1, 2), w2.transpose(1, 2), workspace=ws)
        y.backward(batch.dy[rows])
        return case.Outcome(
            y.detach(), x.grad[::2, 3:], weights.grad.T, w13.grad.transpose(1, 2), w2.grad.transpose(1, 2)
        )


def test_strides_of_the_inputs(pool):
    """Views of other tensors give the bits of contiguous inputs."""
    cfg = config()
    batch = random_batch(cfg, (20, 9, 0, 35))
    same_bits(case.gather(pool.run(strided, cfg, batch, 2, ranks=2)), case.oracle(pool, cfg, batch))


def test_a_rank_may_own_all_the_work_of_others(pool):
    """Every token's experts live on the next rank: nothing is local."""
    cfg = config(top_k=2)
    shard = torch.arange(80) // 20
    ids = torch.stack([(shard + 1) % 4 * 2, (shard + 1) % 4 * 2 + 1], 1)
    batch = random_batch(cfg, (20, 20, 20, 20), ids=ids)
    compare_schedules(pool, cfg, batch, (4,), variants(3, seed=4))


@pytest.mark.parametrize("damage", case.FIELDS)
def test_the_comparison_sees_one_bit(damage):
    """same_bits tells 0.0 from -0.0 and names the place."""
    cfg = config()
    outcome = case.autograd(random_batch(cfg, (2, 0, 0, 0)), cfg, torch.float32)
    zeroed = getattr(outcome, damage).clone()
    zeroed.view(-1)[5 % zeroed.numel()] = 0.0
    flipped = zeroed.clone()
    flipped.view(-1)[5 % zeroed.numel()] = -0.0
    with pytest.raises(AssertionError, match=f"{damage}: 1 of {zeroed.numel()} values differ"):
        same_bits(dataclasses.replace(outcome, **{damage: flipped}), dataclasses.replace(outcome, **{damage: zeroed}))


def steps_from_call(world, cfg, batch, backend, start):
    with uniep.Workspace(cfg, world.group(2), device="cpu", backend=backend, timeout_s=case.TIMEOUT_S) as ws:
        ws.backend._call = start
        return [case.forward_backward(ws, batch) for _ in range(2)]


@pytest.mark.parametrize("backend", ["cpu", "nccl"])
def test_calls_past_2_to_the_31(pool, backend):
    cfg = config(hidden=16, ffn=24)
    batch = random_batch(cfg, (5, 9))
    ranks = pool.run(steps_from_call, cfg, batch, backend, 2**31 - 2, ranks=2)
    for parts in zip(*ranks, strict=True):
        same_bits(case.gather(list(parts)), case.oracle(pool, cfg, batch))

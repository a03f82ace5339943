"""Work that is empty, ragged, unbalanced or bad: numbers of tokens and rows, ids, workloads.

A docstring that starts with a number is the field report of that number (docs/field_reports.md).  Shapes are scaled
to a laptop; structure and closed forms are the report's own.  "The oracle" is uniep's serial schedule at EP=1, which
every run must equal bit for bit; `case.accurate` bounds the distance to fp64.
"""

import dataclasses

import case
import pytest
import torch
import torch._dynamo
from case import config, exact_batch, random_batch, run, same_bits, steps

import uniep
from uniep import workloads

HALF_AND_FULL = [torch.float32, torch.bfloat16, torch.float16]


def grouped_ids(counts: list[int], seed: int = 0) -> torch.Tensor:
    """K=1 ids that give expert i counts[i] rows, in random order."""
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))][:, None]


def even(total: int) -> tuple[int, ...]:
    return tuple(total * (s + 1) // 4 - total * s // 4 for s in range(4))


def routed_rows(world, cfg, batches, ep_size):
    """Per batch: (routed rows on this rank, tokens received from others)."""
    with case.workspace(world, cfg, ep_size) as ws:
        found = []
        for batch in batches:
            plan = uniep.route(batch.ids[batch.rows(ws.rank, ep_size)], workspace=ws)
            mine = plan.counts_RE[:, batch.experts(ws.rank, ep_size)]
            found.append((int(mine.sum()), int((plan.row_return_N >= 0).sum()), int(plan.recv_count_R.sum())))
        return found


def test_01_a_rank_without_tokens(pool):
    """1: rank 0 has no tokens and all the work: it receives 72 rows; y and dX are (0, H); 20 times."""
    cfg = config(num_experts=24, top_k=6)
    ids = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(t)) for t in range(12)])
    batch = random_batch(cfg, (0, 4, 4, 4), ids=ids)
    rows = pool.run(routed_rows, cfg, [batch], 4)
    assert [found[0][:2] for found in rows] == [(72, 72), (0, 0), (0, 0), (0, 0)]
    assert rows[0][0][2] == 12, "twelve tokens travel, each once"
    want = case.oracle(pool, cfg, batch)
    case.accurate(want, batch, cfg)
    ranks = pool.run(case.steps_of_rank, cfg, [batch], 4, None, False, 20)
    assert ranks[0][0].y.shape == ranks[0][0].dx.shape == (0, cfg.hidden)
    for got in zip(*ranks, strict=True):
        same_bits(case.gather(list(got)), want)


@pytest.mark.parametrize("ep_size", [1, 2])
def test_03_an_expert_without_tokens_has_zero_gradients(pool, ep_size):
    """3: local counts [162, 0, 277, 46, 0, 83] behind poison: dW of the idle experts is exactly 0, others equal."""
    cfg = config(num_experts=12, top_k=1, max_tokens_per_rank=1024, dtype=torch.bfloat16)
    batch = random_batch(cfg, even(673), ids=grouped_ids([60, 0, 40, 5, 0, 0, 162, 0, 277, 46, 0, 83]))
    want = case.oracle(pool, cfg, batch)
    got = run(pool, cfg, batch, ep_size, poisoned=True)
    for expert in (1, 4, 5, 7, 10):
        assert not got.dw13[expert].any() and not got.dw2[expert].any()
    same_bits(got, want)


COUNTS = {
    "zero first": [0, 5, 7, 9, 3, 2, 6, 8],
    "zero in the middle": [5, 7, 9, 0, 0, 3, 2, 6],
    "zero last": [5, 7, 9, 3, 2, 6, 8, 0],
    "zeros in a row": [5, 0, 0, 0, 9, 0, 0, 4],
    "only one busy": [0, 0, 0, 0, 0, 70, 0, 0],
    "on the alignment": [8, 16, 64, 128, 0, 128, 64, 0],
}


@pytest.mark.parametrize("ep_size", [1, 2])
def test_04_empty_groups_at_each_position(pool, ep_size):
    """4: zeros first, in the middle, last, in a row; counts of 8, 16, 64, 128; passes one after another."""
    cfg = config(top_k=1, max_tokens_per_rank=512)
    batches = [random_batch(cfg, even(sum(counts)), ids=grouped_ids(counts)) for counts in COUNTS.values()]
    want = [case.oracle(pool, cfg, batch) for batch in batches]
    for batch, one in zip(batches, want, strict=True):
        case.accurate(one, batch, cfg)
    for index, got in enumerate(steps(pool, cfg, batches, ep_size, repeats=4)):
        same_bits(got, want[index % len(batches)], list(COUNTS)[index % len(batches)])


def compiled_steps(world, cfg, batches, ep_size, poisoned):
    """Like case.steps_of_rank with one torch.compile'd function over the layer."""
    torch._dynamo.reset()
    with case.workspace(world, cfg, ep_size) as ws:
        if poisoned:
            case.poison(ws)

        @torch.compile(fullgraph=True, dynamic=True)
        def layer(x, ids, weights, w13, w2):
            return uniep.moe(2 * x, ids, weights, w13, w2, workspace=ws) * 0.5

        outcomes = []
        for batch in batches:
            rows, experts = batch.rows(ws.rank, ep_size), batch.experts(ws.rank, ep_size)
            leaves = [case.leaf(t) for t in (batch.x[rows], batch.weights[rows], batch.w13[experts], batch.w2[experts])]
            y = layer(leaves[0], batch.ids[rows], *leaves[1:])
            y.backward(batch.dy[rows])
            outcomes.append(case.Outcome(y.detach(), *(t.grad for t in leaves)))
        return outcomes


@pytest.mark.parametrize(
    ("mode", "poisoned"), [("eager", False), ("eager", True), pytest.param("compiled", True, marks=pytest.mark.slow)]
)
def test_05_nothing_routed_at_all(pool, mode, poisoned):
    """5: all ids -1, and all ranks without tokens: y and each gradient exist and are exactly 0, also compiled."""
    cfg = config()
    unused = random_batch(cfg, (8, 8, 8, 8), ids=torch.full((32, 2), -1))
    nothing = random_batch(cfg, (0, 0, 0, 0))
    if mode == "eager":
        got = steps(pool, cfg, [unused, nothing], 2, poisoned=poisoned)
    else:
        ranks = pool.run(compiled_steps, cfg, [unused, nothing], 2, poisoned, ranks=2)
        got = [case.gather(list(parts)) for parts in zip(*ranks, strict=True)]
    for one, tokens in zip(got, (32, 0), strict=True):
        assert one.y.shape == one.dx.shape == (tokens, cfg.hidden) and one.dweights.shape == (tokens, 2)
        assert not any(getattr(one, name).any() for name in case.FIELDS)


def test_05_compiled_bits_equal_eager(pool):
    """5, 72: the compiled layer gives the eager bits for several token counts."""
    cfg = config(dtype=torch.bfloat16)
    batches = [
        random_batch(cfg, tokens, seed=n) for n, tokens in enumerate([(8, 8, 8, 8), (12, 3, 9, 1), (5, 0, 0, 0)])
    ]
    doubled = [dataclasses.replace(b, x=2 * b.x, dy=0.5 * b.dy) for b in batches]
    ranks = pool.run(compiled_steps, cfg, batches, 2, False, ranks=2)
    for parts, want in zip(zip(*ranks, strict=True), steps(pool, cfg, doubled, 2), strict=True):
        got = case.gather(list(parts))
        same_bits(got, dataclasses.replace(want, y=0.5 * want.y, dx=2 * want.dx))


def layer_steps(world, cfg, batches, ep_size):
    """The same nn.Experts object over all batches."""
    layer = uniep.nn.Experts(cfg, world.group(ep_size), device="cpu", seed=3)
    rank = layer.workspace.rank
    outcomes = []
    for batch in batches:
        rows = batch.rows(rank, ep_size)
        x, weights = case.leaf(batch.x[rows]), case.leaf(batch.weights[rows])
        layer.zero_grad()
        y = layer(x, batch.ids[rows], weights)
        y.backward(batch.dy[rows])
        outcomes.append(case.Outcome(y.detach(), x.grad, weights.grad, layer.w13.grad.clone(), layer.w2.grad.clone()))
    parameters = layer.w13.detach().clone(), layer.w2.detach().clone()
    layer.workspace.close()
    return outcomes, parameters


def test_06_any_number_of_tokens_per_rank(pool):
    """6: T = [1, 17, 256, 0], then [256, 0, 17, 1], with the same layer; only routed rows are received."""
    cfg = config(num_experts=16)
    batches = [random_batch(cfg, tokens, seed=n) for n, tokens in enumerate([(1, 17, 256, 0), (256, 0, 17, 1)])]
    ranks = pool.run(layer_steps, cfg, batches, 4)
    w13, w2 = (torch.cat([parameters[n] for _, parameters in ranks]) for n in range(2))
    for index, batch in enumerate(batches):
        full = dataclasses.replace(batch, w13=w13, w2=w2)
        got = case.gather([outcomes[index] for outcomes, _ in ranks])
        same_bits(got, case.oracle(pool, cfg, full))
        case.accurate(got, full, cfg)
    for found in pool.run(routed_rows, cfg, batches, 4):
        assert all(counted == rows for counted, rows, _ in found)


@pytest.mark.parametrize("ep_size", [1, 2, 4])
@pytest.mark.parametrize("dtype", HALF_AND_FULL, ids=str)
def test_08_unused_slots(pool, dtype, ep_size):
    """8: ids [-1, 3, -1, 5] with w = [.9, .5, .7, .25], v3 = 8, v5 = 16: y = 8 exactly; dw of -1 slots is 0."""
    cfg = config(top_k=4, dtype=dtype)
    v = torch.tensor([0, 0, 0, 8.0, 0, 16, 0, 0])
    dy = torch.zeros(1, cfg.hidden)
    dy[0, :4] = torch.tensor([1.0, 2, 3, 4])
    batch = exact_batch(cfg, (1, 0, 0, 0), torch.tensor([[-1, 3, -1, 5]]), torch.tensor([[0.9, 0.5, 0.7, 0.25]]), v, dy)
    got = run(pool, cfg, batch, ep_size)
    assert got.y.unique().tolist() == [8.0]
    assert got.dweights.tolist() == [[0, 80, 0, 160]]
    counts = pool.run(routed_rows, cfg, [batch], ep_size, ranks=ep_size)
    assert sum(found[0][0] for found in counts) == 2


@pytest.mark.parametrize("weight_at", ["output", "activation"])
def test_08_half_of_the_slots_unused(pool, weight_at):
    """8: half of the slots are -1 at random."""
    cfg = config(top_k=4, weight_at=weight_at)
    batch = random_batch(cfg, (30, 0, 21, 13), unused=0.5)
    want = case.oracle(pool, cfg, batch)
    case.accurate(want, batch, cfg)
    same_bits(run(pool, cfg, batch, 4), want)
    assert not want.dweights[batch.ids < 0].any()


def test_09_padding_rows(pool):
    """9: the last 16 rows of each rank are -1: 384 routes, zero y and dX there, real rows as if alone."""
    cfg = config()
    batch = random_batch(cfg, (64, 64, 64, 64))
    real = (torch.arange(256) % 64) < 48
    batch.ids[~real] = -1
    routes = [found[0][0] for found in pool.run(routed_rows, cfg, [batch], 4)]
    assert sum(routes) == 384
    got, alone = (run(pool, cfg, b, 4) for b in (batch, batch.with_tokens(real)))
    assert not got.y[~real].any() and not got.dx[~real].any() and not got.dweights[~real].any()
    same_bits(dataclasses.replace(got, y=got.y[real], dx=got.dx[real], dweights=got.dweights[real]), alone)


@pytest.mark.parametrize("first", [2, 0])
def test_10_rows_with_different_numbers_of_routes(pool, first):
    """10: rows with 2 (or 0), 1, 0 and 4 routes, then random ones."""
    cfg = config(top_k=4)
    batch = random_batch(cfg, (40, 3, 0, 21), unused=0.3)
    for row, used in enumerate([first, 1, 0, 4]):
        batch.ids[row] = torch.tensor([3, 6, 0, 5])
        batch.ids[row, used:] = -1
    want = case.oracle(pool, cfg, batch)
    case.accurate(want, batch, cfg)
    for ep_size in (2, 4):
        same_bits(run(pool, cfg, batch, ep_size), want)


def bad_ids(world, cfg, batch, bad_rank, row, slot, values):
    """(error of moe, of route) for each bad value, then a normal step."""
    with case.workspace(world, cfg, 4) as ws:
        before = case.forward_backward(ws, batch)
        errors = []
        for value in values:
            ids = batch.ids.clone()
            if ws.rank == bad_rank:
                ids[batch.rows(bad_rank, 4)][row, slot] = value
            mine = batch.rows(ws.rank, 4)
            arguments = (batch.x[mine], ids[mine], batch.weights[mine], batch.w13[batch.experts(ws.rank, 4)])
            call = lambda a=arguments: uniep.moe(*a, batch.w2[batch.experts(ws.rank, 4)], workspace=ws)  # noqa: E731
            errors.append(case.named_error(call))
            errors.append(case.named_error(lambda i=ids[mine]: uniep.route(i, workspace=ws)))
        return errors, before, case.forward_backward(ws, batch)


def test_11_bad_ids_raise_on_every_rank(pool):
    """11: E, E+5, 2^31-1, -2 on one rank: InputError everywhere with rank, row, slot, value; then all is well."""
    cfg = config()
    batch = random_batch(cfg, (5, 5, 5, 5))
    values = [8, 13, 2**31 - 1, -2]
    for errors, before, after in pool.run(bad_ids, cfg, batch, 2, 3, 1, values):
        for value, pair in zip(values, zip(errors[::2], errors[1::2], strict=True), strict=True):
            for kind, message in pair:
                assert kind == "InputError"
                assert all(text in message for text in ("rank 2", "row 3", "slot 1", str(value))), message
        same_bits(after, before)


def router_step(world, cfg, x_of_rank, ep_size):
    """y and ids of nn.MoE for one x."""
    layer = uniep.nn.MoE(cfg, world.group(ep_size), device="cpu", seed=1)
    with layer.experts.workspace, torch.no_grad():
        x = x_of_rank[layer.experts.workspace.rank]
        return layer(x), layer.route(x)[0]


def test_13_nan_stays_with_its_token(pool):
    """13: a NaN weight, a NaN token and an all-NaN router row change no other token's bits; ids stay valid."""
    cfg = config()
    clean = random_batch(cfg, (16, 16, 16, 16))
    want = run(pool, cfg, clean, 2).y
    others = torch.arange(64) != 21
    for name in ("weights", "x"):
        damaged = getattr(clean, name).clone()
        damaged[21, 0] = float("nan")
        got = run(pool, cfg, dataclasses.replace(clean, **{name: damaged}), 2).y
        case.equal_bits(got[others], want[others], f"NaN in {name}")
        assert got[21].isnan().all()
    x = list(clean.x.split(32))
    y, _ = zip(*pool.run(router_step, cfg, x, 2, ranks=2), strict=True)
    x[0][21] = float("nan")
    broken, ids = zip(*pool.run(router_step, cfg, x, 2, ranks=2), strict=True)
    case.equal_bits(torch.cat(broken)[others], torch.cat(y)[others], "NaN router row")
    assert torch.cat(broken)[21].isnan().all()
    assert all(int(i.min()) >= 0 and int(i.max()) < cfg.num_experts for i in ids)


def test_20_total_imbalance(pool):
    """20: (a) all tokens to expert 0; (b) all eight choices on rank 0; (c) the hot rank moves each step."""
    one = config(num_experts=32, top_k=1)
    everything = random_batch(one, (256, 256, 256, 256), ids=torch.zeros(1024, 1, dtype=torch.int64))
    same_bits(run(pool, one, everything, 4), case.oracle(pool, one, everything))
    cfg = config(num_experts=32, top_k=8)
    batches = []
    for step in range(4):
        ids = 8 * step + torch.rand(256, 8, generator=torch.Generator().manual_seed(step)).argsort(1)
        batches.append(random_batch(cfg, (64, 64, 64, 64), ids=ids, seed=step))
    for batch, got in zip(batches, steps(pool, cfg, batches, 4), strict=True):
        same_bits(got, case.oracle(pool, cfg, batch))


@pytest.mark.parametrize("name", workloads.NAMES)
def test_24_workloads_have_the_same_bits_at_each_ep_size(pool, name):
    """24: the shared skewed workloads, over several steps, at EP 1, 2, 4: the same logical work, the same bits."""
    cfg = config(num_experts=16, top_k=4, dtype=torch.bfloat16, max_tokens_per_rank=256)
    batches = []
    for step in range(3):
        made = workloads.workload(name, tokens=192, num_experts=16, top_k=4, seed=5, step=step, shards=4)
        batches.append(random_batch(cfg, made.shard_tokens, ids=made.ids_TK, seed=step))
    want = steps(pool, cfg, batches, 1, case.SERIAL)
    for ep_size in (2, 4):
        for step, got in enumerate(steps(pool, cfg, batches, ep_size)):
            same_bits(got, want[step], f"{name} step {step} EP={ep_size}")

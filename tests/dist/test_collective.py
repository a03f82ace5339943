"""backend="nccl" over gloo: the same bits as the `cpu` backend, the same errors, on every rank.

On the CPU both backends run the same tile bodies, so what is tested here is the collective path: headers, plan,
all-to-alls, the order of rows on the way, what is saved, failures.
"""

import dataclasses
import datetime
import re
import time

import case
import pytest
import test_bits
import torch
import torch.distributed as dist
from case import config, random_batch, same_bits

import uniep

SERIAL = uniep.Schedule(overlap="serial", tile_order="natural")
AGAIN = dataclasses.replace(SERIAL, received="again")
RECOMPUTED = [dataclasses.replace(schedule, preactivation="recomputed") for schedule in (SERIAL, AGAIN)]
SHORT_S = 2.0


def workspace(world, cfg, ep_size, schedule=None, group=None, timeout_s=case.TIMEOUT_S):
    group = world.group(ep_size) if group is None else group
    return uniep.Workspace(cfg, group, device="cpu", backend="nccl", schedule=schedule, timeout_s=timeout_s)


def steps_of_rank(world, cfg, batches, ep_size, schedules=(None,)):
    """Outcomes of each schedule and batch; memory that the calls may reuse is full of NaN."""
    outcomes = []
    for schedule in schedules:
        with workspace(world, cfg, ep_size, schedule) as ws:
            case.poison(ws)
            outcomes += [case.forward_backward(ws, batch) for batch in batches]
    return outcomes


def compare(pool, cfg, batches, ep_sizes=(1, 2, 4), schedules=(None,)):
    """Every batch at every EP size and schedule has the bits of the cpu backend."""
    want = [case.oracle(pool, cfg, batch) for batch in batches] * len(schedules)
    for ep_size in ep_sizes:
        ranks = pool.run(steps_of_rank, cfg, batches, ep_size, schedules, ranks=ep_size)
        for number, parts in enumerate(zip(*ranks, strict=True)):
            same_bits(case.gather(list(parts)), want[number], f"EP={ep_size}, number {number}")


@pytest.mark.parametrize("weight_at", test_bits.BOTH)
@pytest.mark.parametrize("dtype", test_bits.DTYPES, ids=str)
def test_bits_of_the_cpu_backend(pool, dtype, weight_at):
    """y and every gradient at EP 1, 2, 4; T differs per rank and is 0 on one; unused slots; saved or made again."""
    cfg = config(
        hidden=128,
        ffn=192,
        top_k=3,
        max_tokens_per_rank=300,
        dtype=dtype,
        weight_at=weight_at,
        activation="geglu" if weight_at == "activation" else "swiglu",
    )
    compare(pool, cfg, [random_batch(cfg, (70, 0, 101, 33), unused=0.1)], schedules=(None, AGAIN, *RECOMPUTED))


@pytest.mark.parametrize(("hidden", "ffn"), [(72, 40), (65, 200), (1, 1)], ids=lambda size: str(size))
def test_odd_sizes(pool, hidden, ffn):
    cfg = config(hidden=hidden, ffn=ffn, dtype=torch.bfloat16)
    compare(pool, cfg, [random_batch(cfg, (20, 9, 0, 35))], ep_sizes=(2,))


def routings(cfg):
    """Routings at the edge, 4 x 20 tokens of top_k=2, 8 experts."""
    shard, token = torch.arange(80) // 20, torch.arange(80)
    next_rank = (shard + 1) % 4 * 2
    g = torch.Generator().manual_seed(0)
    return {
        "one expert takes all": torch.stack([torch.full((80,), 5), torch.full((80,), 5)], 1),
        "nothing is local": torch.stack([next_rank, next_rank + 1], 1),
        "everything is local": torch.stack([shard * 2, shard * 2 + 1], 1),
        "no slot is used": torch.full((80, 2), -1),
        "one slot is used": torch.where((token == 33)[:, None], torch.tensor([[-1, 2]]), -1),
        "repeats in a row": torch.randint(-1, 3, (80, 2), generator=g) * 2,
    }


def test_edges_of_routing(pool):
    """Idle experts and ranks have exact zero gradients; empty messages in any place."""
    cfg = config(dtype=torch.bfloat16)
    batches = [random_batch(cfg, (20, 20, 20, 20), ids=ids.clamp(min=-1)) for ids in routings(cfg).values()]
    compare(pool, cfg, [*batches, random_batch(cfg, (0, 0, 0, 0)), random_batch(cfg, (0, 0, 0, 1))])


@pytest.mark.parametrize("ep_size", [2, 4])
def test_random_problems(pool, ep_size):
    problems = [test_bits.random_problem(1000 * ep_size + n)[:2] for n in range(8)]
    ranks = pool.run(each_problem, problems, ep_size, ranks=ep_size)
    for (cfg, batch), parts in zip(problems, zip(*ranks, strict=True), strict=True):
        same_bits(case.gather(list(parts)), test_bits.by_reference(cfg, batch), f"{cfg} {batch.shard_tokens}")


def each_problem(world, problems, ep_size):
    return [steps_of_rank(world, cfg, [batch], ep_size)[0] for cfg, batch in problems]


def in_layouts(world, cfg, batch, ep_size):
    """Gradients of w13 and w2 per layout, put back into the stacked form."""
    found = []
    with workspace(world, cfg, ep_size) as ws:
        rows, experts = batch.rows(ws.rank, ep_size), batch.experts(ws.rank, ep_size)
        for layout in test_bits.LAYOUTS:
            first, second = (
                [case.leaf(t) for t in ts] for ts in test_bits.in_layout(batch.w13[experts], batch.w2[experts], layout)
            )
            parts = [ts[0] if len(ts) == 1 else ts for ts in (first, second)]
            y = uniep.moe(batch.x[rows], batch.ids[rows], batch.weights[rows], *parts, workspace=ws)
            y.backward(batch.dy[rows])
            d_first, d_second = ([t.grad for t in ts] for ts in (first, second))
            join = torch.stack if layout == "lists" else lambda ts: torch.cat(ts, 1)
            found.append((y.detach(), join(d_first).reshape(batch.w13[experts].shape), join(d_second)))
    return found


def test_layouts(pool):
    """Each parameter layout gives the same bits, and gradients in its own layout."""
    cfg = config(ffn=72, dtype=torch.bfloat16)
    batch = random_batch(cfg, (20, 9, 0, 35))
    want = case.oracle(pool, cfg, batch)
    for layout, parts in zip(
        test_bits.LAYOUTS, zip(*pool.run(in_layouts, cfg, batch, 2, ranks=2), strict=True), strict=True
    ):
        for name, tensors in zip(("y", "dw13", "dw2"), zip(*parts, strict=True), strict=True):
            case.equal_bits(torch.cat(tensors), getattr(want, name), f"{layout}: {name}")


def frozen(world, cfg, batch, ep_size, wanted, schedule):
    with workspace(world, cfg, ep_size, schedule) as ws:
        return case.gradients_of(ws, batch, wanted)


@pytest.mark.parametrize("schedule", [SERIAL, AGAIN], ids=["saved", "again"])
@pytest.mark.parametrize(
    "wanted",
    [
        (("dx",), ("dx",)),
        (("dw13",), ("dw13",)),
        (("dweights", "dw2"), ("dweights", "dw2")),
        (("dx", "dw13"), ("dweights",)),  # each rank takes part in what the other wants
    ],
    ids=str,
)
def test_frozen(pool, wanted, schedule):
    cfg = config(dtype=torch.bfloat16)
    batch = random_batch(cfg, (20, 9, 0, 35))
    want = case.oracle(pool, cfg, batch)
    case.equal_where_wanted(pool.run(frozen, cfg, batch, 2, wanted, schedule, ranks=2), wanted, batch, want)


def interleaved(world, cfg, batches, ep_size):
    """Two forwards, then both backwards, the first of them twice: outcomes in order of batches."""
    with workspace(world, cfg, ep_size) as ws:
        leaves, outputs, outcomes = [], [], []
        for batch in batches:
            rows, experts = batch.rows(ws.rank, ep_size), batch.experts(ws.rank, ep_size)
            tensors = batch.x[rows], batch.weights[rows], batch.w13[experts], batch.w2[experts]
            x, weights, w13, w2 = (case.leaf(t) for t in tensors)
            leaves.append((x, weights, w13, w2))
            outputs.append(uniep.moe(x, batch.ids[rows], weights, w13, w2, workspace=ws))
        for batch, tensors, y in zip(batches, leaves, outputs, strict=True):
            dy = batch.dy[batch.rows(ws.rank, ep_size)]
            first = torch.autograd.grad(y, tensors, dy, retain_graph=True)
            for a, b in zip(first, torch.autograd.grad(y, tensors, dy), strict=True):
                case.equal_bits(a, b, "second backward")
            outcomes.append(case.Outcome(y.detach(), *first))
        return outcomes


def test_interleaved_micro_batches(pool):
    """Nothing that backward needs lives in the Workspace."""
    cfg = config(dtype=torch.bfloat16)
    batches = [random_batch(cfg, tokens, seed=n) for n, tokens in enumerate([(20, 9, 0, 35), (0, 50, 1, 2)])]
    for batch, parts in zip(batches, zip(*pool.run(interleaved, cfg, batches, 4), strict=True), strict=True):
        same_bits(case.gather(list(parts)), case.oracle(pool, cfg, batch))


def plans(world, cfg, ids):
    mine = ids[world.rank]
    with workspace(world, cfg, 4) as ours, case.workspace(world, cfg, 4) as theirs:
        return [
            torch.equal(a, b)
            for a, b in zip(
                uniep.route(mine, workspace=ours).tensors(), uniep.route(mine, workspace=theirs).tensors(), strict=True
            )
        ]


def test_route(pool):
    """The plan is that of the cpu backend, also for narrow ids."""
    cfg = config(top_k=3)
    ids = [torch.randint(-1, 8, (tokens, 3), dtype=torch.int8) for tokens in (5, 0, 40, 1)]
    assert all(all(equal) for equal in pool.run(plans, cfg, ids))


# --- errors ---


def step_error(world, cfg, batch, damage):
    """(error of a step where rank 1 passes something else, a normal step before, one after)."""
    with workspace(world, cfg, 4) as ws:
        before = case.forward_backward(ws, batch)
        rows, experts = batch.rows(ws.rank, 4), batch.experts(ws.rank, 4)
        tensors = batch.x[rows], batch.ids[rows], batch.weights[rows], batch.w13[experts], batch.w2[experts]
        if ws.rank == 1:
            tensors = DAMAGES[damage][0](*tensors)
        error = case.named_error(lambda: uniep.moe(*tensors, workspace=ws))
        return error, before, case.forward_backward(ws, batch)


def replaced(ids, row, slot, value):
    ids = ids.clone()
    ids[row, slot] = value
    return ids


DAMAGES = {
    "id too large": (
        lambda x, i, w, a, b: (x, replaced(i, 3, 1, 8), w, a, b),
        "InputError",
        r"rank 1, row 3, slot 1: expert id 8 is not in 0\.\.7",
    ),
    "id below -1": (
        lambda x, i, w, a, b: (x, replaced(i, 0, 0, -2), w, a, b),
        "InputError",
        r"rank 1, row 0, slot 0: expert id -2",
    ),
    "x in fp64": (lambda x, i, w, a, b: (x.double(), i, w, a, b), "DTypeError", r"rank 1: x has dtype torch\.float64"),
    "missing expert": (lambda x, i, w, a, b: (x, i, w, a[1:], b), "ConfigError", r"w13 has shape \(1, 128, 64\)"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_one_rank_passes_bad_inputs(pool, damage):
    """Each rank raises the same named error, and the Workspace works on."""
    _, kind, text = DAMAGES[damage]
    cfg = config()
    for error, before, after in pool.run(step_error, cfg, random_batch(cfg, (5, 5, 5, 5)), damage):
        assert error is not None and error[0] == kind and re.search(text, error[1]), error
        same_bits(after, before)


def test_too_many_rows(pool):
    """One CapacityError on every rank with rows needed and available, before any row moves."""
    cfg = config(max_rows=12, top_k=1)
    fits = random_batch(cfg, (3, 3, 3, 3), ids=torch.arange(12)[:, None] % 8)
    over = random_batch(cfg, (5, 5, 5, 5), ids=torch.zeros(20, 1, dtype=torch.int64))
    want = case.oracle(pool, config(top_k=1), fits)
    for _ in (1, 2):
        ranks = pool.run(overflow, cfg, fits, over)
        same_bits(case.gather([outcome for _, outcome in ranks]), want)
        for (kind, message), _ in ranks:
            assert kind == "CapacityError" and "rank 0 needs 20 rows" in message and "12" in message, message


def overflow(world, cfg, fits, over):
    with workspace(world, cfg, 4) as ws:
        return case.named_error(case.forward_backward, ws, over), case.forward_backward(ws, fits)


def mismatch(world, cfg):
    backend = "cpu" if world.rank == 2 else "nccl"
    return case.named_error(lambda: uniep.Workspace(cfg, world.group(4), device="cpu", backend=backend))


def test_backends_that_differ(pool):
    for kind, message in pool.run(mismatch, config()):
        assert kind == "ConfigError" and "disagree on backend " in message, message


def out_of_step(world, cfg, batch, how):
    """The error of a rank when rank 1 makes other calls than rank 0."""
    with workspace(world, cfg, 2) as ws, workspace(world, cfg, 2) as other:
        rows, experts = batch.rows(ws.rank, 2), batch.experts(ws.rank, 2)
        parameters = case.leaf(batch.w13[experts]), batch.w2[experts]

        def forward(scale=1.0):
            return uniep.moe(scale * batch.x[rows], batch.ids[rows], batch.weights[rows], *parameters, workspace=ws)

        if how == "evaluation":
            return case.named_error(case.forward_only if ws.rank else case.forward_backward, ws, batch)
        if how == "another Workspace":
            return case.named_error(case.forward_only, other if ws.rank else ws, batch)
        outputs = [forward(), forward(2.0)]
        return case.named_error(outputs[ws.rank].sum().backward)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("evaluation", r"call 1 \(rank 0: forward, rank 1: forward without gradients\)"),
        ("another Workspace", r"in a call of another Workspace"),
        ("order of backwards", r"backward of different forwards"),
    ],
)
def test_ranks_out_of_step(pool, how, text):
    cfg = config()
    for error in pool.run(out_of_step, cfg, random_batch(cfg, (5, 5, 5, 5)), how, ranks=2):
        assert error is not None and error[0] == "UniEPError" and re.search(text, error[1]), error


def absent_rank(world, cfg, batch, at):
    """Rank 1 stops making calls before the forward or the backward; (error, seconds, next error) of the others."""
    group = dist.new_group(range(3), timeout=datetime.timedelta(seconds=20))
    if world.rank == 3:
        return None
    cfg = dataclasses.replace(cfg, num_experts=6)
    ws = workspace(world, cfg, 3, group=group, timeout_s=SHORT_S)
    rows, experts = slice(5 * world.rank, 5 * world.rank + 5), slice(2 * world.rank, 2 * world.rank + 2)
    inputs = batch.x[rows], batch.ids[rows] % 6, batch.weights[rows], case.leaf(batch.w13[experts]), batch.w2[experts]
    y = uniep.moe(*inputs, workspace=ws) if at == "backward" else None
    if world.rank == 1:
        time.sleep(2 * SHORT_S)
        return None
    start = time.monotonic()
    error = case.named_error(y.sum().backward if y is not None else lambda: uniep.moe(*inputs, workspace=ws))
    took = time.monotonic() - start
    return error, took, case.named_error(lambda: uniep.moe(*inputs, workspace=ws))


def saved_otherwise(world, backend, lossy):
    """The error of a backward whose saved tensors went through half precision, or to another place and back."""
    cfg = config()
    batch = random_batch(cfg, (5, 3, 0, 4))
    with uniep.Workspace(cfg, world.group(2), device="cpu", backend=backend, timeout_s=case.TIMEOUT_S) as ws:
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: t.half() if lossy and t.is_floating_point() else t.clone(),
            lambda t: t.float() if t.dtype == torch.half else t,
        ):
            rows, mine = batch.rows(ws.rank, 2), batch.experts(ws.rank, 2)
            w13, w2 = case.leaf(batch.w13[mine]), case.leaf(batch.w2[mine])
            y = uniep.moe(batch.x[rows], batch.ids[rows], batch.weights[rows], w13, w2, workspace=ws)
        return case.named_error(y.backward, batch.dy[rows])


@pytest.mark.parametrize("backend", ["cpu", "nccl"])
def test_lossy_hooks_of_saved_tensors(pool, backend):
    """109: refused on every rank; offloading as it is goes through."""
    assert pool.run(saved_otherwise, backend, False, ranks=2) == [None, None]
    for name, text in pool.run(saved_otherwise, backend, True, ranks=2):
        assert name == "UniEPError" and "their inputs changed in between" in text


@pytest.mark.parametrize("at", [pytest.param("forward", marks=pytest.mark.slow), "backward"])
def test_one_rank_does_not_come(pool, at):
    """The others get PeerTimeoutError with call and stage after timeout_s, then ClosedError."""
    cfg = config()
    found = pool.run(absent_rank, cfg, random_batch(cfg, (5, 5, 5, 5)), at)
    for rank in (0, 2):
        (kind, message), took, after = found[rank]
        assert kind == "PeerTimeoutError" and re.search(rf"call \d \({at}\), stage enter", message), message
        assert took < SHORT_S + 10
        assert after is not None and after[0] == "ClosedError" and "PeerTimeoutError" in after[1], after


def test_schedules_that_mean_nothing_here():
    """A field without effect is refused by name."""
    with pytest.raises(uniep.ConfigError, match="overlap is 'fused'"):
        uniep.Workspace(config(), device="cpu", backend="nccl", schedule=uniep.Schedule())
    with pytest.raises(uniep.ConfigError, match="matrix_workers is 2"):
        schedule = dataclasses.replace(SERIAL, matrix_workers=2)
        uniep.Workspace(config(), device="cpu", backend="nccl", schedule=schedule)


@pytest.mark.parametrize("schedule", [SERIAL, AGAIN], ids=["saved", "again"])
def test_life_of_a_workspace(schedule):
    """prepare, check, report, what torch.compile is told about the saved tensors, close."""
    cfg = config(dtype=torch.bfloat16)
    batch = random_batch(cfg, (5, 0, 0, 0))
    ws = uniep.Workspace(cfg, device="cpu", backend="nccl", schedule=schedule)
    ws.prepare()
    ws.check()
    assert uniep.report(ws)["backend"].startswith("nccl: rank 0 of 1")
    w13, w2 = case.leaf(batch.w13), case.leaf(batch.w2)
    arguments = (batch.x, batch.ids, batch.weights, [w13], [w2], [], "stacked", ws.key, True, [], [], False)
    torch.library.opcheck(torch.ops.uniep.moe_fwd.default, arguments, test_utils="test_faketensor")
    ws.close()
    ws.close()
    assert case.named_error(case.forward_backward, ws, batch)[0] == "ClosedError"

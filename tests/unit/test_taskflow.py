"""The taskflow: lowering, its checks, and that its events alone are enough, in any order that they allow."""

import dataclasses
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import uniep
from uniep import reference
from uniep.backends.base import Needs
from uniep.backends.torch_tiles import Backward, Forward, Gather, Rows, Shared
from uniep.config import MoEConfig
from uniep.errors import ConfigError
from uniep.layout import cpu_arrays
from uniep.numerics import fixed_settings
from uniep.routing import build_parts, build_plan, recv_base, return_slots
from uniep.schedule import Schedule, Tile
from uniep.stages import Flags
from uniep.taskflow.check import check
from uniep.taskflow.graph import Block, Event, Relation, Task, from_tasks
from uniep.taskflow.layer import dispatch_operators
from uniep.taskflow.lower import compile_graph, lower_backward, lower_forward, sites
from uniep.way import resolve
from uniep.weights import ExpertWeights

SCHEDULES = {
    "serial": Schedule(overlap="serial", tile_order="natural"),
    "fused": Schedule(),
    "small tiles": Schedule(
        overlap="fused",
        tile_order="natural",
        gate_up=Tile(rows=64, columns=64),
        down=Tile(rows=128, columns=128),
        chunk_tokens=3,
    ),
    "separate": Schedule(
        activation="separate", tile_order="chunk-major", peer_order="rotated", weight_gradient_order="interleaved"
    ),
    "mixed tiles": Schedule(
        overlap="serial", gate_up=Tile(rows=128, columns=128), down=Tile(rows=64, columns=64), chunk_tokens=16
    ),
}


def way_of(schedule, cfg=None, ranks=1):
    """Of any number of tokens."""
    cfg = cfg or MoEConfig(hidden=8, ffn=8, num_experts=2, top_k=1, max_tokens_per_rank=4)
    return resolve(cfg, ranks, 1, schedule, backend="hopper" if schedule.overlap == "mega" else "cpu")


@dataclasses.dataclass
class Problem:
    """One call's routing on all ranks."""

    cfg: MoEConfig
    ids: list[torch.Tensor]

    @property
    def ranks(self):
        return len(self.ids)

    @property
    def tokens(self):
        return [t.shape[0] for t in self.ids]

    def plans(self):
        return [build_plan(self.ids, rank, self.cfg) for rank in range(self.ranks)]

    def parts(self):
        """Of every rank; None without combine groups."""
        if self.cfg.combine_groups is None:
            return None
        return [build_parts(plan, rank, self.cfg) for rank, plan in enumerate(self.plans())]

    def way(self, schedule):
        return way_of(schedule, self.cfg, self.ranks)

    def forward(self, schedule, keep=True):
        return lower_forward(self.plans(), self.tokens, self.cfg, self.way(schedule), keep=keep)

    def backward(self, schedule, **flags):
        return lower_backward(self.plans(), self.tokens, self.cfg, self.way(schedule), Flags(**flags))


def problem(tokens=(40, 17, 0, 64), num_experts=8, top_k=3, hidden=72, ffn=136, seed=0, unused=0.1, idle=(), **fields):
    generator = torch.Generator().manual_seed(seed)
    cfg = MoEConfig(
        hidden=hidden,
        ffn=ffn,
        num_experts=num_experts,
        top_k=top_k,
        max_tokens_per_rank=max(1, *tokens),
        **({"dtype": torch.float32} | fields),
    )
    ids = [torch.randint(0, num_experts, (t, top_k), generator=generator) for t in tokens]
    for i in ids:
        i[torch.rand(i.shape, generator=generator) < unused] = -1
        i[torch.isin(i, torch.tensor(idle))] = -1
    return Problem(cfg, ids)


@st.composite
def problems(draw):
    ranks = draw(st.sampled_from([1, 2, 3, 4]))
    experts = ranks * draw(st.integers(1, 3))
    return problem(
        tokens=[draw(st.integers(0, 150)) for _ in range(ranks)],
        num_experts=experts,
        top_k=draw(st.integers(1, min(experts, 4))),
        seed=draw(st.integers(0, 1000)),
        unused=draw(st.sampled_from([0.0, 0.3, 1.0])),
        combine_groups=draw(st.sampled_from([None, ranks, experts])),
    )


@st.composite
def schedules(draw):
    tile = st.builds(
        Tile,
        rows=st.sampled_from([64, 128]),
        columns=st.sampled_from([64, 128, 256]),
        group_rows=st.sampled_from([1, 8]),
    )
    return draw(
        st.builds(
            Schedule,
            overlap=st.sampled_from(["serial", "fused"]),
            tile_order=st.sampled_from(["natural", "local-first", "chunk-major", "critical-path"]),
            chunk_experts=st.integers(1, 3),
            peer_order=st.sampled_from(["natural", "rotated"]),
            weight_gradient_order=st.sampled_from(["last", "interleaved"]),
            activation=st.sampled_from(["fused", "separate"]),
            gate_up=tile,
            down=tile,
            chunk_tokens=st.integers(1, 200),
        )
    )


# --- lowering ---


@settings(max_examples=60, deadline=None)
@given(problems(), schedules(), st.booleans(), st.tuples(*[st.booleans()] * 4))
def test_every_lowering_passes_the_checks(case, schedule, keep, needs):
    check(case.forward(schedule, keep))
    of_rank = sites(case.plans(), [0] * len(case.plans()), case.cfg, case.way(schedule))
    check(compile_graph(dispatch_operators(), of_rank))
    flags = dict(zip(("x", "weights", "w13", "w2"), needs, strict=True))
    graph = case.backward(schedule, **flags)
    check(graph)
    ops = {t.op for t in graph.tasks}
    for op, needed in {"gate_up_grad": "x", "dweight": "weights", "gate_up_wgrad": "w13", "down_wgrad": "w2"}.items():
        assert flags[needed] or op not in ops, "tasks exist only for gradients that are needed"


@settings(max_examples=20, deadline=None)
@given(problems(), schedules())
def test_what_one_kernel_runs_passes_the_checks(case, schedule):
    """Split as a GPU does; gradients of all experts, of those without rows, too."""
    schedule = dataclasses.replace(schedule, overlap="mega", down=schedule.gate_up)
    check(case.forward(schedule))
    graph = case.backward(schedule)
    check(graph)
    local = case.cfg.num_experts // case.ranks
    for op in ("gate_up_wgrad", "down_wgrad"):
        assert {(t.rank, t.block.group) for t in graph.tasks if t.op == op} == {
            (rank, expert) for rank in range(case.ranks) for expert in range(local)
        }


@settings(max_examples=30, deadline=None)
@given(problems(), schedules())
def test_a_tile_waits_for_the_chunks_of_its_rows(case, schedule):
    """Against a row-by-row search of the send lists; fused waits for no other chunk."""
    plans = case.plans()
    graph = case.forward(dataclasses.replace(schedule, overlap="fused"))
    assert graph.remote.tolist() == [any(e.stage in ("arrived", "returned") for e, _ in t.waits) for t in graph.tasks]
    chunks = -(-case.cfg.max_tokens_per_rank // schedule.chunk_tokens)
    for task in graph.tasks:
        if task.op != "gate_up":
            continue
        expected = set()
        for row in range(task.block.row0, task.block.row1):
            back = int(plans[task.rank].row_return_N[row])
            source, slot = divmod(back, case.cfg.max_tokens_per_rank * case.cfg.top_k)
            if back < 0 or source == task.rank:
                continue
            sent = plans[source].send_token_RT[task.rank].tolist()
            position = sent.index(slot // case.cfg.top_k)
            expected.add(Event(task.rank, "arrived", source * chunks + position // schedule.chunk_tokens))
        assert {event for event, _ in task.waits} == expected


@settings(max_examples=25, deadline=None)
@given(problems(), schedules())
def test_a_tile_waits_for_all_that_it_contracts_or_sums(case, schedule):
    """Against loops over rows and slots, for every reader of local rows and of returns; and no signal is in vain."""
    schedule = dataclasses.replace(schedule, overlap="fused")
    plans, step = case.plans(), schedule.gate_up.rows
    separate = schedule.activation == "separate"
    made = {"down": "activation" if separate else "gate_up"}
    made |= dict.fromkeys(
        ("gate_up_grad", "dweight", "gate_up_wgrad", "down_wgrad"), "activation_gradient" if separate else "down_grad"
    )
    tokens_of = [torch.nonzero((ids >= 0).any(1)).flatten().tolist() for ids in case.ids]
    for graph in (case.forward(schedule), case.backward(schedule)):
        waited = {event for t in graph.tasks for event, _ in t.waits}
        assert waited == {event for t in graph.tasks for event in t.signals}
        for task in graph.tasks:
            rank, b = task.rank, task.block
            if task.op in made:
                start = plans[rank].expert_start_e1.tolist()
                rows = range(b.row0, b.row1) if "wgrad" not in task.op else range(start[b.group], start[b.group + 1])
                expected = {Event(rank, made[task.op], row // step) for row in rows}
                tiles = -(-case.cfg.ffn // schedule.gate_up.columns)
                assert {event for event, _ in task.waits} == expected and all(n == tiles for _, n in task.waits)
            elif task.op in ("combine", "collect"):
                stage = "returned" if task.op == "combine" else "weights returned"
                used = any(b.row0 <= t < b.row1 for t in tokens_of[rank])
                number = b.row0 // schedule.chunk_tokens
                assert [event for event, _ in task.waits] == [Event(rank, stage, number)] * used


def test_two_ranks_by_hand():
    """The plan module's example: rank 1 sends tokens 0 and 1 to rank 0, each once."""
    cfg = MoEConfig(hidden=64, ffn=64, num_experts=2, top_k=2, max_tokens_per_rank=2, dtype=torch.float32)
    case = Problem(cfg, [torch.tensor([[0, 1], [1, -1]]), torch.tensor([[1, 0], [0, 0]])])
    graph = case.forward(Schedule(chunk_tokens=1), keep=False)
    arrived, returned = (lambda rank, i: Event(rank, "arrived", i)), (lambda rank, i: Event(rank, "returned", i))
    tile = Block(0, 0, 128, 0, 64)
    pushes = [t for t in graph.tasks if t.op == "push"]
    assert [(t.rank, t.block, t.signals) for t in pushes] == [
        (0, Block(1, 0, 1, 0, 64), (arrived(1, 0),)),
        (0, Block(1, 1, 2, 0, 64), (arrived(1, 1),)),
        (1, Block(0, 0, 1, 0, 64), (arrived(0, 2),)),
        (1, Block(0, 1, 2, 0, 64), (arrived(0, 3),)),
    ]
    assert list(graph.queue(0, "matrix")) == [
        Task("gate_up", "matrix", 0, tile, ((arrived(0, 2), 1), (arrived(0, 3), 1)), (Event(0, "gate_up", 0),)),
        Task(
            "down", "matrix", 0, tile, ((Event(0, "gate_up", 0), 1),), (returned(0, 0), returned(1, 0), returned(1, 1))
        ),
    ]
    combines = {(t.rank, t.block.row0): t.waits for t in graph.tasks if t.op == "combine"}
    assert combines == {
        (0, 0): ((returned(0, 0), 2),),
        (0, 1): ((returned(0, 1), 1),),
        (1, 0): ((returned(1, 0), 2),),
        (1, 1): ((returned(1, 1), 1),),
    }


@pytest.mark.parametrize("overlap", ["fused", "mega"])
def test_on_one_rank_local_first_is_the_natural_order(overlap):
    case = problem(tokens=(400,))
    for lower in (case.forward, case.backward):
        one, other = (lower(Schedule(overlap=overlap, tile_order=order)) for order in ("local-first", "natural"))
        assert one.queue(0, "matrix") == other.queue(0, "matrix") and one.queue(0, "vector") == other.queue(0, "vector")


def test_local_first_keeps_expert_order_in_each_class():
    case = problem(tokens=(200, 10), num_experts=4, top_k=1)
    order = [t for t in case.forward(Schedule(gate_up=Tile(rows=64))).queue(0, "matrix") if t.op == "gate_up"]
    local = [not t.waits for t in order]
    assert local == sorted(local, reverse=True) and any(local) and not all(local)
    for group in (True, False):
        starts = [t.block.row0 for t, is_local in zip(order, local, strict=True) if is_local == group]
        assert starts == sorted(starts)


def test_pad_rows_are_in_the_wave_of_the_last_source_before_them():
    """As kernels do it: of rank 0 behind rows of rank 1, whose copies come last, in the last wave; behind own rows in
    the first."""
    cfg = MoEConfig(hidden=64, ffn=64, num_experts=12, top_k=1, max_tokens_per_rank=10, dtype=torch.float32)
    ids = [torch.full((10, 1), expert) for expert in (1, 0, 5, 2)]  # rank 0 has experts 0 to 2
    schedule = Schedule(overlap="fused", transfer="copy", arrival_waves=4, gate_up=Tile(rows=64))
    way = resolve(cfg, 4, 10, schedule)
    assert way.waves == 4
    graph = lower_forward([build_plan(ids, rank, cfg) for rank in range(4)], [10] * 4, cfg, way, keep=False)
    order = [task.block.row0 for task in graph.queue(0, "matrix") if task.op == "gate_up"]
    assert order == [128, 192, 256, 320, 0, 64], "own; rank 3's, which come first; rank 1's; each with its pad rows"


def test_serial_has_no_overlap():
    """No task of a stage can start before the last task of the stage before it, on its own rank."""
    graph = problem().backward(SCHEDULES["serial"])
    assert {e for t in graph.tasks for e, _ in t.waits} == {e for t in graph.tasks for e in t.signals}
    stage_of = {}
    for seed in range(5):
        for task in run_anyhow(graph, random.Random(seed), lambda task: None):
            if task.op != "gate":
                seen = stage_of.setdefault((seed, task.rank), [])
                if not seen or seen[-1] != task.op:
                    assert task.op not in seen, f"{task.op} started, stopped and started again"
                    seen.append(task.op)


# --- checks ---


def edited(graph, tasks):
    """The graph of other tasks, with the outputs of `graph`."""
    return from_tasks(graph.ep_size, tasks, graph.outputs)


def without(graph, index):
    return edited(graph, graph.tasks[:index] + graph.tasks[index + 1 :])


def first(graph, op, rank=0):
    return next(i for i, t in enumerate(graph.tasks) if t.op == op and t.rank == rank)


@pytest.mark.parametrize("op", ["push", "keep", "gate_up", "down", "combine"])
def test_a_missing_or_repeated_tile_is_found(op):
    graph = problem().forward(SCHEDULES["small tiles"])
    index = first(graph, op)
    with pytest.raises(ConfigError, match=rf"{op} on rank 0"):
        check(without(graph, index))
    with pytest.raises(ConfigError, match=rf"{op} on rank 0.*more than once"):
        check(edited(graph, (*graph.tasks, graph.tasks[index])))


def test_overlapping_tiles_are_found():
    graph = problem().forward(SCHEDULES["small tiles"])
    index = first(graph, "gate_up")
    task = graph.tasks[index]
    wider = dataclasses.replace(task, block=task.block._replace(column1=task.block.column1 + 64))
    with pytest.raises(ConfigError, match="gap or overlap"):
        check(edited(graph, (wider, *without(graph, index).tasks)))


def test_a_wait_without_enough_producers_is_found():
    graph = problem().forward(SCHEDULES["fused"])
    index = first(graph, "combine")
    task = graph.tasks[index]
    event, count = task.waits[0]
    more = dataclasses.replace(task, waits=((event, count + 1),))
    tasks = (*graph.tasks[:index], more, *graph.tasks[index + 1 :])
    with pytest.raises(ConfigError, match=rf"combine.*waits for {count + 1} of returned.*signalled {count} times"):
        check(edited(graph, tasks))


QUARTERS = [(0, 2, 0, 2), (0, 2, 2, 4), (2, 4, 0, 2), (2, 4, 2, 4)]


@pytest.mark.parametrize(
    ("tiles", "words"),
    [
        (QUARTERS, None),
        ([(0, 1, 0, 4), (1, 4, 0, 3), (1, 4, 3, 4)], None),
        (QUARTERS[1:], "gap or overlap"),
        (QUARTERS[:3], "gap or overlap"),
        (QUARTERS[2:], "gap or overlap"),
        (QUARTERS[:2], "gap or overlap"),
        ([(0, 1, 0, 4), (2, 4, 0, 4)], "gap or overlap"),
        ([(0, 3, 0, 4), (2, 4, 0, 4)], "gap or overlap"),
        ([(0, 4, 0, 2), (0, 4, 1, 4)], "gap or overlap"),
        ([(0, 4, 0, 4), (4, 4, 0, 4)], "gap or overlap"),
        ([(0, 5, 0, 4)], "gap or overlap"),
        ([*QUARTERS, QUARTERS[3]], "more than once"),
        ([], "no tile covers"),
    ],
)
def test_coverage_by_hand(tiles, words):
    """A 4 x 4 output of group 1 between two whole ones, so that neither its first nor its last tile is the list's."""
    whole = {group: Block(group, 0, 4, 0, 4) for group in range(3)}
    blocks = [whole[0], *(Block(1, *t) for t in tiles), whole[2]]
    for groups in ((0, 1, 2), (1,), (0, 1), (1, 2)):
        tasks = [Task("t", "matrix", 0, b) for b in blocks if b.group in groups]
        graph = from_tasks(1, tasks, {("t", 0): tuple(whole[g] for g in groups)})
        if words is None:
            check(graph)
        elif tasks or words == "no tile covers":
            with pytest.raises(ConfigError, match=words if tasks else "an operator without tasks on rank 0: no tile"):
                check(graph)


def fewer(relation, graph, wanted):
    """The relation without the pairs of which `wanted(task, event)` is False."""
    pairs = [
        (i, v) for i, of in enumerate(relation.of_tasks(torch.arange(graph.num_tasks)).lists()) for v in of
        if wanted(i, v)
    ]  # fmt: skip
    table = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    return Relation.of(table[:, 0], table[:, 1], graph.num_tasks, graph.num_events)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("op", ["gate_up", "down", "keep", "combine"])
def test_a_read_that_nothing_orders_is_found(op, name):
    """One wait less; under serial schedules it is the gate's, of the stage before it or of peers."""
    graph = problem().forward(SCHEDULES[name])
    index = first(graph, op)
    serial = SCHEDULES[name].overlap == "serial"
    if serial:
        index = next(i for i in range(index, -1, -1) if graph.tasks[i].op == "gate" and graph.tasks[i].rank == 0)
    assert graph.tasks[index].waits
    broken = dataclasses.replace(graph, waits=fewer(graph.waits, graph, lambda i, v: i != index))
    with pytest.raises(ConfigError, match=r"a read that nothing orders: .* reads .*, but does not wait for \w+\("):
        check(broken)
    check(dataclasses.replace(graph, waits=fewer(graph.waits, graph, lambda i, v: True)))


def test_a_write_without_its_signal_is_found():
    graph = problem().forward(SCHEDULES["small tiles"])
    index = first(graph, "down")
    silent = fewer(graph.signals, graph, lambda i, v: i != index)
    count_V = silent.count(graph.num_events)
    with pytest.raises(ConfigError, match=r"waits for \d+ of returned.*which is signalled \d+ times"):
        check(dataclasses.replace(graph, signals=silent))
    with pytest.raises(ConfigError, match=r"a write without its signal: down\(.* does not signal returned"):
        check(dataclasses.replace(graph, signals=silent, count_V=count_V))


@settings(max_examples=10, deadline=None)
@given(problems(), schedules(), st.data())
def test_each_wait_of_a_compiled_graph_carries_a_read(case, schedule, data):
    """No wait can go, and none is there without need: the proof fails without any one of them (fused)."""
    graph = case.backward(dataclasses.replace(schedule, overlap="fused"))
    pairs = [(i, v) for i, of in enumerate(graph.waits.of_tasks(torch.arange(graph.num_tasks)).lists()) for v in of]
    if pairs:
        gone = data.draw(st.sampled_from(pairs))
        with pytest.raises(ConfigError, match="a read that nothing orders"):
            check(dataclasses.replace(graph, waits=fewer(graph.waits, graph, lambda i, v: (i, v) != gone)))


def test_queues_must_hold_every_task_once():
    graph = problem().forward(SCHEDULES["fused"])
    queues = [graph.indices(rank, worker).tolist() for rank in range(4) for worker in ("matrix", "vector")]
    check(graph, queues)
    queues[0], queues[1] = queues[0][1:], [*queues[1], queues[1][0]]
    with pytest.raises(ConfigError, match=r"is in the workers' queues [02] times"):
        check(graph, queues)


def test_returns_to_each_slot_once_or_not_at_all():
    case = problem()
    plans = case.plans()
    used = torch.nonzero(plans[1].row_return_N >= 0).flatten()
    plans[1].row_return_N[used[0]] = plans[1].row_return_N[used[1]]
    with pytest.raises(ConfigError, match=r"the plans return \d+ rows to \d+ slots of \d+ routed ones"):
        lower_forward(plans, case.tokens, case.cfg, case.way(Schedule()), keep=False)


def tiny(*tasks):
    return from_tasks(2, tasks)


def task(name, rank, waits=(), signals=(), worker="vector"):
    return Task(name, worker, rank, Block(0, 0, 1, 0, 1), tuple((Event(rank, w, 0), 1) for w in waits), tuple(signals))


@pytest.mark.parametrize("count", [0, 1])
def test_an_event_that_nothing_signals_is_found(count):
    with pytest.raises(ConfigError, match=rf"waits for {count} of never\[0\] on rank 0, which is signalled 0 times"):
        check(tiny(Task("sum", "vector", 0, Block(0, 0, 1, 0, 1), ((Event(0, "never", 0), count),))))


def test_a_cycle_is_found_and_listed():
    a = task("a", 0, waits=["x"], signals=[Event(1, "y", 0)])
    b = task("b", 1, waits=["y"], signals=[Event(0, "x", 0)])
    with pytest.raises(ConfigError, match=r"cycle; blocked: a\(.*rank 0; b\(.*rank 1"):
        check(tiny(a, b))


def test_an_order_that_blocks_is_found_and_listed():
    """Each rank's worker first waits for what the other's will send second."""
    a = [task("wait", 0, waits=["x"]), task("send", 0, signals=[Event(1, "x", 0)])]
    b = [task("wait", 1, waits=["x"]), task("send", 1, signals=[Event(0, "x", 0)])]
    with pytest.raises(ConfigError, match=r"order of tasks that blocks; blocked: wait\(.*rank 0; wait\(.*rank 1"):
        check(tiny(*a, *b))
    check(tiny(*a, *reversed(b)))


def test_a_blocking_order_of_the_layer_is_found():
    """Combine before push: with one vector worker per rank nobody ever sends."""
    graph = problem().forward(SCHEDULES["fused"], keep=False)
    tasks = sorted(graph.tasks, key=lambda t: t.op != "combine")
    with pytest.raises(ConfigError, match="order of tasks that blocks; blocked: combine"):
        check(edited(graph, tasks))


# --- events are enough: all ranks in one process, tasks in any order that waits allow ---


def run_anyhow(graph, rng, execute):
    """Run tasks in a random order among those whose waits are met; returns that order."""
    seen, left, order = Counter(), list(graph.tasks), []
    while left:
        ready = [t for t in left if all(seen[e] >= n for e, n in t.waits)]
        chosen = rng.choice(ready)
        execute(chosen)
        left.remove(chosen)
        order.append(chosen)
        seen.update(chosen.signals)
    return order


def poisoned(shape, dtype):
    return torch.full(shape, float("nan"), dtype=dtype)


class Model:
    """A problem with data, run without processes."""

    def __init__(self, case, seed=1):
        self.case, cfg = case, case.cfg
        generator = torch.Generator().manual_seed(seed)

        def make(*shape):
            return torch.randn(shape, generator=generator)

        self.x = [make(t, cfg.hidden).to(cfg.dtype) for t in case.tokens]
        self.dy = [make(t, cfg.hidden).to(cfg.dtype) for t in case.tokens]
        self.weights = [make(t, cfg.top_k) for t in case.tokens]
        self.w13 = make(cfg.num_experts, 2 * cfg.ffn, cfg.hidden).to(cfg.dtype) * cfg.hidden**-0.5
        self.w2 = make(cfg.num_experts, cfg.hidden, cfg.ffn).to(cfg.dtype) * cfg.ffn**-0.5

    def reference(self):
        inputs = [torch.cat(t) for t in (self.x, self.case.ids, self.weights)]
        y = reference.forward(*inputs, self.w13, self.w2, self.case.cfg)
        grads = reference.backward(torch.cat(self.dy), *inputs, self.w13, self.w2, self.case.cfg)
        return [y, grads.x, grads.weights, grads.w13, grads.w2]

    def shared(self):
        arrays = cpu_arrays(self.case.cfg, self.case.ranks, way_of(Schedule()))
        made = [Shared(*(poisoned(*arrays[n]) for n in ("receive", "returns", "dweights"))) for _ in self.case.ids]
        for s in made:
            s.receive[-1] = 0
        return made

    @fixed_settings()
    def run(self, forward, backward, seed):
        """y, dx, dweights, dw13, dw2 of all ranks, every buffer NaN before it is written."""
        case, rng, size = self.case, random.Random(seed), self.case.cfg.num_experts // self.case.ranks
        parts = case.parts()
        groups = [(p, return_slots(p, case.ids, case.cfg)) for p in parts] if parts else [()] * case.ranks
        rows = [Rows.make(r, case.cfg, plan, self.weights, *groups[r]) for r, plan in enumerate(case.plans())]
        experts = [
            ExpertWeights((a,), (b,), "stacked") for a, b in zip(self.w13.split(size), self.w2.split(size), strict=True)
        ]
        shared, ranks = self.shared(), range(case.ranks)
        separate = any(op.startswith("activation") for op in forward.ops)
        fwd = [
            Forward(rows[r], shared, self.x[r], case.ids[r], self.weights[r], experts[r], True, separate) for r in ranks
        ]
        for bodies in fwd:
            poison(bodies, "y_TD", "h_NF", "act_NF", "received_MD", *(["results_ND"] if parts else []))
        run_anyhow(forward, rng, lambda t: t.op == "gate" or getattr(fwd[t.rank], t.op)(t.block))
        shared = self.shared()
        bwd = [
            Backward(
                rows[r],
                shared,
                self.dy[r],
                case.ids[r],
                experts[r],
                fwd[r].h_NF,
                Gather(self.x[r], fwd[r].received_MD, rows[r], compact=True),
                Needs(),
                separate=separate,
            )
            for r in ranks
        ]
        for bodies in bwd:
            names = ("group_sums_NG", "weighted_NF", "dh_NF", "dx_TD", "dweights_TK")
            poison(bodies, *names, *["raw_NF"] * separate, *(["results_ND"] if parts else []))
        run_anyhow(backward, rng, lambda t: t.op == "gate" or getattr(bwd[t.rank], t.op)(t.block))
        parts = [[f.y_TD for f in fwd], [b.dx_TD for b in bwd], [b.dweights_TK for b in bwd]]
        parts += [[b.gradients.w13[0] for b in bwd], [b.gradients.w2[0] for b in bwd]]
        return [torch.cat(p) for p in parts]


def poison(bodies, *names):
    for name in names:
        getattr(bodies, name).fill_(float("nan"))


@pytest.mark.parametrize("compact", [False, True])
def test_gathered_rows(compact):
    """Each row is its token, from the receive buffer or its compact copy; pad rows are exact zeros."""
    model = Model(problem())
    case, rank = model.case, 1
    plan = case.plans()[rank]
    rows = Rows.make(rank, case.cfg, plan, model.weights)
    remote = poisoned((case.cfg.receive_slots(case.ranks), case.cfg.hidden), case.cfg.dtype)
    kept = []
    for peer, other in enumerate(case.plans()):
        if peer != rank:
            tokens = model.x[peer][other.send_token_RT[rank][: other.send_count_R[rank]]]
            start = recv_base(case.cfg, peer, rank)
            remote[start : start + len(tokens)] = tokens
            kept.append(tokens)
    got = Gather(model.x[rank], torch.cat(kept) if compact else remote, rows, compact)(slice(0, plan.num_rows))
    for row, back in zip(got, plan.row_return_N.tolist(), strict=True):
        source, slot = divmod(back, case.cfg.max_tokens_per_rank * case.cfg.top_k)
        expected = model.x[source][slot // case.cfg.top_k] if back >= 0 else torch.zeros(case.cfg.hidden)
        assert torch.equal(row, expected)


@pytest.mark.parametrize("weight_at", ["output", "activation"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_any_order_that_events_allow_gives_the_bits_of_the_reference(schedule, dtype, weight_at):
    model = Model(problem(dtype=dtype, weight_at=weight_at, idle=(2, 6, 7)))
    expected = model.reference()
    forward, backward = model.case.forward(schedule), model.case.backward(schedule)
    for seed in range(2):
        for name, got, want in zip(
            ("y", "dx", "dweights", "dw13", "dw2"), model.run(forward, backward, seed), expected, strict=True
        ):
            assert torch.equal(got, want), f"{name}, order {seed}"


@pytest.mark.parametrize("weight_at", ["output", "activation"])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_with_groups_too(schedule, weight_at):
    model = Model(problem(dtype=torch.bfloat16, weight_at=weight_at, combine_groups=4, idle=(6, 7)))
    expected = model.reference()
    got = model.run(model.case.forward(schedule), model.case.backward(schedule), 0)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("op", "result", "groups"),
    [
        ("gate_up", 0, None), ("activation", 0, None), ("down", 0, None), ("combine", 0, None), ("down_grad", 1, None),
        ("activation_gradient", 1, None), ("gate_up_grad", 1, None), ("collect", 2, None), ("gate_up_wgrad", 3, None),
        ("down_wgrad", 4, None), ("group_sum", 0, 4), ("group_sum", 1, 4), ("combine", 1, 4),
    ],
)  # fmt: skip
def test_every_wait_is_needed(op, result, groups):
    """Without its waits, an op reads what is not there yet in some order: the test above would see it."""
    model = Model(problem(num_experts=4, combine_groups=groups))
    expected = model.reference()[result]

    def careless(graph):
        return edited(graph, [dataclasses.replace(t, waits=()) if t.op == op else t for t in graph.tasks])

    schedule = Schedule(activation="separate" if op.startswith("activation") else "fused")
    forward, backward = (careless(g) for g in (model.case.forward(schedule), model.case.backward(schedule)))
    assert any(not torch.equal(model.run(forward, backward, seed)[result], expected) for seed in range(10))


# --- the executor in one process ---


def test_the_trace_has_every_task_once():
    case = problem(tokens=(100,))
    with uniep.Workspace(case.cfg, device="cpu", schedule=SCHEDULES["serial"]) as ws:
        x, model = Model(case).x[0], Model(case)
        assert ws.backend.trace is None
        ws.backend.trace = []
        uniep.moe(x, case.ids[0], model.weights[0], model.w13, model.w2, workspace=ws)
        entries = ws.backend.trace
    expected = case.forward(SCHEDULES["serial"], keep=False).tasks
    assert Counter((e.op, e.block) for e in entries) == Counter((t.op, t.block) for t in expected)
    assert all(e.claimed_ns <= e.start_ns <= e.end_ns for e in entries)


def test_an_exception_in_a_tile_ends_the_call_and_the_workspace(monkeypatch):
    case = problem(tokens=(100,))
    model = Model(case)

    def broken(self, block):
        raise ZeroDivisionError("in a tile")

    monkeypatch.setattr(Forward, "down", broken)
    with uniep.Workspace(case.cfg, device="cpu") as ws:
        arguments = (model.x[0], case.ids[0], model.weights[0], model.w13, model.w2)
        threads = torch.get_num_threads()
        with pytest.raises(ZeroDivisionError, match="in a tile"):
            uniep.moe(*arguments, workspace=ws)
        assert torch.get_num_threads() == threads
        with pytest.raises(uniep.ClosedError, match="ZeroDivisionError: in a tile"):
            uniep.moe(*arguments, workspace=ws)

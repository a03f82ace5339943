"""The static scheduler: queues that finish, cost what they must and are the same every time; and orders of tiles."""

import dataclasses
import os
import random
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_taskflow import Problem, problem, problems, run_anyhow, schedules, way_of

from uniep.config import MoEConfig
from uniep.errors import ConfigError
from uniep.schedule import Schedule, Tile
from uniep.sim import load_machine
from uniep.taskflow.check import check
from uniep.taskflow.graph import WORKERS, Block, Event, Task, from_tasks
from uniep.taskflow.scheduler import CPU_CORE, Speeds, assign, longest_paths, priorities

UNIT = Speeds(flops=1, memory=1, peer=1, task_ns=0)
H200 = load_machine("h200-node", {"worker_link_gbps": 22.0}).speeds  # 16 workers fill a link


@st.composite
def graphs(draw):
    """Any acyclic graph of up to 40 tasks of up to 3 ranks, in an order that one worker per class can run."""
    rng = random.Random(draw(st.integers(0, 10**6)))
    ranks, tasks, signalled, waited = rng.randint(1, 3), [], {}, set()
    for i in range(rng.randint(1, 40)):
        rank = rng.randrange(ranks)
        known = [e for e in signalled if e.rank == rank and rng.random() < 0.3]
        waited.update(known)
        waits = tuple((e, signalled[e]) for e in known)
        fresh = [e for e in signalled if e not in waited]  # may still get one more producer
        event = rng.choice(fresh) if fresh and rng.random() < 0.4 else Event(rng.randrange(ranks), "s", i)
        signals = (event,) if rng.random() < 0.8 else ()
        tasks.append(Task("t", rng.choice(WORKERS), rank, Block(0, i, i + 1, 0, 1), waits, signals))
        for e in signals:
            signalled[e] = signalled.get(e, 0) + 1
    graph = from_tasks(ranks, tasks)
    work = torch.tensor([[rng.randint(0, 50), rng.randint(0, 9), 0] for _ in tasks])
    return dataclasses.replace(graph, work_N3=work)


def workers(matrix, vector, **fields):
    return way_of(Schedule(matrix_workers=matrix, vector_workers=vector, **fields))


def valid(graph, made, cost_N):
    """Every task once, one at a time per worker, of its class and rank, never before what it waits for."""
    assert sorted(i for queue in made.queues.values() for i in queue) == list(range(graph.num_tasks))
    assert torch.equal(made.finish_N - made.start_N, cost_N)
    done = {}
    for i, task in enumerate(graph.tasks):
        for event in task.signals:
            done[event] = max(done.get(event, 0), int(made.finish_N[i]))
    for name, queue in made.queues.items():
        free = 0
        for i in queue:
            task = graph.tasks[i]
            assert (task.rank, task.worker) == (name.rank, name.worker)
            earliest = max([free, *(done[event] for event, _ in task.waits)])
            assert made.start_N[i] >= earliest
            free = int(made.finish_N[i])
    check(graph, list(made.queues.values()))


@settings(max_examples=80, deadline=None)
@given(graphs(), st.integers(1, 3), st.integers(1, 3), st.sampled_from(["natural", "critical-path"]))
def test_any_graph(graph, matrix, vector, order):
    """Valid, no faster than the longest path and the work allow, no slower than one task after the other."""
    cost_N = UNIT.cost(graph)
    made = assign(graph, workers(matrix, vector, tile_order=order), cost_N)
    valid(graph, made, cost_N)
    assert made.makespan_ns >= int(longest_paths(graph, cost_N).max())
    assert made.makespan_ns <= int(cost_N.sum())
    for rank in range(graph.ep_size):
        for worker, count in (("matrix", matrix), ("vector", vector)):
            of_class = graph.indices(rank, worker)
            assert made.makespan_ns * count >= int(cost_N[of_class].sum())
            order_n = made.order(rank, worker)
            assert sorted(order_n.tolist()) == of_class.tolist()
            assert bool((made.start_N[order_n].diff() >= 0).all())
    # The order of each class alone, which a device's programs claim from, does not block either.
    check(graph, [made.order(r, w).tolist() for r in range(graph.ep_size) for w in WORKERS])


@settings(max_examples=40, deadline=None)
@given(graphs(), st.integers(1, 3), st.integers(1, 3))
def test_no_worker_rests_while_a_task_of_its_class_could_run(graph, matrix, vector):
    made = assign(graph, workers(matrix, vector, tile_order="critical-path"), UNIT.cost(graph))
    done = {}
    for i, task in enumerate(graph.tasks):
        for event in task.signals:
            done[event] = max(done.get(event, 0), int(made.finish_N[i]))
    for i, task in enumerate(graph.tasks):
        ready = max([0, *(done[event] for event, _ in task.waits)])
        for at in range(ready, int(made.start_N[i])):
            peers = graph.indices(task.rank, task.worker)
            running = ((made.start_N[peers] <= at) & (at < made.finish_N[peers])).sum()
            assert running == (matrix if task.worker == "matrix" else vector)


@settings(max_examples=40, deadline=None)
@given(graphs())
def test_longest_paths(graph):
    """Against a walk over tasks in an order that waits allow, backwards."""
    cost = UNIT.cost(graph).tolist()
    place = {task: i for i, task in enumerate(graph.tasks)}
    after, longest = {}, [0] * graph.num_tasks
    for task in reversed(run_anyhow(graph, random.Random(0), lambda task: None)):
        i = place[task]
        longest[i] = cost[i] + max([0, *(after.get(event, 0) for event in task.signals)])
        for event, _ in task.waits:
            after[event] = max(after.get(event, 0), longest[i])
    assert longest_paths(graph, torch.tensor(cost)).tolist() == longest


def test_the_longest_path_goes_first():
    """Two workers; in order, the long chain starts last: 3 + 9 + 1; by priority it starts first: 9 + 1."""
    chain = Event(0, "chain", 0)
    tasks = [Task("short", "matrix", 0, Block(0, i, i + 1, 0, 1)) for i in range(4)]
    tasks += [
        Task("long", "matrix", 0, Block(0, 4, 5, 0, 1), (), (chain,)),
        Task("end", "matrix", 0, Block(0, 5, 6, 0, 1), ((chain, 1),)),
    ]
    graph = dataclasses.replace(from_tasks(1, tasks), work_N3=torch.tensor([[3, 0, 0]] * 4 + [[9, 0, 0], [1, 0, 0]]))
    in_order, by_priority = (
        assign(graph, workers(2, 1, tile_order=o), UNIT.cost(graph)) for o in ("natural", "critical-path")
    )
    assert in_order.makespan_ns == 16 and by_priority.makespan_ns == 12
    assert priorities(graph, UNIT.cost(graph)).tolist() == [1, 2, 3, 4, 0, 5]


def test_paths_that_differ_by_less_than_a_task_keep_the_order():
    """Among equals the order of the graph, in which experts keep their weights in cache."""
    graph = problem(tokens=(200, 130)).forward(Schedule(tile_order="critical-path", chunk_tokens=7))
    place = priorities(graph, CPU_CORE.cost(graph))
    for rank in range(2):
        tiles = torch.tensor([i for i in graph.indices(rank, "matrix").tolist() if graph.tasks[i].op == "gate_up"])
        assert bool((place[tiles].diff() > 0).all())


# --- of the layer ---


@settings(max_examples=25, deadline=None)
@given(problems(), schedules(), st.integers(1, 3), st.integers(1, 3))
def test_queues_of_the_layer(case, schedule, matrix, vector):
    schedule = dataclasses.replace(schedule, matrix_workers=matrix, vector_workers=vector)
    for graph in (case.forward(schedule), case.backward(schedule)):
        made = assign(graph, way_of(schedule))
        valid(graph, made, CPU_CORE.cost(graph))


def digests():
    found = []
    for order in ("local-first", "chunk-major", "critical-path"):
        schedule = Schedule(tile_order=order, peer_order="rotated", matrix_workers=2, activation="separate")
        case = problem(tokens=(200, 33, 0, 170), seed=3)
        both = case.forward(schedule), case.backward(schedule)
        found += [assign(graph, way_of(schedule)).digest() for graph in both]
    return found


def test_the_same_bytes_in_every_process():
    """Here, and in a process whose hashes of text are others."""
    seed = "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0"
    script = "import sys; sys.path.insert(0, sys.argv[1]); import test_scheduler; print(*test_scheduler.digests())"
    command = [sys.executable, "-c", script, os.path.dirname(__file__)]
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    other = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    here = digests()
    assert other.stdout.split() == here and len(set(here)) == 6


def test_a_stuck_graph_is_an_error_not_a_schedule():
    x, y = Event(0, "x", 0), Event(0, "y", 0)
    a = Task("a", "vector", 0, Block(0, 0, 1, 0, 1), ((y, 1),), (x,))
    b = Task("b", "matrix", 0, Block(0, 0, 1, 0, 1), ((x, 1),), (y,))
    for order in ("natural", "critical-path"):
        with pytest.raises(ConfigError, match=r"cycle; blocked: a.*b"):
            assign(from_tasks(1, [a, b]), workers(1, 1, tile_order=order))
    second = Task("b", "vector", 0, Block(0, 0, 1, 0, 1), (), (y,))
    blocking = from_tasks(1, [dataclasses.replace(a, signals=()), second])
    with pytest.raises(ConfigError, match="order of tasks that blocks; blocked: a"):
        assign(blocking, workers(1, 1, tile_order="natural"))
    assign(blocking, workers(1, 1, tile_order="critical-path"))


def test_no_tiles_for_idle_experts():
    """88: experts 2, 6 and 7 of 8 on 4 ranks have no rows."""
    case, products = problem(idle=(2, 6, 7)), ("gate_up", "down")
    for graph in (case.forward(Schedule()), case.backward(Schedule())):
        busy = {2 * t.rank + t.block.group for t in graph.tasks if t.op in products or "grad" in t.op}
        assert busy == {0, 1, 3, 4, 5}


def test_no_tasks_at_all():
    graph = problem(tokens=(0, 0)).forward(Schedule())
    assert graph.num_tasks == 0
    for order in ("natural", "critical-path"):
        assert assign(graph, workers(1, 1, tile_order=order)).makespan_ns == 0


def test_a_hundred_thousand_tasks_in_a_second_or_two():
    """The log has a million; this is what CI can afford."""
    cfg = MoEConfig(hidden=2048, ffn=1024, num_experts=64, top_k=8, max_tokens_per_rank=4096)
    generator = torch.Generator().manual_seed(0)
    ids = [torch.rand(4096, 64, generator=generator).topk(8)[1] for _ in range(8)]
    schedule = Schedule(
        tile_order="critical-path", gate_up=Tile(columns=64), down=Tile(columns=64), matrix_workers=116,
        vector_workers=16,
    )  # fmt: skip
    case = Problem(cfg, ids)
    plans = case.plans()
    case.plans = lambda: plans
    start = time.process_time()
    graph = case.forward(schedule)
    made = assign(graph, way_of(schedule), H200.cost(graph))
    check(graph, list(made.queues.values()))
    assert graph.num_tasks > 100_000
    assert time.process_time() - start < 10, "0.5 s where nothing else runs"


def test_more_overlap_is_not_slower_in_the_model():
    """serial >= fused >= list scheduling, and no schedule under the longest path."""
    case = problem(tokens=(300, 300, 300, 300), num_experts=16, top_k=4, hidden=512, ffn=512, unused=0)
    spans = {}
    for name, schedule in {
        "serial": Schedule(overlap="serial", tile_order="natural"),
        "fused": Schedule(),
        "list": Schedule(tile_order="critical-path"),
    }.items():
        graph = case.backward(schedule)
        spans[name] = assign(graph, way_of(schedule), H200.cost(graph)).makespan_ns
        assert spans[name] >= int(longest_paths(graph, H200.cost(graph)).max())
    assert spans["serial"] >= spans["fused"] >= spans["list"]


# --- orders of tiles ---


def matrix_tasks(graph, rank=0):
    return graph.queue(rank, "matrix")


def test_rotated_peers_are_never_everybodys_first():
    """Balanced routing: the first tile of any expert that returns rows writes to another peer on every rank."""
    cfg = MoEConfig(hidden=64, ffn=64, num_experts=8, top_k=1, max_tokens_per_rank=1024, dtype=torch.float32)
    case = Problem(cfg, [(torch.arange(1024) % 8)[:, None] for _ in range(4)])
    for op, graph in (("down", case.forward), ("gate_up_grad", case.backward)):
        for peer_order, spread in (("natural", 1), ("rotated", 4)):
            targets = []
            for rank in range(4):
                tiles = [t for t in matrix_tasks(graph(Schedule(peer_order=peer_order)), rank) if t.op == op]
                assert [t.block.group for t in tiles] == [0, 0, 0, 0, 1, 1, 1, 1], "experts stay together"
                targets.append([{e.rank for e in t.signals} for t in tiles])
            for step in range(8):
                assert len(set.union(*(of_rank[step] for of_rank in targets))) == spread
    arrivals = matrix_tasks(case.forward(Schedule(peer_order="rotated", tile_order="natural")), 1)
    sources = [{e.number // 16 for e, _ in t.waits} for t in arrivals if t.op == "gate_up"]
    assert sources == [set(), {0}, {3}, {2}] * 2, "its own rows, then as peers send: rank - 1 first"


def test_chunk_major_runs_gemms_one_behind_the_other():
    case = problem(tokens=(400, 400), num_experts=8, top_k=2, unused=0)
    schedule = Schedule(tile_order="chunk-major", chunk_experts=2)
    order = [(t.op, t.block.group // 2) for t in matrix_tasks(case.forward(schedule))]
    assert list(dict.fromkeys(order)) == [("gate_up", 0), ("gate_up", 1), ("down", 0), ("down", 1)]
    order = [(t.op, t.block.group // 2) for t in matrix_tasks(case.backward(schedule))]
    last = [("down_wgrad", 0), ("down_wgrad", 1), ("gate_up_wgrad", 0), ("gate_up_wgrad", 1)]
    assert list(dict.fromkeys(order)) == [
        ("down_grad", 0),
        ("down_grad", 1),
        ("gate_up_grad", 0),
        ("gate_up_grad", 1),
        *last,
    ]
    schedule = dataclasses.replace(schedule, weight_gradient_order="interleaved")
    order = [(t.op, t.block.group // 2) for t in matrix_tasks(case.backward(schedule))]
    assert list(dict.fromkeys(order)) == [
        ("down_grad", 0), ("down_grad", 1), ("gate_up_grad", 0), ("down_wgrad", 0), ("gate_up_wgrad", 0),
        ("gate_up_grad", 1), ("down_wgrad", 1), ("gate_up_wgrad", 1),
    ]  # fmt: skip


def test_interleaved_weight_gradients_follow_the_rows_of_their_expert():
    graph = problem(tokens=(400, 400), num_experts=4, unused=0).backward(Schedule(weight_gradient_order="interleaved"))
    order = [(t.op, t.block.group) for t in matrix_tasks(graph)]
    assert list(dict.fromkeys(order)) == [
        ("down_grad", 0), ("down_grad", 1), ("gate_up_grad", 0), ("down_wgrad", 0), ("gate_up_wgrad", 0),
        ("gate_up_grad", 1), ("down_wgrad", 1), ("gate_up_wgrad", 1),
    ]  # fmt: skip


def test_rows_of_a_group_share_a_column_of_weights():
    case = problem(tokens=(500,), num_experts=1, top_k=1, hidden=64, ffn=192, unused=0)
    graph = case.forward(Schedule(gate_up=Tile(rows=128, columns=64, group_rows=2), tile_order="natural"))
    tiles = [(t.block.row0 // 128, t.block.column0 // 64) for t in matrix_tasks(graph) if t.op == "gate_up"]
    assert tiles == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (2, 0), (3, 0), (2, 1), (3, 1), (2, 2), (3, 2)]


def derived(plan, cfg, schedule, rank, ranks):
    """The forward's matrix list as a device derives it: loops over tables that fit in registers, and running sums.

    From the plan alone: counts per source and expert, starts of segments.
    """
    local = cfg.num_experts // ranks
    counts = plan.counts_RE[:, rank * local : (rank + 1) * local].tolist()
    start = plan.expert_start_e1.tolist()

    def sources(expert, row0, row1):
        """First and last source of a tile's rows; none for a tile of pad rows."""
        at, found = start[expert], []
        for source in range(ranks):
            first, at = at, at + counts[source][expert]
            if first < min(at, row1) and row0 < at and counts[source][expert]:
                found.append(source)
        return (found[0], found[-1]) if found else None

    def step(op, expert, row0, rows):
        span = sources(expert, row0, row0 + rows)
        if schedule.peer_order == "natural":
            return 0
        if span is None:
            return 0 if op == "gate_up" else ranks
        if op == "down":
            return (span[0] - rank - 1) % ranks
        return ranks - 1 if span[0] <= rank < span[1] else (rank - span[0]) % ranks

    def is_late(expert, row0, rows):
        span = sources(expert, row0, row0 + rows)
        return span is not None and (span[0] != rank or span[1] != rank)

    def tiles(op, expert, late):
        tile, width = (schedule.gate_up, cfg.ffn) if op == "gate_up" else (schedule.down, cfg.hidden)
        keyed = []
        row_tiles = range(start[expert], start[expert + 1], tile.rows)
        for group in range(0, len(row_tiles), tile.group_rows):
            for column in range(0, width, tile.columns):
                for row0 in row_tiles[group : group + tile.group_rows]:
                    if late is None or is_late(expert, row0, tile.rows) == late:
                        block = (expert, row0, row0 + tile.rows, column, min(column + tile.columns, width))
                        keyed.append((step(op, expert, row0, tile.rows), block))
        return [(op, *block) for _, block in sorted(keyed, key=lambda k: k[0])]

    out = []
    if schedule.tile_order == "chunk-major":
        chunks = -(-local // schedule.chunk_experts)
        for wave in range(chunks + 1):
            for op, chunk in (("gate_up", wave), ("down", wave - 1)):
                if 0 <= chunk < chunks:
                    first = chunk * schedule.chunk_experts
                    for expert in range(first, min(first + schedule.chunk_experts, local)):
                        out += tiles(op, expert, None)
        return out
    for late in (False, True) if schedule.tile_order == "local-first" else (None,):
        for expert in range(local):
            out += tiles("gate_up", expert, late)
    for expert in range(local):
        out += tiles("down", expert, None)
    return out


@settings(max_examples=60, deadline=None)
@given(problems(), schedules())
def test_a_device_can_derive_the_same_list(case, schedule):
    if schedule.tile_order == "critical-path":  # decided by simulation: it needs the host
        return
    schedule = dataclasses.replace(schedule, overlap="fused")
    graph = case.forward(schedule)
    for rank, plan in enumerate(case.plans()):
        found = [(graph.ops[op], *block) for op, *block in graph.descriptors(graph.indices(rank, "matrix")).tolist()]
        assert found == derived(plan, case.cfg, schedule, rank, case.ranks)

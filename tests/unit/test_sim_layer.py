"""Simulated layers: one rank stands for all, bytes add up, strategies exist everywhere, and the command."""

import collections
import dataclasses
import itertools
import json

import pytest
import torch
from test_taskflow import way_of
from typer.testing import CliRunner

from uniep.cli.main import app
from uniep.errors import ConfigError
from uniep.routing import RoutingPlan, build_plan
from uniep.schedule import Schedule
from uniep.shapes import SHAPES, Shape, parse_shape
from uniep.sim import STRATEGIES, Problem, load_machine, machines, row, simulate
from uniep.sim.beside import predicted
from uniep.sim.costs import RESOURCES, costs
from uniep.sim.problem import opposite
from uniep.sim.rows import spans
from uniep.sim.strategies import execute, parse_strategies
from uniep.taskflow.check import check
from uniep.taskflow.layer import forward_operators, recompute_operators
from uniep.taskflow.lower import compile_graph, lower_forward, sites
from uniep.taskflow.site import Site
from uniep.taskflow.trace import shares

SMALL = Shape("small", 512, 256, 16, 4)


def all_ranks(problem, way):
    """The sites of all ranks, each of which counts ranks from itself: where the one that stands for all is true."""
    cfg, size, own = problem.cfg, problem.ep, problem.cfg.experts_per_rank(problem.ep)
    ids = [problem.ids(rank) for rank in range(size)]
    base = build_plan(ids, 0, cfg)
    slots, block = problem.tokens * cfg.top_k, cfg.receive_block
    sites = []
    for rank in range(size):
        turn = (torch.arange(size) - rank) % size  # absolute rank -> as rank 0 counts
        counts = base.counts_RE.view(size, size, own)[turn][:, turn].reshape(size, -1)
        back = base.row_return_N.long()
        back = torch.where(back >= 0, (back // slots + rank) % size * slots + back % slots, -1)
        slot = -base.row_source_N.long() - 1
        peer = ((slot // block) + 1 + rank) % size
        moved = -((peer - (peer > rank).long()) * block + slot % block) - 1
        source = torch.where((slot >= 0) & (base.row_return_N >= 0), moved, base.row_source_N.long())
        fields = (counts, base.expert_start_e1, base.send_count_R[turn], base.send_token_RT[turn],
                  base.recv_count_R[turn], source, back)  # fmt: skip
        plan = RoutingPlan(*(t.to(torch.int32) for t in fields))
        chunks = torch.arange(-(-problem.tokens // way.chunk_tokens))
        sites.append(Site(rank, size, cfg, way, plan, problem.tokens, chunks))
    return sites


@pytest.mark.parametrize("machine", ["ascend-a3", "h200-node"])
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("ep", [2, 4])
def test_one_rank_stands_for_all(ep, direction, machine):
    """The full simulation of all ranks, task by task."""
    made = load_machine(machine)
    for name, strategy in STRATEGIES.items():
        problem = Problem(SMALL, ep, 512, "balanced", direction)  # a tile's rows are of one source
        arrangement = strategy.arrange(problem, made)
        one = simulate(problem, made, arrangement)
        every = execute(arrangement, arrangement.operators, all_ranks(problem, arrangement.way), made)
        assert every.graph.num_tasks == ep * one.graph.num_tasks
        for rank in range(ep):
            here = every.graph.rank_N == rank
            assert torch.equal(every.graph.op_N[here], one.graph.op_N), name
            assert torch.equal(every.timeline.finish_N[here], one.timeline.finish_N), (name, rank)
        assert every.makespan_ns == one.makespan_ns


@pytest.mark.parametrize("machine", ["ascend-a3", "h200-node"])
def test_one_rank_stands_for_all_where_tiles_hold_rows_of_several_sources(machine):
    """Then the last rank takes some tiles in another order; the layer is over at the same time."""
    made = load_machine(machine)
    for name in ("serialized", "taskflow", "uniep", "uniep-pipelined"):
        problem = Problem(SMALL, 8, 300, "balanced", "fwd")
        arrangement = STRATEGIES[name].arrange(problem, made)
        every = execute(arrangement, arrangement.operators, all_ranks(problem, arrangement.way), made)
        assert every.makespan_ns == simulate(problem, made, arrangement).makespan_ns, name


def test_the_real_order_of_rows_changes_little():
    """The one rank that stands for all has its own rows first in every expert; a real one has them at its place."""
    made = load_machine("h200-node")
    problem = Problem(SHAPES["qwen3-30b"], 4, 2048, "balanced", "fwd")
    for name in ("serialized", "deepep", "taskflow", "uniep"):
        arrangement = STRATEGIES[name].arrange(problem, made)
        cfg, ids = problem.cfg, [problem.ids(rank) for rank in range(4)]
        real = [problem.site(rank, ids, cfg, arrangement.way) for rank in range(4)]
        every = execute(arrangement, arrangement.operators, real, made)
        assert every.makespan_ns == pytest.approx(simulate(problem, made, arrangement).makespan_ns, rel=0.03), name


def test_parts_of_gate_up():
    """The down product of a part begins when gate_up of that part is done, and before that of the next one is; all
    workers carry out the first part."""
    made = load_machine("h200-node")
    problem = Problem(SHAPES["qwen3-30b"], 2, 4096, "balanced", "fwd")
    arrangement = STRATEGIES["uniep-parts"].arrange(problem, made)
    found = simulate(problem, made, arrangement)
    graph, timeline = found.graph, found.timeline
    gate_up, down = (graph.op_N == graph.ops.index(name) for name in ("gate_up", "down"))
    start_n, finish_n = timeline.start_N[down], timeline.finish_N[gate_up].sort().values
    half = len(finish_n) // 2
    assert start_n.min() >= finish_n[half - 1] and start_n.min() < timeline.start_N[gate_up].max()
    assert (start_n >= finish_n[-1]).double().mean() == 0.5
    assert (timeline.claimed_N[gate_up] == 0).sum() == made.matrix_workers
    in_turn = graph.indices(0)
    rows, of_down = (
        list(dict.fromkeys(graph.tasks[n].block.row0 for n in in_turn[chosen[in_turn]].tolist()))
        for chosen in (gate_up, down)
    )
    assert rows == of_down != sorted(rows)
    behind = int(found.sites[0].start_e1[arrangement.way.leads[0]])
    others = [row for row in rows if row >= behind]
    assert others == sorted(others), "only a few experts lead"


def test_opposite_ranks():
    """Two nodes of four: from 0, rank 5 is a node and a place on; so is 0 from 7, which is its opposite."""
    assert opposite(torch.arange(8), 8, 4).tolist() == [0, 3, 2, 1, 4, 7, 6, 5]
    assert opposite(torch.arange(4), 4, 4).tolist() == [0, 3, 2, 1]


@pytest.mark.parametrize("machine", sorted(set(machines()) - {"h100-node"}))
def test_every_strategy_on_every_machine(machine):
    """But on h100-node, whose numbers are those of h100-cluster."""
    made = load_machine(machine)
    for direction in ("fwd", "bwd"):
        for ep, routing in ((1, "balanced"), (4, "zipf"), (16, "balanced")):
            problem = Problem(SMALL, ep, 256, routing, direction)
            for name, strategy in STRATEGIES.items():
                if name == "uniep-copy" and made.per_node(ep) < ep:
                    continue
                got = row(problem, made, strategy)
                assert got["makespan_us"] > 0 and got["schedule"] == name
                assert all(0 <= part <= 1 for part in got["busy"].values())
                assert 0 <= got["exposed_comm_us"] <= got["makespan_us"]
                assert (ep == 1) <= (got["busy"]["link"] == 0)


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["ascend-a3", "h100-cluster"])
def test_few_tokens_idle_experts_and_odd_nodes(machine):
    """Twelve ranks on nodes of eight are three nodes of four; seven tokens leave experts without rows."""
    made = load_machine(machine)
    assert [load_machine("h100-cluster").per_node(ep) for ep in (4, 8, 12, 16)] == [4, 8, 4, 8]
    for ep, tokens, routing in ((12, 7, "zipf"), (2, 1, "zipf"), (12, 5, "balanced"), (1, 1, "balanced")):
        for direction in ("fwd", "bwd"):
            problem = Problem(Shape("odd", 128, 64, 24, 4), ep, tokens, routing, direction)
            for name, strategy in STRATEGIES.items():
                if name != "uniep-copy" or made.per_node(ep) == ep:
                    assert row(problem, made, strategy)["makespan_us"] > 0


def test_bytes_and_operations_add_up():
    made = load_machine("ascend-a3")
    problem = Problem(SMALL, 4, 512, "balanced", "fwd")
    rows, size = 512 * 4, 512 * 2
    for name, away in (("serialized", 2 * rows * 3 / 4), ("taskflow", 2 * rows * 3 / 4)):
        got = simulate(problem, made, STRATEGIES[name].arrange(problem, made))
        assert float(got.costs.sends.sum()) == away * size
        assert int(got.graph.work_N3[:, 0].sum()) == 6 * rows * 512 * 256
        check(got.graph, [queue.tasks for queue in got.timeline.queues])


def test_a_hot_rank_is_slower_than_balance():
    made = load_machine("h200-node")
    for name in ("serialized", "deepep", "taskflow", "uniep"):
        times = [row(Problem(SMALL, 4, 1024, r), made, STRATEGIES[name])["makespan_us"] for r in ("balanced", "zipf")]
        assert times[0] < times[1]


def test_the_network_is_slower_than_links():
    far = load_machine("h100-cluster")
    assert far.values == load_machine("h100-node").values, "test_every_strategy_on_every_machine has but one of them"
    problem = Problem(parse_shape("512x256x32x4"), 16, 256, "balanced")
    one_node = far.replaced({"ranks_per_node": 16})
    for name in ("serialized", "deepep", "taskflow", "uniep"):
        assert (
            row(problem, one_node, STRATEGIES[name])["makespan_us"] < row(problem, far, STRATEGIES[name])["makespan_us"]
        )


def test_combine_groups_send_less():
    made = load_machine("h200-node")
    problem = Problem(Shape("wide", 512, 256, 16, 8), 4, 512, "balanced")
    plain, grouped = (
        simulate(p, made, STRATEGIES["uniep"].arrange(p, made))
        for p in (problem, dataclasses.replace(problem, combine_groups=4))
    )
    assert float(grouped.costs.sends.sum()) < 0.8 * float(plain.costs.sends.sum())


def test_spans_are_a_trace():
    made = load_machine("ascend-a3")
    problem = Problem(SMALL, 4, 256, "balanced", "bwd")
    result = simulate(problem, made, STRATEGIES["taskflow"].arrange(problem, made))
    found = spans(result, "backward")
    assert len(found) == result.graph.num_tasks and max(s.end_ns for s in found) == result.makespan_ns
    for part in shares(found):
        assert part.busy + part.waiting + part.exposed + part.idle == pytest.approx(1)


def recorded(schedule, ranks=2):
    """ids, cfg and way of a layer of random routing."""
    cfg = Problem(SMALL, ranks, 256).cfg
    draws = [torch.Generator().manual_seed(rank) for rank in range(ranks)]
    return [torch.rand(256, 16, generator=draw).topk(4).indices for draw in draws], cfg, way_of(schedule, cfg, ranks)


@pytest.mark.parametrize("machine", [None, "h200-node"])
def test_a_recorded_layer_is_predicted_behind_what_was_recorded(machine):
    """The same tasks, each once, in the schedule's graph; the backward begins when the forward is over."""
    schedule = Schedule(vector_workers=2) if machine is None else Schedule(overlap="mega", push_programs=16)
    ids, cfg, way = recorded(schedule)
    made = machine and load_machine(machine)
    first = predicted(ids, cfg, way, made, [])
    later = predicted(ids, cfg, way, made, first)
    assert [s.phase for s in first] == sorted((s.phase for s in first), reverse=True)
    forward = [s for s in first if s.phase == "forward, predicted"]
    backward = [s for s in first if s.phase == "backward, predicted"]
    assert max(s.end_ns for s in forward) == min(s.claimed_ns for s in backward)
    assert {"push", "gate_up", "down", "combine"} <= {s.op for s in forward}
    assert later[0].claimed_ns - first[0].claimed_ns == max(s.end_ns for s in first) and len(later) == len(first)


@pytest.mark.parametrize("machine", [None, "h200-node"])
@pytest.mark.parametrize("fields", [
    {"send_order": "expert"}, {"transfer": "pull"}, {"transfer": "copy"}, {"preactivation": "recomputed"},
    {"preactivation": "recomputed", "tile_order": "critical-path", "transfer": "pull"},
], ids=lambda fields: " ".join(fields.values()))  # fmt: skip
def test_what_runs_is_predicted(fields, machine):
    """The tasks of the schedule's own graph, each behind what it waits for there, which tells one order of send lists
    from the other; no worker, or program, does two things at once."""
    fields = {"vector_workers": 2} | fields if machine is None else {"overlap": "mega", "push_programs": 9} | fields
    ids, cfg, way = recorded(Schedule(chunk_tokens=32, **fields), ranks=4)
    found = predicted(ids, cfg, way, machine and load_machine(machine), [])
    plans = [build_plan(ids, rank, cfg, way.sends_by_expert) for rank in range(4)]
    graph = lower_forward(plans, [256] * 4, cfg, way, keep=True)
    forward = {(s.rank, s.op, s.block): s for s in found if s.phase == "forward, predicted"}
    tasks = {(t.rank, t.op, t.block): t for t in graph.tasks}
    assert forward.keys() == tasks.keys()
    ends = collections.defaultdict(list)
    for key, task in tasks.items():
        for event in task.signals:
            ends[event].append(forward[key].end_ns)
    assert all(forward[key].start_ns >= max(ends[e]) for key, task in tasks.items() for e, _ in task.waits)
    of_worker = collections.defaultdict(list)
    for s in found:
        kind, number = s.worker.split()
        one = "program" if machine and kind != "copies" else kind
        of_worker[s.rank, one, number].append((s.start_ns, s.end_ns))
    for times in of_worker.values():
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(sorted(times)))
    moved = {s.worker for s in found if s.op in ("push", "pull") and s.rank == 0}
    if machine is not None:
        kind, count = ("copies", 4) if way.copies else ("vector", 9)
        assert {worker.split()[0] for worker in moved} == {kind} and len(moved) == count
    again = {s.phase for s in found if s.op == "recompute"}
    assert again == ({f"{'recompute' if machine else 'backward'}, predicted"} if way.recomputes else set())


def test_fetches_leave_the_ranks_that_they_fetch_from():
    """Rank 0 alone wants tokens: their links out and its link in are busy, whoever moves them."""
    machine, cfg = load_machine("h200-node"), Problem(SMALL, 4, 64).cfg
    machine = machine.replaced({"link_gbps": 1})  # so that links can be short
    ids = [torch.arange(4).expand(64, 4)] * 4
    for transfer in ("push", "pull"):
        way = way_of(Schedule(overlap="mega", transfer=transfer), cfg, 4)
        of_rank = sites([build_plan(ids, rank, cfg) for rank in range(4)], [64] * 4, cfg, way)
        operators = forward_operators(way, keep=False)
        graph = compile_graph(operators, of_rank)
        spent = costs(graph, operators, of_rank, machine)
        task_F = torch.arange(graph.num_tasks).repeat_interleave(spent.flow_start_N1.diff())
        moves_F = torch.isin(graph.op_N[task_F], torch.tensor([graph.ops.index(transfer)]))
        used = {divmod(r, len(RESOURCES)) for r in spent.flow_resource_F[moves_F].tolist()}
        links = {(rank, RESOURCES[kind]) for rank, kind in used if "link" in RESOURCES[kind]}
        assert links == {(0, "link in"), *((rank, "link out") for rank in (1, 2, 3))}, transfer


def test_what_is_made_again_is_not_stored_before():
    """Of a tile: with gate and up kept, two results more than the activation alone; made again without it, one."""
    machine, cfg = load_machine("h200-node"), Problem(SMALL, 2, 64).cfg
    ids, took = [torch.arange(4).expand(64, 4)] * 2, {}
    for preactivation in ("saved", "recomputed"):
        way = way_of(Schedule(overlap="mega", preactivation=preactivation), cfg, 2)
        of_rank = sites([build_plan(ids, rank, cfg) for rank in range(2)], [64] * 2, cfg, way)
        for name, operators in (
            ("gate_up", forward_operators(way, keep=False)), ("recompute", recompute_operators(way)),
        ):  # fmt: skip
            graph = compile_graph(operators, of_rank)
            compute_N = costs(graph, operators, of_rank, machine).compute_N
            took[name, preactivation] = float(compute_N[graph.op_N == graph.ops.index(name)][0])
    saved, alone, again = took["gate_up", "saved"], took["gate_up", "recomputed"], took["recompute", "recomputed"]
    assert saved - alone == pytest.approx(2 * (again - alone)) and again > alone


def test_bad_problems_are_told():
    for bad, told in (
        ({"routing": "zipfy"}, "routing 'zipfy' is unknown; use balanced"),
        ({"direction": "both"}, "direction 'both' is unknown"),
        ({"ep": 3}, "cannot be split evenly over 3 ranks"),
        ({"tokens": 0}, "max_tokens_per_rank is 0"),
    ):
        with pytest.raises(ConfigError, match=told):
            Problem(**{"shape": SMALL, "ep": 2, "tokens": 64, **bad})
    with pytest.raises(ConfigError, match="schedule 'fast' is unknown; use one or more of serialized"):
        parse_strategies("fast")
    with pytest.raises(ConfigError, match="shape '1x2' is unknown; use qwen3-30b"):
        parse_shape("1x2")


def invoke(*args):
    return CliRunner().invoke(app, ["simulate", *args], env={"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"})


def test_the_command(tmp_path):
    out = tmp_path / "rows.json"
    picture = tmp_path / "lanes.svg"
    args = ["--shape", "256x128x8x2", "--ep", "2", "--tokens", "256", "--direction", "bwd", "--set", "link_gbps=100"]
    result = invoke(*args, "--schedule", "serialized,taskflow", "--json", str(out), "--picture", str(picture))
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["rows"]
    assert [r["schedule"] for r in rows] == ["serialized", "taskflow"]
    assert list(rows[0]) == [
        "machine", "shape", "ep", "tokens", "routing", "direction", "schedule", "makespan_us", "busy",
        "exposed_comm_us", "phases",
    ]  # fmt: skip
    assert list(rows[0]["busy"]) == ["matrix", "vector", "link"]
    drawn = picture.read_text()  # an SVG has its texts in comments
    assert all(f"{made['schedule']}: {made['makespan_us'] / 1e3:.2f} ms" in drawn for made in rows)
    first = out.read_bytes()
    invoke(*args, "--schedule", "serialized,taskflow", "--json", str(out))
    assert out.read_bytes() == first, "the same input, the same bytes"
    for bad, told in ((["--machine", "nowhere"], "machine 'nowhere' is unknown"), (["--set", "x=1"], "x is not a key"),
                      (["--schedule", "x"], "schedule 'x' is unknown"), (["--shape", "x"], "shape 'x' is unknown"),
                      (["--ep", "3"], "cannot be split evenly")):  # fmt: skip
        result = invoke(*bad)
        assert result.exit_code == 2 and told in result.output


def test_dw2_beside_gate_up_grad_has_workers_of_its_own():
    """dW13 then runs on all workers; before, all do the same.  On two ranks if asked for, on four by default."""
    machine = load_machine("h200-node")
    for name, ep in (("uniep-dw2-beside", 2), ("uniep", 4)):
        problem = Problem(SHAPES["qwen3-30b"], ep, 4096, "balanced", "bwd")
        behind = STRATEGIES["uniep-dw2-after"].arrange(problem, machine)
        assert ["gate_up_grad"] in behind.kernels and len(behind.lanes) == 1
        made = simulate(problem, machine, STRATEGIES[name].arrange(problem, machine))
        line, of = made.timeline, {op: made.graph.op_N == number for number, op in enumerate(made.graph.ops)}
        (rows,), (others,) = (line.queue_N[of[op]].unique().tolist() for op in ("gate_up_grad", "gate_up_wgrad"))
        assert line.queues[rows].workers == 83 and line.queues[rows].then == others
        assert (line.queue_N[of["down_wgrad"]] == others).all() and rows != others
        assert line.start_N[of["down_wgrad"]].min() < line.finish_N[of["gate_up_grad"]].min()
        share = (line.queue_N[of["down_grad"]] == rows).double().mean()
        assert abs(float(share) - 83 / 132) < 0.02


def test_waves_follow_the_copies():
    """On eight ranks tiles in waves by arrival end sooner; copy engines do not reach other nodes."""
    problem, machine = Problem(SHAPES["qwen3-30b"], 8, 4096), load_machine("h200-node")
    usual = STRATEGIES["uniep-copy"].arrange(problem, machine)
    assert usual.way.waves == 8
    without = dataclasses.replace(usual, way=dataclasses.replace(usual.way, waves=1))
    ended = [simulate(problem, machine, arrangement).makespan_ns for arrangement in (usual, without)]
    assert ended[0] < 0.9 * ended[1]
    two_nodes = STRATEGIES["uniep"].arrange(Problem(SHAPES["qwen3-30b"], 16, 512), load_machine("h100-cluster"))
    assert not any(lane.extra for lane in two_nodes.lanes)
    refused = invoke("--machine", "h100-cluster", "--ep", "16", "--schedule", "uniep,uniep-copy")
    told = "copy engines reach 8 of 16 ranks on h100-cluster, those of one node; use uniep-push"
    assert refused.exit_code == 2 and told in " ".join(refused.output.split())

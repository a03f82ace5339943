"""Operators of one's own: registered, compiled, checked, scheduled, run and traced like the layer's."""

import dataclasses

import pytest
import torch
from test_taskflow import Model, problem

import uniep
from uniep import ConfigError
from uniep.schedule import Schedule, Tile
from uniep.taskflow.check import check
from uniep.taskflow.layer import forward_operators
from uniep.taskflow.lower import compile_graph, sites
from uniep.taskflow.operators import Access, Operator, Operators, by_tile, rows_of, segment_of


def tiles(site):
    return site.row_tiles(site.way.gate_up, site.cfg.ffn)


def cover(site):
    return site.segments(site.cfg.ffn)


def height(way):
    return way.gate_up.rows


def operator(name="mine", worker="vector", reads=(), writes=(), split=tiles, covers=cover, **fields):
    return Operator(name, worker, split, covers, tuple(reads), tuple(writes), **fields)


def compiled(*operators, schedule=None, case=None):
    case = case or problem()
    way = case.way(schedule or Schedule(gate_up=Tile(rows=64, columns=64)))
    return compile_graph(Operators(operators), sites(case.plans(), case.tokens, case.cfg, way))


def test_one_to_one():
    made, used = Access("a", by_tile), Access("a", by_tile)
    graph = compiled(operator("make", writes=[made]), operator("use", "matrix", reads=[used]))
    check(graph)
    makers = {event: t for t in graph.tasks for event in t.signals}
    for task in graph.tasks:
        if task.op == "use":
            ((event, count),) = task.waits
            assert count == 1 and (makers[event].rank, makers[event].block) == (task.rank, task.block)


def test_fan_in_is_counted_and_fan_out_shared():
    """ffn 136 in tiles of 64 columns: three tiles write the rows that three tiles of another operator read."""
    rows = rows_of(height)
    graph = compiled(operator("make", writes=[Access("a", rows)]), operator("use", reads=[Access("a", rows)]))
    check(graph)
    readers = {}
    for task in graph.tasks:
        if task.op == "use":
            ((event, count),) = task.waits
            assert count == 3
            readers[event] = readers.get(event, 0) + 1
    assert set(readers.values()) == {3}


def test_a_tile_may_read_several_stages():
    case = problem()
    graph = compiled(
        operator("make", writes=[Access("a", by_tile)]),
        operator("more", writes=[Access("b", rows_of(height))]),
        operator("use", reads=[Access("a", by_tile), Access("b", segment_of(height))]),
        case=case,
    )
    check(graph)
    plans = case.plans()
    for task in graph.tasks:
        if task.op == "use":
            first, last = plans[task.rank].expert_start_e1[task.block.group : task.block.group + 2].tolist()
            assert sorted(e.number for e, _ in task.waits if e.stage == "b") == list(range(first // 64, last // 64))
            assert [n for e, n in task.waits if e.stage == "a"] == [1]


def test_a_tile_may_write_several_stages():
    graph = compiled(
        operator("make", writes=[Access("a", by_tile), Access("b", rows_of(height))]),
        operator("left", reads=[Access("a", by_tile)]),
        operator("right", reads=[Access("b", rows_of(height))]),
    )
    check(graph)
    assert {e.stage for t in graph.tasks for e in t.signals} == {"a", "b"}


def test_a_read_of_what_nothing_writes_is_refused():
    with pytest.raises(ConfigError, match=r"use\(.* reads a\[\d+\] on rank \d, which nothing writes"):
        compiled(operator("use", reads=[Access("a", by_tile)]))


def test_a_split_that_leaves_a_gap_is_refused():
    with pytest.raises(ConfigError, match=r"mine on rank 0: .*(gap or overlap|no tile covers)"):
        check(compiled(operator(split=lambda s: tiles(s)[1:])))
    with pytest.raises(ConfigError, match="more than once"):
        check(compiled(operator(split=lambda s: torch.cat([tiles(s), tiles(s)[:1]]))))
    with pytest.raises(ConfigError, match="unknown outputs"):
        check(compiled(operator(covers=lambda s: cover(s)[1:])))


def test_operators_that_read_each_other_are_a_cycle():
    a, b = Access("a", by_tile), Access("b", by_tile)
    with pytest.raises(ConfigError, match="a cycle"):
        check(compiled(operator("one", reads=[b], writes=[a]), operator("two", reads=[a], writes=[b])))


def test_the_registry_names_what_it_refuses():
    operators = forward_operators(problem().way(Schedule()), keep=False)
    names = [op.name for op in operators]
    assert names == ["push", "gate_up", "down", "combine"] and len(operators) == 4
    operators.register(operator(), after="gate_up")
    assert [op.name for op in operators] == ["push", "gate_up", "mine", "down", "combine"]
    assert operators["mine"].worker == "vector"
    with pytest.raises(ConfigError, match="'mine' exists already"):
        operators.register(operator())
    with pytest.raises(ConfigError, match="'gate' exists already"):
        operators.register(operator("gate"))
    with pytest.raises(ConfigError, match="no operator 'gemm9' to come after; there are push, gate_up"):
        operators.register(operator("other"), after="gemm9")
    with pytest.raises(ConfigError, match="is for 'tensor'; classes of workers are"):
        operator(worker="tensor")


@pytest.mark.parametrize("schedule", [
    Schedule(), Schedule(overlap="serial"), Schedule(tile_order="chunk-major"),
    Schedule(tile_order="critical-path", activation="separate", vector_workers=2),
], ids=lambda s: s.name)  # fmt: skip
def test_it_runs_with_the_layer(schedule):
    """The largest activation of every row, by vector workers, from the tiles of the first GEMM as they come."""
    case = problem(tokens=(100,), num_experts=4, unused=0)
    model, stage = Model(case), "activation" if schedule.activation == "separate" else "gate_up"
    largest = {}

    def body(bodies, block):
        values = bodies.act_NF[block.row0 : block.row1].amax(1)
        largest.update(zip(range(block.row0, block.row1), values.tolist(), strict=True))

    mine = Operator(
        "largest", "vector", lambda s: s.row_tiles(s.way.gate_up, 1), lambda s: s.segments(1),
        reads=(Access(stage, rows_of(height)),), body=body,
    )  # fmt: skip
    arguments = (model.x[0], case.ids[0], model.weights[0], model.w13, model.w2)
    with uniep.Workspace(case.cfg, device="cpu", schedule=schedule) as ws:
        plain = uniep.moe(*arguments, workspace=ws)
    with uniep.Workspace(case.cfg, device="cpu", schedule=schedule) as ws:
        uniep.moe(*arguments, workspace=ws)  # a program without it is not used again
        ws.backend.forward_operators.register(mine, after=stage)
        ws.backend.trace = []
        assert torch.equal(uniep.moe(*arguments, workspace=ws), plain)
        spans = [s for s in ws.backend.trace if s.op == "largest"]
    rows = case.plans()[0].num_rows
    assert sorted(largest) == list(range(rows)) and len(spans) == rows // 128
    assert all(s.worker.startswith("vector") for s in spans)
    x, experts = model.x[0], model.w13.unflatten(1, (2, -1))
    back = case.plans()[0].row_return_N.tolist()
    for row in (0, 1, 2):
        token, expert = back[row] // case.cfg.top_k, 0
        gate, up = experts[expert] @ x[token]
        assert largest[row] == pytest.approx(float((torch.nn.functional.silu(gate) * up).amax()), rel=1e-4)


def test_an_operator_that_only_some_ranks_have_work_for():
    case = problem(tokens=(0, 200), num_experts=2, top_k=1, unused=0)
    case = dataclasses.replace(case, ids=[case.ids[0], torch.zeros_like(case.ids[1])])
    graph = compiled(
        operator("make", writes=[Access("a", by_tile)]), operator("use", reads=[Access("a", by_tile)]), case=case
    )
    check(graph)
    assert {t.rank for t in graph.tasks} == {0}

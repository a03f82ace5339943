"""The trace: shares that add up, a file that Perfetto loads, a page, and the records of a device."""

import json
import re

import pytest
import torch
from test_taskflow import Model, problem

import uniep
from uniep import InputError
from uniep.cli.page import write_page
from uniep.cli.simulate_picture import COLORS
from uniep.cli.timeline import KINDS, draw_timeline, kinds_of
from uniep.schedule import Schedule
from uniep.taskflow.graph import Block
from uniep.taskflow.layer import _OPERATORS
from uniep.taskflow.trace import Span, device_spans, lanes_of, merge_profile, shares, trace_events, write_trace

ABOUT = {"layer": "tiny <&>", "schedule": "fused"}


def span(rank, worker, op, claimed, start, end, peers=False, phase="forward"):
    return Span(phase, rank, worker, op, Block(0, 0, 64, 0, 64), peers, peers, claimed, start, end)


BY_HAND = [
    span(0, "matrix 0", "gate_up", 0, 0, 40),
    span(0, "matrix 0", "down", 40, 50, 80),
    span(1, "matrix 0", "gate_up", 10, 60, 100, peers=True),
    span(0, "vector 0", "push", 0, 0, 20),
    span(0, "matrix 0", "gate_up_wgrad", 1000, 1000, 1010, phase="backward"),
]


def test_shares_by_hand():
    """Forward, 0 to 100: two matrix workers, 200 in all, busy 40 + 30 + 40, waiting 10, for peers 50."""
    matrix, vector, backward = shares(BY_HAND)
    assert (matrix.phase, matrix.worker, vector.worker, backward.phase) == ("forward", "matrix", "vector", "backward")
    assert (matrix.busy, matrix.waiting, matrix.exposed) == (110 / 200, 10 / 200, 50 / 200)
    assert matrix.idle == pytest.approx(30 / 200)
    assert (vector.busy, vector.exposed, vector.idle) == (0.2, 0, 0.8)
    assert (backward.busy, backward.idle) == (1, 0)
    assert shares([]) == []


def test_events_are_complete_and_on_one_clock():
    events = trace_events(BY_HAND)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(names.values()) == ["matrix 0", "matrix 0", "vector 0"]
    assert {e["pid"] for e in events if e["name"] == "process_name"} == {0, 1}
    complete = [e for e in events if e["ph"] == "X"]
    assert all(set(e) == {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"} for e in complete)
    assert [(e["name"], e["ts"], e["dur"]) for e in complete if e["pid"] == 1] == [
        ("exposed communication", 0.01, 0.05), ("gate_up", 0.06, 0.04),
    ]  # fmt: skip
    assert {e["name"] for e in complete if e["cat"] == "waiting"} == {"waiting"}
    tasks = [e for e in complete if e["cat"] in ("matrix", "vector")]
    assert len(tasks) == len(BY_HAND) and tasks[0]["args"]["rows"] == "0:64"


def test_lanes_count_like_people():
    """By rank, class and number; in the events' threads, too."""
    workers = [(1, "matrix 0"), (0, "vector 0"), (0, "matrix 10"), (0, "matrix 2"), (0, "matrix 100")]
    spans = [span(rank, worker, "gate_up", 0, 0, 10) for rank, worker in workers]
    lanes = [(0, "matrix 2"), (0, "matrix 10"), (0, "matrix 100"), (0, "vector 0"), (1, "matrix 0")]
    assert lanes_of(spans) == lanes
    threads = sorted((e["tid"], e["args"]["name"]) for e in trace_events(spans) if e["name"] == "thread_name")
    assert [name for _, name in threads] == [worker for _, worker in lanes]


def recorded(schedule):
    case = problem(tokens=(150,), num_experts=4)
    model = Model(case)
    with uniep.Workspace(case.cfg, device="cpu", schedule=schedule) as ws:
        ws.backend.trace = []
        x = model.x[0].requires_grad_()
        uniep.moe(x, case.ids[0], model.weights[0], model.w13, model.w2, workspace=ws).sum().backward()
        return ws.backend.trace


@pytest.mark.parametrize("overlap", ["serial", "fused"])
def test_a_recording_adds_up(overlap, tmp_path):
    spans = recorded(Schedule(overlap=overlap, tile_order="natural", matrix_workers=2))
    assert {s.phase for s in spans} == {"forward", "backward"}
    found = shares(spans)
    assert len(found) == 4
    for s in found:
        assert s.busy + s.waiting + s.exposed + s.idle == pytest.approx(1) and min(s.busy, s.waiting, s.idle) >= 0
        assert s.exposed > 0 or s.worker == "matrix" or s.phase == "backward"
    lanes = {}
    for s in sorted(spans, key=lambda s: s.claimed_ns):
        assert lanes.get(s.worker, 0) <= s.claimed_ns <= s.start_ns <= s.end_ns, "one task at a time"
        lanes[s.worker] = s.end_ns
    write_trace(spans, ABOUT, tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text())
    assert document["displayTimeUnit"] == "ms" and document["otherData"]["layer"] == ABOUT["layer"]
    assert document["otherData"]["shares"][0].keys() == {"phase", "worker", "busy", "waiting", "exposed", "idle"}
    tasks = [e for e in document["traceEvents"] if e.get("cat") in ("matrix", "vector")]
    assert len(tasks) == len([s for s in spans if s.op != "gate"])
    write_page(spans, ABOUT, tmp_path / "timeline.html")
    text = (tmp_path / "timeline.html").read_text()
    assert "tiny &lt;&amp;&gt;" in text and not re.search(r"@[A-Z]+@", text) and "src=" not in text
    data = json.loads(re.search(r"^const data = (.*);$", text, re.MULTILINE).group(1))
    assert [worker for _, worker in data["lanes"]] == ["matrix 0", "matrix 1", "vector 0"]
    assert sum(len(p["bars"]) for p in data["phases"].values()) == len(spans)
    for phase in data["phases"].values():
        for lane, kind, claimed, start, end, _, what in phase["bars"]:
            assert 0 <= claimed <= start <= end <= phase["length"] and lane < 3 and kind < len(data["kinds"]) and what


def test_names_of_operators_are_text(tmp_path):
    """Users register operators of their own: what they are called is no markup, script, placeholder or formula."""
    names = ["</script><script>alert(1)", "<!--<script>", "@DATA@ @ABOUT@", "$x^{", "[bold]", "a&b"]
    spans = [span(0, "matrix 0", name, i * 10, i * 10, i * 10 + 5) for i, name in enumerate(names)]
    write_page(spans, {"layer": "@KEY@"}, tmp_path / "timeline.html")
    text = (tmp_path / "timeline.html").read_text()
    assert text.count("<script") == text.count("</script") == 1 and "<!--" not in text and "<dd>@KEY@</dd>" in text
    data = json.loads(re.search(r"^const data = (.*);$", text, re.MULTILINE).group(1))
    assert [label for _, label in data["kinds"]] == names
    assert [bar[6].rpartition("  group")[0] for bar in data["phases"]["forward"]["bars"]] == names
    draw_timeline([*spans, span(0, "matrix 0", "x", 0, 1, 2, phase="backward")], "cost: $5", tmp_path / "timeline.png")


def test_every_operator_of_the_layer_has_a_colour():
    names = {*_OPERATORS, "group_sum", "push_rows"}
    assert names <= {*KINDS} and names <= {*COLORS}
    for schedule in (Schedule(), Schedule(activation="separate", preactivation="recomputed")):
        for graph in (problem().forward(schedule), problem().backward(schedule)):
            assert not {op for op in graph.ops if op not in KINDS and op != "gate"}
    own = kinds_of([span(0, "vector 0", "mine", 0, 0, 1), span(0, "vector 0", "push", 0, 0, 1)])
    assert list(own) == ["push", "mine"] and own["mine"].label == "mine"


def test_records_of_a_device():
    """Timestamps of persistent programs, by place in the list that they claim from, in the executor's own format."""
    graph = problem().forward(Schedule())
    listed = graph.indices(1, "matrix")
    count = len(graph.descriptors(listed))
    records = torch.tensor([[i, i % 3, 100 * i, 100 * i + 5, 100 * i + 90] for i in range(count)])
    spans = device_spans(graph, listed, records, "forward")
    tasks = graph.queue(1, "matrix")
    assert [(s.op, s.block, s.rank) for s in spans] == [(t.op, t.block, 1) for t in tasks]
    assert [s.worker for s in spans[:4]] == ["matrix 0", "matrix 1", "matrix 2", "matrix 0"]
    assert [s.remote for s in spans] == [any(e.stage == "arrived" for e, _ in t.waits) for t in tasks]
    (found,) = shares(spans)
    assert found.busy > 0 and found.exposed > 0
    for bad in ([count, 0, 0, 0, 0], [-1, 0, 0, 0, 0], [0, 0, 5, 4, 9], [0, 0, 5, 6, 5]):
        with pytest.raises(InputError, match=r"record \[.*\] is not a task of this list"):
            device_spans(graph, listed, torch.tensor([bad]), "forward")


def test_serial_matrix_workers_wait_for_peers_at_their_gate():
    graph = problem().forward(Schedule(overlap="serial", tile_order="natural"))
    by_op = {}
    for task, peers, remote in zip(graph.tasks, graph.waits_for_peers.tolist(), graph.remote.tolist(), strict=True):
        by_op.setdefault(task.op, set()).add((peers, remote))
    assert by_op["push"] == {(False, False)} and by_op["down"] == {(False, False)}
    assert by_op["gate_up"] == {(True, True)} or by_op["gate_up"] == {(True, True), (True, False)}
    assert by_op["combine"] == {(True, True)}


def test_tasks_in_a_profile_lie_inside_the_layer(tmp_path):
    """torch.profiler's operators and the recorded tasks, in one file, on one clock."""
    cfg = uniep.MoEConfig(hidden=64, ffn=64, num_experts=4, top_k=2, max_tokens_per_rank=64, dtype=torch.float32)
    ids, weights = torch.randint(2, (64, 2)) + torch.tensor([0, 2]), torch.rand(64, 2)
    spans: list[Span] = []
    with uniep.Workspace(cfg, device="cpu") as workspace:
        x, w13, w2 = torch.randn(64, 64), torch.randn(4, 128, 64), torch.randn(4, 64, 64)
        workspace.backend.trace = spans
        with torch.profiler.profile() as profile, torch.profiler.record_function("layer"):
            uniep.moe(x, ids, weights, w13, w2, workspace=workspace)
    path = tmp_path / "step.json"
    profile.export_chrome_trace(str(path))
    merge_profile(path, spans, path)
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    (layer,) = (e for e in events if e["name"] == "layer" and e["cat"] == "user_annotation")
    tasks = [e for e in events if isinstance(e["pid"], int) and e["pid"] >= 1 << 30]
    assert {"gate_up", "down", "combine"} <= {e["name"] for e in tasks}
    for task in tasks:
        assert layer["ts"] <= task["ts"] and task["ts"] + task["dur"] <= layer["ts"] + layer["dur"]

"""The benchmark harness without a GPU: peers against a dense reference, and everything that reads results."""

import argparse
import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sources import PACKAGE, imported
from typer.testing import CliRunner

from uniep.reference import composition
from uniep.schedule import DEFAULT_SCHEDULES, Schedule, parse_schedule
from uniep.trials import search as searching

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import bits  # noqa: E402
import cases  # noqa: E402
import critical  # noqa: E402
import energy  # noqa: E402
import kernels  # noqa: E402
import moe  # noqa: E402
import peers  # noqa: E402
import ping_pong  # noqa: E402
import plot  # noqa: E402
import points  # noqa: E402
import predict  # noqa: E402
import results  # noqa: E402
import table  # noqa: E402
import worth  # noqa: E402
from layers import parse_groups  # noqa: E402


def run_interpreted(*arguments: str) -> None:
    """Python with these arguments, in a process where Triton interprets its kernels."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr


# ------------------------------------------------------------------------------------------------- peers


@pytest.mark.slow
def test_harness_runs_on_two_processes_and_the_baseline_equals_fp32(tmp_path):
    """The whole program: kernels interpreted, all-to-all over gloo, outputs and gradients compared, rows written."""
    out = tmp_path / "results.json"
    harness = [str(ROOT / "benchmarks" / "moe.py"), "--device", "cpu", "--dtype", "fp32", "--json", str(out)]
    small = ["--shapes", "64x32x4x2", "--tokens", "5", "--iters", "2", "--directions", "fwd_bwd", "--phases"]
    launch = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    also = tmp_path / "points.json"
    also.write_text(json.dumps({"64x32x4x2/5": ["peer-compute"], "64x32x4x2/6": ["uniep"]}))
    run_interpreted(*launch, *harness, *small, "--impl", "nccl", "--points", str(also))
    content = json.loads(out.read_text())
    errors = content["checks"]["small"]
    assert errors.pop("against") == "fp32"
    assert set(errors["nccl"]) == set(moe.OUTPUTS) and max(errors["nccl"].values()) < 1e-5
    assert {row["impl"] for row in content["rows"]} == {"nccl", "peer-compute"}
    for row in content["rows"]:
        assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"] and row["tflops"] >= 0
        assert {"gate_up", "backward gate_up_wgrad"} <= set(row["phases"])


@pytest.mark.slow
def test_orders_are_compared_on_two_processes(tmp_path):
    """critical.py as a whole: bits compared, a row for each order, direction and load; and the same rows simulated."""
    out, predicted = tmp_path / "results.json", tmp_path / "predicted.json"
    program = [str(ROOT / "benchmarks" / "critical.py"), "--shapes", "64x32x4x2", "--tokens", "5", "--orders"]
    launch = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    small = ["--device", "cpu", "--dtype", "fp32", "--samples", "1", "--sustained-s", "0.001", "--json", str(out)]
    run_interpreted(*launch, *program, "local-first,critical-path", *small)
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 8 and all(0 < row["ms_min"] <= row["ms"] <= row["ms_max"] for row in rows)
    run_interpreted(*program, "stages,critical-path", "--simulate", "h200-node", "--measured", str(out),
                    "--json", str(predicted))  # fmt: skip
    content = json.loads(predicted.read_text())["rows"]
    found = {(row["direction"], row["order"]): row for row in content}
    assert len(content) == len(found) == 4 and all(row["predicted_ms"] > 0 for row in content)
    measured = {(r["direction"], r["order"]): r["ms"] for r in rows if r["load"] == "window"}
    assert found["fwd", "critical-path"]["measured_ms"] == measured["fwd", "critical-path"]
    assert found["fwd", "stages"]["measured_ms"] is None


def test_costs_of_tasks():
    """Between tasks of a program, whichever class they are of; of waits, the least tenth and the mean."""
    times = {"matrix 0": [(0, 10, 100), (350, 400, 450)], "vector 0": [(130, 140, 300)], "matrix 1": [(5, 9, 50)]}
    spans = [
        SimpleNamespace(worker=worker, op=worker[:6], claimed_ns=a, start_ns=b, end_ns=c)
        for worker, tasks in times.items()
        for a, b, c in tasks
    ]
    found = critical.task_costs(spans)
    assert found["tasks"] == 4 and found["between_ns"] == 40  # of 30 and 50
    assert found["ops"]["matrix"] == {"tasks": 3, "ready_ns": 4, "waits_ns": 21}
    assert critical.task_costs([])["between_ns"] is None


class Board:
    """A GPU whose counter moves every 0.1 s, and the clock."""

    def __init__(self, watts):
        self.seconds, self.watts = 0.0, watts

    def joules(self):
        return 1000 + self.watts * (int(self.seconds * 10 + 1e-9) / 10)

    def work(self):
        self.seconds += 0.007


def test_watts_between_steps_of_the_counter(monkeypatch):
    """Exact but for the time that passes between two looks; a counter that stands still is an error."""
    board = Board(300)
    monkeypatch.setattr(energy.time, "perf_counter", lambda: board.seconds)
    board.work()
    assert energy.Meter(board.joules).watts(board.work, 1.0) == pytest.approx(300, rel=0.01)
    with pytest.raises(SystemExit, match="stood still"):
        energy.Meter(lambda: 5.0).watts(board.work, 1.0)


class Sampled:
    """What cupti-python is asked for: two samples of counters, of all calls in between."""

    def __init__(self, device_index):
        self.samples = []

    def enable(self):
        pass

    def configure(self, *, metrics, sampling_interval):
        self.metrics, self.is_on = metrics, False

    def start(self):
        self.samples, self.is_on = [SimpleNamespace(metric_values=[0.0, float("nan"), 0.0, 0.0])], True

    def call(self):
        if self.is_on:
            values = [1e9, 75.0, 2e9, 5e8]
            self.samples.append(SimpleNamespace(metric_values=values[: len(self.metrics)]))

    def stop(self):
        self.is_on = False

    def decode(self, max_samples):
        assert len(self.samples) <= max_samples
        return self.samples


def test_l2_counters_are_per_call(monkeypatch):
    """Of sums over all samples; the first call is not counted; counters that stand still, or none, are an error."""
    module, device = SimpleNamespace(Collector=Sampled), SimpleNamespace(index=0)
    monkeypatch.setitem(sys.modules, "cupti", SimpleNamespace(pm_sampling=module))
    monkeypatch.setattr(energy.timing, "synchronize", lambda: None)
    monkeypatch.setattr(energy, "SAMPLED_NS", 1)
    counters = energy.Counters(device)
    call = counters.collector.call
    layer, workspace = SimpleNamespace(forward_backward=lambda case: call()), SimpleNamespace(close=lambda: None)
    products = SimpleNamespace(of={"down": (call, call)}, workspace=workspace)
    monkeypatch.setattr(energy, "Products", lambda *given: products)
    monkeypatch.setattr(energy, "layers", lambda *given: [("uniep", layer, None)])
    args = energy.options(["--seconds", "1e-9"])  # over before the first call
    shape = cases.parse_shape("qwen3-30b")
    found = {"l2_hit": 0.75, "l2_gb": 32.0, "dram_read_gb": 2.0, "dram_write_gb": 0.5}
    sides = ("down", "uniep"), ("down", "grouped_mm"), ("layer", "uniep")
    wanted = [{"shape": "qwen3-30b", "what": what, "side": side, **found} for what, side in sides]
    assert list(energy.l2_rows(shape, counters, args, device)) == wanted
    counters.collector.call = lambda: None
    products.of = {"down": (lambda: None,)}
    with pytest.raises(SystemExit, match="stood still during down, uniep"):
        list(energy.l2_rows(shape, counters, args, device))
    monkeypatch.setitem(sys.modules, "cupti", None)
    with pytest.raises(SystemExit, match="needs cupti-python"):
        energy.Counters(device)


@pytest.mark.parametrize(
    ("options", "given", "says"),
    [
        (energy.options, "--parts product", "--parts 'product' is unknown; use one or more of products, layer,"),
        (worth.options, "--peers nccl,deepep-nowait", "--peers deepep-nowait needs --deepep DIR"),
        (worth.options, "--peers liger-cute --deepep x", "--peers liger-cute needs --liger DIR"),
        (worth.options, "--strategies comet", "--strategies 'comet' is unknown; use one or more of serial-all-to-all,"),
        (worth.options, "--peers megablocks", "--peers 'megablocks' is unknown; use one or more of uniep"),
    ],
)  # fmt: skip
def test_what_a_benchmark_cannot_do_is_refused_beforehand(options, given, says, capsys):
    with pytest.raises(SystemExit) as ended:
        options(given.split())
    assert ended.value.code == 2 and says in capsys.readouterr().err


def rows_of(ms, shape="64x32x4x2", tokens=16):
    return [
        {"shape": shape, "tokens": tokens, "impl": impl, "ms": value, "direction": direction, "load": load}
        for impl, value in ms.items() for direction in ("fwd", "fwd_bwd") for load in ("window", "sustained")
    ]  # fmt: skip


def test_peers_that_failed_are_named():
    """Beside the best of the others."""
    args = worth.options(["--peers", "nccl,liger-cute", "--liger", "folder", "--device", "cpu", "--commit", "x"])
    found = [{"shape": "64x32x4x2", "tokens": 16, "changes": {}}]
    made = list(worth.compared(found, rows_of({"uniep": 2.0, "nccl": 5.0}), args))
    assert [(row["peer"], row["peer_ms"], row["left_out"]) for row in made] == [("nccl", 5.0, ["liger-cute"])] * 4


def test_each_shape_has_its_own_choice_and_what_is_timed_is_told_at_once(monkeypatch):
    """moe.py runs once; its rows are told while it runs; `uniep` is the default whatever tables there are."""
    given = "--device cpu --commit x --liger folder --iters 3 --sustained-s 0.03 --no-check"
    args = worth.options(given.split())
    searches = [
        {"shape": "64x32x4x2", "tokens": 16, "changes": {"chunk_tokens": 32, "tile_order": "natural"}},
        {"shape": "64x64x8x2", "tokens": 16, "changes": {}},
    ]
    told, tuned = [], "uniep@chunk_tokens=32+tile_order=natural"

    class Process:
        def __init__(self, command, env, **how):
            given = dict(itertools.pairwise(command))
            assert env["UNIEP_TUNE"] == "off" and "--no-check" in command
            assert (given["--shape"], given["--tokens"], given["--liger"]) == ("64x32x4x2,64x64x8x2", "16", "folder")
            assert 5 < float(given["--budget-s"]) <= 7.5
            assert (given["--iters"], given["--sustained-s"]) == ("3", "0.03")
            options = moe.options([*command[command.index("--shape") :]])
            assert options.points == {"64x32x4x2/16": [tuned], "64x64x8x2/16": ["uniep"]}
            self.file, self.waits = options.json, 0

        def wait(self, timeout):
            self.waits += 1
            rows = rows_of({"uniep": 2.0, tuned: 1.5})
            if self.waits > 2:
                rows += rows_of({"uniep": 4.0, tuned: 9.0}, "64x64x8x2")
            results.write(self.file, {"rows": rows})
            if self.waits < 3:
                raise subprocess.TimeoutExpired("moe.py", timeout)
            return 0

        def terminate(self):
            pass

    monkeypatch.setenv("UNIEP_TUNE", "cached")
    monkeypatch.setattr(worth.subprocess, "Popen", Process)
    end = time.monotonic() + 7.5
    worth.timed(searches, args, end, lambda rows: told.append(list(worth.compared(searches, rows, args))))
    assert [len(rows) for rows in told] == [4, 8], "only what is new"
    assert {(row["shape"], row["default"], row["tuned"]) for row in told[-1]} == {
        ("64x32x4x2", 2.0, 1.5), ("64x64x8x2", 4.0, 4.0),
    }  # fmt: skip


def test_only_what_was_searched_is_timed_and_only_with_time_left(monkeypatch, capsys):
    """The search of one of four pairs failed: two runs, whose rows are told together; what is missing is named."""
    args = worth.options(["--device", "cpu", "--commit", "x", "--load", "window", "--directions", "fwd"])
    pairs = [("64x32x4x2", 16), ("64x64x8x2", 16), ("64x64x8x2", 32)]
    searches = [{"shape": shape, "tokens": tokens, "changes": {}} for shape, tokens in pairs]
    runs, told = [], []

    def of_moe(shapes, tokens, of, args, budget_s):
        runs.append((shapes, tokens))
        rows = [row for pair in itertools.product(shapes, tokens) for row in rows_of({"uniep": 2.0}, *pair)]
        yield [row for row in rows if (row["load"], row["direction"]) == ("window", "fwd")]

    monkeypatch.setattr(worth, "of_moe", of_moe)
    worth.timed(searches, args, time.monotonic() + 9, told.append)
    assert runs == [(["64x32x4x2"], (16,)), (["64x64x8x2"], (16, 32))]
    assert [(row["shape"], row["tokens"]) for row in told[-1]] == pairs
    every = list(itertools.product(map(cases.parse_shape, ("64x32x4x2", "64x64x8x2")), (16, 32)))
    rows = list(worth.compared(searches, told[-1], args))
    of = {"searches": searches, "rows": rows}
    assert worth.left_out(every, of, args) == ["not timed, or not all of it, as printed above: 64x32x4x2 T=32"]
    assert "64x64x8x2 T=32" in worth.left_out(every, of | {"rows": rows[:2]}, args)[0], "its own time ended"
    args.only_search = True
    assert worth.left_out(every, of | {"rows": []}, args) == ["not searched, as printed above: 64x32x4x2 T=32"]
    assert worth.left_out(every[:1], of, args) == []
    runs.clear()
    worth.timed(searches, args, time.monotonic(), told.append)
    assert not runs and capsys.readouterr().out.count("raise --budget-s") == 2


def test_a_search_and_its_candidates_end_with_their_share_of_the_budget(monkeypatch, tmp_path):
    """So does an ablation.  Scores of all that was tried are kept; a table has them, and what was compared, unless
    nothing was tried."""
    args = worth.options(["--device", "cpu", "--search-s", "6", "--candidate-s", "60", "--ablate-s", "4"])
    args.tables, args.sampler, args.commit = tmp_path, "random", "abc"
    shape = cases.parse_shape("64x32x4x2")
    job = worth.job_of(shape, 64, args)
    case = worth.Case(shape, 64, job)
    usual, ranks, given = worth.default_schedule("cpu", job.cfg, 1), Answers(), {}
    ahead = Ahead(0)
    ranks.becomes = lambda job, timeout_s: None
    ranks.starts = 2  # nothing ends them
    tried = [searching.Tried({"chunk_tokens": 32}, "slow", score=1.5)]
    compared = searching.Compared(dataclasses.replace(usual, chunk_tokens=32), "too slow", [(100.0, 101.0)] * 15)

    def search(job, sampler, record, budget_s, **options):
        given.update(options, budget_s=budget_s)
        return searching.Result(usual, compared, "0", tried, 100.0, 1)

    monkeypatch.setattr(worth, "search", search)
    found = worth.searched(case, ranks, ahead, args, time.monotonic() + 3)
    key = worth.tables.Key.of(job.cfg, 1, "cpu", "cpu")
    entry = worth.tables.valid(tmp_path / key.file, "cpu")["entries"][key.place]
    assert entry["compared"] == found["compared"] and entry["commit"] == "abc"
    assert (found["compared"]["why"], found["compared"]["gain"]) == ("too slow", 0.9901)
    (tmp_path / key.file).unlink()
    tried.clear()
    assert not worth.searched(case, ranks, ahead, args, time.monotonic() + 3)["points"]
    assert not (tmp_path / key.file).exists()
    tried.append(searching.Tried({"chunk_tokens": 32}, "slow", score=1.5))
    ahead = Ahead(0)
    found = worth.searched(case, ranks, ahead, args, time.monotonic() + 3)
    assert 1 < given["budget_s"] <= 3 and 1 < given["candidate_s"] <= 3
    assert found["points"] == [{"changes": {"chunk_tokens": 32}, "status": "slow", "score": 1.5}]
    assert found["tried"] == {"slow": 1} and found["ablation"] and found["dropped"]
    assert given["compilers"] is ahead
    assert found["seconds"] == {"compiling": len(ahead.batches), "timing": pytest.approx(-len(ahead.batches), abs=0.5)}
    found = worth.searched(case, ranks, ahead, args, time.monotonic())
    assert given["budget_s"] == given["candidate_s"] == 0 and not found["ablation"]


class Ahead:
    """In place of Compilers, `batch` points together, in one second.  `dropped`: {Schedule: why}."""

    def __init__(self, batch, dropped=()):
        self.batch, self.dropped, self.seconds, self.batches, self.until = batch, dict(dropped), 0.0, [], []
        self.most = 2 * batch

    def ahead(self, ranks, schedules, candidate_s, until, finish):
        assert finish
        self.seconds += 1.0
        self.batches.append(list(schedules))
        self.until.append(until)
        return [self.dropped.get(schedule) for schedule in schedules]


class Answers:
    """In place of ranks: a call takes 100 us, with another `chunk_tokens` than 64 half as long again; fp32 columns of
    64 have other bits, and `overlap="serial"` ends the ranks once."""

    def __init__(self):
        self.alive, self.starts, self.schedule = True, 1, None

    def becomes(self, job, timeout_s):
        pass

    def ask(self, method, *args, timeout_s):
        if not self.alive:
            self.alive, self.starts = True, self.starts + 1
        if method == "prove":
            (self.schedule,) = args
            if self.schedule.overlap == "serial" and self.starts == 1:
                self.alive = False
                raise worth.DroppedError("fault", "as told")
            return ["other" if self.schedule.gate_up.columns == 64 else "same"]
        us = 150.0 if self.schedule.chunk_tokens != 64 else 100.0
        return [[(100.0, us)] * args[0]] if method == "time" else [None]


def test_points_are_timed_beside_the_default():
    """And the default itself; one that cannot run, or has other bits, says why."""
    args = argparse.Namespace(ep=1, device="cpu", candidate_s=9, pairs=3)
    job, ahead = worth.job_of(cases.parse_shape("64x32x4x2"), 64, args), Ahead(0)
    asked = ["chunk_tokens=32", "gate_up.columns=64", "overlap=mega"]
    again, slower, other, refused = points.timed(job, asked, Answers(), ahead, args)
    assert len(ahead.batches) == 1 and len(ahead.batches[0]) == 3
    assert again == {"point": "", "status": "timed", "window_default_us": 100.0, "window_ratio": 1.0,
                     "sustained_default_us": 100.0, "sustained_ratio": 1.0}  # fmt: skip
    assert (slower["point"], slower["window_ratio"], slower["sustained_ratio"]) == ("chunk_tokens=32", 1.5, 1.5)
    assert other == {"point": "gate_up.columns=64", "status": "other bits"}
    assert refused["point"] == "overlap=mega" and "knows only 'serial' and 'fused'" in refused["status"]
    usual = worth.default_schedule("hopper", job.cfg, 1)
    before = points.schedule_of("before", usual)
    assert before.gate_up == dataclasses.replace(Schedule().gate_up, group_rows=usual.gate_up.group_rows)
    assert before.weight_gradient == Schedule().weight_gradient


def test_an_ablation_switches_each_dimension_back_first(monkeypatch, capsys):
    args = worth.options(["--device", "cpu", "--ablate-s", "9"])
    job = worth.job_of(cases.parse_shape("64x32x4x2"), 64, args)
    best = dataclasses.replace(worth.default_schedule("cpu", job.cfg, 1), tile_order="natural", activation="separate")
    ranks = Answers()
    costs, dropped = worth.ablation(job, best, ranks, Ahead(0), args)
    assert costs["tile_order"]["local-first"] == costs["activation"]["fused"] == 1.0
    assert costs["gate_up.columns"] == {"128": 1.0}, "one with other bits has no cost"
    assert ranks.starts == 2 and "overlap" not in costs, "a fault ends only its own point"
    assert dropped["gate_up.columns"] == {"64": "other bits"} and dropped["overlap"] == {"serial": "fault: as told"}
    said = capsys.readouterr().out
    assert "dropped gate_up.columns=64: other bits\n" in said and "dropped overlap=serial: fault: as told\n" in said
    now, slow = [0.0], Answers()

    def slowly(method, *args, timeout_s):
        now[0] += 5.0 * (method == "time")
        return ask(method, *args, timeout_s=timeout_s)

    ask, slow.ask = slow.ask, slowly
    monkeypatch.setattr(worth.time, "monotonic", lambda: now[0])
    costs, _ = worth.ablation(job, best, slow, Ahead(0), args)
    assert costs.keys() == {"tile_order", "activation"}, "time for two"


@pytest.mark.slow
def test_worth_runs_and_its_table_and_picture_are_made(tmp_path, capsys):
    """The whole program on one CPU rank: two shapes, each with a search and an ablation, and moe.py."""
    out, name = tmp_path / "worth.json", "64x32x4x2"
    few = ["--search-s", "0.5", "--ablate-s", "0.5", "--iters", "1", "--sustained-s", "0.001", "--sampler", "random"]
    command = [str(ROOT / "benchmarks" / "worth.py"), "--device", "cpu", "--shapes", f"{name},64x32x8x2", *few]
    command += ["--tokens", "16", "--tables", str(tmp_path / "tables")]
    subprocess.run([sys.executable, *command, "--json", str(out)], check=True, timeout=150)
    content = json.loads(out.read_text())
    assert [of["shape"] for of in content["searches"]] == [name, "64x32x8x2"] and len(content["rows"]) == 8
    assert all(of["tried"] and of["ablation"] for of in content["searches"])
    assert all(row["default"] > 0 and row["tuned"] > 0 and row["strategy"] for row in content["rows"])
    for of in content["searches"]:
        entries = worth.tables.valid(tmp_path / "tables" / f"cpu-cpu-ep1-{of['shape']}.json", "cpu")["entries"]
        assert [len(entry["tried"]) for entry in entries.values()] == [sum(of["tried"].values())]
    table.main(["--worth", str(out)])
    shown = capsys.readouterr().out
    assert shown.count(f"| {name} | 16 |") == 5 and "**Forward + backward, sustained, 1x CPU" in shown
    plot.main(["worth", "--files", str(out), "--out", str(tmp_path / "worth.png")])
    assert (tmp_path / "worth.png").stat().st_size > 10_000


def test_points_are_compiled_together_before_they_are_timed():
    """All of a grid at once, of an ablation as many as can be; one that died there is not timed."""
    args = worth.options(["--device", "cpu", "--ablate-s", "9"])
    job = worth.job_of(cases.parse_shape("64x32x4x2"), 64, args)
    usual = worth.default_schedule("cpu", job.cfg, 1)
    every = [dataclasses.replace(usual, chunk_tokens=n) for n in (64, 32, 128, 16, 8)]
    for together, sizes in ((0, [2, 2, 1]), (5, [5])):
        ahead, ranks = Ahead(2, {every[2]: worth.DroppedError("fault", "died")}), Answers()
        beside = worth.Beside(ranks, ahead, usual, 60.0)
        found = list(beside.times(every, together=together))
        assert [len(batch) for batch in ahead.batches] == sizes
        assert [status for status, _ in found] == ["timed"] * 2 + ["fault: died"] + ["timed"] * 2
        assert [bool(pairs) for _, pairs in found] == [True, True, False, True, True] and ranks.starts == 1
    ahead = Ahead(3)
    costs, _ = worth.ablation(job, usual, Answers(), ahead, args)
    assert costs and len(ahead.batches) > 1 and max(map(len, ahead.batches)) == 3
    assert all(until <= time.monotonic() + 9 for until in ahead.until)


def test_no_point_nor_batch_begins_behind_the_end(monkeypatch):
    args = worth.options(["--device", "cpu"])
    job = worth.job_of(cases.parse_shape("64x32x4x2"), 64, args)
    usual, now, ahead = worth.default_schedule("cpu", job.cfg, 1), [0.0], Ahead(2)
    monkeypatch.setattr(worth.time, "monotonic", lambda: now[0])
    compile_it, ranks = ahead.ahead, Answers()

    def slowly(*args, **how):
        now[0] += 4.0
        return compile_it(*args, **how)

    ahead.ahead = slowly
    for until, count, batches in ((11.0, 4, 3), (7.0, 2, 2), (3.0, 0, 1)):
        now[0] = 0.0
        ahead.batches.clear()
        beside = worth.Beside(ranks, ahead, usual, 60.0)
        assert len(list(beside.times([usual] * 6, until))) == count and len(ahead.batches) == batches


@pytest.mark.parametrize("sampler", ["model", "optuna"])
def test_what_a_search_and_moe_begin_with_is_compiled_first(monkeypatch, sampler):
    """The default, backend nccl, the Schedule that others are compared with, strategies, the model's best points."""
    monkeypatch.setattr(worth.tables, "card_name", lambda device: "h200")
    args = worth.options(["--device", "cuda", "--ep", "2", "--sampler", sampler])
    shape = cases.SHAPES["qwen3-30b"]
    case = worth.Case(shape, 4096, worth.job_of(shape, 4096, args))
    made = case.sampler(args)
    (job, named), (nccl, of_nccl), (again, first) = case.first(lambda: made, ["deepep-like", "serial-all-to-all"])
    assert [*case.first(lambda: made, [])] == [(job, named[:2]), (again, first)], "moe.py launches nothing more"
    schedules = [*named, *first]
    assert (nccl.backend, nccl.cfg.max_rows, [s.overlap for s in of_nccl]) == ("nccl", None, ["serial"])
    assert again is job is case.job and job.cfg.max_rows
    usual = worth.default_schedule("hopper", job.cfg, 2)
    assert named[:2] == [usual, worth.serial(usual)] and len(set(named)) == len(named)
    first = [schedule for schedule in made.first if schedule != usual]
    assert set(first) < set(schedules) and len(first) >= 7
    assert sum(s.overlap == "serial" and s.transfer == "push" for s in schedules) >= 1
    assert [made.ask() for _ in made.first] == list(made.first), "and it begins with them"


def test_what_cannot_be_compiled_first_is_told(capsys):
    job = worth.job_of(cases.parse_shape("64x32x4x2"), 16, worth.options(["--device", "cpu"]))
    other, usual = dataclasses.replace(job, backend="nccl"), worth.default_schedule("cpu", job.cfg, 1)
    wrong, became = dataclasses.replace(usual, chunk_tokens=32), []
    ahead = Ahead(1, {wrong: worth.DroppedError("refused", "as told")})

    def becomes(job, timeout_s):
        became.append(job)
        if job is other and len(became) > 2:
            raise worth.DroppedError("out of memory", "as told")

    wanted = [(job, [wrong, usual]), (other, [usual])]
    worth.compile_first(wanted, SimpleNamespace(becomes=becomes), ahead, 60.0, 99.0)
    assert became == [job, other] and ahead.batches == [[wrong, usual], [usual]] and ahead.until == [99.0, 99.0]
    assert capsys.readouterr().out == f"cpu, {wrong.name}: not compiled first: refused: as told\n"
    worth.compile_first(wanted[1:], SimpleNamespace(becomes=becomes), ahead, 60.0, 99.0)
    assert len(ahead.batches) == 2
    assert capsys.readouterr().out == "nccl: not compiled first: out of memory: as told\n"


def test_committed_predictions_can_be_made_again():
    """Of a call on four ranks, measured before tiles went in waves; a later commit is predicted with them."""
    wanted = json.loads((results.RESULTS / "predicted.json").read_text())["rows"]
    (row,) = (r for r in predict.measured(["h200x4_layer"]) if r.key.endswith("qwen3-30b/8192/balanced/fwd/uniep"))
    machine, times = predict.load_machine("h200-node"), {}
    same = [r for r in wanted if all(r[key] == value for key, value in dataclasses.asdict(row).items())]
    assert [round(predict.predict(row, machine, times), 4)] == [r["predicted_ms"] for r in same]
    later = predict.predict(dataclasses.replace(row, commit="later"), machine, times)
    assert later != times["h200-node/4/qwen3-30b/8192/balanced/fwd/uniep/uniep-copy"] and len(times) == 2


def test_predictions_of_other_sources_or_machines_are_made_anew(tmp_path):
    path, made_by = tmp_path / "x.json", {"machines": {"h200-node": {"link_gbps": 1}}, "sources": predict.sources()}
    assert predict.kept(path, made_by) == {}
    path.write_text(json.dumps({**made_by, "times": {"a": 1.0}}))
    assert predict.kept(path, made_by) == {"a": 1.0}
    assert predict.kept(path, {**made_by, "sources": "others"}) == predict.kept(path, {**made_by, "machines": {}}) == {}
    path.write_text(json.dumps({"machines": made_by["machines"], "times": {"a": 1.0}}))
    assert predict.kept(path, made_by) == {}, "a file without a hash"


def test_the_hash_of_predictions_is_of_all_that_the_simulator_imports():
    named = {name for name in predict.SOURCES if (PACKAGE / name).is_file()}
    folders = tuple(f"{name}/" for name in predict.SOURCES if (PACKAGE / name).is_dir())
    left = {name for name in imported("uniep.sim") if name not in named and not name.startswith(folders)}
    assert left == {"errors.py"}


@pytest.mark.parametrize("ep", [1, 2])
def test_the_grid_of_gpus_is_small_and_has_the_default_first(ep):
    job = worth.job_of(cases.parse_shape("qwen3-30b"), 8192, argparse.Namespace(device="cuda", ep=ep))
    every = worth.grid(job)
    assert every[0] == worth.default_schedule("hopper", job.cfg, ep)
    assert 100 < len(set(every)) == len(every) <= 300


@pytest.mark.parametrize("of_model", [True, False])
def test_a_grid_is_judged_by_the_model_if_there_is_one(of_model):
    """Of twenty points three may be timed: the model's first three, of which the best takes 1.8 times the best of all;
    without a model there are no first ones."""
    points = [
        {"changes": {"down_sms": i}, "predicted_us": float(i) if of_model else None, "score": 2 - i / 10}
        for i in range(20)
    ]
    found = worth.judged([dict(row, score=max(row["score"], 1.0)) for row in points])
    assert found["timings_allowed"] == 3 and found["reached"] == (round(1 / 1.8, 4) if of_model else None)


def test_every_result_file_says_what_it_was_measured_with():
    """`of_run` or its own: card, versions, commit, command, date."""
    own = {"results.py", "train.py", "paired.py"}
    for path in (ROOT / "benchmarks").glob("*.py"):
        text = path.read_text()
        assert path.name in own or '"meta"' not in text or "of_run(" in text, path.name
        options = set(re.findall(r'add_argument\("--(json|commit)"', text)) if "of_run(" in text else set()
        assert not options or path.name in {"moe.py", "first.py"}, f"{path.name}: add_file_options has {options}"


@pytest.mark.slow
def test_sort_and_deepep_layer_interpreted():
    """`check_sort`, `check_deepep` and `check_alone`, below."""
    run_interpreted(__file__)


class OneRankBuffer:
    """DeepEP's Buffer as its documentation describes it, for one rank that owns every expert."""

    def get_dispatch_layout(self, ids_TK, num_experts):
        in_rank = (ids_TK >= 0).any(1, keepdim=True)
        return in_rank.sum(0), None, torch.bincount(ids_TK[ids_TK >= 0], minlength=num_experts), in_rank, None

    def dispatch(
        self, x_TD, handle=None, topk_idx=None, topk_weights=None, num_tokens_per_rank=None, is_token_in_rank=None,
        num_tokens_per_expert=None, num_worst_tokens=0, config=None,
    ):  # fmt: skip
        cached = handle is not None
        sent, worst = handle if cached else (is_token_in_rank[:, 0].nonzero().flatten(), num_worst_tokens)
        spare = max(worst - sent.numel(), 0)

        def received(rows, fill):
            return torch.cat([rows[sent], rows.new_full((spare, *rows.shape[1:]), fill)])

        x = received(x_TD, float("nan"))
        if cached:
            return x, None, None, None, None, None
        counts = [] if worst else num_tokens_per_expert.tolist()
        return x, received(topk_idx, -1), received(topk_weights, 0.0), counts, (sent, worst), None

    def combine(self, x_TD, handle, topk_weights=None, config=None):
        (sent, _), tokens = handle, self.tokens
        y = x_TD.new_zeros(tokens, x_TD.shape[1])
        y[sent] = x_TD[: sent.numel()]
        if topk_weights is None:
            return y, None, None
        weights = topk_weights.new_zeros(tokens, topk_weights.shape[1])
        weights[sent] = topk_weights[: sent.numel()]
        return y, weights, None


def check_deepep(wait):
    """Equal to the dense reference: unused slots, a token without experts, an idle expert, worst-case buffers."""
    shape = cases.Shape("small", 32, 48, 6, 3)
    weights = cases.make_weights(shape, 0, 1, torch.float32, torch.device("cpu"))
    case = cases.make_case(shape, 9, "zipf", 0, weights)
    case.ids_TK[case.ids_TK == 4] = -1
    case.ids_TK[2] = -1
    buffer = OneRankBuffer()
    buffer.tokens = 9
    check_layer(peers.DeepEpLayer(SimpleNamespace(buffer=buffer, ranks=2, tuned=lambda case: (None, None)), wait), case)


def check_alone():
    """The layer that exchanges nothing equals the dense reference."""
    shape = cases.Shape("small", 32, 48, 6, 3)
    weights = cases.make_weights(shape, 0, 1, torch.float32, torch.device("cpu"))
    check_layer(energy.GroupedMmLayer(), cases.make_case(shape, 9, "zipf", 0, weights))


def check_layer(layer, case):
    layer.prepare(case, backward=True)
    got = layer.forward_backward(case)

    leaves = [t.clone().requires_grad_() for t in (case.x_TD, case.weights_TK, case.w13_e2FD, case.w2_eDF)]
    y_TD = composition(leaves[0], case.ids_TK, *leaves[1:])
    wanted = (y_TD, *torch.autograd.grad(y_TD, leaves, case.dy_TD))
    for name, a, b in zip(moe.OUTPUTS, got, wanted, strict=True):
        assert moe.relative_error(a, b.detach()) < 1e-5, name


LIGER = {
    "__init__.py": """
import dataclasses
configured = []
@dataclasses.dataclass
class MoEConfig:
    max_tokens: int
    hidden_size: int
    num_experts: int
    top_k: int
    num_hosts: int
    gpus_per_host: int
    group: str
def configure(**given):
    configured.append(given)
""",
    "nvshmem.py": "resolve_team = lambda group, create: 7",
    "tvm_ffi.py": """
import torch
from uniep.reference import composition
kept = []
def moe_fused_fwd_bf16(x, ids, weights, gate, up, down, num_experts, top_k, team):
    assert not kept and ids.dtype == torch.int32 and weights.dtype == x.dtype and (top_k, team) == (ids.shape[1], 7)
    leaves = [t.detach().requires_grad_() for t in (x, weights, gate, up, down)]
    with torch.enable_grad():
        y = composition(leaves[0], ids.long(), leaves[1].float(), torch.cat(leaves[2:4], 1), leaves[4])
    kept.append((y, leaves))
    return y.detach(), "x", "y", "offsets", "slots", "tiles", 64
def moe_fused_bwd_bf16(dy, y, x, slots, tiles, offsets, ids, weights, gate, up, down, num_experts, top_k, team, rows):
    assert (y, x, slots, tiles, offsets, rows) == ("y", "x", "slots", "tiles", "offsets", 64)
    (of_y, leaves), = kept
    dx, dweights, *of_experts = torch.autograd.grad(of_y, leaves, dy)
    return dx, *of_experts, dweights
def moe_pop_fwd(team):
    kept.pop()
""",
}
"""What of liger-cute-kernels 0.8.5 a peer calls, for one rank: names, order of arguments and of results."""


def test_liger_layer(tmp_path, monkeypatch):
    """Equal to the dense reference; its memory, which has room for one forward, is free after each call."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "liger_cute_kernels").mkdir()
    for name, text in LIGER.items():
        (tmp_path / "liger_cute_kernels" / name).write_text(text)
    monkeypatch.setattr(peers.dist, "get_world_size", lambda group: 2)
    shapes = [cases.Shape("small", 32, 48, 6, 3), cases.Shape("large", 64, 24, 4, 2)]
    liger = peers.Liger(str(tmp_path), {"ep": "all", "alone": "one"}, torch.device("cpu"), 9, shapes)
    made = sys.modules["liger_cute_kernels"].configured
    assert [tuple(vars(given["moe"]).values()) for given in made] == [(9, 64, 6, 3, 1, 2, n) for n in ("ep", "alone")]
    assert made[0]["process_groups"] == {"ep": "all"}

    weights = cases.make_weights(shapes[0], 0, 1, torch.float32, torch.device("cpu"))
    case = cases.make_case(shapes[0], 9, "balanced", 0, weights)
    layer = peers.LigerLayer(liger, "all")
    layer.prepare(case, backward=True)
    y_TD, _ = layer.forward(case)
    got = layer.joined(layer.forward_backward(case))
    assert torch.equal(layer.joined((y_TD,))[0], got[0])
    leaves = [t.clone().requires_grad_() for t in (case.x_TD, case.weights_TK, *weights)]
    wanted = composition(leaves[0], case.ids_TK, *leaves[1:])
    for name, a, b in zip(moe.OUTPUTS, got, (wanted, *torch.autograd.grad(wanted, leaves, case.dy_TD)), strict=True):
        assert moe.relative_error(a, b.detach()) < 1e-5, name


def check_sort():
    """The sort is stable over blocks and skips unused slots."""
    ids_TK = torch.randint(-1, 5, (150, 3), generator=torch.Generator().manual_seed(0))
    ids_TK[ids_TK == 3] = 2  # an expert without rows
    row_TK, count_E, end_E = kernels.sort_by_expert(ids_TK, 5)
    flat = ids_TK.flatten()
    order = flat.argsort(stable=True)
    wanted = torch.full_like(flat, -1)
    wanted[order[(flat < 0).sum() :]] = torch.arange(int((flat >= 0).sum()))
    assert torch.equal(row_TK.flatten().long(), wanted)
    assert torch.equal(count_E.long(), torch.bincount(flat[flat >= 0], minlength=5))
    assert torch.equal(end_E.long(), count_E.cumsum(0))


def test_a_phase_that_comes_again_is_another_phase():
    """Two products that return rows have a time each; `layer.phases` is None again afterwards."""
    layer = SimpleNamespace(phases=None)
    layer.forward = lambda case: layer.phases.extend((name, moe.timing.HostEvent()) for name in ("a", "b", "a"))
    bench = SimpleNamespace(call=moe.Bench.call)
    assert set(moe.Bench.phases(bench, layer, None, "fwd")) == {"a", "b", "a 2"}
    assert layer.phases is None


def test_relative_error_sees_nan_and_works_in_pieces(monkeypatch):
    a, b = torch.randn(7, 5), torch.randn(7, 5)
    monkeypatch.setattr(moe, "PIECE", 8)
    assert moe.relative_error(a, b) == pytest.approx(float((a - b).norm() / b.norm()), rel=1e-5)
    a[3, 3] = float("nan")
    assert moe.relative_error(a, b) == float("inf")


# ------------------------------------------------------------------------------------------------- cases


def test_routing_is_distinct_per_token_and_zipf_is_skewed():
    shape = cases.parse_shape("64x32x16x4")
    assert (shape.hidden, shape.ffn, shape.num_experts, shape.top_k) == (64, 32, 16, 4)
    busiest = {}
    for routing in cases.ROUTINGS:
        ids_TK = cases.choose_experts(2000, shape, routing, torch.Generator().manual_seed(0))
        assert all(len(set(row)) == 4 for row in ids_TK.tolist())
        busiest[routing] = int(torch.bincount(ids_TK.flatten(), minlength=16).max())
    assert busiest["balanced"] < 600 and busiest["zipf"] > 1000  # of 500 on average


def test_tflop_counts_six_flops_per_weight_and_row():
    assert cases.SHAPES["qwen3-30b"].tflop(8192, "fwd") == pytest.approx(6 * 65536 * 2048 * 768 / 1e12)
    assert cases.SHAPES["qwen3-30b"].tflop(8192, "fwd_bwd") == pytest.approx(18 * 65536 * 2048 * 768 / 1e12)


def test_schedule_variants_name_fields():
    default = DEFAULT_SCHEDULES["hopper"]
    schedule = parse_schedule("overlap=serial+chunk_tokens=8+gate_up.columns=128", default)
    assert (schedule.overlap, schedule.chunk_tokens, schedule.gate_up.columns) == ("serial", 8, 128)
    same = {"overlap": default.overlap, "chunk_tokens": default.chunk_tokens, "gate_up": default.gate_up}
    assert dataclasses.replace(schedule, **same) == default, "nothing else has changed"
    for bad in ("colour=red", "gate_up.colour=3", "chunk_tokens"):
        with pytest.raises(ValueError, match="is not FIELD=VALUE"):
            parse_schedule(bad, default)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "gpt5"], "shape 'gpt5' is unknown; use qwen3-30b"),
        (["--impl", "uniep,megablocks"], "implementation 'megablocks' is unknown; use uniep"),
        (["--impl", "uniep@colour=red"], "'colour=red' is not FIELD=VALUE: Schedule has no field 'colour'"),
        (["--routing", "random"], "--routing 'random' is unknown; use balanced, zipf"),
        (["--load", "heavy"], "--load 'heavy' is unknown; use window, sustained"),
    ],
)
def test_bad_options_end_before_any_process_starts(arguments, message, capsys):
    with pytest.raises(SystemExit):
        moe.options(arguments)
    assert message in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- bits


def test_difference_is_of_bits():
    """-0.0 is not 0.0, a NaN equals itself; a NaN in the place of a number is the largest difference."""
    nan = float("nan")
    wanted = torch.tensor([0.0, 1.0, 2.0, nan, 3.0], dtype=torch.bfloat16)
    assert bits.difference(wanted.clone(), wanted) == (0, 5, 0.0)
    got = torch.tensor([-0.0, 1.5, 2.0, nan, 3.0], dtype=torch.bfloat16)
    assert bits.difference(got, wanted) == (2, 5, 0.5)
    assert bits.difference(got[1:].view(2, 2).T, wanted[1:].view(2, 2).T) == (1, 4, 0.5)
    got[4] = nan
    worst = bits.difference(got, wanted)
    both = bits.together([bits.Difference(1, 10, 4.0), worst, bits.Difference(0, 10, 0.0)])
    assert both[:2] == (4, 25) and both.largest != both.largest
    assert bits.together([bits.Difference(1, 10, 0.25), bits.Difference(2, 10, 0.5)]) == (3, 20, 0.5)


def test_table_of_bits():
    same = dict.fromkeys(bits.OUTPUTS, bits.Difference(0, 4096, 0.0))
    other = {"impl": "nccl", "compared": "3 repeats", **same, "dW13": bits.Difference(1234, 4096, 0.00123)}
    lines = bits.table([{"impl": "uniep", "compared": "EP 1 against EP 2", **same}, other]).splitlines()
    assert lines[0] == "| layer | compared | y | dx | dW13 | dW2 |"
    assert lines[2] == "| uniep | EP 1 against EP 2 | 0 | 0 | 0 | 0 |"
    assert lines[3] == "| nccl | 3 repeats | 0 | 0 | 1,234 of 4,096 (1.2e-03) | 0 |"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--impl", "uniep,megablocks"], "implementation 'megablocks' is unknown; use uniep"),
        (["--repeats", "0"], "--repeats is 0; it must be at least 1"),
        (["--shape", "gpt5"], "shape 'gpt5' is unknown"),
    ],
)
def test_bad_options_of_bits(arguments, message, capsys):
    with pytest.raises(SystemExit):
        bits.options(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_bits_of_layers_on_two_processes(tmp_path):
    """The whole program: uniep has no differences, a composition of PyTorch's has some; what is missing is left out."""
    out = tmp_path / "bits.json"
    program = [str(ROOT / "benchmarks" / "bits.py"), "--device", "cpu", "--dtype", "fp32", "--json", str(out)]
    small = ["--shape", "64x32x4x2", "--tokens", "24", "--repeats", "2", "--impl", "uniep,uniep-nccl,torch,nccl,deepep"]
    launch = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    run_interpreted(*launch, *program, *small)
    found = {(row["impl"], row["compared"]): row for row in json.loads(out.read_text())["rows"]}
    compared = "2 repeats", "EP 1 against EP 2", "uniep, serial"
    assert set(found) == {(impl, what) for impl in ("uniep", "uniep-nccl", "torch", "nccl") for what in compared}
    for what in compared:
        for impl in ("uniep", "uniep-nccl"):
            assert all(found[impl, what][name][0] == 0 for name in bits.OUTPUTS), (impl, what)
    assert found["uniep", "2 repeats"]["y"][1] == 2 * 2 * 24 * 64, "of all ranks and repeats"
    assert found["uniep", "uniep, serial"]["dW13"][1] == 4 * 64 * 64
    for impl in ("torch", "nccl"):
        row = found[impl, "uniep, serial"]
        assert any(row[name][0] for name in bits.OUTPUTS) and all(row[name][2] < 1e-4 for name in bits.OUTPUTS)


# ------------------------------------------------------------------------------------------------- results


@pytest.fixture
def result_file(tmp_path):
    rows = []
    times = {"uniep": 1.0, "uniep-compute": 0.8, "nccl": 2.5, "deepep": 1.5, "deepep-nowait": 1.2, "peer-compute": 1.1}
    for shape, scale in (("qwen3-30b", 1.0), ("mixtral-8x7b", 8.0)):
        for direction, factor in (("fwd", 1.0), ("fwd_bwd", 3.0)):
            key = {"shape": shape, "tokens": 8192, "routing": "balanced", "load": "window", "direction": direction}
            for impl, ms in times.items():
                ms *= scale * factor
                rows.append({**key, "impl": impl, "ms": ms, "ms_min": ms, "ms_max": ms, "tflops": 1.0})
    meta = {"card": "NVIDIA H200", "gpus": 2, "ep": 2, "torch": "2.11", "triton": "3.6", "commit": "abc"}
    path = tmp_path / "h200x2.json"
    path.write_text(json.dumps({"meta": {**meta, "command": "", "date": "2026-11-27 12:00:00"}, "rows": rows}))
    return path


def test_speedup_is_against_the_best_peer(result_file):
    timings = results.load([result_file])
    assert len(timings) == 4 and timings[0].machine == "2x H200"
    assert results.best_peer(timings[0].ms) == "deepep-nowait"
    assert timings[0].speedup == pytest.approx(1.2)
    assert "=> 1.200x of deepep-nowait, 1.250 of own compute" in moe.describe(
        {"shape": "s", "tokens": 1, "routing": "balanced", "direction": "fwd", "load": "window"},
        [{"impl": impl, "ms": ms} for impl, ms in timings[0].ms.items()],
    )


def test_a_short_table_has_both_loads_in_a_row(result_file):
    document = json.loads(result_file.read_text())
    document["rows"] += [{**row, "load": "sustained", "ms": 2 * row["ms"]} for row in document["rows"][:8]]
    result_file.write_text(json.dumps(document))
    text = table.short(results.load([result_file]))
    assert "**2x H200, 8192 tokens per GPU, ms: DeepEP → uniep** (commit abc, 2026-11-27" in text
    assert "| qwen3-30b | 1.20 → 1.00, **1.20x** | 2.40 → 2.00, **1.20x** | 3.60 → 3.00, **1.20x** |" in text


def test_table_is_written_between_the_marks_and_again(result_file):
    text = f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n"
    for _ in range(2):
        text = table.insert(text, table.tables(results.load([result_file])))
    assert text.startswith("before\n") and text.endswith(f"{table.END}\nafter\n") and "old" not in text
    assert text.count("| qwen3-30b | 8192 | balanced | 2.500 | 1.500 | *1.200* | 1.000 | **1.20x** | 1.25 | abc |") == 1
    assert text.count("**Forward + backward, 2x H200, window**") == 1
    assert "2026-11-27, PyTorch 2.11, Triton 3.6." in text
    with pytest.raises(SystemExit, match="needs the two lines"):
        table.insert("no marks", "")


def test_a_table_leaves_out_what_was_measured_again(result_file):
    old = results.load([result_file])
    new = [dataclasses.replace(t, ms=t.ms | {"uniep": 0.5}, meta=old[0].meta | {"date": "2026-11-28"}) for t in old[:2]]
    few = [dataclasses.replace(t, ms={"uniep": 0.4}, meta=old[0].meta | {"date": "2026-11-29"}) for t in old[2:]]
    for timings in (old + new + few, few + new + old):
        text = table.tables(timings)
        lines = [line for line in text.splitlines() if line.startswith("| qwen3-30b")]
        assert len(lines) == 2 and all("| 0.500 |" in line for line in lines)
        assert text.count("| mixtral-8x7b") == 4  # the later one has no peers
        assert "\n2026-11-27, 2026-11-28, 2026-11-29, PyTorch 2.11, Triton 3.6.\n" in text


@pytest.mark.parametrize("page", table.PAGES)
def test_pages_have_the_tables_of_the_committed_files(page):
    assert (ROOT / page).read_text() == table.page_text(page), "python benchmarks/table.py --pages"


def test_pages_have_the_speedups_of_the_committed_files():
    shown = {file for _, files in table.PAGES.values() for file in files}
    readme = " ".join((ROOT / "README.md").read_text().split())
    forward, both = (table.span(direction, shown) for direction in ("fwd", "fwd_bwd"))
    assert f"forward {forward}, forward + backward {both} as fast as DeepEP's pipeline" in readme
    best = {results.best_peer(t.ms) for t in results.load(results.RESULTS / f"{f}.json" for f in shown)}
    assert best == {"deepep", "deepep-nowait"}
    page = " ".join((ROOT / "docs" / "from" / "deepep.md").read_text().split())
    both = table.span("fwd_bwd", ["h200x2_floors_2"], loads=("window",))
    assert f"8192 tokens per GPU {both} as fast as DeepEP's pipeline (forward + backward" in page


def test_table_of_products(tmp_path, capsys):
    path = tmp_path / "products.json"
    of = {"uniep_ms": 1.0, "grouped_mm_ms": 1.2, "uniep_sustained_ms": 2.0, "grouped_mm_sustained_ms": 1.9}
    rows = [{"shape": s, "product": p, **of} for s in ("one", "two") for p in ("a @ W2", "dO @ W2")]
    path.write_text(json.dumps({"meta": {}, "products": rows}))
    table.main(["--products", str(path)])
    window, sustained = capsys.readouterr().out.split("**sustained**")
    assert "| shape | a @ W2 | dO @ W2 |" in window
    assert "| two | 1.000, 1.20x | 1.000, 1.20x |" in window
    assert "| one | 2.000, 0.95x | 2.000, 0.95x |" in sustained


def test_picture_is_drawn(result_file, tmp_path):
    out = tmp_path / "speedup.png"
    plot.main(["speedup", "--files", str(result_file), "--out", str(out)])
    assert out.read_bytes().startswith(b"\x89PNG") and out.stat().st_size > 20_000
    with pytest.raises(SystemExit, match="no file has uniep and a peer"):
        plot.main(["speedup", "--files", str(result_file), "--out", str(out), "--tokens", "7"])
    plot.main(["prediction", "--out", str(out)])
    plot.main(["memory", "--out", str(out)])


@pytest.mark.parametrize("writes", [False, True])
def test_bench_sums_up_what_it_has_timed_itself(monkeypatch, tmp_path, writes):
    """Not what an earlier run has left in the file of --json."""
    from uniep.cli.main import app

    file = tmp_path / "results.json"
    row = {"shape": "small", "tokens": 1, "routing": "balanced", "direction": "fwd", "load": "window", "impl": "uniep"}

    def interrupted(*of_torchrun):
        if writes:
            results.write(file, {"rows": [{**row, "ms": 2.0}]})
        raise KeyboardInterrupt

    monkeypatch.setattr("uniep.cli.bench.torchrun", interrupted)
    results.write(file, {"rows": [{**row, "ms": 1.0}]})
    made = CliRunner().invoke(app, ["bench", "--device", "cpu", "--dtype", "fp32", "--json", str(file)])
    assert made.exit_code == 130 and "uniep 1.000" not in made.output
    assert ("For an issue" in made.output) == ("uniep 2.000" in made.output) == writes


def test_command_passes_options_on(monkeypatch):
    from torch.distributed import run

    from uniep.cli.main import app

    seen, harness = [], ROOT / "benchmarks" / "moe.py"
    monkeypatch.setattr(run, "main", seen.append)
    monkeypatch.delenv("RANK", raising=False)
    done = CliRunner().invoke(app, ["bench", "--ranks", "2", "--device=cpu", "--shapes", "qwen3-30b", "--phases"])
    assert done.exit_code == 0, done.output
    assert "--nproc-per-node=2" in seen[0]
    passed = seen[0][seen[0].index(str(harness)) :]
    assert passed[:-1] == [str(harness), "--device=cpu", "--shapes", "qwen3-30b", "--phases", "--json"]


def test_command_of_an_installed_package_finds_the_clone(monkeypatch, tmp_path):
    """pip install '.[cli]' without -e: the package lies in site-packages, far from benchmarks/."""
    from uniep.cli import bench
    from uniep.cli.main import app

    monkeypatch.setattr(bench, "OWN_CLONE", tmp_path)
    monkeypatch.chdir(ROOT / "docs")
    done = CliRunner().invoke(app, ["bench", "--rnks", "2"])
    assert f"{ROOT / 'benchmarks' / 'moe.py'} times the installed uniep" in done.output, done.output
    assert done.exit_code == 2 and "no option --rnks" in done.output
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["bench"])
    told = f"{tmp_path} is in none; run it there, or install the clone by pip install -e '.[cli]'"
    assert done.exit_code == 2 and told in done.output, done.output


if __name__ == "__main__":
    check_sort()
    check_deepep(wait=True)
    check_deepep(wait=False)
    check_alone()


def test_groups_by_name():
    assert parse_groups("uniep@chunk_tokens=8", 2) is None
    assert [parse_groups(name, 4) for name in ("uniep-groups", "uniep-groups8", "uniep-groups@sum_x=1")] == [4, 8, 4]
    with pytest.raises(ValueError, match="'uniep-groupsx'"):
        parse_groups("uniep-groupsx", 4)


# ------------------------------------------------------------------------------------------------- ping_pong


@pytest.mark.parametrize(
    ("ends", "doing"), [("time.sleep(60)", "second"), ("sys.exit(3)", "second"), ("sys.exit(0)", "")]
)
def test_a_variant_that_hangs_or_fails_is_named_and_its_rows_stay(ends, doing):
    lines = [{"begin": "first"}, {"variant": "first", "ms": 1.5}, {"begin": "second"}]
    program = f"import sys, time\nfor line in {[json.dumps(line) for line in lines]}: print(line)\n{ends}"
    rows, started = [], time.monotonic()
    command = [sys.executable, "-u", "-c", program]
    assert ping_pong.watch(command, 0.5, started + 50, rows.append) == doing
    assert rows == [lines[1]] and time.monotonic() - started < 40


def test_ping_pong_ends_in_time():
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    started = time.monotonic()
    assert ping_pong.watch(command, 50, started + 0.2, lambda row: None) == "set-up"
    assert time.monotonic() - started < 40


@pytest.mark.slow
def test_ping_pong_compiles_for_hopper_without_spills():
    variants = "pp64 s4 h2,pp128 s4 ahead h8 b2"
    script = [str(ROOT / "benchmarks" / "ping_pong.py"), "--offline", "--shapes", "qwen3-30b", "--variants", variants]
    done = subprocess.run([sys.executable, *script], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("spills 0") == 2

"""The space, the model, tables, named strategies and explanations.  (Searches: test_tuner_search.py.)"""

import dataclasses
import errno
import importlib.metadata
import importlib.util
import json
import logging
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from sources import PACKAGE, imported
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from typer.testing import CliRunner

import uniep
from uniep.backends import registry
from uniep.cli.main import app
from uniep.errors import ConfigError
from uniep.schedule import DIMENSION, FEW_ROWS, Schedule, Tile, default_schedule, parse_schedule
from uniep.shapes import SHAPES
from uniep.sim import Problem, load_machine
from uniep.stages import stages as program
from uniep.trials import calibrate
from uniep.tuner import choose, space, strategies, tables, timing
from uniep.tuner.explain import explain
from uniep.tuner.model import CONSTANTS, Load, card_text, cards, checked, load_card, predict, uncalibrated
from uniep.way import resolve

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CFG = uniep.MoEConfig(hidden=2048, ffn=768, num_experts=128, top_k=8, max_tokens_per_rank=8192, max_rows=131072)
SMALL = uniep.MoEConfig(hidden=32, ffn=16, num_experts=4, top_k=2, max_tokens_per_rank=64, dtype=torch.float32)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Of the user's tables; the package has none here (test_shipped_tables.py reads those that it has)."""
    monkeypatch.setenv("UNIEP_TUNE_DIR", str(tmp_path))
    monkeypatch.setattr(tables, "shipped", lambda: tmp_path / "package")
    monkeypatch.delenv("UNIEP_TUNE", raising=False)
    return tmp_path


@pytest.fixture(scope="module")
def benchmark():
    """benchmarks/model.py."""
    sys.path.insert(0, str(BENCHMARKS))  # it shares modules with others of that folder
    spec = importlib.util.spec_from_file_location("benchmark_of_the_model", BENCHMARKS / "model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# --- space ---


@pytest.mark.parametrize(("backend", "least"), [("cpu", 1000), ("nccl", 4), ("hopper", 100_000)])
def test_points_are_distinct_and_run(backend, least):
    made = space.points(backend, CFG, 2)
    assert len(made) >= least
    names = sorted(made.columns)
    coded = torch.stack([made.columns[name] for name in names], 1)
    few = coded[:: max(1, len(made) // 20_000)]
    assert len(torch.unique(few, dim=0)) == len(few)
    for index in range(0, len(made), max(1, len(made) // 150)):
        assert space.refusals(made.schedule(index), CFG, 2, backend) == []


@pytest.mark.parametrize("backend", ["cpu", "nccl", "hopper"])
@pytest.mark.parametrize("tokens", [64, 1024, 8192])
def test_the_first_point_is_the_default(backend, tokens):
    for ep_size in (1, 4):
        cfg = dataclasses.replace(CFG, max_tokens_per_rank=tokens)
        assert space.points(backend, cfg, ep_size).schedule(0) == default_schedule(backend, cfg, ep_size)


@pytest.mark.parametrize("tokens", [64, 1024, 8192])
def test_a_point_is_done_with_its_tokens(tokens):
    """Whatever thresholds the default has: one kernel for both directions only where the point says so."""
    cfg = dataclasses.replace(CFG, max_tokens_per_rank=tokens)
    made, usual = space.points("hopper", cfg, 4), default_schedule("hopper", cfg, 4)
    names = [d.name for d in space.dimensions("hopper", cfg, 4)]
    for index in range(0, len(made), len(made) // 50):
        schedule = made.schedule(index)
        way = resolve(cfg, 4, tokens, schedule)
        assert way.mega == (schedule.overlap == "mega")
        assert (way.down_sms > 0) == (schedule.overlap == "pipelined")
        assert way.down_wgrad_beside == (schedule.down_wgrad == "beside" and not (way.mega or way.gates))
        assert way.gradient_beside == (schedule.activation_gradient == "beside" and not (way.mega or way.gates))
        values, default = ({n: space.get(s, n) for n in names} for s in (schedule, usual))
        assert space.point(values, "hopper", cfg, 4) == (usual if values == default else schedule)
    assert made.schedule(0) == usual
    beside = space.point({"down_wgrad": "beside"}, "hopper", cfg, 2)
    assert beside.pipelined_from == min(tokens, space.PIPELINED_FROM), "calls of fewer tokens run as by default"


def test_what_is_switched_off_has_one_value():
    made = space.points("hopper", CFG, 2)
    listed, late = made.is_in("transfer", "push", "pull"), made.is_in("tile_order", "critical-path")
    pushed = listed & ~made.is_in("overlap", "serial")
    assert bool(late.any()) and made.is_in("overlap", "mega")[late].all()
    assert made.is_in("weight_gradient_order", "last")[late].all()
    assert made.is_in("send_order", "token")[~listed].all() and not made.is_in("send_order", "token").all()
    assert len(torch.unique(made.column("push_programs")[~pushed])) == 1
    assert len(torch.unique(made.column("push_programs")[pushed])) > 1
    assert len(torch.unique(made.column("down_sms")[~made.is_in("overlap", "pipelined")])) == 1
    staged, behind = made.is_in("overlap", "fused", "pipelined"), made.is_in("down_wgrad", "after")
    assert behind[~staged].all() and not behind[staged].all()


@pytest.mark.parametrize("backend", ["cpu", "hopper"])
def test_what_is_of_peers_has_one_value_without_peers(backend):
    alone, two = (space.points(backend, CFG, ep_size) for ep_size in (1, 2))
    assert len(alone) < len(two) / 2
    assert all(len(torch.unique(alone.column(name))) == 1 for name in space.OF_PEERS)
    assert two.is_in("tile_order", "natural").any() and not alone.is_in("tile_order", "natural").any()


def test_columns_are_those_of_the_schedules():
    made = space.points("hopper", CFG, 2)
    chosen = [made.schedule(i) for i in range(0, len(made), len(made) // 7)]
    again = space.Points.of(chosen)
    assert [again.schedule(i) for i in range(len(chosen))] == chosen


def test_more_points_than_the_limit_are_drawn_alike_each_time():
    a, b = (space.points("hopper", CFG, 2, limit=500) for _ in range(2))
    assert len(a) == 500
    assert a.schedule(0) == space.points("hopper", CFG, 2).schedule(0)
    assert all(torch.equal(a.columns[k], b.columns[k]) for k in a.columns)


def test_what_is_searched_is_declared():
    for searched in space.SEARCHED:
        for backend, values in searched.values.items():
            decided = [{searched.name: value, **searched.others(value)} for value in values]
            assert all(of.keys() == {searched.name, *searched.decides} for of in decided)
            for name in decided[0]:
                assert {of[name] for of in decided} <= set(DIMENSION[name].domain), name
                assert backend in DIMENSION[name].backends or "hopper, mega" in DIMENSION[name].backends
        before = {of.name for of in space.SEARCHED[: space.SEARCHED.index(searched)]}
        for needs in (*searched.needs, *searched.only.values()):
            assert set(needs) <= before, searched.name
            for needed, allowed in needs.items():
                assert set(allowed) <= set(DIMENSION[needed].domain)


def way_of(made, index, ep_size):
    return resolve(CFG, ep_size, CFG.max_tokens_per_rank, made.schedule(index))


@pytest.mark.parametrize("ep_size", [2, 4, 8])
def test_each_number_of_waves_is_another_order_of_tiles(ep_size):
    """0 is the model's number, so that number has no value of its own; where no copy is awaited there is one value."""
    made = space.points("hopper", CFG, ep_size)
    waves = made.column("arrival_waves")
    assert made.is_in("transfer", "copy")[waves > 0].all() and made.is_in("operand", "gathered")[waves > 0].all()
    assert made.is_in("overlap", "fused", "pipelined")[waves > 0].all()
    first = {int(v): int((waves == v).nonzero()[0]) for v in waves.unique()}
    assert len(first) > 1
    like = {n: made.columns[n] == made.columns[n][first[max(first)]] for n in made.columns if n != "arrival_waves"}
    alike = torch.stack(list(like.values())).all(0).nonzero().flatten().tolist()
    assert {int(waves[i]) for i in alike} == set(first)
    found = sorted(way_of(made, i, ep_size).waves for i in alike)
    assert found == sorted({min(n, ep_size) for n in (1, 2, 4, 8)})


def test_passes_are_searched_where_one_runs():
    """Serial, or a second dispatch that is pushed or pulled."""
    made = space.points("hopper", CFG, 2, limit=200_000, keep=("preactivation",))
    few, again = made.column("pass_programs") == 2, made.is_in("received", "again")
    serial, copied, mega = (
        made.is_in("overlap", "serial"),
        made.is_in("transfer", "copy"),
        made.is_in("overlap", "mega"),
    )
    assert (serial | (again & ~copied & ~mega))[few].all()
    assert bool((few & serial & ~again).any()) and bool((few & ~serial).any())
    for index in (few & ~serial).nonzero().flatten().tolist()[:5]:
        stages = {s.name: s for s in program(CFG, way_of(made, index, 2), "backward")}
        assert "push_tokens_kernel" in stages["dispatch_again"].kernels


# --- model ---


def test_dw2_beside_gate_up_grad_hides_its_wire():
    """The more where results take long on it; what cannot run so costs what it did."""

    def backward(ep_size, **fields):
        usual = dataclasses.replace(default_schedule("hopper", CFG, ep_size), **fields)
        made = space.Points.of([dataclasses.replace(usual, down_wgrad=value) for value in ("after", "beside")])
        return predict(Load.uniform(CFG, ep_size), made, load_card("h200")).bwd.tolist()

    gains = [1 - beside / after for after, beside in map(backward, (1, 2, 8))]
    assert gains == sorted(gains) and gains[0] < 0.02 < gains[2]
    for fields in ({"overlap": "serial"}, {"overlap": "mega"}, {"pipelined_from": CFG.max_tokens_per_rank + 1}):
        assert len(set(backward(2, **fields))) == 1


def test_1e5_points_in_150_ms_of_one_core(benchmark):
    torch.set_num_threads(1)
    assert benchmark.speed(100_000) <= 0.150


def test_errors_on_held_out_calls_are_within_the_limits(benchmark):
    rows = list(benchmark.measured())
    out = benchmark.held_out(rows)
    assert 0.35 < sum(row.call in out for row in rows) / len(rows) < 0.65
    held = [row for row in rows if row.call in out and row.card == "h200"]
    shown = benchmark.predicted(held, load_card("h200"), out)
    many, few = ([r for r in shown if (r["tokens"] > benchmark.FEW) == large] for large in (True, False))
    of_many = benchmark.errors(many)
    assert of_many["median"] <= 0.05 and of_many["p95"] <= 0.12
    assert benchmark.errors(few)["median"] <= 0.10
    picks = benchmark.picks(shown)
    assert picks["worst"] <= 0.036 and picks["calls"] - picks["within 3 %"] <= 1  # docs/tuner.md says which
    committed = json.loads((BENCHMARKS / "results" / "model.json").read_text())
    assert committed["summary"]["h200, held out, T > 2048"] == of_many
    if tables := list(benchmark.TABLES.glob("h200-*.json")):  # of one GPU: what was timed first in a search
        found = benchmark.of_tables(load_card("h200"))
        assert found["calls"] >= len(tables) and found["median"] <= 0.03 and found["first, median"] <= 1.01
        assert found == pytest.approx(committed["tables"])


def test_the_model_knows_what_helps():
    """Less on the wire, more multiprocessors and larger tiles take less; more tokens more."""
    card, load = load_card("h200"), Load.uniform(CFG, 2)
    usual = default_schedule("hopper", CFG, 2)

    def us(schedule=usual, load=load, card=card):
        return float(predict(load, space.Points.of([schedule]), card).both)

    assert us(dataclasses.replace(usual, overlap="serial")) > us()
    assert us(dataclasses.replace(usual, free_sms=24)) > us()
    assert us(dataclasses.replace(usual, gate_up=Tile(rows=64, columns=128), down=Tile(rows=64, columns=128))) > us()
    assert us(load=dataclasses.replace(load, wire=1e-6)) < us()
    assert us(load=Load.uniform(dataclasses.replace(CFG, max_tokens_per_rank=16384), 2)) > 1.5 * us()
    slow = dataclasses.replace(card, machine=card.machine.replaced({"link_gbps": 20}))
    assert us(card=slow) > 1.5 * us()
    assert us(dataclasses.replace(usual, weight_gradient=FEW_ROWS[64])) > 1.05 * us(), "two stages, many rows"
    parts = dataclasses.replace(usual, overlap="pipelined", gate_up_parts=2)
    assert us(dataclasses.replace(parts, down_sms=16)) > 1.03 * us(dataclasses.replace(parts, down_sms=0))


def predicted(ep_size, **constants):
    """Of the default, with h recomputed, with x received again, and with both: the forwards, and the backwards."""
    usual, changes = default_schedule("hopper", CFG, ep_size), ({}, RECOMPUTED, AGAIN, RECOMPUTED | AGAIN)
    card = load_card("h200").replaced({"boost_ms": 1e6, **constants})
    every = space.Points.of([dataclasses.replace(usual, mega_to=0, **change) for change in changes])
    made = predict(Load.uniform(CFG, ep_size), every, card)
    return made.fwd, made.bwd


RECOMPUTED, AGAIN = {"preactivation": "recomputed"}, {"received": "again"}


def test_the_model_charges_what_recomputing_stores():
    """gate_up stores 2F values of h and F of act; act alone if h is recomputed, and then h alone; one launch more."""
    slow, fast = (predicted(1, store_gbps=gbps) for gbps in (1.0, 1e5))
    fwd, bwd = (a - b for a, b in zip(slow, fast, strict=True))
    h_us = float(fwd[0] - fwd[1])
    assert float(fwd[1]) == pytest.approx(0, abs=1e-6 * h_us)
    assert float(bwd[1] - bwd[0]) == pytest.approx(h_us / 2, rel=1e-4)
    more = predicted(1, launch_us=100.0)[1] - predicted(1, launch_us=0.0)[1]
    assert float(more[1] - more[0]) == pytest.approx(100.0)


def test_the_model_hides_no_second_dispatch_before_recomputed_h():
    """Copies of 8192 tokens to one peer; without recomputed h they come beside rows that return and gradients."""
    card = load_card("h200")
    link = card.machine.link_gbps * card.constants["link_efficiency"] * 1e3
    _, bwd = predicted(2)
    assert default_schedule("hopper", CFG, 2).transfer == "copy"
    assert float(bwd[3] - bwd[1]) == pytest.approx(8192 * CFG.hidden * 2 / link, rel=1e-3)
    assert float(bwd[2] - bwd[0]) < 0.7 * float(bwd[3] - bwd[1])


def test_a_load_is_that_of_its_ids():
    problem = Problem(SHAPES["qwen3-30b"], 2, 1024, "uniform")
    exact, even = Load.of_ids(problem.cfg, [problem.ids(r) for r in range(2)]), Load.uniform(problem.cfg, 2)
    for name in ("rows", "away", "sent", "received"):
        assert getattr(even, name) == pytest.approx(getattr(exact, name), rel=0.05), name
    assert even.tiles == pytest.approx(exact.tiles, rel=0.1)
    assert Load.of_ids(problem.cfg, [problem.ids(0)]).away == 0


def test_a_fit_finds_the_constants_that_made_the_times():
    truth = uncalibrated(load_machine("h200-node")).replaced({"matrix_tflops": 600.0, "plan_us": 150.0})
    loads = [Load.uniform(dataclasses.replace(CFG, max_tokens_per_rank=t), 2) for t in (512, 2048, 4096, 8192)]
    usual = default_schedule("hopper", CFG, 2)
    timed = [
        calibrate.Timed(load, schedule, direction, 1.0)
        for load in loads
        for schedule in (usual, dataclasses.replace(usual, overlap="serial"))
        for direction in ("fwd", "fwd_bwd")
    ]
    us = calibrate.Calls(timed).predicted(truth).tolist()
    timed = [dataclasses.replace(t, us=value) for t, value in zip(timed, us, strict=True)]
    fitted = calibrate.fit(uncalibrated(load_machine("h200-node")), timed, ["matrix_tflops", "plan_us"])
    assert fitted.constants["matrix_tflops"] == pytest.approx(600, rel=0.02)
    assert fitted.constants["plan_us"] == pytest.approx(150, rel=0.05)


def test_card_files(tmp_path):
    assert {"h100", "h200"} <= set(cards())
    made = load_card("h200").replaced({"plan_us": 77.0})
    (tmp_path / "mine.toml").write_text(card_text(made, "mine"))
    assert load_card(str(tmp_path / "mine.toml")).constants["plan_us"] == 77.0
    with pytest.raises(ConfigError, match=r"plan_us is -1; it must be a number of 0 to 100000 us"):
        checked("x", {"machine": "h200-node", "plan_us": -1})
    with pytest.raises(ConfigError, match="nonsense is not a constant"):
        checked("x", {"machine": "h200-node", "nonsense": 1})
    with pytest.raises(ConfigError, match="machine is None"):
        checked("x", {})
    with pytest.raises(ConfigError, match=r"b300.*h100, h200"):
        load_card("b300")
    assert all(c.low <= load_card("h200").constants[k] <= c.high for k, c in CONSTANTS.items())


# --- named strategies ---


def test_named_strategies_are_points_or_say_what_is_missing():
    for name, strategy in strategies.STRATEGIES.items():
        assert strategy.points or strategy.missing
        for backend in ("cpu", "nccl", "hopper"):
            if backend in strategy.points:
                assert space.refusals(strategies.point(name, backend, CFG, 2), CFG, 2, backend) == []
            else:
                with pytest.raises(ConfigError, match=f"not available on backend '{backend}'"):
                    strategies.point(name, backend, CFG, 2)
    with pytest.raises(ConfigError, match="serial-all-to-all, all-gather"):
        strategies.point("nonsense", "cpu", CFG, 2)


def test_bench_takes_named_strategies():
    made, left_out = strategies.implementations("all", "hopper")
    assert {"uniep-nccl", "uniep"} <= set(made) and len(made) == len(set(made)) == 7
    for impl in made:
        if "@" in impl:
            assert parse_schedule(impl.partition("@")[2], default_schedule("hopper", CFG, 2))
    assert left_out == [] and strategies.implementations("all", "cpu")[1] == ["all-gather: not on cpu"]
    assert strategies.implementations("uniep,taskflow", "cpu")[0][0] == "uniep"
    with pytest.raises(ConfigError, match="'x' is unknown; use one of serial-all-to-all"):
        strategies.implementations("x", "cpu")


# --- tables ---


def stored(cfg=SMALL, ep_size=1, changes=None, backend="cpu", card="cpu", into=None, **more):
    """The path of a table with the default and these changes."""
    key = tables.Key.of(cfg, ep_size, backend, card)
    path, usual = (into or tables.folder()) / key.file, tables.fields(default_schedule(backend, cfg, ep_size))
    choice = usual | ({"chunk_tokens": 32} if changes is None else changes)
    tables.store(path, key, {"schedule": choice, "default": usual, "commit": "abc", **more})
    return path


def found(cfg=SMALL, ep_size=1):
    return tables.find(cfg, ep_size, "cpu", "cpu")


def test_a_table_serves_its_card_shape_dtype_and_ranks_alone():
    assert found().schedule is None
    path = stored()
    assert found().schedule == dataclasses.replace(Schedule(), chunk_tokens=32)
    assert found().file == path
    for other in ({"hidden": 64}, {"dtype": torch.float16}, {"top_k": 1}, {"combine_groups": 4}):
        assert found(dataclasses.replace(SMALL, **other)).schedule is None, other
    assert found(ep_size=2).schedule is None
    assert tables.find(SMALL, 1, "hopper", "h200").schedule is None


def test_tokens_are_in_buckets_and_the_nearest_serves():
    assert [tables.bucket(t) for t in (1, 16, 17, 64, 65, 4096, 4097)] == [16, 16, 32, 64, 128, 4096, 8192]

    def of(tokens):
        return found(dataclasses.replace(SMALL, max_tokens_per_rank=tokens)).schedule

    stored(dataclasses.replace(SMALL, max_tokens_per_rank=64), changes={"chunk_tokens": 32})
    stored(dataclasses.replace(SMALL, max_tokens_per_rank=1024), changes={"chunk_tokens": 128})
    stored(dataclasses.replace(SMALL, max_tokens_per_rank=4096), changes={"chunk_tokens": 32})
    assert of(2000).chunk_tokens == 32, "the larger of two that are as near"
    assert [of(t) and of(t).chunk_tokens for t in (16, 20, 33, 64, 100, 200, 400, 600, 1000, 9000)] == [
        None, 32, 32, 32, 32, None, 128, 128, 128, None,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda text: text[: len(text) // 2], "cannot be read"),
        (lambda text: "[]", "not a table of format 3"),
        (lambda text: text.replace('"card": "cpu"', '"card": "h200"'), "is of card 'h200'"),
        (lambda text: text.replace(tables.kernels("cpu"), "0123456789abcdef"), "other kernels"),
        (lambda text: text.replace('"chunk_tokens"', '"chunk_wishes": 1, "chunk_tokens"'), "a field 'chunk_wishes'"),
        (lambda text: text.replace('"chunk_tokens": 32', '"overlap": "sometimes"'), "overlap is 'sometimes'"),
        (lambda text: text.replace('"chunk_tokens": 32', '"gate_up.columns": 7'), "gate_up.columns is 7"),
        (lambda text: text.replace('"tried": [', '"tried": [7, '), "not a table of format 3"),
        (lambda text: text.replace('"score": 0.9', '"score": "good"'), "not a table of format 3"),
        (lambda text: text.replace('"changes": {"peer_order"', '"changes": {"peer_wishes"'), "a field 'peer_wishes'"),
        (lambda text: text.replace('"why": ""', '"why": 1'), "not a table of format 3"),
        (lambda text: text.replace(', "score": 0.9', ""), "not a table of format 3"),
        (lambda text: text.replace("[[9.0, 8.0]]", "[[9.0]]"), "not a table of format 3"),
        (lambda text: text.replace('"usual_us": 9.0', '"usual_us": "9"'), "not a table of format 3"),
        (lambda text: text.replace('{"chunk_tokens": 32}, "pairs', '{"chunk_hopes": 1}, "pairs'), "a field 'chunk_h"),
    ],
)
def test_a_table_that_cannot_serve_is_named_and_the_default_serves(spoil, says, caplog):
    tried = [{"changes": {"peer_order": "rotated"}, "status": "timed", "score": 0.9}]
    compared = {"changes": {"chunk_tokens": 32}, "why": "", "pairs_us": [[9.0, 8.0]]}
    path = stored(tried=tried, compared=compared, usual_us=9.0)
    assert found().schedule.chunk_tokens == 32
    path.write_text(spoil(path.read_text()))
    with caplog.at_level(logging.WARNING, "uniep"):
        assert found().schedule is None and found().file is None
    assert len(caplog.records) == 2 and "remove it, or tune again" in caplog.text
    assert says in caplog.text
    with uniep.Workspace(SMALL) as workspace:
        assert workspace.backend.schedule == Schedule()


def test_a_table_of_the_package_that_cannot_serve_warns_nobody(caplog):
    """Whoever uses the package cannot mend it; `uniep doctor` has the reason in one line, and a remedy."""
    path = stored(into=tables.shipped())
    assert found().file == path
    assert choose.report(CPU) == [(str(path), "serves 32x16x4x2-float32 at 64 tokens; the default stays but for "
                                   "32x16x4x2-float32-64")]  # fmt: skip
    other = stored(dataclasses.replace(SMALL, hidden=64), changes={}, into=tables.shipped())
    ((named, what),) = choose.report(CPU)
    assert named == f"{path} and 1 more" and what.startswith(
        "serves 32x16x4x2-float32, 64x16x4x2-float32 at 64 tokens;"
    )
    for file in (path, other):
        file.write_text(file.read_text().replace(tables.kernels("cpu"), "others"))
    assert found().schedule is None and "other kernels" in found().why and not caplog.records
    ((named, why),) = choose.report(CPU)
    assert named == f"{path} and 1 more" and why.startswith("does not serve: ")
    assert why.endswith("defaults serve, or what uniep tune finds on this machine") and "remove" not in why


def test_a_default_that_stays_serves_as_that_of_its_call(caplog):
    """Not that of the size that was timed.  What the package found is not taken where it was found to be slower here;
    and nobody is warned of a table without which the default runs as well."""
    timed, other = (dataclasses.replace(CFG, max_tokens_per_rank=tokens) for tokens in (1024, 512))
    assert default_schedule("hopper", timed, 2) != default_schedule("hopper", other, 2)
    shipped = stored(timed, 2, {"gate_up.columns": 128}, "hopper", "h200", into=tables.shipped())
    assert tables.find(other, 2, "hopper", "h200").file == shipped
    tried = [{"changes": {"gate_up.columns": 128}, "status": "slow", "score": 1.2}]
    path = stored(timed, 2, {}, "hopper", "h200", tried=tried)
    made = tables.find(other, 2, "hopper", "h200")
    assert (made.schedule, made.file) == (None, path) and made.why.startswith("the default stays at 1024 tokens")
    document = explain(other, 2, "hopper", load_card("h200"), "qwen3-30b")
    assert document["by"] == "table" and document["choice"]["changes"] == {}
    shipped.unlink()
    path.write_text(path.read_text().replace(tables.kernels("hopper"), "others"))
    assert tables.find(other, 2, "hopper", "h200").file is None and not caplog.records


def test_a_full_disk_is_told_and_leaves_the_table(monkeypatch):
    path = stored()
    before = path.read_text()

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=r"No space left.*UNIEP_TUNE_DIR"):
        stored(changes={"chunk_tokens": 128})
    assert path.read_text() == before
    assert sorted(p.name for p in path.parent.iterdir()) == sorted([path.name, f"{path.name}.lock"])


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_the_umask_says_who_may_read_a_table(umask, mode):
    before = os.umask(umask)
    try:
        assert stored().stat().st_mode & 0o777 == mode
    finally:
        os.umask(before)


def test_two_processes_that_tune_at_once(monkeypatch):
    path = stored()
    monkeypatch.setattr(tables, "PATIENCE_S", 0.1)
    with tables.held(path), pytest.raises(ConfigError, match="another process"):
        stored()
    stored()


def no_user(number):
    raise KeyError(f"getpwuid(): uid not found: {number}")


def no_right(path):
    raise PermissionError(13, "Permission denied", str(path))


@pytest.mark.parametrize("lacks", ["a home", "the right to read it"])
def test_a_user_without_a_folder(monkeypatch, lacks):
    """As in a container that runs as another user: a Workspace needs no tables, and who wants to tune is told."""
    for name in ("UNIEP_TUNE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    if lacks == "a home":
        monkeypatch.setattr("pwd.getpwuid", no_user)
        with pytest.raises(ConfigError, match="set UNIEP_TUNE_DIR, or HOME"):
            tables.folder()
    else:
        monkeypatch.setenv("HOME", "/root")
        monkeypatch.setattr(tables.Path, "is_dir", no_right)
    assert tables.own_folder() is None and tables.card_file("h200") == "h200"
    uniep.Workspace(SMALL, device="cpu").close()


def test_a_folder_that_cannot_be_made(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("UNIEP_TUNE_DIR", str(tmp_path / "file" / "x"))
    assert found().schedule is None
    with pytest.raises(ConfigError, match="UNIEP_TUNE_DIR"):
        stored()


def test_a_table_of_another_triton_is_named(monkeypatch, caplog):
    """Only backends whose kernels Triton compiles."""
    stored(CFG, 2, {"gate_up.columns": 128}, "hopper", "h200")
    stored()
    version = importlib.metadata.version
    assert tables.find(CFG, 2, "hopper", "h200").schedule is not None
    monkeypatch.setattr(tables.metadata, "version", lambda name: "0.1" if name == "triton" else version(name))
    assert tables.find(CFG, 2, "hopper", "h200").schedule is None
    assert tables.find(CFG, 2, "hopper", "h200", here=False).schedule is not None
    document = explain(CFG, 2, "hopper", load_card("h200"), "qwen3-30b")
    assert document["by"] == "model" and "another Triton" in document["serves"]
    said = CliRunner().invoke(app, ["explain"]).output
    if not torch.cuda.is_available():
        assert "what a tuned table has" in said and f"Triton {version('triton')}" in said, "there it may be that one"
    assert f"was timed with another Triton ({version('triton')}, here 0.1); remove it, or tune again" in caplog.text
    assert found().schedule is not None


ALIKE = {
    "backends/__init__.py", "backends/base.py", "backends/protocol.py", "config.py", "errors.py",
    "limits.py", "meeting.py", "memory.py", "row_operator.py", "version.py", "waiting.py", "weights.py",
}  # fmt: skip
"""What backends import and every Schedule pays alike."""


@pytest.mark.parametrize("backend", registry.NAMES)
def test_the_hash_is_of_all_sources_that_a_backend_imports(backend):
    needed = imported(registry._CLASSES[backend][0]) - ALIKE
    assert {"way.py", "schedule.py"} <= needed <= set(tables.sources(backend))


@pytest.mark.parametrize(
    ("backend", "name"),
    [("hopper", "stages.py"), ("hopper", "taskflow/stretches.py"), ("hopper", "launch/walk.c"),
     ("cpu", "backends/pinned.py"), ("nccl", "backends/pinned.py")],
)  # fmt: skip
def test_other_sources_are_another_hash(monkeypatch, tmp_path, backend, name):
    shutil.copytree(PACKAGE, tmp_path / "uniep", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(tables.resources, "files", lambda package: tmp_path / package)
    usual = tables.kernels.__wrapped__(backend)
    assert usual == tables.kernels(backend)
    with (tmp_path / "uniep" / name).open("a") as file:
        file.write("\n")
    assert tables.kernels.__wrapped__(backend) != usual


def test_a_choice_serves_other_sizes_as_it_was_timed(monkeypatch):
    """At 512 tokens the default is another one; a table has all fields, those of points that `online` times, too."""
    timed, other = (dataclasses.replace(CFG, max_tokens_per_rank=tokens) for tokens in (1024, 512))
    usual = default_schedule("hopper", timed, 2)
    assert space.differences(usual, default_schedule("hopper", other, 2))
    changes = {"gate_up.columns": 128}, {"down.columns": 128}
    tried = [{"changes": of, "status": "timed", "us": 1000.0, "score": 0.9} for of in changes]
    stored(timed, 2, changes[0], "hopper", "h200", tried=tried)
    monkeypatch.setattr(tables, "card_name", lambda device: "h200")
    proposed = choose.proposals(other, 2, "hopper", CPU, "online")
    assert proposed == [space.replaced(usual, of) for of in changes]
    measured = explain(other, 2, "hopper", load_card("h200"), "qwen3-30b")["measured"]
    assert [of["changes"] for of in measured] == [tables.as_changes(of, other, 2, "hopper") for of in proposed]


# --- what a Workspace runs with ---


def schedule_of(**options):
    with uniep.Workspace(SMALL, device="cpu", **options) as workspace:
        return workspace.backend.schedule


def test_off_cached_and_an_own_schedule(monkeypatch):
    stored()
    tuned = dataclasses.replace(Schedule(), chunk_tokens=32)
    assert schedule_of() == tuned
    assert schedule_of(tune="cached") == tuned
    assert schedule_of(tune="off") == Schedule()
    assert schedule_of(schedule=Schedule(chunk_tokens=128)) == Schedule(chunk_tokens=128)
    monkeypatch.setenv("UNIEP_TUNE", "off")
    assert schedule_of() == Schedule()
    assert schedule_of(tune="cached") == tuned
    monkeypatch.setenv("UNIEP_TUNE", "perhaps")
    with pytest.raises(ConfigError, match="UNIEP_TUNE is 'perhaps'; it must be off, cached or online"):
        schedule_of()


def test_online_times_only_what_was_proved_here():
    tried = [
        {"changes": {"chunk_tokens": 32}, "status": "timed", "score": 0.90},
        {"changes": {"chunk_tokens": 128}, "status": "timed", "score": 0.91},
        {"changes": {"vector_workers": 2}, "status": "timed", "score": 1.2},
        {"changes": {"matrix_workers": 2}, "status": "other bits", "score": None},
        {"changes": {"activation": "separate"}, "status": "slow", "score": 0.9},
    ]
    stored(tried=tried)
    proposed = choose.proposals(SMALL, 1, "cpu", CPU, "online")
    assert [s.chunk_tokens for s in proposed] == [32, 128]
    assert choose.proposals(SMALL, 1, "cpu", CPU, "cached") == proposed[:1]
    before = torch.random.get_rng_state()
    assert schedule_of(tune="online") in proposed
    assert torch.equal(before, torch.random.get_rng_state())


def test_online_times_what_was_as_fast_as_a_default_that_stays():
    tried = [
        {"changes": {"chunk_tokens": n}, "status": "timed", "score": score} for n, score in ((32, 0.99), (128, 1.2))
    ]
    stored(changes={}, tried=tried)
    proposed = choose.proposals(SMALL, 1, "cpu", CPU, "online")
    assert [s.chunk_tokens for s in proposed] == [64, 32]
    assert choose.proposals(SMALL, 1, "cpu", CPU, "cached") == []
    assert schedule_of(tune="cached") == Schedule() and schedule_of(tune="online") in proposed


@pytest.mark.parametrize("other", [{"activation": "relu2"}, {"bias": True}])
def test_online_times_layers_without_gates_and_with_biases(other):
    """A table serves them, too: its key has sizes alone."""
    stored(tried=[{"changes": {"chunk_tokens": n}, "status": "timed", "score": 0.9} for n in (32, 128)])
    with uniep.Workspace(dataclasses.replace(SMALL, **other), device="cpu", tune="online") as workspace:
        assert workspace.backend.schedule.chunk_tokens in (32, 128)


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an operator returns."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.nbytes = max([self.nbytes, *(of.nbytes for of in tree_flatten(out)[0] if isinstance(of, torch.Tensor))])
        return out


def test_inputs_of_trials_are_drawn_without_a_copy_in_fp32():
    cfg = dataclasses.replace(SMALL, dtype=torch.bfloat16, hidden=256)
    with Largest() as largest:
        given = timing.drawn(cfg, 1, 0, 16, 0, CPU)
    assert largest.nbytes == given.w13.nbytes
    assert given.w13.float().std() == pytest.approx(cfg.hidden**-0.5, rel=0.05)
    assert given.w2.float().std() == pytest.approx(cfg.ffn**-0.5, rel=0.05)


def test_40_calls_of_any_tokens_tune_nothing(monkeypatch):
    """73: after the Workspace is made no call looks for a table, and none changes the Schedule."""
    stored()
    torch.manual_seed(0)
    w13, w2 = torch.randn(4, 32, 32), torch.randn(4, 32, 16)
    with uniep.Workspace(SMALL, device="cpu") as workspace:
        schedule, looked = workspace.backend.schedule, []
        for name in ("find", "read", "kernels"):
            monkeypatch.setattr(tables, name, lambda *args, name=name: looked.append(name))
        for tokens in torch.randint(1, 65, (40,)).tolist():
            ids = torch.rand(tokens, 4).topk(2, 1).indices
            uniep.moe(torch.randn(tokens, 32), ids, torch.rand(tokens, 2), w13, w2, workspace=workspace)
        assert workspace.backend.schedule is schedule
    assert looked == []


def test_the_default_is_no_slower_than_what_it_hides(benchmark):
    """76: of every committed call with both, the default takes at most 1.05 times what the serial Schedule does."""
    of_call = {}
    for row in benchmark.window_rows(("h200x2_layer", "h200x2_tokens", "h100x2_layer"), benchmark.Call):
        if row.impl in ("uniep", "uniep-serial"):
            of_call.setdefault((row.file, *row.call, row.routing, row.direction), {})[row.impl] = row.ms
    both = [ms for ms in of_call.values() if len(ms) == 2]
    assert len(both) >= 20
    assert max(ms["uniep"] / ms["uniep-serial"] for ms in both) <= 1.05


# --- explain ---


def test_explain_says_choice_runner_up_and_what_matters():
    cfg = dataclasses.replace(CFG, max_tokens_per_rank=8192)
    files = [BENCHMARKS / "results" / "h200x2_layer.json"]
    document = explain(cfg, 2, "hopper", load_card("h200"), "qwen3-30b", files)
    json.dumps(document)
    assert document["by"] == "model" and document["serves"].startswith("the default")
    assert document["choice"]["predicted_us"] <= document["default"]["predicted_us"]
    assert document["default"]["measured_us"] == pytest.approx(3472.0)
    assert document["runner_up"]["predicted_us"] > document["choice"]["predicted_us"]
    assert document["runner_up"]["differs_from_choice"] and "us" in document["runner_up"]["why"]
    dearest = [max(of["costs"].values()) for of in document["dimensions"].values()]
    assert dearest == sorted(dearest, reverse=True)
    assert document["matters_most"] == next(iter(document["dimensions"]))
    assert document["strategies"]["uniep"] == document["default"]["predicted_us"]


def test_explain_takes_the_tables_choice(tmp_path):
    changes = {"gate_up.columns": 128}
    tried = [{"changes": changes, "status": "timed", "us": 1234.5, "score": 0.9}]
    path = stored(CFG, 2, changes, "hopper", "h200", tried=tried)
    document = explain(CFG, 2, "hopper", load_card("h200"), "qwen3-30b")
    assert document["by"] == "table" and str(path) in document["serves"]
    assert document["choice"]["changes"] == changes and document["measured_us"] == 1234.5
    runner_up = document["runner_up"]
    assert (runner_up["by"], runner_up["changes"]) == ("table", {}), "the default"
    assert runner_up["why"] == "it took 1.111 of the choice's time"


LOST = {"changes": {"down.columns": 128}, "why": "1.004x as fast, with a spread of 0.005"}


@pytest.mark.parametrize(
    ("more", "us", "changes", "why"),
    [
        ({}, (3400.0, 3390.0), {"gate_up.columns": 128}, "it took 0.995 of the choice's time, too little to be timed"),
        ({"compared": LOST | {"pairs_us": [[3500.0, 3480.0], [3520.0, 3490.0], [3510.0, 3500.0]]}}, (3510.0, 3490.0),
         LOST["changes"], "timed again beside the choice, it was 1.004x as fast, with a spread of 0.005"),
        ({"tried": [{"changes": {"down.columns": 128}, "status": "fault"}]}, (3400.0, None), None, "us "),
    ],
)  # fmt: skip
def test_explain_has_times_and_the_runner_up_of_a_search_that_kept_the_default(more, us, changes, why):
    """The point that was timed again, else the fastest, else the model's; times of calls of as many tokens alone."""
    tried = [
        {"changes": {"gate_up.columns": 128}, "status": "timed", "us": 3390.0, "score": 0.995},
        {"changes": {"down.columns": 128}, "status": "slow", "us": 3600.0, "score": 1.06},
    ]
    stored(CFG, 2, {}, "hopper", "h200", **{"tried": tried, "usual_us": 3400.0, **more})
    document = explain(CFG, 2, "hopper", load_card("h200"), "qwen3-30b")
    runner_up = document["runner_up"]
    assert document["by"] == "table" and document["choice"]["changes"] == {} and document["measured_us"] == us[0]
    assert changes is None or runner_up["changes"] == changes
    assert runner_up["measured_us"] == us[1] and why in runner_up["why"]
    assert runner_up["by"] == ("model" if changes is None else "table")
    near = explain(dataclasses.replace(CFG, max_tokens_per_rank=5000), 2, "hopper", load_card("h200"), "qwen3-30b")
    assert near["by"] == "table" and near["measured_us"] is None and near["measured"][0]["tokens"] == 8192


def test_result_files_that_are_none(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"x\.json is not a result file"):
        explain(CFG, 2, "hopper", load_card("h200"), "qwen3-30b", [tmp_path / "x.json"])


def test_uniep_explain_prints_and_writes_all_of_it(tmp_path):
    options = ["--ep", "4", "--json", str(tmp_path / "x.json"), "--picture", str(tmp_path / "x.png")]
    done = CliRunner().invoke(app, ["explain", *options])
    assert done.exit_code == 0, done.output
    for word in ("choice", "runner up", "Matters most", "Named strategies"):
        assert word in done.output
    assert json.loads((tmp_path / "x.json").read_text())["points"] >= 100_000
    assert (tmp_path / "x.png").stat().st_size > 10_000
    document = json.loads((tmp_path / "x.json").read_text())
    assert document["lora"] is None and document["calls"][0]["value"] == "in stages"
    refused = CliRunner().invoke(app, ["explain", "--card", "b300"])
    assert refused.exit_code == 2 and "h100, h200" in " ".join(refused.output.split())


def test_uniep_explain_knows_low_rank_factors(tmp_path):
    """Which run in stages, whatever the number of tokens."""
    found = []
    for options in ([], ["--lora", "8"]):
        call = ["explain", "--tokens", "256", "--json", str(tmp_path / "x.json"), *options]
        done = CliRunner().invoke(app, call)
        assert done.exit_code == 0, done.output
        found.append(next(c for c in json.loads((tmp_path / "x.json").read_text())["calls"] if c["what"] == "kernels"))
    assert [(of["value"], of["rule"]) for of in found] == [("in stages", "overlap"), ("in stages", "lora")]
    assert "How calls with low-rank factors run there" in done.output and "one kernel has no low-rank" in done.output


def test_the_page_has_every_dimension_strategy_and_today_s_figures():
    page = (BENCHMARKS.parent / "docs" / "tuner.md").read_text()
    assert all(f"`{name}`" in page for searched in space.SEARCHED for name in (searched.name, *searched.decides))
    assert all(f"`{name}`" in page for name in strategies.STRATEGIES)
    searched = {name.rpartition(".")[2] for of in space.SEARCHED for name in (of.name, *of.decides)} - set(
        space.OF_MEMORY
    )
    left = {name.rpartition(".")[2] for name in DIMENSION} - searched - {"chunk_experts"}  # of chunk-major
    told = page[page.index("Not searched:") : page.index("**Refused before")]
    assert all(f"`{name}`" in told or name.endswith("_from") for name in left), left
    summary = json.loads((BENCHMARKS / "results" / "model.json").read_text())["summary"]
    for of in summary.values():
        figures = f"| {of['rows']} | {of['median']:.1%} | {of['p95']:.1%}".replace("%", " %")
        assert figures in page or of["rows"] == 30, figures
    for backend in ("hopper", "cpu"):
        assert f"{len(space.points(backend, CFG, 2)):,}" in page

"""Searches: with ranks that answer as told, and with real child processes that fault."""

import dataclasses
import errno
import functools
import json
import logging
import math
import os
import re
import signal
import sqlite3
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import uniep
from uniep.cli.main import app
from uniep.errors import ConfigError
from uniep.schedule import Schedule, default_schedule
from uniep.trials import calibrate, fleet
from uniep.trials import search as searching
from uniep.trials.fleet import DroppedError, Fleet
from uniep.trials.search import Listed, Optuna, Record, different, in_order, sampler_here, sampler_of, search
from uniep.trials.trial import Job, Trial, slowest
from uniep.tuner import tables
from uniep.tuner.model import Load, card_text, load_card, predict
from uniep.tuner.space import Points, dimensions, get, points
from uniep.tuner.timing import in_turn

CFG = uniep.MoEConfig(hidden=32, ffn=16, num_experts=4, top_k=2, max_tokens_per_rank=64, dtype=torch.float32)
JOB = Job(CFG, 1, "cpu", "cpu", 64)
SPACE = points("cpu", CFG, 1)


class Told:
    """In place of a Fleet: a call takes 100 us times `factor`, back to back times `sustained`, too; `fault`: how a
    candidate ends; `bits`: its hash."""

    def __init__(
        self, factor=lambda s: 1.0, fault=lambda s: None, bits=lambda s: "same", ranks=2, sustained=lambda s: 1.0
    ):
        self.factor, self.fault, self.bits, self.ranks, self.sustained = factor, fault, bits, ranks, sustained
        self.starts, self.alive, self.asked = 1, True, []
        self.incumbent = self.candidate = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        raise AssertionError("ranks that were given stay")

    def end(self):
        self.alive = False

    def ask(self, method, *args, timeout_s):
        if not self.alive:
            self.starts, self.alive, self.incumbent = self.starts + 1, True, None
        self.asked.append(method)
        if method == "prove":
            (self.candidate,) = args
            if reason := self.fault(self.candidate):
                self.alive = reason == "refused"
                raise DroppedError(reason, "as told")
            return [self.bits(self.candidate)] * self.ranks
        if method == "take":
            self.incumbent, self.candidate = self.candidate, None
            return [None] * self.ranks
        if method == "time":
            pair = 100 * self.factor(self.incumbent), 100 * self.factor(self.candidate)
            if len(args) > 1:
                pair = pair[0] * self.sustained(self.incumbent), pair[1] * self.sustained(self.candidate)
            return [[pair] * args[0], [(pair[0] * 0.9, pair[1] * 0.9)] * args[0]]
        return [tables.digest(args[0])] * self.ranks


def listed(*changes):
    """A sampler of these points."""
    made = [dataclasses.replace(Schedule(), **change) for change in changes]

    class Some:
        def ask(self):
            return made.pop(0) if made else None

        def tell(self, schedule, score):
            pass

    return Some()


@pytest.fixture
def record(tmp_path):
    made = Record(tmp_path / "x.sqlite", {"kernels": "1"})
    yield made
    made.close()


def run(record, ranks, *changes, **options):
    return search(JOB, listed(*changes), record, 30.0, fleet=ranks, **options)


def gain(result):
    """Of the fastest point over the default, in fresh ranks."""
    return searching.gain_of(result.compared.pairs)[0]


def chunk(factors):
    return lambda s: factors.get(s.chunk_tokens, 1.0)


def test_the_fastest_is_kept_if_it_wins_again_in_fresh_ranks(record):
    ranks = Told(chunk({32: 0.9, 128: 0.8, 96: 1.5}))
    result = run(record, ranks, *({"chunk_tokens": n} for n in (32, 96, 128)))
    assert result.choice.chunk_tokens == 128
    assert gain(result) == pytest.approx(1 / 0.8) and result.compared.schedule == result.choice
    assert ranks.starts == 2
    assert [t.status for t in result.tried] == ["timed", "slow", "timed"]
    assert [t.score for t in result.tried] == pytest.approx([0.9, 1.5 * 0.9 / 0.9, 0.8])
    assert [t.us for t in result.tried] == pytest.approx([90, 150, 80])  # the slowest rank's
    assert result.proof == tables.digest(result.choice)


def test_a_slow_one_is_given_up_early(record):
    result = run(record, Told(chunk({32: 1.2, 128: 1.0})), {"chunk_tokens": 32}, {"chunk_tokens": 128})
    assert [len(t.pairs) for t in result.tried] == [searching.PAIRS, searching.PAIRS * searching.ROUNDS]


def test_a_winner_that_loses_in_fresh_ranks_leaves_the_default(record):
    ranks = Told()
    ranks.factor = lambda s: 0.9 if s.chunk_tokens == 32 and ranks.starts == 1 else 1.0
    result = run(record, ranks, {"chunk_tokens": 32})
    assert result.choice == Schedule() and gain(result) == pytest.approx(1.0)
    said = searching.entry(result, JOB, "abc")
    assert said["schedule"] == said["default"] and said["compared"]["changes"] == {"chunk_tokens": 32}
    assert said["compared"]["why"] == "1.000x as fast, with a spread of 0.000"
    assert len(said["compared"]["pairs_us"]) == searching.CONFIRM and "sustained_pairs_us" not in said["compared"]


def test_a_winner_that_faults_when_it_is_timed_again_leaves_the_default(record):
    ranks = Told(chunk({32: 0.9}))
    ranks.fault = lambda s: "timeout" if s.chunk_tokens == 32 and ranks.starts > 1 else None
    result = run(record, ranks, {"chunk_tokens": 32})
    assert result.choice == Schedule()
    assert result.compared.why == "dropped when it was compared again: timeout: as told"


def test_an_entry_has_every_timing_to_five_digits(record):
    """Without what is not known; a point in a line."""
    ranks = Told(chunk({32: 0.912345678, 96: 1.5, 128: 0.9999}), lambda s: "fault" if s.chunk_tokens == 2 else None)
    result = run(record, ranks, *({"chunk_tokens": n} for n in (32, 96, 2, 128)), card=None)
    made = searching.entry(result, JOB, "abc")
    assert made["tried"][0] == {
        "changes": {"chunk_tokens": 32}, "status": "timed", "score": 0.9123, "us": 91.235,
        "pairs_us": [[100.0, 91.235]] * searching.PAIRS * searching.ROUNDS,
    }  # fmt: skip
    assert made["tried"][1]["status"] == "slow" and len(made["tried"][1]["pairs_us"]) == searching.PAIRS
    assert made["tried"][2] == {"changes": {"chunk_tokens": 2}, "status": "fault", "text": "as told"}
    assert len(made["compared"]["sustained_pairs_us"]) == searching.SUSTAINED and made["compared"]["why"] == ""
    key = tables.Key.of(CFG, 1, "cpu", "cpu")
    tables.store(path := record.path.parent / key.file, key, made)
    assert tables.read(path, "cpu")["entries"][key.place].items() >= made.items()
    lines = path.read_text().splitlines()
    assert [of["changes"] for line in lines if '"status"' in line for of in [json.loads(line.rstrip(","))]] == [
        {"chunk_tokens": n} for n in (32, 96, 2, 128)
    ]


def test_what_faults_or_changes_bits_is_dropped_with_its_reason(record, caplog):
    """75: the search goes on, in ranks that are started anew."""
    faults = {1: "fault", 2: "out of memory", 3: "timeout", 4: "refused"}
    ranks = Told(chunk({}), lambda s: faults.get(s.chunk_tokens), lambda s: str(s.chunk_tokens == 5))
    with caplog.at_level(logging.WARNING, "uniep"):
        result = run(record, ranks, *({"chunk_tokens": n} for n in (1, 2, 3, 4, 5, 6)))
    statuses = {t.changes["chunk_tokens"]: t.status for t in result.tried}
    assert statuses == {**faults, 5: "other bits", 6: "timed"}
    assert all(f"{status}" in caplog.text for status in (*faults.values(), "other bits"))
    assert result.choice == Schedule()
    assert ranks.starts == 4  # one start more for each that did not leave the ranks in step


def test_a_default_that_cannot_run_is_an_error(record):
    with pytest.raises(uniep.UniEPError, match="default Schedule cannot be timed: fault: as told"):
        run(record, Told(fault=lambda s: "fault"))
    with pytest.raises(uniep.UniEPError, match="other bits than the serial one"):
        run(record, Told(bits=lambda s: s.overlap))


@pytest.mark.parametrize(("slower", "chosen"), [(1.2, 32), (1.3, 64)])
def test_a_winner_that_costs_the_host_more_than_it_gains_is_not_kept(record, slower, chosen, caplog):
    """0.8 of the default's time in a call on an idle device; back to back 0.96 or 1.04 of it."""
    ranks = Told(chunk({32: 0.8}), sustained=chunk({32: slower}))
    result = run(record, ranks, {"chunk_tokens": 32})
    assert result.choice.chunk_tokens == chosen and gain(result) == pytest.approx(1.25)
    assert searching.gain_of(result.compared.sustained)[0] == pytest.approx(1 / (0.8 * slower))
    assert ("back to back" in caplog.text) == (chosen == 64)


def test_ranks_with_different_choices_are_an_error(record):
    ranks = Told()
    ask = ranks.ask
    ranks.ask = lambda m, *a, timeout_s: ["a", "b"] if m == "chosen" else ask(m, *a, timeout_s=timeout_s)
    with pytest.raises(uniep.UniEPError, match=r"different choices \(a, b\)"):
        run(record, ranks)


def test_a_search_goes_on_where_it_was(record):
    first = run(record, Told(chunk({32: 0.8})), {"chunk_tokens": 32}, {"chunk_tokens": 128})
    ranks = Told(chunk({32: 0.8, 96: 0.7}))
    again = run(record, ranks, {"chunk_tokens": 32}, {"chunk_tokens": 128}, {"chunk_tokens": 96})
    assert len(first.tried) == 2 and len(again.tried) == 3
    assert ranks.asked.count("time") == 1 + searching.ROUNDS + 2  # the default, the new one, the winner again
    assert again.choice.chunk_tokens == 96
    assert again.tried[-1].score == pytest.approx(0.7)


def test_a_search_goes_on_behind_many_kept_trials(record):
    """More of them than a sampler may repeat points without an end of the search."""
    order = in_order(SPACE, Load.uniform(CFG, 1), None, "random")[0]
    for most in (searching.REPEATED + 20, searching.REPEATED + 25):
        search(JOB, Listed(SPACE, order), record, 60.0, fleet=Told(), most=most)
        assert len(record.all()) == most


def test_trials_of_other_kernels_are_dropped(tmp_path, caplog):
    record = Record(tmp_path / "x.sqlite", {"kernels": "1"})
    run(record, Told(), {"chunk_tokens": 32})
    record.close()
    record = Record(tmp_path / "x.sqlite", {"kernels": "2"})
    assert record.all() == [] and "other kernels" in caplog.text
    record.close()


def test_a_record_that_is_none_and_a_full_disk(tmp_path, record):
    (tmp_path / "y.sqlite").write_text("this is no database, but it is long enough to look at" * 40)
    with pytest.raises(ConfigError, match=r"y\.sqlite: file is not a database"):
        Record(tmp_path / "y.sqlite", {})
    pages = record.db.execute("PRAGMA page_count").fetchone()[0]
    record.db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(ConfigError, match=r"full.*UNIEP_TUNE_DIR"):
        for number in range(1000):
            record.add(searching.Tried({"chunk_tokens": number}, "timed", "x" * 1000))


def test_the_budget_ends_it(record):
    began = time.monotonic()
    order, _ = in_order(SPACE, None, None, "random")
    result = search(JOB, Listed(SPACE, order), record, 0.5, fleet=Told())
    assert 0 < len(result.tried) < len(SPACE) and time.monotonic() - began < 10
    assert len({json.dumps(t.changes, sort_keys=True) for t in result.tried}) == len(result.tried)


def test_the_model_needs_a_card():
    with pytest.raises(ConfigError, match="needs a card; give --card"):
        in_order(SPACE, None, None, "model")


def test_the_model_s_points_begin_with_the_fastest_of_each_tie():
    cfg = dataclasses.replace(CFG, hidden=2048, ffn=768, num_experts=128, top_k=8, max_tokens_per_rank=4096)
    space = points("hopper", cfg, 2)
    order, predicted = in_order(space, Load.uniform(cfg, 2), load_card("h200"), "model")
    assert bool((predicted[order].diff() >= 0).all())
    first = predicted[different(order, predicted)[:8]]
    assert float(first[0]) == float(predicted.min()) and len(torch.unique(first)) == 8


def test_a_search_by_a_model_that_is_wrong_finds_98_percent_with_15_percent_of_a_grid(record):
    """On a card whose links and products are not those that the model was calibrated for."""
    cfg = dataclasses.replace(CFG, hidden=2048, ffn=768, num_experts=128, top_k=8, max_tokens_per_rank=8192)
    job, load = dataclasses.replace(JOB, cfg=cfg, ep_size=4, backend="hopper"), Load.uniform(cfg, 4)
    grid = points("hopper", cfg, 4, limit=300)
    card = load_card("h200")
    truth = card.replaced({"link_efficiency": 0.35, "matrix_tflops": 600.0, "tile_us": 2.0, "together": 4.0})
    usual = default_schedule("hopper", cfg, 4)

    def us(schedule):
        return float(predict(load, Points.of([schedule]), truth).both)

    ranks = Told(lambda s: us(s) / us(usual), ranks=4)
    order, _ = in_order(grid, load, card, "model")
    result = search(job, Listed(grid, order), record, 300.0, fleet=ranks, most=45)
    assert len(result.tried) <= 0.15 * len(grid)
    assert us(result.choice) <= float(predict(load, grid, truth).both.min()) / 0.98


def test_steps_from_the_best_find_what_the_model_does_not_know(record):
    """Behind the model's eight best points: two stages of dimensions that tie in the model, one on the other."""
    cfg = dataclasses.replace(CFG, hidden=2048, ffn=768, num_experts=128, top_k=8, max_tokens_per_rank=8192)
    job, card = dataclasses.replace(JOB, cfg=cfg, ep_size=2, backend="hopper", tokens=8192), load_card("h200")
    usual = default_schedule("hopper", cfg, 2)

    def us(s):
        unknown = 0.95 if s.gate_up.stages != usual.gate_up.stages else 1.0
        unknown *= 0.95 if s.sum_programs != usual.sum_programs else 1.0
        return unknown * float(predict(Load.uniform(cfg, 2), Points.of([s]), card).both)

    sampler = sampler_of("model", job, card)
    for schedule in sampler.first:
        assert sampler.ask() == schedule
        sampler.tell(schedule, 1.0)
    names = [d.name for d in dimensions("hopper", cfg, 2)]
    for schedule in [sampler.ask() for _ in range(8)]:  # steps from the default
        assert sum(get(schedule, name) != get(usual, name) for name in names) == 1
    sampler = sampler_of("model", job, card)
    result = search(job, sampler, record, 60.0, fleet=Told(lambda s: us(s) / us(usual)), most=24)
    unknown = {"gate_up.stages", "down.stages", "sum_programs"}
    assert tables.as_changes(result.choice, cfg, 2, "hopper").keys() >= unknown
    assert len({json.dumps(t.changes, sort_keys=True) for t in result.tried}) == len(result.tried) == 24


def test_what_runs_at_the_end_may_finish(record):
    """The winner is compared in fresh processes then, too."""
    ranks = Told(chunk({32: 0.8}))
    ask = ranks.ask

    def slowly(method, *args, timeout_s):
        assert timeout_s == 60.0
        time.sleep(0.2 if method == "prove" and args[0].chunk_tokens == 32 else 0.0)
        return ask(method, *args, timeout_s=timeout_s)

    ranks.ask = slowly
    made = search(JOB, listed({"chunk_tokens": 32}, {"chunk_tokens": 96}), record, 0.1, fleet=ranks, finish=True)
    assert made.choice.chunk_tokens == 32 and ranks.starts == 2
    assert [t.changes for t in made.tried] == [{"chunk_tokens": 32}], "none begins behind the end"


def test_one_bit_is_another_hash(monkeypatch):
    trial = Trial(JOB, 0, None, torch.device("cpu"))
    hashes, call = [trial.prove(Schedule())], trial.call

    def other(workspace):
        y, *gradients = call(workspace)
        gradients[-1].view(torch.int32).view(-1)[-1] ^= 1
        return y, *gradients

    hashes.append(trial.prove(dataclasses.replace(Schedule(), overlap="serial")))
    monkeypatch.setattr(trial, "call", other)
    hashes.append(trial.prove(Schedule()))
    trial.close()
    assert hashes[0] == hashes[1] != hashes[2]


def test_optuna_asks_for_points_of_the_space(record):
    pytest.importorskip("optuna")
    best = Schedule(tile_order="critical-path", gate_up=dataclasses.replace(Schedule().gate_up, columns=64))

    def far(s):
        return 1 - 0.1 * (s.tile_order == best.tile_order) - 0.1 * (s.gate_up.columns == 64)

    sampler = Optuna(SPACE, JOB, [SPACE.schedule(5)])
    assert sampler.ask() == SPACE.schedule(5)
    sampler.tell(SPACE.schedule(5), None)
    result = search(JOB, sampler, record, 60.0, fleet=Told(far), most=40)
    assert gain(result) == pytest.approx(1 / 0.8)
    assert all("peer_order" not in t.changes for t in result.tried if t.changes.get("overlap") == "serial")


def test_without_optuna_the_remedy_is_told(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"pip install optuna, or search with --sampler"):
        Optuna(SPACE, JOB, [])


# --- real processes ---


@dataclasses.dataclass(frozen=True)
class FaultyJob(Job):
    def made(self, rank, group, device):
        return Faulty(rank)


class Faulty:
    def __init__(self, rank):
        self.rank = rank

    def number(self):
        return self.rank

    def die(self):
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def sleep(self):
        time.sleep(60)

    def children(self, folder):
        """Hangs in a process of its own, whose number is left in the folder."""
        child = subprocess.Popen(["sleep", "60"])
        Path(folder, str(child.pid)).touch()
        child.wait()

    def refuse(self):
        raise ConfigError("not this one")

    def one_fails(self):
        if self.rank == 0:
            raise MemoryError("too much")
        time.sleep(60)


@pytest.mark.slow
def test_ranks_are_started_anew_after_a_fault():
    job = FaultyJob(**{f.name: getattr(JOB, f.name) for f in dataclasses.fields(JOB)} | {"ep_size": 2})
    with Fleet(job) as ranks:
        assert ranks.ask("number", timeout_s=30) == [0, 1]
        with pytest.raises(DroppedError, match="refused: rank 0: ConfigError: not this one"):
            ranks.ask("refuse", timeout_s=30)
        assert ranks.alive and ranks.starts == 1  # in step: nothing was lost
        with pytest.raises(DroppedError, match="fault: rank 1 died by signal 9"):
            ranks.ask("die", timeout_s=30)
        assert not ranks.alive
        assert ranks.ask("number", timeout_s=30) == [0, 1] and ranks.starts == 2
        with pytest.raises(DroppedError, match=r"timeout: rank 0, 1 did not answer within 0\.5 s"):
            ranks.ask("sleep", timeout_s=0.5)
        assert ranks.ask("number", timeout_s=30) == [0, 1]
        ranks.until = time.monotonic() + 0.3
        with pytest.raises(DroppedError, match=r"timeout: rank 0, 1 did not answer within 0\.3 s"):
            ranks.ask("sleep", timeout_s=60)
        ranks.until = time.monotonic() + 60
        assert ranks.ask("number", timeout_s=30) == [0, 1]
        threading.Timer(0.3, ranks.stop).start()
        with pytest.raises(DroppedError, match=r"fault: rank \d died by signal 9"):
            ranks.ask("sleep", timeout_s=60)
        with pytest.raises(DroppedError, match="timeout"):
            ranks.ask("number", timeout_s=30)
    assert not ranks.alive


def test_what_a_rank_has_started_ends_with_it(tmp_path):
    """As a compiler that hangs: nothing may run beside what is timed next."""
    with Fleet(FaultyJob(**{f.name: getattr(JOB, f.name) for f in dataclasses.fields(JOB)})) as ranks:
        ranks.ask("number", timeout_s=math.inf)
        with pytest.raises(DroppedError, match="timeout"):
            ranks.ask("children", tmp_path, timeout_s=2.0)
        (child,) = [int(path.name) for path in tmp_path.iterdir()]
        state = Path(f"/proc/{child}/stat")
        assert not state.exists() or state.read_text().split()[2] == "Z"


@pytest.mark.parametrize("count", [0, 4])
def test_calls_are_timed_alone_or_back_to_back(count):
    made = [0, 0]

    def call(which):
        made[which] += 1
        time.sleep(0.01 * (1 + which))

    calls = functools.partial(call, 0), functools.partial(call, 1)
    pairs = in_turn(calls, 3, 2, None, torch.device("cpu"), count)
    assert made == [2 + 3 * max(count, 1)] * 2 and len(pairs) == 3
    assert all(8_000 < first < second for first, second in pairs)  # us of one call
    assert min(first for first, _ in pairs) < 15_000


def test_an_interrupt_waits_until_all_ranks_are_known():
    """Also one that a thread takes which was there before, and does not have the main thread's mask."""
    started, inside, usual = [], threading.Event(), signal.getsignal(signal.SIGINT)
    other = threading.Thread(target=lambda: (inside.wait(), os.kill(os.getpid(), signal.SIGINT)))
    other.start()
    with pytest.raises(KeyboardInterrupt), fleet._interrupted_later():
        for rank in range(2):
            inside.set()
            other.join()
            time.sleep(0.05)
            started.append(rank)
    assert started == [0, 1] and signal.getsignal(signal.SIGINT) is usual
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.fixture
def always_faster(monkeypatch):
    """`uniep tune` ends after three candidates, however slow the machine is, and any takes half of the default's
    time, so that there is a choice to keep."""
    monkeypatch.setattr(searching, "slowest", lambda of: [(a, 0.5 * a) for a, _ in slowest(of)])
    monkeypatch.setattr("uniep.cli.tune.search", functools.partial(search, most=3))


def test_uniep_tune_on_cpu_ranks(tmp_path, monkeypatch, always_faster):
    monkeypatch.setenv("UNIEP_TUNE_DIR", str(tmp_path))
    monkeypatch.delenv("UNIEP_TUNE", raising=False)
    command = "tune --backend cpu --shape 32x16x4x2 --tokens 64 --ep 1 --dtype fp32 --budget-s 60 --sampler random"
    done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 0, done.output
    assert "all 1 ranks have choice" in done.output
    (entry,) = tables.read(tmp_path / "cpu-cpu-ep1-32x16x4x2.json", "cpu")["entries"].values()
    assert entry["tried"] and entry["proof"] and entry["commit"]
    assert all(t["pairs_us"] for t in entry["tried"] if t["status"] == "timed")
    (trials,) = (tmp_path / "trials").glob("*.sqlite")
    assert sqlite3.connect(trials).execute("SELECT count(*) FROM trials").fetchone()[0] == len(entry["tried"])
    with uniep.Workspace(CFG, device="cpu") as workspace:
        assert tables.fields(workspace.backend.schedule) == entry["schedule"] != entry["default"]
    with tables.held(trials):
        again = CliRunner().invoke(app, command.split())
    assert again.exit_code == 2 and "another process" in again.output
    shown = "".join(c for c in CliRunner().invoke(app, ["doctor"]).output if c not in " │\n")
    assert f"{tmp_path / 'cpu-cpu-ep1-32x16x4x2.json'}:serves32x16x4x2-float32at64tokens;thedefaultstaysbutfor" in shown


def test_a_default_that_stays_is_kept_with_every_timing(tmp_path, monkeypatch):
    """In place of an older choice, too; where nothing was tried, that one stays."""
    monkeypatch.setenv("UNIEP_TUNE_DIR", str(tmp_path))
    monkeypatch.setattr(searching, "slowest", lambda of: [(a, 1.5 * a) for a, _ in slowest(of)])
    monkeypatch.setattr("uniep.cli.tune.search", functools.partial(search, most=2))
    key, usual = tables.Key.of(CFG, 1, "cpu", "cpu"), tables.fields(Schedule())
    path, command = tmp_path / key.file, "tune --backend cpu --shape 32x16x4x2 --tokens 64 --ep 1 --dtype fp32"
    tables.store(path, key, {"schedule": usual | {"chunk_tokens": 32}, "default": usual})
    done = CliRunner().invoke(app, [*command.split(), "--budget-s", "0"])
    assert done.exit_code == 0, done.output
    assert "none in this time; raise --budget-s" in done.output and "no table is written" in done.output
    assert re.search(r"sampler: (optuna|random) \(", done.output)
    assert not tables.stays(tables.read(path, "cpu")["entries"][key.place])
    done = CliRunner().invoke(app, [*command.split(), "--budget-s", "60", "--sampler", "random"])
    assert "the default stays, " in done.output and "written: " in done.output, done.output
    entry = tables.read(path, "cpu")["entries"][key.place]
    assert tables.stays(entry) and "compared" not in entry and len(entry["tried"]) == 2
    assert all(of["status"] == "slow" and of["pairs_us"] for of in entry["tried"])
    with uniep.Workspace(CFG, device="cpu", tune="cached") as workspace:
        assert workspace.backend.schedule == Schedule()
    shown = "".join(c for c in CliRunner().invoke(app, ["doctor"]).output if c not in " │\n")
    assert f"{path}:serves32x16x4x2-float32at64tokens;thedefaultstays└" in shown


def test_several_layers_are_tuned_into_tables_that_can_be_shipped(tmp_path, monkeypatch, always_faster):
    """One command; what is found is written at once; one layer that cannot run is left out; the folder serves as the
    package's, and doctor and explain say so."""
    monkeypatch.setenv("UNIEP_TUNE_DIR", str(tmp_path / "user"))
    monkeypatch.setenv("UNIEP_TUNE", "cached")
    state, out, known = searching._State, tmp_path / "x.json", []

    def refusing(job, *args):
        if job.cfg.num_experts == 8:
            known.append(list(json.loads(out.read_text())))
            raise uniep.UniEPError("the default Schedule cannot be timed")
        return state(job, *args)

    monkeypatch.setattr(searching, "_State", refusing)
    layer, into = "--backend cpu --ep 1 --dtype fp32", tmp_path / "shipped"
    command = f"tune {layer} --shape 32x16x4x2,32x16x8x2 --tokens 16,64 --budget-s 60 --sampler random --into {into}"
    done = CliRunner().invoke(app, [*command.split(), "--json", str(out)])
    assert done.exit_code == 2 and "32x16x8x2-float32-64: failed, as said above" in " ".join(done.output.split())
    assert known == [["32x16x4x2-float32-16", "32x16x4x2-float32-64"]] * 2
    table = into / "cpu-cpu-ep1-32x16x4x2.json"
    entries = tables.read(table, "cpu")["entries"]
    assert entries.keys() == {"32x16x4x2-float32-16", "32x16x4x2-float32-64"}
    assert not list((tmp_path / "user").glob("*.json"))
    monkeypatch.setattr(tables, "shipped", lambda: into)
    with uniep.Workspace(CFG, device="cpu") as workspace:
        assert tables.fields(workspace.backend.schedule) == entries["32x16x4x2-float32-64"]["schedule"]
    shown = "".join(c for c in CliRunner().invoke(app, ["doctor"]).output if c not in " │\n")
    assert f"{table}:serves32x16x4x2-float32at16,64tokens;thedefaultstaysbutfor" in shown
    written = calibrate.uncalibrated(calibrate.machine_of("cpu"), "cpu")
    machine = tmp_path / "machine.toml"
    machine.write_text(calibrate.machine_text(written.machine))
    (tmp_path / "cpu.toml").write_text(card_text(written, "made here", str(machine)))
    explain = f"explain {layer} --shape 32x16x4x2 --tokens 64 --card {tmp_path / 'cpu.toml'}"
    said = CliRunner().invoke(app, [*explain.split(), "--json", str(tmp_path / "x.json")])
    document = json.loads((tmp_path / "x.json").read_text())
    assert document["by"] == "table" and document["serves"].startswith(f"{table}: tuned at 64 tokens"), said.output
    assert document["measured_us"] and document["runner_up"]["by"] == "table"


def test_a_choice_is_told_whose_table_cannot_be_written(tmp_path, monkeypatch, always_faster):
    """A file in place of the folder is refused before anything is timed; a disk that is full later leaves the choice on
    the screen and in the JSON file, and the remedy names the option."""
    monkeypatch.setenv("UNIEP_TUNE_DIR", str(tmp_path / "user"))
    (tmp_path / "file").write_text("")
    layer = "--backend cpu --ep 1 --dtype fp32 --shape 32x16x4x2 --budget-s 60 --sampler random"
    done = CliRunner().invoke(app, f"tune {layer} --tokens 16,64 --into {tmp_path / 'file'}".split())
    assert done.exit_code == 2 and not (tmp_path / "user").exists()
    assert "--into" in done.output and "name a folder that can be written" in " ".join(done.output.split())

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    out, into = tmp_path / "x.json", tmp_path / "into"
    done = CliRunner().invoke(app, f"tune {layer} --tokens 16,64 --into {into} --json {out}".split())
    said = " ".join(done.output.split())
    assert done.exit_code == 2 and said.count("x the default in fresh processes") == 2
    assert said.count("name another folder with --into") == 2 and "UNIEP_TUNE_DIR" not in said
    assert json.loads(out.read_text()).keys() == {"32x16x4x2-float32-16", "32x16x4x2-float32-64"}


def test_auto_is_the_first_sampler_that_there_is(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert sampler_here(None, "cpu")[0] == "random" and sampler_here(load_card("h200"), "h200")[0] == "model"


def test_calibrate_on_cpu_ranks(tmp_path, monkeypatch):
    """What is timed is fitted, and what it wrote is a card for the model's sampler and for explain."""
    monkeypatch.setenv("UNIEP_TUNE_DIR", str(tmp_path))
    monkeypatch.setitem(calibrate.CALLS, "cpu", (("32x16x4x2", 64),))
    monkeypatch.setattr(calibrate, "REPEATS", 2)
    layer = "--backend cpu --ep 1 --dtype fp32"
    done = CliRunner().invoke(app, f"tune --calibrate {layer}".split())
    assert done.exit_code == 0, done.output
    card = load_card(tables.card_file("cpu"))
    assert card.machine.matrix_workers == 1 and card.constants["plan_us"] != card.machine.plan_us
    layer += " --shape 32x16x4x2 --tokens 64"
    document = CliRunner().invoke(app, f"explain {layer} --card cpu --json {tmp_path / 'x.json'}".split())
    assert document.exit_code == 0, document.output
    predicted = json.loads((tmp_path / "x.json").read_text())["default"]["predicted_us"]
    assert 100 < predicted < 1e6
    order, predicted = in_order(SPACE, Load.uniform(CFG, 1), card, "model")
    assert len(order) == len(SPACE) and bool((predicted[order].diff() >= 0).all())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--backend tpu", "--backend is 'tpu'; use cpu, hopper, nccl or auto"),
        ("--backend cpu --sampler guess", "--sampler is 'guess'; use auto, optuna, model, random"),
        ("--backend cpu --sampler model --shape 32x16x4x2 --tokens 64", "needs a card"),
        ("--backend cpu --tokens 64,many", "--tokens is '64,many'; give numbers from 1 on, separated by commas"),
        ("--backend cpu --tokens 60,64", "two have the entry 2048x768x128x8-bfloat16-64; leave out one"),
        ("--calibrate --backend nccl", "--calibrate times backends hopper and cpu, not 'nccl'"),
        pytest.param(
            "--calibrate --backend hopper", "no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)  # fmt: skip
def test_bad_options_are_told(options, says, tmp_path, monkeypatch):
    monkeypatch.setenv("UNIEP_TUNE_DIR", str(tmp_path))
    done = CliRunner().invoke(app, ["tune", *options.split()])
    assert done.exit_code == 2
    assert says in " ".join(done.output.split())

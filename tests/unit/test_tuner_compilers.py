"""Points compiled in parallel beforehand: batches of a search, and real child processes that fault."""

import dataclasses
import json
import logging
import os
import signal
import threading
import time

import pytest
import torch
from test_tuner_search import CFG, JOB, SPACE, Told, chunk, listed
from typer.testing import CliRunner

from uniep.cli.main import app
from uniep.errors import ConfigError
from uniep.schedule import Schedule
from uniep.trials import search as searching
from uniep.trials.compilers import PROCESS, USABLE, Compiler, Compilers, needed
from uniep.trials.fleet import DroppedError
from uniep.trials.search import Climbing, Listed, Optuna, Record, in_order, search
from uniep.trials.trial import Job, Trial
from uniep.tuner import tables
from uniep.tuner.model import load_card


@pytest.fixture
def record(tmp_path):
    made = Record(tmp_path / "x.sqlite", {"kernels": "1"})
    yield made
    made.close()


def of_chunk(tokens):
    return dataclasses.replace(Schedule(), chunk_tokens=tokens)


class Ahead:
    """In place of Compilers, `count` at a time; `dropped`: {chunk_tokens: why}."""

    def __init__(self, count, ranks, seconds=0.0, dropped=()):
        self.count, self.ranks, self.seconds, self.dropped = count, ranks, seconds, dict(dropped)
        self.batches, self.before, self.options = [], [], []

    def at_once(self, job):
        return self.count

    def compile(self, wanted, candidate_s, until, finish):
        assert all(job is JOB for job, _ in wanted)
        self.batches.append([schedule.chunk_tokens for _, schedule in wanted])
        self.before.append(self.ranks.asked.count("time"))
        self.options.append((candidate_s, until, finish))
        time.sleep(self.seconds)
        return [self.dropped.get(schedule.chunk_tokens) for _, schedule in wanted]


def test_batches_are_compiled_before_they_are_timed(record, caplog):
    """What is known, refused or comes twice is in none; what died or hung while it was compiled is not timed."""
    record.add(searching.Tried({"chunk_tokens": 32}, "timed", score=1.0))
    ranks, said = Told(chunk({128: 0.9}), fault=lambda s: "fault" if s.chunk_tokens == 6 else None), []
    ahead = Ahead(3, ranks, dropped={4: DroppedError("timeout", "as told"), 5: DroppedError("fault", "died")})
    changes = [{"chunk_tokens": n} for n in (32, 1, 0, 2, 128, 4, 4, 5, 6, 7)]
    with caplog.at_level(logging.WARNING, "uniep"):
        how = {"fleet": ranks, "compilers": ahead, "progress": lambda seconds, text: said.append(text)}
        result = search(JOB, listed(*changes), record, 30.0, **how)
    assert ahead.batches == [[1, 2, 128], [4], [5, 6, 7]]
    of_one = searching.ROUNDS
    assert ahead.before == [1, 1 + 3 * of_one, 1 + 3 * of_one], "the default; then what was compiled"
    tried = {t.changes["chunk_tokens"]: (t.status, t.text) for t in result.tried}
    assert tried[4] == ("timeout", "while it was compiled: as told") and tried[5][0] == "fault"
    assert tried[0][0] == "refused" and tried[6] == ("fault", "as told") and tried[7][0] == "slow"
    assert "timeout: while it was compiled: as told" in caplog.text
    assert said[0].endswith("last: refused") and said[1] == "compiling 3 points"
    assert result.choice.chunk_tokens == 128


@pytest.mark.parametrize("restarts", [True, False])
def test_compiling_counts_and_no_batch_begins_that_cannot_be_timed(record, restarts):
    ranks = Told()
    ahead = Ahead(2, ranks, seconds=0.4)
    began = time.monotonic()
    changes = [{"chunk_tokens": n} for n in range(1, 99)]
    result = search(JOB, listed(*changes), record, 1.0, fleet=ranks, compilers=ahead, restarts=restarts)
    assert len(ahead.batches) == 2 and len(result.tried) == 4, "0.4 s twice; a third time there is less left"
    assert [finish for _, _, finish in ahead.options] == [not restarts] * 2
    assert all(began + 1.0 <= until <= began + 2.0 for _, until, _ in ahead.options)
    ahead = Ahead(2, ranks, seconds=0.4)
    result = search(JOB, listed(*changes[10:]), record, 0.2, fleet=ranks, compilers=ahead, restarts=restarts)
    assert len(ahead.batches) == 1 and len(result.tried) == 4, "nothing is timed behind the end"


def test_without_compilers_each_point_is_told_before_the_next_is_asked_for(record):
    """Nor if none fits into memory."""
    events = []

    class Spied(Listed):
        def ask(self):
            made = super().ask()
            events.append(made)
            return made

        def tell(self, schedule, score):
            assert events.pop() == schedule and not events

    order, _ = in_order(SPACE, None, None, "random")
    for compilers in (None, Ahead(0, Told())):
        search(JOB, Spied(SPACE, order), record, 60.0, fleet=Told(), compilers=compilers, most=len(record.all()) + 5)
    assert len(record.all()) == 10 and not compilers.batches


def test_samplers_give_several_points_before_they_are_told():
    pytest.importorskip("optuna")
    sampler = Optuna(SPACE, JOB, [SPACE.schedule(i) for i in (5, 9)])
    for _ in range(4):
        asked = [sampler.ask() for _ in range(8)]
        assert len(set(asked)) >= 6, "points without a score are avoided"
        for schedule in dict.fromkeys(reversed(asked)):
            sampler.tell(schedule, None if schedule.overlap == "serial" else 1.0)
    states = [trial.state.is_finished() for trial in sampler.study.trials]
    assert all(states) and len(states) == 32, "also a point that was asked for twice"
    assert sampler.study.trials[0].params["overlap"] == SPACE.schedule(5).overlap

    card, job = load_card("h200"), dataclasses.replace(JOB, backend="hopper", ep_size=2)
    cfg = dataclasses.replace(CFG, hidden=2048, ffn=768, num_experts=128, top_k=8, max_tokens_per_rank=8192)
    sampler = searching.sampler_of("model", dataclasses.replace(job, cfg=cfg, tokens=8192), card)
    assert isinstance(sampler, Climbing)
    first = [sampler.ask() for _ in range(12)]
    assert first[:8] == sampler.first and len(set(first)) == 12
    sampler.tell(first[2], 0.9)
    assert sampler.best == first[2] and sampler.ask() not in first
    queue = sampler.queue
    sampler.tell(first[3], 0.95)
    assert sampler.queue is queue, "not better than the best"
    sampler.tell(first[10], 0.8)
    assert sampler.best == first[10] and not set(sampler.queue) & set(first)


def test_as_many_fleets_as_fit_beside_the_ranks_that_time():
    """A process takes memory also while it does nothing."""
    cfg = dataclasses.replace(CFG, hidden=64, ffn=64, dtype=torch.bfloat16)
    job = dataclasses.replace(JOB, cfg=cfg, backend="hopper", device="cuda")
    free = needed(job, 2) + PROCESS
    compilers = Compilers(job, 8, (free + 5.5 * (needed(job) + PROCESS)) / USABLE)
    assert compilers.at_once(job) == 5
    compilers.fleets = [None] * 8
    compilers.memory = (free + 8 * PROCESS + 3.5 * needed(job)) / USABLE
    assert compilers.at_once(job) == 3
    compilers.memory, compilers.fleets = free, []
    assert compilers.at_once(job) == 0 and compilers.compile([(job, Schedule())], 1.0) == [None]
    assert Compilers(JOB, 8).at_once(JOB) == 8 and needed(job, 2) > needed(job) > 0


def test_what_is_launched_is_what_a_trial_launches(monkeypatch):
    """y and all gradients, of as many tokens; nothing stays."""
    seen, trials, call = [], [], Trial.call

    def spied(self, workspace, *how):
        trials.append(self)
        made = call(self, workspace, *how)
        seen.append((workspace.backend.schedule.chunk_tokens, len(self.ids_TK), len(made), how))
        return made

    monkeypatch.setattr(Trial, "call", spied)
    Compiler(0, None, torch.device("cpu")).compile(JOB, of_chunk(32))
    other = Trial(JOB, 0, None, torch.device("cpu"))
    other.prove(of_chunk(32))
    other.close()
    assert seen == [(32, 64, 5, ())] * 2 and trials[0].candidate is None


# --- real processes ---


@dataclasses.dataclass(frozen=True)
class FaultyJob(Job):
    def made(self, rank, group, device):
        return Faulty()


class Faulty:
    def compile(self, job, schedule):
        how = schedule.chunk_tokens
        if how == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if how == 2:
            time.sleep(60)
        if how == 3:
            raise ConfigError("not this one")
        if how == 4:
            raise RuntimeError("broken")


def faulty(most):
    made = Compilers(JOB, most)
    made.job = FaultyJob(**vars(JOB))
    return made


def test_real_layers_are_compiled_in_the_same_processes():
    job = dataclasses.replace(JOB, cfg=dataclasses.replace(CFG, hidden=64), tokens=32)
    with Compilers(JOB, 2) as compilers:
        assert compilers.compile([], 30.0) == []
        assert compilers.compile([(JOB, Schedule())], 30.0) == [None] and len(compilers.fleets) == 1
        assert compilers.compile([(job, of_chunk(32)), (JOB, of_chunk(32)), (JOB, of_chunk(0))], 30.0) == [None] * 3
        assert [fleet.starts for fleet in compilers.fleets] == [1, 1] and all(f.alive for f in compilers.fleets)
        assert compilers.seconds > 0
        processes = [process for fleet in compilers.fleets for process in fleet._processes]
    assert len(processes) == 2 and not any(process.is_alive() for process in processes)


@pytest.mark.slow
def test_only_points_whose_ranks_died_or_hung_are_dropped():
    """Each fault ends one point; the next ones go on, in ranks that start anew where they have to."""
    with faulty(2) as compilers:
        wanted = [(JOB, of_chunk(n)) for n in (1, 2, 3, 4, 5, 6)]
        dropped = compilers.compile(wanted, candidate_s=2.0)
        assert [error and error.reason for error in dropped] == ["fault", "timeout", None, None, None, None]
        assert "died by signal 9" in dropped[0].text
        began = time.monotonic()
        dropped = compilers.compile([(JOB, of_chunk(2))] * 3, candidate_s=60.0, until=began + 3)
        assert dropped == [None] * 3 and time.monotonic() - began < 20, "their time was over: they did not hang"
        dropped = compilers.compile([(JOB, of_chunk(2))] * 3, candidate_s=6.0, until=time.monotonic() + 5, finish=True)
        assert [error and error.reason for error in dropped] == ["timeout", "timeout", None], "the third never began"
        assert compilers.compile([(JOB, of_chunk(5))], 30.0, until=time.monotonic()) == [None]
        assert compilers.compile([(JOB, of_chunk(5))], 30.0) == [None] and compilers.fleets[0].alive


def test_ranks_that_cannot_start_are_done_without(caplog):
    with Compilers(JOB, 2) as compilers:
        compilers.job = NoRanks(**vars(JOB))
        with caplog.at_level(logging.WARNING, "uniep"):
            assert compilers.compile([(JOB, Schedule())] * 2, 30.0) == [None] * 2
        assert caplog.text.count("cannot start: fault: rank 0: RuntimeError: no ranks here") == 2
        assert compilers.most == compilers.at_once(JOB) == 0 and not compilers.fleets


@dataclasses.dataclass(frozen=True)
class NoRanks(Job):
    def made(self, rank, group, device):
        raise RuntimeError("no ranks here")


def test_an_interrupt_ends_all_that_compiles():
    with pytest.raises(KeyboardInterrupt), faulty(2) as compilers:
        assert compilers.compile([(JOB, of_chunk(5))] * 2, 30.0) == [None] * 2
        processes = [process for fleet in compilers.fleets for process in fleet._processes]
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        compilers.compile([(JOB, of_chunk(2))] * 8, 60.0)
    assert time.monotonic() - began < 20 and len(processes) == 2
    assert not any(process.is_alive() for process in processes)
    assert not any(fleet.alive for fleet in compilers.fleets)


def test_uniep_tune_compiles_beforehand_if_asked(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("UNIEP_TUNE_DIR", str(tmp_path))
    made = []

    class Spied(Compilers):
        def __init__(self, job, most):
            super().__init__(job, most)
            made.append(self)

    monkeypatch.setattr("uniep.cli.tune.Compilers", Spied)
    monkeypatch.setattr("uniep.cli.tune.search", lambda *args, **how: search(*args, **how, most=4))
    layer = "--backend cpu --shape 32x16x4x2 --ep 1 --dtype fp32 --budget-s 60 --sampler random"
    out = tmp_path / "x.json"
    with caplog.at_level(logging.INFO, "uniep"):
        done = CliRunner().invoke(app, f"tune {layer} --tokens 16,64 --compilers 2 --json {out}".split())
    assert done.exit_code == 0, done.output
    (compilers,) = made
    assert compilers.most == 2 and compilers.seconds > 0 and not compilers.fleets
    assert caplog.text.count("compiled 2 points in ") == 4, "two batches of two points, for each number of tokens"
    assert [len(entry["tried"]) for entry in json.loads(out.read_text()).values()] == [4, 4]
    assert CliRunner().invoke(app, f"tune {layer} --tokens 32 --budget-s 0".split()).exit_code == 0
    assert made[1].most == 0, "on CPUs nothing compiles for long"
    assert tables.folder() == tmp_path

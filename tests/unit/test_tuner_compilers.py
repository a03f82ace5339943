"""Points compiled in parallel beforehand: batches of a search, and real child processes that fault."""

import dataclasses
import json
import logging
import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_tuner_search import CFG, JOB, SPACE, Told, chunk, listed
from typer.testing import CliRunner

from uniep.backends.base import Needs
from uniep.cli.main import app
from uniep.errors import ConfigError
from uniep.launch import driver
from uniep.launch.ahead import Kernel, Target
from uniep.launch.driver import Launch
from uniep.schedule import Schedule
from uniep.trials import search as searching
from uniep.trials.compilers import LATE, Compiler, Compilers
from uniep.trials.fleet import DroppedError
from uniep.trials.search import Climbing, Listed, Optuna, Record, in_order, search
from uniep.trials.trial import Trial
from uniep.tuner.model import load_card


@pytest.fixture
def record(tmp_path):
    made = Record(tmp_path / "x.sqlite", {"kernels": "1"})
    yield made
    made.close()


def of_chunk(tokens):
    return dataclasses.replace(Schedule(), chunk_tokens=tokens)


class Ahead:
    """In place of Compilers, `batch` points together; `dropped`: {chunk_tokens: why}."""

    def __init__(self, batch, seconds=0.0, dropped=()):
        self.batch, self.seconds, self.dropped = batch, seconds, dict(dropped)
        self.batches, self.before, self.options, self.default = [], [], [], []

    def ahead(self, ranks, schedules, candidate_s, until, finish=False):
        if not self.default:
            self.default = list(schedules)
            return [None] * len(schedules)
        self.batches.append([schedule.chunk_tokens for schedule in schedules])
        self.before.append(ranks.asked.count("time"))
        self.options.append((candidate_s, until, finish))
        time.sleep(self.seconds)
        return [self.dropped.get(schedule.chunk_tokens) for schedule in schedules]


def test_batches_are_compiled_before_they_are_timed(record, caplog):
    """What is known, refused or comes twice is in none; what has shown there that it cannot run is not timed."""
    record.add(searching.Tried({"chunk_tokens": 32}, "timed", score=1.0))
    ranks, said = Told(chunk({128: 0.9}), fault=lambda s: "fault" if s.chunk_tokens == 6 else None), []
    ahead = Ahead(3, dropped={4: DroppedError("timeout", "as told"), 5: DroppedError("fault", "died")})
    changes = [{"chunk_tokens": n} for n in (32, 1, 0, 2, 128, 4, 4, 5, 6, 7)]
    with caplog.at_level(logging.WARNING, "uniep"):
        how = {"fleet": ranks, "compilers": ahead, "progress": lambda seconds, text: said.append(text)}
        result = search(JOB, listed(*changes), record, 30.0, **how)
    assert ahead.batches == [[1, 2, 128], [4], [5, 6, 7]]
    of_one = searching.ROUNDS
    assert ahead.before == [1, 1 + 3 * of_one, 1 + 3 * of_one], "the default; then what was compiled"
    tried = {t.changes["chunk_tokens"]: (t.status, t.text) for t in result.tried}
    assert tried[4] == ("timeout", "as told") and tried[5][0] == "fault"
    assert tried[0][0] == "refused" and tried[6] == ("fault", "as told") and tried[7][0] == "slow"
    assert "{'chunk_tokens': 4}: timeout: as told" in caplog.text
    assert said[0].endswith("last: refused") and said[1] == "compiling 3 points"
    assert result.choice.chunk_tokens == 128


@pytest.mark.parametrize("finish", [True, False])
def test_compiling_counts_and_what_would_not_be_compiled_in_time_is_left(record, finish):
    """The default is compiled before, and does not count."""
    ranks, late = Told(), DroppedError(LATE, "as told")
    ahead = Ahead(2, seconds=0.4, dropped={4: late, 5: late, 6: late, 7: late})
    began = time.monotonic()
    changes = [{"chunk_tokens": n} for n in range(1, 9)]
    result = search(JOB, listed(*changes), record, 30.0, fleet=ranks, compilers=ahead, finish=finish)
    assert ahead.default == [Schedule(), searching.serial(Schedule())]
    assert ahead.batches == [[1, 2], [3, 4], [5, 6], [7, 8]], "others may have no kernels that are new"
    assert [t.changes["chunk_tokens"] for t in result.tried] == [1, 2, 3, 8] and len(record.all()) == 4
    assert [of for _, _, of in ahead.options] == [finish] * 4
    assert all(began + 30.0 <= until for _, until, _ in ahead.options)
    ahead = Ahead(2, seconds=0.4)
    changes = [{"chunk_tokens": n} for n in range(11, 99)]
    result = search(JOB, listed(*changes), record, 0.2, fleet=ranks, compilers=ahead, finish=finish)
    assert len(ahead.batches) == 1 and len(result.tried) == 4, "nothing is timed behind the end"


def test_without_compilers_each_point_is_told_before_the_next_is_asked_for(record):
    events = []

    class Spied(Listed):
        def ask(self):
            made = super().ask()
            events.append(made)
            return made

        def tell(self, schedule, score):
            assert events.pop() == schedule and not events

    order, _ = in_order(SPACE, None, None, "random")
    for compilers in (None, Ahead(0)):
        search(JOB, Spied(SPACE, order), record, 60.0, fleet=Told(), compilers=compilers, most=len(record.all()) + 5)
    assert len(record.all()) == 10 and not compilers.batches


def test_samplers_give_several_points_before_they_are_told():
    pytest.importorskip("optuna")
    sampler = Optuna(SPACE, JOB, [SPACE.schedule(i) for i in (5, 9, 5)])
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


def test_a_trial_lists_what_its_calls_launch(monkeypatch):
    """By the backend, of as many tokens, with all gradients; nothing stays.  On CPUs nothing is launched."""
    trial, seen = Trial(JOB, 0, None, torch.device("cpu")), []
    made = trial.workspace

    def workspace(schedule):
        found = made(schedule)
        backend = found.backend
        forward, backward = backend.forward, backend.backward

        def spied_forward(inputs, save):
            seen.append((schedule.chunk_tokens, len(inputs.ids_TK), save))
            driver.listed().append(Launch(kernel, (inputs.x_TD, None, 1, 2**33), {"BLOCK": 4}, {"num_warps": 1}))
            return forward(inputs, save)

        def spied_backward(dy_TD, inputs, saved, needs, **how):
            seen.append((needs, how))
            driver.listed().append(driver.listed()[0])
            return backward(dy_TD, inputs, saved, needs, **how)

        monkeypatch.setattr(backend, "forward", spied_forward)
        monkeypatch.setattr(backend, "backward", spied_backward)
        return found

    kernel = SimpleNamespace(fn=test_a_trial_lists_what_its_calls_launch)
    assert trial.kernels(Schedule()) == []
    monkeypatch.setattr(trial, "workspace", workspace)
    (found,) = trial.kernels(of_chunk(32))
    assert seen == [(32, 64, True), (Needs(), {"blocks": 1})] and trial.candidate is None
    assert found.name == "test_a_trial_lists_what_its_calls_launch" and driver.listed() is None
    trial.close()


def test_what_is_listed_is_neither_launched_nor_copied_nor_filled():
    words, others = torch.zeros(4, dtype=torch.int32), torch.ones(4, dtype=torch.int32)
    with driver.listing() as launches:
        driver.launch(None, 1, (words,), {"BLOCK": 4}, num_warps=1)
        driver.copy(words, others, None)
        driver.fill(words, 7)
    assert launches == [Launch(None, (words,), {"BLOCK": 4}, {"num_warps": 1})] and not words.any()


class Lists:
    """In place of ranks: what their calls launch, by `chunk_tokens`; or why they cannot."""

    def __init__(self, lists):
        self.lists, self.asked = lists, []

    def ask(self, method, schedule, timeout_s):
        assert method == "kernels"
        self.asked.append((schedule.chunk_tokens, timeout_s))
        found = self.lists[schedule.chunk_tokens]
        if isinstance(found, DroppedError):
            raise found
        return [found, found[:1]]


def of_name(*names):
    return [Kernel(str(name), b"") for name in names]


# --- real processes ---


@dataclasses.dataclass(frozen=True)
class FaultyProcess:
    arch: int = 90
    ep_size: int = 1
    device: str = "cpu"
    timeout_s: float = 60.0

    def made(self, rank: int, group: Any, device: Any) -> Any:
        return Faulty()


class NoProcess(FaultyProcess):
    def made(self, rank: int, group: Any, device: Any) -> Any:
        raise RuntimeError("no process here")


class Faulty:
    def compile(self, kernel):
        if kernel.name == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if kernel.name == "hangs":
            time.sleep(60)
        if kernel.name == "refused":
            raise ConfigError("not this one")
        if kernel.name == "broken":
            raise RuntimeError("not this one either")


def faulty(most):
    made = Compilers(most)
    made.process = FaultyProcess()
    return made


def processes_of(compilers):
    return [process for fleet in compilers.fleets for process in fleet._processes]


def test_each_kernel_is_compiled_once_by_processes_that_stay(caplog):
    """Also for another layer.  A point that cannot be listed is refused at once."""
    no = DroppedError("refused", "as told")
    ranks = Lists({1: of_name("a", "b"), 2: of_name("b", "c"), 3: no, 4: of_name("a", "d"), 5: []})
    with faulty(2) as compilers, caplog.at_level(logging.INFO, "uniep"):
        assert compilers.batch == 1 and faulty(5).batch == 3
        assert compilers.ahead(ranks, [], 30.0) == []
        assert compilers.ahead(ranks, [of_chunk(n) for n in (1, 2, 3)], 30.0) == [None, None, no]
        assert "compiled 3 kernels in " in caplog.text and compilers.seconds > 0
        processes = processes_of(compilers)
        assert compilers.ahead(ranks, [of_chunk(n) for n in (2, 4, 5)], 30.0) == [None] * 3
        assert "compiled 1 kernels in " in caplog.text
        assert processes_of(compilers) == processes and len(processes) == 2
        assert {timeout_s for _, timeout_s in ranks.asked} == {30.0}
    assert not any(process.is_alive() for process in processes)
    with faulty(0) as compilers:
        assert compilers.ahead(ranks, [of_chunk(1)], 30.0) == [None] and len(ranks.asked) == 6


def test_lists_take_no_longer_than_there_is_time(caplog):
    """A fault ends the lists of this batch, not the point: it may be that of lists alone."""
    ranks = Lists({1: [], 2: DroppedError("timeout", "as told"), 3: DroppedError("out of memory", "as told")})
    with faulty(2) as compilers:
        now = time.monotonic()
        assert compilers.ahead(ranks, [of_chunk(1)], 30.0, until=now) == [None] and not ranks.asked
        compilers.ahead(ranks, [of_chunk(1)], 30.0, until=now + 9)
        compilers.ahead(ranks, [of_chunk(1)], 30.0, until=now + 9, finish=True)
        compilers.ahead(ranks, [of_chunk(1)], 3.0, until=now + 9)
        assert [timeout_s for _, timeout_s in ranks.asked] == [pytest.approx(9, abs=5), 30.0, 3.0]
        ranks.asked.clear()
        found = compilers.ahead(ranks, [of_chunk(n) for n in (3, 1, 2, 1)], 30.0)
        assert found == [ranks.lists[3], None, None, None] and [n for n, _ in ranks.asked] == [3, 1, 2]
        assert "ranks cannot list what" in caplog.text and "timeout: as told" in caplog.text
        assert not compilers.fleets


@pytest.mark.slow
def test_only_points_whose_kernels_kill_or_hang_are_dropped():
    """Each fault ends one kernel, for good; the next ones go on, in processes that start anew where they have to."""
    with faulty(2) as compilers:
        lists = [of_name(*names) for names in (("a", "dies"), ("hangs",), ("refused", "broken"), ("b", "c"), ("dies",))]
        dropped = compilers.compile(lists, candidate_s=2.0)
        assert [error and error.reason for error in dropped] == ["fault", "timeout", None, None, "fault"]
        assert dropped[0].text == "while dies was compiled: rank 0 died by signal 9"
        starts = [fleet.starts for fleet in compilers.fleets]
        assert compilers.compile([of_name("hangs", "refused", "broken")], candidate_s=2.0) == [dropped[1]]
        assert [fleet.starts for fleet in compilers.fleets] == starts, "nothing is tried again"
    with faulty(1) as compilers:
        hangs = [of_name("hangs"), of_name("d")]
        began = time.monotonic()
        assert compilers.compile(hangs, candidate_s=60.0, until=began + 4) == [None] * 2, "their time was over"
        assert time.monotonic() - began < 20
        assert compilers.compile([of_name("e")], 30.0) == [None], "the process runs"
        dropped = compilers.compile(hangs, candidate_s=6.0, until=time.monotonic() + 5, finish=True)
        assert [error and error.reason for error in dropped] == ["timeout", None]
        assert Kernel("d", b"") not in compilers.known, "it never began"
        (late,) = compilers.compile(hangs[1:], 30.0, until=time.monotonic())
        assert late.reason == LATE
        assert compilers.compile(hangs[1:], 30.0) == [None] and Kernel("d", b"") in compilers.known


def test_points_that_would_not_be_compiled_in_time_are_late():
    """By what kernels took so far; one whose kernels are known is not, whatever the time."""
    with faulty(2) as compilers:
        soon = time.monotonic() + 600
        assert compilers.compile([of_name("a", "b")], 30.0, until=soon) == [None], "of the first nothing is known"
        assert len(compilers.took) == 2
        compilers.took = [900.0, 300.0]
        lists = [of_name("a", "c"), of_name("d", "e", "f"), of_name("d"), of_name("b")]
        late = compilers.compile(lists, 30.0, until=time.monotonic() + 900)
        assert [error and error.reason for error in late] == [None, LATE, None, None], "600 s for two, 1200 for four"
        assert {kernel.name for kernel in compilers.known} == {"a", "b", "c", "d"}
        late = compilers.compile([*lists, of_name("a", "b")], 30.0, until=time.monotonic())
        assert [error and error.reason for error in late] == [None, LATE, None, None, None]
        assert compilers.compile(lists, 30.0) == [None] * 4


def test_processes_that_cannot_start_are_done_without(caplog):
    with Compilers(2) as compilers:
        compilers.process = NoProcess()
        with caplog.at_level(logging.WARNING, "uniep"):
            assert compilers.compile([of_name("a", "b")], 30.0) == [None]
        assert caplog.text.count("cannot start: fault: rank 0: RuntimeError: no process here") == 2
        assert compilers.most == compilers.batch == 0 and not compilers.fleets
    with Compilers(8) as compilers:
        compilers.process = NoProcess()
        assert compilers.compile([of_name("a", "b")], 30.0) == [None]
        assert compilers.most == 6, "the others were not tried"


@pytest.fixture
def interrupts():
    """Ctrl-C is KeyboardInterrupt, whoever wanted to know of it before."""
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, usual)


def test_an_interrupt_ends_all_that_compiles(interrupts):
    with pytest.raises(KeyboardInterrupt), faulty(2) as compilers:
        assert compilers.compile([of_name("a", "b", "c", "d")], 30.0) == [None]
        processes = processes_of(compilers)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        compilers.compile([[Kernel("hangs", bytes(n)) for n in range(8)]], 60.0)
    assert time.monotonic() - began < 20 and len(processes) == 2
    assert not any(process.is_alive() for process in processes)
    assert not any(fleet.alive for fleet in compilers.fleets)


@dataclasses.dataclass(frozen=True)
class InFolder(FaultyProcess):
    folder: str = ""

    def made(self, rank: int, group: Any, device: Any) -> Any:
        os.environ["TRITON_CACHE_DIR"] = self.folder
        return Compiler(self.arch)


def test_kernels_are_compiled_into_a_cache_without_a_gpu(tmp_path, monkeypatch):
    """Where another process finds them."""
    triton = pytest.importorskip("triton")
    from uniep.kernels.entry import clock_kernel
    from uniep.kernels.transfer import used_dweights_kernel

    words, floats = torch.zeros(16, dtype=torch.int64), torch.zeros(16)
    dweights = floats, words, torch.zeros(16, dtype=torch.int32), floats, 16
    launches = [
        Launch(clock_kernel, (words,), {}, {"num_warps": 1}),
        *(Launch(used_dweights_kernel, dweights, {"BLOCK": block}, {"num_warps": 4}) for block in (512, 500)),
    ]
    with Compilers(2) as compilers:
        compilers.process = InFolder(folder=str(tmp_path))
        assert compilers.compile([[Kernel.of(launch) for launch in launches]], 60.0) == [None]
    kernels = sorted(file.name for file in tmp_path.glob("*/*.cubin"))
    assert kernels == ["clock_kernel.cubin", "used_dweights_kernel.cubin"], "Triton refuses a block of 500"
    found = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, cache_hit, **_: found.append(cache_hit))
    monkeypatch.setattr(triton.runtime.driver, "_active", Target(90))
    for launch in launches[:2]:
        Kernel.of(launch).compile()
    assert found == [True, True]


def test_what_launches_a_kernel_is_made_with_it(monkeypatch):
    """Where it cannot be made, the launch makes it."""
    triton = pytest.importorskip("triton")
    from triton.backends.nvidia import driver as of_triton

    from uniep.kernels.entry import clock_kernel

    monkeypatch.setattr(triton.runtime.driver, "_active", None)
    kernel, made = Kernel.of(Launch(clock_kernel, (torch.zeros(4, dtype=torch.int64),), {}, {"num_warps": 1})), []

    def launcher(src, metadata):
        made.append((src.name, metadata.num_warps))
        raise AssertionError("libcuda.so cannot found!")

    monkeypatch.setattr(of_triton, "CudaLauncher", launcher)
    Compiler(90).compile(kernel)
    assert made == [("clock_kernel", 1)]


def test_uniep_tune_compiles_beforehand_if_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("UNIEP_TUNE_DIR", str(tmp_path))
    made, given = [], []

    class Spied(Compilers):
        def __init__(self, most):
            super().__init__(most)
            made.append(self)

        def ahead(self, ranks, schedules, *how):
            given.append((ranks.job.tokens, len(schedules)))
            return super().ahead(ranks, schedules, *how)

    monkeypatch.setattr("uniep.cli.tune.Compilers", Spied)
    monkeypatch.setattr("uniep.cli.tune.search", lambda *args, **how: search(*args, **how, most=4))
    layer = "--backend cpu --shape 32x16x4x2 --ep 1 --dtype fp32 --budget-s 60 --sampler random"
    out = tmp_path / "x.json"
    done = CliRunner().invoke(app, f"tune {layer} --tokens 16,64 --compilers 4 --json {out}".split())
    assert done.exit_code == 0, done.output
    assert len(made) == 1 and made[0].most == 4
    assert given == [(16, 2), (16, 2), (16, 2), (64, 2), (64, 2), (64, 2)], "the default, then two batches"
    assert [len(entry["tried"]) for entry in json.loads(out.read_text()).values()] == [4, 4]
    assert CliRunner().invoke(app, f"tune {layer} --tokens 32 --budget-s 0".split()).exit_code == 0
    assert made[1].most == 0, "on CPUs nothing is compiled"

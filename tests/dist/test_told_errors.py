"""What one rank does wrong at an odd moment: every rank gets a named error at once, and no wrong number."""

import contextlib
import dataclasses
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time

import case
import pytest
import torch
from case import config, equal_bits, random_batch, same_bits
from torch._subclasses.fake_tensor import FakeTensorMode

import uniep

BACKENDS = os.path.join("uniep", "backends")


def make(world, cfg, **options):
    """A Workspace of ranks 0 and 1."""
    return uniep.Workspace(cfg, world.group(2), **({"device": "cpu", "timeout_s": 20.0} | options))


def odd_workspace(world, cfg, changes, options):
    """(error, seconds) of making a Workspace where rank 1 alone has `changes` in its config and `options`."""
    if world.rank == 1:
        cfg = dataclasses.replace(cfg, **changes)
    start = time.monotonic()
    error = case.named_error(lambda: make(world, cfg, **(options if world.rank == 1 else {})))
    return error, time.monotonic() - start


@pytest.mark.parametrize(
    ("changes", "options", "text"),
    [
        ({}, {"timeout_s": -1.0}, "timeout_s is -1"),
        ({}, {"backend": "hopper"}, "backend 'hopper' does not run on cpu"),
        ({}, {"device": "nonsense"}, "nonsense"),
        ({"num_experts": 7}, {}, "ranks disagree on num_experts (rank 0: 8, rank 1: 7)"),
    ],
    ids=["timeout", "backend", "device", "experts"],
)
def test_one_rank_cannot_make_its_workspace(pool, changes, options, text):
    """The others do not wait for it."""
    for error, took in pool.run(odd_workspace, config(), changes, options, ranks=2):
        assert error is not None and error[0] == "ConfigError" and text in error[1], error
        assert took < 10


def lonely_workspace(world, cfg, batch):
    """(error, seconds) of making a Workspace that rank 1 does not make, and a step of the next one, of both."""
    error, start = None, time.monotonic()
    if world.rank == 0:
        error = case.named_error(lambda: make(world, cfg, timeout_s=1.0))
    else:
        time.sleep(3)
    took = time.monotonic() - start
    with make(world, cfg) as ws:
        return error, took, case.forward_backward(ws, batch)


def test_a_workspace_that_one_rank_does_not_make(pool):
    """The others wait timeout_s, not as long as the group would, and name it; they can try again."""
    cfg = config()
    batch = random_batch(cfg, (9, 9))
    (error, took, first), (_, _, second) = pool.run(lonely_workspace, cfg, batch, ranks=2)
    assert error[0] == "PeerTimeoutError" and "rank 1 did not come within 1 s" in error[1]
    assert took < 5
    want = pool.run(lone_step, cfg, batch, ranks=2)
    for got, step in zip((first, second), want, strict=True):
        same_bits(got, step, "the next Workspace")


def lone_step(world, cfg, batch):
    with make(world, cfg) as ws:
        return case.forward_backward(ws, batch)


def closed_from(world, cfg, batch, where):
    """(error, seconds) of steps until rank 1 closes its Workspace, by another thread or a signal."""
    ws = make(world, cfg)
    case.forward_backward(ws, batch)
    if world.rank == 1 and where == "thread":
        threading.Timer(0.3, ws.close).start()
    elif world.rank == 1:
        pause_s = 0.5 if where == "slow signal" else 0.0  # the other rank fails meanwhile
        signal.signal(signal.SIGALRM, lambda *_: (ws.close(), time.sleep(pause_s)))
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    start, error = time.monotonic(), None
    while error is None and time.monotonic() < start + 10:
        error = case.named_error(case.forward_backward, ws, batch)
    return error, time.monotonic() - start


@pytest.mark.parametrize("where", ["thread", "signal", "slow signal"])
def test_closed_while_a_call_may_be_under_way(pool, where):
    """A thread waits for the call; a signal handler, which cannot, says so: peers wait no longer than it takes."""
    cfg = config()
    (first, took, *_), (second, *_) = pool.run(closed_from, cfg, random_batch(cfg, (9, 9)), where, ranks=2)
    assert first is not None and second is not None
    assert second[0] == "ClosedError" and "close() was called" in first[1], (first, second)
    assert took < 8


class InterruptionError(KeyboardInterrupt):
    """As Ctrl-C in one process."""


def interrupt_at(number):
    """Raise InterruptionError in this thread when it enters function `number` of the backends."""
    entered = itertools.count()

    def profile(frame, event, _):
        code = frame.f_code
        inside = BACKENDS in code.co_filename and code.co_name not in ("call", "_or_give_up")
        if event == "call" and inside and next(entered) == number:
            raise InterruptionError("Ctrl-C")

    sys.setprofile(profile)


def interrupted(world, cfg, batch, numbers):
    """Per number: (error, seconds, the next step's error) of a step in which rank 1 is interrupted there."""
    found = []
    for number in numbers:
        with make(world, cfg) as ws:
            case.forward_backward(ws, batch)
            if world.rank == 1:
                interrupt_at(number)
            start = time.monotonic()
            try:
                case.forward_backward(ws, batch)
                stopped = None
            except (uniep.UniEPError, KeyboardInterrupt) as error:
                stopped = f"{type(error).__name__}: {error}"
            finally:
                sys.setprofile(None)
            found.append((stopped, time.monotonic() - start, case.named_error(case.forward_backward, ws, batch)))
    return found


def test_an_interrupt_inside_a_call(pool):
    """Wherever it strikes, the other rank hears of it at once, and both Workspaces are dead."""
    numbers = list(range(0, 120, 9))
    first, second = pool.run(interrupted, config(), random_batch(config(), (5, 5, 5, 5)), numbers, ranks=2)
    for number, (stopped, took, after), (own, _, own_after) in zip(numbers, first, second, strict=True):
        assert own is not None and own.startswith("InterruptionError"), (number, own)
        assert stopped is None or "rank 1 failed with InterruptionError" in stopped, (number, stopped)
        assert took < 10
        assert after[0] in ("ClosedError", "PeerTimeoutError") and own_after[0] == "ClosedError", (number, after)


def odd_surroundings(world, cfg, batch, backend):
    """This rank's y of a Workspace made and used under another default device and dtype; a refusal in between."""
    rows, experts = batch.rows(world.rank, 2), batch.experts(world.rank, 2)
    arguments = [batch.x[rows], batch.ids[rows], batch.weights[rows], batch.w13[experts], batch.w2[experts]]
    bad = list(arguments)
    if world.rank == 1:
        bad[1] = bad[1].float()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            ws = make(world, cfg)
            ws.prepare()
            error = case.named_error(lambda: uniep.moe(*bad, workspace=ws))
            y = uniep.moe(*arguments, workspace=ws)
        return error, y, case.forward_backward(ws, batch)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("backend", ["cpu", "nccl"])
def test_another_default_device_and_dtype(pool, backend):
    """Global settings reach neither the exchange nor the numbers."""
    batch = random_batch(config(), (5, 6, 0, 9))
    ranks = pool.run(odd_surroundings, config(), batch, backend, ranks=2)
    want = case.oracle(pool, config(), batch)
    for error, _, _ in ranks:
        assert error[0] == "DTypeError" and "ids have dtype torch.float32" in error[1]
    equal_bits(torch.cat([y for _, y, _ in ranks]), want.y, "y")
    same_bits(case.gather([outcome for _, _, outcome in ranks]), want)


def too_many_compiled(world, cfg, batch):
    """(error of a compiled call for which rank 1 has too many tokens, y of the next)."""
    with make(world, cfg) as ws:
        rows, experts = batch.rows(world.rank, 2), batch.experts(world.rank, 2)
        arguments = batch.x[rows], batch.ids[rows], batch.weights[rows], batch.w13[experts], batch.w2[experts]

        @torch.compile(fullgraph=True, backend="eager")
        def compiled(x, ids, weights, w13, w2):
            return uniep.moe(x, ids, weights, w13, w2, workspace=ws)

        def call(repeats):
            tokens = [t.repeat(repeats, 1) for t in arguments[:3]]
            for t in tokens:
                torch._dynamo.decorators.mark_unbacked(t, 0)
            return compiled(*tokens, *arguments[3:])

        return case.named_error(call, 100 if world.rank == 1 else 1), call(1)


def test_a_compiled_call_refuses_on_every_rank(pool):
    """62, 72: the number of tokens is judged when the call runs, so all ranks hear of it."""
    batch = random_batch(config(), (5, 6, 0, 9))
    ranks = pool.run(too_many_compiled, config(), batch, ranks=2)
    for rank, (error, _) in enumerate(ranks):
        words = "there are 900 tokens" if rank == 1 else "rank 1: there are 900 tokens"
        assert error[0] == "ConfigError" and words in error[1], error
    equal_bits(torch.cat([y for _, y in ranks]), case.oracle(pool, config(), batch).y, "y")


def leaving(world, cfg, batch, how):
    """Rank 1 leaves after one step, rank 0 goes on: (its error, seconds)."""
    start = 0.0
    try:
        with make(world, cfg, timeout_s=60.0) as ws:
            case.forward_backward(ws, batch)
            start = time.monotonic()
            if world.rank == 1 and how == "error":
                raise OSError("no more data")
            while world.rank == 0:
                case.forward_backward(ws, batch)
    except (uniep.PeerTimeoutError, OSError) as error:
        return str(error), time.monotonic() - start
    return None


@pytest.mark.parametrize(("how", "reason"), [("error", "OSError: no more data"), ("end", "close() was called")])
def test_one_rank_leaves(pool, how, reason):
    """62, 63: its own error, or fewer batches: the other hears why at once, not after the time limit."""
    first, _ = pool.run(leaving, config(), random_batch(config(), (5, 5, 5, 5)), how, ranks=2)
    assert f"rank 1 left after call 2 ({reason})" in first[0], first
    assert first[1] < 10


MODES = {
    "plain": contextlib.nullcontext,
    "meta": lambda: torch.device("meta"),
    "fake": FakeTensorMode,
    "inference": torch.inference_mode,
}


def dropping(world, cfg, batch, mode):
    """Rank 1 drops its Workspace after one step, rank 0 goes on: (its error, seconds)."""
    ws = make(world, cfg, timeout_s=60.0)
    case.forward_backward(ws, batch)
    if world.rank == 1:
        with MODES[mode]():
            del ws
            gc.collect()
        return None
    start = time.monotonic()
    return case.named_error(case.forward_backward, ws, batch), time.monotonic() - start


@pytest.mark.parametrize("mode", MODES)
def test_one_rank_drops_its_workspace(pool, mode):
    """63: as at the end of a process that an error of its program ends; nobody has to wait for it, whatever mode of
    PyTorch is on where garbage is collected."""
    first, _ = pool.run(dropping, config(), random_batch(config(), (5, 5, 5, 5)), mode, ranks=2)
    error, took = first
    assert error[0] == "PeerTimeoutError" and "rank 1 left after call 2 (its Workspace was dropped" in error[1], error
    assert took < 10


ENDING = """
import os, sys, torch.distributed as dist
sys.path.insert(0, sys.argv[1])
import case, uniep
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
batch = case.random_batch(case.config(), (5, 6, 0, 9))
ws = uniep.Workspace(case.config(), dist.group.WORLD, device="cpu", timeout_s=60)
case.forward_backward(ws, batch)
if rank == 1:
    child = os.fork()
    if child == 0:
        sys.exit(0)  # of which nobody must hear
    os.waitpid(child, 0)
case.forward_backward(ws, batch)
if rank == 1:
    raise ValueError("no more data")
try:
    case.forward_backward(ws, batch)
except uniep.PeerTimeoutError as error:
    print(error)
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_program_ends_without_closing(tmp_path):
    """63: by an error outside of the layer; the end of a forked child is none."""
    arguments = [sys.executable, "-c", ENDING, os.path.dirname(__file__), str(tmp_path / "store")]
    ranks = [
        subprocess.Popen(arguments, env=os.environ | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    start = time.monotonic()
    said, _ = (rank.communicate(timeout=120)[0] for rank in ranks)
    assert "rank 1 left after call 4" in said and "its process ended, without close()" in said, said
    assert time.monotonic() - start < 55


FAKE = """
import torch.distributed as dist, uniep
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
cfg = uniep.MoEConfig(hidden=64, ffn=64, num_experts=8, top_k=2, max_tokens_per_rank=8)
try:
    uniep.Workspace(cfg, dist.group.WORLD, device="cpu")
except uniep.UnsupportedError as error:
    print(error)
"""


def test_a_fake_process_group():
    """Its ranks do not exist, so none of them is missing."""
    told = subprocess.run([sys.executable, "-c", FAKE], capture_output=True, text=True, timeout=120, check=True).stdout
    assert "fake one of 2 ranks" in told and "group=None" in told

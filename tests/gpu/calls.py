"""Checks of test_hopper.py: what ranks tell each other, and calls beside other work."""

import dataclasses
import functools
import random
import statistics
import time

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch.utils.checkpoint import checkpoint

import uniep
from uniep import MoEConfig, Schedule, Workspace
from uniep.backends.base import Inputs, LayerTag, Needs
from uniep.kernels.ptx import load_acquire, nanoseconds
from uniep.launch import driver as call
from uniep.launch import mega as launch_mega
from uniep.launch import staged as launch
from uniep.schedule import default_schedule
from uniep.weights import ExpertWeights

SHAPE = {"hidden": 512, "ffn": 264, "num_experts": 16, "top_k": 4, "max_tokens_per_rank": 1024}
COPIED = Schedule(transfer="copy", activation_gradient="beside", beside_from=0)
PUSHED = Schedule(transfer="push")
MEGA = Schedule(transfer="push", overlap="mega")
WAYS = {"copied": COPIED, "pushed": PUSHED, "mega": MEGA}


def same(want, got):
    return all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


NO_LAYER = LayerTag()


def parts(data, layer=NO_LAYER):
    x, ids, weights, w13, w2, dy = data
    return Inputs(x, ids, weights, ExpertWeights((w13,), (w2,), "stacked"), layer), dy


def together():
    torch.cuda.synchronize()
    dist.barrier()


def check_other_forward(r):
    """Backwards of different forwards: the same UniEPError on every rank, and NaN."""
    cfg = MoEConfig(**SHAPE)
    given, dy = parts(r.data(cfg, 500))
    for schedule in (*WAYS.values(), Schedule(transfer="copy", received="again")):
        workspace = Workspace(cfg, r.group, schedule=schedule, timeout_s=20)
        backend = workspace.backend
        saved = [backend.forward(given, save=True)[1] for _ in range(2)]
        got = []

        def run(backend=backend, saved=saved, got=got):
            got.append(backend.backward(dy, given, saved[int(r.rank == 0)], Needs()))
            torch.cuda.synchronize()
            backend.check()

        with pytest.raises(uniep.UniEPError, match="backward of different forwards"):
            run()
        assert all(bool(t.isnan().all()) for g in got for t in (g.x, g.weights, *g.w13, *g.w2)), schedule
        together()


def check_other_operation(r):
    """With gradients on one rank only, or another layer: the same UniEPError on every rank, in this call; the Workspace
    works afterwards.  A layer that one rank does not know equals any."""
    cfg = MoEConfig(**SHAPE)
    data = r.data(cfg, 500)
    given, _ = parts(data)
    with Workspace(cfg, r.group, timeout_s=20) as workspace:
        backend = workspace.backend
        want = backend.forward(given, save=False)[0]
        with pytest.raises(uniep.UniEPError, match="different operations"):
            backend.forward(given, save=r.rank == 0)
        with pytest.raises(uniep.UniEPError, match="different layers"):
            backend.forward(parts(data, LayerTag(1 + int(r.rank == 0)))[0], save=False)
        assert torch.equal(backend.forward(parts(data, LayerTag(3 * int(r.rank == 0)))[0], save=False)[0], want)


def check_copied_experts(r):
    """Digests that were different and are equal: refused on every rank, at once or at the next look."""
    data = r.data(MoEConfig(**SHAPE), 500)
    for cfg in (MoEConfig(**SHAPE), MoEConfig(**SHAPE, max_rows=8192)):
        with Workspace(cfg, r.group, timeout_s=20) as workspace:
            for now, error in ((r.rank, False), (7, True)):
                digest = torch.tensor([r.rank - 3, now, 1], device=r.device)
                given = parts(data, LayerTag(1, digest))[0]

                def run(workspace=workspace, given=given):
                    workspace.backend.forward(given, save=False)
                    torch.cuda.synchronize()
                    workspace.check()

                if error:
                    with pytest.raises(uniep.UniEPError, match="weights have become equal"):
                        run()
                else:
                    run()
            together()


def check_last_number(r):
    """Calls across 2**31 and across 0 have the bits of others."""
    cfg = MoEConfig(**SHAPE)
    data = r.data(cfg, 700)
    for schedule in WAYS.values():
        with Workspace(cfg, r.group, schedule=schedule, timeout_s=20) as workspace:
            want, backend = r.run(workspace, data), workspace.backend
            for start in (2**31 - 3, -3):
                together()
                backend.planner.call.fill_(start)
                backend.arena.views["flags"].fill_(start)
                backend.planner.calls_made = start
                together()
                for _ in range(3):
                    assert same(want, r.run(workspace, data)), start
            together()


def check_exception_told(r):
    """Rank 1 fails while it launches: all others raise within seconds, naming it and why, whatever timeout_s is."""
    cfg = MoEConfig(**SHAPE)
    data = r.data(cfg, 500)
    for schedule in WAYS.values():
        module, name = (launch_mega, "launch_forward") if schedule is MEGA else (launch, "launch_gate_up")
        workspace = Workspace(cfg, r.group, schedule=schedule, timeout_s=100)
        r.run(workspace, data)
        together()
        if r.rank == 1:
            usual = getattr(module, name)

            def fails(*args, **options):
                raise MemoryError("of this check")

            setattr(module, name, fails)
            try:
                with pytest.raises(MemoryError):
                    uniep.moe(*data[:5], workspace=workspace)
            finally:
                setattr(module, name, usual)
        else:
            started = time.monotonic()
            with pytest.raises(uniep.PeerTimeoutError, match="rank 1 failed with MemoryError: of this check"):
                y = uniep.moe(*data[:5], workspace=workspace)
                torch.cuda.synchronize()
                assert y.isnan().all()
                workspace.check()
            assert time.monotonic() - started < 10
        with pytest.raises(uniep.ClosedError):
            uniep.moe(*data[:5], workspace=workspace)
        together()


def check_left(r):
    """Rank 1 closes its Workspace: who calls on raises within seconds."""
    cfg = MoEConfig(**SHAPE, max_rows=8192)
    data = r.data(cfg, 500)
    workspace = Workspace(cfg, r.group, timeout_s=100)
    r.run(workspace, data)
    if r.rank == 1:
        workspace.close()
    else:
        started = time.monotonic()
        y = uniep.moe(*data[:5], workspace=workspace)
        torch.cuda.synchronize()
        assert y.isnan().all()
        with pytest.raises(uniep.PeerTimeoutError, match="rank 1 left after call"):
            workspace.check()
        assert time.monotonic() - started < 10
    together()


def check_late_rank(r):
    """A rank that comes after its peers gave up: an error at once, and no result."""
    cfg = MoEConfig(**SHAPE, max_rows=8192)
    data = r.data(cfg, 500)
    for schedule in WAYS.values():
        workspace = Workspace(cfg, r.group, schedule=schedule, timeout_s=2)
        uniep.moe(*data[:5], workspace=workspace)
        together()
        if r.rank == 1:
            time.sleep(4)
        started = time.monotonic()
        with pytest.raises(uniep.PeerTimeoutError, match="rank"):
            y = uniep.moe(*data[:5], workspace=workspace)
            torch.cuda.synchronize()
            assert y.isnan().all()
            workspace.check()
        assert time.monotonic() - started < (1.5 if r.rank == 1 else 10)
        together()


def check_waits(r):
    """For rank 1, which comes 0.2 s late, the others wait at the entry, by their devices' clocks; also in calls that
    are made again by records."""
    cfg = MoEConfig(**SHAPE, max_rows=8192)
    data = r.data(cfg, 500)
    for schedule in WAYS.values():
        with Workspace(cfg, r.group, schedule=schedule, timeout_s=60) as workspace:
            for _ in range(5):
                y = uniep.moe(*data[:5], workspace=workspace)
                together()
                before = workspace.backend.waited().clone()
                torch.cuda.synchronize()
                if r.rank == 1:
                    time.sleep(0.2)
                assert torch.equal(uniep.moe(*data[:5], workspace=workspace), y)
                entry_ms, data_ms = ((workspace.backend.waited() - before) / 1e6).tolist()
                assert (entry_ms > 150) == (r.rank != 1) and 0 <= data_ms < 150, (entry_ms, data_ms)
                together()


def check_two_workspaces(r):
    """On two streams, in the same order on every rank: their bits.  In another order: an error on every rank, which
    names Workspaces and calls."""
    cfg = MoEConfig(**SHAPE, max_rows=8192)
    data, streams = r.data(cfg, 700), [torch.cuda.Stream() for _ in range(2)]
    chance = random.Random(r.rank)
    workspaces = [Workspace(cfg, r.group, schedule=PUSHED, timeout_s=5) for _ in range(2)]
    want = r.run(workspaces[0], data)
    wrong = [torch.zeros((), dtype=torch.int64, device=r.device) for _ in streams]
    together()
    for _ in range(100):
        for stream, workspace, count in zip(streams, workspaces, wrong, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(chance.randrange(200_000))
                count += (uniep.moe(*data[:5], workspace=workspace) != want[0]).sum()
    together()
    assert not any(map(int, wrong))
    for workspace in workspaces:
        workspace.check()
    started = time.monotonic()
    with pytest.raises(uniep.PeerTimeoutError, match=r"Workspace \d+|cannot go on"):
        first = int(r.rank > 0)
        for workspace in (workspaces[first], workspaces[1 - first]):
            uniep.moe(*data[:5], workspace=workspace)
            torch.cuda.synchronize()
            workspace.check()
    assert time.monotonic() - started < 20
    together()


def check_graph_beside_eager(r):
    """A graph replayed on one stream, calls on another, ranks out of step: the bits of both."""
    cfg = MoEConfig(**SHAPE, max_rows=8192)
    ours, theirs = r.data(cfg, 700), r.data(cfg, 600, seed=1)
    chance = random.Random(r.rank)
    for schedule in WAYS.values():
        with Workspace(cfg, r.group, schedule=schedule, timeout_s=10) as workspace:
            want = [uniep.moe(*data[:5], workspace=workspace) for data in (ours, theirs)]
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                y = uniep.moe(*ours[:5], workspace=workspace)
            streams = [torch.cuda.Stream() for _ in range(2)]
            wrong = [torch.zeros((), dtype=torch.int64, device=r.device) for _ in range(2)]
            together()
            for _ in range(100):
                with torch.cuda.stream(streams[0]):
                    torch.cuda._sleep(chance.randrange(200_000))
                    graph.replay()
                    wrong[0] += (y != want[0]).sum()
                with torch.cuda.stream(streams[1]):
                    torch.cuda._sleep(chance.randrange(200_000))
                    wrong[1] += (uniep.moe(*theirs[:5], workspace=workspace) != want[1]).sum()
            together()
            workspace.check()
            assert not any(map(int, wrong)), (schedule, wrong)


@triton.jit
def hold_kernel(until_ns):
    start = nanoseconds()
    now = start
    while now - start < until_ns:
        now = nanoseconds()


def check_free_sms(r):
    """free_sms=24: beside 24 multiprocessors held, or collectives, a forward takes at most 1.3 times as long."""
    cfg = MoEConfig(hidden=2048, ffn=768, num_experts=128, top_k=8, max_tokens_per_rank=8192)
    data = r.data(cfg, 8192, unused=0.0)
    schedule = dataclasses.replace(default_schedule("hopper", cfg, r.size), free_sms=24)
    side, group = torch.cuda.Stream(), dist.new_group(backend="nccl")
    block = torch.zeros(2**25, device=r.device)
    gathered = torch.zeros(r.size * 2**25, device=r.device)
    dist.all_gather_into_tensor(gathered, block, group=group)

    def median_ms(workspace, start):
        times = []
        for _ in range(15):
            together()
            with torch.cuda.stream(side):
                start()
            torch.cuda._sleep(400_000)  # what is beside the call has begun
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            uniep.moe(*data[:5], workspace=workspace)
            events[1].record()
            torch.cuda.synchronize()
            times.append(events[0].elapsed_time(events[1]))
        return statistics.median(times[3:])

    def gather():
        for _ in range(12):
            dist.all_gather_into_tensor(gathered, block, group=group)

    beside = {
        "held": lambda: hold_kernel[(24,)](8_000_000, num_warps=32),
        "collectives": gather,
    }
    with Workspace(cfg, r.group, schedule=schedule, timeout_s=60) as workspace:
        alone = median_ms(workspace, lambda: None)
        ratio = {how: median_ms(workspace, start) / alone for how, start in beside.items()}
    with Workspace(cfg, r.group, timeout_s=60) as workspace:
        usual = median_ms(workspace, lambda: None)
    print(f"rank {r.rank}: forward {usual:.3f} ms, free_sms=24 {alone:.3f} ms, beside others times {ratio}", flush=True)
    dist.destroy_process_group(group)
    assert all(value <= 1.3 for value in ratio.values()), (usual, alone, ratio)


@triton.jit(do_not_specialize=["first", "count", "timeout_ns"])
def read_behind_flag_kernel(
    last_ptr, flag_ptr, ack_ptr, wrong_ptr, first, count, timeout_ns, WORDS: tl.constexpr, THREADS: tl.constexpr
):
    """Wait for the flag to become first, first + 1, ...; each time see that these words have its value."""
    lanes = tl.arange(0, THREADS)
    wrong = tl.zeros((), tl.int32)
    deadline_ns = nanoseconds() + timeout_ns
    late = 0
    i = first + 0
    while (i < first + count) & (late == 0):
        seen = tl.min(load_acquire(flag_ptr + lanes * 0))
        while (seen < i) & (late == 0):
            seen = tl.min(load_acquire(flag_ptr + lanes * 0))
            late = tl.max(tl.where(nanoseconds() > deadline_ns, lanes * 0 + 1, 0))
        values = tl.load(last_ptr + tl.arange(0, WORDS), cache_modifier=".cg")
        wrong += tl.sum((values != i).to(tl.int32)) + late
        tl.debug_barrier()
        tl.atomic_xchg(ack_ptr, i, sem="release", scope="sys")
        i += 1
    tl.store(wrong_ptr, wrong)


@triton.jit(do_not_specialize=["needed", "timeout_ns"])
def wait_kernel(flag_ptr, late_ptr, needed, timeout_ns):
    """late: set by the first wait that is not fulfilled in time; those behind it do not wait any more."""
    deadline_ns = nanoseconds() + tl.where(tl.load(late_ptr) == 0, timeout_ns, 0)
    lanes = tl.arange(0, 32)
    while tl.min(load_acquire(flag_ptr + lanes * 0)) < needed:
        if tl.max(tl.where(nanoseconds() > deadline_ns, lanes * 0 + 1, 0)) > 0:
            needed = needed * 0 - 1
            tl.store(late_ptr, 1)


def check_copy_then_flag(r):
    """A copy engine's copy, then its copy of a flag, 100,000 times: who sees the flag sees the copy's last 64 KB."""
    words, batch, longest_ns = 2**14, 10_000, 20 * 10**9
    sending, reading = torch.cuda.Stream(), torch.cuda.Stream()
    with Workspace(MoEConfig(**SHAPE), r.group, timeout_s=20) as workspace:
        arena = workspace.backend.arena
        after, before = (r.rank + 1) % r.size, (r.rank - 1) % r.size
        here, there = (arena.everywhere["receive"][rank][:-1].view(torch.int32).flatten() for rank in (r.rank, after))
        size = min(here.numel(), 2**18)
        flag, ack = arena.views["exchange"][0, 0], arena.views["exchange"][1, 0]
        their_flag, their_ack = arena.everywhere["exchange"][after][0, 0], arena.everywhere["exchange"][before][1, 0]
        flag[:1].zero_()
        ack[:1].zero_()
        data = torch.zeros(size, dtype=torch.int32, device=r.device)
        wrong = torch.zeros(10, 4, dtype=torch.int32, device=r.device)
        late = torch.zeros(4, dtype=torch.int32, device=r.device)
        # Loaded before anything spins: loading code may wait for the kernels that run.
        reads = (here[size - words :], flag, their_ack, wrong[0], 1, 0, longest_ns)
        call.launch(read_behind_flag_kernel, 1, reads, {"WORDS": words, "THREADS": 256}, num_warps=8)
        call.launch(wait_kernel, 1, (ack, late, 0, longest_ns), {}, num_warps=1)
        data.fill_(0)
        call.copy(there[:size], data, torch.cuda.current_stream())
        together()
        started, done = time.monotonic(), 0
        while done < 10 * batch:
            number = done // batch
            with torch.cuda.stream(reading):
                call.launch(
                    read_behind_flag_kernel, 1,
                    (here[size - words :], flag, their_ack, wrong[number], done + 1, batch, longest_ns),
                    {"WORDS": words, "THREADS": 256}, num_warps=8,
                )  # fmt: skip
            with torch.cuda.stream(sending):
                for i in range(done + 1, done + batch + 1):
                    call.launch(wait_kernel, 1, (ack, late, i - 1, longest_ns), {}, num_warps=1)
                    data.fill_(i)
                    call.copy(there[:size], data, sending)
                    call.copy(their_flag, data[:1], sending)
            together()
            done += batch
            slow = torch.tensor([time.monotonic() - started > 15], device=r.device, dtype=torch.int32)
            dist.all_reduce(slow)
            if int(slow):
                break
        assert not wrong.any() and not late.any(), (wrong.tolist(), late.tolist())
        assert done >= batch
        together()


def check_checkpointing(r):
    """A layer that is recomputed after calls that change what is allocated, with saved and moved tensors."""
    cfg = MoEConfig(**SHAPE)
    x, ids, weights, w13, w2, dy = r.data(cfg, 900)
    one_rank = torch.full_like(ids, -1)
    one_rank[:, 0] = 0
    with Workspace(cfg, r.group, timeout_s=20) as workspace:
        leaves = [t.detach().requires_grad_() for t in (x, weights, w13, w2)]

        def layer(choice):
            return uniep.moe(leaves[0], choice, *leaves[1:], workspace=workspace)

        def gradients(choice, call):
            y = call(choice)
            for other in (one_rank, ids, one_rank):
                for _ in range(3):
                    layer(other)
            return torch.autograd.grad(y, leaves, dy)

        def moved(choice, pinned):
            with torch.autograd.graph.save_on_cpu(pin_memory=pinned):
                return layer(choice)

        recomputed = functools.partial(checkpoint, layer, use_reentrant=False)
        compiled = functools.partial(checkpoint, torch.compile(layer), use_reentrant=False)
        ways = {
            "recomputed": recomputed, "to pinned memory": functools.partial(moved, pinned=True), "again": recomputed,
            "to other memory": functools.partial(moved, pinned=False), "compiled": compiled,
        }  # fmt: skip
        for choice in (ids, one_rank):
            want = gradients(choice, layer)
            for name, call in ways.items():
                assert same(want, gradients(choice, call)), name
        workspace.check()

"""Errors and lifetime: every failure is a named error on every rank within the timeout, never a hang.

Field reports 62, 63, 64, 67 in processes; order of calls, closing, mismatches between ranks.
"""

import dataclasses
import gc
import os
import re
import threading
import time
from pathlib import Path

import case
import pytest
import torch
import torch.distributed as dist
from case import config, random_batch, same_bits
from pool import Pool, WorkerHungError

import uniep

SHORT_S = 3.0
"""Timeout of Workspaces that a test lets run into it."""

SLACK_S = 10.0
"""What a busy machine may add."""


def impatient(world, cfg, batch, ep_size):
    """A Workspace with a short timeout, once a patient one has warmed every process up."""
    with case.workspace(world, cfg, ep_size) as ws:
        case.forward_backward(ws, batch)
    return uniep.Workspace(cfg, world.group(ep_size), device="cpu", timeout_s=SHORT_S)


def step_error(world, cfg, batch, ep_size, damage):
    """(error of a step where rank 1 passes something else, a normal step before, one after)."""
    with case.workspace(world, cfg, ep_size) as ws:
        before = case.forward_backward(ws, batch)
        rows, experts = batch.rows(ws.rank, ep_size), batch.experts(ws.rank, ep_size)
        x, ids, weights, w13, w2 = (
            batch.x[rows],
            batch.ids[rows],
            batch.weights[rows],
            batch.w13[experts],
            batch.w2[experts],
        )
        if ws.rank == 1:
            x, ids, weights, w13, w2 = DAMAGES[damage][0](x, ids, weights, w13, w2)
        error = case.named_error(lambda: uniep.moe(x, ids, weights, w13, w2, workspace=ws))
        return error, before, case.forward_backward(ws, batch)


DAMAGES = {
    "x in fp64": (lambda x, i, w, a, b: (x.double(), i, w, a, b), "DTypeError", r"x has dtype torch\.float64"),
    "w2 in bf16": (lambda x, i, w, a, b: (x, i, w, a, b.bfloat16()), "DTypeError", r"w2 has dtype torch\.bfloat16"),
    "float ids": (lambda x, i, w, a, b: (x, i.float(), w, a, b), "DTypeError", r"ids have dtype torch\.float32"),
    "narrow x": (lambda x, i, w, a, b: (x[:, :-1], i, w, a, b), "ConfigError", r"x has shape \(\d+, 63\).*hidden=64"),
    "one slot": (lambda x, i, w, a, b: (x, i[:, :1], w, a, b), "ConfigError", r"ids have shape \(\d+, 1\).*top_k=2"),
    "missing expert": (lambda x, i, w, a, b: (x, i, w, a[1:], b), "ConfigError", r"w13 has shape \(1, 128, 64\)"),
    "too many tokens": (
        lambda x, i, w, a, b: (x.repeat(60, 1), i.repeat(60, 1), w.repeat(60, 1), a, b),
        "ConfigError",
        r"max_tokens_per_rank is 256",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_62_one_rank_refuses(pool, damage):
    """62: rank 1 passes something wrong: each rank raises the same named error, and the Workspace works on."""
    _, kind, text = DAMAGES[damage]
    cfg = config()
    batch = random_batch(cfg, (5, 5, 5, 5))
    for error, before, after in pool.run(step_error, cfg, batch, 4, damage):
        assert error is not None and error[0] == kind and re.search(text, error[1]), error
        same_bits(after, before)


def absent_rank(world, cfg, batch):
    """Rank 1 raises in user code before the layer; (error, seconds) of the others, then the next call's error."""
    ws = impatient(world, cfg, batch, 4)
    if ws.rank == 1:
        ws.close()
        return None
    start = time.monotonic()
    error = case.named_error(case.forward_backward, ws, batch)
    took = time.monotonic() - start
    after = case.named_error(case.forward_backward, ws, batch)
    ws.close()
    return error, took, after


def test_62_one_rank_does_not_come(pool):
    """62, 66: the others raise PeerTimeoutError within the timeout, naming the rank; then ClosedError."""
    cfg = config()
    found = pool.run(absent_rank, cfg, random_batch(cfg, (5, 5, 5, 5)))
    for result in (found[0], found[2], found[3]):
        (kind, message), took, after = result
        assert kind == "PeerTimeoutError" and "rank 1" in message, message
        assert took < SHORT_S + SLACK_S
        assert after is not None and after[0] == "ClosedError", after


def killed_rank(world, cfg, batch):
    """Rank 1 dies after one good step; rank 0 goes on."""
    ws = impatient(world, cfg, batch, 2)
    case.forward_backward(ws, batch)
    if ws.rank == 1:
        os._exit(9)
    return case.named_error(case.forward_backward, ws, batch)


def test_62_one_rank_is_killed():
    """62: the survivor raises PeerTimeoutError, and no shared memory outlives the processes."""
    cfg = config()
    small = Pool(2)
    own = tuple(f"uniep-{process.pid}-" for process in small._processes)
    try:
        with pytest.raises(
            WorkerHungError, match=r"rank 0: returned \('PeerTimeoutError'[\s\S]*rank 1: dead, exit code 9"
        ):
            small.run(killed_rank, cfg, random_batch(cfg, (5, 5, 5, 5)))
    finally:
        small.close()
    if os.path.isdir("/dev/shm"):
        assert not [name for name in os.listdir("/dev/shm") if name.startswith(own)]


def unequal_calls(world, cfg, batch, extra):
    """Rank 0 does one forward more than the others, then every rank a normal step; (error, seconds)."""
    ws = impatient(world, cfg, batch, 4)
    start = time.monotonic()
    error = None
    if ws.rank == 0 and extra == "evaluation":
        error = case.named_error(case.forward_only, ws, batch)
    elif ws.rank == 0:
        rows, experts = batch.rows(0, 4), batch.experts(0, 4)
        parameters = case.leaf(batch.w13[experts]), case.leaf(batch.w2[experts])
        arguments = (batch.x[rows], batch.ids[rows], batch.weights[rows], *parameters)
        error = case.named_error(lambda: uniep.moe(*arguments, workspace=ws))
    error = error or case.named_error(case.forward_backward, ws, batch)
    took = time.monotonic() - start
    ws.close()
    return error, took


@pytest.mark.parametrize("extra", ["evaluation", "forward"])
def test_63_unequal_numbers_of_calls(pool, extra):
    """63: rank 0 does one extra forward: soon a named error on all ranks says who was where; nobody trains on."""
    cfg = config()
    call = {"evaluation": 1, "forward": 2}[extra]  # a forward is taken for the others' forward: same call, same kind
    for error, took in pool.run(unequal_calls, cfg, random_batch(cfg, (5, 5, 5, 5)), extra):
        assert error is not None and re.search(rf"call {call}\b[\s\S]*rank 0: forward", error[1]), error
        assert took < 2 * SHORT_S + SLACK_S


def extra_call_at_the_end(world, cfg, batch):
    ws = impatient(world, cfg, batch, 2)
    case.forward_backward(ws, batch)
    error = case.named_error(case.forward_only, ws, batch) if ws.rank == 0 else None
    ws.close()
    return error


def test_63_evaluation_on_one_rank_only(pool):
    """63: after the last common step one rank goes on alone: it gets a PeerTimeoutError that names the other."""
    cfg = config()
    first, second = pool.run(extra_call_at_the_end, cfg, random_batch(cfg, (5, 5, 5, 5)), ranks=2)
    assert first is not None and first[0] == "PeerTimeoutError" and "rank 1" in first[1], first
    assert second is None


def backwards_in_different_order(world, cfg, batch, same):
    """Two forwards, `same` routing or not; rank 1 runs their backwards in the other order: the error."""
    with case.workspace(world, cfg, 2) as ws:
        rows, experts = batch.rows(ws.rank, 2), batch.experts(ws.rank, 2)
        outputs = []
        for scale in (1.0, 2.0):
            x, weights = case.leaf(scale * batch.x[rows]), batch.weights[rows] if same else scale * batch.weights[rows]
            outputs.append(uniep.moe(x, batch.ids[rows], weights, batch.w13[experts], batch.w2[experts], workspace=ws))
        for y in reversed(outputs) if ws.rank else outputs:
            if (error := case.named_error(y.backward, batch.dy[rows])) is not None:
                return error
    return None


@pytest.mark.parametrize("same", [False, True], ids=["other weights", "same routing"])
def test_63_backwards_in_different_order(pool, same):
    """63: ranks that run backwards in different orders get a named error, also when the routing is the same."""
    cfg = config()
    for error in pool.run(backwards_in_different_order, cfg, random_batch(cfg, (5, 5, 5, 5)), same, ranks=2):
        assert error is not None and "same order" in error[1], error


def overlapping(world, cfg, batches, members, turns):
    """One Workspace per group, all alive, called in turn; {group: outcomes of this rank}."""
    groups = [dist.new_group(list(m)) for m in members]
    spaces = {
        n: uniep.Workspace(cfg, group, device="cpu", timeout_s=case.TIMEOUT_S)
        for n, group in enumerate(groups)
        if world.rank in members[n]
    }
    found = {n: [] for n in spaces}
    for _ in range(turns):
        for n, ws in spaces.items():
            found[n].append(case.forward_backward(ws, batches[n]))
    for ws in spaces.values():
        ws.close()
    for n in spaces:
        dist.destroy_process_group(groups[n])
    return found


@pytest.mark.parametrize(
    "members", [((0, 1), (2, 3), (1, 2)), ((0, 1), (0, 1, 2)), ((0, 3), (3, 1, 0), (2, 1))], ids=str
)
def test_64_overlapping_groups(pool, members):
    """64: Workspaces of overlapping groups alive together, called in turn: each equals its oracle."""
    cfg = config(num_experts=6)
    batches = [random_batch(cfg, (5, 8, 3, 0) if len(m) == 3 else (5, 2, 9, 0), seed=n) for n, m in enumerate(members)]
    found = pool.run(overlapping, cfg, batches, members, 10)
    for n, ranks in enumerate(members):
        want = case.oracle(pool, cfg, batches[n])
        for parts in zip(*(found[rank][n] for rank in sorted(ranks)), strict=True):
            same_bits(case.gather(list(parts)), want, str(ranks))


def resources():
    """(threads, open files, mapped shared-memory regions) of this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    maps = sum("/dev/shm" in line or "memfd" in line for line in lines)
    return threading.active_count(), len(os.listdir("/proc/self/fd")), maps


def build_and_drop(world, cfg, batch, rounds):
    """Layers built, used and dropped at different times per rank; resources after an early and the last round."""
    seen = []
    for number in range(rounds):
        group = dist.new_group(list(range(world.size)))
        layer = uniep.nn.Experts(cfg, group, device="cpu", seed=0)
        rows = batch.rows(world.rank, world.size)
        layer(batch.x[rows], batch.ids[rows], batch.weights[rows]).sum().backward()
        if world.rank == 0:
            del layer
            gc.collect()
        elif world.rank == 1:
            layer.workspace.close()
        time.sleep(0.002 * world.rank)
        layer = None
        dist.destroy_process_group(group)
        if number in (4, rounds - 1):
            gc.collect()
            dist.barrier()
            seen.append(resources())
    return seen


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts resources through /proc")
@pytest.mark.slow
def test_67_twenty_lifetimes(pool):
    """67: 20 rounds of build, step, drop at different times, destroy the group: no hang, nothing left over."""
    cfg = config()
    for early, late in pool.run(build_and_drop, cfg, random_batch(cfg, (5, 5, 5, 5)), 20):
        assert late[0] <= early[0] and late[1] <= early[1] + 2 and late[2] <= early[2], (early, late)


def closing(world, cfg, batch, ep_size):
    """Errors after close, after close twice, and after fail."""
    ws = case.workspace(world, cfg, ep_size)
    case.forward_backward(ws, batch)
    ws.close()
    ws.close()
    closed = case.named_error(case.forward_backward, ws, batch)
    other = case.workspace(world, cfg, ep_size)
    other.fail("the network is gone")
    failed = [
        case.named_error(call) for call in (other.check, other.prepare, lambda: case.forward_backward(other, batch))
    ]
    other.close()
    failed.append(case.named_error(other.check))
    return closed, failed, repr(other)


@pytest.mark.parametrize("ep_size", [1, 2])
def test_closing(pool, ep_size):
    """close() is idempotent; every use afterwards is a ClosedError; after a failure it repeats the cause."""
    cfg = config()
    for closed, failed, text in pool.run(closing, cfg, random_batch(cfg, (5, 5, 5, 5)), ep_size, ranks=ep_size):
        assert closed[0] == "ClosedError" and "close() was called" in closed[1]
        assert all(kind == "ClosedError" and "the network is gone" in message for kind, message in failed), failed
        assert "the network is gone" in text


def dropped_before_backward(world, cfg, batch):
    ws = case.workspace(world, cfg, 1)
    x = case.leaf(batch.x)
    y = uniep.moe(x, batch.ids, batch.weights, batch.w13, batch.w2, workspace=ws)
    del ws
    gc.collect()
    return case.named_error(y.sum().backward)


def test_a_workspace_must_outlive_backward(pool):
    cfg = config()
    ((kind, message),) = pool.run(dropped_before_backward, cfg, random_batch(cfg, (5, 5, 5, 5)), ranks=1)
    assert kind == "ClosedError" and "keep it alive" in message


def mismatch(world, cfg, changes, schedules):
    odd = world.rank == 2
    made = dataclasses.replace(cfg, **changes) if odd else cfg
    return case.named_error(case.workspace, world, made, 4, schedules[odd])


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"hidden": 128}, "hidden"),
        ({"ffn": 128}, "ffn"),
        ({"num_experts": 12}, "num_experts"),
        ({"top_k": 3}, "top_k"),
        ({"dtype": torch.bfloat16}, "dtype"),
        ({"weight_at": "activation"}, "weight_at"),
        ({"max_tokens_per_rank": 7}, "max_tokens_per_rank"),
        ({}, "schedule"),
    ],
)
def test_configs_that_differ(pool, changes, name):
    """Every rank's ConfigError names the field and each rank's value."""
    schedules = (case.SERIAL, case.SERIAL if changes else case.FUSED)
    for kind, message in pool.run(mismatch, config(), changes, schedules):
        assert kind == "ConfigError" and f"disagree on {name} " in message, message
        assert all(f"rank {rank}:" in message for rank in range(4)), message


def too_many_rows(world, cfg, batches):
    ws = uniep.Workspace(cfg, world.group(4), device="cpu", timeout_s=case.TIMEOUT_S)
    fits = case.forward_backward(ws, batches[0])

    def overflow():
        case.forward_backward(ws, batches[1])
        ws.check()

    error = case.named_error(overflow)
    ws.close()
    return fits, error


def test_more_rows_than_max_rows(pool):
    """20: an overflow of max_rows is one CapacityError on every rank with rows needed and available."""
    cfg = config(max_rows=12, top_k=1)
    fits = random_batch(cfg, (3, 3, 3, 3), ids=torch.arange(12)[:, None] % 8)
    over = random_batch(cfg, (5, 5, 5, 5), ids=torch.zeros(20, 1, dtype=torch.int64))
    ranks = pool.run(too_many_rows, cfg, [fits, over])
    same_bits(case.gather([r[0] for r in ranks]), case.oracle(pool, config(top_k=1), fits))
    for _, (kind, message) in ranks:
        assert kind == "CapacityError" and "20" in message and "12" in message, message

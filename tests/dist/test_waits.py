"""Every wait ends, and every error of one rank reaches the others within a second or so, on both backends for CPUs."""

import contextlib
import os
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from case import config, named_error, random_batch
from pool import Pool
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

import uniep
from uniep.backends.collective import backend as nccl
from uniep.backends.cpu import backend as cpu
from uniep.backends.cpu import shm
from uniep.integrations.common import Workspaces

PATIENT_S = 30.0
"""Timeout of Workspaces none of whose waits may last that long."""

SOON_S = 8.0
"""At once, on a busy machine."""

BACKENDS = pytest.mark.parametrize("backend", ["cpu", "nccl"])


def make(world, backend="cpu", timeout_s=PATIENT_S, group=None):
    group = group if group is not None else world.group(2)
    return uniep.Workspace(config(), group, device="cpu", backend=backend, timeout_s=timeout_s)


def own_group():
    """Of ranks 0 and 1, for collectives that a failure may leave out of step."""
    return dist.new_group([0, 1], use_local_synchronization=True)


def timed(call):
    """(its error as (class, text), seconds)."""
    start = time.monotonic()
    try:
        call()
        error = None
    except BaseException as cause:
        error = type(cause).__name__, str(cause)
    return error, time.monotonic() - start


def raising(error):
    def hook(*args):
        raise error

    return hook


def forward(layer, x, batch):
    return layer.experts(x, batch.ids[:5], batch.weights[:5])


def odd_pack(layer, x, batch):
    with torch.autograd.graph.saved_tensors_hooks(raising(ValueError("my hook")), lambda t: t):
        forward(layer, x, batch)


def odd_unpack(layer, x, batch):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, raising(ValueError("my hook"))):
        y = forward(layer, x, batch)
    y.sum().backward()


def odd_memory(layer, x, batch):
    backend = layer.workspace.backend
    if backend.name == "cpu":
        backend._rows = raising(MemoryError("all is used"))
    else:
        backend.experts.forward = raising(MemoryError("all is used"))
    forward(layer, x, batch)


def odd_memory_in_backward(layer, x, batch):
    y = forward(layer, x, batch)
    backend = layer.workspace.backend
    if backend.name == "cpu":
        backend._rows = raising(MemoryError("all is used"))
    else:
        backend.experts.backward = raising(MemoryError("all is used"))
    y.sum().backward()


def odd_experts_hook(error):
    def odd(layer, x, batch):
        layer.experts.register_forward_pre_hook(raising(error))
        layer(x)

    return odd


def odd_in_place(layer, x, batch):
    y = forward(layer, x, batch)
    layer.experts.w13.detach().add_(1)
    y.sum().backward()


def odd_freed(name):
    """A tensor whose memory is gone, as FSDP's parameters outside of their module."""

    def odd(layer, x, batch):
        given = {"x": x, "ids": batch.ids[:5].clone(), "weights": batch.weights[:5].bfloat16()}
        given[name].detach().untyped_storage().resize_(0)
        layer.experts(*given.values())

    return odd


def odd_freed_in_backward(layer, x, batch):
    y = forward(layer, x, batch)
    layer.experts.w13.detach().untyped_storage().resize_(0)
    y.sum().backward()


def odd_freed_compiled(layer, x, batch):
    """At a compiled call's tensors only the operator looks."""
    experts, ids, weights = layer.experts, batch.ids[:5], batch.weights[:5]
    experts.w2.detach().untyped_storage().resize_(0)
    call = torch.compile(uniep.moe, backend="aot_eager")
    call(x, ids, weights, experts.w13, experts.w2, workspace=layer.workspace)


def odd_freed_factor(layer, x, batch):
    w13, w2 = layer.experts.w13.detach(), layer.experts.w2.detach()
    factors = w13.new_zeros(len(w13), 8, w13.shape[-1]), w13.new_zeros(len(w13), w13.shape[1], 8)
    factors[1].untyped_storage().resize_(0)
    lora = uniep.nn.Lora(factors, None, 1.0)
    uniep.moe(x, batch.ids[:5], batch.weights[:5], w13, w2, workspace=layer.workspace, lora=lora)


def odd_counted(layer, x, batch):
    monitor = uniep.nn.LoadMonitor(layer)
    try:
        layer.experts(x)
    finally:
        monitor.close()


def odd_mesh(layer, x, batch):
    mesh = DeviceMesh("cpu", [0], _init_backend=False)
    layer(DTensor.from_local(x, mesh, [Replicate()], run_check=False))


def odd_batched(layer, x, batch):
    y = forward(layer, x, batch)
    torch.autograd.grad(y, [x], torch.ones(2, *y.shape), is_grads_batched=True)


def inference_clone(x):
    with torch.inference_mode():
        return x.clone()


ODD = {
    "a list": (lambda layer, x, batch: layer(x.tolist()), "ConfigError", "rank 1: x is or holds list"),
    "sparse": (lambda layer, x, batch: layer(x.detach().to_sparse()), "UnsupportedError", "layout torch.sparse"),
    "a DTensor": (odd_mesh, "UnsupportedError", r"x is a DTensor .*x.to_local\(\)"),
    "meta": (lambda layer, x, batch: layer(x.to("meta")), "ConfigError", "x is on meta"),
    "nested": (
        lambda layer, x, batch: forward(layer, torch.nested.nested_tensor([x[0].detach()]), batch),
        "UnsupportedError", "x is a nested tensor",
    ),
    "torch.func": (
        lambda layer, x, batch: torch.func.grad(lambda x: forward(layer, x, batch).sum())(x.detach()),
        "UnsupportedError", "torch.func",
    ),
    "inference tensor": (
        lambda layer, x, batch: forward(layer, inference_clone(x), batch), "UnsupportedError", "torch.inference_mode",
    ),
    "no ids, counted": (odd_counted, "UniEPError", "rank 1: TypeError: .*missing 2 required positional arguments"),
    "batched gradients": (odd_batched, "UnsupportedError", "rank 1: .*is_grads_batched"),
    "no ids": (lambda layer, x, batch: layer.experts(x, None, batch.weights[:5]), "ConfigError", "holds NoneType"),
    "second derivatives": (
        lambda layer, x, batch: forward(layer, x, batch).sum().backward(create_graph=True),
        "UnsupportedError", "create_graph=True",
    ),
    "freed x": (odd_freed("x"), "ConfigError", r"rank 1: x has shape \(5, 64\), but its 1280 bytes have been freed"),
    "freed ids": (odd_freed("ids"), "ConfigError", "ids has shape .* but its 80 bytes have been freed"),
    "freed weights": (odd_freed("weights"), "ConfigError", "weights has shape .* but its 20 bytes have been freed"),
    "freed w13": (odd_freed_in_backward, "ConfigError", "w13 has shape .*freed.*inside"),
    "freed w2, compiled": (odd_freed_compiled, "ConfigError", "w2 has shape .*freed"),
    "freed factor": (odd_freed_factor, "ConfigError", "lora has shape .*freed"),
    "written in place": (odd_in_place, "UniEPError", "rank 1: RuntimeError: .*inplace operation"),
    "hook of the experts": (odd_experts_hook(ValueError("my hook")), "UniEPError", "rank 1: ValueError: my hook"),
    "interrupt before": (odd_experts_hook(KeyboardInterrupt()), "PeerTimeoutError", "rank 1 left.*KeyboardInterrupt"),
    "exit before": (odd_experts_hook(SystemExit(3)), "PeerTimeoutError", "rank 1 left.*SystemExit: 3"),
    "unpack hook": (odd_unpack, "UniEPError", "rank 1: ValueError: my hook"),
    "pack hook": (odd_pack, "PeerTimeoutError", "rank 1 left.*ValueError: my hook"),
    "memory": (odd_memory, "PeerTimeoutError", "rank 1 failed with MemoryError: all is used"),
    "memory in backward": (odd_memory_in_backward, "PeerTimeoutError", "rank 1 failed with MemoryError: all is used"),
}  # fmt: skip
NO_CALL = ("a list", "sparse", "a DTensor", "meta", "hook of the experts", "interrupt before", "exit before")
"""Where the other rank goes through the router, too."""


def odd_ranks(world, backend, batch):
    """{name: (error, seconds)} of a step in which rank 1 does something else, each with Workspaces that still work."""
    found, ws = {}, None
    for name, (odd, *_) in ODD.items():
        if ws is None or named_error(ws.check) is not None:
            ws = make(world, backend, group=own_group())
        layer = uniep.nn.MoE(config(), workspace=ws, seed=0)
        x = batch.x[:5].clone().requires_grad_()
        if world.rank == 1:
            found[name] = timed(lambda odd=odd, layer=layer, x=x: odd(layer, x, batch))
        else:
            call = layer if name in NO_CALL else lambda x, layer=layer: forward(layer, x, batch)
            found[name] = timed(lambda call=call, x=x: call(x).sum().backward())
        gone = named_error(ws.check) is not None
        if gone and world.rank == 1:
            ws.close()
    ws.close()
    return found


@BACKENDS
def test_whatever_one_rank_raises_reaches_the_others(pool, backend):
    """Refused on every rank before a call, told inside of one; the Workspace goes on after refusals."""
    found = pool.run(odd_ranks, backend, random_batch(config(), (5, 5)), ranks=2)
    for name, (_, kind, text) in ODD.items():
        (other, other_s), (own, own_s) = found[0][name], found[1][name]
        assert other is not None and other[0] == kind, (name, other)
        assert re.search(text, other[1]), (name, other)
        assert own is not None and other_s < SOON_S and own_s < SOON_S, (name, own, other_s, own_s)


def left_in_router(world, backend):
    """(error, seconds) of rank 0 in a layer whose router exchanges; rank 1 is interrupted before its router."""
    routers = uniep.nn.RouterConfig(aux_loss=0.1)
    with make(world, backend, group=own_group()) as ws:
        layer, x = uniep.nn.MoE(config(), workspace=ws, seed=0, router=routers), torch.ones(3, 64)
        layer(x)
        if world.rank == 1:
            layer.router.register_forward_pre_hook(raising(KeyboardInterrupt()))
        found = timed(lambda: layer(x))
        dist.barrier(world.group(2))
    return found


@BACKENDS
def test_a_router_hears_of_a_rank_that_left(pool, backend):
    (error, seconds), (own, _) = pool.run(left_in_router, backend, ranks=2)
    assert error[0] == "PeerTimeoutError" and "rank 1 left after call 1 (KeyboardInterrupt" in error[1], error
    assert seconds < SOON_S and own[0] == "KeyboardInterrupt"


def growing(experts):
    """A call as integrations make it where nobody has told them the number of tokens."""
    made, space = Workspaces(None, None, {"timeout_s": experts.workspace.timeout_s}), experts.workspace
    ids, weights = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    made.moe(space.group, torch.ones(3, 64), ids, weights, experts.w13, experts.w2, num_local=experts.num_local)


def lonely_sums(world):
    """Rank 0 is interrupted where it waits for counts of all ranks, then runs into the limit; rank 1 does not come."""
    routers = uniep.nn.RouterConfig(aux_loss=0.1)
    calls = {
        "router": lambda layer, monitor: layer(torch.ones(3, 64)),
        "bias": lambda layer, monitor: layer.router.update_bias(),
        "load": lambda layer, monitor: monitor.read(),
        "tokens": lambda layer, monitor: growing(layer.experts),
    }
    found = {}
    for name, call in calls.items():
        for limit_s in (PATIENT_S, 0.5):
            ws = make(world, timeout_s=limit_s, group=own_group())
            layer = uniep.nn.MoE(config(), workspace=ws, seed=0, router=routers)
            monitor = uniep.nn.LoadMonitor(layer)
            if world.rank == 0:
                run = interrupted if limit_s == PATIENT_S else timed
                found[name, limit_s] = run(lambda call=call, layer=layer, monitor=monitor: call(layer, monitor))
            monitor.close()
            make(world).close()  # rank 1 waits here
    return found


def test_a_wait_for_counts_ends(pool):
    """An interrupt is heard, timeout_s is the limit, and a rank that waited in a router says so, and not that its
    refusal did not arrive."""
    found, _ = pool.run(lonely_sums, ranks=2)
    for (name, limit_s), (error, seconds) in found.items():
        if limit_s == PATIENT_S:
            assert error[0] == "KeyboardInterrupt" and seconds < SOON_S, (name, error, seconds)
        else:
            assert error[0] == "PeerTimeoutError" and "a peer is missing after 0.5 s" in error[1], (name, error)


# --- making a Workspace ---


@contextlib.contextmanager
def replaced(module, name, value):
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def failing_creation(world, kind):
    """(error, seconds) where rank 1 fails inside, then whether both can make one."""
    errors = {
        "error": RuntimeError("all is lost"),
        "interrupt": KeyboardInterrupt(),
        "files": OSError(24, "Too many open files"),
    }
    odd = world.rank == 1
    if kind == "version":
        odd_thing = replaced(uniep.version, "__version__", "0.0.1")
    elif kind == "cfg":
        odd_thing = replaced(
            uniep, "Workspace", lambda cfg, *args, original=uniep.Workspace, **kw: original(None, *args, **kw)
        )
    else:
        odd_thing = replaced(shm, "_create", raising(errors[kind]))
    with odd_thing if odd else contextlib.nullcontext():
        result = timed(lambda: make(world))
    make(world).close()
    return result


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("error", "PeerTimeoutError", "stage allocation: rank 1 failed with RuntimeError: all is lost"),
        ("interrupt", "PeerTimeoutError", "rank 1 failed with KeyboardInterrupt"),
        ("files", "CapacityError", "rank 1 on .*Too many open files"),
        ("version", "ConfigError", r"versions of uniep \(rank 0: .*, rank 1: 0.0.1\)"),
        ("cfg", "ConfigError", "rank 1: cfg is a NoneType"),
    ],
)
def test_one_rank_fails_while_a_workspace_is_made(pool, kind, error, text):
    (other, seconds), (own, _) = pool.run(failing_creation, kind, ranks=2)
    assert other[0] == error and re.search(text, other[1]), other
    assert seconds < SOON_S and own is not None


def stopped_in_creation(world, pids, backend):
    """Rank 1 stops inside; rank 0 wakes it when it has its error.  (error, seconds), then a Workspace of both."""
    if world.rank == 1:
        stop = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)  # noqa: E731
        owner, name = (shm, "_create") if backend == "cpu" else (nccl, "local_experts")
        with replaced(owner, name, stop):
            result = timed(lambda: make(world, backend, timeout_s=1.5))
    else:
        result = timed(lambda: make(world, backend, timeout_s=1.5))
        os.kill(pids[1], signal.SIGCONT)
    make(world, backend).close()
    return result


def pid(world):
    return os.getpid()


@BACKENDS
def test_a_rank_stops_while_a_workspace_is_made(pool, backend):
    (error, seconds), (own, _) = pool.run(stopped_in_creation, pool.run(pid, ranks=2), backend, ranks=2)
    assert error[0] == "PeerTimeoutError" and "rank 1 did not come within 1.5 s" in error[1], error
    assert seconds < SOON_S and own is not None


def interrupted(call):
    """(error, seconds after the interrupt) of `call`, interrupted after half a second."""
    sent = []

    def interrupt():
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.5, interrupt)
    timer.start()
    error, _ = timed(call)
    ended = time.monotonic()
    timer.join()
    return error, ended - sent[0]


def interrupted_waits(world, backend, batch):
    """Rank 0 is interrupted while it waits, in a call and in `Workspace()`; rank 1 comes late."""
    group = own_group()
    ws = make(world, backend, group=group)
    layer = uniep.nn.MoE(config(), workspace=ws, seed=0)
    found = []
    for call in (lambda: layer(batch.x[:5]), lambda: make(world, backend, group=group)):
        if world.rank == 0:
            found.append(interrupted(call))
        else:
            time.sleep(2.5)
            found.append(timed(call) if not found else None)
        make(world).close()
    return found


@pytest.mark.parametrize("backend", ["cpu", pytest.param("nccl", marks=pytest.mark.slow)])
def test_an_interrupt_is_heard_while_waiting(pool, backend):
    first, second = pool.run(interrupted_waits, backend, random_batch(config(), (5, 5)), ranks=2)
    for error, seconds in first:
        assert error[0] == "KeyboardInterrupt" and seconds < 2
    assert second[0][0][0] == "PeerTimeoutError" and "rank 0 failed with KeyboardInterrupt" in second[0][0][1]


def suspended_wait(world, backend, batch, folder):
    """A step to which rank 1 comes late, and is in time.  A file of each rank says that it is about to wait."""
    ws = make(world, backend, timeout_s=2.0)
    layer = uniep.nn.MoE(config(), workspace=ws, seed=0)
    layer(batch.x[:5])
    (folder / str(world.rank)).touch()
    time.sleep(2.5 * world.rank)
    return named_error(lambda: layer(batch.x[:5])), ws.close()


@pytest.mark.parametrize("backend", ["cpu", pytest.param("nccl", marks=pytest.mark.slow)])
def test_suspended_ranks_are_not_late(pool, backend, tmp_path):
    """All ranks stop for longer than timeout_s; nobody raises once they go on."""
    batch, pids = random_batch(config(), (5, 5)), pool.run(pid, ranks=2)
    ended = threading.Event()

    def send(number):
        for process in pids:
            os.kill(process, number)

    def suspend():
        while len(list(tmp_path.iterdir())) < 2 and not ended.wait(0.05):
            pass
        ended.wait(0.5)
        send(signal.SIGSTOP)
        ended.wait(3.5)
        send(signal.SIGCONT)

    suspending = threading.Thread(target=suspend)
    suspending.start()
    try:
        errors = pool.run(suspended_wait, backend, batch, tmp_path, ranks=2)
    finally:
        ended.set()
        suspending.join()
    assert errors == [(None, None)] * 2


def tiny_timeout(world, backend, batch):
    """Rank 1 does not come; (error, seconds) of rank 0."""
    ws = make(world, backend, group=own_group())
    layer = uniep.nn.MoE(config(), workspace=ws, seed=0)
    layer(batch.x[:5])
    for waits in (ws.backend, getattr(ws.backend, "_peers", None)):
        if hasattr(waits, "timeout_s"):
            waits.timeout_s = 0.0004
    result = timed(lambda: layer(batch.x[:5])) if world.rank == 0 else None
    ws.close()
    return result


@BACKENDS
def test_a_tiny_timeout_is_what_it_says(pool, backend):
    (error, seconds), _ = pool.run(tiny_timeout, backend, random_batch(config(), (5, 5)), ranks=2)
    assert error[0] == "PeerTimeoutError" and seconds < SOON_S


def killed_in_creation(world):
    make(world).close()  # both are there
    if world.rank == 1:
        cpu.CpuBackend.__init__ = lambda *_: os._exit(9)
    return timed(lambda: make(world, timeout_s=4.0))


@pytest.mark.slow
def test_a_rank_dies_while_a_workspace_is_made():
    """The other gets uniep's error, and nothing is left in /dev/shm."""
    small = Pool(2)
    own = tuple(f"uniep-{process.pid}-" for process in small._processes)
    try:
        with pytest.raises(AssertionError, match=r"rank 0: returned \(\('PeerTimeoutError', '[^']*rank 1 did not come"):
            small.run(killed_in_creation, ranks=2)
    finally:
        small.close()
    if os.path.isdir("/dev/shm"):
        assert not [name for name in os.listdir("/dev/shm") if name.startswith(own)]


# --- surroundings ---


def modes(world, backend, batch):
    """Errors of Workspaces and layers made and used inside inference mode and outside, in every order."""
    x, found = batch.x[:5], []
    for inside in (True, False):
        with torch.inference_mode(inside):
            ws = make(world, backend)
        layer = uniep.nn.MoE(config(), workspace=ws, seed=0)
        for used_inside in (inside, not inside, inside):
            with torch.inference_mode(used_inside):
                step = (lambda: layer(x)) if used_inside else (lambda: layer(x).sum().backward())  # noqa: B023
                found.append(named_error(step))
        ws.close()
    return found


@BACKENDS
def test_inference_mode(pool, backend):
    assert pool.run(modes, backend, random_batch(config(), (5, 5)), ranks=2) == [[None] * 6] * 2

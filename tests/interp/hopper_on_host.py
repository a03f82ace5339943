"""The Hopper backend without a GPU, for processes that interpret its kernels or only compile them.

The backend's own launch code runs unchanged.  Symmetric memory is host memory, given as one tensor per rank
(of this process, or shared with others); streams and events do nothing.  `install` changes torch.cuda, so
call it in a process of its own.
"""

import builtins
import contextlib
import dataclasses
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from uniep import layout
from uniep.backends.hopper import backend as hopper
from uniep.backends.hopper import calls as hopper_calls
from uniep.backends.hopper import link
from uniep.config import MoEConfig
from uniep.kernels import claims, entry, gemm, gradients, groups, lists, mega, plan, router, sync, transfer
from uniep.launch import mega as launch_mega
from uniep.row_operator import RowOperator
from uniep.schedule import Schedule, default_schedule
from uniep.way import Ways


class Nothing:
    """Stands for a stream or an event: every method does nothing."""

    def __init__(self, *args, **kwargs) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


class HostArena(link.Arena):
    """`Arena` over the host memory that the workspace brings."""

    def _allocate(self, size, member):
        if member.cfg.dtype != torch.float32:  # which GPUs refuse
            self._describe()
        return list(member.memories(size))


def install(multiprocessors: int) -> None:
    """Make HopperBackend run on the CPU; a persistent kernel has `multiprocessors` programs."""
    cuda = torch.cuda
    cuda.get_device_properties = lambda device=None: types.SimpleNamespace(
        multi_processor_count=multiprocessors, name="no GPU", total_memory=80 * 2**30
    )
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.get_device_name = lambda device=None: "no GPU"
    cuda.Stream = cuda.Event = Nothing
    here = Nothing()
    cuda.current_stream = lambda device=None: here
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.synchronize = lambda device=None: None
    cuda.is_current_stream_capturing = lambda: False
    torch.Tensor.pin_memory = lambda self, *args: self
    link.Arena = HostArena
    hopper._check_support = lambda cfg, ep_size, device: None  # the interpreter computes in fp32, too


def interpret(ahead_ns: int = 0) -> None:
    """`install` for processes that interpret.  Few programs, since they run one after another.  ahead_ns: of its clock.

    Three things are nearer to compiled kernels here than in Triton's interpreter: `for i in range(...)` yields
    int32 tensors, not Python ints; a dot rounds its elements alike, wherever in the tile they lie, which numpy's BLAS
    does not on every CPU; and there is a clock, so that waits end.  It also lets other processes run while a kernel
    spins.
    """
    install(multiprocessors=4)
    hurry()
    interpreter.InterpreterBuilder.create_dot = dot
    hopper_calls.EXCHANGE_PROGRAMS = 3
    layout.PLAN_CHUNKS = 16

    def tensor_range(*bounds):
        for value in builtins.range(*(int(bound) for bound in bounds)):
            yield tl.full((), value, tl.int32)

    def nanoseconds():
        time.sleep(0.001)
        return tl.full((), time.monotonic_ns() + ahead_ns, tl.int64)

    for module in (claims, entry, gemm, gradients, groups, lists, mega, plan, router, sync, transfer):
        module.range = tensor_range
    for module in (claims, entry, mega, sync):
        module.nanoseconds = nanoseconds


def dot(self, a, b, c, input_precision, max_num_imprecise_acc):
    """a @ b + c, of fp16 or fp32: summed in fp64, rounded once."""
    total = np.matmul(a.data, b.data, dtype=np.float64) + c.data
    return interpreter.TensorHandle(total.astype(c.data.dtype), c.dtype.scalar)


def hurry() -> None:
    """Triton's interpreter without what it does again and again, and throws away: more than half of its time.

    It exchanges the functions of triton.language for its own at every call of a device function; here it does so once,
    for as long as the process lives. It looks whether integers overflow, but tells only where `debug` is set. It makes
    a table of all types for each type that it looks up.
    """
    for language in (tl, tl.core):
        interpreter._patch_lang(types.FunctionType((lambda: None).__code__, {"language": language}))
    interpreter._patch_lang = lambda fn: types.SimpleNamespace(restore=lambda: None)
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    usual, known = interpreter._get_np_dtype, {}

    def numpy_type(of):
        name = of.scalar.name
        if name not in known:
            known[name] = usual(of)
        return known[name]

    interpreter._get_np_dtype = numpy_type


def programs_at_once(count: int, slow: bool) -> None:
    """From here on, kernels of overlap="mega" run `count` programs beside each other, in processes of their own.

    slow: all but one take their time to return rows.
    All memory is shared, since nobody knows what such a kernel will be given; new memory is NaN.
    """
    launch, tile = launch_mega.launch, mega.product_tile

    def slow_tile(*args):
        time.sleep(0.05)
        return tile(*args)

    def forked(kernel, programs, args, constants, **options):
        if kernel not in (mega.forward_kernel, mega.backward_kernel):
            return launch(kernel, programs, args, constants, **options)
        children = []
        for number in range(1, count):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    time.sleep(0.01 * number)
                    mega.product_tile = slow_tile if slow else tile
                    launch(kernel, 1, args, constants, **options)
                    status = 0
                finally:
                    os._exit(status)
            children.append(child)
        launch(kernel, 1, args, constants, **options)
        assert all(os.waitpid(child, 0)[1] == 0 for child in children), "a program failed"

    def shared(make):
        def made(*args, **options):
            tensor = make(*args, **options)
            if tensor.numel() == 0:
                return tensor
            if make.__name__.startswith("empty") and tensor.is_floating_point():
                tensor.fill_(float("nan"))
            return tensor.share_memory_()

        return made

    launch_mega.launch = forked
    for name in ("empty", "full", "zeros", "empty_like"):
        setattr(torch, name, shared(getattr(torch, name)))


def host_backend(
    cfg: MoEConfig,
    rank: int,
    ep_size: int,
    memories: Callable[[int], Sequence[Tensor]],
    schedule: Schedule | None = None,
    timeout_s: float = 60.0,
    copies: int = 1,
    operators: Sequence[RowOperator] = (),
) -> hopper.HopperBackend:
    """One rank's backend.  `memories(bytes)`: the symmetric memory of all ranks, uint8, zero at first."""
    member = types.SimpleNamespace(
        cfg=cfg,
        rank=rank,
        ep_size=ep_size,
        device=torch.device("cpu"),
        group=None,
        timeout_s=timeout_s,
        copies=copies,
        blocks=cfg.gradient_shards // copies,
        memories=memories,
        failures=[],
        cause="",
        operators=operators,
    )
    member.fail = member.failures.append
    schedule = schedule or default_schedule("hopper", cfg, ep_size)
    pushing = min(schedule.push_programs, torch.cuda.get_device_properties().multi_processor_count // 2)
    return hopper.HopperBackend(member, dataclasses.replace(schedule, push_programs=pushing))


def use(backend: hopper.HopperBackend, schedule: Schedule, operators: Sequence[RowOperator] = ()) -> None:
    """From here on, its calls are of `schedule`, with `operators`; memory stays as its first one made it."""
    backend.schedule = schedule
    backend.ways = Ways(backend.cfg, backend.num_ranks, schedule, "hopper", backend.ways.measured, operators)
    backend.way = way = backend.ways[backend.cfg.max_tokens_per_rank]
    backend.planner.group_rows = way.gate_up.group_rows, way.down.group_rows
    backend.orders.clear()


def host_backends(
    cfg: MoEConfig, ep_size: int, schedule: Schedule | None = None, timeout_s: float = 60.0
) -> list[hopper.HopperBackend]:
    """All ranks in this process."""
    made: list[Tensor] = []

    def memories(size: int) -> list[Tensor]:
        if not made:
            made.extend(torch.zeros(size, dtype=torch.uint8) for _ in range(ep_size))
        return made

    return [host_backend(cfg, rank, ep_size, memories, schedule, timeout_s) for rank in range(ep_size)]


def run_as_ranks(script: str, ranks: int, limit_s: float, *arguments: str) -> None:
    """A script of this folder as one process per rank, whose first argument is its rank; all of them end well."""
    command = [sys.executable, str(Path(__file__).parent / script)]
    started = [
        subprocess.Popen([*command, str(rank), *arguments], stderr=subprocess.PIPE, text=True) for rank in range(ranks)
    ]
    try:
        for rank, process in enumerate(started):
            _, errors = process.communicate(timeout=limit_s)
            assert process.returncode == 0, f"rank {rank}:\n{errors}"
    finally:
        for process in started:
            process.kill()
            process.wait()

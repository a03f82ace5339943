"""Compiling ahead: what calls will launch, by several processes at once, once for each machine.

A first call would compile its kernels one after the other, for minutes.  Instead `driver.listing` finds out what calls
launch, without launching it, and children compile that.  They put the code into Triton's cache, from where every rank
loads it; ranks of one machine share the work by locks in that cache.

    python -m uniep.launch.ahead        a child: kernels in, one line each, numbers of those done out
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import functools
import hashlib
import importlib
import importlib.resources
import logging
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from uniep.errors import ConfigError
from uniep.launch.driver import Block, Bundle, Launch, Memory

log = logging.getLogger("uniep")

PATIENCE_S = 300.0  # after which kernels compile where they are launched

_BIG, _SMALL = 2**40, 8  # integers that stand for those of 8 and of 4 bytes


class _Memory(NamedTuple):
    dtype: torch.dtype


class _Blocks(NamedTuple):
    dtype: torch.dtype
    block: tuple[int, ...]


class Kernel(NamedTuple):
    """A kernel to compile: its function by name, kinds of its arguments, constants and options.  It can be pickled."""

    module: str
    name: str
    args: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, Any]

    @classmethod
    def of(cls, launch: Launch) -> Kernel:
        function = launch.kernel.fn
        args = tuple(map(_kind, launch.args))
        return cls(function.__module__, function.__name__, args, launch.constants, launch.options)

    def compile(self) -> None:
        kernel = getattr(importlib.import_module(self.module), self.name)
        kernel.run(*map(_example, self.args), grid=(1,), warmup=True, **self.constants, **self.options)

    @property
    def key(self) -> str:
        """Of code that no process need compile again."""
        import triton

        return hashlib.sha256(f"{_sources()}{triton.__version__}{tuple(self)}".encode()).hexdigest()


def _kind(a: Any) -> Any:
    """What the code depends on."""
    if isinstance(a, Block):
        return _Blocks(a.base.dtype, a.block)
    if isinstance(a, Memory):
        return _Memory(a.dtype)
    if isinstance(a, Bundle):
        a = a.fields
    if isinstance(a, tuple):
        return type(a)(*map(_kind, a))
    return a if a is None else _BIG if a >> 31 > 0 else _SMALL


def _example(kind: Any) -> Any:
    """An argument of that kind, for Triton."""
    if isinstance(kind, _Memory):
        return torch.empty(16, dtype=kind.dtype)
    if isinstance(kind, _Blocks):
        from triton.tools.tensor_descriptor import TensorDescriptor

        rank = len(kind.block)
        return TensorDescriptor(torch.empty(16, dtype=kind.dtype), [16] * rank, [16] * (rank - 1) + [1], [*kind.block])
    return type(kind)(*map(_example, kind)) if isinstance(kind, tuple) else kind


@functools.cache
def _sources() -> str:
    """A hash of all kernels."""
    found = hashlib.sha256()
    for file in sorted(importlib.resources.files("uniep.kernels").iterdir(), key=lambda f: f.name):
        if file.name.endswith(".py"):
            found.update(file.read_bytes())
    return found.hexdigest()


def missing(launches: Sequence[Launch]) -> list[Kernel]:
    """Those that no process has compiled here, each once."""
    from triton.runtime.cache import get_cache_manager

    kernels = {kernel.key: kernel for kernel in map(Kernel.of, launches)}
    return [kernel for key, kernel in kernels.items() if get_cache_manager(key).get_file("compiled") is None]


def compile_all(kernels: Sequence[Kernel], processes: int, done: Callable[[int], None] = lambda number: None) -> None:
    """By so many children, in PATIENCE_S at most.  done: called with how many are done.  What is left, or fails, is
    logged, and compiles where it is launched."""
    waiting: queue.SimpleQueue[Kernel] = queue.SimpleQueue()
    for kernel in kernels:
        waiting.put(kernel)
    lock, finished = threading.Lock(), 0
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p or "." for p in sys.path), "OMP_NUM_THREADS": "1"}
    children: list[subprocess.Popen[str]] = []

    def serve(child: subprocess.Popen[str]) -> None:
        nonlocal finished
        assert child.stdin is not None and child.stdout is not None
        with child, contextlib.suppress(BrokenPipeError):
            while True:
                try:
                    kernel = waiting.get_nowait()
                except queue.Empty:
                    child.stdin.close()
                    return
                child.stdin.write(base64.b64encode(pickle.dumps(kernel)).decode() + "\n")
                child.stdin.flush()
                said = child.stdout.readline()
                if said != "compiled\n":
                    log.warning("%s was not compiled ahead (%s)", kernel.name, said.strip() or "a child has ended")
                if not said:
                    return
                with lock:
                    finished += 1
                    done(finished)

    try:
        for _ in range(min(processes, len(kernels))):
            command = [sys.executable, "-m", "uniep.launch.ahead"]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            children.append(subprocess.Popen(command, env=environment, text=True, **pipes))
        threads = [threading.Thread(target=serve, args=(child,)) for child in children]
        for thread in threads:
            thread.start()
        until = time.monotonic() + PATIENCE_S
        for thread in threads:
            thread.join(max(until - time.monotonic(), 0))
    finally:
        for child in children:
            child.kill()


def compile_ahead(launches: Sequence[Launch], rank: int, ranks: int, processes: int) -> None:
    """What is missing, as one of the ranks of a machine; with progress on rank 0's terminal, if rich is there."""
    kernels = missing(launches)
    if len(kernels) < 2 or processes < 2:
        return
    first = len(kernels) * rank // ranks  # ranks begin in different places, and wait for each other's at the end
    log.info("compiling %d kernels by %d processes, once for this machine", len(kernels), processes)
    with contextlib.ExitStack() as stack:
        done = _progress(stack, len(kernels)) if rank == 0 and sys.stderr.isatty() else lambda number: None
        compile_all([*kernels[first:], *kernels[:first]], processes, done)


def _progress(stack: contextlib.ExitStack, total: int) -> Callable[[int], None]:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        return lambda number: None
    columns = TextColumn("uniep compiles its kernels"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    bar = stack.enter_context(Progress(*columns, console=Console(stderr=True), transient=True))
    task = bar.add_task("", total=total)
    return lambda number: bar.update(task, completed=number)


def processes_of(ranks: int) -> int:
    """Children of one rank of a machine: UNIEP_COMPILE_PROCESSES, or its share of the processors, at most 16.  There
    are none with less than 2."""
    said = os.environ.get("UNIEP_COMPILE_PROCESSES", "")
    if not said:
        return min(max(len(os.sched_getaffinity(0)) // ranks, 1), 16)
    if not said.isdecimal():
        raise ConfigError(f"UNIEP_COMPILE_PROCESSES is {said!r}; it must be a number of processes, 0 or more")
    return int(said)


class HopperTarget:
    """A driver of Triton that knows its target, a Hopper GPU that need not exist, and nothing else."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    with Path(path).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _serve() -> None:
    """A child's main function."""
    import triton
    from triton.runtime.cache import get_cache_manager

    triton.runtime.driver._active = HopperTarget()
    for line in sys.stdin:
        said = "compiled"
        try:
            kernel: Kernel = pickle.loads(base64.b64decode(line))
            cache = get_cache_manager(kernel.key)
            Path(cache.cache_dir).mkdir(parents=True, exist_ok=True)
            with _locked(os.path.join(cache.cache_dir, "lock")):
                if cache.get_file("compiled") is None:
                    kernel.compile()
                    cache.put(b"", "compiled", binary=True)
        except Exception:
            said = traceback.format_exc().strip().splitlines()[-1]
        print(said, flush=True)


if __name__ == "__main__":
    sys.modules["uniep.launch.ahead"] = sys.modules["__main__"]  # of which pickled kernels are
    _serve()

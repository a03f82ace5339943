"""A pool of real processes that lives as long as the pytest session.

A test sends a module-level function and its arguments; every rank runs `function(world, *args)` and its
return value comes back.  An exception on any rank fails the call with every rank's traceback.  A rank
that does not answer in time is asked for its stack, then the pool is killed and started anew, so one
hung test costs a few seconds and not the session.

    pool.run(function, 1, "text", ranks=2)  ->  [value of rank 0, value of rank 1]

Ranks are forked from a server that has only imported what most of them need, since importing it takes longer than most
tests.  So all ranks of a session hash strings alike; those that torchrun starts in other tests do not.

Values travel as plain pickles: tensors by value, never as shared memory.
"""

from __future__ import annotations

import dataclasses
import datetime
import faulthandler
import importlib
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 200.0
"""Of a start and of a call: no machine is so slow that a rank at work needs longer."""

GRACE_S = 15.0
"""How long the others may go on after a rank's death."""

MAX_GROUPS = 8
"""So many groups may functions leave behind. Each has a thread that looks 100 times a second; what torch remembers of
device meshes names them, so that they cannot be destroyed alone."""

PRELOADED = ["pytest", "uniep", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"]

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class WorkerError(AssertionError):
    """At least one rank raised; the text has every failing rank's traceback."""


class WorkerHungError(AssertionError):
    """At least one rank did not answer in time or died; the text has what each rank was doing."""


@dataclasses.dataclass(frozen=True)
class World:
    """First argument of every function the pool runs: this process's rank and its expert-parallel groups."""

    rank: int
    size: int
    groups: dict[int, dist.ProcessGroup]

    def group(self, ep_size: int) -> dist.ProcessGroup | None:
        """The group of ranks 0 .. ep_size-1 (or its sibling this rank is in); None for EP=1."""
        return None if ep_size == 1 else self.groups[ep_size]


class Pool:
    """`size` processes, one gloo group over all of them, and sub-groups of every power of two below.

    keep_groups: whatever number of groups functions leave behind. Otherwise the processes start anew at MAX_GROUPS.
    """

    def __init__(self, size: int = 4, keep_groups: bool = False) -> None:
        self.size, self._keep_groups = size, keep_groups
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._folder = tempfile.TemporaryDirectory(prefix="uniep-pool-")
        self._processes, self._pipes = [], []
        saved = {name: os.environ.get(name) for name in ONE_THREAD}
        os.environ.update(ONE_THREAD)
        try:
            for rank in range(self.size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_worker, args=(rank, self.size, self._folder.name, theirs, dict(os.environ)), daemon=True
                )
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
        finally:
            for name, value in saved.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        self._collect(range(self.size), TIMEOUT_S, "start")

    def run(
        self, function: Callable[..., Any], *args: Any, ranks: int | None = None, timeout: float = TIMEOUT_S
    ) -> list[Any]:
        """`function(world, *args)` on ranks 0 .. ranks-1 (default: all); the values in rank order."""
        chosen = range(self.size if ranks is None else ranks)
        folder = str(Path(inspect.getfile(function)).resolve().parent)
        task = pickle.dumps((folder, function.__module__, function.__qualname__, args))
        for rank in chosen:
            self._pipes[rank].send_bytes(task)
        replies = self._collect(chosen, timeout, function.__qualname__)
        failures = [f"--- rank {rank} ---\n{text}" for rank, (ok, text) in replies.items() if not ok]
        if failures:
            self.restart()  # an exception may leave the groups out of step
            raise WorkerError(
                f"{function.__qualname__} raised on {len(failures)} of {len(chosen)} ranks\n" + "\n".join(failures)
            )
        if self._groups_left > MAX_GROUPS and not self._keep_groups:
            self.restart()
        return [replies[rank][1] for rank in chosen]

    def _collect(self, ranks: range, timeout: float, what: str) -> dict[int, tuple[bool, Any]]:
        """Every rank's reply, or WorkerHungError after `timeout` or a rank's death."""
        replies: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        rank_of: dict[Any, int] = {self._pipes[rank]: rank for rank in ranks}
        died = None
        while rank_of:
            ready = wait(list(rank_of), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = rank_of.pop(pipe)
                try:
                    ok, value, self._groups_left = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                    replies[rank] = ok, value
                except (EOFError, ConnectionError):
                    died = rank
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if len(replies) == len(ranks):
            return dict(sorted(replies.items()))
        reason = f"rank {died} died" if died is not None else f"no answer within {timeout:.0f} s"
        text = "\n".join(f"--- rank {rank}: {self._state(rank, replies)}" for rank in ranks)
        self.restart() if what != "start" else self.close()
        raise WorkerHungError(f"{what}: {reason}\n{text}")

    def _state(self, rank: int, replies: dict[int, tuple[bool, Any]]) -> str:
        if rank in replies:
            ok, value = replies[rank]
            return f"returned {value!r}"[:2000] if ok else f"raised\n{value}"
        process = self._processes[rank]
        process.join(0.2)
        if not process.is_alive():
            return f"dead, exit code {process.exitcode}"
        os.kill(process.pid, signal.SIGUSR1)  # the worker writes its stacks
        time.sleep(0.5)
        return "still running\n" + _stack_file(self._folder.name, rank).read_text()

    def restart(self) -> None:
        self.close()
        self._start()

    def close(self) -> None:
        """Kill the processes and wait for their end."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []
        self._folder.cleanup()


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"stacks-{rank}.txt"


def _worker(rank: int, size: int, folder: str, pipe: Connection, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)  # not that of the test in which the server was started
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
    torch.set_num_threads(1)
    store, timeout = f"file://{folder}/store", datetime.timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timeout)
    groups = {}
    for ep_size in (2**power for power in range(size.bit_length())):
        for first in range(0, size - ep_size + 1, ep_size):
            members = list(range(first, first + ep_size))
            group = dist.new_group(members)
            if rank in members:
                groups[ep_size] = group
    world = World(rank, size, groups)
    known = len(dist.distributed_c10d._world.pg_map)
    with _stack_file(folder, rank).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        pipe.send_bytes(pickle.dumps((True, None, 0)))
        while True:
            try:
                task = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionError):
                return
            ok, value = _answer(world, *task)
            pipe.send_bytes(pickle.dumps((ok, value, len(dist.distributed_c10d._world.pg_map) - known)))


def _answer(world: World, folder: str, module: str, name: str, args: tuple) -> tuple[bool, Any]:
    try:
        if folder not in sys.path:
            sys.path.insert(0, folder)
        return True, getattr(importlib.import_module(module), name)(world, *args)
    except BaseException:
        return False, traceback.format_exc()

"""All ranks of a trial as child processes, which are restarted after a fault.

A candidate may crash its process, leave a dead device, or never return.  None of this harms the parent: it sends the
same question to all ranks and waits for all answers.  If one does not come, it kills all ranks and starts new ones.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist

from uniep.errors import UniEPError
from uniep.trials.trial import described

START_S, END_S = 120.0, 10.0
"""Longest time for all ranks to start, and for a killed one to end: a driver may hold it.  In seconds."""

LONGEST_S = 1e6
"""Longest time for any answer: the system's calls that wait know no time of 25 days or more."""


class DroppedError(UniEPError):
    """A candidate was dropped.  reason: one word or two; the text says more.  died: a rank's process has ended."""

    def __init__(self, reason: str, text: str, died: bool = False) -> None:
        super().__init__(f"{reason}: {text}")
        self.reason, self.text, self.died = reason, text, died


class Ranks(Protocol):
    """What a fleet needs of a Job."""

    @property
    def ep_size(self) -> int: ...

    @property
    def device(self) -> str: ...

    @property
    def timeout_s(self) -> float: ...

    def made(self, rank: int, group: dist.ProcessGroup | None, device: torch.device) -> Any: ...


class Fleet:
    """`job.made(rank, group, device)` in one process per rank; `ask` calls its methods.  until: the time
    (`time.monotonic()`) behind which no answer is waited for."""

    def __init__(self, job: Ranks, until: float = math.inf) -> None:
        self.job, self.until = job, until
        self.starts = 0
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    @property
    def alive(self) -> bool:
        return bool(self._processes)

    def start(self) -> None:
        """Raises DroppedError if a rank cannot start."""
        self.starts += 1
        # Forked from a server that has only done the imports: a restart does not import again.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["uniep.trials.trial", "triton"])
        self._folder = tempfile.TemporaryDirectory(prefix="uniep-tune-")
        with _starting, _one_thread(), _interrupted_later():
            for rank in range(self.job.ep_size):
                ours, theirs = context.Pipe()
                args = (self.job, rank, f"file://{self._folder.name}/store", theirs)
                process = context.Process(target=_rank, args=args, daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
        try:
            self._answers(START_S)
        except DroppedError:
            self.end()
            raise

    def becomes(self, job: Ranks, timeout_s: float) -> None:
        """Another job of as many ranks on the same devices, in the same processes.

        Raises DroppedError if ranks cannot make it.  `job` is the new one also then, and that of ranks that start anew;
        ranks that still run have none until they become another.
        """
        self.job = job
        if self.alive:
            self.ask("becomes", job, timeout_s=timeout_s)

    def ask(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """The results of `method(*args)`, one per rank.  Raises DroppedError; ranks that are out of step are killed."""
        if not self._processes:
            self.start()
        for pipe in self._pipes:
            try:
                pipe.send((method, args))
            except OSError:  # `_answers` says how it ended
                continue
        return self._answers(timeout_s)

    def _answers(self, timeout_s: float) -> list[Any]:
        answers: dict[int, Any] = {}
        timeout_s = max(0.0, min(timeout_s, self.until - time.monotonic(), LONGEST_S))
        until = time.monotonic() + timeout_s
        while len(answers) < len(self._pipes):
            waiting: dict[Any, int] = {pipe: r for r, pipe in enumerate(self._pipes) if r not in answers}
            ready: list[Any] = multiprocessing.connection.wait(list(waiting), max(0.0, until - time.monotonic()))
            if not ready:
                ranks = ", ".join(map(str, waiting.values()))
                self.end()
                raise DroppedError("timeout", f"rank {ranks} did not answer within {round(timeout_s, 1):g} s")
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, OSError):
                    self._processes[rank].join(10)
                    code = self._processes[rank].exitcode
                    self.end()
                    ended = f"died by signal {-code}" if code is not None and code < 0 else f"ended with status {code}"
                    raise DroppedError("fault", f"rank {rank} {ended}", died=True) from None
            if any(not ok for ok, _ in answers.values()):  # the others wait for the one that failed
                until = min(until, time.monotonic() + GRACE_S)
        failed = {rank: value for rank, (ok, value) in answers.items() if not ok}
        if failed:
            if len(failed) < len(answers) or not all(value["in_step"] for value in failed.values()):
                self.end()
            rank = min(failed)
            value = failed[rank]
            raise DroppedError(value["reason"], f"rank {rank}: {value['text']}")
        return [answers[rank][1] for rank in range(len(self._pipes))]

    def stop(self) -> None:
        """For another thread than that which asks: kill all ranks, and let it wait for no more answers."""
        self.until = -math.inf
        for process in [*self._processes]:
            _kill(process)

    def end(self) -> None:
        """Kill all ranks; the next `ask` starts new ones."""
        for process in self._processes:
            _kill(process)
        for process in self._processes:
            process.join(END_S)
        for pipe in self._pipes:
            pipe.close()
        if self._processes:
            self._folder.cleanup()
        self._processes, self._pipes = [], []

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def _kill(process: Any) -> None:
    """And what it has started, such as a compiler that hangs."""
    if process.is_alive():
        process.kill()
        with contextlib.suppress(ProcessLookupError):  # it has not come so far as to lead a group
            os.killpg(process.pid, signal.SIGKILL)


_starting = threading.Lock()
"""Held while the environment is that of ranks: fleets start from several threads."""


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    saved = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if saved is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = saved


@contextlib.contextmanager
def _interrupted_later() -> Iterator[None]:
    """Ctrl-C inside the block is raised at its end, when all processes are known, and can be ended.

    It reaches every process of a terminal: the fork server and the ranks inherit the mask, and do not see it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    multiprocessing.resource_tracker.ensure_running()  # when it starts it unblocks the signal; so not inside
    usual = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, signal.default_int_handler if usual is None else usual)
    if came:
        raise KeyboardInterrupt


GRACE_S = 5.0
"""How long the other ranks may continue after one has failed."""


def _rank(job: Ranks, rank: int, store: str, pipe: Any) -> None:
    os.setsid()  # with what it starts it can be killed
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its children
    torch.set_num_threads(1)
    group: dist.ProcessGroup | None = None
    try:
        device = torch.device("cuda", rank) if job.device == "cuda" else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if job.ep_size > 1:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", init_method=store, rank=rank,
                world_size=job.ep_size, timeout=datetime.timedelta(seconds=job.timeout_s),
            )  # fmt: skip
            group = dist.group.WORLD
        made = job.made(rank, group, device)
        pipe.send((True, None))
    except Exception as error:
        pipe.send((False, described(error)))
        return
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, getattr(made, method)(*args))
        except Exception as error:
            answer = (False, described(error))
        pipe.send(answer)

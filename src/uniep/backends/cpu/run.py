"""Run one call's taskflow on one rank: every worker thread takes the tasks of its queue in order, waits, runs, signals.

Which worker runs which task, and in which order, is decided before anything runs: see `taskflow.scheduler`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from uniep.backends.cpu.peers import Peers
from uniep.backends.pinned import PinnedThreads
from uniep.errors import PeerTimeoutError
from uniep.taskflow.check import check
from uniep.taskflow.graph import GATE, SHARED_STAGES, Block, Event, Task, TaskGraph
from uniep.taskflow.operators import Operators
from uniep.taskflow.scheduler import WorkerName, assign
from uniep.taskflow.trace import Span
from uniep.way import Way

Body = Callable[[Any, Block], None]


class Step(NamedTuple):
    """An entry of a worker's queue.  remote, for_peers: as in `Span`."""

    task: Task
    remote: bool
    for_peers: bool


@dataclasses.dataclass(frozen=True, eq=False)
class CheckedQueues:
    """A checked graph, and the queues of one rank's workers.  bodies: those that operators bring themselves."""

    graph: TaskGraph
    of_worker: dict[WorkerName, list[Step]]
    bodies: Mapping[str, Body]

    @classmethod
    def make(
        cls, graph: TaskGraph, operators: Operators, way: Way, rank: int, left_out: Sequence[str] = ()
    ) -> CheckedQueues:
        """left_out: operators whose tasks only wait and signal on this rank.

        Raises ConfigError where `check` does.
        """
        assignment = assign(graph, way)
        check(graph, list(assignment.queues.values()))
        queues = assignment.of_rank(rank)
        index = torch.tensor([i for queue in queues.values() for i in queue], dtype=torch.int64)
        flags = (graph.remote[index].tolist(), graph.waits_for_peers[index].tolist())
        steps = map(Step, graph.some(index), *flags)
        of_worker = {name: [next(steps) for _ in queue] for name, queue in queues.items()}
        bodies: dict[str, Body] = {op.name: op.body for op in operators if op.body is not None}
        return cls(graph, of_worker, bodies | dict.fromkeys(left_out, lambda *_: None))


class Exposed:
    """How long no worker of this rank ran a task while one or more waited for peers, in `total_ns`."""

    def __init__(self) -> None:
        self.total_ns = 0
        self._running = self._waiting = self._since = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While a worker runs a task."""
        self._change(1, 0)
        try:
            yield
        finally:
            self._change(-1, 0)

    @contextlib.contextmanager
    def waiting(self, for_peers: bool) -> Iterator[None]:
        """While a worker waits for what its task needs."""
        self._change(0, int(for_peers))
        try:
            yield
        finally:
            self._change(0, -int(for_peers))

    def _change(self, running: int, waiting: int) -> None:
        with self._lock:
            now = time.perf_counter_ns()
            if self._waiting and not self._running:
                self.total_ns += now - self._since
            self._running += running
            self._waiting += waiting
            self._since = now


class _StoppedError(Exception):
    """Another worker of this rank failed."""


class Run:
    """Checked queues in one call.  bodies: an object with a method per operator.  trace: where to append, or None."""

    def __init__(
        self,
        peers: Peers,
        threads: PinnedThreads,
        number: int,
        operation: str,
        queues: CheckedQueues,
        bodies: object,
        trace: list[Span] | None,
    ) -> None:
        self.peers, self.threads, self.number, self.operation = peers, threads, number, operation
        self.queues, self.bodies, self.trace = queues, bodies, trace
        self.exposed = Exposed()
        self.local: dict[Event, int] = collections.defaultdict(int)
        self.local_lock = threading.Lock()
        self.errors: list[BaseException] = []

    def run(self) -> None:
        """Raises the first error of a worker, once all have stopped."""
        first = self.peers.rank * self.peers.workers
        jobs = [
            functools.partial(self._work, name, queue, first + number)
            for number, (name, queue) in enumerate(self.queues.of_worker.items())
        ]
        try:
            self.threads.run(jobs, stop=self.errors.append)  # workers must stop before their memory goes
        except BaseException:
            if not self.errors:
                raise
        if self.errors:
            try:
                raise self.errors[0]
            finally:
                self.errors.clear()  # its traceback refers to this object, and the cycle would keep the call's tensors

    def _work(self, name: WorkerName, queue: list[Step], column: int) -> None:
        try:
            with torch.no_grad():
                for step in queue:
                    self._step(name, step, column)
        except _StoppedError:
            pass
        except BaseException as error:
            self.errors.append(error)

    def _step(self, name: WorkerName, step: Step, column: int) -> None:
        task, claimed = step.task, time.perf_counter_ns()
        if task.waits:
            with self.exposed.waiting(step.for_peers):
                for event, count in task.waits:
                    self._wait(task, event, count)
        started = time.perf_counter_ns()
        if task.op != GATE:
            with self.exposed.running():
                if (body := self.queues.bodies.get(task.op)) is not None:
                    body(self.bodies, task.block)
                else:
                    getattr(self.bodies, task.op)(task.block)
        if self.trace is not None:
            ended = time.perf_counter_ns()
            phase = "forward" if self.operation.startswith("forward") else "backward"
            what = (phase, task.rank, str(name), task.op, task.block, step.remote, step.for_peers)
            self.trace.append(Span(*what, claimed, started, ended))
        for event in task.signals:
            self._signal(event, column)

    def _signal(self, event: Event, column: int) -> None:
        if event.stage in SHARED_STAGES:
            self.peers.signal(event, self.number, column)
        else:
            with self.local_lock:
                self.local[event] += 1

    def _wait(self, task: Task, event: Event, count: int) -> None:
        shared = event.stage in SHARED_STAGES

        def ready() -> bool:
            if self.errors:
                raise _StoppedError
            return (sum(self.peers.seen(event, self.number)) if shared else self.local.get(event, 0)) >= count

        # Waits for own tasks need no limit: they stop when a wait for a peer stops.
        self.peers.wait(ready, (lambda: self._late(task, event)) if shared else None)

    def _late(self, task: Task, event: Event) -> PeerTimeoutError:
        """Which peers are behind: the signals expected from their tasks, and those seen."""
        peers, seen = self.peers, self.peers.seen(event, self.number)
        graph = self.queues.graph
        signals = graph.signals.events
        groups = signals.groups[signals.item_P == graph.index_of(event)]
        expected = collections.Counter(graph.rank_N[graph.signals.tasks.take(groups).item_P].tolist())
        behind = []
        for peer, wanted in sorted(expected.items()):
            got = sum(seen[peer * peers.workers : (peer + 1) * peers.workers])
            if got < wanted:
                behind.append(f"rank {peer}: expected {wanted}, seen {got}")
        return PeerTimeoutError(
            f"rank {peers.rank} waited {peers.timeout_s:g} s in call {self.number} ({self.operation}), stage "
            f"{event.stage}, for {'; '.join(behind)}; blocked: {task}"
        )

"""Run one call's taskflow on one rank: worker threads claim tasks of their class in order, wait, run, signal."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import threading
import time
from collections.abc import Iterator

import torch

from uniep.backends.cpu_peers import Peers
from uniep.errors import PeerTimeoutError
from uniep.taskflow.graph import SHARED_STAGES, Event, Task, TaskGraph, Worker
from uniep.taskflow.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class TraceEntry:
    """When a worker ran a task, in time.perf_counter_ns of this host, and how long it had waited for it."""

    rank: int
    worker: str
    task: Task
    start_ns: int
    end_ns: int
    waited_ns: int


class _StoppedError(Exception):
    """Another worker of this rank failed."""


class Run:
    """One graph in one call.  bodies: an object with a method per op.  trace: where to append, or None."""

    def __init__(
        self,
        peers: Peers,
        number: int,
        operation: str,
        graph: TaskGraph,
        bodies: object,
        trace: list[TraceEntry] | None,
    ) -> None:
        self.peers, self.number, self.operation = peers, number, operation
        self.graph, self.bodies, self.trace = graph, bodies, trace
        self.local: dict[Event, int] = collections.defaultdict(int)
        self.local_lock = threading.Lock()
        self.errors: list[BaseException] = []

    def run(self, schedule: Schedule) -> None:
        """Raises the first error of a worker, once all have stopped."""
        classes: dict[Worker, int] = {"matrix": schedule.matrix_workers, "vector": schedule.vector_workers}
        threads: list[threading.Thread] = []
        for worker, count in classes.items():
            tasks, cursor = self.graph.queue(self.peers.rank, worker), itertools.count()
            for index in range(count):
                column = self.peers.rank * self.peers.workers + len(threads)
                arguments = (f"{worker} {index}", tasks, cursor, column)
                threads.append(threading.Thread(target=self._work, args=arguments, daemon=True))
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException as interrupt:  # KeyboardInterrupt: workers must stop before their memory goes
            self.errors.append(interrupt)
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
        if self.errors:
            try:
                raise self.errors[0]
            finally:
                self.errors.clear()  # its traceback refers to this object: no cycle that keeps the call's tensors

    def _work(self, name: str, tasks: tuple[Task, ...], cursor: Iterator[int], column: int) -> None:
        torch.set_num_threads(1)  # a setting of each thread
        try:
            with torch.no_grad():
                while (index := next(cursor)) < len(tasks):
                    self._step(name, tasks[index], column)
        except _StoppedError:
            pass
        except BaseException as error:
            self.errors.append(error)

    def _step(self, name: str, task: Task, column: int) -> None:
        claimed = time.perf_counter_ns()
        for event, count in task.waits:
            self._wait(task, event, count)
        if task.op != "gate":
            started = time.perf_counter_ns()
            getattr(self.bodies, task.op)(task.block)
            if self.trace is not None:
                ended = time.perf_counter_ns()
                self.trace.append(TraceEntry(task.rank, name, task, started, ended, started - claimed))
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

        # Own tasks need no limit: they stop when one that waits for a peer does.
        self.peers.wait(ready, (lambda: self._late(task, event)) if shared else None)

    def _late(self, task: Task, event: Event) -> PeerTimeoutError:
        """Which peers are behind: what their tasks must signal against what they have."""
        peers, seen = self.peers, self.peers.seen(event, self.number)
        expected = collections.Counter(t.rank for t in self.graph.tasks for e in t.signals if e == event)
        behind = []
        for peer, wanted in sorted(expected.items()):
            got = sum(seen[peer * peers.workers : (peer + 1) * peers.workers])
            if got < wanted:
                behind.append(f"rank {peer}: expected {wanted}, seen {got}")
        return PeerTimeoutError(
            f"rank {peers.rank} waited {peers.timeout_s:g} s in call {self.number} ({self.operation}), stage "
            f"{event.stage}, for {'; '.join(behind)}; blocked: {task}"
        )

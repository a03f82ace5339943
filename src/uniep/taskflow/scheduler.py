"""The static scheduler: from a graph to a queue per worker, before anything runs.

It simulates the workers of all ranks from event to event.  By default ("in order") a free worker takes the next task of
its class and rank in the graph's order, and waits until it may start; programs that claim from a cursor do the same.
For tile_order="critical-path" it takes, among the tasks that may start now, the one on the longest path to the end.
Paths that differ by less than the longest task count as equal; equal tasks keep the graph's order, and with it the
order of experts that keeps weights in cache.

All times are integer nanoseconds, and ties are broken by the position in the graph: the same input gives the same
bytes, on every rank.

**Source**: event-driven static scheduling over heterogeneous workers, HyperParallel-MoE (arXiv 2605.23764).
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from uniep.taskflow.check import Flow, check
from uniep.taskflow.graph import WORKERS, TaskGraph, Worker
from uniep.way import Way


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speeds:
    """The cost model: a task takes `task_ns` plus the longest of its parts at these speeds of one worker.

    flops, memory, peer: operations and bytes per nanosecond.  `uniep.sim.load_machine(name).speeds` has those of GPUs
    and of Ascend dies.
    """

    flops: float
    memory: float
    peer: float
    task_ns: int

    def parts(self, work_N3: Tensor) -> Tensor:
        """(N, 3) nanoseconds: for operations, for bytes of memory, for bytes to peers."""
        return work_N3.double() / torch.tensor([self.flops, self.memory, self.peer], dtype=torch.float64)

    def cost(self, graph: TaskGraph) -> Tensor:
        """(N,) int64 nanoseconds, at least 1."""
        longest_N = self.parts(graph.work_N3).amax(1).round().long()
        is_gate_N = graph.work_N3.amax(1) == 0
        return torch.where(is_gate_N, 1, longest_N + self.task_ns).clamp(min=1)


CPU_CORE = Speeds(flops=60, memory=10, peer=10, task_ns=15_000)
"""A core of a server, from traces of bfloat16 tiles: 50 to 70 GFLOP/s in GEMMs, 6 to 30 GB/s in copies."""


class WorkerName(NamedTuple):
    """One worker: its rank, its class, its number in the class."""

    rank: int
    worker: Worker
    number: int

    def __str__(self) -> str:
        return f"{self.worker} {self.number}"


@dataclasses.dataclass(frozen=True, eq=False)
class Assignment:
    """Which worker runs which tasks, in which order.  queues: task indices per worker; start_N, finish_N: simulated
    ns."""

    queues: dict[WorkerName, list[int]]
    start_N: Tensor
    finish_N: Tensor

    @property
    def makespan_ns(self) -> int:
        return int(self.finish_N.max()) if len(self.finish_N) else 0

    def of_rank(self, rank: int) -> dict[WorkerName, list[int]]:
        return {name: queue for name, queue in self.queues.items() if name.rank == rank}

    def order(self, rank: int, worker: Worker) -> Tensor:
        """Tasks of a class in order of their start times: the list from which a device's programs claim."""
        tasks = [i for name, queue in self.of_rank(rank).items() if name.worker == worker for i in queue]
        index_n = torch.tensor(sorted(tasks), dtype=torch.int64)
        return index_n[torch.argsort(self.start_N[index_n], stable=True)]

    def digest(self) -> str:
        """SHA-256 of queues and times."""
        state = hashlib.sha256()
        for name, queue in self.queues.items():
            state.update(f"{name.rank} {name}: {queue}\n".encode())
        for times in (self.start_N, self.finish_N):
            state.update(repr(times.tolist()).encode())
        return state.hexdigest()


def assign(graph: TaskGraph, way: Way, cost_N: Tensor | None = None) -> Assignment:
    """Queues for the workers of `way`.  cost_N: ns of each task; default: on a CPU core.

    Raises ConfigError, as `check` does, for a graph that never finishes.
    """
    counts: dict[Worker, int] = {"matrix": way.matrix_workers, "vector": way.vector_workers}
    cost_N = CPU_CORE.cost(graph) if cost_N is None else cost_N
    rank_N = priorities(graph, cost_N) if way.critical_path else None
    made = _simulate(graph, counts, cost_N, rank_N)
    if sum(map(len, made.queues.values())) < graph.num_tasks or bool((made.finish_N == 0).any()):
        check(graph)
        raise AssertionError("the simulation stopped early")
    return made


def priorities(graph: TaskGraph, cost_N: Tensor) -> Tensor:
    """(N,): the position of each task among all: longest path to the end first, then the graph's order."""
    length_N = longest_paths(graph, cost_N)
    coarse_N = length_N // max(int(cost_N.max()), 1) if len(cost_N) else length_N
    place_N = torch.empty_like(length_N)
    place_N[torch.argsort(-coarse_N, stable=True)] = torch.arange(len(length_N))
    return place_N


def longest_paths(graph: TaskGraph, cost_N: Tensor) -> Tensor:
    """(N,): the longest path from the start of each task to the end of the call, over all ranks.  Level by level:
    a level holds the tasks whose last wait is fulfilled by the level before it."""
    waits, signals = graph.waits, graph.signals
    waiters, num = waits.events.inverse(graph.num_events), graph.num_events
    waiting_G, unfinished_S = waits.events.start_G1.diff(), signals.tasks.start_G1.diff()
    missing_V = torch.bincount(signals.events.item_P, minlength=num)
    level = waits.tasks.take(torch.nonzero(waiting_G == 0).flatten()).item_P
    levels = []
    while len(level):
        levels.append(level)
        groups = _counted_down(unfinished_S, signals.group_N[level])
        events = _counted_down(missing_V, signals.events.take(groups).item_P)
        groups = _counted_down(waiting_G, waiters.take(events).item_P)
        level = waits.tasks.take(groups).item_P
    path_N, path_V = cost_N.clone(), torch.zeros(num, dtype=torch.int64)
    path_S, path_G = (
        torch.zeros(len(signals.events), dtype=torch.int64),
        torch.zeros(len(waits.events), dtype=torch.int64),
    )
    for level in reversed(levels):
        groups = torch.unique(signals.group_N[level])
        of_group = signals.events.take(groups)
        path_S[groups] = torch.zeros_like(groups).scatter_reduce_(0, of_group.groups, path_V[of_group.item_P], "amax")
        path_N[level] += path_S[signals.group_N[level]]
        path_G.scatter_reduce_(0, waits.group_N[level], path_N[level], "amax")
        groups = torch.unique(waits.group_N[level])
        of_group = waits.events.take(groups)
        path_V.scatter_reduce_(0, of_group.item_P, path_G[groups][of_group.groups], "amax")
    return path_N


def _counted_down(left: Tensor, index: Tensor) -> Tensor:
    """Subtract one from `left` for each entry of `index`; returns the entries that reach 0."""
    left.index_add_(0, index, torch.full_like(index, -1))
    touched = torch.unique(index)
    return touched[left[touched] == 0]


def _simulate(graph: TaskGraph, counts: Mapping[Worker, int], cost_N: Tensor, place_N: Tensor | None) -> Assignment:
    """place_N: priorities, or None for workers that take tasks in order."""
    num = graph.num_tasks
    cost, flow = cost_N.tolist(), Flow(graph)
    class_of = (graph.rank_N * len(WORKERS) + graph.classes).tolist()
    in_order = place_N is None
    place = list(range(num)) if place_N is None else place_N.tolist()
    at_place = place if place_N is None else torch.argsort(place_N).tolist()
    names = [
        [WorkerName(rank, worker, number) for number in range(counts[worker])]
        for rank in range(graph.ep_size)
        for worker in WORKERS
    ]
    queues: list[list[list[int]]] = [[[] for _ in of_class] for of_class in names]
    free = [list(range(len(of_class))) for of_class in names]
    ready: list[list[int]] = [[] for _ in names]  # heaps of places
    order: list[list[int]] = [[] for _ in names]  # in order: tasks not yet taken, the next one last
    for index in range(num - 1, -1, -1):
        if in_order:
            order[class_of[index]].append(index)
        elif flow.may_start(index):
            ready[class_of[index]].append(place[index])
    for heap in ready:
        heapq.heapify(heap)
    start, finish, worker_of = [0] * num, [0] * num, [-1] * num
    running: list[int] = []  # finish * num + task
    now = 0
    touched = set(range(len(names)))
    while True:
        for kind in sorted(touched):
            idle, taken, heap = free[kind], order[kind], ready[kind]
            while idle and (taken or heap):
                index = taken.pop() if in_order else at_place[heapq.heappop(heap)]
                worker_of[index] = heapq.heappop(idle)
                queues[kind][worker_of[index]].append(index)
                if flow.may_start(index):
                    start[index], finish[index] = now, now + cost[index]
                    heapq.heappush(running, finish[index] * num + index)
        touched.clear()
        if not running:
            break
        now = running[0] // num
        while running and running[0] // num == now:
            index = heapq.heappop(running) % num
            kind = class_of[index]
            heapq.heappush(free[kind], worker_of[index])
            touched.add(kind)
            for group in flow.finish(index):
                for other in group:
                    if not in_order:
                        heapq.heappush(ready[class_of[other]], place[other])
                        touched.add(class_of[other])
                    elif worker_of[other] >= 0:  # a worker has taken it and waits
                        start[other], finish[other] = now, now + cost[other]
                        heapq.heappush(running, finish[other] * num + other)
    return Assignment(
        {name: queues[kind][name.number] for kind, of_class in enumerate(names) for name in of_class},
        torch.tensor(start, dtype=torch.int64),
        torch.tensor(finish, dtype=torch.int64),
    )

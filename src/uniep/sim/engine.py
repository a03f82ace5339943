"""Discrete events: queues of tasks run on workers that share memory, links and network.

Time is in whole nanoseconds.  A worker takes the next task of its queue, waits until it may start, runs it, and takes
the next.  Shared resources: every running task requests its bytes evenly over the time that it takes alone.  While the
requests together exceed the capacity, all tasks run at the same fraction of their speed, capacity / demand.  So each
resource has one clock, which runs slower than time while demand exceeds capacity.  A task ends when the clocks of all
resources that it uses have advanced by its time alone.  It keeps requesting until it ends.

The same input gives the same bytes: no randomness, ties by the position in the graph.

**Source**: processor sharing by virtual time (Kleinrock 1967; Zhang's virtual clock); event-driven tasks and queues,
HyperParallel-MoE (arXiv 2605.23764).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import heapq
import math
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from uniep.sim.costs import Costs
from uniep.taskflow.check import Flow, check
from uniep.taskflow.graph import TaskGraph


class Queue(NamedTuple):
    """Tasks that `workers` workers of a rank take in order.  name: of the class, or of a single worker.  then: number
    of the queue that the workers join when this one is empty."""

    rank: int
    name: str
    workers: int
    tasks: Sequence[int]
    then: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Timeline:
    """claimed_N, start_N, finish_N: int64 ns.  queue_N, worker_N: which worker ran each task."""

    queues: Sequence[Queue]
    claimed_N: Tensor
    start_N: Tensor
    finish_N: Tensor
    queue_N: Tensor
    worker_N: Tensor

    @property
    def makespan_ns(self) -> int:
        return int(self.finish_N.max()) if len(self.finish_N) else 0

    def numbers(self) -> Tensor:
        """(N,): the number of each task's worker in the last queue that it joins, where no other has it."""
        first = _first_numbers(self.queues)
        last = list(first)
        for number, queue in enumerate(self.queues):
            while queue.then is not None:
                last[number] += first[queue.then]
                queue = self.queues[queue.then]
        return self.worker_N + torch.tensor(last)[self.queue_N]


def run(graph: TaskGraph, queues: Sequence[Queue], costs: Costs) -> Timeline:
    """Raises ConfigError, as `check` does, for queues that never finish."""
    num, events = graph.num_tasks, graph.num_events
    kinds = num + events + len(costs.capacity)  # a code in the heap: a task, an event, a resource
    flow = Flow(graph)
    alone, poll, delay = costs.alone_N.tolist(), costs.poll_N.tolist(), costs.delay_V.tolist()
    begin, resource_of, demand_of = (
        t.tolist() for t in (costs.flow_start_N1, costs.flow_resource_F, costs.flow_demand_F)
    )
    flows = bool(resource_of)
    shared = _Shared(costs, kinds)
    due = [0.0] * len(resource_of)  # value of a flow's clock at its end
    todo = [list(reversed(queue.tasks)) for queue in queues]
    idle = [list(range(queue.workers)) for queue in queues]
    first = _first_numbers(queues)
    claimed, start, finish, worker, taken_from = ([-1] * num for _ in range(5))
    heap: list[int] = []
    push, pop = heapq.heappush, heapq.heappop
    may_start, completes, joins, is_over = flow.may_start, flow.completes, shared.joins, shared.is_over

    def starts(index: int, now: int) -> None:
        start[index] = now
        if flows:
            for f in range(begin[index], begin[index + 1]):
                due[f] = joins(resource_of[f], demand_of[f], now, heap) + alone[index]
        push(heap, (now + alone[index]) * kinds + index)

    def claims(number: int, now: int) -> None:
        tasks, free = todo[number], idle[number]
        while free and tasks:
            index = tasks.pop()
            worker[index], claimed[index], taken_from[index] = pop(free), now, number
            if may_start(index):
                starts(index, now)
        if free and (then := queues[number].then) is not None:
            for who in free:
                push(idle[then], who + first[number])
            free.clear()
            claims(then, now)

    def opens(event: int, now: int) -> None:
        for group in flow.complete(event):
            for other in group:
                if claimed[other] >= 0:  # a worker has taken it and waits
                    if poll[other]:
                        push(heap, (now + poll[other]) * kinds + other)
                    else:
                        starts(other, now)

    def ends(index: int, now: int) -> None:
        finish[index] = now
        if flows:
            for f in range(begin[index], begin[index + 1]):
                joins(resource_of[f], -demand_of[f], now, heap)
        for event in completes(index):
            if delay[event]:
                push(heap, (now + delay[event]) * kinds + num + event)
            else:
                opens(event, now)
        number = taken_from[index]
        tasks, free = todo[number], idle[number]
        if free or not tasks:
            push(free, worker[index])
            claims(number, now)
            return
        following = tasks.pop()  # the usual case: no other worker of this queue is free
        worker[following], claimed[following], taken_from[following] = worker[index], now, number
        if may_start(following):
            starts(following, now)

    with _without_collection():
        for number in range(len(queues)):
            claims(number, 0)
        while heap:
            code = pop(heap)
            now = code // kinds
            code -= now * kinds
            if code >= num + events:
                for index in shared.ended(code - num - events, begin, resource_of, due, now, heap):
                    ends(index, now)
            elif code >= num:
                opens(code - num, now)
            elif start[code] < 0:  # its worker has seen that it may start
                starts(code, now)
            elif not flows or is_over(code, begin, resource_of, due, now, heap):
                ends(code, now)
    if min(finish, default=0) < 0:
        check(graph, [queue.tasks for queue in queues])
        raise AssertionError("the simulation stopped early")
    columns = (
        torch.frombuffer(array("q", of or [0]), dtype=torch.int64)[:num]
        for of in (claimed, start, finish, taken_from, worker)
    )
    return Timeline(queues, *columns)


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """No garbage collection: it would scan millions of lists, and there are no cycles here (a fifth faster)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _first_numbers(queues: Sequence[Queue]) -> list[int]:
    """Per queue, the offset added to its workers' numbers in the queue that they join."""
    taken, first = [queue.workers for queue in queues], []
    for queue in queues:
        first.append(0 if queue.then is None else taken[queue.then])
        if queue.then is not None:
            taken[queue.then] += queue.workers
    return first


class _Shared:
    """The clocks of shared resources."""

    def __init__(self, costs: Costs, kinds: int) -> None:
        self.capacity, self.kinds = costs.capacity.tolist(), kinds
        count = len(self.capacity)
        self.first = kinds - count  # code of resource 0
        self.demand, self.clock, self.pace = [0.0] * count, [0.0] * count, [1.0] * count
        self.read_at, self.predicted = [0] * count, [-1] * count
        self.late: list[list[tuple[float, int]]] = [[] for _ in range(count)]  # (due, task) past their time alone

    def joins(self, resource: int, demand: float, now: int, heap: list[int]) -> float:
        """Change the demand from now on; returns the clock."""
        clock = self._read(resource, now)
        asked = self.demand[resource] = self.demand[resource] + demand
        capacity = self.capacity[resource]
        pace = capacity / asked if asked > capacity else 1.0
        if pace != self.pace[resource]:
            self.pace[resource] = pace
            if self.late[resource]:
                self._predict(resource, now, heap)
        return clock

    def _read(self, resource: int, now: int) -> float:
        since = now - self.read_at[resource]
        if since:
            self.read_at[resource] = now
            self.clock[resource] += since * self.pace[resource]
        return self.clock[resource]

    def _predict(self, resource: int, now: int, heap: list[int]) -> None:
        left = self.late[resource][0][0] - self.clock[resource]
        at = now + max(math.ceil(left / self.pace[resource] - 1e-6), 0)
        if at != self.predicted[resource]:
            self.predicted[resource] = at
            heapq.heappush(heap, at * self.kinds + self.first + resource)

    def is_over(self, task: int, begin: list[int], of: list[int], due: list[float], now: int, heap: list[int]) -> bool:
        """Whether all clocks of a task have reached their values; else it ends when the first of the others has."""
        for f in range(begin[task], begin[task + 1]):
            resource = of[f]
            if due[f] - self._read(resource, now) > 1e-6 * (1.0 + self.pace[resource]):
                heapq.heappush(self.late[resource], (due[f], task))
                self._predict(resource, now, heap)
                return False
        return True

    def ended(
        self, resource: int, begin: list[int], of: list[int], due: list[float], now: int, heap: list[int]
    ) -> list[int]:
        """The late tasks of a resource that end now."""
        if self.predicted[resource] != now:
            return []  # its pace has changed since
        self.predicted[resource] = -1
        late, clock = self.late[resource], self._read(resource, now)
        over = []
        while late and late[0][0] - clock <= 1e-6 * (1.0 + self.pace[resource]):
            task = heapq.heappop(late)[1]
            if self.is_over(task, begin, of, due, now, heap):
                over.append(task)
        if late:
            self._predict(resource, now, heap)
        return over

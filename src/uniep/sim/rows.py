"""Results of a simulation: makespan, how busy workers and links were, exposed communication, phases."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from uniep.sim.costs import RESOURCES
from uniep.sim.machine import Machine
from uniep.sim.problem import Problem
from uniep.sim.strategies import COPIES, Simulated, Strategy, simulate
from uniep.taskflow.graph import GATE, WORKERS
from uniep.taskflow.trace import Span


def row(problem: Problem, machine: Machine, strategy: Strategy) -> dict[str, Any]:
    """One row of results."""
    return row_of(problem, machine, strategy, simulate(problem, machine, strategy.arrange(problem, machine)))


def row_of(problem: Problem, machine: Machine, strategy: Strategy, made: Simulated) -> dict[str, Any]:
    return {
        "machine": machine.name,
        "shape": problem.shape.name,
        "ep": problem.ep,
        "tokens": problem.tokens,
        "routing": problem.routing,
        "direction": problem.direction,
        "schedule": strategy.name,
        "makespan_us": made.makespan_ns / 1e3,
        "busy": busy(made, machine),
        "exposed_comm_us": exposed_us(made, machine),
        "phases": phases(made),
    }


def busy(made: Simulated, machine: Machine) -> dict[str, float]:
    """Shares of the makespan: matrix workers' computing, vector workers' tasks, used capacity of links (or network)."""
    graph, timeline, is_matrix = made.graph, made.timeline, _is_matrix(made)
    whole = max(made.makespan_ns, 1) * graph.ep_size
    ran_N = (timeline.finish_N - timeline.start_N).double()
    vector_workers = int(machine.vector_workers) or int(machine.matrix_workers)
    link, network = (float(made.costs.capacity[RESOURCES.index(name)]) for name in ("link out", "network out"))
    out = {
        "matrix": float(made.costs.compute_N[is_matrix].sum()) / (whole * int(machine.matrix_workers)),
        "vector": float(ran_N[~is_matrix].sum()) / (whole * vector_workers),
        "link": max(float(made.costs.near_N.sum()) / link, float(made.costs.far_N.sum()) / network) / whole,
    }
    return {name: round(part, 4) for name, part in out.items()}


def exposed_us(made: Simulated, machine: Machine) -> float:
    """Time in which tasks of a rank send, minus the time that its matrix workers compute meanwhile; mean over ranks."""
    graph, timeline, is_matrix = made.graph, made.timeline, _is_matrix(made)
    took_N = (timeline.finish_N - timeline.start_N).double()
    total = 0.0
    for rank in range(graph.ep_size):
        here = graph.rank_N == rank
        sending = here & (made.costs.sends > 0)
        if not bool(sending.any()):
            continue
        computing = here & is_matrix
        edge, before = _union(timeline.start_N[sending], timeline.finish_N[sending])
        meanwhile_N = _until(timeline.finish_N[computing], edge, before) - _until(
            timeline.start_N[computing], edge, before
        )
        computed = made.costs.compute_N[computing] * meanwhile_N / took_N[computing]
        total += max(float(before[-1]) - float(computed.sum()) / int(machine.matrix_workers), 0.0)
    return round(total / graph.ep_size / 1e3, 3)


def _is_matrix(made: Simulated) -> Tensor:
    return made.graph.classes == WORKERS.index("matrix")


def _union(start_n: Tensor, finish_n: Tensor) -> tuple[Tensor, Tensor]:
    """The union of these intervals: times at which it begins or ends, and its length before each time."""
    start_n, order = torch.sort(start_n)
    until_n = torch.cummax(finish_n[order], 0).values
    begins = torch.cat([torch.ones(1, dtype=torch.bool), start_n[1:] > until_n[:-1]])
    ends = torch.cat([begins[1:], torch.ones(1, dtype=torch.bool)])
    edge = torch.stack([start_n[begins], until_n[ends]], 1).flatten()
    length = torch.zeros_like(edge)
    length[1::2] = edge[1::2] - edge[::2]
    return edge, length.cumsum(0)


def _until(time_n: Tensor, edge: Tensor, before: Tensor) -> Tensor:
    """Length of the intervals before each of these times."""
    at = torch.searchsorted(edge, time_n, right=True) - 1
    passed = torch.where(at % 2 == 0, time_n - edge[at.clamp(min=0)], 0)
    return torch.where(at < 0, 0, before[at.clamp(min=0)] + passed).double()


def phases(made: Simulated) -> dict[str, float]:
    """us from the first start to the last end of each operator, on the rank that ends last."""
    graph, timeline = made.graph, made.timeline
    if not graph.num_tasks:
        return {}
    last = graph.rank_N[timeline.finish_N.argmax()]
    out = {}
    for number, name in enumerate(graph.ops):
        of_op = (graph.op_N == number) & (graph.rank_N == last)
        if name != GATE and bool(of_op.any()):
            span = int(timeline.finish_N[of_op].max() - timeline.start_N[of_op].min())
            out[name] = round(span / 1e3, 3)
    return out


def spans(made: Simulated, phase: str) -> list[Span]:
    """The tasks as records of the trace format."""
    graph, timeline = made.graph, made.timeline
    tasks = graph.tasks
    remote, for_peers = graph.remote.tolist(), graph.waits_for_peers.tolist()
    names: list[str] = []
    for at, number, task in zip(timeline.queue_N.tolist(), timeline.numbers().tolist(), tasks, strict=True):
        queue = timeline.queues[at]
        kind = COPIES if queue.name == COPIES else task.worker
        names.append(queue.name if queue.workers == 1 else f"{kind} {number}")
    times = (timeline.claimed_N, timeline.start_N, timeline.finish_N)
    return [
        Span(phase, t.rank, name, t.op, t.block, is_remote, waits, claimed, start, end)
        for t, name, is_remote, waits, claimed, start, end in zip(
            tasks, names, remote, for_peers, *((of + made.start_ns).tolist() for of in times), strict=True
        )
    ]

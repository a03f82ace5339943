"""What a simulation says: makespan, how busy workers and links were, communication that nothing hides, phases."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from uniep.sim.costs import RESOURCES
from uniep.sim.machine import Machine
from uniep.sim.problem import Problem
from uniep.sim.strategies import Simulated, Strategy, simulate
from uniep.taskflow.graph import GATE, WORKERS
from uniep.taskflow.trace import Span


def row(problem: Problem, machine: Machine, strategy: Strategy) -> dict[str, Any]:
    """One row of results."""
    return row_of(problem, machine, strategy, simulate(problem, machine, strategy.program(problem, machine)))


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
        "exposed_comm_us": exposed_us(made),
        "phases": phases(made),
    }


def busy(made: Simulated, machine: Machine) -> dict[str, float]:
    """Parts of the makespan: of a mean worker of each class, and of the links' capacity."""
    graph, timeline = made.graph, made.timeline
    whole = max(made.makespan_ns, 1) * graph.ep_size
    ran_N = (timeline.finish_N - timeline.start_N).double()
    out: dict[str, float] = {}
    for number, worker in enumerate(WORKERS):
        count = int(machine.vector_workers if worker == "vector" else 0) or int(machine.matrix_workers)
        out[worker] = float(ran_N[graph.classes == number].sum()) / (whole * count)
    link_rate = max(float(made.costs.capacity[RESOURCES.index("link out")]), 1e-9)
    network_rate = float(made.costs.capacity[RESOURCES.index("network out")])
    near, far = made.costs.near_N, made.costs.far_N
    out["link"] = max(float(near.sum()) / link_rate, float(far.sum()) / network_rate) / whole
    return {name: round(part, 4) for name, part in out.items()}


def exposed_us(made: Simulated) -> float:
    """Time in which a rank sends, or waits for peers' rows, while no matrix worker of it computes; mean over ranks."""
    graph, timeline = made.graph, made.timeline
    is_matrix = graph.classes == WORKERS.index("matrix")
    total = 0
    for rank in range(graph.ep_size):
        here = graph.rank_N == rank
        compute = _union(timeline, here & is_matrix)
        sends = _union(timeline, here & (made.costs.sends > 0))
        both = _union(timeline, here & (is_matrix | (made.costs.sends > 0)))
        total += both - compute if sends else 0
    return round(total / graph.ep_size / 1e3, 3)


def _union(timeline: Any, chosen_N: Tensor) -> int:
    """ns in which any of these tasks runs."""
    start, order = torch.sort(timeline.start_N[chosen_N])
    if not len(start):
        return 0
    until = torch.cummax(timeline.finish_N[chosen_N][order], 0).values
    gaps = (start[1:] - until[:-1]).clamp(min=0)
    return int(until[-1] - start[0] - gaps.sum())


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


def spans(made: Simulated, problem: Problem) -> list[Span]:
    """As records of the trace format."""
    graph, timeline = made.graph, made.timeline
    tasks = graph.tasks
    remote, for_peers = graph.remote.tolist(), graph.waits_for_peers.tolist()
    phase = "forward" if problem.direction == "fwd" else "backward"
    names: list[str] = []
    for number, worker, index in zip(
        timeline.queue_N.tolist(), timeline.worker_N.tolist(), range(graph.num_tasks), strict=True
    ):
        queue = timeline.queues[number]
        names.append(queue.name if queue.workers == 1 else f"{tasks[index].worker} {worker}")
    times = (timeline.claimed_N, timeline.start_N, timeline.finish_N)
    return [
        Span(phase, t.rank, name, t.op, t.block, is_remote, waits, claimed, start, end)
        for t, name, is_remote, waits, claimed, start, end in zip(
            tasks, names, remote, for_peers, *((of + made.start_ns).tolist() for of in times), strict=True
        )
    ]

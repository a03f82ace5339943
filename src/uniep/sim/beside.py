"""Prediction for a recorded layer: the same routing, schedule and tasks, as records of the same kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from uniep.config import MoEConfig
from uniep.routing import build_plan
from uniep.sim.costs import Costs, costs
from uniep.sim.engine import Queue, run
from uniep.sim.machine import Machine
from uniep.sim.rows import spans
from uniep.sim.strategies import Arrangement, Lane, Simulated, queues_of
from uniep.taskflow.layer import backward_operators, forward_operators
from uniep.taskflow.lower import compile_graph, sites
from uniep.taskflow.scheduler import CPU_CORE, assign
from uniep.taskflow.trace import Span, window
from uniep.way import Way

PREDICTED = ", predicted"
"""Suffix of a phase's name."""


def predicted(
    ids: Sequence[Tensor], cfg: MoEConfig, way: Way, machine: Machine | None, after: Sequence[Span]
) -> list[Span]:
    """Records of a forward and a backward that begin when the last of `after` has ended.

    ids: of all ranks.  machine: None: CPU processes whose threads run the static scheduler's queues; else GPUs that run
    the way's lists in one kernel per direction.
    """
    plans = [build_plan(ids, rank, cfg) for rank in range(len(ids))]
    of_rank = sites(plans, [len(part) for part in ids], cfg, way)
    now, out = window(after)[1] if after else 0, list[Span]()
    for phase, operators in (
        ("forward", forward_operators(way, keep=True)),
        ("backward", backward_operators(way)),
    ):
        graph = compile_graph(operators, of_rank)
        if machine is None:
            spent = Costs.without_contention(graph, CPU_CORE.cost(graph))
            planned = assign(graph, way, spent.alone_N)
            queues = [Queue(name.rank, str(name), 1, tasks) for name, tasks in planned.queues.items()]
        else:
            spent = costs(graph, operators, of_rank, machine)
            arrangement = Arrangement(
                operators=operators, way=way, lanes=(Lane(("push",), way.push_programs),)
            )  # fmt: skip
            queues = queues_of(graph, arrangement, machine, spent.alone_N)
        made = Simulated(graph, of_rank, spent, run(graph, queues, spent), 0)
        out += [
            dataclasses.replace(
                s, claimed_ns=now + s.claimed_ns, start_ns=now + s.start_ns, end_ns=now + s.end_ns
            )
            for s in spans(made, phase + PREDICTED)
        ]  # fmt: skip
        now += made.makespan_ns
    return out

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
from uniep.sim.strategies import Arrangement, Simulated, queues_of, with_transfer
from uniep.taskflow.layer import backward_operators, forward_operators, recompute_operators
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
    the way's lists in one kernel per direction, and, if it recomputes, a launch before the backward's that is a phase
    of its own.
    """
    plans = [build_plan(ids, rank, cfg, way.sends_by_expert, way.align) for rank in range(len(ids))]
    of_rank = sites(plans, [len(part) for part in ids], cfg, way)
    launches = [("forward", forward_operators(way, keep=True), of_rank)]
    if way.recomputes and way.mega:
        natural = dataclasses.replace(way, local_first="none", chunk_experts=0, critical_path=False, rotated=False)
        of_launch = [dataclasses.replace(site, way=natural) for site in of_rank]
        launches.append(("recompute", recompute_operators(natural), of_launch))
    launches.append(("backward", backward_operators(way), of_rank))
    now, out = window(after)[1] if after else 0, list[Span]()
    for phase, operators, here in launches:
        if machine is None:
            graph = compile_graph(operators, here)
            spent = Costs.without_contention(graph, CPU_CORE.cost(graph))
            planned = assign(graph, way, spent.alone_N)
            queues = [Queue(name.rank, str(name), 1, tasks) for name, tasks in planned.queues.items()]
        else:
            operators, sending = with_transfer(operators, way)
            graph = compile_graph(operators, here)
            arrangement = Arrangement(operators=operators, way=way, lanes=(sending,))
            spent = costs(graph, operators, here, machine, engines=arrangement.engines)
            queues = queues_of(graph, arrangement, machine, spent.alone_N)
        made = Simulated(graph, here, spent, run(graph, queues, spent), 0)
        out += [
            dataclasses.replace(
                s, claimed_ns=now + s.claimed_ns, start_ns=now + s.start_ns, end_ns=now + s.end_ns
            )
            for s in spans(made, phase + PREDICTED)
        ]  # fmt: skip
        now += made.makespan_ns
    return out

"""Named strategies: what a call is made of, how tasks are grouped into kernels, and who takes which task.

One entry each.  A strategy is a function of a problem and a machine; `Program` is all that the simulator needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from uniep.errors import ConfigError
from uniep.sim import operators as made
from uniep.sim.costs import Costs, costs
from uniep.sim.engine import Queue, Timeline, run
from uniep.sim.kernels import in_kernels
from uniep.sim.machine import Machine
from uniep.sim.problem import Problem, folded
from uniep.taskflow.graph import WORKERS, TaskGraph
from uniep.taskflow.layer import backward_operators, forward_operators
from uniep.taskflow.lower import compile_graph
from uniep.taskflow.operators import Operators
from uniep.taskflow.schedule import Schedule, Tile
from uniep.taskflow.scheduler import assign
from uniep.taskflow.site import Site


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """operators: of the call.  schedule: tiles and orders.  kernels: names of operators that start together; None: one
    kernel, whose tasks wait for events alone.  static: queues per worker, made beforehand; else workers of a class
    claim from one list.  dynamic: what is next is decided at run time.  first: an operator, and how many workers run it
    before they join the others, where workers run both kinds of tasks."""

    operators: Operators
    schedule: Schedule
    kernels: Sequence[Sequence[str]] | None = None
    static: bool = False
    dynamic: bool = False
    first: tuple[str, int] | None = None


@dataclasses.dataclass(frozen=True)
class Strategy:
    name: str
    about: str
    program: Callable[[Problem, Machine], Program]


_TILES = {"gemm1": Tile(rows=128, columns=256), "gemm2": Tile(rows=128, columns=256)}


def _schedule(machine: Machine, **fields: object) -> Schedule:
    workers = {"matrix_workers": int(machine.matrix_workers), "vector_workers": max(int(machine.vector_workers), 1)}
    return Schedule(**{**_TILES, **workers, "tile_order": "natural", **fields})  # type: ignore[arg-type]


def _one_by_one(make: Callable[[Problem, Schedule], Operators]) -> Callable[[Problem, Machine], Program]:
    """A kernel for each operator."""

    def program(problem: Problem, machine: Machine) -> Program:
        schedule = _schedule(machine)
        operators = make(problem, schedule)
        return Program(operators=operators, schedule=schedule, kernels=[[op.name] for op in operators])

    return program


def _taskflow(
    *, one_event: bool = False, dynamic: bool = False, order: str = "natural"
) -> Callable[[Problem, Machine], Program]:
    """In the order of the public kernel: all puts, then activations, then rows back; first products before second
    ones, weight gradients last.  Workers of a class get their queues beforehand, unless `dynamic`."""

    def program(problem: Problem, machine: Machine) -> Program:
        schedule = _schedule(machine, peer_order="rotated", tile_order=order)
        operators = made.taskflow(problem, schedule, separate=machine.separate_vector, one_event=one_event)
        static = machine.separate_vector and not dynamic
        return Program(operators=operators, schedule=schedule, static=static, dynamic=dynamic)

    return program


def _uniep(overlap: bool) -> Callable[[Problem, Machine], Program]:
    """The layer's own operators: tokens once per rank, rows that return from the product's epilogue."""

    def program(problem: Problem, machine: Machine) -> Program:
        schedule = _schedule(machine, tile_order="local-first" if overlap else "natural")
        grouped = problem.combine_groups is not None
        if problem.direction == "fwd":
            operators = forward_operators(schedule, keep=True, grouped=grouped)
            kernels = [["push", "gemm1"], ["gemm2"], ["group_sum"], ["combine", "keep"]]
        else:
            operators = backward_operators(schedule, grouped=grouped)
            kernels = [["push", "dgrad2"], ["dgrad1"], ["group_sum"], ["wgrad2"], ["wgrad1"],
                       ["dweight", "collect", "combine"]]  # fmt: skip
        if not overlap:
            kernels = [[op.name] for op in operators]
        first = ("push", schedule.push_programs) if overlap else None
        return Program(operators=operators, schedule=schedule, kernels=kernels, first=first)

    return program


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("serialized", "operator by operator with all-to-alls of rows, as frameworks run it",
                 _one_by_one(made.serialized)),
        Strategy("deepep", "operator by operator; tokens once per rank, rows added before they return",
                 _one_by_one(made.deepep)),
        Strategy("taskflow", "one kernel of tile tasks, rows put in the order of experts, static queues",
                 _taskflow()),
        Strategy("taskflow-one-event", "as taskflow, but nothing starts before the whole dispatch has arrived",
                 _taskflow(one_event=True)),
        Strategy("taskflow-dynamic", "as taskflow, but workers decide at run time which task is next",
                 _taskflow(dynamic=True)),
        Strategy("taskflow-critical-path", "as taskflow, queues by list scheduling along the longest path",
                 _taskflow(order="critical-path")),
        Strategy("uniep-serial", "uniep's operators, one after the other", _uniep(False)),
        Strategy("uniep", "uniep's operators; tokens travel under the first product, results under the second",
                 _uniep(True)),
    )
}  # fmt: skip


def parse_strategies(text: str) -> list[Strategy]:
    """Comma-separated names.  Raises ConfigError."""
    names = [name for name in text.split(",") if name]
    if not names or any(name not in STRATEGIES for name in names):
        raise ConfigError(f"schedule {text!r} is unknown; use one or more of {', '.join(STRATEGIES)}")
    return [STRATEGIES[name] for name in names]


@dataclasses.dataclass(frozen=True, eq=False)
class Simulated:
    """A program as it ran.  start_ns: the launch before the first task."""

    graph: TaskGraph
    sites: Sequence[Site]
    costs: Costs
    timeline: Timeline
    start_ns: int

    @property
    def makespan_ns(self) -> int:
        return self.start_ns + self.timeline.makespan_ns


def simulate(problem: Problem, machine: Machine, program: Program) -> Simulated:
    """Compile, schedule, and run on the machine; balanced routing on the one rank that stands for all."""
    operators, sites = program.operators, problem.sites(program.schedule)
    if problem.symmetric:
        operators = folded(operators, int(machine.ranks_per_node))
    return execute(program, operators, sites, machine)


def execute(program: Program, operators: Operators, sites: Sequence[Site], machine: Machine) -> Simulated:
    """operators: the program's, or those of them that stand for all ranks.  sites: of the ranks of the graph."""
    launches = []
    if program.kernels is not None:
        launches = [max(_launch_us(operators, name, machine) for name in names) for names in program.kernels]
        operators = in_kernels(operators, program.kernels)
    graph = compile_graph(operators, sites)
    spent = costs(graph, operators, sites, machine, launches, dynamic=program.dynamic)
    timeline = run(graph, queues_of(graph, program, machine, spent.alone_N), spent)
    first = launches[0] if launches else machine.matrix_launch_us
    return Simulated(graph, sites, spent, timeline, round(first * 1e3))


def _launch_us(operators: Operators, name: str, machine: Machine) -> float:
    if name not in [op.name for op in operators]:
        return 0.0
    if name in made.COLLECTIVES:
        return machine.collective_launch_us
    return machine.matrix_launch_us if operators[name].worker == "matrix" else machine.vector_launch_us


def queues_of(graph: TaskGraph, program: Program, machine: Machine, alone_N: Tensor) -> list[Queue]:
    if program.static:
        planned = assign(graph, program.schedule, alone_N)
        return [Queue(name.rank, str(name), 1, tasks) for name, tasks in planned.queues.items()]
    workers = {"matrix": int(machine.matrix_workers), "vector": int(machine.vector_workers)}
    queues: list[Queue] = []
    for rank in range(graph.ep_size):
        if machine.separate_vector:
            queues += [Queue(rank, kind, workers[kind], graph.indices(rank, kind).tolist()) for kind in WORKERS]
            continue
        tasks = graph.indices(rank)
        early, count = torch.zeros_like(tasks, dtype=torch.bool), 0
        if program.first is not None and program.first[0] in graph.ops:
            early, count = graph.op_N[tasks] == graph.ops.index(program.first[0]), program.first[1]
        if not bool(early.any()):
            count = 0
        queues.append(Queue(rank, "worker", workers["matrix"] - count, tasks[~early].tolist()))
        if count:
            queues.append(Queue(rank, "worker", count, tasks[early].tolist(), len(queues) - 1))
    return queues

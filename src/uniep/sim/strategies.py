"""Named strategies: the operators of a call, how tasks are grouped into kernels, and which worker takes which task.

One entry each.  A strategy is a function of a problem and a machine; it returns an `Arrangement`, all that the
simulator needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from uniep.dimension import CPU, GPU
from uniep.errors import ConfigError
from uniep.schedule import Schedule, Tile, default_schedule
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
from uniep.taskflow.scheduler import assign
from uniep.taskflow.site import Site
from uniep.way import Way, resolve


class Lane(NamedTuple):
    """Operators that `workers` workers run.  extra: these workers are not part of the die's, as copy engines; others
    join the rest afterwards.  last: the rest joins them instead.  shares: operators that they run with the rest before,
    tiles in turn."""

    operators: tuple[str, ...]
    workers: int
    extra: bool = False
    last: bool = False
    shares: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrangement:
    """operators: of the call.  way: tiles and orders.  kernels: names of operators that start together; None: one
    kernel, whose tasks wait only for events.  static: one queue per worker, made beforehand; else workers of a class
    claim from one list.  dynamic: the next task is chosen at run time.  framework: products are those of a framework.
    lanes: operators with separate workers, if workers run both kinds of tasks."""

    operators: Operators
    way: Way
    kernels: Sequence[Sequence[str]] | None = None
    static: bool = False
    dynamic: bool = False
    framework: bool = False
    lanes: tuple[Lane, ...] = ()

    @property
    def engines(self) -> list[str]:
        """Operators that copy engines run."""
        return [name for lane in self.lanes if lane.extra for name in lane.operators]


@dataclasses.dataclass(frozen=True)
class Strategy:
    name: str
    about: str
    arrange: Callable[[Problem, Machine], Arrangement]


_TILES = {"gate_up": Tile(rows=128, columns=256), "down": Tile(rows=128, columns=256)}


def _way(problem: Problem, machine: Machine, **fields: object) -> Way:
    """A way with GPU tiles, if workers run both kinds of tasks."""
    workers = {"matrix_workers": int(machine.matrix_workers), "vector_workers": max(int(machine.vector_workers), 1)}
    schedule = Schedule(**{**_TILES, **workers, "tile_order": "natural", **fields})  # type: ignore[arg-type]
    if machine.separate_vector:
        return resolve(problem.cfg, problem.ep, problem.tokens, schedule, backend=CPU)
    schedule = dataclasses.replace(schedule, overlap="mega")
    return resolve(problem.cfg, problem.ep, problem.tokens, schedule, backend=GPU)


def _one_by_one(make: Callable[[Problem, Way], Operators]) -> Callable[[Problem, Machine], Arrangement]:
    """A kernel for each operator."""

    def arrange(problem: Problem, machine: Machine) -> Arrangement:
        way = _way(problem, machine)
        operators = make(problem, way)
        kernels = [[op.name] for op in operators]
        return Arrangement(operators=operators, way=way, kernels=kernels, framework=True)

    return arrange


def _hierarchical(problem: Problem, machine: Machine) -> Arrangement:
    way = _way(problem, machine)
    operators = made.hierarchical(problem, way, machine.per_node(problem.ep))
    kernels = [[op.name] for op in operators]
    return Arrangement(operators=operators, way=way, kernels=kernels, framework=True)


def _taskflow(
    *, one_event: bool = False, dynamic: bool = False, order: str = "natural"
) -> Callable[[Problem, Machine], Arrangement]:
    """In the order of the public kernel: all puts, then activations, then rows back; first products before second
    ones, weight gradients last.  Workers of a class get their queues beforehand, unless `dynamic`."""

    def arrange(problem: Problem, machine: Machine) -> Arrangement:
        way = _way(problem, machine, peer_order="rotated", tile_order=order)
        operators = made.taskflow(problem, way, separate=machine.separate_vector, one_event=one_event)
        static = machine.separate_vector and not dynamic
        return Arrangement(operators=operators, way=way, static=static, dynamic=dynamic)

    return arrange


COPY_ENGINES = 4
COPIES = "copies"
"""Name of their queue."""


def _uniep_serial(problem: Problem, machine: Machine) -> Arrangement:
    """The layer's own operators; a separate pass returns rows, so that no transfer overlaps a product."""
    operators, way = _uniep_operators(problem, machine, tile_order="natural")
    operators = made.rows_sent_apart(operators)
    return Arrangement(operators=operators, way=way, kernels=[[op.name] for op in operators])


def _uniep_operators(problem: Problem, machine: Machine, **fields: object) -> tuple[Operators, Way]:
    usual = default_schedule(GPU, problem.cfg, problem.ep)
    way = _way(problem, machine, chunk_tokens=usual.chunk_tokens, **fields)
    if problem.direction == "bwd":
        return backward_operators(way), way
    return made.kept_in_pieces(forward_operators(way, keep=True)), way


def with_transfer(operators: Operators, way: Way) -> tuple[Operators, Lane]:
    """The operators as `way` moves tokens, and the lane of those that do."""
    if way.copies:
        return made.sent_whole(operators), Lane(("push",), COPY_ENGINES, extra=True)
    return operators, Lane(("pull" if way.pulls else "push",), way.push_programs)


def _uniep(
    transfer: Literal["push", "copy"] | None = None, pipelined: bool | None = None,
    down_wgrad: Literal["after", "beside"] | None = None, parts: int | None = None,
) -> Callable[[Problem, Machine], Arrangement]:  # fmt: skip
    """transfer: "copy", by copy engines; "push", by programs.  pipelined: the second product beside the first.
    parts: of that; 1: by claims.  down_wgrad: "beside" the product whose rows return, or "after" it.  None: as uniep
    chooses by default on GPUs."""

    def arrange(problem: Problem, machine: Machine) -> Arrangement:
        usual = default_schedule(GPU, problem.cfg, problem.ep)
        node = machine.per_node(problem.ep)
        if transfer == "copy" and node < problem.ep:
            raise ConfigError(
                f"copy engines reach {node} of {problem.ep} ranks on {machine.name}, those of one node; use uniep-push"
            )
        if transfer is not None or node < problem.ep:
            usual = dataclasses.replace(usual, transfer=transfer or "push")
        if pipelined is not None:
            usual = dataclasses.replace(usual, overlap="pipelined" if pipelined else "fused", pipelined_from=0)
        if down_wgrad is not None:
            usual = dataclasses.replace(usual, down_wgrad=down_wgrad)
        if parts is not None:
            usual = dataclasses.replace(usual, gate_up_parts=parts, down_sms=0 if parts > 1 else Schedule().down_sms)
        of_gpus = resolve(problem.cfg, problem.ep, problem.tokens, usual)
        operators, way = _uniep_operators(problem, machine, tile_order="local-first", peer_order="rotated")
        # `way` is that of one kernel, whose operators these are.  Of the stages' way the compiler reads waves, down_sms
        # and parts, and with those, whose results return in this order, how many experts lead; else own rows come first
        # in all experts.
        names = ["waves", "down_sms", "gate_up_parts"]
        if of_gpus.gate_up_parts > 1 and problem.direction == "fwd":
            operators, names = made.in_parts(operators), [*names, "local_first", "leads"]
        way = dataclasses.replace(way, **{name: getattr(of_gpus, name) for name in names})
        operators, sending = with_transfer(operators, of_gpus)
        lanes = [sending]
        if problem.direction == "bwd":
            first = ("push", "down_grad", "activation_gradient", "dweight")
            rows, weights = ("gate_up_grad", "group_sum"), ("down_wgrad", "gate_up_wgrad", "collect", "combine")
            kernels = [[*first], *([name] for name in rows), [*weights]]
            if of_gpus.down_wgrad_beside:
                kernels = [[*first], [*rows, *weights]]
                lanes.append(Lane(rows, of_gpus.gate_up_grad_sms, shares=first[1:]))
        elif of_gpus.down_sms:
            kernels = [["push", "gate_up", "keep", "down"], ["group_sum"], ["combine"]]
            lanes.append(Lane(("down", "group_sum", "combine"), of_gpus.down_sms, last=True))
        else:
            kernels = [["push", "gate_up", "keep"], ["down"], ["group_sum"], ["combine"]]
        return Arrangement(operators=operators, way=way, kernels=kernels, lanes=tuple(lanes))

    return arrange


def _uniep_mega(order: str, **fields: object) -> Callable[[Problem, Machine], Arrangement]:
    """One kernel for each direction; its programs claim all tasks from one list, after the first have pushed."""

    def arrange(problem: Problem, machine: Machine) -> Arrangement:
        operators, way = _uniep_operators(problem, machine, tile_order=order, **fields)
        operators, sending = with_transfer(operators, way)
        return Arrangement(operators=operators, way=way, lanes=(sending,))

    return arrange


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("serialized", "operator by operator with all-to-alls of rows, as frameworks run it",
                 _one_by_one(made.serialized)),
        Strategy("deepep", "operator by operator; tokens once per rank, rows added before they return",
                 _one_by_one(made.deepep)),
        Strategy("hierarchical", "as deepep; tokens once per node, forwarded there, rows added per node",
                 _hierarchical),
        Strategy("taskflow", "one kernel of tile tasks, rows put in the order of experts, static queues",
                 _taskflow()),
        Strategy("taskflow-one-event", "as taskflow, but nothing starts before the whole dispatch has arrived",
                 _taskflow(one_event=True)),
        Strategy("taskflow-dynamic", "as taskflow, but workers decide at run time which task is next",
                 _taskflow(dynamic=True)),
        Strategy("taskflow-critical-path", "as taskflow, queues by list scheduling along the longest path",
                 _taskflow(order="critical-path")),
        Strategy("uniep-serial", "uniep's operators, one after the other", _uniep_serial),
        Strategy("uniep", "uniep's operators: tokens travel under the first product, results under the second",
                 _uniep()),
        Strategy("uniep-push", "as uniep-dw2-after, tokens pushed by programs", _uniep("push", False, "after")),
        Strategy("uniep-copy", "as uniep-dw2-after, tokens sent by copy engines", _uniep("copy", False, "after")),
        Strategy("uniep-pipelined", "as uniep-dw2-after, the second product beside the first by claims",
                 _uniep(None, True, "after", 1)),
        Strategy("uniep-parts", "as uniep-pipelined, in two parts: the second product of one beside the first of the "
                 "other", _uniep(None, True, "after", 2)),
        Strategy("uniep-dw2-after", "as uniep without parts, dW2 after the product whose rows return",
                 _uniep(down_wgrad="after", parts=1)),
        Strategy("uniep-dw2-beside", "as uniep, dW2 beside the product whose rows return", _uniep(down_wgrad="beside")),
        Strategy("uniep-mega", "uniep's operators in one kernel, own rows first", _uniep_mega("local-first")),
        Strategy("uniep-mega-natural", "as uniep-mega, experts in turn", _uniep_mega("natural")),
        Strategy("uniep-mega-chunk-major", "as uniep-mega, four experts at a time",
                 _uniep_mega("chunk-major", chunk_experts=4)),
        Strategy("uniep-mega-critical-path", "as uniep-mega, list scheduling of stretches",
                 _uniep_mega("critical-path")),
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
    """An arrangement as it ran.  start_ns: the launch before the first task."""

    graph: TaskGraph
    sites: Sequence[Site]
    costs: Costs
    timeline: Timeline
    start_ns: int

    @property
    def makespan_ns(self) -> int:
        return self.start_ns + self.timeline.makespan_ns


def simulate(problem: Problem, machine: Machine, arrangement: Arrangement) -> Simulated:
    """Compile, schedule, and run on the machine; balanced routing on the one rank that stands for all."""
    node = machine.per_node(problem.ep)
    operators, sites = arrangement.operators, problem.sites(arrangement.way, node)
    if problem.symmetric:
        operators = folded(operators, node)
    return execute(arrangement, operators, sites, machine)


def execute(arrangement: Arrangement, operators: Operators, sites: Sequence[Site], machine: Machine) -> Simulated:
    """operators: the arrangement's, folded if one rank stands for all.  sites: of the ranks of the graph."""
    launches = []
    if arrangement.kernels is not None:
        launches = [max(_launch_us(operators, name, machine) for name in names) for names in arrangement.kernels]
        operators = in_kernels(operators, arrangement.kernels)
    graph = compile_graph(operators, sites)
    spent = costs(
        graph, operators, sites, machine, launches, dynamic=arrangement.dynamic, framework=arrangement.framework,
        engines=arrangement.engines,
    )  # fmt: skip
    timeline = run(graph, queues_of(graph, arrangement, machine, spent.alone_N), spent)
    first = launches[0] if launches else machine.matrix_launch_us
    site = sites[0]
    if "gate_up" in graph.ops:
        first += machine.of("plan_us", site.ep_size)
    return Simulated(graph, sites, spent, timeline, round(first * 1e3))


def _launch_us(operators: Operators, name: str, machine: Machine) -> float:
    if name not in [op.name for op in operators]:
        return 0.0
    if name in made.COLLECTIVES:
        return machine.collective_launch_us
    return machine.matrix_launch_us if operators[name].worker == "matrix" else machine.vector_launch_us


def queues_of(graph: TaskGraph, arrangement: Arrangement, machine: Machine, alone_N: Tensor) -> list[Queue]:
    if arrangement.static:
        planned = assign(graph, arrangement.way, alone_N)
        return [Queue(name.rank, str(name), 1, tasks) for name, tasks in planned.queues.items()]
    workers = {"matrix": int(machine.matrix_workers), "vector": int(machine.vector_workers)}
    queues: list[Queue] = []
    for rank in range(graph.ep_size):
        if machine.separate_vector:
            queues += [Queue(rank, kind, workers[kind], graph.indices(rank, kind).tolist()) for kind in WORKERS]
            continue
        tasks, lane_n = graph.indices(rank), torch.zeros(graph.num_tasks, dtype=torch.int64)[graph.rank_N == rank]
        for number, lane in enumerate(arrangement.lanes):
            ops = torch.tensor([graph.ops.index(name) for name in lane.operators if name in graph.ops])
            lane_n[torch.isin(graph.op_N[tasks], ops)] = number + 1
            shared = torch.tensor([graph.ops.index(name) for name in lane.shares if name in graph.ops])
            (places,) = torch.isin(graph.op_N[tasks], shared).nonzero(as_tuple=True)
            lane_n[places[torch.arange(len(places)) % workers["matrix"] < lane.workers]] = number + 1
            if "down" in lane.operators:
                lane_n[_first_part(graph, tasks, arrangement.way, lane.workers / workers["matrix"])] = number + 1
        busy = [(lane, tasks[lane_n == n + 1].tolist()) for n, lane in enumerate(arrangement.lanes)]
        busy = [(lane, of_lane) for lane, of_lane in busy if of_lane]
        left = workers["matrix"] - sum(lane.workers for lane, _ in busy if not lane.extra)
        # When their queue is empty, the workers of the first products join the lane of the next ones.
        then = next((len(queues) + n + 1 for n, (lane, _) in enumerate(busy) if lane.last), None)
        rest = len(queues)
        queues.append(Queue(rank, "worker", left, tasks[lane_n == 0].tolist(), then))
        for lane, of_lane in busy:
            joins = None if lane.extra or lane.last else rest
            queues.append(Queue(rank, COPIES if lane.extra else "worker", lane.workers, of_lane, joins))
    return queues


def _first_part(graph: TaskGraph, tasks: Tensor, way: Way, share: float) -> Tensor:
    """Of a rank's tasks, the places of a share of those of the first part of gate_up, which all workers carry out."""
    if way.gate_up_parts == 1 or "gate_up" not in graph.ops:
        return torch.zeros(0, dtype=torch.int64)
    place_n = torch.nonzero(graph.op_N[tasks] == graph.ops.index("gate_up")).flatten()
    first_n = place_n[: len(place_n) // way.gate_up_parts]
    turn_n = (torch.arange(len(first_n) + 1) * share).long()
    return first_n[turn_n.diff() > 0]

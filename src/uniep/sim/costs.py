"""From work to time: how long each task takes alone, and how much it uses of shared resources.

A task alone takes the longest of three times at a worker's own speeds: for its operations, for its bytes of memory and
for its bytes to peers.  While it runs it requests its bytes at a constant rate: from the memory of its die, from the
cache (operands of products), and from the links or the network out of its die and into its peer's.  If all tasks
together request more than a resource has, each gets the same share of its request.

Shape suffixes: N tasks, F flows (a task and a shared resource), V events.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from uniep.sim.kernels import KERNEL
from uniep.sim.machine import Machine
from uniep.sim.operators import COLLECTIVES, PART, RESIDUAL
from uniep.taskflow.graph import SHARED_STAGES, WORKERS, TaskGraph, running_start
from uniep.taskflow.operators import Operators
from uniep.taskflow.site import Site

RESOURCES = ("memory", "cache", "link out", "link in", "network out", "network in")
"""The resources that a rank's tasks share; resource number = rank * 6 + index in this list."""


_GOLDEN = 0.6180339887
WEIGHT_GRADIENTS = ("gate_up_wgrad", "down_wgrad")
GATHERING = ("gate_up", "recompute", "down_grad", *WEIGHT_GRADIENTS)
"""uniep's products that read their rows directly from the tokens."""

STORED = {"gate_up": 2.0, "recompute": 1.0, "down_grad": 1.0}
"""Extra stores of a tile, in units of one result: gate and up, kept for the backward, or made again instead of the
activation; fp32 instead of 16 bits."""


@dataclasses.dataclass(frozen=True, eq=False)
class Costs:
    """alone_N: int64 ns of each task alone.  compute_N: ns of its operations only.  flow_start_N1, flow_resource_F,
    flow_demand_F: bytes per ns while a task runs.  capacity: bytes per ns of each resource.  delay_V: ns until a
    complete event is seen.
    poll_N: ns until a worker that waits sees that its task may start.  near_N, far_N: bytes to peers of the same
    node and of others."""

    alone_N: Tensor
    compute_N: Tensor
    flow_start_N1: Tensor
    flow_resource_F: Tensor
    flow_demand_F: Tensor
    capacity: Tensor
    delay_V: Tensor
    poll_N: Tensor
    near_N: Tensor
    far_N: Tensor

    @property
    def sends(self) -> Tensor:
        return self.near_N + self.far_N

    @classmethod
    def without_contention(cls, graph: TaskGraph, alone_N: Tensor) -> Costs:
        """Costs of tasks without shared resources."""
        none = torch.zeros(0)
        zero = torch.zeros(graph.num_tasks + 1, dtype=torch.int64)
        no_delay = torch.zeros(graph.num_events, dtype=torch.int64)
        sent_N = graph.work_N3[:, 2].double()
        return cls(
            alone_N,
            alone_N.double(),
            zero,
            none.long(),
            none,
            none,
            no_delay,
            zero[1:],
            sent_N,
            torch.zeros_like(sent_N),
        )


def costs(
    graph: TaskGraph,
    operators: Operators,
    sites: Sequence[Site],
    machine: Machine,
    launches: Sequence[float] = (),
    *,
    dynamic: bool = False,
    framework: bool = False,
    engines: Sequence[str] = (),
) -> Costs:
    """sites: of all ranks of the graph.  launches: us before each kernel begins.  dynamic: workers decide at run time
    which task is next.  framework: products are those of a framework.  engines: operators that copy engines run."""
    ep, size = sites[0].ep_size, sites[0].cfg.dtype.itemsize
    per_node = machine.per_node(ep)
    classes, work = graph.classes, graph.work_N3.double()
    is_matrix = classes == WORKERS.index("matrix")
    is_collective, is_residual = _of_operators(graph, COLLECTIVES), _of_operators(graph, (RESIDUAL,))
    near_N, far_N, peer_N = _to_peers(graph, operators, sites, per_node)
    link, network = machine.link_gbps * machine.link_efficiency, machine.network_gbps * machine.network_efficiency
    all_to_all = machine.of("all_to_all_gbps", ep)
    # --- alone ---
    tile_us = machine.framework_tile_us if framework else machine.tile_us
    overhead_N = is_matrix * tile_us * 1e3
    if not framework:
        overhead_N += _of_operators(graph, GATHERING) * machine.gather_us * 1e3
        hidden = sites[0].way.weight_gradient.programs_per_sm  # programs of a multiprocessor hide each other's
        overhead_N /= torch.where(_of_operators(graph, WEIGHT_GRADIENTS), hidden, 1)
    compute_N = work[:, 0] / machine.speeds.flops + overhead_N
    area_N = (graph.block_N5[:, 2] - graph.block_N5[:, 1]) * (graph.block_N5[:, 4] - graph.block_N5[:, 3])
    stored = {} if framework else STORED | ({"gate_up": 0.0} if sites[0].way.recomputes else {})
    for name, more in stored.items():
        compute_N += _of_operators(graph, (name,)) * area_N * more * size / machine.store_gbps
    compute_N *= _at_the_power_limit(graph, torch.where(is_matrix, compute_N, 0), machine)
    by_engine = _of_operators(graph, engines)
    memory_N = work[:, 1] / torch.where(is_collective | by_engine, machine.hbm, machine.worker_gbps)
    own_link = torch.where(by_engine, link, torch.where(is_collective, all_to_all, min(machine.worker_link_gbps, link)))
    own_network = torch.where(by_engine | is_collective, network, min(machine.worker_link_gbps, network))
    peers_N = near_N / own_link + far_N / own_network
    task_us = machine.task_us + (machine.dynamic_task_us if dynamic else 0)
    alone_N = torch.stack([compute_N, memory_N, peers_N]).amax(0) + task_us * 1e3
    if bool(is_residual.any()):
        on_matrix = bool(is_matrix[is_residual][0])
        workers = machine.matrix_workers if on_matrix or not machine.separate_vector else machine.vector_workers
        tiles = torch.bincount(graph.rank_N[is_residual], minlength=graph.ep_size)[graph.rank_N[is_residual]]
        share = workers / tiles.clamp(min=workers).double()  # no task takes longer than all workers together
        alone_N[is_residual] = machine.of("backward_residual_us", ep) * 1e3 * share
    alone_N = alone_N.round().long().clamp(min=1)
    # --- what is shared ---
    operands_N = work[:, 0] / 2 * size * sum(1 / (graph.block_N5[:, i + 1] - graph.block_N5[:, i]) for i in (1, 3))
    here, there = graph.rank_N * len(RESOURCES), peer_N * len(RESOURCES)
    source, target = here, there
    if graph.ep_size > 1:  # in a folded graph incoming equals outgoing traffic
        fetches = _of_operators(graph, ("pull",))
        source, target = torch.where(fetches, there, here), torch.where(fetches, here, there)
    asked: list[tuple[int, Tensor, Tensor]] = [
        (0, here, work[:, 1]), (1, here, operands_N), (2, source, near_N), (4, source, far_N),
    ]  # fmt: skip
    if graph.ep_size > 1:
        asked += [(3, target, near_N), (5, target, far_N)]
    flows = [(n, resource[n] + kind, moved[n] / alone_N[n]) for kind, resource, moved in asked
             for n in (torch.nonzero(moved > 0).flatten(),)]  # fmt: skip
    task_F, resource_F, demand_F = (torch.cat([flow[i] for flow in flows]) for i in range(3))
    collective_links = bool(is_collective.any())
    of_rank = [machine.hbm, machine.l2_gbps] + [all_to_all if collective_links else link] * 2 + [network] * 2
    capacity = torch.tensor(of_rank * graph.ep_size, dtype=torch.float64)
    kept_F = _can_be_short(graph, task_F, resource_F, demand_F, capacity, machine)
    task_F, resource_F, demand_F = task_F[kept_F], resource_F[kept_F], demand_F[kept_F]
    order = torch.argsort(task_F, stable=True)
    flow_start = running_start(torch.bincount(task_F, minlength=graph.num_tasks))
    # --- until a waiting worker sees it ---
    latency = machine.network_latency_us if ep > per_node else machine.link_latency_us
    parts = [machine.matrix_launch_us] * sites[0].way.gate_up_parts
    delay_V = _delays(graph, {KERNEL: launches, PART: parts}, latency)
    poll = torch.tensor([machine.matrix_poll_us, machine.vector_poll_us])[classes] / 2
    polled_V = torch.ones(graph.num_events, dtype=torch.bool)
    for stage in {KERNEL, PART}.intersection(graph.stages):
        polled_V &= graph.event_V3[:, 1] != graph.stages.index(stage)
    poll[~graph.has_any(graph.waits, polled_V)] = 0
    return Costs(
        alone_N, compute_N, flow_start, resource_F[order], demand_F[order], capacity, delay_V,
        (poll * 1e3).round().long(), near_N, far_N,
    )  # fmt: skip


def _at_the_power_limit(graph: TaskGraph, product_N: Tensor, machine: Machine) -> Tensor:
    """(N,): factor by which products on each task's rank take longer on average: a card runs `boost_ms` at full rate.
    A backward follows its forward, which has half as many."""
    whole_R = torch.zeros(graph.ep_size, dtype=torch.float64).index_add_(0, graph.rank_N, product_N)
    whole_R = (whole_R / machine.matrix_workers).clamp(min=1)
    left_R = (machine.boost_ms * 1e6 - whole_R / 2 * ("down_grad" in graph.ops)).clamp(min=0)
    late_R = (1 - left_R / whole_R).clamp(min=0)
    return (1 + late_R * (1 / machine.sustained_share - 1))[graph.rank_N]


def _of_operators(graph: TaskGraph, names: Sequence[str]) -> Tensor:
    """(N,): whether a task is of one of these operators."""
    numbers = [graph.ops.index(name) for name in names if name in graph.ops]
    return torch.isin(graph.op_N, torch.tensor(numbers, dtype=torch.int64))


def _delays(graph: TaskGraph, by_number: Mapping[str, Sequence[float]], latency_us: float) -> Tensor:
    stage_V, number_V = graph.event_V3[:, 1], graph.event_V3[:, 2]
    delay_V = torch.zeros(graph.num_events, dtype=torch.float64)
    for name in (*SHARED_STAGES, "forwarded", "gathered"):
        if name in graph.stages:
            delay_V[stage_V == graph.stages.index(name)] = latency_us
    for name, values in by_number.items():
        if name in graph.stages and len(values):
            chosen = stage_V == graph.stages.index(name)
            delay_V[chosen] = torch.tensor(values, dtype=torch.float64)[number_V[chosen]]
    return (delay_V * 1e3).round().long()


def _can_be_short(
    graph: TaskGraph, task_F: Tensor, resource_F: Tensor, demand_F: Tensor, capacity: Tensor, machine: Machine
) -> Tensor:
    """(F,): whether requests can ever exceed the resource: not if it is enough for all workers that use it together."""
    workers = torch.tensor([machine.matrix_workers, machine.vector_workers or machine.matrix_workers]).double()
    most = torch.zeros(len(capacity), len(WORKERS), dtype=torch.float64)
    key_F = resource_F * len(WORKERS) + graph.classes[task_F]
    most.view(-1).scatter_reduce_(0, key_F, demand_F, "amax")
    kind = torch.arange(len(capacity)) % len(RESOURCES)
    senders = torch.where((kind == 3) | (kind == 5), graph.ep_size, 1)
    together = (most * workers) if machine.separate_vector else most.amax(1, keepdim=True) * workers[:1]
    return (together.sum(1) * senders > capacity)[resource_F]


def _to_peers(
    graph: TaskGraph, operators: Operators, sites: Sequence[Site], per_node: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(N,) each: bytes to ranks of the same node, to ranks of others, and the rank that gets most."""
    total_N = graph.work_N3[:, 2].double()
    near_N, far_N, peer_N = torch.zeros_like(total_N), torch.zeros_like(total_N), graph.rank_N.clone()
    by_group = torch.zeros(len(graph.ops), dtype=torch.bool)
    for op in operators:
        by_group[graph.ops.index(op.name)] = op.where in ("first", "last")
    for site in sites:
        at = torch.nonzero((graph.rank_N == site.rank) & (total_N > 0)).flatten()
        home = site.rank // per_node
        grouped = at[by_group[graph.op_N[at]]]
        peer_N[grouped] = graph.block_N5[grouped, 0]
        is_near = peer_N[grouped] // per_node == home
        near_N[grouped], far_N[grouped] = total_N[grouped] * is_near, total_N[grouped] * ~is_near
        scattered = at[~by_group[graph.op_N[at]]]
        source = site.source_of_row
        away = (source >= 0) & (source != site.rank)
        leading = torch.nonzero(away).flatten()
        if not len(scattered) or not len(leading):
            continue
        near, both = (running_start(rows.long()) for rows in (away & (source // per_node == home), away))
        first, last = graph.block_N5[scattered, 1], graph.block_N5[scattered, 2]
        rows, near_rows = both[last] - both[first], near[last] - near[first]
        per_row = total_N[scattered] / rows.clamp(min=1)
        near_N[scattered], far_N[scattered] = per_row * near_rows, per_row * (rows - near_rows)
        # A tile's rows return to several ranks; here one of them takes all, a different one for each column of tiles.
        width = graph.block_N5[scattered, 4] - graph.block_N5[scattered, 3]
        turn = graph.block_N5[scattered, 3] / width * _GOLDEN % 1
        chosen = both[first] + (rows * turn).long()
        peer_N[scattered] = source[leading[chosen.clamp(max=len(leading) - 1)]]
    return near_N, far_N, peer_N

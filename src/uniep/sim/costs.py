"""From work to time: how long each task takes alone, and what it asks of what workers share.

A task alone takes the longest of its operations, its bytes of memory and its bytes to peers, at a worker's own speeds.
While it runs it asks for its bytes evenly: of the memory of its die, of the cache (operands of products), of the links
or the network out of its die and into its peer's.  Where all tasks together ask for more than there is, each gets the
same part of what it asks for.

Shape suffixes: N tasks, F flows (a task and a shared resource), V events.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from uniep.sim.kernels import KERNEL
from uniep.sim.machine import Machine
from uniep.sim.operators import COLLECTIVES, RESIDUAL
from uniep.taskflow.graph import SHARED_STAGES, WORKERS, TaskGraph, running_start
from uniep.taskflow.operators import Operators
from uniep.taskflow.site import Site

RESOURCES = ("memory", "cache", "link out", "link in", "network out", "network in")
"""What the tasks of a rank share; resource number rank * 6 + its place here."""


@dataclasses.dataclass(frozen=True, eq=False)
class Costs:
    """alone_N: int64 ns.  flow_start_N1, flow_resource_F, flow_demand_F: bytes per ns while a task runs.
    capacity: bytes per ns of each resource.  delay_V: ns until a complete event is seen.  poll_N: ns until a worker
    that waits sees that its task may start.  near_N, far_N: bytes to peers of the node and of others."""

    alone_N: Tensor
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
        """Tasks that share nothing."""
        none = torch.zeros(0)
        zero = torch.zeros(graph.num_tasks + 1, dtype=torch.int64)
        no_delay = torch.zeros(graph.num_events, dtype=torch.int64)
        sent_N = graph.work_N3[:, 2].double()
        return cls(alone_N, zero, none.long(), none, none, no_delay, zero[1:], sent_N, torch.zeros_like(sent_N))


def costs(
    graph: TaskGraph,
    operators: Operators,
    sites: Sequence[Site],
    machine: Machine,
    launches: Sequence[float] = (),
    *,
    dynamic: bool = False,
) -> Costs:
    """sites: of all ranks of the graph.  launches: us before each kernel begins.  dynamic: workers decide at run time
    which task is next."""
    ep, size = sites[0].ep_size, sites[0].cfg.dtype.itemsize
    per_node = min(int(machine.ranks_per_node), ep)
    classes, work = graph.classes, graph.work_N3.double()
    is_matrix = classes == WORKERS.index("matrix")
    is_collective, is_residual = (
        torch.isin(graph.op_N, torch.tensor([graph.ops.index(n) for n in names if n in graph.ops], dtype=torch.int64))
        for names in (COLLECTIVES, (RESIDUAL,))
    )
    near_N, far_N, peer_N = _to_peers(graph, operators, sites, per_node)
    link, network = machine.link_gbps * machine.link_efficiency, machine.network_gbps * machine.network_efficiency
    all_to_all = machine.of("all_to_all_gbps", ep)
    # --- alone ---
    compute_N = work[:, 0] / machine.speeds.flops + is_matrix * machine.tile_us * 1e3
    memory_N = torch.where(is_collective, 0.0, work[:, 1] / machine.worker_gbps)
    own = torch.where(is_collective, all_to_all, min(machine.worker_link_gbps, link))
    peers_N = near_N / own + far_N / min(machine.worker_link_gbps, network)
    task_us = machine.task_us + (machine.dynamic_task_us if dynamic else 0)
    alone_N = torch.stack([compute_N, memory_N, peers_N]).amax(0) + task_us * 1e3
    if bool(is_residual.any()):
        on_matrix = bool(is_matrix[is_residual][0])
        workers = machine.matrix_workers if on_matrix or not machine.separate_vector else machine.vector_workers
        tiles = torch.bincount(graph.rank_N[is_residual], minlength=graph.ep_size)[graph.rank_N[is_residual]]
        alone_N[is_residual] = machine.of("backward_residual_us", ep) * 1e3 * workers / tiles.double()
    alone_N = alone_N.round().long().clamp(min=1)
    # --- what is shared ---
    operands_N = work[:, 0] / 2 * size * sum(1 / (graph.block_N5[:, i + 1] - graph.block_N5[:, i]) for i in (1, 3))
    here = graph.rank_N * len(RESOURCES)
    there = peer_N * len(RESOURCES)
    asked: list[tuple[int, Tensor, Tensor]] = [
        (0, here, work[:, 1]), (1, here, operands_N), (2, here, near_N), (4, here, far_N),
    ]  # fmt: skip
    if graph.ep_size > 1:  # in a folded graph what comes in is what goes out
        asked += [(3, there, near_N), (5, there, far_N)]
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
    # --- until somebody sees it ---
    latency = machine.network_latency_us if ep > per_node else machine.link_latency_us
    delay_V = _delays(graph, {KERNEL: launches}, latency)
    poll = torch.tensor([machine.matrix_poll_us, machine.vector_poll_us])[classes] / 2
    polled_V = torch.ones(graph.num_events, dtype=torch.bool)
    if KERNEL in graph.stages:
        polled_V = graph.event_V3[:, 1] != graph.stages.index(KERNEL)
    poll[~graph.has_any(graph.waits, polled_V)] = 0
    return Costs(
        alone_N, flow_start, resource_F[order], demand_F[order], capacity, delay_V, (poll * 1e3).round().long(),
        near_N, far_N,
    )  # fmt: skip


def _delays(graph: TaskGraph, by_number: Mapping[str, Sequence[float]], latency_us: float) -> Tensor:
    stage_V, number_V = graph.event_V3[:, 1], graph.event_V3[:, 2]
    delay_V = torch.zeros(graph.num_events, dtype=torch.float64)
    for name in SHARED_STAGES:
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
    """(F,): whether a resource can ever be asked for more than there is: not if all workers that ask could have it."""
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
        peer_N[scattered] = source[leading[both[first].clamp(max=len(leading) - 1)]]
    return near_N, far_N, peer_N

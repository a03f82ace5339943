"""Records of the tasks of overlap="mega": memory for them, and the `Span`s that they become."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from uniep.backends.base import Needs
from uniep.launch.driver import tensor
from uniep.layout import EXCHANGE_HEADER
from uniep.routing import build_plan
from uniep.schedule import num_chunks
from uniep.stages import Flags
from uniep.taskflow.graph import TaskGraph
from uniep.taskflow.lower import lower_backward, lower_forward
from uniep.taskflow.trace import Span, device_spans

if TYPE_CHECKING:
    from uniep.backends.hopper.link import Link
    from uniep.backends.hopper.planner import DevicePlan
    from uniep.launch.mega import TaskLists

HEAD_START_CYCLES = 8_000_000  # about 4 ms at boost clock


@dataclasses.dataclass(frozen=True)
class Records:
    """int64 rows of (place, program, claimed, started, ended), -1 where there is no task; one row for each place of the
    matrix list, and of the vector list, which begins with the pushes and ends with the sums."""

    matrix: Tensor
    vector: Tensor

    @classmethod
    def empty(cls, link: Link, lists: TaskLists) -> Records:
        chunks = num_chunks(link.cfg, link.way.chunk_tokens)
        places = (
            len(lists.lists.matrix),
            len(lists.lists.vector) + 2 * link.num_ranks * chunks + link.cfg.max_tokens_per_rank,
        )
        return cls(*(torch.full((n, 5), -1, dtype=torch.int64, device=link.device) for n in places))

    @property
    def buffers(self) -> tuple[Tensor, Tensor]:
        return self.matrix, self.vector


def lead_host(link: Link) -> None:
    """Let the device sleep, so that the host has launched all of a call before its kernels begin: with records to make,
    and behind the wait for the last call's, it would be late, and later on one rank than on another."""
    if link.device.type == "cuda":
        torch.cuda._sleep(HEAD_START_CYCLES)


def exchanged_ids(link: Link) -> list[Tensor]:
    """The routing ids of all ranks in the forward under way, on the CPU."""
    from uniep.kernels.header import TOKENS

    top_k, found = link.cfg.top_k, []
    for words in link.arena.views["exchange"][link.planner.calls_made & 1].cpu():
        count = int(words[TOKENS.value]) * top_k
        found.append(words[EXCHANGE_HEADER : EXCHANGE_HEADER + count].view(-1, top_k).clone())
    return found


def spans(
    link: Link, records: Records, plan: DevicePlan, ids: Sequence[Tensor], sum_tokens: int, *,
    keep: bool = False, needs: Needs | None = None,
) -> list[Span]:  # fmt: skip
    """What this rank has recorded.  needs: of a backward; None: a forward.  Waits for the GPU; nothing where rows did
    not fit.

    A span is a task of the compiler.  Copies of what was received, and sums, are several records of one task: the
    kernels take fewer tokens at once.
    """
    if link.device.type == "cuda":
        torch.cuda.synchronize(link.device)
    cfg, rank, way = link.cfg, link.rank, link.way
    plans = [build_plan(list(ids), r, cfg, way.sends_by_expert, way.align) for r in range(link.num_ranks)]
    tokens = [t.shape[0] for t in ids]
    if int(tensor(plan.rows.totals)[0]) != plans[rank].num_rows:
        return []
    if needs is None:
        phase, graph = "forward", lower_forward(plans, tokens, cfg, way, keep=keep)
    else:
        phase, graph = "backward", lower_backward(plans, tokens, cfg, way, Flags(w13=needs.w13, w2=needs.w2))
    matrix, vector = (t[t[:, 0] >= 0].cpu() for t in records.buffers)
    if link.traced_from is not None:
        for rows in (matrix, vector):
            rows[:, 2:] -= link.traced_from.cpu()
    chosen = graph.indices(rank, "vector")
    moved = _count(graph, chosen, "pull" if way.pulls else "push")
    pushes = 0 if link.copying else moved
    if needs is None:
        sent = tokens if link.copying else plans[rank].recv_count_R.tolist()
        kept = [s for s, n in enumerate(sent) if s != rank for _ in range(-(-n // way.chunk_tokens))] if keep else []
    else:
        kept = []
    listed = 0 if needs is None else _count(graph, chosen, "activation_gradient") + _count(graph, chosen, "dweight")
    task_of = [
        *range(pushes),
        *(_task(graph, chosen, "keep", group=source) for source in kept),
        *range(moved, moved + listed),
        *(_task(graph, chosen, "combine", row=t) for t in range(0, tokens[rank], sum_tokens)),
    ]
    vector[:, 0] = torch.tensor(task_of, dtype=torch.int64)[vector[:, 0]]
    vector = vector[vector[:, 0] >= 0]
    return [
        *device_spans(graph, graph.indices(rank, "matrix"), matrix, phase),
        *device_spans(graph, chosen, vector, phase),
    ]


def _count(graph: TaskGraph, chosen: Tensor, op: str) -> int:
    return int((graph.op_N[chosen] == graph.ops.index(op)).sum()) if op in graph.ops else 0


def _task(graph: TaskGraph, chosen: Tensor, op: str, group: int = 0, row: int = 0) -> int:
    """The place in a list of the task of `op` for this group that holds this row; -1 where there is none."""
    block = graph.block_N5[chosen]
    holds = (graph.op_N[chosen] == graph.ops.index(op)) & (block[:, 0] == group)
    places = torch.nonzero(holds & (block[:, 1] <= row) & (row < block[:, 2])).flatten().tolist()
    return places[0] if places else -1

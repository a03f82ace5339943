"""The order of a rank's tasks: closed formulas of the plan, which a device can evaluate as well.

A task's place is (major, middle, operator, place inside it, number in the split); docs/taskflow.md has the formulas.
List scheduling ("critical-path", `scheduler`) decides while it simulates, and uses this order among equals.
"""

from __future__ import annotations

import torch
from torch import Tensor

from uniep.taskflow.graph import running_start
from uniep.taskflow.operators import Operator, Operators
from uniep.taskflow.site import Site

_LAST = 1 << 30


def places(operators: Operators, op: Operator, site: Site, block_n5: Tensor, late_n: Tensor) -> Tensor:
    """(n, 3): major, middle and place of the tiles of one operator.  late_n: tiles that wait for peers."""
    schedule, expert = site.schedule, block_n5[:, 0]
    major, middle, inside = (torch.zeros(len(block_n5), dtype=torch.int64) for _ in range(3))
    names = [o.name for o in operators]
    major += names.index(op.name)
    if schedule.overlap == "serial":
        return torch.stack([major, middle, _inside(op, site, block_n5, late_n)], 1)
    if op.where in ("expert", "weights"):
        inside = _inside(op, site, block_n5, late_n)
    interleaved = op.where == "expert" or schedule.weight_gradient_order == "interleaved"
    if schedule.tile_order == "chunk-major":
        if op.where == "first":
            major.zero_()
        elif op.where == "last" or not interleaved:
            major += _LAST
        else:
            major = 1 + expert // schedule.chunk_experts + op.lag
    elif schedule.weight_gradient_order == "interleaved":
        # One stretch of the operators that lag behind the first GEMM: what returns rows, and weight gradients.
        stretch = [o.name for o in operators if o.worker == "matrix" and o.lag]
        if op.name in stretch:
            major = torch.full_like(major, names.index(stretch[0]))
            middle = expert + 1
    return torch.stack([major, middle, inside], 1)


def _inside(op: Operator, site: Site, block_n5: Tensor, late_n: Tensor) -> Tensor:
    """Local tiles first where the schedule says so, then by expert, then by the peers whose rows a tile holds."""
    experts, steps = len(site.start_e1), site.ep_size + 1
    local_first = site.schedule.tile_order in ("local-first", "critical-path") and op.where == "expert"
    late = late_n.long() if local_first else 0
    step = _steps(op, site, block_n5) if site.schedule.peer_order == "rotated" and op.where == "expert" else 0
    expert = block_n5[:, 0] if op.where in ("expert", "weights") else 0
    return torch.as_tensor((late * experts + expert) * steps + step).expand(len(block_n5))


def _steps(op: Operator, site: Site, block_n5: Tensor) -> Tensor:
    """Per tile: when its rows have arrived, counted in peers before; or how far behind this rank they return.

    Rows of an expert are sorted by source rank, and pad rows come last.
    """
    source_N, rank, size = site.source_of_row, site.rank, site.ep_size
    used = running_start((source_N >= 0).long())
    count = used[block_n5[:, 2]] - used[block_n5[:, 1]]
    first = source_N[block_n5[:, 1]]
    last = source_N[block_n5[:, 1] + (count - 1).clamp(min=0)]
    if any(access.stage == "arrived" for access in op.reads):
        # Rank r - 1 sends to r first, rank r + 1 last.
        waits_for_all = (first <= rank) & (rank < last)
        return torch.where(count == 0, 0, torch.where(waits_for_all, size - 1, (rank - first) % size))
    if any(access.stage == "returned" for access in op.writes):
        return torch.where(count == 0, size, (first - rank - 1) % size)
    return torch.zeros_like(count)

"""The order of a rank's tasks: closed formulas of the plan, which a device can also evaluate.

A task's place is (major, middle, operator, place inside it, number in the split); docs/taskflow.md has the formulas.
List scheduling ("critical-path", `scheduler`) decides during its simulation, and breaks ties by this order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from uniep.taskflow.operators import Operator, Operators
from uniep.taskflow.site import Site

_LAST = 1 << 30


def places(operators: Operators, op: Operator, site: Site, block_n5: Tensor) -> Tensor:
    """(n, 3): major, middle and place of the tiles of one operator."""
    way, expert = site.way, block_n5[:, 0]
    major, middle, inside = (torch.zeros(len(block_n5), dtype=torch.int64) for _ in range(3))
    names = [o.name for o in operators]
    major += names.index(op.name)
    if op.where == "expert":
        inside = _inside(op, site, block_n5)
    elif op.where == "weights":
        inside = expert
    interleaved = op.where == "expert" or way.interleaved
    if way.gates:
        pass  # stages follow each other
    elif way.chunk_experts:
        if op.where == "first":
            major.zero_()
        elif op.where == "last" or not interleaved:
            major += _LAST
        else:
            major = 1 + expert // way.chunk_experts + op.lag
    elif way.interleaved:
        # One section for the operators that lag behind the first GEMM: those that return rows, and weight gradients.
        stretch = [o.name for o in operators if o.worker == "matrix" and o.lag]
        if op.name in stretch:
            major = torch.full_like(major, names.index(stretch[0]))
            middle = expert + 1
    return torch.stack([major, middle, inside], 1)


def _inside(op: Operator, site: Site, block_n5: Tensor) -> Tensor:
    """Local tiles first if the way says so, then by expert, then by the peers whose rows a tile holds.

    Rows of an expert are sorted by source rank, and pad rows come last.  An operator without lag follows the arrival
    of rows: rank r - 1 sends to r first, rank r + 1 last.  One with lag returns them, to rank r + 1 first.
    """
    way, rank, size = site.way, site.rank, site.ep_size
    source_N, expert = site.source_of_row, block_n5[:, 0]
    if way.local_first == "none" and not way.rotated:
        return expert
    used = site.rows_before
    rows = used[block_n5[:, 2]] - used[block_n5[:, 1]]
    first = source_N[block_n5[:, 1]]
    last = source_N[block_n5[:, 1] + (rows - 1).clamp(min=0)]
    late, step = torch.zeros_like(expert), torch.zeros_like(expert)
    if not op.lag and way.local_first != "none":
        late = ((rows > 0) & ((first != rank) | (last != rank))).long()
    if way.rotated and op.lag:
        step = torch.where(rows == 0, size, (first - rank - 1) % size)
    elif way.rotated:
        waits_for_all = (first <= rank) & (rank < last)
        step = torch.where(rows == 0, 0, torch.where(waits_for_all, size - 1, (rank - first) % size))
    return (late * len(site.start_e1) + expert) * (size + 1) + step

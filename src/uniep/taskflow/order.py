"""The order of a rank's tasks: closed formulas of the plan, which a device can also evaluate.

A task's place is (major, middle, operator, place inside it, number in the split); docs/taskflow.md has the formulas.
List scheduling ("critical-path") decides on the CPU during its simulation (`scheduler`), and breaks ties by this order;
for a device it makes a table of places of stretches, which stands for closed formulas here (`stretches`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from uniep.taskflow.operators import Operator, Operators
from uniep.taskflow.site import Site
from uniep.taskflow.stretches import STRETCH, positions
from uniep.way import wave_of

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
    if way.mega and way.critical_path:
        return _places_by_table(op, site, block_n5, major, inside, backward="down_grad" in names)
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


def _places_by_table(
    op: Operator, site: Site, block_n5: Tensor, major: Tensor, inside: Tensor, *, backward: bool
) -> Tensor:
    """In the order of the table of `stretches`.  Vector tasks come before the first matrix task that needs them, or
    others behind them, to be claimed: activation gradients in the order of the first product, d(weight) where its rows
    return."""
    if op.where in ("first", "last"):
        return torch.stack([major + _LAST * (op.where == "last"), torch.zeros_like(major), inside], 1)
    table, expert = positions(site.cfg, site.way, backward=backward).long(), block_n5[:, 0]
    late = _late(site, block_n5) if op.where == "expert" else torch.zeros_like(expert)
    if op.worker == "matrix":
        major = 2 * table[STRETCH[op.name], late, expert] + 1
        return torch.stack([major, torch.zeros_like(major), inside], 1)
    key = 2 * table[op.lag, late, expert] + op.lag
    later, order = table[1:].flatten(0, 1).T.flatten().sort()
    needs = (2 * table[0].amax(0) + 1).repeat_interleave(6)[order].cummax(0).values
    claimed = torch.searchsorted(needs, key, right=True)
    major = torch.where(claimed < len(later), 2 * later[claimed.clamp(max=len(later) - 1)], _LAST)
    return torch.stack([major, key, inside], 1)


def _late(site: Site, block_n5: Tensor) -> Tensor:
    """(n,): 1 for tiles that hold a row of another rank."""
    first, last, rows = _ends(site, block_n5)
    return ((rows > 0) & ((first != site.rank) | (last != site.rank))).long()


def _ends(site: Site, block_n5: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(n,) each: sources of the first and the last row of a tile, and its rows without padding."""
    used = site.rows_before
    rows = used[block_n5[:, 2]] - used[block_n5[:, 1]]
    first = site.source_of_row[block_n5[:, 1]]
    return first, site.source_of_row[block_n5[:, 1] + (rows - 1).clamp(min=0)], rows


def _source_before(site: Site, block_n5: Tensor) -> Tensor:
    """(n,): the source of the last row before a tile that is no pad row."""
    source_N = site.source_of_row[site.source_of_row >= 0]
    return source_N[site.rows_before[block_n5[:, 1]] - 1]


def _inside(op: Operator, site: Site, block_n5: Tensor) -> Tensor:
    """Local tiles first, or in waves by arrival, if the way says so, then by expert, then by the peers whose rows a
    tile holds.

    Rows of an expert are sorted by source rank, and pad rows come last.  An operator without lag follows the arrival
    of rows: rank r - 1 sends to r first, rank r + 1 last.  One with lag returns them, to rank r + 1 first.  The down
    product of parts of gate_up follows that.
    """
    way, rank, size = site.way, site.rank, site.ep_size
    expert = block_n5[:, 0]
    if way.local_first == "none" and not way.rotated:
        return expert
    first, last, rows = _ends(site, block_n5)
    in_waves = way.waves > 1 and (not op.lag or (op.name == "down" and way.down_sms > 0))
    arriving = not op.lag or (op.name == "down" and way.gate_up_parts > 1)
    late, step = torch.zeros_like(expert), torch.zeros_like(expert)
    if arriving and way.local_first != "none":
        late = _late(site, block_n5)
    if way.local_first == "leading":
        behind = late if way.leads_in_turn else 2 * late
        late = torch.where(expert < way.leads[op.name == "down_grad"], behind, 1)
    if way.rotated and not arriving and not in_waves:
        step = torch.where(rows == 0, size, (first - rank - 1) % size)
    elif way.rotated or in_waves:
        # Tiles of pad rows alone are this rank's; in waves, behind rows of later ranks, of the last one of these.
        pads = _source_before(site, block_n5).clamp(min=rank) if in_waves else rank
        first = torch.where(rows == 0, pads, first)
        waits_for_all = (first <= rank) & (rank < last)
        step = torch.where(waits_for_all, size - 1, (rank - first) % size)
    if in_waves:
        return wave_of(step, way.waves, size) * len(site.start_e1) + expert
    return (late * len(site.start_e1) + expert) * (size + 1) + step

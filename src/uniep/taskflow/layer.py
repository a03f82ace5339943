"""The operators of the layer: dispatch, two GEMMs around the activation, combine, and their gradients."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from uniep.row_operator import PLACES, RowOperator
from uniep.stages import ALL, Direction, Flags, stages
from uniep.taskflow.graph import Block, running_start
from uniep.taskflow.operators import (
    Access,
    Operator,
    Operators,
    Work,
    by_tile,
    came,
    came_from,
    fetched,
    parts_return,
    returned,
    returns,
    rows_of,
    rows_of_parts,
    segment_of,
    sent,
)
from uniep.taskflow.site import Site, blocks, steps
from uniep.way import Way


def _rows1(way: Way) -> int:
    return way.gate_up.rows


def _rows2(way: Way) -> int:
    return way.down.rows


def _send_chunks(site: Site) -> Tensor:
    """Send lists in chunks, starting with the next rank's, so that ranks do not all send to the same peer first."""
    return _chunks(site, site.plan.send_count_R.tolist())


def _chunks(site: Site, counts: list[int]) -> Tensor:
    tiles = []
    for step in range(1, site.ep_size):
        peer = (site.rank + step) % site.ep_size
        first, last = steps(counts[peer], site.way.chunk_tokens)
        width = torch.full_like(first, site.cfg.hidden)
        tiles.append(blocks(torch.full_like(first, peer), first, last, torch.zeros_like(first), width))
    return torch.cat(tiles) if tiles else torch.zeros(0, 5, dtype=torch.int64)


def _own_chunks(site: Site) -> Tensor:
    first, last = steps(site.tokens, site.way.chunk_tokens)
    zero = torch.zeros_like(first)
    return blocks(zero, first, last, zero, zero + 1)


def _peers(site: Site) -> Tensor:
    return torch.tensor(site.lists(site.plan.recv_count_R), dtype=torch.int64).view(-1, 5)


def _down_wgrad_tiles(site: Site) -> Tensor:
    cfg, way = site.cfg, site.way
    if not way.device_tiles:
        return site.weight_tiles(cfg.hidden, cfg.ffn, way.down)
    return site.weight_tiles(cfg.hidden, cfg.ffn, way.weight_gradient, 1, True)


def _gate_up_wgrad_tiles(site: Site) -> Tensor:
    """A GPU computes dW13 transposed, gate and up separately, and writes zeros for experts without rows."""
    cfg, way = site.cfg, site.way
    if not way.device_tiles:
        return site.weight_tiles(cfg.h_columns, cfg.hidden, way.gate_up)
    tile = way.weight_gradient
    turned = dataclasses.replace(tile, rows=tile.columns, columns=tile.rows)
    return site.weight_tiles(cfg.ffn, cfg.hidden, turned, 1 + cfg.gated, True)


def _weights(site: Site, columns: int, rows: int) -> tuple[Block, ...]:
    if site.way.device_tiles:
        return tuple(Block(e, 0, rows, 0, columns) for e in range(len(site.start_e1) - 1))
    return site.segments(columns, rows)


def _area(tiles: Tensor) -> tuple[Tensor, Tensor]:
    return tiles[:, 2] - tiles[:, 1], tiles[:, 4] - tiles[:, 3]


def _gemm(depth: Callable[[Site], int], halves: bool = False, returns: bool = False) -> Work:
    """Work of a tile of a product of this depth, or, with `halves`, of those of gate and up; returns: its rows go to
    the ranks of their tokens.  Rows count as read once for all columns, and weights once for all rows of an expert,
    because of caches."""

    def work(site: Site, tiles: Tensor) -> Sequence[Tensor | int]:
        rows, columns = _area(tiles)
        k, size, products = depth(site), site.cfg.dtype.itemsize, 1 + (halves and site.cfg.gated)
        tiles_e = torch.bincount(tiles[:, 0])
        wide = torch.bincount(tiles[:, 1])[tiles[:, 1]]  # tiles with the same rows
        high = tiles_e[tiles[:, 0]] // wide
        moved = rows * k // wide + products * columns * k // high + products * rows * columns
        return 2 * products * rows * columns * k, moved * size, site.away(tiles) * columns * size if returns else 0

    return work


def _wgrad_work(site: Site, tiles: Tensor) -> Sequence[Tensor | int]:
    rows, columns = _area(tiles)
    k, size = site.start_e1.diff()[tiles[:, 0]], site.cfg.dtype.itemsize
    return 2 * rows * columns * k, rows * columns * size, 0


def _passes(count: int, size: int | None = None, sends: bool = False) -> Work:
    """Elementwise work: every element is read or written `count` times, with `size` bytes (None: the layer's dtype)."""

    def work(site: Site, tiles: Tensor) -> Sequence[Tensor | int]:
        rows, columns = _area(tiles)
        moved = rows * columns * (size or site.cfg.dtype.itemsize)
        return 0, count * moved, moved if sends else 0

    return work


def _slots_read(size: Callable[[Site], int]) -> Work:
    """Work of sums of slots, each slot of `size` bytes."""

    def work(site: Site, tiles: Tensor) -> Sequence[Tensor | int]:
        return 0, (tiles[:, 2] - tiles[:, 1]) * (site.cfg.top_k + 1) * size(site), 0

    return work


PUSH = Operator(
    "push", "vector", _send_chunks, lambda s: s.lists(s.plan.send_count_R),
    writes=(Access("arrived", sent),), work=_passes(2, sends=True), where="first",
)  # fmt: skip
PULL = Operator(
    "pull", "vector", lambda s: _chunks(s, s.plan.recv_count_R.tolist()), lambda s: s.lists(s.plan.recv_count_R),
    writes=(Access("arrived", fetched),), work=_passes(2, sends=True), where="first",
)  # fmt: skip
KEEP = Operator(
    "keep", "vector", _peers, lambda s: s.lists(s.plan.recv_count_R),
    reads=(Access("arrived", came_from),), work=_passes(2), where="last",
)  # fmt: skip


def _sum(name: str, stage: str, size: Callable[[Site], int]) -> Operator:
    """One task per chunk of a rank's own tokens, once all its rows have returned.  size: bytes of a slot."""
    reads = (Access(stage, returned),)
    return Operator(name, "vector", _own_chunks, Site.own, reads=reads, work=_slots_read(size), where="last")


COMBINE = _sum("combine", "returned", lambda s: s.cfg.hidden * s.cfg.dtype.itemsize)
COLLECT = _sum("collect", "weights returned", lambda s: 4)


def _part_work(site: Site, tiles: Tensor) -> Sequence[Tensor | int]:
    """Work of group sums: each row of a part is read, and its sum is written to its destination."""
    assert site.parts is not None
    before_P1 = running_start((site.parts.row_PK >= 0).sum(1))
    sums = tiles[:, 2] - tiles[:, 1]
    size = site.cfg.hidden * site.cfg.dtype.itemsize
    rows = before_P1[tiles[:, 2]] - before_P1[tiles[:, 1]]
    return 0, (rows + sums) * size, torch.where(tiles[:, 0] != site.rank, sums * size, 0)


_ARRIVED = Access("arrived", came)


def _first(
    name: str, rows: Callable[[Site], Tensor], separate: bool, halves: bool, reads: tuple[Access, ...] = (_ARRIVED,)
) -> Operator:
    """The product that reads tokens.  separate: what follows it element by element is an operator of its own."""
    writes = Access(name, by_tile if separate else rows_of(_rows1))
    return Operator(
        name, "matrix", rows, lambda s: s.segments(s.cfg.ffn), reads=reads, writes=(writes,),
        work=_gemm(lambda s: s.cfg.hidden, halves=halves),
    )  # fmt: skip


def _gate_up_tiles(site: Site) -> Tensor:
    return site.row_tiles(site.way.forward_tile, site.cfg.ffn)


def _gate_up(way: Way) -> Operator:
    return _first("gate_up", _gate_up_tiles, way.separate, halves=True)


def _recompute(way: Way) -> Operator:
    """gate_up again, in a backward, whose tokens are here."""
    return _first("recompute", _gate_up_tiles, separate=False, halves=True, reads=())


def _recomputed(way: Way) -> tuple[Access, ...]:
    """What the activation's gradient reads besides its product, unless it is made before the tasks begin."""
    return (Access("recompute", rows_of(_rows1)),) * (way.recomputes and not way.mega)


def _down_grad(way: Way) -> Operator:
    rows = lambda s: s.row_tiles(s.way.down_grad_tile, s.cfg.ffn)  # noqa: E731
    reads = (_ARRIVED, *(() if way.separate_gradient else _recomputed(way)))
    return _first("down_grad", rows, way.separate_gradient and not way.own("down_grad"), halves=False, reads=reads)


def _elementwise(name: str, of: Operator, way: Way, passes: int, reads: tuple[Access, ...] = ()) -> Operator:
    """Tiles of a vector worker for those of a product.  reads: besides its results."""
    own = of.name == "down_grad" and way.own(of.name)  # in between
    read = Access(_last(way, of.name), rows_of(_rows1)) if own else Access(of.name, by_tile)
    writes = (Access(name, rows_of(_rows1)),)
    return Operator(name, "vector", of.split, of.covers, reads=(read, *reads), writes=writes, work=_passes(passes))


def _last(way: Way, product: str, before: RowOperator | None = None) -> str:
    """The operator that leaves the rows of a product as the next one reads them, or as `before` does."""
    made = "activation" if product == "gate_up" and way.separate else product
    for op in way.own(product):
        if op is before:
            break
        made = op.name
    return made


def _own(op: RowOperator, way: Way) -> Operator:
    """One's own: a tile is whole rows, behind those of its product or of the operator before it."""
    tile, rows = (way.down, _rows2) if op.after in ("down", "gate_up_grad") else (way.gate_up, _rows1)

    def body(bodies: Any, block: Block) -> None:
        of_tile = slice(block.row0, block.row1)
        op.apply(getattr(bodies, PLACES[op.after].memory)[of_tile], bodies.rows.target_N[of_tile] >= 0)

    return Operator(
        op.name, "vector", lambda s: s.row_tiles(tile, 1), lambda s: s.segments(1),
        reads=(Access(_last(way, op.after, op), rows_of(rows)),), writes=(Access(op.name, rows_of(rows)),), body=body,
        work=_passes(2), lag=int(rows is _rows2),
    )  # fmt: skip


def _made(way: Way, rule: Callable[[Callable[[Way], int]], Any] = rows_of) -> Access:
    """What the activation's gradient writes."""
    return Access("activation_gradient" if way.separate_gradient else "down_grad", rule(_rows1))


def _kept(way: Way) -> bool:
    """Whether tasks return rows behind the product: what a GPU's pass does is none."""
    return way.grouped or (way.keeps_results and not way.device_tiles)


def _returning(name: str, depth: Callable[[Site], int], read: Access, way: Way) -> Operator:
    """The GEMM whose rows return to their tokens: from its epilogue or, with combine groups, after they are added."""
    kept = _kept(way)
    writes = Access(name, rows_of(_rows2)) if kept else Access("returned", returns)
    return Operator(
        name, "matrix", lambda s: s.row_tiles(s.way.down, s.cfg.hidden), lambda s: s.segments(s.cfg.hidden),
        reads=(read,), writes=(writes,), work=_gemm(depth, returns=not kept), lag=1,
    )  # fmt: skip


def _push_rows(way: Way, product: str) -> Operator:
    return Operator(
        "push_rows", "vector", lambda s: s.row_tiles(s.way.down, s.cfg.hidden), lambda s: s.segments(s.cfg.hidden),
        reads=(Access(_last(way, product), rows_of(_rows2)),), writes=(Access("returned", returns),),
        work=_passes(2, sends=True), lag=1,
    )  # fmt: skip


def _group_sum(way: Way, product: str) -> Operator:
    return Operator(
        "group_sum", "vector", Site.part_chunks, Site.part_lists,
        reads=(Access(_last(way, product), rows_of_parts(_rows2)),),
        writes=(Access("returned", parts_return),), work=_part_work, where="last",
    )  # fmt: skip


def _wgrad(
    name: str, tiles: Callable[[Site], Tensor], covers: Callable[[Site], tuple[Block, ...]], way: Way
) -> Operator:
    reads = (_made(way, segment_of),)
    return Operator(name, "matrix", tiles, covers, reads=reads, work=_wgrad_work, where="weights", lag=1)


_OPERATORS: dict[str, Callable[[Way], Operator]] = {
    "push": lambda way: PUSH,
    "pull": lambda way: PULL,
    "keep": lambda way: KEEP,
    "gate_up": _gate_up,
    "activation": lambda way: _elementwise("activation", _gate_up(way), way, 3),
    "down": lambda way: _returning("down", lambda s: s.cfg.ffn, Access(_last(way, "gate_up"), rows_of(_rows1)), way),
    "combine": lambda way: COMBINE,
    "recompute": _recompute,
    "down_grad": _down_grad,
    "activation_gradient": lambda way: _elementwise(
        "activation_gradient", _down_grad(way), way, 8, _recomputed(way)
    ),
    "dweight": lambda way: Operator(
        "dweight", "vector", lambda s: s.row_tiles(s.way.down, 1), lambda s: s.segments(1), reads=(_made(way),),
        writes=(Access("weights returned", returns),), work=_passes(2, 4, sends=True), lag=1,
    ),
    "gate_up_grad": lambda way: _returning("gate_up_grad", lambda s: s.cfg.h_columns, _made(way), way),
    "down_wgrad": lambda way: _wgrad(
        "down_wgrad", _down_wgrad_tiles, lambda s: _weights(s, s.cfg.ffn, s.cfg.hidden), way
    ),
    "gate_up_wgrad": lambda way: _wgrad(
        "gate_up_wgrad", _gate_up_wgrad_tiles, lambda s: _weights(s, s.cfg.hidden, s.cfg.h_columns), way
    ),
    "collect": lambda way: COLLECT,
}  # fmt: skip
"""Of the stages' operators, but for those behind a product that returns rows, and one's own."""


def _operators(way: Way, direction: Direction, flags: Flags) -> Operators:
    """Those of the stages of a call, in their order."""
    product = "down" if direction == "forward" else "gate_up_grad"
    known: dict[str, Callable[[Way], Operator]] = {
        **_OPERATORS,
        "push_rows": lambda way: _push_rows(way, product),
        "group_sum": lambda way: _group_sum(way, product),
        **{op.name: functools.partial(_own, op) for op in way.operators},
    }
    names = [name for stage in stages(way.given[1], way, direction, flags) for name in stage.operators]
    return Operators([known[name](way) for name in names])


def forward_operators(way: Way, *, keep: bool) -> Operators:
    """Dispatch, two GEMMs around the activation, combine; keep: also copy received tokens out, for backward.

    The activation is the end of a tile of the first GEMM ("fused"), or a separate tile for a vector worker.
    """
    return _operators(way, "forward", Flags(save=keep))


def recompute_operators(way: Way) -> Operators:
    """Of the launch that makes gate and up again before a backward in one kernel."""
    return Operators([_recompute(way)])


def dispatch_operators() -> Operators:
    return Operators([PUSH, KEEP])


def backward_operators(way: Way, flags: Flags = ALL) -> Operators:
    """Dispatch of dO, two data gradients around the activation's gradient, d(weight), weight gradients, sums."""
    return _operators(way, "backward", flags)

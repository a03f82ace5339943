"""One rank's share of a call, as split rules and accesses see it: rows, tiles, and sources and targets of rows.

Shape suffixes: e local experts, N padded rows of the rank, n tiles, G groups, P pairs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from uniep.config import MoEConfig
from uniep.routing import Parts, RoutingPlan
from uniep.schedule import Tile, num_chunks
from uniep.taskflow.graph import Block, lexsort, ranges, running_start
from uniep.way import Way

_F = TypeVar("_F", bound=Callable[..., Any])


def _kept(method: _F) -> _F:
    """Caches results by arguments, since forward and backward ask a Site the same.  Tensors are compared by identity
    and kept alive."""

    @functools.wraps(method)
    def get(self: Site, *args: Any) -> Any:
        key = (method.__name__, *(id(a) if isinstance(a, Tensor) else a for a in args))
        if key not in self._results:
            self._results[key] = (args, method(self, *args))
        return self._results[key][1]

    return get  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """One rank's share of a call: everything that split rules and accesses use.  tokens: T.  returned: chunks of its
    tokens to which any rank returns rows.  parts: with combine groups, the sums that return instead of rows."""

    rank: int
    ep_size: int
    cfg: MoEConfig
    way: Way
    plan: RoutingPlan
    tokens: int
    returned: Tensor
    parts: Parts | None = None

    @functools.cached_property
    def _results(self) -> dict[Any, tuple[Any, Any]]:
        return {}

    @functools.cached_property
    def chunks(self) -> int:
        return num_chunks(self.cfg, self.way.chunk_tokens)

    @functools.cached_property
    def start_e1(self) -> Tensor:
        return self.plan.expert_start_e1.long()

    @functools.cached_property
    def source_of_row(self) -> Tensor:
        """(N,): the rank whose token a row is, -1 for pad rows."""
        back_N = self.plan.row_return_N.long()
        slots = self.cfg.max_tokens_per_rank * self.cfg.top_k
        return torch.where(back_N >= 0, back_N // slots, -1)

    @functools.cached_property
    def rows_before(self) -> Tensor:
        """(N+1,): number of rows before each row, without padding."""
        return running_start((self.source_of_row >= 0).long())

    @functools.cached_property
    def arrival_of_row(self) -> Tensor:
        """(N,): source rank * chunks + chunk that contains a row's token, -1 for local and pad rows."""
        slot_N = -self.plan.row_source_N.long() - 1
        block_N = slot_N.clamp(min=0) // self.cfg.receive_block
        peer_N = block_N + (block_N >= self.rank)
        chunk_N = slot_N.clamp(min=0) % self.cfg.receive_block // self.way.chunk_tokens
        return torch.where((slot_N >= 0) & (self.source_of_row >= 0), peer_N * self.chunks + chunk_N, -1)

    @functools.cached_property
    def return_of_row(self) -> Tensor:
        """(N,): source rank * chunks + chunk of its tokens that a row returns to, -1 for pad rows."""
        back_N = self.plan.row_return_N.long()
        slots = self.cfg.max_tokens_per_rank * self.cfg.top_k
        chunk_N = back_N % slots // self.cfg.top_k // self.way.chunk_tokens
        return torch.where(back_N >= 0, back_N // slots * self.chunks + chunk_N, -1)

    @_kept
    def spans(self, tiles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The distinct row spans of tiles: (group_n, first_G, count_G)."""
        limit = 1 << 31
        span_G, group_n = torch.unique(tiles[:, 1] * limit + tiles[:, 2], return_inverse=True)
        return group_n, span_G // limit, span_G % limit - span_G // limit

    @_kept
    def keys(self, tiles: Tensor, key_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(group_n, group_P, key_P): the distinct keys of the rows of each span of rows; rows of key -1 have none."""
        group_n, first_G, count_G = self.spans(tiles)
        group_R, key_R = torch.arange(len(first_G)).repeat_interleave(count_G), key_N[ranges(first_G, count_G)]
        used_R = key_R >= 0
        span = self.ep_size * self.chunks
        key_P = torch.unique(group_R[used_R] * span + key_R[used_R])
        return group_n, key_P // span, key_P % span

    # --- tiles ---

    @_kept
    def row_tiles(self, tile: Tile, columns: int) -> Tensor:
        """Tiles over all rows: experts, then groups of row tiles, then columns, then the row tiles of a group, so
        that `group_rows` row tiles share a column of weights before the next one starts."""
        count_e = self.start_e1.diff() // tile.rows
        expert_M = torch.arange(len(count_e)).repeat_interleave(count_e)
        row_M = torch.arange(len(expert_M))
        group_M = (row_M - self.start_e1[expert_M] // tile.rows) // tile.group_rows
        column0_C, column1_C = steps(columns, tile.columns)
        wide = len(column0_C)
        row_n, column_n = row_M.repeat_interleave(wide), torch.arange(wide).repeat(len(row_M))
        order = lexsort(row_n, column_n, group_M[row_n], expert_M[row_n])
        row_n, column_n = row_n[order], column_n[order]
        return blocks(
            expert_M[row_n], row_n * tile.rows, (row_n + 1) * tile.rows, column0_C[column_n], column1_C[column_n]
        )

    @_kept
    def weight_tiles(self, rows: int, columns: int, tile: Tile, parts: int = 1, every: bool = False) -> Tensor:
        """Tiles over a (parts * rows, columns) output of each expert that has rows, or of every one; its contraction is
        never split, and no tile lies in two parts."""
        row0_A, row1_A = (torch.cat([t + part * rows for part in range(parts)]) for t in steps(rows, tile.rows))
        column0_C, column1_C = steps(columns, tile.columns)
        busy = torch.nonzero((self.start_e1.diff() > 0) | every).flatten()
        expert_n, a_n, c_n = (t.flatten() for t in torch.meshgrid(busy, count(row0_A), count(column0_C), indexing="ij"))
        return blocks(expert_n, row0_A[a_n], row1_A[a_n], column0_C[c_n], column1_C[c_n])

    @_kept
    def segments(self, columns: int, rows: int | None = None) -> tuple[Block, ...]:
        """One rectangle per expert that has rows: its rows, or `rows` rows of a weight."""
        spans = zip(self.start_e1.tolist(), self.start_e1[1:].tolist(), strict=False)
        return tuple(
            Block(e, a if rows is None else 0, b if rows is None else rows, 0, columns)
            for e, (a, b) in enumerate(spans)
            if a < b
        )

    @_kept
    def part_chunks(self) -> Tensor:
        """Tiles over the parts of each chunk of a source's tokens; peers' parts first, since they must be sent."""
        assert self.parts is not None
        key_P = self.parts.source_P * self.chunks + self.parts.token_P // self.way.chunk_tokens
        key_n, count_n = torch.unique_consecutive(key_P, return_counts=True)
        last_n, source_n = torch.cumsum(count_n, 0), key_n // self.chunks
        order = torch.argsort((source_n - self.rank - 1) % self.ep_size, stable=True)
        zero = torch.zeros_like(key_n)
        return blocks(source_n, last_n - count_n, last_n, zero, zero + 1)[order]

    def part_lists(self) -> tuple[Block, ...]:
        """One rectangle per source: the parts of its tokens."""
        assert self.parts is not None
        last = torch.cumsum(torch.bincount(self.parts.source_P, minlength=self.ep_size), 0).tolist()
        spans = zip([0, *last], last, strict=False)
        return tuple(Block(source, a, b, 0, 1) for source, (a, b) in enumerate(spans) if a < b)

    def lists(self, count_R: Tensor) -> tuple[Block, ...]:
        """One rectangle per peer: its send or receive list."""
        return tuple(Block(p, 0, n, 0, self.cfg.hidden) for p, n in enumerate(count_R.tolist()) if n)

    def own(self) -> tuple[Block, ...]:
        return (Block(0, 0, self.tokens, 0, 1),) if self.tokens else ()

    @_kept
    def away(self, tiles: Tensor) -> Tensor:
        """Rows of each tile that return to other ranks."""
        is_away_N = (self.source_of_row >= 0) & (self.source_of_row != self.rank)
        before = running_start(is_away_N.long())
        return before[tiles[:, 2]] - before[tiles[:, 1]]


def steps(extent: int, step: int) -> tuple[Tensor, Tensor]:
    """First and last + 1 of each span of `step` that together cover 0 .. extent - 1."""
    first = torch.arange(0, extent, step)
    return first, (first + step).clamp(max=extent)


def count(of: Tensor) -> Tensor:
    """0 .. len - 1."""
    return torch.arange(len(of))


def blocks(*columns: Tensor) -> Tensor:
    """(n, 5), from the five columns of `Block`."""
    return torch.stack(columns, 1) if len(columns[0]) else torch.zeros(0, 5, dtype=torch.int64)

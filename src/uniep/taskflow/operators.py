"""Operators: what a call consists of, how each splits into tiles, and which events its tiles read and write.

An operator is a split rule and accesses.  The split rule names the tiles of one rank; an access names, for each tile,
the events that it reads or writes.  `compile_graph` in `lower` derives every dependency from these two, so your own
operator needs only these:

- 1:1: `Access(stage, by_tile)` on both sides, an event per tile;
- N:1: tiles that write one event are counted, and its readers wait for all of them (columns of a row tile, say);
- 1:N: any number of tiles may read an event; a tile may write several (rows that return to different ranks).

Shape suffixes: n tiles, G groups of tiles, P pairs (group, event).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from uniep.errors import ConfigError
from uniep.taskflow.graph import GATE, WORKERS, Block, Worker, ranges
from uniep.taskflow.site import Site, count
from uniep.way import Way


class Pairs(NamedTuple):
    """The events of tiles.  Tiles of one group share them: group of each tile; then pairs of a group and an event."""

    group_n: Tensor
    group_P: Tensor
    rank_P: Tensor
    number_P: Tensor


# --- accesses ---


@dataclasses.dataclass(frozen=True)
class Access:
    """The events of `stage` that each tile reads or writes.  pairs: (site, tiles (n, 5)) -> Pairs."""

    stage: str
    pairs: Callable[[Site, Tensor], Pairs]


def _here(site: Site, group_n: Tensor, group_P: Tensor, number_P: Tensor) -> Pairs:
    return Pairs(group_n, group_P, torch.full_like(group_P, site.rank), number_P)


def by_tile(site: Site, tiles: Tensor) -> Pairs:
    """An event per tile: 1:1 between operators with the same split."""
    return _here(site, *[count(tiles)] * 3)


def rows_of(rows: Callable[[Way], int]) -> Callable[[Site, Tensor], Pairs]:
    """An event per `rows(way)` rows; a tile of any height has the events of the rows it touches."""

    def pairs(site: Site, tiles: Tensor) -> Pairs:
        step = rows(site.way)
        group_n, first_G, rows_G = site.spans(tiles)
        count_G = (first_G + rows_G - 1) // step - first_G // step + 1
        return _here(site, group_n, _repeated(count_G), ranges(first_G // step, count_G))

    return pairs


def segment_of(rows: Callable[[Way], int]) -> Callable[[Site, Tensor], Pairs]:
    """The events of all rows of the tile's expert."""

    def pairs(site: Site, tiles: Tensor) -> Pairs:
        first_e1 = site.start_e1 // rows(site.way)
        count_e = first_e1.diff()
        return _here(site, tiles[:, 0], _repeated(count_e), ranges(first_e1[:-1], count_e))

    return pairs


def _repeated(count_G: Tensor) -> Tensor:
    return count(count_G).repeat_interleave(count_G)


def sent(site: Site, tiles: Tensor) -> Pairs:
    """Arrival of a chunk of a send list at its peer, which is the tile's group."""
    number = site.rank * site.chunks + tiles[:, 1] // site.way.chunk_tokens
    return Pairs(count(tiles), count(tiles), tiles[:, 0], number)


def fetched(site: Site, tiles: Tensor) -> Pairs:
    """Arrival here of a chunk of the list of the tile's group, which this rank fetches."""
    return _here(site, count(tiles), count(tiles), tiles[:, 0] * site.chunks + tiles[:, 1] // site.way.chunk_tokens)


def came(site: Site, tiles: Tensor) -> Pairs:
    """Arrival of the chunks that contain the tokens of the tile's rows."""
    return _here(site, *site.keys(tiles, site.arrival_of_row))


def came_from(site: Site, tiles: Tensor) -> Pairs:
    """Arrival of all chunks of the tile's peer."""
    chunks_n = -(-tiles[:, 2] // site.way.chunk_tokens)
    return _here(site, count(tiles), _repeated(chunks_n), ranges(tiles[:, 0] * site.chunks, chunks_n))


def returns(site: Site, tiles: Tensor) -> Pairs:
    """Return of rows to the chunks of tokens, on any rank, that they belong to."""
    group_n, group_P, key_P = site.keys(tiles, site.return_of_row)
    return Pairs(group_n, group_P, key_P // site.chunks, key_P % site.chunks)


def rows_of_parts(rows: Callable[[Way], int]) -> Callable[[Site, Tensor], Pairs]:
    """As `rows_of`, for tiles over parts: the rows that are added."""

    def pairs(site: Site, tiles: Tensor) -> Pairs:
        assert site.parts is not None
        step, row_PK = rows(site.way), site.parts.row_PK
        count_n = tiles[:, 2] - tiles[:, 1]
        row = row_PK[ranges(tiles[:, 1], count_n)]
        tile = _repeated(count_n)[:, None].expand_as(row)[row >= 0]
        limit = len(site.source_of_row) // step + 1
        pair_P = torch.unique(tile * limit + row[row >= 0] // step)
        return _here(site, count(tiles), pair_P // limit, pair_P % limit)

    return pairs


def parts_return(site: Site, tiles: Tensor) -> Pairs:
    """Return of parts to a chunk of the tokens of a source, which is the tile's group."""
    assert site.parts is not None
    token_n = site.parts.token_P[tiles[:, 1]]
    return Pairs(count(tiles), count(tiles), tiles[:, 0], token_n // site.way.chunk_tokens)


def returned(site: Site, tiles: Tensor) -> Pairs:
    """All returns to the tile, a chunk of this rank's tokens."""
    number = tiles[:, 1] // site.way.chunk_tokens
    used = torch.isin(number, site.returned)
    return _here(site, count(tiles), count(tiles)[used], number[used])


# --- operators ---

Work = Callable[[Site, Tensor], Sequence[Tensor | int]]
"""(site, tiles) -> floating point operations, bytes of memory, bytes to peers of each tile."""


def no_work(site: Site, tiles: Tensor) -> Sequence[Tensor | int]:
    return 0, 0, 0


Where = Literal["first", "expert", "weights", "last"]


@dataclasses.dataclass(frozen=True)
class Operator:
    """A kind of tile task.

    split: the tiles of a rank, (n, 5) int64 rows of `Block`, in natural order.  covers: what they must cover exactly
    once.  work: for the cost model.  where: how orders of tiles treat it: "expert", tiles over rows of experts: without
    `lag` in the order in which rows arrive; with `lag` in the order in which they return, `lag` chunks of experts after
    the first GEMM; "weights", tiles of a weight gradient; "first" and "last", before and after all of those.
    body: (bodies of the call, block) on the CPU; None: the method of this name.
    """

    name: str
    worker: Worker
    split: Callable[[Site], Tensor]
    covers: Callable[[Site], tuple[Block, ...]]
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()
    work: Work = no_work
    where: Where = "expert"
    lag: int = 0
    body: Callable[[Any, Block], None] | None = None

    def __post_init__(self) -> None:
        if self.worker not in WORKERS:
            raise ConfigError(f"operator {self.name!r} is for {self.worker!r}; classes of workers are {WORKERS}")


class Operators:
    """The operators of one kind of call, each after those whose events it reads.  A small registry: `register` adds
    your own operator, which is then compiled, checked, scheduled, run and traced like the others."""

    def __init__(self, operators: Sequence[Operator] = ()) -> None:
        self._by_name: dict[str, Operator] = {}
        for op in operators:
            self.register(op)

    def register(self, operator: Operator, after: str | None = None) -> None:
        """Add it at the end, or after operator `after`.  Raises ConfigError for a name that is taken or unknown."""
        if operator.name in self._by_name or operator.name == GATE:
            raise ConfigError(f"operator {operator.name!r} exists already; choose another name")
        if after is not None and after not in self._by_name:
            raise ConfigError(f"there is no operator {after!r} to come after; there are {', '.join(self._by_name)}")
        names = list(self._by_name)
        self._by_name[operator.name] = operator
        names.insert(len(names) if after is None else names.index(after) + 1, operator.name)
        self._by_name = {name: self._by_name[name] for name in names}

    def without(self, names: Sequence[str]) -> Operators:
        return Operators([op for op in self if op.name not in names])

    def __iter__(self) -> Iterator[Operator]:
        return iter(self._by_name.values())

    def __getitem__(self, name: str) -> Operator:
        return self._by_name[name]

    def __len__(self) -> int:
        return len(self._by_name)

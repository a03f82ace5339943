"""Kernels: operators that start together, after the whole previous kernel, as launches on a stream do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from uniep.errors import ConfigError
from uniep.taskflow.operators import Access, Operator, Operators, Pairs
from uniep.taskflow.site import Site

KERNEL = "kernel"
"""Stage of the events that kernels wait for: event k lets kernel k begin, one launch later."""


def in_kernels(operators: Operators, kernels: Sequence[Sequence[str]]) -> Operators:
    """Names in `kernels` that are not operators are ignored.  Raises ConfigError for an operator in no kernel."""
    of = {name: k for k, names in enumerate(kernels) for name in names}
    if absent := [op.name for op in operators if op.name not in of]:
        raise ConfigError(f"operators {', '.join(absent)} are in no kernel; kernels: {kernels}")
    members = [[op for op in operators if of[op.name] == k] for k in range(len(kernels))]
    begins, ends = ([make(members, k) for k in range(len(kernels))] for make in (_begins, _ends))
    return Operators(
        [
            dataclasses.replace(
                op, reads=(*op.reads, begins[of[op.name]]), writes=(*op.writes, ends[of[op.name]])
            )
            for op in operators
        ]
    )  # fmt: skip


def _begins(members: list[list[Operator]], k: int) -> Access:
    return Access(KERNEL, _all_tiles(lambda site: k if any(_busy(members[j], site) for j in range(k)) else None))


def _ends(members: list[list[Operator]], k: int) -> Access:
    """The event of the next kernel that has tiles."""
    later = range(k + 1, len(members))
    return Access(KERNEL, _all_tiles(lambda site: next((j for j in later if _busy(members[j], site)), None)))


def _busy(members: list[Operator], site: Site) -> bool:
    return any(len(op.split(site)) for op in members)


def _all_tiles(number: Callable[[Site], int | None]) -> Callable[[Site, Tensor], Pairs]:
    """One event, or none, for all tiles."""

    def pairs(site: Site, tiles: Tensor) -> Pairs:
        found = number(site)
        event = torch.tensor([] if found is None else [found], dtype=torch.int64)
        group = torch.zeros_like(event)
        return Pairs(torch.zeros(len(tiles), dtype=torch.int64), group, group + site.rank, event)

    return pairs

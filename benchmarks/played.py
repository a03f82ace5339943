"""Rank 0 of several, alone on one GPU: the memory of all ranks lies there, and what peers would write at the entry of a
call has been written beforehand.  For benchmarks; `emulate.py` plays the tokens, too."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor

from uniep.backends.hopper import link
from uniep.backends.hopper.backend import HopperBackend
from uniep.backends.protocol import OPERATIONS
from uniep.config import MoEConfig
from uniep.kernels import header
from uniep.layout import EXCHANGE_HEADER
from uniep.schedule import Schedule

ALWAYS = 2**30  # a flag that no call waits for
TIMEOUT_S = 5.0


class PlayedArena(link.Arena):
    """`Arena` whose memories all lie on this GPU."""

    def _allocate(self, size: int, member: Any) -> list[Tensor]:
        return [torch.zeros(size, dtype=torch.uint8, device=member.device) for _ in range(member.ep_size)]


def _fail(cause: str) -> None:
    raise RuntimeError(cause)


def rank_0(
    cfg: MoEConfig, ranks: int, schedule: Schedule | None = None, kind: type[HopperBackend] = HopperBackend,
    device: str = "cuda:0",
) -> HopperBackend:  # fmt: skip
    """Its backend, whose waits end after TIMEOUT_S."""
    member: Any = types.SimpleNamespace(
        cfg=cfg, rank=0, ep_size=ranks, device=torch.device(device), group=None, timeout_s=TIMEOUT_S, copies=1,
        cause="", operators=(), fail=_fail,
    )  # fmt: skip
    usual, link.Arena = link.Arena, PlayedArena  # type: ignore[misc]
    try:
        return kind(member, schedule)
    finally:
        link.Arena = usual  # type: ignore[misc]


def enter_peers(backend: HopperBackend, ids: list[Tensor], weights: list[Tensor], operation: str) -> None:
    """Every peer enters every call, as `operation`, with these ids and weights, and has returned its results.  ids,
    weights: of all ranks, (T, K)."""
    arena, planner = backend.arena, backend.planner
    exchange = arena.views["exchange"]
    for source, (ids_TK, weights_TK) in enumerate(zip(ids, weights, strict=True)):
        if source == 0:
            continue
        words = exchange[:, source]
        words.zero_()
        words[:, header.TOKENS.value] = len(ids_TK)
        words[:, header.CAPACITY.value] = planner.capacity
        words[:, header.OPERATION.value] = OPERATIONS.index(operation)
        slots, count = backend.slots, ids_TK.numel()
        words[:, EXCHANGE_HEADER : EXCHANGE_HEADER + count] = ids_TK.flatten().int()
        first = EXCHANGE_HEADER + slots
        words[:, first : first + count] = weights_TK.flatten().float().view(torch.int32)
    for name in ("entered", "returned"):
        arena.flag_view(name)[1 : backend.num_ranks] = ALWAYS

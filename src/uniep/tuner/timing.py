"""What trials time: one call of a layer with its own inputs, on all ranks at the same moment."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from uniep.config import MoEConfig

SLEEP_CYCLES = 4_000_000
"""The device sleeps for about 2 ms, so that the host is ahead when a call begins."""


Call = Callable[[], object]


class Drawn(NamedTuple):
    """x, dy (T, D); ids (T, K): uniform random; weights (T, K) fp32; w13 (e, 2F or F, D), w2 (e, D, F).
    biases: b13 (e, 2F or F) and b2 (e, D), or none."""

    x_TD: Tensor
    dy_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    w13: Tensor
    w2: Tensor
    biases: tuple[Tensor, ...]


def drawn(cfg: MoEConfig, ep_size: int, rank: int, tokens: int, seed: int, device: torch.device) -> Drawn:
    """This rank's inputs, a function of `seed`, `rank` and the kind of device."""
    generator = torch.Generator(device).manual_seed(seed * 1000 + rank)
    local = cfg.experts_per_rank(ep_size)
    made_by: dict[str, Any] = {"generator": generator, "device": device}

    def normal(*shape: int, fan_in: int = 1) -> Tensor:
        """No copy in fp32: a user's GPU may be full."""
        return torch.randn(*shape, dtype=cfg.dtype, **made_by).mul_(fan_in**-0.5)

    score_TE = torch.rand(tokens, cfg.num_experts, **made_by)
    ids_TK = score_TE.topk(cfg.top_k, dim=1).indices
    share_TK = torch.rand(tokens, cfg.top_k, **made_by).add(0.1)
    dy_TD, x_TD = normal(tokens, cfg.hidden), normal(tokens, cfg.hidden)
    w13 = normal(local, cfg.h_columns, cfg.hidden, fan_in=cfg.hidden)
    w2 = normal(local, cfg.hidden, cfg.ffn, fan_in=cfg.ffn)
    biases = (normal(local, cfg.h_columns), normal(local, cfg.hidden)) if cfg.bias else ()
    return Drawn(x_TD, dy_TD, ids_TK, share_TK / share_TK.sum(1, keepdim=True), w13, w2, biases)


def back_to_back(call: Call, count: int, group: dist.ProcessGroup | None, device: torch.device) -> float:
    """us of each of `count` calls on this rank, the host's time included where it is longer.  Collective."""
    if group is not None:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(count):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / count * 1e6


def timed(call: Call, group: dist.ProcessGroup | None, device: torch.device) -> float:
    """us of one `call` on this rank, which finds an idle device, and on GPUs a host that is ahead.  Collective."""
    if device.type != "cuda":
        if group is not None:
            dist.barrier(group)
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e6
    torch.cuda._sleep(SLEEP_CYCLES)
    if group is not None:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def in_turn(
    calls: tuple[Call, Call], pairs: int, warmup: int,
    group: dist.ProcessGroup | None, device: torch.device, count: int = 0,
) -> list[tuple[float, float]]:  # fmt: skip
    """us of both calls, `pairs` times, after `warmup` calls of each: `timed`, or `back_to_back` of `count`.  The second
    call finds warm caches, so the order alternates."""
    for call in calls:
        for _ in range(warmup):
            call()
    made = []
    for number in range(pairs):
        first = number % 2
        of = {i: _taken(calls[i], group, device, count) for i in (first, 1 - first)}
        made.append((of[0], of[1]))
    return made


def _taken(call: Call, group: dist.ProcessGroup | None, device: torch.device, count: int) -> float:
    return back_to_back(call, count, group, device) if count else timed(call, group, device)


def over_ranks(
    mine: list[tuple[float, float]], group: dist.ProcessGroup | None, device: torch.device
) -> list[tuple[float, float]]:
    """For every pair, the slowest rank's two times.  Collective."""
    pairs = torch.tensor(mine, dtype=torch.float64, device=device)
    if group is not None:
        dist.all_reduce(pairs, op=dist.ReduceOp.MAX, group=group)
    return [(a, b) for a, b in pairs.tolist()]

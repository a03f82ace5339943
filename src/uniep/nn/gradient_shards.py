"""Expert gradients by blocks of source ranks: `MoEConfig(gradient_shards=G)`, `Workspace(copies=)`.

An expert's rows come from all ranks of its EP group and, where other EP groups hold copies of it, from theirs.  These
source ranks, in the order (copy, rank in the EP group), form G blocks of consecutive ranks.  Each block's dW13 and dW2
is a chain of its own over its rows in canonical order, in fp32 and from 0, as if there were no other rows; and so are
db13 and db2, whose blocks of 128 rows begin with the block's first row.

**Order**: (((b_0 + b_1) + b_2) + ... + b_G-1), fp32, also of blocks without rows, which are zeros.  The sum is cast
once, or goes to main_grad in one rounding.  Nothing in it depends on which ranks are one EP group.

A rank keeps its blocks apart only where there are copies.  Of those, each sums a share of the elements, and then all
gather the sums: G / copies + 1 times the bytes of the gradient leave a rank.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from uniep.backends.base import ExpertGradients, Inputs, MainGrads, Needs
from uniep.errors import PeerTimeoutError, UniEPError
from uniep.layout import SUMMED_AT_ONCE
from uniep.nn.record import digest
from uniep.workspace import Workspace

__all__ = ["backward", "share_of_sum", "sum_over_ranks"]

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name until torch 2.13


def backward(
    space: Workspace,
    dy_TD: Tensor,
    inputs: Inputs,
    saved: list[Tensor],
    needs: Needs,
    main_grads: MainGrads | None = None,
) -> ExpertGradients:
    """`Backend.backward`, with expert gradients by blocks.  Collective over the EP group and the copies."""
    backend, blocks = space.enter(), space.num_blocks
    if space.num_copies == 1:
        return backend.backward(dy_TD, inputs, saved, needs, main_grads, blocks)
    of_blocks, copies = _memory(inputs, needs, blocks), space.among_copies
    assert copies is not None
    wait, begun = copies.wait if dy_TD.device.type == "cpu" else None, copies.sums
    try:
        got = backend.backward(dy_TD, inputs, saved, needs, of_blocks, blocks)
        wanted, experts = {"w13": needs.w13, "w2": needs.w2, "biases": needs.biases}, inputs.experts
        copies.agree(wanted, lambda: int(digest(experts, space.cfg.dtype, space.rank, experts.factors)))
        w13, w2, biases = (
            tuple(sum_over_ranks(t.flatten(1), space.copies, wait).view(t.shape[1:]) for t in ts)
            for ts in (of_blocks.w13, of_blocks.w2, of_blocks.biases)
        )
        copies.done()
    except BaseException as error:
        if not isinstance(error, UniEPError) or isinstance(error, PeerTimeoutError):  # they may wait for this rank
            space.fail(f"{type(error).__name__}: {error}")
        elif copies.sums == begun:
            space.tell_copies(error)
        raise
    got = dataclasses.replace(got, biases=_cast(biases, inputs.experts.biases))
    if main_grads is None:
        first, second = inputs.experts.trained
        return dataclasses.replace(got, w13=_cast(w13, first) or None, w2=_cast(w2, second) or None)
    for target, dw in zip((*main_grads.w13, *main_grads.w2), (*w13, *w2), strict=True):
        target.add_(dw) if main_grads.accumulate else target.copy_(dw)
    return got


def _memory(inputs: Inputs, needs: Needs, blocks: int) -> MainGrads:
    """fp32 memory for the gradients that are needed, of each block."""

    def fresh(weights: tuple[Tensor, ...], needed: bool) -> tuple[Tensor, ...]:
        return tuple(w.new_empty((blocks, *w.shape), dtype=torch.float32) for w in weights) if needed else ()

    w13, w2 = inputs.experts.trained
    biases = fresh(inputs.experts.biases, needs.biases)
    return MainGrads(fresh(w13, needs.w13), fresh(w2, needs.w2), False, True, biases)


def _cast(sums: tuple[Tensor, ...], like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """(): not needed."""
    return tuple(dw.to(w.dtype) for dw, w in zip(sums, like, strict=True)) if sums else ()


def sum_over_ranks(
    blocks_BN: Tensor, group: dist.ProcessGroup | None, wait: Callable[[Callable[[], Any]], None] | None = None
) -> Tensor:
    """Sum of the blocks of all ranks, each fp32 (N,), in the order (rank, block) -> (N,), the same bits on every rank.

    wait: runs what begins a collective, on the CPU; None: as torch does, up to the timeout of the group.

    **Order**: ((b_0 + b_1) + b_2) + ... .  Each rank sums a share of the elements; then all gather the sums.
    """
    if group is None or group.size() == 1:
        return _chain(blocks_BN)
    whole = blocks_BN.new_empty(blocks_BN.shape[1])
    size, number = group.size(), blocks_BN.shape[0]
    for first in range(0, whole.shape[0], SUMMED_AT_ONCE):
        part_BN = blocks_BN[:, first : first + SUMMED_AT_ONCE]
        length = part_BN.shape[1]
        share = -(-length // size)
        sent = torch.nn.functional.pad(part_BN, (0, size * share - length))
        total = share_of_sum(sent.view(number, size, share).transpose(0, 1), group, wait)
        gathered = total.new_empty(size * share)
        _run(_all_gather, gathered, total, group, wait)
        whole[first : first + length] = gathered[:length]
    return whole


def share_of_sum(
    sent_RBN: Tensor, group: dist.ProcessGroup, wait: Callable[[Callable[[], Any]], None] | None = None
) -> Tensor:
    """This rank's share (N,) of the sum over the blocks of all ranks, in the order (rank, block), fp32.

    sent_RBN: of this rank's blocks the share of each rank."""
    sent_RBN = sent_RBN.contiguous()
    received = torch.empty_like(sent_RBN)
    _run(dist.all_to_all_single, received, sent_RBN, group, wait)
    return _chain(received.flatten(0, 1))


def _run(
    collective: Callable[..., Any], out: Tensor, given: Tensor, group: dist.ProcessGroup,
    wait: Callable[[Callable[[], Any]], None] | None,
) -> None:  # fmt: skip
    if wait is None:
        collective(out, given, group=group)
    else:
        wait(functools.partial(collective, out, given, group=group, async_op=True))


def _chain(blocks_BN: Tensor) -> Tensor:
    total = blocks_BN[0].to(torch.float32, copy=True)
    for block in blocks_BN[1:]:
        total += block
    return total

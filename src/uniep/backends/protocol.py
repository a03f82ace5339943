"""What ranks tell each other when they enter a call, and what all of them conclude from it.

Every rank judges the same headers, so every rank raises the same error: before any row moves, and with the
Workspace still usable.  How headers travel is up to the backend.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from uniep.backends.base import LayerTag, Needs
from uniep.config import MoEConfig
from uniep.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    DTypeError,
    InputError,
    PeerTimeoutError,
    UniEPError,
    UnsupportedError,
)
from uniep.layout import TEXT_BYTES
from uniep.routing import find_bad_id

log = logging.getLogger("uniep")

OPERATIONS = ("route", "forward", "forward without gradients", "backward", "dispatch", "refuse")

_ERRORS: tuple[type[UniEPError], ...] = (
    UniEPError,
    InputError,
    DTypeError,
    ConfigError,
    CapacityError,
    UnsupportedError,
    ClosedError,
    PeerTimeoutError,
)


@dataclasses.dataclass
class Header:
    """What a rank says about itself when it enters a call: integers, sent in this order."""

    call: int
    operation: int  # index into OPERATIONS
    tokens: int = 0
    error: int = -1  # an `error_index`: why this rank refuses
    text_bytes: int = 0
    digest: int = 0  # of this rank's inputs
    fingerprint: int = 0  # backward: of the forward it belongs to
    forwards: int = 0  # forwards that this rank has entered
    needs: int = 0  # backward: `needs_bits`
    layer: int = 0  # this and the fields below: as in `LayerTag`
    draw: int = 0
    before: int = 0  # digests
    now: int = 0
    looks: int = -1  # -1: without digests


def tag_words(tag: LayerTag) -> tuple[int, ...]:
    """The fields of a Header from `layer` on."""
    draw = tag.draw - (tag.draw >> 63 << 64)  # as a signed number
    return tag.number, draw, *(tag.digests.tolist() if tag.digests is not None else (0, 0, -1))


def needs_bits(needs: Needs | None) -> int:
    """The wanted gradients as bits: 1 x, 2 weights, 4 w13, 8 w2, 16 biases."""
    wanted = dataclasses.astuple(needs) if needs is not None else ()
    return sum(1 << bit for bit, want in enumerate(wanted) if want)


def wanted_anywhere(headers: Sequence[Header]) -> Needs:
    """The gradients that at least one rank wants.  dx and d(weight) need work on all ranks, so all compute them."""
    return Needs(*(any(h.needs >> bit & 1 for h in headers) for bit in range(5)))


def error_index(error: UniEPError | None) -> int:
    """Number of the error's class; -1: no error."""
    if error is None:
        return -1
    return next((i for i, kind in enumerate(_ERRORS) if type(error) is kind), 0)


def error_of(index: int) -> type[UniEPError]:
    """The class of an `error_index`."""
    return _ERRORS[index]


def utf8(text: str, most: int = TEXT_BYTES) -> bytes:
    """Cut after `most` bytes."""
    return text.encode(errors="replace")[:most]


def encoded(text: str, most: int = TEXT_BYTES) -> Tensor:
    """`utf8`; (number of bytes,) uint8."""
    return torch.tensor(list(utf8(text, most)), dtype=torch.uint8)


def decoded(raw: Tensor) -> str:
    """The text of bytes that `encoded` made."""
    return bytes(raw.tolist()).decode(errors="replace")


def bad_id_error(ids_TK: Tensor, rank: int, num_experts: int) -> InputError | None:
    """The refusal of a rank with an id outside -1 .. E-1; None: all are good."""
    bad = find_bad_id(ids_TK, num_experts)
    if bad is None:
        return None
    row, slot, value = bad
    return InputError(
        f"rank {rank}, row {row}, slot {slot}: expert id {value} is not in 0..{num_experts - 1}; "
        "use -1 for an unused slot"
    )


def agree(number: int, headers: Sequence[Header], text: Callable[[int], str]) -> None:
    """Raise the refusal of the first rank that refuses, or UniEPError if ranks are in different operations.

    text: the refusal's text of a rank.
    """
    for peer, header in enumerate(headers):
        if header.error >= 0:
            raise error_of(header.error)(text(peer))
    if all(h.operation == headers[0].operation for h in headers):
        return
    forwards = [h.forwards for h in headers]
    ahead = ""
    if max(forwards) > min(forwards):
        first = forwards.index(max(forwards))
        ahead = f"rank {first} is ahead: it is in forward {max(forwards)}, others have made {min(forwards)}. "
    listed = ", ".join(f"rank {r}: {OPERATIONS[h.operation]}" for r, h in enumerate(headers))
    raise UniEPError(
        f"ranks are in different operations in call {number} ({listed}). {ahead}Every rank must make the same "
        "calls, all with or all without gradients; ranks without tokens pass T=0"
    )


def same_forward(number: int, headers: Sequence[Header], fingerprint: int) -> None:
    """Raise UniEPError unless every rank's backward belongs to the forward that `fingerprint` names."""
    if any(h.fingerprint != fingerprint for h in headers):
        raise UniEPError(
            f"call {number}: ranks run the backward of different forwards, or their inputs changed in between; "
            "every rank must run its backwards in the same order"
        )


def check_layers(number: int, headers: Sequence[Header]) -> None:
    """Raise UniEPError unless every rank is in the same layer, with experts of its own from the same draw."""
    same_layer(number, [h.layer for h in headers])
    same_draw(number, [h.draw for h in headers])
    refuse_copies(number, [(h.before, h.now, h.looks) if h.looks >= 0 else () for h in headers])


def same_layer(number: int, layers: Sequence[int]) -> None:
    """Raise UniEPError if two ranks are in different layers.  layers: `LayerTag.number` of every rank."""
    if len({layer for layer in layers if layer}) > 1:
        listed = ", ".join(f"rank {r}: {f'layer {layer}' if layer else 'not known'}" for r, layer in enumerate(layers))
        raise UniEPError(
            f"call {number}: ranks are in different layers ({listed}; a layer's number is that of its first "
            "forward in the Workspace). Every rank must call its layers, recompute them and run their "
            "backwards in the same order"
        )


def same_draw(number: int, draws: Sequence[int]) -> None:
    """Raise UniEPError if two ranks initialised a layer from different draws.  draws: `LayerTag.draw` of every rank."""
    if len({draw for draw in draws if draw}) > 1:
        listed = ", ".join(f"rank {r}: {draw & 2**64 - 1:#x}" for r, draw in enumerate(draws))
        raise UniEPError(
            f"call {number}: ranks initialised this layer from different random numbers ({listed}), so the model "
            "is not the one that a single rank would make. Call torch.manual_seed with the same seed on all ranks "
            "before they make the model, and draw as many random numbers before each layer, or pass seed= to the layer"
        )


def refuse_copies(number: int, digests: Sequence[Sequence[int]]) -> None:
    """Raise UniEPError if a tool has made experts of two ranks equal, as if they were copies of one parameter.

    digests: `LayerTag.digests` of every rank; empty if not taken.  Experts that differed before and are equal now were
    overwritten.  Before the first look, both may have been initialised alike on purpose (upcycling).  So there it is an
    error only if one of the two is unchanged: then the other took its values; else it is told.
    """
    if not all(digests):
        return
    for a, (before_a, now_a, looks) in enumerate(digests):
        for b, (before_b, now_b, _) in enumerate(digests[:a]):
            copied = before_a != before_b and now_a == now_b
            if copied and (looks > 0 or now_a == before_a or now_b == before_b):
                raise UniEPError(
                    f"call {number}: ranks {b} and {a} hold different experts, but their weights have become equal: a "
                    "wrapper, an optimizer or a loader treated them as copies of one parameter "
                    "(DistributedDataParallel, fully_shard, ZeroRedundancyOptimizer, broadcast_from_rank0). Experts "
                    "are lost; load or initialise them again, and use uniep.integrations.torch: data_parallel or "
                    "fully_shard_experts, and TrainState"
                )
            if copied:
                tell_alike()


@functools.cache  # once, however many layers and ranks
def tell_alike() -> None:
    log.warning(
        "ranks of an EP group hold the same experts in the first call of a layer, so fewer than num_experts differ.  "
        "That is right after upcycling.  But random numbers drawn with the same seed on all ranks give each rank the "
        "same experts: initialise by reset_parameters() of Experts, or draw all num_experts and keep those from "
        "first_expert on"
    )


def check_capacity(counts_RE: Tensor, cfg: MoEConfig) -> None:
    """Raise CapacityError if any rank would receive more than cfg.max_rows rows.  counts_RE: RoutingPlan's."""
    if cfg.max_rows is None:
        return
    rows = counts_RE.sum(0).view(counts_RE.shape[0], -1).sum(1).tolist()
    for rank, needed in enumerate(rows):
        if needed > cfg.max_rows:
            raise CapacityError(
                f"rank {rank} needs {needed} rows but max_rows is {cfg.max_rows}; raise max_rows in MoEConfig, or pass "
                "None to allocate exactly"
            )

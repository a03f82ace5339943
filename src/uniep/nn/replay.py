"""Record which experts tokens were sent to, and send them there again: `record_routing`, `replay_routing`.

For reinforcement learning: a policy is trained with the routing with which it was sampled, at any EP size, in other
batches, under activation checkpointing.  Only the choice of experts is replayed; weights come from the current router,
with their gradients.  Source: rollout routing replay, arXiv 2510.11370.

    with uniep.nn.record_routing(model) as record: ...       # calls of any number of tokens, one after another
    batch = record.gather(group).take(index)                 # the tokens of a micro-batch, in its order
    with uniep.nn.replay_routing(model, batch): loss = ...; loss.backward()
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from uniep.errors import ConfigError, InputError
from uniep.nn.bits import bits_digest
from uniep.nn.router_ops import is_recomputing
from uniep.nn.wrappers import unwrapped


class RoutingRecord:
    """The choices of every layer: `ids`, {name of the layer in the model: (N, K) int32}, in the order of its calls.
    Names are without what torch.compile, FSDP1 and checkpoint_wrapper put into them.

    A plain value: `RoutingRecord(ids)` makes one from tensors, such as those of an inference engine or a file.
    """

    def __init__(self, ids: dict[str, Tensor] | None = None) -> None:
        self._parts: dict[str, list[Tensor]] = {name: [t.detach().to(torch.int32)] for name, t in (ids or {}).items()}
        self.seen: dict[int, Tensor] = {}  # by id of a layer, which is of one model of several: digest of its inputs

    @property
    def ids(self) -> dict[str, Tensor]:
        return {name: self.of(name) for name in self._parts}

    def of(self, name: str) -> Tensor:
        """The choices of one layer: (N, K) int32."""
        parts = self._parts[name]
        if len(parts) > 1:
            parts[:] = [torch.cat(parts)]
        return parts[0]

    def append(self, name: str, ids_TK: Tensor) -> None:
        self._parts.setdefault(name, []).append(ids_TK.detach().to(torch.int32, copy=True))

    def take(self, index: Tensor | slice) -> RoutingRecord:
        """The record of these tokens, in this order."""
        return RoutingRecord({name: ids[index] for name, ids in self.ids.items()})

    def split(self, num_tokens: int | Sequence[int]) -> list[RoutingRecord]:
        """Records of consecutive tokens, such as micro-batches, as torch.split."""
        sizes = num_tokens if isinstance(num_tokens, int) else list(num_tokens)
        parts = {name: ids.split(sizes) for name, ids in self.ids.items()}
        return [RoutingRecord(dict(zip(parts, part, strict=True))) for part in zip(*parts.values(), strict=True)]

    def gather(self, group: dist.ProcessGroup | None) -> RoutingRecord:
        """The record of all ranks' tokens, in rank order, on every rank.  Collective; the result is on the CPU."""
        if group is None:
            return RoutingRecord(self.ids)
        mine = {name: ids.cpu() for name, ids in self.ids.items()}
        every: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(every, mine, group=group)
        return RoutingRecord.cat([RoutingRecord(theirs) for theirs in every])

    @staticmethod
    def cat(records: Sequence[RoutingRecord]) -> RoutingRecord:
        """Concatenates records of the same layers along tokens."""
        names = [list(record._parts) for record in records]
        if any(sorted(other) != sorted(names[0]) for other in names):
            raise ConfigError(f"the records are of different layers ({names}); concatenate those of one model")
        return RoutingRecord({name: torch.cat([record.of(name) for record in records]) for name in names[0]})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RoutingRecord):
            return NotImplemented
        mine, theirs = self.ids, other.ids
        return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"RoutingRecord({ {name: tuple(ids.shape) for name, ids in self.ids.items()} })"


class Tape:
    """A layer's hook around routing.  This one stays after replays: it refuses to recompute their forwards.

    before: the tape that was active before, and is again afterwards.  `outstanding`: digests of the inputs of the last
    replayed forwards.
    """

    def __init__(self, before: Tape | None = None) -> None:
        self.before = before
        self.outstanding: Tensor | None = None
        self._next = 0
        self._refused: Tensor | None = None

    def given(self, x_TD: Tensor, top_k: int) -> Tensor | None:
        """The choice for a call with these inputs, or None."""
        self._refused = None
        if self.outstanding is None or not len(x_TD):
            return None
        now = _digest(x_TD)
        if not is_recomputing():
            self.forget(now)
            return None
        self._refused = (self.outstanding == now).any()
        if x_TD.device.type != "cuda" and bool(self._refused):
            raise ConfigError(
                "a forward that was replayed is run again in a backward, but no replay is active; keep the backward "
                "inside the replay_routing of its forward, or enter it again with the same record"
            )
        return None

    def keep(self, ids_TK: Tensor) -> Tensor:
        """The router's choice -> the choice that the call uses."""
        return ids_TK if self._refused is None else torch.where(self._refused, _NO_EXPERT, ids_TK)

    def note(self, ids_TK: Tensor) -> None:
        """Passes the choice on to recordings around a replay."""
        if self.before is not None:
            self.before.note(ids_TK)

    def remember(self, now: Tensor) -> None:
        """Note that a forward with these inputs is replayed."""
        if self.outstanding is None:
            with torch.inference_mode(False):  # written to in later calls, whatever their mode
                self.outstanding = torch.full((_REMEMBERED,), -1, dtype=torch.int64, device=now.device)
        self.outstanding[self._next % _REMEMBERED] = now
        self._next += 1

    def forget(self, now: Tensor) -> None:
        """Note that a forward with these inputs is not replayed."""
        if self.outstanding is not None:
            self.outstanding.masked_fill_(self.outstanding == now, -1)

    def is_needed(self) -> bool:
        """Whether a replay was active below it."""
        return type(self) is not Tape or self.outstanding is not None

    def root(self) -> Tape:
        return self if self.before is None else self.before.root()


class _Recording(Tape):
    before: Tape

    def __init__(self, name: str, record: RoutingRecord, before: Tape) -> None:
        super().__init__(before)
        self.name, self.record = name, record

    def given(self, x_TD: Tensor, top_k: int) -> Tensor | None:
        return self.before.given(x_TD, top_k)

    def keep(self, ids_TK: Tensor) -> Tensor:
        if not is_recomputing():
            self.record.append(self.name, ids_TK)
        return self.before.keep(ids_TK)

    def note(self, ids_TK: Tensor) -> None:
        super().note(ids_TK)
        if not is_recomputing():
            self.record.append(self.name, ids_TK)


class _Replaying(Tape):
    """The choice of one call, for its forward and its recomputation, whose inputs `record.seen` knows by `layer`."""

    def __init__(self, name: str, layer: int, record: RoutingRecord, before: Tape) -> None:
        super().__init__(before)
        self.name, self.layer, self.ids_TK, self.seen, self.called = name, layer, record.of(name), record.seen, False

    def given(self, x_TD: Tensor, top_k: int) -> Tensor | None:
        wanted = (x_TD.shape[0], top_k)
        if tuple(self.ids_TK.shape) != wanted:
            raise InputError(
                f"the record of {self.name} has {tuple(self.ids_TK.shape)} choices (tokens, top_k), but the call has "
                f"{wanted}; replay the tokens of this call: RoutingRecord.take, split"
            )
        ids_TK = self.ids_TK.to(x_TD.device, torch.int64)
        now = _digest(x_TD)
        if not is_recomputing():
            if self.called:
                raise ConfigError(
                    f"{self.name} is called a second time in one replay_routing, which is one micro-batch; enter one "
                    "for each, with its part of the record (RoutingRecord.split)"
                )
            self.called, self.seen[self.layer] = True, now
            if len(x_TD):
                self.root().remember(now)
            return ids_TK
        seen = self.seen.get(self.layer)
        same = torch.zeros((), dtype=torch.bool, device=now.device) if seen is None else seen == now
        if x_TD.device.type != "cuda" and not bool(same):
            raise ConfigError(
                f"a forward of {self.name} is run again with other inputs than the one that this record was replayed "
                "for; enter the replay_routing of the forward that this backward belongs to"
            )
        return torch.where(same, ids_TK, _NO_EXPERT)

    def keep(self, ids_TK: Tensor) -> Tensor:
        self.note(ids_TK)
        return ids_TK


_NO_EXPERT = -2
"""An invalid id, which the call refuses: so no host read is needed here."""
_REMEMBERED = 64
_COLUMNS = 64


def _digest(x_TD: Tensor) -> Tensor:
    """() int64: digest of the bits of the first columns of x."""
    return bits_digest(x_TD.detach()[:, :_COLUMNS])


@contextlib.contextmanager
def _tapes(tapes: dict[Any, Tape]) -> Iterator[None]:
    """Give each layer a tape while the `with` block is open."""
    for layer, tape in tapes.items():
        layer.tape = tape
    try:
        yield
    finally:
        for layer, tape in tapes.items():
            before = tape.before
            layer.tape = before if before is not None and before.is_needed() else None


def _layers(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {
        unwrapped(name): module for name, module in model.named_modules() if "tape" in vars(module)
    }
    if not found:
        raise ConfigError(f"{type(model).__name__} has no uniep.nn.MoE, so no routing to record or replay")
    for layer in found.values():
        layer.tape = layer.tape or Tape()
    return found


@contextlib.contextmanager
def record_routing(model: nn.Module) -> Iterator[RoutingRecord]:
    """Record the choice of every `uniep.nn.MoE` of the model, on this rank, while the `with` block is open.

    Forwards recomputed by activation checkpointing are not recorded again.  No host read; 4 bytes per slot.
    """
    record = RoutingRecord()
    layers = _layers(model)
    with _tapes({layer: _Recording(name, record, layer.tape) for name, layer in layers.items()}):
        yield record


@contextlib.contextmanager
def replay_routing(model: nn.Module, record: RoutingRecord) -> Iterator[None]:
    """Send the tokens of one micro-batch where `record` says: one forward of every layer, and its backward.

    The backward may come later, as in a pipeline: enter this again around it, with the same record object.  A
    recomputed forward (activation checkpointing) uses the same choice.  A recomputed forward of another micro-batch, or
    one while no replay is active, raises ConfigError (on GPUs InputError of the call: no host read here).

    record: the choices of this rank's tokens, in the order of the call; on any device.  Works at any EP size, since ids
        are global.
    Raises ConfigError, before anything runs, if the record is of other layers than the model's; InputError on every
    rank, in the call, if one rank's record has another number of tokens.
    """
    layers = _layers(model)
    if sorted(layers) != sorted(record._parts):
        raise ConfigError(
            f"the model's layers are {sorted(layers)}, but the record is of {sorted(record._parts)}; rename its "
            "layers: RoutingRecord({name: ids})"
        )
    with _tapes({layer: _Replaying(name, id(layer), record, layer.tape) for name, layer in layers.items()}):
        yield

"""Calls of the Hopper backend that are made again: the first time as they are written, the second time recorded, from
then on by their records (`uniep.launch.records`), which take the host a fraction of the time.

A call is made again if it has the same key: tokens, rows, dtypes, strides, gradients that are needed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from uniep.backends.base import LayerTag
from uniep.backends.hopper.calls import identity
from uniep.launch.driver import watching
from uniep.launch.records import NothingElse, RecordedCall, Recording
from uniep.weights import ExpertWeights

if TYPE_CHECKING:
    from uniep.backends.hopper.link import Link

log = logging.getLogger("uniep")

MOST_CALLS = 64  # of a Workspace; calls of any number of tokens may come
SEEN = None  # once


class RecordedCalls:
    """Of one Workspace.  known: by key; SEEN; or why there is none."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.known: dict[Hashable, RecordedCall | str | None] = {}

    def call(
        self, key: Hashable, given: Sequence[Tensor], layer: LayerTag, has_ids: bool,
        perform: Callable[[], list[Any]],
    ) -> list[Any]:  # fmt: skip
        """What `perform` returns, tensors or None, which makes a call, with ids or without; by its record, if known.

        given: all tensors that it uses and that are not the Workspace's.
        """
        link, addresses = self.link, [t.data_ptr() for t in given]
        if not self._may_record(layer) or any(address & 15 for address in addresses):
            return perform()
        if key not in self.known:
            if len(self.known) >= MOST_CALLS:
                self.known.clear()
            self.known[key] = SEEN
            return perform()
        recorded = self.known[key]
        if recorded is SEEN:
            return self._record(key, given, perform)
        if isinstance(recorded, str):
            return perform()
        link.planner.begin(layer, has_ids)
        return recorded.run(self._streams(), addresses, identity(layer), link.device)

    def _may_record(self, layer: LayerTag) -> bool:
        link = self.link
        return (
            link.device.type == "cuda"
            and (layer.digests is None or link.num_ranks == 1)
            and link.trace is link.phases is None
            and not torch.cuda.is_current_stream_capturing()
        )

    def _record(self, key: Hashable, given: Sequence[Tensor], perform: Callable[[], list[Any]]) -> list[Any]:
        recording = Recording(given, self.link.lasting(), self._streams())
        with watching(recording), NothingElse(recording):
            outputs = perform()
        recording.returns(outputs)
        if recording.why_not:
            log.warning("calls like this one stay slower on the host: %s", recording.why_not)
            self.known[key] = recording.why_not
        else:
            self.known[key] = RecordedCall(recording)
        return outputs

    def _streams(self) -> tuple[int, int, int]:
        link = self.link
        current = torch._C._cuda_getCurrentRawStream(link.device.index)
        return current, link.side.cuda_stream, link.copies.cuda_stream


def layout_of(experts: ExpertWeights) -> tuple[Hashable, ...]:
    """What launches depend on, but for addresses."""
    w13, w2 = experts.w13, experts.w2
    distance = w13[1].data_ptr() - w13[0].data_ptr() if len(w13) == 2 else 0
    lora = None if experts.lora is None else (experts.adapted, experts.lora.scale)
    shapes = (t.shape for t in experts.factors)
    return experts.layout, distance, *(t.stride() for t in w13), *(t.stride() for t in w2), lora, *shapes

"""What a Workspace needs from a backend, and what one call hands over."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from torch import SymInt, Tensor

from uniep.errors import UniEPError
from uniep.routing import RoutingPlan
from uniep.schedule import Schedule
from uniep.way import Way
from uniep.weights import ExpertWeights

MAIN_GRAD = "opt-in per call: the fp32 gradient is added or written once; else gradients are returned"
"""What every backend's `report` says of main_grad."""


def kept_for_backward(schedule: Schedule) -> dict[str, str]:
    """What every backend's `report` says of what a backward keeps or makes again."""
    return {
        "received": "dispatched again in backward" if schedule.received == "again" else "kept for backward",
        "gate and up": f"{schedule.preactivation} for backward",
    }


@dataclasses.dataclass(frozen=True)
class LayerTag:
    """What a call says about its layer, so that ranks notice if they are in different layers.

    number: the layer's number, the same on every rank (`nn.LayerRecord`); 0: not known, matches every number.
    digests: (3,) int64 on the Workspace's device, in some calls only: the digest of some of this rank's expert weights
        at the previous look, the digest now, and the number of looks before this call since the weights were made or
        loaded.
    draw: 64 bits from which this rank's experts were initialised, the same on every rank; 0: not known.
    """

    number: int = 0
    digests: Tensor | None = None
    draw: int = 0


UNKNOWN_LAYER = LayerTag()


@dataclasses.dataclass(frozen=True)
class Inputs:
    """One call's tensors on this rank: x (T, D), ids (T, K) any integer dtype, weights (T, K) fp32."""

    x_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    experts: ExpertWeights
    layer: LayerTag = UNKNOWN_LAYER


@dataclasses.dataclass(frozen=True)
class Needs:
    """Which gradients backward must compute; what is not needed is not computed."""

    x: bool = True
    weights: bool = True
    w13: bool = True
    w2: bool = True
    biases: bool = True


@dataclasses.dataclass(frozen=True)
class MainGrads:
    """Where backward stores the fp32 gradients of experts: in the parameters' layout, contiguous and 16-byte aligned.

    accumulate: each finished gradient is added to the stored value; else it replaces that value.
    apart: blocks of source ranks are not added; each tensor has one more dimension in front, for the blocks.
    biases: where those of b13 and b2 go, never added; (): they are `ExpertGradients.biases`, in the layer's dtype.
    Parameters whose gradients are not needed are left out, w13, w2 or biases as a whole.  With LoRA, w13 and w2 are the
    gradients of the factors, `ExpertWeights.trained`.
    """

    w13: tuple[Tensor, ...]
    w2: tuple[Tensor, ...]
    accumulate: bool
    apart: bool = False
    biases: tuple[Tensor, ...] = ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them."""
        return *self.w13, *self.w2, *self.biases

    def of_block(self, block: int) -> MainGrads:
        """Where the gradient of a block goes that is kept apart."""
        w13, w2, biases = (tuple(t[block] for t in ts) for ts in (self.w13, self.w2, self.biases))
        return MainGrads(w13, w2, self.accumulate, biases=biases)

    def clear(self) -> None:
        """Write zeros for experts without rows, unless gradients are added."""
        if not self.accumulate:
            for t in self.tensors:
                t.zero_()


@dataclasses.dataclass(frozen=True)
class ExpertGradients:
    """dx (T, D), dweights (T, K) fp32, experts (with LoRA: factors) in the parameters' own layout; None where not
    needed, and for experts with `MainGrads`.  biases: (db13, db2), or () without biases, where not needed, and where
    `MainGrads` has them."""

    x: Tensor | None
    weights: Tensor | None
    w13: tuple[Tensor, ...] | None
    w2: tuple[Tensor, ...] | None
    biases: tuple[Tensor, ...] = ()


class Backend(Protocol):
    """Executes calls of one Workspace.  route, forward, backward, refuse and prepare are collective: all ranks of
    the group call them in the same order, including ranks without tokens."""

    name: str

    def route(self, ids_TK: Tensor) -> RoutingPlan:
        """This rank's plan, made from the ids of all ranks.  Raises InputError on every rank."""
        ...

    def forward(self, inputs: Inputs, save: bool) -> tuple[Tensor, list[Tensor]]:
        """(y (T, D), what backward needs: fresh tensors that own their memory; [] unless `save`)."""
        ...

    def backward(
        self, dy_TD: Tensor, inputs: Inputs, saved: list[Tensor], needs: Needs, main_grads: MainGrads | None = None,
        blocks: int = 1,
    ) -> ExpertGradients:  # fmt: skip
        """Gradients of one earlier forward; `saved` is not modified, so it may run twice.

        main_grads: where the gradients of experts go; None: they are returned.
        blocks: number of blocks of consecutive source ranks; a gradient of experts is summed over the rows of each
            block in fp32, and these sums are added in ascending order."""
        ...

    def refuse(self, error: UniEPError) -> None:
        """This rank's inputs are bad: tell all ranks, so that every other rank raises an error of the same class and
        text.

        On this rank it may raise `error` or return; if it returns, the caller raises."""
        ...

    def trimmed(self, saved: list[Tensor]) -> list[Tensor]:
        """Views of what a forward saved whose shapes depend on its inputs alone, not on earlier calls, as checkpointing
        asks for.  A backward takes these, or copies of them, in place of what they are views of."""
        ...

    def fake_saved(self, num_tokens: int | SymInt, x_TD: Tensor, new_size: Callable[[], SymInt]) -> list[Tensor]:
        """Shapes and dtypes of forward's saved tensors, for torch.compile; `new_size` makes an unknown size."""
        ...

    def way_of(self, tokens: int, lora: tuple[str, ...] = ()) -> Way:
        """Of a call with so many tokens of this rank.  lora: `Way.lora`."""
        ...

    def prepare(self) -> None:
        """Compile and allocate ahead of the first call."""
        ...

    def check(self) -> None:
        """Raise what earlier calls deferred."""
        ...

    def look(self) -> None:
        """Raise PeerTimeoutError if a peer will not come to the next call, as far as the host knows."""
        ...

    def waited(self) -> Tensor | None:
        """(2,) int64: nanoseconds in which this rank has stood still, since the Workspace was made, for ranks that had
        not entered a call, and for their tokens and results.  On the Workspace's device; the backend goes on counting
        in it, in the order of the current stream.  None: not measured."""
        ...

    def report(self) -> dict[str, str]:
        """What is active, and why the rest is not: one line each."""
        ...

    def close(self) -> None:
        """Free what the backend holds.  Idempotent."""
        ...


def aligned(matrix: Tensor) -> Tensor:
    """`matrix` at an address that is a multiple of 16 bytes: kernels copy 16 bytes at once."""
    return matrix if matrix.data_ptr() % 16 == 0 else matrix.clone()

"""Operators of one's own on rows of the experts: what they are, and where in a call they may stand.

They are given to `Workspace(operators=)`, and run on every backend: `uniep.stages` has a stage for each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from uniep.dimension import GPU
from uniep.errors import ConfigError


class Place(NamedTuple):
    """Behind a product: in which direction, which rows are there, the attribute of a call that has them, and what an
    operator there costs."""

    direction: Literal["forward", "backward"]
    rows: str
    memory: str
    cost: str


PLACES = {
    "gate_up": Place(
        "forward", "the activation (N, ffn), as the down product reads it", "act_NF",
        "the down product runs behind gate_up",
    ),
    "down": Place(
        "forward", "results (N, hidden), before they return to their tokens", "results_ND",
        "rows return by a pass of their own",
    ),
    "down_grad": Place(
        "backward", "dO W2 (N, ffn) in fp32, before the activation's gradient", "raw_NF",
        "the activation's gradient is a pass behind the product",
    ),
    "gate_up_grad": Place(
        "backward", "dX of each row (N, hidden), before it returns to its token", "results_ND",
        "rows return by a pass of their own",
    ),
}  # fmt: skip
TAKEN = frozenset((
    "enter", "send", "plan", "send_others", "push", "pull", "dispatch", "expand", "gate_up_shrink", "gate_up",
    "activation", "keep", "down_shrink", "down", "group_sum", "push_rows", "combine", "dispatch_again", "recompute",
    "down_grad_shrink", "down_grad", "activation_gradient", "dweight", "gate_up_grad_shrink", "gate_up_grad",
    "bias_gradient", "down_wgrad", "gate_up_wgrad", "collect", "lists", "forward", "backward", "return", "gate",
))  # fmt: skip
"""Names of stages and operators of the layer."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class RowOperator:
    """An operator on rows of the experts, behind one of the products in `PLACES`.

    name: a lower-case identifier of its own.  after: the product.
    rows: a torch function (values_NX, valid_N) -> None that works in place.  values (N, X): the rows at this place, in
        cfg.dtype, or fp32 after "down_grad".  valid (N,) bool: which of them belong to a token.  The others have
        undefined values, and are set to zero if the operator changes values.  Each row must depend on itself alone,
        since N differs: on the CPU it is a tile of rows, on GPUs all allocated rows.  It must not wait for the GPU.
        On the CPU several threads call it at once, unless it only reads.
    body: a @triton.jit function values (ROWS, X) fp32 -> the same, X padded to a power of two by zeros.  `hopper`
        launches it instead of `rows` over all valid rows, and rounds its results to the dtype of the rows.  Other
        backends use `rows`.
    changes: whether values change.  If not, it may only read them, and has no body.

    One behind "gate_up_grad" need not run where no gradient of x is wanted: `hopper` makes these rows all the same.
    An operator that changes rows of the forward has no gradient: run such calls under torch.no_grad.  Raises
    ConfigError.
    """

    name: str
    after: str
    rows: Callable[[Tensor, Tensor], None] | None = None
    body: Any = None
    changes: bool = True
    _turn: Any = dataclasses.field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        named = f"operator {self.name!r}"
        if not isinstance(self.name, str) or not re.fullmatch("[a-z][a-z0-9_]*", self.name) or self.name in TAKEN:
            raise ConfigError(f"{named} needs another name: lower-case letters, digits, _, and none of the layer's own")
        if self.after not in tuple(PLACES):
            places = "; ".join(f"{after!r}: {place.rows}" for after, place in PLACES.items())
            raise ConfigError(f"{named} stands after {self.after!r}; it may stand after {places}")
        if self.rows is None and self.body is None:
            raise ConfigError(f"{named} does nothing; give it rows, a torch function, or body, a Triton function")
        if self.rows is not None and not callable(self.rows):
            raise ConfigError(f"{named} has rows={self.rows!r}; it must be a function (values, valid) -> None")
        if self.body is not None and not hasattr(self.body, "fn"):
            raise ConfigError(f"{named} has body={self.body!r}; it must be a @triton.jit function values -> values")
        if self.body is not None and not self.changes:
            raise ConfigError(f"{named} has a body, whose results are stored, but changes=False; give it rows instead")

    @property
    def direction(self) -> str:
        return PLACES[self.after].direction

    @property
    def described(self) -> tuple[str, str, bool, bool, bool]:
        """What ranks have to have alike, and can compare."""
        return self.name, self.after, self.rows is not None, self.body is not None, self.changes

    def apply(self, values_NX: Tensor, valid_N: Tensor) -> None:
        """Call `rows`."""
        assert self.rows is not None
        with torch.no_grad(), contextlib.nullcontext() if self.changes else self._turn:
            self.rows(values_NX, valid_N)
            if self.changes:
                values_NX.masked_fill_(~valid_N[:, None], 0)


def refuse_operators(operators: Sequence[RowOperator], backend: str) -> None:
    """Raise ConfigError unless `backend` can run them."""
    if not isinstance(operators, Sequence):
        raise ConfigError(f"operators is a {type(operators).__name__}; pass a list of uniep.RowOperator")
    for number, op in enumerate(operators):
        if not isinstance(op, RowOperator):
            raise ConfigError(f"operators[{number}] is a {type(op).__name__}; pass a uniep.RowOperator")
        if op.name in [other.name for other in operators[:number]]:
            raise ConfigError(f"there are two operators {op.name!r}; give each a name of its own")
        if op.rows is None and backend != GPU:
            raise ConfigError(
                f"operator {op.name!r} has a Triton body alone, which backend {backend!r} does not run; give it rows, "
                "a torch function, too"
            )

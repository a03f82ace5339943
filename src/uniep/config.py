"""What an expert-parallel MoE layer is: shapes, dtype, and the choices that decide its numerics.

Everything that changes results lives in `MoEConfig`; everything that only changes speed lives in
`schedule.Schedule`.  Both are frozen.
"""

from __future__ import annotations

import bisect
import dataclasses
import difflib
import functools
import math
from typing import Any, Literal, TypeVar

import torch

from uniep.activation import ACTIVATIONS
from uniep.errors import ConfigError, UnsupportedError

ROW_TILES = (64, 128)
"""Heights that row tiles may have."""

ROW_ALIGN = ROW_TILES[-1]
"""Rows are allocated as if every expert's segment were a multiple of this, whatever the tiles are; and so many rows
make a block of a bias's gradient."""

COLUMN_GROUP = 64
"""Columns summed by one adjacent-pairs tree in d(weight); no tile is narrower."""

MAX_INDEX = 2**31 - 1
"""Rows, slots, experts and columns are int32 in plans and kernels."""

MAX_BYTES = 2**63 - 1
"""PyTorch counts the bytes of a tensor in int64."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


ELSEWHERE = {
    "hidden": ("hidden_size", "d_model", "dim", "model_dim"),
    "ffn": (
        "intermediate_size",
        "moe_intermediate_size",
        "ffn_size",
        "ffn_hidden_size",
        "moe_ffn_hidden_size",
        "ffn_dim",
    ),
    "num_experts": ("n_experts", "num_local_experts", "n_routed_experts", "num_moe_experts", "experts"),
    "top_k": ("num_experts_per_tok", "topk", "k", "moe_router_topk", "moe_top_k"),
    "max_tokens_per_rank": ("max_tokens", "num_tokens", "tokens"),
    "activation": ("hidden_act", "act"),
    "activation_limit": ("swiglu_limit", "limit"),
}
"""Names of the fields of `MoEConfig` in other programs, for the error."""

_T = TypeVar("_T")


def _names_keywords(cls: type[_T]) -> type[_T]:
    """A keyword that is no field raises ConfigError with the field that is probably meant."""
    made, known = cls.__init__, [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type, misc]
    meant = {theirs: ours for ours, names in ELSEWHERE.items() for theirs in names}

    @functools.wraps(made)
    def init(self: Any, *args: Any, **given: Any) -> None:
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = meant.get(name, near[0] if near else "")
                raise ConfigError(
                    f"{cls.__name__} has no {name!r}{f'; did you mean {hint!r}?' if hint else '.'}  Its fields: "
                    f"{', '.join(known)}"
                )
        made(self, *args, **given)

    cls.__init__ = init  # type: ignore[method-assign, misc]
    return cls


@_names_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Shape and numerics of one MoE layer (identical on every rank of the expert-parallel group).

    hidden: D, width of a token.  ffn: F, width of one expert.  num_experts: E, total over all ranks.
    top_k: K, slots per token (ids of -1 leave a slot unused).
    max_tokens_per_rank: largest T any rank passes in one call; T may differ per rank and per call.
    activation: of a row's gate and up, the halves of h = x W13^T, or of h itself; see `activation.ACTIVATIONS`.
    activation_limit: None, or the largest gate, and the largest |up|, that the activation takes; larger ones are
        clamped, and their gradients are zeros.  Of gated activations only.
    bias: each expert has biases b13, of h, and b2, of its result (`uniep.moe`).
    dtype: of x, the expert parameters and y.  Routing weights are always fp32.
    weight_at: where the routing weight is applied.  "output": to the expert's result, in fp32, on the
        token's own rank (HF, torchtitan).  "activation": to the activation before the second GEMM
        (Megatron).  The two round differently.
    combine_groups: None: a token's K results are added in one sum on its own rank.  G: the experts form G contiguous
        groups, and the results of one group are added, and rounded, on the experts' rank: fewer rows travel back.
        Rounds differently, so results differ.  The same for every EP size that divides G; refused for others.
    gradient_shards: 1: an expert's weight gradient is one fp32 chain over its rows in the EP group.  G: the source
        ranks of all EP groups with copies of the same experts (`Workspace(copies=)`) form G blocks of consecutive
        ranks.  Each block is a chain of its own from 0, and blocks are added in fp32, ascending; so are the gradients
        of biases.  Rounds differently, so expert gradients differ.  The same for every split of the ranks into EP and
        copies; see `check_group`.
    max_rows: most routed rows (not counting alignment) one rank may receive in one call.  None: rows are allocated as
        needed, with one host read per call.  A number: no host read (CUDA graphs); more rows raise `CapacityError`,
        tokens are never dropped.

    Raises ConfigError or UnsupportedError at construction, naming the value and the limit, or a keyword that is no
    field.
    """

    hidden: int
    ffn: int
    num_experts: int
    top_k: int
    max_tokens_per_rank: int
    activation: str = "swiglu"
    activation_limit: float | None = None
    bias: bool = False
    dtype: torch.dtype = torch.bfloat16
    weight_at: Literal["output", "activation"] = "output"
    combine_groups: int | None = None
    gradient_shards: int = 1
    max_rows: int | None = None

    def __post_init__(self) -> None:
        counts = ("hidden", "ffn", "num_experts", "top_k", "max_tokens_per_rank", "gradient_shards")
        for name in (*counts, "combine_groups", "max_rows"):
            value = getattr(self, name)
            if name in ("combine_groups", "max_rows") and value is None:
                continue
            if reason := refused_number(value, 1):
                raise ConfigError(f"MoEConfig.{name} is {reason}")
        if self.top_k > self.num_experts:
            raise ConfigError(
                f"MoEConfig.top_k is {self.top_k} but there are only num_experts={self.num_experts}; "
                "lower top_k or add experts"
            )
        if self.activation not in tuple(ACTIVATIONS):
            names = ", ".join(map(repr, ACTIVATIONS))
            raise UnsupportedError(
                f"MoEConfig.activation is {self.activation!r}; supported: {names}. Others are refused rather than "
                "approximated"
            )
        if (limit := self.activation_limit) is not None:
            if not isinstance(limit, int | float) or isinstance(limit, bool) or not 0 < limit < math.inf:
                raise ConfigError(
                    f"MoEConfig.activation_limit is {limit!r}; it must be a finite number above 0, or None for no limit"
                )
            if not self.gated:
                raise UnsupportedError(
                    f"MoEConfig.activation_limit is {limit!r} but activation {self.activation!r} has no gate; pass "
                    "activation_limit=None"
                )
        if not isinstance(self.bias, bool):
            raise ConfigError(f"MoEConfig.bias is {self.bias!r}; it must be True or False")
        if not isinstance(self.dtype, torch.dtype) or self.dtype not in DTYPES:
            names = ", ".join(str(d) for d in DTYPES)
            raise ConfigError(f"MoEConfig.dtype is {self.dtype!r}; supported: {names}")
        if self.weight_at not in ("output", "activation"):
            raise ConfigError(f"MoEConfig.weight_at is {self.weight_at!r}; it must be 'output' or 'activation'")
        if self.combine_groups is not None and self.num_experts % self.combine_groups:
            fits = _listed(divisors(self.num_experts), self.combine_groups)
            raise ConfigError(
                f"MoEConfig.combine_groups is {self.combine_groups}, which does not divide num_experts="
                f"{self.num_experts}; use one of {fits}, or None for one sum over all of a token's slots"
            )
        _refuse_bytes("w13 of all experts", self.num_experts * self.h_columns, self.hidden)

    def experts_per_rank(self, ep_size: int) -> int:
        """e = E / R.  Raises ConfigError when R does not divide E."""
        if reason := refused_number(ep_size, 1):
            raise ConfigError(f"ep_size is {reason}")
        if self.num_experts % ep_size:
            fits = divisors(self.num_experts)
            below = max(r for r in fits if r < ep_size)
            raise ConfigError(
                f"num_experts={self.num_experts} cannot be split evenly over {ep_size} ranks; use an EP group "
                f"of {below} ranks (these sizes fit: {_listed(fits, ep_size)}), or make num_experts a multiple of "
                f"{ep_size}"
            )
        return self.num_experts // ep_size

    def wanted(self, ep_size: int) -> float:
        """Share of a rank's tokens that a given other rank needs, for uniform routing."""
        others, none = self.num_experts - self.experts_per_rank(ep_size), 1.0
        for slot in range(self.top_k):  # none: probability that no expert of the token is on that rank
            none *= max(others - slot, 0) / (self.num_experts - slot)
            if none < 1e-18:
                return 1.0
        return 1 - none

    def check_group(self, ep_size: int, copies: int = 1) -> None:
        """Raise ConfigError where `ep_size` ranks, in each of `copies` EP groups with the same experts, cannot run
        this."""
        self.experts_per_rank(ep_size)
        self._check_shards(ep_size, copies)
        groups = self.combine_groups
        if groups is not None and groups % ep_size:
            fits = _listed(divisors(groups), ep_size)
            raise ConfigError(
                f"combine_groups={groups} cannot be split evenly over {ep_size} ranks, and a group on two ranks "
                f"would be summed differently; use an EP group of {fits} ranks, or combine_groups a multiple of "
                f"{ep_size} that divides num_experts={self.num_experts}"
            )
        slots = ep_size * self.max_tokens_per_rank * self.top_k
        if slots > MAX_INDEX:
            raise ConfigError(
                f"{ep_size} ranks * max_tokens_per_rank={self.max_tokens_per_rank} * top_k={self.top_k} are {slots} "
                f"slots; plans count up to {MAX_INDEX}. Lower max_tokens_per_rank"
            )
        rows = slots + self.num_experts * ROW_ALIGN
        _refuse_bytes("the experts' tokens", rows, max(self.hidden, self.h_columns))

    @property
    def gated(self) -> bool:
        """Whether h has two halves, gate and up."""
        return ACTIVATIONS[self.activation].gated

    @property
    def h_columns(self) -> int:
        """Columns of h = x W13^T: 2F, or F of an activation without a gate."""
        return (1 + self.gated) * self.ffn

    def _check_shards(self, ep_size: int, copies: int) -> None:
        shards = self.gradient_shards
        if shards % copies == 0 and ep_size % (shards // copies) == 0:
            return
        fits = _listed([copies * d for d in divisors(ep_size)], shards)
        raise ConfigError(
            f"gradient_shards={shards} cannot be blocks of whole ranks of {copies} EP groups of {ep_size} ranks, each "
            f"with equally many blocks; use gradient_shards of {fits}, or other sizes of the EP group and of the "
            "group of its copies (Workspace(copies=))"
        )

    @property
    def return_slots(self) -> int:
        """Most rows that return to a token: one per slot, or one per combine group that the token can use."""
        return self.top_k if self.combine_groups is None else min(self.top_k, self.combine_groups)

    @property
    def experts_per_group(self) -> int:
        """Consecutive experts whose results are added together before they travel."""
        return self.num_experts // (self.combine_groups or self.num_experts)

    @property
    def receive_block(self) -> int:
        """Receive slots per peer: max_tokens_per_rank, aligned so that arrival chunks never span peers."""
        return align_rows(self.max_tokens_per_rank)

    def receive_slots(self, ep_size: int) -> int:
        """Receive slots of one rank: every token of every other rank once (deduplicated)."""
        return (ep_size - 1) * self.receive_block


def refused_number(value: object, least: int, most: int = MAX_INDEX) -> str:
    """Why `value` is not an int from `least` to `most`, starting with the value; empty if it is one."""
    if not isinstance(value, int) or isinstance(value, bool):
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        return f"{shown}, a {type(value).__name__}; it must be an int of at least {least}"
    if least <= value <= most:  # Dynamo traces this, but no text
        return ""
    shown = str(value) if abs(value) < 10**30 else f"a number of {value.bit_length()} bits"
    return f"{shown}; it must be at least {least}" if value < least else f"{shown}; it must be at most {most}"


def divisors(number: int) -> list[int]:
    """All divisors, ascending, in time proportional to the square root."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def _listed(fits: list[int], near: int, most: int = 16) -> str:
    """`fits` as text, ascending; if there are many, those around `near`."""
    first = 0
    if len(fits) > most:
        first = min(max(bisect.bisect(fits, near) - most // 2, 0), len(fits) - most)
    shown = ", ".join(map(str, fits[first : first + most]))
    return f"{'..., ' if first else ''}{shown}{', ...' if first + most < len(fits) else ''}"


def _refuse_bytes(what: str, rows: int, width: int) -> None:
    """Raise ConfigError where an fp32 tensor of this shape, such as a gradient, has more bytes than PyTorch counts."""
    if (size := 4 * rows * width) > MAX_BYTES:
        raise ConfigError(
            f"{what}, {rows} rows of {width}, are {size} bytes in fp32; the limit is {MAX_BYTES}. Lower one of these"
        )


def align_rows(rows: int) -> int:
    """`rows` rounded up to ROW_ALIGN."""
    return -(-rows // ROW_ALIGN) * ROW_ALIGN


def max_padded_rows(max_rows: int, num_local_experts: int) -> int:
    """Rows that always hold `max_rows` routed rows once each expert's segment is aligned."""
    return align_rows(max_rows + num_local_experts * (ROW_ALIGN - 1)) if max_rows else 0

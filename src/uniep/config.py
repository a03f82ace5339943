"""What an expert-parallel MoE layer is: shapes, dtype, and the choices that decide its numerics.

Everything that changes results lives in `MoEConfig`; everything that only changes speed lives in
`taskflow.Schedule`.  Both are frozen.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch

from uniep.activation import ACTIVATIONS
from uniep.errors import ConfigError, UnsupportedError

ROW_ALIGN = 128
"""Expert segments start at multiples of this many rows; every tile height divides it."""

COLUMN_GROUP = 64
"""Columns summed by one adjacent-pairs tree in d(weight); no tile is narrower."""

MAX_INDEX = 2**31 - 1
"""Rows and slots are int32 in plans."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Shape and numerics of one MoE layer (identical on every rank of the expert-parallel group).

    hidden: D, width of a token.  ffn: F, width of one expert.  num_experts: E, over all ranks.
    top_k: K, slots per token (ids of -1 leave a slot unused).
    max_tokens_per_rank: largest T any rank passes in one call; T may differ per rank and per call.
    activation: of a row's gate and up, the halves of x W13^T; see `activation.ACTIVATIONS`.
    dtype: of x, the expert parameters and y.  Routing weights are always fp32.
    weight_at: where the routing weight acts.  "output": on the expert's result, in fp32, on the
        token's own rank (HF, torchtitan).  "activation": on the activation before the second GEMM
        (Megatron).  The two round differently.
    combine_groups: None: a token's K results are added in one sum on its own rank.  G: the experts form G contiguous
        groups, and the results of one group are added, and rounded, on the experts' rank: fewer rows travel back.
        Other roundings, and so another function; the same for every EP size that divides G, refused for others.
    max_rows: most routed rows (not counting alignment) one rank may receive in one call.  None: rows
        are allocated exactly, after one host read per call.  A number: no host read (CUDA graphs);
        more rows end in `CapacityError`, never in dropped tokens.

    Raises ConfigError or UnsupportedError at construction, naming the value and the limit.
    """

    hidden: int
    ffn: int
    num_experts: int
    top_k: int
    max_tokens_per_rank: int
    activation: str = "swiglu"
    dtype: torch.dtype = torch.bfloat16
    weight_at: Literal["output", "activation"] = "output"
    combine_groups: int | None = None
    max_rows: int | None = None

    def __post_init__(self) -> None:
        for name in ("hidden", "ffn", "num_experts", "top_k", "max_tokens_per_rank", "combine_groups", "max_rows"):
            value = getattr(self, name)
            if name in ("combine_groups", "max_rows") and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"MoEConfig.{name} is {value!r}; it must be an integer of at least 1")
        if self.top_k > self.num_experts:
            raise ConfigError(
                f"MoEConfig.top_k is {self.top_k} but there are only num_experts={self.num_experts}; "
                "lower top_k or add experts"
            )
        if self.activation not in tuple(ACTIVATIONS):
            names = ", ".join(map(repr, ACTIVATIONS))
            raise UnsupportedError(
                f"MoEConfig.activation is {self.activation!r}; supported: {names}. Other activations and "
                "per-expert biases are refused rather than approximated"
            )
        if self.dtype not in DTYPES:
            names = ", ".join(str(d) for d in DTYPES)
            raise ConfigError(f"MoEConfig.dtype is {self.dtype!r}; supported: {names}")
        if self.weight_at not in ("output", "activation"):
            raise ConfigError(f"MoEConfig.weight_at is {self.weight_at!r}; it must be 'output' or 'activation'")
        if self.combine_groups is not None and self.num_experts % self.combine_groups:
            fits = ", ".join(str(g) for g in range(1, self.num_experts + 1) if self.num_experts % g == 0)
            raise ConfigError(
                f"MoEConfig.combine_groups is {self.combine_groups}, which does not divide num_experts="
                f"{self.num_experts}; use one of {fits}, or None for one sum over all of a token's slots"
            )

    def experts_per_rank(self, ep_size: int) -> int:
        """e = E / R.  Raises ConfigError when R does not divide E."""
        if ep_size < 1:
            raise ConfigError(f"ep_size is {ep_size}; it must be at least 1")
        if self.num_experts % ep_size:
            fits = [r for r in range(1, self.num_experts + 1) if self.num_experts % r == 0]
            below = max(r for r in fits if r < ep_size)
            raise ConfigError(
                f"num_experts={self.num_experts} cannot be split evenly over {ep_size} ranks; use an EP group "
                f"of {below} ranks (these sizes fit: {', '.join(map(str, fits))}), or make num_experts a multiple of "
                f"{ep_size}"
            )
        return self.num_experts // ep_size

    def wanted(self, ep_size: int) -> float:
        """Part of a rank's tokens that some expert of a given other rank wants, for uniform routing."""
        others = self.num_experts - self.experts_per_rank(ep_size)
        return 1 - math.comb(others, self.top_k) / math.comb(self.num_experts, self.top_k)

    def check_group(self, ep_size: int) -> None:
        """Raise ConfigError where `ep_size` ranks cannot run this."""
        if not isinstance(ep_size, int):
            raise ConfigError(f"ep_size is {ep_size!r}; it must be a number of ranks, an integer")
        self.experts_per_rank(ep_size)
        groups = self.combine_groups
        if groups is not None and groups % ep_size:
            fits = ", ".join(str(r) for r in range(1, groups + 1) if groups % r == 0)
            raise ConfigError(
                f"combine_groups={groups} cannot be split evenly over {ep_size} ranks, and a group that lies on two "
                f"ranks would be another sum; use an EP group of {fits} ranks, or combine_groups a multiple of "
                f"{ep_size} that divides num_experts={self.num_experts}"
            )
        slots = ep_size * self.max_tokens_per_rank * self.top_k
        if slots > MAX_INDEX:
            raise ConfigError(
                f"{ep_size} ranks * max_tokens_per_rank={self.max_tokens_per_rank} * top_k={self.top_k} are {slots} "
                f"slots; plans count up to {MAX_INDEX}. Lower max_tokens_per_rank"
            )

    @property
    def return_slots(self) -> int:
        """Rows that come back to a token at most: one for each of its slots, or for each group that it can have."""
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


def align_rows(rows: int) -> int:
    """`rows` rounded up to ROW_ALIGN."""
    return -(-rows // ROW_ALIGN) * ROW_ALIGN


def max_padded_rows(max_rows: int, num_local_experts: int) -> int:
    """Rows that always hold `max_rows` routed rows once each expert's segment is aligned."""
    return align_rows(max_rows + num_local_experts * (ROW_ALIGN - 1)) if max_rows else 0

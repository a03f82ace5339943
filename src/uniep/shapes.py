"""Named shapes of MoE layers, for measurements and predictions."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from uniep.config import MoEConfig
from uniep.errors import ConfigError

Scope = Literal["layer", "dispatch-to-combine"]
"""What a time covers: from tokens to summed tokens, or from rows sorted by expert to rows returned to their ranks."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """One model's MoE layer.  num_experts: over all ranks, or on each rank if `per_rank`.

    scope: what published times of it cover.
    """

    name: str
    hidden: int
    ffn: int
    num_experts: int
    top_k: int
    per_rank: bool = False
    scope: Scope = "layer"

    def experts(self, ep_size: int) -> int:
        """Number of experts over all ranks."""
        return self.num_experts * ep_size if self.per_rank else self.num_experts

    def config(self, ep_size: int, tokens: int, **choices: Any) -> MoEConfig:
        """The layer's MoEConfig for `tokens` per rank.  choices: further fields."""
        return MoEConfig(
            hidden=self.hidden, ffn=self.ffn, num_experts=self.experts(ep_size), top_k=self.top_k,
            max_tokens_per_rank=tokens, **choices,
        )  # fmt: skip

    def sync_free_rows(self, tokens: int) -> int:
        """A max_rows that balanced routing does not reach: twice a rank's slots."""
        return 2 * tokens * self.top_k

    def tflop(self, tokens: int, direction: str) -> float:
        """FLOPs of one rank with the mean number of rows: three GEMMs in forward, each twice more in backward."""
        return 6 * tokens * self.top_k * self.hidden * self.ffn * (3 if direction == "fwd_bwd" else 1) / 1e12


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen3-30b", 2048, 768, 128, 8),
        Shape("dsv2-lite", 2048, 1408, 64, 6),
        Shape("qwen3-235b", 4096, 1536, 128, 8),
        Shape("deepseek-v3", 7168, 2048, 64, 8),  # a quarter of its experts, to fit on two GPUs
        Shape("mixtral-8x7b", 4096, 14336, 8, 2),
        Shape("deepseek-v3-256", 7168, 2048, 256, 8),
        Shape("granite-small-1k", 1024, 512, 64, 8),
        Shape("olmoe", 2048, 1024, 64, 8),
        Shape("qwen3-next-80b", 2048, 512, 512, 10),
        Shape("granite-4-small", 4096, 768, 72, 10),
        Shape("glm-4.5", 5120, 1536, 160, 8),
        Shape("deepseek-v2", 5120, 1536, 160, 6),
        Shape("qwen3-coder-480b", 6144, 2560, 160, 8),
        Shape("kimi-k2", 7168, 2048, 384, 8),
        # HyperParallel-MoE's table (arXiv 2605.23764): DeepSeek-V3's layer with 8 experts on each rank
        Shape("hyperparallel-a3", 7168, 2048, 8, 8, per_rank=True, scope="dispatch-to-combine"),
    )
}


def parse_shape(text: str) -> Shape:
    """A shape's name, or DxFxExK (hidden, ffn, experts, top-k).  Raises ConfigError."""
    if text in SHAPES:
        return SHAPES[text]
    sizes = text.split("x")
    if len(sizes) != 4 or not all(size.isdecimal() for size in sizes):
        raise ConfigError(f"shape {text!r} is unknown; use {', '.join(SHAPES)}, or DxFxExK such as 2048x768x128x8")
    hidden, ffn, num_experts, top_k = map(int, sizes)
    return Shape(text, hidden, ffn, num_experts, top_k)

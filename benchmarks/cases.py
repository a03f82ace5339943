"""What is timed: the shapes, and one rank's inputs.

Shape suffixes: T tokens, K slots, D hidden, F ffn, E experts, e local experts.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from uniep import shapes
from uniep.shapes import Shape

SHAPES = {name: shape for name, shape in shapes.SHAPES.items() if not shape.per_rank}
SPANNING = (
    "granite-small-1k", "olmoe", "qwen3-next-80b", "granite-4-small", "glm-4.5", "deepseek-v2", "qwen3-coder-480b",
    "kimi-k2", "qwen3-30b", "dsv2-lite", "qwen3-235b", "deepseek-v3-256",
)  # fmt: skip
"""Twelve layers over the published ranges: 64 to 512 experts, top-6 to top-10, hidden 1024 to 7168."""
ROUTINGS = ("balanced", "zipf")


@dataclasses.dataclass(frozen=True)
class Case:
    """One rank's tensors: x, dy (T, D); ids (T, K) int64; weights (T, K) fp32; w13 (e, 2F, D); w2 (e, D, F)."""

    x_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    w13_e2FD: Tensor
    w2_eDF: Tensor
    dy_TD: Tensor
    num_experts: int

    @property
    def num_local(self) -> int:
        return self.w13_e2FD.shape[0]


def parse_shape(text: str) -> Shape:
    """A shape's name, or DxFxExK.  Raises ValueError."""
    if (shape := shapes.parse_shape(text)).per_rank:
        raise ValueError(f"shape {text!r} counts experts per rank; give DxFxExK, such as 7168x2048x16x8 on two ranks")
    return shape


def make_weights(
    shape: Shape, rank: int, ranks: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(w13, w2) of one rank's experts, normal with std 1/sqrt(fan-in)."""
    generator = torch.Generator(device).manual_seed(1000 + rank)

    def made(rows: int, columns: int) -> Tensor:
        out = torch.empty(shape.num_experts // ranks, rows, columns, dtype=dtype, device=device)
        for expert in out:
            expert.copy_(torch.randn(rows, columns, device=device, generator=generator) * columns**-0.5)
        return out

    return made(2 * shape.ffn, shape.hidden), made(shape.hidden, shape.ffn)


def make_case(shape: Shape, tokens: int, routing: str, rank: int, weights: tuple[Tensor, Tensor]) -> Case:
    """Inputs of one rank; `weights` from `make_weights`."""
    dtype, device = weights[0].dtype, weights[0].device
    generator = torch.Generator(device).manual_seed(2000 + rank)

    def normal() -> Tensor:
        return torch.randn(tokens, shape.hidden, device=device, generator=generator).to(dtype)

    x_TD, dy_TD = normal(), normal()
    ids_TK = choose_experts(tokens, shape, routing, generator)
    share_TK = torch.rand(tokens, shape.top_k, device=device, generator=generator) + 0.1
    return Case(x_TD, ids_TK, share_TK / share_TK.sum(1, keepdim=True), *weights, dy_TD, shape.num_experts)


def choose_experts(tokens: int, shape: Shape, routing: str, generator: torch.Generator) -> Tensor:
    """(T, K) int64, distinct experts per token.

    balanced: uniform.  zipf: the n-th most popular expert is chosen in proportion to 1/n (without
    replacement, by Gumbel's trick); which expert is how popular is the same on every rank.
    """
    device = generator.device
    score_TE = torch.rand(tokens, shape.num_experts, device=device, generator=generator)
    if routing == "zipf":
        place_E = torch.randperm(shape.num_experts, generator=torch.Generator().manual_seed(3)).to(device)
        gumbel_TE = -torch.log(-torch.log(score_TE.clamp(1e-6, 1 - 1e-6)))
        score_TE = gumbel_TE - torch.log1p(place_E.float())
    return score_TE.topk(shape.top_k, dim=1).indices.contiguous()

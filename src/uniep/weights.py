"""Expert parameters as frameworks store them, without ever concatenating them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from uniep.config import MoEConfig
from uniep.errors import ConfigError, DTypeError

Layout = Literal["stacked", "split", "list"]


@dataclasses.dataclass(frozen=True)
class Lora:
    """Low-rank factors of this rank's e experts, each pair (A, B) for W + scale B A; None: W alone.

    w13: A (e, r, D), B (e, 2F, r), gate rows first.  w2: A (e, r, F), B (e, D, r).  The two ranks r may differ.
    """

    w13: tuple[Tensor, Tensor] | None
    w2: tuple[Tensor, Tensor] | None
    scale: float

    def to(self, dtype: torch.dtype) -> Lora:
        """Differentiable."""
        w13, w2 = (None if pair is None else (pair[0].to(dtype), pair[1].to(dtype)) for pair in (self.w13, self.w2))
        return Lora(w13, w2, self.scale)

    def check(self, cfg: MoEConfig, ep_size: int) -> None:
        """Raises ConfigError or DTypeError with both shapes or dtypes."""
        e, f, d = cfg.experts_per_rank(ep_size), cfg.ffn, cfg.hidden
        if not math.isfinite(self.scale):
            raise ConfigError(f"scale of LoRA is {self.scale}; it must be a finite number")
        for name, pair, wide, high in (("w13", self.w13, d, 2 * f), ("w2", self.w2, f, d)):
            if pair is None:
                continue
            a, b = pair
            rank = a.shape[1] if a.dim() == 3 else 0
            if rank < 1 or tuple(a.shape) != (e, rank, wide) or tuple(b.shape) != (e, high, rank):
                raise ConfigError(
                    f"LoRA factors of {name} have shapes {tuple(a.shape)} and {tuple(b.shape)}; for {e} local experts "
                    f"they must be ({e}, r, {wide}) and ({e}, {high}, r), r at least 1"
                )
            for t in pair:
                if t.dtype != cfg.dtype:
                    raise DTypeError(
                        f"a LoRA factor of {name} has dtype {t.dtype} but the layer computes in {cfg.dtype}; convert "
                        "it, or run under torch.autocast"
                    )


@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """This rank's e experts.

    layout "stacked": w13 = [(e, 2F, D)], gate rows first; (e, 2, F, D) is the same bytes.
    layout "split": w13 = [w1 (e, F, D), w3 (e, F, D)], gate and up.
    layout "list": w13 = e tensors (2F, D).
    w2 is [(e, D, F)] or e tensors (D, F), independent of w13's layout.
    lora: factors beside weights that are not trained.
    """

    w13: tuple[Tensor, ...]
    w2: tuple[Tensor, ...]
    layout: Layout
    lora: Lora | None = None

    @property
    def trained(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """What has gradients, of w13 and of w2: themselves, or their factors."""
        return (self.w13, self.w2) if self.lora is None else (self.lora.w13 or (), self.lora.w2 or ())

    @classmethod
    def parse(
        cls, w13: Tensor | Sequence[Tensor], w2: Tensor | Sequence[Tensor], cfg: MoEConfig, ep_size: int
    ) -> ExpertWeights:
        """Recognise the layout by shape.  Raises ConfigError or DTypeError with both shapes or dtypes."""
        e, f, d = cfg.experts_per_rank(ep_size), cfg.ffn, cfg.hidden
        first = (w13,) if isinstance(w13, Tensor) else tuple(w13)
        second = (w2,) if isinstance(w2, Tensor) else tuple(w2)
        shapes = [tuple(t.shape) for t in first]
        layout: Layout
        if shapes in ([(e, 2 * f, d)], [(e, 2, f, d)]):
            layout = "stacked"
        elif shapes == [(e, f, d)] * 2:
            layout = "split"
        elif shapes == [(2 * f, d)] * e and not isinstance(w13, Tensor):
            layout = "list"
        else:
            raise ConfigError(
                f"w13 has shape {shapes if len(shapes) != 1 else shapes[0]}; for {e} local experts "
                f"(num_experts={cfg.num_experts} over {ep_size} ranks), ffn={f}, hidden={d} it must be "
                f"[{e}, {2 * f}, {d}] (gate rows first), [{e}, 2, {f}, {d}], a pair (w1, w3) of [{e}, {f}, {d}], "
                f"or {e} tensors of [{2 * f}, {d}]"
            )
        down = [tuple(t.shape) for t in second]
        if down != [(e, d, f)] and down != [(d, f)] * e:
            raise ConfigError(
                f"w2 has shape {down[0] if len(down) == 1 else down}; it must be [{e}, {d}, {f}] "
                f"or {e} tensors of [{d}, {f}]"
            )
        for name, tensors in (("w13", first), ("w2", second)):
            for t in tensors:
                if t.dtype != cfg.dtype:
                    raise DTypeError(
                        f"{name} has dtype {t.dtype} but the layer computes in {cfg.dtype}; convert one of them"
                    )
        return cls(first, second, layout)

    def halves(self, expert: int) -> tuple[Tensor, Tensor]:
        """Gate and up rows, two (F, D) views, of local expert `expert`."""
        if self.layout == "split":
            return self.w13[0][expert], self.w13[1][expert]
        w = self.w13[expert] if self.layout == "list" else self.w13[0][expert]
        pair = w.view(2, -1, w.shape[-1])
        return pair[0], pair[1]

    def down(self, expert: int) -> Tensor:
        """(D, F) view of w2 of local expert `expert`."""
        return self.w2[0][expert] if self.w2[0].dim() == 3 else self.w2[expert]

    def like(self, fill: bool = False) -> ExpertWeights:
        """Same layout and dtypes in new memory: zeros if `fill`, else uninitialised."""
        new = torch.zeros_like if fill else torch.empty_like
        make = lambda ts: tuple(new(t, memory_format=torch.contiguous_format) for t in ts)  # noqa: E731
        return ExpertWeights(make(self.w13), make(self.w2), self.layout)

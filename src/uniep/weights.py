"""Expert parameters as frameworks store them, without ever concatenating them.

Experts of an activation without a gate have F rows of W13 instead of 2F.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from uniep.config import MoEConfig
from uniep.errors import ConfigError, DTypeError

Layout = Literal["stacked", "split", "list"]


@dataclasses.dataclass(frozen=True)
class Lora:
    """Low-rank factors of this rank's e experts, each pair (A, B) for W + scale B A; None: W alone.

    w13: A (e, r, D), B (e, 2F, r), gate rows first, without a gate (e, F, r).  w2: A (e, r, F), B (e, D, r).  The two
    ranks r may differ.
    """

    w13: tuple[Tensor, Tensor] | None
    w2: tuple[Tensor, Tensor] | None
    scale: float

    def to(self, dtype: torch.dtype) -> Lora:
        """Differentiable."""
        return self.each(lambda factor: factor.to(dtype))

    def each(self, change: Callable[[Tensor], Tensor]) -> Lora:
        """With every factor changed."""
        w13, w2 = (None if pair is None else (change(pair[0]), change(pair[1])) for pair in (self.w13, self.w2))
        return Lora(w13, w2, self.scale)

    def check(self, cfg: MoEConfig, ep_size: int) -> None:
        """Raises ConfigError or DTypeError with both shapes or dtypes."""
        e, f, d = cfg.experts_per_rank(ep_size), cfg.ffn, cfg.hidden
        if not isinstance(self.scale, int | float) or not math.isfinite(self.scale):
            raise ConfigError(f"scale of LoRA is {self.scale!r}; it must be a finite number")
        for name, pair, wide, high in (("w13", self.w13, d, cfg.h_columns), ("w2", self.w2, f, d)):
            if pair is None:
                continue
            if not isinstance(pair, tuple) or [isinstance(t, Tensor) for t in pair] != [True, True]:
                raise ConfigError(f"LoRA factors of {name} are {pair!r:.100}; pass a tuple (A, B) of tensors, or None")
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
    gated: False: w13 = [(e, F, D)] or e tensors (F, D), "stacked" or "list".
    b13 (e, 2F or F), gate first, and b2 (e, D): biases, both or none.
    lora: factors beside weights that are not trained.
    """

    w13: tuple[Tensor, ...]
    w2: tuple[Tensor, ...]
    layout: Layout
    gated: bool = True
    b13: Tensor | None = None
    b2: Tensor | None = None
    lora: Lora | None = None

    @property
    def trained(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """What has gradients, of w13 and of w2: themselves, or their factors."""
        return (self.w13, self.w2) if self.lora is None else (self.lora.w13 or (), self.lora.w2 or ())

    @property
    def adapted(self) -> tuple[str, ...]:
        """The weights that have factors: "w13", "w2"."""
        lora = self.lora
        return () if lora is None else ("w13",) * (lora.w13 is not None) + ("w2",) * (lora.w2 is not None)

    @property
    def factors(self) -> tuple[Tensor, ...]:
        """Of lora, w13's first, A before B."""
        return () if self.lora is None else (*(self.lora.w13 or ()), *(self.lora.w2 or ()))

    @classmethod
    def parse(
        cls, w13: Tensor | Sequence[Tensor], w2: Tensor | Sequence[Tensor], cfg: MoEConfig, ep_size: int,
        b13: Tensor | None = None, b2: Tensor | None = None,
    ) -> ExpertWeights:  # fmt: skip
        """Recognise the layout by shape.  Raises ConfigError or DTypeError with both shapes or dtypes."""
        e, f, d = cfg.experts_per_rank(ep_size), cfg.ffn, cfg.hidden
        first = (w13,) if isinstance(w13, Tensor) else tuple(w13)
        second = (w2,) if isinstance(w2, Tensor) else tuple(w2)
        shapes, h = [tuple(t.shape) for t in first], cfg.h_columns
        layout: Layout
        if shapes == [(e, h, d)] or (cfg.gated and shapes == [(e, 2, f, d)]):
            layout = "stacked"
        elif cfg.gated and shapes == [(e, f, d)] * 2:
            layout = "split"
        elif shapes == [(h, d)] * e and not isinstance(w13, Tensor):
            layout = "list"
        else:
            pair = f" (gate rows first), [{e}, 2, {f}, {d}], a pair (w1, w3) of [{e}, {f}, {d}]" if cfg.gated else ""
            raise ConfigError(
                f"w13 has shape {shapes if len(shapes) != 1 else shapes[0]}; for {e} local experts "
                f"(num_experts={cfg.num_experts} over {ep_size} ranks), ffn={f}, hidden={d}, activation "
                f"{cfg.activation!r} it must be [{e}, {h}, {d}]{pair}, or {e} tensors of [{h}, {d}]"
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
        _check_biases({"b13": (b13, (e, h)), "b2": (b2, (e, d))}, cfg)
        return cls(first, second, layout, cfg.gated, b13, b2)

    @classmethod
    def zeros(cls, cfg: MoEConfig, local: int, **like: Any) -> ExpertWeights:
        """Of `local` experts, stacked, to try calls with.  like: dtype and device."""
        h = cfg.h_columns
        biases = (torch.zeros(local, h, **like), torch.zeros(local, cfg.hidden, **like)) if cfg.bias else ()
        w13, w2 = torch.zeros(local, h, cfg.hidden, **like), torch.zeros(local, cfg.hidden, cfg.ffn, **like)
        return cls((w13,), (w2,), "stacked", cfg.gated, *biases)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them."""
        return *self.w13, *self.w2, *self.biases

    @property
    def biases(self) -> tuple[Tensor, ...]:
        """(b13, b2), or ()."""
        return () if self.b13 is None or self.b2 is None else (self.b13, self.b2)

    def halves(self, expert: int) -> tuple[Tensor, ...]:
        """Gate and up rows, two (F, D) views, of local expert `expert`; without a gate one."""
        if self.layout == "split":
            return self.w13[0][expert], self.w13[1][expert]
        w = self.w13[expert] if self.layout == "list" else self.w13[0][expert]
        return w.view(1 + self.gated, -1, w.shape[-1]).unbind(0)

    def half_biases(self, expert: int) -> tuple[Tensor | None, ...]:
        """Of `halves`: two (F,) views of b13, or one."""
        if self.b13 is None:
            return (None,) * (1 + self.gated)
        return self.b13[expert].chunk(1 + self.gated)

    def down(self, expert: int) -> Tensor:
        """(D, F) view of w2 of local expert `expert`."""
        return self.w2[0][expert] if self.w2[0].dim() == 3 else self.w2[expert]

    def like(self, fill: bool = False) -> ExpertWeights:
        """Same layout and dtypes in new memory: zeros if `fill`, else uninitialised."""
        new = torch.zeros_like if fill else torch.empty_like
        make = lambda ts: tuple(new(t, memory_format=torch.contiguous_format) for t in ts)  # noqa: E731
        return dataclasses.replace(self, w13=make(self.w13), w2=make(self.w2))


def _check_biases(given: dict[str, tuple[Tensor | None, tuple[int, int]]], cfg: MoEConfig) -> None:
    """Raise ConfigError or DTypeError unless there are biases of these shapes where the configuration has biases."""
    for name, (bias, shape) in given.items():
        if (bias is not None) != cfg.bias:
            remedy = f"pass {name} {list(shape)}" if cfg.bias else f"set MoEConfig(bias=True), or pass {name}=None"
            found = "None" if bias is None else f"a tensor of shape {tuple(bias.shape)}"
            raise ConfigError(f"{name} is {found} but MoEConfig.bias is {cfg.bias}; {remedy}")
        if bias is None:
            continue
        if tuple(bias.shape) != shape:
            raise ConfigError(f"{name} has shape {tuple(bias.shape)}; it must be {list(shape)}")
        if bias.dtype != cfg.dtype:
            raise DTypeError(
                f"{name} has dtype {bias.dtype} but the layer computes in {cfg.dtype}; convert one of them"
            )

"""What parameters are initialised from: one seed for a layer's parts, a random stream of its own for each."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

STREAMS = 1_000_003
"""Random streams of one seed: one for each expert from 0 on, and from the end `ROUTER` and `SHARED`."""
ROUTER, SHARED = STREAMS - 1, STREAMS - 2


class Seed:
    """What a router and its experts are initialised from: a given seed, or one draw for each reset of all."""

    def __init__(self, given: int | None) -> None:
        self.given = given
        self._value = 0
        self._takers: set[str] = set()

    def take(self, taker: str) -> int:
        if self.given is not None:
            return self.given
        if not self._takers or taker in self._takers:
            with _disable_current_modes():
                self._value = int(torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device="cpu")) % 2**64
            self._takers.clear()
        self._takers.add(taker)
        return self._value


def generator(seed: int, stream: int) -> torch.Generator:
    """Of one stream: no two layers, experts or routers have the same."""
    return torch.Generator().manual_seed((seed * STREAMS + stream) % 2**64)


def normal(shape: torch.Size, draw: torch.Generator) -> Tensor:
    """Normal with std 1/sqrt(fan-in); the same values whatever the default dtype and device."""
    return torch.randn(shape, generator=draw, dtype=torch.float32, device="cpu") * shape[1] ** -0.5

"""Initialisation of parameters: one seed per layer, and a separate random stream for each of its parts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from uniep.errors import ConfigError

STREAMS = 1_000_003
"""Random streams of one seed: one for each expert from 0 on, and from the end `ROUTER`, `SHARED` and, downwards, one
for each expert's `LORA`."""
ROUTER, SHARED, LORA = STREAMS - 1, STREAMS - 2, STREAMS - 3


def place(device: torch.device | str | None) -> torch.device:
    """Where parameters begin: the given device, or meta inside of `with torch.device("meta")`."""
    default = torch.get_default_device()
    return default if default.type == "meta" or device is None else torch.device(device)


class Seed:
    """The seed of a router and its experts: a given one, or one draw for each reset of all of them."""

    def __init__(self, given: int | None) -> None:
        if given is not None and (not isinstance(given, int) or isinstance(given, bool)):
            raise ConfigError(f"seed is {given!r}; it must be an int, or None to draw one")
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


def refuse_parametrized(module: nn.Module, *names: str) -> None:
    """Raise ConfigError where torch.nn.utils.parametrize computes one of these parameters: what is written into its
    result is lost."""
    for name in names:
        if name in getattr(module, "parametrizations", ()):
            raise ConfigError(
                f"{name} of {type(module).__name__} is computed by a parametrization, so it cannot be initialised; "
                f"register the parametrization afterwards, or initialise parametrizations.{name}.original"
            )


def generator(seed: int, stream: int) -> torch.Generator:
    """The generator of one stream: no two layers, experts or routers share one."""
    return torch.Generator().manual_seed((seed * STREAMS + stream) % 2**64)


def normal(shape: torch.Size, draw: torch.Generator) -> Tensor:
    """Normal with std 1/sqrt(fan-in); values do not depend on the default dtype and device."""
    return torch.randn(shape, generator=draw, dtype=torch.float32, device="cpu") * shape[1] ** -0.5

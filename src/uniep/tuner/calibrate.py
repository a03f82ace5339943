"""Constants of the model from measured calls: least squares of log errors, held near where they begin.

Each constant moves by its logarithm, inside its range; the prior keeps one that the measurements say nothing about
where it was.  Levenberg and Marquardt's steps with differences for derivatives: a card has less than 20 constants.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from uniep.schedule import Schedule
from uniep.tuner.model import CONSTANTS, Card, Load, predict
from uniep.tuner.space import Points

PRIOR = 0.06
"""What a constant's factor of e weighs, in relative errors of one measured call."""


@dataclasses.dataclass(frozen=True)
class Timed:
    """A measured call.  direction: "fwd", "bwd" or "fwd_bwd" (under a window of both)."""

    load: Load
    schedule: Schedule
    direction: str
    us: float


def stacked(loads: Sequence[Load]) -> Load:
    """Of several calls, as one of columns."""

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    fields = {
        f.name: column([getattr(load, f.name) for load in loads]) for f in dataclasses.fields(Load) if f.name != "tiles"
    }
    return Load(**fields, tiles=tuple(column([load.tiles[i] for load in loads]) for i in (0, 1)))  # type: ignore[arg-type]


class Calls:
    """Measured calls, predicted together."""

    def __init__(self, timed: Sequence[Timed]) -> None:
        self.load, self.points = stacked([t.load for t in timed]), Points.of([t.schedule for t in timed])
        self.direction = torch.tensor([("fwd", "bwd", "fwd_bwd").index(t.direction) for t in timed])
        self.log_us = torch.tensor([t.us for t in timed], dtype=torch.float64).log()

    def predicted(self, card: Card) -> Tensor:
        """(N,) us."""
        made = predict(self.load, self.points, card)
        return torch.stack([made.fwd, made.bwd, made.both]).gather(0, self.direction[None])[0]

    def errors(self, card: Card) -> Tensor:
        """(N,): logarithms of predicted over measured."""
        return self.predicted(card).log() - self.log_us


def fit(card: Card, timed: Sequence[Timed], names: Sequence[str] = tuple(CONSTANTS), steps: int = 40) -> Card:
    """`card` with the constants `names` calibrated on `timed`."""
    calls = Calls(timed)
    start_P = torch.tensor([math.log(max(float(card.constants[n]), 1e-6)) for n in names], dtype=torch.float64)
    low_P, high_P = (
        torch.tensor([math.log(max(getattr(CONSTANTS[n], end), 1e-6)) for n in names], dtype=torch.float64)
        for end in ("low", "high")
    )

    def at(log_P: Tensor) -> Card:
        return card.replaced(dict(zip(names, log_P.exp().tolist(), strict=True)))

    def residuals(log_P: Tensor) -> Tensor:
        off = calls.errors(at(log_P))
        robust = torch.where(off.abs() < ROBUST, off, off.sign() * (2 * ROBUST * off.abs() - ROBUST**2).sqrt())
        return torch.cat([robust, PRIOR * (log_P - start_P)])

    here, damping = start_P, 1e-3
    off = residuals(here)
    for _ in range(steps):
        slope = torch.stack([(residuals(here + STEP * row) - off) / STEP for row in torch.eye(len(names)).double()], 1)
        normal, down = slope.T @ slope, slope.T @ off
        for _ in range(8):
            moved = here - torch.linalg.solve(normal + damping * torch.eye(len(names)).double(), down)
            moved = torch.maximum(torch.minimum(moved, high_P), low_P)
            tried = residuals(moved)
            if tried.square().sum() < off.square().sum():
                break
            damping *= 4
        else:
            break
        gained = 1 - float(tried.square().sum() / off.square().sum())
        here, off, damping = moved, tried, damping / 4
        if gained < 1e-6:
            break
    return at(here)


ROBUST = 0.1
"""Relative error from which a call counts by its error, not its square: a hiccup does not bend the rest."""

STEP = 1e-4

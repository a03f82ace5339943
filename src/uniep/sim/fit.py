"""Fit a machine's collectives to measured layers that ran operator by operator.

Two numbers per EP size: the all-to-all bandwidth, from the forward, and the time of the backward that no operator
accounts for, from the backward.  This module reads only the serialized columns, and simulates only the serialized
strategy.  Its result is frozen before anything else is predicted.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources

from uniep.errors import ConfigError
from uniep.shapes import SHAPES
from uniep.sim.machine import KEYS, Machine
from uniep.sim.problem import Direction, Problem
from uniep.sim.strategies import STRATEGIES, simulate

SHAPE = SHAPES["hyperparallel-a3"]
SIZES = (4, 8, 16)
ALL_TO_ALL, RESIDUAL = "all_to_all_gbps", "backward_residual_us"
_TRIES = 8
_CLOSE = 1e-4


def serialized_column() -> dict[str, float]:
    return column("hyperparallel_serialized")


def column(name: str) -> dict[str, float]:
    """ms by "fwd_ep4"; and "tokens"."""
    return tomllib.loads((resources.files("uniep.sim") / "published" / f"{name}.toml").read_text())


def layer_ms(machine: Machine, strategy: str, ep: int, direction: Direction, tokens: int) -> float:
    problem = Problem(SHAPE, ep, tokens, "balanced", direction)
    return simulate(problem, machine, STRATEGIES[strategy].arrange(problem, machine)).makespan_ns / 1e6


def fit(machine: Machine, measured: Mapping[str, float] | None = None) -> Machine:
    """`machine` with the two numbers of each size.  measured: default, the serialized columns.

    Raises ConfigError where no value in a key's range fits.
    """
    measured = measured or serialized_column()
    tokens = int(measured["tokens"])
    for ep in SIZES:
        fwd, bwd = measured[f"fwd_ep{ep}"], measured[f"bwd_ep{ep}"]
        machine = machine.replaced({f"{RESIDUAL}_ep{ep}": 0.0})
        machine = _solved(machine, f"{ALL_TO_ALL}_ep{ep}", fwd, ep, "fwd", tokens, inverse=True)
        machine = _solved(machine, f"{RESIDUAL}_ep{ep}", bwd, ep, "bwd", tokens, inverse=False)
    return machine


def _solved(
    machine: Machine, key: str, wanted: float, ep: int, direction: Direction, tokens: int, *, inverse: bool
) -> Machine:
    """The value of `key` at which the serialized layer takes `wanted` ms, by secants in the value or in its inverse:
    the time is linear in one of them."""

    def at(value: float) -> tuple[Machine, float]:
        made = machine.replaced({key: value})
        return made, layer_ms(made, "serialized", ep, direction, tokens) - wanted

    def value_of(x: float) -> float:
        return 1 / x if inverse else x

    x0, x1 = (1 / 150, 1 / 100) if inverse else (0.0, 1000.0)
    (made, off0), (_, off1) = at(value_of(x0)), at(value_of(x1))
    if not inverse and off0 > 0:
        return made  # the operators alone take longer: no time is left over
    for _ in range(_TRIES):
        if off1 == off0:
            break
        x0, x1, off0 = x1, x1 - off1 * (x1 - x0) / (off1 - off0), off1
        known = KEYS[key.rsplit("_ep", 1)[0]]
        if x1 <= 0 or not known.low <= value_of(x1) <= known.high:
            raise ConfigError(f"no {key} of {known.low:g} to {known.high:g} {known.unit} makes it {wanted} ms")
        made, off1 = at(value_of(x1))
        if abs(off1) < _CLOSE * wanted:
            return made
    raise ConfigError(f"no {key} makes the serialized layer at EP {ep} take {wanted} ms; it comes within {off1:.3f} ms")

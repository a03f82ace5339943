"""Constants of the model from measured calls: least squares of log errors, with a prior at the start values.

The fit changes the logarithm of each constant, inside its range.  The prior keeps a constant at its start value if the
measurements do not determine it.  Levenberg-Marquardt steps with difference quotients: a card has some 20
constants.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from uniep.config import MoEConfig
from uniep.errors import ConfigError
from uniep.schedule import Schedule, default_schedule
from uniep.shapes import parse_shape
from uniep.sim.machine import KEYS, Machine, checked, load_machine
from uniep.trials.fleet import Fleet
from uniep.trials.trial import Job
from uniep.tuner.model import CONSTANTS, Card, Load, predict, uncalibrated
from uniep.tuner.space import Points, refusals, replaced

PRIOR = 0.06
"""Weight of the prior: the cost of changing a constant by a factor of e, in relative errors of one measured call."""


@dataclasses.dataclass(frozen=True)
class Timed:
    """A measured call.  direction: "fwd", "bwd" or "fwd_bwd" (under a window of both)."""

    load: Load
    schedule: Schedule
    direction: str
    us: float


def stacked(loads: Sequence[Load]) -> Load:
    """The loads of several calls as one Load of columns."""

    def column(values: Sequence[float | Tensor]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    fields = {
        f.name: column([getattr(load, f.name) for load in loads]) for f in dataclasses.fields(Load) if f.name != "tiles"
    }
    return Load(**fields, tiles=tuple(map(column, zip(*(load.tiles for load in loads), strict=True))))  # type: ignore[arg-type]


class Calls:
    """Measured calls, whose times are predicted together."""

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
"""Relative error above which a call counts linearly, not by its square, so that an outlier does not spoil the fit."""

STEP = 1e-4


CALLS = {
    "hopper": (("qwen3-30b", 512), ("qwen3-30b", 4096), ("deepseek-v3", 4096)),
    "cpu": (("64x64x8x2", 32), ("128x128x8x2", 128), ("256x128x8x2", 256)),
}
"""(shape, tokens of a rank) that a calibration times, with the default, the serial Schedule and the other transfer."""

REPEATS = 5


def measure(
    backend: str, ep_size: int, dtype: torch.dtype, machine: Machine, name: str, progress: Callable[[str], None]
) -> Card:
    """A new card: times the calls of CALLS on `ep_size` ranks and fits the constants to them.

    Raises ConfigError if the backend has no such calls, UniEPError if they cannot be timed.
    """
    if backend not in CALLS:
        raise ConfigError(f"--calibrate times backends {' and '.join(CALLS)}, not {backend!r}")
    timed: list[Timed] = []
    fleet = None
    try:
        for text, tokens in CALLS[backend]:
            shape = parse_shape(text)
            cfg = shape.config(ep_size, tokens, dtype=dtype, max_rows=shape.sync_free_rows(tokens))
            job = Job(cfg, ep_size, backend, "cuda" if backend == "hopper" else "cpu", tokens)
            if fleet is None:
                fleet = Fleet(job)
            fleet.becomes(job, timeout_s=120)
            for schedule in _schedules(backend, cfg, ep_size):
                of_rank = fleet.ask("alone", schedule, REPEATS, timeout_s=120)
                calls = [[max(us) for us in zip(*call, strict=True)] for call in zip(*of_rank, strict=True)]
                load = Load.uniform(cfg, ep_size)
                for direction, us in zip(("fwd", "fwd_bwd"), zip(*calls, strict=True), strict=True):
                    timed.append(Timed(load, schedule, direction, statistics.median(us)))
            progress(f"{text}, {tokens} tokens")
    finally:
        if fleet is not None:
            fleet.end()
    return fit(uncalibrated(machine, name), timed)


def _schedules(backend: str, cfg: MoEConfig, ep_size: int) -> list[Schedule]:
    usual = default_schedule(backend, cfg, ep_size)
    changes: list[dict[str, Any]] = [{}, {"overlap": "serial"}]
    if backend == "hopper":
        changes.append({"transfer": "copy" if usual.transfer == "push" else "push"})
    made = [replaced(usual, change) for change in changes]
    return [schedule for schedule in made if not refusals(schedule, cfg, ep_size, backend)]


def machine_of(card: str) -> Machine:
    """The card that a calibration starts from.  Raises ConfigError for a card that no machine file describes."""
    if card == "cpu":
        return _this_cpu()
    try:
        return load_machine(f"{card}-node")
    except ConfigError as error:
        raise ConfigError(f"{error}; describe the card in a TOML file and name it with --machine") from None


def _this_cpu() -> Machine:
    """One thread of this processor as a machine of one worker; stores to peers are stores to memory."""
    a, big = torch.randn(256, 256), torch.zeros(2**22)
    flops = 2 * 256**3 / _seconds(lambda: a @ a)
    copied = 2 * big.nbytes / _seconds(lambda: big + 1) / 1e9
    values: dict[str, object] = {key: KEYS[key].low for key in KEYS}
    values |= {
        "matrix_workers": 1, "matrix_tflops": flops / 1e12, "sustained_share": 1.0, "tile_us": 20.0, "gather_us": 10.0,
        "store_gbps": copied, "hbm_gbps": copied, "hbm_efficiency": 0.5, "l2_gbps": copied * 4, "worker_gbps": copied,
        "link_gbps": copied, "link_efficiency": 0.5, "worker_link_gbps": copied, "ranks_per_node": 64,
        "network_gbps": copied, "network_efficiency": 0.5, "all_to_all_gbps": copied, "plan_us": 1000.0,
        "boost_ms": 1e6,
    }  # fmt: skip
    return checked("cpu", values)


def _seconds(call: Callable[[], object]) -> float:
    call()
    best = math.inf
    for _ in range(5):
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return best


def machine_text(machine: Machine) -> str:
    """The text of a machine file."""
    return "".join(
        f"{key} = {int(value) if KEYS[key].whole else value}  # "
        + f"{KEYS[key].unit}: {KEYS[key].about}\n".lstrip(": ")
        for key, value in machine.values.items()
        if key in KEYS
    )

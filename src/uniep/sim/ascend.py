"""HyperParallel-MoE's table on Ascend A3: predicted from a machine that was fitted to the serialized columns only.

Fitted (`fit`): per EP size one all-to-all bandwidth and one time of the backward outside the matrix units.  Then both
are frozen.  Predicted: the fused columns, controls, and the effect of each parameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from uniep.sim import fit as fitting
from uniep.sim.fit import SHAPE, SIZES
from uniep.sim.machine import Machine
from uniep.sim.operators import RESIDUAL
from uniep.sim.problem import Direction, Problem
from uniep.sim.strategies import STRATEGIES, Arrangement, simulate
from uniep.taskflow.operators import Operators

DIRECTIONS: tuple[Direction, ...] = ("fwd", "bwd")
VARIED = (
    "matrix_tflops", "hbm_gbps", "link_gbps", "worker_link_gbps", "worker_gbps", "link_latency_us", "matrix_poll_us",
    "vector_poll_us", "task_us", "matrix_launch_us", "vector_launch_us", "collective_launch_us", "all_to_all_gbps",
    "backward_residual_us",
)  # fmt: skip
LAYER_SHARES = (0.22, 0.36)
"""Share of a step that Dispatch-to-Combine takes: lowest and highest."""


class Times(NamedTuple):
    """ms of one EP size."""

    serialized: dict[str, float]
    fused: dict[str, float]

    @property
    def gain(self) -> float:
        return sum(self.serialized.values()) / sum(self.fused.values())


def times(machine: Machine, ep: int, fused: str = "taskflow", tokens: int = 4096) -> Times:
    return Times(
        {d: fitting.layer_ms(machine, "serialized", ep, d, tokens) for d in DIRECTIONS},
        {d: fitting.layer_ms(machine, fused, ep, d, tokens) for d in DIRECTIONS},
    )


class Check(NamedTuple):
    """A number, the range it must lie in, and whether it does."""

    what: str
    value: float
    low: float
    high: float

    @property
    def holds(self) -> bool:
        return self.low <= self.value <= self.high


def table(machine: Machine) -> dict[int, Times]:
    return {ep: times(machine, ep) for ep in SIZES}


def checks(found: Mapping[int, Times]) -> list[Check]:
    """The predictions against the published columns."""
    serialized, fused = fitting.serialized_column(), fitting.column("hyperparallel_fused")
    out = []
    for ep, of in found.items():
        published = Times(_of(serialized, ep), _of(fused, ep))
        for d in DIRECTIONS:
            ms = published.serialized[d]
            out.append(Check(f"EP {ep} serialized {d}, ms", of.serialized[d], ms * 0.98, ms * 1.02))
        for d in DIRECTIONS:
            ms = published.fused[d]
            out.append(Check(f"EP {ep} fused {d}, ms", of.fused[d], ms * 0.9, ms * 1.1))
        out.append(Check(f"EP {ep} gain of both", of.gain, published.gain * 0.92, published.gain * 1.08))
    growth = sum(found[16].fused.values()) / sum(found[4].fused.values())
    return [*out, Check("fused of both, EP 16 over EP 4", growth, 1.0, 1.08)]


def _of(column: Mapping[str, float], ep: int) -> dict[str, float]:
    return {direction: column[f"{direction}_ep{ep}"] for direction in DIRECTIONS}


def controls(machine: Machine, found: Mapping[int, Times]) -> Iterator[Check]:
    """Changes that must have an effect, and how large it must be."""
    for ep, of in found.items():
        gain = of.gain
        lost = 1 - times(machine, ep, "taskflow-one-event").gain / gain
        yield Check(f"EP {ep}, one event for the whole dispatch: gain lost", lost, 0.08, 1)
        slow_link = machine.replaced({"link_gbps": machine.link_gbps * 0.4})
        lost = 1 - times(slow_link, ep).gain / gain
        yield Check(f"EP {ep}, link at 40 % (collectives as they were): gain lost", lost, 0.05, 1)
        slow = machine.replaced({"matrix_tflops": machine.matrix_tflops * 0.9})
        yield Check(f"EP {ep}, products at 90 %: gain lost", 1 - times(slow, ep).gain / gain, 0.02, 0.12)
        half = times(machine, ep, tokens=2048)
        share = sum(half.fused.values()) / sum(of.fused.values())
        yield Check(f"EP {ep}, 2048 tokens: part of the fused time", share, 0.45, 0.60)


def variants(machine: Machine, found: Mapping[int, Times]) -> Iterator[tuple[str, dict[int, float], dict[int, float]]]:
    """(what, fused ms of both directions, gain) per EP size."""
    yield "as predicted", *_both(found)
    yield (
        "residual of the backward on the matrix units",
        *_both(
            {ep: of._replace(fused={**of.fused, "bwd": residual_on_matrix(machine, ep)}) for ep, of in found.items()}
        ),
    )
    dynamic = {ep: times(machine, ep, "taskflow-dynamic") for ep in found}
    yield f"tasks chosen at run time ({machine.task_us + machine.dynamic_task_us:.2f} us a task)", *_both(dynamic)
    list_order = {ep: times(machine, ep, "taskflow-critical-path") for ep in found}
    yield "list scheduling by critical path", *_both(list_order)
    yield "uniep's operators (tokens once per rank)", *_both({ep: times(machine, ep, "uniep") for ep in found})


def _both(found: Mapping[int, Times]) -> tuple[dict[int, float], dict[int, float]]:
    return {ep: sum(of.fused.values()) for ep, of in found.items()}, {ep: of.gain for ep, of in found.items()}


def residual_on_matrix(machine: Machine, ep: int) -> float:
    """ms of the fused backward if the time that no operator accounts for were work of the matrix units."""
    problem = Problem(SHAPE, ep, 4096, "balanced", "bwd")
    arrangement: Arrangement = STRATEGIES["taskflow"].arrange(problem, machine)
    operators = Operators(
        [dataclasses.replace(op, worker="matrix") if op.name == RESIDUAL else op for op in arrangement.operators]
    )
    return simulate(problem, machine, dataclasses.replace(arrangement, operators=operators)).makespan_ns / 1e6


class Moved(NamedTuple):
    """The effect of changing one parameter: gain per EP size, fused ms of both directions.  None: cannot be fitted."""

    key: str
    factor: float
    refitted: bool
    gain: dict[int, float] | None
    fused: dict[int, float] | None


def sensitivity(machine: Machine, done: Callable[[], None] = lambda: None) -> Iterator[Moved]:
    """Every parameter 10 % down and up: with the others unchanged, and with the fitted ones fitted again."""
    for key in VARIED:
        for factor in (0.9, 1.1):
            moved = machine.replaced(
                {k: v * factor for k, v in machine.values.items() if k == key or k.startswith(f"{key}_ep")}
            )
            for refit in (False, True):
                if refit and key in (fitting.ALL_TO_ALL, fitting.RESIDUAL):
                    continue
                try:
                    found = table(fitting.fit(moved) if refit else moved)
                except fitting.ConfigError:
                    yield Moved(key, factor, refit, None, None)
                else:
                    fused, gain = _both(found)
                    yield Moved(key, factor, refit, gain, fused)
                done()


def end_to_end(gain: float, share: float) -> float:
    """The gain of a whole step, if the layer takes `share` of it."""
    return 1 / (1 - share * (1 - 1 / gain))


def natural_gain(machine: Machine, ep: int) -> float:
    """The gain over both directions with natural routing: every rank is simulated."""
    total = {"serialized": 0, "taskflow": 0}
    for direction in DIRECTIONS:
        problem = Problem(SHAPE, ep, 4096, "natural", direction)
        for name in total:
            total[name] += simulate(problem, machine, STRATEGIES[name].arrange(problem, machine)).makespan_ns
    return total["serialized"] / total["taskflow"]

"""`uniep simulate --a3`: HyperParallel-MoE's table on Ascend A3."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from uniep.cli.progress import progress
from uniep.sim import ascend, fit
from uniep.sim.ascend import DIRECTIONS, LAYER_SHARES, VARIED, Check, Moved, Times
from uniep.sim.fit import SIZES
from uniep.sim.machine import Machine
from uniep.sim.problem import Problem
from uniep.sim.strategies import STRATEGIES, simulate


def reproduce(console: Console, machine: Machine, with_sensitivity: bool) -> dict[str, Any]:
    """Fit on the serialized columns, freeze, predict, print.  Returns what was printed, as numbers."""
    with progress(console, "fit", 1) as done:
        machine = fit.fit(machine)
        done()
    fitted = {key: round(value, 2) for key, value in machine.values.items() if "_ep" in key}
    console.print(f"fitted on the serialized columns: {', '.join(f'{k} {v:g}' for k, v in fitted.items())}\n")
    found = ascend.table(machine)
    console.print(_columns(found))
    checks = ascend.checks(found)
    with progress(console, "controls", 4 * len(SIZES)) as done:
        controls = []
        for control in ascend.controls(machine, found):
            controls.append(control)
            done()
    console.print(_checks("Predictions", checks))
    console.print(_checks("Controls", controls))
    variants = list(ascend.variants(machine, found))
    console.print(_variants(variants))
    natural = {ep: ascend.natural_gain(machine, ep) for ep in SIZES}
    steps = _end_to_end(console, machine, found, natural)
    document: dict[str, Any] = {
        "fitted": fitted,
        "predicted": {
            ep: {"serialized": of.serialized, "fused": of.fused, "gain": of.gain} for ep, of in found.items()
        },
        "checks": [{**c._asdict(), "holds": c.holds} for c in (*checks, *controls)],
        "variants": [{"what": what, "fused_ms": fused, "gain": gain} for what, fused, gain in variants],
        "natural_gain": natural,
        "end_to_end": steps,
    }
    if with_sensitivity:
        with progress(console, "sensitivity", 4 * len(VARIED) - 4) as done:
            moved = list(ascend.sensitivity(machine, done))
        console.print(_sensitivity(moved, found))
        document["sensitivity"] = [m._asdict() for m in moved]
    return document


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=number > 0)
    return table


def _columns(found: dict[int, Times]) -> Table:
    table = _table(
        "Dispatch-to-Combine, ms: published -> simulated", "EP", "serialized fwd", "bwd", "fused fwd", "bwd", "gain"
    )
    serialized, fused = fit.serialized_column(), fit.column("hyperparallel_fused")
    for ep, of in found.items():
        cells, totals = [], []
        for column, made in ((serialized, of.serialized), (fused, of.fused)):
            cells += [f"{column[f'{d}_ep{ep}']:.1f} -> {made[d]:.2f}" for d in DIRECTIONS]
            totals.append(sum(column[f"{d}_ep{ep}"] for d in DIRECTIONS))
        table.add_row(str(ep), *cells, f"{totals[0] / totals[1]:.2f} -> {of.gain:.2f}")
    return table


def _checks(title: str, checks: list[Check]) -> Table:
    table = _table(title, "what", "value", "must lie in", "")
    for c in checks:
        table.add_row(c.what, f"{c.value:.3f}", f"{c.low:.3f} .. {c.high:.3f}", "ok" if c.holds else "MISSED")
    return table


def _variants(variants: list[tuple[str, dict[int, float], dict[int, float]]]) -> Table:
    table = _table("Variants of the fused column: ms of both directions (gain)", "what", *(f"EP {ep}" for ep in SIZES))
    for what, fused, gain in variants:
        table.add_row(what, *(f"{fused[ep]:.2f} ({gain[ep]:.2f})" for ep in SIZES))
    return table


def _end_to_end(
    console: Console, machine: Machine, found: dict[int, Times], natural: dict[int, float]
) -> list[dict[str, Any]]:
    low, high = LAYER_SHARES
    table = _table(
        f"Gain of a step of which the layer takes {low:.0%} to {high:.0%} (published: 1.08, 1.09, 1.09)\n"
        "hidden: natural routing, and 61 % of the baseline's all-to-alls hide under other work",
        "EP", "balanced", "natural routing", "hidden",
    )  # fmt: skip
    rows = []
    for ep in SIZES:
        gains = {
            "balanced": found[ep].gain,
            "natural": natural[ep],
            "hidden": natural[ep] * _kept(machine, ep, found[ep]),
        }
        steps = {name: [round(ascend.end_to_end(g, share), 4) for share in LAYER_SHARES] for name, g in gains.items()}
        table.add_row(str(ep), *(f"{a:.3f} .. {b:.3f} (layer {gains[n]:.2f})" for n, (a, b) in steps.items()))
        rows.append({"ep": ep, "layer_gain": gains, "step_gain": steps})
    console.print(table)
    return rows


def _kept(machine: Machine, ep: int, of: Times) -> float:
    """Part of the serialized time that is left where 61 % of its all-to-alls hide under other work (the profile)."""
    travel = 0.0
    for direction in DIRECTIONS:
        problem = Problem(fit.SHAPE, ep, 4096, "balanced", direction)
        made = simulate(problem, machine, STRATEGIES["serialized"].arrange(problem, machine))
        graph, line = made.graph, made.timeline
        for name in ("dispatch", "return"):
            of_op = graph.op_N == graph.ops.index(name)
            travel += float(line.finish_N[of_op].max() - line.start_N[of_op].min()) / 1e6
    return 1 - 0.61 * travel / sum(of.serialized.values())


def _sensitivity(moved: list[Moved], found: dict[int, Times]) -> Table:
    table = _table(
        "Each parameter 10 % down and up: change of the gain, of the fused ms; EP 4, 8, 16",
        "parameter", "x", "others kept: gain", "fused", "fitted again: gain", "fused",
    )  # fmt: skip
    by = {(m.key, m.factor, m.refitted): m for m in moved}
    for key in VARIED:
        for factor in (0.9, 1.1):
            cells = []
            for refitted in (False, True):
                m = by.get((key, factor, refitted))
                if m is None:
                    cells += ["", ""]
                elif m.gain is None or m.fused is None:
                    cells += ["cannot be fitted", ""]
                else:
                    cells.append(" ".join(f"{m.gain[ep] / found[ep].gain - 1:+.1%}" for ep in SIZES))
                    cells.append(" ".join(f"{m.fused[ep] / sum(found[ep].fused.values()) - 1:+.1%}" for ep in SIZES))
            table.add_row(key, f"{factor:g}", *cells)
    return table

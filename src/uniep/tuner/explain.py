"""Why this point: its predicted and measured times, and the runner-up and why it loses."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from uniep.config import MoEConfig
from uniep.errors import ConfigError
from uniep.schedule import Schedule, default_schedule, parse_schedule
from uniep.tuner import tables
from uniep.tuner.model import Card, Load, Predicted, predict, times
from uniep.tuner.space import Points, differences, dimensions, get, points, refusals, replaced
from uniep.tuner.strategies import STRATEGIES

LEAST = 5e-4
"""Relative change of the time from which a dimension matters: what is shown as 0.1 %."""

SAME = 1e-4
"""Relative difference of two predictions below which the model does not tell them apart."""


def explain(
    cfg: MoEConfig, ep_size: int, backend: str, card: Card, shape: str, results: Sequence[Path] = (),
    found: tables.Found | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A document of plain values.  cfg: with max_tokens_per_rank of one call.  results: files of benchmarks/moe.py.
    found: what the tables say, if somebody has looked.

    choice: the table's, which may be the default, if a table of this card fits, else the fastest by the model.
    runner_up: the next best point of the table's search, else the fastest other one that the model tells from the
    choice.  measured_us: of calls of as many tokens.
    """
    space = points(backend, cfg, ep_size)
    load, usual = Load.uniform(cfg, ep_size), default_schedule(backend, cfg, ep_size)
    us_N = times(load, space, card)
    found = found or tables.find(cfg, ep_size, backend, card.name)
    order = us_N.argsort(stable=True).tolist()
    choice = found.schedule or (usual if found.file else None)
    if choice is None:
        choice = next(s for s in map(space.schedule, order) if not refusals(s, cfg, ep_size, backend))
    of_choice = predict(load, Points.of([choice]), card)
    us = float(of_choice.both)
    runner_up, why_not = _measured_runner_up(found.entry, choice)
    if runner_up is None:
        runner_up = _runner_up(space, order, us_N, us, choice, cfg, ep_size, backend)
    measured = list(_measured(cfg, ep_size, card, shape, results))
    if found.entry:
        source = f"{found.file}, commit {found.entry.get('commit', '?')}"
        tokens = found.entry.get("timed_tokens", found.entry["tokens"])
        measured += [
            {"us": us, "tokens": tokens, "changes": tables.as_changes(point, cfg, ep_size, backend), "source": source}
            for point, us in _times(found.entry)
        ]

    def of_point(schedule: Schedule) -> dict[str, Any]:
        differs = tables.as_changes(schedule, cfg, ep_size, backend)
        of = predict(load, Points.of([schedule]), card)
        same = [m for m in measured if m["changes"] == differs and m["tokens"] == cfg.max_tokens_per_rank]
        return {
            "changes": differs, "predicted_us": round(float(of.both), 1), "predicted_fwd_us": round(float(of.fwd), 1),
            "measured_us": same[-1]["us"] if same else None, "measured_by": same[-1]["source"] if same else None,
        }  # fmt: skip

    document = {
        "shape": shape, "ep": ep_size, "tokens": cfg.max_tokens_per_rank, "backend": backend, "card": card.name,
        "points": len(space), "serves": f"{found.file or 'the default Schedule'}: {found.why}",
        "by": "table" if found.file else "model",
        "choice": of_point(choice), "default": of_point(usual), "runner_up": None,
        "predicted_us": round(us, 1), "stages_us": {k: round(float(v), 1) for k, v in of_choice.parts.items()},
        "dimensions": _dimensions(choice, us, load, card, cfg, ep_size, backend),
        "strategies": _strategies(load, card, cfg, ep_size, backend), "measured": measured,
    }  # fmt: skip
    document["measured_us"] = document["choice"]["measured_us"]  # type: ignore[index]
    if runner_up is not None:
        document["runner_up"] = {
            **of_point(runner_up), "by": "table" if why_not else "model",
            "why": why_not or _why(runner_up, of_choice, load, card),
        }  # fmt: skip
        document["runner_up"]["differs_from_choice"] = {  # type: ignore[index]
            name: get(runner_up, name)
            for name in _names(backend, cfg, ep_size)
            if get(runner_up, name) != get(choice, name)
        }
    costs = {name: max(map(abs, of["costs"].values())) for name, of in document["dimensions"].items()}  # type: ignore[attr-defined]
    document["matters_most"] = next((name for name, cost in costs.items() if cost >= LEAST), None)
    document["choice"]["name"] = choice.name  # type: ignore[index]
    return document


def _names(backend: str, cfg: MoEConfig, ep_size: int) -> list[str]:
    return [d.name for d in dimensions(backend, cfg, ep_size)]


def _runner_up(
    space: Points,
    order: list[int],
    us_N: Tensor,
    us: float,
    choice: Schedule,
    cfg: MoEConfig,
    ep_size: int,
    backend: str,
) -> Schedule | None:
    """The fastest other point that the model tells from the choice."""
    for index in order:
        if abs(float(us_N[index]) / us - 1) > SAME:
            schedule = space.schedule(index)
            if schedule != choice and not refusals(schedule, cfg, ep_size, backend):
                return schedule
    return None


def _times(entry: dict[str, Any]) -> Iterator[tuple[Schedule, float]]:
    """(point, us) of a table's entry; what was timed again comes last."""
    usual, compared = tables.parse(entry["default"]), entry.get("compared", {})
    every = [(usual, entry.get("usual_us")), *((point, of.get("us")) for point, of in tables.tried(entry))]
    if pairs := compared.get("pairs_us"):
        again = usual, tables.parse(compared["changes"], usual)
        every += zip(again, map(statistics.median, zip(*pairs, strict=True)), strict=True)
    yield from ((point, us) for point, us in every if us)


def _measured_runner_up(entry: dict[str, Any], choice: Schedule) -> tuple[Schedule | None, str]:
    """What came next in the search of a table's entry, and by how much it lost."""
    if not entry:
        return None, ""
    usual, compared = tables.parse(entry["default"]), entry.get("compared")
    if compared is not None and compared["why"]:
        return tables.parse(compared["changes"], usual), f"timed again beside the choice, it was {compared['why']}"
    scores = {usual: 1.0} | {point: of["score"] for point, of in tables.tried(entry) if of.get("score")}
    stays = tables.stays(entry)
    mine = scores.pop(usual if stays else choice, None)
    best = min(scores, key=scores.__getitem__, default=None)
    if best is None or mine is None:
        return None, ""
    too_little = ", too little to be timed again" if stays and scores[best] < mine else ""
    return best, f"it took {scores[best] / mine:.3f} of the choice's time{too_little}"


def _why(other: Schedule, of_choice: Predicted, load: Load, card: Card) -> str:
    of = predict(load, Points.of([other]), card)
    lost = float(of.both) - float(of_choice.both)
    more = {name: float(us) - float(of_choice.parts[name]) for name, us in of.parts.items()}
    stage, most = max(more.items(), key=lambda item: item[1])
    begun = (
        f"{lost:.1f} us slower"
        if lost >= 0
        else f"{-lost:.1f} us faster by the model, but the table's Schedule was measured faster"
    )
    if most < max(lost, 1.0) * 0.1:
        return f"{begun}: no stage takes longer by itself, but less runs at the same time"
    return f"{begun}: its {stage} takes {most:.1f} us more by itself"


def _dimensions(
    choice: Schedule, us: float, load: Load, card: Card, cfg: MoEConfig, ep_size: int, backend: str
) -> dict[str, dict[str, Any]]:
    """For each dimension, the cost of its values with all others as in the choice; most expensive first."""
    out: dict[str, dict[str, Any]] = {}
    for dimension in dimensions(backend, cfg, ep_size):
        costs: dict[str, float] = {}
        for value in dimension.values[backend]:
            changed = replaced(choice, {dimension.name: value, **dimension.others(value)})
            if value != get(choice, dimension.name) and not refusals(changed, cfg, ep_size, backend):
                costs[str(value)] = round(float(predict(load, Points.of([changed]), card).both) / us - 1, 4)
        if costs:
            out[dimension.name] = {"is": get(choice, dimension.name), "costs": costs}
    return dict(sorted(out.items(), key=lambda item: -max(item[1]["costs"].values())))


def _strategies(load: Load, card: Card, cfg: MoEConfig, ep_size: int, backend: str) -> dict[str, float]:
    """Predicted us of the named strategies that the backend supports."""
    usual, out = default_schedule(backend, cfg, ep_size), {}
    for name, strategy in STRATEGIES.items():
        if backend in strategy.points:
            schedule = replaced(usual, strategy.points[backend])
            if not refusals(schedule, cfg, ep_size, backend):
                out[name] = round(float(predict(load, Points.of([schedule]), card).both), 1)
    return out


def _measured(
    cfg: MoEConfig, ep_size: int, card: Card, shape: str, results: Sequence[Path]
) -> Iterator[dict[str, Any]]:
    """Forward + backward of this call in result files.  `uniep` is assumed to be today's default."""
    for path in results:
        try:
            document = json.loads(path.read_text())
            meta, rows = document["meta"], document["rows"]
            here = meta["ep"] == ep_size and card.name in meta["card"].lower()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} is not a result file of benchmarks/moe.py ({type(error).__name__}: {error})"
            ) from None
        usual = default_schedule("hopper", cfg, ep_size)
        for row in rows if here else ():
            call = row["shape"], row["tokens"], row["routing"], row["load"], row["direction"]
            if call != (shape, cfg.max_tokens_per_rank, "balanced", "window", "fwd_bwd"):
                continue
            change = {"uniep": "", "uniep-serial": "overlap=serial"}.get(
                row["impl"], row["impl"].partition("uniep@")[2]
            )
            if row["impl"] in ("uniep", "uniep-serial") or change:
                yield {
                    "us": row["ms"] * 1e3, "tokens": row["tokens"],
                    "changes": differences(parse_schedule(change, usual), usual),
                    "source": f"{path.name}, commit {meta['commit']}, {row['impl']}",
                }  # fmt: skip

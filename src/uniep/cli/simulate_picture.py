"""A picture of simulated schedules: how many workers of each class are busy with what, over time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from uniep.cli import pictures
from uniep.cli.pictures import INK, MUTED, WIDTH, figure_style
from uniep.sim.strategies import Simulated
from uniep.taskflow.graph import GATE, WORKERS

COLORS = {
    "put": "#e8590c", "push": "#e8590c", "pull": "#e8590c", "dispatch": "#e8590c", "put_back": "#f08c00",
    "return": "#f08c00",
    "permute": "#ffc078", "sort": "#ffd8a8", "unsort": "#ffd8a8", "unpermute": "#ffc078", "keep": "#ffe8cc",
    "gate_up": "#2f6fde", "down_grad": "#2f6fde", "down": "#123a8c", "gate_up_grad": "#123a8c", "down_wgrad": "#b197fc",
    "gate_up_wgrad": "#7048e8", "activation": "#22b8cf", "activation_gradient": "#22b8cf", "combine": "#2b8a3e",
    "collect": "#0ca678", "dweight": "#63e6be", "group_sum": "#087f5b", "push_rows": "#f08c00",
    "recompute": "#5c9dea", "residual": "#adb5bd",
}  # fmt: skip
ABOUT = {"residual": "residual (fitted)"}
"""What the legend says of an operator, where its name is not enough."""
STEPS = 600


def draw_lanes(ran: Mapping[str, Simulated], title: str, path: Path) -> None:
    """One panel per schedule, one lane per class of workers; its filled height is the busy share, by operator."""
    plt = figure_style()
    until = max(made.makespan_ns for made in ran.values())
    figure, panels = plt.subplots(
        len(ran), figsize=(WIDTH, 1.9 + 1.5 * len(ran)), sharex=True, layout="constrained", squeeze=False
    )
    used: dict[str, None] = {}
    for axes, (name, made) in zip(panels[:, 0], ran.items(), strict=True):
        graph = made.graph
        here = graph.rank_N == 0
        for lane, worker in enumerate(WORKERS):
            of_class = here & (graph.classes == WORKERS.index(worker))
            ops = [o for o, op in enumerate(graph.ops) if op != GATE and bool((of_class & (graph.op_N == o)).any())]
            if not ops:
                continue
            parts = torch.stack([_running(made, of_class & (graph.op_N == o), until) for o in ops])
            most = max(float(parts.sum(0).max()), 1.0)
            base = torch.full((STEPS,), float(-lane))
            x = (torch.arange(STEPS) + 0.5) * until / STEPS / 1e6
            for o, part in zip(ops, parts, strict=True):
                top = base + 0.85 * part / most
                axes.fill_between(x, base, top, color=COLORS.get(graph.ops[o], "#d6336c"), linewidth=0, step="mid")
                used[graph.ops[o]] = None
                base = top
        axes.set_yticks([0.4, -0.6], WORKERS)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.axvline(made.makespan_ns / 1e6, color=MUTED, linewidth=0.8, linestyle=":")
        axes.set_title(f"{name}: {made.makespan_ns / 1e6:.2f} ms", loc="left", color=INK)
    panels[-1, 0].set_xlabel("ms")
    panels[-1, 0].set_xlim(0, until / 1e6 * 1.01)
    names: dict[str, list[str]] = {}  # operators of one kind have one colour, and one entry
    for name in used:
        names.setdefault(COLORS.get(name, "#d6336c"), []).append(ABOUT.get(name, name))
    figure.legend(
        [plt.Rectangle((0, 0), 1, 1, color=color) for color in names], [", ".join(of) for of in names.values()],
        loc="outside lower center", ncols=3, handlelength=1, handleheight=1,
    )  # fmt: skip
    pictures.title(figure, "What workers are busy with, simulated", f"{title}; height: the share of them that is busy")
    figure.savefig(path)
    plt.close(figure)


def _running(made: Simulated, chosen: torch.Tensor, until: int) -> torch.Tensor:
    """(STEPS,): mean number of these tasks that run in each step of time."""
    width = until / STEPS
    line = made.timeline
    edges = torch.zeros(STEPS + 1, dtype=torch.float64)
    for times, sign in ((line.start_N[chosen], 1.0), (line.finish_N[chosen], -1.0)):
        place = (times + made.start_ns).double() / width
        at = place.long().clamp(max=STEPS - 1)
        part = (place - at).clamp(0, 1)
        edges.index_add_(0, at, sign * (1 - part))
        edges.index_add_(0, at + 1, sign * part)
    return edges.cumsum(0)[:STEPS].clamp(min=0).float()

"""Draw docs/images/taskflow.png: one backward under four schedules, as the static scheduler plans it.

python docs/images/taskflow.py

The rank of 4 that ends last, with 4 matrix and 2 vector workers; costs are the model's for multiprocessors of an H200.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from uniep import MoEConfig, Schedule, Tile
from uniep.cli.pictures import INK, WIDTH, figure_style, title
from uniep.cli.timeline import KINDS
from uniep.routing import build_plan
from uniep.sim import load_machine
from uniep.taskflow.check import check
from uniep.taskflow.graph import GATE
from uniep.taskflow.lower import lower_backward
from uniep.taskflow.scheduler import assign
from uniep.way import resolve

SCHEDULES = {
    "serial": Schedule(overlap="serial", tile_order="natural"),
    "fused, local tiles first": Schedule(),
    "chunk-major, weight gradients interleaved": Schedule(
        tile_order="chunk-major", peer_order="rotated", weight_gradient_order="interleaved"
    ),
    "critical path (list scheduling)": Schedule(tile_order="critical-path", peer_order="rotated"),
}


OUT = Path(__file__).with_suffix(".png")
THIN_MS = 0.004
"""A task shorter than this is drawn as a line, which would else be narrower than its white edge."""


def main(out: Path = OUT) -> None:
    cfg = MoEConfig(hidden=2048, ffn=768, num_experts=16, top_k=4, max_tokens_per_rank=512)
    generator = torch.Generator().manual_seed(0)
    ids = [torch.rand(512, 16, generator=generator).topk(4)[1] for _ in range(4)]
    plans = [build_plan(ids, rank, cfg) for rank in range(4)]
    speeds = load_machine("h200-node").speeds
    plt, shown = figure_style(), dict[str, None]()
    figure, panels = plt.subplots(len(SCHEDULES), figsize=(WIDTH, 8.4), sharex=True, layout="constrained")
    for axes, (name, base) in zip(panels, SCHEDULES.items(), strict=True):
        schedule = dataclasses.replace(
            base, matrix_workers=4, vector_workers=2, gate_up=Tile(columns=256), down=Tile(columns=256)
        )
        way = resolve(cfg, 4, 512, schedule, backend="cpu")
        graph = lower_backward(plans, [512] * 4, cfg, way)
        made = assign(graph, way, speeds.cost(graph))
        check(graph, list(made.queues.values()))
        start, finish, remote = made.start_N.tolist(), made.finish_N.tolist(), graph.remote.tolist()
        last = int(graph.rank_N[made.finish_N.argmax()])
        lanes = list(made.of_rank(last).items())
        for lane, (_, queue) in enumerate(lanes):
            for index in queue:
                op = graph.ops[int(graph.op_N[index])]
                if op == GATE:
                    continue
                kind = "push dO" if op == "push" else f"{op} local" if op == "down_grad" and not remote[index] else op
                width = (finish[index] - start[index]) / 1e6
                thin = width < THIN_MS
                axes.barh(lane, width, left=start[index] / 1e6, height=0.8, color=KINDS[kind].color,
                          edgecolor=KINDS[kind].color if thin else "white", linewidth=1.0 if thin else 0.3)  # fmt: skip
                shown[kind] = None
        classes = [str(name).split()[0] for name, _ in lanes]
        places = {name: [n for n, c in enumerate(classes) if c == name] for name in dict.fromkeys(classes)}
        axes.set_yticks([sum(of) / len(of) for of in places.values()], list(places))
        axes.invert_yaxis()
        axes.set_title(f"{name}: {made.makespan_ns / 1e6:.2f} ms", loc="left", color=INK)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
    panels[-1].set_xlabel("ms")
    panels[-1].set_xlim(left=0)
    figure.legend(
        [plt.Rectangle((0, 0), 1, 1, color=KINDS[name].color) for name in KINDS if name in shown],
        [KINDS[name].label for name in KINDS if name in shown],
        loc="outside lower center", ncols=2, handlelength=1, handleheight=1,
    )  # fmt: skip
    about = "the rank of four that ends last; four matrix and two vector workers; times of the cost model"
    title(figure, "One backward, four schedules of the same tasks", about)
    figure.savefig(out)
    plt.close(figure)


if __name__ == "__main__":
    main()

"""Tasks per second of the engine of the simulator: a backward of DeepSeek-V3 on 8 ranks, with and without contention.

python benchmarks/engine.py
"""

from __future__ import annotations

import time

import torch

from uniep.schedule import Schedule, Tile
from uniep.shapes import SHAPES
from uniep.sim import Problem, load_machine
from uniep.sim.costs import Costs, costs
from uniep.sim.engine import Queue, run
from uniep.taskflow.layer import backward_operators
from uniep.taskflow.lower import compile_graph
from uniep.way import resolve


def main() -> None:
    torch.set_num_threads(1)
    problem, machine = Problem(SHAPES["deepseek-v3-256"], 8, 4096, "uniform", "bwd"), load_machine("h200-node")
    schedule = Schedule(gate_up=Tile(columns=128), down=Tile(columns=128))
    way = resolve(problem.cfg, problem.ep, problem.tokens, schedule, backend="cpu")
    operators, sites = backward_operators(way), problem.sites(way)
    graph = compile_graph(operators, sites)
    shared = costs(graph, operators, sites, machine)
    queues = [Queue(rank, "worker", 132, graph.indices(rank).tolist()) for rank in range(graph.ep_size)]
    for what, of in (("without", Costs.without_contention(graph, shared.alone_N)), ("with", shared)):
        start = time.process_time()
        made = run(graph, queues, of)
        seconds = time.process_time() - start
        print(
            f"{what} contention: {graph.num_tasks} tasks in {seconds:.2f} s of one core, "
            f"{graph.num_tasks / seconds:,.0f} tasks/s; makespan {made.makespan_ns / 1e6:.3f} ms"
        )


if __name__ == "__main__":
    main()

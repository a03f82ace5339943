"""Lists that the device makes from a plan, interpreted: the compiler's, and an order in which nothing blocks."""

import dataclasses
import itertools
import random

import pytest
import torch

from uniep.config import MoEConfig
from uniep.kernels import lists as tasks
from uniep.kernels.arguments import Rows
from uniep.launch import mega as launch_mega
from uniep.launch.driver import Bundle
from uniep.layout import backward_tiles, forward_tiles, steps
from uniep.routing import build_plan
from uniep.schedule import Schedule, Tile
from uniep.stages import Flags
from uniep.taskflow import order as order_module
from uniep.taskflow import stretches
from uniep.taskflow.lower import lower_backward, lower_forward
from uniep.taskflow.scheduler import assign
from uniep.way import resolve
from uniep.workloads import workload

FIELDS = {
    "tile_order": ("natural", "local-first", "chunk-major", "critical-path"),
    "chunk_experts": (1, 2, 3),
    "peer_order": ("natural", "rotated"),
    "weight_gradient_order": ("last", "interleaved"),
}


def random_case(seed: int, **fixed):
    """(cfg, way, ids of all ranks).  fixed: fields of the Schedule."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    ranks = chance.choice((1, 2, 4))
    experts, tokens = ranks * chance.randint(1, 5), [chance.randint(0, 150) for _ in range(ranks)]
    top_k, rows = chance.randint(1, min(experts, 4)), chance.choice((64, 128))

    def tile():
        return Tile(rows=rows, columns=chance.choice((128, 256)), group_rows=chance.choice((1, 2, 8)))

    schedule = Schedule(
        overlap="mega", gate_up=tile(), down=tile(),
        weight_gradient=Tile(rows=chance.choice((64, 128)), columns=chance.choice((64, 128))),
        **{name: chance.choice(values) for name, values in FIELDS.items()} | fixed,
    )  # fmt: skip
    cfg = MoEConfig(
        hidden=chance.choice((72, 264)), ffn=chance.choice((136, 200)), num_experts=experts, top_k=top_k,
        max_tokens_per_rank=max(1, *tokens), dtype=torch.float32,
    )  # fmt: skip
    ids = [torch.randint(-1, experts, (t, top_k)) for t in tokens]
    if chance.random() < 0.3:  # an expert with most rows
        ids = [torch.where(torch.rand(i.shape) < 0.7, 0, i) for i in ids]
    return cfg, resolve(cfg, ranks, max(tokens), schedule), ids


def made_lists(plan, cfg, way, rank, *, backward, w13=True, w2=True):
    """`launch_lists` for a CPU's plan: (matrix, vector, what tiles of an expert's first product, and others, need)."""
    start = plan.expert_start_e1.int()
    local, tile_rows = len(start) - 1, way.gate_up.rows
    counts = plan.counts_RE.int()
    count_e = (start.diff() // tile_rows).long()
    num_m = int(count_e.sum())
    expert_M = torch.arange(local, dtype=torch.int32).repeat_interleave(count_e)
    tables = dict.fromkeys(Rows._fields) | {
        "start_e1": start, "rows_e": counts[:, rank * local : (rank + 1) * local].sum(0, dtype=torch.int32),
        "expert_M": torch.cat([expert_M, torch.zeros(1, dtype=torch.int32)]),
        "totals": torch.tensor([num_m * tile_rows, num_m], dtype=torch.int32),
    }  # fmt: skip
    tiles = backward_tiles(cfg, way, w13=w13, w2=w2) if backward else forward_tiles(cfg, way)
    order = order_module.positions(cfg, way, backward=backward) if way.critical_path else None
    made = launch_mega.TaskLists.empty(num_m + 2, local, tiles, torch.device("cpu"), backward=backward, order=order)
    lists = made.lists
    lists.matrix.fill_(-1)
    launch_mega.launch_lists(counts, Bundle(Rows(**tables)), made, way, rank, 1, backward=backward)
    num_tasks = num_m * (tiles[0] + tiles[1]) + local * (tiles[2] + tiles[3])
    need = lists.counters[tasks.COUNTERS.value + 2 * num_m :][: 2 * local].view(local, 2).tolist()
    assert lists.counters[: tasks.COUNTERS.value + 2 * num_m].tolist() == [
        num_tasks if word == tasks.TASKS.value else 0 for word in range(tasks.COUNTERS.value + 2 * num_m)
    ]
    return lists.matrix[:num_tasks], lists.vector[: num_m * (tiles[0] + 1)], need


MATRIX_OPS = ("gate_up", "down"), ("down_grad", "gate_up_grad", "down_wgrad", "gate_up_wgrad")
VECTOR_OPS = (), ("activation_gradient", "dweight")
"""Names in a `TaskGraph` of the operators of each list, forward and backward."""


def descriptors(word_n, ops, cfg, way):
    """Words of a list of these operators as (operator, group, row0, row1, column0, column1): a `TaskGraph`'s."""
    tile, weight_tile = way.down, way.weight_gradient
    columns = {  # (step, extent)
        "gate_up": (way.gate_up.columns // 2, cfg.ffn), "down": (tile.columns, cfg.hidden),
        "down_grad": (tile.columns, cfg.ffn), "gate_up_grad": (tile.columns, cfg.hidden),
        "activation_gradient": (tile.columns, cfg.ffn), "dweight": (1, 1),
    }  # fmt: skip
    found = []
    for word in word_n.tolist():
        op, expert, number = ops[word >> 56], word >> 40 & 0xFFFF, word & 0xFFFFFFFFFF
        if op in columns:
            step, extent = columns[op]
            row, column = (number >> 16) * tile.rows, (number & 0xFFFF) * step
            found.append((op, expert, row, row + tile.rows, column, min(column + step, extent)))
        elif op == "down_wgrad":
            row, column = (
                i * s
                for i, s in zip(
                    divmod(number, steps(cfg.ffn, weight_tile.columns)),
                    (weight_tile.rows, weight_tile.columns),
                    strict=True,
                )
            )
            ends = min(row + weight_tile.rows, cfg.hidden), min(column + weight_tile.columns, cfg.ffn)
            found.append((op, expert, row, ends[0], column, ends[1]))
        else:
            block, m = divmod(number, steps(cfg.hidden, weight_tile.rows))
            part, n = divmod(block, steps(cfg.ffn, weight_tile.columns))
            row, column = n * weight_tile.columns, m * weight_tile.rows
            ends = min(row + weight_tile.columns, cfg.ffn), min(column + weight_tile.rows, cfg.hidden)
            found.append((op, expert, part * cfg.ffn + row, part * cfg.ffn + ends[0], column, ends[1]))
    return found


def compiled(graph, rank, worker, ops):
    index = graph.indices(rank, worker)
    return [(graph.ops[op], *block) for op, *block in graph.descriptors(index).tolist() if graph.ops[op] in ops]


@pytest.mark.parametrize("seed", range(8))
def test_lists_are_the_compilers(seed):
    check_lists(seed, *random_case(seed))


def any_order(cfg, way, *, backward, chance):
    """Places of stretches, in a random order in which each comes behind what it reads."""
    local = cfg.experts_per_rank(way.ep_size)
    places = torch.zeros(4, 2, local, dtype=torch.int32)
    left = [
        (op, half, e) for op in range(4 if backward else 2) for half in range(2 if op < 2 else 1) for e in range(local)
    ]
    for place in range(len(left)):
        first = {(half, e) for op, half, e in left if op == 0}
        free = [s for s in left if s[0] == 0 or not {(h, s[2]) for h in ((0, 1) if backward else s[1:2])} & first]
        op, half, e = chosen = chance.choice(free)
        left.remove(chosen)
        places[op, slice(None) if op > 1 else half, e] = place
    return places


def balanced_case(seed):
    """Two or four ranks, every expert equally often, in the order of the static scheduler."""
    cfg, way, ids = random_case(2 * seed, tile_order="critical-path")
    ranks = 2 + 2 * (seed % 2)
    cfg = dataclasses.replace(cfg, num_experts=2 * ranks, top_k=2, max_tokens_per_rank=96)
    ids = workload("balanced", tokens=96 * ranks, num_experts=cfg.num_experts, top_k=2, shards=ranks).split(ranks)
    return cfg, resolve(cfg, ranks, 96, way.given[0]), ids


@pytest.mark.parametrize("seed", range(2))
def test_balanced_lists_are_the_static_schedulers(seed):
    """Stretch by stretch in the order in which the scheduler has started them, and word for word the compiler's."""
    cfg, way, ids = balanced_case(seed)
    check_lists(seed, cfg, way, ids)
    graph, cost_N = stretches.problem(cfg, way, way.given[2], backward=True)
    made = assign(graph, dataclasses.replace(way, matrix_workers=1, vector_workers=graph.num_tasks), cost_N)
    wanted = [(graph.ops[graph.op_N[i]], *graph.block_N5[i, :2].tolist()) for i in made.order(0, "matrix")]
    for rank in range(len(ids)):
        plan = build_plan(ids, rank, cfg)
        matrix, _, _ = made_lists(plan, cfg, way, rank, backward=True)
        source_N = torch.where(plan.row_return_N >= 0, plan.row_return_N // (cfg.max_tokens_per_rank * cfg.top_k), rank)
        found = [
            (op, expert, int(not op.endswith("wgrad") and bool((source_N[row0:row1] != rank).any())))
            for op, expert, row0, row1, *_ in descriptors(matrix, MATRIX_OPS[1], cfg, way)
        ]
        found = [key for key, _ in itertools.groupby(found)]
        assert found == [key for key in wanted if key in set(found)]
        assert {op for op, *_ in found} == set(MATRIX_OPS[1])


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_stretches_does(seed, monkeypatch):
    """Also one that no scheduler would choose, and for all tokens to one expert: the compiler's, and nothing blocks."""
    cfg, way, ids = random_case(seed, tile_order="critical-path")
    if seed % 3 == 0:
        ids = [torch.where(i >= 0, cfg.num_experts - 1, i) for i in ids]
    tables = {
        backward: any_order(cfg, way, backward=backward, chance=random.Random(seed)) for backward in (False, True)
    }
    monkeypatch.setattr(order_module, "positions", lambda cfg, way, *, backward: tables[backward])
    check_lists(seed, cfg, way, ids)
    check_nothing_blocks(seed, cfg, way, ids)


def check_lists(seed, cfg, way, ids):
    plans = [build_plan(ids, rank, cfg) for rank in range(len(ids))]
    tokens = [t.shape[0] for t in ids]
    w13, w2 = seed % 4 != 1, seed % 4 != 2
    forward = lower_forward(plans, tokens, cfg, way, keep=True)
    backward = lower_backward(plans, tokens, cfg, way, Flags(w13=w13, w2=w2))
    for rank, plan in enumerate(plans):
        matrix, _, _ = made_lists(plan, cfg, way, rank, backward=False)
        ops = MATRIX_OPS[0]
        assert descriptors(matrix, ops, cfg, way) == compiled(forward, rank, "matrix", ops)
        matrix, vector, _ = made_lists(plan, cfg, way, rank, backward=True, w13=w13, w2=w2)
        ops = MATRIX_OPS[1]
        assert descriptors(matrix, ops, cfg, way) == compiled(backward, rank, "matrix", ops)
        ops = VECTOR_OPS[1]
        assert descriptors(vector, ops, cfg, way) == compiled(backward, rank, "vector", ops)


class Program:
    """The claims of one program of a backward, as `backward_kernel` makes them."""

    def __init__(self):
        self.matrix = self.vector = None
        self.running = None


@pytest.mark.parametrize("seed", range(8))
def test_nothing_blocks(seed):
    """Any number of programs that claim in turns, and hold a next place while they work, finish all tasks."""
    check_nothing_blocks(seed, *random_case(seed))


def check_nothing_blocks(seed, cfg, way, ids):
    chance = random.Random(seed)
    rank = chance.randrange(len(ids))
    plan = build_plan(ids, rank, cfg)
    matrix, vector, need = made_lists(plan, cfg, way, rank, backward=True)
    blocks = {
        "matrix": descriptors(matrix, MATRIX_OPS[1], cfg, way),
        "vector": descriptors(vector, VECTOR_OPS[1], cfg, way),
    }
    start = plan.expert_start_e1.tolist()
    mixed = way.chunk_experts > 0 or way.critical_path
    done, claimed = set(), {"matrix": 0, "vector": 0}

    def claim(worker):
        claimed[worker] += 1
        return claimed[worker] - 1

    def ready(worker, place):
        op, expert, row0, row1, *_ = blocks[worker][place]
        if op == "down_grad":
            return True  # peers push without waiting
        before = "down_grad" if op == "activation_gradient" else "activation_gradient"
        if op.endswith("wgrad"):
            row0, row1 = start[expert], start[expert + 1]
        other = "matrix" if before == "down_grad" else "vector"
        return all((other, i) in done for i, t in enumerate(blocks[other]) if t[0] == before and row0 <= t[2] < row1)

    programs = [Program() for _ in range(chance.choice((1, 2, 5, 40)))]
    waiting = 0
    while len(done) < len(matrix) + len(vector):
        program = chance.choice(programs)
        if program.matrix is None:
            program.matrix, program.vector = claim("matrix"), claim("vector")
        if program.running is None:
            worker = "vector"
            if program.matrix < len(matrix):
                op, expert = blocks["matrix"][program.matrix][:2]
                is_later = op != "down_grad"
                if program.vector >= (need[expert][is_later] if mixed or is_later else 0):
                    worker = "matrix"
            place = getattr(program, worker)
            if place >= len(blocks[worker]):
                continue
            program.running, program.next = (worker, place), claim(worker)
        if ready(*program.running):
            done.add(program.running)
            setattr(program, program.running[0], program.next)
            program.running, waiting = None, 0
        else:
            waiting += 1
            assert waiting < 2000 * len(programs), f"blocked: {[p.running for p in programs]}"

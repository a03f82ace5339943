"""Lists that the device makes from a plan, interpreted: the compiler's, and an order in which nothing blocks."""

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
from uniep.taskflow.lower import lower_backward, lower_forward

FIELDS = {
    "tile_order": ("natural", "local-first", "chunk-major"),
    "chunk_experts": (1, 2, 3),
    "peer_order": ("natural", "rotated"),
    "weight_gradient_order": ("last", "interleaved"),
}


def random_case(seed: int):
    """(cfg, schedule, ids of all ranks)."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    ranks = chance.choice((1, 2, 4))
    experts, tokens = ranks * chance.randint(1, 5), [chance.randint(0, 150) for _ in range(ranks)]
    top_k, rows = chance.randint(1, min(experts, 4)), chance.choice((64, 128))

    def tile():
        return Tile(rows=rows, columns=chance.choice((128, 256)), group_rows=chance.choice((1, 2, 8)))

    schedule = Schedule(
        overlap="mega", gemm1=tile(), gemm2=tile(),
        weight_gradient=Tile(rows=chance.choice((64, 128)), columns=chance.choice((64, 128))),
        **{name: chance.choice(values) for name, values in FIELDS.items()},
    )  # fmt: skip
    cfg = MoEConfig(
        hidden=chance.choice((72, 264)), ffn=chance.choice((136, 200)), num_experts=experts, top_k=top_k,
        max_tokens_per_rank=max(1, *tokens), dtype=torch.float32,
    )  # fmt: skip
    ids = [torch.randint(-1, experts, (t, top_k)) for t in tokens]
    if chance.random() < 0.3:  # an expert with most rows
        ids = [torch.where(torch.rand(i.shape) < 0.7, 0, i) for i in ids]
    return cfg, schedule, ids


def made_lists(plan, cfg, schedule, rank, *, backward, w13=True, w2=True):
    """`launch_lists` for a CPU's plan: (matrix, vector, what expert's tasks need)."""
    start = plan.expert_start_e1.int()
    local, tile_rows = len(start) - 1, schedule.gemm1.rows
    counts = plan.counts_RE.int()
    count_e = (start.diff() // tile_rows).long()
    num_m = int(count_e.sum())
    expert_M = torch.arange(local, dtype=torch.int32).repeat_interleave(count_e)
    tables = dict.fromkeys(Rows._fields) | {
        "start_e1": start, "rows_e": counts[:, rank * local : (rank + 1) * local].sum(0, dtype=torch.int32),
        "expert_M": torch.cat([expert_M, torch.zeros(1, dtype=torch.int32)]),
        "totals": torch.tensor([num_m * tile_rows, num_m], dtype=torch.int32),
    }  # fmt: skip
    tiles = backward_tiles(cfg, schedule, w13=w13, w2=w2) if backward else forward_tiles(cfg, schedule)
    made = launch_mega.TaskLists.empty(num_m + 2, local, tiles, torch.device("cpu"), backward=backward)
    lists = made.lists
    lists.matrix.fill_(-1)
    launch_mega.launch_lists(counts, Bundle(Rows(**tables)), made, schedule, rank, 1, backward=backward)
    num_tasks = num_m * (tiles[0] + tiles[1]) + local * (tiles[2] + tiles[3])
    need = lists.counters[tasks.COUNTERS.value + 2 * num_m :][:local].tolist()
    assert lists.counters[: tasks.COUNTERS.value + 2 * num_m].tolist() == [
        num_tasks if word == tasks.TASKS.value else 0 for word in range(tasks.COUNTERS.value + 2 * num_m)
    ]
    return lists.matrix[:num_tasks], lists.vector[: num_m * (tiles[0] + 1)], need


MATRIX_OPS = ("gemm1", "gemm2"), ("dgrad2", "dgrad1", "wgrad2", "wgrad1")
VECTOR_OPS = (), ("activation_gradient", "dweight")
"""Names in a `TaskGraph` of the operators of each list, forward and backward."""


def descriptors(word_n, ops, cfg, schedule):
    """Words of a list of these operators as (operator, group, row0, row1, column0, column1): a `TaskGraph`'s."""
    tile, weight_tile = schedule.gemm2, schedule.weight_gradient
    columns = {  # (step, extent)
        "gemm1": (schedule.gemm1.columns // 2, cfg.ffn), "gemm2": (tile.columns, cfg.hidden),
        "dgrad2": (tile.columns, cfg.ffn), "dgrad1": (tile.columns, cfg.hidden),
        "activation_gradient": (tile.columns, cfg.ffn), "dweight": (1, 1),
    }  # fmt: skip
    found = []
    for word in word_n.tolist():
        op, expert, number = ops[word >> 56], word >> 40 & 0xFFFF, word & 0xFFFFFFFFFF
        if op in columns:
            step, extent = columns[op]
            row, column = (number >> 16) * tile.rows, (number & 0xFFFF) * step
            found.append((op, expert, row, row + tile.rows, column, min(column + step, extent)))
        elif op == "wgrad2":
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


@pytest.mark.parametrize("seed", range(12))
def test_lists_are_the_compilers(seed):
    cfg, schedule, ids = random_case(seed)
    plans = [build_plan(ids, rank, cfg) for rank in range(len(ids))]
    tokens = [t.shape[0] for t in ids]
    w13, w2 = seed % 4 != 1, seed % 4 != 2
    forward = lower_forward(plans, tokens, cfg, schedule, keep=True)
    backward = lower_backward(plans, tokens, cfg, schedule, w13=w13, w2=w2)
    for rank, plan in enumerate(plans):
        matrix, _, _ = made_lists(plan, cfg, schedule, rank, backward=False)
        ops = MATRIX_OPS[0]
        assert descriptors(matrix, ops, cfg, schedule) == compiled(forward, rank, "matrix", ops)
        matrix, vector, _ = made_lists(plan, cfg, schedule, rank, backward=True, w13=w13, w2=w2)
        ops = MATRIX_OPS[1]
        assert descriptors(matrix, ops, cfg, schedule) == compiled(backward, rank, "matrix", ops)
        ops = VECTOR_OPS[1]
        assert descriptors(vector, ops, cfg, schedule) == compiled(backward, rank, "vector", ops)


class Program:
    """The claims of one program of a backward, as `backward_kernel` makes them."""

    def __init__(self):
        self.matrix = self.vector = None
        self.running = None


@pytest.mark.parametrize("seed", range(12))
def test_nothing_blocks(seed):
    """Any number of programs that claim in turns, and hold a next place while they work, finish all tasks."""
    cfg, schedule, ids = random_case(seed)
    chance = random.Random(seed)
    rank = chance.randrange(len(ids))
    plan = build_plan(ids, rank, cfg)
    matrix, vector, need = made_lists(plan, cfg, schedule, rank, backward=True)
    blocks = {
        "matrix": descriptors(matrix, MATRIX_OPS[1], cfg, schedule),
        "vector": descriptors(vector, VECTOR_OPS[1], cfg, schedule),
    }
    start = plan.expert_start_e1.tolist()
    chunked = schedule.chunk_experts if schedule.tile_order == "chunk-major" else None
    done, claimed = set(), {"matrix": 0, "vector": 0}

    def claim(worker):
        claimed[worker] += 1
        return claimed[worker] - 1

    def ready(worker, place):
        op, expert, row0, row1, *_ = blocks[worker][place]
        if op == "dgrad2":
            return True  # peers push without waiting
        before = "dgrad2" if op == "activation_gradient" else "activation_gradient"
        if op.startswith("wgrad"):
            row0, row1 = start[expert], start[expert + 1]
        other = "matrix" if before == "dgrad2" else "vector"
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
                of = expert if op != "dgrad2" else expert - 2 * chunked if chunked else -1
                if program.vector >= (need[of] if of >= 0 else 0):
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

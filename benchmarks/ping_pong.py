"""dO @ W2 with the activation's gradient in its epilogue, by two warpgroups in turn, against today's two kernels.

    python benchmarks/ping_pong.py --json benchmarks/results/h200x1_ping_pong.json
    python benchmarks/ping_pong.py --offline              # no GPU: compiles, prints registers, spills, shared memory

One GPU, rows and experts of one of two ranks.  A kernel in Gluon (Triton 3.6 or 3.7): a producer of four warps fills a
ring of stages with rows of dO (cp.async) and W2 (TMA).  Two consumer warpgroups own whole tiles and take turns with
their main loops, so that one's epilogue runs under the other's products.  The epilogue goes by chunks of 64 x 32:

    raw = dO[rows] @ W2[e]                     fp32, k ascending, never in global memory
    dh  = cast(gradient of SwiGLU at h)        (N, 2, F)
    act = cast(weight * f(h))                  (N, F), what dW2 contracts
    groups = sums of raw * f(h) of 64 columns  (N, F / 64) fp32, adjacent pairs

"pp128", "pp64": tiles of 128 x 128, of 64 x 256.  sN: stages.  hN: buffers for N chunks of gate and up.  Each consumer
has its own buffers, which it refills once a chunk is done.  "ahead": both share the buffers, and dgate and dup leave
from where gate and up were.  Who has left a buffer refills it with what comes N chunks later, in the end with the
other's tile: with h8 all of h is fetched during the main loop before it.  What a chunk sends has to have left when the
next one has sent, too.  "b2": two chunks are handed to TMA at once.  "bare": the epilogue of two chunks of eight only;
nearly the product alone.  "no loads" (of h), "no stores", "no arithmetic", "no sums" (of d(weight)): what each part of
an epilogue costs.  Results of these are wrong by design and not compared.

All others are compared with today's kernels bit by bit before they are timed: a small case with received tokens, then
the full one.  Found on an H200 (969a1eb, Triton 3.6, T = 8192, window, ms): exact bits, but no gain.

    | | qwen3-30b | qwen3-235b |
    |---|---:|---:|
    | product alone, both kernels | 0.342, 0.486 | 1.194, 1.421 |
    | pp128: s5 h2, s5 ahead h4, s4 ahead h8 | 0.605, 0.684, 0.657 | 1.583, 1.598, 1.685 |
    | pp64: s4 h2, s4 ahead h4, s3 ahead h8 | 0.546, 0.559, 0.584 | 1.467, 1.476, 1.819 |
    | bare: pp128 s5, pp64 s4 | 0.335, 0.361 | 1.261, 1.332 |
    | pp128 s4 ahead h8 without loads, stores | 0.499, 0.451 | 1.446, 1.384 |
    | the same without arithmetic, sums | 0.422, 0.468 | 1.464, 1.499 |

Two tiles take as long as two main loops, or as one and an epilogue if that is longer.  So an epilogue of pp128 s4 ahead
h8 takes 42 and 45 us, where a main loop takes 14 and 27.  Alone, loads cost 13 and 10 of these, stores 18 and 13,
arithmetic 20 and 9, sums 16 and 8: no part decides.  Fetching h ahead gains nothing, so the wait for h is not it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
import select
import statistics
import subprocess
import sys
import tempfile
import time
import unittest.mock
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import timing
from cases import parse_shape
from moe import add_file_options, of_run
from products import Products
from results import write
from uniep.kernels.activation import activate, gate_gradient, up_gradient
from uniep.kernels.arguments import ALL_HERE, Activation, Rows, Tokens
from uniep.kernels.gemm import halves
from uniep.kernels.gradients import tile_coordinates
from uniep.kernels.ptx import narrow
from uniep.kernels.trees import pair_tree_sum
from uniep.launch import staged
from uniep.launch.driver import Bundle, tensor, unbind
from uniep.layout import GROUP_BITS
from uniep.weights import ExpertWeights

partition_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # Triton 3.6, 3.7

TABLE_ROWS = gl.constexpr(128)  # of a row tile in the tables
GROUP_M = gl.constexpr(8)  # of these, how many share a column of weights, of any expert (today's end with one)
DEPTH = gl.constexpr(64)  # of a stage
CHUNK = gl.constexpr(32)  # columns
CHUNK_BYTES = gl.constexpr(2 * 64 * 32 * 2)  # of gate and up
GROUP = gl.constexpr(64)  # columns of a sum of d(weight)
PRODUCER_WARPS = gl.constexpr(4)
SHARED_LIMIT = 232448


class Variant(NamedTuple):
    """A tile, stages of the ring, chunks of h with a buffer (of a consumer, or of both: AHEAD), chunks of a handover
    to TMA, chunks of a tile, and the part of the epilogue that is left out."""

    ROWS: int
    COLUMNS: int
    STAGES: int
    BUFFERS: int = 2
    AHEAD: bool = False
    BATCH: int = 1
    CHUNKS: int = 8
    WITHOUT: str = ""


_AHEAD = Variant(128, 128, 4, 8, True)
VARIANTS = {
    "pp128 s5 h2": Variant(128, 128, 5),
    "pp64 s4 h2": Variant(64, 256, 4),
    "pp128 s4 ahead h8": _AHEAD,
    "pp128 s4 ahead h8 b2": _AHEAD._replace(BATCH=2),
    "pp128 s5 ahead h4": Variant(128, 128, 5, 4, True),
    "pp64 s3 ahead h8": Variant(64, 256, 3, 8, True),
    "pp64 s3 ahead h8 b2": Variant(64, 256, 3, 8, True, 2),
    "pp64 s4 ahead h4": Variant(64, 256, 4, 4, True),
    "pp128 s5 bare": Variant(128, 128, 5, CHUNKS=2),
    "pp64 s4 bare": Variant(64, 256, 4, CHUNKS=2),
} | {f"pp128 s4 ahead no {part}": _AHEAD._replace(WITHOUT=part) for part in ("loads", "stores", "arithmetic", "sums")}


@gluon.jit
def tile_of(step, num_m, order_ptr, F: gl.constexpr, V: gl.constexpr):
    """(first row, first column, row tile of the tables) of a step; past the last one any tile."""
    NUM_N: gl.constexpr = (F + V.COLUMNS - 1) // V.COLUMNS
    PER: gl.constexpr = TABLE_ROWS // V.ROWS
    step = gl.maximum(gl.minimum(step, num_m * NUM_N - 1), 0)
    position, n = tile_coordinates(step, gl.maximum(num_m, 1), NUM_N, GROUP_M * PER)
    m = gl.load(order_ptr + position // PER)
    return m * TABLE_ROWS + position % PER * V.ROWS, n * V.COLUMNS, m


@gluon.jit
def produce(dy, w2, tables, ring, steps, D: gl.constexpr, F: gl.constexpr, V: gl.constexpr):
    """Fills the ring, tile by tile.  Tables are read a tile ahead, the order two."""
    num_m, num_steps = steps
    dy_ptr, received_ptr, num_received = dy
    order_ptr, expert_ptr, source_ptr = tables
    a_ring, b_ring, full, empty = ring
    UNROLL: gl.constexpr = 4 if D % (4 * DEPTH) == 0 else 1
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (DEPTH // 8), DEPTH // 8], [gl.num_warps(), 1], [1, 0])
    r = gl.arange(0, V.ROWS, gl.SliceLayout(1, layout))
    c = gl.arange(0, DEPTH, gl.SliceLayout(0, layout))
    first = gl.program_id(0)
    programs = gl.num_programs(0)
    stage = 0
    phase = 1  # the ring starts empty
    row, column, m = tile_of(first, num_m, order_ptr, F, V)
    source = gl.load(source_ptr + row + r)
    expert = gl.load(expert_ptr + m)
    next_row, next_column, next_m = tile_of(first + programs, num_m, order_ptr, F, V)
    for step in range(first, num_steps, programs):
        source_row = gl.where(source >= 0, source, -source - 1).to(gl.int64)
        base = gl.where(source >= 0, dy_ptr.to(gl.int64), received_ptr.to(gl.int64)) + source_row * (D * 2)
        here = (-source - 1 < num_received)[:, None]  # pad rows are not read: zeros
        rows = gl.multiple_of(base.to(dy_ptr.dtype), 16)[:, None]
        w_row = expert * D
        w_column = column + 0
        next_source = gl.load(source_ptr + next_row + r)
        next_expert = gl.load(expert_ptr + next_m)
        after_row, after_column, after_m = tile_of(step + 2 * programs, num_m, order_ptr, F, V)
        for k in range(0, D, UNROLL * DEPTH):
            for u in gl.static_range(UNROLL):
                bar = full.index(stage)
                mbarrier.wait(empty.index(stage), phase)
                mbarrier.expect(bar, V.COLUMNS * DEPTH * 2)
                tma.async_copy_global_to_shared(w2, [w_row + k + u * DEPTH, w_column], bar, b_ring.index(stage))
                pointers = gl.multiple_of(rows + (k + u * DEPTH + c)[None, :], [1, 16])
                async_copy.async_copy_global_to_shared(a_ring.index(stage), pointers, mask=here)
                async_copy.mbarrier_arrive(bar, increment_count=False)
                stage += 1
                if stage == V.STAGES:
                    stage = 0
                    phase ^= 1
        source = next_source + 0  # + 0: a bare name would no longer be carried (docs/log.md: Triton 3.6, 3.7)
        expert = next_expert + 0
        column = next_column + 0
        next_row = after_row + 0
        next_column = after_column + 0
        next_m = after_m + 0


@gluon.jit
def pieces(x, COLUMNS: gl.constexpr):
    """Of 32 columns, of 64 rows."""
    left, right = halves(x, 64, COLUMNS)
    if COLUMNS == 64:
        return left, right
    else:
        return pieces(left, COLUMNS // 2) + pieces(right, COLUMNS // 2)


@gluon.jit
def gradient_of(gate_16, up_16, raw, weight, V: gl.constexpr):
    """What `activation_gradient_item` computes: (dgate, dup, weight * activation), and sums of all columns."""
    layout: gl.constexpr = gate_16.type.layout
    dtype: gl.constexpr = gate_16.dtype
    row_weight = weight
    weight = weight[:, None]
    if V.WITHOUT == "arithmetic":
        scored = raw
        outputs = (up_16, gate_16, narrow(weight * raw, dtype))
    else:
        gate = gate_16.to(gl.float32)
        up = up_16.to(gl.float32)
        scored = narrow(activate(gate, up, "swiglu", None), dtype).to(gl.float32)
        d_act = weight * raw
        d_gate = narrow(gate_gradient(gate, up, d_act, "swiglu", None), dtype)
        d_up = narrow(up_gradient(gate, up, d_act, "swiglu", None), dtype)
        outputs = (d_gate, d_up, narrow(weight * scored, dtype))
    if V.WITHOUT == "sums":
        sums = row_weight
    else:
        sums = pair_tree_sum(raw * scored, raw.shape[0], raw.shape[1], raw.shape[1]).reshape((raw.shape[0],))
        sums = gl.convert_layout(sums, gl.SliceLayout(1, layout), assert_trivial=True)
    return outputs, sums


@gluon.jit
def place(tile, chunk: gl.constexpr, V: gl.constexpr):
    """(row, column) of a chunk.  A bare variant spreads its chunks, so that no product is left out."""
    PART: gl.constexpr = chunk * (8 // V.CHUNKS)
    ACROSS: gl.constexpr = V.COLUMNS // CHUNK
    return tile[0] + PART // ACROSS * 64, tile[1] + PART % ACROSS * CHUNK


@gluon.jit
def fetch(blocks, tile, chunk: gl.constexpr, h, h_full, who: gl.constexpr, V: gl.constexpr):
    """A chunk of h of a tile of consumer `who`, into its buffer."""
    SLOT: gl.constexpr = chunk % V.BUFFERS
    BUFFER: gl.constexpr = SLOT if V.AHEAD else who * V.BUFFERS + SLOT
    row, column = place(tile, chunk, V)
    bar = h_full.index(who * V.BUFFERS + SLOT)
    if V.WITHOUT != "loads":
        mbarrier.expect(bar, CHUNK_BYTES)
        tma.async_copy_global_to_shared(blocks[0], [row, column], bar, h[0].index(BUFFER))
        tma.async_copy_global_to_shared(blocks[1], [row, column], bar, h[1].index(BUFFER))


@gluon.jit
def refill(blocks, left: gl.constexpr, own, following, h, h_full, WHO: gl.constexpr, V: gl.constexpr):
    """The buffer that chunk `left` of the tile `own` has left: with a later chunk, or one of the tile `following`."""
    if left + V.BUFFERS < V.CHUNKS:
        fetch(blocks, own, left + V.BUFFERS, h, h_full, WHO, V)
    else:
        if following[2]:
            fetch(blocks, following, left + V.BUFFERS - V.CHUNKS, h, h_full, 1 - WHO if V.AHEAD else WHO, V)


@gluon.jit
def leaving(chunk: gl.constexpr, outs, WHO: gl.constexpr, V: gl.constexpr):
    """Where dgate, dup and act of a chunk leave from."""
    GRADIENTS: gl.constexpr = chunk % V.BUFFERS if V.AHEAD else WHO
    ACT: gl.constexpr = 2 * V.BATCH * WHO + chunk % (2 * V.BATCH) if V.AHEAD else WHO
    return outs[0].index(GRADIENTS), outs[1].index(GRADIENTS), outs[2].index(ACT)


@gluon.jit
def send(blocks, tile, chunk: gl.constexpr, outs, WHO: gl.constexpr, V: gl.constexpr):
    """dgate, dup and act of a chunk, by TMA, which leaves out what lies behind F."""
    row, column = place(tile, chunk, V)
    for i in gl.static_range(3):
        tma.async_copy_shared_to_global(blocks[2 + i], [row, column], leaving(chunk, outs, WHO, V)[i])


@gluon.jit
def consume(
    WHO: gl.constexpr, blocks, pointers, ring, buffers, steps, D: gl.constexpr, F: gl.constexpr, V: gl.constexpr
):
    """The tiles of one warpgroup."""
    STRIDE: gl.constexpr = 8 // V.CHUNKS
    FIRST: gl.constexpr = 0 if V.AHEAD else WHO * V.BUFFERS  # of its buffers
    STEPS: gl.constexpr = D // DEPTH
    ROWS: gl.constexpr = V.ROWS
    COLUMNS: gl.constexpr = V.COLUMNS
    BUFFERS: gl.constexpr = V.BUFFERS
    BATCH: gl.constexpr = V.BATCH
    CHUNKS: gl.constexpr = V.CHUNKS
    num_m, num_steps = steps
    order_ptr, weight_ptr, groups_ptr = pointers
    a_ring, b_ring, full, empty = ring
    h, outs, h_full, turn = buffers
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, V.COLUMNS, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, CHUNK, 16])
    r = gl.arange(0, 64, gl.SliceLayout(1, layout))
    programs = gl.num_programs(0)
    first = gl.program_id(0) + WHO * programs  # the second one is behind the other's first tile
    stage = WHO * STEPS % V.STAGES
    phase = WHO * STEPS // V.STAGES & 1
    turn_phase = 0
    h_phase = 0
    row, column, _ = tile_of(first, num_m, order_ptr, F, V)
    if first < num_steps and (WHO == 0 or not V.AHEAD):
        for chunk in gl.static_range(BUFFERS):
            fetch(blocks, (row, column), chunk, h, h_full, WHO, V)
    for step in range(first, num_steps, 2 * programs):
        own_row, own_column, _ = tile_of(step + 2 * programs, num_m, order_ptr, F, V)
        if V.AHEAD:  # the buffers have the other's tile next
            next_row, next_column, _ = tile_of(step + programs, num_m, order_ptr, F, V)
            following = (next_row, next_column, step + programs < num_steps)
        else:
            following = (own_row, own_column, step + 2 * programs < num_steps)
        mbarrier.wait(turn.index(WHO), turn_phase)
        turn_phase ^= 1
        acc = gl.zeros((ROWS, COLUMNS), gl.float32, mma)
        for k in range(0, D, DEPTH):
            mbarrier.wait(full.index(stage), phase)
            fence_async_shared()  # cp.async wrote through the generic proxy, wgmma reads through the asynchronous one
            acc = warpgroup_mma(a_ring.index(stage), b_ring.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            # The stage before this one has been read.
            mbarrier.arrive(empty.index(gl.where(stage == 0, V.STAGES - 1, stage - 1)), count=1, pred=k > 0)
            stage += 1
            if stage == V.STAGES:
                stage = 0
                phase ^= 1
        mbarrier.arrive(turn.index(1 - WHO), count=1)  # the last product is issued
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(gl.where(stage == 0, V.STAGES - 1, stage - 1)), count=1)
        ahead = stage + STEPS  # behind the other's next tile
        phase ^= (ahead // V.STAGES) & 1
        stage = ahead % V.STAGES
        if V.ROWS == 64:
            raws = pieces(acc, COLUMNS)
        else:
            top, bottom = acc.reshape((2, 64, COLUMNS)).permute((1, 2, 0)).split()
            raws = pieces(top, COLUMNS) + pieces(bottom, COLUMNS)
        for chunk in gl.static_range(CHUNKS):
            chunk_row, chunk_column = place((row, column), chunk, V)
            if chunk * STRIDE % (COLUMNS // CHUNK) == 0:
                weight = gl.load(weight_ptr + chunk_row + r)
            if V.WITHOUT != "loads":
                mbarrier.wait(h_full.index(WHO * BUFFERS + chunk % BUFFERS), h_phase)
            else:
                partition_barrier()  # as behind every wait
            if chunk % BUFFERS == BUFFERS - 1:
                h_phase ^= 1
            gate = h[0].index(FIRST + chunk % BUFFERS).load(layout)
            up = h[1].index(FIRST + chunk % BUFFERS).load(layout)
            raw = gl.convert_layout(raws[chunk * STRIDE], layout, assert_trivial=True)
            outputs, sums = gradient_of(gate, up, raw, weight, V)
            if not V.AHEAD:
                tma.store_wait(0)  # the first warp's: what it has sent has left
            if chunk % BATCH == 0:
                partition_barrier()
            for i in gl.static_range(3):
                leaving(chunk, outs, WHO, V)[i].store(outputs[i])
            if chunk % BATCH == BATCH - 1:
                fence_async_shared()
                partition_barrier()
                if V.WITHOUT != "stores":
                    for b in gl.static_range(chunk - BATCH + 1, chunk + 1):
                        send(blocks, (row, column), b, outs, WHO, V)
                if not V.AHEAD:
                    refill(blocks, chunk, (row, column), following, h, h_full, WHO, V)
                elif chunk >= BATCH:
                    tma.store_wait(3 * BATCH)  # what the batch before has sent has left
                    partition_barrier()
                    for b in gl.static_range(chunk - 2 * BATCH + 1, chunk - BATCH + 1):
                        refill(blocks, b, (row, column), following, h, h_full, WHO, V)
            if chunk % 2 == 0:
                left_sums = sums
            elif V.WITHOUT != "sums":
                at = (chunk_row + r) * (F // GROUP) + chunk_column // GROUP
                gl.store(groups_ptr + at, left_sums + sums, mask=(r >= 0) & (chunk_column < F))
        if V.AHEAD:
            tma.store_wait(0)
            partition_barrier()
            for b in gl.static_range(CHUNKS - BATCH, CHUNKS):
                refill(blocks, b, (row, column), following, h, h_full, WHO, V)
        row = own_row + 0
        column = own_column + 0
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_received"])
def gradient_kernel(
    dy_ptr, received_ptr, num_received, w2, gate_block, up_block, d_gate_block, d_up_block, act_block, groups_ptr,
    totals_ptr, order_ptr, expert_ptr, source_ptr, weight_ptr, D: gl.constexpr, F: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """w2: of (e * D, F); the other blocks: of (N, F).  totals and what follows: of `uniep.kernels.arguments.Rows`."""
    dtype: gl.constexpr = w2.dtype
    piece: gl.constexpr = act_block.layout
    OWN: gl.constexpr = 1 if V.AHEAD else 2
    a_ring = gl.allocate_shared_memory(dtype, [V.STAGES, V.ROWS, DEPTH], gl.NVMMASharedLayout(128, 16, rank=2))
    b_ring = gl.allocate_shared_memory(dtype, [V.STAGES, DEPTH, V.COLUMNS], w2.layout)
    gate = gl.allocate_shared_memory(dtype, [OWN * V.BUFFERS, 64, CHUNK], piece)
    up = gl.allocate_shared_memory(dtype, [OWN * V.BUFFERS, 64, CHUNK], piece)
    act = gl.allocate_shared_memory(dtype, [4 * V.BATCH if V.AHEAD else 2, 64, CHUNK], piece)
    if V.AHEAD:
        outs = (gate, up, act)
    else:
        d_gate = gl.allocate_shared_memory(dtype, [2, 64, CHUNK], piece)
        d_up = gl.allocate_shared_memory(dtype, [2, 64, CHUNK], piece)
        outs = (d_gate, d_up, act)
    full = gl.allocate_shared_memory(gl.int64, [V.STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [V.STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    h_full = gl.allocate_shared_memory(gl.int64, [2 * V.BUFFERS, 1], mbarrier.MBarrierLayout())
    STAGES: gl.constexpr = V.STAGES
    BARS: gl.constexpr = 2 * V.BUFFERS
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1 + 32 * PRODUCER_WARPS)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(turn.index(i), count=1)
    for i in gl.static_range(BARS):
        mbarrier.init(h_full.index(i), count=1)
    mbarrier.arrive(turn.index(0), count=1)  # the first warpgroup begins
    num_m = gl.load(totals_ptr + 1) * (TABLE_ROWS // V.ROWS)
    steps = (num_m, num_m * ((F + V.COLUMNS - 1) // V.COLUMNS))
    ring = (a_ring, b_ring, full, empty)
    buffers = ((gate, up), outs, h_full, turn)
    blocks = (gate_block, up_block, d_gate_block, d_up_block, act_block)
    pointers = (order_ptr, weight_ptr, groups_ptr)
    dy = (dy_ptr, received_ptr, num_received)
    tables = (order_ptr, expert_ptr, source_ptr)
    gl.warp_specialize(
        [
            (consume, (0, blocks, pointers, ring, buffers, steps, D, F, V)),
            (consume, (1, blocks, pointers, ring, buffers, steps, D, F, V)),
            (produce, (dy, w2, tables, ring, steps, D, F, V)),
        ],
        [4, PRODUCER_WARPS],
        [224, 56],
    )


def arguments_of(
    name: str, dy_TD: torch.Tensor, received_SD: torch.Tensor, num_received: int, w2_eDF: torch.Tensor,
    made: Activation, rows: Rows,
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """What a variant of `gradient_kernel` is launched with.

    dy (T, D), received (S, D): where rows of dO lie; sources from `num_received` slots on are pad rows.  w2 (e, D, F),
    contiguous.  Raises ValueError for sizes that the kernel has no masks for.
    """
    e, hidden, ffn = w2_eDF.shape
    variant = VARIANTS[name]
    if hidden % DEPTH.value or ffn % GROUP.value:
        raise ValueError(
            f"hidden {hidden} and ffn {ffn} must be multiples of {DEPTH.value} and {GROUP.value}: choose other --shapes"
        )
    piece = gl.NVMMASharedLayout(64, 16, rank=2)
    matrices = (made.gate_NF, made.up_NF, made.dh_N2F[:, 0], made.dh_N2F[:, 1], made.act_NF)
    args = (
        dy_TD, received_SD, num_received,
        TensorDescriptor.from_tensor(
            w2_eDF.view(e * hidden, ffn), [DEPTH.value, variant.COLUMNS], gl.NVMMASharedLayout(128, 16, rank=2)
        ),
        *(TensorDescriptor.from_tensor(matrix, [64, CHUNK.value], piece) for matrix in matrices),
        made.groups_NG, rows.totals, rows.backward_order_M, rows.expert_M, rows.source_N, rows.weight_N,
    )  # fmt: skip
    options = {"D": hidden, "F": ffn, "V": variant, "num_warps": 4, "enable_fp_fusion": False}
    return args, options | {"maxnreg": 168}  # 12 warps enter with 168 registers each


def compile_all(args: argparse.Namespace) -> bool:
    """All variants for all shapes, for sm_90.  Returns whether each is without spills and fits."""
    target = GPUTarget("cuda", 90, 32)
    asked = {"get_current_target.return_value": target, "get_current_device.return_value": 0}
    triton.runtime.driver.set_active(unittest.mock.Mock(**asked))
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    good, n = True, 256
    for shape in map(parse_shape, args.shapes.split(",")):
        fields: dict[str, Any] = dict.fromkeys(Rows._fields)
        for field in ("source_N", "expert_M", "backward_order_M", "totals"):
            fields[field] = torch.zeros(n, dtype=torch.int32)
        rows = Rows(**fields | {"weight_N": torch.zeros(n)})
        h_2NF = torch.zeros(2, n, shape.ffn, dtype=torch.bfloat16)
        dy_TD, w2_eDF = h_2NF.new_zeros(n, shape.hidden), h_2NF.new_zeros(2, shape.hidden, shape.ffn)
        for name in args.variants.split(","):
            launch, options = arguments_of(name, dy_TD, dy_TD, 0, w2_eDF, outputs_of(h_2NF), rows)
            compiled = gradient_kernel.warmup(*launch, grid=(1,), **options)
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(compiled.asm["cubin"])
                file.flush()
                usage, sass = (
                    subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
                    for option in ("--dump-resource-usage", "--dump-sass")
                )
            registers, shared = re.findall(r"REG:(\d+)", usage)[0], compiled.metadata.shared
            spills = len(re.findall(r"\b(?:STL|LDL)\b", sass))
            good &= not spills and shared <= SHARED_LIMIT
            print(
                f"Triton {triton.__version__} {shape.name:10s} {name:28s} registers {registers} (at entry), spills "
                f"{spills}, shared memory {shared} of {SHARED_LIMIT} bytes, barriers {sass.count('BAR.SYNC')}",
                flush=True,
            )
    return good


def outputs_of(h_2NF: torch.Tensor, raw_NF: torch.Tensor | None = None) -> Activation:
    """Of both sides; filled with NaN."""
    _, n, ffn = h_2NF.shape
    dh_N2F, act_NF = h_2NF.new_full((n, 2, ffn), float("nan")), h_2NF.new_full((n, ffn), float("nan"))
    groups_NG = torch.full((n, ffn // GROUP.value), float("nan"), device=h_2NF.device)
    return Activation(raw_NF, h_2NF[0], h_2NF[1], dh_N2F, act_NF, groups_NG)


OUTPUTS = ("dh_N2F", "act_NF", "groups_NG")
RECEIVE_BLOCK = 64
SMALL_ROWS = (1, 127, 128, 129, 300)  # of five experts
SET_UP_S = 120  # and for all times of a shape


@dataclasses.dataclass
class Sides:
    """Today's kernels and a variant, on the same tensors."""

    rows: Rows
    dy: Tokens
    experts: ExpertWeights
    peers: Any
    cfg: Any
    tile: Any
    sms: int

    def __post_init__(self) -> None:
        rows, dy, experts, peers, cfg, tile, sms = (getattr(self, field.name) for field in dataclasses.fields(self))
        n, device = rows.source_N.shape[0], rows.source_N.device
        generator = torch.Generator(device).manual_seed(7)
        h_2NF = torch.randn(2, n, cfg.ffn, device=device, generator=generator, dtype=torch.bfloat16)
        raw_NF = torch.empty(n, cfg.ffn, device=device)
        self.today, self.own = outputs_of(h_2NF, raw_NF), outputs_of(h_2NF, raw_NF)
        tables = Bundle(rows)
        claims = torch.zeros(2, -(-rows.expert_M.shape[0] // 4) * 4, dtype=torch.int32, device=device)
        progress_M, cursor = unbind(claims)

        def product(progress: Any = None) -> None:
            staged.launch_gathered_down_gradient(dy, tables, experts, peers, tile, sms, raw_NF, ALL_HERE, progress)

        def beside() -> None:
            claims.zero_()
            product(progress_M)
            staged.launch_claimed_activation_gradient(self.today, tables, peers, cfg, tile, sms, progress_M, cursor)

        self.calls = {"product alone": product, "both kernels": beside}

    def variant(self, name: str) -> Callable[[], object]:
        num_received = (self.peers.num_ranks - 1) * self.peers.receive_block
        dy = self.dy.local, tensor(self.dy.received)
        args, options = arguments_of(name, *dy, num_received, self.experts.w2[0], self.own, self.rows)
        return lambda: gradient_kernel[(self.sms,)](*args, **options)

    def differ(self, name: str) -> dict[str, int]:
        """Elements whose bits are not today's, by output."""
        for output in OUTPUTS:
            getattr(self.own, output).fill_(-123.0)
        self.variant(name)()
        counts = {}
        for output in OUTPUTS:
            ours, theirs = (getattr(made, output)[: int(self.rows.totals[0])] for made in (self.own, self.today))
            bits = torch.int32 if ours.dtype == torch.float32 else torch.int16
            counts[output] = int((ours.view(bits) != theirs.view(bits)).sum())
        return counts


def full_case(products: Products) -> Sides:
    """The layer's, with a second rank, from which nothing comes but pad rows."""
    caught: list[Any] = []
    with unittest.mock.patch.object(staged, "launch_gathered_down_gradient", lambda *given: caught.append(given)):
        products.of["dO @ W2"][0]()
    dy, tables, experts, peers, tile, sms, *_ = caught[0]
    peers = dataclasses.replace(peers, num_ranks=2, receive_block=RECEIVE_BLOCK, _sending={})
    received_SD = torch.randn(RECEIVE_BLOCK + 1, dy.local.shape[1], device=dy.local.device).to(torch.bfloat16)
    received_SD[-1] = 0
    rows = Rows(*(None if field is None else tensor(field).clone() for field in tables.fields))
    rows = rows._replace(source_N=torch.where(rows.source_N < 0, -1 - RECEIVE_BLOCK, rows.source_N).int())
    return Sides(rows, Tokens(dy.local, received_SD), experts, peers, products.workspace.cfg, tile, sms)


def small_case(full: Sides) -> Sides:
    """Of five experts with few rows, local and received ones in random order, and five programs."""
    device, tokens, e = full.rows.source_N.device, 200, len(SMALL_ROWS)
    generator = torch.Generator(device).manual_seed(11)
    padded = [-(-count // 128) * 128 for count in SMALL_ROWS]
    n, m = sum(padded), sum(padded) // 128
    source = torch.randint(-RECEIVE_BLOCK, tokens, (n,), device=device, generator=generator, dtype=torch.int32)
    weight = torch.rand(n, device=device, generator=generator)
    for start, count, size in zip(itertools.accumulate(padded, initial=0), SMALL_ROWS, padded, strict=False):
        source[start + count : start + size], weight[start + count : start + size] = -1 - RECEIVE_BLOCK, 0.0

    def ints(values: Iterable[int]) -> torch.Tensor:
        return torch.tensor([*values], dtype=torch.int32, device=device)

    order_M = torch.randperm(m, device=device, generator=generator).int()
    expert_M = ints(i for i in range(e) for _ in range(padded[i] // 128))
    rows = full.rows._replace(
        source_N=source, weight_N=weight, expert_M=expert_M, start_e1=ints(itertools.accumulate(padded, initial=0)),
        rows_e=ints(SMALL_ROWS), order_M=order_M, backward_order_M=order_M, totals=ints((n, m)),
        backward_group_M=(expert_M[order_M] << 2 * GROUP_BITS) + 1, return_N=torch.zeros_like(source),
    )  # fmt: skip
    experts = ExpertWeights((full.experts.w13[0][:e],), (full.experts.w2[0][:e],), "stacked")
    dy = Tokens(full.dy.local[:tokens], full.dy.received)
    return dataclasses.replace(full, rows=rows, dy=dy, experts=experts, sms=5)


def work(text: str, skip: Sequence[str], args: argparse.Namespace) -> None:
    """Compares and times a shape; tells the parent, in lines of JSON, what it begins and what it finds."""
    # Before other kernels have been: functions that both use would give it another key, and so a second compilation.
    assert gradient_kernel.cache_key
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    timing.setup(device, None)
    products = Products(parse_shape(text), args.tokens, device)
    full = full_case(products)
    cases = {"small": small_case(full), "full": full}
    for sides in cases.values():
        sides.calls["both kernels"]()
    right = []
    for name in args.variants.split(","):
        if name in skip:
            continue
        print(json.dumps({"begin": name}), flush=True)
        counts = {case: sides.differ(name) for case, sides in cases.items()}
        if is_whole(name):
            print(json.dumps({"shape": text, "variant": name, "differ": counts}), flush=True)
        if not is_whole(name) or not any(count for of in counts.values() for count in of.values()):
            right.append(name)
    print(json.dumps({"begin": "timing"}), flush=True)
    calls = cases["full"].calls | {name: cases["full"].variant(name) for name in right}
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    windows, back_to_back = timing.in_turn(calls, args.iters), timing.sustained_in_turn(calls, args.sustained_s)
    for name in calls:
        times = {"ms": statistics.median(windows[name]), "sustained_ms": statistics.median(back_to_back[name])}
        row = {"shape": text, "variant": name, "tflop": products.tflop_of("dO @ W2")} | times
        print(json.dumps({key: round(v, 4) if isinstance(v, float) else v for key, v in row.items()}), flush=True)
    products.workspace.close()
    dist.destroy_process_group()


def is_whole(name: str) -> bool:
    """A variant that leaves nothing out."""
    return VARIANTS[name].CHUNKS == 8 and not VARIANTS[name].WITHOUT


def watch(command: Sequence[str], limit_s: float, end: float, add: Callable[[dict[str, Any]], None]) -> str:
    """Runs a process of `work`, and ends it when it is silent for too long.  Returns what it could not do, or ""."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0)
    assert process.stdout is not None
    doing = "set-up"
    try:
        while True:
            limit = min(SET_UP_S if doing in ("set-up", "timing") else limit_s, end - time.monotonic())
            if not select.select([process.stdout], [], [], max(limit, 0.0))[0]:
                return doing
            line = process.stdout.readline().decode()
            if not line:
                return doing if process.wait() else ""
            if not line.startswith("{"):
                print(line, end="", flush=True)
                continue
            row = json.loads(line)
            if "begin" in row:
                doing = row["begin"]
            else:
                add(row)
    finally:
        process.kill()
        process.wait()


def measure(args: argparse.Namespace, own: list[str]) -> None:
    """All shapes.  own: the options that this process was given."""
    end = time.monotonic() + args.total_s
    run = [sys.executable, "-u", __file__, *own]
    compiling = [
        subprocess.Popen([*run, "--offline", "--variants", name], stdout=subprocess.DEVNULL)
        for name in args.variants.split(",")
    ]
    for process in compiling:
        process.wait(args.total_s)
    print(f"compiled, {end - time.monotonic():.0f} of {args.total_s:.0f} s left", flush=True)
    meta = of_run("ping_pong.py", torch.device("cuda", 0), args.commit, 1)
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
        if args.json:
            write(args.json, {"meta": meta, "rows": rows})

    for shape in args.shapes.split(","):
        skip: list[str] = []
        while time.monotonic() < end:
            doing = watch([*run, "--work", shape, "--skip", ",".join(skip)], args.limit_s, end, add)
            if doing:
                add({"shape": shape, "variant": doing, "failed": True})
                skip.append(doing)
            if doing in ("", "set-up", "timing"):
                break


def main(argv: Sequence[str] | None = None) -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shapes", default="qwen3-30b,qwen3-235b", help="(default %(default)s)")
    made.add_argument("--tokens", type=int, default=8192, help="(default %(default)s)")
    made.add_argument("--variants", default=",".join(VARIANTS), help="(default all)")
    made.add_argument("--iters", type=int, default=20, help="window calls of each (default %(default)s)")
    made.add_argument("--sustained-s", type=float, default=0.2, help="of each, in parts, in turn")
    made.add_argument("--limit-s", type=float, default=10, help="of a variant (default %(default)s)")
    made.add_argument("--total-s", type=float, default=120, help="of everything (default %(default)s)")
    made.add_argument("--offline", action="store_true", help="compile only, without a GPU; exits with 1 if one spills")
    made.add_argument("--work", help=argparse.SUPPRESS)
    made.add_argument("--skip", default="", help=argparse.SUPPRESS)
    add_file_options(made)
    own = [*(sys.argv[1:] if argv is None else argv)]
    args = made.parse_args(own)
    if args.offline:
        sys.exit(not compile_all(args))
    if args.work:
        work(args.work, args.skip.split(","), args)
    else:
        measure(args, own)


if __name__ == "__main__":
    main()

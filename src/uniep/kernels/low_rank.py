"""LoRA on experts: rows times a skinny factor.  What else it needs are operands of the products in `gemm.py`, and
weight gradients of few columns.

Suffixes: D hidden, F ffn, e local experts, N padded rows, R rank, padded to 16, 32, 64 or 128.
"""

import triton
import triton.language as tl

from uniep.kernels.arguments import Offsets, Rows, Tokens, Wire
from uniep.kernels.gemm import product_of_rows
from uniep.kernels.ptx import narrow
from uniep.kernels.rows import gathered_rows, num_row_tiles, wait_for_rows
from uniep.kernels.sync import deadline
from uniep.kernels.transfer import push_tokens


@triton.jit(
    do_not_specialize=["timeout_ns", "rank", "arrived_offset", "finished_offset", "num_tokens", "push_programs"]
)
def shrink_kernel(
    tokens: Tokens,
    rows: Rows,
    wire: Wire,
    timeout_ns,
    rank,
    arrived_offset,
    finished_offset,
    num_tokens,
    push_programs,
    order_ptr,
    a_desc,
    factor_desc,
    out_desc,
    DEPTH: tl.constexpr,
    B: tl.constexpr,
    SCALE: tl.constexpr,
    TILE: tl.constexpr,
    SENDING: tl.constexpr,
    FUSED: tl.constexpr,
):
    """out (N, R) = cast(SCALE * (a @ factor)), the product in fp32, k ascending; columns from r on are zeros.

    order (M,): of row tiles.  a_desc: (N, DEPTH), or None: rows are read where they lie, local tokens and receive slots.
    factor_desc: B "transposed": (e, r, DEPTH); "plain": (e, DEPTH, r).
    FUSED (and gathered): tiles wait for their tokens; where programs push (CHUNK > 0), the first `push_programs` push
    this rank's before they join.
    """
    program = tl.program_id(0)
    if FUSED and SENDING.CHUNK > 0:
        if program < push_programs:
            offsets = Offsets(arrived_offset, finished_offset, None)
            push_tokens(tokens.local, rows, wire, offsets, num_tokens, rank, program, push_programs, SENDING)
    deadline_ns = deadline(wire.status, timeout_ns)
    all_here = 0
    begin = program - push_programs
    if begin < 0:  # a program that has pushed helps from the end of its round
        begin += tl.num_programs(0)
    for position in tl.range(begin, num_row_tiles(rows), tl.num_programs(0)):
        m = tl.load(order_ptr + position)
        expert = tl.load(rows.expert_M + m)
        if a_desc is None:
            source = tl.load(rows.source_N + m * TILE.M + tl.arange(0, TILE.M))
            if FUSED:
                all_here = wait_for_rows(source, all_here, wire, deadline_ns, rank, TILE.M, SENDING)
            a_ptrs = gathered_rows(source, tokens, DEPTH, SENDING)
        else:
            a_ptrs = None
        acc = product_of_rows(a_ptrs, a_desc, factor_desc, m, expert, 0, DEPTH, 0, B, False, TILE)
        out_desc.store([m * TILE.M, 0], narrow(acc * SCALE, out_desc.dtype))

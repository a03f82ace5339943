"""What programs of one kernel for a direction do beside tiles: claim, count, push, keep, record."""

import triton
import triton.language as tl

from uniep.kernels.gemm import count_tile
from uniep.kernels.lists import COUNTERS, MADE, PUSH, PUSHED
from uniep.kernels.ptx import load_acquire, nanoseconds
from uniep.kernels.sync import WIDE, every_rank, failed, signal_when_all, wait_for
from uniep.kernels.transfer import push_chunk


@triton.jit
def claim(counter_ptr, THREADS: tl.constexpr):
    """Begin to claim the next place of a list: one thread asks.  The answer is used when it has come."""
    thread = tl.arange(0, THREADS)
    return tl.atomic_add(counter_ptr + thread * 0, 1, mask=thread == 0, sem="relaxed")


@triton.jit
def claimed(answer, THREADS: tl.constexpr):
    """The place that `claim` asked for; the same in all threads."""
    return tl.max(tl.where(tl.arange(0, THREADS) == 0, answer, 0))


@triton.jit
def has_all(counter_ptr, total):
    """Whether a counter has reached `total`; the same in all threads."""
    return tl.min(load_acquire(counter_ptr + tl.zeros((WIDE,), tl.int32))) >= total


@triton.jit
def count_made(counters_ptr, stored, made):
    """Count the tiles of the first product that this program has stored last: one of row tile `stored`, `made` in all."""
    count_tile(counters_ptr + COUNTERS, stored)
    tl.atomic_add(counters_ptr + MADE, made, sem="release", scope="gpu")


@triton.jit
def count_pushes(send_count_ptr, rank, CHUNK: tl.constexpr, NUM_RANKS: tl.constexpr):
    """Chunks that this rank pushes to all others."""
    total = 0
    for step in tl.static_range(1, NUM_RANKS):
        total += tl.cdiv(tl.load(send_count_ptr + (rank + step) % NUM_RANKS), CHUNK)
    return total


@triton.jit
def push(
    x_ptr,
    send_token_ptr,
    send_count_ptr,
    receive_table_ptr,
    flag_table_ptr,
    arrived_offset,
    call,
    num_tokens,
    rank,
    place,
    D: tl.constexpr,
    PUSH_D: tl.constexpr,
    PUSH_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    RECEIVE_BLOCK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
):
    """The chunk at this place: the next rank's first."""
    peer = (rank + 1) % NUM_RANKS
    chunk = place
    for step in tl.static_range(1, NUM_RANKS - 1):
        ahead = (rank + step) % NUM_RANKS
        chunks = tl.cdiv(tl.load(send_count_ptr + ahead), CHUNK)
        behind = (peer == ahead) & (chunk >= chunks)
        chunk = tl.where(behind, chunk - chunks, chunk)
        peer = tl.where(behind, (rank + step + 1) % NUM_RANKS, peer)
    count = tl.load(send_count_ptr + peer)
    push_chunk(
        x_ptr, send_token_ptr, receive_table_ptr, flag_table_ptr, arrived_offset, call, num_tokens, rank, peer, chunk,
        count, D, PUSH_D, PUSH_ROWS, CHUNK, RECEIVE_BLOCK,
    )  # fmt: skip


@triton.jit
def record_task(trace_ptr, place, claimed_ns, started_ns, ENABLED: tl.constexpr):
    """One row of a trace: place, program, claimed, started, ended."""
    if ENABLED:
        row_ptr = trace_ptr + place.to(tl.int64) * 5
        tl.debug_barrier()
        tl.store(row_ptr, place.to(tl.int64))
        tl.store(row_ptr + 1, tl.program_id(0).to(tl.int64))
        tl.store(row_ptr + 2, claimed_ns)
        tl.store(row_ptr + 3, started_ns)
        tl.store(row_ptr + 4, nanoseconds())


@triton.jit
def push_first(
    x_ptr,
    send_token_ptr,
    send_count_ptr,
    receive_table_ptr,
    flag_table_ptr,
    arrived_offset,
    finished_offset,
    call,
    counters_ptr,
    status_ptr,
    num_tokens,
    rank,
    arrival,
    push_programs,
    trace_ptr,
    D: tl.constexpr,
    PUSH_D: tl.constexpr,
    PUSH_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    RECEIVE_BLOCK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    TRACE: tl.constexpr,
):
    """The programs that have arrived first push chunks until none is left."""
    if arrival < push_programs:
        num_pushes = count_pushes(send_count_ptr, rank, CHUNK, NUM_RANKS)
        pushed = (arrival == 0).to(tl.int32)
        skips = failed(status_ptr)
        place = tl.atomic_add(counters_ptr + PUSH, 1, sem="relaxed")
        while place < num_pushes:
            claimed_ns = nanoseconds() if TRACE else 0
            if not skips:
                push(
                    x_ptr, send_token_ptr, send_count_ptr, receive_table_ptr, flag_table_ptr, arrived_offset, call,
                    num_tokens, rank, place, D, PUSH_D, PUSH_ROWS, CHUNK, RECEIVE_BLOCK, NUM_RANKS,
                )  # fmt: skip
            record_task(trace_ptr, place, claimed_ns, claimed_ns, TRACE)
            pushed += 1
            place = tl.atomic_add(counters_ptr + PUSH, 1, sem="relaxed")
        if pushed > 0:
            signal_when_all(
                flag_table_ptr, finished_offset + rank, call, counters_ptr + PUSHED, pushed, num_pushes + 1,
                status_ptr, NUM_RANKS,
            )  # fmt: skip


@triton.jit
def wait_for_peers(
    flags_ptr, call_ptr, rank, deadline_ns, status_ptr, NUM_RANKS: tl.constexpr, STAGE: tl.constexpr, OWN: tl.constexpr
):
    """Wait for the flag of every other rank, and of this one if OWN."""
    ranks = every_rank(NUM_RANKS)
    flags = flags_ptr + ranks
    if not OWN:
        flags = flags_ptr + tl.where(ranks == rank, (rank + 1) % NUM_RANKS, ranks)
    wait_for(flags, ranks, tl.load(call_ptr), deadline_ns, status_ptr, STAGE)


@triton.jit
def keep(
    receive_ptr,
    kept_ptr,
    counts_ptr,
    stride,
    kept_block,
    rank,
    place,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    KEPT: tl.constexpr,
    RECEIVE_BLOCK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
):
    """Copy the KEPT tokens at this place out of the receive buffer: sources ascending, kept_block tokens of each at most."""
    source = 0
    first = place * KEPT
    passed = 0
    for block in tl.static_range(NUM_RANKS - 1):
        count = tl.load(counts_ptr + tl.where(rank <= block, block + 1, block) * stride)
        ahead = passed + tl.cdiv(count, KEPT)
        if block == 0:
            source_count = count
        else:
            source_count = tl.where(place >= passed, count, source_count)
            source = tl.where(place >= passed, block, source)
            first = tl.where(place >= passed, (place - passed) * KEPT, first)
        passed = ahead
    for r in range(0, KEPT, ROWS):
        index = first + r + tl.arange(0, ROWS)
        slot = (source * RECEIVE_BLOCK + index).to(tl.int64)
        kept = (source * kept_block + index).to(tl.int64)
        for d in range(0, D, BLOCK_D):
            column = d + tl.arange(0, BLOCK_D)
            mask = (index < tl.minimum(source_count, kept_block))[:, None] & (column < D)[None, :]
            value = tl.load(receive_ptr + slot[:, None] * D + column[None, :], mask=mask)
            tl.store(kept_ptr + kept[:, None] * D + column[None, :], value, mask=mask)


@triton.jit
def count_kept(counts_ptr, stride, rank, KEPT: tl.constexpr, NUM_RANKS: tl.constexpr):
    """Places of `keep`."""
    total = 0
    for block in tl.static_range(NUM_RANKS - 1):
        total += tl.cdiv(tl.load(counts_ptr + tl.where(rank <= block, block + 1, block) * stride), KEPT)
    return total

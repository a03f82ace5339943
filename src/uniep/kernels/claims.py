"""What programs of one kernel for a direction do beside tiles: claim, count, push, keep, record."""

import triton
import triton.language as tl

from uniep.kernels.arguments import Lists, Offsets, Rows, Wire
from uniep.kernels.gemm import count_tile
from uniep.kernels.lists import COUNTERS, MADE, PUSH, PUSHED
from uniep.kernels.ptx import load_acquire, nanoseconds
from uniep.kernels.sync import STAGE_DISPATCH, WIDE, every_rank, failed, signal_when_all, wait_for
from uniep.kernels.transfer import move_chunk, moved_counts


@triton.jit
def claim(counter_ptr, THREADS: tl.constexpr):
    """Begin to claim the next place of a list: one thread asks.  The answer is used when it has come."""
    thread = tl.arange(0, THREADS)
    return tl.atomic_add(counter_ptr + tl.zeros_like(thread), 1, mask=thread == 0, sem="relaxed")


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
    """Publish `made` finished tiles of the first product; the last is of row tile `stored`."""
    count_tile(counters_ptr + COUNTERS, stored)
    tl.atomic_add(counters_ptr + MADE, made, sem="release", scope="gpu")


@triton.jit
def count_pushes(rows: Rows, rank, SENDING: tl.constexpr):
    """Chunks that this rank pushes to all others, or pulls from them."""
    NUM_RANKS: tl.constexpr = SENDING.NUM_RANKS
    counts_ptr = moved_counts(rows, SENDING)
    total = 0
    for step in tl.static_range(1, NUM_RANKS):
        total += tl.cdiv(tl.load(counts_ptr + (rank + step) % NUM_RANKS), SENDING.CHUNK)
    return total


@triton.jit
def push(x_ptr, rows: Rows, wire: Wire, arrived_offset, call, num_tokens, rank, place, SENDING: tl.constexpr):
    """The chunk at this place: the next rank's first."""
    NUM_RANKS: tl.constexpr = SENDING.NUM_RANKS
    counts_ptr = moved_counts(rows, SENDING)
    peer = (rank + 1) % NUM_RANKS
    chunk = place
    for step in tl.static_range(1, NUM_RANKS - 1):
        ahead = (rank + step) % NUM_RANKS
        chunks = tl.cdiv(tl.load(counts_ptr + ahead), SENDING.CHUNK)
        behind = (peer == ahead) & (chunk >= chunks)
        chunk = tl.where(behind, chunk - chunks, chunk)
        peer = tl.where(behind, (rank + step + 1) % NUM_RANKS, peer)
    count = tl.load(counts_ptr + peer)
    move_chunk(x_ptr, rows, wire, arrived_offset, call, num_tokens, rank, peer, chunk, count, SENDING)


@triton.jit
def now_if(records_ptr):
    """The time, if tasks are recorded."""
    return nanoseconds() if records_ptr is not None else 0


@triton.jit
def record_task(records_ptr, place, claimed_ns, started_ns):
    """One row of a trace, if there is one: place, program, claimed, started, ended."""
    if records_ptr is not None:
        row_ptr = records_ptr + place.to(tl.int64) * 5
        tl.debug_barrier()
        tl.store(row_ptr, place.to(tl.int64))
        tl.store(row_ptr + 1, tl.program_id(0).to(tl.int64))
        tl.store(row_ptr + 2, claimed_ns)
        tl.store(row_ptr + 3, started_ns)
        tl.store(row_ptr + 4, nanoseconds())


@triton.jit
def push_first(
    x_ptr,
    rows: Rows,
    wire: Wire,
    offsets: Offsets,
    lists: Lists,
    num_tokens,
    rank,
    arrival,
    push_programs,
    SENDING: tl.constexpr,
):
    """The programs that have arrived first push (or pull) chunks until none is left."""
    call = tl.load(wire.call)
    if arrival < push_programs:
        num_pushes = count_pushes(rows, rank, SENDING)
        pushed = (arrival == 0).to(tl.int32)
        skips = failed(wire.status)
        place = tl.atomic_add(lists.counters + PUSH, 1, sem="relaxed")
        while place < num_pushes:
            claimed_ns = now_if(lists.vector_records)
            if not skips:
                push(x_ptr, rows, wire, offsets.arrived, call, num_tokens, rank, place, SENDING)
            record_task(lists.vector_records, place, claimed_ns, claimed_ns)
            pushed += 1
            place = tl.atomic_add(lists.counters + PUSH, 1, sem="relaxed")
        if pushed > 0:
            signal_when_all(
                wire, offsets.finished + rank, call, lists.counters + PUSHED, pushed, num_pushes + 1, SENDING.NUM_RANKS
            )


@triton.jit
def wait_for_peers(flags_ptr, wire: Wire, deadline_ns, NUM_RANKS: tl.constexpr, STAGE: tl.constexpr):
    """Wait for the flag of every rank."""
    ranks = every_rank(NUM_RANKS)
    wait_for(flags_ptr + ranks, ranks, tl.load(wire.call), deadline_ns, wire.status, STAGE)


@triton.jit
def wait_for_tokens(wire: Wire, rank, deadline_ns, SENDING: tl.constexpr):
    """Wait until all tokens of the other ranks are here, by the flags of those who move them."""
    ranks = every_rank(SENDING.NUM_RANKS)
    if SENDING.PULL:
        movers = tl.zeros_like(ranks) + rank
    else:
        movers = tl.where(ranks == rank, (rank + 1) % SENDING.NUM_RANKS, ranks)
    wait_for(wire.finished + movers, movers, tl.load(wire.call), deadline_ns, wire.status, STAGE_DISPATCH)


@triton.jit
def keep(
    receive_ptr,
    kept_ptr,
    counts_ptr,
    stride,
    kept_block,
    rank,
    place,
    ROWS: tl.constexpr,
    KEPT: tl.constexpr,
    SENDING: tl.constexpr,
):
    """Copy the KEPT tokens at this place out of the receive buffer: sources ascending, kept_block tokens of each at most."""
    D: tl.constexpr = SENDING.WIDTH
    OTHERS: tl.constexpr = SENDING.NUM_RANKS - 1
    source = 0
    first = place * KEPT
    passed = 0
    for block in tl.static_range(OTHERS):
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
        slot = (source * SENDING.RECEIVE_BLOCK + index).to(tl.int64)
        kept = (source * kept_block + index).to(tl.int64)
        for d in range(0, D, SENDING.PUSH_D):
            column = d + tl.arange(0, SENDING.PUSH_D)
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

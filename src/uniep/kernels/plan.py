"""The routing plan on the GPU: five small kernels, equal element for element to `routing.build_plan`.

exchange   every rank stores its ids and weights into every peer's exchange slot, then raises `entered`
histogram  per block of tokens: slots per expert, tokens to receive, tokens to send
scan       running sums of each histogram row over the blocks, in (source, block) order
tiles      segment starts, tile tables, totals; the one record a host may read
place      each slot computes its row: start of its expert + slots before its block + slots before it

Each lets the next one's programs come before it ends; see `after_previous`.  Waiting for other ranks is an exception:
what comes then must not hold multiprocessors that other streams may need for these ranks to go on.

No atomic decides a position.  Blocks are BLOCK_T tokens of one source; their entries are flattened as
(token, slot), which is the canonical order inside a source.

The exchange slot of source s (parity p) holds a header (`kernels/header.py`), then T_max*K ids, then T_max*K weights as
fp32 bits.  It has two parities because a peer may enter the next call while this rank reads.

Suffixes: R ranks, E experts, e local experts, B blocks (R * blocks per rank), M row tiles.
"""

import triton
import triton.language as tl

from uniep.kernels.header import (
    CAPACITY,
    DIGEST_WORDS,
    DIGESTS,
    DRAW,
    ERROR,
    FORWARD,
    FORWARDS,
    GAVE_UP,
    HAS_DIGESTS,
    HEADER,
    HOST_AGREED,
    HOST_AGREED_WORDS,
    HOST_DIGEST_WORDS,
    IS_REFUSED,
    LAYER,
    LOST_CALL,
    LOST_REASON,
    LOST_TEXT_BYTES,
    LOST_WORDS,
    OPERATION,
    STATUS,
    STATUS_TOLD,
    TOKENS,
    header_of,
    host_record,
    host_refusal,
)
from uniep.kernels.ptx import after_previous, nanoseconds, next_may_come
from uniep.kernels.sync import (
    BAD_ID,
    LOST,
    LOST_RANK,
    OTHER_CALL,
    REFUSED,
    STAGE_ENTRY,
    TIMEOUT,
    TOO_MANY_ROWS,
    deadline,
    every_rank,
    pass_on,
    record,
    wait_for,
)

LONGEST_TASK_NS = tl.constexpr(200_000_000)  # much longer than a tile takes that reads what a peer has sent


@triton.jit(
    do_not_specialize=[
        "num_tokens", "capacity", "operation", "layer", "draw_low", "draw_high", "has_digests", "entered_offset", "rank",
    ]
)  # fmt: skip
def exchange_kernel(
    ids_ptr,
    weights_ptr,
    refusal_ptr,
    digests_ptr,
    forward_ptr,
    num_tokens,
    capacity,
    operation,
    layer,
    draw_low,
    draw_high,
    has_digests,
    exchange_table_ptr,
    flag_table_ptr,
    entered_offset,
    call_ptr,
    ticket_ptr,
    rank,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_IDS: tl.constexpr,
    REFUSE: tl.constexpr,
):
    """Enter call `*call_ptr + 1`: publish this rank's header, ids and weights, then count the call.

    call: its number, then the number of calls with ids so far.  forward: with ids, takes the number of this call; without,
    the call whose plan this one uses.  digests: int32 words, if has_digests.
    REFUSE: publish instead that this rank's inputs are bad; refusal: HEADER words, of which those from ERROR on go into the
    header.
    """
    after_previous()
    next_may_come()
    call = tl.load(call_ptr) + 1
    forwards = tl.load(call_ptr + 1)
    if HAS_IDS:
        forwards += 1
        total = num_tokens * K
        for first in range(tl.program_id(0) * BLOCK, total, tl.num_programs(0) * BLOCK):
            index = first + tl.arange(0, BLOCK)
            mask = index < total
            ids = tl.load(ids_ptr + index, mask=mask, other=-1)
            ids = tl.minimum(tl.maximum(ids, -2147483648), 2147483647).to(tl.int32)
            weights = tl.load(weights_ptr + index, mask=mask, other=0.0).to(tl.int32, bitcast=True)
            for peer in range(NUM_RANKS):
                exchange = tl.load(exchange_table_ptr + peer).to(tl.pointer_type(tl.int32))
                slot = header_of(exchange, call, rank, SLOTS, NUM_RANKS)
                tl.store(slot + HEADER + index, ids, mask=mask)
                tl.store(slot + HEADER + SLOTS + index, weights, mask=mask)
    if tl.program_id(0) == 0:
        forward = 0
        if not HAS_IDS and not REFUSE:
            forward = tl.load(forward_ptr)
        for peer in range(NUM_RANKS):
            slot = header_of(
                tl.load(exchange_table_ptr + peer).to(tl.pointer_type(tl.int32)), call, rank, SLOTS, NUM_RANKS
            )
            tl.store(slot + TOKENS, num_tokens)
            tl.store(slot + CAPACITY, capacity)
            tl.store(slot + OPERATION, operation)
            tl.store(slot + LAYER, layer)
            tl.store(slot + FORWARD, forward)
            tl.store(slot + FORWARDS, forwards)
            tl.store(slot + DRAW, draw_low)
            tl.store(slot + DRAW + 1, draw_high)
            if REFUSE:
                word = tl.arange(0, HEADER)
                tl.store(slot + word, tl.load(refusal_ptr + word), mask=word >= ERROR)
            else:
                tl.store(slot + HAS_DIGESTS, has_digests)
                word = tl.arange(0, HOST_DIGEST_WORDS)
                mask = word < has_digests * DIGEST_WORDS
                tl.store(slot + DIGESTS + word, tl.load(digests_ptr + word, mask=mask, other=0), mask=mask)
    tl.debug_barrier()
    ticket = tl.atomic_add(ticket_ptr, 1, sem="acq_rel", scope="sys")
    if ticket == tl.num_programs(0) - 1:
        tl.store(ticket_ptr, 0)
        tl.store(call_ptr, call)
        tl.store(call_ptr + 1, forwards)
        if HAS_IDS:
            tl.store(forward_ptr, call)
        for peer in range(NUM_RANKS):
            flags = tl.load(flag_table_ptr + peer).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(flags + entered_offset + rank, call, sem="release", scope="sys")


@triton.jit
def _two_known(values):
    """Whether two of them differ; those that are 0 are not known."""
    known = tl.max(tl.where(values == 0, -(2**63), values))
    return tl.min(tl.where(values == 0, known, values)) != known


@triton.jit
def _judge(exchange_ptr, call, status_ptr, rank, SLOTS: tl.constexpr, NUM_RANKS: tl.constexpr):
    """Record that a rank refuses, or that ranks disagree; all ranks come to the same.

    The host gets the words that it needs to say so, and any digests.
    """
    ranks = every_rank(NUM_RANKS)
    header = header_of(exchange_ptr, call, ranks, SLOTS, NUM_RANKS)
    operation = tl.load(header + OPERATION)
    layer = tl.load(header + LAYER)
    forward = tl.load(header + FORWARD)
    draw = (tl.load(header + DRAW + 1).to(tl.int64) << 32) | (tl.load(header + DRAW).to(tl.int64) & 0xFFFFFFFF)
    has_digests = tl.load(header_of(exchange_ptr, call, rank, SLOTS, NUM_RANKS) + HAS_DIGESTS)
    host_ptr = host_record(status_ptr)
    refuses = operation == IS_REFUSED
    differs = tl.max(operation) != tl.min(operation)
    differs |= tl.max(forward) != tl.min(forward)
    differs |= _two_known(layer.to(tl.int64)) | _two_known(draw)
    if tl.max(refuses.to(tl.int32)) != 0:
        source = tl.min(tl.where(refuses, ranks, NUM_RANKS))
        word = tl.arange(0, HEADER)
        words = tl.load(header_of(exchange_ptr, call, source, SLOTS, NUM_RANKS) + word)
        tl.store(host_refusal(host_ptr, NUM_RANKS) + word, words)
        record(status_ptr, REFUSED, source, 0, call, 0)
    elif differs:
        agreed = host_ptr + HOST_AGREED + ranks * HOST_AGREED_WORDS
        for word in tl.static_range(HOST_AGREED_WORDS):
            tl.store(agreed + word, tl.load(header + OPERATION + word))
        record(status_ptr, OTHER_CALL, 0, 0, call, 0)
    elif has_digests != 0:
        digests = host_refusal(host_ptr, NUM_RANKS) + HEADER
        word = tl.arange(0, HOST_DIGEST_WORDS)
        for source in tl.static_range(NUM_RANKS):
            of_source = header_of(exchange_ptr, call, rank * 0 + source, SLOTS, NUM_RANKS)
            words = tl.load(of_source + HAS_DIGESTS + word)
            tl.store(digests + 1 + source * HOST_DIGEST_WORDS + word, words)
        tl.debug_barrier()
        tl.atomic_xchg(digests, 1, sem="release", scope="sys")


@triton.jit
def _tell_peers(status_ptr, status_table_ptr, call, rank, NUM_RANKS: tl.constexpr, COPIES: tl.constexpr):
    """Every peer's results are lost: this rank gave up, and what it does next may overwrite what a late peer still reads.

    COPIES: copy engines send next, whatever was told; so that nobody reads what they overwrite after looking at the status
    before this, they begin when tasks that had begun have ended.
    """
    tl.store(status_ptr + STATUS_TOLD, 1)
    for peer in range(NUM_RANKS):
        if peer != rank:
            status = tl.load(status_table_ptr + peer).to(tl.pointer_type(tl.int32))
            slot = status + STATUS + rank * LOST_WORDS
            tl.store(slot + LOST_CALL, call)
            tl.store(slot + LOST_TEXT_BYTES, 0)
            tl.store(slot + LOST_REASON, GAVE_UP)
            tl.debug_barrier()
            tl.atomic_cas(status, 0, (rank + 1) * LOST_RANK + LOST, sem="acq_rel", scope="sys")
    if COPIES:
        start_ns = nanoseconds()
        now_ns = nanoseconds()
        while now_ns - start_ns < LONGEST_TASK_NS:
            now_ns = nanoseconds()


@triton.jit(do_not_specialize=["timeout_ns", "rank"])
def barrier_kernel(
    flags_ptr,
    exchange_ptr,
    call_ptr,
    status_ptr,
    status_table_ptr,
    timeout_ns,
    rank,
    SLOTS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    STAGE: tl.constexpr,
    JUDGE: tl.constexpr,
    COPIES: tl.constexpr,
):
    """Wait until one flag of every other rank has reached this call.  One warp.

    JUDGE, at the entry: then see that all ranks have entered the same.  COPIES: copy engines send behind it.
    """
    after_previous()
    ranks = every_rank(NUM_RANKS)
    call = tl.load(call_ptr)
    flags = tl.where(ranks == rank, call_ptr, flags_ptr + ranks)
    deadline_ns = deadline(status_ptr, timeout_ns)
    if STAGE == STAGE_ENTRY:
        gone = status_ptr + STATUS + ranks * LOST_WORDS + LOST_REASON
        wait_for(flags, ranks, call, deadline_ns, status_ptr, STAGE, gone)
    else:
        wait_for(flags, ranks, call, deadline_ns, status_ptr, STAGE)
    code = tl.load(status_ptr, volatile=True)
    if code != 0:
        pass_on(status_ptr)
        if STAGE == STAGE_ENTRY:
            if (code == TIMEOUT) & (tl.load(status_ptr + STATUS_TOLD) == 0):
                _tell_peers(status_ptr, status_table_ptr, call, rank, NUM_RANKS, COPIES)
    elif JUDGE:
        _judge(exchange_ptr, call, status_ptr, rank, SLOTS, NUM_RANKS)


@triton.jit
def clock_kernel(time_ptr):
    """This device's clock (int64, ns), when the kernel before it has ended."""
    after_previous()
    tl.store(time_ptr, nanoseconds())


@triton.jit
def _block_ids(
    exchange_ptr, call, block, BLOCKS, K, KP: tl.constexpr, SLOTS: tl.constexpr, NUM_RANKS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """(source, first token, T of the source, its slot base, ids (BLOCK_T, KP) with -1 where there is none)."""
    source = block // BLOCKS
    first = block % BLOCKS * BLOCK_T
    base = header_of(exchange_ptr, call, source, SLOTS, NUM_RANKS)
    num_tokens = tl.load(base + TOKENS)
    token = first + tl.arange(0, BLOCK_T)
    slot = tl.arange(0, KP)
    mask = (token < num_tokens)[:, None] & (slot < K)[None, :]
    ids = tl.load(base + HEADER + token[:, None] * K + slot[None, :], mask=mask, other=-1)
    return source, first, num_tokens, base, ids


@triton.jit(do_not_specialize=["rank"])
def histogram_kernel(
    exchange_ptr,
    histogram_ptr,
    call_ptr,
    status_ptr,
    rank,
    E: tl.constexpr,
    EP: tl.constexpr,
    LOCAL: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    SLOTS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """histogram (E + 1 + R, B): rows 0..E-1 slots per expert; row E tokens that this rank receives;
    row E+1+d tokens that this rank sends to d (blocks of this rank only)."""
    after_previous()
    next_may_come()
    call = tl.load(call_ptr)
    block = tl.program_id(0)
    total: tl.constexpr = BLOCKS * NUM_RANKS
    source, first, num_tokens, base, ids = _block_ids(
        exchange_ptr, call, block, BLOCKS, K, KP, SLOTS, NUM_RANKS, BLOCK_T
    )
    if tl.load(base + OPERATION) == IS_REFUSED:
        record(status_ptr, REFUSED, source, 0, 0, 0)
    bad = (ids >= E) | (ids < -1)
    if tl.max(bad.to(tl.int32)) != 0:
        entry = (first + tl.arange(0, BLOCK_T))[:, None] * K + tl.arange(0, KP)[None, :]
        record(status_ptr, BAD_ID, source, tl.min(tl.where(bad, entry, 2147483647)), 0, 0)
        ids = tl.where(bad, -1, ids)
    flat = tl.reshape(ids, (BLOCK_T * KP,))
    counts = tl.histogram(tl.where(flat >= 0, flat, 0), EP)
    expert = tl.arange(0, EP)
    unused = tl.sum((flat < 0).to(tl.int32))
    counts = tl.where(expert == 0, counts - unused, counts)
    tl.store(histogram_ptr + expert.to(tl.int64) * total + block, counts, mask=expert < E)
    here = (ids >= rank * LOCAL) & (ids < (rank + 1) * LOCAL)
    received = tl.sum(tl.max(here.to(tl.int32), 1))
    tl.store(histogram_ptr + tl.full((), E, tl.int64) * total + block, tl.where(source == rank, 0, received))
    if source == rank:
        for peer in range(NUM_RANKS):
            there = (ids >= peer * LOCAL) & (ids < (peer + 1) * LOCAL)
            sent = tl.where(peer == rank, 0, tl.sum(tl.max(there.to(tl.int32), 1)))
            tl.store(histogram_ptr + (E + 1 + peer).to(tl.int64) * total + block, sent)


@triton.jit(do_not_specialize=["rank"])
def scan_kernel(
    histogram_ptr,
    counts_ptr,
    send_count_ptr,
    recv_count_ptr,
    rank,
    E: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_P: tl.constexpr,
):
    """Exclusive running sums of one histogram row, in place, and its total per source."""
    after_previous()
    next_may_come()
    row = tl.program_id(0)
    source = tl.arange(0, NUM_RANKS)
    block = tl.arange(0, BLOCKS_P)
    at = histogram_ptr + row.to(tl.int64) * (NUM_RANKS * BLOCKS) + source[:, None] * BLOCKS + block[None, :]
    # Rows of sends hold this rank's blocks only.
    mask = (block < BLOCKS)[None, :] & ((row <= E) | (source == rank))[:, None]
    counts = tl.load(at, mask=mask, other=0)
    before = tl.cumsum(counts, 1) - counts
    total = tl.sum(counts, 1)
    if row < E:
        before += (tl.cumsum(total, 0) - total)[:, None]
        tl.store(counts_ptr + source * E + row, total)
    elif row == E:
        tl.store(recv_count_ptr + source, total)
    else:
        tl.store(send_count_ptr + row - E - 1, tl.sum(total))
    tl.store(at, before, mask=mask)


@triton.jit
def _store_order(order_ptr, leads, start, num_tiles, first, last):
    """The order of the row tiles, for experts that lead or not; see `tiles_kernel`."""
    num_local = tl.where(leads, tl.maximum(last - first, 0), 0)
    num_whole = tl.where(leads, 0, num_tiles)
    num_late = tl.where(leads, num_tiles - num_local, 0)
    local_before = tl.cumsum(num_local, 0) - num_local
    whole_before = tl.sum(num_local) + tl.cumsum(num_whole, 0) - num_whole
    late_before = tl.sum(num_local) + tl.sum(num_whole) + tl.cumsum(num_late, 0) - num_late
    for i in range(0, tl.max(num_tiles)):
        locals_before = tl.minimum(tl.maximum(i - first, 0), num_local)
        is_local = (i >= first) & (i < last)
        leading = tl.where(is_local, local_before + i - first, late_before + i - locals_before)
        tl.store(order_ptr + tl.where(leads, leading, whole_before + i), start + i, mask=i < num_tiles)


@triton.jit(do_not_specialize=["rank", "lead", "backward_lead"])
def tiles_kernel(
    exchange_ptr,
    counts_ptr,
    send_count_ptr,
    start_ptr,
    rows_ptr,
    expert_ptr,
    order_ptr,
    backward_order_ptr,
    progress_ptr,
    cursor_ptr,
    totals_ptr,
    host_ptr,
    call_ptr,
    status_ptr,
    rank,
    lead,
    backward_lead,
    E: tl.constexpr,
    SLOTS: tl.constexpr,
    LOCAL: tl.constexpr,
    LOCAL_P: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ALIGN: tl.constexpr,
    HOST: tl.constexpr,
):
    """Segment starts and, per row tile, its expert and its place in the order.  One program.

    totals: [0] padded rows, [1] row tiles.  progress (M,) and cursor, which count tiles of this call: zero.
    Order: of the first `lead` experts the tiles whose rows are all local; the tiles of all other experts;
    the remaining tiles of the first.  Each part in expert order.  lead = 0 is the natural order; few
    leading experts hide the dispatch at the least cost in L2, which sees their weights twice.  The backward has an
    order of its own: other tiles, which nothing precedes.

    Where a rank has more rows than it allocated, or after a failure, no rank sends a token or runs a tile.
    HOST (exact allocation): the host reads [call, padded rows, whether they fit] and tries again with
    enough; else TOO_MANY_ROWS is recorded.
    """
    after_previous()
    next_may_come()
    local = tl.arange(0, LOCAL_P)
    source = tl.arange(0, NUM_RANKS)
    at = counts_ptr + source[:, None] * E + rank * LOCAL + local[None, :]
    counts = tl.load(at, mask=(local < LOCAL)[None, :], other=0)
    rows = tl.sum(counts, 0)
    ahead = tl.sum(tl.where((source < rank)[:, None], counts, 0), 0)  # rows of earlier sources
    own = tl.sum(tl.where((source == rank)[:, None], counts, 0), 0)
    padded = (rows + ALIGN - 1) // ALIGN * ALIGN
    start = tl.cumsum(padded, 0) - padded
    total = tl.sum(padded)
    call = tl.load(call_ptr)
    fits = tl.load(status_ptr) == 0
    for peer in range(NUM_RANKS):  # every rank finds every rank's overflow, so that all act alike
        peer_at = counts_ptr + source[:, None] * E + peer * LOCAL + local[None, :]
        peer_rows = tl.sum(tl.load(peer_at, mask=(local < LOCAL)[None, :], other=0), 0)
        peer_total = tl.sum((peer_rows + ALIGN - 1) // ALIGN * ALIGN)
        capacity = tl.load(header_of(exchange_ptr, call, peer, SLOTS, NUM_RANKS) + CAPACITY)
        if peer_total > capacity:
            if not HOST:
                record(status_ptr, TOO_MANY_ROWS, peer, 0, tl.sum(peer_rows), capacity)
            fits = fits & False
    if not fits:
        tl.store(send_count_ptr + source, tl.zeros((NUM_RANKS,), tl.int32))
    tl.store(start_ptr + local, tl.where(fits, start, 0), mask=local < LOCAL)
    tl.store(rows_ptr + local, tl.where(fits, rows, 0), mask=local < LOCAL)
    tl.store(start_ptr + LOCAL, tl.where(fits, total, 0))

    # Tiles [first, last) of a segment hold this rank's rows only: from the tile after the last foreign row
    # in front, to the tile before the first foreign row behind (pad rows are local).
    first = (ahead + BLOCK_M - 1) // BLOCK_M
    last = tl.where(ahead + own == rows, padded // BLOCK_M, (ahead + own) // BLOCK_M)
    num_tiles = padded // BLOCK_M
    tl.store(cursor_ptr, 0)
    tl.store(totals_ptr, tl.where(fits, total, 0))
    tl.store(totals_ptr + 1, tl.where(fits, total // BLOCK_M, 0))
    if fits:
        for i in range(0, tl.max(num_tiles)):
            tile = start // BLOCK_M + i
            exists = i < num_tiles
            tl.store(expert_ptr + tile, local, mask=exists)
            tl.store(progress_ptr + tile, tl.zeros((LOCAL_P,), tl.int32), mask=exists)
        _store_order(order_ptr, local < lead, start // BLOCK_M, num_tiles, first, last)
        _store_order(backward_order_ptr, local < backward_lead, start // BLOCK_M, num_tiles, first, last)
    if HOST:
        tl.store(host_ptr + 1, total)
        tl.store(host_ptr + 2, fits.to(tl.int32))
        tl.debug_barrier()
        tl.atomic_xchg(host_ptr, call, sem="release", scope="sys")


@triton.jit(do_not_specialize=["rank", "num_tokens"])
def place_kernel(
    exchange_ptr,
    histogram_ptr,
    start_ptr,
    counts_ptr,
    totals_ptr,
    source_ptr,
    return_ptr,
    weight_ptr,
    send_token_ptr,
    call_ptr,
    rank,
    num_tokens,
    E: tl.constexpr,
    LOCAL: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    SLOTS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    RECEIVE_BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
    DEDUP: tl.constexpr,
):
    """Rows and send lists.  Programs 0..B-1 place their block's slots; B..B+e-1 fill pad rows.

    DEDUP: a source sends its list, so that a token's receive slot is its place in the list; else it sends all its
    tokens, and the slot is the token.
    """
    after_previous()
    next_may_come()
    call = tl.load(call_ptr)
    block = tl.program_id(0)
    total: tl.constexpr = BLOCKS * NUM_RANKS
    zero_row: tl.constexpr = -(NUM_RANKS - 1) * RECEIVE_BLOCK - 1
    have_rows = tl.load(totals_ptr) > 0
    if block >= total:
        local = block - total
        rows = 0
        for source in range(NUM_RANKS):
            rows += tl.load(counts_ptr + source * E + rank * LOCAL + local)
        begin = tl.load(start_ptr + local) + rows
        row = begin + tl.arange(0, ALIGN)
        mask = (row < tl.load(start_ptr + local + 1)) & have_rows
        tl.store(source_ptr + row, tl.full((ALIGN,), zero_row, tl.int32), mask=mask)
        tl.store(return_ptr + row, tl.full((ALIGN,), -1, tl.int32), mask=mask)
        tl.store(weight_ptr + row, tl.zeros((ALIGN,), tl.float32), mask=mask)
    else:
        source, first, source_tokens, base, ids = _block_ids(
            exchange_ptr, call, block, BLOCKS, K, KP, SLOTS, NUM_RANKS, BLOCK_T
        )
        ids = tl.where(ids >= E, -1, ids)
        here = (ids >= rank * LOCAL) & (ids < (rank + 1) * LOCAL)
        any_here = tl.max(here.to(tl.int32), 1)
        token = first + tl.arange(0, BLOCK_T)
        if source == rank:
            value = token
            for peer in range(NUM_RANKS):
                if peer != rank:
                    there = tl.max(((ids >= peer * LOCAL) & (ids < (peer + 1) * LOCAL)).to(tl.int32), 1)
                    at = (
                        tl.load(histogram_ptr + (E + 1 + peer).to(tl.int64) * total + block)
                        + tl.cumsum(there, 0)
                        - there
                    )
                    tl.store(send_token_ptr + peer.to(tl.int64) * num_tokens + at, token, mask=there != 0)
        else:
            slot = token
            if DEDUP:
                listed = tl.load(histogram_ptr + tl.full((), E, tl.int64) * total + block)
                slot = listed + tl.cumsum(any_here, 0) - any_here
            value = -((source - (source > rank)) * RECEIVE_BLOCK + slot) - 1
        if (tl.max(any_here) != 0) & have_rows:
            entries: tl.constexpr = BLOCK_T * KP
            flat = tl.reshape(tl.where(here, ids, -1), (entries,))
            other = tl.reshape(tl.where(here, ids, -1), (entries,))
            index = tl.arange(0, entries)
            same = (flat[:, None] == other[None, :]) & (index[None, :] < index[:, None])
            before = tl.reshape(tl.sum(same.to(tl.int32), 1), (BLOCK_T, KP))
            local = tl.where(here, ids - rank * LOCAL, 0)
            at = (
                tl.load(start_ptr + local)
                + tl.load(histogram_ptr + (rank * LOCAL + local).to(tl.int64) * total + block)
                + before
            )
            entry = token[:, None] * K + tl.arange(0, KP)[None, :]
            weight = tl.load(base + HEADER + SLOTS + entry, mask=here, other=0).to(tl.float32, bitcast=True)
            tl.store(source_ptr + at, tl.broadcast_to(value[:, None], (BLOCK_T, KP)), mask=here)
            tl.store(return_ptr + at, source * SLOTS + entry, mask=here)
            tl.store(weight_ptr + at, weight, mask=here)

"""The routing plan on the GPU: four small kernels behind `kernels/entry.py`, equal element for element to
`routing.build_plan`.

histogram  per block of tokens: slots per expert, tokens to receive, tokens to send
scan       running sums of each histogram row over the blocks, in (source, block) order
tiles      segment starts, tile tables, totals; the one record a host may read
place      each slot computes its row: start of its expert + slots before its block + slots before it

Each lets the next one's programs come before it ends; see `after_previous`.

No atomic decides a position.  Blocks are BLOCK_T tokens of one source; their entries are flattened as
(token, slot), which is the canonical order inside a source.

Suffixes: R ranks, E experts, e local experts, B blocks (R * blocks per rank), M row tiles.
"""

import triton
import triton.language as tl

from uniep.kernels.arguments import Rows
from uniep.kernels.header import CAPACITY, HEADER, IS_REFUSED, OPERATION, TOKENS, header_of
from uniep.kernels.ptx import after_previous, next_may_come
from uniep.kernels.rows import group_word
from uniep.kernels.sync import BAD_ID, REFUSED, TOO_MANY_ROWS, record


@triton.jit
def _chunk(num_tokens, chunk, CHUNKS: tl.constexpr, BLOCK_T: tl.constexpr):
    """(first token, end) of a chunk of a source that has `num_tokens`: whole blocks, as many in every chunk."""
    tokens = tl.cdiv(tl.cdiv(num_tokens, BLOCK_T), CHUNKS) * BLOCK_T
    return tl.minimum(chunk * tokens, num_tokens), tl.minimum((chunk + 1) * tokens, num_tokens)


@triton.jit
def _block_ids(base, first, end, K: tl.constexpr, KP: tl.constexpr, BLOCK_T: tl.constexpr):
    """(BLOCK_T, KP): the ids of a block's tokens, -1 where there is none."""
    token = first + tl.arange(0, BLOCK_T)
    slot = tl.arange(0, KP)
    mask = (token < end)[:, None] & (slot < K)[None, :]
    return tl.load(base + HEADER + token[:, None] * K + slot[None, :], mask=mask, other=-1)


@triton.jit
def _wanted_by(ids, LOCAL: tl.constexpr, NUM_RANKS: tl.constexpr):
    """(BLOCK_T, R): 1 where some expert of that rank is among the token's."""
    owner = tl.where(ids >= 0, ids // LOCAL, -1)
    return tl.max((owner[:, :, None] == tl.arange(0, NUM_RANKS)[None, None, :]).to(tl.int32), 1)


@triton.jit
def _is_first(ids, LOCAL: tl.constexpr):
    """(BLOCK_T, KP): whether a slot's expert is the lowest of its token's on that rank; of equal ones the first slot."""
    slot = tl.arange(0, ids.shape[1])
    a = ids[:, :, None]
    b = ids[:, None, :]
    before = (b < a) | ((b == a) & (slot[None, None, :] < slot[None, :, None]))
    before &= (b >= 0) & (b // LOCAL == a // LOCAL)
    return (ids >= 0) & (tl.max(before.to(tl.int32), 2) == 0)


@triton.jit
def _count_of(ids, BINS: tl.constexpr):
    """How many of `ids` (flat, -1 for none) name each expert below BINS."""
    unused = tl.sum((ids < 0).to(tl.int32))
    return tl.histogram(tl.maximum(ids, 0), BINS) - tl.where(tl.arange(0, BINS) == 0, unused, 0)


@triton.jit
def _count_chunk(
    exchange_ptr,
    histogram_ptr,
    call,
    status_ptr,
    rank,
    item,
    PLAN: tl.constexpr,
    BY_EXPERT: tl.constexpr,
):
    """One column of the histogram."""
    E: tl.constexpr = PLAN.E
    EP: tl.constexpr = PLAN.EP
    LOCAL: tl.constexpr = PLAN.LOCAL
    K: tl.constexpr = PLAN.K
    KP: tl.constexpr = PLAN.KP
    NUM_RANKS: tl.constexpr = PLAN.NUM_RANKS
    CHUNKS: tl.constexpr = PLAN.CHUNKS
    BLOCK_T: tl.constexpr = PLAN.BLOCK_T
    TOTAL: tl.constexpr = NUM_RANKS * CHUNKS
    source = item // CHUNKS
    base = header_of(exchange_ptr, call, source, PLAN.SLOTS, NUM_RANKS)
    begin, end = _chunk(tl.load(base + TOKENS), item % CHUNKS, CHUNKS, BLOCK_T)
    if tl.load(base + OPERATION) == IS_REFUSED:
        record(status_ptr, REFUSED, source, 0, call, 0)
    expert = tl.arange(0, EP)
    peer = tl.arange(0, NUM_RANKS)
    counts = tl.zeros((EP,), tl.int32)
    firsts = tl.zeros((EP,), tl.int32)
    sent = tl.zeros((NUM_RANKS,), tl.int32)
    received = tl.zeros_like(item)
    for first in range(begin, end, BLOCK_T):
        ids = _block_ids(base, first, end, K, KP, BLOCK_T)
        bad = (ids >= E) | (ids < -1)
        if tl.max(bad.to(tl.int32)) != 0:
            entry = (first + tl.arange(0, BLOCK_T))[:, None] * K + tl.arange(0, KP)[None, :]
            record(status_ptr, BAD_ID, source, tl.min(tl.where(bad, entry, 2147483647)), 0, 0)
            ids = tl.where(bad, -1, ids)
        counts += _count_of(tl.reshape(ids, (BLOCK_T * KP,)), EP)
        if BY_EXPERT:
            firsts += _count_of(tl.reshape(tl.where(_is_first(ids, LOCAL), ids, -1), (BLOCK_T * KP,)), EP)
        if source == rank:
            sent += tl.sum(_wanted_by(ids, LOCAL, NUM_RANKS), 0)
        else:
            here = (ids >= rank * LOCAL) & (ids < (rank + 1) * LOCAL)
            received += tl.sum(tl.max(here.to(tl.int32), 1))
    tl.store(histogram_ptr + expert * TOTAL + item, counts, mask=expert < E)
    tl.store(histogram_ptr + E * TOTAL + item, received)
    if source == rank:
        tl.store(histogram_ptr + (E + 1 + peer) * TOTAL + item, tl.where(peer == rank, 0, sent))
    if BY_EXPERT:
        tl.store(histogram_ptr + (E + 1 + NUM_RANKS + expert) * TOTAL + item, firsts, mask=expert < E)


@triton.jit(do_not_specialize=["rank"])
def histogram_kernel(
    exchange_ptr,
    histogram_ptr,
    call_ptr,
    status_ptr,
    rank,
    PLAN: tl.constexpr,
    BY_EXPERT: tl.constexpr,
):
    """histogram (E + 1 + R, C): rows 0..E-1 slots per expert; row E tokens that this rank receives;
    row E+1+d tokens that this rank sends to d (chunks of this rank only).

    BY_EXPERT: E more rows, tokens per expert that is the lowest of theirs on its rank."""
    after_previous()
    next_may_come()
    call = tl.load(call_ptr)
    for item in range(tl.program_id(0), PLAN.NUM_RANKS * PLAN.CHUNKS, tl.num_programs(0)):
        _count_chunk(exchange_ptr, histogram_ptr, call, status_ptr, rank, item, PLAN, BY_EXPERT)


@triton.jit
def _scan_row(
    histogram_ptr,
    counts_ptr,
    send_count_ptr,
    recv_count_ptr,
    first_ptr,
    rank,
    row,
    E: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Exclusive running sums of one histogram row, in place, and its total per source."""
    source = tl.arange(0, NUM_RANKS)
    chunk = tl.arange(0, CHUNKS)
    at = histogram_ptr + row * (NUM_RANKS * CHUNKS) + source[:, None] * CHUNKS + chunk[None, :]
    # Rows of sends hold this rank's chunks only.
    has_all = (row <= E) | (row > E + NUM_RANKS)
    mask = tl.broadcast_to((has_all | (source == rank))[:, None], (NUM_RANKS, CHUNKS))
    counts = tl.load(at, mask=mask, other=0)
    before = tl.cumsum(counts, 1) - counts
    total = tl.sum(counts, 1)
    if row < E:
        before += (tl.cumsum(total, 0) - total)[:, None]
        tl.store(counts_ptr + source * E + row, total)
    elif row == E:
        tl.store(recv_count_ptr + source, total)
    elif row <= E + NUM_RANKS:
        tl.store(send_count_ptr + row - E - 1, tl.sum(total))
    else:
        if first_ptr is not None:
            tl.store(first_ptr + source * E + row - E - 1 - NUM_RANKS, total)
    tl.store(at, before, mask=mask)


@triton.jit(do_not_specialize=["rank"])
def scan_kernel(
    histogram_ptr,
    counts_ptr,
    send_count_ptr,
    recv_count_ptr,
    first_ptr,
    rank,
    E: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """`_scan_row` of all rows.  first (R, E): totals of the last E rows, if the histogram has them; or None."""
    after_previous()
    next_may_come()
    num_rows = E + 1 + NUM_RANKS
    if first_ptr is not None:
        num_rows += E
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        _scan_row(
            histogram_ptr, counts_ptr, send_count_ptr, recv_count_ptr, first_ptr, rank, row, E, NUM_RANKS, CHUNKS
        )  # fmt: skip


@triton.jit
def segment_of(end, tile, SEGMENTS: tl.constexpr):
    """The segment that holds each tile.  end (SEGMENTS,): its last tile and one; a power of two of them, ascending; some
    may be empty."""
    segment = tl.zeros_like(tile)
    for level in tl.static_range(1, 16):
        if (SEGMENTS >> level) > 0:
            behind = segment + (SEGMENTS >> level)
            segment = tl.where(tl.gather(end, behind - 1, 0) <= tile, behind, segment)
    return segment


@triton.jit
def _begin_of(end, segment):
    """The first tile of each of these segments.  end: as for `segment_of`."""
    return tl.where(segment > 0, tl.gather(end, tl.maximum(segment - 1, 0), 0), 0)


@triton.jit
def _shifts(end, wave, WAVES: tl.constexpr):
    """Of each segment, what leads from the number of a row tile to its place in the order: by wave, in each as they lie.
    end (S,): of each segment, its last tile and one.  wave (S,): below WAVES, a power of two."""
    SEGMENTS: tl.constexpr = end.shape[0]
    index = tl.arange(0, SEGMENTS)
    begin = _begin_of(end, index)
    is_in = wave[None, :] == tl.arange(0, WAVES)[:, None]
    count = tl.where(is_in, (end - begin)[None, :], 0)
    until = tl.reshape(tl.cumsum(tl.reshape(count, (WAVES * SEGMENTS,)), 0), (WAVES, SEGMENTS))
    return tl.sum(tl.where(is_in, until - count, 0), 0) - begin


@triton.jit
def _wave(arrival, waves, NUM_RANKS: tl.constexpr):
    """The wave of sources that arrive so many places behind this rank's own rows, which are wave 0."""
    return (arrival * waves + NUM_RANKS - 1) // NUM_RANKS


@triton.jit
def _neighbours(of_source, rank, waves, NUM_RANKS: tl.constexpr):
    """(first, last) of the sources of the same wave whose segments of an expert lie side by side with each one's.
    waves = 1: those of an expert whose local tiles come first."""
    wave = _wave((rank - of_source + NUM_RANKS) % NUM_RANKS, waves, NUM_RANKS)
    soonest = (wave - 1) * NUM_RANKS // waves + 1  # places behind this rank's rows
    latest = wave * NUM_RANKS // waves
    is_behind = of_source > rank
    first = tl.where(is_behind, tl.maximum(rank - latest + NUM_RANKS, rank + 1), tl.maximum(rank - latest, 0))
    last = tl.where(is_behind, tl.minimum(rank - soonest + NUM_RANKS, NUM_RANKS - 1), rank - soonest)
    is_own = of_source == rank
    return tl.where(is_own, rank, first), tl.where(is_own, rank, last)


@triton.jit
def _store_walk(order_ptr, group_ptr, shift, tile, exists, expert, begin, tiles, group_rows):
    """Row tiles at their places in an order, and their words there.  begin, tiles: of the run that each belongs to."""
    tl.store(order_ptr + shift + tile, tile, mask=exists)
    tl.store(group_ptr + shift + tile, group_word(expert, tile - begin, tiles, group_rows), mask=exists)


@triton.jit(do_not_specialize=["rank", "lead", "backward_lead", "waves", "group_rows", "down_group_rows"])
def tiles_kernel(
    exchange_ptr,
    counts_ptr,
    table: Rows,
    host_ptr,
    call_ptr,
    status_ptr,
    rank,
    lead,
    backward_lead,
    waves,
    group_rows,
    down_group_rows,
    E: tl.constexpr,
    SLOTS: tl.constexpr,
    LOCAL: tl.constexpr,
    LOCAL_P: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ALIGN: tl.constexpr,
    TILES: tl.constexpr,
    HOST: tl.constexpr,
    DEDUP: tl.constexpr,
    WAVES: tl.constexpr,
    IN_TURN: tl.constexpr,
):
    """Segment starts and, per row tile, its expert, its place in the orders and its groups.

    Segments are multiples of BLOCK_M, so that a tile never spans two experts.  ALIGN: what rows are counted by where a
    rank needs room for them, whatever its tiles are: every rank finds the same.
    totals: [0] padded rows, [1] row tiles.  progress (M,) and cursor, which count tiles of this call: zero.
    Order: segments, which are the tiles of one expert that wait for one source last, go in waves, and inside a wave by
    expert.  waves = 1: the local segments of the first `lead` experts; the segments of all other experts; the remaining
    ones of the first.  lead = 0 is the natural order; few leading experts hide the dispatch at the least cost in L2, which
    sees their weights twice.  IN_TURN: the remaining ones come before those of all other experts, in the forward alone.
    The backward leads by a number of its own.  waves > 1: local segments, then the sources in the order in which their
    copies arrive, from the rank before this one downwards, about NUM_RANKS / waves at a time.
    Groups, of at most `group_rows` row tiles in the order of gate_up, else `down_group_rows`, are cut out of the tiles of
    an expert, or, where the order separates these, of neighbouring segments of one wave.
    Each program looks at all segments, then at TILES tiles at once, every one of which finds its segment and its places.

    Where a rank has more rows than it allocated, or after a failure, no rank sends a token or runs a tile.
    HOST (exact allocation): the host reads [call, rows by ALIGN, whether they fit, most tokens that one source sends] and
    tries again with enough; else TOO_MANY_ROWS is recorded.  DEDUP: as for `place_kernel`.
    """
    after_previous()
    next_may_come()
    local = tl.arange(0, LOCAL_P)
    source = tl.arange(0, NUM_RANKS)
    program = tl.program_id(0)
    at = counts_ptr + source[None, :] * E + rank * LOCAL + local[:, None]
    counts = tl.load(at, mask=(local < LOCAL)[:, None], other=0)
    rows = tl.sum(counts, 1)
    padded = (rows + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    start = tl.cumsum(padded, 0) - padded
    total = tl.sum(padded)
    call = tl.load(call_ptr)
    # Every rank finds every rank's overflow, so that all act alike.
    header = header_of(exchange_ptr, call, source, SLOTS, NUM_RANKS)
    capacity_R = tl.load(header + CAPACITY)
    rows_R = tl.zeros_like(source)
    padded_R = tl.zeros_like(source)
    for peer in tl.static_range(NUM_RANKS):
        peer_at = counts_ptr + source[:, None] * E + peer * LOCAL + local[None, :]
        peer_rows = tl.sum(tl.load(peer_at, mask=(local < LOCAL)[None, :], other=0), 0)
        rows_R = tl.where(source == peer, tl.sum(peer_rows), rows_R)
        padded_R = tl.where(source == peer, tl.sum((peer_rows + ALIGN - 1) // ALIGN * ALIGN), padded_R)
    over = padded_R > capacity_R
    fits = (tl.load(status_ptr) == 0) & (tl.max(over.to(tl.int32)) == 0)
    if HOST:  # before the counts are zeroed
        sent_R = tl.load(table.recv_count_R + source) if DEDUP else tl.where(source == rank, 0, tl.load(header))
        most_sent = tl.max(sent_R)
    if program == 0:
        if not HOST:
            if tl.max(over.to(tl.int32)) != 0:
                first_over = tl.min(tl.where(over, source, NUM_RANKS))
                needed = tl.sum(tl.where(source == first_over, rows_R, 0))
                available = tl.sum(tl.where(source == first_over, capacity_R, 0))
                record(status_ptr, TOO_MANY_ROWS, first_over, 0, needed, available)
        if not fits:
            tl.store(table.send_count_R + source, tl.zeros((NUM_RANKS,), tl.int32))
            tl.store(table.recv_count_R + source, tl.zeros((NUM_RANKS,), tl.int32))
        tl.store(table.start_e1 + local, tl.where(fits, start, 0), mask=local < LOCAL)
        tl.store(table.rows_e + local, tl.where(fits, rows, 0), mask=local < LOCAL)
        tl.store(table.start_e1 + LOCAL, tl.where(fits, total, 0))
        tl.store(table.cursor, 0)
        tl.store(table.totals, tl.where(fits, total, 0))
        tl.store(table.totals + 1, tl.where(fits, total // BLOCK_M, 0))

    # A tile waits last for the source of its first row, since copies come from the rank before this one downwards; but for
    # the rank behind this one, which comes last, where it has rows up to this rank's and later ones.  Pad rows are this
    # rank's, or, behind rows of later ranks, of the last one of these.
    SEGMENTS: tl.constexpr = LOCAL_P * NUM_RANKS
    end = tl.cumsum(counts, 1)  # rows
    own_end = tl.sum(tl.where((source == rank)[None, :], end, 0), 1)
    behind = (end == rows[:, None]) & (source >= rank)[None, :]
    last = tl.where(behind, (padded // BLOCK_M)[:, None], (end + BLOCK_M - 1) // BLOCK_M)
    whole = tl.where(own_end < rows, own_end // BLOCK_M, padded // BLOCK_M)
    last = tl.where((source <= rank)[None, :], tl.minimum(last, whole[:, None]), last)
    end = tl.reshape((start // BLOCK_M)[:, None] + last, (SEGMENTS,))
    index = tl.arange(0, SEGMENTS)
    expert = index // NUM_RANKS
    of_source = index % NUM_RANKS
    late = tl.where(of_source == rank, 0, 2)
    arrival = (rank - of_source + NUM_RANKS) % NUM_RANKS
    by_arrival = _wave(arrival, waves, NUM_RANKS)
    rest = tl.minimum(late, 1) if IN_TURN else late
    shift = _shifts(end, tl.where(waves > 1, by_arrival, tl.where(expert < lead, rest, 1)), WAVES)
    backward_shift = shift
    if waves == 1:
        backward_shift = _shifts(end, tl.where(expert < backward_lead, late, 1), WAVES)
    num_m = tl.where(fits, total // BLOCK_M, 0)
    for begin in range(program * TILES, num_m, tl.num_programs(0) * TILES):
        tile = begin + tl.arange(0, TILES)
        exists = tile < num_m
        segment = segment_of(end, tile, SEGMENTS)
        owner = segment // NUM_RANKS
        begin_e = _begin_of(end, owner * NUM_RANKS)
        tiles_e = tl.gather(end, owner * NUM_RANKS + NUM_RANKS - 1, 0) - begin_e
        lowest, highest = _neighbours(segment % NUM_RANKS, rank, waves, NUM_RANKS)
        begin_s = _begin_of(end, owner * NUM_RANKS + lowest)
        tiles_s = tl.gather(end, owner * NUM_RANKS + highest, 0) - begin_s
        tl.store(table.expert_M + tile, owner, mask=exists)
        tl.store(table.progress_M + tile, tl.zeros((TILES,), tl.int32), mask=exists)
        tl.store(table.group_M + tile, group_word(owner, tile - begin_e, tiles_e, down_group_rows), mask=exists)
        together = (waves == 1) & (owner >= lead)
        _store_walk(
            table.order_M, table.order_group_M, tl.gather(shift, segment, 0), tile, exists, owner,
            tl.where(together, begin_e, begin_s), tl.where(together, tiles_e, tiles_s), group_rows,
        )  # fmt: skip
        together = (waves == 1) & (owner >= backward_lead)
        _store_walk(
            table.backward_order_M, table.backward_group_M, tl.gather(backward_shift, segment, 0), tile, exists, owner,
            tl.where(together, begin_e, begin_s), tl.where(together, tiles_e, tiles_s), down_group_rows,
        )  # fmt: skip
    if HOST:
        if program == 0:
            tl.store(host_ptr + 1, tl.sum(tl.where(source == rank, padded_R, 0)))
            tl.store(host_ptr + 2, fits.to(tl.int32))
            tl.store(host_ptr + 3, most_sent)
            tl.debug_barrier()
            tl.atomic_xchg(host_ptr, call, sem="release", scope="sys")


@triton.jit
def _slots_before(local, BINS: tl.constexpr):
    """How many slots before each one name the same expert, below BINS.  local: of at most 256 slots, -1 for none.

    Four experts are counted in one word.
    """
    WORDS: tl.constexpr = 4
    shift = (local & 3) * 8
    before = tl.zeros((WORDS, local.shape[0]), tl.int32)
    for first in range(0, BINS // 4, WORDS):
        mine = (local >> 2)[None, :] == first + tl.arange(0, WORDS)[:, None]
        ones = tl.where(mine, (1 << shift)[None, :], 0)
        before += tl.where(mine, tl.cumsum(ones, 1) - ones, 0)
    return (tl.sum(before, 0) >> shift) & 255


@triton.jit
def _place_chunk(
    exchange_ptr,
    histogram_ptr,
    first_ptr,
    table: Rows,
    call,
    rank,
    num_tokens,
    have_rows,
    item,
    RECEIVE_BLOCK: tl.constexpr,
    DEDUP: tl.constexpr,
    PLAN: tl.constexpr,
):
    """Rows of the slots of one chunk, and, of this rank's own, its part of the send lists."""
    E: tl.constexpr = PLAN.E
    EP: tl.constexpr = PLAN.EP
    BINS: tl.constexpr = PLAN.BINS
    LOCAL: tl.constexpr = PLAN.LOCAL
    K: tl.constexpr = PLAN.K
    KP: tl.constexpr = PLAN.KP
    SLOTS: tl.constexpr = PLAN.SLOTS
    NUM_RANKS: tl.constexpr = PLAN.NUM_RANKS
    CHUNKS: tl.constexpr = PLAN.CHUNKS
    BLOCK_T: tl.constexpr = PLAN.BLOCK_T
    TOTAL: tl.constexpr = NUM_RANKS * CHUNKS
    ENTRIES: tl.constexpr = BLOCK_T * KP
    source = item // CHUNKS
    base = header_of(exchange_ptr, call, source, SLOTS, NUM_RANKS)
    begin, end = _chunk(tl.load(base + TOKENS), item % CHUNKS, CHUNKS, BLOCK_T)
    expert = tl.arange(0, BINS)
    peer = tl.arange(0, NUM_RANKS)
    # The next free row of each expert, receive slot, and place in the list to each rank.
    free = tl.load(table.start_e1 + expert, mask=expert < LOCAL, other=0)
    free += tl.load(histogram_ptr + (rank * LOCAL + expert) * TOTAL + item, mask=expert < LOCAL, other=0)
    listed = tl.load(histogram_ptr + E * TOTAL + item)
    sent = tl.load(histogram_ptr + (E + 1 + peer) * TOTAL + item)
    if first_ptr is not None:  # the next place of each expert in the list of its rank
        every = tl.arange(0, EP)
        firsts = tl.load(first_ptr + source * E + every, mask=every < E, other=0)
        before = tl.cumsum(firsts, 0) - firsts
        place = before - tl.gather(before, every // LOCAL * LOCAL, 0)
        place += tl.load(histogram_ptr + (E + 1 + NUM_RANKS + every) * TOTAL + item, mask=every < E, other=0)
    if table.recv_token_N is not None:
        fetched_ptr = table.recv_token_N + tl.sum(tl.load(table.recv_count_R + peer, mask=peer < source, other=0))
    for first in range(begin, end, BLOCK_T):
        ids = _block_ids(base, first, end, K, KP, BLOCK_T)
        ids = tl.where(ids >= E, -1, ids)
        here = (ids >= rank * LOCAL) & (ids < (rank + 1) * LOCAL)
        any_here = tl.max(here.to(tl.int32), 1)
        token = first + tl.arange(0, BLOCK_T)
        if first_ptr is not None:
            chosen = tl.reshape(tl.where(_is_first(ids, LOCAL), ids, -1), (ENTRIES,))
            listed_at = tl.gather(place, tl.maximum(chosen, 0), 0) + _slots_before(chosen, EP)
            place += _count_of(chosen, EP)
        if source == rank:
            value = token
            if first_ptr is not None:
                owner = tl.maximum(chosen, 0) // LOCAL
                list_ptr = table.send_token_RT + owner.to(tl.int64) * num_tokens
                tokens = tl.reshape(tl.broadcast_to(token[:, None], (BLOCK_T, KP)), (ENTRIES,))
                tl.store(list_ptr + listed_at, tokens, mask=(chosen >= 0) & (owner != rank))
            else:
                wanted = tl.where((peer == rank)[None, :], 0, _wanted_by(ids, LOCAL, NUM_RANKS))
                at = sent[None, :] + tl.cumsum(wanted, 0) - wanted
                list_ptr = table.send_token_RT + peer.to(tl.int64) * num_tokens
                tl.store(list_ptr[None, :] + at, tl.broadcast_to(token[:, None], at.shape), mask=wanted != 0)
                sent += tl.sum(wanted, 0)
        else:
            slot = token
            if DEDUP:
                if first_ptr is not None:
                    is_here = (chosen >= rank * LOCAL) & (chosen < (rank + 1) * LOCAL)
                    slot = tl.sum(tl.reshape(tl.where(is_here, listed_at, 0), (BLOCK_T, KP)), 1)
                else:
                    slot = listed + tl.cumsum(any_here, 0) - any_here
                    listed += tl.sum(any_here)
                if table.recv_token_N is not None:
                    tl.store(fetched_ptr + slot, token, mask=(any_here != 0) & have_rows)
            value = -((source - (source > rank)) * RECEIVE_BLOCK + slot) - 1
        if (tl.max(any_here) != 0) & have_rows:
            local = tl.reshape(tl.where(here, ids - rank * LOCAL, -1), (ENTRIES,))
            is_row = local >= 0
            row = tl.gather(free, tl.maximum(local, 0), 0) + _slots_before(local, BINS)
            index = tl.arange(0, ENTRIES)
            entry = (first + index // KP) * K + index % KP
            weight = tl.load(base + HEADER + SLOTS + entry, mask=is_row, other=0).to(tl.float32, bitcast=True)
            where = tl.reshape(tl.broadcast_to(value[:, None], (BLOCK_T, KP)), (ENTRIES,))
            tl.store(table.source_N + row, where, mask=is_row)
            tl.store(table.return_N + row, source * SLOTS + entry, mask=is_row)
            tl.store(table.weight_N + row, weight, mask=is_row)
            free += _count_of(local, BINS)


@triton.jit
def _pad_segment(table: Rows, expert, ZERO_ROW: tl.constexpr, ALIGN: tl.constexpr):
    """The rows of an expert behind its last one."""
    begin = tl.load(table.start_e1 + expert) + tl.load(table.rows_e + expert)
    row = begin + tl.arange(0, ALIGN)
    mask = row < tl.load(table.start_e1 + expert + 1)
    tl.store(table.source_N + row, tl.full((ALIGN,), ZERO_ROW, tl.int32), mask=mask)
    tl.store(table.return_N + row, tl.full((ALIGN,), -1, tl.int32), mask=mask)
    tl.store(table.weight_N + row, tl.zeros((ALIGN,), tl.float32), mask=mask)


@triton.jit(do_not_specialize=["rank", "num_tokens"])
def place_kernel(
    exchange_ptr,
    histogram_ptr,
    first_ptr,
    table: Rows,
    call_ptr,
    rank,
    num_tokens,
    RECEIVE_BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
    DEDUP: tl.constexpr,
    PLAN: tl.constexpr,
):
    """Rows and send lists: items 0..C-1 place the slots of a chunk; C..C+e-1 fill pad rows.

    DEDUP: a source sends its list, so that a token's receive slot is its place in the list; else it sends all its
    tokens, and the slot is the token.  first (R, E), as `scan_kernel` leaves it: lists have tokens in the order of their
    lowest expert on the other rank, then ascending; None: ascending.
    """
    after_previous()
    next_may_come()
    call = tl.load(call_ptr)
    have_rows = tl.load(table.totals) > 0
    COLUMNS: tl.constexpr = PLAN.NUM_RANKS * PLAN.CHUNKS
    for item in range(tl.program_id(0), COLUMNS + PLAN.LOCAL, tl.num_programs(0)):
        if item < COLUMNS:
            _place_chunk(
                exchange_ptr,
                histogram_ptr,
                first_ptr,
                table,
                call,
                rank,
                num_tokens,
                have_rows,
                item,
                RECEIVE_BLOCK,
                DEDUP,
                PLAN,
            )
        elif have_rows:
            _pad_segment(table, item - COLUMNS, -(PLAN.NUM_RANKS - 1) * RECEIVE_BLOCK - 1, ALIGN)

"""Entering a call: every rank tells every other what it calls, and waits for all of them.

exchange   every rank stores its ids and weights into every peer's exchange slot, then raises `entered`
barrier    waits for the flags of all ranks, judges what they have told, and tells the host
clock      the device's time, for traces

A wait for other ranks does not let the next kernel's programs come early, as those of a plan do: they would hold
multiprocessors that other streams may need for these ranks to go on.

The exchange slot of source s (parity p) holds a header (`kernels/header.py`), then T_max*K ids, then T_max*K weights as
fp32 bits.  It has two parities because a peer may enter the next call while this rank reads.

Suffixes: R ranks, T tokens, K slots.
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
    LOST,
    LOST_RANK,
    OTHER_CALL,
    REFUSED,
    STAGE_ENTRY,
    TIMEOUT,
    deadline,
    every_rank,
    pass_on,
    record,
    set_flags,
    wait_for,
)

LONGEST_TASK_NS = tl.constexpr(200_000_000)  # much longer than a tile takes that reads what a peer has sent


@triton.jit(
    do_not_specialize=[
        "num_tokens", "capacity", "operation", "layer", "draw_low", "draw_high", "has_digests", "entered_offset", "rank",
    ]
)  # fmt: skip
def exchange_kernel(
    call_ptr,
    ticket_ptr,
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
    rank,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Enter call `*call_ptr + 1`: publish this rank's header, ids and weights, then count the call.

    call: its number, then the number of calls with ids so far.  forward: with ids, takes the number of this call; without,
    the call whose plan this one uses.  digests: int32 words, if has_digests.
    ids, weights: or None, an entry alone.  refusal: or None; publish instead that this rank's inputs are bad: HEADER words,
    of which those from ERROR on go into the header.
    """
    HAS_IDS: tl.constexpr = ids_ptr is not None
    REFUSE: tl.constexpr = refusal_ptr is not None
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
        set_flags(flag_table_ptr, entered_offset + rank, call, NUM_RANKS)


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
            of_source = header_of(exchange_ptr, call, tl.full((), source, tl.int32), SLOTS, NUM_RANKS)
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
    waited_ptr,
    timeout_ns,
    rank,
    SLOTS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    STAGE: tl.constexpr,
    JUDGE: tl.constexpr,
    COPIES: tl.constexpr,
):
    """Wait until one flag of every other rank has reached this call.  One warp.

    waited (1,): int64, the nanoseconds of this wait are added; None: it hides behind other work.
    JUDGE, at the entry: then see that all ranks have entered the same.  COPIES: copy engines send behind it.
    """
    after_previous()
    began_ns = nanoseconds()
    ranks = every_rank(NUM_RANKS)
    call = tl.load(call_ptr)
    flags = tl.where(ranks == rank, call_ptr, flags_ptr + ranks)
    deadline_ns = deadline(status_ptr, timeout_ns)
    if STAGE == STAGE_ENTRY:
        gone = status_ptr + STATUS + ranks * LOST_WORDS + LOST_REASON
        wait_for(flags, ranks, call, deadline_ns, status_ptr, STAGE, gone)
    else:
        wait_for(flags, ranks, call, deadline_ns, status_ptr, STAGE)
    if waited_ptr is not None:
        tl.atomic_add(waited_ptr, nanoseconds() - began_ns, sem="relaxed", scope="gpu")
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

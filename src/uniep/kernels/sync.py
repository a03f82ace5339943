"""Waiting for peers and signalling them.

Flags are int32 words in every rank's symmetric memory that hold the number of the call they belong to:
they only grow and are never reset.  Every wait is bounded.

Threads poll for themselves and may see a flag at different times, so what a program does next must never hang on
what one thread saw: threads that part ways at a barrier wait for each other for ever.  Decisions are reductions
over WIDE elements or more, which end in shared memory, or results of scalar atomics, which one thread hands out.

The status record (symmetric memory) has code 0 while all is well.  This rank's kernels note the first failure there,
and its details in the host's record.  A peer that cannot go on stores LOST there, with its rank above it: whoever waits or
reads results here looks at this one word.  What lies where: header.py.
"""

import triton
import triton.language as tl

from uniep.kernels.arguments import Wire
from uniep.kernels.header import (
    LOST_CALL,
    LOST_WORDS,
    STATUS,
    host_record,
)
from uniep.kernels.ptx import load_acquire, nanoseconds

TIMEOUT = tl.constexpr(1)
BAD_ID = tl.constexpr(2)
TOO_MANY_ROWS = tl.constexpr(3)
REFUSED = tl.constexpr(4)
OTHER_CALL = tl.constexpr(5)
LOST = tl.constexpr(6)  # by a peer: LOST + LOST_RANK * (its rank + 1)
LOST_RANK = tl.constexpr(256)

# For peers, whose flags reach the number of the call.
STAGE_ENTRY = tl.constexpr(1)
STAGE_DISPATCH = tl.constexpr(2)
STAGE_COMBINE = tl.constexpr(3)
# For this rank's own tiles, which are counted.
STAGE_ROWS = tl.constexpr(4)
STAGE_SUM = tl.constexpr(5)
STAGE_RAW = tl.constexpr(6)
STAGE_ACTIVATED = tl.constexpr(7)

WIDE = tl.constexpr(64)  # more elements than a warp has lanes


@triton.jit
def _tell_host(status_ptr, code, a, b, c, d):
    """Write the host's record, the code last."""
    host_ptr = host_record(status_ptr)
    tl.store(host_ptr + 1, a)
    tl.store(host_ptr + 2, b)
    tl.store(host_ptr + 3, c)
    tl.store(host_ptr + 4, d)
    tl.debug_barrier()
    tl.atomic_xchg(host_ptr, code, sem="release", scope="sys")


@triton.jit
def record(status_ptr, code, a, b, c, d):
    """Write a status record here and to the host.  The first failure stays."""
    if tl.atomic_cas(status_ptr, 0, code, scope="sys") == 0:
        _tell_host(status_ptr, code, a, b, c, d)


@triton.jit
def pass_on(status_ptr):
    """If a peer has stored LOST here, tell the host.  By one program at a time."""
    code = tl.load(status_ptr, volatile=True)
    if code > LOST_RANK:
        if tl.load(host_record(status_ptr), volatile=True) == 0:
            source = code // LOST_RANK - 1
            call = tl.load(status_ptr + STATUS + source * LOST_WORDS + LOST_CALL, volatile=True)
            _tell_host(status_ptr, LOST, source, call, 0, 0)


@triton.jit
def deadline(status_ptr, timeout_ns):
    """When waits of this kernel give up: at once if the call has failed already."""
    return nanoseconds() + tl.where(tl.load(status_ptr) == 0, timeout_ns, 0)


@triton.jit
def every_rank(NUM_RANKS: tl.constexpr):
    """Ranks 0 .. NUM_RANKS - 1 over and over, WIDE of them."""
    return tl.arange(0, WIDE) % NUM_RANKS


@triton.jit
def _lateness(seen, needed, deadline_ns):
    """0: every flag has reached `needed`; 1: some have not; 2: nor is there time left.  The same in all threads."""
    return tl.max(tl.where(seen - needed < 0, tl.where(nanoseconds() > deadline_ns, 2, 1), 0))


@triton.jit
def wait_for(flag_ptrs, peers, needed, deadline_ns, status_ptr, STAGE: tl.constexpr, gone_ptrs=None):
    """Spin until every flag has reached `needed`; after `deadline_ns` record the late peer and give up.  Give up, too, as
    soon as this call has failed, here or by what a peer has told: what is awaited may then never come.

    flag_ptrs: WIDE or more.  gone_ptrs: a word of each peer's that is not zero once it has gone, and will set no flag.
    """
    seen = load_acquire(flag_ptrs)
    late = _lateness(seen, needed, deadline_ns)
    while late == 1:
        is_lost = tl.load(status_ptr, volatile=True) != 0
        if gone_ptrs is not None:
            is_lost = is_lost | (load_acquire(gone_ptrs) != 0)  # before the flags: it may enter, and go
        until_ns = tl.where(is_lost, 0, deadline_ns)
        seen = load_acquire(flag_ptrs)
        late = _lateness(seen, needed, until_ns)
    if late == 2:
        if gone_ptrs is not None:
            gone = tl.max(tl.where((seen - needed < 0) & (load_acquire(gone_ptrs) != 0), peers, -1))
            if gone >= 0:
                record(status_ptr, LOST, gone, needed, 0, 0)
        behind = needed - seen
        # One reduction, so that this path takes few registers from the loop around it: a peer, then its latest flag.
        worst = tl.max(tl.where(behind > 0, peers.to(tl.int64) << 32 | behind, -1))
        record(status_ptr, TIMEOUT, STAGE, (worst >> 32).to(tl.int32), needed, needed - worst.to(tl.int32))


@triton.jit
def failed(status_ptr):
    """Whether this call has failed on this rank; the same in all threads."""
    return tl.atomic_add(status_ptr, 0, sem="relaxed") != 0


@triton.jit
def set_flags(flag_table, offset, call, NUM_RANKS: tl.constexpr):
    """Store `call` into flag `offset` of every rank: each by a lane of its own, behind one fence for all."""
    flags = tl.load(flag_table + tl.arange(0, NUM_RANKS)).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flags + offset, tl.full((NUM_RANKS,), 0, tl.int32) + call, sem="release", scope="sys")


@triton.jit
def signal_when_all(wire: Wire, offset, call, counter_ptr, number, total, NUM_RANKS: tl.constexpr):
    """Count `number` tasks of this program as done; who completes `total` signals as in `signal_all`."""
    tl.debug_barrier()
    before = tl.atomic_add(counter_ptr, number, sem="acq_rel", scope="sys")
    if (before + number == total) & (not failed(wire.status)):
        set_flags(wire.flag_table, offset, call, NUM_RANKS)


@triton.jit
def signal_all(wire: Wire, offset, call, ticket_ptr, num_programs, NUM_RANKS: tl.constexpr):
    """The last of `num_programs` programs stores `call` into flag `offset` of every rank, unless this rank has failed:
    a peer that comes late must not take what was never sent for a result.

    Each program's own stores are released at system scope by its ticket; the last ticket acquires them
    all before it signals.  The ticket counter returns to zero for the next launch.
    """
    tl.debug_barrier()
    ticket = tl.atomic_add(ticket_ptr, 1, sem="acq_rel", scope="sys")
    if ticket == num_programs - 1:
        tl.store(ticket_ptr, 0)
    if (ticket == num_programs - 1) & (not failed(wire.status)):
        set_flags(wire.flag_table, offset, call, NUM_RANKS)

"""Waiting for peers and signalling them.

Flags are int32 words in every rank's symmetric memory that hold the number of the call they belong to:
they only grow and are never reset.  Every wait is bounded.

Threads poll for themselves and may see a flag at different times, so what a program does next must never hang on
what one thread saw: threads that part ways at a barrier wait for each other for ever.  Decisions are reductions
over WIDE elements or more, which end in shared memory, or results of scalar atomics, which one thread hands out.

The status record (int32, device memory) is zero while all is well: [0] code, [1] stage, [2] peer,
[3] call expected, [4] least seen, [5] and [6] rows needed and available.  Words 8 and 9 hold the address of the
host's pinned copy, which the host reads without synchronising.
"""

import triton
import triton.language as tl

from uniep.kernels.ptx import load_acquire, nanoseconds

TIMEOUT = tl.constexpr(1)
BAD_ID = tl.constexpr(2)
TOO_MANY_ROWS = tl.constexpr(3)
REFUSED = tl.constexpr(4)
OTHER_CALL = tl.constexpr(5)

STAGE_ENTRY = tl.constexpr(1)
STAGE_DISPATCH = tl.constexpr(2)
STAGE_COMBINE = tl.constexpr(3)
STAGE_ROWS = tl.constexpr(4)
STAGE_SUM = tl.constexpr(5)
STAGE_RAW = tl.constexpr(6)
STAGE_ACTIVATED = tl.constexpr(7)

# What a rank enters.
IS_FORWARD = tl.constexpr(0)
IS_REFUSED = tl.constexpr(1)
IS_BACKWARD = tl.constexpr(2)

WIDE = tl.constexpr(64)  # more elements than a warp has lanes


@triton.jit
def record(status_ptr, code, a, b, c, d):
    """Write a status record here and to the host, the code last.  The first failure stays."""
    if tl.atomic_cas(status_ptr, 0, code) == 0:
        host_ptr = tl.load((status_ptr + 8).to(tl.pointer_type(tl.int64))).to(tl.pointer_type(tl.int32))
        tl.store(host_ptr + 1, a)
        tl.store(host_ptr + 2, b)
        tl.store(host_ptr + 3, c)
        tl.store(host_ptr + 4, d)
        tl.debug_barrier()
        tl.atomic_xchg(host_ptr, code, sem="release", scope="sys")


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
def wait_for(
    flag_ptrs, peers, needed, deadline_ns, status_ptr, STAGE: tl.constexpr, UNTIL_FAILURE: tl.constexpr = False
):
    """Spin until every flag has reached `needed`; after `deadline_ns` record the late peer and give up.

    flag_ptrs: WIDE or more.  UNTIL_FAILURE: give up, too, as soon as this call has failed: what is awaited may then
    never come.
    """
    seen = load_acquire(flag_ptrs)
    late = _lateness(seen, needed, deadline_ns)
    while late == 1:
        until_ns = deadline_ns
        if UNTIL_FAILURE:
            is_lost = load_acquire(status_ptr + tl.zeros_like(peers)) != 0
            until_ns = tl.where(is_lost, 0, deadline_ns)
        seen = load_acquire(flag_ptrs)
        late = _lateness(seen, needed, until_ns)
    if late == 2:
        peer = tl.max(tl.where(seen - needed < 0, peers, -1))
        record(status_ptr, TIMEOUT, STAGE, peer, needed, tl.min(seen))


@triton.jit
def failed(status_ptr):
    """Whether this call has failed on this rank; the same in all threads."""
    return tl.atomic_add(status_ptr, 0, sem="relaxed") != 0


@triton.jit
def signal_when_all(flag_table_ptr, offset, call, counter_ptr, number, total, status_ptr, NUM_RANKS: tl.constexpr):
    """Count `number` tasks of this program as done; who completes `total` signals as in `signal_all`."""
    tl.debug_barrier()
    before = tl.atomic_add(counter_ptr, number, sem="acq_rel", scope="sys")
    if (before + number == total) & (not failed(status_ptr)):
        for rank in range(NUM_RANKS):
            flags = tl.load(flag_table_ptr + rank).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(flags + offset, call, sem="release", scope="sys")


@triton.jit
def signal_all(flag_table_ptr, offset, call, ticket_ptr, num_programs, status_ptr, NUM_RANKS: tl.constexpr):
    """The last of `num_programs` programs stores `call` into flag `offset` of every rank, unless this rank has failed:
    a peer that comes late must not take what was never sent for a result.

    Each program's own stores are released at system scope by its ticket; the last ticket acquires them
    all before it signals.  The ticket counter returns to zero for the next launch.
    """
    tl.debug_barrier()
    ticket = tl.atomic_add(ticket_ptr, 1, sem="acq_rel", scope="sys")
    if ticket == num_programs - 1:
        tl.store(ticket_ptr, 0)
    if (ticket == num_programs - 1) & (not failed(status_ptr)):
        for rank in range(NUM_RANKS):
            flags = tl.load(flag_table_ptr + rank).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(flags + offset, call, sem="release", scope="sys")

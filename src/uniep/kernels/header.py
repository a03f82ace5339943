"""What a rank says of itself when it enters a call, what it leaves at its peers when it cannot go on, and what the host
is told.  Words of int32.

An exchange slot begins with the header.  A status array (symmetric memory) is this rank's record, then a slot of
LOST_WORDS for each rank: why that rank is gone.  The host's record is pinned memory: `HostRecord` says what lies where.
"""

import triton
import triton.language as tl

from uniep.layout import EXCHANGE_HEADER, LOST_SLOT, STATUS_RECORD

HEADER = tl.constexpr(EXCHANGE_HEADER)
# Words of the header.
TOKENS = tl.constexpr(0)
CAPACITY = tl.constexpr(1)  # rows allocated
OPERATION = tl.constexpr(2)  # index into protocol.OPERATIONS
LAYER = tl.constexpr(3)  # its number; 0: not known, and equal to any other
FORWARD = tl.constexpr(4)  # of a backward: the call that its forward was
FORWARDS = tl.constexpr(5)  # forwards and routes entered
DRAW = tl.constexpr(6)  # of the layer's experts, two words: low, high; 0: not known
ERROR = tl.constexpr(8)  # of a refusal: protocol.error_index
HAS_DIGESTS = tl.constexpr(9)
DIGESTS = tl.constexpr(10)  # three int64
DIGEST_WORDS = tl.constexpr(6)
TEXT = tl.constexpr(16)  # of a refusal, to the end

IS_REFUSED = tl.constexpr(5)  # the operation "refuse"

# Words of the status record, whose first is the code.
STATUS = tl.constexpr(STATUS_RECORD)
STATUS_TOLD = tl.constexpr(1)  # 1: the peers know that this rank has failed
STATUS_HOST = tl.constexpr(8)  # two words: address of the host's record

# Words of a lost slot.
LOST_WORDS = tl.constexpr(LOST_SLOT)
LOST_REASON = tl.constexpr(0)  # 0: nothing is lost
LOST_CALL = tl.constexpr(1)  # that the rank was in
LOST_TEXT_BYTES = tl.constexpr(2)
LOST_TEXT = tl.constexpr(4)
# Reasons.
GAVE_UP = tl.constexpr(1)  # waited in vain
FAILED = tl.constexpr(2)  # an exception
LEFT = tl.constexpr(3)  # closed between two calls

# The host's record: code and details, six words of every rank's header, one refusal's header, every rank's digests.
HOST_AGREED = tl.constexpr(8)
HOST_AGREED_WORDS = tl.constexpr(6)  # OPERATION to DRAW
HOST_DIGEST_WORDS = tl.constexpr(8)  # HAS_DIGESTS and what follows


@triton.jit
def header_of(exchange_ptr, call, source, SLOTS: tl.constexpr, NUM_RANKS: tl.constexpr):
    """The exchange slot of `source` in this call."""
    slot = (call & 1) * NUM_RANKS + source  # not %: the call's number turns negative
    return exchange_ptr + slot.to(tl.int64) * (HEADER + 2 * SLOTS)


class HostRecord:
    """First words of the parts of the host's record of a group of `num_ranks`, and its length."""

    def __init__(self, num_ranks: int) -> None:
        self.agreed = HOST_AGREED.value
        self.refusal = self.agreed + HOST_AGREED_WORDS.value * num_ranks
        self.digests_here = self.refusal + EXCHANGE_HEADER  # 1 once the digests are complete
        self.digests = self.digests_here + 1
        self.words = self.digests + HOST_DIGEST_WORDS.value * num_ranks


@triton.jit
def host_record(status_ptr):
    """Where kernels write what the host reads without synchronising."""
    return tl.load((status_ptr + STATUS_HOST).to(tl.pointer_type(tl.int64))).to(tl.pointer_type(tl.int32))


@triton.jit
def host_refusal(host_ptr, NUM_RANKS: tl.constexpr):
    """`HostRecord.refusal`."""
    return host_ptr + HOST_AGREED + HOST_AGREED_WORDS * NUM_RANKS

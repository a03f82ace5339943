"""What kernels are given, in bundles: memory that belongs together, and constants that do.

A bundle is one argument.  In a kernel the fields of the first kind are pointers, on the host the memory that they point
to.  A field that a kernel does not use, as its other arguments say, is None: there is no parameter for it then.  Two
kinds of arguments stay by themselves: integers, for whose values Triton would compile, do_not_specialize or not, and
descriptors, which its launcher finds in no bundle.

Suffixes: N padded rows, M row tiles, e local experts, D hidden, F ffn, T tokens, K slots, L lines, R ranks, S slots of all
tokens, G column groups.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Pointer = Any  # on the host: `uniep.launch.driver.Memory`, or None


class Tokens(NamedTuple):
    """Matrices of tokens: this rank's own (T, D), and received ones, one slot each, behind the last a row of zeros."""

    local: Pointer
    received: Pointer


class Rows(NamedTuple):
    """Tables of one rank's routed rows; all int32 but weight_N (fp32).

    source_N: a local token, or -1 - receive slot.  return_N: return slot over all ranks, -1 of pad rows.
    start_e1, rows_e: first row and number of rows of each expert.  expert_M: expert of each row tile.
    order_M, backward_order_M: the row tiles as kernels that wait for rows walk them.
    group_M, order_group_M, backward_group_M: a word for each row tile as they lie, and for each place of the two orders:
    expert, place in its group, height of the group (`kernels.rows.group_of`).  A group is consecutive row tiles of one
    expert, which share a column of weights before the next column starts.
    progress_M, cursor: zero; counted up by kernels that run beside each other.
    send_token_RT, send_count_R: what this rank sends to each.  totals: (2 or more,), padded rows and row tiles.
    recv_count_R: how many tokens come from each.  recv_token_N: which, one source's behind the other's, or None: they
    are pushed.
    """

    source_N: Pointer
    return_N: Pointer
    weight_N: Pointer
    start_e1: Pointer
    rows_e: Pointer
    expert_M: Pointer
    order_M: Pointer
    backward_order_M: Pointer
    progress_M: Pointer
    cursor: Pointer
    send_token_RT: Pointer
    send_count_R: Pointer
    totals: Pointer
    recv_count_R: Pointer = None
    recv_token_N: Pointer = None
    group_M: Pointer = None
    order_group_M: Pointer = None
    backward_group_M: Pointer = None


class Wire(NamedTuple):
    """This rank's status, call and flags, and addresses (int64) of arrays at every rank; see kernels/sync.py.

    push_ticket, return_ticket: programs of a kernel that are done with pushing, and with returning.  tokens_table: of what
    peers fetch, or None.
    """

    status: Pointer
    call: Pointer
    arrived: Pointer
    finished: Pointer
    returned: Pointer
    receive_table: Pointer
    returns_table: Pointer
    dweights_table: Pointer
    flag_table: Pointer
    push_ticket: Pointer
    return_ticket: Pointer
    tokens_table: Pointer = None


class Offsets(NamedTuple):
    """Words before this rank's flags at its peers; made inside kernels, of integers."""

    arrived: Any
    finished: Any
    returned: Any


class Counted(NamedTuple):
    """A tile that a program has stored before, and counts at its row tile in `progress` a turn late, if there was one;
    made inside kernels."""

    progress: Pointer
    turns: Any
    row_tile: Any


class LowRank(NamedTuple):
    """What a product adds to its own: rows (N, R) times a factor of LoRA.  On the host tensors; descriptors inside
    kernels, made there."""

    rows: Any
    factor: Any


class GateUpBlocks(NamedTuple):
    """Descriptors of `gate_up_kernel`, b13 (e, 2F or F) or None, and `LowRank` or None; made inside kernels.  gate, up,
    act: None where they are not stored."""

    rows: Any
    w13: Any
    gate: Any
    up: Any
    act: Any
    b13: Any
    low: Any = None


class Biases(NamedTuple):
    """b13 (e, 2F or F) and b2 (e, D), or None."""

    b13: Pointer
    b2: Pointer


class Lists(NamedTuple):
    """The tasks of one direction (int64) and its counters (int32); see kernels/lists.py.

    *_records: int64 rows of 5 that tasks leave, or None.  order: int32 (4 operators, 2, e), the place of each stretch, own
    rows first; None: closed forms.
    """

    matrix: Pointer
    vector: Pointer
    counters: Pointer
    matrix_records: Pointer = None
    vector_records: Pointer = None
    order: Pointer = None


class Kept(NamedTuple):
    """Room for received tokens, or None, and how many each source has sent (int32)."""

    tokens: Pointer
    count: Pointer


class Sums(NamedTuple):
    """What a direction adds at its end.  returns_SD: what has returned.  out_TD: sums of ids_TK's slots, by weights_TK or
    None.  dweights_S, dweights_TK: d(weight) as it has returned, and of this rank's tokens, or None."""

    returns_SD: Pointer
    ids_TK: Pointer
    weights_TK: Pointer
    out_TD: Pointer
    dweights_S: Pointer = None
    dweights_TK: Pointer = None


class Activation(NamedTuple):
    """The activation's gradient: from raw_NF = dO @ W2 (fp32) and gate and up (N, F), dh_N2F, the activation act_NF that
    dW2 contracts, and groups_NG (fp32), sums for d(weight).  Without a gate up_NF is None and dh (N, F).  b2 (e, D), or
    None: d(weight) has dO . b2."""

    raw_NF: Pointer
    gate_NF: Pointer
    up_NF: Pointer
    dh_N2F: Pointer
    act_NF: Pointer
    groups_NG: Pointer
    b2: Pointer = None


class Segments(NamedTuple):
    """Rows of blocks of source ranks, see `RowBlocks`.  start (S + 2,): first place of each segment.  row (P,): the row
    at each place, -1: none.  address (P,) int64: where it is in the first operand of a product."""

    start_S: Pointer
    row_P: Pointer
    address_P: Pointer


class Addresses(NamedTuple):
    """Of the rows of x and dO, where they lie: int64."""

    x_N: Pointer
    dy_N: Pointer


class GroupRows(NamedTuple):
    """What is added by groups: rows_ND, by weight_N or None; tables of lines, see kernels/groups.py."""

    rows_ND: Pointer
    weight_N: Pointer
    row_LK: Pointer
    slot_LK: Pointer


# Constants.


class Layer(NamedTuple):
    """What a layer computes.  KP: K or the next power of two.  SLOTS: return slots of a rank.  GATED: h is gate and up.
    LIMIT: None, or what they are clamped to."""

    D: int
    F: int
    K: int
    KP: int
    SLOTS: int
    ACTIVATION: str
    WEIGHTED: bool  # the activation by the routing weight
    GATED: bool
    LIMIT: float | None


class TileShape(NamedTuple):
    """A tile of a product, (M, N), and its steps of depth K.  GROUP_M: of weight gradients, tiles of a column that come
    before the next column."""

    M: int
    N: int
    K: int
    GROUP_M: int


class RowPart(NamedTuple):
    """Of the row tiles of a product in several launches: one of COUNT parts, which follow each other in an order, and
    are equal but for whole groups of row tiles."""

    NUMBER: int
    COUNT: int


class Product(NamedTuple):
    """A @ B of rows, A (N, HALVES * DEPTH).

    B: (e, WIDTH, DEPTH) if TRANSPOSED, else (e, HALVES, DEPTH, WIDTH), of which UP_FIRST turns the halves.
    SCATTER: each row goes to its return slot, one of SLOTS of a rank.  WEIGHTED: a bias is multiplied by the routing
    weight.  CHECKED (and SCATTER): nothing is stored once this call has failed.
    """

    DEPTH: int
    WIDTH: int
    HALVES: int
    TRANSPOSED: bool
    UP_FIRST: bool
    SLOTS: int
    SCATTER: bool
    WEIGHTED: bool = False
    CHECKED: bool = False


class Sending(NamedTuple):
    """How rows travel.  CHUNK: tokens under one `arrived` flag; 0: copy engines send, under `finished` alone.
    RECEIVE_BLOCK: receive slots of a source.  PUSH_ROWS, PUSH_D: what a program moves at once, of rows of WIDTH values.
    PULL: programs fetch the tokens that this rank wants, instead of sending those that peers want."""

    NUM_RANKS: int
    CHUNK: int
    RECEIVE_BLOCK: int
    WIDTH: int
    PUSH_D: int
    PUSH_ROWS: int
    PULL: bool = False


class Direction(NamedTuple):
    """How one kernel runs a direction.  FUSED: peers send tokens meanwhile.  THREADS: of a program.  BLOCK_D: columns that
    are added at once.  Of a forward: UP_FIRST, w13's first half is the up projection; KEPT, received tokens of a task.  Of a
    backward: MIXED, tiles of later products lie before some of the first; ITEM_ROWS, rows of the activation's gradient at
    once; ACCUMULATE, dW is added to what is there."""

    FUSED: bool
    THREADS: int
    BLOCK_D: int
    UP_FIRST: bool = False
    KEPT: int = 0
    MIXED: bool = False
    ITEM_ROWS: int = 0
    ACCUMULATE: bool = False


class Order(NamedTuple):
    """Closed forms of the order of a list, of LOCAL experts.  CHUNK_EXPERTS: of chunk-major, else 0.  INTERLEAVED: weight
    gradients behind their expert's rows.  LOCAL_FIRST: tiles of own rows apart, and first.  ROTATED: in the order of
    peers."""

    LOCAL: int
    CHUNK_EXPERTS: int
    INTERLEAVED: bool
    LOCAL_FIRST: bool
    ROTATED: bool


class Lines(NamedTuple):
    """How lines are added: K rows at most, of D values, BLOCK_L lines and BLOCK_D columns at once, into SLOTS return slots
    of a rank.  ONE_GROUP: no line has rows of two groups."""

    D: int
    K: int
    SLOTS: int
    BLOCK_L: int
    BLOCK_D: int
    ONE_GROUP: bool


class PlanShape(NamedTuple):
    """A plan: E experts, LOCAL of a rank, and as many or more, powers of two, EP and BINS; K slots of a token, or KP with
    those that make a power of two; CHUNKS of each rank's tokens, in blocks of BLOCK_T."""

    E: int
    EP: int
    LOCAL: int
    BINS: int
    K: int
    KP: int
    SLOTS: int
    NUM_RANKS: int
    CHUNKS: int
    BLOCK_T: int


# Of launches, on the host.


class Dispatch(NamedTuple):
    """Whether a kernel that gathers rows waits for them, how many of its programs push this rank's tokens meanwhile, for
    how many turns of the others, and whether it counts finished tiles of each row tile.  part: of the row tiles; None:
    all."""

    fused: bool = False
    push_programs: int = 0
    push_rounds: int = 0
    count_tiles: bool = False
    part: RowPart | None = None


ALL_HERE = Dispatch()

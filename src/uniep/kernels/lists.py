"""The lists of tasks that the programs of kernels/mega.py claim, made on the device from a plan.

A list holds the tasks of one class in the order of the Schedule, equal to what `taskflow` compiles for the same
routing (docs/taskflow.md).  A task is one int64: n (16 bits), m (24), expert (16), operator.  m, n: row tile of the rank
and column block; of a weight gradient both together count the tiles of its expert.

Counters (int32, zeroed here): COUNTERS words, then finished tiles of the first product of each row tile (M), items of the
activation gradient of each row tile (M), and, per local expert, two numbers: the vector tasks that tiles of its first
product, and its later matrix tasks, need before them.

Suffixes: R ranks, M row tiles, e local experts.
"""

import triton
import triton.language as tl

from uniep.kernels.arguments import Lists, Rows
from uniep.kernels.ptx import after_previous, next_may_come
from uniep.kernels.rows import num_row_tiles

# Operators of the matrix list: the first product, the one that returns rows, the weight gradients.
FIRST = tl.constexpr(0)
RETURN = tl.constexpr(1)
DOWN_WEIGHTS = tl.constexpr(2)
GATE_UP_WEIGHTS = tl.constexpr(3)
# Of the vector list of a backward: activation gradient, d(weight).
ACTIVATION_GRADIENT = tl.constexpr(0)
DWEIGHTS = tl.constexpr(1)

# Words of the counters.
ARRIVED = tl.constexpr(0)  # programs
MATRIX = tl.constexpr(1)  # claimed places
VECTOR = tl.constexpr(2)
PUSH = tl.constexpr(3)
PUSHED = tl.constexpr(4)  # chunks, plus one
RETURNED = tl.constexpr(5)  # tasks that return something, plus one
MADE = tl.constexpr(6)  # tiles of the first product
ACTIVATED = tl.constexpr(7)  # items of the activation gradient
TASKS = tl.constexpr(8)  # of the matrix list, whose number does not change
COUNTERS = tl.constexpr(16)

STEP = tl.constexpr(1 << 27)  # of a key, above all row tiles


@triton.jit
def _packed(op, expert, m, n):
    return (((expert + op * 65536).to(tl.int64) << 24) + m << 16) + n


@triton.jit
def task_op(word):
    return word >> 56


@triton.jit
def task_expert(word):
    return ((word >> 40) & 0xFFFF).to(tl.int32)


@triton.jit
def task_m(word):
    return ((word >> 16) & 0xFFFFFF).to(tl.int32)


@triton.jit
def task_n(word):
    return (word & 0xFFFF).to(tl.int32)


@triton.jit
def task_tile(word):
    """Of a weight gradient: m and n together."""
    return (word & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def _stretch(op, late, expert, order_ptr, VECTOR: tl.constexpr, HOW: tl.constexpr):
    """Stretches of a list in ascending order: the tiles of one operator and one expert, and if they are late.

    VECTOR: of the vector list.  In the order of a table (docs/taskflow.md) a stretch of the matrix list has its place there;
    activation gradients come in the order of the first product, and d(weight) where their rows return.
    """
    if order_ptr is not None:
        key = tl.load(order_ptr + (op * 2 + late) * HOW.LOCAL + expert, mask=expert < HOW.LOCAL, other=0)
        if VECTOR:
            key = key * 2 + op
    elif HOW.CHUNK_EXPERTS > 0:
        wave = expert // HOW.CHUNK_EXPERTS + (op > 0)
        if VECTOR or not HOW.INTERLEAVED:
            wave = tl.where(op >= DOWN_WEIGHTS, HOW.LOCAL + 1, wave)
        key = (wave * 4 + op) * HOW.LOCAL + expert
    else:
        key = tl.where(op > 0, op * 2, late) * HOW.LOCAL + expert
        if HOW.INTERLEAVED and not VECTOR:
            key = tl.where(op > 0, 2 * HOW.LOCAL + expert * 3 + op - 1, key)
    return key


@triton.jit
def _before(
    key,
    early,
    num_tiles,
    expert,
    order_ptr,
    TILES0: tl.constexpr,
    TILES1: tl.constexpr,
    TILES2: tl.constexpr,
    TILES3: tl.constexpr,
    VECTOR: tl.constexpr,
    HOW: tl.constexpr,
):
    """Tasks of all stretches before `key`.  expert: all of this rank (and more), with their row tiles."""
    zero = tl.zeros_like(expert)
    one = zero + 1
    late = num_tiles - early
    count = tl.where(_stretch(zero, zero, expert, order_ptr, VECTOR, HOW) < key, early * TILES0, 0)
    count += tl.where(_stretch(zero, one, expert, order_ptr, VECTOR, HOW) < key, late * TILES0, 0)
    count += tl.where(_stretch(one, zero, expert, order_ptr, VECTOR, HOW) < key, early * TILES1, 0)
    count += tl.where(_stretch(one, one, expert, order_ptr, VECTOR, HOW) < key, late * TILES1, 0)
    if TILES2 > 0:
        count += tl.where(_stretch(zero + 2, zero, expert, order_ptr, VECTOR, HOW) < key, TILES2, 0)
    if TILES3 > 0:
        count += tl.where(_stretch(zero + 3, zero, expert, order_ptr, VECTOR, HOW) < key, TILES3, 0)
    return tl.sum(tl.where(expert < HOW.LOCAL, count, 0))


@triton.jit
def _first_places(expert, order_ptr, HOW: tl.constexpr):
    """In a table: places of an expert's two stretches of the first product, the earlier one and the later one."""
    zero = tl.zeros_like(expert)
    own = _stretch(zero, zero, expert, order_ptr, False, HOW)
    late = _stretch(zero, zero + 1, expert, order_ptr, False, HOW)
    return tl.minimum(own, late), tl.maximum(own, late)


@triton.jit
def _tile_key(tile, end_R, source, rows, rank, NUM_RANKS: tl.constexpr, ROTATED: tl.constexpr, BLOCK_M: tl.constexpr):
    """(late, step of an arriving tile, step of a returning one) of row tiles of one expert; see docs/taskflow.md.

    end_R: of source `source`, its last row and one.
    """
    begin = tile * BLOCK_M
    used = begin < rows
    last = tl.minimum(begin + BLOCK_M, rows) - 1
    # Rows are sorted by source: as many sources end before a row as are smaller than its own.
    of_first = tl.sum((end_R[None, :] <= begin[:, None]).to(tl.int32), 1)
    of_last = tl.sum((end_R[None, :] <= last[:, None]).to(tl.int32), 1)
    late = (used & ((of_first != rank) | (of_last != rank))).to(tl.int32)
    if ROTATED:
        waits_for_all = (of_first <= rank) & (rank < of_last)
        arrives = tl.where(waits_for_all, NUM_RANKS - 1, (rank - of_first + NUM_RANKS) % NUM_RANKS)
        arrives = tl.where(used, arrives, 0)
        returns = tl.where(used, (of_first - rank - 1 + NUM_RANKS) % NUM_RANKS, NUM_RANKS)
    else:
        arrives = tl.zeros_like(late)
        returns = tl.zeros_like(late)
    return late, arrives, returns


@triton.jit
def _count_if(mask):
    return tl.sum(mask.to(tl.int32))


@triton.jit
def _store_tiles(list_ptr, offset, op, expert, m, before, same, own, TILES: tl.constexpr, TILES_P: tl.constexpr):
    """The TILES tasks of a row tile: `before` row tiles lie before those that share its columns (`same`, its place among
    them `own`)."""
    n = tl.arange(0, TILES_P)
    place = offset + before * TILES + n * same + own
    tl.store(list_ptr + place, _packed(op, expert, m, n), mask=n < TILES)


@triton.jit
def _store_weights(list_ptr, offset, op, expert, TILES: tl.constexpr, TILES_P: tl.constexpr):
    """The TILES tasks of an expert's weight gradient: their number stands for m and n."""
    for first in range(0, TILES, TILES_P):
        tile = first + tl.arange(0, TILES_P)
        tl.store(list_ptr + offset + tile, _packed(op, expert, 0, 0) + tile, mask=tile < TILES)


@triton.jit(do_not_specialize=["rank"])
def list_kernel(
    counts_ptr,
    table: Rows,
    lists: Lists,
    rank,
    E: tl.constexpr,
    LOCAL_P: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP0: tl.constexpr,
    GROUP1: tl.constexpr,
    TILES0: tl.constexpr,
    TILES1: tl.constexpr,
    TILES2: tl.constexpr,
    TILES3: tl.constexpr,
    TILES_P: tl.constexpr,
    HOW: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """The lists of one direction, and its counters.

    TILES0, TILES1: columns of tiles of the first and the returning product; TILES2, TILES3: tiles of an expert's weight
    gradients (0: not needed); GROUP0, GROUP1: row tiles that share a column of weights.
    Programs walk row tiles, each of which finds its places by counting the tiles before it.
    """
    LOCAL: tl.constexpr = HOW.LOCAL
    LOCAL_FIRST: tl.constexpr = HOW.LOCAL_FIRST
    ROTATED: tl.constexpr = HOW.ROTATED
    order_ptr = lists.order
    after_previous()
    next_may_come()
    expert = tl.arange(0, LOCAL_P)
    source = tl.arange(0, NUM_RANKS)
    inside = expert < LOCAL
    start = tl.load(table.start_e1 + expert, mask=inside, other=0)
    num_tiles = (tl.load(table.start_e1 + expert + 1, mask=inside, other=0) - start) // BLOCK_M
    rows = tl.load(table.rows_e + expert, mask=inside, other=0)
    early = num_tiles
    if LOCAL_FIRST:
        at = counts_ptr + source[:, None] * E + rank * LOCAL + expert[None, :]
        counts = tl.load(at, mask=inside[None, :] & (rows > 0)[None, :], other=0)
        ahead = tl.sum(tl.where((source < rank)[:, None], counts, 0), 0)
        own = tl.sum(tl.where((source == rank)[:, None], counts, 0), 0)
        used = (rows + BLOCK_M - 1) // BLOCK_M
        first = (ahead + BLOCK_M - 1) // BLOCK_M
        last = tl.where(ahead + own == rows, used, (ahead + own) // BLOCK_M)
        early = tl.maximum(last - first, 0) + num_tiles - used  # tiles of own rows only, and of pad rows only
    num_m = num_row_tiles(table)
    progress_ptr = lists.counters + COUNTERS
    program = tl.program_id(0)
    if program == 0:
        word = tl.arange(0, COUNTERS)
        num_tasks = num_m * (TILES0 + TILES1) + LOCAL * (TILES2 + TILES3)
        tl.store(lists.counters + word, tl.where(word == TASKS, num_tasks, 0))
    for item in range(program, num_m + LOCAL, tl.num_programs(0)):
        if item < num_m:
            m = item
            e = tl.load(table.expert_M + m)
            zero = tl.zeros_like(e)
            tl.store(progress_ptr + m, 0)
            tl.store(progress_ptr + num_m + m, 0)
            first_m = tl.load(table.start_e1 + e) // BLOCK_M
            tiles = tl.load(table.start_e1 + e + 1) // BLOCK_M - first_m
            num_rows = tl.load(table.rows_e + e)
            end_R = tl.cumsum(tl.load(counts_ptr + source * E + rank * LOCAL + e), 0)
            i = m - first_m
            one = tl.full((1,), 0, tl.int32) + i
            own_late, own_arrives, own_returns = _tile_key(
                one, end_R, source, num_rows, rank, NUM_RANKS, ROTATED, BLOCK_M
            )
            late = tl.max(own_late) if LOCAL_FIRST else 0
            key0 = tl.max(own_arrives) * STEP + i // GROUP0
            key1 = tl.max(own_returns) * STEP + i // GROUP1
            before0 = tl.zeros_like(i)
            same0 = tl.zeros_like(i)
            own0 = tl.zeros_like(i)
            before1 = tl.zeros_like(i)
            same1 = tl.zeros_like(i)
            own1 = tl.zeros_like(i)
            for j in range(0, tiles, 64):
                tile = j + tl.arange(0, 64)
                is_late, arrives, returns = _tile_key(tile, end_R, source, num_rows, rank, NUM_RANKS, ROTATED, BLOCK_M)
                exists = tile < tiles
                alike = exists
                if LOCAL_FIRST:
                    alike = exists & (is_late == late)
                key = arrives * STEP + tile // GROUP0
                before0 += _count_if(alike & (key < key0))
                same0 += _count_if(alike & (key == key0))
                own0 += _count_if(alike & (key == key0) & (tile < i))
                if order_ptr is not None:
                    exists = alike
                key = returns * STEP + tile // GROUP1
                before1 += _count_if(exists & (key < key1))
                same1 += _count_if(exists & (key == key1))
                own1 += _count_if(exists & (key == key1) & (tile < i))
            half = late + zero
            key = _stretch(zero, half, e, order_ptr, False, HOW)
            offset = _before(key, early, num_tiles, expert, order_ptr, TILES0, TILES1, TILES2, TILES3, False, HOW)
            _store_tiles(lists.matrix, offset, FIRST, e, m, before0, same0, own0, TILES0, TILES_P)
            key = _stretch(zero + 1, half, e, order_ptr, False, HOW)
            offset = _before(key, early, num_tiles, expert, order_ptr, TILES0, TILES1, TILES2, TILES3, False, HOW)
            _store_tiles(lists.matrix, offset, RETURN, e, m, before1, same1, own1, TILES1, TILES_P)
            if BACKWARD:
                key = _stretch(zero, half, e, order_ptr, True, HOW)
                offset = _before(key, early, num_tiles, expert, order_ptr, TILES0, 1, 0, 0, True, HOW)
                _store_tiles(lists.vector, offset, ACTIVATION_GRADIENT, e, m, before0, same0, own0, TILES0, TILES_P)
                key = _stretch(zero + 1, half, e, order_ptr, True, HOW)
                offset = _before(key, early, num_tiles, expert, order_ptr, TILES0, 1, 0, 0, True, HOW)
                _store_tiles(lists.vector, offset, DWEIGHTS, e, m, before1, same1, own1, 1, TILES_P)
        elif BACKWARD:
            e = item - num_m
            zero = tl.zeros_like(e)
            if TILES2 > 0:
                key = _stretch(zero + DOWN_WEIGHTS, zero, e, order_ptr, False, HOW)
                offset = _before(key, early, num_tiles, expert, order_ptr, TILES0, TILES1, TILES2, TILES3, False, HOW)
                _store_weights(lists.matrix, offset, DOWN_WEIGHTS, e, TILES2, TILES_P)
            if TILES3 > 0:
                key = _stretch(zero + GATE_UP_WEIGHTS, zero, e, order_ptr, False, HOW)
                offset = _before(key, early, num_tiles, expert, order_ptr, TILES0, TILES1, TILES2, TILES3, False, HOW)
                _store_weights(lists.matrix, offset, GATE_UP_WEIGHTS, e, TILES3, TILES_P)
            # Before its first product: what those that come before it and need vector tasks needed; of closed forms, all
            # but chunk-major need none there.  Behind it: the activation gradients of its chunk, or of the first products
            # up to its own, and what is ahead of those; before those of the last chunk, and without chunks: all.
            need0 = tl.zeros_like(e)
            need1 = num_m * (TILES0 + 1)
            if order_ptr is not None:
                vectors = tl.zeros_like(expert)
                begin_e, made_e = _first_places(expert, order_ptr, HOW)
                later_e = _stretch(vectors + 1, vectors, expert, order_ptr, False, HOW)
                later_e = tl.minimum(later_e, _stretch(vectors + 1, vectors + 1, expert, order_ptr, False, HOW))
                if TILES2 > 0:
                    later_e = tl.minimum(later_e, _stretch(vectors + 2, vectors, expert, order_ptr, False, HOW))
                if TILES3 > 0:
                    later_e = tl.minimum(later_e, _stretch(vectors + 3, vectors, expert, order_ptr, False, HOW))
                begin, made = _first_places(e, order_ptr, HOW)
                made_before = tl.max(tl.where((expert < LOCAL) & (later_e < begin), made_e, -1))
                need0 = _before(made_before * 2 + 1, early, num_tiles, expert, order_ptr, TILES0, 1, 0, 0, True, HOW)
                need1 = _before(made * 2 + 1, early, num_tiles, expert, order_ptr, TILES0, 1, 0, 0, True, HOW)
            elif HOW.CHUNK_EXPERTS > 0:
                chunk = e // HOW.CHUNK_EXPERTS
                key = (chunk * 4 + 1) * LOCAL
                of_chunk = _before(key, early, num_tiles, expert, order_ptr, TILES0, 1, 0, 0, True, HOW)
                need1 = tl.where(chunk == (LOCAL - 1) // HOW.CHUNK_EXPERTS, need1, of_chunk)
                key = ((chunk - 2) * 4 + 1) * LOCAL
                need0 = _before(key, early, num_tiles, expert, order_ptr, TILES0, 1, 0, 0, True, HOW)
            need_ptr = progress_ptr + 2 * num_m + e * 2
            tl.store(need_ptr, need0)
            tl.store(need_ptr + 1, need1)

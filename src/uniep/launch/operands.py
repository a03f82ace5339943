"""What launchers give kernels: memory in blocks, shapes, peers.  Only `activation_memory` and `in_reach` allocate.

`Peers` is what fused kernels need of the other ranks; `alone` serves kernels whose rows are all here.

Suffixes: N padded rows, e local experts, D hidden, F ffn.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

import torch
from torch import Tensor

from uniep.config import COLUMN_GROUP, MoEConfig
from uniep.errors import UnsupportedError
from uniep.kernels.arguments import Activation, Layer, LowRank, Product, Sending, TileShape, Wire
from uniep.launch.driver import Block, Bundle, Memory, temporary, unbind
from uniep.layout import power_of_2
from uniep.schedule import Tile
from uniep.weights import ExpertWeights

log = logging.getLogger("uniep")

MAX_STRIDE_BYTES = 2**40  # of a Hopper tensor map
PUSH_ROWS = 16  # tokens that a pushing program moves at once
GEMM_PUSH_ROWS = 32  # the same in a GEMM, whose first programs push


@dataclasses.dataclass(frozen=True)
class Peers:
    """What kernels need of the other ranks: see `Wire`, kernels/sync.py and kernels/transfer.py.

    *_offset: of this rank's flags at its peers.  chunk: 0 where copy engines send; pull: see `Sending`.
    """

    rank: int
    num_ranks: int
    wire: Bundle[Wire]
    timeout_ns: int
    arrived_offset: int
    finished_offset: int
    returned_offset: int
    chunk: int
    receive_block: int
    pull: bool = False
    _sending: dict[tuple[int, int], Sending] = dataclasses.field(default_factory=dict)

    @classmethod
    def alone(cls, zero: Tensor, **tables: Tensor) -> Peers:
        """No peers.  zero: an int32 zero on the device; nothing writes it.  tables: of `Wire`."""
        nothing: dict[str, Any] = dict.fromkeys(Wire._fields)
        wire = Bundle(Wire(**(nothing | tables | {"status": zero})))
        return cls(
            rank=0, num_ranks=1, wire=wire, timeout_ns=0, arrived_offset=0, finished_offset=0, returned_offset=0,
            chunk=1, receive_block=1,
        )  # fmt: skip

    @property
    def waiting(self) -> tuple[int, int, int, int]:
        """Integers of kernels that wait for rows and, fused, push tokens first."""
        return self.timeout_ns, self.rank, self.arrived_offset, self.finished_offset

    def sending(self, width: int, rows: int) -> Sending:
        """rows: tokens that a pushing program moves at once."""
        known = self._sending.get((width, rows))
        if known is None:
            columns = min(power_of_2(width), 1024)
            known = Sending(self.num_ranks, self.chunk, self.receive_block, width, columns, rows, self.pull)
            self._sending[width, rows] = known
        return known


def activation_memory(h_2NF: Tensor, b2: Tensor | None = None) -> Activation:
    """New memory for the activation's gradient of gate and up (2, N, F), or, without a gate, of h (1, N, F); raw_NF
    briefly."""
    halves, rows, ffn = h_2NF.shape
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": h_2NF.device}
    like: dict[str, Any] = {"dtype": h_2NF.dtype, "device": h_2NF.device}
    gate_NF, *up_NF = unbind(h_2NF)
    return Activation(
        temporary(rows, ffn, **fp32, briefly=True),
        gate_NF,
        up_NF[0] if up_NF else None,
        dh_N2F=temporary(rows, halves, ffn, **like),
        act_NF=temporary(rows, ffn, **like),
        groups_NG=temporary(rows, -(-ffn // COLUMN_GROUP), **fp32),
        b2=b2,
    )


def tile_shape(tile: Tile, group_rows: int = 1) -> TileShape:
    """group_rows: of weight gradients; products of rows find groups in the plan's tables."""
    return TileShape(tile.rows, tile.columns, tile.depth, group_rows)


def layer_shape(cfg: MoEConfig) -> Layer:
    return Layer(
        cfg.hidden, cfg.ffn, cfg.top_k, power_of_2(cfg.top_k), cfg.max_tokens_per_rank * cfg.top_k, cfg.activation,
        cfg.weight_at == "activation", cfg.gated, cfg.activation_limit,
    )  # fmt: skip


def options(tile: Tile) -> dict[str, Any]:
    """Launch options of a GEMM kernel.  Fusion off: results may not depend on what a compiler contracts."""
    return {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}


def is_crowded(cfg: MoEConfig) -> bool:
    """Whether the activation's gradient takes more registers than that of swiglu."""
    return cfg.activation_limit is not None or cfg.activation.startswith(("gelu", "geglu"))


def stored_columns(tile: Tile, out: Tensor) -> int:
    """Of each block in which a kernel stores a tile into `out`: see `store_tile`."""
    return tile.columns // (4 if out.dtype == torch.float32 else 2)


def rows_block(matrix: Memory, rows: int, columns: int) -> Block:
    """Blocks of a contiguous matrix."""
    shape = matrix.shape
    return Block(matrix, (shape[0], shape[1]), (shape[1], 1), (rows, columns))


def w13_block(experts: ExpertWeights, *block: int) -> tuple[Block, bool]:
    """(blocks of (e, 2, F, D), whether its first half is the up projection); without a gate of (e, 1, F, D).

    A pair (w1, w3) is one 4-dimensional tensor whose second stride is the distance between the two.
    """
    if experts.layout == "stacked":  # (e, 2F, D) or (e, 2, F, D)
        w13, halves = experts.w13[0], 1 + experts.gated
        f, row = w13.shape[-2], w13.stride(-2)
        if w13.dim() == 3:
            f //= halves
        half = f * row if w13.dim() == 3 else w13.stride(1)
        return Block(w13, (w13.shape[0], halves, f, w13.shape[-1]), (w13.stride(0), half, row, 1), block), False
    gate, up = experts.w13
    if gate.stride() != up.stride():
        raise UnsupportedError(
            f"w1 and w3 have strides {gate.stride()} and {up.stride()}; one tensor map reads both: allocate them "
            "alike, or as one w13 (e, 2F, D)"
        )
    e, f, d = gate.shape
    distance = up.data_ptr() - gate.data_ptr()
    if distance % 16:
        raise UnsupportedError(
            f"w1 and w3 lie {abs(distance)} bytes apart; a tensor map's stride must be a multiple of 16; allocate them "
            "together, or as one w13 (e, 2F, D)"
        )
    first = gate if distance > 0 else up
    strides = (gate.stride(0), abs(distance) // gate.element_size(), gate.stride(1), 1)
    return Block(first, (e, 2, f, d), strides, block), distance < 0


def in_reach(experts: ExpertWeights) -> ExpertWeights:
    """The same; w1 and w3 in a copy of both if one tensor map does not reach from one to the other.

    An allocator may take memory from both ends of the addresses, at any step of a training.
    """
    if experts.layout != "split":
        return experts
    gate, up = experts.w13
    if abs(up.data_ptr() - gate.data_ptr()) < MAX_STRIDE_BYTES:
        return experts
    _tell_of_copies(2 * gate.nbytes)
    return dataclasses.replace(experts, w13=torch.stack((gate, up), 1).unbind(1))


@functools.cache
def _tell_of_copies(size: int) -> None:
    log.warning(
        "w1 and w3 lie 1 TiB or more apart, farther than a tensor map reaches; every call copies both, %.0f MiB; "
        "allocate them together, or as one w13 (e, 2F, D)", size / 2**20,
    )  # fmt: skip


def w2_block(experts: ExpertWeights, *block: int) -> Block:
    """Blocks of (e, D, F), or of (e, 1, D, F) for a 4-dimensional block."""
    w2 = experts.w2[0]
    e, d, f = w2.shape
    if len(block) == 4:
        return Block(w2, (e, 1, d, f), (w2.stride(0), w2.stride(0), w2.stride(1), 1), block)
    return Block(w2, (e, d, f), (w2.stride(0), w2.stride(1), 1), block)


def low_blocks(low: LowRank | None, tile: Tile, *block: int) -> tuple[Block | None, Block | None]:
    """Of rows and factor.  block: of the factor, -1 for the rank; of four dimensions: (e, 2, F, r)."""
    if low is None:
        return None, None
    width = low.rows.shape[1]
    factor = low.factor.unflatten(1, (block[1], -1)) if len(block) == 4 else low.factor
    sizes = tuple(width if size < 0 else size for size in block)
    return rows_block(low.rows, tile.rows, width), Block(factor, tuple(factor.shape), factor.stride(), sizes)


def h_blocks(h_2NF: Tensor | None, *block: int) -> tuple[Block | None, Block | None]:
    """Of the halves of h, if it is stored; without a gate of h."""
    if h_2NF is None:
        return None, None
    gate_NF, *up_NF = unbind(h_2NF)
    return rows_block(gate_NF, *block), rows_block(up_NF[0], *block) if up_NF else None


def down(cfg: MoEConfig, *, slots: int, scatter: bool, checked: bool = False) -> Product:
    """act @ W2^T."""
    weighted = cfg.bias and cfg.weight_at == "activation"
    return Product(cfg.ffn, cfg.hidden, 1, True, False, slots, scatter, weighted, checked)


def gate_up_gradient(
    cfg: MoEConfig, *, up_first: bool, slots: int, scatter: bool, checked: bool = False
) -> Product:  # fmt: skip
    """dh (N, 2F or F) @ W13."""
    return Product(cfg.ffn, cfg.hidden, 1 + cfg.gated, False, up_first, slots, scatter, CHECKED=checked)

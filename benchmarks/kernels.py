"""Triton kernels and the grouped GEMM that the peers share: sort, permute, unpermute, SwiGLU.

They are written to be strong: every pass reads and writes each byte once, and no pass waits for the host.
fp32 arithmetic inside, the tensors' own dtype outside.  They run in Triton's interpreter (fp16, fp32).

Shape suffixes: T tokens, K slots, D hidden, F ffn, E experts, N rows, B blocks of entries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _count_kernel(id_ptr, count_BE, num_entries, E, BLOCK: tl.constexpr, E_PAD: tl.constexpr):
    """How often each expert occurs in this program's block of entries."""
    block = tl.program_id(0)
    entry = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.arange(0, E_PAD)
    chosen = tl.load(id_ptr + entry, mask=entry < num_entries, other=-1).to(tl.int32)
    count = tl.sum((chosen[:, None] == expert[None, :]).to(tl.int32), axis=0)
    tl.store(count_BE + block * E + expert, count, mask=expert < E)


@triton.jit
def _scan_kernel(count_BE, total_E, num_blocks, E, B_PAD: tl.constexpr):
    """Turn one expert's block counts into the number of its entries in earlier blocks, in place."""
    expert = tl.program_id(0)
    block = tl.arange(0, B_PAD)
    count = tl.load(count_BE + block * E + expert, mask=block < num_blocks, other=0)
    tl.store(count_BE + block * E + expert, tl.cumsum(count, 0) - count, mask=block < num_blocks)
    tl.store(total_E + expert, tl.sum(count, 0))


@triton.jit
def _place_kernel(
    id_ptr, earlier_BE, total_E, row_ptr, end_E, num_entries, E, BLOCK: tl.constexpr, E_PAD: tl.constexpr
):
    """Row of each entry: its expert's segment, then entries of earlier blocks, then earlier ones of this block."""
    block = tl.program_id(0)
    expert = tl.arange(0, E_PAD)
    total = tl.load(total_E + expert, mask=expert < E, other=0)
    end = tl.cumsum(total, 0)
    if block == 0:
        tl.store(end_E + expert, end, mask=expert < E)
    first = end - total + tl.load(earlier_BE + block * E + expert, mask=expert < E, other=0)
    entry = block * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(id_ptr + entry, mask=entry < num_entries, other=-1).to(tl.int32)
    match = (chosen[:, None] == expert[None, :]).to(tl.int32)
    row = tl.sum(match * (first[None, :] + tl.cumsum(match, 0) - 1), axis=1)
    tl.store(row_ptr + entry, tl.where(chosen >= 0, row, -1), mask=entry < num_entries)


@triton.jit
def _spread_kernel(
    x_TD, row_TK, weight_TK, out_ND, weight_N,
    D: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, D_PAD: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    """Copy one token (and its weights) to the rows of its slots."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, K_PAD)
    rows = tl.load(row_TK + token * K + slot, mask=slot < K, other=-1)
    if tl.max(rows, 0) >= 0:
        if WEIGHT:
            weight = tl.load(weight_TK + token * K + slot, mask=slot < K, other=0.0)
            tl.store(weight_N + rows, weight, mask=rows >= 0)
        column = tl.arange(0, D_PAD)
        x = tl.load(x_TD + token * D + column, mask=column < D)
        for k in tl.static_range(K):
            row = tl.load(row_TK + token * K + k).to(tl.int64)
            tl.store(out_ND + row * D + column, x, mask=(column < D) & (row >= 0))


@triton.jit
def _collect_kernel(
    y_ND, row_TK, weight_N, out_TD, weight_TK,
    D: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, D_PAD: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    """Add the rows of one token's slots in fp32 (and bring back one fp32 value per slot)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, K_PAD)
    rows = tl.load(row_TK + token * K + slot, mask=slot < K, other=-1)
    if WEIGHT:
        weight = tl.load(weight_N + rows, mask=rows >= 0, other=0.0)
        tl.store(weight_TK + token * K + slot, weight, mask=slot < K)
    if tl.max(rows, 0) >= 0:
        column = tl.arange(0, D_PAD)
        total = tl.zeros((D_PAD,), tl.float32)
        for k in tl.static_range(K):
            row = tl.load(row_TK + token * K + k).to(tl.int64)
            total += tl.load(y_ND + row * D + column, mask=(column < D) & (row >= 0), other=0.0).to(tl.float32)
        tl.store(out_TD + token * D + column, total.to(out_TD.dtype.element_ty), mask=column < D)


@triton.jit
def _exchange_layout_kernel(
    count_RE, split_2R, chunk_end, chunk_shift, end_e, rank, E, e, R, R_PAD: tl.constexpr, E_PAD: tl.constexpr
):
    """What an all-to-all sends and receives, and how received chunks (source, expert) move to (expert, source) order.

    split_2R: rows sent to each rank, then rows received from each rank.
    chunk_end, chunk_shift: (R, e), end of each received chunk and how far it moves.  end_e: ends of segments.
    """
    peer = tl.arange(0, R_PAD)
    expert = tl.arange(0, E_PAD)
    valid = (peer[:, None] < R) & (expert[None, :] < e)
    mine = tl.load(count_RE + rank * E + peer[:, None] * e + expert[None, :], mask=valid, other=0)
    tl.store(split_2R + peer, tl.sum(mine, 1).to(tl.int64), mask=peer < R)

    count = tl.load(count_RE + peer[:, None] * E + rank * e + expert[None, :], mask=valid, other=0)
    from_peer = tl.sum(count, 1)
    tl.store(split_2R + R + peer, from_peer.to(tl.int64), mask=peer < R)
    of_expert = tl.sum(count, 0)
    end = tl.cumsum(of_expert, 0)
    tl.store(end_e + expert, end, mask=expert < e)
    end_by_peer = (tl.cumsum(from_peer, 0) - from_peer)[:, None] + tl.cumsum(count, 1)
    end_by_expert = (end - of_expert)[None, :] + tl.cumsum(count, 0)
    chunk = peer[:, None] * e + expert[None, :]
    tl.store(chunk_end + chunk, end_by_peer, mask=valid)
    tl.store(chunk_shift + chunk, end_by_expert - end_by_peer, mask=valid)


@triton.jit
def _reorder_kernel(
    src_ND, dst_ND, src_N, dst_N, chunk_end, chunk_shift, num_chunks,
    D: tl.constexpr, C_PAD: tl.constexpr, D_PAD: tl.constexpr, BACK: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Move one row (and one fp32 value) between arrival order and expert order."""
    arrived = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, C_PAD)
    end = tl.load(chunk_end + chunk, mask=chunk < num_chunks, other=2147483647)
    sorted_row = arrived + tl.load(chunk_shift + tl.sum((end <= arrived).to(tl.int32), 0))
    source = sorted_row if BACK else arrived
    target = arrived if BACK else sorted_row
    column = tl.arange(0, D_PAD)
    tl.store(dst_ND + target * D + column, tl.load(src_ND + source * D + column, mask=column < D), mask=column < D)
    if VALUE:
        tl.store(dst_N + target, tl.load(src_N + source))


@triton.jit
def _swiglu_kernel(h_N2F, weight_N, act_NF, end_e, last, F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """act = weight * silu(gate) * up, on the rows that hold tokens."""
    num_rows = tl.load(end_e + last)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    if tl.program_id(0) * ROWS < num_rows:
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        valid = (row < num_rows)[:, None] & (column < F)[None, :]
        at = row[:, None] * (2 * F) + column[None, :]
        gate = tl.load(h_N2F + at, mask=valid, other=0.0).to(tl.float32)
        up = tl.load(h_N2F + at + F, mask=valid, other=0.0).to(tl.float32)
        weight = tl.load(weight_N + row, mask=row < num_rows, other=0.0)
        act = gate * tl.sigmoid(gate) * up * weight[:, None]
        tl.store(act_NF + row[:, None] * F + column[None, :], act.to(act_NF.dtype.element_ty), mask=valid)


@triton.jit
def _swiglu_backward_kernel(
    h_N2F, weight_N, dact_NF, dh_N2F, act_NF, dweight_N, end_e, last,
    F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dh, the recomputed activation (for the weight gradient of the second GEMM) and d(weight)."""
    num_rows = tl.load(end_e + last)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    if tl.program_id(0) * ROWS < num_rows:
        weight = tl.load(weight_N + row, mask=row < num_rows, other=0.0)[:, None]
        dweight = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, F, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            valid = (row < num_rows)[:, None] & (column < F)[None, :]
            wide = row[:, None] * (2 * F) + column[None, :]
            narrow = row[:, None] * F + column[None, :]
            gate = tl.load(h_N2F + wide, mask=valid, other=0.0).to(tl.float32)
            up = tl.load(h_N2F + wide + F, mask=valid, other=0.0).to(tl.float32)
            dact = tl.load(dact_NF + narrow, mask=valid, other=0.0).to(tl.float32)
            sigmoid = tl.sigmoid(gate)
            silu = gate * sigmoid
            dweight += dact * silu * up
            tl.store(act_NF + narrow, (silu * up * weight).to(act_NF.dtype.element_ty), mask=valid)
            dact *= weight
            dgate = dact * up * sigmoid * (1 + gate * (1 - sigmoid))
            tl.store(dh_N2F + wide, dgate.to(dh_N2F.dtype.element_ty), mask=valid)
            tl.store(dh_N2F + wide + F, (dact * silu).to(dh_N2F.dtype.element_ty), mask=valid)
        tl.store(dweight_N + row, tl.sum(dweight, 1), mask=row < num_rows)


def _pow2(value: int, least: int = 1) -> int:
    return max(least, triton.next_power_of_2(value))


def _warps(hidden: int) -> int:
    return 8 if hidden > 4096 else 4


def sort_by_expert(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(row of each slot (T, K), -1 where the id is; rows per expert (E,); ends of segments (E,)), all int32.

    Stable: rows of an expert are in (token, slot) order.
    """
    n, e_pad = ids_TK.numel(), _pow2(num_experts, 16)
    block = min(128, max(16, 16384 // e_pad))  # entries of one program: its (entries, experts) table fits in registers
    blocks = triton.cdiv(n, block)
    row_TK = torch.empty(ids_TK.shape, dtype=torch.int32, device=ids_TK.device)
    count_BE = row_TK.new_empty(max(blocks, 1), num_experts)
    total_E, end_E = row_TK.new_zeros(num_experts), row_TK.new_zeros(num_experts)
    if n:
        _count_kernel[(blocks,)](ids_TK, count_BE, n, num_experts, block, e_pad, num_warps=8)
        _scan_kernel[(num_experts,)](count_BE, total_E, blocks, num_experts, _pow2(blocks))
        _place_kernel[(blocks,)](ids_TK, count_BE, total_E, row_TK, end_E, n, num_experts, block, e_pad, num_warps=8)
    return row_TK, total_E, end_E


def spread(
    x_TD: Tensor, row_TK: Tensor, num_rows: int, weights_TK: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Permute: (rows (N, D), weights (N,)); rows that no slot names are left uninitialised."""
    (tokens, hidden), top_k = x_TD.shape, row_TK.shape[1]
    out_ND = x_TD.new_empty(num_rows, hidden)
    weight_N = None if weights_TK is None else weights_TK.new_empty(num_rows)
    if tokens:
        _spread_kernel[(tokens,)](
            x_TD, row_TK, weights_TK, out_ND, weight_N, hidden, top_k, _pow2(top_k), _pow2(hidden),
            weights_TK is not None, num_warps=_warps(hidden),
        )  # fmt: skip
    return out_ND, weight_N


def collect(y_ND: Tensor, row_TK: Tensor, value_N: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Unpermute: (sum over slots (T, D), value of each slot (T, K)); tokens without rows are left uninitialised."""
    (tokens, top_k), hidden = row_TK.shape, y_ND.shape[1]
    out_TD = y_ND.new_empty(tokens, hidden)
    value_TK = None if value_N is None else value_N.new_empty(tokens, top_k)
    if tokens:
        _collect_kernel[(tokens,)](
            y_ND, row_TK, value_N, out_TD, value_TK, hidden, top_k, _pow2(top_k), _pow2(hidden),
            value_N is not None, num_warps=_warps(hidden),
        )  # fmt: skip
    return out_TD, value_TK


def exchange_layout(count_RE: Tensor, rank: int) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    """From all ranks' counts: (splits (2R,) int64, chunks for `reorder`, ends of this rank's segments (e,))."""
    ranks, experts = count_RE.shape
    local = experts // ranks
    split_2R = torch.empty(2 * ranks, dtype=torch.int64, device=count_RE.device)
    chunk_end, chunk_shift = count_RE.new_empty(ranks * local), count_RE.new_empty(ranks * local)
    end_e = count_RE.new_empty(local)
    _exchange_layout_kernel[(1,)](
        count_RE, split_2R, chunk_end, chunk_shift, end_e, rank, experts, local, ranks, _pow2(ranks), _pow2(local)
    )
    return split_2R, (chunk_end, chunk_shift), end_e


def reorder(
    rows_ND: Tensor, chunks: tuple[Tensor, Tensor], value_N: Tensor | None = None, *, back: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Rows and values from arrival order to expert order, or `back`."""
    num_rows, hidden = rows_ND.shape
    out_ND = torch.empty_like(rows_ND)
    out_N = None if value_N is None else torch.empty_like(value_N)
    count = chunks[0].numel()
    if num_rows:
        _reorder_kernel[(num_rows,)](
            rows_ND, out_ND, value_N, out_N, *chunks, count, hidden, _pow2(count), _pow2(hidden), back,
            value_N is not None, num_warps=_warps(hidden),
        )  # fmt: skip
    return out_ND, out_N


def swiglu(h_N2F: Tensor, weight_N: Tensor, end_e: Tensor) -> Tensor:
    """(N, F) weighted activation; rows behind the last segment are left uninitialised."""
    num_rows, ffn = h_N2F.shape[0], h_N2F.shape[1] // 2
    act_NF = h_N2F.new_empty(num_rows, ffn)
    if num_rows:
        grid = (triton.cdiv(num_rows, 8), triton.cdiv(ffn, 256))
        _swiglu_kernel[grid](h_N2F, weight_N, act_NF, end_e, end_e.numel() - 1, ffn, 8, 256)
    return act_NF


def swiglu_backward(h_N2F: Tensor, weight_N: Tensor, dact_NF: Tensor, end_e: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(dh (N, 2F), weighted activation (N, F), d(weight) (N,) fp32)."""
    num_rows, ffn = dact_NF.shape
    dh, act, dweight = torch.empty_like(h_N2F), torch.empty_like(dact_NF), torch.empty_like(weight_N)
    if num_rows:
        grid = (triton.cdiv(num_rows, 4),)
        _swiglu_backward_kernel[grid](h_N2F, weight_N, dact_NF, dh, act, dweight, end_e, end_e.numel() - 1, ffn, 4, 256)
    return dh, act, dweight


def grouped_mm(a: Tensor, b: Tensor, end_e: Tensor) -> Tensor:
    """PyTorch's grouped GEMM: (N, k) x (e, k, n) -> (N, n), or (m, N) x (N, n) -> (e, m, n)."""
    if a.is_cuda:
        return getattr(torch.nn.functional, "grouped_mm", torch._grouped_mm)(a, b, offs=end_e)
    ends = end_e.tolist()
    parts = list(zip([0, *ends[:-1]], ends, strict=True))
    if b.dim() == 2:
        return torch.stack([a[:, i:j] @ b[i:j] for i, j in parts])
    out = a.new_empty(a.shape[0], b.shape[2])
    for weight, (i, j) in zip(b, parts, strict=True):
        out[i:j] = a[i:j] @ weight
    return out

"""The plain PyTorch meaning of the layer: one process, no tiles, no communication.

`forward` and `backward` follow the numerics contract rounding for rounding, so they define what every
backend computes; `composition` has only the formulas, without the roundings, differentiable in any dtype (fp64 for
tests).

Shape suffixes: T tokens, K slots, D hidden, F ffn, E experts, N rows of one expert.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional

from uniep.activation import activation_of
from uniep.config import MoEConfig, align_rows
from uniep.numerics import (
    add_ascending,
    bias_groups,
    column_group_sums,
    combine_grouped,
    combine_slots,
    fixed_settings,
    matmul,
    row_block_sums,
    widened,
)


@dataclasses.dataclass(frozen=True)
class Gradients:
    """dx (T, D), dweights (T, K) fp32, dw13 (E, 2F, D), dw2 (E, D, F), or (E, F, D) without a gate; parameters in their
    own dtype.  db13 (E, 2F or F), db2 (E, D), or None without biases."""

    x: Tensor
    weights: Tensor
    w13: Tensor
    w2: Tensor
    b13: Tensor | None = None
    b2: Tensor | None = None


Biases = tuple[Tensor, Tensor]
"""b13 (E, 2F), or (E, F) without a gate, and b2 (E, D)."""


def composition(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    w13_E2FD: Tensor,
    w2_EDF: Tensor,
    weight_at: str = "output",
    activation: str = "swiglu",
    limit: float | None = None,
    biases: Biases | None = None,
) -> Tensor:
    """What a PyTorch user would write: differentiable, in the dtype of its inputs."""
    ffn, of = w2_EDF.shape[2], activation_of(activation, limit)
    y_TD = torch.zeros_like(x_TD)
    for expert in range(w13_E2FD.shape[0]):
        token, slot = torch.where(ids_TK == expert)
        b13, b2 = (None, None) if biases is None else (b[expert] for b in biases)
        h = functional.linear(x_TD[token], w13_E2FD[expert], b13)
        act = of.plain(*h.split(ffn, 1))
        weight = weights_TK[token, slot, None].to(act.dtype)
        if weight_at == "activation":
            rows = functional.linear(act * weight, w2_EDF[expert])
            rows = rows if b2 is None else rows + weight * b2
        else:
            rows = functional.linear(act, w2_EDF[expert], b2) * weight
        y_TD = y_TD.index_add(0, token, rows)
    return y_TD


def _expert_rows(ids_TK: Tensor, expert: int) -> tuple[Tensor, Tensor, int]:
    """Tokens and slots of one expert in canonical order, and its row count with alignment."""
    token, slot = torch.where(ids_TK == expert)
    return token, slot, align_rows(token.numel())


def _aligned(rows: Tensor, count: int) -> Tensor:
    """`rows` padded with zero rows to `count` rows."""
    out = rows.new_zeros(count, rows.shape[1])
    out[: rows.shape[0]] = rows
    return out


@fixed_settings()
def forward(
    x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, w13_E2FD: Tensor, w2_EDF: Tensor, cfg: MoEConfig,
    biases: Biases | None = None,
) -> Tensor:  # fmt: skip
    """y (T, D) in cfg.dtype.  Inputs of all ranks in global token order; see docs/numerics.md."""
    slots_TKD = torch.zeros(*ids_TK.shape, cfg.hidden, dtype=cfg.dtype)
    for expert in range(cfg.num_experts):
        token, slot, count = _expert_rows(ids_TK, expert)
        if count:
            _, act = _activation(x_TD, weights_TK, w13_E2FD, expert, token, slot, count, cfg, biases)
            product = matmul(act[:, : cfg.ffn], w2_EDF[expert].T)[: token.numel()]
            if biases is not None:
                bias = biases[1][expert].float()
                product += weights_TK[token, slot, None] * bias if cfg.weight_at == "activation" else bias
            slots_TKD[token, slot] = product.to(cfg.dtype)
    return _combine(slots_TKD, ids_TK, weights_TK if cfg.weight_at == "output" else None, cfg)


def _combine(slots_TKD: Tensor, ids_TK: Tensor, weights_TK: Tensor | None, cfg: MoEConfig) -> Tensor:
    """The sum of each token's slots, at once or by groups of experts, in cfg.dtype."""
    if cfg.combine_groups is None:
        return combine_slots(slots_TKD, ids_TK, weights_TK).to(cfg.dtype)
    group_TK = torch.where(ids_TK >= 0, ids_TK // cfg.experts_per_group, -1)
    return combine_grouped(slots_TKD, group_TK, weights_TK, cfg.combine_groups, cfg.dtype).to(cfg.dtype)


def _activation(x_TD, weights_TK, w13_E2FD, expert, token, slot, count, cfg, biases):
    """(halves of h, act) of one expert's rows, columns widened: h fp32 after its cast, act in cfg.dtype."""
    x = _aligned(x_TD[token], count)
    products = [matmul(x, half.T) for half in w13_E2FD[expert].split(cfg.ffn)]
    if biases is not None:
        products = [p + b.float() for p, b in zip(products, biases[0][expert].split(cfg.ffn), strict=True)]
    halves = [widened(product.to(cfg.dtype)) for product in products]
    act = activation_of(cfg.activation, cfg.activation_limit).forward(*halves)
    if cfg.weight_at == "activation":
        act = _aligned(weights_TK[token, slot, None], count) * act
    return halves, act.to(cfg.dtype)


@fixed_settings()
def backward(
    dy_TD: Tensor, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, w13_E2FD: Tensor, w2_EDF: Tensor, cfg: MoEConfig,
    biases: Biases | None = None,
) -> Gradients:  # fmt: skip
    """Gradients of `forward` for the output gradient `dy_TD` (T, D), with the contract's roundings."""
    ffn, activation = cfg.ffn, activation_of(cfg.activation, cfg.activation_limit)
    slots_TKD = torch.zeros(*ids_TK.shape, cfg.hidden, dtype=cfg.dtype)
    dweights_TK = torch.zeros(ids_TK.shape, dtype=torch.float32)
    dw13, dw2 = torch.zeros_like(w13_E2FD), torch.zeros_like(w2_EDF)
    db13, db2 = (None, None) if biases is None else map(torch.zeros_like, biases)
    for expert in range(cfg.num_experts):
        token, slot, count = _expert_rows(ids_TK, expert)
        if not count:
            continue
        n = token.numel()
        halves, act = _activation(x_TD, weights_TK, w13_E2FD, expert, token, slot, count, cfg, biases)
        weight = _aligned(weights_TK[token, slot, None], count)
        dy = _aligned(dy_TD[token], count)
        raw = widened(matmul(dy, w2_EDF[expert]))
        scored = act.float() if cfg.weight_at == "output" else activation.forward(*halves)
        groups = column_group_sums(raw * scored)
        if biases is not None:
            groups = torch.cat([groups, bias_groups(dy, biases[1][expert])], 1)
        dweights_TK[token, slot] = add_ascending(groups)[:n]
        gradients = activation.backward(*halves, weight * raw)
        dh = torch.cat([gradient[:, :ffn] for gradient in gradients], 1).to(cfg.dtype)
        weighted = (weight * act.float()).to(cfg.dtype) if cfg.weight_at == "output" else act
        slots_TKD[token, slot] = matmul(dh, w13_E2FD[expert])[:n].to(cfg.dtype)
        dw2[expert] = matmul(dy.T, weighted[:, :ffn]).to(dw2.dtype)
        dw13[expert] = matmul(dh.T, _aligned(x_TD[token], count)).to(dw13.dtype)
        if db13 is not None and db2 is not None:
            db13[expert], db2[expert] = row_block_sums(dh.float()), row_block_sums(weight * dy)
    return Gradients(_combine(slots_TKD, ids_TK, None, cfg), dweights_TK, dw13, dw2, db13, db2)

"""Launches of `kernels/router.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from uniep.kernels.router import d_logits_kernel, losses_kernel, route_kernel
from uniep.launch.driver import launch
from uniep.layout import power_of_2

MOST_EXPERTS, MOST_SLOTS = 1024, 32
PROGRAMS = 2048
"""At most; each takes the next token after so many."""
COPIES = 16
"""Of sums that programs add to: with one, the atomics on 512 addresses took as long as the rest of the kernel."""


def _padded(num_experts: int, groups: int) -> int:
    """Experts that a program holds: all, or groups and the experts of each, padded to powers of two."""
    return max(power_of_2(num_experts), power_of_2(groups) * power_of_2(num_experts // groups))


def _options(padded: int) -> dict[str, Any]:
    """Of a launch.  A warp has registers for 512 experts."""
    return {"num_warps": max(padded // 512, 1), "enable_fp_fusion": False}


def beyond(num_experts: int, top_k: int, groups: int) -> str:
    """The limit of the kernels that a router is beyond; "": they can run it."""
    if (padded := _padded(num_experts, groups)) > MOST_EXPERTS:
        in_groups = f" in {groups} groups, padded to {padded}" if groups > 1 else ""
        return f"{num_experts} experts{in_groups}; kernels take {MOST_EXPERTS}"
    return f"top_k is {top_k}; kernels take {MOST_SLOTS}" if top_k > MOST_SLOTS else ""


def route(
    logits_TE: Tensor, bias_E: Tensor | None, given_TK: Tensor | None, top_k: int, *, sigmoid: bool, renormalize: bool,
    scale: float, groups: int, groups_per_token: int, group_top: int, losses: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(chosen (T, K) int64, weights (T, K) fp32, this rank's integers (2E + 4,) int64; of these without `losses` only
    the slots of each expert).  given_TK: a choice, integers; then only weights and integers are computed."""
    num_tokens, num_experts = logits_TE.shape
    chosen_TK = logits_TE.new_empty(num_tokens, top_k, dtype=torch.int64)
    weights_TK = torch.empty_like(chosen_TK, dtype=torch.float32)
    copies = COPIES if losses else 1
    sums = logits_TE.new_zeros(copies, 2 * num_experts + 4, dtype=torch.int64)
    if num_tokens:
        bias_E, given_TK = (t if t is None else t.contiguous() for t in (bias_E, given_TK))
        constants = {
            "EXPERTS": num_experts, "TOP_K": top_k, "SIGMOID": sigmoid, "RENORMALIZE": renormalize, "SCALE": scale,
            "GROUPS": groups, "GROUPS_PER_TOKEN": groups_per_token, "GROUP_TOP": group_top, "LOSSES": losses,
            "COPIES": copies, "BLOCK": power_of_2(num_experts), "SLOTS": power_of_2(top_k),
            "GROUP_BLOCK": power_of_2(groups), "MEMBER_BLOCK": power_of_2(num_experts // groups),
        }  # fmt: skip
        args = logits_TE, bias_E, given_TK, chosen_TK, weights_TK, sums, num_tokens
        options = _options(_padded(num_experts, groups))
        launch(route_kernel, min(num_tokens, PROGRAMS), args, constants, **options)
    return chosen_TK, weights_TK, sums.sum(0) if losses else sums[0]


def losses(
    every: Tensor, rank: int, *, aux_loss: float, z_loss: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(aux loss (), z-loss (), counts of this rank (E,), d(aux loss) / d(probability) of a token (E,), tokens ()), of
    all ranks' integers (R, 2E + 4)."""
    num_experts = (every.shape[1] - 4) // 2
    aux, z, d_aux_E = (every.new_empty(shape, dtype=torch.float32) for shape in ((), (), num_experts))
    counts_E, tokens = every.new_empty(num_experts), every.new_empty(())
    constants = {"EXPERTS": num_experts, "AUX_LOSS": aux_loss, "Z_LOSS": z_loss, "BLOCK": power_of_2(num_experts)}
    args = every, aux, z, counts_E, d_aux_E, tokens, len(every), rank
    launch(losses_kernel, 1, args, constants, num_warps=4, enable_fp_fusion=False)
    return aux, z, counts_E, d_aux_E, tokens


def d_logits(
    logits_TE: Tensor, ids_TK: Tensor, chosen_TK: Tensor, d_weights_TK: Tensor, d_aux_E: Tensor | None,
    d_aux_loss: Tensor, d_z_loss: Tensor, tokens: Tensor, *, sigmoid: bool, renormalize: bool, scale: float,
    z_loss: float,
) -> Tensor:  # fmt: skip
    """(T, E) fp32: `d_logits_kernel`.  d_aux: None without an aux loss."""
    num_tokens, num_experts = logits_TE.shape
    out_TE = torch.empty_like(logits_TE)
    if num_tokens:
        constants = {
            "EXPERTS": num_experts, "TOP_K": ids_TK.shape[1], "SIGMOID": sigmoid, "RENORMALIZE": renormalize,
            "SCALE": scale, "Z_LOSS": z_loss, "BLOCK": power_of_2(num_experts),
        }  # fmt: skip
        args = (
            logits_TE, ids_TK, chosen_TK, d_weights_TK, d_aux_E, d_aux_loss, d_z_loss, tokens, out_TE, num_tokens
        )  # fmt: skip
        launch(d_logits_kernel, min(num_tokens, PROGRAMS), args, constants, **_options(power_of_2(num_experts)))
    return out_TE

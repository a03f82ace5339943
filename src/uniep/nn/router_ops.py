"""The formulas of the router kit, and the operator that runs them, with its autograd.

Everything is fp32 unless stated otherwise.  A row of every result depends only on its token: products are
`row_products`, and sums over experts and slots have a documented order.  Sums over tokens must be equal on all ranks,
so they are sums of integers, which are exact in any order.

Shape suffixes: T tokens, D hidden, E experts, K slots, G groups, R ranks.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from uniep.errors import CapacityError, PeerTimeoutError, UniEPError
from uniep.nn.invariant import ROWS, refuse_forward_mode, row_products, settings, token_sums
from uniep.nn.router_config import RouterConfig
from uniep.numerics import LEAST_SUM, PROBABILITY_UNIT, SQUARE_LIMIT, SQUARE_UNIT, add_ascending, pair_tree_sum
from uniep.waiting import finish

log = logging.getLogger("uniep")


def row_sum(x_TE: Tensor) -> Tensor:
    """Sums of the last dimension: by adjacent pairs, ((x0+x1)+(x2+x3))+..., padded with zeros to a power of two."""
    width = x_TE.shape[-1]
    return pair_tree_sum(torch.nn.functional.pad(x_TE, (0, (1 << (width - 1).bit_length()) - width)))


def softmax(logits_TE: Tensor) -> tuple[Tensor, Tensor]:
    """(probabilities (T, E), log of the sum of exponentials (T,))."""
    highest_T1 = logits_TE.amax(-1, keepdim=True)
    powers_TE = torch.exp(logits_TE - highest_T1)
    total_T = row_sum(powers_TE)
    return powers_TE / total_T[:, None], highest_T1[:, 0] + torch.log(total_T)


def sigmoid(logits_TE: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-logits_TE))


def probabilities(scores_TE: Tensor, score: str) -> Tensor:
    """What aux loss averages: scores that add to 1."""
    return scores_TE if score == "softmax" else scores_TE / (row_sum(scores_TE) + LEAST_SUM)[:, None]


def choose(scores_TE: Tensor, bias_E: Tensor | None, cfg: RouterConfig, top_k: int) -> Tensor:
    """(T, K) int64: the K experts of highest score + bias, highest first; ties to the lower expert.

    With groups: only from the groups_per_token groups with the largest sums of their group_top highest scores (added
    highest first); ties to the lower group.  NaN is lower than any number.
    """
    ranked_TE = torch.nan_to_num(
        scores_TE if bias_E is None else scores_TE + bias_E, nan=torch.finfo(torch.float32).min
    )
    if cfg.groups > 1:
        of_group_TGE = ranked_TE.unflatten(1, (cfg.groups, -1))
        top_TGK = of_group_TGE.sort(-1, descending=True).values[..., : cfg.highest_of_group(top_k)]
        group_TM = add_ascending(top_TGK).sort(dim=-1, descending=True, stable=True).indices[:, : cfg.groups_per_token]
        chosen_TG = torch.zeros(of_group_TGE.shape[:2], dtype=torch.bool, device=ranked_TE.device)
        chosen_TG.scatter_(1, group_TM, True)
        ranked_TE = torch.where(chosen_TG[..., None], of_group_TGE, -math.inf).flatten(1)
    return ranked_TE.sort(dim=-1, descending=True, stable=True).indices[:, :top_k].contiguous()


def weigh(scores_TE: Tensor, ids_TK: Tensor, cfg: RouterConfig) -> tuple[Tensor, Tensor]:
    """(weights (T, K), what scores were divided by (T,)); weights of unused slots are 0.  Sums k = 0 .. K-1."""
    chosen_TK = torch.where(ids_TK >= 0, scores_TE.gather(1, ids_TK.clamp(0, scores_TE.shape[1] - 1)), 0.0)
    if not cfg.renormalize:
        return chosen_TK * cfg.scale, torch.ones_like(chosen_TK[:, 0])
    total_T = add_ascending(chosen_TK) + LEAST_SUM
    return chosen_TK / total_T[:, None] * cfg.scale, total_T


def jitter(token_ids_T: Tensor, hidden: int, seed: int, amount: float) -> Tensor:
    """(T, D): factors in [1 - amount, 1 + amount), a function of (seed, the token's id, the column) only.

    Uses 24 bits of a hash of 32-bit words: the seed's two, the id's two, then the column.  For each word the hash so
    far is multiplied by an odd number, the word is added, and the result is mixed by shifts and odd multiplications
    (the finisher of MurmurHash3).
    """
    device = token_ids_T.device
    state_T = torch.zeros_like(token_ids_T)
    for word in (seed & _WORD, seed >> 32 & _WORD, token_ids_T & _WORD, token_ids_T >> 32 & _WORD):
        state_T = _mix(state_T * 5 + 0x9E3779B1 + word)
    state_TD = _mix(state_T[:, None] * 5 + 0x9E3779B1 + torch.arange(hidden, device=device))
    unit_TD = (state_TD >> 8).float() * 2.0**-24  # [0, 1)
    return (unit_TD * 2 - 1) * amount + 1


_WORD = 0xFFFFFFFF


def _mix(h: Tensor) -> Tensor:
    h = h & _WORD
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = ((h ^ h >> shift) * factor) & _WORD
    return h ^ h >> 16


# --- sums over the tokens of all ranks ---


def _integers(counts_E: Tensor, probabilities_TE: Tensor, log_sum_T: Tensor) -> Tensor:
    """(2E + 4,) int64: slots of each expert, sums of probabilities and of squares, tokens, tokens that are not finite,
    ranks that have failed."""
    bad_T = ~torch.isfinite(log_sum_T)
    probability_TE = torch.where(bad_T[:, None], 0.0, probabilities_TE) / PROBABILITY_UNIT
    square_T = torch.where(bad_T, 0.0, (log_sum_T * log_sum_T).clamp(max=SQUARE_LIMIT)) / SQUARE_UNIT
    few = torch.stack(
        [square_T.round().long().sum(), torch.full_like(counts_E[0], len(bad_T)), bad_T.sum(), counts_E.new_zeros(())]
    )
    return torch.cat([counts_E, probability_TE.round().long().sum(0), few])


def count_slots(ids_TK: Tensor, num_experts: int) -> Tensor:
    """(E,) int64: slots of each expert; unused ones are not counted.  Needs no host read."""
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids_TK.device)
    where = ids_TK.flatten().long().clamp(-1, num_experts - 1) + 1  # the call itself will refuse other ids
    return counts.scatter_add_(0, where, torch.ones_like(where))[1:]


def _gather(mine: Tensor, group: str, timeout_s: float) -> tuple[Tensor, int]:
    """((R, n), this rank's number).  group: "" is this rank alone.  On a GPU the group's own timeout counts."""
    if not group:
        return mine[None], 0
    members = _resolve_process_group(group)  # type: ignore[arg-type]
    every = mine.new_empty(dist.get_world_size(members), len(mine))
    rank = dist.get_rank(members)
    if mine.device.type != "cpu":
        dist.all_gather_into_tensor(every.view(-1), mine, group=members)
        return every, rank
    work = dist.all_gather_into_tensor(every.view(-1), mine, group=members, async_op=True)
    _finish(work, members, timeout_s, "in a router's exchange", "call the layer")
    return every, rank


_here = threading.local()


@contextlib.contextmanager
def looking(look: Callable[[], None]) -> Iterator[None]:
    """Inside, this thread's waits for an exchange on the CPU poll `look`, which may raise; behind it, what they polled
    before."""
    before = getattr(_here, "look", _look_nowhere)
    _here.look = look
    try:
        yield
    finally:
        _here.look = before


def _look_nowhere() -> None:
    pass


def _finish(work: Any, group: dist.ProcessGroup, timeout_s: float, where: str, what: str) -> None:
    """Wait for a collective on the CPU.  where, what: for the error, where this rank waits and what all have to do."""
    try:
        finish(work, timeout_s, getattr(_here, "look", _look_nowhere))
    except (RuntimeError, TimeoutError) as error:
        raise PeerTimeoutError(
            f"rank {dist.get_rank(group)} of {group.size()} waits {where}, where a peer is missing after {timeout_s:g} "
            f"s or has gone ({str(error).splitlines()[0]}); every rank has to {what} the same number of times"
        ) from error


def reduce_counts(
    counts: Tensor, group: dist.ProcessGroup, timeout_s: float, what: str, op: Any = dist.ReduceOp.SUM
) -> None:
    """counts becomes its sum, or `op`, over all ranks.  On a GPU the group's own timeout counts."""
    if counts.device.type != "cpu":
        dist.all_reduce(counts, op, group=group)
    else:
        _finish(dist.all_reduce(counts, op, group=group, async_op=True), group, timeout_s, f"in {what}", f"call {what}")


def exchange(mine: Tensor, group: str, timeout_s: float, error: Exception | None = None) -> tuple[Tensor, int]:
    """All ranks' integers and this rank's number.  error: an error of this rank, which it contributes instead.

    On the CPU every rank then raises.  On GPUs that would need a host read, so the losses become NaN instead.
    """
    every, rank = _gather(mine, group, timeout_s)
    if group and mine.device.type == "cpu" and bool(every[:, -1].any()):
        reasons: list[Any] = [None] * len(every)
        dist.all_gather_object(reasons, error, group=_resolve_process_group(group))  # type: ignore[arg-type]
        if error is None:
            first = next(number for number, reason in enumerate(reasons) if reason is not None)
            kind = type(reasons[first]) if isinstance(reasons[first], UniEPError) else UniEPError
            raise kind(f"rank {first}: {reasons[first]}")
    return every, rank


def join_with_error(error: Exception, num_experts: int, group: str, timeout_s: float, device: torch.device) -> None:
    """Take part in the exchange that the other ranks are in, without tokens."""
    mine = torch.zeros(2 * num_experts + 4, dtype=torch.int64, device=device)
    mine[-1] = 1
    told = error if isinstance(error, UniEPError) else UniEPError(f"{type(error).__name__}: {error}")
    exchange(mine, group, timeout_s, told)


def _losses(every: Tensor, rank: int, cfg: RouterConfig) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(aux loss, z-loss, this rank's counts (E,), d(aux loss) / d(probability) of every token (E,), tokens), from the
    integers of all ranks (R, 2E + 4), in fp64.

    aux: E * sum over e of (share of the slots) * (mean probability), the sum by adjacent pairs.
    """
    num_experts, sums = (every.shape[1] - 4) // 2, every.sum(0)
    counts, probability = sums[:num_experts], sums[num_experts : 2 * num_experts].double() * PROBABILITY_UNIT
    square, tokens, bad, failed = sums[2 * num_experts :]
    tokens_f = tokens.clamp(min=1).double()
    share = counts.double() / counts.sum().clamp(min=1).double()
    factor = torch.where(bad + failed > 0, math.nan, 1.0).double()
    aux = row_sum((share * (probability / tokens_f))[None])[0] * (num_experts * cfg.aux_loss) * factor
    z = square.double() * SQUARE_UNIT / tokens_f * cfg.z_loss * factor
    d_aux = (share / tokens_f * (num_experts * cfg.aux_loss)).float()
    return aux.float(), z.float(), every[rank, :num_experts].clone(), d_aux, tokens.clone()


def _within_capacity(ids_TK: Tensor, every: Tensor, rank: int, cfg: RouterConfig) -> tuple[Tensor, Tensor]:
    """(ids with -1 where an expert is full, number of such slots over all ranks): each expert takes the first slots in
    the order of (rank, token, slot), up to ceil(capacity_factor * slots of all ranks / E)."""
    num_experts = (every.shape[1] - 4) // 2
    counts_RE = every[:, :num_experts]
    slots = every[:, 2 * num_experts + 1].sum() * ids_TK.shape[1]
    capacity = torch.ceil(slots.double() * (cfg.capacity_factor or 0.0) / num_experts).long()
    flat = ids_TK.flatten()
    order = torch.argsort(flat, stable=True)
    mine_E = counts_RE[rank]
    start_E = counts_RE[:rank].sum(0) - (torch.cumsum(mine_E, 0) - mine_E)
    place = torch.empty_like(flat)
    place[order] = torch.arange(len(flat), device=flat.device)
    kept = place + start_E[flat] < capacity
    dropped = (counts_RE.sum(0) - capacity).clamp(min=0).sum()
    if cfg.overflow == "raise" and bool(dropped):
        most = counts_RE.sum(0).max()
        raise CapacityError(
            f"{int(dropped)} of {int(slots)} slots are beyond the capacity of their experts: the fullest has "
            f"{int(most)}, but capacity_factor={cfg.capacity_factor} allows {int(capacity)}; raise it, pass "
            "overflow='drop', or leave it out: uniep needs none"
        )
    return torch.where(kept.view_as(ids_TK), ids_TK, -1), dropped


# --- the operator ---


@functools.lru_cache(maxsize=64)
def parse(text: str) -> RouterConfig:
    return RouterConfig.parse(text)


def _padded(x_TD: Tensor) -> Tensor:
    """Padded with zero rows to a multiple of ROWS."""
    missing = -len(x_TD) % ROWS
    return torch.nn.functional.pad(x_TD, (0, 0, 0, missing)) if missing else x_TD


def _inputs_of(x: Tensor, token_ids: Tensor | None, cfg: RouterConfig, seed: int) -> Tensor:
    """The input of the logits: x, or x times its jitter."""
    return x if token_ids is None else x.float() * jitter(token_ids, x.shape[1], seed, cfg.jitter)


def why_torch(device: torch.device, num_experts: int, top_k: int, cfg: RouterConfig) -> str:
    """Why PyTorch computes a router on this device, with bits of PyTorch's own exp and log; "": kernels do."""
    if device.type != "cuda":
        return "no GPU"
    from uniep.launch import router  # needs Triton

    return router.beyond(num_experts, top_k, cfg.groups)


@functools.cache
def _tell(reason: str) -> None:
    log.warning("a router is computed by PyTorch on a GPU, in some forty launches: %s (said once)", reason)


def _kernels(x: Tensor, num_experts: int, top_k: int, cfg: RouterConfig) -> Any:
    """`uniep.launch.router`, or None: see `why_torch`."""
    if reason := why_torch(x.device, num_experts, top_k, cfg):
        if x.device.type == "cuda":
            _tell(reason)
        return None
    from uniep.launch import router

    return router


def _route(
    logits_TE: Tensor, num_tokens: int, bias_E: Tensor | None, given_TK: Tensor | None, cfg: RouterConfig, top_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(chosen (T, K) int64, weights (T, K), this rank's integers (2E + 4,)) of the first num_tokens logits."""
    softmax_TE, log_sum_T = softmax(logits_TE) if cfg.score == "softmax" or cfg.exchanges else (None, None)
    scores_TE = softmax_TE if cfg.score == "softmax" and softmax_TE is not None else sigmoid(logits_TE)
    if given_TK is None:
        chosen_TK = choose(scores_TE[:num_tokens], bias_E, cfg, top_k)
    else:
        chosen_TK = given_TK.to(torch.int64, copy=True)
    counts_E = count_slots(chosen_TK, logits_TE.shape[1])
    if log_sum_T is not None and cfg.exchanges:
        mine = _integers(counts_E, probabilities(scores_TE, cfg.score)[:num_tokens], log_sum_T[:num_tokens])
    else:
        mine = torch.nn.functional.pad(counts_E, (0, len(counts_E) + 4))
    return chosen_TK, weigh(scores_TE[:num_tokens], chosen_TK, cfg)[0], mine


@torch.library.custom_op("uniep::router", mutates_args=())
def router_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, token_ids: Tensor | None, given: Tensor | None,
    config: str, top_k: int, seed: int, group: str, timeout_s: float,
) -> list[Tensor]:  # fmt: skip
    """[ids, weights, aux loss, z-loss, counts (E,), dropped (), logits (T, E), chosen (T, K), d(aux) (E,), tokens ()].

    counts: this rank's slots, before the capacity; losses and capacity use the counts of all ranks.
    """
    cfg, num_tokens, num_experts = parse(config), len(x), weight.shape[0]
    kernels = _kernels(x, num_experts, top_k, cfg)
    with settings(x):
        inputs = _inputs_of(x, token_ids, cfg, seed)
        if kernels is None:
            padded = row_products(_padded(inputs), weight.T)
            chosen, weights, mine = _route(padded, num_tokens, bias, given, cfg, top_k)
            logits = padded[:num_tokens].clone()
        else:
            logits = row_products(inputs, weight.T)
            chosen, weights, mine = kernels.route(
                logits, bias, given, top_k, sigmoid=cfg.score == "sigmoid", renormalize=cfg.renormalize,
                scale=cfg.scale, groups=cfg.groups, groups_per_token=cfg.groups_per_token,
                group_top=cfg.highest_of_group(top_k), losses=cfg.exchanges,
            )  # fmt: skip
    every, rank = exchange(mine, group, timeout_s)
    if kernels is None:
        aux, z, counts, d_aux, tokens = _losses(every, rank, cfg)
    else:
        aux, z, counts, d_aux, tokens = kernels.losses(every, rank, aux_loss=cfg.aux_loss, z_loss=cfg.z_loss)
    if cfg.capacity_factor is not None and given is None:
        ids, dropped = _within_capacity(chosen, every, rank, cfg)
        weights = torch.where(ids >= 0, weights, 0.0)
    else:
        ids, dropped = chosen.clone(), mine.new_zeros(())
    return [ids, weights, aux, z, counts, dropped, logits, chosen, d_aux, tokens]


@router_forward.register_fake
def _(x, weight, bias, token_ids, given, config, top_k, seed, group, timeout_s):
    num_tokens, num_experts = x.shape[0], weight.shape[0]
    f, i = {"dtype": torch.float32}, {"dtype": torch.int64}
    return [
        x.new_empty(num_tokens, top_k, **i), x.new_empty(num_tokens, top_k, **f), x.new_empty((), **f),
        x.new_empty((), **f), x.new_empty(num_experts, **i), x.new_empty((), **i),
        x.new_empty(num_tokens, num_experts, **f), x.new_empty(num_tokens, top_k, **i),
        x.new_empty(num_experts, **f), x.new_empty((), **i),
    ]  # fmt: skip


def d_logits(
    logits_TE: Tensor, ids_TK: Tensor, chosen_TK: Tensor, d_weights_TK: Tensor, d_probability_E: Tensor,
    d_square: Tensor, cfg: RouterConfig,
) -> Tensor:  # fmt: skip
    """(T, E): from the gradients of the weights, of each token's probabilities, and of each token's z^2.

    With s the scores, c = scale, w = c s / S: ds = (c dw - sum over k of dw w) / S, k ascending; not renormalised c dw.
    softmax: dl = p (ds - sum over e of p ds); sigmoid: dl = ds s (1 - s); z: + 2 d(z^2) z p.  Sums over e by pairs.
    """
    softmax_TE, log_sum_T = softmax(logits_TE)
    scores_TE = softmax_TE if cfg.score == "softmax" else sigmoid(logits_TE)
    weights_TK, total_T = weigh(scores_TE, chosen_TK, cfg)
    d_TK = torch.where(ids_TK >= 0, d_weights_TK, 0.0)
    d_scores_TK = d_TK * cfg.scale
    if cfg.renormalize:
        d_scores_TK = (d_scores_TK - add_ascending(d_TK * weights_TK)[:, None]) / total_T[:, None]
    d_scores_TK = torch.where(chosen_TK >= 0, d_scores_TK, 0.0)
    d_scores_TE = torch.zeros_like(logits_TE)
    for k in range(ids_TK.shape[1]):  # one at a time: a replayed row may name an expert twice
        d_scores_TE.scatter_add_(1, chosen_TK[:, k : k + 1].clamp(0, logits_TE.shape[1] - 1), d_scores_TK[:, k : k + 1])
    if cfg.score == "softmax":
        if cfg.aux_loss:
            d_scores_TE = d_scores_TE + d_probability_E
        d_TE = scores_TE * (d_scores_TE - row_sum(scores_TE * d_scores_TE)[:, None])
    else:
        if cfg.aux_loss:
            sum_T1 = (row_sum(scores_TE) + LEAST_SUM)[:, None]
            mean_T1 = row_sum(scores_TE / sum_T1 * d_probability_E)[:, None]
            d_scores_TE = d_scores_TE + (d_probability_E - mean_T1) / sum_T1
        d_TE = d_scores_TE * scores_TE * (1 - scores_TE)
    return d_TE + softmax_TE * (2 * d_square * log_sum_T)[:, None] if cfg.z_loss else d_TE


@torch.library.custom_op("uniep::router_bwd", mutates_args=())
def router_backward(
    d_weights: Tensor, d_aux_loss: Tensor, d_z_loss: Tensor, x: Tensor, weight: Tensor, token_ids: Tensor | None,
    ids: Tensor, logits: Tensor, chosen: Tensor, d_aux: Tensor, tokens: Tensor, config: str, seed: int,
    needs: list[bool],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(dx, dW), empty where not needed."""
    cfg, num_tokens = parse(config), len(x)
    kernels = _kernels(x, weight.shape[0], ids.shape[1], cfg)
    with settings(x):
        if kernels is None:
            pad = (0, 0, 0, -num_tokens % ROWS)
            all_logits, *of_slots = (torch.nn.functional.pad(t, pad) for t in (logits, ids, chosen, d_weights))
            d_square = d_z_loss * cfg.z_loss / tokens.clamp(min=1)
            all_ids, all_chosen, d_slots = of_slots
            d_TE = d_logits(all_logits, all_ids, all_chosen, d_slots, d_aux * d_aux_loss, d_square, cfg)
        else:
            d_TE = kernels.d_logits(
                logits, ids, chosen, d_weights, d_aux if cfg.aux_loss else None, d_aux_loss, d_z_loss, tokens,
                sigmoid=cfg.score == "sigmoid", renormalize=cfg.renormalize, scale=cfg.scale, z_loss=cfg.z_loss,
            )  # fmt: skip
        dx, dw = x.new_empty(0), weight.new_empty(0)
        if needs[0]:
            dx_TD = row_products(d_TE, weight)[:num_tokens]
            if token_ids is not None:
                dx_TD = dx_TD * jitter(token_ids, x.shape[1], seed, cfg.jitter)
            dx = dx_TD.to(x.dtype).contiguous()
        if needs[1]:
            inputs = _inputs_of(x, token_ids, cfg, seed).float()
            dw = token_sums(d_TE[:num_tokens], inputs).to(weight.dtype)
    return dx, dw


@router_backward.register_fake
def _(
    d_weights, d_aux_loss, d_z_loss, x, weight, token_ids, ids, logits, chosen, d_aux, tokens, config, seed, needs
):  # fmt: skip
    return tuple(t.new_empty(t.shape if needed else 0) for t, needed in zip((x, weight), needs, strict=True))


def _setup(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    x, weight, _, token_ids, _, ctx.config, _, ctx.seed, *_ = inputs
    ids, _, _, _, _, _, logits, chosen, d_aux, tokens = output
    ctx.needs = [x.requires_grad, weight.requires_grad]
    ctx.save_for_backward(x, weight, token_ids, ids, logits, chosen, d_aux, tokens)


def _differentiate(ctx: Any, grads: list[Tensor | None]) -> tuple:
    x, weight, token_ids, ids, logits, chosen, d_aux, tokens = ctx.saved_tensors
    d_weights = torch.zeros_like(ids, dtype=torch.float32) if grads[1] is None else grads[1].contiguous()
    d_aux_loss, d_z_loss = (d_aux.new_zeros(()) if grad is None else grad for grad in grads[2:4])
    got = router_backward(
        d_weights, d_aux_loss, d_z_loss, x, weight, token_ids, ids, logits, chosen, d_aux, tokens, ctx.config, ctx.seed,
        ctx.needs,
    )  # fmt: skip
    dx, dw = (grad if needed else None for grad, needed in zip(got, ctx.needs, strict=True))
    return dx, dw, *(None,) * 8


router_forward.register_autograd(_differentiate, setup_context=_setup)
router_forward.register_effect(torch.library.EffectType.ORDERED)  # it may have an exchange in it


# --- carrying the losses' gradients, and counting in a training step ---


@torch.library.custom_op("uniep::count_load", mutates_args=("load",))
def count_load(load: Tensor, counts: Tensor) -> None:
    """load += counts, except in a recomputed forward."""
    if not is_recomputing():
        load += counts


@count_load.register_fake
def _(load, counts):
    return None


def is_recomputing() -> bool:
    """Whether a backward is running; a forward inside it is a recomputation."""
    return torch._C._current_graph_task_id() != -1


@torch.library.custom_op("uniep::attach_loss", mutates_args=())
def _attach(weights: Tensor, loss: Tensor, scale: float) -> Tensor:
    return weights.clone()


@_attach.register_fake
def _(weights, loss, scale):
    return torch.empty_like(weights)


def _setup_attach(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.scale = inputs[2]


def _differentiate_attach(ctx: Any, grad: Tensor) -> tuple:
    return grad, grad.new_full((), ctx.scale), None


_attach.register_autograd(_differentiate_attach, setup_context=_setup_attach)


def attach_loss(weights_TK: Tensor, loss: Tensor, scale: float = 1.0) -> Tensor:
    """`weights_TK`; its backward gives `loss` the gradient `scale`, as if scale * loss had been added to the training
    loss."""
    refuse_forward_mode({"weights": [weights_TK], "loss": [loss]})
    return _attach(weights_TK, loss, scale)

"""The router's formulas (docs/router.md): a program takes one token at a time and holds all its experts.

A token's results depend on its own row alone.  Sums over experts add adjacent pairs; sums over tokens are integers,
exact in any order.
"""

import triton
import triton.language as tl

from uniep import numerics
from uniep.kernels.ptx import exp, log
from uniep.kernels.trees import pair_tree_sum

LEAST_SUM = tl.constexpr(numerics.LEAST_SUM)
PROBABILITY_UNIT = tl.constexpr(numerics.PROBABILITY_UNIT)
SQUARE_UNIT, SQUARE_LIMIT = tl.constexpr(numerics.SQUARE_UNIT), tl.constexpr(numerics.SQUARE_LIMIT)
INFINITY = tl.constexpr(float("inf"))
GREATEST = tl.constexpr(3.4028234663852886e38)  # of fp32
NOTHING = tl.constexpr(-(2**63))  # below every key


@triton.jit(do_not_specialize=["tokens"])
def route_kernel(
    logits_ptr, bias_ptr, given_ptr, chosen_ptr, weights_ptr, sums_ptr, tokens, EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr, SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, SCALE: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_PER_TOKEN: tl.constexpr, GROUP_TOP: tl.constexpr, LOSSES: tl.constexpr, COPIES: tl.constexpr,
    BLOCK: tl.constexpr, SLOTS: tl.constexpr, GROUP_BLOCK: tl.constexpr, MEMBER_BLOCK: tl.constexpr,
):  # fmt: skip
    """chosen (tokens, TOP_K) int64 and weights (tokens, TOP_K) fp32 of logits (tokens, EXPERTS) fp32.

    Adds to sums (COPIES, 2 EXPERTS + 4) int64, which are zeros before: the slots of each expert, and with LOSSES the
    other sums over tokens.  A program adds to one of the copies, so that few wait for each other.
    bias_ptr: None, or (EXPERTS,) fp32.  given_ptr: None, or a choice (tokens, TOP_K) of integers.
    """
    expert, slot = tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    counts = tl.zeros((BLOCK,), tl.int32)
    probabilities = tl.zeros((BLOCK,), tl.int64)
    squares, bad = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        row = logits_ptr + token.to(tl.int64) * EXPERTS
        highest, total = 0.0, 1.0
        if LOSSES or not SIGMOID:
            powers, highest, total = _powers(row, EXPERTS, BLOCK)
            if LOSSES:
                log_sum = highest + log(total)
                finite = tl.abs(log_sum) < INFINITY
                if SIGMOID:
                    score = _scores(row, EXPERTS, BLOCK)
                    probability = tl.div_rn(score, _row_sum(score, BLOCK) + LEAST_SUM)
                else:
                    probability = tl.div_rn(powers, total)
                probabilities += _rounded(tl.where(finite, probability, 0.0) * (1 / PROBABILITY_UNIT))
                square = tl.where(log_sum * log_sum < SQUARE_LIMIT, log_sum * log_sum, SQUARE_LIMIT)
                squares += _rounded(tl.where(finite, square, 0.0) * (1 / SQUARE_UNIT))
                bad += tl.where(finite, 0, 1)
        if given_ptr is None:
            keys = _keys(
                row, bias_ptr, highest, total, EXPERTS, SIGMOID, GROUPS, GROUPS_PER_TOKEN, GROUP_TOP, GROUP_BLOCK,
                MEMBER_BLOCK,
            )  # fmt: skip
        chosen, scores = tl.full((SLOTS,), -1, tl.int64), tl.zeros((SLOTS,), tl.float32)
        divisor = 0.0
        for k in range(TOP_K):
            if given_ptr is None:
                best = tl.max(keys)
                keys = tl.where(keys == best, NOTHING, keys)
                chosen_k = EXPERTS - 1 - (best & 0xFFFFFFFF)
            else:
                chosen_k = tl.load(given_ptr + token.to(tl.int64) * TOP_K + k).to(tl.int64)
            counts += (expert == tl.minimum(chosen_k, EXPERTS - 1)).to(tl.int32)
            score_k = _slot_score(row, chosen_k, highest, total, EXPERTS, SIGMOID)
            divisor += score_k
            chosen, scores = tl.where(slot == k, chosen_k, chosen), tl.where(slot == k, score_k, scores)
        if RENORMALIZE:
            scores = tl.div_rn(scores, divisor + LEAST_SUM)
        place = token.to(tl.int64) * TOP_K + slot
        tl.store(chosen_ptr + place, chosen, mask=slot < TOP_K)
        tl.store(weights_ptr + place, scores * SCALE, mask=slot < TOP_K)
    sums_ptr += tl.program_id(0) % COPIES * (2 * EXPERTS + 4)
    tl.atomic_add(sums_ptr + expert, counts.to(tl.int64), mask=counts > 0, sem="relaxed")
    if LOSSES:
        of_probabilities = sums_ptr + EXPERTS + expert
        tl.atomic_add(of_probabilities, probabilities, mask=probabilities > 0, sem="relaxed")
        tl.atomic_add(sums_ptr + 2 * EXPERTS, squares, sem="relaxed")
        tl.atomic_add(sums_ptr + 2 * EXPERTS + 2, bad, mask=bad > 0, sem="relaxed")
        if tl.program_id(0) == 0:
            tl.store(sums_ptr + 2 * EXPERTS + 1, tokens.to(tl.int64))


@triton.jit(do_not_specialize=["ranks", "rank"])
def losses_kernel(
    every_ptr, aux_ptr, z_ptr, counts_ptr, d_aux_ptr, tokens_ptr, ranks, rank, EXPERTS: tl.constexpr,
    AUX_LOSS: tl.constexpr, Z_LOSS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Both losses, what `d_logits_kernel` needs of all tokens, and this rank's counts, of the sums of all ranks,
    every (ranks, 2 EXPERTS + 4) int64.  In fp64; the sum over experts by adjacent pairs.  One program."""
    expert = tl.arange(0, BLOCK)
    inside = expert < EXPERTS
    width: tl.constexpr = 2 * EXPERTS + 4
    slots, probability = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64)
    square, tokens, bad = tl.zeros((), tl.int64), tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    for other in range(ranks):
        sums = every_ptr + other * width
        slots += tl.load(sums + expert, mask=inside, other=0)
        probability += tl.load(sums + EXPERTS + expert, mask=inside, other=0)
        square += tl.load(sums + 2 * EXPERTS)
        tokens += tl.load(sums + 2 * EXPERTS + 1)
        bad += tl.load(sums + 2 * EXPERTS + 2) + tl.load(sums + 2 * EXPERTS + 3)
    tl.store(counts_ptr + expert, tl.load(every_ptr + rank * width + expert, mask=inside), mask=inside)
    tl.store(tokens_ptr, tokens)
    # Constants as fp64: beside a tensor Triton may round them to fp32.
    aux, z = tl.full((), EXPERTS * AUX_LOSS, tl.float64), tl.full((), Z_LOSS, tl.float64)
    unit, of_square = tl.full((), PROBABILITY_UNIT, tl.float64), tl.full((), SQUARE_UNIT, tl.float64)
    factor = tl.where(bad > 0, float("nan"), 1.0).to(tl.float64)
    num_tokens = tl.maximum(tokens, 1).to(tl.float64)
    share = slots.to(tl.float64) / tl.maximum(tl.sum(slots), 1).to(tl.float64)
    mean = probability.to(tl.float64) * unit / num_tokens
    tl.store(aux_ptr, (_row_sum(share * mean, BLOCK) * aux * factor).to(tl.float32))
    tl.store(z_ptr, (square.to(tl.float64) * of_square / num_tokens * z * factor).to(tl.float32))
    tl.store(d_aux_ptr + expert, (share / num_tokens * aux).to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def d_logits_kernel(
    logits_ptr, ids_ptr, chosen_ptr, d_weights_ptr, d_aux_ptr, d_aux_loss_ptr, d_z_loss_ptr, all_tokens_ptr, out_ptr,
    tokens, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr,
    SCALE: tl.constexpr, Z_LOSS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out (tokens, EXPERTS) fp32: the gradient of the logits.

    ids, chosen (tokens, TOP_K) int64: slots after and before a capacity.  d_weights (tokens, TOP_K) fp32.
    d_aux (EXPERTS,) fp32, or None without an aux loss.
    """
    expert = tl.arange(0, BLOCK)
    inside = expert < EXPERTS
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        row = logits_ptr + token.to(tl.int64) * EXPERTS
        first = token.to(tl.int64) * TOP_K
        powers, highest, total = _powers(row, EXPERTS, BLOCK)
        probability = tl.div_rn(powers, total)
        if SIGMOID:
            scores = _scores(row, EXPERTS, BLOCK)
        else:
            scores = probability
        divisor, projected = 1.0, 0.0
        if RENORMALIZE:
            divisor = 0.0
            for k in range(TOP_K):
                chosen = tl.load(chosen_ptr + first + k)
                divisor += _slot_score(row, chosen, highest, total, EXPERTS, SIGMOID)
            divisor += LEAST_SUM
            for k in range(TOP_K):
                chosen = tl.load(chosen_ptr + first + k)
                score = _slot_score(row, chosen, highest, total, EXPERTS, SIGMOID)
                d_weight = _slot_gradient(ids_ptr, d_weights_ptr, first + k)
                projected += d_weight * (tl.div_rn(score, divisor) * SCALE)
        d_scores = tl.zeros((BLOCK,), tl.float32)
        for k in range(TOP_K):
            chosen = tl.load(chosen_ptr + first + k)
            d_score = _slot_gradient(ids_ptr, d_weights_ptr, first + k) * SCALE
            if RENORMALIZE:
                d_score = tl.div_rn(d_score - projected, divisor)
            d_scores += tl.where(expert == tl.minimum(chosen, EXPERTS - 1), d_score, 0.0)
        if d_aux_ptr is not None:
            d_probability = tl.load(d_aux_ptr + expert, mask=inside, other=0.0) * tl.load(d_aux_loss_ptr)
            if SIGMOID:
                every = _row_sum(scores, BLOCK) + LEAST_SUM
                mean = _row_sum(tl.div_rn(scores, every) * d_probability, BLOCK)
                d_probability = tl.div_rn(d_probability - mean, every)
            d_scores += d_probability
        if SIGMOID:
            d_logits = d_scores * scores * (1 - scores)
        else:
            d_logits = scores * (d_scores - _row_sum(scores * d_scores, BLOCK))
        if Z_LOSS > 0:
            all_tokens = tl.maximum(tl.load(all_tokens_ptr), 1).to(tl.float32)
            d_square = tl.div_rn(tl.load(d_z_loss_ptr) * Z_LOSS, all_tokens)
            d_logits += probability * (2 * d_square * (highest + log(total)))
        tl.store(out_ptr + token.to(tl.int64) * EXPERTS + expert, d_logits, mask=inside)


@triton.jit
def _row_sum(x, BLOCK: tl.constexpr):
    """(BLOCK,) -> (): by adjacent pairs."""
    return tl.sum(pair_tree_sum(tl.reshape(x, (1, BLOCK)), 1, BLOCK, BLOCK))


@triton.jit
def _powers(row, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """(exp(l - max l) (BLOCK,), zeros behind the experts; max l; the sum)."""
    expert = tl.arange(0, BLOCK)
    logits = tl.load(row + expert, mask=expert < EXPERTS, other=-INFINITY)
    highest = tl.max(logits)
    powers = tl.where(expert < EXPERTS, exp(logits - highest), 0.0)
    return powers, highest, _row_sum(powers, BLOCK)


@triton.jit
def _score(logits, highest, total, SIGMOID: tl.constexpr):
    if SIGMOID:
        return tl.div_rn(1.0, 1.0 + exp(-logits))
    else:
        return tl.div_rn(exp(logits - highest), total)


@triton.jit
def _scores(row, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Sigmoid (BLOCK,), zeros behind the experts."""
    expert = tl.arange(0, BLOCK)
    logits = tl.load(row + expert, mask=expert < EXPERTS, other=0.0)
    return tl.where(expert < EXPERTS, _score(logits, 0.0, 1.0, True), 0.0)


@triton.jit
def _slot_score(row, chosen, highest, total, EXPERTS: tl.constexpr, SIGMOID: tl.constexpr):
    """Of an expert; 0 of none (-1)."""
    logit = tl.load(row + tl.minimum(tl.maximum(chosen, 0), EXPERTS - 1))
    return tl.where(chosen >= 0, _score(logit, highest, total, SIGMOID), 0.0)


@triton.jit
def _slot_gradient(ids_ptr, d_weights_ptr, place):
    return tl.where(tl.load(ids_ptr + place) >= 0, tl.load(d_weights_ptr + place), 0.0)


@triton.jit
def _rounded(x):
    """To int64, half to even; x from 0 to 2^40."""
    return tl.where(x < 2.0**23, (x + 2.0**23) - 2.0**23, x).to(tl.int64)


@triton.jit
def _key(value, index, COUNT: tl.constexpr):
    """An int64 that orders by value, then by the lower index; no value is -0 or NaN."""
    bits = value.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (COUNT - 1 - index)


@triton.jit
def _value(key):
    bits = (key >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _keys(
    row, bias_ptr, highest, total, EXPERTS: tl.constexpr, SIGMOID: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_PER_TOKEN: tl.constexpr, GROUP_TOP: tl.constexpr, GROUP_BLOCK: tl.constexpr, MEMBER_BLOCK: tl.constexpr,
):  # fmt: skip
    """(GROUP_BLOCK, MEMBER_BLOCK): keys of the experts that may be chosen, NOTHING for all others."""
    members: tl.constexpr = EXPERTS // GROUPS
    group, member = tl.arange(0, GROUP_BLOCK), tl.arange(0, MEMBER_BLOCK)
    expert = group[:, None] * members + member[None, :]
    inside = (group < GROUPS)[:, None] & (member < members)[None, :]
    ranked = _score(tl.load(row + expert, mask=inside, other=0.0), highest, total, SIGMOID)
    if bias_ptr is not None:
        ranked += tl.load(bias_ptr + expert, mask=inside, other=0.0)
    ranked = tl.where(ranked == ranked, tl.minimum(tl.maximum(ranked, -GREATEST), GREATEST), -GREATEST)
    keys = tl.where(inside, _key(ranked, expert, EXPERTS), NOTHING)
    if GROUPS > 1:
        rest, sums = keys, tl.zeros((GROUP_BLOCK,), tl.float32)
        for _ in range(GROUP_TOP):
            best = tl.max(rest, 1)
            sums += _value(best)
            rest = tl.where(rest == best[:, None], NOTHING, rest)
        of_groups = tl.where(group < GROUPS, _key(sums, group, GROUPS), NOTHING)
        taken = of_groups
        for _ in range(GROUPS_PER_TOKEN):
            of_groups = tl.where(of_groups == tl.max(of_groups), NOTHING, of_groups)
        keys = tl.where((of_groups != taken)[:, None], keys, NOTHING)
    return keys

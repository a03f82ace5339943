"""Parts of combine groups against their definition, token by token."""

import pytest
import torch

from uniep.config import MoEConfig
from uniep.numerics import combine_grouped, combine_slots
from uniep.routing import build_parts, build_plan, return_slots, token_groups

CASES = {  # tokens of each rank, experts, slots, groups
    "two ranks, two groups each": ((9, 4), 8, 3, 4),
    "one group on each rank": ((5, 0, 17, 2), 8, 4, 4),
    "one expert in each group": ((6, 6), 4, 3, 4),
    "fewer groups than slots": ((40,), 12, 6, 2),
    "one slot": ((3, 8), 4, 1, 4),
    "no tokens": ((0, 0), 4, 2, 2),
}


def made(name):
    tokens, experts, top_k, groups = CASES[name]
    cfg = MoEConfig(
        hidden=8, ffn=8, num_experts=experts, top_k=top_k, max_tokens_per_rank=max(1, *tokens, 1), combine_groups=groups
    )
    g = torch.Generator().manual_seed(len(name))
    return cfg, [torch.randint(-1, experts, (t, top_k), generator=g) for t in tokens]


@pytest.mark.parametrize("name", CASES)
def test_parts(name):
    """Every (token, group) with slots is one part, on its group's rank; rows in ascending k; slots side by side."""
    cfg, ids = made(name)
    per_rank, size, slots = cfg.combine_groups // len(ids), cfg.experts_per_group, cfg.max_tokens_per_rank * cfg.top_k
    for rank in range(len(ids)):
        plan = build_plan(ids, rank, cfg)
        row_of = {back: row for row, back in enumerate(plan.row_return_N.tolist()) if back >= 0}
        want = []
        for source, ids_TK in enumerate(ids):
            for token, row in enumerate(ids_TK.tolist()):
                groups = sorted({e // size for e in row if e >= 0})
                for place, group in enumerate(groups):
                    if group // per_rank == rank:
                        used = [k for k, e in enumerate(row) if e >= 0 and e // size == group]
                        rows = [row_of[source * slots + token * cfg.top_k + k] for k in used]
                        rows += [-1] * (cfg.top_k - len(rows))
                        want.append((source, token, group, rows, token * cfg.return_slots + place))
        parts = build_parts(plan, rank, cfg)
        got = (parts.source_P, parts.token_P, parts.group_P, parts.row_PK, return_slots(parts, ids, cfg))
        assert list(zip(*(t.tolist() for t in got), strict=True)) == want


def test_the_example():
    cfg = MoEConfig(hidden=8, ffn=8, num_experts=4, top_k=3, max_tokens_per_rank=2, combine_groups=2)
    assert token_groups(torch.tensor([[3, 0, 2], [-1, 3, 3]], dtype=torch.int8), cfg).tolist() == [[0, 1], [1, -1]]


def test_order_and_rounding():
    """Slots by k inside a group, each group rounded, then the groups: none of these sums equals another's."""
    slots = torch.tensor([2.0**24, 1, 1, -(2.0**24)]).view(1, 4, 1)
    for groups, want in (([0, 0, 0, 0], 0.0), ([0, 1, 1, 0], 2.0), ([1, 0, 0, 1], 2.0), ([0, 1, 2, 2], 1.0)):
        got = combine_grouped(slots, torch.tensor([groups]), None, 3, torch.float32)
        assert got.item() == want, groups
    # 1 + 2^-7 is a bf16, 1 + 2^-8 is not: the sum of the first group is rounded before the second is added.
    slots = torch.tensor([1.0, 2.0**-8, 2.0**-8]).view(1, 3, 1)
    assert combine_slots(slots, torch.zeros(1, 3), None).item() == 1 + 2.0**-7
    assert combine_grouped(slots, torch.tensor([[0, 0, 1]]), None, 2, torch.bfloat16).item() == 1 + 2.0**-8
    weights = torch.tensor([[1.0, 1.0, 2.0]])
    assert combine_grouped(slots, torch.tensor([[0, 0, 1]]), weights, 2, torch.bfloat16).item() == 1 + 2.0**-7


def test_unused_slots_and_groups_are_skipped():
    slots = torch.full((2, 3, 1), float("nan"))
    slots[0, 1] = 3.0
    got = combine_grouped(slots, torch.tensor([[-1, 1, -1], [-1, -1, -1]]), torch.full((2, 3), 2.0), 2, torch.float16)
    assert got.flatten().tolist() == [6.0, 0.0]

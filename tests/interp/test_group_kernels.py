"""The kernels of combine groups, interpreted: tables of lines against `build_parts`, sums against `combine_slots`."""

import pytest
import torch

from uniep.config import MoEConfig
from uniep.kernels.launch import Peers, Rows
from uniep.kernels.launch_groups import Lines, launch_group_sum, launch_parts
from uniep.memory import EXCHANGE_HEADER, hopper_parts_arrays, plan_words
from uniep.numerics import combine_slots
from uniep.routing import build_parts, build_plan, return_slots, token_groups

D, PROGRAMS, CALL = 136, 2, 7
CASES = {  # tokens of each rank, experts, slots, groups
    "one group on each rank": ((50, 9), 8, 3, 2),
    "four groups on each rank": ((20, 33), 16, 5, 8),
    "groups of one expert": ((12, 0, 40, 7), 8, 3, 8),
    "one slot": ((40, 3), 4, 1, 2),
    "one rank": ((70,), 6, 6, 3),
}


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Problem:
    """Ids of all ranks, and one rank's plan and lines as the kernels make them."""

    def __init__(self, name: str, rank: int, dtype: torch.dtype = torch.float16) -> None:
        tokens, experts, top_k, groups = CASES[name]
        self.rank, self.ranks = rank, len(tokens)
        self.cfg = cfg = MoEConfig(
            hidden=D, ffn=8, num_experts=experts, top_k=top_k, max_tokens_per_rank=max(tokens) + 3, dtype=dtype,
            combine_groups=groups,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(rank + len(name))
        self.ids = [torch.randint(-1, experts, (t, top_k), generator=generator) for t in tokens]
        self.plan = build_plan(self.ids, rank, cfg)
        self.parts = build_parts(self.plan, rank, cfg)
        slots = cfg.max_tokens_per_rank * top_k
        exchange = torch.full((2, self.ranks, EXCHANGE_HEADER + 2 * slots), 99, dtype=torch.int32)
        for source, ids in enumerate(self.ids):
            exchange[CALL % 2, source, EXCHANGE_HEADER : EXCHANGE_HEADER + ids.numel()] = ids.flatten()
        zero = int32(0)
        totals = int32(self.plan.num_rows, 0)
        rows = Rows(zero, self.plan.row_return_N, *[zero] * 10, totals)
        flat = torch.full((sum(plan_words(hopper_parts_arrays(cfg, self.ranks))),), -1, dtype=torch.int32)
        self.lines = Lines.of(flat, cfg, self.ranks)
        arguments = (rows, self.lines, int32(CALL), rank, self.ranks, tokens[rank], cfg, PROGRAMS)
        launch_parts(exchange, *arguments)

    @property
    def return_slots(self) -> int:
        return self.cfg.max_tokens_per_rank * self.cfg.return_slots

    def targets(self) -> torch.Tensor:
        """(P,): each part's slot, counted over all ranks."""
        return self.parts.source_P * self.return_slots + return_slots(self.parts, self.ids, self.cfg)


@pytest.mark.parametrize("name", CASES)
def test_lines(name):
    """A line has the rows of its parts, part by part, in ascending k; slots that no group has are marked."""
    for rank in range(len(CASES[name][0])):
        p = Problem(name, rank)
        cfg, parts = p.cfg, p.parts
        want = [[] for _ in range(p.ranks * cfg.max_tokens_per_rank)]
        for source, token, rows, target in zip(
            parts.source_P.tolist(), parts.token_P.tolist(), parts.row_PK.tolist(), p.targets().tolist(), strict=True
        ):
            want[source * cfg.max_tokens_per_rank + token] += [(row, target) for row in rows if row >= 0]
        for line, row_K, slot_K in zip(want, p.lines.row_LK.tolist(), p.lines.slot_LK.tolist(), strict=True):
            assert row_K == [row for row, _ in line] + [-1] * (cfg.top_k - len(line))
            assert slot_K[: len(line)] == [slot for _, slot in line]
        used = token_groups(p.ids[rank], cfg) >= 0
        assert torch.equal(p.lines.used_TW[: len(used)] >= 0, used)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_sums(name, dtype, weighted):
    """Every sum has the bits of its definition and lies in its slot, at its rank; nothing else is touched."""
    rank = len(CASES[name][0]) - 1
    p = Problem(name, rank, dtype)
    generator = torch.Generator().manual_seed(3)
    rows_ND = torch.randn(p.plan.num_rows, D, generator=generator).to(dtype)
    # Products by powers of two are exact: the interpreter's fma rounds twice.
    weight_N = 2.0 ** torch.randint(-2, 3, (p.plan.num_rows,), generator=generator)
    returns = [torch.full((p.return_slots, D), float("nan"), dtype=dtype) for _ in range(p.ranks)]
    flags = [torch.zeros(4, dtype=torch.int32) for _ in range(p.ranks)]
    address = lambda ts: torch.tensor([t.data_ptr() for t in ts], dtype=torch.int64)  # noqa: E731
    status, ticket = torch.zeros(16, dtype=torch.int32), int32(0)
    zero = int32(0)
    peers = Peers(
        rank=rank, num_ranks=p.ranks, call=int32(CALL), status=status, timeout_ns=0, arrived=zero, finished=zero,
        returned=zero, receive_table=zero, returns_table=address(returns), flag_table=address(flags), arrived_offset=0,
        finished_offset=0, returned_offset=2, push_ticket=zero, return_ticket=ticket, chunk=1, receive_block=1,
    )  # fmt: skip
    arguments = (rows_ND, weight_N if weighted else None, p.lines.row_LK, p.lines.slot_LK, peers, p.return_slots)
    how = {"one_group": p.cfg.combine_groups == p.ranks, "signal": True}
    status[0] = 1
    launch_group_sum(*arguments, PROGRAMS, **how)
    assert all(t.isnan().all() for t in returns), "after a failure nothing is sent"
    assert not any(f.any() for f in flags)
    status[0] = 0
    launch_group_sum(*arguments, PROGRAMS, **how)
    index = p.parts.row_PK.clamp(min=0)
    sums = combine_slots(rows_ND[index], p.parts.row_PK, weight_N[index] if weighted else None).to(dtype)
    want = torch.full((p.ranks * p.return_slots, D), float("nan"), dtype=dtype)
    want[p.targets()] = sums
    assert torch.equal(torch.cat(returns).nan_to_num(12345.0), want.nan_to_num(12345.0))
    assert [f.tolist() for f in flags] == [[0, 0, CALL, 0]] * p.ranks
    assert ticket.item() == 0

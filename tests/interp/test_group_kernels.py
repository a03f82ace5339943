"""The kernels of combine groups, interpreted: tables of lines against `build_parts`, sums against `combine_slots`."""

import threading
import time
from collections import Counter

import pytest
import torch
from test_plan import walked_groups

from uniep.config import MoEConfig
from uniep.kernels.arguments import Rows, Wire
from uniep.launch.driver import Bundle
from uniep.launch.groups import (
    GroupSums,
    LineTables,
    launch_claimed_sum,
    launch_group_sum,
    launch_parts,
    launch_return_order,
)
from uniep.launch.operands import Peers
from uniep.layout import EXCHANGE_HEADER, hopper_parts_arrays, plan_words
from uniep.numerics import combine_slots
from uniep.routing import build_parts, build_plan, return_slots, token_groups
from uniep.schedule import Tile

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
        self._rows = Rows(None, self.plan.row_return_N, *[None] * 10, int32(self.plan.num_rows, 0))
        flat = torch.full((sum(plan_words(hopper_parts_arrays(cfg, self.ranks))),), -1, dtype=torch.int32)
        self.lines = LineTables.of(flat, cfg, self.ranks)
        arguments = (self.rows(), self.lines, int32(CALL), rank, self.ranks, tokens[rank], cfg, PROGRAMS)
        launch_parts(exchange, *arguments)

    def rows(self, **changes: torch.Tensor) -> Rows:
        return self._rows._replace(**changes)

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


@pytest.mark.parametrize("number", range(len(CASES)))
def test_sums(number):
    """Every sum has the bits of its definition and lies in its slot, at its rank; nothing else is touched."""
    name, weighted = list(CASES)[number], number % 2 == 1
    dtype = torch.float32 if weighted else torch.float16
    rank = len(CASES[name][0]) - 1
    p = Problem(name, rank, dtype)
    generator = torch.Generator().manual_seed(3)
    rows_ND = torch.randn(p.plan.num_rows, D, generator=generator).to(dtype)
    # Products by powers of two are exact: the interpreter's fma rounds twice.
    weight_N = 2.0 ** torch.randint(-2, 3, (p.plan.num_rows,), generator=generator)
    box = Box(p, dtype)
    sums = GroupSums(
        rows_ND, weight_N if weighted else None, p.lines.row_LK, p.lines.slot_LK, p.return_slots,
        p.cfg.combine_groups == p.ranks,
    )  # fmt: skip
    index = p.parts.row_PK.clamp(min=0)
    want = combine_slots(rows_ND[index], p.parts.row_PK, weight_N[index] if weighted else None).to(dtype)

    box.wire.status[0] = 1
    launch_group_sum(sums, box.peers, PROGRAMS, signal=True)
    box.assert_untouched()  # after a failure nothing is sent
    box.wire.status[0] = 0
    launch_group_sum(sums, box.peers, PROGRAMS, signal=True)
    box.assert_holds(want)

    # By claims, beside a product whose three columns of tiles are done.
    box = Box(p, dtype)
    p.lines.cursor.zero_()
    rows = p.rows(progress_M=torch.full((p.plan.num_rows // 64,), 3, dtype=torch.int32))
    launch_claimed_sum(sums, rows, p.lines, box.peers, Tile(rows=64, columns=64), 1)
    box.assert_holds(want)


def test_sums_wait_for_their_tiles():
    """Rows and counts that come while the kernel runs: no line is added before all of its tiles are counted."""
    p = Problem("four groups on each rank", 0)
    rows_ND = torch.full((p.plan.num_rows, D), float("nan"), dtype=torch.float16)
    values_ND = torch.randn(rows_ND.shape, generator=torch.Generator().manual_seed(1)).half()
    box, columns = Box(p, rows_ND.dtype), 3
    progress_M = torch.zeros(p.plan.num_rows // 64, dtype=torch.int32)
    p.lines.cursor.zero_()

    def product() -> None:
        for number in torch.randperm(len(progress_M)).tolist():
            for column in range(columns):
                time.sleep(0.01)
                part = slice(64 * number, 64 * number + 64), slice(64 * column, 64 * column + 64)
                rows_ND[part] = values_ND[part]
                progress_M[number] += 1

    sums = GroupSums(rows_ND, None, p.lines.row_LK, p.lines.slot_LK, p.return_slots, False)
    rows = p.rows(progress_M=progress_M)
    thread = threading.Thread(target=product)
    thread.start()
    try:
        launch_claimed_sum(sums, rows, p.lines, box.peers, Tile(rows=64, columns=64), 1)
    finally:
        thread.join()
    box.assert_holds(combine_slots(values_ND[p.parts.row_PK.clamp(min=0)], p.parts.row_PK, None).half())


class Box:
    """Return slots and flags of all ranks, and the arguments that address them."""

    def __init__(self, p: Problem, dtype: torch.dtype) -> None:
        self.p = p
        self.returns = [torch.full((p.return_slots, D), float("nan"), dtype=dtype) for _ in range(p.ranks)]
        self.flags = [torch.zeros(4, dtype=torch.int32) for _ in range(p.ranks)]
        returns_table, flag_table = (
            torch.tensor([t.data_ptr() for t in ts], dtype=torch.int64) for ts in (self.returns, self.flags)
        )
        nothing = dict.fromkeys(Wire._fields)
        self.wire = Wire(
            **nothing | {
                "status": torch.zeros(16, dtype=torch.int32), "call": int32(CALL), "returns_table": returns_table,
                "flag_table": flag_table, "return_ticket": int32(0),
            }
        )  # fmt: skip
        self.peers = Peers(
            rank=p.rank, num_ranks=p.ranks, wire=Bundle(self.wire), timeout_ns=20_000_000_000, arrived_offset=0,
            finished_offset=0, returned_offset=2, chunk=1, receive_block=1,
        )  # fmt: skip

    def assert_untouched(self) -> None:
        assert all(t.isnan().all() for t in self.returns)
        assert not any(f.any() for f in self.flags)

    def assert_holds(self, sums_PD: torch.Tensor) -> None:
        """Every sum lies in its slot, no other slot was touched, all ranks were told."""
        want = torch.full((self.p.ranks * self.p.return_slots, D), float("nan"), dtype=sums_PD.dtype)
        want[self.p.targets()] = sums_PD
        assert torch.equal(torch.cat(self.returns).nan_to_num(12345.0), want.nan_to_num(12345.0))
        assert [f.tolist() for f in self.flags] == [[0, 0, CALL, 0]] * self.p.ranks
        assert self.wire.return_ticket.item() == 0


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_return_order(ranks):
    """Every tile once, by the source rank that it counts to, in the order in which sums travel; inside by expert."""
    generator, height, local = torch.Generator().manual_seed(ranks), 64, 3
    for rank in range(ranks):
        counts = torch.randint(0, 150, (ranks, ranks * local), generator=generator).int()
        counts[torch.rand(counts.shape, generator=generator) < 0.2] = 0
        mine = counts[:, rank * local : (rank + 1) * local]
        padded = -(-mine.sum(0) // 128) * 128
        start = torch.cat([padded.new_zeros(1), padded.cumsum(0)]).int()
        keys = []
        for expert in range(local):
            sources = torch.arange(ranks).repeat_interleave(mine[:, expert]).tolist()
            higher = sum(s <= rank for s in sources) // height  # the tile in which rows of higher ranks begin
            for number in range(int(padded[expert]) // height):
                of_tile = sources[number * height : (number + 1) * height] or [ranks - 1]
                source = of_tile[0]
                if rank + 1 < ranks and number >= higher:
                    source = max(source, rank + 1)
                keys.append(((source - rank - 1) % ranks, len(keys)))
        order, group = torch.full((2, len(keys) + 2), -1, dtype=torch.int32)
        rows = Rows(*[None] * 3, start, mine.sum(0).int(), *[None] * 7, int32(int(start[-1]), len(keys)))
        launch_return_order(counts, rows, rank, Tile(rows=height, group_rows=2), order, group)
        assert order.tolist() == [number for _, number in sorted(keys)] + [-1, -1]
        assert group[-2:].tolist() == [-1, -1]
        expert_M = torch.arange(local).repeat_interleave(padded // height).tolist()
        groups = walked_groups(order[:-2].tolist(), group[:-2].tolist(), expert_M)
        of_source = Counter((expert_M[number], key) for key, number in keys)
        assert Counter(expert_M[of[0]] for of in groups) == Counter(
            expert for (expert, _), tiles in of_source.items() for _ in range(-(-tiles // 2))
        )

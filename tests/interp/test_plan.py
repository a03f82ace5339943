"""The plan kernels, interpreted, against `routing.build_plan`: every rank, element for element."""

import dataclasses
import itertools
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from hopper_on_host import host_backends, use

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from uniep.backends.base import Inputs
from uniep.backends.hopper.planner import Planner
from uniep.config import ROW_ALIGN, MoEConfig, align_rows
from uniep.errors import CapacityError, DTypeError, InputError, PeerTimeoutError
from uniep.kernels.arguments import Addresses, Rows, Tokens
from uniep.kernels.rows import group_word
from uniep.launch.driver import Bundle, tensor
from uniep.launch.staged import launch_row_addresses
from uniep.layout import group_words, hopper_histogram, plan_blocks
from uniep.memory import plan_memory
from uniep.routing import build_plan
from uniep.schedule import Schedule, Tile
from uniep.weights import ExpertWeights

PLAN_FIELDS = {  # RoutingPlan's name -> DevicePlan's
    "counts_RE": "counts_RE",
    "expert_start_e1": "start_e1",
    "send_count_R": "send_count_R",
    "recv_count_R": "recv_count_R",
    "row_source_N": "source_N",
    "row_return_N": "return_N",
}


def make_config(num_experts: int, top_k: int, max_tokens: int, **more) -> MoEConfig:
    sizes = {"hidden": 8, "ffn": 8, "max_tokens_per_rank": max_tokens}
    return MoEConfig(num_experts=num_experts, top_k=top_k, dtype=torch.float16, **sizes, **more)


def make_schedule(rows: int = 128, groups: tuple[int, int] = (3, 2)) -> Schedule:
    gate_up, down = (Tile(rows=rows, group_rows=most) for most in groups)
    return Schedule(gate_up=gate_up, down=down)


def make_weights(ids_of_rank: list[torch.Tensor]) -> list[torch.Tensor]:
    """Distinct everywhere, so that a weight tells which slot it came from."""
    base = torch.Generator().manual_seed(7)
    return [torch.rand(ids.shape, generator=base) for ids in ids_of_rank]


def host_planners(cfg: MoEConfig, ranks: int, schedule: Schedule, timeout_s: float = 60.0) -> list[Planner]:
    return [backend.planner for backend in host_backends(cfg, ranks, schedule, timeout_s)]


def roomy_planners(cfg: MoEConfig, ranks: int, schedule: Schedule) -> list[Planner]:
    """All ranks, with room for any number of rows, so that the first try fits."""
    planners = host_planners(cfg, ranks, schedule)
    for planner in planners:
        planner.allocate = planner.capacity
    return planners


class EnteredError(Exception):
    """Ends a plan behind its first kernel."""


def attempt(planners, ids_of_rank, weights_of_rank, lead=0, waves=1, by_expert=False, in_turn=False):
    """One try of a plan on every rank.  All enter first: in one process nobody may wait for a later rank."""

    def enter_and_stop(enter):
        def stop(*args):
            enter(*args)
            raise EnteredError

        return stop

    ranks = list(zip(planners, ids_of_rank, weights_of_rank, strict=True))
    for planner, ids, weights in ranks:
        planner.enter = enter_and_stop(planner.enter)
        with pytest.raises(EnteredError):
            planner.plan(ids, weights)
        planner.enter = lambda *args: None
    made = [
        planner.plan(ids, weights, (lead, lead + 1), waves=waves, by_expert=by_expert, in_turn=in_turn)
        for planner, ids, weights in ranks
    ]
    for planner in planners:
        del planner.enter
    return made


def plans(planners, ids_of_rank, weights_of_rank, lead=0, waves=1, by_expert=False, in_turn=False):
    """One call's plan on every rank; made again, as every call is, until the rows fit what was allocated."""
    while True:
        made = attempt(planners, ids_of_rank, weights_of_rank, lead, waves, by_expert, in_turn)
        fits = [planner.fits() for planner in planners]
        assert len(set(fits)) == 1, "ranks disagree on whether the rows fit"
        if fits[0]:
            return made
        for plan in made:
            assert not tensor(plan.rows.send_count_R).any() and not tensor(plan.rows.recv_count_R).any()
            assert tensor(plan.rows.totals).tolist()[:2] == [0, 0]


WHOLE = 1
"""The part of an order in which experts have all of their row tiles."""


def expected_order(plan, rank: int, cfg: MoEConfig, rows: int, lead: int, in_turn: bool) -> list[tuple[int, int]]:
    """(Part, row tile): 0, of the first `lead` experts those with rows of this rank only; 1, all other experts; 2, the
    rest; in_turn: the rest before all other experts.

    A pad row is foreign behind rows of later ranks.
    """
    slots = cfg.max_tokens_per_rank * cfg.top_k
    parts = [], [], []
    starts = plan.expert_start_e1.tolist()
    for expert, (begin, end) in enumerate(itertools.pairwise(starts)):
        source = [slot // slots if slot >= 0 else None for slot in plan.row_return_N[begin:end].tolist()]
        later = any(s is not None and s > rank for s in source)
        foreign = [later if s is None else s != rank for s in source]
        for first in range(0, end - begin, rows):
            part = 1 if expert >= lead else 2 if any(foreign[first : first + rows]) else 0
            parts[part].append((begin + first) // rows)
    return [(part, tile) for part in ((0, 2, 1) if in_turn else (0, 1, 2)) for tile in parts[part]]


def order_of_arrival(plan, rank: int, cfg: MoEConfig, rows: int, waves: int) -> list[tuple[int, int]]:
    """(Wave, row tile) by wave, in each by expert.  The wave is that of the source that arrives last of those of its
    rows; the last one if the rows begin up to this rank and end behind it.  Sources arrive from the rank before this
    one downwards.  A pad row is this rank's, or, behind rows of later ranks, of the last one of these."""
    slots, ranks = cfg.max_tokens_per_rank * cfg.top_k, len(plan.counts_RE)
    keys = []
    for begin, end in itertools.pairwise(plan.expert_start_e1.tolist()):
        source = [slot // slots for slot in plan.row_return_N[begin:end].tolist() if slot >= 0]
        source += [max([rank, *source[-1:]])] * (end - begin - len(source))
        for first in range(0, end - begin, rows):
            of_tile = source[first : first + rows]
            arrival = max((rank - s) % ranks for s in of_tile)
            if of_tile[0] <= rank < of_tile[-1]:
                arrival = ranks - 1
            keys.append((-(-arrival * waves // ranks), (begin + first) // rows))
    return sorted(keys)


def check(
    planners, ids_of_rank, cfg: MoEConfig, lead: int = 0, waves: int = 1, by_expert: bool = False, in_turn: bool = False
) -> None:  # fmt: skip
    weights_of_rank = make_weights(ids_of_rank)
    flat_weights = torch.zeros(len(ids_of_rank), cfg.max_tokens_per_rank * cfg.top_k)
    for source, weights in enumerate(weights_of_rank):
        flat_weights[source, : weights.numel()] = weights.flatten()
    align = planners[0].tile_rows
    every = [build_plan(ids_of_rank, rank, cfg, by_expert, align) for rank in range(len(ids_of_rank))]
    for rank, got in enumerate(plans(planners, ids_of_rank, weights_of_rank, lead, waves, by_expert, in_turn)):
        want = every[rank]
        tables, rows = got.rows, want.num_rows
        for name, device_name in PLAN_FIELDS.items():
            value = tensor(getattr(got if hasattr(got, device_name) else tables, device_name))
            if name.startswith("row_"):
                value = value[:rows]
            torch.testing.assert_close(value, getattr(want, name), rtol=0, atol=0, msg=f"rank {rank}: {name}")
        for peer, count in enumerate(want.send_count_R.tolist()):
            assert torch.equal(tensor(got.rows.send_token_RT)[peer, :count], want.send_token_RT[peer, :count])
        if planners[rank].pull:
            lists = [every[s].send_token_RT[rank, :n] for s, n in enumerate(want.recv_count_R.tolist())]
            fetched = torch.cat(lists)
            assert torch.equal(tensor(got.rows.recv_token_N)[: len(fetched)], fetched)
        weight = torch.where(want.row_return_N >= 0, flat_weights.flatten()[want.row_return_N.clamp(min=0).long()], 0.0)
        assert torch.equal(tensor(tables.weight_N)[:rows], weight)

        height = planners[rank].tile_rows
        tiles = rows // height
        assert tensor(tables.totals).tolist()[:2] == [rows, tiles]
        first = rank * planners[rank].local
        assert torch.equal(tensor(tables.rows_e), want.counts_RE.sum(0)[first : first + planners[rank].local].int())
        starts = want.expert_start_e1
        expert = torch.searchsorted(starts, torch.arange(tiles, dtype=torch.int32) * height, right=True) - 1
        assert tensor(tables.expert_M)[:tiles].tolist() == expert.tolist()
        for lead_of, order in ((lead, tables.order_M), (lead + 1, tables.backward_order_M)):
            by_leads = expected_order(want, rank, cfg, height, lead_of, in_turn and order is tables.order_M)
            expected = by_leads if waves == 1 else order_of_arrival(want, rank, cfg, height, waves)
            assert tensor(order)[:tiles].tolist() == [tile for _, tile in expected]
            group, most = tables.order_group_M, planners[rank].group_rows[0]
            if order is tables.backward_order_M:
                group, most = tables.backward_group_M, planners[rank].group_rows[1]
            check_groups(expected, tensor(group)[:tiles], expert.tolist(), most, WHOLE if waves == 1 else None)
        as_they_lie = [(WHOLE, tile) for tile in range(tiles)]
        check_groups(as_they_lie, tensor(tables.group_M)[:tiles], expert.tolist(), planners[rank].group_rows[1], WHOLE)


def check_groups(
    walk: list[tuple[int, int]], group_M: torch.Tensor, expert_M: list[int], most: int, whole: int | None
) -> None:  # fmt: skip
    """Each stretch of consecutive row tiles of one expert in one part of a walk is cut into groups: as few and as even
    as `most` allows, larger ones first.  In parts other than `whole` it may be cut in two before, where this rank's
    tiles would lie."""
    tiles = [tile for _, tile in walk]
    heights = [len(group) for group in walked_groups(tiles, group_M.tolist(), expert_M)]
    cuts = [
        i for i, ((part, a), (other, b)) in enumerate(itertools.pairwise(walk), 1)
        if part != other or b != a + 1 or expert_M[a] != expert_M[b]
    ]  # fmt: skip
    for begin, end in itertools.pairwise([0, *cuts, len(walk)] if walk else []):
        found = []
        while sum(found) < end - begin:
            found.append(heights.pop(0))
        apart = [even(n, most) + even(end - begin - n, most) for n in range(1, end - begin)]
        assert found == even(end - begin, most) or (walk[begin][0] != whole and found in apart)


def even(tiles: int, most: int) -> list[int]:
    """Heights of groups."""
    count = -(-tiles // most)
    return [tiles // count + (number < tiles % count) for number in range(count)]


def walked_groups(order: list[int], words: list[int], expert_M: list[int]) -> list[list[int]]:
    """The groups of a walk: consecutive row tiles of one expert; each names its place and how many there are."""
    groups = []
    while len(order) > (begin := sum(map(len, groups))):
        expert, height = words[begin] >> 14, words[begin] & 127
        tiles = order[begin : begin + height]
        assert tiles == list(range(tiles[0], tiles[0] + height))
        assert {expert_M[tile] for tile in tiles} == {expert}
        assert words[begin : begin + height] == [expert << 14 | place << 7 | height for place in range(height)]
        groups.append(tiles)
    return groups


def random_ids(tokens: int, top_k: int, num_experts: int, seed: int) -> torch.Tensor:
    """Any ids: a token may name an expert twice, and an eighth of the slots is unused."""
    generator = torch.Generator().manual_seed(seed)
    ids_TK = torch.randint(0, num_experts, (tokens, top_k), generator=generator)
    ids_TK[torch.rand(tokens, top_k, generator=generator) < 1 / 8] = -1
    return ids_TK


CASES = {  # experts, K, most tokens, tokens per rank (the first R are used)
    "one token each": (4, 1, 1, [1, 1, 1, 1]),
    "ragged, experts no power of two": (12, 3, 50, [50, 0, 33, 17]),
    "several blocks of tokens": (24, 6, 70, [70, 61, 16, 5]),
    "K of 32": (64, 32, 9, [9, 4, 0, 7]),
    "K equals E, no power of two": (20, 20, 12, [12, 9, 11, 1]),
    "segments of several tiles": (4, 4, 130, [130, 90, 129, 64]),
    "nobody has tokens": (8, 2, 16, [0, 0, 0, 0]),
}


@pytest.mark.parametrize(
    ("case", "ranks"),
    [(case, 4) for case in CASES] + [("several blocks of tokens", 2), ("K of 32", 1), ("segments of several tiles", 1)],
)
def test_equals_build_plan(case, ranks):
    num_experts, top_k, most, tokens = CASES[case]
    cfg = make_config(num_experts, top_k, most)
    lead = {1: 2, 2: 0, 4: 3}[ranks]
    planners = roomy_planners(cfg, ranks, make_schedule(rows=64 if ranks == 4 else 128))
    ids_of_rank = [random_ids(t, top_k, num_experts, seed) for seed, t in enumerate(tokens[:ranks])]
    check(planners, ids_of_rank, cfg, lead)


@pytest.mark.parametrize("case", ["segments of several tiles", "several blocks of tokens"])
def test_leading_experts_in_turn(case):
    """Their other tiles behind their local ones, in the forward alone."""
    num_experts, top_k, most, tokens = CASES[case]
    cfg = make_config(num_experts, top_k, most)
    planners = roomy_planners(cfg, 2, make_schedule(rows=64))
    ids_of_rank = [random_ids(t, top_k, num_experts, seed) for seed, t in enumerate(tokens[:2])]
    check(planners, ids_of_rank, cfg, 1, in_turn=True)


@pytest.mark.parametrize("waves", [2, 4])
@pytest.mark.parametrize("case", ["segments of several tiles", "several blocks of tokens"])
def test_tiles_in_order_of_arrival(case, waves):
    num_experts, top_k, most, tokens = CASES[case]
    cfg = make_config(num_experts, top_k, most)
    planners = roomy_planners(cfg, 4, make_schedule(rows=64))
    check(planners, [random_ids(t, top_k, num_experts, seed) for seed, t in enumerate(tokens)], cfg, waves=waves)


def test_played_peers():
    """One rank alone, whose peers' entries are played, plans as if they were there, call after call."""
    import played
    from plan import check as check_of_benchmark

    cfg = make_config(16, 2, 64, max_rows=512)
    backend = played.rank_0(cfg, 4, Schedule(transfer="copy", gate_up=Tile(rows=64), down=Tile(rows=64)), device="cpu")
    ids_of_rank = [random_ids(60, 2, 16, seed) for seed in range(4)]
    played.enter_peers(backend, ids_of_rank, make_weights(ids_of_rank), "route")
    for _ in range(3):
        check_of_benchmark(backend, ids_of_rank, make_weights(ids_of_rank))


@pytest.mark.parametrize("by_expert", [False, True])
@pytest.mark.parametrize("case", ["ragged, experts no power of two", "several blocks of tokens", "K of 32"])
def test_lists_to_fetch_and_by_expert(case, by_expert):
    """Peers' lists, one behind the other; a token may name its lowest expert twice."""
    num_experts, top_k, most, tokens = CASES[case]
    cfg = make_config(num_experts, top_k, most)
    planners = host_planners(cfg, 4, dataclasses.replace(make_schedule(rows=64), transfer="pull"))
    ids_of_rank = [random_ids(t, top_k, num_experts, s) for s, t in enumerate(tokens)]
    check(planners, ids_of_rank, cfg, 1, by_expert=by_expert)


def test_a_list_by_expert_by_hand():
    """Rank 0's tokens name experts of rank 1 (2 and 3): 3; none; 3 and 2; 2."""
    ids = [torch.tensor([[3, 0], [1, 0], [3, 2], [2, -1]]), torch.tensor([[2, 3]])]
    cfg = make_config(4, 2, 4)
    assert build_plan(ids, 0, cfg, True).send_token_RT[1].tolist() == [2, 3, 0, -1]
    planners = roomy_planners(cfg, 2, make_schedule())
    got = plans(planners, ids, make_weights(ids), by_expert=True)[0]
    assert tensor(got.rows.send_token_RT)[1, :3].tolist() == [2, 3, 0]


def test_more_blocks_than_chunks():
    """Eight ranks with far fewer tokens than they may have, most of them on one: programs walk one block, several
    or none; a third of all slots name one expert."""
    cfg = make_config(num_experts=24, top_k=6, max_tokens=70_000)
    tokens, chunks = plan_blocks(cfg, 8)
    assert hopper_histogram(cfg, 8) == hopper_histogram(dataclasses.replace(cfg, max_tokens_per_rank=2**20), 8)
    assert 4 * tokens * chunks < 150  # blocks of rank 1
    planners = host_planners(cfg, 8, make_schedule(rows=64))
    ids_of_rank = [random_ids(t, 6, 24, seed) for seed, t in enumerate((17, 150, 0, 1, 40, 16, 0, 33))]
    for ids in ids_of_rank:
        ids[:, 1:3] = 13
    check(planners, ids_of_rank, cfg, lead=1)


def test_tables_follow_the_call():
    """With room for a million tokens, what a call of a hundred allocates is that of a hundred."""
    cfg = make_config(num_experts=16, top_k=8, max_tokens=2**20)
    backend = host_backends(dataclasses.replace(cfg, max_tokens_per_rank=4096), 8, make_schedule())[0]
    few, many = (plan_memory(dataclasses.replace(cfg, max_tokens_per_rank=t), 8, tokens=100) for t in (4096, 2**20))
    for a, b in zip(few.buffers, many.buffers, strict=True):
        assert a.kind == "shared" or a == b
    assert backend.planner._layout(100).words < backend.planner._layout(1000).words


def test_room_for_received_tokens():
    """At first as many of each source as this rank has; then what the last call needed; more is copied again."""
    cfg = make_config(num_experts=4, top_k=1, max_tokens=1024)
    backend = host_backends(cfg, 2, make_schedule())[0]
    planner, receive = backend.planner, backend.arena.views["receive"]
    receive[:-1] = torch.arange(len(receive) - 1)[:, None]
    kept = backend.keep(100)
    assert torch.equal(kept, receive[:128])
    planner.received = 400
    (kept,) = backend._with_all_received([kept], 100)
    assert torch.equal(kept, receive[: align_rows(400 + 400 // 32 + 1)])
    assert backend.keep(100).shape == kept.shape
    planner.received = 1024
    assert torch.equal(backend.keep(100), receive[:-1])
    use(backend, dataclasses.replace(backend.schedule, received="again"))
    assert backend.keep(100).shape == (0, cfg.hidden)


@pytest.mark.parametrize("block", [128, 512])
def test_addresses_of_kept_tokens(block):
    """x is read where `_copy_received` puts it, dO in the receive buffer; pad rows read its zero row for both."""
    cfg = make_config(num_experts=4, top_k=1, max_tokens=500)
    backend = host_backends(cfg, 4, make_schedule())[0]
    receive, slots = backend.arena.views["receive"], cfg.receive_block
    receive[:-1] = torch.arange(len(receive) - 1)[:, None] + 1
    kept = torch.empty(3 * block, cfg.hidden, dtype=cfg.dtype)
    backend.copy_received(kept, backend.copies)
    x, dy = (torch.full((10, cfg.hidden), -value, dtype=cfg.dtype) for value in (1.0, 2.0))
    slot = torch.tensor([0, 5, 127, slots, slots + 99, 2 * slots, 2 * slots + 127, 3 * slots])  # the last of pad rows
    source = torch.cat([-slot - 1, torch.tensor([3, 9])]).int()
    totals = torch.tensor([len(source), 1], dtype=torch.int32)
    rows = Bundle(Rows(**dict.fromkeys(Rows._fields) | {"source_N": source, "totals": totals}))
    found = torch.empty(2, 16, dtype=torch.int64)
    launch_row_addresses(Tokens(x, kept), Tokens(dy, receive), rows, 4, 1, Addresses(*found))

    def read(address: int, *of: torch.Tensor) -> float:
        (memory,) = (t for t in of if t.data_ptr() <= address < t.data_ptr() + t.nbytes)
        return float(memory[(address - memory.data_ptr()) // memory.stride(0) // memory.itemsize, 0])

    want = receive[slot, 0].tolist()
    assert [read(a, x, kept, receive) for a in found[0, : len(source)].tolist()] == [*want, -1.0, -1.0]
    assert [read(a, dy, receive) for a in found[1, : len(source)].tolist()] == [*want, -2.0, -2.0]


SHAPED = {
    "all to one expert": lambda t, k: torch.full((t, k), 5),
    "all to the last rank": lambda t, k: 6 + torch.arange(t * k).view(t, k) % 2,
    "own experts only": None,
    "nothing routed": lambda t, k: torch.full((t, k), -1),
    "slots used at the end only": lambda t, k: torch.where(torch.arange(k) == k - 1, 3, -1).expand(t, k).contiguous(),
}


@pytest.mark.parametrize(("shape", "rows"), [*zip(SHAPED, (64, 128) * 3, strict=False), ("own experts only", 128)])
def test_extreme_routings(shape, rows):
    cfg = make_config(num_experts=8, top_k=3, max_tokens=90)
    make = SHAPED[shape]
    ids_of_rank = [
        make(t, 3) if make else 2 * rank + torch.arange(3 * t).view(t, 3) % 2 for rank, t in enumerate((90, 41, 3, 66))
    ]
    check(roomy_planners(cfg, 4, make_schedule(rows)), ids_of_rank, cfg, lead=1)


def test_calls_follow_each_other():
    """Both parities of the exchange, shorter calls after longer ones, int32 ids, first tries that do not fit."""
    cfg = make_config(num_experts=6, top_k=2, max_tokens=40)
    planners = host_planners(cfg, 2, make_schedule())
    for call, tokens in enumerate([(40, 40), (3, 0), (40, 1), (0, 0), (17, 40)]):
        ids_of_rank = [random_ids(t, 2, 6, seed=10 * call + rank) for rank, t in enumerate(tokens)]
        check(planners, [ids.int() if call % 2 else ids for ids in ids_of_rank], cfg)


def test_a_plan_reads_nothing_stale():
    """Memory full of an earlier call's large numbers changes nothing: what is read was written by this call."""
    cfg = make_config(num_experts=6, top_k=2, max_tokens=40)
    planners = host_planners(cfg, 2, make_schedule())
    for planner in planners:
        planner.arena.views["exchange"].fill_(5)
    check(planners, [random_ids(t, 2, 6, seed=t) for t in (30, 7)], cfg)


# Two ranks, experts 0 and 1 on rank 0, tiles of 64 rows, K = 1.  On rank 0 expert 0 gets 70 own rows and then
# 10 of rank 1: tile 0 is local, tile 1 is not.  Expert 1 gets 60 own rows: tile 2 is local.
# On rank 1 expert 2 gets 65 rows of rank 0 and 63 own ones: neither tile is local; expert 3
# gets 64 of rank 0 and 70 own ones in 192 rows: tile 2 is not local, tiles 3 and 4 are.
HAND_IDS = (
    [[0]] * 70 + [[1]] * 60 + [[2]] * 65 + [[3]] * 64,
    [[0]] * 10 + [[2]] * 63 + [[3]] * 70,
)


@triton.jit
def words_kernel(out_ptr, tiles, most, SIZE: tl.constexpr):
    tile = tl.arange(0, SIZE)
    tl.store(out_ptr + tile, group_word(tile * 0 + 3, tile, tiles, most), mask=tile < tiles)


@pytest.mark.parametrize("most", [1, 2, 3, 16, 63, 64])
def test_words_of_groups(most):
    """Of the fourth expert, on the device and made by torch; as many as a word has room for."""
    for tiles in (0, 1, 2, 15, 16, 17, 64, 65, 129, 200):
        out = torch.full((256,), -1, dtype=torch.int32)
        words_kernel[(1,)](out, tiles, most, SIZE=256)
        heights = even(tiles, most) if tiles else []
        assert out.tolist() == words(*((3, height) for height in heights)) + [-1] * (256 - tiles)
        expert_M = torch.tensor([0] * 5 + [3] * tiles)
        made = group_words(expert_M, torch.tensor([5, 0, 0, tiles, 0]), most)
        assert made[5:].tolist() == out[:tiles].tolist()
        assert made[:5].tolist() == words(*((0, height) for height in even(5, most)))


def words(*groups: tuple[int, int]) -> list[int]:
    """Of groups of (expert, height)."""
    return [expert * 2**14 + place * 2**7 + height for expert, height in groups for place in range(height)]


@pytest.mark.parametrize(
    ("lead", "orders", "groups"),
    [
        (0, ([0, 1, 2], [0, 1, 2, 3, 4]), [(0, 2), (1, 3)]),
        (1, ([0, 2, 1], [2, 3, 4, 0, 1]), [(1, 3), (0, 2)]),
        (2, ([0, 2, 1], [3, 4, 0, 1, 2]), [(1, 2), (0, 2), (1, 1)]),
        (9, ([0, 2, 1], [3, 4, 0, 1, 2]), [(1, 2), (0, 2), (1, 1)]),
    ],
)
def test_tile_order_by_hand(lead, orders, groups):
    """groups: of rank 1, in its order."""
    cfg = make_config(num_experts=4, top_k=1, max_tokens=260)
    planners = roomy_planners(cfg, 2, make_schedule(rows=64, groups=(3, 2)))
    ids_of_rank = [torch.tensor(ids) for ids in HAND_IDS]
    got = plans(planners, ids_of_rank, make_weights(ids_of_rank), lead)
    assert [tensor(plan.rows.totals)[1] for plan in got] == [3, 5]
    assert tensor(got[0].rows.expert_M)[:3].tolist() == [0, 0, 1]
    assert tensor(got[1].rows.expert_M)[:5].tolist() == [0, 0, 1, 1, 1]
    for plan, order in zip(got, orders, strict=True):
        assert tensor(plan.rows.order_M)[: len(order)].tolist() == order
    assert tensor(got[0].rows.group_M)[:3].tolist() == words((0, 2), (1, 1))
    assert tensor(got[1].rows.group_M)[:5].tolist() == words((0, 2), (1, 2), (1, 1))
    assert tensor(got[1].rows.order_group_M)[:5].tolist() == words(*groups)


@pytest.mark.parametrize("value", [8, -2, 2**31, 2**40, -(2**40)])
def test_bad_ids_are_found_by_every_rank(value):
    cfg = make_config(num_experts=8, top_k=2, max_tokens=80)
    planners = host_planners(cfg, 2, make_schedule())
    ids_of_rank = [random_ids(80, 2, 8, seed=1), random_ids(70, 2, 8, seed=2)]
    good = [ids.clone() for ids in ids_of_rank]
    ids_of_rank[1][66, 1] = value
    attempt(planners, ids_of_rank, make_weights(ids_of_rank))
    for planner in planners:
        with pytest.raises(InputError, match="rank 1, row 66, slot 1"):
            planner.fits()
    check(planners, good, cfg)  # nobody's state is left broken


def test_a_refusal_reaches_every_rank():
    """The peers of a rank that refuses its inputs raise its error; the Workspaces work afterwards."""
    cfg = make_config(num_experts=8, top_k=2, max_tokens=80)
    first, second = planners = roomy_planners(cfg, 2, make_schedule())
    ids_of_rank = [random_ids(80, 2, 8, seed=1), random_ids(70, 2, 8, seed=2)]
    second.wait = lambda *args: None  # in one process nobody may wait for a later rank
    second.refuse(DTypeError("rank 1: x has dtype torch.float64"))
    del second.wait
    plan = first.plan(ids_of_rank[0], torch.zeros(80, 2))
    assert tensor(plan.rows.totals).tolist() == [0, 0]
    with pytest.raises(DTypeError, match=r"^rank 1: x has dtype torch.float64$"):
        first.fits()
    check(planners, ids_of_rank, cfg)


def test_bad_ids_without_host_read():
    """With max_rows the error comes at the next check, and the plan has dropped the bad slot."""
    cfg = make_config(num_experts=8, top_k=2, max_tokens=80, max_rows=320)
    planners = host_planners(cfg, 2, make_schedule())
    ids_of_rank = [random_ids(80, 2, 8, seed=1), random_ids(70, 2, 8, seed=2)]
    ids_of_rank[0][3, 1] = 9
    plans(planners, ids_of_rank, make_weights(ids_of_rank))
    for planner in planners:
        with pytest.raises(InputError, match="rank 0, entry 7"):
            planner.check()


def test_a_peer_that_does_not_come():
    """The wait ends, and the error names the rank that was missing."""
    cfg = make_config(num_experts=8, top_k=2, max_tokens=16)
    planner = host_planners(cfg, 2, make_schedule(), timeout_s=0.05)[0]
    ids = random_ids(16, 2, 8, seed=1)
    with pytest.raises(PeerTimeoutError, match=r"rank 0, call 1: rank 1 did not come.*entry"):
        planner.plan(ids, torch.zeros(ids.shape))
        planner.fits()


@pytest.mark.parametrize("max_rows", [None, 150])
def test_max_rows_that_suffices(max_rows):
    cfg = make_config(num_experts=4, top_k=1, max_tokens=80, max_rows=max_rows)
    planners = host_planners(cfg, 2, make_schedule())
    check(planners, [torch.arange(80).view(80, 1) % 4] * 2, dataclasses.replace(cfg, max_rows=None))
    for planner in planners:
        planner.check()


@pytest.mark.parametrize("rows", [64, 128])
def test_overflow_is_recorded_everywhere(rows):
    """Rank 1 gets 400 rows where 10 and their alignment fit 256: every rank records it, whatever its tiles are, and no
    tile runs."""
    cfg = make_config(num_experts=2, top_k=1, max_tokens=300, max_rows=10)
    planners = host_planners(cfg, 2, make_schedule(rows=rows))
    assert [planner.capacity for planner in planners] == [2 * ROW_ALIGN] * 2
    ids_of_rank = [torch.ones(200, 1, dtype=torch.int64), torch.ones(200, 1, dtype=torch.int64)]
    for plan in attempt(planners, ids_of_rank, make_weights(ids_of_rank)):
        assert tensor(plan.rows.totals).tolist()[:2] == [0, 0]
        assert not tensor(plan.rows.send_count_R).any()
    for planner in planners:
        with pytest.raises(CapacityError, match=r"rank 1 was routed 400 rows but max_rows=10 leaves room for 256"):
            planner.check()
        assert planner.member.failures


@pytest.mark.parametrize(
    ("operand", "groups", "preactivation"),
    [("gathered", None, "saved"), ("expanded", None, "saved"), ("gathered", 2, "recomputed")],
)
def test_plan_memory_is_what_the_backend_has(operand, groups, preactivation):
    """Symmetric memory, and what the first forward saves for backward, byte for byte."""
    cfg = MoEConfig(
        hidden=64, ffn=72, num_experts=4, top_k=2, max_tokens_per_rank=70, dtype=torch.float16, combine_groups=groups
    )
    tile = Tile(rows=64, columns=128)
    tiles = {"gate_up": tile, "down": tile}
    schedule = Schedule(operand=operand, chunk_tokens=32, preactivation=preactivation, **tiles)
    for ranks in (1, 2):
        backend = host_backends(cfg, ranks, schedule)[0]
        plan = plan_memory(cfg, ranks, schedule=schedule)
        shared = {b.name: (b.shape, b.dtype) for b in plan.buffers if b.kind == "shared"}
        assert shared == {name: (tuple(v.shape), v.dtype) for name, v in backend.arena.views.items()}
        if ranks == 1:
            like = {"dtype": cfg.dtype}
            experts = ExpertWeights((torch.zeros(4, 144, 64, **like),), (torch.zeros(4, 64, 72, **like),), "stacked")
            inputs = Inputs(torch.zeros(70, 64, **like), random_ids(70, 2, 4, 0), torch.zeros(70, 2), experts)
            assert sum(t.nbytes for t in backend.forward(inputs, save=True)[1]) == plan.total_bytes("saved")


def test_a_report_says_what_is_made_again():
    cfg = make_config(num_experts=8, top_k=2, max_tokens=16)
    for received, preactivation, text in (
        ("saved", "saved", "kept for backward"), ("again", "recomputed", "dispatched again in backward"),
    ):  # fmt: skip
        found = host_backends(cfg, 1, Schedule(received=received, preactivation=preactivation))[0].report()
        assert found["received"] == text and found["gate and up"] == f"{preactivation} for backward"


def test_a_plan_that_the_gpu_never_makes():
    """The host does not wait for ever, nor take an earlier call's totals for this one's."""
    cfg = make_config(num_experts=8, top_k=2, max_tokens=16)
    planners = host_planners(cfg, 2, make_schedule())
    check(planners, [random_ids(16, 2, 8, seed=1)] * 2, cfg)
    planner = planners[0]
    planner.calls_made += 1  # as if a call had been launched behind work that does not end
    planner.member.timeout_s = -5.0  # `fits` allows five seconds more
    with pytest.raises(PeerTimeoutError, match="its plan was not ready"):
        planner.fits()
    assert planner.member.failures

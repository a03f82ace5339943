"""RoutingPlan: a hand-computed example, an oracle of plain loops, and the properties every plan has."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from uniep.config import ROW_ALIGN, MoEConfig
from uniep.routing import build_plan, find_bad_id, recv_base

FIELDS = (
    "counts_RE",
    "expert_start_e1",
    "send_count_R",
    "send_token_RT",
    "recv_count_R",
    "row_source_N",
    "row_return_N",
)


def make_config(num_experts: int, top_k: int, max_tokens: int) -> MoEConfig:
    return MoEConfig(hidden=64, ffn=64, num_experts=num_experts, top_k=top_k, max_tokens_per_rank=max_tokens)


def loops(ids_of_rank: list[list[list[int]]], rank: int, cfg: MoEConfig) -> dict[str, list]:
    """The plan by its definition, one slot at a time, with Python lists only."""
    ranks, top_k, most = len(ids_of_rank), cfg.top_k, cfg.max_tokens_per_rank
    block = math.ceil(most / 128) * 128  # receive slots per peer
    local = cfg.num_experts // ranks
    counts = [[0] * cfg.num_experts for _ in range(ranks)]
    rows_of_expert = [[] for _ in range(local)]  # (source, token, slot)
    travels = [[[] for _ in range(ranks)] for _ in range(ranks)]  # [from][to] -> tokens
    for source, ids in enumerate(ids_of_rank):
        for token, row in enumerate(ids):
            for slot, expert in enumerate(row):
                if expert == -1:
                    continue
                counts[source][expert] += 1
                owner = expert // local
                if owner == rank:
                    rows_of_expert[expert - rank * local].append((source, token, slot))
                if owner != source and token not in travels[source][owner]:
                    travels[source][owner].append(token)
    starts, source_of, returns = [0], [], []
    blocks = [peer for peer in range(ranks) if peer != rank]  # order of the blocks in the receive buffer
    for rows in rows_of_expert:
        for source, token, slot in rows:
            if source == rank:
                source_of.append(token)
            else:
                received = blocks.index(source) * block + travels[source][rank].index(token)
                source_of.append(-received - 1)
            returns.append((source * most + token) * top_k + slot)
        while len(source_of) % ROW_ALIGN:
            source_of.append(-len(blocks) * block - 1)
            returns.append(-1)
        starts.append(len(source_of))
    own = len(ids_of_rank[rank])
    return {
        "counts_RE": counts,
        "expert_start_e1": starts,
        "send_count_R": [len(tokens) for tokens in travels[rank]],
        "send_token_RT": [tokens + [-1] * (own - len(tokens)) for tokens in travels[rank]],
        "recv_count_R": [len(travels[peer][rank]) for peer in range(ranks)],
        "row_source_N": source_of,
        "row_return_N": returns,
    }


@st.composite
def routings(draw):
    """(ids per rank, cfg): ragged T with empty ranks, unused slots, repeats in a row, idle experts."""
    ranks, local = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    num_experts = ranks * local
    top_k = draw(st.integers(1, min(num_experts, 6)))
    tokens = [draw(st.integers(0, 7)) for _ in range(ranks)]
    expert = draw(st.sampled_from([st.integers(-1, num_experts - 1), st.integers(-1, 0), st.just(-1)]))
    ids = [[[draw(expert) for _ in range(top_k)] for _ in range(count)] for count in tokens]
    return ids, make_config(
        num_experts, top_k, max(*tokens, 1) + draw(st.integers(0, 3)) if ranks > 1 else max(tokens[0], 1)
    )


def plans_of(ids, cfg, dtype=torch.int64):
    tensors = [torch.tensor(rank_ids, dtype=dtype).reshape(-1, cfg.top_k) for rank_ids in ids]
    return [build_plan(tensors, rank, cfg) for rank in range(len(ids))]


def test_hand_computed():
    """R=2, E=4, K=2, at most 4 tokens per rank; expert 1 and rank 1's third token unused."""
    cfg = make_config(4, 2, 4)
    ids = [[[0, 2], [3, 2], [2, 2]], [[0, 0], [3, -1], [-1, -1], [2, 0]]]
    plan0, plan1 = plans_of(ids, cfg)
    assert plan0.counts_RE.tolist() == plan1.counts_RE.tolist() == [[1, 0, 4, 1], [3, 0, 1, 1]]

    # Rank 0: expert 0 gets (0,0,0) (1,0,0) (1,0,1) (1,3,1); rank 1 sends it tokens 0 and 3.
    # Rank 1's tokens may fill 128 receive slots (4, aligned); the zero row lies behind them.
    pad = -128 - 1
    assert plan0.expert_start_e1.tolist() == [0, 128, 128]
    assert plan0.row_source_N.tolist() == [0, -1, -1, -2] + [pad] * 124
    assert plan0.row_return_N.tolist() == [0, 8, 9, 15] + [-1] * 124
    assert plan0.send_count_R.tolist() == [0, 3]
    assert plan0.send_token_RT.tolist() == [[-1, -1, -1], [0, 1, 2]]
    assert plan0.recv_count_R.tolist() == [0, 2]

    # Rank 1: expert 2 gets (0,0,1) (0,1,1) (0,2,0) (0,2,1) (1,3,0); expert 3 gets (0,1,0) (1,1,0).
    assert plan1.expert_start_e1.tolist() == [0, 128, 256]
    assert plan1.row_source_N[:5].tolist() == [-1, -2, -3, -3, 3]
    assert plan1.row_return_N[:5].tolist() == [1, 3, 4, 5, 14]
    assert plan1.row_source_N[128:130].tolist() == [-2, 1]
    assert plan1.row_return_N[128:130].tolist() == [2, 10]
    assert plan1.send_token_RT.tolist() == [[0, 3, -1, -1], [-1] * 4]
    assert plan1.recv_count_R.tolist() == [3, 0]
    for plan, used in ((plan0, [range(4), ()]), (plan1, [range(5), range(128, 130)])):
        rows = {row for segment in used for row in segment}
        pads = [row for row in range(plan.num_rows) if row not in rows]
        assert plan.row_source_N[pads].unique().tolist() == [pad]
        assert plan.row_return_N[pads].unique().tolist() == [-1]


@settings(max_examples=150, deadline=None)
@given(routings())
def test_equals_the_loops(routing):
    ids, cfg = routing
    for rank, plan in enumerate(plans_of(ids, cfg)):
        expected = loops(ids, rank, cfg)
        for name in FIELDS:
            assert getattr(plan, name).tolist() == expected[name], f"rank {rank}: {name}"


@settings(max_examples=150, deadline=None)
@given(routings())
def test_properties(routing):
    ids, cfg = routing
    ranks, most, top_k = len(ids), cfg.max_tokens_per_rank, cfg.top_k
    local = cfg.num_experts // ranks
    plans = plans_of(ids, cfg)
    used = [(s, t, k) for s, rows in enumerate(ids) for t, row in enumerate(rows) for k, v in enumerate(row) if v >= 0]
    placed = []
    for rank, plan in enumerate(plans):
        assert all(t.dtype == torch.int32 for t in plan.tensors())
        assert torch.equal(plan.counts_RE, plans[0].counts_RE), "ranks agree on the counts"
        start = plan.expert_start_e1.tolist()
        assert start[0] == 0 and start[-1] == plan.num_rows and not any(s % ROW_ALIGN for s in start)
        for expert in range(local):
            rows = plan.row_return_N[start[expert] : start[expert + 1]].tolist()
            count = int(plan.counts_RE[:, rank * local + expert].sum())
            assert len(rows) - count < ROW_ALIGN, "no more pad rows than alignment needs"
            real = rows[:count]
            assert all(v == -1 for v in rows[count:]), "pad rows lie behind the real ones"
            # A larger return slot is a later (source, token, slot), so canonical order is ascending order.
            assert real == sorted(set(real)), "canonical order, each slot once"
            for row, value in enumerate(real, start[expert]):
                source, token, slot = value // (most * top_k), value // top_k % most, value % top_k
                assert ids[source][token][slot] == rank * local + expert
                origin = int(plan.row_source_N[row])
                if source == rank:
                    assert origin == token
                else:
                    place = -origin - 1 - recv_base(cfg, source, rank)
                    assert 0 <= place < int(plan.recv_count_R[source])
                    assert int(plans[source].send_token_RT[rank, place]) == token, "the slot holds this row's token"
                placed.append((source, token, slot))
        zero_row = -cfg.receive_slots(ranks) - 1
        assert bool((plan.row_source_N[plan.row_return_N < 0] == zero_row).all()), "pad rows read the zero row"
        for peer in range(ranks):
            count = int(plan.send_count_R[peer])
            sent = plan.send_token_RT[peer].tolist()
            assert sent[:count] == sorted(set(sent[:count])), "sorted, each token once"
            assert all(v == -1 for v in sent[count:])
            assert count == int(plans[peer].recv_count_R[rank]), "sender and receiver agree"
            assert count == 0 or peer != rank
    assert sorted(placed) == used, "every used slot has exactly one row on exactly one rank"


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64, torch.uint8])
def test_any_integer_dtype(dtype):
    ids, cfg = [[[0, 3]], [[2, 1], [1, 1]]], make_config(4, 2, 2)
    for plan, expected in zip(plans_of(ids, cfg, dtype), plans_of(ids, cfg), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plan.tensors(), expected.tensors(), strict=True))


def test_narrow_dtypes_do_not_wrap():
    """E=512 does not fit into 8 bits; ids that do are fine, and -1 is no limit of unsigned ones."""
    cfg = make_config(512, 2, 2)
    for dtype, value in ((torch.uint8, 255), (torch.int8, 127), (torch.int8, -1)):
        ids = [[[0, value]], [[value, 1]]]
        assert all(find_bad_id(torch.tensor(rows, dtype=dtype), 512) is None for rows in ids)
        for plan, expected in zip(plans_of(ids, cfg, dtype), plans_of(ids, cfg), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(plan.tensors(), expected.tensors(), strict=True))
    assert find_bad_id(torch.tensor([[200]], dtype=torch.uint8), 128) == (0, 0, 200)


@pytest.mark.parametrize("count", [1, 127, 128, 129, 256])
def test_segments_around_the_alignment(count):
    cfg = make_config(2, 1, 512)
    (plan,) = plans_of([[[0]] * count + [[1]]], cfg)
    aligned = -(-count // 128) * 128
    assert plan.expert_start_e1.tolist() == [0, aligned, aligned + 128]
    assert plan.row_return_N[count - 1] == count - 1 and plan.row_return_N[aligned] == count


def test_everything_on_one_expert_of_many():
    cfg = make_config(512, 4, 64)
    plans = plans_of([[[300] * 4] * 64, []], cfg)
    assert plans[0].num_rows == 0 and plans[0].send_count_R.tolist() == [0, 64]
    assert plans[1].num_rows == 256 and plans[1].recv_count_R.tolist() == [64, 0]
    assert int(plans[1].expert_start_e1[300 - 256]) == 0 and int(plans[1].expert_start_e1[300 - 255]) == 256


def test_tensors_round_trip():
    (plan,) = plans_of([[[0, 1]]], make_config(2, 2, 1))
    again = type(plan).from_tensors(plan.tensors())
    assert all(torch.equal(a, b) for a, b in zip(plan.tensors(), again.tensors(), strict=True))


@pytest.mark.parametrize("value", [-2, 4, 9, 2**31 - 1, -(2**31)])
def test_find_bad_id(value):
    ids = torch.tensor([[0, -1], [3, value], [value, 0]])
    assert find_bad_id(ids, 4) == (1, 1, value)
    assert find_bad_id(ids[:1], 4) is None
    assert find_bad_id(ids[:0], 4) is None

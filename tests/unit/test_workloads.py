"""Workload generators: pure, exact, and skewed as they say (field reports 24 and 90)."""

import pytest
import torch

import uniep
from uniep import workloads


def rank_counts(made, num_experts, ranks):
    return torch.bincount(made.ids_TK.flatten() // (num_experts // ranks), minlength=ranks).tolist()


def test_90_balanced_means_balanced():
    """90: E=256, K=8, 8 tokens: every one of 16 ranks gets 4; max - min <= 1 for every count and EP size."""
    made = workloads.workload("balanced", tokens=8, num_experts=256, top_k=8, shards=16)
    assert rank_counts(made, 256, 16) == [4] * 16
    for tokens in (0, 1, 3, 8, 31, 32, 200):
        for experts, top_k in ((256, 8), (60, 4), (8, 8), (6, 5), (384, 6)):
            made = workloads.workload("balanced", tokens=tokens, num_experts=experts, top_k=top_k, seed=tokens)
            for ranks in (r for r in range(1, experts + 1) if experts % r == 0):
                counts = rank_counts(made, experts, ranks)
                assert max(counts) - min(counts) <= 1, (tokens, experts, ranks)


@pytest.mark.parametrize("name", workloads.NAMES)
def test_24_90_workloads_are_pure_and_valid(name):
    """24, 90: a function of (name, seed, step); K distinct experts per row; each EP size splits the same rows."""
    for step in range(5):
        shape = {"tokens": 100, "num_experts": 64, "top_k": 6, "seed": 3, "step": step}
        made, again = workloads.workload(name, **shape), workloads.workload(name, **shape)
        assert torch.equal(made.ids_TK, again.ids_TK) and made.shard_tokens == again.shard_tokens
        assert all(len(set(row)) == 6 for row in made.ids_TK.tolist())
        assert int(made.ids_TK.min()) >= 0 and int(made.ids_TK.max()) < 64
        assert sum(made.shard_tokens) == len(made.ids_TK) == (13 if name == "burst" and step % 4 else 100)
        for ep_size in (1, 2, 4, 8):
            parts = made.split(ep_size)
            assert len(parts) == ep_size and torch.equal(torch.cat(parts), made.ids_TK)
    other = workloads.workload(name, **(shape | {"seed": 4}))
    assert other.ids_TK.shape != made.ids_TK.shape or not torch.equal(other.ids_TK, made.ids_TK)


def test_24_workloads_have_the_shape_they_name():
    """24: where the load goes."""

    def load(name, step=0, seed=0):
        made = workloads.workload(name, tokens=2000, num_experts=64, top_k=4, seed=seed, step=step)
        return torch.bincount(made.ids_TK.flatten(), minlength=64), made

    assert load("balanced")[0].unique().tolist() == [125]
    hot = load("hot_experts")[0]
    assert (hot > 4 * hot.median()).sum() == 4
    assert torch.equal(hot > 500, load("hot_experts", step=1)[0] > 500), "the hot experts stay"
    per_rank = load("hot_rank")[0].view(8, 8).sum(1)
    assert per_rank.argmax() == 0 and per_rank[0] > 0.5 * per_rank.sum()
    spread = load("hot_spread")[0].view(8, 8).sum(1)
    assert spread.max() < 1.2 * spread.min()
    assert [int(load("moving", step=s)[0].view(8, 8).sum(1).argmax()) for s in range(9)] == [0, 1, 2, 3, 4, 5, 6, 7, 0]
    assert not load("zero_experts")[0][32:].any() and load("zero_experts")[0][:32].all()
    sizes = load("ragged")[1].shard_tokens
    assert min(sizes) == 0 and max(sizes) > 900 and sum(sizes) == 2000


def test_24_workloads_refuse_what_cannot_be():
    """24: unknown names and impossible shapes are named."""
    shape = {"tokens": 4, "num_experts": 8, "top_k": 2}
    with pytest.raises(uniep.ConfigError, match=r"'skewed'.*balanced"):
        workloads.workload("skewed", **shape)
    with pytest.raises(uniep.ConfigError, match="top_k=9"):
        workloads.workload("balanced", **(shape | {"top_k": 9}))
    with pytest.raises(uniep.ConfigError, match=r"ep_size=3.*8 shards"):
        workloads.workload("balanced", **shape).split(3)

"""Expert parameters in each layout a framework uses, recognised by shape, never copied."""

import dataclasses

import pytest
import torch

from uniep.config import MoEConfig
from uniep.errors import ConfigError, DTypeError
from uniep.weights import ExpertWeights

E, F, D = 4, 3, 5
CFG = MoEConfig(hidden=D, ffn=F, num_experts=8, top_k=2, max_tokens_per_rank=4, dtype=torch.float32)
W13 = torch.arange(E * 2 * F * D, dtype=torch.float32).view(E, 2 * F, D)
W2 = torch.arange(E * D * F, dtype=torch.float32).view(E, D, F)

INTERLEAVED = torch.stack([W13[:, :F], W13[:, F:]], 2).flatten(1, 2)

LAYOUTS = {
    "stacked": (W13, W2),
    "four dimensions": (W13.view(E, 2, F, D), W2),
    "split": ((W13[:, :F].clone(), W13[:, F:].clone()), W2),
    "interleaved rows": ((INTERLEAVED[:, 0::2], INTERLEAVED[:, 1::2]), W2),
    "lists": (list(W13.clone()), list(W2.clone())),
    "list and stacked": (list(W13.clone()), W2),
    "split and list": ((W13[:, :F].clone(), W13[:, F:].clone()), list(W2.clone())),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_same_halves_in_each_layout(name):
    w13, w2 = LAYOUTS[name]
    parsed = ExpertWeights.parse(w13, w2, CFG, ep_size=2)
    for expert in range(E):
        gate, up = parsed.halves(expert)
        assert torch.equal(gate, W13[expert, :F]) and torch.equal(up, W13[expert, F:])
        assert torch.equal(parsed.down(expert), W2[expert])


@pytest.mark.parametrize("name", LAYOUTS)
def test_views_share_memory(name):
    w13, w2 = LAYOUTS[name]
    parsed = ExpertWeights.parse(w13, w2, CFG, ep_size=2)
    storages = {t.untyped_storage().data_ptr() for t in (*parsed.w13, *parsed.w2)}
    for expert in range(E):
        for view in (*parsed.halves(expert), parsed.down(expert)):
            assert view.untyped_storage().data_ptr() in storages


@pytest.mark.parametrize("name", LAYOUTS)
def test_like_has_the_same_layout(name):
    w13, w2 = LAYOUTS[name]
    parsed = ExpertWeights.parse(w13, w2, CFG, ep_size=2)
    zeros = parsed.like(fill=True)
    for old, new in zip((*parsed.w13, *parsed.w2), (*zeros.w13, *zeros.w2), strict=True):
        assert new.shape == old.shape and new.dtype == old.dtype and not new.any()
        assert new.data_ptr() != old.data_ptr() and new.is_contiguous()
    assert zeros.layout == parsed.layout
    assert parsed.like().w13[0].shape == parsed.w13[0].shape


def test_a_single_expert_as_list_is_a_list():
    cfg = MoEConfig(hidden=D, ffn=F, num_experts=1, top_k=1, max_tokens_per_rank=4, dtype=torch.float32)
    parsed = ExpertWeights.parse([W13[0].clone()], [W2[0].clone()], cfg, ep_size=1)
    assert parsed.layout == "list" and torch.equal(parsed.halves(0)[1], W13[0, F:])


def test_two_experts_of_two_rows_are_not_a_pair():
    """(w1, w3) of (e, F, D) and a list of e tensors differ in their number of dimensions."""
    cfg = MoEConfig(hidden=D, ffn=F, num_experts=2, top_k=1, max_tokens_per_rank=4, dtype=torch.float32)
    assert ExpertWeights.parse(list(W13[:2].clone()), W2[:2], cfg, 1).layout == "list"
    assert ExpertWeights.parse((W13[:2, :F], W13[:2, F:]), W2[:2], cfg, 1).layout == "split"


B13, B2 = (
    torch.arange(E * 2 * F, dtype=torch.float32).view(E, 2 * F),
    torch.arange(E * D, dtype=torch.float32).view(E, D),
)
BIASED, PLAIN = (dataclasses.replace(CFG, **how) for how in ({"bias": True}, {"activation": "relu2"}))


def test_biases_lie_as_the_rows_do():
    parsed = ExpertWeights.parse(W13, W2, BIASED, 2, B13, B2)
    gate, up = parsed.half_biases(1)
    assert torch.equal(gate, B13[1, :F]) and torch.equal(up, B13[1, F:])
    assert parsed.biases == (B13, B2) and ExpertWeights.parse(W13, W2, CFG, 2).biases == ()


def test_without_a_gate_there_is_one_half():
    for w13 in (W13[:, :F], list(W13[:, :F].clone())):
        (half,) = ExpertWeights.parse(w13, W2, PLAIN, 2).halves(2)
        assert torch.equal(half, W13[2, :F])
    for w13 in (W13, (W13[:, :F], W13[:, F:])):
        with pytest.raises(ConfigError, match=r"activation 'relu2' it must be \[4, 3, 5\], or 4 tensors of \[3, 5\]"):
            ExpertWeights.parse(w13, W2, PLAIN, 2)


@pytest.mark.parametrize(
    ("cfg", "b13", "b2", "text"),
    [
        (BIASED, None, B2, r"b13 is None but MoEConfig.bias is True; pass b13 \[4, 6\]"),
        (BIASED, B13, None, r"b2 is None but MoEConfig.bias is True; pass b2 \[4, 5\]"),
        (CFG, B13, B2, r"b13 is a tensor of shape \(4, 6\) but MoEConfig.bias is False; set MoEConfig\(bias=True\)"),
        (BIASED, B13[:, :F], B2, r"b13 has shape \(4, 3\); it must be \[4, 6\]"),
        (BIASED, B13, B2[:3], r"b2 has shape \(3, 5\); it must be \[4, 5\]"),
        (BIASED, B13, B2.half(), r"b2 has dtype torch.float16 but the layer computes in torch.float32"),
    ],
)
def test_wrong_biases(cfg, b13, b2, text):
    with pytest.raises(ConfigError if "dtype" not in text else DTypeError, match=text):
        ExpertWeights.parse(W13, W2, cfg, 2, b13, b2)


@pytest.mark.parametrize(
    ("w13", "w2", "text"),
    [
        (W13[:3], W2, r"\(3, 6, 5\).*4 local experts.*num_experts=8 over 2 ranks"),
        (W13.transpose(1, 2), W2, r"\(4, 5, 6\).*\[4, 6, 5\]"),
        ((W13[:, :F],), W2, r"\(4, 3, 5\)"),
        (list(W13[:3]), W2, r"4 tensors of \[6, 5\]"),
        (W13, W2.transpose(1, 2), r"w2 has shape \(4, 3, 5\).*\[4, 5, 3\]"),
        (W13, list(W2[:2]), r"w2 has shape.*4 tensors of \[5, 3\]"),
    ],
)
def test_wrong_shapes_name_both(w13, w2, text):
    with pytest.raises(ConfigError, match=text):
        ExpertWeights.parse(w13, w2, CFG, ep_size=2)


@pytest.mark.parametrize(("w13", "w2", "name"), [(W13.half(), W2, "w13"), (W13, W2.bfloat16(), "w2")])
def test_wrong_dtype_names_both(w13, w2, name):
    with pytest.raises(
        DTypeError, match=rf"{name} has dtype torch\.(float16|bfloat16).*computes in torch\.float32"
    ) as caught:
        ExpertWeights.parse(w13, w2, CFG, ep_size=2)
    assert isinstance(caught.value, TypeError)

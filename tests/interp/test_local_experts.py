"""The collective backend on the Hopper kernels, interpreted: the bits of the hopper backend, of either schedule."""

import dataclasses

import hopper_on_host
import pytest
import torch

import uniep
from uniep.backends.base import Inputs, MainGrads, Needs
from uniep.backends.collective.backend import CollectiveBackend
from uniep.backends.collective.local_experts import KernelExperts, Routed, Tokens, TorchExperts
from uniep.numerics import fixed_settings
from uniep.routing import build_plan
from uniep.way import resolve
from uniep.weights import ExpertWeights

TILE = uniep.Tile(rows=64, columns=64, depth=32)
SERIAL = uniep.Schedule(
    overlap="serial", tile_order="natural", gate_up=uniep.Tile(rows=64, columns=128, depth=32), down=TILE,
    weight_gradient=TILE,
)  # fmt: skip


def config(**changes):
    small = {"hidden": 64, "ffn": 72, "num_experts": 4, "top_k": 2, "max_tokens_per_rank": 160, "dtype": torch.float16}
    return uniep.MoEConfig(**(small | changes))


def way_of(cfg):
    return resolve(cfg, 1, 0, SERIAL, backend="nccl")


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def experts_of(cfg, local, layout):
    w13 = (random(local, 2 * cfg.ffn, cfg.hidden, seed=1) * cfg.hidden**-0.5).to(cfg.dtype)
    w2 = (random(local, cfg.hidden, cfg.ffn, seed=2) * cfg.ffn**-0.5).to(cfg.dtype)
    if layout == "split":
        both = w13.view(local, 2, cfg.ffn, -1).transpose(0, 1).contiguous()  # a tensor map's stride joins them
        return ExpertWeights((both[0], both[1]), (w2,), layout)
    if layout == "split, two strides":
        return ExpertWeights((w13[:, : cfg.ffn].clone(), w13[:, cfg.ffn :]), (w2,), "split")
    if layout == "list":
        return ExpertWeights(tuple(w.clone() for w in w13), tuple(w.clone() for w in w2), layout)
    return ExpertWeights((w13,), (w2,), layout)


@pytest.mark.parametrize(
    ("weight_at", "groups", "activation"),
    [("output", None, "swiglu"), ("activation", 2, "geglu_tanh")],
)
def test_bits_of_the_hopper_backend(weight_at, groups, activation):
    """y and all gradients at EP=1."""
    cfg = config(weight_at=weight_at, combine_groups=groups, activation=activation)
    ids = torch.randint(-1, 3, (90, 2), generator=torch.Generator().manual_seed(3))  # expert 3 is idle
    x, dy, weights = random(90, 64).half(), random(90, 64, seed=4).half(), random(90, 2, seed=5).abs()
    inputs = Inputs(x, ids, weights, experts_of(cfg, 4, "stacked"))
    with uniep.Workspace(cfg, device="cpu", backend="nccl", schedule=SERIAL) as ws:
        ours = ws.backend
        assert isinstance(ours, CollectiveBackend)
        ours.experts = KernelExperts(cfg, 0, way_of(cfg), torch.device("cpu"))
        (theirs,) = hopper_on_host.host_backends(cfg, 1, SERIAL)
        results = []
        for backend in (ours, theirs):
            y, saved = backend.forward(inputs, save=True)
            grads = backend.backward(dy, inputs, saved, Needs())
            main_grads = MainGrads(*(tuple(torch.ones(t.shape) for t in ts) for ts in (grads.w13, grads.w2)), True)
            backend.backward(dy, inputs, saved, Needs(), main_grads)
            results.append((y, grads.x, grads.weights, *grads.w13, *grads.w2, *main_grads.w13, *main_grads.w2))
    for name, a, b in zip(("y", "dx", "dweights", "dw13", "dw2", "main13", "main2"), *results, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b.view(a.shape)), name


@pytest.mark.parametrize("layout", ["stacked", "list"])
@pytest.mark.parametrize("kind", [TorchExperts, KernelExperts])
def test_recomputed(kind, layout):
    """A backward without h has the bits of one with it; with biases, of tokens of another rank, too."""
    cfg = config(bias=True, activation="geglu" if layout == "list" else "swiglu")
    ids = [torch.randint(-1, 4, (count, 2), generator=torch.Generator().manual_seed(count)) for count in (70, 33)]
    plans = [build_plan(ids, r, cfg) for r in (0, 1)]
    sent = plans[0].send_token_RT[1, : plans[0].send_count_R[1]]
    x, dy = ([random(len(i), 64, seed=seed + n).half() for n, i in enumerate(ids)] for seed in (10, 20))
    x, dy = (Tokens(t[1], torch.cat([t[0][sent], torch.zeros(1, 64).half()])) for t in (x, dy))
    routed = Routed(plans[1], torch.where(plans[1].row_return_N >= 0, 0.5, 0.0))
    b13, b2 = (random(2, width, seed=width).half() for width in (cfg.h_columns, cfg.hidden))
    experts = dataclasses.replace(experts_of(cfg, 2, layout), b13=b13, b2=b2)
    local = kind(cfg, 1, way_of(cfg), *([torch.device("cpu")] if kind is KernelExperts else []))
    with fixed_settings():
        h = local.forward(x, routed, experts, True)[1]
        both = [local.backward(dy, x, routed, experts, given, Needs()) for given in (h, None)]
    used = plans[1].row_return_N >= 0
    first, second = ((g.x_ND[used], g.weights_N[used], *g.w13, *g.w2, *g.biases) for g in both)
    assert all(map(torch.equal, first, second)) and all(t.any() for t in first)


def written(local, dy, x, routed, experts, h, accumulate):
    """main_grads, of ones before, after a backward."""
    main_grads = MainGrads(*(tuple(torch.ones(t.shape) for t in ts) for ts in (experts.w13, experts.w2)), accumulate)
    local.backward(dy, x, routed, experts, h, Needs(), main_grads)
    return *main_grads.w13, *main_grads.w2


@pytest.mark.parametrize(("rank", "layout"), [(0, "stacked"), (1, "split"), (1, "split, two strides"), (0, "list")])
def test_kernels_mean_what_torch_does(rank, layout):
    """One rank of two, rows from both: kernels and torch agree to rounding, in every parameter layout."""
    cfg = config(weight_at="activation" if rank else "output", activation="geglu" if rank else "swiglu")
    g = torch.Generator().manual_seed(3)
    ids = [torch.randint(-1, 3, (count, 2), generator=g) for count in (70, 33)]
    plans = [build_plan(ids, r, cfg) for r in (0, 1)]
    plan, other = plans[rank], 1 - rank
    used = plan.row_return_N >= 0
    weight = torch.where(used, random(plan.num_rows).abs(), 0.0)

    def tokens(seed):
        x = [random(len(i), 64, seed=seed + n).half() for n, i in enumerate(ids)]
        sent = plans[other].send_token_RT[rank, : plans[other].send_count_R[rank]]
        return Tokens(x[rank], torch.cat([x[other][sent], torch.zeros(1, 64).half()]))

    x, dy, experts, routed = tokens(10), tokens(20), experts_of(cfg, 2, layout), Routed(plan, weight)
    found = []
    with fixed_settings():
        h = TorchExperts(cfg, rank, way_of(cfg)).forward(x, routed, experts, True)[1]
        for local in (TorchExperts(cfg, rank, way_of(cfg)), KernelExperts(cfg, rank, way_of(cfg), torch.device("cpu"))):
            y, own_h = local.forward(x, routed, experts, True)
            if isinstance(local, KernelExperts):  # which keep gate and up apart
                own_h = own_h.view(2, -1, cfg.ffn).transpose(0, 1).reshape(h.shape)
                h = h.view(-1, 2, cfg.ffn).transpose(0, 1).reshape(h.shape)
            got = local.backward(dy, x, routed, experts, h, Needs())
            found.append((y[used], own_h, got.x_ND[used], got.weights_N[used], *got.w13, *got.w2))
            finished = written(local, dy, x, routed, experts, h, False)
            for a, b, grad in zip(
                finished, written(local, dy, x, routed, experts, h, True), found[-1][4:], strict=True
            ):
                assert torch.equal(a.half(), grad) and torch.equal(b, 1 + a)
    for a, b in zip(*found, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert (a.float() - b.float()).norm() <= 1e-3 * a.float().norm()


@pytest.mark.parametrize("layout", ["stacked", "list"])
@pytest.mark.parametrize("kind", [TorchExperts, KernelExperts])
def test_blocks_of_source_ranks(kind, layout):
    """Rank 1 of two with rows from both: the gradient of each source has the bits of a call without the other."""
    cfg = config(bias=layout == "stacked")
    ids = [torch.randint(-1, 4, (count, 2), generator=torch.Generator().manual_seed(count)) for count in (70, 33)]
    experts = experts_of(cfg, 2, layout)
    if cfg.bias:
        b13, b2 = (random(2, width, seed=width).half() for width in (cfg.h_columns, cfg.hidden))
        experts = dataclasses.replace(experts, b13=b13, b2=b2)
    of_experts = experts.w13, experts.w2, experts.biases
    local = kind(cfg, 1, way_of(cfg), *([torch.device("cpu")] if kind is KernelExperts else []))

    def gradients(ids, blocks=1, apart=False):
        plans = [build_plan(ids, r, cfg) for r in (0, 1)]
        x, dy = ([random(len(i), 64, seed=seed + n).half() for n, i in enumerate(ids)] for seed in (10, 20))
        sent = plans[0].send_token_RT[1, : plans[0].send_count_R[1]]
        x, dy = (Tokens(t[1], torch.cat([t[0][sent], torch.zeros(1, 64).half()])) for t in (x, dy))
        routed = Routed(plans[1], torch.where(plans[1].row_return_N >= 0, 0.5, 0.0))
        h = local.forward(x, routed, experts, True)[1]
        shape = (2,) if apart else ()
        w13, w2, biases = (tuple(torch.full((*shape, *t.shape), torch.nan) for t in ts) for ts in of_experts)
        into = MainGrads(w13, w2, False, apart, biases)
        assert local.backward(dy, x, routed, experts, h, Needs(), into, blocks).biases == ()
        return into.tensors

    with fixed_settings():
        none = [torch.full_like(i, -1) for i in ids]
        alone = [gradients([ids[0], none[1]]), gradients([none[0], ids[1]])]
        apart, added = gradients(ids, blocks=2, apart=True), gradients(ids, blocks=2)
    for first, second, both, total in zip(*alone, apart, added, strict=True):
        assert first.any() and torch.equal(both, torch.stack([first, second])) and torch.equal(total, first + second)


@pytest.mark.parametrize("save", [False, True])
def test_no_rows(save):
    """A rank to which no token goes, in a forward that keeps something for backward, too."""
    cfg = config()
    plan = build_plan([torch.zeros(0, 2, dtype=torch.int64)] * 2, 0, cfg)
    none = Tokens(random(0, 64).half(), torch.zeros(1, 64).half())
    out_ND, h = KernelExperts(cfg, 0, way_of(cfg), torch.device("cpu")).forward(
        none, Routed(plan, torch.zeros(plan.num_rows)), experts_of(cfg, 2, "stacked"), save
    )
    assert out_ND.shape == (0, 64) and (h is None) != save
    assert h is None or h.shape == (0, 2 * cfg.ffn)

"""Biases of experts: who needs which gradients, main_grad, compilers, and errors that every rank raises.

Their bits are in test_bits.py.
"""

import dataclasses

import case
import pytest
import torch
from case import config, equal_bits, random_batch

import uniep

BACKENDS = pytest.mark.parametrize("backend", ["cpu", "nccl"])
TOKENS = (20, 9, 0, 35)
NAMES = ("x", "weights", "w13", "w2", "b13", "b2")


def workspace(world, cfg, backend):
    return uniep.Workspace(cfg, world.group(2), device="cpu", backend=backend, timeout_s=case.TIMEOUT_S)


def leaves_of(ws, batch, wanted=NAMES):
    """This rank's inputs by name; those of `wanted` need a gradient."""
    rows, experts = batch.rows(ws.rank, 2), batch.experts(ws.rank, 2)
    parts = [batch.x[rows], batch.weights[rows], *(t[experts] for t in (batch.w13, batch.w2, *batch.biases))]
    return {name: t.clone().requires_grad_(name in wanted) for name, t in zip(NAMES, parts, strict=True)}


def call(ws, batch, leaves, **options):
    x, weights, w13, w2, b13, b2 = leaves.values()
    rows = batch.rows(ws.rank, 2)
    y = uniep.moe(x, batch.ids[rows], weights, w13, w2, workspace=ws, b13=b13, b2=b2, **options)
    return y, batch.dy[rows]


def gradients(ws, batch, leaves, **options):
    y, dy = call(ws, batch, leaves, **options)
    y.backward(dy)
    return {name: t.grad for name, t in leaves.items()}


def each_need(world, cfg, batch, backend):
    needs = [(("b13",), ("b2",)), (("b2", "x"), ("b13", "w13")), (("weights",), ("w2", "b13")), (("w13",), NAMES)]
    with workspace(world, cfg, backend) as ws:
        whole = gradients(ws, batch, leaves_of(ws, batch))
        for of_rank in needs:
            wanted = of_rank[ws.rank]
            for name, got in gradients(ws, batch, leaves_of(ws, batch, wanted)).items():
                assert (got is not None) == (name in wanted), name
                if got is not None:
                    equal_bits(got, whole[name], f"{wanted}: {name}")
    return True


@BACKENDS
def test_gradients_that_some_ranks_need(pool, backend):
    """Frozen weights beside trained biases, and the other way round, on one rank or all: the usual bits."""
    cfg = config(dtype=torch.bfloat16, bias=True)
    assert all(pool.run(each_need, cfg, random_batch(cfg, TOKENS), backend, ranks=2))


def with_main_grad(world, cfg, batch, backend):
    with workspace(world, cfg, backend) as ws:
        plain, into = leaves_of(ws, batch), leaves_of(ws, batch)
        for name in ("w13", "w2"):
            into[name].main_grad = torch.full(into[name].shape, case.POISON)
        want, got = gradients(ws, batch, plain), gradients(ws, batch, into, main_grad="overwrite")
        for name in ("x", "weights", "b13", "b2"):
            equal_bits(got[name], want[name], name)
            assert got[name].any()
        for name in ("w13", "w2"):
            equal_bits(into[name].main_grad.to(cfg.dtype), want[name], name)
            assert into[name].grad_added_to_main_grad and not got[name].any()
    return True


@BACKENDS
def test_main_grad(pool, backend):
    """Gradients of weights go there, those of biases come as ever."""
    cfg = config(dtype=torch.bfloat16, bias=True, weight_at="activation")
    assert all(pool.run(with_main_grad, cfg, random_batch(cfg, TOKENS), backend, ranks=2))


WRONG = {
    "none": ({"b2": None}, "ConfigError", "rank 1: b2 is None but MoEConfig.bias is True; pass b2"),
    "both none": ({"b13": None, "b2": None}, "ConfigError", "rank 1: b13 is None but MoEConfig.bias is True"),
    "shape": ({"b13": torch.zeros(4, 64)}, "ConfigError", "rank 1: b13 has shape (4, 64); it must be [4, 128]"),
    "dtype": ({"b2": torch.zeros(4, 64).half()}, "DTypeError", "rank 1: b2 has dtype torch.float16"),
    "device": ({"b2": torch.zeros(4, 64, device="meta")}, "ConfigError", "rank 1: b2 is on meta but the Workspace"),
}


def wrong_on_one_rank(world, cfg, batch, backend, how):
    with workspace(world, cfg, backend) as ws:
        leaves = leaves_of(ws, batch)
        error = case.named_error(call, ws, batch, leaves | (WRONG[how][0] if ws.rank == 1 else {}))
        return error, bool(call(ws, batch, leaves)[0].isfinite().all())


@BACKENDS
@pytest.mark.parametrize("how", WRONG)
def test_wrong_biases(pool, backend, how):
    """Every rank raises the same, naming rank, bias, value and limit; the Workspace works on."""
    _, kind, text = WRONG[how]
    cfg = config(bias=True)
    for error, works in pool.run(wrong_on_one_rank, cfg, random_batch(cfg, (5, 5, 5, 5)), backend, how, ranks=2):
        assert error is not None and error[0] == kind and text in error[1] and works, error


def configured_otherwise(world):
    return case.named_error(workspace, world, config(bias=world.rank == 0), "cpu")


def test_ranks_with_and_without(pool):
    """They find out when they make the Workspace."""
    for error in pool.run(configured_otherwise, ranks=2):
        assert error is not None and "bias" in error[1], error


def module_steps(world, cfg, dtype):
    found = []
    for ep in (1, 2):
        if world.rank >= ep:
            continue
        with uniep.Workspace(cfg, world.group(ep), device="cpu", timeout_s=case.TIMEOUT_S) as ws:
            layer = uniep.nn.MoE(cfg, workspace=ws, seed=0)
            experts = slice(layer.experts.first_expert, layer.experts.first_expert + layer.experts.num_local)
            assert not layer.experts.b13.any() and not layer.experts.b2.any()
            g = torch.Generator().manual_seed(3)
            with torch.no_grad():
                for bias in (layer.experts.b13, layer.experts.b2):
                    bias.copy_(torch.randn(cfg.num_experts, bias.shape[1], generator=g)[experts])
            x = torch.randn(40, cfg.hidden, generator=g).to(dtype)
            mine = slice(world.rank * 40 // ep, (world.rank + 1) * 40 // ep)
            layer(x[mine]).square().sum().backward()
            found.append([layer.experts.b13.grad, layer.experts.b2.grad, layer.experts.w13.grad])
    return found


@pytest.mark.parametrize("activation", ["swiglu_oai", "relu2"])
def test_modules(pool, activation):
    """Parameters of an `Experts`: zeros at first; gradients with the same bits at EP 1 and 2."""
    cfg = config(dtype=torch.bfloat16, bias=True, activation=activation)
    (alone, first), (second,) = pool.run(module_steps, cfg, torch.bfloat16, ranks=2)
    for number, whole in enumerate(alone):
        equal_bits(torch.cat([first[number], second[number]]), whole, f"parameter {number}")
        assert whole.any()


def test_compiled():
    """The operators, traced: the bits of eager calls."""
    cfg = config(bias=True, max_tokens_per_rank=64)
    batch = random_batch(cfg, (30, 0, 0, 0))
    with uniep.Workspace(cfg, device="cpu") as ws:

        def step(x, weights, w13, w2, b13, b2):
            return uniep.moe(x, batch.ids, weights, w13, w2, workspace=ws, b13=b13, b2=b2)

        inputs = [batch.x, batch.weights, batch.w13, batch.w2, *batch.biases]
        results = []
        for run in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
            leaves = [case.leaf(t) for t in inputs]
            y = run(*leaves)
            y.backward(batch.dy)
            results.append([y.detach(), *(t.grad for t in leaves)])
        for number, (a, b) in enumerate(zip(*results, strict=True)):
            equal_bits(a, b, f"tensor {number}")


def test_pad_rows_are_not_seen(pool):
    """Biases make activations of the rows that fill a segment up; neither dW nor db nor d(weight) has them."""
    cfg = config(bias=True, activation="relu2", dtype=torch.float32)
    batch = random_batch(cfg, (1, 0, 0, 2))  # one row, or none, of the 128 of a segment
    batch = dataclasses.replace(batch, biases=tuple(b * 1e15 for b in batch.biases))
    got = case.oracle(pool, cfg, batch)
    unused = [e for e in range(cfg.num_experts) if not (batch.ids == e).any()]
    assert unused and not got.dw2[unused].any() and not got.db2[unused].any()
    assert got.dw2.isfinite().all() and got.db13.isfinite().all() and got.db2.isfinite().all()

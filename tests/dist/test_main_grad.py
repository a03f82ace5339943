"""Expert gradients in fp32 main_grads (52, 54): finished gradients added or written, never rounded.

The `finished` gradient of a step is what "overwrite" leaves; one rounding makes it the usual gradient, and what
"accumulate" leaves is the sum of finished gradients in the order of the backwards, bit for bit.
"""

import dataclasses
import re

import case
import pytest
import test_bits
import torch
from case import config, equal_bits, exact_batch, random_batch
from torch.utils.checkpoint import checkpoint

import uniep

BACKENDS = pytest.mark.parametrize("backend", ["cpu", "nccl"])
TOKENS = ((20, 9, 0, 35), (0, 50, 1, 2))


def workspace(world, cfg, ep_size, backend):
    return uniep.Workspace(cfg, world.group(ep_size), device="cpu", backend=backend, timeout_s=case.TIMEOUT_S)


class Parameters:
    """Leaves of one layout, with main_grads full of `value`, and how often their hooks ran."""

    def __init__(self, ws, batch, layout="stacked", value=0.0, dtype=None):
        experts = batch.experts(ws.rank, ws.ep_size)
        parts = test_bits.in_layout(batch.w13[experts], batch.w2[experts], layout)
        w13, w2 = ([case.leaf(t.to(dtype or t.dtype)) for t in ts] for ts in parts)
        self.all, self.hooks = [*w13, *w2], 0
        self.arguments = [ts if layout == "lists" or len(ts) > 1 else ts[0] for ts in (w13, w2)]
        for t in self.all:
            t.main_grad = torch.full(t.shape, value)
            t.register_post_accumulate_grad_hook(self._hook)

    def _hook(self, parameter):
        self.hooks += 1

    @property
    def main_grads(self):
        return [t.main_grad.clone() for t in self.all]


def forward(ws, batch, parameters, main_grad, layer=uniep.moe):
    """(y, x, weights) of this rank."""
    rows = batch.rows(ws.rank, ws.ep_size)
    x, weights = case.leaf(batch.x[rows]), case.leaf(batch.weights[rows])
    return layer(x, batch.ids[rows], weights, *parameters.arguments, workspace=ws, main_grad=main_grad), x, weights


def step(ws, batch, parameters, main_grad, layer=uniep.moe):
    """[y, dx, dweights] of this rank."""
    y, x, weights = forward(ws, batch, parameters, main_grad, layer)
    y.backward(batch.dy[batch.rows(ws.rank, ws.ep_size)])
    return [y.detach(), x.grad, weights.grad]


def same(got, want, what):
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        equal_bits(a, b, f"{what}, tensor {number}")


def finished_of(ws, batch, **how):
    """The fp32 gradients of one step, out of main_grads that were NaN."""
    parameters = Parameters(ws, batch, value=case.POISON, **how)
    step(ws, batch, parameters, "overwrite")
    return parameters.main_grads


def each_layout(world, cfg, batches, ep_size, backend):
    with workspace(world, cfg, ep_size, backend) as ws:
        for layout in test_bits.LAYOUTS:
            finished = []
            for batch in batches:
                plain, into = Parameters(ws, batch, layout), Parameters(ws, batch, layout, case.POISON)
                same(step(ws, batch, into, "overwrite"), step(ws, batch, plain, None), f"{layout}: y, dx, dweights")
                same([t.to(cfg.dtype) for t in into.main_grads], [t.grad for t in plain.all], layout)
                assert not any(hasattr(t, "grad_added_to_main_grad") for t in plain.all)
                finished.append(into.main_grads)
            assert cfg.dtype == torch.float32 or any((t != t.to(cfg.dtype)).any() for t in finished[0]), "rounded"
            parameters = Parameters(ws, batches[0], layout, value=0.3)
            outputs = [forward(ws, batch, parameters, "accumulate")[0] for batch in batches]
            for y, batch in zip(outputs, batches, strict=True):  # main_grads change between a forward and its backward
                y.backward(batch.dy[batch.rows(ws.rank, ep_size)])
            want = [(torch.full(a.shape, 0.3) + a) + b for a, b in zip(*finished, strict=True)]
            same(parameters.main_grads, want, f"{layout}: accumulated")
            assert parameters.hooks == 2 * len(parameters.all)
            for t in parameters.all:
                assert t.grad_added_to_main_grad is True
                assert t.grad.shape == t.shape and t.grad.dtype == t.dtype and not t.grad.any()
        return True


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_accumulated_and_overwritten(pool, dtype, backend):
    """Every layout, two micro-batches, idle experts and ranks: bits, dummy gradients, the flag, hooks once each."""
    cfg = config(ffn=72, dtype=dtype)
    ids = torch.randint(0, 3, (64, 2), generator=torch.Generator().manual_seed(0)) * 2  # experts 1, 3, 5, 6, 7 are idle
    batches = [random_batch(cfg, TOKENS[0], ids=ids), random_batch(cfg, TOKENS[1], seed=1)]
    batches[1] = dataclasses.replace(batches[1], w13=batches[0].w13, w2=batches[0].w2)
    assert all(pool.run(each_layout, cfg, batches, 2, backend, ranks=2))


def micro_batches(world, cfg, batches, backend, main_grad):
    with workspace(world, cfg, 2, backend) as ws:
        parameters = Parameters(ws, batches[0])
        for batch in batches:
            step(ws, batch, parameters, main_grad)
        w2 = parameters.all[1]
        return (w2.main_grad if main_grad else w2.grad)[0, 0, 0].item()


@BACKENDS
def test_52_small_updates_are_not_lost(pool, backend):
    """52: dW2 of 256, then of 1: 257 in main_grad, 1 if overwritten; 256 in a bf16 .grad."""
    cfg = config(dtype=torch.bfloat16, top_k=1)
    batches = []
    for value in (256.0, 1.0):
        dy = torch.zeros(4, cfg.hidden)
        dy[0, 0] = value
        ids = torch.tensor([[0], [1], [4], [5]])
        batches.append(exact_batch(cfg, (1, 1, 1, 1), ids, torch.ones(4, 1), torch.ones(8), dy))
    for main_grad, want in (("accumulate", 257.0), ("overwrite", 1.0), (None, 256.0)):
        assert pool.run(micro_batches, cfg, batches, backend, main_grad, ranks=2)[0] == want


def frozen(world, cfg, batch, backend):
    with workspace(world, cfg, 2, backend) as ws:
        for layout, still in (("stacked", (0,)), ("stacked", (1,)), ("stacked", (0, 1)), ("lists", (1, 2, 6))):
            whole, parameters = Parameters(ws, batch, layout), Parameters(ws, batch, layout)
            for number in still:
                parameters.all[number].requires_grad_(False)
                del parameters.all[number].main_grad
            same(step(ws, batch, parameters, "accumulate"), step(ws, batch, whole, "overwrite"), "y, dx, dweights")
            assert parameters.hooks == len(parameters.all) - len(still)
            for number, (t, full) in enumerate(zip(parameters.all, whole.all, strict=True)):
                if number in still:
                    assert t.grad is None and not hasattr(t, "grad_added_to_main_grad")
                else:
                    equal_bits(t.main_grad, full.main_grad + 0.0, f"{layout}, {still}: tensor {number}")
        before = whole.main_grads
        with torch.no_grad():
            forward(ws, batch, whole, "accumulate")
        same(whole.main_grads, before, "without gradients")
        return True


@BACKENDS
def test_54_frozen_parameters_need_no_main_grad(pool, backend):
    """54: w13 or w2, both, or some experts of a list: the others' main_grads are as ever."""
    cfg = config(dtype=torch.bfloat16)
    assert all(pool.run(frozen, cfg, random_batch(cfg, TOKENS[0]), backend, ranks=2))


WRONG = {
    "none": (lambda w: delattr(w, "main_grad"), "ConfigError", r"w2\.main_grad is None but main_grad='accumulate'"),
    "bf16": (lambda w: setattr(w, "main_grad", w.detach().bfloat16()), "DTypeError", r"has dtype torch\.bfloat16"),
    "flat": (lambda w: setattr(w, "main_grad", w.main_grad.flatten()), "ConfigError", r"has shape \(16384,\)"),
    "value": (None, "ConfigError", "main_grad is 'add'"),
}


def wrong_on_one_rank(world, cfg, batch, backend, how):
    with workspace(world, cfg, 2, backend) as ws:
        parameters = Parameters(ws, batch)
        main_grad = "accumulate"
        if ws.rank == 1 and WRONG[how][0] is not None:
            WRONG[how][0](parameters.all[1])
        elif ws.rank == 1:
            main_grad = "add"
        error = case.named_error(forward, ws, batch, parameters, main_grad)
        return error, bool(torch.stack(finished_of(ws, batch)[:1]).isfinite().all())


@BACKENDS
@pytest.mark.parametrize("how", WRONG)
def test_wrong_main_grads(pool, backend, how):
    """Every rank raises, naming rank, parameter, value and remedy; the Workspace works on."""
    _, kind, text = WRONG[how]
    cfg = config()
    for error, works in pool.run(wrong_on_one_rank, cfg, random_batch(cfg, (5, 5, 5, 5)), backend, how, ranks=2):
        assert error is not None and error[0] == kind and works, error
        assert re.search(text, error[1]) and ("main_grad=None" in error[1] or how == "value"), error


def elsewhere(world, cfg, batch, backend):
    with workspace(world, cfg, 2, backend) as ws:
        want = finished_of(ws, batch)
        checkpointed = Parameters(ws, batch)

        def recomputed(*args, **kwargs):
            return checkpoint(lambda: uniep.moe(*args, **kwargs), use_reentrant=False)

        step(ws, batch, checkpointed, "accumulate", recomputed)
        same(checkpointed.main_grads, [t + 0.0 for t in want], "activation checkpointing")
        master = Parameters(ws, batch, dtype=torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, *_ = forward(ws, batch, master, "accumulate")
        y.backward(batch.dy[batch.rows(ws.rank, 2)])
        same(master.main_grads, [t + 0.0 for t in want], "autocast")
        assert master.hooks == 2 and not any(t.grad.any() or t.grad.dtype != torch.float32 for t in master.all)
        assert all(t.grad_added_to_main_grad for t in master.all)
        odd = Parameters(ws, batch)
        for t in odd.all:  # neither aligned nor dense
            t.main_grad = torch.zeros(t.numel() + 1)[1:].view(t.mT.shape).mT
        step(ws, batch, odd, "accumulate")
        same(odd.main_grads, [t + 0.0 for t in want], "memory as it comes")
        return True


@BACKENDS
def test_checkpointing_autocast_and_strides(pool, backend):
    """The same bits with a recomputed forward, from fp32 master weights, and in any memory."""
    cfg = config(dtype=torch.bfloat16)
    assert all(pool.run(elsewhere, cfg, random_batch(cfg, TOKENS[0]), backend, ranks=2))


def compiled(world, cfg, batches, backend):
    with workspace(world, cfg, 2, backend) as ws:

        @torch.compile(fullgraph=True, dynamic=True)
        def two_layers(x, ids, weights, w13, w2, workspace, main_grad):
            for _ in range(2):
                x = x + uniep.moe(x, ids, weights, w13, w2, workspace=ws, main_grad=main_grad)
            return x

        eager, parameters = Parameters(ws, batches[0]), Parameters(ws, batches[0])
        for batch in batches:
            want = step(ws, batch, eager, "accumulate", two_layers._torchdynamo_orig_callable)
            same(step(ws, batch, parameters, "accumulate", two_layers), want, "y, dx, dweights")
            same(parameters.main_grads, eager.main_grads, "compiled")
        assert parameters.hooks == eager.hooks == 2 * len(batches)
        assert all(t.grad_added_to_main_grad and not t.grad.any() for t in parameters.all)
        return True


@BACKENDS
@pytest.mark.slow
def test_compiled(pool, backend):
    """One set of parameters in two layers of one graph, several token counts: as without torch.compile."""
    cfg = config(dtype=torch.bfloat16)
    batches = [random_batch(cfg, tokens, seed=n) for n, tokens in enumerate([(8, 8, 8, 8), (12, 3, 9, 1)])]
    assert all(pool.run(compiled, cfg, batches, backend, ranks=2))


def module_step(world, cfg, batch):
    with workspace(world, cfg, 2, "cpu") as ws:
        layer = uniep.nn.MoE(cfg, workspace=ws, seed=0, main_grad="overwrite")
        plain = uniep.nn.MoE(cfg, workspace=ws, seed=0)
        experts = layer.experts.w13, layer.experts.w2
        for t in experts:
            t.main_grad = torch.full(t.shape, case.POISON)
        rows = batch.rows(ws.rank, 2)
        for one in (layer, plain):
            one(batch.x[rows]).backward(batch.dy[rows])
        same([t.main_grad.to(t.dtype) for t in experts], [plain.experts.w13.grad, plain.experts.w2.grad], "experts")
        equal_bits(layer.router.grad, plain.router.grad, "router")
        return uniep.report(ws)["main_grad"]


def test_modules_and_report(pool):
    cfg = config(dtype=torch.bfloat16)
    assert all("fp32" in line for line in pool.run(module_step, cfg, random_batch(cfg, TOKENS[0]), ranks=2))

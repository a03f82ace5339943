"""Expert gradients by blocks of source ranks: equal bits however ranks are split into EP and copies.

The oracle knows no blocks: each block's tokens run alone, on one rank, and the finished fp32 gradients are added here.
"""

import functools
import os
import re
import time

import case
import pytest
import torch
import torch.distributed as dist
from case import config, equal_bits, named_error, random_batch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import uniep

TOKENS = (70, 33, 0, 150)
NAMES = ("y", "dx", "dweights", "dw13", "dw2", "db13", "db2")
LAYOUTS = {2: ((2, 1), (4, 1), (1, 2), (2, 2)), 4: ((4, 1), (2, 2), (1, 4))}
"""gradient_shards -> (EP, copies)."""


def workspace(world, cfg, ep, copies, **how):
    """Of ep * copies ranks; those of an EP group lie side by side."""
    how = {"device": "cpu", "timeout_s": case.TIMEOUT_S} | how
    if copies == 1:
        return uniep.Workspace(cfg, world.group(ep), **how)
    ranks = torch.arange(ep * copies).view(copies, ep)
    mesh = init_device_mesh("cpu", (copies, ep), mesh_dim_names=("dp", "ep")) if ranks.numel() == world.size else None
    if mesh is None:
        return uniep.Workspace(cfg, None, copies=world.group(copies), **how)  # EP 1
    return uniep.Workspace(cfg, mesh["ep"], copies=mesh["dp"], **how)


def step(ws, batch, rank, ranks, main_grad=None, value=0.0):
    """(y, dx, dweights, dw13, dw2, any db13, db2) of this rank: of its share of the tokens and its experts."""
    rows, experts = batch.rows(rank, ranks), batch.experts(ws.rank, ws.ep_size)
    given = batch.x[rows], batch.weights[rows], *(t[experts] for t in (batch.w13, batch.w2, *batch.biases))
    x, weights, w13, w2, *biases = map(case.leaf, given)
    for w in (w13, w2):
        w.main_grad = torch.full(w.shape, value)
    options = {"workspace": ws, "main_grad": main_grad, **case.named(biases)}
    y = uniep.moe(x, batch.ids[rows], weights, w13, w2, **options)
    y.backward(batch.dy[rows])
    of_experts = [w.grad if main_grad is None else w.main_grad for w in (w13, w2)]
    return [y.detach(), x.grad, weights.grad, *of_experts, *(b.grad for b in biases)]


def on_ranks(world, cfg, batch, ep, copies, backend, main_grad, value):
    with workspace(world, cfg, ep, copies, backend=backend) as ws:
        return step(ws, batch, world.rank, ep * copies, main_grad, value)


def of_block(world, cfg, batches):
    with workspace(world, cfg, 1, 1) as ws:
        return [step(ws, batch, 0, 1, "overwrite") for batch in batches]


def only(batch, shards):
    """The tokens of these shards."""
    shard = torch.arange(4).repeat_interleave(torch.tensor(batch.shard_tokens))
    return batch.with_tokens(torch.isin(shard, torch.tensor(shards)))


@functools.cache
def expected(pool, dtype, blocks):
    """(batch, y, dx, dweights, dw13, dw2) with expert gradients in fp32, added here."""
    cfg = config(dtype=dtype, max_tokens_per_rank=256)
    batch = random_batch(cfg, TOKENS, unused=0.1)
    per = 4 // blocks
    parts = [only(batch, list(range(first, first + per))) for first in range(0, 4, per)]
    (found,) = pool.run(of_block, cfg, parts, ranks=1)
    rows = [torch.cat(of_blocks) for of_blocks in list(zip(*found, strict=True))[:3]]
    return batch, *rows, *(functools.reduce(torch.add, dw) for dw in list(zip(*found, strict=True))[3:])


@pytest.mark.parametrize("main_grad", [None, "accumulate"])
@pytest.mark.parametrize("backend", ["cpu", "nccl"])
@pytest.mark.parametrize("blocks", [2, 4])
def test_equal_bits_over_ep_and_copies(pool, blocks, backend, main_grad):
    dtype = torch.float32 if backend == "nccl" else torch.bfloat16
    batch, *rows, dw13, dw2 = expected(pool, dtype, blocks)
    cfg = config(dtype=dtype, gradient_shards=blocks)
    want = [dw.to(dtype) if main_grad is None else 0.3 + dw for dw in (dw13, dw2)]
    for ep, copies in LAYOUTS[blocks]:
        found = pool.run(on_ranks, cfg, batch, ep, copies, backend, main_grad, 0.3, ranks=ep * copies)
        for name, *got, expect in zip(("y", "dx", "dweights"), *found, rows, strict=False):
            equal_bits(torch.cat(got), expect, f"EP {ep} x {copies}: {name}")
        for rank, grads in enumerate(found):
            experts = batch.experts(rank % ep, ep)
            for name, got, expect in zip(("dw13", "dw2"), grads[3:], want, strict=True):
                equal_bits(got, expect[experts], f"EP {ep} x {copies}: {name} of rank {rank}")


def test_another_function_than_one_chain(pool):
    """Else the tests above could not tell the two apart."""
    batch, *_, dw13, _ = expected(pool, torch.float32, 4)
    cfg = config(max_tokens_per_rank=256)
    (one_chain,) = pool.run(of_block, cfg, [batch], ranks=1)
    assert not torch.equal(one_chain[0][3], dw13)
    torch.testing.assert_close(one_chain[0][3], dw13)


@pytest.mark.parametrize("main_grad", [None, "accumulate"])
@pytest.mark.parametrize("backend", ["cpu", "nccl"])
def test_biases(pool, backend, main_grad):
    """Of fp32 experts without a gate, whose cast does nothing: also their gradients are sums of those of each block."""
    cfg = config(max_tokens_per_rank=256, bias=True, activation="relu2")
    batch = random_batch(cfg, TOKENS, unused=0.1)
    (found,) = pool.run(of_block, cfg, [only(batch, [0, 1]), only(batch, [2, 3]), batch], ranks=1)
    *blocks, one_chain = found
    first, second, want = NAMES.index("dw13"), len(NAMES), []
    for number in range(first, second):
        want.append(functools.reduce(torch.add, (block[number] for block in blocks)))
        assert not torch.equal(want[-1], one_chain[number])  # else this could not tell the two apart
    cfg = config(bias=True, activation="relu2", gradient_shards=2)
    for ep, copies in LAYOUTS[2]:
        found = pool.run(on_ranks, cfg, batch, ep, copies, backend, main_grad, 0.0, ranks=ep * copies)
        for rank, grads in enumerate(found):
            experts = batch.experts(rank % ep, ep)
            for name, got, expect in zip(NAMES[first:], grads[first:], want, strict=True):
                equal_bits(got, expect[experts], f"EP {ep} x {copies}: {name} of rank {rank}")


def refused(world, cfg, ep, copies):
    def make():
        workspace(world, cfg, ep, copies).close()

    return named_error(make)


@pytest.mark.parametrize(
    ("shards", "ep", "copies", "fits"), [(3, 2, 2, "2, 4"), (1, 2, 2, "2, 4"), (8, 4, 1, "1, 2, 4"), (2, 1, 4, "4")]
)
def test_blocks_of_whole_ranks(pool, shards, ep, copies, fits):
    for kind, text in pool.run(refused, config(gradient_shards=shards), ep, copies, ranks=ep * copies):
        assert kind == "ConfigError"
        assert re.search(f"gradient_shards={shards} .*; use gradient_shards of {fits},", text)


def other_config(world):
    """Copy 1 rounds elsewhere."""
    how = {"weight_at": "activation"} if world.rank >= 2 else {}
    return refused(world, config(gradient_shards=4, **how), 2, 2)


def test_copies_agree(pool):
    for kind, text in pool.run(other_config):
        assert kind == "ConfigError" and "copies of the same experts disagree on weight_at" in text


def frozen(world, cfg, batch):
    with workspace(world, cfg, 2, 2) as ws:
        rows, experts = batch.rows(world.rank, 4), batch.experts(ws.rank, 2)
        w13, w2 = batch.w13[experts].clone(), case.leaf(batch.w2[experts])
        y = uniep.moe(batch.x[rows], batch.ids[rows], batch.weights[rows], w13, w2, workspace=ws)
        y.backward(batch.dy[rows])
        return w2.grad


def test_frozen_w13(pool):
    batch, *_, dw2 = expected(pool, torch.float32, 4)
    for rank, got in enumerate(pool.run(frozen, config(gradient_shards=4), batch)):
        equal_bits(got, dw2[batch.experts(rank % 2, 2)], f"rank {rank}")


def other_experts(world, how):
    """(error of a step in which copy 1 has other experts in this sum, whether the same step without that is right)."""
    with workspace(world, config(gradient_shards=2), 2, 2) as ws:
        odd, alike = world.rank > 1, [1, 2]
        seeds = [seed + 10 * (odd and how == "seeds") for seed in alike]
        layers = [uniep.nn.Experts(ws.cfg, workspace=ws, seed=seed) for seed in seeds]
        if how == "factors":
            uniep.nn.add_lora(torch.nn.ModuleList(layers), r=2, target_parameters=["w13"], seed=int(odd))
        x, ids, weights = torch.ones(5, 64), torch.arange(10).view(5, 2) % 8, torch.ones(5, 2)

        def step(order):
            losses = [layer(x, ids, weights).sum() for layer in layers]
            for number in order:
                losses[number].backward()

        error = named_error(step, [1, 0] if odd and how == "order" else [0, 1])
        for layer, seed in zip(layers, alike, strict=True):
            layer.reset_parameters(seed)
            if how == "factors":
                layer.lora_a13.data.fill_(0.5)
        return error, named_error(step, [0, 1])


@pytest.mark.parametrize("how", ["order", "seeds", "factors"])
def test_copies_of_other_experts(pool, how):
    """Their sums would be gradients of neither: of another layer, of a layer drawn otherwise."""
    for error, after in pool.run(other_experts, how):
        assert error[0] == "UniEPError" and "have other weights than each other in sum 1" in error[1]
        assert after is None


def own_groups(world):
    """(EP group, copies) of 2 x 2 ranks: a failure may leave their collectives out of step."""
    first, second = ([0, 1], [2, 3]) if world.rank < 2 else ([2, 3], [0, 1])
    copies = sorted([world.rank, second[first.index(world.rank)]])
    return (dist.new_group(ranks, use_local_synchronization=True) for ranks in (first, copies))


def unpacked(tensor):
    raise ValueError("my hook")


def odd_copy(world, cfg, batch, backend, odd):
    """(error, seconds) of a backward for which rank 3, or its copy as a whole, does something else; then the error of
    an ordinary step."""
    group, copies = own_groups(world)
    how = {"device": "cpu", "backend": backend, "timeout_s": 3.0 if odd in UNTOLD else 30.0}
    with uniep.Workspace(cfg, group, copies=copies, **how) as ws:
        step(ws, batch, world.rank, 4)
        rows, experts = batch.rows(world.rank, 4), batch.experts(ws.rank, 2)
        x, w13, w2 = map(case.leaf, (batch.x[rows], batch.w13[experts], batch.w2[experts]))
        if odd == "frozen" and world.rank > 1:
            w13.requires_grad_(False)
        if odd == "cannot be told":
            ws.among_copies._group = None  # as on GPUs
        ids, wrong = batch.ids[rows], batch.ids[rows] + 1000
        turns = iter([ids, wrong if odd == "recomputes wrongly" and world.rank == 3 else ids])
        call = torch.compile(uniep.moe, backend="aot_eager") if odd == "freed, compiled" else uniep.moe

        def layer(x):
            return call(x, next(turns), batch.weights[rows], w13, w2, workspace=ws)

        unpack = unpacked if odd in ("refuses", "cannot be told") and world.rank == 3 else lambda t: t
        if odd == "recomputes wrongly":
            y = checkpoint(layer, x, use_reentrant=False)
        else:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
                y = layer(x)
        if odd.startswith("freed") and world.rank == 3:
            w13.detach().untyped_storage().resize_(0)
        if odd == "leaves" and world.rank == 3:
            ws.close()
        if odd == "does not come" and world.rank > 1:
            return None
        start = time.monotonic()
        error = named_error(y.sum().backward)
        took = time.monotonic() - start
        return error, took, named_error(step, ws, batch, world.rank, 4)


UNTOLD = "does not come", "cannot be told"
ODD_COPIES = {
    "refuses": ("UniEPError", "copy 1 of the experts: .*ValueError: my hook", "UniEPError"),
    "freed": ("ConfigError", "copy 1 of the experts: .*w13 .* have been freed", "ConfigError"),
    "freed, compiled": ("ConfigError", "copy 1 of the experts: .*w13 .* have been freed", "ConfigError"),
    "recomputes wrongly": ("InputError", "copy 1 of the experts: rank 1, row 0, slot 0: expert id", "InputError"),
    "cannot be told": ("PeerTimeoutError", "did not come within 3 s", "UniEPError"),
    "frozen": ("UniEPError", r"different parameters \(copy 0: w13, w2; copy 1: w2\)", "UniEPError"),
    "leaves": ("PeerTimeoutError", r"sum 2 of expert gradients .*left after sum 1", "PeerTimeoutError"),
    "does not come": ("PeerTimeoutError", "did not come within 3 s", None),
}


@pytest.mark.parametrize("backend", ["cpu", "nccl"])
@pytest.mark.parametrize("odd", ODD_COPIES)
def test_what_one_copy_does_reaches_the_others(pool, odd, backend):
    """Nobody waits in the sum for a copy that has raised; after refusals all go on, but for who cannot tell."""
    kind, text, theirs = ODD_COPIES[odd]
    cfg = config(gradient_shards=2)
    ranks = pool.run(odd_copy, cfg, random_batch(cfg, (5, 6, 7, 9)), backend, odd)
    for error, took, after in ranks[:2]:
        assert error[0] == kind and re.search(text, error[1]), error
        assert took < 12 and (after is None) == (kind != "PeerTimeoutError"), (took, after)
    if theirs is not None:
        assert ranks[2][0][0] == theirs and (ranks[2][2] is None) == (kind != "PeerTimeoutError"), ranks[2]


def closed_in_a_child(world, cfg):
    """Seconds that it took there."""
    group, copies = own_groups(world)
    with uniep.Workspace(cfg, group, copies=copies, device="cpu", timeout_s=30.0) as ws:
        started, child = time.monotonic(), os.fork()
        if child == 0:
            ws.close()
            os._exit(0)
        os.waitpid(child, 0)
        return time.monotonic() - started


def test_a_forked_child_tells_the_copies_nothing(pool):
    assert max(pool.run(closed_in_a_child, config(gradient_shards=2))) < 1

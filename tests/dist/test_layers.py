"""Layers in training: shared Workspaces, interleaved micro-batches, checkpointing, compile, autocast."""

import itertools

import case
import pytest
import torch
from case import config, random_batch, same_bits
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import uniep


def leaves(batch, ws):
    rows, experts = batch.rows(ws.rank, ws.ep_size), batch.experts(ws.rank, ws.ep_size)
    return [case.leaf(t) for t in (batch.x[rows], batch.weights[rows], batch.w13[experts], batch.w2[experts])]


def interleaved(world, cfg, batches, ep_size, order, schedule):
    """Two layers of one Workspace: forward both, no_grad calls in between, backward in `order`."""
    with case.workspace(world, cfg, ep_size, schedule) as ws:
        inputs = [leaves(batch, ws) for batch in batches]
        rows = [batch.rows(ws.rank, ep_size) for batch in batches]

        def call(n):
            x, *rest = inputs[n]
            return uniep.moe(x, batches[n].ids[rows[n]], *rest, workspace=ws)

        outputs = []
        for n in range(len(batches)):
            outputs.append(call(n))
            with torch.no_grad():
                call(len(batches) - 1 - n)
        for n in order:
            with torch.no_grad():
                call(n)
            outputs[n].backward(batches[n].dy[rows[n]])
        return [case.Outcome(y.detach(), *(t.grad for t in ts)) for y, ts in zip(outputs, inputs, strict=True)]


def frozen(world, cfg, batch, ep_size, wanted, schedule):
    with case.workspace(world, cfg, ep_size, schedule) as ws:
        return case.gradients_of(ws, batch, wanted)


@pytest.mark.parametrize("overlap", ["serial", "fused"])
def test_frozen_on_one_rank(pool, overlap):
    """What one rank leaves out, others may wait for, and its own later stages do."""
    cfg = config(dtype=torch.bfloat16)
    batch = random_batch(cfg, (9, 5, 4, 7))
    want = case.oracle(pool, cfg, batch)
    wanted = ("dx", "dweights", "dw13", "dw2"), ("dx", "dweights", "dw2")
    found = pool.run(frozen, cfg, batch, 2, wanted, uniep.Schedule(overlap=overlap), ranks=2)
    case.equal_where_wanted(found, wanted, batch, want)


@pytest.mark.parametrize("received", ["saved", "again"])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_interleaved_micro_batches(pool, order, received):
    """Layers sharing a Workspace, forwards first, backwards in any order, no_grad calls between: as one by one."""
    cfg = config(dtype=torch.bfloat16)
    batches = [
        random_batch(cfg, tokens, seed=n) for n, tokens in enumerate([(9, 5, 4, 7), (0, 30, 2, 1), (3, 3, 0, 60)])
    ]
    schedule = uniep.Schedule(received=received)
    ranks = pool.run(interleaved, cfg, batches, 2, order, schedule, ranks=2)
    for n, parts in enumerate(zip(*ranks, strict=True)):
        same_bits(case.gather(list(parts)), case.oracle(pool, cfg, batches[n]), f"layer {n}")


def keep_the_layer(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in uniep.SAVE_OPS else CheckpointPolicy.PREFER_RECOMPUTE


KINDS = {
    "plain": lambda f, x: f(x),
    "reentrant": lambda f, x: checkpoint(f, x, use_reentrant=True),
    "not reentrant": lambda f, x: checkpoint(f, x, use_reentrant=False),
    "selective": lambda f, x: checkpoint(
        f, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(keep_the_layer)
    ),
}


def checkpointed(world, cfg, x, ep_size):
    """Per kind: y, dx and parameter gradients of two router layers, and how many layer calls were made."""
    found = []
    with case.workspace(world, cfg, ep_size) as ws:
        layers = torch.nn.ModuleList(uniep.nn.MoE(cfg, workspace=ws, seed=n) for n in range(2))
        for layer in layers:
            with torch.no_grad():
                layer.router[1::2] = layer.router[::2]  # exact ties between pairs of experts
        calls = []
        forward = ws.backend.forward
        ws.backend.forward = lambda *args: calls.append(1) or forward(*args)
        for run in KINDS.values():
            layers.zero_grad()
            calls.clear()
            mine = case.leaf(x.chunk(ep_size)[ws.rank])
            hidden = mine
            for layer in layers:
                hidden = hidden + run(lambda v, layer=layer: layer(torch.tanh(v)), hidden)
            hidden.square().sum().backward()
            found.append((len(calls), [hidden.detach(), mine.grad, *(p.grad.clone() for p in layers.parameters())]))
    return found


def test_activation_checkpointing(pool):
    """44, 72: every kind of checkpoint gives the plain bits, also with tied logits; SAVE_OPS avoids the second run."""
    cfg = config(top_k=3)
    x = torch.randn(48, cfg.hidden, generator=torch.Generator().manual_seed(0))
    for found in pool.run(checkpointed, cfg, x, 2, ranks=2):
        assert [calls for calls, _ in found] == [2, 4, 4, 2]
        for kind, (_, tensors) in zip(KINDS, found, strict=True):
            for index, (got, want) in enumerate(zip(tensors, found[0][1], strict=True)):
                case.equal_bits(got, want, f"{kind}, tensor {index}")


def under_autocast(world, cfg, batch, ep_size):
    """fp32 inputs and parameters under autocast, and the same cast by hand."""
    found = []
    with case.workspace(world, cfg, ep_size) as ws:
        rows = batch.rows(ws.rank, ep_size)
        for automatic in (True, False):
            x, weights, w13, w2 = leaves(batch, ws)
            cast = [t if automatic else t.to(cfg.dtype) for t in (x, w13, w2)]
            with torch.autocast("cpu", torch.bfloat16, enabled=automatic):
                y = uniep.moe(cast[0], batch.ids[rows], weights, *cast[1:], workspace=ws)
            y.backward(batch.dy[rows].to(y.dtype))
            found.append(case.Outcome(y.detach(), x.grad, weights.grad, w13.grad, w2.grad))
    return found


def test_autocast(pool):
    """36: under autocast fp32 tensors are computed in cfg.dtype; gradients come in the parameters' dtype."""
    cfg = config(dtype=torch.bfloat16)
    batch = random_batch(config(), (9, 5, 4, 7))
    for automatic, by_hand in pool.run(under_autocast, cfg, batch, 2, ranks=2):
        same_bits(automatic, by_hand)
        assert automatic.y.dtype == torch.bfloat16 and automatic.dw13.dtype == automatic.dx.dtype == torch.float32


def whole_model(world, cfg, x, ep_size, schedule):
    """Two router layers over this rank's shards: (y, dx, dw13, dw2, router gradient of each shard)."""
    with case.workspace(world, cfg, ep_size, schedule) as ws:
        layers = [uniep.nn.MoE(cfg, workspace=ws, seed=n) for n in range(2)]
        mine = case.leaf(x.chunk(ep_size)[ws.rank])
        hidden = mine.view(-1, 4, cfg.hidden)
        for layer in layers:
            hidden = hidden + layer(hidden)
        hidden.square().sum().backward()
        experts = [p.grad for layer in layers for p in (layer.experts.w13, layer.experts.w2)]
        return [hidden.detach().flatten(0, 1), mine.grad, *experts]


def test_router_layers_at_each_ep_size(pool):
    """nn.MoE (a (..., D) input, parameters seeded per expert) is the same model with the same bits at EP 1, 2, 4."""
    cfg = config(top_k=2)
    x = torch.randn(64, cfg.hidden, generator=torch.Generator().manual_seed(0))
    runs = [
        [torch.cat(parts) for parts in zip(*pool.run(whole_model, cfg, x, ep, case.FUSED, ranks=ep), strict=True)]
        for ep in (1, 2, 4)
    ]
    for got in runs[1:]:
        for index, (a, b) in enumerate(zip(got, runs[0], strict=True)):
            case.equal_bits(a, b, f"tensor {index}")


def a_mesh(world, cfg, batch):
    """A one-dimensional DeviceMesh as group, and a two-dimensional one."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    with uniep.Workspace(cfg, mesh["ep"], device="cpu", timeout_s=case.TIMEOUT_S) as ws:
        outcome = case.forward_backward(ws, batch)
    return outcome, case.named_error(lambda: uniep.Workspace(cfg, mesh, device="cpu"))


def test_device_mesh(pool):
    """A DeviceMesh dimension is a group; the whole mesh is refused with what to pass."""
    cfg = config()
    batch = random_batch(cfg, (9, 5, 4, 7))
    ranks = pool.run(a_mesh, cfg, batch)
    for pair in (ranks[:2], ranks[2:]):
        same_bits(case.gather([outcome for outcome, _ in pair]), case.oracle(pool, cfg, batch))
    assert all(kind == "ConfigError" and "2 dimensions" in message for _, (kind, message) in ranks)

"""The router kit over ranks: the same bits at EP 1, 2 and 4, and errors that reach everybody."""

import dataclasses
import time

import case
import pytest
import torch
from case import config
from torch.utils.checkpoint import checkpoint

import uniep
from uniep.nn import RouterConfig, RoutingRecord, add_by_pairs, record_routing, replay_routing

TOKENS = 512
KIT = RouterConfig(
    score="sigmoid",
    groups=4,
    groups_per_token=2,
    selection_bias=True,
    bias_rate=0.1,
    aux_loss=0.1,
    z_loss=0.01,
    jitter=0.1,
)


def trained(world, x, kit, sizes, ep_size):
    """Two steps: what depends on tokens, experts, and all ranks alike."""
    cfg = config(max_tokens_per_rank=TOKENS)
    first = sum(sizes[: world.rank])
    mine = slice(first, first + sizes[world.rank])
    with case.workspace(world, cfg, ep_size) as ws:
        layer = uniep.nn.MoE(cfg, workspace=ws, seed=0, router=kit, shared_ffn=32)
        found = []
        for step in range(2):
            leaf = case.leaf(x[mine])
            ids = torch.arange(mine.start, mine.stop) + step * TOKENS
            layer.zero_grad()
            routing = layer.router(leaf, ids)
            y = layer(leaf, ids)
            y.square().sum().backward()
            router_grad = add_by_pairs(layer.router.weight.grad, ws.group)
            tokens = [y.detach(), leaf.grad, routing.ids_TK, routing.weights_TK.detach()]
            layer.router.load.zero_()
            layer.router.load += routing.counts_E
            alike = [routing.aux_loss.detach(), routing.z_loss.detach(), routing.dropped, layer.router.update_bias()]
            alike += [b.clone() for b in (layer.router.bias,) if b is not None]
            found.append((tokens, [layer.experts.w13.grad, layer.experts.w2.grad], alike, router_grad))
        return found


def at(pool, x, kit, sizes):
    ranks = pool.run(trained, x, kit, sizes, len(sizes), ranks=len(sizes))
    found = []
    for step in zip(*ranks, strict=True):
        for other in step[1:]:
            for ours, theirs in zip((*other[2], other[3]), (*step[0][2], step[0][3]), strict=True):
                assert torch.equal(ours, theirs)
        parts = [torch.cat(p) for kind in (0, 1) for p in zip(*(rank[kind] for rank in step), strict=True)]
        found.append([*parts, *step[0][2], step[0][3]])
    return found


def test_the_same_bits_at_each_ep_size(pool):
    """Choice, weights, y, dx, expert gradients, losses, load, bias, and the router's gradient as a tree of blocks."""
    x = torch.randn(TOKENS, 64, generator=torch.Generator().manual_seed(0))
    want = at(pool, x, KIT, [TOKENS])
    assert float(want[0][-2].abs().max()) > 0.05  # the bias has moved
    for sizes in ([256] * 2, [128] * 4):
        for got, truth in zip(at(pool, x, KIT, sizes), want, strict=True):
            for index, (a, b) in enumerate(zip(got, truth, strict=True)):
                case.equal_bits(a, b, f"EP {len(sizes)}, tensor {index}")


def test_uneven_ranks(pool):
    """Any split: all but the router's gradient, whose tree is of whole blocks; an idle rank too."""
    x = torch.randn(TOKENS, 64, generator=torch.Generator().manual_seed(1))
    want = at(pool, x, KIT, [TOKENS])
    for got, truth in zip(at(pool, x, KIT, [100, 0, 389, 23]), want, strict=True):
        for index, (a, b) in enumerate(zip(got[:-1], truth[:-1], strict=True)):
            case.equal_bits(a, b, f"tensor {index}")


def test_capacity_at_each_ep_size(pool):
    """The slots that are dropped are those that one rank drops, and their number is said everywhere."""
    kit = RouterConfig(capacity_factor=1.05, overflow="drop")
    x = torch.randn(TOKENS, 64, generator=torch.Generator().manual_seed(0))
    want = at(pool, x, kit, [TOKENS])
    dropped = int((want[0][2] < 0).sum())
    assert 0 < dropped == int(want[0][8])
    for sizes in ([256] * 2, [128] * 4):
        for index, (a, b) in enumerate(zip(at(pool, x, kit, sizes)[0], want[0], strict=True)):
            case.equal_bits(a, b, f"EP {len(sizes)}, tensor {index}")


def in_trouble(world, what):
    cfg = config(max_tokens_per_rank=64)
    kit = dataclasses.replace(KIT, capacity_factor=0.5 if what == "full" else None)
    with case.workspace(world, cfg, 2) as ws:
        layer = uniep.nn.MoE(cfg, workspace=ws, seed=0, router=kit)
        x, ids = torch.randn(10, 64), torch.arange(10)
        bad = world.rank == 1
        call = {
            "width": lambda: layer(x[:, 1:] if bad else x, ids),
            "no ids": lambda: layer(x, None if bad else ids),
            "alone": lambda: layer.router(x[:, 1:] if bad else x, ids),
            "full": lambda: layer(x, ids),
        }[what]
        error = case.named_error(call)
        layer.router.cfg = dataclasses.replace(kit, capacity_factor=None)
        return error, layer(x, ids).shape


@pytest.mark.parametrize(
    "what, kind, message",
    [
        ("width", "ConfigError", r"x has shape (10, 63)"),
        ("no ids", "ConfigError", "token_ids is None"),
        ("alone", "ConfigError", "x has shape (10, 63)"),
        ("full", "CapacityError", "capacity_factor=0.5 allows"),
    ],
)
def test_errors_reach_all_ranks(pool, what, kind, message):
    """One rank's error is raised on both, at once, and the layer goes on."""
    for error, shape in pool.run(in_trouble, what, ranks=2, timeout=20):
        assert error is not None and error[0] == kind and message in error[1], error
        assert shape == (10, 64)


BIASED = RouterConfig(score="sigmoid", groups=4, groups_per_token=2, selection_bias=True)


def rolled_out(world, x, ep_size, per_call):
    """The record of this rank's tokens, `per_call` in each call, and their results."""
    cfg = config(max_tokens_per_rank=64)
    with case.workspace(world, cfg, ep_size) as ws, torch.no_grad():
        layer = uniep.nn.MoE(cfg, workspace=ws, seed=0, router=BIASED)
        with record_routing(layer) as record:
            y = torch.cat([layer(part) for part in x.chunk(ep_size)[world.rank].split(per_call)])
        return record.gather(ws.group), y


def replayed(world, x, record, ep_size):
    """Under recompute, in two micro-batches, by other routers: (y, dx, gradients), the error of another length."""
    cfg = config(max_tokens_per_rank=64)
    with case.workspace(world, cfg, ep_size) as ws:
        layer = uniep.nn.MoE(cfg, workspace=ws, seed=0, router=BIASED)
        with torch.no_grad():
            layer.router.weight.add_(0.1)
        rows = len(x) // ep_size
        mine = record.take(slice(world.rank * rows, (world.rank + 1) * rows)).split(rows // 2)
        leaf = case.leaf(x.chunk(ep_size)[world.rank])
        results = []
        for part, of in zip(leaf.split(rows // 2), mine, strict=True):
            with replay_routing(layer, of):
                y = checkpoint(layer, part, use_reentrant=False)
                y.square().sum().backward()
            results.append(y.detach())
        short = RoutingRecord({name: ids[world.rank :] for name, ids in mine[0].ids.items()})
        with replay_routing(layer, short):
            error = case.named_error(lambda: layer(leaf[: rows // 2]))
        return [torch.cat(results), leaf.grad], [layer.experts.w13.grad], error


def test_a_rollout_is_replayed_at_other_ep_sizes(pool):
    """Recorded at EP 1, 2, 4 in calls of few tokens: one record; replayed at EP 1, 2, 4: one result."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    found = {}
    for ep_size, per_call in ((1, 5), (2, 1), (4, 3)):
        ranks = pool.run(rolled_out, x, ep_size, per_call, ranks=ep_size)
        assert all(record == ranks[0][0] for record, _ in ranks)
        found[ep_size] = ranks[0][0], torch.cat([y for _, y in ranks])
    assert found[1][0] == found[2][0] == found[4][0]
    case.equal_bits(found[2][1], found[1][1], "EP 2")
    case.equal_bits(found[4][1], found[1][1], "EP 4")
    want = None
    for ep_size in (1, 2, 4):
        ranks = pool.run(replayed, x, found[2][0], ep_size, ranks=ep_size)
        parts = [torch.cat(p) for kind in (0, 1) for p in zip(*(rank[kind] for rank in ranks), strict=True)]
        want = want or parts
        for a, b in zip(parts[:2], want[:2], strict=True):
            case.equal_bits(a, b, f"EP {ep_size}")
        torch.testing.assert_close(parts[2], want[2])
        errors = [error for *_, error in ranks]
        if ep_size > 1:  # rank 1's record is short; all are told
            assert all(kind == "InputError" and "RoutingRecord.take" in text for kind, text in errors), errors


def left_alone(world):
    """Rank 1 makes a call less; in a group of its own, which does not outlive a timeout."""
    cfg = config(max_tokens_per_rank=64)
    group = torch.distributed.new_group([0, 1], use_local_synchronization=True)
    with uniep.Workspace(cfg, group, device="cpu", timeout_s=2.0) as ws:
        layer = uniep.nn.MoE(cfg, workspace=ws, seed=0, router=RouterConfig(z_loss=0.1))
        layer(torch.randn(5, 64))
        if world.rank == 0:
            return case.named_error(lambda: layer.router(torch.randn(5, 64)))
        time.sleep(4)
    return None


@pytest.mark.slow
def test_a_missing_rank(pool):
    (error, _) = pool.run(left_alone, ranks=2)
    assert error[0] == "PeerTimeoutError" and "in a router's exchange" in error[1] and "after 2 s" in error[1]


def under_ddp(world):
    """Two steps of forward and backward at EP 2 x DP 2: load of this rank and of all, bias, gradients."""
    from torch.distributed.device_mesh import init_device_mesh

    from uniep.integrations.torch import data_parallel

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    kit = RouterConfig(selection_bias=True, bias_rate=0.5, aux_loss=0.1)
    with uniep.Workspace(config(), mesh["ep"], device="cpu", timeout_s=case.TIMEOUT_S) as ws:
        layer = uniep.nn.MoE(ws.cfg, workspace=ws, seed=0, router=kit, shared_ffn=16)
        model = data_parallel(layer, mesh)
        for step in range(2):
            draw = torch.Generator().manual_seed(10 * world.rank + step)
            model(torch.randn(10 + world.rank, 64, generator=draw)).sum().backward()
        own = layer.router.load.clone()
        total = layer.router.update_bias(torch.distributed.group.WORLD)
        return own, total, layer.router.bias.clone(), layer.router.weight.grad, layer.shared.w2.grad


def test_under_data_parallelism(pool):
    """DDP reduces router and shared experts; each rank counts its own load, and the bias moves by that of all."""
    ranks = pool.run(under_ddp)
    assert [int(own.sum()) for own, *_ in ranks] == [2 * 2 * (10 + rank) for rank in range(4)]
    assert torch.equal(sum(own for own, *_ in ranks), ranks[0][1]) and bool(ranks[0][2].any())
    for rank in ranks[1:]:
        for ours, theirs in zip(rank[1:], ranks[0][1:], strict=True):
            assert torch.equal(ours, theirs)

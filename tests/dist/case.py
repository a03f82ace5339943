"""One global batch, run by an expert-parallel group of any size, and its gathered results compared.

A `Batch` is what all ranks see together: the tokens of four shards one behind the other, and all experts.
At EP size R a rank owns 4/R consecutive shards and E/R consecutive experts, so concatenating the ranks'
results gives the same tensors at every R, and "the same bits" is one comparison.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

import uniep
from uniep import reference

SHARDS = 4
TIMEOUT_S = 20.0
SERIAL = uniep.Schedule(overlap="serial", tile_order="natural")
FUSED = uniep.Schedule(overlap="fused", tile_order="local-first")
SCHEDULES = tuple(
    uniep.Schedule(overlap=overlap, tile_order=order)
    for overlap in ("serial", "fused")
    for order in ("natural", "local-first")
)
FIELDS = ("y", "dx", "dweights", "dw13", "dw2")
BIASES = ("db13", "db2")  # fields that are None without biases
POISON = float("nan")


def config(**changes: Any) -> uniep.MoEConfig:
    """A small layer: D=64, F=64, E=8, K=2, fp32, with `changes`."""
    small = {"hidden": 64, "ffn": 64, "num_experts": 8, "top_k": 2, "max_tokens_per_rank": 256, "dtype": torch.float32}
    return uniep.MoEConfig(**(small | changes))


@dataclasses.dataclass(frozen=True)
class Batch:
    """x (T, D), ids (T, K), weights (T, K) fp32, dy (T, D), w13 (E, 2F or F, D), w2 (E, D, F); T of each shard;
    biases: b13 (E, 2F or F) and b2 (E, D), or none."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    dy: Tensor
    w13: Tensor
    w2: Tensor
    shard_tokens: tuple[int, ...]
    biases: tuple[Tensor, ...] = ()

    def rows(self, rank: int, ep_size: int) -> slice:
        share = SHARDS // ep_size
        first = sum(self.shard_tokens[: rank * share])
        return slice(first, first + sum(self.shard_tokens[rank * share : (rank + 1) * share]))

    def experts(self, rank: int, ep_size: int) -> slice:
        local = self.w13.shape[0] // ep_size
        return slice(rank * local, (rank + 1) * local)

    def with_tokens(self, keep: Tensor) -> Batch:
        """Only the tokens of the boolean mask `keep`."""
        parts = keep.split(list(self.shard_tokens))
        tensors = {name: getattr(self, name)[keep] for name in ("x", "ids", "weights", "dy")}
        return dataclasses.replace(self, **tensors, shard_tokens=tuple(int(p.sum()) for p in parts))


def random_batch(
    cfg: uniep.MoEConfig,
    shard_tokens: tuple[int, ...],
    *,
    ids: Tensor | None = None,
    seed: int = 0,
    unused: float = 0.0,
) -> Batch:
    """Random values; ids distinct in a row unless given, a share `unused` of the slots set to -1."""
    g = torch.Generator().manual_seed(seed)
    total, e, d, f = sum(shard_tokens), cfg.num_experts, cfg.hidden, cfg.ffn
    if ids is None:
        ids = torch.rand(total, e, generator=g).argsort(1)[:, : cfg.top_k]
        ids = torch.where(torch.rand(ids.shape, generator=g) < unused, -1, ids)
    weights = torch.rand(total, cfg.top_k, generator=g) + 0.1
    values = {
        "x": torch.randn(total, d, generator=g),
        "dy": torch.randn(total, d, generator=g),
        "w13": torch.randn(e, cfg.h_columns, d, generator=g) * d**-0.5,
        "w2": torch.randn(e, d, f, generator=g) * f**-0.5,
    }
    values = {name: value.to(cfg.dtype) for name, value in values.items()}
    biases = tuple(torch.randn(e, n, generator=g).to(cfg.dtype) for n in (cfg.h_columns, d)) if cfg.bias else ()
    return Batch(ids=ids, weights=weights, shard_tokens=tuple(shard_tokens), **values, biases=biases)


def exact_batch(
    cfg: uniep.MoEConfig,
    shard_tokens: tuple[int, ...],
    ids: Tensor,
    weights: Tensor,
    v: Tensor,
    dy: Tensor | None = None,
) -> Batch:
    """Exact experts: y_t = sum over k of w[t,k] * v[e], with every intermediate value a small power of two.

    x is one-hot at column 0, the gate row 0 is 32, the up row 0 is 1/32: silu(32)/32 = 1 in each dtype.
    v: (E,) or (E, D).
    """
    total, e, d, f = sum(shard_tokens), cfg.num_experts, cfg.hidden, cfg.ffn
    x = torch.zeros(total, d)
    x[:, 0] = 1
    w13 = torch.zeros(e, 2 * f, d)
    w13[:, 0, 0], w13[:, f, 0] = 32, 1 / 32
    w2 = torch.zeros(e, d, f)
    w2[:, :, 0] = v[:, None] if v.dim() == 1 else v
    dy = torch.zeros(total, d) if dy is None else dy
    cast = {name: t.to(cfg.dtype) for name, t in (("x", x), ("w13", w13), ("w2", w2), ("dy", dy))}
    return Batch(ids=ids, weights=weights, shard_tokens=tuple(shard_tokens), **cast)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one step gave: one rank's part, or all ranks' parts one behind the other."""

    y: Tensor
    dx: Tensor
    dweights: Tensor
    dw13: Tensor
    dw2: Tensor
    db13: Tensor | None = None
    db2: Tensor | None = None


def workspace(
    world: Any, cfg: uniep.MoEConfig, ep_size: int, schedule: uniep.Schedule | None = None
) -> uniep.Workspace:
    """A CPU Workspace of this rank's group of `ep_size`."""
    return uniep.Workspace(cfg, world.group(ep_size), device="cpu", schedule=schedule, timeout_s=TIMEOUT_S)


def gradients_of(ws, batch, wanted):
    """Of x, weights, w13 and w2, where rank r wants those that wanted[r] names alone; the others are None."""
    rows, experts = batch.rows(ws.rank, ws.ep_size), batch.experts(ws.rank, ws.ep_size)
    inputs = {"dx": batch.x[rows], "dweights": batch.weights[rows]}
    inputs |= {"dw13": batch.w13[experts], "dw2": batch.w2[experts]}
    leaves = {name: t.clone().requires_grad_(name in wanted[ws.rank]) for name, t in inputs.items()}
    x, weights, w13, w2 = leaves.values()
    uniep.moe(x, batch.ids[rows], weights, w13, w2, workspace=ws).backward(batch.dy[rows])
    return {name: t.grad for name, t in leaves.items()}


def equal_where_wanted(found, wanted, batch, want):
    """`found`, of `gradients_of` on all ranks: the bits of the oracle `want` where wanted, None elsewhere."""
    for rank, grads in enumerate(found):
        for name, got in grads.items():
            side = batch.rows if name in ("dx", "dweights") else batch.experts
            assert (got is not None) == (name in wanted[rank])
            if got is not None:
                equal_bits(got, getattr(want, name)[side(rank, len(found))], f"rank {rank} {name}")


def named(biases) -> dict[str, Tensor]:
    """As arguments of `uniep.moe`."""
    return dict(zip(("b13", "b2"), biases, strict=True)) if biases else {}


def leaf(t: Tensor) -> Tensor:
    return t.detach().clone().requires_grad_()


def forward_backward(ws: uniep.Workspace, batch: Batch) -> Outcome:
    """This rank's part of one step."""
    rows, experts = batch.rows(ws.rank, ws.ep_size), batch.experts(ws.rank, ws.ep_size)
    x, weights = leaf(batch.x[rows]), leaf(batch.weights[rows])
    w13, w2, *biases = (leaf(t[experts]) for t in (batch.w13, batch.w2, *batch.biases))
    y = uniep.moe(x, batch.ids[rows], weights, w13, w2, workspace=ws, **named(biases))
    y.backward(batch.dy[rows])
    grads = [t.grad for t in (x, weights, w13, w2, *biases)]
    missing = [name for name, g in zip((*FIELDS, *BIASES)[1:], grads, strict=False) if g is None]
    assert not missing, f"rank {ws.rank}: gradients are None: {missing}"
    return Outcome(y.detach(), *grads)


def forward_only(ws: uniep.Workspace, batch: Batch) -> Tensor:
    """This rank's part of one forward without gradients."""
    rows, experts = batch.rows(ws.rank, ws.ep_size), batch.experts(ws.rank, ws.ep_size)
    with torch.no_grad():
        return uniep.moe(
            batch.x[rows], batch.ids[rows], batch.weights[rows], batch.w13[experts], batch.w2[experts], workspace=ws,
            **named([b[experts] for b in batch.biases]),
        )  # fmt: skip


def poison(ws: uniep.Workspace) -> None:
    """Fill everything a call may reuse with NaN: shared buffers by a full call, then the allocator's free blocks."""
    cfg = ws.cfg
    tokens, local = cfg.max_tokens_per_rank, cfg.num_experts // ws.ep_size
    ids = (torch.arange(tokens)[:, None] * cfg.top_k + torch.arange(cfg.top_k)) % cfg.num_experts
    full = {"dtype": cfg.dtype, "requires_grad": True}
    x = torch.full((tokens, cfg.hidden), POISON, **full)
    w13 = torch.full((local, cfg.h_columns, cfg.hidden), POISON, **full)
    w2 = torch.full((local, cfg.hidden, cfg.ffn), POISON, **full)
    weights = torch.full(ids.shape, POISON, requires_grad=True)
    columns = {"b13": cfg.h_columns, "b2": cfg.hidden} if cfg.bias else {}
    biases = {name: torch.full((local, n), POISON, **full) for name, n in columns.items()}
    y = uniep.moe(x, ids, weights, w13, w2, **biases, workspace=ws)
    y.backward(torch.full_like(y, POISON))
    del x, w13, w2, biases, y
    blocks = [torch.full((2**size,), POISON) for size in range(8, 20) for _ in range(4)]
    del blocks


def steps_of_rank(world, cfg, batches, ep_size, schedule=None, poisoned=False, repeats=1):
    """[Outcome of each batch, `repeats` times], all with one Workspace."""
    with workspace(world, cfg, ep_size, schedule) as ws:
        if poisoned:
            poison(ws)
        return [forward_backward(ws, batch) for _ in range(repeats) for batch in batches]


def gather(per_rank: list[Outcome]) -> Outcome:
    names = FIELDS if per_rank[0].db13 is None else (*FIELDS, *BIASES)
    return Outcome(*(torch.cat([getattr(o, name) for o in per_rank]) for name in names))


def steps(pool, cfg, batches, ep_size, schedule=None, **options) -> list[Outcome]:
    """Gathered outcomes of `batches` run one after another at EP size `ep_size`."""
    arguments = (cfg, batches, ep_size, schedule, options.pop("poisoned", False), options.pop("repeats", 1))
    return [
        gather(list(ranks))
        for ranks in zip(*pool.run(steps_of_rank, *arguments, ranks=ep_size, **options), strict=True)
    ]


def run(pool, cfg, batch, ep_size, schedule=None, **options) -> Outcome:
    """Gathered outcome of one step at EP size `ep_size`."""
    return steps(pool, cfg, [batch], ep_size, schedule, **options)[0]


def oracle(pool, cfg, batch) -> Outcome:
    """uniep's own serial schedule at EP=1, one worker: what every other run must equal bit for bit."""
    return run(pool, dataclasses.replace(cfg, max_tokens_per_rank=max(1, sum(batch.shard_tokens))), batch, 1, SERIAL)


def same_bits(got: Outcome, want: Outcome, what: str = "") -> None:
    """torch.equal on the bit patterns (so NaN equals itself and -0.0 is not 0.0), each tensor on its own."""
    for name in FIELDS:
        equal_bits(getattr(got, name), getattr(want, name), f"{what} {name}")
    for name in BIASES:
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None), f"{what} {name}"
        if a is not None and b is not None:
            equal_bits(a, b, f"{what} {name}")


def equal_bits(a: Tensor, b: Tensor, what: str) -> None:
    assert a.shape == b.shape and a.dtype == b.dtype, f"{what}: {a.shape} {a.dtype} is not {b.shape} {b.dtype}"
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    ints_a, ints_b = a.contiguous().view(integer), b.contiguous().view(integer)
    if not torch.equal(ints_a, ints_b):
        first = tuple(int(v) for v in torch.nonzero(ints_a != ints_b)[0])
        count = int((ints_a != ints_b).sum())
        raise AssertionError(
            f"{what}: {count} of {a.numel()} values differ, first at {first}: {a[first]} is not {b[first]}"
        )


def autograd(batch: Batch, cfg: uniep.MoEConfig, dtype: torch.dtype) -> Outcome:
    """The plain composition and its autograd in `dtype`."""
    leaves = [leaf(t.to(dtype)) for t in (batch.x, batch.weights, batch.w13, batch.w2, *batch.biases)]
    x, weights, w13, w2, *biases = leaves
    how = (cfg.weight_at, cfg.activation, cfg.activation_limit, tuple(biases) or None)
    y = reference.composition(x, batch.ids, weights, w13, w2, *how)
    y.backward(batch.dy.to(dtype))
    return Outcome(y.detach(), *(t.grad for t in leaves))


def flat_rows(name: str, t: Tensor, cfg: uniep.MoEConfig) -> dict[str, Tensor]:
    """Each gradient as rows, the gate and up halves of dw13 apart."""
    if name == "dw13" and cfg.gated:
        return {
            "dw1 (gate)": t[:, : cfg.ffn].reshape(-1, cfg.hidden),
            "dw3 (up)": t[:, cfg.ffn :].reshape(-1, cfg.hidden),
        }
    return {name: t.reshape(-1, t.shape[-1])}


def reordered(batch: Batch, cfg: uniep.MoEConfig, seed: int) -> Outcome:
    """`autograd` in cfg.dtype with T, D and F in another order: the same mathematics, rounded anew.

    Few tokens are joined by copies with dy = 0, so that torch takes the kernels it takes in training;
    those for a handful of rows sum in more and shorter chains.
    """
    g = torch.Generator().manual_seed(seed)
    tokens = len(batch.x)
    copies = max(1, 1024 // max(tokens, 1))
    t, d, f = (torch.randperm(size, generator=g) for size in (copies * tokens, cfg.hidden, cfg.ffn))
    halves = torch.cat([f, f + cfg.ffn]) if cfg.gated else f
    first = (t < tokens)[:, None]
    t = t % max(tokens, 1)
    moved = dataclasses.replace(
        batch,
        x=batch.x[t][:, d],
        ids=batch.ids[t],
        weights=batch.weights[t],
        dy=batch.dy[t][:, d] * first,
        w13=batch.w13[:, halves][:, :, d],
        w2=batch.w2[:, d][:, :, f],
        biases=tuple(b[:, order] for b, order in zip(batch.biases, (halves, d), strict=False)),
    )
    got = autograd(moved, cfg, cfg.dtype)
    place = torch.empty(tokens, dtype=torch.int64)
    place[t[first[:, 0]]] = first[:, 0].nonzero()[:, 0]
    d, f, halves = (order.argsort() for order in (d, f, halves))
    return Outcome(
        got.y[place][:, d],
        got.dx[place][:, d],
        got.dweights[place],
        got.dw13[:, halves][:, :, d],
        got.dw2[:, d][:, :, f],
        None if got.db13 is None else got.db13[:, halves],
        None if got.db2 is None else got.db2[:, d],
    )


def accurate(got: Outcome, batch: Batch, cfg: uniep.MoEConfig) -> None:
    """No row of any tensor is further from fp64 than twice the worst row of torch's own composition in cfg.dtype.

    The worst of several orders of summation: one order's error is a matter of luck, most of all with few rows.
    """
    exact = autograd(batch, cfg, torch.float64)
    plain = [reordered(batch, cfg, seed) for seed in range(8)]
    for name in FIELDS if got.db13 is None else (*FIELDS, *BIASES):
        ours, truth, *theirs = (flat_rows(name, getattr(o, name).double(), cfg) for o in (got, exact, *plain))
        for part, rows in ours.items():
            if not rows.numel():
                continue
            error = (rows - truth[part]).norm(dim=1)
            bound = 2 * torch.stack([t[part] - truth[part] for t in theirs]).norm(dim=2).max()
            worst = int(error.nan_to_num(nan=float("inf")).argmax())
            assert bool((error <= bound).all()), (
                f"{part}: row {worst} is off by {error[worst]:.3g}, allowed {bound:.3g}"
            )


def named_error(function, *args):
    """(class name, message) of the UniEPError that `function(*args)` raises, or None."""
    try:
        function(*args)
    except uniep.UniEPError as error:
        return type(error).__name__, str(error)
    return None

"""What goes wrong around a call, on the real backend, interpreted: late ranks, overflow, memory in bad places."""

import dataclasses

import pytest
import torch
from fused_rank import SCHEDULE
from hopper_on_host import host_backend, host_backends

from uniep.backends.base import Inputs, Needs
from uniep.config import MoEConfig
from uniep.dimension import MEASURED
from uniep.errors import CapacityError, ConfigError, PeerTimeoutError, UniEPError, UnsupportedError
from uniep.kernels import sync
from uniep.launch import operands
from uniep.schedule import Tile, is_valid
from uniep.weights import ExpertWeights

SHAPE = {"hidden": 72, "ffn": 136, "num_experts": 4, "top_k": 2, "max_tokens_per_rank": 40, "dtype": torch.float16}
RUN_AHEAD = 0x7000_0000_0000_0010  # an address that nobody has


def inputs(cfg: MoEConfig, rank: int, ranks: int) -> Inputs:
    generator = torch.Generator().manual_seed(rank)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(cfg.dtype)

    tokens, local = cfg.max_tokens_per_rank, cfg.num_experts // ranks
    w13, w2 = normal(local, 2 * cfg.ffn, cfg.hidden), normal(local, cfg.hidden, cfg.ffn)
    ids_TK = torch.randint(0, cfg.num_experts, (tokens, cfg.top_k), generator=generator)
    weights_TK = torch.rand(tokens, cfg.top_k, generator=generator)
    return Inputs(normal(tokens, cfg.hidden), ids_TK, weights_TK, ExpertWeights((w13,), (w2,), "stacked"))


@pytest.mark.parametrize("overlap", ["fused", "mega"])
@pytest.mark.parametrize("transfer", ["push", "copy"])
def test_a_rank_that_comes_after_its_peer_gave_up_gets_an_error(transfer, overlap):
    """Never a sum of what the peer did not send."""
    cfg = MoEConfig(**SHAPE)
    schedule = dataclasses.replace(SCHEDULE, transfer=transfer, overlap=overlap)
    backends = host_backends(cfg, 2, schedule, timeout_s=0.3)
    for rank, backend in enumerate(backends):
        with pytest.raises(PeerTimeoutError):
            backend.forward(inputs(cfg, rank, 2), save=False)
            backend.check()


def test_a_forward_against_a_backward_is_an_error_on_both_ranks():
    cfg = MoEConfig(**SHAPE)
    first, second = host_backends(cfg, 2, SCHEDULE, timeout_s=0.3)
    second.planner.enter(None, None, 40, "backward", forward=second.planner.call)
    second.planner.is_inside = False
    said = r"different operations in call 1 \(rank 0: forward without gradients, rank 1: backward\). rank 0 is ahead"
    with pytest.raises(UniEPError, match=said):
        first.forward(inputs(cfg, 0, 2), save=False)
    second.planner.wait_entered()
    with pytest.raises(UniEPError, match=said):
        second.check()


@pytest.mark.parametrize("overlap", ["fused", "mega"])
def test_overflow_seen_late_reads_nothing(overlap):
    """The host queues the backward before it sees that rows did not fit: no address of no row is followed."""
    cfg = MoEConfig(**SHAPE | {"max_rows": 20, "num_experts": 2, "max_tokens_per_rank": 160})
    backend = host_backends(cfg, 1, dataclasses.replace(SCHEDULE, overlap=overlap))[0]
    given, check, empty = inputs(cfg, 0, 1), backend.planner.check, torch.empty
    backend.planner.check = lambda: None
    y_TD, saved = backend.forward(given, save=True)
    assert y_TD.isnan().all()

    def filled(*args, **kwargs):
        made = empty(*args, **kwargs)
        return made.fill_(RUN_AHEAD) if made.dtype == torch.int64 else made

    torch.empty = filled
    try:
        grads = backend.backward(torch.ones_like(y_TD), given, saved, Needs())
    finally:
        torch.empty = empty
    assert all(gradient.isnan().all() for gradient in (grads.x, grads.weights, *grads.w13, *grads.w2))
    with pytest.raises(CapacityError, match="max_rows=20"):
        check()


@pytest.mark.parametrize("overlap", ["pipelined", "mega"])
@pytest.mark.parametrize("timeout_s", [0.5, 1.5])
def test_pipelined_waits_as_long_as_it_is_told(timeout_s, overlap):
    """Twice the timeout in nanoseconds does not fit 32 bits from 1.07 s on."""
    cfg = MoEConfig(**SHAPE)
    backend = host_backends(cfg, 1, dataclasses.replace(SCHEDULE, overlap=overlap), timeout_s=timeout_s)[0]
    backend.forward(inputs(cfg, 0, 1), save=False)
    backend.check()


@pytest.mark.parametrize("which", ["transposed", "every other value", "odd address"])
def test_weights_that_block_loads_cannot_read_are_refused_before_anything_moves(which):
    cfg = MoEConfig(**SHAPE)
    backend, given = host_backends(cfg, 1, SCHEDULE)[0], inputs(cfg, 0, 1)
    w2 = given.experts.w2[0]
    if which == "transposed":
        bad = w2.transpose(1, 2).contiguous().transpose(1, 2)
    elif which == "every other value":
        bad = torch.zeros(*w2.shape[:2], 2 * w2.shape[2], dtype=w2.dtype)[..., ::2]
    else:
        bad = torch.zeros(w2.numel() + 1, dtype=w2.dtype)[1:].view(w2.shape)
    experts = ExpertWeights(given.experts.w13, (bad,), "stacked")
    with pytest.raises(UnsupportedError, match="w2 has strides"):
        backend.forward(dataclasses.replace(given, experts=experts), save=False)
    assert backend.planner.calls_made == 0


def test_a_pair_that_no_tensor_map_covers_is_refused():
    """w3 a part of a larger tensor, w1 not: with the strides of w1, experts behind the first would read other rows."""
    cfg = MoEConfig(**SHAPE)
    backend, given = host_backends(cfg, 1, SCHEDULE)[0], inputs(cfg, 0, 1)
    w13 = given.experts.w13[0]
    experts = ExpertWeights((w13[:, : cfg.ffn].clone(), w13[:, cfg.ffn :]), given.experts.w2, "split")
    with pytest.raises(UnsupportedError, match=r"w1 and w3 have strides \(9792, 72, 1\) and \(19584, 72, 1\)"):
        backend.forward(dataclasses.replace(given, experts=experts), save=False)
    assert backend.planner.calls_made == 0


@pytest.mark.parametrize("overlap", ["fused", "mega"])
def test_a_pair_far_apart_is_copied(overlap, monkeypatch, caplog):
    """As where an allocator has taken memory from both ends of the addresses."""
    cfg = MoEConfig(**SHAPE)
    backend, given = host_backends(cfg, 1, dataclasses.replace(SCHEDULE, overlap=overlap))[0], inputs(cfg, 0, 1)
    dy_TD = torch.randn(given.x_TD.shape).to(cfg.dtype)
    gate, up = given.experts.w13[0].unflatten(1, (2, -1)).transpose(0, 1).contiguous()

    def results(experts):
        at = dataclasses.replace(given, experts=experts)
        y_TD, saved = backend.forward(at, save=True)
        got = backend.backward(dy_TD, at, saved, Needs())
        return y_TD, got.x, torch.cat(got.w13, 1), *got.w2

    want = results(given.experts)
    monkeypatch.setattr(operands, "MAX_STRIDE_BYTES", gate[0].nbytes + 1)
    operands._tell_of_copies.cache_clear()
    for pair in ((gate, up), (up.clone(), gate.clone())[::-1]):
        assert all(map(torch.equal, want, results(ExpertWeights(pair, given.experts.w2, "split"))))
    assert "every call copies both" in caplog.text


@pytest.mark.parametrize("overlap", ["fused", "mega"])
def test_inputs_and_gradients_at_odd_addresses(overlap):
    """The same bits, and kernels get addresses that they were compiled for."""
    cfg = MoEConfig(**SHAPE)
    backend, given = host_backends(cfg, 1, dataclasses.replace(SCHEDULE, overlap=overlap))[0], inputs(cfg, 0, 1)
    dy_TD = torch.randn(given.x_TD.shape).to(cfg.dtype)

    def odd(matrix: torch.Tensor) -> torch.Tensor:
        moved = torch.empty(matrix.numel() + 1, dtype=matrix.dtype)[1:].view(matrix.shape)
        assert moved.data_ptr() % 16
        return moved.copy_(matrix)

    def plan(*tensors, **options):
        assert not any(t.data_ptr() % 16 for t in tensors if isinstance(t, torch.Tensor))
        return made(*tensors, **options)

    made, backend.planner.plan = backend.planner.plan, plan
    results = []
    for x, ids, weights, dy in (
        (given.x_TD, given.ids_TK, given.weights_TK, dy_TD),
        [odd(t) for t in (given.x_TD, given.ids_TK, given.weights_TK, dy_TD)],
    ):
        moved = Inputs(x, ids, weights, given.experts)
        y_TD, saved = backend.forward(moved, save=True)
        got = backend.backward(dy, moved, saved, Needs())
        results.append((y_TD, got.x, got.w13[0], got.w2[0]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_programs_that_would_all_push_are_refused():
    cfg, schedule = MoEConfig(**SHAPE), dataclasses.replace(SCHEDULE, push_programs=MEASURED.sms)
    (reason,) = is_valid(schedule, cfg, 2, "hopper")
    assert f"push_programs is {MEASURED.sms}, but kernels that push or pull have {MEASURED.sms} programs here" in reason
    copied = dataclasses.replace(schedule, transfer="copy")
    assert is_valid(schedule, cfg, 1, "hopper") == is_valid(copied, cfg, 2, "hopper") == []


def test_tiles_that_would_read_other_segments_are_refused():
    for name, tile in (
        ("weight_gradient", Tile(depth=256)),
        ("down", Tile(group_rows=65)),
        ("gate_up", Tile(group_rows=0)),
    ):
        assert any(
            name in reason for reason in is_valid(dataclasses.replace(SCHEDULE, **{name: tile}), MoEConfig(**SHAPE))
        )


def test_multiprocessors_left_free():
    """Persistent kernels have fewer programs; some must be left."""
    cfg = MoEConfig(**SHAPE)
    usual = host_backends(cfg, 1, SCHEDULE)[0].sms
    fewer = host_backends(cfg, 1, dataclasses.replace(SCHEDULE, free_sms=1))[0]
    assert (fewer.sms, fewer.planner.sms) == (usual - 1, usual - 1)
    with pytest.raises(ConfigError, match=f"free_sms is {usual}, but this GPU has {usual} multiprocessors"):
        host_backends(cfg, 1, dataclasses.replace(SCHEDULE, free_sms=usual))
    assert any("free_sms" in reason for reason in is_valid(dataclasses.replace(SCHEDULE, free_sms=-1), cfg))


def test_room_for_one_of_two_groups_with_the_same_experts():
    """Memory is planned for the group with its copies: alone, EP 1 cannot keep two blocks."""
    cfg = MoEConfig(**SHAPE, gradient_shards=2)
    memory = [torch.zeros(1 << 20, dtype=torch.uint8)]
    assert host_backend(cfg, 0, 1, lambda size: memory, SCHEDULE, copies=2).num_ranks == 1
    with pytest.raises(ConfigError, match="gradient_shards=2 cannot be blocks of whole ranks of 1 EP groups"):
        host_backend(cfg, 0, 1, lambda size: memory, SCHEDULE)


def test_who_gives_up_at_the_entry_tells_first():
    """Before its copies begin, a late peer's status says so, and why."""
    cfg = MoEConfig(**SHAPE | {"max_rows": 80})
    first, second = host_backends(cfg, 2, dataclasses.replace(SCHEDULE, transfer="copy"), timeout_s=0.3)
    told = []
    first.send = lambda x_TD, **which: told.append(int(second.planner.status[0]))
    first.forward(inputs(cfg, 0, 2), save=False)
    assert told and told[0] > 0
    with pytest.raises(PeerTimeoutError, match=r"rank 1 cannot go on: rank 0 failed with .*waited in vain in call 1"):
        second.check()
    with pytest.raises(PeerTimeoutError, match="rank 1 did not come"):
        first.check()


@pytest.mark.parametrize(
    ("stage", "wanted"),
    [(stage, "8 tiles") for stage in ("ROWS", "SUM", "RAW", "ACTIVATED")]
    + [(stage, "signal 8") for stage in ("DISPATCH", "COMBINE")],
)
def test_a_wait_for_own_programs_names_no_peer(stage, wanted):
    backend = host_backends(MoEConfig(**SHAPE), 2, SCHEDULE)[1]
    planner = backend.planner
    planner.calls_made = 3
    planner._words[:5] = [sync.TIMEOUT.value, getattr(sync, f"STAGE_{stage}").value, 1, 8, 5]
    said = r"^rank 1, call 3: its own (rows of|pulls of|results for) .* were not there within 60 s "
    said += rf"\(Workspace \d+; expected {wanted}.*, seen 5\)"
    with pytest.raises(PeerTimeoutError, match=said):
        backend.check()

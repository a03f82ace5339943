"""The GEMM and row kernels, interpreted, one by one against torch.

Two kinds of data.  `integers`: sums are exact in fp32, so results must equal torch's bit for bit, whatever the
order.  `normal`: a sum of n products a.b may be off by n ulps of sum |a||b| in fp32, and by half an ulp of the
result when it is rounded to the layer's dtype; nothing else is allowed.
"""

import dataclasses
import itertools
import threading
import time

import pytest
import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from uniep.activation import ACTIVATIONS
from uniep.config import COLUMN_GROUP, ROW_ALIGN, MoEConfig
from uniep.kernels.arguments import (
    Activation,
    Addresses,
    Layer,
    Product,
    Rows,
    Sending,
    Sums,
    TileShape,
    Tokens,
    Wire,
)
from uniep.kernels.biases import bias_gradient_kernel
from uniep.kernels.gemm import gate_up_kernel, product_kernel
from uniep.kernels.gradients import activation_gradient_kernel, weight_gradient_kernel
from uniep.kernels.header import STATUS_HOST
from uniep.kernels.sync import STAGE_DISPATCH, STAGE_ENTRY, TIMEOUT, every_rank, wait_for
from uniep.kernels.transfer import (
    combine_kernel,
    dweights_kernel,
    expand_kernel,
    push_rows_kernel,
    push_tokens_kernel,
    row_addresses_kernel,
)
from uniep.launch.driver import Bundle
from uniep.launch.operands import Peers
from uniep.launch.staged import (
    launch_block_gradient,
    launch_claimed_activation_gradient,
    launch_weight_gradient,
)
from uniep.layout import GROUP_BITS, group_words
from uniep.numerics import (
    add_ascending,
    bias_groups,
    column_group_sums,
    combine_slots,
    row_block_sums,
    widened,
)
from uniep.routing import build_plan, row_blocks
from uniep.schedule import Tile

D, F, K, TOKENS = 136, 200, 3, (150, 45)  # no multiples of a tile in any direction
LOCAL, EMPTY = 4, 2  # experts of a rank, and one without rows
PROGRAMS = 3
BIG, SMALL = Tile(rows=128, columns=256, depth=64), Tile(rows=64, columns=128, depth=32)
DTYPES = {"fp16": torch.float16, "fp32": torch.float32}
UNIT = {torch.float16: 2.0**-11, torch.float32: 2.0**-24}  # half an ulp, relative
TINY = {torch.float16: 2.0**-25, torch.float32: 2.0**-126}  # and absolute, below the normal numbers
EPS = 2.0**-24

CHOICES = {
    "dtype": DTYPES,
    "tile": {"128x256x64": BIG, "64x128x32": SMALL},
    "weight_at": {"output": "output", "activation": "activation"},
    "data": {"integers": "integers", "normal": "normal"},
    "up_first": {"gate first": False, "up first": True},
    "gathered": {"rows": False, "addresses": True},
    "transposed": {"dW": False, "dW transposed": True},
    "apart": {"added": False, "apart": True},
    "main_grad": {"no main_grad": None, "overwrite": "overwrite", "accumulate": "accumulate"},
}
"""Argument of a test -> its values by name."""

both_dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
both_weightings = pytest.mark.parametrize("weight_at", ["output", "activation"])


def every_pair(*arguments: str) -> pytest.MarkDecorator:
    """Parametrises by as few cases as a greedy choice finds in which any two values of two arguments meet."""
    cases = list(itertools.product(*(CHOICES[name] for name in arguments)))

    def pairs(case: tuple[str, ...]) -> set:
        return set(itertools.combinations(enumerate(case), 2))

    missing, chosen = set().union(*map(pairs, cases)), []
    while missing:
        chosen.append(max(cases, key=lambda case: len(pairs(case) & missing)))
        missing -= pairs(chosen[-1])
    values = [[CHOICES[name][value] for name, value in zip(arguments, case, strict=True)] for case in chosen]
    return pytest.mark.parametrize(arguments, values, ids=["-".join(case) for case in chosen])


def made(shape: tuple[int, ...], dtype: torch.dtype, data: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if data == "integers":
        return torch.randint(-1, 2, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype)


BUNDLES = {
    "tokens": Tokens, "rows": Rows, "wire": Wire, "sums": Sums, "made": Activation, "addresses": Addresses,
    "LAYER": Layer, "PRODUCT": Product, "SENDING": Sending,
}  # fmt: skip


def launch(kernel, tile: Tile | None = None, **given) -> None:
    """Run a kernel that has no peers, by the names of its arguments and of the fields of its bundles; `given` replaces
    the rest."""
    usual = {
        "status": torch.zeros(16, dtype=torch.int32), "timeout_ns": 0, "rank": 0, "arrived_offset": 0,
        "finished_offset": 0, "num_tokens": 0, "push_programs": 0, "push_rounds": 0, "programs": PROGRAMS,
        "address_ptr": None,
        "COUNT_TILES": False, "TILES_BEFORE": 0, "NUM_RANKS": 1, "CHUNK": 1, "RECEIVE_BLOCK": 1, "PUSH_D": 16,
        "PUSH_ROWS": 1, "FUSED": False, "D": D, "F": F, "K": K, "ACTIVATION": "swiglu",
        "GATED": True, "LIMIT": None, "CHECKED": False, "b13_ptr": None, "bias_ptr": None, "b2_ptr": None,
        "dy_ptr": None, "low_desc": None, "factor_desc": None, "PART": None,
    }  # fmt: skip
    if tile is not None:
        usual |= {"TILE": TileShape(tile.rows, tile.columns, tile.depth, 2), "BLOCK_M": tile.rows}
    usual |= given

    def argument(name: str):
        if name in usual:
            return usual[name]
        bundle = BUNDLES[name]
        return bundle(*(usual.get(field) for field in bundle._fields))

    kernel[(PROGRAMS,)](**{name: argument(name) for name in kernel.arg_names})


def describe(base: Tensor, *block: int) -> TensorDescriptor:
    return TensorDescriptor(base, list(base.shape), list(base.stride()), list(block))


@dataclasses.dataclass
class Problem:
    """Rank 0 of two: its plan as tables, its tokens and those received, every row's input."""

    cfg: MoEConfig
    plan: object
    weight_N: Tensor
    tables: dict[str, Tensor]
    x_TD: Tensor
    receive_MD: Tensor
    x_ND: Tensor
    w13_e2FD: Tensor
    w2_eDF: Tensor

    @property
    def used(self) -> Tensor:
        return self.plan.row_return_N >= 0

    @property
    def row_expert(self) -> Tensor:
        return torch.searchsorted(self.plan.expert_start_e1, torch.arange(self.plan.num_rows), right=True) - 1

    def w13_desc(self, up_first: bool, *block: int) -> TensorDescriptor:
        return describe(self.w13_e2FD.flip(1) if up_first else self.w13_e2FD, *block)


def problem(dtype: torch.dtype, data: str, weight_at: str = "output", height: int = 128) -> Problem:
    cfg = MoEConfig(
        hidden=D, ffn=F, num_experts=2 * LOCAL, top_k=K, max_tokens_per_rank=max(TOKENS), dtype=dtype,
        weight_at=weight_at,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    ids_of_rank = [torch.randint(-1, 2 * LOCAL, (t, K), generator=generator) for t in TOKENS]
    for ids in ids_of_rank:
        ids[ids == EMPTY] = 0
    plan = build_plan(ids_of_rank, 0, cfg, align=height)
    sent = build_plan(ids_of_rank, 1, cfg).send_token_RT[0, : plan.recv_count_R[1]].long()
    x_TD, peer_TD = made((TOKENS[0], D), dtype, data, 2), made((TOKENS[1], D), dtype, data, 3)
    receive_MD = torch.full((cfg.receive_slots(2) + 1, D), float("nan"), dtype=dtype)
    receive_MD[: len(sent)] = peer_TD[sent]
    receive_MD[-1] = 0
    source = plan.row_source_N.long()
    x_ND = torch.where((source >= 0)[:, None], x_TD[source.clamp(min=0)], receive_MD[(-source - 1).clamp(min=0)])
    weight_N = torch.rand(plan.num_rows, generator=generator) + 0.25
    weight_N[plan.row_return_N < 0] = 0
    tiles = plan.num_rows // height
    tile_starts = torch.arange(tiles, dtype=torch.int32) * height
    totals = torch.tensor([plan.num_rows, tiles, 0, 0], dtype=torch.int32)
    tables = {
        "source_N": plan.row_source_N, "return_N": plan.row_return_N, "weight_N": weight_N,
        "start_e1": plan.expert_start_e1, "totals": totals,
        "expert_M": (expert_M := torch.searchsorted(plan.expert_start_e1, tile_starts, right=True).int() - 1),
        "group_M": (group_M := group_words(expert_M, plan.expert_start_e1.diff() // height, 2)),
        **shuffled_groups(group_M, generator),  # no order may change a result
    }  # fmt: skip
    w13, w2 = made((LOCAL, 2, F, D), dtype, data, 4), made((LOCAL, D, F), dtype, data, 5)
    return Problem(cfg, plan, weight_N, tables, x_TD, receive_MD, x_ND, w13, w2)


def shuffled_groups(group_M: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """An order of row tiles that keeps their groups together, and the groups there."""
    first_M = torch.arange(len(group_M)) - (group_M >> GROUP_BITS & 2**GROUP_BITS - 1)
    key_M = torch.randperm(len(group_M), generator=generator)[first_M]
    order_M = key_M.argsort(stable=True)
    return {"order_M": order_M.int(), "order_group_M": group_M[order_M]}


def unwritten(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def row_products(a_NX: Tensor, b_eXY: Tensor, expert_N: Tensor) -> Tensor:
    """a[n] @ b[expert of n] in fp64."""
    out = torch.zeros(len(a_NX), b_eXY.shape[2], dtype=torch.float64)
    for expert in range(len(b_eXY)):
        mine = expert_N == expert
        out[mine] = a_NX[mine].double() @ b_eXY[expert].double()
    return out


def assert_products(got: Tensor, a: Tensor, b: Tensor, expert_N: Tensor, data: str) -> None:
    """`got` is cast(a @ b) within the bound of fp32 accumulation; exactly, for integers."""
    exact = row_products(a, b, expert_N)
    if data == "integers":
        assert torch.equal(got, exact.to(got.dtype))
        return
    bound = a.shape[1] * EPS * row_products(a.abs(), b.abs(), expert_N)
    assert_within(got, exact, bound)


def assert_within(got: Tensor, exact: Tensor, bound: Tensor) -> None:
    """|got - exact| <= bound, and one rounding to the dtype of `got`."""
    unit, tiny = UNIT[got.dtype], TINY[got.dtype]
    excess = (got.double() - exact).abs() - (bound * (1 + unit) + unit * exact.abs() + tiny)
    assert not excess.isnan().any()
    assert excess.max() <= 0, f"off by {float(excess.max()):.3e} more than the bound"


def gate_up(
    p: Problem, tile: Tile, *, up_first: bool = False, save: bool = True, gathered: bool = True,
    address_N: Tensor | None = None, act: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    n, dtype, half = p.plan.num_rows, p.cfg.dtype, tile.columns // 2
    h_2NF, act_NF = unwritten(2, n, F, dtype=dtype), unwritten(n, F, dtype=dtype)
    received_MD = p.receive_MD.clone()
    received_MD[-1] = float("nan")  # pad rows are zero, not read
    launch(
        gate_up_kernel, tile, **p.tables, local=p.x_TD, received=received_MD, NUM_RANKS=2,
        RECEIVE_BLOCK=len(received_MD) - 1,
        w13_desc=p.w13_desc(up_first, 1, 2, half, tile.depth),
        gate_desc=describe(h_2NF[0], tile.rows, half) if save else None,
        up_desc=describe(h_2NF[1], tile.rows, half) if save else None,
        act_desc=describe(act_NF, tile.rows, half) if act else None, address_ptr=address_N,
        WEIGHTED=p.cfg.weight_at == "activation", UP_FIRST=up_first,
        rows_desc=None if gathered else describe(p.x_ND, tile.rows, tile.depth),
    )  # fmt: skip
    return h_2NF.transpose(0, 1), act_NF


@every_pair("dtype", "data", "weight_at", "up_first", "tile")
def test_gate_up(dtype, data, weight_at, up_first, tile):
    p = problem(dtype, data, weight_at, tile.rows)
    h_N2F, act_NF = gate_up(p, tile, up_first=up_first)
    assert_products(h_N2F.flatten(1), p.x_ND, p.w13_e2FD.flatten(1, 2).mT, p.row_expert, data)
    gate, up = h_N2F.double().unbind(1)
    exact = gate * torch.sigmoid(gate) * up
    if weight_at == "activation":
        exact *= p.weight_N[:, None]
    assert_within(act_NF, exact, 8 * EPS * exact.abs() + 2.0**-126)  # at most 8 roundings in fp32
    assert not h_N2F[~p.used].any()
    assert not act_NF[~p.used].any()


@both_weightings
def test_gate_up_variants(weight_at):
    """Not saving h, reading expanded rows, or rows by their addresses change no bit; what is not saved is not
    touched."""
    p = problem(torch.float16, "normal", weight_at)
    h_N2F, act_NF = gate_up(p, BIG)
    untouched_N2F, got_NF = gate_up(p, BIG, save=False)
    assert torch.equal(got_NF, act_NF)
    assert untouched_N2F.isnan().all()
    p.receive_MD.fill_(float("nan"))  # with expanded rows nobody reads it
    expanded_N2F, got_NF = gate_up(p, BIG, gathered=False)
    assert torch.equal(expanded_N2F, h_N2F)
    assert torch.equal(got_NF, act_NF)
    rows = torch.arange(len(p.x_ND) + 2 * ROW_ALIGN) % len(p.x_ND)
    address_N = p.x_ND.data_ptr() + rows * p.x_ND.stride(0) * p.x_ND.element_size()
    p.x_TD.fill_(float("nan"))
    again_N2F, untouched_NF = gate_up(p, BIG, address_N=address_N, act=False)
    assert torch.equal(again_N2F, h_N2F)
    assert untouched_NF.isnan().all()


class Mailbox:
    """Return slots and flags of two ranks, and the arguments that address them."""

    def __init__(self, cfg: MoEConfig) -> None:
        self.slots = cfg.max_tokens_per_rank * cfg.top_k
        self.returns = [unwritten(self.slots, D, dtype=cfg.dtype) for _ in range(2)]
        self.flags = [torch.zeros(8, dtype=torch.int32) for _ in range(2)]
        self.ticket = torch.zeros(1, dtype=torch.int32)
        self.arguments = {
            "returns_table": addresses(self.returns), "flag_table": addresses(self.flags), "returned_offset": 5,
            "call": torch.tensor([9], dtype=torch.int32), "return_ticket": self.ticket, "NUM_RANKS": 2,
            "SLOTS": self.slots,
        }  # fmt: skip

    def assert_untouched(self) -> None:
        assert all(r.isnan().all() for r in self.returns)
        assert not any(f.any() for f in self.flags)

    def assert_holds(self, rows_ND: Tensor, return_N: Tensor) -> None:
        """Each used row lies in its slot, no other slot was touched, both ranks were told."""
        want = torch.cat([torch.full_like(r, float("nan")) for r in self.returns])
        want[return_N[return_N >= 0].long()] = rows_ND[return_N >= 0]
        assert torch.equal(torch.cat(self.returns).nan_to_num(12345.0), want.nan_to_num(12345.0))
        for flags in self.flags:
            assert flags.tolist() == [0, 0, 0, 0, 0, 9, 0, 0]
        assert self.ticket.item() == 0


def addresses(tensors: list[Tensor]) -> Tensor:
    return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64)


def check_return(p: Problem, tile: Tile, a_NX: Tensor, b_eXD: Tensor, data: str, **direction) -> None:
    """a @ b by product_kernel: in place, then scattered."""
    out_ND, box = unwritten(p.plan.num_rows, D, dtype=p.cfg.dtype), Mailbox(p.cfg)
    columns = tile.columns // (4 if p.cfg.dtype == torch.float32 else 2)
    arguments = {
        **p.tables, **box.arguments, **direction, "a_desc": describe(a_NX, tile.rows, tile.depth),
        "out_desc": describe(out_ND, tile.rows, columns), "DEPTH": F, "WIDTH": D,
    }  # fmt: skip
    launch(product_kernel, tile, **arguments, SCATTER=False)
    assert_products(out_ND, a_NX, b_eXD, p.row_expert, data)
    assert not out_ND[~p.used].any()
    box.assert_untouched()
    in_place = out_ND.clone()
    launch(product_kernel, tile, **arguments, SCATTER=True)
    box.assert_holds(in_place, p.plan.row_return_N)
    assert torch.equal(out_ND, in_place)


@every_pair("dtype", "data", "tile")
def test_return_of_outputs(dtype, data, tile):
    """act @ W2^T."""
    p = problem(dtype, data, height=tile.rows)
    act_NF = made((p.plan.num_rows, F), dtype, data, 6) * p.used[:, None]
    w2_desc = describe(p.w2_eDF, 1, tile.columns, tile.depth)
    check_return(p, tile, act_NF, p.w2_eDF.mT, data, b_desc=w2_desc, HALVES=1, TRANSPOSED=True, UP_FIRST=False)


@every_pair("dtype", "data", "up_first", "tile")
def test_return_of_gradients(dtype, data, up_first, tile):
    """dh @ W13, gate and up in one contraction."""
    p = problem(dtype, data, height=tile.rows)
    dh_NH = made((p.plan.num_rows, 2 * F), dtype, data, 6) * p.used[:, None]
    desc = p.w13_desc(up_first, 1, 1, tile.depth, tile.columns)
    w13 = p.w13_e2FD.flatten(1, 2)
    check_return(p, tile, dh_NH, w13, data, b_desc=desc, HALVES=2, TRANSPOSED=False, UP_FIRST=up_first)


@every_pair("data", "tile")
def test_product_in_fp32(data, tile):
    """dO @ W2 of 16-bit operands, not rounded."""
    p = problem(torch.float16, data, height=tile.rows)
    raw_NF = unwritten(p.plan.num_rows, F, dtype=torch.float32)
    launch(
        product_kernel, tile, **p.tables, **Mailbox(p.cfg).arguments, a_desc=describe(p.x_ND, tile.rows, tile.depth),
        b_desc=describe(p.w2_eDF[:, None], 1, 1, tile.depth, tile.columns), DEPTH=D, WIDTH=F, HALVES=1,
        out_desc=describe(raw_NF, tile.rows, tile.columns // 4), TRANSPOSED=False, UP_FIRST=False, SCATTER=False,
    )  # fmt: skip
    assert_products(raw_NF, p.x_ND, p.w2_eDF, p.row_expert, data)


def activation_gradient(p: Problem, raw_NF: Tensor, h_N2F: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    n, dtype = p.plan.num_rows, p.cfg.dtype
    dh_N2F, act_NF = unwritten(n, 2, F, dtype=dtype), unwritten(n, F, dtype=dtype)
    groups_NG = unwritten(n, -(-F // COLUMN_GROUP), dtype=torch.float32)
    launch(
        activation_gradient_kernel, **p.tables, raw_NF=raw_NF, gate_NF=h_N2F[:, 0].contiguous(),
        up_NF=h_N2F[:, 1].contiguous(), dh_N2F=dh_N2F, act_NF=act_NF,
        groups_NG=groups_NG, ROWS=16, COLUMNS=128, WEIGHTED=p.cfg.weight_at == "activation",
    )  # fmt: skip
    return dh_N2F, act_NF, groups_NG


@both_weightings
@both_dtypes
def test_activation_gradient_bits(dtype, weight_at):
    """Where sigmoid is exactly 0 or 1, every formula has one right bit pattern, and so has the pair tree."""
    p = problem(dtype, "normal", weight_at)
    n, generator = p.plan.num_rows, torch.Generator().manual_seed(8)
    gate = torch.tensor([32.0, 64.0, -128.0])[torch.randint(0, 3, (n, F), generator=generator)]
    h_N2F = torch.stack([gate, torch.randn(n, F, generator=generator)], 1).to(dtype) * p.used[:, None, None]
    raw_NF = torch.randn(n, F, generator=generator) * p.used[:, None]
    dh_N2F, act_NF, groups_NG = activation_gradient(p, raw_NF, h_N2F)

    gate, up = (widened(half) for half in h_N2F.unbind(1))
    raw, weight = widened(raw_NF), p.weight_N[:, None]
    activation = ACTIVATIONS[p.cfg.activation]
    act = activation.forward(gate, up)
    scored = act if weight_at == "activation" else act.to(dtype).float()
    d_gate, d_up = activation.backward(gate, up, weight * raw)
    assert torch.equal(act_NF, (weight * scored).to(dtype)[:, :F])
    assert torch.equal(dh_N2F, torch.stack([d_gate, d_up], 1).to(dtype)[..., :F])
    assert torch.equal(groups_NG, column_group_sums(raw * scored))
    one_by_one = (raw * scored).unflatten(-1, (-1, COLUMN_GROUP)).cumsum(-1)[..., -1]
    assert not torch.equal(groups_NG, one_by_one), "the data do not tell one order from another"
    assert not dh_N2F[~p.used].any()
    assert not act_NF[~p.used].any()


def test_activation_gradient_waits_for_its_tiles():
    """Rows and counts that come while the kernel runs: nothing is read before its row tile is done."""
    p, tile = problem(torch.float16, "normal"), Tile(rows=64, columns=128)
    n = p.plan.num_rows
    h_2NF, made_NF = made((2, n, F), torch.float16, "normal", 6), made((n, F), torch.float32, "normal", 7)
    want = activation_gradient(p, made_NF, h_2NF.transpose(0, 1))
    raw_NF, got = torch.full((n, F), float("nan")), [torch.full_like(t, float("nan")) for t in want]
    order_M, progress_M = torch.randperm(n // 64).int(), torch.zeros(n // 64, dtype=torch.int32)
    zero, cursor = torch.zeros(2, dtype=torch.int32).split(1)
    totals = torch.tensor([n, n // 64], dtype=torch.int32)
    rows = Bundle(Rows(zero, None, p.weight_N, *[None] * 4, order_M, *[None] * 4, totals))
    peers = dataclasses.replace(Peers.alone(zero), timeout_ns=10**10)

    def product() -> None:
        for m in torch.randperm(n // 64).tolist():
            for column in range(0, F, 128):
                time.sleep(0.01)
                part = slice(64 * m, 64 * m + 64), slice(column, column + 128)
                raw_NF[part] = made_NF[part]
                progress_M[m] += 1

    thread = threading.Thread(target=product)
    thread.start()
    try:
        made_here = Activation(raw_NF, *h_2NF, *got)
        launch_claimed_activation_gradient(made_here, rows, peers, p.cfg, tile, 1, progress_M, cursor)
    finally:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@both_weightings
@both_dtypes
def test_activation_gradient_errors(dtype, weight_at):
    """Any gate: at most 16 roundings in fp32 of each term, and one to the layer's dtype."""
    p = problem(dtype, "normal", weight_at)
    h_N2F = made((p.plan.num_rows, 2, F), dtype, "normal", 6) * 2
    raw = made((p.plan.num_rows, F), torch.float32, "normal", 7)
    dh_N2F, act_NF, _ = activation_gradient(p, raw, h_N2F)
    gate, up = h_N2F.double().unbind(1)
    weight = p.weight_N[:, None].double()
    sigmoid, d_act = torch.sigmoid(gate), weight * raw
    slope, steep = sigmoid * (1 + gate * (1 - sigmoid)), sigmoid * (1 + gate.abs() * (1 - sigmoid))
    assert_within(dh_N2F[:, 0], d_act * up * slope, 16 * EPS * (d_act * up).abs() * steep)
    assert_within(dh_N2F[:, 1], d_act * gate * sigmoid, 16 * EPS * (d_act * gate).abs() * sigmoid)
    act = gate * sigmoid * up
    once = UNIT[dtype] if weight_at == "output" else 0  # act is rounded before its weight, too
    assert_within(act_NF, weight * act, (once + 8 * EPS) * (weight * act).abs() + TINY[dtype])


@every_pair("dtype", "data", "tile", "gathered", "transposed", "main_grad")
def test_weight_gradient(dtype, data, tile, gathered, transposed, main_grad):
    """a against part of b's columns, into rows with a stride; an expert without rows gets zeros.

    main_grad: into fp32, or added to what is there: the sum of that and the finished gradient, rounded once."""
    p = problem(dtype, data)
    n, first, used = p.plan.num_rows, F, p.used[:, None]
    b_NW = made((n, 2 * F), dtype, data, 6) * used
    address_N = torch.empty(2, n + 256, dtype=torch.int64)
    tokens = Tokens(p.x_TD, p.receive_MD)
    block = len(p.receive_MD) - 1  # of the other rank, and the zero row
    launch(
        row_addresses_kernel, **p.tables, a=tokens, b=tokens, x_N=address_N[0], dy_N=address_N[1], WIDTH=D,
        BLOCK=64, NUM_RANKS=2, RECEIVE_BLOCK=block, kept_block=block,
    )  # fmt: skip
    assert torch.equal(address_N[0, :n], address_N[1, :n])
    height, width = (F, D) if transposed else (D, F)
    out_dtype = torch.float32 if main_grad else dtype
    columns = tile.columns // (4 if out_dtype == torch.float32 else 2)

    def computed(memory: Tensor, accumulate: bool = False) -> Tensor:
        dw = memory[..., :width]
        launch(
            weight_gradient_kernel, tile, a_desc=None if gathered else describe(p.x_ND, tile.depth, tile.rows),
            address_ptr=address_N[0] if gathered else None, start_ptr=p.plan.expert_start_e1,
            status_ptr=torch.zeros(1, dtype=torch.int32), b_desc=describe(b_NW, tile.depth, tile.columns),
            out_desc=describe(dw, 1, *((columns, tile.rows) if transposed else (tile.rows, columns))),
            first_column=first, LOCAL=LOCAL, HEIGHT=D, WIDTH=F, rows_ptr=p.plan.counts_RE.sum(0)[:LOCAL].int(),
            TRANSPOSED=transposed, ACCUMULATE=accumulate,
        )  # fmt: skip
        return dw

    memory = unwritten(LOCAL, height, width + 8, dtype=out_dtype)
    dw = computed(memory)
    if main_grad == "accumulate":
        finished, before = dw.clone(), made(dw.shape, torch.float32, data, 7)
        dw.copy_(before)
        assert torch.equal(computed(memory, accumulate=True), before + finished)
        return
    for expert in range(LOCAL):
        begin, end = p.plan.expert_start_e1[expert : expert + 2].tolist()
        a, b = p.x_ND[begin:end].double(), b_NW[begin:end, first:].double()
        exact, bound = a.T @ b, (end - begin) * EPS * (a.abs().T @ b.abs())
        got = dw[expert].T if transposed else dw[expert]
        if data == "integers" or expert == EMPTY:
            assert torch.equal(got, exact.to(out_dtype))
        else:
            assert_within(got, exact, bound)
    assert memory[..., width:].isnan().all()
    assert p.plan.expert_start_e1[EMPTY] == p.plan.expert_start_e1[EMPTY + 1]


@every_pair("dtype", "tile", "gathered", "transposed", "apart", "main_grad")
def test_block_gradient(dtype, tile, gathered, transposed, apart, main_grad):
    """Each block of ranks has the bits of a product of its rows alone, and sees no rows of others, not even NaN; they
    are added in ascending order, and rounded once.  Blocks end inside of steps; some have no rows; an expert has none.
    """
    counts_Re = torch.tensor([[70, 0, 0], [1, 0, 0], [0, 0, 300], [250, 0, 64], [5, 0, 0], [0, 0, 130]])
    blocks, local, height, width, first = 3, 3, D, F, 8
    rows_e = counts_Re.sum(0)
    start_e1 = torch.cumsum(torch.tensor([0, *(-(-rows_e // ROW_ALIGN) * ROW_ALIGN).tolist()]), 0)
    n = int(start_e1[-1]) + 50  # as in memory with room
    a_NH, b_NW = made((n, height), dtype, "normal", 6), made((n, first + width), dtype, "normal", 7)
    status, options = torch.zeros(1, dtype=torch.int32), {"transposed": transposed, "multiprocessors": 2}
    out_dtype, accumulate = (torch.float32 if main_grad or apart else dtype), main_grad == "accumulate"
    shape = (width, height) if transposed else (height, width)
    of_blocks = row_blocks(counts_Re.int(), start_e1.int(), rows_e.int(), n, blocks, tile.depth)

    def computed() -> Tensor:
        dw = torch.full(((blocks if apart else 1) * local, *shape), 0.3 if accumulate else torch.nan, dtype=out_dtype)
        launch_block_gradient(
            of_blocks.addresses_of(row_addresses(a_NH) if gathered else a_NH), b_NW, first, dw, of_blocks, status,
            tile=tile, accumulate=accumulate, apart=apart, **options,
        )  # fmt: skip
        return dw.view(-1, local, *shape)

    def alone(expert: int, block: int) -> Tensor:
        """From rows in memory of their own, zeros behind."""
        before = int(start_e1[expert] + counts_Re[: 2 * block, expert].sum())
        count = int(counts_Re[2 * block : 2 * block + 2, expert].sum())
        a, b = (torch.cat([t[before : before + count], t.new_zeros(512, t.shape[1])]) for t in (a_NH, b_NW))
        dw, start = torch.empty(1, *shape), torch.zeros(1, dtype=torch.int32)
        rows = torch.tensor([count], dtype=torch.int32)
        narrow = dataclasses.replace(tile, columns=128)  # which the interpreter's products would show
        launch_weight_gradient(a, b, first, dw, start, rows, status, tile if apart else narrow, **options)
        return dw[0]

    got = computed()
    each_Be = torch.stack([torch.stack([alone(e, b) for e in range(local)]) for b in range(blocks)])
    want = each_Be if apart else ((each_Be[0] + each_Be[1]) + each_Be[2])[None]
    assert torch.equal(got, (0.3 + want if accumulate else want).to(out_dtype)) and not each_Be[:, 1].any()
    if not apart:
        assert not torch.equal(each_Be[0] + (each_Be[1] + each_Be[2]), want[0]), "the data tell no order from another"
    else:
        for t in (a_NH, b_NW):
            t[: counts_Re[:2, 0].sum()] = torch.nan  # block 0 of expert 0
        assert computed()[0, 0].isnan().all() and torch.equal(computed()[1:], got[1:])
    status.fill_(1)
    assert computed().isnan().all()


@both_dtypes
def test_expand(dtype):
    p = problem(dtype, "normal")
    out_ND = unwritten(p.plan.num_rows, D, dtype=dtype)
    given = {"local": p.x_TD, "received": p.receive_MD, "out_ptr": out_ND}
    launch(expand_kernel, BIG, **p.tables, **given, BLOCK_D=64, ROWS=16)
    assert torch.equal(out_ND, p.x_ND)
    assert not out_ND[~p.used].any()


@pytest.mark.parametrize("height", [64, 128])
def test_dweights(height):
    """Groups added in ascending order, bit for bit, into the slots of both source ranks.  Rows behind the last tile,
    here one tile's, are those of an earlier call: nothing of them is stored."""
    p = problem(torch.float16, "normal", height=height)
    p.tables["totals"] -= torch.tensor([height, 1, 0, 0], dtype=torch.int32)
    here = p.used & (torch.arange(p.plan.num_rows) < p.plan.num_rows - height)
    assert int(p.tables["totals"][0]) % 128 == height % 128 and int(here.sum()) < int(p.used.sum())
    groups_NG = made((p.plan.num_rows, 4), torch.float32, "normal", 6)
    slots = p.cfg.max_tokens_per_rank * K
    got = [unwritten(slots, dtype=torch.float32) for _ in range(2)]
    given = {
        "groups_ptr": groups_NG,
        "dweights_table": addresses(got),
        "status": torch.zeros(1, dtype=torch.int32),
    }
    constants = {"GROUPS": 4, "SLOTS": slots, "BLOCK_M": height}
    launch(dweights_kernel, **p.tables, **given, **constants)
    given["status"].fill_(1)
    launch(dweights_kernel, **p.tables, **given | {"groups_ptr": groups_NG + 1}, **constants)
    want = unwritten(2 * slots, dtype=torch.float32)  # after a failure nothing is stored
    want[p.plan.row_return_N[here].long()] = add_ascending(groups_NG)[here]
    assert torch.equal(torch.cat(got).nan_to_num(12345.0), want.nan_to_num(12345.0))
    assert not torch.equal(add_ascending(groups_NG), add_ascending(groups_NG.flip(1)))


def row_addresses(rows_NX: Tensor) -> Tensor:
    return rows_NX.data_ptr() + torch.arange(len(rows_NX)) * (rows_NX.shape[1] * rows_NX.element_size())


@both_dtypes
def test_dweights_with_biases(dtype):
    """Behind the column groups come those of dO . b2, bit for bit; experts of row tiles of 64 rows."""
    p = problem(dtype, "normal", height=64)
    groups_NG, b2_eD = made((p.plan.num_rows, 4), torch.float32, "normal", 6), made((LOCAL, D), dtype, "normal", 7)
    slots = p.cfg.max_tokens_per_rank * K
    got = [unwritten(slots, dtype=torch.float32) for _ in range(2)]
    launch(
        dweights_kernel, **p.tables, groups_ptr=groups_NG, dy_ptr=row_addresses(p.x_ND), b2_ptr=b2_eD,
        dweights_table=addresses(got), GROUPS=4, SLOTS=slots, BLOCK_M=64,
    )  # fmt: skip
    more_NG = torch.cat([bias_groups(p.x_ND[n : n + 1], b2_eD[e]) for n, e in enumerate(p.row_expert.tolist())])
    want = torch.full((2 * slots,), float("nan"))
    both_NG = torch.cat([groups_NG, more_NG], 1)
    want[p.plan.row_return_N[p.used].long()] = add_ascending(both_NG)[p.used]
    assert torch.equal(torch.cat(got).nan_to_num(12345.0), want.nan_to_num(12345.0))
    assert not torch.equal(add_ascending(both_NG), add_ascending(both_NG.flip(1))), (
        "the data tell no order from another"
    )


def zeros_behind(rows_NX: Tensor) -> Tensor:
    return torch.cat([rows_NX, rows_NX.new_zeros(-len(rows_NX) % ROW_ALIGN, rows_NX.shape[1])])


@both_dtypes
@pytest.mark.parametrize("which", ["db13", "db2"])
def test_bias_gradient(dtype, which):
    """Blocks of 128 rows by trees, ascending, bit for bit; rows that fill a segment up are not seen; NaN after a
    failure."""
    width = 2 * F if which == "db13" else D
    count = 3 * ROW_ALIGN - 70  # of the second expert, between two without rows
    tables = {
        "start_ptr": torch.tensor([0, 0, 3, 3], dtype=torch.int32) * ROW_ALIGN,
        "count_ptr": torch.tensor([0, count, 0], dtype=torch.int32),
    }
    weight_N = torch.rand(3 * ROW_ALIGN, generator=torch.Generator().manual_seed(9))
    rows_NW = made((3 * ROW_ALIGN, width), dtype, "normal", 8)
    value_NW = rows_NW.to(torch.float32, copy=True)
    if which == "db2":
        value_NW *= weight_N[:, None]
    value_NW[count:], rows_NW[count:] = 0.0, float("nan")
    given = {"values_ptr": rows_NW, "weight_ptr": None, "address_ptr": None, "b2_ptr": None}
    if which == "db2":
        given = {"values_ptr": None, "weight_ptr": weight_N, "address_ptr": row_addresses(rows_NW), "b2_ptr": rows_NW}
    status = torch.zeros(1, dtype=torch.int32)
    constants = {"LOCAL": 3, "BLOCKS": 1, "APART": False, "WIDTH": width, "COLUMNS": 128}
    got = unwritten(3, width, dtype=dtype)
    run = {**tables, **given, "status_ptr": status, "out_ptr": got, **constants}
    launch(bias_gradient_kernel, **run)
    want = row_block_sums(value_NW)
    assert torch.equal(got[1], want.to(dtype)) and not got[[0, 2]].any()
    assert not torch.equal(want, value_NW.cumsum(0)[-1]), "the data tell no order from another"
    of_blocks = {"LOCAL": 1, "BLOCKS": 3, "out_ptr": unwritten(3, width, dtype=torch.float32)}
    start, count = (torch.tensor(t, dtype=torch.int32) for t in ([0, 7, 200], [7, 193, count - 200]))
    of_blocks |= {"start_ptr": start, "count_ptr": count}
    each = [row_block_sums(zeros_behind(value_NW[s : s + c])) for s, c in zip(start, count, strict=True)]
    launch(bias_gradient_kernel, **(run | of_blocks | {"APART": True}))
    assert torch.equal(of_blocks["out_ptr"], torch.stack(each))
    launch(bias_gradient_kernel, **(run | of_blocks))
    assert torch.equal(of_blocks["out_ptr"][0], (each[0] + each[1]) + each[2])
    status.fill_(1)
    launch(bias_gradient_kernel, **run)
    assert got.isnan().all()


@pytest.mark.parametrize("weights", ["none", "powers of two", "any"])
@both_dtypes
def test_combine(dtype, weights):
    """Slots in ascending order; what unused slots hold does not matter."""
    tokens, top_k = 7, 5
    generator = torch.Generator().manual_seed(1)
    slots_TKD = made((tokens, top_k, D), dtype, "normal", 2)
    ids_TK = torch.randint(-1, 3, (tokens, top_k), generator=generator)
    ids_TK[2] = -1
    slots_TKD[ids_TK < 0] = float("nan")
    weights_TK = None
    if weights == "powers of two":  # exact products: one rounding or two makes no difference
        weights_TK = torch.tensor([0.25, 0.5, 2.0])[torch.randint(0, 3, (tokens, top_k), generator=generator)]
    elif weights == "any":
        weights_TK = torch.rand(tokens, top_k, generator=generator)
    out_TD, status = unwritten(tokens, D, dtype=dtype), torch.zeros(16, dtype=torch.int32)
    arguments = {
        "returns_SD": slots_TKD, "ids_TK": ids_TK, "weights_TK": weights_TK, "out_TD": out_TD, "num_tokens": tokens,
        "status": status, "K": top_k, "BLOCK_D": 64,
    }  # fmt: skip
    launch(combine_kernel, **arguments)
    if weights != "any":
        assert torch.equal(out_TD, combine_slots(slots_TKD, ids_TK, weights_TK).to(dtype))
        backwards = weights_TK.flip(1) if weights_TK is not None else None
        assert not torch.equal(out_TD, combine_slots(slots_TKD.flip(1), ids_TK.flip(1), backwards).to(dtype)) or (
            dtype == torch.float16
        )
    else:
        terms = torch.where((ids_TK >= 0)[..., None], slots_TKD.double() * weights_TK[..., None].double(), 0.0)
        assert_within(out_TD, terms.sum(1), 2 * top_k * EPS * terms.abs().sum(1))
    assert not out_TD[2].any()
    status[0] = 1
    launch(combine_kernel, **arguments)
    assert out_TD.isnan().all()


def test_push_rows():
    p = problem(torch.float16, "normal")
    rows_ND, box = made((p.plan.num_rows, D), torch.float16, "normal", 6), Mailbox(p.cfg)
    launch(push_rows_kernel, **p.tables, **box.arguments, out_ptr=rows_ND, WIDTH=D, BLOCK_D=64, ROWS=8)
    box.assert_holds(rows_ND, p.plan.row_return_N)


@pytest.mark.parametrize("ranks", [2, 4])
def test_push_tokens(ranks):
    """Every peer has exactly its tokens, in list order, and the flags of the chunks that hold any."""
    most, chunk, call = 200, 64, 3
    cfg = MoEConfig(hidden=D, ffn=8, num_experts=ranks, top_k=1, max_tokens_per_rank=most, dtype=torch.float16)
    tokens = (200, 77, 0, 130)[:ranks]
    generator = torch.Generator().manual_seed(1)
    ids_of_rank = [torch.randint(0, ranks, (t, 1), generator=generator) for t in tokens]
    ids_of_rank[0][:130] = ranks - 1  # three chunks to the last rank
    x_of_rank = [made((t, D), torch.float16, "normal", rank) for rank, t in enumerate(tokens)]
    receive = [unwritten(cfg.receive_slots(ranks) + 1, D, dtype=torch.float16) for _ in range(ranks)]
    words = ranks + cfg.receive_slots(ranks) // chunk  # `finished`, then `arrived`
    flags = [torch.zeros(words, dtype=torch.int32) for _ in range(ranks)]
    plans = [build_plan(ids_of_rank, rank, cfg) for rank in range(ranks)]
    for rank, plan in enumerate(plans):
        ticket = torch.zeros(1, dtype=torch.int32)
        launch(
            push_tokens_kernel, x_ptr=x_of_rank[rank], send_token_RT=plan.send_token_RT,
            send_count_R=plan.send_count_R, receive_table=addresses(receive), flag_table=addresses(flags),
            arrived_offset=ranks, finished_offset=0, call=torch.tensor([call], dtype=torch.int32),
            push_ticket=ticket, num_tokens=tokens[rank], rank=rank, WIDTH=D, PUSH_D=64, PUSH_ROWS=16, CHUNK=chunk,
            RECEIVE_BLOCK=cfg.receive_block, NUM_RANKS=ranks,
        )  # fmt: skip
        assert ticket.item() == 0
    for rank in range(ranks):
        want, arrived = torch.full_like(receive[rank], float("nan")), []
        for block, source in enumerate(s for s in range(ranks) if s != rank):
            count = int(plans[rank].recv_count_R[source])
            listed = plans[source].send_token_RT[rank, :count].long()
            want[block * cfg.receive_block :][:count] = x_of_rank[source][listed]
            chunks = cfg.receive_block // chunk
            arrived += [call if c * chunk < count else 0 for c in range(chunks)]
        assert torch.equal(receive[rank].nan_to_num(12345.0), want.nan_to_num(12345.0))
        assert flags[rank].tolist() == [call] * ranks + arrived


def status_record():
    """(host, status): the host's record, and a rank's own that points to it."""
    host, status = torch.zeros(8, dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
    at = STATUS_HOST.value
    status[at : at + 2] = torch.tensor([host.data_ptr()]).view(torch.int32)
    return host, status


@triton.jit
def waiting_kernel(flags_ptr, needed, status_ptr):
    ranks = every_rank(4)
    wait_for(flags_ptr + ranks, ranks, needed, -1, status_ptr, STAGE_ENTRY)


@pytest.mark.parametrize("call", [7, -(2**31) + 1])
def test_a_timeout_names_a_late_peer_with_its_own_flag(call):
    """Of two late ones the last; also where the number of the call has just turned negative."""
    seen = [(call - behind + 2**31) % 2**32 - 2**31 for behind in (5, 0, 3, 0)]
    host, status = status_record()
    waiting_kernel[(1,)](torch.tensor(seen, dtype=torch.int32), call, status)
    assert status[0] == TIMEOUT.value
    assert host[:5].tolist() == [TIMEOUT.value, STAGE_ENTRY.value, 2, call, seen[2]]


@pytest.mark.parametrize("pull", [False, True], ids=["pushed", "pulled"])
def test_a_timeout_of_tokens_names_who_moves_them(pull):
    """Rank 1 of three waits for tokens of rank 2: pushed, rank 2 is late; pulled, its own programs are."""
    host, status = status_record()
    tables = {
        "totals": torch.tensor([16, 1], dtype=torch.int32), "order_M": torch.zeros(1, dtype=torch.int32),
        "source_N": torch.full((16,), -5, dtype=torch.int32),  # the fifth slot, of those behind rank 0's four
    }  # fmt: skip
    launch(
        expand_kernel, **tables, status=status, rank=1, NUM_RANKS=3, RECEIVE_BLOCK=4, CHUNK=2, PULL=pull, FUSED=True,
        call=torch.tensor([6], dtype=torch.int32), finished=torch.tensor([6, 5, 5], dtype=torch.int32),
        arrived=torch.tensor([6, 6, 5, 6], dtype=torch.int32), local=made((1, D), torch.float16, "normal", 1),
        received=made((9, D), torch.float16, "normal", 2), out_ptr=unwritten(16, D, dtype=torch.float16), BLOCK_D=64,
        ROWS=16, BLOCK_M=16,
    )  # fmt: skip
    assert host[:5].tolist() == [TIMEOUT.value, STAGE_DISPATCH.value, 1 if pull else 2, 6, 5]

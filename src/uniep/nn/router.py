"""The router kit: which experts a token goes to, with which weights.  docs/router.md has every formula and order.

The bits of a token's logits, choice, weights and gradient row do not depend on other tokens, ranks or the EP size.  The
losses have the same bits for the same tokens, however these are split over ranks.  Sources: softmax and aux loss,
Switch Transformers (arXiv 2101.03961); z-loss, ST-MoE (2202.08906); selection bias, 2408.15664; groups, DeepSeek-V3
(2412.19437).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from uniep.config import MoEConfig, refused_number
from uniep.errors import ConfigError, DTypeError, InputError, check_kind
from uniep.nn import flops
from uniep.nn.initial import ROUTER, Seed, generator, normal, place, refuse_parametrized
from uniep.nn.invariant import refuse_forward_mode
from uniep.nn.late import LateReads
from uniep.nn.router_config import RouterConfig
from uniep.nn.router_ops import attach_loss, count_load, join_with_error, reduce_counts, router_forward, why_torch
from uniep.routing.plan import find_bad_id
from uniep.workspace import DEFAULT_TIMEOUT_S, Workspace, process_group

log = logging.getLogger("uniep")


class Routing(NamedTuple):
    """The results of a router.

    ids_TK: int64, highest score (with bias) first; -1 where a slot was dropped.  weights_TK: fp32, differentiable.
    aux_loss, z_loss: () fp32, differentiable, over the tokens of all ranks, coefficients included.  The value is the
        same on every rank; a rank's backward gives the part of its own tokens.
    counts_E: (E,) int64, slots of this rank's tokens, including dropped ones.
    dropped: () int64, slots of all ranks that the capacity left out.
    """

    ids_TK: Tensor
    weights_TK: Tensor
    aux_loss: Tensor
    z_loss: Tensor
    counts_E: Tensor
    dropped: Tensor


def choose_experts(
    x_TD: Tensor,
    weight_ED: Tensor,
    top_k: int,
    cfg: RouterConfig,
    *,
    bias_E: Tensor | None = None,
    token_ids_T: Tensor | None = None,
    jitter_seed: int = 0,
    ids_TK: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Routing:
    """The router as a function.  Collective over `group` if `cfg.exchanges`: then every rank calls it the same number
    of times.

    x_TD: (T, D), any floating dtype; T may differ per rank, 0 included.
    weight_ED: (E, D), any floating dtype; logits = x W^T in fp32.  Its gradient is cast once, to its dtype.
    bias_E: (E,) fp32, added for the choice.
    token_ids_T: (T,) int64: jitter, if any, is a function of these and of jitter_seed.  None: no jitter.
    ids_TK: a given choice, as in a replay: only weights are computed; -1 leaves a slot unused, and no capacity applies.
    group: the ranks whose tokens count for losses and capacity; None: this rank only.
    timeout_s: longest wait for a peer in the exchange on the CPU, before PeerTimeoutError.

    Raises ConfigError, DTypeError, InputError; CapacityError on all ranks.  On the CPU, errors of one rank are raised
    on all; on GPUs losses of the others become NaN, which needs no host read.
    **Order**: logits `row_products`; everything else as docs/router.md says.
    """
    name = _group_name(group, cfg)
    with _told(weight_ED, name, timeout_s) as enter:
        _check(x_TD, weight_ED, top_k, cfg, bias_E, token_ids_T, ids_TK)
        refuse_forward_mode({"x": [x_TD], "weight": [weight_ED]})
        x_TD = x_TD.contiguous()
        if not torch.compiler.is_compiling():
            flops.looked_at()
        enter()
        got = router_forward(
            x_TD,
            weight_ED,
            bias_E,
            token_ids_T if cfg.jitter else None,
            ids_TK,
            cfg.text,
            top_k,
            jitter_seed,
            name,
            timeout_s,
        )
    return Routing(*got[:6])


def _group_name(group: dist.ProcessGroup | None, cfg: RouterConfig) -> str:
    """For the operator: name of the group in which it exchanges, or ""."""
    return group.group_name if group is not None and cfg.exchanges and dist.get_world_size(group) > 1 else ""


@contextlib.contextmanager
def _told(weight_ED: Tensor, group: str, timeout_s: float) -> Iterator[Callable[[], None]]:
    """An error raised inside, before the yielded function is called, also reaches the other ranks: they are in an
    exchange."""
    entered = [not group]
    try:
        yield lambda: entered.__setitem__(0, True)
    except Exception as error:
        if not entered[0] and not torch.compiler.is_compiling():
            entered[0] = True
            device = weight_ED.device if not weight_ED.is_meta else torch.device("cpu")
            join_with_error(error, weight_ED.shape[0], group, timeout_s, device)
        raise


def _check(
    x_TD: Tensor,
    weight_ED: Tensor,
    top_k: int,
    cfg: RouterConfig,
    bias_E: Tensor | None,
    token_ids_T: Tensor | None,
    ids_TK: Tensor | None,
) -> None:
    check_kind("cfg", cfg, RouterConfig)
    given = {"x": x_TD, "weight": weight_ED, "bias": bias_E, "token_ids": token_ids_T, "ids": ids_TK}
    for name, value in given.items():
        if value is not None or name in ("x", "weight"):
            check_kind(name, value, Tensor)
    if x_TD.dim() != 2 or weight_ED.dim() != 2 or x_TD.shape[1] != weight_ED.shape[1]:
        raise ConfigError(
            f"x has shape {tuple(x_TD.shape)} and the router's weight {tuple(weight_ED.shape)}; pass (T, D) and (E, D)"
        )
    if not x_TD.is_floating_point() or not weight_ED.is_floating_point():
        raise DTypeError(
            f"x has dtype {x_TD.dtype} and the router's weight {weight_ED.dtype}; both must be floating point"
        )
    num_tokens, num_experts = x_TD.shape[0], weight_ED.shape[0]
    if reason := refused_number(top_k, 1, num_experts):
        raise ConfigError(f"top_k is {reason}, the number of experts")
    cfg.check(num_experts, top_k)
    if bias_E is not None and (bias_E.dtype != torch.float32 or bias_E.shape != (num_experts,)):
        raise DTypeError(f"the bias is {tuple(bias_E.shape)} {bias_E.dtype}; it must be ({num_experts},) fp32")
    if token_ids_T is not None and (token_ids_T.dtype != torch.int64 or token_ids_T.shape != (num_tokens,)):
        raise DTypeError(f"token_ids are {tuple(token_ids_T.shape)} {token_ids_T.dtype}; pass ({num_tokens},) int64")
    if ids_TK is not None:
        check_given(ids_TK, num_tokens, top_k, num_experts)


def check_given(ids_TK: Tensor, num_tokens: int, top_k: int, num_experts: int) -> None:
    """Raise InputError unless a given choice fits the call; values are checked on the CPU only, so there is no host
    read."""
    check_kind("ids", ids_TK, Tensor)
    if ids_TK.shape != (num_tokens, top_k):
        raise InputError(
            f"the given choice has shape {tuple(ids_TK.shape)}, but the call has {num_tokens} tokens and top_k={top_k}"
            "; replay it for the tokens for which it was recorded, in their order (RoutingRecord.take)"
        )
    if ids_TK.is_floating_point():
        raise InputError(f"the given choice has dtype {ids_TK.dtype}; it must be integers")
    if ids_TK.device.type == "cpu" and not torch.compiler.is_compiling():
        bad = find_bad_id(ids_TK, num_experts)
        if bad is not None:
            raise InputError(
                f"the given choice of token {bad[0]} in slot {bad[1]} is {bad[2]}; it must be from -1 (unused) to "
                f"{num_experts - 1}"
            )


class _Held:
    """State that copies of a module share."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: dict[int, Any]) -> _Held:
        return self


class Router(nn.Module):
    """A router with its weight (E, D), and its bias (E,) if there is one.  forward(x_TD) -> Routing.

    num_experts, hidden, top_k: those of the layer's MoEConfig, or pass the MoEConfig.  dtype: of the weight.
    group: the ranks whose tokens count for losses and capacity: a ProcessGroup, a DeviceMesh or a Workspace's group;
        the group of data parallelism may be larger; None: this rank only.  Calls are collective over it if
        `cfg.exchanges`; `update_bias` always is.
    loss_scale: an attribute; `uniep.nn.MoE` multiplies the gradients of the losses by it (a gradient scaler's factor,
        or 1 / number of micro-batches).
    jitter_seed: an attribute; by default the seed of the initialisation.

    The bias stays fp32 whatever the module is cast to, and is part of the state_dict.  `load`, the slots that this rank
    has sent to each expert since the last update, is not in the state_dict.
    """

    bias: Tensor | None

    def __init__(
        self,
        moe: MoEConfig,
        cfg: RouterConfig | None = None,
        *,
        group: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        seed: int | Seed | None = None,
    ) -> None:
        super().__init__()
        check_kind("moe", moe, MoEConfig)
        self.cfg = cfg if cfg is not None else RouterConfig()
        check_kind("cfg", self.cfg, RouterConfig)
        self.cfg.check(moe.num_experts, moe.top_k)
        self.top_k, self._group = moe.top_k, _Held(group if isinstance(group, Workspace) else process_group(group))
        self._seed = seed if isinstance(seed, Seed) else Seed(seed)
        self.loss_scale, self.jitter_seed = 1.0, (self._seed.given or 0) % 2**63
        device = place(device)
        self.weight = nn.Parameter(torch.empty(moe.num_experts, moe.hidden, dtype=dtype or moe.dtype, device=device))
        bias = torch.zeros(moe.num_experts, dtype=torch.float32, device=device) if self.cfg.selection_bias else None
        self.register_buffer("bias", bias)
        # Not a buffer: DistributedDataParallel would overwrite it with rank 0's.
        self.load = torch.zeros(moe.num_experts, dtype=torch.int64, device="cpu" if device.type == "meta" else device)
        self._dropped = LateReads()
        self._told = 0  # how often drops were logged
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None) -> None:
        """Weight: normal with std 1/sqrt(D); bias and load: 0."""
        if self.weight.is_meta:
            return
        refuse_parametrized(self, "weight")
        value = self._seed.take("router") if seed is None else seed
        self.weight.copy_(normal(self.weight.shape, generator(value, ROUTER)))
        self.jitter_seed = value % 2**63
        self.load.zero_()
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x_TD: Tensor, token_ids_T: Tensor | None = None, ids_TK: Tensor | None = None) -> Routing:
        """token_ids_T: needed for jitter: (T,) int64, unique for each token of a training run, such as
        step * (tokens per step) + index in the step.  ids_TK: a given choice (`choose_experts`)."""
        jitters = self.training and self.cfg.jitter > 0
        with self.errors_told() as entered:
            if jitters and token_ids_T is None:
                raise ConfigError(
                    f"jitter is {self.cfg.jitter}, but token_ids is None; pass the tokens' own numbers, on which their "
                    "jitter depends, or call eval()"
                )
            entered()
            routing = choose_experts(
                x_TD, self.weight, self.top_k, self.cfg, bias_E=self.bias, token_ids_T=token_ids_T if jitters else None,
                jitter_seed=self.jitter_seed, ids_TK=ids_TK, group=self.group, timeout_s=self.timeout_s,
            )  # fmt: skip
        if self.training:
            count_load(self.load, routing.counts_E)
        if self.cfg.capacity_factor is not None and not torch.compiler.is_compiling():
            self._dropped.put(routing.dropped)
            self._tell_dropped()
        return routing

    @property
    def group(self) -> dist.ProcessGroup | None:
        held = self._group.value
        return held.group if isinstance(held, Workspace) else held

    @property
    def timeout_s(self) -> float:
        held = self._group.value
        return held.timeout_s if isinstance(held, Workspace) else DEFAULT_TIMEOUT_S

    def errors_told(self) -> contextlib.AbstractContextManager[Callable[[], None]]:
        """An error raised inside, before a forward, also reaches the other ranks, which would wait in theirs; see
        `_told`."""
        return _told(self.weight, _group_name(self.group, self.cfg), self.timeout_s)

    def losses_on(self, routing: Routing) -> Tensor:
        """`routing.weights_TK`; in backward they add the losses' gradients, times `loss_scale`."""
        weights_TK = routing.weights_TK
        for coefficient, loss in ((self.cfg.aux_loss, routing.aux_loss), (self.cfg.z_loss, routing.z_loss)):
            if coefficient and loss.requires_grad:
                weights_TK = attach_loss(weights_TK, loss, self.loss_scale)
        return weights_TK

    @torch.no_grad()
    def update_bias(self, group: Any = None) -> Tensor:
        """After an optimizer step: bias += bias_rate for experts with less than the mean load, -= for those with more.

        The load of all ranks since the last update, in integers: the same on every rank, at any number of them.
        group: all ranks that train the router, if the router's own group is smaller: EP times data parallelism.
        Collective over it.  Returns that load, (E,) int64.  Source: arXiv 2408.15664.
        """
        if group is None and isinstance(held := self._group.value, Workspace):
            _ = held.backend  # a closed one no longer knows its group: the sum would be that of this rank alone
        load = self.load.clone()
        members = process_group(group) or self.group
        if members is not None:
            reduce_counts(load, members, self.timeout_s, "Router.update_bias")
        if self.bias is not None:
            self.bias += self.cfg.bias_rate * torch.sign(load.sum() - load * len(load)).float()
        self.load.zero_()
        return load

    def _tell_dropped(self) -> None:
        for number in self._dropped.read():
            self._told += number > 0
            if number and self._told & self._told - 1 == 0:
                log.warning(
                    "a router's capacity_factor=%g left out %d slots of a call; their tokens go without those experts. "
                    "uniep needs no capacity: leave it out, or count with uniep.nn.LoadMonitor (said again after 1, 2, "
                    "4 ... such calls)",
                    self.cfg.capacity_factor,
                    number,
                )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        bias = self.bias
        super()._apply(fn, recurse)
        if bias is not None and self.bias is not None and self.bias.dtype != torch.float32:
            self.bias = bias.to(self.bias.device) if not bias.is_meta else self.bias.float()
        if not self.weight.is_meta:
            self.load = self.load.to(self.weight.device)
        return self

    def extra_repr(self) -> str:
        weight = self.weight
        reason = why_torch(weight.device, len(weight), self.top_k, self.cfg)
        by = f"PyTorch ({reason})" if reason else "kernels"
        return f"{tuple(weight.shape)}, top {self.top_k}, {self.cfg}, computed by {by}"

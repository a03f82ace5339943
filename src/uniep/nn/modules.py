"""`Experts` (parameters and the expert-parallel call) and `MoE` (router, experts and optional shared experts)."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from uniep.config import MoEConfig, refused_number
from uniep.errors import ConfigError, UnsupportedError, check_kind
from uniep.meeting import has_process_group
from uniep.nn.beside import start_beside
from uniep.nn.functional import MATERIALISE, MainGrad, check_dense, check_devices, moe
from uniep.nn.initial import ROUTER, SHARED, Seed, generator, normal, place, refuse_parametrized
from uniep.nn.invariant import activate, add, linear
from uniep.nn.record import LayerRecord
from uniep.nn.replay import Tape
from uniep.nn.router import Router, check_given
from uniep.nn.router_config import RouterConfig
from uniep.nn.router_ops import looking
from uniep.nn.wrappers import RankOfState, is_full_state_taken, refuse_full_optimizer_state, whole_tensor
from uniep.numerics import LEAST_SUM
from uniep.weights import ExpertWeights, Lora
from uniep.workspace import Workspace, told_to_all

log = logging.getLogger("uniep")

BIASES = ("b13", "b2")
"""Names of the parameters that `Experts` have with `MoEConfig(bias=True)`."""


class Experts(nn.Module):
    """This rank's e = E / EP experts.  forward(x_TD, ids_TK, weights_TK) -> y_TD.

    Parameters: w13 (e, 2F, D), gate rows first, or (e, F, D) for an activation without a gate, and w2 (e, D, F); with
    cfg.bias b13 (e, 2F or F) and b2 (e, D), else None; or DTensors of which this is the local part.
    Their global expert ids are `first_expert .. first_expert + e - 1`.  Initialised per global expert id from the seed,
    so the whole model is the same at every EP size.

    workspace: shared with other layers of the same configuration; or pass `group` and `device` to make a new one.
    seed: None: one number drawn from torch's default generator, as in other layers.  So seed that generator alike on
        all ranks (torch.manual_seed); if ranks drew different numbers, the first call raises an error.
    main_grad: as for `uniep.moe`; an attribute, which may be set later.
    lora_scale: an attribute; not None where `uniep.nn.add_lora` has given it factors (`lora_a13` ...).
    expert_dims: an attribute, {name: dim}: for each parameter or buffer of this module, the dimension along which this
        rank's experts lie, or None if all E share it.  Tensors of a subclass, parametrization or adapter must be added
        to it: `uniep.integrations.torch` reduces, distributes and saves by it.
    Under torch.device("meta") parameters have no memory, and nothing is drawn: `to_empty`, then `reset_parameters`.
    A deep copy shares the Workspace.  A state_dict names the rank whose experts it holds; loading another rank's
    raises. A state of all experts loads at any EP size.
    """

    def __init__(
        self,
        cfg: MoEConfig,
        group: Any = None,
        *,
        workspace: Workspace | None = None,
        device: torch.device | str | None = None,
        seed: int | None = None,
        main_grad: MainGrad | None = None,
    ) -> None:
        super().__init__()
        check_kind("cfg", cfg, MoEConfig)
        if workspace is not None:
            check_kind("workspace", workspace, Workspace)
        self.main_grad: MainGrad | None = main_grad
        self.expert_dims: dict[str, int | None] = {"w13": 0, "w2": 0, **(dict.fromkeys(BIASES, 0) if cfg.bias else {})}
        self.lora_scale: float | None = None
        if workspace is None:
            workspace = Workspace(cfg, group, device=device)
            if group is None and has_process_group() and dist.get_world_size() > 1:
                log.warning(
                    "a layer without group= or workspace= has all %d experts on each of %d ranks, which nothing keeps "
                    "alike; pass the expert-parallel group, or reduce its gradients as those of other layers",
                    cfg.num_experts,
                    dist.get_world_size(),
                )
        elif group is not None or device is not None:
            raise ConfigError("a Workspace has its own group and device; pass either workspace or group and device")
        elif workspace.cfg != cfg:
            raise ConfigError(f"the layer is {cfg} but its Workspace computes {workspace.cfg}; make a Workspace for it")
        self.workspace = workspace
        self.cfg = cfg
        self.num_local = local = cfg.experts_per_rank(self.workspace.ep_size)
        self.first_expert = self.workspace.rank * local
        make: dict[str, Any] = {"dtype": cfg.dtype, "device": place(self.workspace.device)}
        self.w13 = nn.Parameter(torch.empty(local, cfg.h_columns, cfg.hidden, **make))
        self.w2 = nn.Parameter(torch.empty(local, cfg.hidden, cfg.ffn, **make))
        for name, columns in zip(BIASES, (cfg.h_columns, cfg.hidden), strict=True):
            bias = nn.Parameter(torch.empty(local, columns, **make)) if cfg.bias else None
            self.register_parameter(name, bias)
        self._seed = Seed(seed)
        self.record = LayerRecord(self)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None) -> None:
        """Normal with std 1/sqrt(fan-in), each expert from its own generator; biases zeros.

        seed: None: the seed that the layer was made with, or else a new draw; the resets of a router and of its experts
            share one draw, in either order.  Parameters on the meta device stay as they are.
        """
        w13, w2, *biases = self._local()
        if w13.is_meta or w2.is_meta:
            return
        refuse_parametrized(self, "w13", "w2", *BIASES)
        for bias in biases:
            bias.zero_()
        if not self._is_whole(w13):
            raise ConfigError(f"this rank has {tuple(w13.shape)} of w13, not whole experts; initialise before sharding")
        drawn = seed is None and self._seed.given is None
        value = self._seed.take("experts") if seed is None else seed
        for local in range(self.num_local):
            draw = generator(value, self.first_expert + local)
            for weight in (w13[local], w2[local]):
                weight.copy_(normal(weight.shape, draw))
        self._made(value if drawn else 0)

    @told_to_all(lambda self, *_, **__: self.workspace)
    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        w13, w2, *biases = self._local()
        return moe(
            x_TD, ids_TK, weights_TK, w13, w2, workspace=self.workspace, main_grad=self.main_grad, layer=self.record,
            lora=self._lora(), **dict(zip(BIASES, biases, strict=False)),
        )  # fmt: skip

    # --- states, copies ---

    def get_extra_state(self) -> Tensor:
        """[rank, EP size] of the experts in this state, or [0, 1] for all experts: numbers small enough for any
        dtype."""
        everything = self._holds_all() or is_full_state_taken()
        numbers = (0, 1) if everything else (self.workspace.rank, self.workspace.ep_size)
        made = torch.tensor(numbers, dtype=torch.float32, device="cpu")
        return made if everything else made.as_subclass(RankOfState)

    def set_extra_state(self, state: Any) -> None:
        """Does nothing: `_load_from_state_dict` has checked it."""

    def _fqn_modifiers(self) -> dict[str, str]:
        """Names to change: none.  torch.distributed.checkpoint asks for them before it takes or loads any state."""
        if not self._holds_all():
            refuse_full_optimizer_state(f"experts {self.first_expert}..{self.first_expert + self.num_local - 1}")
        return {}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self._holds_all() and is_full_state_taken():
            for name, dim in self.expert_dims.items():
                if dim is not None and (key := prefix + name) in destination:
                    destination[key] = whole_tensor(destination[key], dim, self.workspace.group)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        key = f"{prefix}_extra_state"
        self._refuse_state(state_dict.get(key), prefix)
        for name, dim in self.expert_dims.items() if not self._holds_all() else ():
            found = state_dict.get(prefix + name)
            if dim is not None and isinstance(found, Tensor) and found.shape[dim : dim + 1] == (self.cfg.num_experts,):
                state_dict[prefix + name] = found.narrow(dim, self.first_expert, self.num_local).clone()
        absent = key not in state_dict  # as in files of versions that did not write it
        if absent:
            state_dict[key] = self.get_extra_state()
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if absent:
            del state_dict[key]
        if any(name.startswith(f"{prefix}w13") or name.startswith(f"{prefix}param") for name in state_dict):
            self._made()

    def _refuse_state(self, found: Any, prefix: str) -> None:
        """Raise ConfigError for a state of another rank's experts, or of some ranks' at another EP size.

        found: the saved `get_extra_state`, unchecked."""
        rank, size, e = self.workspace.rank, self.workspace.ep_size, self.num_local
        if not isinstance(found, Tensor) or found.shape != (2,):
            return
        theirs, of = (round(float(n)) for n in found)
        if of <= 1 or ((theirs, of) == (rank, size) and not self._holds_all()):
            return
        remedy = (
            "take a state of all experts, get_model_state_dict with full_state_dict, which loads at any EP size; or "
            "uniep.integrations.torch.TrainState with torch.distributed.checkpoint"
        )
        if of == size and not self._holds_all():
            raise ConfigError(
                f"rank {rank} holds experts {self.first_expert}..{self.first_expert + e - 1}, but the state that it "
                f"was given ({prefix}w13) those of rank {theirs}, experts {theirs * e}..{theirs * e + e - 1}; load "
                f"this rank's own, or {remedy}"
            )
        here = f"{size} and has DTensors of all experts" if size > 1 and self._holds_all() else f"{size}"
        raise ConfigError(
            f"{prefix}w13 was saved at EP size {of}, by rank {theirs}, which holds a part of the "
            f"{self.cfg.num_experts} experts; this model runs at EP size {here}; {remedy}.  Files of all {of} ranks: "
            "concatenate each expert tensor along its experts (dimension 0), ranks ascending, and give the whole to "
            "uniep.integrations.torch.load_full_state_dict"
        )

    def _made(self, draw: int = 0) -> None:
        w13, w2, *biases = self._local()
        b13, b2 = biases or (None, None)
        whole = self.workspace.ep_size > 1 and self._is_whole(w13)
        experts = ExpertWeights((w13,), (w2,), "stacked", self.cfg.gated, b13, b2) if whole else None
        self.record.made(experts, self.cfg.dtype, self.workspace.rank, draw)

    def _is_whole(self, w13: Tensor) -> bool:
        """Whether it holds all of this rank's experts, not a shard."""
        return tuple(w13.shape) == (self.num_local, self.cfg.h_columns, self.cfg.hidden)

    def _holds_all(self) -> bool:
        """Whether a state of this module has all experts: there is one rank, or its parameters are DTensors of them."""
        return self.w13.shape[0] == self.cfg.num_experts

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.record.belongs_to(self)

    def __prepare_scriptable__(self) -> NoReturn:
        raise UnsupportedError("torch.jit.script does not know uniep's layers; use torch.compile")

    # --- parameters ---

    def _local(self) -> tuple[Tensor, ...]:
        """w13, w2 and any b13, b2 as plain tensors, differentiable."""
        given = (self.w13, self.w2, *((self.b13, self.b2) if self.cfg.bias else ()))
        return tuple(local_part(t) for t in given)

    def _lora(self) -> Lora | None:
        """The factors, which are parameters of this module, as plain tensors."""
        if self.lora_scale is None:
            return None
        pairs: list[tuple[Tensor, Tensor] | None] = []
        for weight in ("13", "2"):
            a, b = (getattr(self, f"lora_{factor}{weight}", None) for factor in ("a", "b"))
            pairs.append(None if a is None or b is None else (local_part(a), local_part(b)))
        return Lora(pairs[0], pairs[1], self.lora_scale)

    def extra_repr(self) -> str:
        return f"experts {self.first_expert}..{self.first_expert + self.num_local - 1}, {self.cfg}"


def local_part(weight: Tensor) -> Tensor:
    """A plain tensor, differentiable: of a DTensor the part on this rank."""
    if type(weight) is nn.Parameter:
        return weight
    from torch.distributed.tensor import DTensor  # takes half a second, which a user of DTensors has already spent

    return weight.to_local() if isinstance(weight, DTensor) else weight


class SharedExperts(nn.Module):
    """A dense FFN for every token, the same on every rank.  forward(x_TD) -> (T, D), rows as `uniep.nn.linear`'s.

    h = cast(x W13^T); act = cast(f(h)); y = cast(act W2^T), x and weights in cfg.dtype, f with cfg's limit.  w13 (2F,
    D), gate rows first, or (F, D) without a gate; w2 (D, F).  No biases, whatever cfg.bias.  Its parameters are dense
    ones: data parallelism reduces their gradients.
    """

    def __init__(
        self,
        cfg: MoEConfig,
        ffn: int,
        *,
        device: torch.device | str | None = None,
        seed: int | Seed | None = None,
    ) -> None:
        super().__init__()
        check_kind("cfg", cfg, MoEConfig)
        if reason := refused_number(ffn, 1):
            raise ConfigError(f"ffn of the shared experts is {reason}")
        self.activation, self.limit, self.dtype = cfg.activation, cfg.activation_limit, cfg.dtype
        make: dict[str, Any] = {"dtype": cfg.dtype, "device": place(device)}
        self.w13 = nn.Parameter(torch.empty((1 + cfg.gated) * ffn, cfg.hidden, **make))
        self.w2 = nn.Parameter(torch.empty(cfg.hidden, ffn, **make))
        self._seed = seed if isinstance(seed, Seed) else Seed(seed)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None) -> None:
        """As `Experts.reset_parameters`, but from a separate random stream."""
        if self.w13.is_meta:
            return
        refuse_parametrized(self, "w13", "w2")
        draw = generator(self._seed.take("shared") if seed is None else seed, SHARED)
        for weight in (self.w13, self.w2):
            weight.copy_(normal(weight.shape, draw))

    def forward(self, x_TD: Tensor) -> Tensor:
        x_TD, w13, w2 = (t.to(self.dtype) for t in (x_TD, self.w13, self.w2))
        return linear(activate(linear(x_TD, w13), self.activation, self.limit), w2)


class MoE(nn.Module):
    """Router and experts.  forward(x (..., D), token_ids (...), ids (T, K)) -> y (..., D), the last two optional.

    router: None: softmax top-k, one parameter `router` (E, D): probabilities = softmax(x W_router^T) in fp32; the top K
        by value, ties to the lower expert id (a stable sort), so a recomputed forward routes the same; with
        `renormalize` they are divided by their sum.  Or a `RouterConfig`: `router` is a `uniep.nn.Router` then
        (docs/router.md); gradients of its losses come with those of the routing weights, times `Router.loss_scale`.
    renormalize: option of the default router.  With top_k=1 a renormalised weight is always 1 and the router gets no
        gradient; refused at construction.
    shared_ffn: width of `SharedExperts` for every token, or None.  y = cast(y of the experts + y of these).
    shared_beside: on GPUs run these on a stream of their own, launched before the experts' call, so that they compute
        while tokens travel; with one rank, in a compiled graph, and on CPUs one behind the other.  The same bits; a
        choice for each rank.
    token_ids: int64, needed for jitter (`Router`).  ids: a given choice of experts: only weights are computed; see also
        `uniep.nn.replay_routing`.
    """

    router: nn.Parameter | Router

    def __init__(
        self,
        cfg: MoEConfig,
        group: Any = None,
        *,
        workspace: Workspace | None = None,
        device: torch.device | str | None = None,
        renormalize: bool = True,
        router: RouterConfig | None = None,
        shared_ffn: int | None = None,
        shared_beside: bool = False,
        seed: int | None = None,
        main_grad: MainGrad | None = None,
    ) -> None:
        super().__init__()
        check_kind("cfg", cfg, MoEConfig)
        if shared_beside and shared_ffn is None:
            raise ConfigError("shared_beside is True but shared_ffn is None; set the width of shared experts")
        if router is not None:
            check_kind("router", router, RouterConfig)
            if not renormalize:
                raise ConfigError("renormalize=False is an option of the default router; set it in the RouterConfig")
        (router or RouterConfig(renormalize=renormalize)).check(cfg.num_experts, cfg.top_k)
        self.experts = Experts(cfg, group, workspace=workspace, device=device, seed=seed, main_grad=main_grad)
        self.workspace, self.cfg = self.experts.workspace, cfg  # `experts` may get wrapped, for example in DDP
        self.renormalize = renormalize
        self.tape: Tape | None = None
        self._seed = self.experts._seed  # of all
        device = self.experts.w13.device
        if router is None:
            self.router = nn.Parameter(torch.empty(cfg.num_experts, cfg.hidden, dtype=cfg.dtype, device=device))
            self.reset_parameters()
        else:
            self.router = Router(cfg, router, group=self.workspace, device=device, seed=self._seed)
        self.shared = SharedExperts(cfg, shared_ffn, device=device, seed=self._seed) if shared_ffn is not None else None
        self.shared_beside = shared_beside

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None) -> None:
        """Reset the default router's weight, as `Experts.reset_parameters`: each module resets only its own
        parameters."""
        if isinstance(self.router, Router) or self.router.is_meta:
            return
        refuse_parametrized(self, "router")
        value = self._seed.take("router") if seed is None else seed
        self.router.copy_(normal(self.router.shape, generator(value, ROUTER)))

    def route(
        self, x_TD: Tensor, token_ids_T: Tensor | None = None, ids_TK: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(ids (T, K) int64, weights (T, K) fp32).  NaN logits give valid ids and NaN weights.

        ids_TK: a given choice.  Weights carry the gradients of the losses, if the router has some.
        """
        if isinstance(self.router, Router):
            routing = self.router(x_TD, token_ids_T, ids_TK)
            return routing.ids_TK, self.router.losses_on(routing)
        with torch.autocast(self.workspace.device.type, enabled=False):
            probabilities = torch.softmax(x_TD.float() @ self.router.float().T, dim=-1)
        given = ids_TK
        if ids_TK is None:
            order = torch.nan_to_num(probabilities.detach(), nan=0.0).sort(dim=-1, descending=True, stable=True)
            ids_TK = order.indices[:, : self.cfg.top_k]
            weights_TK = probabilities.gather(1, ids_TK)
        else:
            check_given(ids_TK, x_TD.shape[0], self.cfg.top_k, self.cfg.num_experts)
            ids_TK = ids_TK.long()
            weights_TK = probabilities.gather(1, ids_TK.clamp(0, self.cfg.num_experts - 1)).masked_fill(ids_TK < 0, 0.0)
        if self.renormalize:
            total_T1 = weights_TK.sum(-1, keepdim=True)
            weights_TK = weights_TK / (total_T1 if given is None else total_T1.clamp(min=LEAST_SUM))
        return ids_TK, weights_TK

    @told_to_all(lambda self, *_, **__: self.workspace)
    def forward(self, x: Tensor, token_ids: Tensor | None = None, ids: Tensor | None = None) -> Tensor:
        run = self._forward if self.tape is None else self._forward_eagerly
        return run(x, token_ids, ids)

    @_disable_dynamo
    def _forward_eagerly(self, x: Tensor, token_ids: Tensor | None, ids: Tensor | None) -> Tensor:
        """Not compiled: a tape asks whether a backward is running, and compilers cannot trace that."""
        return self._forward(x, token_ids, ids)

    def _forward(self, x: Tensor, token_ids: Tensor | None, ids: Tensor | None) -> Tensor:
        told = self.router.errors_told() if isinstance(self.router, Router) else nullcontext(lambda: None)
        with told as entered:
            check_dense(x=x)
            check_devices({"x": [x]}, self.workspace)
            if x.shape[-1:] != (self.cfg.hidden,):
                raise ConfigError(f"x has shape {tuple(x.shape)}; it must be (..., hidden={self.cfg.hidden})")
            weight = self.router.weight if isinstance(self.router, Router) else self.router
            if weight.is_meta:
                raise ConfigError(f"router is on meta but the Workspace is on {self.workspace.device}; {MATERIALISE}")
            x_TD = x.reshape(-1, x.shape[-1])
            if self.tape is not None and ids is None:
                ids = self.tape.given(x_TD, self.cfg.top_k)
            if token_ids is not None:
                check_kind("token_ids", token_ids, Tensor)
            token_ids_T = token_ids.reshape(-1) if token_ids is not None else None
            entered()
        with self._looking():
            ids_TK, weights_TK = self.route(x_TD, token_ids_T, ids)
        if self.tape is not None:
            ids_TK = self.tape.keep(ids_TK)
        if self.shared is None:
            y_TD = self.experts(x_TD, ids_TK, weights_TK)
        else:
            shared = start_beside(self.shared, x_TD) if self._runs_beside(x_TD) else None
            y_TD = self.experts(x_TD, ids_TK, weights_TK)
            y_TD = add(y_TD, self.shared(x_TD) if shared is None else shared())
        return y_TD if x.dim() == 2 else y_TD.view(x.shape)  # FSDP2 warns of views

    def _looking(self) -> AbstractContextManager[None]:
        """Inside, a wait of the router also ends if a peer will not come to the experts' call, which follows."""
        exchanges = isinstance(self.router, Router) and self.router.cfg.exchanges
        return looking(self.workspace.look) if exchanges and not torch.compiler.is_compiling() else nullcontext()

    def _runs_beside(self, x_TD: Tensor) -> bool:
        """Whether shared experts get a stream of their own: compilers trace no streams, and one rank sends nothing."""
        return self.shared_beside and x_TD.is_cuda and self.workspace.ep_size > 1 and not torch.compiler.is_compiling()

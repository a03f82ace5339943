"""`Experts` (parameters and the expert-parallel call) and `MoE` (a softmax top-k router in front)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from uniep.config import MoEConfig
from uniep.errors import ConfigError
from uniep.nn.functional import MainGrad, check_dense, check_devices, moe
from uniep.workspace import Workspace, told_to_all


class Experts(nn.Module):
    """This rank's e = E / EP experts.  forward(x_TD, ids_TK, weights_TK) -> y_TD.

    Parameters: w13 (e, 2F, D), gate rows first, and w2 (e, D, F), or DTensors of which this is the local part.
    Their global expert ids are `first_expert .. first_expert + e - 1`.  Initialised per global expert id from
    `seed`, so the whole model is the same at every EP size.

    workspace: shared with other layers of the same configuration; or `group` and `device` to make an own one.
    main_grad: as for `uniep.moe`; an attribute, which may be set later.
    expert_dims: an attribute, {name: dim}; for each parameter or buffer in here the dimension along which this rank's
        experts lie, or None if all E share it.  What a subclass, parametrization or adapter adds has to be added to it
        for `uniep.integrations.torch`, which reduces, distributes and saves by it.
    A deep copy shares the Workspace.
    """

    def __init__(
        self,
        cfg: MoEConfig,
        group: Any = None,
        *,
        workspace: Workspace | None = None,
        device: torch.device | str | None = None,
        seed: int = 0,
        main_grad: MainGrad | None = None,
    ) -> None:
        super().__init__()
        self.main_grad: MainGrad | None = main_grad
        self.expert_dims: dict[str, int | None] = {"w13": 0, "w2": 0}
        if workspace is None:
            workspace = Workspace(cfg, group, device=device)
        elif group is not None or device is not None:
            raise ConfigError("a Workspace has its own group and device; pass either workspace or group and device")
        elif workspace.cfg != cfg:
            raise ConfigError(f"the layer is {cfg} but its Workspace computes {workspace.cfg}; make a Workspace for it")
        self.workspace = workspace
        self.cfg = cfg
        self.num_local = local = cfg.experts_per_rank(self.workspace.ep_size)
        self.first_expert = self.workspace.rank * local
        make: dict[str, Any] = {"dtype": cfg.dtype, "device": self.workspace.device}
        self.w13 = nn.Parameter(torch.empty(local, 2 * cfg.ffn, cfg.hidden, **make))
        self.w2 = nn.Parameter(torch.empty(local, cfg.hidden, cfg.ffn, **make))
        self.reset_parameters(seed)

    @torch.no_grad()
    def reset_parameters(self, seed: int = 0) -> None:
        """Normal with std 1/sqrt(fan-in), each expert from its own generator."""
        w13, w2 = self._local()
        if tuple(w13.shape) != (self.num_local, 2 * self.cfg.ffn, self.cfg.hidden):
            raise ConfigError(f"this rank has {tuple(w13.shape)} of w13, not whole experts; initialise before sharding")
        for local in range(self.num_local):
            generator = torch.Generator().manual_seed(_stream(seed, self.first_expert + local))
            for weight in (w13[local], w2[local]):
                weight.copy_(_normal(weight.shape, generator))

    @told_to_all(lambda self, *_: self.workspace)
    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        w13, w2 = self._local()
        return moe(x_TD, ids_TK, weights_TK, w13, w2, workspace=self.workspace, main_grad=self.main_grad)

    def _local(self) -> tuple[Tensor, Tensor]:
        """w13 and w2 as plain tensors, differentiable."""
        if type(self.w13) is nn.Parameter and type(self.w2) is nn.Parameter:
            return self.w13, self.w2
        from torch.distributed.tensor import DTensor  # takes half a second, and whoever has one has paid that

        w13, w2 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w13, self.w2))
        return w13, w2

    def extra_repr(self) -> str:
        return f"experts {self.first_expert}..{self.first_expert + self.num_local - 1}, {self.cfg}"


class MoE(nn.Module):
    """Softmax top-k router and experts.  forward(x (..., D)) -> y (..., D).

    Routing in fp32: probabilities = softmax(x W_router^T); the top K by value, ties to the lower expert
    id (a stable sort), so a recomputed forward routes alike.  renormalize: divide by their sum.  With
    top_k=1 a renormalised weight is always 1 and the router gets no gradient; refused at construction.
    """

    def __init__(
        self,
        cfg: MoEConfig,
        group: Any = None,
        *,
        workspace: Workspace | None = None,
        device: torch.device | str | None = None,
        renormalize: bool = True,
        seed: int = 0,
        main_grad: MainGrad | None = None,
    ) -> None:
        super().__init__()
        if renormalize and cfg.top_k == 1:
            raise ConfigError(
                "top_k=1 with renormalize=True makes every routing weight 1, so the router never learns; "
                "pass renormalize=False"
            )
        self.experts = Experts(cfg, group, workspace=workspace, device=device, seed=seed, main_grad=main_grad)
        self.workspace, self.cfg = self.experts.workspace, cfg  # `experts` may be wrapped, such as in a DDP
        self.renormalize = renormalize
        generator = torch.Generator().manual_seed(_stream(seed, _STREAMS - 1))
        value = _normal(torch.Size((cfg.num_experts, cfg.hidden)), generator)
        self.router = nn.Parameter(value.to(self.experts.w13.device, cfg.dtype))

    def route(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """(ids (T, K) int64, weights (T, K) fp32).  NaN logits give valid ids and NaN weights."""
        with torch.autocast(self.workspace.device.type, enabled=False):
            probabilities = torch.softmax(x_TD.float() @ self.router.float().T, dim=-1)
        order = torch.nan_to_num(probabilities.detach(), nan=0.0).sort(dim=-1, descending=True, stable=True)
        ids_TK = order.indices[:, : self.cfg.top_k]
        weights_TK = probabilities.gather(1, ids_TK)
        if self.renormalize:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return ids_TK, weights_TK

    @told_to_all(lambda self, *_: self.workspace)
    def forward(self, x: Tensor) -> Tensor:
        check_dense(x=x)
        check_devices({"x": [x]}, self.workspace)
        if x.shape[-1:] != (self.cfg.hidden,):
            raise ConfigError(f"x has shape {tuple(x.shape)}; it must be (..., hidden={self.cfg.hidden})")
        x_TD = x.reshape(-1, x.shape[-1])
        ids_TK, weights_TK = self.route(x_TD)
        return self.experts(x_TD, ids_TK, weights_TK).view(x.shape)


_STREAMS = 1_000_003  # random streams of one seed: one for each expert, and the last for the router


def _stream(seed: int, number: int) -> int:
    """The generator's seed for one of them: streams of no two layers, experts or routers are the same."""
    return seed * _STREAMS + number


def _normal(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Normal with std 1/sqrt(fan-in); the same values whatever the default dtype and device."""
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * shape[1] ** -0.5

"""The gradient norm over dense and expert parameters, and gradients that are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from uniep.errors import ConfigError, UnsupportedError
from uniep.integrations.torch.owners import Owner, owners_of
from uniep.nn.modules import local_part
from uniep.nn.router_ops import row_sum
from uniep.workspace import process_group

__all__ = ["clip_grad_norm_", "share_nonfinite_"]


@torch.no_grad()
def clip_grad_norm_(
    dense: Iterable[nn.Parameter],
    experts: Iterable[nn.Parameter],
    max_norm: float,
    ep_group: dist.ProcessGroup | DeviceMesh | None,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    independent: bool = False,
) -> Tensor:
    """Scale all gradients by min(1, max_norm / (norm + 1e-6)) of their common norm; returns the norm, fp32.

    Collective over all ranks of the parameters' meshes and of `ep_group`.  The norm is the same on every rank: each
    element of each parameter counts once, on whatever rank it lies and however often it is given.
    `split_parameters(model)` gives dense and experts.

    dense, experts: tensors or DTensors; a gradient that is None counts as zeros, one that is a partial sum is summed.
        An `Experts`' DTensors over its EP ranks may be in either.
    ep_group: the experts' EP group or one-dimensional mesh; None where all experts are here, or are DTensors.

    **Order**: first the fp32 norm of each parameter's part on this rank.  Then the norm of these over the ranks of each
    mesh dimension that the parameter is split over, in the mesh's order, with `ep_group` last if it is not among them.
    Then the norm of these over all parameters, dense ones first, in the order given.  Reruns give the same bits.

    independent: another order, whose bits do not depend on EP and DP sizes, nor on DDP or FSDP2, if those of the
        gradients do not; norm_type 2 only.  The square of every element, fp32; their sum along the last dimension of
        the whole parameter, then along the one before, and so on; of these over the parameters; each by adjacent pairs,
        `((x0+x1)+(x2+x3))+...`, with zeros up to a power of two; the square root.  A dimension that ranks share is
        gathered after the sums of those behind it: one number for each expert, at best; the gradient, if the last is.

    Raises ConfigError, before anything is sent, for max_norm below 0, norm_type not above 0 (or not 2, if independent),
    no parameters, and where the norm would be wrong: an `Experts`' own parameter in `dense` or without its EP group, a
    dense one in `experts` beside those;
    UnsupportedError for parameters that are partial sums; RuntimeError if the norm is not finite and
    error_if_nonfinite.
    """
    if not (max_norm >= 0 and norm_type > 0):
        raise ConfigError(f"max_norm is {max_norm} and norm_type {norm_type}; they must be at least 0 and above 0")
    if independent and norm_type != 2.0:
        raise ConfigError(f"norm_type is {norm_type}; independent=True supports only 2")
    group = process_group(ep_group, "ep_group")
    over_ep = dict.fromkeys(experts)
    parameters = list(dict.fromkeys([*(p for p in dense if p not in over_ep), *over_ep]))
    if not parameters:
        raise ConfigError("there are no parameters to clip; an iterator may have been used up before")
    _check_owners(parameters, group, over_ep)
    for p in parameters:
        if isinstance(p.grad, DTensor) and any(placement.is_partial() for placement in p.grad.placements):
            p.grad = p.grad.redistribute(p.grad.device_mesh, [_whole(placement) for placement in p.grad.placements])
    grads = [None if p.grad is None else local_part(p.grad) for p in parameters]
    if independent:
        total = _independent_norm(parameters, group, over_ep)
    else:
        total = _norm(parameters, grads, norm_type, group, over_ep)
    if error_if_nonfinite and not math.isfinite(float(total)):
        raise RuntimeError(f"the gradient norm is {float(total)}; gradients were not changed")
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for g in grads:
        if g is not None:
            g.mul_(factor.to(g.device))
    return total


def _check_owners(
    parameters: list[nn.Parameter], group: dist.ProcessGroup | None, over_ep: dict[nn.Parameter, None]
) -> None:
    """Raise ConfigError for a parameter that would count other than once."""
    known = owners_of(parameters)
    if not known:  # experts of the bare function, or a framework's own: who passes them knows
        return
    for number, p in enumerate(parameters):
        owner = known.get(id(p))
        if owner is None and p not in over_ep:
            continue
        given = f"experts[{number + len(over_ep) - len(parameters)}]" if p in over_ep else f"dense[{number}]"
        over = _split_over(p, group if p in over_ep else None)
        added = over[-1] if len(over) > len(_split_over(p, None)) else None
        if owner is not None and owner.dim is not None:
            _check_expert(given, owner, over, added)
        elif added is not None and added.size() > 1:
            what = "is in no uniep.nn.Experts" if owner is None else f"is {owner.name}, which all experts share"
            raise ConfigError(
                f"{given}, of shape {tuple(p.shape)}, {what}, and would count once for each of the {added.size()} "
                "ranks of ep_group; pass dense, experts = split_parameters(model)"
            )


def _check_expert(
    given: str, owner: Owner, over: tuple[dist.ProcessGroup, ...], added: dist.ProcessGroup | None
) -> None:
    """over: the groups over which the norms are added; added: the one of them that is ep_group."""
    module, space = owner.experts, owner.experts.workspace
    ours = space.ranks
    last = module.first_expert + module.num_local - 1
    named = f"{given} is {owner.name} of experts {module.first_expert}..{last} of {module.cfg.num_experts}"
    if added is not None:
        ranks = dist.get_process_group_ranks(added)
        if set(ours) != set(ranks):
            raise ConfigError(
                f"{named}, which are spread over {space.ep_size} ranks {ours}, but ep_group is of ranks {ranks}; "
                "pass the group of their Workspace, or None for one rank"
            )
        return
    covered = any(set(ours) <= set(dist.get_process_group_ranks(g)) for g in over)
    if space.ep_size > 1 and not covered:
        raise ConfigError(
            f"{named}, which are spread over {space.ep_size} ranks, and would count on this rank alone, so that each "
            "rank would scale by another factor; pass dense, experts = split_parameters(model) and the EP group: "
            "clip_grad_norm_(dense, experts, max_norm, mesh['ep'])"
        )


def _norm(
    parameters: list[nn.Parameter],
    grads: list[Tensor | None],
    norm_type: float,
    group: dist.ProcessGroup | None,
    over_ep: dict[nn.Parameter, None],
) -> Tensor:
    norms = [
        torch.zeros((), device=local_part(p).device)
        if g is None or not g.numel()  # a rank without rows: no largest one
        else torch.linalg.vector_norm(g, norm_type, dtype=torch.float32)
        for p, g in zip(parameters, grads, strict=True)
    ]
    together: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
    for number, parameter in enumerate(parameters):
        together.setdefault(_split_over(parameter, group if parameter in over_ep else None), []).append(number)
    for groups, numbers in together.items():
        here = torch.stack([norms[n] for n in numbers])
        for over in groups:
            parts = [torch.empty_like(here) for _ in range(over.size())]
            dist.all_gather(parts, here, group=over)
            here = torch.linalg.vector_norm(torch.stack(parts), norm_type, dim=0)
        for n, norm in zip(numbers, here, strict=True):
            norms[n] = norm
    device = norms[0].device
    return torch.linalg.vector_norm(torch.stack([n.to(device) for n in norms]), norm_type)


def _independent_norm(
    parameters: list[nn.Parameter], group: dist.ProcessGroup | None, over_ep: dict[nn.Parameter, None]
) -> Tensor:
    """As `clip_grad_norm_` says of `independent`."""
    squares = [_sum_of_squares(p, group if p in over_ep else None) for p in parameters]
    device = squares[0].device
    return row_sum(torch.stack([s.to(device) for s in squares])).sqrt()


def _sum_of_squares(parameter: nn.Parameter, ep_group: dist.ProcessGroup | None) -> Tensor:
    """Of the whole parameter's gradient, on every rank.  ep_group: plain experts lie on its ranks."""
    here, grad = local_part(parameter), parameter.grad
    sums = torch.zeros_like(here, dtype=torch.float32) if grad is None else local_part(grad).float().square()
    split = -1  # the last dimension that ranks share
    if isinstance(parameter, DTensor):
        split = max([p.dim for p in parameter.placements if not p.is_replicate()], default=-1)  # type: ignore[attr-defined]
    elif ep_group is not None:
        split = 0
    sums = _sum_behind(sums, split)
    if split >= 0 and isinstance(parameter, DTensor):
        shape = parameter.shape[: split + 1]
        layout: dict[str, Any] = {"shape": shape, "stride": torch.empty(shape, device="meta").stride()}
        mesh, placements = parameter.device_mesh, parameter.placements
        sums = DTensor.from_local(sums.contiguous(), mesh, placements, run_check=False, **layout).full_tensor()
    elif split >= 0 and ep_group is not None:
        parts = [torch.empty_like(sums) for _ in range(ep_group.size())]
        dist.all_gather(parts, sums.contiguous(), group=ep_group)
        sums = torch.cat(parts)
    return _sum_behind(sums, -1)


def _sum_behind(x: Tensor, dim: int) -> Tensor:
    """Sum of the dimensions behind `dim`, the last one first."""
    while x.dim() > dim + 1:
        x = row_sum(x)
    return x


def _split_over(parameter: Tensor, ep_group: dist.ProcessGroup | None) -> tuple[dist.ProcessGroup, ...]:
    """The groups whose ranks hold different parts of the parameter."""
    groups = []
    if isinstance(parameter, DTensor):
        for dimension, placement in enumerate(parameter.placements):
            if placement.is_partial():
                raise UnsupportedError(f"a parameter is a partial sum ({parameter.placements}); reduce it first")
            if not placement.is_replicate():
                groups.append(parameter.device_mesh.get_group(dimension))
    if ep_group is not None:
        ranks = set(dist.get_process_group_ranks(ep_group))
        if not any(ranks.issubset(dist.get_process_group_ranks(g)) for g in groups):
            groups.append(ep_group)
    return tuple(groups)


def _whole(placement: Placement) -> Placement:
    return Replicate() if placement.is_partial() else placement


@torch.no_grad()
def share_nonfinite_(experts: Iterable[nn.Parameter], ep_group: dist.ProcessGroup | DeviceMesh) -> None:
    """If one rank's expert gradients hold an inf or a NaN, write a NaN into those of all ranks of the EP group.

    `torch.amp.GradScaler` looks only at the gradients of its own rank; with this it skips a step on all ranks or none.
    Call it before `unscale_`.  Gradients that are finite on all ranks do not change.  `data_parallel` does this after
    every backward that reduces gradients.  Collective over `ep_group`; no host wait.
    """
    group = process_group(ep_group, "ep_group")
    if group is None:
        raise ConfigError("ep_group is None; pass mesh['ep'] or the process group of the experts")
    experts = list(experts)
    grads = [g for g in (local_part(p.grad) for p in experts if p.grad is not None) if g.numel()]
    if not experts:
        return
    bad = torch.zeros((), device=local_part(experts[0]).device)
    if grads:
        largest = torch._foreach_norm(grads, math.inf)
        bad = torch.stack([norm.float() for norm in largest]).amax() * 0.0  # 0, or NaN
    dist.all_reduce(bad, group=group)
    if grads:
        first = grads[0][(slice(0, 1),) * grads[0].dim()]
        first.copy_(torch.where(bad == 0, first, torch.full_like(first, math.nan)))

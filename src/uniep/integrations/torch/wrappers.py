"""DDP and FSDP2 for experts and dense parameters in one model."""

from __future__ import annotations

import copy
import dataclasses
import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from uniep.errors import ConfigError, UnsupportedError
from uniep.integrations.torch.clipping import share_nonfinite_
from uniep.integrations.torch.owners import Owner, check_group, layers, mesh_of, owners
from uniep.integrations.torch.rank_order import Complete
from uniep.nn import Experts
from uniep.nn.modules import local_part

__all__ = ["data_parallel", "distribute_experts", "fully_shard_experts"]


def data_parallel(
    model: nn.Module, mesh: DeviceMesh, *, dp: str | Sequence[str] = "dp", ep: str = "ep", **options: Any
) -> DistributedDataParallel:
    """DDP: every gradient becomes the mean over all ranks; an expert's gradient is reduced over its copies only.

    Returns a DDP over all ranks that leaves the experts alone; nothing inside the model is wrapped or renamed.  The
    experts' gradients are averaged over mesh[dp] while the backward continues.  Some copies may leave out a layer
    (find_unused_parameters=True): it counts as zeros there, and if all leave it out, its gradients do not change.
    Wrapping again, or wrapping another model that shares experts, is allowed: the model whose forward ran last handles
    them.
    dp: the dimension, or dimensions, whose ranks hold copies of the same experts.
    options: those of DistributedDataParallel, except process_group.

    Expert gradients arrive summed over the EP group.  They are divided by its size at once, before anything else sees
    them, so gradients may be accumulated over several backwards, inside `no_sync()` or not.  A non-finite gradient
    makes those of all ranks non-finite (`share_nonfinite_`): GradScaler skips a step on all ranks or none.

    Raises ConfigError if the model has no Experts, if they are on another EP group than mesh[ep], if the mesh is not
    made of all ranks or has other dimensions, if a tensor inside an Experts has no known owner; UnsupportedError for
    main_grad, which DDP would not reduce.
    """
    found, names = _checked(model, mesh, dp, ep)
    if mesh.size() != dist.get_world_size():
        raise ConfigError(
            f"the mesh has {mesh.size()} ranks but the job has {dist.get_world_size()}; DDP averages over all of them. "
            "Use fully_shard_experts with parallelism beyond EP and DP"
        )
    if isinstance(model, Experts):
        raise ConfigError("the model is itself an Experts; pass the module around it")
    for option in ("process_group", "device_mesh"):
        if option in options:
            raise ConfigError(f"{option} is decided by the mesh; leave it out")
    for name, (tensor, _) in found.items():
        if isinstance(tensor, DTensor):
            raise UnsupportedError(f"{name} is a DTensor, which DDP does not take; use fully_shard_experts")
    spread = {id(t): t for t, owner in found.values() if owner.dim is not None}
    shared = {id(t) for t, owner in found.values() if owner.dim is None}
    local = {id(t) for _, module in layers(model) for t in module.buffers()} - shared | spread.keys()
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    copies = (mesh[names[0]] if len(names) == 1 else mesh[names]._flatten()).get_group()
    if options.get("init_sync", True) and copies.size() > 1:
        for tensor in spread.values():
            dist.broadcast(tensor.detach(), group_src=0, group=copies)
    ignored = dict.fromkeys(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))  # the user's
    ignored |= dict.fromkeys(n for n, t in named if id(t) in local)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(ignored))
    wrapped = DistributedDataParallel(model, **options)
    places: dict[bool, list[tuple[nn.Module, str]]] = {True: [], False: []}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            if id(parameter) in spread or name not in ignored:
                places[id(parameter) in spread].append((module, name.rpartition(".")[2]))
    averages = _Averages(places[True], places[False], copies, mesh[ep].get_group(), _complete(model))
    wrapped.register_forward_pre_hook(averages.before)
    wrapped.register_forward_hook(averages.behind)
    return wrapped


class _Averages:
    """Handles the experts' gradients of one DDP model: divides them by the EP size, then averages them over the copies.

    places: (module, name) of each parameter that belongs to this rank's experts.  dense: of all others.
    complete: the layer has summed gradients over the copies, too (`Workspace(copies=)`), so that they are only divided.
    A copy of the model has its own object, which finds the copy's parameters at its first forward.

    **Order**: copies reduce the parameters in one order, the last module's first, as DDP does, since a layer may have
    run on some copies only.  One goes when its gradient is there and those before it have gone, or else at the end of
    the backward.

    **Reentrant checkpoints** have backwards of their own, inside the outer one, in which another part of the same
    gradient may come.  A parameter whose gradient ever came in one waits for the end of every backward, and so do those
    behind it.  The first backward finds them: it sends nothing before its end.
    """

    def __init__(
        self,
        places: list[tuple[nn.Module, str]],
        dense: list[tuple[nn.Module, str]],
        copies: dist.ProcessGroup,
        ep_group: dist.ProcessGroup,
        complete: bool,
    ) -> None:
        self.places, self.dense, self.copies, self.ep_group, self.complete = places, dense, copies, ep_group, complete
        now = [(module, name, module._parameters.get(name)) for module, name in dense]  # None: parametrized since
        self.frozen = [(module, name) for module, name, p in now if p is not None and not p.requires_grad]
        self.declared = {module: len(module.expert_dims) for module, _ in places if isinstance(module, Experts)}
        self.synchronize = True
        self.running = False
        self.uneven = True  # layers may be left out on some copies or on all; else each runs somewhere
        self.first = True  # until the end of the first backward
        self.task = 0  # autograd's number of this backward
        self.there: set[nn.Parameter] = set()
        self.handled: list[nn.Parameter] = []  # in this backward
        self.waiting: list[nn.Parameter] = []  # the next one last
        self.sent: list[tuple[nn.Parameter, Tensor, bool, dist.Work]] = []
        self.parameters()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Averages:
        places, dense = copy.deepcopy((self.places, self.dense), memo)
        return _Averages(places, dense, self.copies, self.ep_group, self.complete)

    def parameters(self) -> list[nn.Parameter]:
        """All expert parameters.  Takes over those that require gradients: new ones, such as from
        `load_state_dict(assign=True)`, and those of another model that shares them, or of an earlier DDP."""
        parts = self.ep_group.size() * (self.copies.size() if self.complete else 1)
        found = list(dict.fromkeys(self._present(module, name) for module, name in self.places))
        for parameter in found:
            handler, handles = _handlers.get(parameter, (None, ()))
            if parameter.requires_grad and (handler is None or handler() is not self):
                for handle in handles:
                    handle.remove()
                hooks = [parameter.register_post_accumulate_grad_hook(self.arrived)]
                if parts > 1:
                    hooks.append(parameter.register_hook(lambda grad: grad / parts))
                _handlers[parameter] = weakref.ref(self), hooks
        return found

    @staticmethod
    def _present(module: nn.Module, name: str) -> nn.Parameter:
        parameter = module._parameters.get(name)
        if parameter is None:
            raise ConfigError(
                f"{type(module).__name__} has lost its parameter {name!r} since data_parallel, so that its "
                "gradient would not be averaged; parametrize or replace it before data_parallel"
            )
        return parameter

    def before(self, wrapped: DistributedDataParallel, args: Any) -> None:
        """The forward decides whether its backward reduces, as in DDP.  Leftovers of a failed backward are dropped."""
        if not torch.is_grad_enabled():  # it has no backward, and that of another forward may be to come
            return
        self.synchronize, self.running = wrapped.require_backward_grad_sync, False
        self.uneven = wrapped.find_unused_parameters or wrapped.static_graph
        self.sent.clear()
        for module, name in self.frozen:
            parameter = module._parameters.get(name)
            if parameter is not None and parameter.requires_grad:
                path = next(path for path, inner in wrapped.module.named_modules() if inner is module)
                raise ConfigError(
                    f"{path}.{name} requires gradients, but did not when data_parallel was called, so that DDP would "
                    "not reduce it; call model = data_parallel(model.module, mesh) again"
                )
        if any(len(module.expert_dims) != number for module, number in self.declared.items()):
            raise ConfigError(
                "experts have got other parameters since data_parallel, such as those of add_lora, whose gradients "
                "would not be averaged; call model = data_parallel(model.module, mesh) again"
            )
        self.parameters()

    def behind(self, wrapped: DistributedDataParallel, args: Any, output: Any) -> None:
        """Every rank of the EP group starts the reduction, even if its experts are frozen."""
        for t in _tensors(output):
            if t.requires_grad:
                t.register_hook(self.begin)

    def begin(self, grad: Tensor | None = None) -> None:
        if not self.synchronize or self.running:
            return
        self.running, self.task = True, torch._C._current_graph_task_id()
        self.there.clear()
        averages = self.copies.size() > 1 and not self.complete
        self.handled = self.parameters()
        self.waiting = [p for p in self.handled if p.requires_grad] if averages else []
        torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    @torch.no_grad()
    def arrived(self, parameter: nn.Parameter) -> None:
        """This backward has added to its gradient."""
        _changed[parameter] = True
        if not self.synchronize:
            return
        self.begin()
        if self.task != torch._C._current_graph_task_id():
            _nested[parameter] = True
        if parameter in self.there and any(parameter is sent for sent, *_ in self.sent):
            raise UnsupportedError(
                f"the gradient of an expert parameter of shape {tuple(parameter.shape)} was already being averaged "
                "over its copies when a reentrant checkpoint added to it, which none did in the backwards before; use "
                "checkpoint(use_reentrant=False), or call model = data_parallel(model.module, mesh) again"
            )
        self.there.add(parameter)
        while not self.first and self.waiting and self.waiting[-1] in self.there and self.waiting[-1] not in _nested:
            self._send(self.waiting.pop())

    def _send(self, parameter: nn.Parameter) -> None:
        grad, changed = parameter.grad, _changed.pop(parameter, False)
        if grad is None:
            mean, changed = torch.zeros_like(parameter), False
        else:
            mean = grad.div_(self.copies.size()) if changed else grad / self.copies.size()
        self.sent.append((parameter, mean, changed, dist.all_reduce(mean, group=self.copies, async_op=True)))

    @torch.no_grad()
    def finish(self) -> None:
        """Runs at the end of the backward."""
        self.running = self.first = False
        while self.waiting:
            parameter = self.waiting.pop()
            if _handlers[parameter][0]() is self:  # else another model in this backward does
                self._send(parameter)
        if self.sent:
            changes = [changed for _, _, changed, _ in self.sent]
            if self.uneven:
                somewhere = torch.ones(len(changes), dtype=torch.int32, device=self.sent[0][1].device)
                if not all(changes):  # else the host need not wait
                    somewhere.copy_(torch.tensor(changes))
                dist.all_reduce(somewhere, dist.ReduceOp.MAX, group=self.copies)
            for _, _, _, work in self.sent:
                work.wait()
            if not all(changes):
                ran = somewhere.tolist() if self.uneven else [True] * len(changes)
                for (parameter, mean, changed, _), some in zip(self.sent, ran, strict=True):
                    if some and not changed:
                        parameter.grad = mean
            self.sent.clear()
        if self.ep_group.size() > 1:
            share_nonfinite_(self.handled, self.ep_group)


_handlers = WeakTensorKeyDictionary()
"""Parameter -> (weak reference to the `_Averages` whose hooks it has, handles of these)."""

_nested = WeakTensorKeyDictionary()
"""Parameters whose gradients have come in a reentrant checkpoint's own backward."""

_changed = WeakTensorKeyDictionary()
"""Parameters whose gradients have changed since they were averaged."""


def _tensors(output: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])


def distribute_experts(model: nn.Module, ep_mesh: DeviceMesh | dist.ProcessGroup) -> None:
    """Make each parameter of each `Experts` a DTensor over `ep_mesh`, split along its experts; nothing moves.

    w13 then has the global shape (E, 2F, D), and rank r holds experts r*e .. r*e + e-1, so that FSDP2, optimizers and
    checkpoints can tell experts apart.  A parameter that all experts share is replicated.  Call it before making the
    optimizer.

    Raises ConfigError if they are on another EP group, are DTensors over other ranks already, or a tensor inside an
    Experts has no known owner.
    """
    found = list(layers(model))
    ep_mesh = mesh_of(ep_mesh, found[0][1].workspace.device.type)
    for layer, module in found:
        check_group(module, layer, ep_mesh)
    made: dict[int, nn.Parameter] = {}
    for name, (tensor, owner) in owners(model).items():
        if isinstance(tensor, DTensor):
            _check_distributed(name, tensor, owner, ep_mesh)
        elif isinstance(tensor, nn.Parameter) and id(tensor) not in made:
            placement = Replicate() if owner.dim is None else Shard(owner.dim)
            whole = DTensor.from_local(tensor.detach(), ep_mesh, [placement], run_check=False)
            made[id(tensor)] = nn.Parameter(whole, requires_grad=tensor.requires_grad)
    for holder in model.modules():
        for name, parameter in list(holder.named_parameters(recurse=False)):
            if id(parameter) in made:
                holder.register_parameter(name, made[id(parameter)])


def fully_shard_experts(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    dp: str | Sequence[str] = "dp",
    ep: str = "ep",
    mp_policy: MixedPrecisionPolicy | None = None,
    **options: Any,
) -> None:
    """FSDP2 of each `Experts` over mesh[dp], in place; call `fully_shard` on the blocks and the model afterwards.

    Parameters become DTensors over (dp, ep) of global shape (E, ...): split by experts if dp divides a rank's share
    of them, else along their second dimension.  Gradients become the mean over all ranks of the mesh.
    dp: the dimension whose ranks hold the same experts; or two, (replicate, shard), for HSDP.
    mp_policy: its input cast is ignored: routing weights stay fp32, and x comes in the layer's dtype
        because the block around was cast.
    options: those of fully_shard, except mesh (reshard_after_forward, offload_policy, shard_placement_fn).

    Raises ConfigError if the model has no Experts, if they are on another EP group than mesh[ep], if the mesh has
    other dimensions, if `fully_shard` came first, if a tensor inside an Experts has no known owner; UnsupportedError
    for main_grad, which FSDP2 would not reduce, and for parameters of several Experts.
    """
    found, names = _checked(model, mesh, dp, ep)
    if len(names) > 2:
        raise ConfigError(f"dp is {names}; fully_shard takes one dimension, or two: (replicate, shard)")
    for name, (tensor, owner) in found.items():
        if isinstance(tensor, DTensor):
            _check_distributed(name, tensor, owner, mesh[ep])
        for layer, module in layers(model):
            if module is not owner.experts and any(p is tensor for p in module.parameters()):
                raise UnsupportedError(
                    f"{name} belongs to {owner.layer} and {layer}, and FSDP2 units cannot share parameters"
                )
    complete = _complete(model)
    if complete and len(names) > 1:
        raise UnsupportedError(
            f"Workspace(copies=) sums expert gradients over all copies, and FSDP2 would sum them over {names[0]!r} "
            "again; use one dimension of copies, or no copies="
        )
    distribute_experts(model, mesh[ep])
    policy = dataclasses.replace(mp_policy or MixedPrecisionPolicy(), cast_forward_inputs=False)
    copies = mesh[names[0]] if len(names) == 1 else mesh[names]
    parts = mesh[names[-1]].size()
    for _, module in layers(model):
        chosen = {"shard_placement_fn": functools.partial(_even, parts)} | options
        sharded = fully_shard(module, mesh=copies, mp_policy=policy, **chosen)
        sharded.set_gradient_divide_factor(float(mesh.size()))
        # gloo cannot sum and divide at once.  Not set for a group of one: torch 2.13 would divide twice.
        sharded.set_force_sum_reduction_for_comms(parts > 1)
        if complete:
            sharded.set_custom_reduce_scatter(Complete())
    for holder in (model, *(module for _, module in layers(model))):
        holder.__deepcopy__ = functools.partial(_refuse_copy, type(holder).__name__)  # type: ignore[assignment]


def _even(parts: int, parameter: nn.Parameter) -> Shard:
    """The first dimension that can be split evenly over `parts` ranks; preferably the experts'."""
    shape = local_part(parameter).shape
    return Shard(next((dim for dim, size in enumerate(shape) if size % parts == 0), 0))


def _refuse_copy(name: str, memo: dict[int, Any]) -> NoReturn:
    raise UnsupportedError(
        f"this {name} holds experts in FSDP2, which cannot be deep-copied, as AveragedModel does.  Build a second "
        "model, shard it in the same way, load the first one's state_dict() into it, and average parameter by "
        "parameter: average.lerp_(parameter, weight)"
    )


def _checked(
    model: nn.Module, mesh: DeviceMesh, dp: str | Sequence[str], ep: str
) -> tuple[dict[str, tuple[Tensor, Owner]], tuple[str, ...]]:
    """The owners of all tensors, and the names of the dp dimensions."""
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"mesh is a {type(mesh).__name__}; pass a DeviceMesh of two named dimensions, "
            "init_device_mesh(device_type, (DP, EP), mesh_dim_names=('dp', 'ep'))"
        )
    have, names = mesh.mesh_dim_names or (), (dp,) if isinstance(dp, str) else tuple(dp)
    if not names or ep not in have or any(name not in have for name in names):
        raise ConfigError(f"the mesh has dimensions {have}; it needs {', '.join(map(repr, names))} and {ep!r}")
    for name in have:
        if name not in (*names, ep) and mesh[name].size() > 1:
            raise ConfigError(
                f"the mesh has a dimension {name!r} of {mesh[name].size()} ranks beside {names} and {ep!r}.  If its "
                f"ranks hold copies of the same experts and have other tokens, name it: dp={(name, *names)}; if they "
                f"hold other layers or parts, pass mesh[{(*names, ep)}] of the ranks that hold the same"
            )
    for layer, module in layers(model):
        check_group(module, layer, mesh[ep])
        _check_copies(module, layer, mesh, tuple(name for name in have if name in names))
        if module.main_grad is not None:
            raise UnsupportedError(
                f"{layer} has main_grad={module.main_grad!r}, which PyTorch's wrappers would not reduce over {names}; "
                "set it to None (FSDP2 reduces in fp32 with MixedPrecisionPolicy(reduce_dtype=torch.float32))"
            )
    return owners(model), tuple(name for name in have if name in names)


def _complete(model: nn.Module) -> bool:
    """Whether the layers sum expert gradients over the copies themselves."""
    found = {module.workspace.num_copies > 1 for _, module in layers(model)}
    if len(found) > 1:
        raise ConfigError("some Workspaces of this model have copies= and others not; use the same for all its layers")
    return found.pop()


def _check_copies(module: Experts, layer: str, mesh: DeviceMesh, names: tuple[str, ...]) -> None:
    """Copies that the layer sums itself are those of the mesh."""
    copies = module.workspace.copies
    if copies is None or copies.size() == 1:
        return
    ours = dist.get_process_group_ranks(copies)
    theirs = mesh[names].mesh.flatten().tolist()
    if ours != theirs:
        raise ConfigError(
            f"{layer} sums its gradients over copies on ranks {ours} but along {names} are ranks {theirs}; give its "
            "Workspace copies= that dimension of the mesh"
        )


def _check_distributed(name: str, tensor: DTensor, owner: Owner, ep_mesh: DeviceMesh) -> None:
    wanted = [Replicate() if owner.dim is None else Shard(owner.dim)]
    ranks = tensor.device_mesh.mesh.flatten().tolist()
    if ranks != ep_mesh.mesh.flatten().tolist() or list(tensor.placements) != wanted:
        raise ConfigError(
            f"{name} is already a DTensor over ranks {ranks}, split as {tensor.placements}; call fully_shard_experts "
            "(or distribute_experts) first and fully_shard of the modules around it afterwards"
        )

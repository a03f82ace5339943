"""Model and optimizer for torch.distributed.checkpoint: every tensor with its owner, or an error."""

from __future__ import annotations

import copy
import ctypes
import hashlib
import itertools
import json
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from uniep.errors import ConfigError, UniEPError, UnsupportedError
from uniep.integrations.torch.owners import Owner, check_group, layers, mesh_of, owners, plain_name
from uniep.nn import Experts
from uniep.nn.modules import local_part
from uniep.nn.wrappers import callers

__all__ = ["TrainState", "load_full_state_dict"]

log = logging.getLogger("uniep")

STATES: dict[str, int | None] = {
    "step": None,
    "mu_product": None,
    "eta": None,
    "mu": None,
    "row_var": 0,
    "col_var": 0,
    "exp_avg_sq_row": 0,
    "exp_avg_sq_col": 0,
}
"""States of torch's optimizers and transformers' Adafactor: the dimension along which experts lie; None for numbers
that are the same for all experts."""

OF_PARAMETERS = ("params", "states", "param_names")
"""Keys of a parameter group that are no settings: lists, in the order of its own parameters."""


class TrainState(Stateful):
    """Model and optimizer for torch.distributed.checkpoint, with experts under their global ids.

        dcp.save({"train": TrainState(model, optimizer, mesh["ep"])}, checkpoint_id=path)
        dcp.load({"train": TrainState(model, optimizer, mesh["ep"])}, checkpoint_id=path)

    A checkpoint saved at any EP and DP size, plain, DDP or FSDP2, loads at any other: w13 is one tensor (E, 2F, D) in
    the checkpoint.  Plain and DDP models keep ordinary parameters; they are DTensors only while saving and loading.

    Each tensor has an owner, or saving raises.  Inside an `Experts`, `expert_dims` gives it.  In the optimizer's state
    of an expert's parameter, a tensor of the parameter's shape is split like the parameter.  Other states of torch's
    optimizers are known; anything else must be in `expert_dims`.  For loading, the optimizer's states need not exist,
    and gradients may.  A parameter that had no state when it was saved has none after loading.

    model: contains `Experts`, wrapped or not.  optimizer: one or several for its parameters, or None.
        Parameters that require gradients and are in none are told by a warning.
    ep_mesh: one-dimensional, e.g. mesh["ep"], or the process group of the experts.
    expert_dims: {name of an optimizer state: dimension along which this rank's experts lie, or None if it is the
        same for all experts}.

    Collective over `ep_mesh`, and its errors are raised on all of its ranks.

    Raises ConfigError for another ep_mesh, for tensors without an owner and for states that EP ranks should share but
    do not.  Loading also raises it if parameters, states, layers or dtypes differ from the checkpoint's.  Missing
    tensors or other shapes are errors of dcp.load.  UnsupportedError for ZeroRedundancyOptimizer, whose ranks hold
    parts of a state.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None,
        ep_mesh: DeviceMesh | dist.ProcessGroup,
        *,
        expert_dims: Mapping[str, int | None] | None = None,
    ) -> None:
        found = list(layers(model))
        self.model, self.ep_mesh = model, mesh_of(ep_mesh, found[0][1].workspace.device.type)
        self.optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
        self.states = STATES | dict(expert_dims or {})
        self._spread: set[tuple[str, str]] = set()
        self._last: Any = None
        for layer, module in found:
            check_group(module, layer, self.ep_mesh)
        owners(model)
        for one in self.optimizers:
            if isinstance(one, ZeroRedundancyOptimizer):
                raise UnsupportedError(
                    "ZeroRedundancyOptimizer takes the experts of all ranks for copies: it spreads their states over "
                    "ranks and sends one rank's experts to all; use fully_shard_experts and fully_shard"
                )
        if self.optimizers:
            self._tell_untrained()

    def state_dict(self) -> dict[str, Any]:
        return self._agreed(self._collect)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        about = json.loads(state_dict["about"])
        self._agreed(lambda: self._check(about))
        own = owners(self.model)
        model = {
            name: local_part(value) if name in own and not isinstance(own[name][0], DTensor) else value
            for name, value in state_dict["model"].items()
        }
        _set_state(self.model, model)
        if not self.optimizers:
            return
        kept = _states_of(about["groups"])
        settings = {name: group for group in about["groups"] for name in group["params"]}
        for optimizer, group, name, parameter in self._parameters():
            for key, value in settings[name].items():
                if key not in OF_PARAMETERS:
                    _set(group, key, tuple(value) if isinstance(group.get(key), tuple) else value)
            if name not in kept:
                optimizer.state.pop(parameter, None)
                continue
            state = optimizer.state[parameter]
            for key, value in state_dict["optimizer"]["state"][name].items():
                # Parameters that were plain are plain again.
                _set(state, key, local_part(value) if (name, key) in self._spread else value)

    def _tell_untrained(self) -> None:
        held = {id(p) for one in self.optimizers for group in one.param_groups for p in group["params"]}
        wanted = {plain_name(self.model, path): id(p) for path, p in self.model.named_parameters() if p.requires_grad}
        if left := [name for name, one in wanted.items() if one not in held]:
            log.warning(
                "uniep: TrainState's optimizers hold %d of the model's %d parameters that require gradients; nothing "
                "trains the others, the first of which is %s.  Pass all optimizers, or requires_grad_(False)",
                len(wanted) - len(left), len(wanted), left[0],
            )  # fmt: skip

    def _agreed(self, function: Any) -> Any:
        """The result of `function`, which returns (result, claims).  Raises if it raises on any EP rank or claims
        differ."""
        error: Exception | None = None
        result, claims = None, {}
        try:
            result, claims = function()
        except Exception as raised:
            error = raised
        if self.ep_mesh.size() > 1:
            everyone: list[Any] = [None] * self.ep_mesh.size()
            told = None if error is None else str(error)
            if told is not None and not isinstance(error, UniEPError):
                told = f"{type(error).__name__}: {told}"
            dist.all_gather_object(everyone, (told, claims), group=self.ep_mesh.get_group())
            if error is None:
                for rank, (text, theirs) in enumerate(everyone):
                    if text is not None:
                        raise ConfigError(f"expert-parallel rank {rank}: {text}")
                    for what in sorted(claims.keys() | theirs.keys()):
                        if claims.get(what) != theirs.get(what):
                            raise ConfigError(
                                f"{what} should be the same on all expert-parallel ranks, but differs between rank "
                                f"{rank} and this one, {self.ep_mesh.get_local_rank()}; if it belongs to this rank's "
                                "experts, say along which dimension they lie: TrainState(..., expert_dims={name: dim})"
                            )
        if error is not None:
            raise error
        return result

    def _collect(self) -> tuple[dict[str, Any], dict[str, str]]:
        """(all that is saved, what all EP ranks have to agree on).

        "about" is one string, because of a dictionary dcp.load would read only the keys that its template has.
        """
        claims: dict[str, str] = {}
        model = self._model(claims)
        states, groups = self._optimizer(claims)
        about = {
            "dtypes": {name: _dtype(value) for name, value in model.items()},
            "layers": {
                layer: {"top_k": module.cfg.top_k, "activation": module.cfg.activation, **_limit(module)}
                for layer, module in layers(self.model)
            },
            "groups": groups,
        }
        self._last = (
            about,
            {name: {key: _dtype(value) for key, value in state.items()} for name, state in states.items()},
        )
        return {"model": model, "optimizer": {"state": states}, "about": _About(json.dumps(about))}, claims

    def _model(self, claims: dict[str, str]) -> dict[str, Any]:
        own = owners(self.model)
        values = _state(self.model)
        for name in _of_ranks(self.model, values):
            del values[name]
        prefixes = tuple(f"{layer}." if layer else "" for layer, _ in layers(self.model))
        for name, value in values.items():
            if name in own:
                dim = own[name][1].dim
                if dim is not None and not isinstance(value, DTensor):
                    values[name] = self._over_ep(value, dim)
            elif name.startswith(prefixes):
                claims[name] = _digest(value)  # the extra state of a module, of unknown shape
        return values

    def _over_ep(self, value: Tensor, dim: int) -> DTensor:
        return DTensor.from_local(value, self.ep_mesh, [Shard(dim)], run_check=False)

    def _parameters(self) -> Iterator[tuple[Optimizer, dict[str, Any], str, nn.Parameter]]:
        """(optimizer, group, name, parameter) for every parameter of every optimizer."""
        names = {id(p): plain_name(self.model, path) for path, p in self.model.named_parameters()}
        for optimizer in self.optimizers:
            for number, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    if id(parameter) not in names:
                        raise ConfigError(
                            f"parameter group {number} of {type(optimizer).__name__} holds a parameter of shape "
                            f"{tuple(parameter.shape)} that is not the model's; make the optimizer after wrapping the "
                            "model, of its parameters"
                        )
                    yield optimizer, group, names[id(parameter)], parameter

    def _optimizer(self, claims: dict[str, str]) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
        """States of all parameters, and groups with the names of the parameters that already have a state."""
        own = owners(self.model)
        states: dict[str, dict[str, Any]] = {}
        groups: dict[int, dict[str, Any]] = {}
        self._spread.clear()
        seen: dict[int, set[int]] = defaultdict(set)
        for optimizer, group, name, parameter in self._parameters():
            seen[id(optimizer)].add(id(parameter))
            saved = groups.setdefault(id(group), {**_settings(group), "params": [], "states": {}})
            saved["params"].append(name)
            state = optimizer.state.get(parameter)
            if state:
                saved["states"][name] = {key: _dtype(value) for key, value in state.items()}
            elif parameter.requires_grad:
                state = _unborn(optimizer, group, parameter, name)
            _, owner = own.get(name, (None, None))
            if state:
                states[name] = {
                    key: self._owned(value, name, key, parameter, owner, claims) for key, value in state.items()
                }
            claims[f"whether the optimizer has a state of {name}"] = str(sorted(state or ()))
        for optimizer in self.optimizers:
            stray = [key for key in optimizer.state if id(key) not in seen[id(optimizer)]]
            if stray:
                raise ConfigError(
                    f"{type(optimizer).__name__} keeps {len(stray)} states of objects that are not its parameters, "
                    f"the first of a {type(stray[0]).__name__}: they have no owner.  Remove them while saving"
                )
        return states, list(groups.values())

    def _owned(
        self, value: Any, name: str, key: str, parameter: Tensor, owner: Owner | None, claims: dict[str, str]
    ) -> Any:
        """One value of the state of a parameter, as a checkpoint holds it."""
        label = f"optimizer state {key!r} of {name}"
        if isinstance(value, DTensor):
            if any(placement.is_partial() for placement in value.placements):
                raise ConfigError(f"{label} is a partial sum, {value.placements}; sum it before saving")
            return value
        dim = None if owner is None else owner.dim
        if owner is None and not isinstance(parameter, DTensor):  # every rank has the whole parameter
            if not isinstance(value, Tensor) or value.shape != parameter.shape:
                claims[label] = _digest(value)
            return value
        here = local_part(parameter).shape
        known = key in self.states
        if isinstance(value, Tensor) and type(value) not in (Tensor, nn.Parameter):
            pass  # such as quantized blocks, whose shape is no help
        elif not isinstance(value, Tensor | int | float | bool | None):
            pass  # such as the lists of LBFGS
        elif (known and self.states[key] is None) or (dim is None and not isinstance(parameter, DTensor)):
            claims[label] = _digest(value)
            return value
        elif not isinstance(value, Tensor):
            if value is None or isinstance(value, bool):
                claims[label] = _digest(value)
                return value
        elif value.shape == here and not (known and self.states[key] != dim):
            self._spread.add((name, key))
            if isinstance(parameter, DTensor):
                return DTensor.from_local(
                    value,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            assert dim is not None
            return self._over_ep(value, dim)
        elif known and owner is not None and (not isinstance(parameter, DTensor) or parameter.device_mesh.ndim == 1):
            along = self.states[key]
            assert along is not None
            if along < value.dim() and value.shape[along] % owner.experts.num_local == 0:
                self._spread.add((name, key))
                return self._over_ep(value, along)
        shape = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"value {str(value)[:40]}"
        raise ConfigError(
            f"{label}, a {type(value).__name__} of {shape}, has no known owner: the parameter's part here has shape "
            f"{tuple(here)}, and which of its elements this belongs to cannot be told.  If this rank's experts lie "
            f"along one of its dimensions, or it is the same for all: TrainState(..., expert_dims={{{key!r}: dim or "
            "None}); else use an optimizer whose states have the parameter's shape"
        )

    def _check(self, saved: dict[str, Any]) -> tuple[None, dict[str, str]]:
        """Raise unless model and optimizer match what was saved.  dcp.load has already reported missing tensors."""
        if self._last is None:
            self._collect()
        ours, dtypes = self._last
        # dcp.load needed it, and a second one would take the same memory again
        old = _of_ranks(self.model, saved["dtypes"])  # once saved for the second name of shared experts
        for name, dtype in saved["dtypes"].items():
            if name in old:
                continue
            if name not in ours["dtypes"]:
                raise ConfigError(f"the checkpoint has {name}, which this model lacks; build the model that was saved")
            if dtype != ours["dtypes"][name]:
                raise ConfigError(
                    f"{name} is {dtype} in the checkpoint and {ours['dtypes'][name]} here; load it into a model of "
                    "that dtype and convert that"
                )
        for layer, settings in ours["layers"].items():
            if settings != saved["layers"].get(layer, settings):
                raise ConfigError(f"{layer} was saved with {saved['layers'][layer]} and has {settings} here")
        if not self.optimizers:
            return None, {}
        groups = {name: group for group in saved["groups"] for name in group["params"]}
        for group in ours["groups"]:
            if lost := [name for name in group["params"] if name not in groups]:
                raise ConfigError(
                    f"the checkpoint's optimizer did not have {lost[0]}; give this one the same parameters"
                )
            theirs = [groups[name] | dict.fromkeys(OF_PARAMETERS) for name in group["params"]]
            if any(other != theirs[0] for other in theirs):
                raise ConfigError(
                    f"{group['params'][0]} and others of its parameter group were in groups of other settings when "
                    "they were saved; group the parameters as they were"
                )
        for name, state in _states_of(saved["groups"]).items():
            if name not in dtypes:
                raise ConfigError(
                    f"the checkpoint has an optimizer state of {name}, which this optimizer lacks or holds as frozen; "
                    "load into an optimizer of the same parameters, requiring gradients, and freeze them afterwards"
                )
            if state != dtypes[name]:
                raise ConfigError(
                    f"the optimizer state of {name} was saved as {state} and is {dtypes[name]} here; use the optimizer "
                    "and dtypes that were saved"
                )
        return None, {}


def load_full_state_dict(model: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Load whole tensors, each rank its part: from a `state_dict()` at EP size 1, a converted checkpoint, or a file.

    state_dict: w13 (E, 2F, D), w2 (E, D, F) and all other tensors whole, on every rank; may be mapped from a file.
    model: plain, DDP or FSDP2, at any EP size.

    Raises ConfigError for names or shapes that are not the model's, before anything is changed.
    """
    own = owners(model)
    here = _state(model)
    of_ranks = _of_ranks(model, here)
    names = here.keys() - of_ranks.keys()
    others = state_dict.keys() - names - of_ranks.keys()
    if (lost := names - state_dict.keys()) or others:
        raise ConfigError(
            f"the state lacks {len(lost)} tensors of the model ({_some(lost)}) and has {len(others)} others "
            f"({_some(others)}){_renaming(lost, others)}"
        )
    for name in names:
        value, mine = here[name], state_dict[name]
        if not isinstance(value, Tensor):
            here[name] = mine
            continue
        shape, first = list(value.shape), [0] * value.dim()
        dim = own[name][1].dim if name in own else None
        if dim is not None and not isinstance(value, DTensor):
            workspace = own[name][1].experts.workspace
            first[dim] = workspace.rank * shape[dim]
            shape[dim] *= workspace.ep_size
        if list(mine.shape) != shape:
            raise ConfigError(f"{name} is {tuple(mine.shape)} in the state; whole it has shape {tuple(shape)}")
        if isinstance(value, DTensor):
            mine = mine.to(value.device)
            here[name] = distribute_tensor(mine, value.device_mesh, value.placements, src_data_rank=None)
        else:
            here[name] = mine[tuple(slice(a, a + n) for a, n in zip(first, value.shape, strict=True))]
    _set_state(model, here)


class _About(str):
    """What a checkpoint says of its tensors.  torch's writers of safetensors write it between them, into a file that
    nothing can read, and raise no error; so this does, on all ranks, when it is asked how it is split."""

    def __create_write_items__(self, name: str, value: Any) -> list[Any]:
        for frame in callers():
            kind = getattr(frame.f_locals.get("storage_writer"), "serialization_format", None)
            if getattr(kind, "name", None) == "SAFETENSORS":
                raise UnsupportedError(
                    "safetensors hold tensors alone, and TrainState also saves settings as text.  Save it with the "
                    "default writer (checkpoint_id=folder), or the model alone, TrainState(...).state_dict()['model'], "
                    "with this one"
                )
        return _create_write_items(name, str(self))

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return str, (str(self),)


def _some(names: Iterable[str]) -> str:
    first = sorted(names)
    return ", ".join(first[:3]) + (", ..." if len(first) > 3 else "") if first else "none"


def _renaming(lost: Collection[str], others: Collection[str]) -> str:
    """The remedy: a prefix that most names have in one of the two and not in the other, or in general."""
    for have, want, text in (
        (others, lost, "the state's names begin with {!r}; take it off them"),
        (lost, others, "the model's names begin with {!r}; put it before the state's"),
    ):
        one, short = min(want, default=""), set(want)
        for prefix in {name.removesuffix(one) for name in have if one and name.endswith(f".{one}")}:
            if 2 * sum(name.startswith(prefix) and name.removeprefix(prefix) in short for name in have) > len(have):
                return "; " + text.format(prefix)
    return (
        "; give the tensors the model's names (join_experts of uniep.integrations.checkpoints; the router by router=)"
    )


def _state(model: nn.Module) -> dict[str, Any]:
    """`state_dict()` with names that leave out wrappers."""
    return {plain_name(model, path): value for path, value in model.state_dict().items()}


def _set_state(model: nn.Module, state_dict: dict[str, Any]) -> None:
    own = model.state_dict()
    given = state_dict | _of_ranks(model, _state(model))
    model.load_state_dict({path: given[plain_name(model, path)] for path in own})


def _of_ranks(model: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The extra state of each `Experts`, under each of its names, which belongs to this rank only."""
    own = Experts.get_extra_state
    names = {
        f"{plain_name(model, path)}._extra_state".lstrip(".")
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, Experts) and type(module).get_extra_state is own
    }
    return {name: value for name, value in state_dict.items() if name in names}


def _unborn(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor, name: str) -> dict[str, Any]:
    """The state that the parameter's first step would make, from a stand-in; the parameter itself is not touched."""
    stand_in = nn.Parameter(torch.zeros_like(parameter))
    stand_in.grad = torch.zeros_like(stand_in)
    shadow = copy.copy(optimizer)
    shadow.state = defaultdict(dict)
    shadow.param_groups = [{**group, "params": [stand_in]}]
    shadow._optimizer_step_pre_hooks, shadow._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        type(shadow).step(shadow)
    except Exception as cause:
        raise ConfigError(
            f"{type(optimizer).__name__} has no state of {name} yet, and making it ahead failed ({cause}); take a step "
            "before saving or loading"
        ) from cause
    return dict(shadow.state[stand_in])


def _states_of(groups: Sequence[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """name -> {key: dtype} of the parameters that had a state."""
    return dict(itertools.chain.from_iterable(group["states"].items() for group in groups))


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Learning rates and other settings, as numbers."""
    settings = {}
    for key, value in group.items():
        if key not in OF_PARAMETERS:
            settings[key] = value.item() if isinstance(value, Tensor) else value
            try:
                json.dumps(settings[key])
            except TypeError as cause:
                raise ConfigError(
                    f"the setting {key!r} of a parameter group is a {type(value).__name__}, which a checkpoint does "
                    "not hold; take it out of the group while saving and loading"
                ) from cause
    return settings


def _set(target: Any, key: str, value: Any) -> None:
    """Set it; in place if it is a tensor, because a captured graph may read it."""
    old = target.get(key)
    if isinstance(old, Tensor) and (not isinstance(value, Tensor) or old.shape == value.shape):
        with torch.no_grad():
            old.copy_(value) if isinstance(value, Tensor) else old.fill_(value)
    else:
        target[key] = value


def _limit(module: Experts) -> dict[str, float]:
    """The activation's limit, if there is one: checkpoints without are as they were before there were any."""
    limit = module.cfg.activation_limit
    return {} if limit is None else {"activation_limit": limit}


def _dtype(value: Any) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else "not a tensor"


def _digest(value: Any) -> str:
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().flatten()
        raw = ctypes.string_at(flat.data_ptr(), flat.nbytes)  # numpy is not a dependency
        return hashlib.blake2b(raw, digest_size=8).hexdigest() + str(value.shape)
    if isinstance(value, list | tuple):
        return str([_digest(one) for one in value])
    if isinstance(value, dict):
        return str({str(key): _digest(one) for key, one in value.items()})
    return repr(value)

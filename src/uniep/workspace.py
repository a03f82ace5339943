"""Workspace: one expert-parallel group's shared memory, backend and call order.

All layers of one shape and group share a Workspace; what a call must keep for backward is never in it.
Environment variables are read here, when a Workspace is made, and arguments win over them:
UNIEP_BACKEND, UNIEP_TIMEOUT_S, UNIEP_TUNE.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from uniep.backends import registry
from uniep.config import MoEConfig
from uniep.copies import Copies
from uniep.errors import ClosedError, ConfigError, PeerTimeoutError, UniEPError, UnsupportedError, check_kind
from uniep.meeting import Meeting, has_process_group
from uniep.membership import Membership
from uniep.row_operator import RowOperator, refuse_operators
from uniep.schedule import Schedule, refuse_invalid
from uniep.stages import DIRECTIONS, Direction, Flags, Program, stages
from uniep.tuner import choose
from uniep.way import ADAPTABLE

if TYPE_CHECKING:
    from uniep.backends.base import Backend

_P = ParamSpec("_P")
_T = TypeVar("_T")

log = logging.getLogger("uniep")

DEFAULT_TIMEOUT_S = 600.0
_LONGEST_S = 1e9
_numbers = itertools.count()
_by_key: weakref.WeakValueDictionary[str, Workspace] = weakref.WeakValueDictionary()


class Workspace:
    """Collective: every rank of `group` creates it, in the same order.  An error of one rank is raised on all.

    It belongs to this process: it cannot be pickled, and it is closed in a forked child.  Copies of a layer share it.
    Calls of several threads run one after another; all ranks need them in the same order.

    cfg: identical on all ranks, else ConfigError on every rank naming the field.
    group: ProcessGroup, one-dimensional DeviceMesh, or None for EP=1.  One of several ranks (WORLD_SIZE above 1)
        without init_process_group is refused.
    device: where x lives; default the current CUDA device if there is one, else CPU.
    backend: "auto", "cpu", "hopper" or "nccl" (explicit collectives, any GPU, several nodes; gloo on CPU).
        "auto" takes UNIEP_BACKEND if it is set, else "hopper" on CUDA and "cpu" on CPU, and raises if that cannot run.
    copies: ProcessGroup or one-dimensional DeviceMesh of the ranks of other EP groups that hold copies of this rank's
        experts, in the order of their blocks (`MoEConfig.gradient_shards`), this rank included.  Then each backward
        sums expert gradients over them, too, and is collective over both groups: `.grad` and main_grad are complete
        over EP x copies, the same on all copies.  None: no copies, or they are reduced elsewhere.
        On the CPU a copy's error or absence is raised on all copies, and it is an error if their experts differ.  On
        GPUs nobody can be told: a failed backward closes the Workspace, and the copies' sum ends by the timeout of
        `copies`.
    operators: your own operators on rows of the experts (`RowOperator`); those after the same product run in this
        order.  Ranks compare their names, places and kinds, not what they compute.
    schedule: how calls are executed; changes only speed.  Default: chosen by `tune`.
    tune: "off": the backend's default Schedule.  "cached": the choice of a table of this card, shape and kernels for
        max_tokens_per_rank, the same on all ranks.  "online": the fastest of the Schedules that such a table has
        verified, timed once on this machine.  Default UNIEP_TUNE or "cached".
    timeout_s: longest wait for a peer before PeerTimeoutError, in each stage of creation and of a call, on every
        backend; time in which this process did not run does not count.  Default UNIEP_TIMEOUT_S or 600.
    agreed: other values that must be the same on all ranks, else ConfigError.
    """

    def __init__(
        self,
        cfg: MoEConfig,
        group: Any = None,
        *,
        copies: Any = None,
        operators: Sequence[RowOperator] = (),
        device: torch.device | str | int | None = None,
        backend: str = "auto",
        schedule: Schedule | None = None,
        timeout_s: float | None = None,
        agreed: str = "",
        tune: str | None = None,
    ) -> None:
        self.cfg = cfg
        self.group: dist.ProcessGroup | None = process_group(group)
        self.rank = dist.get_rank(self.group) if self.group is not None else 0
        self.ep_size = dist.get_world_size(self.group) if self.group is not None else 1
        self.ranks = _global_ranks(self.group)
        self.copies: dist.ProcessGroup | None = process_group(copies, "copies")
        self.num_copies = dist.get_world_size(self.copies) if self.copies is not None else 1
        self.among_copies: Copies | None = None
        self.key = f"uniep-workspace-{next(_numbers)}"
        self._entered = threading.local()
        self._backend: Backend | None = None
        self.forwards = 0  # number of forwards that have run: the same on every rank
        self.unnamed = False  # whether a forward of an unknown layer has run
        self.entering = threading.RLock()  # held from when a forward is numbered until it is done
        self.timeout_s = DEFAULT_TIMEOUT_S
        self.operators = operators  # judged with the rest

        fields, error, chosen, found = self._judge(cfg, device, backend, schedule, timeout_s, agreed, tune)
        error = self._agree_with_copies(fields, error)
        meeting = Meeting(self.group, self.timeout_s)  # of all ranks, until this Workspace is made
        try:
            with meeting, _ordinary():
                found = self._agree(fields, error, found, meeting)
                if len(found) < 2 or operators:  # which were not there when the points were timed
                    self._make(chosen, found[0] if found else schedule, meeting)
            if self._backend is None:
                schedule = choose.fastest(cfg, self.group, chosen, self.device, found, self.timeout_s, self.num_copies)
                meeting = Meeting(self.group, self.timeout_s)
                with meeting, _ordinary():
                    self._make(chosen, schedule, meeting)
        except BaseException as cause:  # the other ranks have no Workspace either
            self._close(f"{type(cause).__name__}: {cause}")
            raise
        log.info("rank %d of %d: backend %s on %s", self.rank, self.ep_size, chosen, self.device)
        _by_key[self.key] = self

    def _make(self, backend: str, schedule: Schedule | None, meeting: Meeting) -> None:
        _end_in_forked_children()
        self._membership = Membership(
            self.cfg, self.group, self.rank, self.ep_size, self.device, self.timeout_s, meeting, self.fail,
            self.num_copies, self.operators,
        )  # fmt: skip
        self._backend = registry.make(backend, self._membership, schedule)
        meeting.exchange(None, "ready")
        self._membership.is_made()

    def _judge(
        self,
        cfg: MoEConfig,
        device: Any,
        backend: str,
        schedule: Schedule | None,
        timeout_s: float | None,
        agreed: str,
        tune: str | None,
    ) -> tuple[dict[str, Any], UniEPError | None, str, list[Schedule]]:
        """(values that must be the same on all ranks, the error in this rank's arguments, the backend's name, the
        tables' proposals if no schedule is given)."""
        fields: dict[str, Any] = {}
        found: list[Schedule] = []
        chosen, error = "", None
        try:
            self.timeout_s = choose_timeout(timeout_s)
            check_kind("cfg", cfg, MoEConfig)
            _refuse_launcher_without_group(self.group)
            fields |= dataclasses.asdict(cfg) | {"ep_size": self.ep_size, "copies": self.num_copies}
            self.device = _device(device)
            cfg.check_group(self.ep_size, self.num_copies)
            if schedule is not None:
                refuse_invalid(schedule, cfg)
            chosen = choose_backend(backend, self.device)
            fields |= {"backend": chosen, "device type": self.device.type, "schedule": schedule, "agreed": agreed}
            refuse_operators(self.operators, chosen)
            self.operators = tuple(self.operators)
            fields["operators"] = [op.described for op in self.operators]
            fields["tune"] = choose.mode(tune)
            if schedule is None:
                found = choose.proposals(cfg, self.ep_size, chosen, self.device, fields["tune"])
        except UniEPError as cause:
            error = cause
        except Exception as cause:  # torch's error for an unknown or missing device
            error = ConfigError(f"{type(cause).__name__}: {cause}")
        return fields, error, chosen, found

    def _agree_with_copies(self, fields: dict[str, Any], error: UniEPError | None) -> UniEPError | None:
        """This rank's error or, if it has none, what the ranks with copies of its experts tell: theirs, or that they
        compute something else."""
        if self.num_copies == 1:
            return error
        try:
            with Meeting(self.copies, self.timeout_s) as meeting:
                everyone = meeting.exchange((fields, error), "copies")
                if error is None and self.copies is not None:
                    self.among_copies = Copies(self.copies, meeting, self.device)
        except UniEPError as cause:
            return error or cause
        first = next((theirs for _, theirs in everyone if theirs is not None), None)
        return error or first or _disagreement([theirs for theirs, _ in everyone], "copy")

    def _agree(
        self, fields: dict[str, Any], error: UniEPError | None, found: list[Schedule], meeting: Meeting
    ) -> list[Schedule]:
        """Raise on every rank if any rank has an error, or another configuration.  -> what rank 0 has found."""
        if self.group is None:
            if error is not None:
                raise error
            return found
        everyone = meeting.exchange((fields, error, found), "configuration")
        if (disagreement := _disagreement([theirs for theirs, _, _ in everyone], "rank")) is not None:
            raise disagreement
        if error is not None:
            raise error
        for rank, (_, theirs_error, _) in enumerate(everyone):
            if theirs_error is not None:
                raise type(theirs_error)(f"rank {rank}: {theirs_error}")
        return everyone[0][2]

    @property
    def backend(self) -> Backend:
        if self._backend is None:
            raise ClosedError(f"this Workspace is closed ({self.cause}); make a new one")
        return self._backend

    @property
    def cause(self) -> str:
        """Why it is closed; "" while it is not."""
        return self._membership.cause

    @property
    def entered(self) -> int:
        """How many calls this thread has handed to the backend."""
        return getattr(self._entered, "count", 0)

    def enter(self) -> Backend:
        """The backend, for one call.  The backend itself tells the other ranks about errors inside the call."""
        backend = self.backend
        self._entered.count = self.entered + 1
        return backend

    def tell(self, error: BaseException, since: int | None, sums: int | None = None) -> None:
        """Tell the other ranks about `error`, which leaves a function in which this rank should have made a call.

        since: `entered` at the function's start; None: no call has been entered.  Before a call, the error is a
        refusal, which every rank raises, including this one.  After a call, or if it is not an Exception (such as an
        interrupt), or if a peer is missing already, it closes the Workspace.

        sums: `Copies.sums` at the start of a backward, whose gradients ranks with copies of the experts wait for.
        """
        if self._backend is None or _is_no_failure(error):
            return
        named = error if isinstance(error, UniEPError) else UniEPError(f"{type(error).__name__}: {error}")
        with temporarily_clear_interpreter_stack(), _disable_current_modes():
            try:
                self._tell(error, named, since)
            finally:
                if self.among_copies is not None and self.among_copies.sums == sums:
                    self.tell_copies(named)

    def _tell(self, error: BaseException, named: UniEPError, since: int | None) -> None:
        """To the ranks of the EP group."""
        if getattr(error, "uniep_told", "") == self.key:
            return
        if since is not None and self.entered != since:
            if error is not named:  # the backend has already told the others about a UniEPError
                self.fail(str(named))
        elif isinstance(error, Exception) and not isinstance(error, PeerTimeoutError):
            error.uniep_told = self.key  # type: ignore[attr-defined]  # set by the innermost of nested functions
            self.enter().refuse(named)
        else:
            self.fail(f"{type(error).__name__}: {error}")

    def tell_copies(self, error: UniEPError) -> None:
        """Tell ranks with copies of the experts that this one has no gradients for their sum.  Where they cannot be
        told, the Workspace is closed: the next backward would come to this sum."""
        if self.among_copies is not None and self._backend is not None and not self.among_copies.tell(error):
            self.fail(f"a backward failed, which copies of the experts cannot be told here: {error}")

    def program(self, tokens: int, direction: Direction, lora: Sequence[str] = ()) -> Program:
        """What a call with so many tokens of this rank does: its stages; printed, a table.  direction: "forward" or
        "backward", with all gradients.  lora: the weights beside which it has low-rank factors, "w13" and "w2".  Raises
        ConfigError."""
        if type(tokens) is not int or not 0 <= tokens <= self.cfg.max_tokens_per_rank:
            most = self.cfg.max_tokens_per_rank
            raise ConfigError(f"tokens is {tokens!r}; it must be between 0 and max_tokens_per_rank={most}")
        if direction not in DIRECTIONS:
            raise ConfigError(f"direction is {direction!r}; use {' or '.join(map(repr, DIRECTIONS))}")
        if not isinstance(lora, (tuple, list)) or not set(lora) <= set(ADAPTABLE):
            raise ConfigError(f"lora is {lora!r}; pass a tuple of some of {', '.join(map(repr, ADAPTABLE))}")
        way = self.backend.way_of(tokens, tuple(weight for weight in ADAPTABLE if weight in lora))
        title = f"{direction}, {way.backend}, {way.ep_size} ranks, T={tokens}{', LoRA' * bool(way.lora)}"
        return Program(title, stages(self.cfg, way, direction, Flags(blocks=self.num_blocks)))

    @property
    def num_blocks(self) -> int:
        """Blocks of source ranks that this EP group has, of `MoEConfig.gradient_shards`."""
        return self._membership.blocks

    def prepare(self) -> None:
        """Compile and allocate ahead of the first call.  Collective."""
        self.enter().prepare()

    def check(self) -> None:
        """Raise errors that earlier calls deferred (timeouts, overflow of max_rows)."""
        self.backend.check()

    def look(self) -> None:
        """Raise PeerTimeoutError if a peer will not come to the next call, as far as the host knows."""
        self.backend.look()

    def fail(self, cause: str) -> None:
        """Close it after an error that may have left bad data in peers' memory: later calls raise ClosedError with
        `cause`."""
        self._close(cause)

    def close(self) -> None:
        """Free the shared memory.  Not collective; calling it again does nothing."""
        self._close("close() was called")

    def _close(self, cause: str) -> None:
        if self.among_copies is not None:
            self.among_copies.leave(cause)
        if self._backend is not None:
            self._membership.cause = cause
            self._backend.close()
            self._backend = None
            self.copies = None
            self.group = self._membership.group = (
                None  # a process group that outlives destroy_process_group can abort the process at exit
            )

    def __enter__(self) -> Workspace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(f"{kind.__name__}: {value}" if kind is not None else "close() was called")

    def __copy__(self) -> Workspace:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Workspace:
        return self

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            "a Workspace belongs to its process and cannot be pickled; save a layer's state_dict() and load it into a "
            "new layer"
        )

    def _end_in_forked_child(self) -> None:
        """The memory and the group are the parent's.  The backend is kept: freeing it here may touch a device."""
        self._membership.cause = f"it belongs to process {os.getppid()}, of which this one is a fork"
        self._parents, self._backend, self.group, self.copies = self._backend, None, None, None
        self._membership.group = None
        if self.among_copies is not None:
            self.among_copies.forget()

    def __repr__(self) -> str:
        state = self._backend.name if self._backend is not None else f"closed: {self.cause}"
        return f"Workspace(rank {self.rank} of {self.ep_size}, {state}, {self.cfg})"


@contextlib.contextmanager
def _ordinary() -> Iterator[None]:
    """New tensors have memory, also under fake tensors, and are used inside and outside inference mode."""
    with torch.inference_mode(False), _disable_current_modes():
        yield


def _disagreement(everyone: Sequence[dict[str, Any]], who: str) -> ConfigError | None:
    """The error of all, if two of them have different values of a field."""
    for name in dict.fromkeys(itertools.chain(*everyone)):
        values = {number: theirs[name] for number, theirs in enumerate(everyone) if name in theirs}
        if any(v != next(iter(values.values())) for v in values.values()):
            listed = ", ".join(f"{who} {number}: {value}" for number, value in values.items())
            who = {"rank": "ranks", "copy": "copies of the same experts"}[who]
            return ConfigError(f"{who} disagree on {name} ({listed}); pass the same value on every rank")
    return None


def by_key(key: str) -> Workspace:
    """The live Workspace of `key` (custom operators carry strings, not objects)."""
    workspace = _by_key.get(key)
    if workspace is None:
        raise ClosedError(f"Workspace {key} no longer exists; keep it alive until the last backward")
    return workspace


def told_to_all(
    of: Callable[..., Workspace | None], *, sums: bool = False
) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Decorator for functions that make a call of the Workspace `of(*arguments)`: see `Workspace.tell`.  sums: they are
    a backward, or a part of it before its sums."""

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(function)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            workspace = of(*args, **kwargs)
            if not isinstance(workspace, Workspace):
                return function(*args, **kwargs)  # which says so
            since = None if torch.compiler.is_compiling() else workspace.entered  # a compiler would guard on the number
            begun = workspace.among_copies.sums if sums and workspace.among_copies is not None else None
            try:
                return function(*args, **kwargs)
            except BaseException as error:
                workspace.tell(error, since, begun)
                raise

        return run

    return decorate


def _is_no_failure(error: BaseException) -> bool:
    """Whether the error is checkpointing's way to end a recomputation, or comes from fake tensors, where no peer
    waits."""
    stop = getattr(sys.modules.get("torch.utils.checkpoint"), "_StopRecomputationError", None)
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return fake is not None or (stop is not None and isinstance(error, stop))


@functools.cache
def _end_in_forked_children() -> None:
    """Close Workspaces in forked children from now on.  A child's calls would write into its parent's memory."""

    def after() -> None:
        for workspace in list(_by_key.values()):
            workspace._end_in_forked_child()

    os.register_at_fork(after_in_child=after)


def process_group(group: Any, name: str = "group") -> dist.ProcessGroup | None:
    """The group itself, that of a one-dimensional DeviceMesh, or None.  name: of the argument, for the errors.

    Raises ConfigError for anything else."""
    if group is None or isinstance(group, dist.ProcessGroup):
        return group
    if hasattr(group, "get_group"):  # DeviceMesh
        if group.ndim != 1:
            raise ConfigError(
                f"{name} is a DeviceMesh of {group.ndim} dimensions {group.mesh_dim_names or ''}; pass one of them, "
                "e.g. mesh['ep']"
            )
        return group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(f"this process is not in {name}; make that call on the group's own ranks only")
    raise ConfigError(f"{name} is a {type(group).__name__}; pass a ProcessGroup, a one-dimensional DeviceMesh or None")


def _global_ranks(group: dist.ProcessGroup | None) -> list[int]:
    """Of the group's members; without one, this process's."""
    if group is not None:
        return dist.get_process_group_ranks(group)
    return [dist.get_rank() if has_process_group() else 0]


def _refuse_launcher_without_group(group: dist.ProcessGroup | None) -> None:
    """Raise ConfigError where a launcher has started several ranks that do not know each other yet: each would train
    all experts alone.  (dist.group.WORLD is None then.)"""
    if group is not None or has_process_group():
        return
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks != "1":
        raise ConfigError(
            f"WORLD_SIZE is {ranks}, so that this process is one of several ranks, but there is no process group yet "
            "and each rank would have all experts to itself; call torch.distributed.init_process_group first, then "
            "pass group=, or None behind it for EP=1 on each rank; if this process is alone, unset WORLD_SIZE"
        )


def _device(device: torch.device | str | int | None) -> torch.device:
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    made = torch.device(device) if not isinstance(device, int) else torch.device("cuda", device)
    if made.type == "cuda" and not torch.cuda.is_available():
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is a CPU build"
        raise UnsupportedError(f"device is {made} but no CUDA device is usable (torch {built}); pass device='cpu'")
    if made.type == "cuda" and made.index is None:
        made = torch.device("cuda", torch.cuda.current_device())
    return made


def choose_timeout(given: float | None) -> float:
    """Seconds: the Workspace's argument, or the environment variable, or the default.  Raises ConfigError."""
    name, value = ("timeout_s", given) if given is not None else ("UNIEP_TIMEOUT_S", os.environ.get("UNIEP_TIMEOUT_S"))
    try:
        seconds = float(value if value is not None else DEFAULT_TIMEOUT_S)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _LONGEST_S:
        raise ConfigError(
            f"{name} is {value!r}; it must be a number of seconds, more than 0 and at most {_LONGEST_S:g}"
        )
    return seconds


def choose_backend(given: str, device: torch.device) -> str:
    """Name of the backend that a Workspace on `device` takes.  Raises ConfigError or UnsupportedError."""
    known = {"auto", *registry.NAMES}
    wanted = given if given != "auto" else os.environ.get("UNIEP_BACKEND", "auto")
    name = "backend" if wanted == given else "UNIEP_BACKEND"
    if wanted not in known:
        raise ConfigError(f"{name} is {wanted!r}; known: {', '.join(sorted(known))}")
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"device {device} is not supported; use a CPU or CUDA device")
    natural = "hopper" if device.type == "cuda" else "cpu"
    if wanted in ("auto", "nccl"):
        return natural if wanted == "auto" else wanted
    if wanted != natural:
        missing = ": no CUDA device" if wanted == "hopper" and not torch.cuda.is_available() else ""
        remedy = "use backend='auto' or another device" if name == "backend" else "unset UNIEP_BACKEND"
        raise ConfigError(f"backend {wanted!r} does not run on {device}{missing}; {remedy}")
    return wanted

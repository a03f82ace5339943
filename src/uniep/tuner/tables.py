"""Tables of tuning results: which Schedule to use for which calls on a card, with all its timings.

One JSON file per card, backend, number of ranks and shape.  The tables of the package are in `tuner/tables`.  Results
of `uniep tune` on this machine are in a folder of the user (`folder()`), which is searched first.  An entry is valid
for one dtype and bucket of tokens, and only while the sources that decide speed and Triton are those that were timed
(`timed_with`).  Its Schedules are written as they differ from `Schedule()`, because the default depends on the size of
the call.  Where the default was the fastest, the entry says so: a call then gets the default of its own size.

A table that cannot be used is no error: the default is used.  A warning names one of the user, if its choice is another
than the default; one of the package, which nobody here can mend, only `uniep doctor` names, and a test finds it before
it is released (tests/unit/test_shipped_tables.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import logging
import math
import os
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Iterator
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from uniep import version
from uniep.config import MoEConfig
from uniep.errors import ConfigError
from uniep.schedule import DIMENSION, Schedule, default_schedule
from uniep.tuner.space import NAMES, differences, refusals, replaced

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

log = logging.getLogger("uniep")

FORMAT = 3
FARTHEST = 1.0
"""Largest distance, in factors of two, between a call's tokens and the bucket used for it."""

_CHOICES = ("activation.py", "dimension.py", "schedule.py", "way.py", "layout.py", "routing")
_TORCH = ("numerics.py", "backends/torch_tiles.py", "backends/pinned.py")
_SOURCES = {
    "cpu": (*_CHOICES, *_TORCH, "stages.py", "taskflow", "backends/cpu"),
    "hopper": (*_CHOICES, "stages.py", "taskflow", "kernels", "launch", "backends/hopper"),
    "nccl": (*_CHOICES, *_TORCH, "taskflow/graph.py", "kernels", "launch", "backends/collective"),
}
"""Sources that decide how fast a Schedule is, by backend, relative to the package: all that the backend imports, but
what costs every Schedule the same (checks, messages, starting and ending)."""


def sources(backend: str) -> dict[str, Traversable]:
    """The files that decide how fast a Schedule of this backend is, by their path in the package."""
    root, found = resources.files("uniep"), {}
    for name in _SOURCES[backend]:
        entry = root / name
        if entry.is_file():
            found[name] = entry
        else:
            found |= {f"{name}/{e.name}": e for e in entry.iterdir() if e.name.endswith((".py", ".c"))}
    return dict(sorted(found.items()))


@functools.cache
def kernels(backend: str) -> str:
    """Hash of the sources that decide how fast a Schedule of this backend is."""
    made = hashlib.sha256()
    for name, file in sources(backend).items():
        made.update(name.encode() + b"\0" + file.read_bytes())
    return made.hexdigest()[:16]


def timed_with(backend: str) -> dict[str, str]:
    """What timings on a card hold for: `kernels`, and the version of Triton, if it compiles them."""
    if backend == "cpu":
        return {"kernels": kernels(backend)}
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = "none"
    return {"kernels": kernels(backend), "triton": triton}


def card_name(device: torch.device) -> str:
    """ "h200", "h100", the name of another card as letters and digits, or "cpu"."""
    if device.type != "cuda":
        return "cpu"
    name = torch.cuda.get_device_name(device)
    known = re.search(r"H\d00", name)
    return (known[0] if known else re.sub(r"\W+", "-", name)).lower()


def bucket(tokens: int) -> int:
    """The smallest power of two that is at least `tokens`, and at least 16: the bucket whose result is used for
    them."""
    return max(16, 1 << (tokens - 1).bit_length())


@dataclasses.dataclass(frozen=True)
class Key:
    """The calls for which an entry is valid.  tokens: a bucket."""

    card: str
    backend: str
    ep_size: int
    shape: str
    dtype: str
    tokens: int

    @classmethod
    def of(cls, cfg: MoEConfig, ep_size: int, backend: str, card: str) -> Key:
        groups = "" if cfg.combine_groups is None else f"g{cfg.combine_groups}"
        shards = "" if cfg.gradient_shards == 1 else f"s{cfg.gradient_shards}"
        shape = f"{cfg.hidden}x{cfg.ffn}x{cfg.num_experts}x{cfg.top_k}{groups}{shards}"
        return cls(
            card, backend, ep_size, shape, str(cfg.dtype).removeprefix("torch."), bucket(cfg.max_tokens_per_rank)
        )

    @property
    def file(self) -> str:
        return f"{self.card}-{self.backend}-ep{self.ep_size}-{self.shape}.json"

    @property
    def place(self) -> str:
        """The entry's key in its file."""
        return f"{self.shape}-{self.dtype}-{self.tokens}"


@dataclasses.dataclass(frozen=True)
class Found:
    """schedule: the one to use, None for the backend's default; file: the table that serves the call, None if none
    does; why: in words; entry: what that table says of the call."""

    schedule: Schedule | None
    file: Path | None
    why: str
    entry: dict[str, Any] = dataclasses.field(default_factory=dict)


def folder() -> Path:
    """Where `uniep tune` writes and a Workspace looks first: UNIEP_TUNE_DIR, or under the user's cache.

    Raises ConfigError for a user without a home directory."""
    if given := os.environ.get("UNIEP_TUNE_DIR"):
        return Path(given)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "uniep" / "tuner"
    except RuntimeError as error:
        raise ConfigError(f"there is no folder for tables ({error}); set UNIEP_TUNE_DIR, or HOME") from error


def own_folder() -> Path | None:
    """`folder`, or None where nothing can be read there: a container may run as a user without a home, or in another
    user's."""
    try:
        path = folder()
        if not path.is_dir():
            return None
        if not os.access(path, os.R_OK | os.X_OK):
            raise PermissionError(f"{path} cannot be read")
        return path
    except (ConfigError, OSError) as error:
        (log.warning if "UNIEP_TUNE_DIR" in os.environ else log.info)("no tables of your own are used: %s", error)
        return None


def card_file(card: str) -> str:
    """For `model.load_card`: the path of the card that `uniep tune --calibrate` wrote on this machine, or the name
    itself."""
    own = own_folder()
    path = own / "cards" / f"{card}.toml" if own is not None else None
    return str(path) if path is not None and path.is_file() else card


def shipped() -> Path:
    """The tables of the package."""
    return Path(str(resources.files("uniep.tuner") / "tables"))


def find(cfg: MoEConfig, ep_size: int, backend: str, card: str, here: bool = True) -> Found:
    """The Schedule for a Workspace of `cfg` on a card, from the nearest bucket of a table.  Warns of the user's tables
    that cannot be used; `uniep doctor` also names the package's.  here: False: it runs on another machine, so this
    one's Triton does not matter."""
    key = Key.of(cfg, ep_size, backend, card)
    why = f"no table {key.file} has {key.dtype} near {key.tokens} tokens"
    own = own_folder()
    for path in (place / key.file for place in (own, shipped()) if place is not None):
        if not path.is_file():
            continue
        told = log.warning if path.parent == own else log.info
        try:
            document = read(path, backend)
            entry = _nearest(document, key)
            if entry is None:
                continue
            if stays(entry):
                told = log.info  # nothing is lost without it
            _refuse_outdated(path, document, backend, here)
            schedule = _choice(path, entry, cfg, ep_size, backend)
        except ConfigError as error:
            told("%s; it is not used", error)
            why = str(error)
            continue
        with_triton = f", Triton {document['triton']}" if "triton" in document else ""
        at = f"{entry['tokens']} tokens, of {len(entry.get('tried', ()))} points, commit {entry.get('commit', '?')}"
        why = f"{'the default stays' if schedule is None else 'tuned'} at {at}{with_triton}"
        return Found(schedule, path, why, entry)
    return Found(None, None, why)


def _choice(path: Path, entry: dict[str, Any], cfg: MoEConfig, ep_size: int, backend: str) -> Schedule | None:
    """None for the default.  Raises ConfigError, which names the file, for points that do not exist, and for a choice
    that cannot run."""
    try:
        schedule = None if stays(entry) else parse(entry["schedule"])
        list(tried(entry))
        parse(entry.get("compared", {}).get("changes", {}))
        reasons = [] if schedule is None else refusals(schedule, cfg, ep_size, backend)
    except ConfigError as error:
        reasons = [str(error)]
    if reasons:
        where = f"{entry['shape']}-{entry['dtype']}-{entry['tokens']}"
        raise ConfigError(f"table {path}: {where} cannot run: {'; '.join(reasons)}; {_remedy(path)}")
    return schedule


def _nearest(document: dict[str, Any], key: Key) -> dict[str, Any] | None:
    """The entry whose bucket is nearest to the key's; of two, the larger."""

    def far(entry: dict[str, Any]) -> float:
        return abs(math.log2(entry["tokens"] / key.tokens))

    fits = [e for e in document["entries"].values() if (e["shape"], e["dtype"]) == (key.shape, key.dtype)]
    best = min(fits, key=lambda e: (far(e), -e["tokens"]), default=None)
    return best if best is not None and far(best) <= FARTHEST else None


def stays(entry: dict[str, Any]) -> bool:
    """Whether the default was kept."""
    return entry["schedule"] == entry["default"]


def read(path: Path, backend: str) -> dict[str, Any]:
    """A table, also one that is outdated.  Raises ConfigError, which names the file, for one that is corrupt or
    foreign."""
    try:
        document = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"table {path} cannot be read ({type(error).__name__}: {error}); {_remedy(path)}") from None
    entries = document.get("entries") if isinstance(document, dict) else None
    whole = isinstance(entries, dict) and all(_is_entry(entry) for entry in entries.values())
    if not whole or document.get("format") != FORMAT:
        raise ConfigError(f"table {path} is not a table of format {FORMAT}; {_remedy(path)}")
    for name, wanted in (("card", path.name.rsplit(f"-{backend}-ep", 1)[0]), ("backend", backend)):
        if document.get(name) != wanted:
            raise ConfigError(f"table {path} is of {name} {document.get(name)!r}, not {wanted!r}; {_remedy(path)}")
    return document


def valid(path: Path, backend: str) -> dict[str, Any]:
    """A table for this machine.  Raises ConfigError as `read` does, and for one that is outdated."""
    document = read(path, backend)
    _refuse_outdated(path, document, backend)
    return document


def _refuse_outdated(path: Path, document: dict[str, Any], backend: str, here: bool = True) -> None:
    now = timed_with(backend)
    for name, why in (("kernels", "was timed with other kernels"), ("triton", "was timed with another Triton")):
        if document.get(name) != now.get(name) and (here or name != "triton"):
            raise ConfigError(f"table {path} {why} ({document.get(name)}, here {now.get(name)}); {_remedy(path)}")


def _remedy(path: Path) -> str:
    if path.parent == shipped():
        return "defaults serve, or what uniep tune finds on this machine"
    return "remove it, or tune again with uniep tune"


def _is_entry(entry: Any) -> bool:
    kinds = {"shape": str, "dtype": str, "tokens": int, "schedule": dict, "default": dict}
    return (
        isinstance(entry, dict)
        and all(isinstance(entry.get(k), kind) for k, kind in kinds.items())
        and entry["tokens"] > 0
        and _is_number(entry.get("usual_us", 0))
        and isinstance(entry.get("tried", []), list)
        and all(map(_is_tried, entry.get("tried", [])))
        and ("compared" not in entry or _is_compared(entry["compared"]))
    )


def _is_tried(of: Any) -> bool:
    return (
        isinstance(of, dict)
        and isinstance(of.get("changes"), dict)
        and isinstance(of.get("status"), str)
        and all(of.get(name) is None or _is_number(of[name]) for name in ("score", "us"))
        and (of["status"] != "timed" or of.get("score") is not None)
    )


def _is_compared(of: Any) -> bool:
    return (
        isinstance(of, dict)
        and isinstance(of.get("changes"), dict)
        and isinstance(of.get("why"), str)
        and isinstance(pairs := of.get("pairs_us", []), list)
        and all(isinstance(pair, list) and len(pair) == 2 and all(map(_is_number, pair)) for pair in pairs)
    )


def _is_number(of: Any) -> bool:
    return isinstance(of, (int, float))


def served(entries: dict[str, Any]) -> str:
    """In words: the layers and tokens of tables, and where they have another Schedule than the default."""
    tokens, layers = defaultdict[str, list[int]](list), defaultdict[str, list[str]](list)
    for entry in entries.values():
        tokens[f"{entry['shape']}-{entry['dtype']}"].append(entry["tokens"])
    for layer, of in sorted(tokens.items()):
        layers[", ".join(map(str, sorted(of)))].append(layer)
    said = "; ".join(f"{', '.join(of)} at {counts} tokens" for counts, of in layers.items())
    others = sorted(place for place, entry in entries.items() if not stays(entry))
    return f"serves {said}; the default stays{' but for ' * bool(others)}{', '.join(others)}"


def parse(values: dict[str, Any], usual: Schedule | None = None) -> Schedule:
    """{"gate_up.columns": 128} -> `usual` with that value; without it `Schedule()`.  Raises ConfigError for names and
    values that do not exist."""
    for name, value in values.items():
        if name not in NAMES:
            raise ConfigError(f"it has a field {name!r} that no Schedule has")
        if refused := DIMENSION[name].refused(value):
            raise ConfigError(f"it has a value that no Schedule has: {refused}")
    return replaced(usual or Schedule(), values)


def fields(schedule: Schedule) -> dict[str, Any]:
    """{name: value} of every dimension that differs from `Schedule()`, for `parse`."""
    return differences(schedule, Schedule())


def tried(entry: dict[str, Any]) -> Iterator[tuple[Schedule, dict[str, Any]]]:
    """The points that were tried for an entry, and what it says of each."""
    for of in entry.get("tried", ()):
        yield parse(of["changes"], parse(entry["default"])), of


def digest(schedule: Schedule) -> str:
    """Hash of all fields: equal for equal Schedules on every rank."""
    return hashlib.sha256(repr(schedule).encode()).hexdigest()[:16]


FOLDER_BY = "UNIEP_TUNE_DIR"
"""What names the folder of the tables, in errors; of some callers it is an option."""


def store(path: Path, key: Key, entry: dict[str, Any], folder_by: str = FOLDER_BY) -> None:
    """Put an entry into a table, atomically.  entry: "schedule", the choice, and "default", what it was compared with,
    as `fields`; "tried"; and more to read.  Raises ConfigError, also for a full disk."""
    with held(path, PATIENCE_S, folder_by):
        try:
            document = valid(path, key.backend) if path.exists() else None
        except ConfigError as error:
            log.warning("%s; it is written anew", error)
            document = None
        document = document or {
            "format": FORMAT, "card": key.card, "backend": key.backend, "ep": key.ep_size,
            **timed_with(key.backend), "entries": {},
        }  # fmt: skip
        versions = {"uniep": version.__version__, "torch": torch.__version__}
        document["entries"][key.place] = {
            "shape": key.shape, "dtype": key.dtype, "tokens": key.tokens, **versions, **entry,
        }  # fmt: skip
        write(path, _lines(document) + "\n", folder_by)


LINE = 600
"""Characters of a line of a table: a point that was tried has one."""


def _lines(value: Any, indent: str = "") -> str:
    """JSON, in which everything that fits into a line is in one."""
    short = json.dumps(value, sort_keys=True)
    if not isinstance(value, (dict, list)) or len(indent + short) <= LINE:
        return short
    inner = indent + " "
    if isinstance(value, dict):
        parts = [f"{json.dumps(name)}: {_lines(of, inner)}" for name, of in sorted(value.items())]
    else:
        parts = [_lines(of, inner) for of in value]
    return f"{short[0]}\n{inner}" + f",\n{inner}".join(parts) + f"\n{indent}{short[-1]}"


def write(path: Path, text: str, folder_by: str = FOLDER_BY) -> None:
    """Who may read it, the umask says.  Raises ConfigError; an existing file stays intact."""
    made = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with made.open("x") as file:
            try:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
                os.replace(made, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    made.unlink()
                raise
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; free space or name another folder with {folder_by}") from None


PATIENCE_S = 10.0
"""How long to wait for another process that writes into the same table, which takes milliseconds."""


@contextlib.contextmanager
def held(path: Path, patience_s: float = 0.0, folder_by: str = FOLDER_BY) -> Iterator[None]:
    """Lock `path` for writing by this process only, until the block or the process ends.

    Raises ConfigError if another process holds the lock for longer than `patience_s`.
    """
    lock = path.with_name(f"{path.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(f"{lock}: {error.strerror}; name another folder with {folder_by}") from None
    try:
        until = time.monotonic() + patience_s
        while not _locked(handle):
            if time.monotonic() >= until:
                raise ConfigError(
                    f"{path} is locked by another process, which tunes the same; wait for it, or name another "
                    f"folder with {folder_by}"
                )
            time.sleep(0.05)
        yield
    finally:
        os.close(handle)


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def as_changes(schedule: Schedule, cfg: MoEConfig, ep_size: int, backend: str) -> dict[str, Any]:
    """The values that differ from the backend's default for this call."""
    return differences(schedule, default_schedule(backend, cfg, ep_size))

"""The search: which points are timed, in which order, and which one is kept.

Candidates come from the model's order and steps from the best, from random draws, or from optuna.  Each is verified
(the bits of y and all gradients against the serial Schedule) and timed in turns with the incumbent, in lock step on all
ranks.  A slow one is abandoned early.  A candidate that crashes, runs out of memory, takes too long or changes bits is
dropped with the reason.  The winner is timed against the default again in fresh processes, and must beat it by more
than the spread of that run; and be no slower in calls back to back, which the host may limit.

With `Compilers` the next points are compiled together before they are timed one by one.

Every trial is written to SQLite at once, so that an interrupted search resumes where it stopped.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib.util
import json
import logging
import sqlite3
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from uniep.errors import ConfigError, UniEPError
from uniep.schedule import Schedule, default_schedule
from uniep.trials.compilers import LATE, Compilers
from uniep.trials.fleet import DroppedError, Fleet
from uniep.trials.trial import Job, slowest
from uniep.tuner import tables
from uniep.tuner.model import Card, Load, predict, times
from uniep.tuner.space import Points, differences, dimensions, get, neighbours, point, points, refusals

log = logging.getLogger("uniep")

PAIRS, ROUNDS = 3, 3
"""A candidate is timed in this many rounds of this many pairs."""

EARLY = 1.08
"""A candidate is abandoned after a round if it takes more than this many times the incumbent's time."""

BETTER = 0.99
"""A candidate replaces the incumbent if it takes at most this many times its time, and wins three of four pairs."""

ENDED = "ended"
"""The status of a point for which there was no time."""

CONFIRM = 15
"""Pairs of the winner and the default in fresh processes."""

SUSTAINED, SUSTAINED_US = 9, 20_000.0
"""Pairs of calls back to back, and how long about each side of a pair takes."""


@dataclasses.dataclass(frozen=True)
class Tried:
    """changes: values that differ from the default.  status: "timed", "slow" (abandoned) or why it was dropped.  score:
    its time over the default's, through the incumbents it was timed with.  us: median, of the slowest rank."""

    changes: dict[str, Any]
    status: str
    text: str = ""
    score: float | None = None
    us: float | None = None
    predicted_us: float | None = None
    pairs: list[tuple[float, float]] = dataclasses.field(default_factory=list)


class Record:
    """Trials in a SQLite file.  Raises ConfigError if it cannot be written, or is not a file of trials."""

    def __init__(self, path: Path, of: dict[str, Any]) -> None:
        """of: what the trials were timed with; trials of anything else are dropped."""
        self.path = path
        wanted = json.dumps(of, sort_keys=True)
        with self._told():
            path.parent.mkdir(parents=True, exist_ok=True)
            self.db = sqlite3.connect(path)
            with self.db:
                self.db.execute("CREATE TABLE IF NOT EXISTS meta (of TEXT)")
                self.db.execute("CREATE TABLE IF NOT EXISTS trials (point TEXT PRIMARY KEY, tried TEXT)")
                kept = self.db.execute("SELECT of FROM meta").fetchone()
                if kept is None or kept[0] != wanted:
                    if kept is not None:
                        log.warning("%s has trials of other kernels or versions; they are dropped", path)
                    self.db.execute("DELETE FROM trials")
                    self.db.execute("DELETE FROM meta")
                    self.db.execute("INSERT INTO meta VALUES (?)", (wanted,))

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(
                f"{self.path}: {error}; remove it, free space, or name another folder with UNIEP_TUNE_DIR"
            ) from None

    def add(self, tried: Tried) -> None:
        with self._told(), self.db:
            point = json.dumps(tried.changes, sort_keys=True)
            self.db.execute(
                "INSERT OR REPLACE INTO trials VALUES (?, ?)", (point, json.dumps(dataclasses.asdict(tried)))
            )

    def all(self) -> list[Tried]:
        with self._told():
            return [Tried(**json.loads(text)) for (text,) in self.db.execute("SELECT tried FROM trials ORDER BY rowid")]

    def close(self) -> None:
        self.db.close()


class Sampler(Protocol):
    @property
    def first(self) -> Sequence[Schedule]:
        """Points that it begins with."""

    def ask(self) -> Schedule | None:
        """The next candidate, or None.  Several may be asked for before their scores are told."""

    def tell(self, schedule: Schedule, score: float | None) -> None:
        """Report the score of a candidate; None: it was dropped."""


class Listed:
    """Points one after the other."""

    def __init__(self, space: Points, order: torch.Tensor) -> None:
        self.space, self.order = space, iter(order.tolist())
        self.first = [space.schedule(i) for i in order[:FIRST].tolist()]

    def ask(self) -> Schedule | None:
        index = next(self.order, None)
        return None if index is None else self.space.schedule(index)

    def tell(self, schedule: Schedule, score: float | None) -> None:
        pass


class Optuna:
    """optuna's tree-structured Parzen estimator by ask and tell, starting with the points `first`."""

    def __init__(self, space: Points, job: Job, first: list[Schedule], seed: int = 0) -> None:
        try:
            import optuna
        except ImportError:
            raise ConfigError(
                "optuna is not installed; pip install optuna, or search with --sampler model or random"
            ) from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.job, self.first = job, first
        usual, chosen = space.schedule(0), dimensions(job.backend, job.cfg, job.ep_size)
        self.distributions: dict[str, Any] = {
            d.name: optuna.distributions.CategoricalDistribution(
                tuple(dict.fromkeys((get(usual, d.name), *d.values[job.backend])))
            )
            for d in chosen
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            how: Any = {"seed": seed, "n_startup_trials": 8, "constant_liar": True}  # what has no score yet is avoided
            self.study = optuna.create_study(sampler=optuna.samplers.TPESampler(**how))
        self.failed = optuna.trial.TrialState.FAIL
        self.asked: collections.defaultdict[Schedule, list[Any]] = collections.defaultdict(list)
        for schedule in first:
            self.study.enqueue_trial({name: get(schedule, name) for name in self.distributions})

    def ask(self) -> Schedule:
        trial = self.study.ask(self.distributions)
        schedule = point(trial.params, self.job.backend, self.job.cfg, self.job.ep_size)
        self.asked[schedule].append(trial)
        return schedule

    def tell(self, schedule: Schedule, score: float | None) -> None:
        for trial in self.asked.pop(schedule):
            if score is None:
                self.study.tell(trial, state=self.failed)
            else:
                self.study.tell(trial, score)


class Climbing:
    """The points `first`; then points one step from the best so far, the fastest predicted first; then `rest`."""

    def __init__(self, job: Job, card: Card, first: Sequence[Schedule], rest: Listed) -> None:
        self.job, self.card, self.first, self.queue, self.rest = job, card, first, list(first), rest
        self.best, self.score = default_schedule(job.backend, job.cfg, job.ep_size), 1.0
        self.asked: list[Schedule] = [self.best]
        self.climbs = False

    def ask(self) -> Schedule | None:
        if not self.queue and not self.climbs:
            self.climbs, self.queue = True, self._steps()
        schedule = self.queue.pop(0) if self.queue else self.rest.ask()
        if schedule is not None:
            self.asked.append(schedule)
        return schedule

    def tell(self, schedule: Schedule, score: float | None) -> None:
        if score is not None and score < BETTER * self.score:
            self.best, self.score = schedule, score
            if self.climbs:
                self.queue = self._steps()

    def _steps(self) -> list[Schedule]:
        job = self.job
        near = neighbours(self.best, job.backend, job.cfg, job.ep_size)
        steps = [schedule for _, _, schedule in near if schedule not in self.asked]
        if not steps:
            return []
        us = predict(Load.uniform(job.cfg, job.ep_size, job.tokens), Points.of(steps), self.card).both
        return [steps[i] for i in us.argsort(stable=True).tolist()]


def in_order(space: Points, load: Load, card: Card | None, sampler: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(indices of points in the order of timing, predicted us of all points or None): the fastest first, or random."""
    if card is not None:
        predicted = times(load, space, card)
        if sampler != "random":
            return torch.sort(predicted, stable=True).indices, predicted
    else:
        predicted = None
    if sampler == "model":
        raise ConfigError("--sampler model needs a card; give --card, or calibrate one with uniep tune --calibrate")
    drawn = torch.randperm(len(space) - 1, generator=torch.Generator().manual_seed(0)) + 1
    return torch.cat([torch.zeros(1, dtype=torch.int64), drawn]), predicted


def different(order: torch.Tensor, predicted: torch.Tensor) -> list[int]:
    """The first of each set of points that the model does not tell apart."""
    us_N = predicted[order]
    ties_N = torch.zeros(len(us_N), dtype=torch.bool)
    ties_N[1:] = (us_N[1:] / us_N[:-1] - 1).abs() < 1e-6
    return order[~ties_N].tolist()


FIRST = 8
"""Number of the model's best points that a search begins with."""

SAMPLERS = ("auto", "optuna", "model", "random")


def sampler_here(card: Card | None, name: str) -> tuple[str, str]:
    """The sampler that "auto" stands for, and why.  name: of the card that `card` is of."""
    if importlib.util.find_spec("optuna") is not None:
        return "optuna", "installed"
    if card is not None:
        return "model", f"optuna is not installed, and there is a card file of {name}"
    return "random", f"optuna is not installed, and no card file of {name}: uniep tune --calibrate writes one"


def sampler_of(name: str, job: Job, card: Card | None) -> Sampler:
    """The sampler "optuna", "model" or "random" over the whole space.  card: None: nothing is predicted."""
    space = points(job.backend, job.cfg, job.ep_size)
    order, predicted = in_order(space, Load.uniform(job.cfg, job.ep_size, job.tokens), card, name)
    first = [] if predicted is None else [space.schedule(i) for i in different(order, predicted)[:FIRST]]
    if name == "optuna":
        return Optuna(space, job, first)
    listed = Listed(space, order)
    return listed if name == "random" or card is None else Climbing(job, card, first, listed)


Pairs = Sequence[tuple[float, float]]
"""us of two Schedules that were timed in turn, of the slowest rank."""


@dataclasses.dataclass(frozen=True)
class Compared:
    """The fastest point of a search, beside the default in fresh processes.  why: it is not kept; "" if it is.  pairs:
    the default's time and the point's, of one call each; sustained: of calls back to back."""

    schedule: Schedule
    why: str
    pairs: Pairs = ()
    sustained: Pairs = ()


@dataclasses.dataclass(frozen=True)
class Result:
    """choice: the Schedule that is kept.  compared: None if no point seemed to be faster than the default.  proof: hash
    of the choice, the same on all ranks."""

    choice: Schedule
    compared: Compared | None
    proof: str
    tried: list[Tried]
    usual_us: float
    starts: int


def entry(result: Result, job: Job, commit: str) -> dict[str, Any]:
    """What a table says of a search, with every time that was measured, to five digits."""
    usual = default_schedule(job.backend, job.cfg, job.ep_size)
    made: dict[str, Any] = {
        "schedule": tables.fields(result.choice), "default": tables.fields(usual), "proof": result.proof,
        "usual_us": _digits(result.usual_us), "commit": commit, "timed_tokens": job.tokens,
        "date": time.strftime("%Y-%m-%d"), "tried": [_tried_entry(t) for t in result.tried],
    }  # fmt: skip
    if result.compared is not None:
        made["compared"] = compared_entry(result.compared, usual)
    return made


def compared_entry(of: Compared, usual: Schedule) -> dict[str, Any]:
    made: dict[str, Any] = {"changes": differences(of.schedule, usual), "why": of.why}
    for name, pairs in (("", of.pairs), ("sustained_", of.sustained)):
        if pairs:
            gain, spread = gain_of(pairs)
            made |= {f"{name}gain": round(gain, 4), f"{name}spread": round(spread, 4)}
            made[f"{name}pairs_us"] = _digits(pairs)
    return made


def _tried_entry(tried: Tried) -> dict[str, Any]:
    """Without what is not known."""
    made = {
        "changes": tried.changes, "status": tried.status, "text": tried.text,
        "score": None if tried.score is None else round(tried.score, 4), "us": _digits(tried.us),
        "predicted_us": _digits(tried.predicted_us), "pairs_us": _digits(tried.pairs),
    }  # fmt: skip
    return {name: of for name, of in made.items() if name in ("changes", "status") or of}


def _digits(of: Any) -> Any:
    """Numbers, also in lists, to five digits."""
    if isinstance(of, (list, tuple)):
        return [*map(_digits, of)]
    return None if of is None else float(f"{of:.5g}")


Progress = Callable[[float, str], None]
"""Called with the elapsed seconds and the latest result."""


def search(
    job: Job,
    sampler: Sampler,
    record: Record,
    budget_s: float,
    *,
    fleet: Fleet | None = None,
    compilers: Compilers | None = None,
    card: Card | None = None,
    candidate_s: float = 60.0,
    most: int | None = None,
    finish: bool = False,
    progress: Progress = lambda seconds, text: None,
) -> Result:
    """Time candidates for `budget_s` seconds, counted from when all ranks have started and the default was timed; the
    candidate that runs at their end is given up.  most: limit of candidates.  candidate_s: longest time for one
    question to all ranks.  fleet: ranks of this job, which stay.  compilers: compile the default before it is timed,
    and the next candidates together, in the same seconds, before they are timed.  finish: what runs at the end may
    finish.

    Raises UniEPError if the default itself cannot be timed.
    """
    usual = default_schedule(job.backend, job.cfg, job.ep_size)
    with contextlib.nullcontext(fleet) if fleet is not None else Fleet(job) as ranks:
        if compilers is not None and compilers.batch:
            compilers.ahead(ranks, [usual, serial(usual)], candidate_s, time.monotonic() + candidate_s)
        state = _State(job, ranks, usual, candidate_s, finish)
        began = time.monotonic()
        until = began + budget_s
        candidates = _Candidates(
            job, sampler, record, card, most, lambda said: progress(time.monotonic() - began, said)
        )
        best = min((t for t in record.all() if t.status == "timed"), key=lambda t: t.score or 9.0, default=None)
        if best is not None and best.score is not None and best.score < BETTER:
            state.resume(tables.parse(best.changes, usual), best.score)
        count = compilers.batch if compilers is not None else 0
        while batch := candidates.next(max(count, 1), until):
            errors: list[DroppedError | None] = [None] * len(batch)
            if compilers is not None and count:
                progress(time.monotonic() - began, f"compiling {len(batch)} points")
                errors = compilers.ahead(ranks, [point for point, _ in batch], candidate_s, until, finish)
            for (schedule, changes), error in zip(batch, errors, strict=True):
                if error is None:
                    tried = state.tried(schedule, changes, until)
                else:
                    tried = Tried(changes, error.reason, error.text)
                if tried.status not in (ENDED, LATE):
                    candidates.tell(schedule, tried)
        return state.confirmed(list(candidates.known.values()))


class _Candidates:
    """What a sampler asks for, and what is known of it.  told: is given words for progress."""

    def __init__(
        self, job: Job, sampler: Sampler, record: Record, card: Card | None, most: int | None,
        told: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.job, self.sampler, self.record, self.card, self.most, self.told = job, sampler, record, card, most, told
        self.known = {_name(t.changes): t for t in record.all()}
        self.repeats = len(self.known) + REPEATED  # a resumed sampler returns what is kept first

    def next(self, count: int, until: float) -> list[tuple[Schedule, dict[str, Any]]]:
        """Up to so many that are not known and can run, with their changes; none behind `until`."""
        job, found = self.job, dict[str, tuple[Schedule, dict[str, Any]]]()
        repeated = 0
        while time.monotonic() < until and len(found) < count and repeated < self.repeats and self._may_add(len(found)):
            if (schedule := self.sampler.ask()) is None:
                break
            changes = tables.as_changes(schedule, job.cfg, job.ep_size, job.backend)
            name = _name(changes)
            if name in found:  # the sampler has to be told first
                break
            if name in self.known or not changes:
                self.sampler.tell(schedule, self.known[name].score if name in self.known else 1.0)
                repeated += 1
                continue
            repeated = 0
            if reasons := refusals(schedule, job.cfg, job.ep_size, job.backend):
                self.tell(schedule, Tried(changes, "refused", "; ".join(reasons)))
            else:
                found[name] = schedule, changes
        return list(found.values())

    def _may_add(self, asked: int) -> bool:
        return self.most is None or len(self.known) + asked < self.most

    def tell(self, schedule: Schedule, tried: Tried) -> None:
        """To all who want to know."""
        if self.card is not None:
            load = Load.uniform(self.job.cfg, self.job.ep_size, self.job.tokens)
            us = float(predict(load, Points.of([schedule]), self.card).both)
            tried = dataclasses.replace(tried, predicted_us=us)
        self.known[_name(tried.changes)] = tried
        self.record.add(tried)
        if tried.status not in ("timed", "slow"):
            log.warning("dropped %s: %s: %s", tried.changes, tried.status, tried.text)
        self.sampler.tell(schedule, tried.score)
        self.told(_said(tried, len(self.known)))


def _name(changes: dict[str, Any]) -> str:
    return json.dumps(changes, sort_keys=True)


REPEATED = 200
"""A sampler that returns points known beforehand, one after the other, and then ends."""


def _said(tried: Tried, count: int) -> str:
    result = f"{tried.score:.3f} of the default's time" if tried.score is not None else tried.status
    return f"{count} tried, last: {result}"


def serial(usual: Schedule) -> Schedule:
    """The Schedule whose bits all others must have."""
    return dataclasses.replace(
        usual, overlap="serial", tile_order="natural", peer_order="natural", weight_gradient_order="last",
        group_sum="after",
    )  # fmt: skip


class _State:
    """The incumbent, which the running ranks hold, and its score."""

    def __init__(self, job: Job, ranks: Fleet, usual: Schedule, candidate_s: float, finish: bool) -> None:
        self.job, self.ranks, self.usual, self.candidate_s, self.finish = job, ranks, usual, candidate_s, finish
        self.incumbent, self.score = usual, 1.0
        try:
            self.bits = self._ask("prove", usual)
            self._ask("take")
            if self._ask("prove", serial(usual)) != self.bits:
                raise UniEPError("the default Schedule has other bits than the serial one: a bug; please report it")
            self.usual_us = statistics.median(a for a, _ in slowest(self._ask("time", PAIRS)))
        except DroppedError as error:
            raise UniEPError(f"the default Schedule cannot be timed: {error}") from None
        self.running = ranks.starts

    def _ask(self, method: str, *args: Any) -> list[Any]:
        return self.ranks.ask(method, *args, timeout_s=self.candidate_s)

    def resume(self, schedule: Schedule, score: float) -> None:
        """Start with the best of an earlier search, if it still runs."""
        with contextlib.suppress(DroppedError):
            if self._ask("prove", schedule) == self.bits:
                self._ask("take")
                self.incumbent, self.score = schedule, score

    def tried(self, schedule: Schedule, changes: dict[str, Any], until: float) -> Tried:
        """until: when the budget ends; a candidate that is to begin or still runs then is ENDED, which is no trial."""
        pairs: list[tuple[float, float]] = []
        if time.monotonic() >= until:
            return Tried(changes, ENDED)

        def ask(method: str, *args: Any) -> list[Any]:
            left = self.candidate_s if self.finish else max(until - time.monotonic(), 0.0)
            return self.ranks.ask(method, *args, timeout_s=min(self.candidate_s, left))

        try:
            if self.ranks.starts != self.running or not self.ranks.alive:
                self._ask("prove", self.incumbent)
                self._ask("take")
                self.running = self.ranks.starts
            if (bits := ask("prove", schedule)) != self.bits:
                ranks = ", ".join(str(r) for r, (a, b) in enumerate(zip(bits, self.bits, strict=True)) if a != b)
                return Tried(changes, "other bits", f"y or gradients differ from the serial Schedule's on rank {ranks}")
            for _ in range(ROUNDS):
                pairs += slowest(ask("time", PAIRS))
                ratio = statistics.median(b / a for a, b in pairs)
                if ratio > EARLY:
                    break
                if not self.finish and time.monotonic() > until:
                    return Tried(changes, ENDED)
        except DroppedError as error:
            if not self.finish and error.reason == "timeout" and time.monotonic() >= until:
                return Tried(changes, ENDED)
            return Tried(changes, error.reason, error.text)
        score, us = ratio * self.score, statistics.median(b for _, b in pairs)
        status = "slow" if ratio > EARLY else "timed"
        if ratio < BETTER and 4 * sum(b < a for a, b in pairs) >= 3 * len(pairs):
            self._ask("take")
            self.incumbent, self.score = schedule, score
        return Tried(changes, status, "", score, us, None, pairs)

    def confirmed(self, tried: list[Tried]) -> Result:
        """The incumbent, if it beats the default again, and does not lose in calls back to back; else the default."""
        compared = self._compared() if self.incumbent != self.usual else None
        if compared is not None and compared.why:
            log.warning("the default stays; the fastest of the search, %s, was %s", self.incumbent.name, compared.why)
        choice = self.incumbent if compared is not None and not compared.why else self.usual
        proofs = set(self._ask("chosen", choice))
        if len(proofs) != 1:
            raise UniEPError(f"ranks have different choices ({', '.join(sorted(proofs))}): a bug; please report it")
        return Result(choice, compared, proofs.pop(), tried, self.usual_us, self.ranks.starts)

    def _compared(self) -> Compared:
        """The incumbent beside the default in fresh processes."""
        self.ranks.end()
        pairs: Pairs = []
        try:
            self._ask("prove", self.usual)
            self._ask("take")
            if self._ask("prove", self.incumbent) != self.bits:
                return Compared(self.incumbent, "other in its bits in fresh processes")
            pairs = slowest(self._ask("time", CONFIRM))
            gain, spread = gain_of(pairs)
            if gain - 1 <= spread:
                return Compared(self.incumbent, f"{gain:.3f}x as fast, with a spread of {spread:.3f}", pairs)
            count = max(2, round(SUSTAINED_US / self.usual_us))
            sustained = slowest(self._ask("time", SUSTAINED, count))
            of_many, noise = gain_of(sustained)
            why = "" if of_many >= 1 - noise else f"{gain:.3f}x as fast, but {of_many:.3f}x in calls back to back"
            return Compared(self.incumbent, why, pairs, sustained)
        except DroppedError as error:
            return Compared(self.incumbent, f"dropped when it was compared again: {error}", pairs)


def gain_of(pairs: Pairs) -> tuple[float, float]:
    """Median of the first's time over the second's, and half of its interquartile range."""
    ratios = sorted(a / b for a, b in pairs)
    quarter = len(ratios) // 4
    return statistics.median(ratios), (ratios[-1 - quarter] - ratios[quarter]) / 2

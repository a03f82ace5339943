"""`uniep tune`: find the fastest Schedule of one layer on this machine, and keep it in a table."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import uniep
from uniep.backends import registry
from uniep.cli.options import DType, Dtype, JsonFile, check_file, check_folder, refuse, write_json
from uniep.cli.summary import commit
from uniep.errors import ConfigError, UniEPError, UnsupportedError
from uniep.shapes import parse_shape
from uniep.sim.machine import load_machine
from uniep.trials import calibrate as calibration
from uniep.trials.compilers import MOST, Compilers, usual_number
from uniep.trials.fleet import Fleet
from uniep.trials.search import (
    EARLY,
    SAMPLERS,
    Record,
    Result,
    Sampler,
    entry,
    gain_of,
    sampler_here,
    sampler_of,
    search,
)
from uniep.trials.trial import Job
from uniep.tuner import tables
from uniep.tuner.model import Card, card_text, find_card


def tune(
    context: typer.Context,
    shape: Annotated[str, typer.Option(help="Shapes, DxFxExK (hidden, ffn, experts, top-k) or names.")] = "qwen3-30b",
    ep: Annotated[
        int | None, typer.Option(help="Ranks, as processes of this machine; default: 2, with one GPU 1.", min=1)
    ] = None,
    tokens: Annotated[str, typer.Option(help="Tokens per rank; each result is kept for their bucket.")] = "4096",
    backend: Annotated[
        str, typer.Option(help="Backend: hopper, nccl or cpu; auto: hopper if there are GPUs.")
    ] = "auto",
    dtype: Dtype = DType.bf16,
    combine_groups: Annotated[int | None, typer.Option(help="MoEConfig.combine_groups.", min=1)] = None,
    budget_s: Annotated[
        float,
        typer.Option(
            help="Seconds to compile and time candidates of each shape and number of tokens, after ranks have started "
            "and run the default.",
            min=0,
        ),
    ] = 300.0,
    candidate_s: Annotated[
        float, typer.Option(help="Seconds after which a candidate is dropped as too slow.", min=1)
    ] = 120.0,
    sampler: Annotated[
        str,
        typer.Option(
            help="Search: optuna (the extra tune); model: fastest predicted first, then steps from the best; random. "
            "auto: the first of them that there is here."
        ),
    ] = "auto",
    compilers: Annotated[
        int | None,
        typer.Option(
            help="Processes that compile the next candidates together, before they are timed; 0: none. Default: on "
            f"GPUs one for each core, up to {MOST}.",
            min=0,
        ),
    ] = None,
    card: Annotated[str | None, typer.Option(help="Card that the model assumes; default: this machine's.")] = None,
    into: Annotated[
        Path | None, typer.Option(help="Folder of the tables; default: UNIEP_TUNE_DIR, or the user's cache.")
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Instead measure this card's constants for the model; under a minute.")
    ] = False,
    machine: Annotated[
        str | None, typer.Option(help="With --calibrate: the machine file that describes this card.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Find the fastest Schedule of layers on this machine, and keep it for Workspaces of this card.

    Lists, separated by commas, of shapes and of tokens are searched one after the other, in the same ranks. Candidates
    run in child processes of all ranks; on GPUs others compile them beforehand, in parallel. A candidate that
    crashes, takes too long or changes a bit is dropped, with the reason. An interrupted search resumes where it
    stopped. The table has the choice, which may be the default, and every timing. Tables and trials are in
    UNIEP_TUNE_DIR, or in the user's cache; --into names another folder for tables.
    """
    console = Console(highlight=False)
    check_file(json_file, "--json")
    if calibrate:
        searched = ("shape", "tokens", "combine_groups", "budget_s", "candidate_s", "sampler", "compilers", "card")
        refuse(context, (*searched, "into"), "beside --calibrate, which searches nothing; leave one out")
    else:
        refuse(context, ("machine",), "is for --calibrate; give it, too, or leave --machine out")
    if into is not None:
        check_folder(into, "--into")
    backend = _backend(backend)
    device = torch.device("cuda" if backend == "hopper" or (torch.cuda.is_available() and backend == "nccl") else "cpu")
    name = tables.card_name(device)
    if ep is None:
        ep = 1 if device.type == "cuda" and torch.cuda.device_count() == 1 else 2
    if device.type == "cuda" and ep > torch.cuda.device_count():
        raise ConfigError(f"--ep is {ep}, one rank per GPU, and this machine has {torch.cuda.device_count()}; lower it")
    if calibrate:
        write_json(json_file, _calibrate(console, backend, ep, dtype, name, machine))
        return
    if sampler not in SAMPLERS:
        raise ConfigError(f"--sampler is {sampler!r}; use {', '.join(SAMPLERS)}")
    known = find_card(card, name)
    if sampler == "auto":
        sampler, why = sampler_here(known, name)
        console.print(f"sampler: {sampler} ({why})")
    jobs: dict[tables.Key, Job] = {}
    for text, count in itertools.product(shape.split(","), _counts(tokens)):
        layer = parse_shape(text)
        rows = None if device.type == "cpu" else layer.sync_free_rows(count)
        cfg = layer.config(ep, count, dtype=dtype.torch, combine_groups=combine_groups, max_rows=rows)
        cfg.check_group(ep)
        key = tables.Key.of(cfg, ep, backend, name)
        if key in jobs:
            raise ConfigError(f"--shape {shape} --tokens {tokens}: two have the entry {key.place}; leave out one")
        jobs[key] = Job(cfg, ep, backend, device.type, count)
    entries: dict[str, Any] = {}
    failed = []
    folder, folder_by = (into, "--into") if into is not None else (tables.folder(), tables.FOLDER_BY)
    if compilers is None:
        compilers = usual_number() if device.type == "cuda" else 0
    with Fleet(next(iter(jobs.values()))) as ranks, Compilers(compilers) as ahead:
        for key, job in jobs.items():
            if len(jobs) > 1:
                console.print(f"[bold]{key.place}[/bold]")
            which = sampler_of(sampler, job, known)
            try:
                made = _search(console, key, job, which, ranks, ahead, budget_s, candidate_s, known)
                entries[key.place] = made
                write_json(json_file, entries if len(jobs) > 1 else made)
                if made["tried"]:
                    tables.store(folder / key.file, key, made, folder_by)
            except UniEPError as error:
                if len(jobs) == 1:
                    raise
                failed.append(key.place)
                console.print(f"{key.place} failed: {error}")
            else:
                console.print(
                    f"written: {folder / key.file}" if made["tried"] else "no table is written: nothing was tried"
                )
    if failed:
        raise UniEPError(f"{', '.join(failed)}: failed, as said above; all others are kept")


def _counts(text: str) -> list[int]:
    """ "512,4096" -> [512, 4096]."""
    if not all(part.isdecimal() and int(part) for part in text.split(",")):
        raise ConfigError(f"--tokens is {text!r}; give numbers from 1 on, separated by commas")
    return [int(part) for part in text.split(",")]


def _search(
    console: Console, key: tables.Key, job: Job, sampler: Sampler, ranks: Fleet, ahead: Compilers, budget_s: float,
    candidate_s: float, card: Card | None,
) -> dict[str, Any]:  # fmt: skip
    """Print the choice.  -> its entry for a table."""
    trials = tables.folder() / "trials" / f"{Path(key.file).stem}-{key.place}.sqlite"
    ranks.becomes(job, timeout_s=candidate_s)
    with tables.held(trials):
        versions = {**tables.timed_with(job.backend), "uniep": uniep.__version__, "torch": torch.__version__}
        with closing(Record(trials, {**versions, "tokens": job.tokens})) as record, _bar(console, budget_s) as progress:
            result = search(
                job, sampler, record, budget_s, fleet=ranks, compilers=ahead, card=card, candidate_s=candidate_s,
                progress=progress,
            )  # fmt: skip
    _print(console, result, job)
    return entry(result, job, commit())


def _backend(given: str) -> str:
    if given == "auto":
        return "hopper" if torch.cuda.is_available() else "cpu"
    if given not in registry.NAMES:
        raise ConfigError(f"--backend is {given!r}; use {', '.join(registry.NAMES)} or auto")
    if given == "hopper" and not torch.cuda.is_available():
        raise UnsupportedError("--backend hopper: no CUDA device is usable here; --backend cpu tunes CPU ranks")
    return given


@contextmanager
def _bar(console: Console, budget_s: float) -> Iterator[Callable[[float, str], None]]:
    columns = (TextColumn("tuned"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("ranks start", total=max(budget_s, 1e-9))
        yield lambda seconds, text: bar.update(task, completed=seconds, description=text)


def _print(console: Console, result: Result, job: Job) -> None:
    words = {"timed": "timed", "slow": f"given up, over {EARLY:g} times the fastest so far"}
    counts = Counter(t.status for t in result.tried)
    listed = ", ".join(f"{n} {words.get(status, status)}" for status, n in counts.most_common())
    console.print(f"Schedules tried: {listed or 'none in this time; raise --budget-s'}")
    compared = result.compared
    if compared is None:
        console.print(f"the default stays, {result.usual_us:.0f} us")
    else:
        changes = tables.as_changes(compared.schedule, job.cfg, job.ep_size, job.backend)
        named = ", ".join(f"{name}={value}" for name, value in changes.items())
        if compared.why:
            stays = f"the default stays, {result.usual_us:.0f} us"
            console.print(f"{stays}; the fastest of the search, timed again, was {compared.why}: {named}")
        else:
            (gain, spread), (sustained, _) = gain_of(compared.pairs), gain_of(compared.sustained)
            console.print(
                f"{gain:.3f}x the default in fresh processes (spread {spread:.3f}), {sustained:.3f}x in calls back to "
                f"back: {named}"
            )
    console.print(f"all {job.ep_size} ranks have choice {result.proof}")


def _calibrate(
    console: Console, backend: str, ep: int, dtype: Dtype, name: str, machine: str | None
) -> dict[str, float]:
    began = time.monotonic()
    made = load_machine(machine) if machine is not None else calibration.machine_of(name)
    card = calibration.measure(backend, ep, dtype.torch, made, name, console.print)
    where = tables.folder() / "cards"
    base = machine or made.name
    if name == "cpu" and machine is None:
        base = str(where / "cpu-machine.toml")
        tables.write(Path(base), calibration.machine_text(made))
    about = f"{name}: calibrated by uniep tune --calibrate --backend {backend} --ep {ep}, {time.strftime('%Y-%m-%d')}"
    tables.write(where / f"{name}.toml", card_text(card, about, base))
    constants = {key: round(float(value), 4) for key, value in card.constants.items()}
    console.print(json.dumps(constants), style="dim")
    console.print(f"written in {time.monotonic() - began:.0f} s: {where / f'{name}.toml'}")
    return constants

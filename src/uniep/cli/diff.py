"""`uniep diff`: the first tensor of the first training step whose bits two runs do not share."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from uniep.cli.options import JsonFile, check_file, write_json
from uniep.errors import ConfigError

Step = dict[str, "Whole"]


@dataclasses.dataclass(frozen=True)
class Whole:
    """One tensor of one step: what it is, its digest, or why it has none; by_rank: of values of each rank."""

    what: str
    digest: str
    by_rank: bool = False


@dataclasses.dataclass(frozen=True)
class Run:
    folder: Path
    ranks: int
    steps: dict[int, Step]


def diff(
    first: Annotated[Path, typer.Argument(help="Folder that a uniep.nn.DigestLog wrote.", metavar="RUN")],
    second: Annotated[Path, typer.Argument(help="Folder of the other run.", metavar="OTHER")],
    most: Annotated[int, typer.Option(help="Largest number of tensors to list.", min=1)] = 10,
    json_file: JsonFile = None,
) -> None:
    """Name the first step and its tensors whose bits differ between two runs.

    Runs write digests of their tensors by uniep.nn.DigestLog (docs/determinism.md), and may have other numbers of
    ranks. In a step tensors are named in the order in which training makes them: parameters, values such as the loss,
    outputs, gradients from the last layer to the first, optimizer states. The exit status is 1 if a bit differs.
    """
    check_file(json_file, "--json")
    console = Console(highlight=False)
    with console.status("read"):
        runs = [read(first), read(second)]
    common = [step for step in runs[0].steps if step in runs[1].steps]
    if not common:
        one, another = (f"{run.folder} has steps {_list(run.steps)}" for run in runs)
        raise ConfigError(f"{one}, {another}: none in common; compare runs of the same steps")
    for run, other in (runs, runs[::-1]):
        if alone := [step for step in run.steps if step not in other.steps]:
            console.print(f"[yellow]not compared[/yellow]: steps {_list(alone)}, only in {run.folder}", soft_wrap=True)
    compared, left_out, found, at = 0, set[str](), dict[str, str](), None
    for step in common:
        for name, reason in differences(runs[0].steps[step], runs[1].steps[step], runs[0].ranks == runs[1].ranks):
            if reason is None:
                left_out.add(name)
            elif reason:
                found[name] = reason
            compared += 1
        if found:
            at = step
            break
    if left_out:
        console.print(
            f"[yellow]not compared[/yellow]: {len(left_out)} values of single ranks, such as {min(left_out)}; the runs "
            f"have {runs[0].ranks} and {runs[1].ranks} ranks",
            soft_wrap=True,
        )
    if at is None:
        console.print(
            f"[bold green]identical[/bold green]: {compared - len(left_out)} digests of steps {_list(common)}",
            soft_wrap=True,
        )
    else:
        console.print(f"[bold red]step {at}[/bold red] is the first that differs, in {len(found)} tensors:")
        for name, reason in list(found.items())[:most]:
            console.print(f"  {name}: {reason}", markup=False, soft_wrap=True)
        if len(found) > most:
            console.print(f"  and {len(found) - most} more")
    write_json(json_file, {"step": at, "differ": found, "steps": common, "not_compared": sorted(left_out)})
    raise typer.Exit(1 if found else 0)


def differences(a: Step, b: Step, same_ranks: bool) -> Iterator[tuple[str, str | None]]:
    """(name, what differs) of every tensor: "" if nothing does, None if it cannot be compared."""
    for name in dict.fromkeys([*a, *b]):
        one, other = a.get(name), b.get(name)
        if one is None or other is None:
            yield name, f"only the {'first' if other is None else 'second'} run has it"
        elif (one.by_rank or other.by_rank) and not same_ranks:
            yield name, None
        elif one.what != other.what:
            yield name, f"{one.what} against {other.what}"
        elif "!" in one.digest + other.digest:
            yield name, next(d for d in (one.digest, other.digest) if "!" in d).removeprefix("!")
        else:
            yield name, "" if one.digest == other.digest else f"{one.what}, {one.digest} against {other.digest}"


def read(folder: Path) -> Run:
    """The run whose ranks wrote into this folder.  Raises ConfigError if a rank's file is missing or is none."""
    files = sorted(folder.glob("*.jsonl"), key=lambda path: (len(path.name), path.name))
    if not files:
        raise ConfigError(f"{folder} has no file RANK.jsonl; give the folder of a uniep.nn.DigestLog")
    of_rank = [list(_lines(path)) for path in files]
    ranks = of_rank[0][0].get("ranks")
    if len(files) != ranks:
        raise ConfigError(f"{folder} has files of {len(files)} ranks, but {ranks} wrote; bring all of them together")
    every: dict[int, list[dict[str, Any]]] = {}
    for lines in of_rank:
        for line in lines[1:]:
            every.setdefault(line["step"], []).append(line["tensors"])
    return Run(folder, len(files), {step: _together(found) for step, found in every.items() if len(found) == ranks})


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    text = path.read_text()
    for number, line in enumerate(text.splitlines(), 1):
        try:
            found = json.loads(line)
            if (number == 1 and "ranks" not in found) or (number > 1 and "tensors" not in found):
                raise ValueError
            yield found
        except (ValueError, TypeError):
            if number > 1 and not text.endswith("\n") and number == len(text.splitlines()):
                return  # the run ended in the middle of it
            raise ConfigError(f"{path}, line {number} was not written by a uniep.nn.DigestLog") from None
    if not text:
        raise ConfigError(f"{path} is empty; the run ended before it began")


def _together(of_rank: list[dict[str, Any]]) -> Step:
    """One step's tensors from the parts of all ranks."""
    parts: dict[str, list[tuple[int, Any]]] = {}
    for rank, tensors in enumerate(of_rank):
        for name, entry in tensors.items():
            parts.setdefault(name, []).append((rank, entry))
    return {name: _whole(found) for name, found in parts.items()}


def _whole(found: list[tuple[int, Any]]) -> Whole:
    what = found[0][1][0]
    if any(offset is None for _, (_, offset, _) in found):
        if len({(of, digest) for _, (of, _, digest) in found}) == 1:
            return Whole(what, found[0][1][2])
        kinds = ", ".join(dict.fromkeys(of for _, (of, _, _) in found))
        return Whole(kinds, ", ".join(f"rank {rank} {digest}" for rank, (_, _, digest) in found), by_rank=True)
    first: dict[tuple[int, ...], tuple[int, str]] = {}
    total = 0
    for rank, (_, offset, digest) in found:
        before = first.setdefault(tuple(offset), (rank, digest))
        if before[1] != digest:
            return Whole(what, f"!ranks {before[0]} and {rank} of one run hold different bits of it")
        if before[0] == rank:
            total += int(digest, 16)
    return Whole(what, f"{total % 2**64:016x}")


def _list(steps: Any) -> str:
    numbers = list(steps)
    if len(numbers) > 4 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers[:8])) + ("" if len(numbers) <= 8 else ", ...") or "none"

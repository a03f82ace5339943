"""`uniep bench`: start the repository's benchmark harness, one process per GPU."""

from __future__ import annotations

import difflib
import json
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import uniep
from uniep.cli import summary
from uniep.cli.launch import torchrun, under_torchrun
from uniep.cli.options import JsonFile, check_file
from uniep.errors import ConfigError, UnsupportedError
from uniep.tuner.strategies import STRATEGIES, implementations

OWN_CLONE = Path(__file__).parents[3]
"""The clone that this package runs from, where it was installed by `pip install -e`."""

ON_CPUS = "uniep bench --ranks 2 --device cpu --dtype fp32 --shape 128x128x8x2 --tokens 128"

# Ctrl-C reaches every process of a terminal: ranks end silently, and the process that started them prints.
_RANK = """
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
del sys.argv[0]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def bench(
    context: typer.Context,
    ranks: Annotated[int, typer.Option(help="Processes, one per GPU; 0: one for each GPU of this machine.", min=0)] = 0,
    strategy: Annotated[
        str, typer.Option(help=f"Named strategies to time: all, or some of {', '.join(STRATEGIES)} (docs/tuner.md).")
    ] = "",
    json_file: JsonFile = None,
) -> None:
    """Time uniep and its peers on one MoE layer, interleaved, on the GPUs of this machine.

    Everything else on the command line goes to benchmarks/moe.py: uniep bench --shape qwen3-30b --tokens 4096,8192.
    Needs a clone of the repository, since benchmarks are not in the installed package: the one that is installed by
    pip install -e, or the one around the current folder. The installed uniep is timed. Tokens are per rank.
    To list the options of that script: uniep bench -- --help. The last lines are a summary for an issue.
    """
    check_file(json_file, "--json")
    harness_file = _harness()
    if strategy:
        made, left_out = implementations(strategy, "cpu" if "cpu" in context.args else "hopper")
        context.args += ["--impl", ",".join(made)]
        for reason in left_out if not under_torchrun() else ():
            typer.echo(f"left out: {reason}")
    if json_file is not None:
        context.args += ["--json", str(json_file)]
    if under_torchrun():
        sys.argv = [str(harness_file), *context.args]
        sys.path.insert(0, str(harness_file.parent))
        runpy.run_path(str(harness_file), run_name="__main__")
        return
    if harness_file.parents[1] != OWN_CLONE:
        typer.echo(f"{harness_file} times the installed uniep, {Path(uniep.__file__).parent}")
    sys.path.insert(0, str(harness_file.parent))
    harness = runpy.run_path(str(harness_file))
    made = harness["parser"]()
    _, unknown = made.parse_known_args(context.args)
    if unknown:
        known = [name for of in (made._actions, context.command.params) for action in of for name in _names(action)]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1)
        guess = f"did you mean {near[0]}?" if near else "uniep bench --help and uniep bench -- --help list options"
        raise ConfigError(f"no option {unknown[0]}; {guess}")
    harness["options"](context.args)  # ends here, once, with what is wrong with a value
    told = {argument.partition("=")[0] for argument in context.args}
    if not torch.cuda.is_available() and "--device" not in told:
        typer.echo(f"this machine has no GPU to time; to see the harness run, in seconds, on CPU processes: {ON_CPUS}")
        raise typer.Exit(2)
    with tempfile.TemporaryDirectory(prefix="uniep-") as folder:
        results = json_file or Path(folder) / "results.json"
        if json_file is None:
            context.args += ["--json", str(results)]
        before = _version(results)
        try:
            command = ["--no-python", sys.executable, "-u", "-c", _RANK, str(harness_file), *context.args]
            torchrun(ranks or max(1, torch.cuda.device_count()), command)
        finally:
            if _version(results) != before:  # else it has nothing, or what an earlier run has timed
                summary.say(_lines(json.loads(results.read_text())))


def _harness() -> Path:
    """benchmarks/moe.py of the clone that this package runs from, or else of the one around the current folder."""
    here = Path.cwd()
    for clone in (OWN_CLONE, here, *here.parents):
        found = clone / "benchmarks" / "moe.py"
        if found.exists() and (clone / "src" / "uniep").is_dir():
            return found
    raise UnsupportedError(
        f"uniep bench needs a clone of the repository, and {here} is in none; run it there, or install the clone by "
        "pip install -e '.[cli]'"
    )


def _version(file: Path) -> tuple[int, int] | None:
    """Another one whenever the harness writes the file, which replaces it; None: there is no file."""
    if not file.exists():
        return None
    of = file.stat()
    return of.st_ino, of.st_mtime_ns


def _names(option: Any) -> list[str]:
    """Of argparse's options and of this command's."""
    names: list[str] = getattr(option, "option_strings", None) or getattr(option, "opts", [])
    return names


def _lines(results: dict[str, Any]) -> list[str]:
    """What was timed, a line for each case: ms of every implementation, the slowest rank's."""
    cases: dict[str, list[str]] = {}
    for row in results["rows"]:
        case = f"{row['shape']} T={row['tokens']} {row['routing']} {row['direction']} {row['load']}"
        cases.setdefault(case, []).append(f"{row['impl']} {row['ms']:.3f}")
    return [f"{case}, ms: {', '.join(of)}" for case, of in cases.items()] or ["nothing could be timed"]

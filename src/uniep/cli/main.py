"""The `uniep` command: every command is one file, registered here."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

import uniep
from uniep.cli.bench import bench
from uniep.cli.demo import demo
from uniep.cli.diff import diff
from uniep.cli.doctor import doctor
from uniep.cli.explain import explain
from uniep.cli.lora import lora
from uniep.cli.memory import memory
from uniep.cli.simulate import simulate
from uniep.cli.trace import trace
from uniep.cli.tune import tune
from uniep.cli.verify import verify
from uniep.errors import UniEPError

_CLICK_ERROR: Any = typer.BadParameter.__mro__[2]  # ClickException: where typer has it depends on typer's version


class OneLineErrors(typer.core.TyperGroup):
    """Says what is wrong with a command line in one line, with where to read on."""

    def main(self, args: Any = None, prog_name: str | None = None, standalone_mode: bool = True, **extra: Any) -> Any:  # type: ignore[override]
        try:
            status = super().main(args, prog_name, standalone_mode=False, **extra)
        except _CLICK_ERROR as error:
            if not standalone_mode:
                raise
            context = getattr(error, "ctx", None)
            command = context.command_path if context else "uniep"
            text = " ".join(error.format_message().split())
            if text:  # empty where help is what it had to say, and has been printed
                typer.secho(f"{command}: {text}  ({command} --help)", fg="red", err=True)
            sys.exit(error.exit_code)
        if standalone_mode:
            sys.exit(status or 0)
        return status


app = typer.Typer(
    cls=OneLineErrors,
    help="Deterministic expert-parallel Mixture-of-Experts layers for PyTorch.",
    epilog="Commands that need several ranks start them with torchrun; under torchrun they use its ranks.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"uniep {uniep.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    pass


def _without_traceback(command: Callable[..., None]) -> Callable[..., None]:
    """uniep's own errors say what is wrong and what to do; a traceback would hide that."""

    @functools.wraps(command)
    def run(*args: object, **kwargs: object) -> None:
        try:
            command(*args, **kwargs)
        except UniEPError as error:
            typer.secho(f"{type(error).__name__}: {error}", fg="red", err=True)
            raise typer.Exit(2) from error
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(130) from None

    return run


for command in (demo, verify, diff, trace, doctor, memory, simulate, tune, explain, lora):
    app.command()(_without_traceback(command))
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(_without_traceback(bench))

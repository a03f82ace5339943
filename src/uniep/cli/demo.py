"""`uniep demo`: train a small MoE language model with expert parallelism, then prove its bits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import uniep
from uniep.cli import launch, pictures, summary
from uniep.cli.bits import Digests, differences, digest_of, merge, verdict
from uniep.cli.launch import World
from uniep.cli.model import NUM_SHARDS, ModelConfig, Trainer
from uniep.cli.options import DType, JsonFile, check_file, check_folder, numbers, write_json
from uniep.cli.proof import MAX_NORM, parameters, prove, prove_copies, schedules
from uniep.cli.text import Text
from uniep.cli.timeline import Span, draw_timeline, fastest, recording
from uniep.integrations.torch import TrainState

LEARNING_RATE = 4e-3
HELD_OUT_BATCHES = 4
TRACED_STEPS = 8


def demo(
    steps: Annotated[int, typer.Option(help="Optimizer steps of the training run.", min=1)] = 200,
    ep: Annotated[int, typer.Option(help="Expert-parallel ranks of the training run: 1, 2 or 4.")] = 2,
    proof_ep: Annotated[str, typer.Option(help="EP sizes that the proof compares, each 1, 2 or 4.")] = "1,2,4",
    proof_steps: Annotated[int, typer.Option(help="Optimizer steps of each run of the proof.", min=1)] = 3,
    dtype: Annotated[DType, typer.Option(help="dtype of expert computation.")] = DType.bf16,
    out: Annotated[Path, typer.Option(help="Folder for loss.png and timeline.png.")] = Path("out"),
    json_file: JsonFile = None,
) -> None:
    """Train a small MoE language model, then prove its bits.

    A byte-level transformer learns the sources of Python's standard library with expert parallelism: one
    process per rank, on CPUs, or on GPUs (one rank each) where there are some. Then the proof: the same few
    optimizer steps at every EP size under several schedules, and loss, norm, logits, gradients and parameters
    compared bit by bit with EP=1, serial; with ranks split into EP groups and copies of the experts; and
    after a checkpoint, resumed at another EP size. The exit status is 1 if a single bit differs.
    """
    sizes = sorted({1, *numbers(proof_ep, "--proof-ep")})
    for option, size in [("--ep", ep), *(("--proof-ep", size) for size in sizes)]:
        if size < 1 or NUM_SHARDS % size:
            raise typer.BadParameter(
                f"EP={size} cannot share {NUM_SHARDS} shards evenly; use 1, 2 or 4", param_hint=option
            )
    check_folder(out)
    check_file(json_file, "--json")
    backend = launch.backend()
    if not launch.under_torchrun():
        launch.run_again(launch.most_ranks(max(ep, *sizes)))
    cfg = ModelConfig(dtype=dtype.torch)
    with launch.ranks() as world:
        say = world.console.print
        possible = [size for size in (1, 2, 4) if size <= world.size]
        if ep not in possible:
            say(f"[yellow]training at EP={possible[-1]}[/yellow], not {ep}: {world.shortage}")
            ep = possible[-1]
        groups = {size: world.first(size) for size in possible}
        text = Text()
        say(f"text: {text.num_files} files of Python's standard library, {text.train.numel() / 1e6:.1f} MB")
        recorded = _train(cfg, world, groups[ep], text, steps, out) if world.rank < ep else []
        of_rank = world.gather(recorded)  # ranks outside the training group wait here
        drawn = [out / "loss.png"]
        if world.rank == 0 and recorded[0]:
            drawn.append(out / "timeline.png")
            spans = fastest([[span for part in step for span in part] for step in zip(*of_rank[:ep], strict=True)])
            note = f"layer {cfg.layers // 2} of {cfg.layers}, EP={ep}, {_describe(cfg)}"
            draw_timeline(spans, f"{note}; the fastest of {TRACED_STEPS} training steps", drawn[-1])
        batches = [_batch(text, cfg, step) for step in range(proof_steps)]
        compared = {size: groups[size] for size in sizes if size in groups}
        same = prove(cfg, world, compared, schedules(backend), batches, LEARNING_RATE)
        copied = prove_copies(cfg, world, batches, LEARNING_RATE)
        resumed = _resume(cfg, world, groups, ep, text, proof_steps)
        if missing := [size for size in sizes if size not in groups]:
            say(f"[yellow]not compared[/yellow]: EP {_list(missing)}; {world.shortage}")
        same = same and copied is not False and resumed is not False
        say(verdict(same, compared, backend))
        say(f"pictures: {_list(drawn)}", markup=False)
        if world.rank == 0:
            document = {
                "command": summary.command_line(),
                "backend": backend,
                "ep": [*compared],
                "identical": same,
                "with_copies": copied,
                "resumed": resumed,
                "machine": summary.machine(),
            }
            write_json(json_file, document)
    raise typer.Exit(0 if same else 1)


def _resume(
    cfg: ModelConfig, world: World, groups: dict[int, dist.ProcessGroup | None], ep: int, text: Text, steps: int
) -> bool | None:
    """Train `steps` steps at EP `ep`, save, go on; load at the largest other EP size, go on.  Whether losses and the
    parameters' bits are equal; None if there is no other EP size."""
    other = max((size for size in groups if size != ep), default=ep)
    if other == ep:
        return None
    found: list[tuple[list[float], Digests]] = []
    with world.folder() as folder:
        for size, load in ((ep, False), (other, True)):
            losses: list[float] = []
            mine: Digests = {}
            mesh = world.mesh(size)
            if mesh is not None:
                with uniep.Workspace(cfg.moe(size), groups[size], device=world.device) as workspace:
                    trainer = Trainer(cfg, workspace, LEARNING_RATE, max_norm=MAX_NORM)
                    state = {"train": TrainState(trainer.model, trainer.optimizer, mesh)}
                    if load:
                        dcp.load(state, checkpoint_id=folder, process_group=mesh.get_group())
                    else:
                        for step in range(steps):
                            trainer.step(_batch(text, cfg, step))
                        dcp.save(state, checkpoint_id=folder, process_group=mesh.get_group())
                    losses = [float(trainer.step(_batch(text, cfg, steps + step))) for step in range(steps)]
                    mine = dict(parameters(trainer))
            everyone = world.gather((losses, mine))
            found.append((everyone[0][0], merge(theirs for _, theirs in everyone)))
    (losses, saved), (again, resumed) = found
    same = losses == again and not differences(resumed, saved)
    for size, values, digests in ((ep, losses, saved), (other, again, resumed)):
        shown = ", ".join(f"{value:.6f}" for value in values)
        what = "saved, went on" if size == ep else "resumed"
        whole = digest_of(digests)
        world.console.print(f"EP={size} {what} after step {steps}: losses {shown}; parameters {whole[:16]}")
    return same


def _list(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def _batch(text: Text, cfg: ModelConfig, step: int, held_out: bool = False) -> list[torch.Tensor]:
    return text.batch(step, NUM_SHARDS, cfg.sequences_per_shard, cfg.context, held_out=held_out)


def _train(
    cfg: ModelConfig, world: World, group: dist.ProcessGroup | None, text: Text, steps: int, out: Path
) -> list[list[Span]]:
    """Train, print and draw the loss.  Returns this rank's tasks of a middle layer, in a few more steps."""
    ep_size = dist.get_world_size(group) if group is not None else 1
    say = world.console.print
    with uniep.Workspace(cfg.moe(ep_size), group, device=world.device) as workspace:
        trainer = Trainer(cfg, workspace, LEARNING_RATE, max_norm=MAX_NORM)
        what = f"{trainer.num_parameters / 1e6:.1f} M parameters, {cfg.layers} layers, {_describe(cfg)}, EP={ep_size}"
        say(f"{what}, backend {workspace.backend.name}")
        history: list[float] = []
        tokens = NUM_SHARDS * cfg.tokens_per_shard
        begin = time.perf_counter()
        with _progress(world, steps) as advance:
            for step in range(steps):
                for parameters in trainer.optimizer.param_groups:
                    parameters["lr"] = LEARNING_RATE * _rate(step, steps)
                start = time.perf_counter()
                history.append(float(trainer.step(_batch(text, cfg, step))))
                advance(step, history[-1], tokens / (time.perf_counter() - start))
        speed = f"{tokens * steps / (time.perf_counter() - begin):,.0f} tokens/s"
        # Every rank evaluates the same number of times: the layer is collective in evaluation too.
        unseen = [trainer.evaluate(_batch(text, cfg, step, held_out=True)) for step in range(HELD_OUT_BATCHES)]
        held_out = float(sum(unseen)) / HELD_OUT_BATCHES
        recorded = []
        for step in range(TRACED_STEPS):
            with recording(trainer.experts_of(cfg.layers // 2 - 1)) as spans:
                trainer.step(_batch(text, cfg, steps + step))
            recorded.append(spans)
        last = history[-10:]
        say(
            f"loss {history[0]:.2f} -> {sum(last) / len(last):.2f} nats per byte (mean of the last {len(last)} steps), "
            f"held-out files {held_out:.2f}; {speed}"
        )
    if world.rank == 0:
        pictures.draw_loss(history, held_out, f"{what}, {speed}", out / "loss.png")
    return recorded


def _describe(cfg: ModelConfig) -> str:
    return f"{cfg.num_experts} {str(cfg.dtype).removeprefix('torch.')} experts, top-{cfg.top_k}"


@contextmanager
def _progress(world: World, steps: int) -> Iterator[Callable[[int, float, float], None]]:
    """A progress bar on a terminal, else about ten lines; rank 0 only."""
    console = world.console
    if not console.is_terminal:
        every = max(1, steps // 10)

        def print_line(step: int, loss: float, speed: float) -> None:
            if step % every == 0 or step == steps - 1:
                console.print(f"step {step + 1:>5} of {steps}  loss {loss:.3f}  {speed:,.0f} tokens/s")

        yield print_line
        return
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss [bold]{task.fields[loss]}[/bold]"),
        TextColumn("{task.fields[speed]} tokens/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("training", total=steps, loss="-", speed="-")

        def advance(step: int, loss: float, speed: float) -> None:
            bar.update(task, completed=step + 1, loss=f"{loss:.3f}", speed=f"{speed:,.0f}")

        yield advance


def _rate(step: int, steps: int) -> float:
    """Learning rate as a share of its peak: ten steps of warm-up, then a cosine down to a tenth."""
    warm = min(1.0, (step + 1) / 10)
    return warm * (0.55 + 0.45 * math.cos(math.pi * step / steps))

"""What is tuned on several ranks: the same bits for every point, and the same choice on every rank."""

import dataclasses
import logging
import os

import case
import torch
from case import config, random_batch, same_bits

import uniep
from uniep.schedule import Schedule
from uniep.tuner import choose, space, strategies, tables

CFG = config(hidden=64, ffn=32, max_tokens_per_rank=128)
TOKENS = (30, 61, 7, 64)


def steps_of_points(world, points, batch):
    made = []
    for backend, schedule in points:
        group = world.group(2)
        with uniep.Workspace(CFG, group, device="cpu", backend=backend, schedule=schedule, timeout_s=20) as workspace:
            made.append(case.forward_backward(workspace, batch))
    return made


def test_every_named_strategy_and_points_of_the_space_have_the_same_bits(pool):
    named = {
        f"{name} on {backend}": (backend, strategies.point(name, backend, CFG, 2))
        for name, strategy in strategies.STRATEGIES.items()
        for backend in ("cpu", "nccl")
        if backend in strategy.points
    }
    assert {"serial-all-to-all on nccl", "comet-like on cpu", "taskflow on cpu", "uniep on cpu"} <= set(named)
    drawn = space.points("cpu", CFG, 2, limit=12, keep=())
    points = named | {f"point {i}": ("cpu", drawn.schedule(i)) for i in range(len(drawn))}
    batch = random_batch(CFG, TOKENS)
    want = case.oracle(pool, CFG, batch)
    ranks = pool.run(steps_of_points, list(points.values()), batch, ranks=2)
    for name, parts in zip(points, zip(*ranks, strict=True), strict=True):
        same_bits(case.gather(list(parts)), want, name)


def started(world, folders, batch, tune):
    """One start with each rank's own folder of tables: (schedule, result)."""
    os.environ["UNIEP_TUNE_DIR"] = folders[world.rank]
    try:
        with uniep.Workspace(CFG, world.group(2), device="cpu", timeout_s=20, tune=tune) as workspace:
            return workspace.backend.schedule, case.forward_backward(workspace, batch)
    finally:
        del os.environ["UNIEP_TUNE_DIR"]


def table(folder, changes, tried=()):
    key = tables.Key.of(CFG, 2, "cpu", "cpu")
    usual = tables.fields(Schedule())
    tables.store(folder / key.file, key, {"schedule": usual | changes, "default": usual, "tried": list(tried)})
    return str(folder)


def test_ranks_with_different_tables_run_one_schedule(pool, tmp_path):
    """46: two cold starts, a warm one, and one where rank 1 alone has another cached choice."""
    none, a, b = (tmp_path / name for name in ("none", "a", "b"))
    table(a, {"gate_up.columns": 128, "chunk_tokens": 32})
    table(b, {"tile_order": "natural", "down.rows": 64, "gate_up.rows": 64})
    batch = random_batch(CFG, TOKENS)
    tuned = Schedule(chunk_tokens=32, gate_up=dataclasses.replace(Schedule().gate_up, columns=128))
    want = None
    for folders, schedule in (
        ((none, none), Schedule()), ((none, none), Schedule()),
        ((a, a), tuned), ((a, b), tuned), ((none, b), Schedule()),
    ):  # fmt: skip
        ranks = pool.run(started, [str(folder) for folder in folders], batch, "cached", ranks=2)
        assert [of for of, _ in ranks] == [schedule] * 2, folders
        assert len({tables.digest(of) for of, _ in ranks}) == 1
        result = case.gather([of for _, of in ranks])
        want = want or result
        same_bits(result, want, str(folders))


def test_online_ends_alike_on_all_ranks(pool, tmp_path):
    proved = [{"changes": {"chunk_tokens": n}, "status": "timed", "score": 0.9} for n in (32, 128)]
    folder = table(tmp_path / "a", {"chunk_tokens": 32}, proved)
    ranks = pool.run(started, [folder, folder], random_batch(CFG, TOKENS), "online", ranks=2)
    assert ranks[0][0] == ranks[1][0]
    assert ranks[0][0].chunk_tokens in (32, 128)
    same_bits(case.gather([of for _, of in ranks]), case.oracle(pool, CFG, random_batch(CFG, TOKENS)), "online")


def started_on_a_full_device(world, folder, batch):
    """As `started`, where rank 1 has no memory for inputs; with what was logged."""
    logged: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())
    drawn = choose.drawn

    def full(*args):
        if world.rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")
        return drawn(*args)

    logging.getLogger("uniep").addHandler(handler)
    choose.drawn = full
    try:
        return started(world, [folder, folder], batch, "online")[0], logged
    finally:
        choose.drawn = drawn
        logging.getLogger("uniep").removeHandler(handler)


def test_online_on_a_full_device_takes_the_tables_choice(pool, tmp_path):
    proved = [{"changes": {"chunk_tokens": n}, "status": "timed", "score": 0.9} for n in (32, 128)]
    folder = table(tmp_path / "a", {"chunk_tokens": 32}, proved)
    for schedule, logged in pool.run(started_on_a_full_device, folder, random_batch(CFG, TOKENS), ranks=2):
        assert schedule.chunk_tokens == 32
        assert logged == [
            "nothing was tuned online, the table's choice runs: rank 1 has no memory for inputs: CUDA out of memory. "
            "Tried to allocate 2.00 GiB."
        ]


def with_modes(world, modes):
    try:
        uniep.Workspace(CFG, world.group(2), device="cpu", timeout_s=20, tune=modes[world.rank])
    except uniep.ConfigError as error:
        return str(error)
    return None


def test_ranks_that_are_told_different_modes_are_told(pool):
    for text in pool.run(with_modes, ["off", "cached"], ranks=2):
        assert "ranks disagree on tune (rank 0: off, rank 1: cached)" in text
    for text in pool.run(with_modes, ["off", "never"], ranks=2):
        assert "tune is 'never'; it must be off, cached or online" in text


def test_modes_are_those_that_are_documented():
    assert choose.MODES == ("off", "cached", "online")
    assert torch.device("cpu").type == tables.card_name(torch.device("cpu"))

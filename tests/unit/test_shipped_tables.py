"""The tables of the package: each is of today's sources, and says what it must say to be explained.

A table that is outdated serves nobody, and warns nobody: so it is found here, before it is released.
"""

import json
import shutil
import statistics
from pathlib import Path

import pytest
from typer.testing import CliRunner

from uniep.backends import registry
from uniep.cli.main import app
from uniep.errors import ConfigError
from uniep.schedule import default_schedule
from uniep.shapes import parse_shape
from uniep.trials.search import EARLY, gain_of
from uniep.tuner import tables
from uniep.tuner.model import cards

LARGEST = 200_000
"""Bytes of a file."""

REMEDY = "time it again (docs/tuner.md, Tables of the package), or remove it: git rm"


def faults(path: Path) -> list[str]:
    """What is wrong with a table of the package."""
    card, backend, ranks, shape = (*path.stem.split("-"), "", "", "", "")[:4]
    if card not in cards() or backend not in registry.NAMES or not shape:
        return [f"{path.name} is not CARD-BACKEND-epN-SHAPE.json, of {', '.join(cards())}"]
    try:
        document = tables.read(path, backend)
    except ConfigError as error:
        return [str(error)]
    now, size = tables.kernels(backend), path.stat().st_size
    found = []
    if document["kernels"] != now:
        found.append(f"{path.name} was timed with other sources ({document['kernels']}, now {now}); {REMEDY} {path}")
    if size > LARGEST:
        found.append(f"{path.name} has {size} bytes; at most {LARGEST}: leave out layers or numbers of tokens")
    if ranks != f"ep{document.get('ep')}" or {of["shape"] for of in document["entries"].values()} != {shape}:
        found.append(f"{path.name} is of another number of ranks or shape")
    for place, entry in document["entries"].items():
        found += [f"{path.name}, {place}: {fault}" for fault in faults_of(place, entry)]
    return found


def faults_of(place: str, entry: dict) -> list[str]:
    found = []
    if place != f"{entry['shape']}-{entry['dtype']}-{entry['tokens']}":
        found.append("its key is of another call")
    if tables.bucket(entry.get("timed_tokens", 0) or 1) != entry["tokens"]:
        found.append(f"{entry.get('timed_tokens')} timed tokens are of another bucket")
    found += [f"has no {name}" for name in ("commit", "date", "proof", "torch", "usual_us") if not entry.get(name)]
    try:
        points = list(tables.tried(entry))
        choice, usual = tables.parse(entry["schedule"]), tables.parse(entry["default"])
    except ConfigError as error:
        return [*found, str(error)]
    timed = [(point, of) for point, of in points if of["status"] in ("timed", "slow")]
    if not timed:
        found.append("nothing was timed")
    for point, of in timed:
        if not (of.get("pairs_us") and of.get("us") and of.get("score")):
            found.append(f"{point.name} has no times")
        elif abs(statistics.median(us for _, us in of["pairs_us"]) / of["us"] - 1) > 1e-3:
            found.append(f"{point.name}: us is not the median of its times")
        elif (of["status"] == "slow") != (statistics.median(b / a for a, b in of["pairs_us"]) > EARLY):
            found.append(f"{point.name} is not {of['status']}")
    compared = entry.get("compared", {})
    of_one, of_many = (compared.get(f"{name}pairs_us") for name in ("", "sustained_"))
    wins = bool(of_one and of_many) and keeps(of_one, of_many)
    if choice != usual and (not wins or compared["why"] or choice != tables.parse(compared["changes"], usual)):
        found.append("its choice did not beat the default in fresh processes by more than the spread, and back to back")
    if choice == usual and wins and not compared["why"]:
        found.append("the default stays, though it was beaten")
    return found


def keeps(of_one: list, of_many: list) -> bool:
    """The rule of the search, for times that are rounded."""
    (gain, spread), (sustained, noise) = gain_of(of_one), gain_of(of_many)
    return gain - 1 > spread - 1e-4 and sustained >= 1 - noise - 1e-4


FILES = sorted(tables.shipped().glob("*")) if tables.shipped().is_dir() else []
TABLES = [path for path in FILES if path.suffix != ".lock"]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.name)
def test_a_table_of_the_package_is_of_today_and_complete(path):
    assert not faults(path), "\n".join(faults(path))


def explained(shape, ep, tokens, dtype, folder):
    command = ["explain", "--shape", shape, "--ep", ep, "--tokens", tokens, "--dtype", dtype]
    done = CliRunner().invoke(app, [*map(str, command), "--json", str(folder / "x.json")])
    assert done.exit_code == 0, done.output
    return json.loads((folder / "x.json").read_text()), done.output


OF_RANKS = {path.name.rpartition("-")[0]: path for path in TABLES if path.name.startswith("h200-hopper-")}


@pytest.mark.parametrize("path", OF_RANKS.values(), ids=lambda path: path.name)
def test_a_table_of_the_package_is_explained_without_a_gpu(path, monkeypatch, tmp_path):
    """One layer for each number of ranks; the others have the same form."""
    document = json.loads(path.read_text())
    monkeypatch.setenv("UNIEP_TUNE_DIR", str(tmp_path))
    entry = min(document["entries"].values(), key=lambda of: of["timed_tokens"])
    dtype = {"bfloat16": "bf16", "float16": "fp16"}[entry["dtype"]]
    made, said = explained(entry["shape"], document["ep"], entry["timed_tokens"], dtype, tmp_path)
    assert made["by"] == "table" and made["serves"].startswith(f"{path}: ")
    assert made["measured_us"] and made["predicted_us"] and made["dimensions"]
    assert made["runner_up"]["by"] == "table" and made["runner_up"]["measured_us"] and made["runner_up"]["why"]
    assert made["runner_up"]["why"].rpartition(" ")[2] in said


# --- what the checks find ---


@pytest.fixture
def example(tmp_path, monkeypatch):
    """A table in place of the package's: a default that stays after a comparison, and a choice."""
    monkeypatch.setenv("UNIEP_TUNE_DIR", str(tmp_path / "user"))
    monkeypatch.setattr(tables, "shipped", lambda: tmp_path)
    shape = parse_shape("qwen3-30b")
    for tokens, faster in ((512, 1.0), (8192, 1.1)):
        cfg = shape.config(2, tokens, max_rows=shape.sync_free_rows(tokens))
        key = tables.Key.of(cfg, 2, "hopper", "h200")
        usual, changes = tables.fields(default_schedule("hopper", cfg, 2)), {"down.columns": 128}
        tried = [
            {"changes": changes, "status": "timed", "score": 0.98, "us": 980.0, "pairs_us": [[1000.0, 980.0]] * 9},
            {"changes": {"gate_up.columns": 128}, "status": "slow", "score": 1.1, "us": 1100.0,
             "pairs_us": [[1000.0, 1100.0]] * 3},
            {"changes": {"transfer": "pull"}, "status": "fault", "text": "died"},
        ]  # fmt: skip
        pairs = [[1000.0 * faster + n, 1000.0] for n in range(15)]
        compared = {"changes": changes, "why": "" if faster > 1 else "1.007x as fast, with a spread of 0.008"}
        compared |= {"pairs_us": pairs, "sustained_pairs_us": pairs[:9]} if faster > 1 else {"pairs_us": pairs}
        entry = {
            "default": usual, "schedule": usual | changes if faster > 1 else usual, "tried": tried, "usual_us": 1000.0,
            "compared": compared, "commit": "abc", "date": "2026-12-01", "proof": "1", "timed_tokens": tokens,
        }  # fmt: skip
        tables.store(tmp_path / key.file, key, entry)
    return tmp_path / key.file


def test_a_right_table_has_no_faults_and_is_explained(example, tmp_path):
    assert faults(example) == []
    made, said = explained("qwen3-30b", 2, 512, "bf16", tmp_path)
    assert made["serves"].startswith(f"{example}: the default stays at 512 tokens, of 3 points, commit abc, Triton ")
    assert (made["choice"]["changes"], made["measured_us"]) == ({}, 1007.0)
    assert made["runner_up"]["measured_us"] == 1000.0
    assert "with a spread of 0.008" in " ".join(said.split())
    made, _ = explained("qwen3-30b", 2, 8192, "bf16", tmp_path)
    assert (made["choice"]["changes"], made["measured_us"]) == ({"down.columns": 128}, 1000.0)
    assert made["runner_up"]["changes"] == {} and made["by"] == "table"


def at(place, **values):
    return lambda document: document["entries"][f"2048x768x128x8-bfloat16-{place}"].update(values)


TIMED = {"status": "timed", "us": 1.0, "score": 1.0}


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda of: of.update(kernels="0123"), r"timed with other sources \(0123, now .*time it again.*git rm .*ep2"),
        (lambda of: of.update(ep=4), "another number of ranks or shape"),
        (at(512, shape="2048x768x128x4"), "another number of ranks or shape"),
        (at(512, commit=""), "8-bfloat16-512: has no commit"),
        (at(512, tokens=1024), "its key is of another call"),
        (at(512, timed_tokens=200), "200 timed tokens are of another bucket"),
        (at(512, tried=[]), "nothing was timed"),
        (at(512, tried=[{**TIMED, "changes": {"transfer": "swim"}}]), "transfer is 'swim'"),
        (at(512, tried=[{**TIMED, "changes": {"transfer": "pull"}}]), "no times"),
        (at(512, schedule={"down.columns": 128}), "its choice did not beat the default"),
        (at(8192, compared={"changes": {}, "why": ""}), "its choice did not beat the default"),
        (lambda of: at(8192, schedule=of["entries"]["2048x768x128x8-bfloat16-8192"]["default"])(of), "it was beaten"),
        (at(512, notes="x" * LARGEST), "at most 200000"),
        (lambda of: of.update(format=1), "not a table of format"),
    ],
)  # fmt: skip
def test_a_wrong_table_is_told(example, spoil, says):
    document = json.loads(example.read_text())
    spoil(document)
    example.write_text(json.dumps(document))
    with pytest.raises(AssertionError, match=says):
        test_a_table_of_the_package_is_of_today_and_complete(example)


def test_a_file_of_another_name_is_told(example):
    other = example.with_name(f"h300{example.name[4:]}")
    shutil.copy(example, other)
    assert faults(other) == [f"h300{example.name[4:]} is not CARD-BACKEND-epN-SHAPE.json, of h100, h200"]

"""benchmarks/train.py without a GPU: two processes train a tiny model three times, and the comparison can fail."""

import copy
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import train  # noqa: E402

TINY = [
    "--layers=2", "--heads=2", "--context=16", "--sequences=1", "--hidden=64", "--ffn=64", "--experts=4", "--top-k=2",
]  # fmt: skip
STEPS = 4


def train_on_two_processes(*arguments: str) -> subprocess.CompletedProcess[str]:
    ranks = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    script = [str(ROOT / "benchmarks" / "train.py"), "--device=cpu", *TINY, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *ranks, *script]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(output, path of the results file) of the whole program."""
    out = tmp_path_factory.mktemp("train") / "results.json"
    done = train_on_two_processes(f"--steps={STEPS}", f"--json={out}")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, out


@pytest.mark.slow
def test_fused_and_nccl_train_with_the_bits_of_serial(trained):
    output, path = trained
    content = json.loads(path.read_text())
    assert content["equal"] == {"fused": True, "nccl": True}
    assert f"fused and serial: identical, every bit of {STEPS} steps" in output
    assert "tokens/s of fused over nccl" in output
    runs = {run["run"]: run for run in content["runs"]}
    assert list(runs) == ["fused", "serial", "nccl"]
    assert [run["backend"] for run in runs.values()] == ["cpu", "cpu", "nccl"]
    assert [run["schedule"]["overlap"] for run in runs.values()] == ["fused", "serial", "serial"]
    for run in runs.values():
        assert run["steps"] == len(run["losses"]) == len(run["losses_hex"]) == STEPS
        assert run["losses_hex"] == runs["serial"]["losses_hex"]
        assert run["losses"] == [round(float.fromhex(text), 6) for text in run["losses_hex"]]
        assert run["step_ms_min"] <= run["step_ms"] <= run["step_ms_max"]
        tokens = content["meta"]["tokens_per_step"]
        assert run["tokens_per_s"] == pytest.approx(tokens / run["step_ms"] * 1e3, rel=1e-3)
    assert runs["fused"]["shared_mib"] > 0 and runs["nccl"]["shared_mib"] == 0


@pytest.mark.slow
def test_results_tell_what_ran_and_no_folder(trained):
    _, path = trained
    meta = json.loads(path.read_text())["meta"]
    assert {"card", "gpus", "ep", "torch", "triton", "commit", "command", "date"} <= meta.keys()
    assert meta["ep"] == 2 and meta["tokens_per_step"] == 4 * 16
    assert meta["model"]["hidden"] == 64 and meta["model"]["parameters_millions"] == pytest.approx(0.2, abs=0.1)
    assert meta["command"].startswith("benchmarks/train.py --device=cpu") and "--json=results.json" in meta["command"]
    assert str(path.parent) not in path.read_text() and str(ROOT) not in path.read_text()


@pytest.mark.slow
def test_picture_is_drawn_and_can_be_drawn_again(trained):
    _, path = trained
    picture = path.with_suffix(".png")
    first = picture.read_bytes()
    assert first.startswith(b"\x89PNG") and len(first) > 20_000
    picture.unlink()
    assert train.main(["--draw", str(path)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_one_bit_is_a_difference(trained):
    _, path = trained
    runs = json.loads(path.read_text())["runs"]
    assert train.differences(runs) == {"fused": "", "nccl": ""}
    changed = copy.deepcopy(runs)
    loss = float.fromhex(changed[0]["losses_hex"][2])
    changed[0]["losses_hex"][2] = math.nextafter(loss, math.inf).hex()
    assert train.differences(changed)["fused"].startswith("first in the loss of step 3: ")
    changed = copy.deepcopy(runs)
    changed[2]["parameters_sha256"][1] = ""
    assert "parameters" in train.differences(changed)["nccl"]
    changed[2]["losses_hex"].pop()
    changed[2]["steps"] -= 1
    assert train.differences(changed)["nccl"] == "", "a run cut short is compared as far as it went"


@pytest.mark.slow
def test_budget_stops_a_run_and_what_was_not_compared_is_no_success(tmp_path):
    out = tmp_path / "results.json"
    done = train_on_two_processes("--steps=50", f"--json={out}", "--budget-s=0.001")
    assert done.returncode != 0
    assert "not compared: fused, serial, nccl" in done.stdout, done.stdout + done.stderr
    assert not out.exists()


def test_speed_leaves_the_warm_up_out():
    assert train.speed([9.0] * train.WARM_UP + [1.0, 2.0, 4.0] * 4, tokens=8)["step_ms"] == 2000.0
    assert train.speed([9.0, 2.0], tokens=8)["step_ms_max"] == 2000.0
    assert train.speed([2.0], tokens=8)["tokens_per_s"] == 4.0


def test_rate_warms_up_and_falls():
    rates = [train.rate(step, 200) for step in range(200)]
    assert rates[0] < 0.06 and max(rates) > 0.95 and rates[-1] == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--runs", "fused,deepep"], "--runs 'deepep' is unknown; use fused, serial, nccl"),
        (["--steps", "0"], "--steps is 0; it must be at least 1"),
        (["--heads", "7"], "--hidden 1024 is not a multiple of --heads 7"),
        ([], "start it with torchrun"),
    ],
)
def test_bad_options_end_before_any_process_waits(arguments, message, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit):
        train.options(arguments)
    assert message in capsys.readouterr().err

"""The `uniep` command: what it prints, when it fails, and the parts of the demo's proof."""

import dataclasses
import inspect
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

import uniep
from uniep.cli import launch, model, progress, proof
from uniep.cli.bits import BitTable, differences, digest, merge
from uniep.cli.main import app
from uniep.cli.model import ModelConfig, Trainer
from uniep.cli.options import write_json
from uniep.cli.pictures import draw_loss
from uniep.cli.proof import schedules
from uniep.cli.text import Text
from uniep.cli.timeline import draw_timeline, kind_of, recording
from uniep.cli.verify import QUANTITIES as VERIFIED
from uniep.cli.verify import Problem as VerifyProblem
from uniep.cli.whole_model import of_config
from uniep.errors import ConfigError
from uniep.integrations.torch import of_shard
from uniep.schedule import DIMENSION, DIMENSIONS, is_valid
from uniep.way import resolve

SMALL = ["--hidden", "64", "--ffn", "64", "--experts", "4", "--top-k", "2", "--tokens", "37"]


def run(*args: str):
    return CliRunner().invoke(app, list(args), env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})


def run_process(*args: str, timeout: int = 150) -> subprocess.CompletedProcess[str]:
    """The real thing, torchrun and all."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "uniep", *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture
def one_rank(monkeypatch):
    """As if torchrun had started this process as the only rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    here = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in here.items():
        monkeypatch.setenv(name, str(value))


@pytest.fixture
def trainer():
    cfg = ModelConfig(layers=2, heads=2, context=16, sequences_per_shard=2, hidden=64, ffn=64, dtype=torch.float32)
    with uniep.Workspace(cfg.moe(1), device="cpu") as workspace:
        yield Trainer(cfg, workspace, learning_rate=1e-2)


def batch(cfg_length: int = 16, seed: int = 0) -> list[torch.Tensor]:
    return list(
        torch.randint(256, (model.NUM_SHARDS, 2, cfg_length + 1), generator=torch.Generator().manual_seed(seed))
    )


@pytest.mark.parametrize(
    "command", ["demo", "verify", "diff", "trace", "doctor", "memory", "simulate", "tune", "explain", "lora", "bench"]
)
def test_help_describes_every_command(command):
    assert command in run("--help").output
    result = run(command, "--help")
    assert result.exit_code == 0 and "Usage" in result.output


def test_memory_lists_buffers():
    result = run("memory", *SMALL, "--ep", "2")
    assert result.exit_code == 0
    assert "receive" in result.output and "2 ranks" in result.output
    assert "dlora13" in run("memory", *SMALL, "--ep", "2", "--lora", "8").output
    refused = run("memory", *SMALL, "--ep", "2", "--lora", "8", "--layers", "2")
    assert refused.exit_code == 2 and "--lora 8 is of one layer" in refused.output


@pytest.mark.parametrize("command", ["memory", "verify", "trace", "lora", "simulate", "tune", "explain"])
def test_every_layer_has_a_shape_by_name(command):
    (made,) = (c for c in app.registered_commands if c.callback.__name__ == command)
    assert "shape" in inspect.signature(made.callback).parameters


def test_progress_without_a_terminal_is_a_line_now_and_then(monkeypatch):
    monkeypatch.setattr(progress, "FIRST_S", 0.05)
    output = io.StringIO()
    with progress.progress(Console(file=output, width=80), "simulated", 3) as done:
        done()
        time.sleep(0.5)
    assert output.getvalue() == "simulated: 1 of 3 after 0 s\n"


def test_a_named_shape_is_its_four_sizes():
    sizes = ["--hidden", "2048", "--ffn", "1408", "--experts", "64", "--top-k", "6"]
    assert run("memory", "--shape", "dsv2-lite").output == run("memory", *sizes).output
    assert run("memory", "--shape", "dsv2-lite").output != run("memory").output


def test_memory_shows_what_recomputing_saves():
    args = ("memory", "--shape", "qwen3-30b", "--ep", "2")
    saved, recomputed = run(*args).output, run(*args, "--recompute").output
    both = saved.split("gate and up   ")[1]
    assert both == recomputed.split("gate and up   ")[1]
    lines = [re.split("  +", line) for line in both.splitlines()]
    assert [line[0] for line in lines[1:]] == ["saved", "recomputed"]
    h = next(re.split("  +", line) for line in saved.splitlines() if line.startswith("saved      h "))[4]
    held = [float(line[1].removesuffix(" MiB")) for line in lines[1:]]
    assert held[0] - held[1] == pytest.approx(float(h.removesuffix(" MiB")), abs=0.02)
    assert "transient  h " in recomputed


def test_memory_writes_what_recomputing_saves(tmp_path):
    out = tmp_path / "memory.json"
    assert run("memory", *SMALL, "--ep", "2", "--json", str(out)).exit_code == 0
    document = json.loads(out.read_text())
    assert document["gate and up"]["saved"]["peak_bytes"] == document["layer"]["peak_bytes"]
    kept = [document["gate and up"][how]["kept_bytes"] for how in ("saved", "recomputed")]
    (h,) = (b["bytes"] for b in document["layer"]["buffers"] if b["name"] == "h")
    assert kept[0] - kept[1] == h


def test_memory_of_a_whole_model(tmp_path):
    """Two layers of 4 experts of 3 * 64 * 64, over 2 ranks, beside two routers and 1000 other parameters."""
    out = tmp_path / "memory.json"
    result = run("memory", *SMALL, "--ep", "2", "--layers", "2", "--dense", "1e3", "--json", str(out))
    assert result.exit_code == 0, result.output
    found = {row["what"]: row for row in json.loads(out.read_text())["model"]["bytes"]}
    experts, dense = 2 * 4 * 3 * 64 * 64 // 2, 2 * 4 * 64 + 1000
    assert (found["parameters, bfloat16"]["experts"], found["parameters, bfloat16"]["dense"]) == (
        2 * experts,
        2 * dense,
    )
    assert found["two averages, fp32"]["total"] == 8 * (experts + dense)
    buffers = json.loads(out.read_text())["layer"]["buffers"]
    saved = sum(b["bytes"] for b in buffers if b["kind"] == "saved")
    assert found["saved by 2 MoE layers"]["total"] == 2 * saved > 0
    assert found["total"]["total"] == sum(row["total"] for what, row in found.items() if what != "total")
    result = run("memory", *SMALL, "--ep", "2", "--layers", "2", "--fsdp", "3")
    assert result.exit_code == 2 and "--fsdp is 3; it must be 1 (nothing is sharded) or a multiple" in result.output


def test_memory_of_a_hugging_face_config(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        num_hidden_layers=3, mlp_only_layers=[1], num_experts=8, hidden_size=64, moe_intermediate_size=48,
        num_experts_per_tok=2, num_attention_heads=2, num_key_value_heads=1, vocab_size=100, intermediate_size=96,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    size, shape = of_config(tmp_path / "config.json")
    assert shape == {"hidden": 64, "ffn": 48, "num_experts": 8, "top_k": 2, "bias": False}
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert (size.layers, size.experts) == (2, 2 * 8 * 3 * 64 * 48)
    assert size.experts + size.dense == sum(p.numel() for p in model.parameters())
    transformers.Qwen3Config(num_hidden_layers=1, hidden_size=64, vocab_size=100).save_pretrained(tmp_path / "dense")
    result = run("memory", "--config", str(tmp_path / "dense"))
    assert result.exit_code == 2 and "Qwen3ForCausalLM has no MoE layer" in result.output
    result = run("memory", "--config", str(tmp_path / "none"))
    assert result.exit_code == 2 and "no such file" in result.output


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["memory", *SMALL, "--ep", "3"], "num_experts=4 cannot be split evenly over 3 ranks"),
        (["memory", "--tokens", "x"], "Invalid value for '--tokens'"),
        (["tracee"], "No such command 'tracee'. Did you mean 'trace'?"),
        (["demo", "--nosuch"], "No such option"),
        (["doctor", "--json", "/proc/x.json"], "--json /proc"),
        (["doctor", "--json", "/no/such/x.json"], "--json /no/such/x.json: there is no folder /no/such; make it"),
        (["simulate", "--picture", "/no/such/x.png"], "--picture /no/such/x.png: there is no folder"),
        (["simulate", "--picture", "x.xyz"], "--picture x.xyz: the name must end in a format, one of ."),
        (["explain", "--picture", "x"], "--picture x: the name must end in a format, one of "),
        (["memory", "--shape", "qwen3-30b", "--ffn", "3"], "--shape qwen3-30b beside --ffn; give the shape, or"),
        (
            ["memory", "--fsdp", "8", "--dense", "1e9"],
            "--dense, --fsdp without effect on one layer; give --layers or --config, too",
        ),
        (
            ["memory", "--config", "x.json", "--hidden", "64"],
            "--hidden beside --config x.json, which says it; give one",
        ),
        (
            ["trace", "--machine", "h100-node"],
            "--machine is for --predict with --gpus; give both, too, or leave it out",
        ),
        (["tune", "--calibrate", "--into", "x"], "--into beside --calibrate, which searches nothing; leave one out"),
        (["tune", "--machine", "h200-node"], "--machine is for --calibrate; give it, too, or leave --machine out"),
        (["simulate", "--sensitivity"], "--sensitivity is for --a3; give it, too"),
        (["simulate", "--a3", "--shape", "olmoe"], "--shape beside --a3, which has its own; leave one out"),
        (["verify", "--shape", "qwen"], "shape 'qwen' is unknown; use qwen3-30b"),
        (["bench", "--rnks", "2"], "no option --rnks; did you mean --ranks?"),
        (["bench", "--tokns=2"], "no option --tokns=2; did you mean --tokens?"),
        (["explain", "--card", "a100"], "card 'a100' is unknown; use h100, h200"),
        (["explain", "--backend", "cpu", "--card", "h200"], "which is a GPU; uniep tune --calibrate --backend cpu"),
        (["explain", "--dtype", "fp32"], "dtype is torch.float32; the kernels compute in bfloat16 or float16"),
        (["explain", "--shape", "100x64x8x2"], "hidden is 100; on Hopper it must be a multiple of 8"),
        (["explain", "--shape", "256x128x24x4", "--ep", "3"], "the EP group has 3 ranks; the hopper backend needs a"),
        (["memory", "--layers", "2", "--dense", "inf"], "Invalid value for '--dense': Input should be less than or"),
        (["explain", "--lora", "12"], "--lora: r is 12; LoRA on backend 'hopper' takes multiples of 8 up to 128; use"),
        (["lora", "--backend", "tpu"], "backend is 'tpu'; known: auto, cpu, hopper, nccl"),
        (["lora", "--rank", "8,300"], "--rank: r is 300, but experts have only 256 columns; use at most 256"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_errors_are_one_line_with_the_remedy(args, words):
    result = run(*args)
    assert result.exit_code == 2 and len(result.output.splitlines()) == 1
    assert words in result.output and "Traceback" not in result.output


def test_every_command_writes_json():
    """The harness behind bench has --json, too, and gets it from there."""
    for command in app.registered_commands:
        assert "json_file" in inspect.signature(command.callback).parameters, command.callback.__name__


@pytest.mark.slow
def test_completion_knows_commands_and_values():
    def completed(*words: str) -> list[str]:
        env = {**os.environ, "_UNIEP_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words)}
        env["COMP_CWORD"] = str(len(words) - 1)
        command = [sys.executable, "-m", "uniep"]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=150).stdout.split()

    assert completed("uniep", "ver") == ["verify"]
    assert completed("uniep", "memory", "--optimizer", "adamw") == ["adamw-fp32", "adamw"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--experts", "10000000001", "--ep", "8"], "num_experts is 10000000001; it must be at most"),
        (["--experts", "2147483647", "--top-k", "1", "--ep", "8"], "(these sizes fit: 1, 2147483647)"),
        (["--hidden", str(2**60)], f"hidden is {2**60}; it must be at most"),
        (["--ep", "9" * 40], "ep_size is a number of 133 bits; it must be at most"),
    ],
    ids=["experts", "prime", "hidden", "ranks"],
)
def test_huge_numbers_end_at_once(args, words):
    result = run("memory", *args)
    assert result.exit_code == 2 and words in result.output and "Traceback" not in result.output
    assert len(result.output) < 400


def test_doctor_says_which_backend_and_which_environment(monkeypatch):
    monkeypatch.setenv("UNIEP_TIMEOUT_S", "17")
    result = run("doctor")
    assert result.exit_code == 0
    assert "auto takes" in result.output and torch.__version__ in result.output
    assert re.search(r"UNIEP_TIMEOUT_S\W+17", result.output)


@pytest.mark.parametrize("args", [("--ep", "3"), ("--proof-ep", "1,3"), ("--proof-ep", "one")])
def test_demo_refuses_sizes_that_cannot_share_the_shards(args):
    result = run("demo", *args)
    assert result.exit_code == 2
    assert args[0] in result.output and ("3" in result.output or "one" in result.output)


def test_a_file_that_cannot_be_written_is_told(monkeypatch, tmp_path):
    """One that is read-only before any work is done; a full disk in one line, too."""
    with pytest.raises(ConfigError, match="--json /dev/full: No space left on device; free space, or name another"):
        write_json(Path("/dev/full"), {})
    (file := tmp_path / "kept.json").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # for root no file is read-only
    result = run("memory", "--json", str(file))
    assert result.exit_code == 2 and len(result.output.splitlines()) == 1 and "cannot be written" in result.output


@pytest.mark.parametrize(
    ("command", "column"),
    [("simulate --tokens 16", "exposed"), ("explain --shape 128x64x8x2 --ep 1 --tokens 16", "differs"),
     ("memory --layers 2", "together")],
)  # fmt: skip
def test_a_narrow_terminal_cuts_off_no_number(command, column):
    result = CliRunner().invoke(app, command.split(), env={"COLUMNS": "40", "NO_COLOR": "1", "TERM": "dumb"})
    assert result.exit_code == 0 and "\u2026" not in result.output and column in result.output


def test_explain_says_when_nothing_matters():
    """Few tokens: the host limits the call under every Schedule."""
    result = run("explain", "--shape", "128x64x8x2", "--ep", "1", "--tokens", "16")
    assert "no dimension changes the time" in result.output and "Matters most" not in result.output


@pytest.mark.parametrize("command", ["demo", "trace"])
def test_a_folder_that_cannot_be_written_is_refused_before_the_work(command, tmp_path):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "folder", "/proc/uniep"):
        result = run(command, "--out", str(out))
        assert result.exit_code == 2 and len(result.output.splitlines()) == 1
        assert f"--out {out}" in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize(("command", "status"), [("doctor", 1), ("verify", 2), ("demo", 2)])
def test_a_backend_that_cannot_run_is_said_once(command, status, monkeypatch, tmp_path):
    monkeypatch.setenv("UNIEP_BACKEND", "hopper")
    monkeypatch.chdir(tmp_path)
    result = run(command)
    assert result.exit_code == status
    words = " ".join(re.sub("[│\n]", " ", result.output).split())
    assert words.count("no CUDA device; unset UNIEP_BACKEND") == 1


def test_version():
    assert run("--version").output == f"uniep {uniep.__version__}\n"


def test_schedules_are_those_that_the_backend_knows(monkeypatch, one_rank):
    again = ["serial/natural", "serial/natural/again/recomputed"]
    assert [s.name for s in schedules("nccl")] == again
    expected = [again[0], "fused/local-first", "fused/local-first/by expert/again/recomputed"]
    assert [s.name for s in schedules("cpu")] == [expected[0], "serial/local-first", "fused/natural", *expected[1:]]
    cfg = uniep.MoEConfig(hidden=256, ffn=128, num_experts=8, top_k=2, max_tokens_per_rank=1024)
    for backend in ("hopper", "cpu", "nccl"):
        names = [s.name for s in schedules(backend)]
        assert len(set(names)) == len(names)
        for ep in (1, 2, 4):
            assert not [reasons for s in schedules(backend) if (reasons := is_valid(s, cfg, ep, backend))]
    found = {d.name: {d.of(s) for s in schedules("hopper")} for d in DIMENSIONS}
    for name in ("transfer", "send_order", "preactivation", "received", "operand"):
        assert found[name] == {*DIMENSION[name].domain}, name
    ways = [resolve(cfg, 2, 512, s) for s in schedules("hopper")]
    assert max(way.waves for way in ways) == max(way.gate_up_parts for way in ways) == 2
    monkeypatch.setenv("UNIEP_BACKEND", "nccl")
    result = run("verify", *SMALL, "--ep", "1")
    assert result.exit_code == 0 and "under each schedule above, backend nccl" in result.output


def test_verify_judges_what_is_no_number(one_rank, monkeypatch):
    """A gradient that nobody wrote is not accurate, wherever it stands in the table."""
    run_layer = VerifyProblem.run

    def broken(self, workspace):
        results = run_layer(self, workspace)
        results.tensors["dw13"].fill_(float("nan"))
        return results

    monkeypatch.setattr(VerifyProblem, "run", broken)
    result = run("verify", *SMALL, "--ep", "1")
    assert result.exit_code == 1 and "NOT accurate" in result.output


@pytest.mark.parametrize(
    "few",
    ["--tokens 1 --top-k 1 --experts 2 --hidden 8 --ffn 8 --seed 29",  # no slot in use
     "--hidden 128 --ffn 64 --experts 8 --top-k 1 --tokens 2 --dtype fp16 --weight-at activation --seed 462848"],
)  # fmt: skip
def test_verify_does_not_judge_luck(one_rank, few):
    """The error of two values is not what a dtype's error is."""
    result = run("verify", *few.split(), "--ep", "1")
    assert result.exit_code == 0 and "NOT accurate" not in result.output and "too few values" in result.output


def test_verify_judges_narrow_shapes_by_products_of_their_kind(one_rank, monkeypatch):
    """PyTorch's product of one column is more exact than its others, and than uniep's; an error of ours still shows."""
    shape = ("--hidden", "200", "--ffn", "1", "--experts", "8", "--top-k", "1", "--tokens", "143")
    narrow = (*shape, "--dtype", "fp32", "--weight-at", "activation")
    result = run("verify", *narrow, "--ep", "1")
    assert result.exit_code == 0, result.output
    right = uniep.moe
    for error in (1e-6, 1e-5):
        monkeypatch.setattr(uniep, "moe", lambda *args, e=error, **kwargs: right(*args, **kwargs) * (1 + e))
        result = run("verify", *narrow, "--ep", "1")
        assert result.exit_code == 1 and "NOT accurate" in result.output


def test_another_order_is_the_same_problem():
    cfg = uniep.MoEConfig(hidden=70, ffn=5, num_experts=3, top_k=2, max_tokens_per_rank=9, dtype=torch.float32)
    problem = VerifyProblem(cfg, 9, 1, 0)
    exact = problem.composition(torch.float64)
    for number in range(3):
        other = problem.in_another_order(number).composition(torch.float64)
        for name, value in exact.items():
            torch.testing.assert_close(other[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_bench_needs_a_gpu_or_to_be_told(monkeypatch):
    result = run("bench")
    assert result.exit_code == 2 and "--device cpu --dtype fp32 --shape 128x128x8x2 --tokens 128" in result.output


RANK = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}


@pytest.mark.parametrize("command", ["verify", "demo", "trace", "bench"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, "MASTER_PORT is not set"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"RANK": "x"}, "RANK is 'x'; it must be a number from 0 to 0"),
        ({"RANK": "1"}, "RANK is '1'; it must be a number from 0 to 0"),
        ({"RANK": ""}, "RANK is ''"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE is '999"),
        ({"MASTER_PORT": "-1"}, "MASTER_PORT is '-1'"),
        ({"LOCAL_RANK": "3"}, "LOCAL_RANK is '3'"),
        ({"MASTER_ADDR": "203.0.113.1.invalid"}, "rank 0 of 1 cannot meet the others at 203.0.113.1.invalid:29511"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_half_an_environment_of_torchrun(monkeypatch, tmp_path, command, change, words):
    if "meet" in words and command != "verify":
        return  # bench has its own rendezvous, and the others' is verify's
    monkeypatch.setenv("UNIEP_TIMEOUT_S", "2")
    monkeypatch.chdir(tmp_path)
    for name, value in {**RANK, **change}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    result = run(command, *(["--device", "cpu"] if command == "bench" else ["--ep", "1"]))
    assert result.exit_code == 2 and len(result.output.splitlines()) == 1, result.output
    assert words in result.output and "unset" in result.output


def test_a_lone_variable_starts_ranks_as_usual(monkeypatch):
    monkeypatch.setenv("RANK", "x")
    assert not launch.under_torchrun()


def test_verify_says_what_it_could_not_compare(one_rank):
    result = run("verify", *SMALL, "--ep", "1,2")
    assert result.exit_code == 0
    assert "not compared: EP 2; this run has only 1 rank\n" in result.output


def test_verify_does_not_judge_the_error_of_few_values(one_rank):
    sizes = ["--hidden", "7", "--ffn", "5", "--experts", "2", "--top-k", "1", "--ep", "1"]
    result = run("verify", *sizes, "--tokens", "1")
    assert result.exit_code == 0 and "accurate: no error" not in result.output and "0.00 times" not in result.output
    assert result.output.count("too few values to judge the error of y, dx, dweights, dw13, dw2") == 2
    result = run("verify", *sizes, "--tokens", "30", "--dtype", "fp32")
    assert "accurate: no error is over" in result.output and "too few values to judge the error of dweights" in (
        result.output
    )


def test_verify_needs_memory(one_rank):
    result = run("verify", *SMALL, "--hidden", str(2**31 - 1), "--tokens", str(2**20))
    assert result.exit_code == 2 and len(result.output.splitlines()) == 1
    assert "this shape needs more memory than there is" in result.output


def test_verify_with_real_processes(tmp_path):
    options = [*SMALL, "--ep", "1,2", "--weight-at", "activation", "--activation", "geglu"]
    result = run_process("verify", *options, "--json", str(tmp_path / "verify.json"))
    assert result.returncode == 0, result.stdout + result.stderr
    pasted = result.stdout.split("For an issue:\n\n")[1].splitlines()[:4]
    assert all(line.startswith("    ") for line in pasted) and pasted[0].startswith("    $ uniep verify --hidden 64")
    assert "EP 1, 2, backend cpu: all bits equal; largest error" in pasted[2] and torch.__version__ in pasted[3]
    document = json.loads((tmp_path / "verify.json").read_text())
    assert document["differ"] == [] and document["ep"] == [1, 2] and document["errors"]["dw13"]["judged"]
    assert result.stdout.count("fused/local-first") == 4 and "✗" not in result.stdout
    assert "identical: every bit at EP 1, 2" in result.stdout and "accurate: no error is over" in result.stdout


def test_the_launcher_names_a_killed_rank_and_leaves_no_files(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    kill = "import os, signal, time; time.sleep(9 * (os.environ['RANK'] == '0')); os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(typer.Exit) as stopped:
        launch.torchrun(2, ["--no-python", sys.executable, "-c", kill])
    assert stopped.value.exit_code == 1
    assert capfd.readouterr().err.splitlines() == ["rank 1 died by signal 9 (SIGKILL)"]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_interrupted_in_one_line(tmp_path):
    command = [sys.executable, "-m", "uniep", "demo", "--steps", "9999", "--out", str(tmp_path)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None and process.stdout.readline()  # training begins
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and err.splitlines() == ["interrupted"]


@pytest.mark.parametrize("broken", ["a bit", "accuracy"])
def test_verify_fails_on_a_wrong_bit_and_on_a_large_error(one_rank, monkeypatch, broken):
    right = uniep.moe

    def wrong(*args, workspace, **options):
        y = right(*args, workspace=workspace, **options)
        if broken == "accuracy":
            return y * 1.05
        if workspace.backend.schedule.overlap == "fused":
            y = y.clone()
            y.data[0, 0] = torch.nextafter(y.data[0, 0], torch.tensor(torch.inf, dtype=y.dtype))
        return y

    assert run("verify", *SMALL, "--ep", "1", "--dtype", "fp32").exit_code == 0
    monkeypatch.setattr(uniep, "moe", wrong)
    result = run("verify", *SMALL, "--ep", "1", "--dtype", "fp32")
    assert result.exit_code == 1
    assert ("✗ 1 of 1" in result.output) == ("NOT identical" in result.output) == (broken == "a bit")
    assert ("NOT accurate" in result.output) == (broken == "accuracy")


@pytest.mark.slow
def test_demo_with_real_processes(tmp_path):
    out = ("--out", str(tmp_path), "--json", str(tmp_path / "demo.json"))
    result = run_process("demo", "--steps", "2", "--proof-ep", "1,2", "--proof-steps", "1", *out, timeout=170)
    assert json.loads((tmp_path / "demo.json").read_text())["identical"]
    assert result.returncode == 0, result.stdout + result.stderr
    assert "identical" in result.stdout and "✗" not in result.stdout
    last = "proof 10 of 10: EP=2 fused/local-first/by expert"
    assert last in result.stdout, "without a terminal, a line for each run"
    saved, resumed = re.findall(r"EP=\d (?:saved, went on|resumed) after step 1: (.*)", result.stdout)
    assert saved == resumed and "1 x 2  default" in result.stdout
    for name in ("loss.png", "timeline.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_lora_refuses_ranks_before_it_measures(monkeypatch):
    """On hopper; its remedy is an option of the command."""
    measured = []
    monkeypatch.setattr(launch, "choose_backend", lambda given, device: "hopper" if given == "auto" else given)
    monkeypatch.setattr(launch, "run_again", lambda count: measured.append(count) or exit(0))
    refused = run("lora", *SMALL, "--rank", "8,12")
    assert refused.exit_code == 2 and not measured
    assert "r is 12;" in refused.output and "use one of these, or --backend nccl" in refused.output
    run("lora", *SMALL, "--rank", "8,12", "--backend", "nccl")
    assert measured == [2]


@pytest.mark.slow
def test_lora_with_real_processes():
    result = run_process("lora", *SMALL, "--rank", "8", "--steps", "1", "--backend", "nccl")
    assert result.returncode == 0, result.stdout + result.stderr
    rows = re.findall(r"(whole experts|LoRA, r = 8) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)", result.stdout)
    assert [row[0] for row in rows] == ["whole experts", "LoRA, r = 8"]
    (_, whole, _, gradients, states), (_, factors, _, few, fewer) = rows
    assert float(whole) == pytest.approx(4 * 3 * 64 * 64 / 1e6, abs=0.01)
    assert float(factors) == pytest.approx(4 * 8 * (64 + 128 + 64 + 64) / 1e6, abs=0.01)
    assert float(few) < float(gradients) and float(fewer) < float(states)
    refused = run("lora", "--rank", "0")
    assert refused.exit_code == 2 and "--rank" in refused.output


@pytest.mark.slow
def test_trace_with_real_processes(tmp_path):
    schedule = "tile_order=critical-path, activation=separate, vector_workers=2"
    result = run_process("trace", *SMALL, "--out", str(tmp_path), "--schedule", schedule, "--predict")
    assert result.returncode == 0, result.stdout + result.stderr
    for phase in ("forward", "backward", "forward, predicted", "backward, predicted"):
        for worker in ("matrix", "vector"):
            assert re.search(rf"{phase} +{worker}( +[\d.]+%){{4}}", result.stdout)
    document = json.loads((tmp_path / "trace.json").read_text())
    assert "critical-path" in document["otherData"]["schedule"]
    events = [e for e in document["traceEvents"] if e["ph"] == "X"]
    assert {e["pid"] for e in events} == {0, 1}
    assert {"push", "gate_up", "activation", "down", "combine", "down_grad", "gate_up_wgrad"} <= {
        e["name"] for e in events
    }
    assert "<canvas" in (tmp_path / "timeline.html").read_text()


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ("tile_order=best", "tile_order is 'best'; use 'natural', 'local-first'"),
        ("matrix_workers=0", "matrix_workers is 0; it must be at least 1"),
        ("matrix_workers=two", "'matrix_workers=two' is not FIELD=VALUE with a number"),
        ("gate_up=3", "has no field 'gate_up'; did you mean gate_up.rows or gate_up.columns or"),
        ("tile_ordr=natural", "did you mean tile_order?"),
        ("foo=3", "'foo=3' is not FIELD=VALUE: Schedule has no field 'foo'; docs/schedule.md has all, for example"),
        ("vector_workers=1000000", "vector_workers is 1000000; it must be at most 1024"),
        ("overlap", "overlap is ''; use 'serial'"),
        ("overlap=pipelined", "Schedule.overlap is 'pipelined', but backend 'cpu' knows only 'serial' and 'fused'"),
    ],
)
def test_trace_refuses_schedules_that_cannot_run(one_rank, tmp_path, schedule, words):
    result = run("trace", *SMALL, "--ep", "1", "--out", str(tmp_path), "--schedule", schedule)
    assert result.exit_code == 2 and words in " ".join(re.sub("[│\n]", " ", result.output).split())
    assert not list(tmp_path.iterdir()) and len(result.output) < 400


# --- evidence ---


def test_digest_sees_every_bit():
    zero = torch.zeros(2, 2)
    others = [-zero, zero.bfloat16(), zero.view(4), torch.full((2, 2), 1e-45)]
    assert digest(zero) == digest(torch.zeros(4, 2)[::2])
    assert len({digest(t) for t in (zero, *others)}) == 5


def test_differences_name_the_part():
    reference = {("y", "shard 0"): "a", ("y", "shard 1"): "b"}
    assert differences(dict(reference), reference) == []
    assert differences({("y", "shard 0"): "a", ("y", "shard 1"): "x"}, reference) == [("y", "shard 1")]
    assert differences({("y", "shard 0"): "a"}, reference) == [("y", "shard 1")]
    assert differences({**reference, ("dx", "shard 0"): "c"}, reference) == [("dx", "shard 0")]


def test_ranks_that_disagree_are_never_equal_to_the_reference():
    reference = {("loss", "step 0"): "a"}
    merged = merge([reference, {("loss", "step 0"): "b"}, reference])
    assert differences(merged, reference) == [("loss", "step 0")]


def test_bit_table_remembers_what_differs():
    table = BitTable("title", ["y"])
    table.add(1, "serial/natural", {("y", "shard 0"): "a"})
    table.add(2, "fused/natural", {("y", "shard 0"): "a"})
    assert not table.wrong
    table.add(4, "fused/natural", {("y", "shard 0"): "b"})
    assert table.wrong == ["EP=4 fused/natural: y, shard 0"]


@pytest.mark.parametrize(("quantities", "width"), [(proof.QUANTITIES, 80), (VERIFIED, 60)])
def test_a_narrow_terminal_shows_every_header(quantities, width):
    table = BitTable("title", quantities)
    for schedule in schedules("cpu"):
        table.add(1, schedule.name, {(q, f"part {i}"): "a" for q in quantities for i in range(96)})
    output = io.StringIO()
    table.print(Console(file=output, width=width))
    assert "…" not in output.getvalue() and all(word in output.getvalue() for q in quantities for word in q.split())
    assert output.getvalue().count("96") == len(quantities) * len(schedules("cpu"))


# --- the demo's model ---


def test_twins_share_memory_but_not_dense_gradients(trainer):
    first, second = trainer.twins[:2]
    for name, parameter in trainer.model.named_parameters():
        one, two = first.get_parameter(name), second.get_parameter(name)
        assert one.data_ptr() == two.data_ptr() == parameter.data_ptr()
        assert (one is two) == (".experts." in name)
    before = first.head.weight.clone()
    trainer.step(batch())
    assert not torch.equal(first.head.weight, before)


def test_step_computes_the_gradient_of_the_global_mean_loss(trainer):
    """Shard by shard equals one pass over the whole batch, up to rounding."""
    tokens = batch()
    whole = of_shard(trainer.model)
    logits, imbalance = model.forward([whole] * model.NUM_SHARDS, [b[:, :-1] for b in tokens])
    parts = model.losses(logits, [b[:, 1:] for b in tokens])
    (sum(parts) + model.BALANCE / model.NUM_SHARDS * sum(imbalance)).backward()
    expected = {n: p.grad.clone() for n, p in whole.named_parameters()}
    loss = trainer.step(tokens)
    torch.testing.assert_close(loss, sum(parts).detach())
    for name, parameter in trainer.model.named_parameters():
        error = float((parameter.grad - expected[name]).norm() / expected[name].norm())
        assert error < 1e-4, f"{name}: relative error {error}"


def test_training_lowers_the_loss(trainer):
    losses = [float(trainer.step(batch())) for _ in range(12)]
    assert losses[-1] < 0.7 * losses[0]
    assert float(trainer.evaluate(batch())) < losses[0]


def test_recording_takes_one_layer_both_ways(trainer, tmp_path):
    with recording(trainer.experts_of(0)) as spans:
        trainer.step(batch())
    ops = {phase: {s.op for s in spans if s.phase == phase} for phase in ("forward", "backward")}
    assert ops["forward"] == {"gate_up", "down", "combine"}
    assert {"down_grad", "gate_up_grad", "gate_up_wgrad", "down_wgrad", "combine"} <= ops["backward"]
    count = len(spans)
    trainer.step(batch())
    assert len(spans) == count, "hooks are gone"
    assert {kind_of(dataclasses.replace(spans[0], op="push", phase=phase)) for phase in ops} == {"push", "push dO"}
    draw_timeline(spans, "note", tmp_path / "timeline.png")
    draw_loss([5.0, 4.0, 3.0], 3.5, "note", tmp_path / "loss.png")
    assert (tmp_path / "timeline.png").stat().st_size > 10_000 < (tmp_path / "loss.png").stat().st_size


def test_text_is_a_function_of_the_step():
    text = Text()
    assert text.train.numel() > 2_000_000 and text.held_out.numel() > 50_000
    first, again, other = text.batch(3, 4, 2, 32), text.batch(3, 4, 2, 32), text.batch(4, 4, 2, 32)
    assert [tuple(b.shape) for b in first] == [(2, 33)] * 4
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])

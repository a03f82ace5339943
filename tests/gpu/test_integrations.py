"""Frameworks on GPUs: `pytest tests/gpu/test_integrations.py` on two Hopper cards or more; what is missing is skipped.

Each check is one run of tests/gpu/integrations.py, each example one of examples/, on two GPUs.
"""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available() or torch.cuda.device_count() < 2 or torch.cuda.get_device_capability(0)[0] != 9:
    pytest.skip("needs two Hopper GPUs", allow_module_level=True)

ROOT = Path(__file__).parents[2]
NEEDED = {"hf": ("transformers", "5.23"), "plain": ("torch", "2.11"), "megatron": ("megatron-core", "0.19")}
NEEDED |= {"torchtitan": ("torchtitan", "0.3"), "peft": ("peft", "0.21")}
EXAMPLES = {"hf": "hf_train.py", "plain": "fsdp2_train.py", "megatron": "megatron_train.py"}
EXAMPLES["torchtitan"] = "torchtitan_train.py"


def run(*arguments):
    """Both ranks' output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *arguments]
    paths = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "4"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, cwd=ROOT)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return done.stdout


def need(name):
    package, version = NEEDED[name]
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    parts, wanted = ([int(p) for p in text.split(".")[:2]] for text in (found, version))
    if parts < wanted:
        pytest.skip(f"{package} is {found}, older than {version}")
    if name == "torchtitan" and torch.__version__ < "2.13":
        pytest.skip(f"torchtitan's FSDP2 needs PyTorch 2.13; this is {torch.__version__}")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NEEDED)
def test_framework(name):
    need(name)
    assert run("tests/gpu/integrations.py", name).count("is right") == 2


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name):
    """The loss falls."""
    need(name)
    output = run(f"examples/{EXAMPLES[name]}")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert losses[-1] < 0.75 * losses[0], output

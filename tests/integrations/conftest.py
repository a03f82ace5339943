"""Processes that the files of this folder share, and which of its tests `make test` runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(items):
    """Frameworks take most of the suite's time: of this folder, only what is marked `smoke` is not slow."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("smoke") is None:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module")
def frameworks():
    """Four processes for one framework, which is told there what it does not ask: that the device is the CPU."""
    from pool import Pool

    made = Pool(4, keep_groups=True)
    yield made
    made.close()


@pytest.fixture
def pool(frameworks):
    """As above: DTensor remembers groups by the shape of their mesh, so that none may be destroyed."""
    return frameworks


@pytest.fixture
def losses_of(tmp_path):
    """Trains an example, which prints `told`, with 2 processes, and goes on with one from its checkpoint, in
    tmp_path/checkpoint: the losses before, after and later."""

    def losses(example, told):
        path, folder = Path(__file__).parents[2] / "examples" / example, str(tmp_path / "checkpoint")
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        found = []
        for ranks, arguments in ((2, ["--steps", "20", "--save"]), (1, ["--steps", "0", "--load"])):
            run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            command = [*run, str(path), "--layers", "1", *arguments, folder]
            done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
            assert done.returncode == 0, done.stderr
            assert told.format(ranks=ranks) in done.stdout
            found += [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
        return found

    return losses

"""Runs the interpreted test files, each in a process that interprets kernels; see conftest.py."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted({path.name for path in HERE.glob("test_*.py")} - {"test_interpreted.py", "test_lint.py"})
TIMEOUT_S = 1800


@pytest.fixture(scope="module")
def runs():
    """Two files at a time, those that two ranks run first."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}

    def run(name: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "--timeout",
            str(TIMEOUT_S),
            str(HERE / name),
        ]
        return subprocess.run(
            command, env=environment, cwd=HERE.parents[1], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=TIMEOUT_S,
        )  # fmt: skip

    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(run, name) for name in sorted(FILES, key=lambda name: "fused" not in name)}


@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("name", FILES)
def test_interpreted(runs, name):
    done = runs[name].result()
    assert done.returncode == 0, done.stdout

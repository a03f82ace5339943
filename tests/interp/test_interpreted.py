"""Runs the interpreted test files, each in a process that interprets kernels; see conftest.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted({path.name for path in HERE.glob("test_*.py")} - {"test_interpreted.py", "test_lint.py"})
TIMEOUT_S = 500


@pytest.fixture(scope="module")
def runs():
    """All files at once, two cores at a time being the most that they need."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    started = {
        name: subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(HERE / name)],
            env=environment,
            cwd=HERE.parents[1],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in FILES
    }
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("name", FILES)
def test_interpreted(runs, name):
    output, _ = runs[name].communicate(timeout=TIMEOUT_S)
    assert runs[name].returncode == 0, output

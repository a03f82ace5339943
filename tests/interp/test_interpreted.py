"""Runs the interpreted test files, each in a process that interprets kernels; see conftest.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted({path.name for path in HERE.glob("test_*.py")} - {"test_interpreted.py", "test_lint.py"})
SLOW = {
    "test_backend_failures.py", "test_calls.py", "test_emulate.py", "test_fused.py", "test_fused_groups.py",
    "test_fused_lora.py", "test_fused_mega.py", "test_fused_parts.py", "test_fused_pull.py", "test_local_experts.py",
    "test_mega_lists.py", "test_own_operators.py",
}  # fmt: skip
"""Of files in which two ranks run, `make test` runs test_fused_pairs.py, which has every overlap."""
TIMEOUT_S = 600


@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in FILES]
)
def test_interpreted(name):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--timeout={TIMEOUT_S}", str(HERE / name)]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=HERE.parents[1], stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout

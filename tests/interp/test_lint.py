"""Every kernel that ships compiles for Hopper without spills and the like, with each Triton that users have.

The other Triton than the installed one lies in <prefix>/triton36, where `make test` puts it.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "lint.py"
OTHER = Path(sys.prefix) / "triton36"
TRITONS = {"installed": None, "3.6": OTHER}
ALWAYS = {  # kernels that any forward and backward over several ranks launches
    "exchange_kernel", "histogram_kernel", "scan_kernel", "tiles_kernel", "place_kernel", "gate_up_kernel",
    "product_kernel", "gathered_product_kernel", "row_addresses_kernel", "combine_kernel", "activation_gradient_kernel",
    "weight_gradient_kernel", "expand_kernel",
    "dweights_kernel", "push_tokens_kernel", "push_rows_kernel", "parts_kernel", "group_sum_kernel",
    "return_order_kernel", "counted_product_kernel", "claimed_sum_kernel", "list_kernel", "forward_kernel",
    "backward_kernel",
}  # fmt: skip
PRODUCTS = {
    "gate_up_kernel", "product_kernel", "gathered_product_kernel", "weight_gradient_kernel", "counted_product_kernel",
    "forward_kernel", "backward_kernel",
}  # fmt: skip
TIMEOUT_S = 1800


@pytest.fixture(scope="module")
def runs():
    """Both at once."""

    def run(folder: Path | None) -> subprocess.CompletedProcess[str]:
        path = [str(folder)] if folder else []
        if inherited := os.environ.get("PYTHONPATH"):
            path.append(inherited)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(SCRIPT)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)

    with ThreadPoolExecutor(2) as pool:
        there = {name: folder for name, folder in TRITONS.items() if folder is None or folder.is_dir()}
        yield {name: pool.submit(run, folder) for name, folder in there.items()}


@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("name", TRITONS)
def test_kernels_compile_well(runs, name):
    if name not in runs:
        pytest.skip(f"{OTHER} does not exist; `make test` installs Triton 3.6 there")
    done = runs[name].result()
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    if name != "installed":
        assert {row["triton"].rpartition(".")[0] for row in rows} == {name}
    assert {row["kernel"] for row in rows} >= ALWAYS
    assert all(row["dots"] for row in rows if row["kernel"] in PRODUCTS)
    # Loads are under way while it multiplies: more than one stage of 48 KiB, and 32 KiB for results.
    assert all(row["shared_bytes"] > 150_000 for row in rows if row["kernel"] == "counted_product_kernel")
    bad = [f"{row['kernel']} ({row['case']}): {'; '.join(row['complaints'])}" for row in rows if row["complaints"]]
    assert not bad, "\n".join(bad)

"""Every kernel that ships compiles for Hopper without spills and the like, with each Triton that users have.

The other Triton than the installed one lies in <prefix>/triton36, where `make test-all` puts it.
"""

import json
import os
import subprocess
import sys
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
    "backward_kernel", "row_operator_kernel",
}  # fmt: skip
SOMETIMES = {  # kernels that tokens which are fetched, factors, biases, blocks of ranks, and routers launch
    "publish_kernel", "shrink_kernel", "bias_gradient_kernel", "block_gradient_kernel", "row_products_kernel",
    "route_kernel", "losses_kernel", "d_logits_kernel",
}  # fmt: skip
PRODUCTS = {
    "gate_up_kernel", "product_kernel", "gathered_product_kernel", "weight_gradient_kernel", "counted_product_kernel",
    "block_gradient_kernel", "forward_kernel", "backward_kernel",
}  # fmt: skip
TIMEOUT_S = 1800  # it takes 550 on a good core


@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("installed", "few"),
        pytest.param("installed", "others", marks=pytest.mark.slow),
        pytest.param("3.6", "few", marks=pytest.mark.slow),
        pytest.param("3.6", "others", marks=pytest.mark.slow),
    ],
)
def test_kernels_compile_well(name, part):
    folder = TRITONS[name]
    if folder and not folder.is_dir():
        pytest.skip(f"{OTHER} does not exist; `make test-all` installs Triton 3.6 there")
    path = [str(folder)] if folder else []
    if inherited := os.environ.get("PYTHONPATH"):
        path.append(inherited)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--part", part], env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    if folder:
        assert {row["triton"].rpartition(".")[0] for row in rows} == {name}
    assert {row["kernel"] for row in rows} >= (ALWAYS if part == "few" else SOMETIMES)
    assert all(row["dots"] for row in rows if row["kernel"] in PRODUCTS)
    products = [row for row in rows if row["kernel"] in PRODUCTS]
    assert all(row["shared_bytes"] <= row["most_shared"] for row in products)
    assert any(row["shared_bytes"] == row["most_shared"] for row in products), "the formula has no slack to hide in"
    # Loads are under way while it multiplies: more than one stage of 48 KiB, and 32 KiB for results.
    assert all(row["shared_bytes"] > 150_000 for row in rows if row["kernel"] == "counted_product_kernel")
    bad = [f"{row['kernel']} ({row['case']}): {'; '.join(row['complaints'])}" for row in rows if row["complaints"]]
    assert not bad, "\n".join(bad)

"""Fixtures shared by all tests; the last lines of a run say, per framework, its version and what ran."""

import importlib.metadata
import os
import sys
from pathlib import Path

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no compiler processes beside each rank
os.environ["UNIEP_TUNE"] = "off"  # tables of whoever runs the tests decide nothing
torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parent / "dist"))

FRAMEWORKS = {
    "test_hf.py": "transformers",
    "test_megatron.py": "megatron-core",
    "test_peft.py": "peft",
    "test_torch.py": "torch",
    "test_torchtitan.py": "torchtitan",
}
"""Test file -> distribution it is about."""


@pytest.fixture(scope="session")
def pool():
    """Four processes for the whole session; see tests/dist/pool.py."""
    from pool import Pool

    made = Pool(4)
    yield made
    made.close()


def pytest_collection_modifyitems(items):
    """What takes a minute comes first, so that no worker is left alone with it."""
    items.sort(key=lambda item: item.path.name not in ("test_lint.py", "test_interpreted.py"))


def pytest_sessionfinish(session, exitstatus):
    """Nothing but missing frameworks is no failure."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and reporter and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.OK


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter):
    def reports_of(file, outcome):
        reports = (r for r in terminalreporter.stats.get(outcome, []) if r.when in (None, "call", "setup", "collect"))
        return [r for r in reports if f"integrations/{file}" in r.nodeid]

    found = {
        file: {outcome: reports_of(file, outcome) for outcome in ("passed", "failed", "error", "skipped")}
        for file in FRAMEWORKS
    }
    if not any(reports for of_file in found.values() for reports in of_file.values()):
        return
    terminalreporter.section("integrations")
    for file, package in FRAMEWORKS.items():
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            module = sys.modules.get(package.replace("-", "."))  # a checkout on PYTHONPATH
            version = getattr(module, "__version__", "not installed")
        ran = ", ".join(f"{len(of)} {outcome}" for outcome, of in found[file].items() if of) or "nothing ran"
        skipped = found[file]["skipped"]
        reasons = {r.longrepr[2].removeprefix("Skipped: ") for r in skipped if isinstance(r.longrepr, (tuple, list))}
        terminalreporter.write_line(
            f"{package} {version}: {ran}" + "".join(f"; {reason}" for reason in sorted(reasons))
        )

"""The last lines of a run say, per framework, its version and what ran."""

import importlib.metadata
import sys
from pathlib import Path

import pytest

FRAMEWORKS = {
    "test_hf.py": "transformers",
    "test_megatron.py": "megatron-core",
    "test_torch.py": "torch",
    "test_torchtitan.py": "torchtitan",
}
"""Test file -> distribution it is about."""


@pytest.fixture(scope="module")
def frameworks():
    """Four processes for one framework, which is told there what it does not ask: that the device is the CPU."""
    from pool import Pool

    made = Pool(4)
    yield made
    made.close()


def pytest_sessionfinish(session, exitstatus):
    """Nothing but missing frameworks is no failure."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and reporter and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.OK


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter):
    terminalreporter.section("integrations")
    for file, package in FRAMEWORKS.items():
        if not (Path(__file__).parent / file).exists():
            continue
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            module = sys.modules.get(package.replace("-", "."))  # a checkout on PYTHONPATH
            version = getattr(module, "__version__", "not installed")
        counts = {}
        for outcome in ("passed", "failed", "error", "skipped"):
            reports = terminalreporter.stats.get(outcome, [])
            counts[outcome] = [r for r in reports if file in r.nodeid and r.when in (None, "call", "setup", "collect")]
        ran = ", ".join(f"{len(found)} {outcome}" for outcome, found in counts.items() if found) or "nothing ran"
        reasons = {r.longrepr[2].removeprefix("Skipped: ") for r in counts["skipped"] if isinstance(r.longrepr, tuple)}
        terminalreporter.write_line(
            f"{package} {version}: {ran}" + "".join(f"; {reason}" for reason in sorted(reasons))
        )

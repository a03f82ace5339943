"""Processes that the files of this folder share, and which of its tests `make test` runs."""

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

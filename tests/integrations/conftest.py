"""Processes that the files of this folder share."""

import pytest


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

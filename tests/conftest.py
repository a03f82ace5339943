"""Fixtures shared by all tests."""

import os
import sys
from pathlib import Path

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["UNIEP_TUNE"] = "off"  # tables of whoever runs the tests decide nothing
torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parent / "dist"))


@pytest.fixture(scope="session")
def pool():
    """Four processes for the whole session; see tests/dist/pool.py."""
    from pool import Pool

    made = Pool(4)
    yield made
    made.close()

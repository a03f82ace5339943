"""What a recording of the Hopper backend leaves open is all that differs when the call is made again."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from uniep.launch.records import VARYING


@pytest.fixture(scope="module")
def printed():
    script = Path(__file__).parent / "recorded_calls.py"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=150, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_calls_differ_in_what_recordings_leave_open(printed):
    """A later call, with other tensors and of another layer, launches the same, in the same order, on the same streams,
    at the same places of what it is given, of its results and of its temporary memory."""
    lines = [line for line in printed if "steps" in line]
    found = [re.fullmatch(r"(.+): (\d+) steps, (\d+) patches, differing (.*)", line) for line in lines]
    assert len(found) == 66
    assert not [m[0] for m in found if m[4] != "[]"]
    assert all(int(m[2]) > 4 and int(m[3]) > len(VARYING) for m in found)
    of_default = next(m for m in found if m[1] == "default, forward")
    assert int(of_default[2]) >= 12


def test_kernels_can_be_listed_without_a_launch(printed):
    """Those of a forward and a backward, with all that their code depends on."""
    lines = [line for line in printed if "kernels listed" in line]
    found = [re.fullmatch(r".+: (\d+) kernels listed, otherwise than launched: \[\]", line) for line in lines]
    assert len(lines) == 21 and all(match and int(match[1]) >= 12 for match in found), lines


def test_calls_launch_what_their_stages_list(printed):
    """Every kernel and copy of a call is in its stages, in this order, on the stream that they say, and behind the
    stages of other streams that they say."""
    lines = [line for line in printed if "launches what" in line or ", not [" in line]
    assert len(lines) == 66
    assert not [line for line in lines if not line.endswith("launches what its stages list, too early []")]

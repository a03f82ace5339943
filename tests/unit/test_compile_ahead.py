"""Kernels compiled by children: into Triton's cache, each once; what fails is logged, and the rest goes on."""

import logging

import pytest
import torch

from uniep.errors import ConfigError
from uniep.kernels.plan import clock_kernel
from uniep.kernels.transfer import used_dweights_kernel
from uniep.launch import ahead
from uniep.launch.driver import Launch


def launches():
    """Two kernels, one of them twice, and one that Triton refuses."""
    words, floats = torch.zeros(16, dtype=torch.int64), torch.zeros(16)
    ids, status = torch.zeros(16, dtype=torch.int64), torch.zeros(16, dtype=torch.int32)
    clock = Launch(clock_kernel, (words,), {}, {"num_warps": 1})
    dweights = floats, ids, status, floats, 16
    good = Launch(used_dweights_kernel, dweights, {"BLOCK": 512}, {"num_warps": 4})
    return [clock, good, clock, Launch(used_dweights_kernel, dweights, {"BLOCK": 500}, {"num_warps": 4})]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_children_compile_what_is_missing(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    first, counts = ahead.missing(launches()), []
    assert [kernel.name for kernel in first] == ["clock_kernel", "used_dweights_kernel", "used_dweights_kernel"]
    with caplog.at_level(logging.WARNING, "uniep"):
        ahead.compile_all(first, 2, counts.append)
    assert counts == [1, 2, 3]
    assert "used_dweights_kernel was not compiled ahead" in caplog.text
    assert [kernel.constants for kernel in ahead.missing(launches())] == [{"BLOCK": 500}]
    assert list(tmp_path.glob("*/clock_kernel.cubin"))


def test_processes(monkeypatch):
    monkeypatch.setattr(ahead.os, "sched_getaffinity", lambda process: set(range(32)))
    monkeypatch.delenv("UNIEP_COMPILE_PROCESSES", raising=False)
    assert [ahead.processes_of(ranks) for ranks in (1, 2, 8, 64)] == [16, 16, 4, 1]
    monkeypatch.setenv("UNIEP_COMPILE_PROCESSES", "3")
    assert ahead.processes_of(8) == 3
    monkeypatch.setenv("UNIEP_COMPILE_PROCESSES", "many")
    with pytest.raises(ConfigError, match="'many'; it must be a number of processes"):
        ahead.processes_of(8)

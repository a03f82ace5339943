"""HyperParallel-MoE's table: fitted on the serialized columns alone, and what follows from that."""

import ast
import inspect

import pytest

from uniep.errors import ConfigError
from uniep.shapes import parse_shape
from uniep.sim import ascend, fit, load_machine
from uniep.sim.problem import Problem
from uniep.sim.strategies import STRATEGIES, simulate


@pytest.fixture(scope="module")
def machine():
    return load_machine("ascend-a3")


@pytest.fixture(scope="module")
def found(machine):
    return ascend.table(machine)


def test_the_fit_sees_the_serialized_columns_alone_and_gives_the_machine_file(machine, monkeypatch):
    """It reads one file, simulates one strategy, and imports nothing that knows of the other columns."""
    read, ran = [], set()
    column, simulate = fit.column, fit.simulate

    def recorded(name):
        read.append(name)
        return column(name)

    def spied(problem, on, program):
        ran.add(next(iter(program.operators)).name)
        return simulate(problem, on, program)

    monkeypatch.setattr(fit, "column", recorded)
    monkeypatch.setattr(fit, "simulate", spied)
    fitted = fit.fit(machine.replaced({fit.ALL_TO_ALL: 100.0, fit.RESIDUAL: 0.0}))
    assert ran == {"dispatch"}, "serialized layers begin with their all-to-all"
    assert set(read) == {"hyperparallel_serialized"}
    source = inspect.getsource(fit)
    assert "fused" not in source and '"taskflow' not in source
    modules = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
    assert not any("ascend" in (module or "") for module in modules)
    for ep in fit.SIZES:
        for key in (fit.ALL_TO_ALL, fit.RESIDUAL):
            assert machine.of(key, ep) == pytest.approx(fitted.of(key, ep), rel=2e-3)
        assert 60 <= fitted.of(fit.ALL_TO_ALL, ep) <= 196


def test_predictions_hold(found):
    missed = [c for c in ascend.checks(found) if not c.holds]
    assert not missed


def test_controls_hold(machine, found):
    missed = [c for c in ascend.controls(machine, {4: found[4]}) if not c.holds]
    assert not missed


def test_the_residual_would_show_on_the_matrix_units(machine, found):
    assert ascend.residual_on_matrix(machine, 4) > 1.08 * found[4].fused["bwd"]


def test_few_tasks_do_not_make_the_residual_longer(machine):
    """They leave vector workers idle; one task had the time of all workers, one after the other."""
    problem = Problem(parse_shape("64x32x8x2"), 4, 1, direction="bwd")
    made = simulate(problem, machine, STRATEGIES["serialized"].arrange(problem, machine))
    assert machine.of(fit.RESIDUAL, 4) * 1e3 < made.makespan_ns < machine.of(fit.RESIDUAL, 4) * 1.3e3


def test_what_cannot_be_fitted_is_told(machine):
    with pytest.raises(ConfigError, match="no all_to_all_gbps_ep4"):
        fit.fit(machine, {**fit.serialized_column(), "fwd_ep4": 1.0})


def test_a_step_gains_what_its_layer_loses():
    assert ascend.end_to_end(1.5, 0.3) == pytest.approx(1 / 0.9)

"""Simulate a layer's tasks on a machine model, from one node to a thousand, before running it.

machine: machine files.  problem, operators, kernels, strategies: what runs.  costs: from work to time.  engine:
discrete events.  rows: the results.  fit, ascend: comparison with published measurements.
"""

from uniep.sim.machine import Machine, load_machine, machines
from uniep.sim.problem import Problem
from uniep.sim.rows import row
from uniep.sim.strategies import STRATEGIES, simulate

__all__ = ["STRATEGIES", "Machine", "Problem", "load_machine", "machines", "row", "simulate"]

"""Routing: what goes where, as a pure function of the ids of all ranks."""

from uniep.routing.plan import RoutingPlan, build_plan, find_bad_id, recv_base

__all__ = ["RoutingPlan", "build_plan", "find_bad_id", "recv_base"]

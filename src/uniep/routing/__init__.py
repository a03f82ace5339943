"""Routing: what goes where, as a pure function of the ids of all ranks."""

from uniep.routing.blocks import RowBlocks, row_blocks
from uniep.routing.groups import Parts, build_parts, return_slots, token_groups
from uniep.routing.plan import RoutingPlan, build_plan, find_bad_id, recv_base

__all__ = [
    "Parts", "RoutingPlan", "RowBlocks", "build_parts", "build_plan", "find_bad_id", "recv_base", "return_slots",
    "row_blocks", "token_groups",
]  # fmt: skip

"""The layer as tile tasks with events.

site, operators, layer: how work is split.  lower: the compiler.  graph: its result.  order, scheduler: which worker
runs what, and when.  check: whether the result can run.  trace: what happened.
"""

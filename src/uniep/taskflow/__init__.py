"""The layer as tile tasks with events.

site, operators, layer: what is split how.  lower: the compiler.  graph: its result.  order, scheduler: who runs what
when.  check: whether that may run.  trace: what happened.
"""

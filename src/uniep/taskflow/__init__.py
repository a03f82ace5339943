"""The layer as tile tasks with events.

graph: the representation.  lower: the layer as tasks.  check: whether they may run.  schedule: in which order.
"""

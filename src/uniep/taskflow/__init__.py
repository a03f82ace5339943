"""The layer as tile tasks with events: graph (the IR), lower (to tasks), check (may they run), schedule (their order)."""

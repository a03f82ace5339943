"""The layer as tile tasks with events: graph (the IR), lower (layer -> graph), check (may it run), schedule (the order)."""

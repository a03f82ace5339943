"""One search space, a cost model and a tuner: which Schedule a call of a shape should have on a card.

`space` has the points, `model` says how long each takes, `search` times the best of them, `tables` keeps what was
found, `explain` says why.  See docs/tuner.md.
"""

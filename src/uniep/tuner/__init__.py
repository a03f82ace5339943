"""Search space, cost model and tables: which Schedule a call of a shape should have on a card.

`space` has the points, `model` predicts how long each takes, `uniep.trials.search` times the best of them, `tables`
stores what was found, `explain` says why.  See docs/tuner.md.
"""

"""Sweeps: the same run with other values of its fields, and which of them are best on a holdout.

`fedbilevel.sweep` (sweep.py) and the command `fedbilevel sweep` have in common: points and seeds (plan.py), the order
in which they are played, with outcomes on disk (journal.py), what came of it (outcome.py) and a picture of it
(picture.py).
"""

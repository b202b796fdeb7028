"""Run rounds: engines simulate clients or reach them elsewhere, and a loop drives an engine.

No engine depends on a particular algorithm.
"""

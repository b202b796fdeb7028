"""Checks before and beside a run: whether a hypergradient is right, and which step sizes suit a problem."""

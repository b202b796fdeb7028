"""Check whether a hypergradient is right, and which step sizes suit a problem, without or before a run."""

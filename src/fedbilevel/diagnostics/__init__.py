"""What to know before and beside a run: whether a hypergradient is right, and which step sizes a problem bears."""

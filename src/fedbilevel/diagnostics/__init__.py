"""Check a hypergradient, a method, a task or a structure before a run, and suggest step sizes for a problem."""

"""Run a client of a federation: its phases on its samples, its limits, its state and its audit."""

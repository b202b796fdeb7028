"""Run a client of a federation: its samples, its replies, its limits and its state."""

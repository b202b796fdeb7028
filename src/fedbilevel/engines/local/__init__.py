"""Simulation on this machine's devices: clients vectorised, in chunks, over a mesh of devices."""

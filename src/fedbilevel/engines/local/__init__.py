"""Simulate clients on this machine's devices: in vectorised chunks, distributed over a mesh of devices."""

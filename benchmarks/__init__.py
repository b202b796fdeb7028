"""Programs that measure speed, memory and quality.

`python -m benchmarks` lists them, and README.md says how to run them.
"""

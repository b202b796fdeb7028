"""Programs that measure; `python -m benchmarks` lists them. README.md says how they are run."""

"""Describe the machine on which numbers are measured, and measure its rate of matrix products, as a unit of speed."""

from __future__ import annotations

import os
import platform
import resource
from importlib.metadata import version

import numpy as np

from benchmarks.harness import seconds

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the contenders are processes that share a GPU


def describe() -> str:
    """Return a text with the processor, its cores, and the versions of Python and JAX. JAX is not started."""
    with open("/proc/cpuinfo") as file:
        model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "unknown CPU")
    return f"{model}, {os.cpu_count()} cores; Python {platform.python_version()}, jax {version('jax')}"


def device() -> str:
    """Return the name of JAX's first device."""
    import jax

    first = jax.devices()[0]
    return f"{first.platform} ({first.device_kind})"


def load() -> str:
    """Return the mean number of running processes over the last minute."""
    return f"{os.getloadavg()[0]:.1f}"


def peak_mb() -> float:
    """Return the peak memory so far, in MB: of JAX's device if it reports this, as GPUs do, else of this process."""
    import jax

    stats = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"] / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def gemm_rate(size: int = 1024, repeats: int = 10) -> float:
    """Return the best GFLOP/s of the float32 product of two size×size matrices.

    On a CPU the product is NumPy's, on all cores. On a GPU it is JAX's, in its default precision, with matrices that
    are eight times as wide.
    """
    import jax

    on_cpu = jax.default_backend() == "cpu"
    size = size if on_cpu else 8 * size
    a = np.random.default_rng(0).normal(size=(size, size)).astype(np.float32)
    a, product = (a, np.matmul) if on_cpu else (jax.device_put(a), jax.jit(jax.numpy.matmul))
    each = [seconds(lambda: jax.block_until_ready(product(a, a))) for _ in range(1 + repeats)]  # the first compiles
    return 2 * size**3 / min(each) / 1e9

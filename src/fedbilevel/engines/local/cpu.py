"""XLA's settings for simulating clients on a CPU. They are read once, when JAX first touches a device."""

import os
from importlib.metadata import version

from fedbilevel.core.errors import require

TESTED = "0.10."  # an unknown flag ends the process, so what was not tested is left alone


def tune_cpu(devices: int = 1) -> None:
    """Set XLA_FLAGS for this process; call it before JAX's first computation. Flags that are already set win.

    Args:
        devices: CPU devices to present, for `Local(devices=…)`. With several, each runs its products on one thread,
            and clients side by side.

    The matrix products of clients (some 64×784×200) ran 1.2 times faster in XLA's Eigen kernels than in its newer
    YNN ones, which jaxlib 0.10 takes by default; FISM's walks, small loops, ran 1.6 times faster compiled as one piece
    each, which by default is for loops over less than 1,024 bytes alone; docs/reference/benchmarks.md
    has the measurements.
    """
    require(devices >= 1, "devices", devices, "positive")
    wanted = {}
    if version("jaxlib").startswith(TESTED):
        wanted["--xla_cpu_experimental_ynn_fusion_type"] = ""
        wanted["--xla_backend_extra_options"] = "xla_cpu_small_while_loop_byte_threshold=32768"
    if devices > 1:
        wanted["--xla_force_host_platform_device_count"] = str(devices)
        wanted["--xla_cpu_multi_thread_eigen"] = "false"
    present = os.environ.get("XLA_FLAGS", "")
    added = [f"{flag}={value}" for flag, value in wanted.items() if flag not in present]
    os.environ["XLA_FLAGS"] = " ".join([*present.split(), *added])

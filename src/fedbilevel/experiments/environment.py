"""What a run depended on, apart from its spec: versions and the kind of machine. No names of hosts or people."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax

from fedbilevel import __version__

PACKAGES = ("jax", "jaxlib", "optax", "numpy", "scikit-learn")


def describe() -> dict[str, Any]:
    """Versions of Python and of the packages that decide numbers, devices and CPU count."""
    devices = jax.devices()
    return {
        "fedbilevel": __version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "system": platform.system(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "backend": jax.default_backend(),
        "devices": len(devices),
        "device_kind": devices[0].device_kind,
        "x64": bool(jax.config.read("jax_enable_x64")),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

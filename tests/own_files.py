"""Remove what users' own files leave in the process, because tests have files of one name in several folders."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.experiments.loader import FOLDER


@contextmanager
def apart() -> Iterator[None]:
    """Remove at the end what users' own files have brought into the process, as if another process had loaded them."""
    algorithms, path = dict(ALGORITHMS), list(sys.path)
    try:
        yield
    finally:
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__dict__", {}).get("__file__")
            if file and FOLDER and FOLDER[0] in Path(file).parents:
                del sys.modules[name]
        FOLDER.clear()
        sys.path[:] = path
        ALGORITHMS.clear()
        ALGORITHMS.update(algorithms)

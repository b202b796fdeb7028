"""Memory that compiling leaves behind: freed, but kept by the C library for later."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any


@cache
def _trim() -> Any:
    """The C library's malloc_trim, or None where it has none: elsewhere than on Linux with glibc."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return None


def give_back() -> None:
    """Return freed memory to the operating system, in 20 to 110 ms.

    A process compiles in many threads, and glibc keeps what each of them frees in a pool of its own: after a few runs
    with programs of their own that is several hundred megabytes, more with each pool that is opened.
    """
    if trim := _trim():
        trim(0)

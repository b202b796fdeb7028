"""The one error of this room, and the sentence for a name nobody knows."""

from collections.abc import Iterable
from difflib import get_close_matches


class DataError(ValueError):
    """Data that cannot be found, read, downloaded, partitioned or stored; the message says what to do."""


def unknown_name(field: str, got: object, allowed: Iterable[str]) -> DataError:
    """The error for a `field` that got a name outside `allowed`, with the nearest valid name."""
    names = sorted(allowed)
    near = get_close_matches(str(got), names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return DataError(f"{field} {got!r} is unknown.{hint} Allowed: {', '.join(names) or 'none'}.")

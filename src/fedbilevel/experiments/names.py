"""The names of tasks and algorithms: those of the library, and module:NAME or path/to/file.py:NAME for a user's own."""

from __future__ import annotations

from pathlib import Path


def full_name(name: str) -> str:
    """The name as a spec records it: files by their absolute path, so that a run can be resumed from anywhere."""
    place, _, attribute = name.rpartition(":")
    return f"{absolute(place)}:{attribute}" if is_file(place) else name


def label(name: str) -> str:
    """The name for people: files without their folders."""
    place, _, attribute = name.rpartition(":")
    return f"{Path(place).name}:{attribute}" if is_file(place) else name


def own_file(name: str) -> Path | None:
    """The file that a user's own task or algorithm is in, if its name says one."""
    place = code_of(name)
    return Path(place) if is_file(place) else None


def code_of(name: str) -> str:
    """The file or module with the code of a user's own task or algorithm; "" for those of the library."""
    return name.rpartition(":")[0]


def is_file(place: str) -> bool:
    """Whether that is a path rather than a module's name."""
    return place.endswith(".py") or "/" in place


def absolute(place: str) -> Path:
    """The absolute path of a file.

    Raises:
        ConfigurationError: no file can have that name.
    """
    from fedbilevel.core.errors import ConfigurationError
    from fedbilevel.wording import in_a_line

    try:
        return Path(place).expanduser().resolve()
    except (ValueError, OSError, RuntimeError) as error:  # a zero byte; a loop of links; ~ of nobody
        raise ConfigurationError(f"{place[:200]!r} is not the name of a file: {in_a_line(error)}") from error

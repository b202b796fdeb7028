"""Report errors of functions that a spec or a command calls by the field or the argument that the user has written."""

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from fedbilevel.core.errors import ConfigurationError
from fedbilevel.data import DataError

ARGUMENT = re.compile(r"\w+(?=$|[.,\[])")
"""The argument at the beginning of the path of an error; the path may go on with a place in this argument."""


@contextmanager
def data_errors_in(place: str = "") -> Iterator[None]:
    """Raise a DataError of the block as a ConfigurationError with the same fields, whose message begins with `place`.

    Args:
        place: the argument that names the data; "" if the message should begin as the message of the DataError does.
    """
    try:
        yield
    except DataError as error:
        raise ConfigurationError(
            path=error.path,
            got=error.got,
            allowed=error.allowed,
            near=error.near,
            message=str(error.args[0]),
            where=place,
        ) from error


@contextmanager
def paths_in(table: str, names: Collection[str]) -> Iterator[None]:
    """Name the fields of a spec in errors of the block that are about arguments of a function.

    An error about the argument `clients` of a task's function then names `task.clients`.

    Args:
        table: the table of the spec that has the arguments, such as "task".
        names: the names of the arguments.
    """
    try:
        yield
    except (ConfigurationError, DataError) as error:
        for mistake in error.wrong if isinstance(error, ConfigurationError) else (error,):
            argument = ARGUMENT.match(mistake.path)
            if argument is None or argument[0] not in names:
                continue
            if isinstance(mistake, ConfigurationError):
                mistake.message = _moved(mistake.message, mistake.path, table)
            else:
                mistake.args = (_moved(str(mistake.args[0]), mistake.path, table),)
            mistake.path = f"{table}.{mistake.path}"
        raise


def _moved(message: str, path: str, table: str) -> str:
    """Return a message with the table before the path, if the message begins with the path."""
    return f"{table}.{message}" if message.startswith(path) else message

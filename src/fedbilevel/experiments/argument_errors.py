"""Report errors of functions that a spec or a command calls by the field or the argument that the user has written."""

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from fedbilevel.core.errors import ConfigurationError
from fedbilevel.data import DataError

ARGUMENT = re.compile(r"\w+(?=$|[.,\[])")
"""The argument at the beginning of the path of an error; the path may go on with a place in this argument."""
OF_CLIENTS = re.compile(r"^(?:Remote)?Clients\.(?:own\['([^']+)'\]|(\w+))")
"""The path of clients' own numbers, or of another field of `Clients`, at the beginning of the path of an error."""


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
            message=str(error.args[0]).removesuffix("."),
            where=place,
        ) from error


@contextmanager
def clients_by_spec() -> Iterator[None]:
    """Report errors of the block about fields of `Clients` by the fields of [clients] in a spec.

    The error about Clients.own['local_steps'] is then about clients.local_steps.
    """
    try:
        yield
    except ConfigurationError as error:
        for mistake in error.wrong:
            mistake.path = OF_CLIENTS.sub(r"clients.\1\2", mistake.path)
        raise


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

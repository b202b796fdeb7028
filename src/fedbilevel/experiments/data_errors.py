"""Report an error about data as an error about the argument or the field of a spec that names these data."""

from collections.abc import Iterator
from contextlib import contextmanager

from fedbilevel.core.errors import ConfigurationError
from fedbilevel.data import DataError


@contextmanager
def data_errors_in(place: str = "") -> Iterator[None]:
    """Raise a DataError of the block as a ConfigurationError with the same fields, whose message begins with `place`.

    Args:
        place: the argument that names the data; "" if the message should begin with that of the DataError.
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

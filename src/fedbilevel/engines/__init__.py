"""Where the clients are, and the loop over rounds; no engine knows any particular algorithm."""

from typing import NoReturn

from fedbilevel.core.renames import no_attribute


def __getattr__(name: str) -> NoReturn:
    raise no_attribute(__name__, name)

"""Read snapshots from a page of `fedbilevel watch --serve`, for a terminal on another machine.

A request contains only the address that the user gave. Redirects are not followed, and proxies of the environment are
not used, so that the token reaches no other host. There is a time limit for each wait while connecting. After the
request, there is a time limit for the whole answer, even if it arrives byte by byte. The size of the answer is limited
too, and its content is checked.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from urllib.parse import urlsplit

from fedbilevel.core.errors import ConfigurationError, require
from fedbilevel.experiments.snapshot import Snapshot
from fedbilevel.experiments.snapshot_json import from_json
from fedbilevel.reading import CHUNK, LONGEST
from fedbilevel.wording import in_a_line, without_secrets

PATIENCE = 10.0  # the largest number of seconds without a byte from the page
WHOLE = 60.0  # the largest number of seconds for a whole answer
COPY = "copy the whole address that `fedbilevel watch --serve` printed"
KINDS = {"http": HTTPConnection, "https": HTTPSConnection}
REFUSALS = {
    403: f"its token is missing or wrong: {COPY}",
    421: f"it is not a page of a machine of this name: use an IP address of the machine, or {COPY}",
}
CLOSED = "it closed the connection, probably because it has as many readers as it allows: try again later"
NO_PAGE = f"it is no page of `fedbilevel watch --serve`: {COPY}"


class PageReader:
    """A reader of snapshots from a page of `fedbilevel watch --serve`.

    Args:
        url: the address of the page, with its token.

    Raises:
        ConfigurationError: the text is not the address of a page.
    """

    def __init__(self, url: str) -> None:
        self.shown = without_secrets(re.sub(r"\s", "%20", url))  # so that a token with a blank is hidden whole
        try:
            place = urlsplit(url)
            fits = place.scheme in KINDS and bool(place.hostname) and "@" not in place.netloc
            fits = fits and place.port != 0
        except ValueError:
            fits = False
        require(fits, "URL", self.shown, "the address of a page, such as http://127.0.0.1:8080/")
        plain = url.isascii() and url.isprintable() and " " not in url
        require(plain, "URL", self.shown, f"an address of ASCII characters without blanks: {COPY}")
        self.kind, self.host, self.port = KINDS[place.scheme], place.hostname or "", place.port
        self.path = f"{place.path.rpartition('/')[0]}/snapshot?{place.query}"

    def snapshot(self) -> Snapshot:
        """Read the snapshot that the page shows now.

        Raises:
            ConfigurationError: there is no answer, the page refuses the request, or it is not a page of `fedbilevel
                watch`.
        """
        try:
            answer, content = self._answer()
            if answer.status != 200:
                ours = answer.headers.get("Server") == "fedbilevel"
                why = REFUSALS.get(answer.status, NO_PAGE) if ours else f"it answers {answer.status}; {NO_PAGE}"
            elif len(content) > LONGEST:
                why = f"its answer is too long for a terminal: it has more than {LONGEST:,} bytes"
            else:
                return from_json(content)
        except (ConnectionResetError, BrokenPipeError):
            why = CLOSED
        except (OSError, HTTPException) as error:
            why = f"it does not answer ({in_a_line(error)})"
        except ValueError as error:
            why = f"{NO_PAGE} ({in_a_line(error)})"
        raise ConfigurationError(f"it cannot be watched: {why}", where=self.shown)

    def _answer(self) -> tuple[HTTPResponse, bytes]:
        """Return the answer and its content. Of an answer that is too long, only the beginning is read."""
        content = bytearray()
        with closing(self.kind(self.host, self.port, timeout=PATIENCE)) as connection:
            connection.connect()
            with _bounded(connection.sock):
                connection.request("GET", self.path, headers={"Connection": "close"})
                with connection.getresponse() as answer:
                    while answer.status == 200 and len(content) <= LONGEST and (part := answer.read1(CHUNK)):
                        content += part
        return answer, bytes(content)


@contextmanager
def _bounded(connection: socket.socket) -> Iterator[None]:
    """Shut a connection down if the block takes longer than `WHOLE` seconds, and raise TimeoutError.

    The shutdown ends any wait for the connection.
    """
    late = threading.Event()

    def end() -> None:
        late.set()
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(WHOLE, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, HTTPException, ValueError):
        if not late.is_set():
            raise
    finally:
        timer.cancel()
    if late.is_set():
        raise TimeoutError(f"it has sent only a part of its answer in {WHOLE:.0f} seconds")

"""Read snapshots from a page of `fedbilevel watch --serve`, for a terminal on another machine.

A request contains only the address that the user gave. Redirects are not followed, and proxies of the environment are
not used, so that the token reaches no other host. An answer is bounded in time and size, and is checked.
"""

from __future__ import annotations

import time
from http.client import HTTPException
from typing import Any
from urllib import request
from urllib.error import HTTPError
from urllib.parse import urljoin, urlsplit

from fedbilevel.core.errors import ConfigurationError, require
from fedbilevel.experiments.snapshot import Snapshot
from fedbilevel.experiments.snapshot_json import from_json
from fedbilevel.reading import CHUNK, LONGEST
from fedbilevel.wording import in_a_line, without_secrets

PATIENCE = 10.0  # seconds that a page may be silent
WHOLE = 60.0  # seconds that an answer may take
COPY = "copy the whole address that `fedbilevel watch --serve` printed"
REFUSALS = {
    403: f"its token is missing or wrong: {COPY}",
    421: f"it is not a page of a machine of this name: use an IP address of the machine, or {COPY}",
    503: "it has as many readers as it allows: try again later",
}
NO_PAGE = f"it is no page of `fedbilevel watch --serve`: {COPY}"


class Unredirected(request.HTTPRedirectHandler):
    """Follow no redirect, which then is an error."""

    def redirect_request(self, *redirect: Any) -> None:
        """Return no request for another address."""


class PageReader:
    """Read snapshots from a page.

    Args:
        url: the address of the page, with its token.

    Raises:
        ConfigurationError: the text is no address of a page.
    """

    def __init__(self, url: str) -> None:
        self.shown = without_secrets(url)
        try:
            place = urlsplit(url)
            fits = place.scheme in ("http", "https") and bool(place.hostname) and "@" not in place.netloc
            fits = fits and place.port != 0
        except ValueError:
            fits = False
        require(fits, "URL", self.shown, "the address of a page, such as http://127.0.0.1:8080/")
        self.url = urljoin(url, f"snapshot?{place.query}")
        self.opener = request.build_opener(request.ProxyHandler({}), Unredirected)

    def snapshot(self) -> Snapshot:
        """Read what the page shows now.

        Raises:
            ConfigurationError: nothing answers, the page refuses, or it is no page of `fedbilevel watch`.
        """
        try:
            return from_json(self._read())
        except HTTPError as error:
            ours = error.headers.get("Server") == "fedbilevel"
            why = REFUSALS.get(error.code, NO_PAGE) if ours else f"it answers {error.code}; {NO_PAGE}"
            error.close()
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            why = f"it does not answer ({in_a_line(reason) if isinstance(reason, Exception) else reason})"
        except ValueError as error:
            why = f"{NO_PAGE} ({in_a_line(error)})"
        raise ConfigurationError(f"{self.shown} cannot be watched: {why}")

    def _read(self) -> bytes:
        content, stop = bytearray(), time.monotonic() + WHOLE
        with self.opener.open(self.url, timeout=PATIENCE) as answer:
            while part := answer.read1(CHUNK):
                content += part
                if len(content) > LONGEST:
                    raise ValueError(f"it sends more than {LONGEST:,} bytes")
                if time.monotonic() > stop:
                    raise TimeoutError(f"it has sent only a part in {WHOLE:.0f} seconds")
        return bytes(content)

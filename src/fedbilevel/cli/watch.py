"""Define `fedbilevel watch`, which shows the progress of a run, a federation or a sweep."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from fedbilevel.cli import shared
from fedbilevel.core.errors import require

if TYPE_CHECKING:
    from fedbilevel.experiments.snapshot import Snapshot

HOST = "127.0.0.1"


def add_to(add: shared.Add) -> None:
    watch = add("watch", _watch)
    watch.add_argument(
        "place",
        metavar="FOLDER|URL",
        help="the folder of a run, of a federation's server or of a sweep, or the address that --serve has printed",
    )
    how = watch.add_mutually_exclusive_group()
    how.add_argument("--once", action="store_true", help="print the state once, as always in a pipe")
    how.add_argument(
        "--serve", nargs="?", type=_port, const=0, metavar="PORT", help="show a local web page (any free port)"
    )
    watch.add_argument("--host", metavar="ADDRESS", help=f"with --serve: the address of the page ({HOST})")


def _port(text: str) -> int:
    found = shared.count(text)
    if found > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 1 to 65535")
    return found


def _watch(options: argparse.Namespace) -> int:
    """Watch the progress of a run, a federation or a sweep.

      fedbilevel watch runs/RUN                    on the terminal, until the run has ended, or Ctrl-C
      fedbilevel watch runs/RUN --once             print the state once, as always in a pipe
      fedbilevel watch runs/SWEEP --serve 8080     as a web page at http://127.0.0.1:8080/, until Ctrl-C
      fedbilevel watch 'http://HOST:PORT/?token=…' that page on the terminal of another machine

    The command only reads. It shows rounds, the last values and the curves of all metrics, bytes and, with
    privacy, the ε that was spent. For a federation it also shows replies, delays, and absent clients with the reasons;
    for a sweep, all runs and the best so far.

    The page loads nothing from elsewhere and cannot change the run. Every user of this machine can read it. With --host
    it is at another address of this machine, and its URL has a token, without which nothing is shown. The connection is
    not encrypted. A tunnel (ssh -L 8080:127.0.0.1:8080 HOST) is encrypted, and needs no --host.

    A shell needs quotes around an address with a token. A terminal that reads a page follows no redirect and uses no
    proxy, so that the token reaches no other machine.

    exit codes: 0 the run has ended, or was shown once; that of `fedbilevel run` if it has ended with an error;
      2 wrong input, 130 Ctrl-C, 143 SIGTERM
    """
    require(options.host is None or options.serve is not None, "--host", options.host, "given with --serve")
    terminal = shared.console()
    from rich.live import Live

    from fedbilevel.experiments.snapshot import snapshots
    from fedbilevel.experiments.window import on_terminal

    found = snapshots(_reader(options.place, options.serve is None))
    snapshot = next(found)
    if options.serve is not None:
        return _serve(chain([snapshot], found), HOST if options.host is None else options.host, options.serve)
    if options.once or not terminal.is_terminal or terminal.is_dumb_terminal:
        terminal.print(on_terminal(snapshot, terminal.width))
        return _code(snapshot)
    with Live(on_terminal(snapshot, terminal.width), console=terminal, auto_refresh=False) as live:
        while not snapshot.over:
            snapshot = next(found)
            live.update(on_terminal(snapshot, terminal.width), refresh=True)
    return _code(snapshot)


def _reader(place: str, on_terminal: bool) -> Callable[[], Snapshot]:
    """Return the function that reads snapshots of a folder, or of a page.

    A page of another `fedbilevel watch` can be shown only on a terminal, and not be served again.
    """
    require(bool(place.strip()), "FOLDER", place, "a folder, or the URL that `fedbilevel watch --serve` has printed")
    if "://" not in place:
        from fedbilevel.experiments.folder_reader import FolderReader

        return FolderReader(Path(place)).snapshot
    from fedbilevel.experiments.page_reader import PageReader

    reader = PageReader(place)
    require(on_terminal, "--serve", reader.shown, "given with a folder, and not with the address of a page")
    return reader.snapshot


def _code(snapshot: Snapshot) -> int:
    return shared.OK if snapshot.error is None else shared.exit_code(snapshot.error) or 1


def _serve(found: Iterator[Snapshot], host: str, port: int) -> int:
    from fedbilevel.experiments.window_server import WindowServer

    with WindowServer(host, port) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(f"page  {server.url}", flush=True)
        try:
            server.publish(found)  # until Ctrl-C
        finally:
            server.shutdown()
    return shared.OK

"""The two apps of a federation, as Flower wants them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedbilevel.core.errors import FedbilevelError
from fedbilevel.flower.records import ACTION, content, said_in
from fedbilevel.flower.site import ClientRuntime, Site, in_words
from fedbilevel.flower.store import ContextStore
from fedbilevel.flower.wire import Answer, Ask

log = logging.getLogger("fedbilevel.client")

Config = Mapping[str, Any]
"""Flower's: names to strings, numbers and flags."""


def client_app(make: Callable[[Config, Config], Site]) -> ClientApp:
    """A ClientApp that serves the phases of its site's algorithm, by name, and nothing else.

    Args:
        make: (run configuration, node configuration) -> what this client has and does. Called once per process and
            run; a process that stays (see `fedbilevel.flower.supernode`) keeps samples and compiled programs.
    """
    keep_compiled_programs()
    app = ClientApp()
    runtimes: dict[int, tuple[Any, ClientRuntime]] = {}  # node -> the last one, and what it was made for

    @app.query(ACTION)
    def answer(message: Message, context: Context) -> Message:
        try:
            ask: Ask = said_in(Ask, message)
            wanted = context.run_id, context.run_config, context.node_config
            made, runtime = runtimes.get(context.node_id, (None, None))
            if runtime is None or made != wanted:
                runtime = ClientRuntime(make(context.run_config, context.node_config))
                runtimes[context.node_id] = wanted, runtime
            said = runtime.answer(ask, ContextStore(context.state))
        except Exception as error:
            log.warning("no answer: %s", error, exc_info=not isinstance(error, FedbilevelError))
            said = Answer(run="", round=0, exchange=0, client=-1, refused=in_words(error))
        return Message(content(said), reply_to=message)

    return app


def server_app(main: Callable[[Grid, Config], None]) -> ServerApp:
    """A ServerApp whose main is `main`(grid, run configuration), which ends in `solve(…, engine=Flower(grid=grid))`."""
    app = ServerApp()

    @app.main()
    def run(grid: Grid, context: Context) -> None:
        main(grid, context.run_config)

    return app


def keep_compiled_programs() -> None:
    """Keep compiled programs on disk: Flower's stock SuperNode starts a new process for every message."""
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR") and jax.config.values["jax_compilation_cache_dir"] is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
        jax.config.update("jax_compilation_cache_dir", str(cache / "fedbilevel" / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

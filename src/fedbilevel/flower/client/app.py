"""The ClientApp of a federation, as Flower wants it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedbilevel.core.errors import FedbilevelError
from fedbilevel.engines.disk_cache import keep_on_disk
from fedbilevel.flower.client.site import ClientRuntime, Site, in_words
from fedbilevel.flower.client.store import ContextStore
from fedbilevel.flower.wire.messages import RequestMessage, ResponseMessage
from fedbilevel.flower.wire.records import ACTION, decode, encode

log = logging.getLogger("fedbilevel.client")


def client_app(make: Callable[[Mapping[str, Any], Mapping[str, Any]], Site]) -> ClientApp:
    """A ClientApp that serves the phases of its site's algorithm, by name, and nothing else.

    Args:
        make: (run configuration, node configuration) -> what this client has and does. Called once per process and
            run; a process that stays (see `fedbilevel.flower.launch.supernode`) keeps samples and compiled programs.
    """
    keep_compiled_programs()
    app = ClientApp()
    runtimes: dict[int, tuple[Any, ClientRuntime]] = {}  # node -> the last one, and what it was made for

    @app.query(ACTION)
    def respond(message: Message, context: Context) -> Message:
        try:
            request: RequestMessage = decode(RequestMessage, message)
            wanted = context.run_id, context.run_config, context.node_config
            made, runtime = runtimes.get(context.node_id, (None, None))
            if runtime is None or made != wanted:
                runtime = ClientRuntime(make(context.run_config, context.node_config))
                runtimes[context.node_id] = wanted, runtime
            said = runtime.respond(request, ContextStore(context.state))
        except Exception as error:
            log.warning("no answer: %s", error, exc_info=not isinstance(error, FedbilevelError))
            said = ResponseMessage(run="", round=0, exchange=0, client=-1, refused=in_words(error))
        return Message(encode(said), reply_to=message)

    return app


def keep_compiled_programs() -> None:
    """Keep compiled programs on disk: Flower's stock SuperNode starts a new process for every message."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        keep_on_disk()

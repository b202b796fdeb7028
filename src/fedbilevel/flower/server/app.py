"""The ServerApp of a federation, as Flower wants it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

Config = Mapping[str, Any]
"""Flower's: names to strings, numbers and flags."""


def server_app(main: Callable[[Grid, Config], None]) -> ServerApp:
    """A ServerApp whose main is `main`(grid, run configuration), which ends in `solve(…, engine=Flower(grid=grid))`."""
    app = ServerApp()

    @app.main()
    def run(grid: Grid, context: Context) -> None:
        main(grid, context.run_config)

    return app

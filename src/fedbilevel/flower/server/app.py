"""The ServerApp of a federation, as Flower wants it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp


def server_app(main: Callable[[Grid, Mapping[str, Any]], None]) -> ServerApp:
    """A ServerApp whose main is `main`(grid, run configuration), which ends in `solve(…, engine=Flower(grid=grid))`."""
    app = ServerApp()

    @app.main()
    def run(grid: Grid, context: Context) -> None:
        main(grid, context.run_config)

    return app

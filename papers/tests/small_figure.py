"""Make up a figure on the quadratic task, whose runs take seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from papers.figure import Figure, read

ROUNDS = {"run": {"rounds": 4, "eval_every": 2}}
CONTENT: dict[str, Any] = {
    **dict.fromkeys(("part", "title", "shows", "setting"), "-"),
    "metric": "relative_error",
    "against": "exchanges",
    "spec": {"task": {"name": "quadratic", "clients": 3}},
    "panels": {"all": {}},
    "methods": {
        "FedBiO": {"algorithm": {"name": "fedbio"}, "grid": {"client_lr.x": [0.01, 1e9]}},
        "SimFBO": {"algorithm": {"name": "simfbo"}, "grid": {"server_lr.x": [1e-9, 0.05]}},
    },
    "tuning": {"select": "outer_loss", "spec": {"run": {"rounds": 2, "eval_every": 1}}},
    "claims": [{"says": "-", "better": "SimFBO", "than": ["FedBiO"]}],
    "quick": {"minutes": 1, "spec": ROUNDS},
    "full": {"minutes": 1, "spec": ROUNDS},
}
UNTUNED: dict[str, Any] = {
    "tuning": None,
    "untuned": "-",
    "methods": {name: {"algorithm": of["algorithm"]} for name, of in CONTENT["methods"].items()},
}


def made_up(**changed: Any) -> Figure:
    """Return the figure with some of its content changed."""
    return read(Path("made-up.toml"), {**CONTENT, **changed})

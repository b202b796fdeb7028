"""Values that work, for each task and data set: what a spec does not say is taken from here.

A field that an algorithm does not have is left out; what is in neither is the algorithm's or the task's own default.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Preset:
    """Defaults for one task on one data set."""

    task: Fields = field(default_factory=dict)
    shared: Fields = field(default_factory=dict)  # for every algorithm that has such a field
    algorithms: Mapping[str, Fields] = field(default_factory=dict)  # by name
    run: Fields = field(default_factory=dict)
    networks: Mapping[str, Fields] = field(default_factory=dict)  # of the task, for a network that is asked for

    def of_task(self, network: Any) -> dict[str, Any]:
        return {**self.task, **next((fields for name, fields in self.networks.items() if name == network), {})}

    def of(self, algorithm: str) -> dict[str, Any]:
        return {**self.shared, **self.algorithms.get(algorithm, {})}


def _single_loop(**fields: Any) -> dict[str, Fields]:
    """The same values for SimFBO and ShroFBO."""
    return {"simfbo": fields, "shrofbo": fields}


CNN = {"cnn": {"hidden": [8, 16, 32]}}

MNIST = Preset(
    task={"clients": 100, "hidden": [200]},
    shared={"local_steps": 10, "batch_size": 64},
    algorithms=_single_loop(
        client_lr={"x": 0.1, "y": 0.1, "v": 0.1}, server_lr={"x": 0.2, "y": 0.2, "v": 0.2}, radius=10.0
    ),
    run={"rounds": 300, "cohort": 10, "eval_every": 10},
    networks=CNN,
)

PRESETS: dict[tuple[str, str | None], Preset] = {
    ("hyper_representation", "digits"): Preset(
        task={"clients": 20, "hidden": [64]},
        shared={"local_steps": 5, "batch_size": 32},
        algorithms=_single_loop(
            client_lr={"x": 0.1, "y": 0.1, "v": 0.1}, server_lr={"x": 0.1, "y": 0.1, "v": 0.1}, radius=10.0
        ),
        run={"rounds": 300, "cohort": 10, "eval_every": 10},
        networks=CNN,
    ),
    ("hyper_representation", "mnist"): MNIST,
    ("hyper_representation", "fashion-mnist"): MNIST,
    ("hyper_representation", "cifar-10"): Preset(
        task={"network": "cnn", "hidden": [16, 32, 64], "clients": 100},
        shared={"local_steps": 5, "batch_size": 32},
        algorithms=_single_loop(
            client_lr={"x": 0.05, "y": 0.05, "v": 0.05}, server_lr={"x": 0.1, "y": 0.1, "v": 0.1}, radius=10.0
        ),
        run={"rounds": 300, "cohort": 10, "eval_every": 10},
        networks={"mlp": {"hidden": [200]}},
    ),
    ("quadratic", None): Preset(
        shared={"local_steps": 5, "batch_size": None},
        algorithms=_single_loop(
            client_lr={"x": 1e-4, "y": 1e-3, "v": 1e-3},  # where they end is off by a multiple of these
            server_lr={"x": 0.01, "y": 0.1, "v": 0.1},
        ),
        run={"rounds": 500, "cohort": None, "eval_every": 10},
    ),
}


def preset(task: str, data: str | None) -> Preset:
    """The values for a task and a data set; those without an entry have none."""
    return PRESETS.get((task, data), PRESETS.get((task, None), Preset()))

"""Choose a ridge penalty for each feature by the validation data of two hospitals, which keep their patients' records.

x holds the logarithms of the penalties. y holds the weights of a linear model, which is trained with these penalties.
"""

from pathlib import Path

import jax.numpy as jnp
import numpy as np

import fedbilevel as fb
from fedbilevel.tasks import Task

FEATURES = 10


def outer(x, y, batch):
    """Return the validation loss, half the mean squared error."""
    return 0.5 * jnp.mean((batch["features"] @ y["weights"] + y["offset"] - batch["target"]) ** 2)


def inner(x, y, batch):
    """Return the training loss, which is the same with the penalties."""
    return outer(x, y, batch) + 0.5 * jnp.sum(jnp.exp(x) * y["weights"] ** 2) + 0.005 * y["offset"] ** 2


def read(file):
    rows = np.loadtxt(file, delimiter=",", skiprows=1, ndmin=2)
    return {"features": rows[:, :-1].astype(np.float32), "target": rows[:, -1].astype(np.float32)}


def hospital(folder):
    """Return the validation and the training samples of one hospital."""
    return read(folder / "validation.csv"), read(folder / "train.csv")


def penalties(folder: str = "data", party: int | str = "all") -> Task:
    """Return the task for one party: "server", a client's number, or "all" in a simulation.

    Args:
        folder: for a client, the client's own folder; for the server and in a simulation, the folder with test.csv.
    """
    place, metrics = Path(folder), {}
    if isinstance(party, int):
        validation, training = hospital(place)
        clients = fb.Clients([validation], [training])
    elif party == "server":
        example = {"features": np.zeros((1, FEATURES), np.float32), "target": np.zeros(1, np.float32)}
        clients = fb.RemoteClients(2, example, example)
    else:
        samples = [hospital(place / name) for name in ("north", "south")]
        clients = fb.Clients([v for v, _ in samples], [t for _, t in samples])
    if not isinstance(party, int):
        test = read(place / "test.csv")
        metrics = {"test_error": lambda x, y: 2 * outer(x, y, test)}
    x0 = jnp.zeros(FEATURES)
    y0 = {"weights": jnp.zeros(FEATURES), "offset": jnp.asarray(0.0)}
    return Task("penalties", fb.Bilevel(outer, inner), clients, x0, y0, metrics)

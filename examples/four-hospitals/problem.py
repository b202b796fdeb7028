"""Heart disease in four hospitals that have agreed on columns, categories and scales (columns.json, by agree.py).

x: logarithms of penalties, one for each column; y: a logistic model, with an intercept for each hospital.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

import fedbilevel as fb
from fedbilevel.estimators import Preparer
from fedbilevel.tasks import Task

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
CATEGORICAL = ["sex", "cp", "fbs", "restecg", "exang", "slope", "thal"]  # words, and codes


def logits(y, batch):
    return batch["row"] @ y["weights"] + y["intercepts"][batch["hospital"]]


def outer(x, y, batch):
    """Validation loss: the mean logistic loss."""
    z = logits(y, batch)
    return jnp.mean(jax.nn.softplus(z) - batch["label"] * z)


def inner(x, y, batch):
    """Training loss: the same with the penalties."""
    return outer(x, y, batch) + jnp.sum(jnp.exp(x) * y["weights"] ** 2) + 0.002 * jnp.sum(y["intercepts"] ** 2)


def accuracy(y, batch):
    return jnp.mean((logits(y, batch) > 0) == (batch["label"] > 0))


def read(file):
    """Columns and labels of the patients in a CSV file."""
    frame = pd.read_csv(file, na_values="?")
    return frame, frame.pop("disease")


def prepared(agreed, name, patients, labels):
    """Samples of a hospital's patients, with the columns that all have agreed on."""
    row = agreed.transform(patients).to_numpy(np.float32)
    number = np.full(len(row), HOSPITALS.index(name), np.int32)
    return {"row": row, "label": labels.to_numpy(np.float32), "hospital": number}


def hospital(agreed, folder, name):
    """(validation, training) samples of a hospital: every third patient is for validation."""
    samples = prepared(agreed, name, *read(folder / name / "patients.csv"))
    third = np.arange(len(samples["label"])) % 3 == 0
    return tuple({field: values[some] for field, values in samples.items()} for some in (third, ~third))


def heart(folder: str = "data", party: int | str = "all") -> Task:
    """The task as one party sees it: "server", a client by its number, or "all" in a simulation.

    Args:
        folder: where columns.json is, beside a client's own folder, and the server's test.csv.
    """
    place, metrics = Path(folder), {}
    agreed = Preparer.load(place / "columns.json")
    width = len(agreed.get_feature_names_out())
    if party == "server":
        example = {"row": np.zeros((1, width), np.float32), "label": np.zeros(1, np.float32)}
        example["hospital"] = np.zeros(1, np.int32)
        clients = fb.RemoteClients(len(HOSPITALS), example, example)
    else:
        own = [HOSPITALS[party]] if isinstance(party, int) else HOSPITALS
        samples = [hospital(agreed, place, name) for name in own]
        clients = fb.Clients([validation for validation, _ in samples], [training for _, training in samples])
    if not isinstance(party, int):
        patients, labels = read(place / "test.csv")
        site = patients.pop("hospital")
        tests = {name: prepared(agreed, name, patients[site == name], labels[site == name]) for name in HOSPITALS}
        everyone = jax.tree.map(lambda *parts: np.concatenate(parts), *tests.values())
        for name, test in {"accuracy": everyone, **{f"accuracy.{name}": test for name, test in tests.items()}}.items():
            metrics[name] = fb.Metric(lambda x, y, test=test: accuracy(y, test), larger_is_better=True)
    y0 = {"weights": jnp.zeros(width), "intercepts": jnp.zeros(len(HOSPITALS))}
    return Task("heart", fb.Bilevel(outer, inner), clients, jnp.full(width, -3.0), y0, metrics)

"""Draw how clients with wrong labels lose their weight: a picture of the weight of each client, round by round.

Run: python examples/client_weights.py [FILE.png]        (needs matplotlib)

Half of the clients have wrong labels: half of their labels were drawn at random. The run does not know which clients
these are. It chooses the weights by the validation loss of all clients.
"""

import sys

import numpy as np
from matplotlib.figure import Figure

import fedbilevel as fb
from fedbilevel.tasks import Task
from fedbilevel.tasks.client_weights import client_weights, weights

COLOURS = {"right labels": "#0072B2", "wrong labels": "#D55E00"}


def weighed(task: Task, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """Run the task. Return the measured rounds, (R,), and the weight of each client in each of them, (R, M)."""
    count = len(task.population)
    metrics = {f"weight {i}": lambda x, y, i=i: weights(x)[i] for i in range(count)}
    method = fb.SimFBO(batch_size=None, local_steps=1)
    history = fb.solve(
        method, task.problem, task.clients, task.x0, task.y0, rounds=rounds, eval_every=2, metrics=metrics
    ).history
    return np.asarray(history["round"]), np.stack([history[name] for name in metrics], axis=1)


def spoilt(task: Task, clean: Task) -> np.ndarray:
    """Return which clients have other labels than in `clean`, a task in which all labels are right: booleans (M,)."""
    rows = [(task.population.inner.row(i), clean.population.inner.row(i)) for i in range(len(task.population))]
    return np.array([np.any(own["label"] != right["label"]) for own, right in rows])


def draw(file: str, rounds: np.ndarray, weight: np.ndarray, wrong: np.ndarray) -> None:
    """Draw a line for each client, and save the picture as PNG."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for (label, colour), which in zip(COLOURS.items(), (~wrong, wrong), strict=True):
        lines = axes.plot(rounds, weight[:, which], color=colour, linewidth=1)
        lines[0].set_label(f"{np.sum(which)} clients with {label}")
    axes.axhline(1, color="black", linestyle=":", linewidth=0.8)
    axes.set(xlabel="round", ylabel="weight M softmax(x)_i", xlim=(rounds[0], rounds[-1]), ylim=(0, None))
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    figure.savefig(file, dpi=110, metadata={"Software": None})


def main() -> None:
    task, clean = client_weights(), client_weights(spoilt=0.0)
    file = sys.argv[1] if len(sys.argv) > 1 else "client-weights.png"
    draw(file, *weighed(task, rounds=100), spoilt(task, clean))
    print(file)


if __name__ == "__main__":
    main()

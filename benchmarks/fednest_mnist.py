"""MNIST accuracy of FedNest's family and its rivals in FedNest's setting, against training the head alone.

    FEDBILEVEL_DATA=FOLDER .venv/bin/python benchmarks/fednest_mnist.py [--epochs N] [--partition iid|shards]

The published setting of FedNest's figure 2: MLP 784-200-10 started as PyTorch starts linear layers, x its first layer,
100 clients of 300 + 300 samples, 10 in each epoch, 25 local steps of batch 64 (5 passes) of size 0.01, outer step and
Neumann step 0.01, N = 5. First at these step sizes, then every method at its own. "Head only" leaves x where it starts.
"""

import argparse
from dataclasses import replace

import jax
import numpy as np

import fedbilevel as fb
from fedbilevel.tasks import hyper_representation
from fedbilevel.tasks.task import Task

ROWS = (10, 50, 100)
EPOCH = {"local_steps": 25, "batch_size": 64}
PUBLISHED = {**EPOCH, "inner_lr": 0.25, "outer_lr": 0.01, "neumann_step": 0.01, "neumann_terms": 5, "inverse": "random"}
FASTER = {**PUBLISHED, "outer_lr": 0.03, "neumann_step": 0.02}
METHODS = {
    "head only": fb.LFedNest(**{**PUBLISHED, "outer_lr": 1e-30}),
    "FedNest, published steps": fb.FedNest(**PUBLISHED),
    "LFedNest, published steps": fb.LFedNest(**PUBLISHED),
    "FedNest": fb.FedNest(**FASTER),
    "FedNest, conjugate gradient": fb.FedNest(**{**FASTER, "outer_lr": 0.05, "inverse": "cg"}, cg_iterations=5),
    "FedNest-SGD": fb.FedNestSGD(**FASTER),
    "LFedNest": fb.LFedNest(**{**PUBLISHED, "outer_lr": 0.025}),
    "FedMBO": fb.FedMBO(**{**FASTER, "inverse": "parallel"}),
    "AggITD": fb.AggITD(inner_rounds=5, local_steps=5, batch_size=64, inner_lr=0.05, outer_lr=0.05, inverse="random"),
    "FedBiO": fb.FedBiO(local_steps=5, batch_size=64, client_lr=0.02),
    "FedBiOAcc": fb.FedBiOAcc(local_steps=5, batch_size=64, client_lr=0.02),
    "SimFBO": fb.SimFBO(local_steps=5, batch_size=64, client_lr=0.05, server_lr=0.1, radius=10),
}


def started_as_in_pytorch(task: Task) -> Task:
    """Weights and biases uniform on ±1/√inputs, the default of torch.nn.Linear."""

    def linear(key: jax.Array, inputs: int, outputs: int) -> dict[str, jax.Array]:
        bound = inputs**-0.5
        weight, bias = jax.random.split(key)
        return {
            "weight": jax.random.uniform(weight, (inputs, outputs), minval=-bound, maxval=bound),
            "bias": jax.random.uniform(bias, (outputs,), minval=-bound, maxval=bound),
        }

    first, head = jax.random.split(jax.random.key(0))
    return replace(task, x0=[linear(first, 784, 200)], y0=linear(head, 200, 10))


def accuracies(task: Task, algorithm: object, epochs: int) -> tuple[np.ndarray, float]:
    """Test accuracy in % after ROWS epochs, and exchanges per epoch."""
    run = fb.solve(
        algorithm, task.problem, task.clients, task.x0, task.y0,
        rounds=epochs, cohort=10, eval_every=10, metrics=task.metrics,
    )  # fmt: skip
    rows = np.searchsorted(run.history["round"], [row for row in ROWS if row <= epochs])
    return 100 * run.history["test_accuracy"][rows], run.ledger.exchanges / epochs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=ROWS[-1])
    parser.add_argument("--partition", choices=("iid", "shards"))
    parser.add_argument("--method", choices=sorted(METHODS))
    options = parser.parse_args()
    fb.tune_cpu()
    print(f"{'':10s}{'':30s}" + "".join(f"{f'epoch {row}':>12s}" for row in ROWS) + "   exchanges per epoch")
    for partition in [options.partition] if options.partition else ["iid", "shards"]:
        split = {"per_client": 2} if partition == "shards" else None
        task = hyper_representation(
            data="mnist", hidden=(200,), clients=100, partition_by=partition, partition_options=split
        )
        for name in [options.method] if options.method else METHODS:
            try:
                found, exchanges = accuracies(started_as_in_pytorch(task), METHODS[name], options.epochs)
            except fb.errors.NumericalError as error:
                print(f"{partition:10s}{name:30s}  {error}", flush=True)
                continue
            print(
                f"{partition:10s}{name:30s}" + "".join(f"{a:12.1f}" for a in found) + f"{exchanges:12.1f}", flush=True
            )


if __name__ == "__main__":
    main()

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
SVRG, SGD = (kind(local_steps=25, lr=0.25) for kind in (fb.parts.SVRG, fb.parts.LocalSGD))
PUBLISHED = fb.parts.Neumann(terms=5, step=0.01, sampling="random")
FASTER = replace(PUBLISHED, step=0.02)


def fednest(outer_lr: float, solver: fb.parts.Neumann | fb.parts.CG) -> fb.FedNest:
    return fb.FedNest(inner=SVRG, hypergradient=fb.parts.Implicit(solver=solver), outer_lr=outer_lr, batch_size=64)


def lfednest(outer_lr: float) -> fb.LFedNest:
    own = fb.parts.LocalImplicit(solver=PUBLISHED)
    return fb.LFedNest(inner=SGD, hypergradient=own, outer_lr=outer_lr, batch_size=64)


METHODS = {
    "head only": lfednest(1e-30),
    "FedNest, published steps": fednest(0.01, PUBLISHED),
    "LFedNest, published steps": lfednest(0.01),
    "FedNest": fednest(0.03, FASTER),
    "FedNest, conjugate gradient": fednest(0.05, fb.parts.CG(max_steps=5)),
    "FedNest-SGD": fb.FedNestSGD(
        inner=SGD, hypergradient=fb.parts.Implicit(solver=FASTER), outer_lr=0.03, batch_size=64
    ),
    "LFedNest": lfednest(0.025),
    "FedMBO": fb.FedMBO(
        inner=SGD,
        hypergradient=fb.parts.Implicit(solver=replace(FASTER, sampling="random_per_client")),
        outer_lr=0.03,
        batch_size=64,
    ),
    "AggITD": fb.AggITD(
        inner=fb.parts.LocalSGD(rounds=5, local_steps=5, lr=0.05), sampling="random", outer_lr=0.05, batch_size=64
    ),
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

"""How much of what wrong labels cost does hyper-cleaning bring back? SimFBO, 18 clients, softmax regression.

    FEDBILEVEL_DATA=FOLDER .venv/bin/python benchmarks/hyper_cleaning.py [--data mnist] [--corruption 0.3,0.5]
        [--partition iid|shards|dirichlet] [--seeds 0,1] [--rounds N] [--histogram FILE.png]

The same model is first trained to convergence (L-BFGS, full batches, the same ridge) on all training samples with equal
weights, and on the clean ones alone; no validation sample is used for either. Then SimFBO, with the preset's steps,
learns a weight for each training sample. "Recovered" is (cleaned − all)/(clean − all), in test accuracy.
"""

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedbilevel as fb
from fedbilevel import experiments
from fedbilevel.tasks import Task, networks
from fedbilevel.tasks.hyper_cleaning import cleaning_weights

PARTITIONS: dict[str, dict[str, Any]] = {
    "iid": {},
    "shards": {"partition_by": "shards", "partition_options": {"per_client": 2}},
    "dirichlet": {"partition_by": "dirichlet", "partition_options": {"alpha": 0.5, "minimum": 20}},
}
ITERATIONS, TOLERANCE = 400, 1e-3  # of the ordinary training; the norm of the gradient at which it ends
COLOURS = ("#0072B2", "#D55E00")  # of clean and of corrupted; M. Okabe, K. Ito, 2008


def trained(task: Task, ridge: float, kept: np.ndarray) -> tuple[float, float]:
    """Test accuracy in % of y trained on the kept samples alone, and the norm of the gradient where training ended.

    Samples weigh as in the task: clients alike, and a client's samples alike.
    """
    samples, size = task.population.inner.values, task.population.inner.size
    share = np.repeat(task.population.weights / size, size) * kept
    share = jnp.asarray(share / share.sum() * len(share))
    image, label = jnp.asarray(samples["image"]), jnp.asarray(samples["label"])
    optimizer = optax.lbfgs()

    def loss(y: Any) -> jax.Array:
        logits = image @ y[1]["weight"] + y[1]["bias"]
        return networks.cross_entropy(logits, label, share) + ridge * optax.tree.vdot(y, y)

    @jax.jit
    def descend(y: Any) -> tuple[Any, jax.Array]:
        def step(carry: tuple[Any, Any, jax.Array, jax.Array]) -> tuple[Any, Any, jax.Array, jax.Array]:
            y, state, count, _ = carry
            value, slope = optax.value_and_grad_from_state(loss)(y, state=state)
            change, state = optimizer.update(slope, state, y, value=value, grad=slope, value_fn=loss)
            return optax.apply_updates(y, change), state, count + 1, optax.tree.norm(slope)

        start = (y, optimizer.init(y), jnp.asarray(0), jnp.asarray(jnp.inf))
        end = jax.lax.while_loop(lambda carry: (carry[2] < ITERATIONS) & (carry[3] > TOLERANCE), step, start)
        return end[0], end[3]

    y, slope = descend(task.y0)
    return 100 * float(task.metrics["test_accuracy"](task.x0, y)), float(slope)


def report(data: str, corruption: float, partition: str, seed: int, rounds: int) -> tuple[Task, jax.Array]:
    """Print one row of the table; the task's fields and the method's steps are those of `fedbilevel run`."""
    fields = {"name": "hyper_cleaning", "data": data, "corruption": corruption, "seed": seed, **PARTITIONS[partition]}
    spec = experiments.resolve({"task": fields, "algorithm": "simfbo", "run": {"seed": seed, "rounds": rounds}})
    task, algorithm, engine = experiments.build(spec)
    corrupted = task.population.inner.values["corrupted"]
    ends = [trained(task, spec.task.fields["ridge"], kept) for kept in (np.ones(len(corrupted), bool), ~corrupted)]
    (everything, clean), slope = (end[0] for end in ends), max(end[1] for end in ends)
    found = fb.solve(
        algorithm, task.problem, task.clients, task.x0, task.y0, rounds=rounds, cohort=spec.run.cohort,
        key=seed, eval_every=rounds, metrics=task.metrics, engine=engine,
    )  # fmt: skip
    last = {name: float(found.history[name][-1]) for name in task.metrics}
    cleaned = 100 * last["test_accuracy"]
    print(
        f"{data:14s}{partition:10s}{100 * corruption:5.0f} %{100 * corrupted.mean():8.1f} %{seed:5d}{rounds:8d}"
        f"{everything:9.2f}{cleaned:9.2f}{clean:9.2f}{100 * (cleaned - everything) / (clean - everything):10.0f} %"
        f"{last['auc']:8.3f}{last['clean_weight']:8.2f}{last['corrupted_weight']:10.2f}"
        f"{found.history['seconds'][-1]:9.1f}{slope:10.1e}",
        flush=True,
    )
    return task, found.x


def draw(file: Path, panels: dict[str, tuple[Task, jax.Array]]) -> None:
    """A histogram of the learned weights, of clean and of corrupted samples, in each panel."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(4.8 * len(panels), 3.4), sharey=True, squeeze=False)
    for axis, (title, (task, x)) in zip(axes[0], panels.items(), strict=True):
        for found, name, colour in zip(cleaning_weights(task, x), ("clean", "corrupted"), COLOURS, strict=True):
            label = f"{name} ({len(found):,})"
            share = np.full(len(found), 100 / len(found))
            axis.hist(found, np.linspace(0, 1, 41), weights=share, label=label, color=colour, alpha=0.65)
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("learned weight sigmoid(x)")
        axis.set_xlim(0, 1)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, loc="upper center")
    axes[0, 0].set_ylabel("% of the samples of its kind")
    figure.tight_layout()
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits", help="digits, mnist, fashion-mnist; several with commas")
    parser.add_argument("--corruption", default="0.3,0.5", help="probabilities, with commas")
    parser.add_argument("--partition", choices=sorted(PARTITIONS), default="iid")
    parser.add_argument("--seeds", default="0", help="with commas; of partition, corruption, start and batches")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--histogram", type=Path, help="PNG of the weights that the last seed ends with")
    options = parser.parse_args()
    fb.tune_cpu(1)
    print(
        f"{'data':14s}{'partition':10s}{'replaced':>7s}{'wrong':>8s}{'seed':>7s}{'rounds':>8s}{'all':>9s}{'cleaned':>9s}"
        f"{'clean':>9s}{'recovered':>12s}{'auc':>8s}{'w clean':>8s}{'w corrupt':>10s}{'seconds':>9s}{'‖∇‖':>10s}"
    )
    panels = {}
    for data in options.data.split(","):
        for corruption in map(float, options.corruption.split(",")):
            for seed in map(int, options.seeds.split(",")):
                end = report(data, corruption, options.partition, seed, options.rounds)
            panels[f"{data}, {100 * corruption:.0f} % of labels replaced"] = end
    if options.histogram:
        draw(options.histogram, panels)


if __name__ == "__main__":
    main()

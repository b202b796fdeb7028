"""Search for good values of a method's fields by Optuna around `fb.solve`, with any sampler, pruner or storage.

Run: python examples/search_with_optuna.py [TRIALS]        (needs optuna)

Runs that differ only in their numbers share their compiled programs. A trial reports the metric of each row of its
history, and the pruner may then end the trial. A trial whose run diverges also counts as ended early.
"""

import sys

import optuna

import fedbilevel as fb
from fedbilevel.tasks import quadratic

ROUNDS, EVERY = 90, 10
TASK = quadratic(clients=4)
METRIC = "relative_error"


def objective(trial: optuna.Trial) -> float:
    """Make a run with values that the sampler draws, and return the metric at its end."""
    method = fb.SimFBO(
        server_lr=trial.suggest_float("server_lr", 1e-3, 1.0, log=True),
        radius=trial.suggest_float("radius", 1.0, 100.0, log=True),
    )

    def report(result: fb.Result, row: dict[str, float] | None) -> None:
        if row and row["round"]:
            trial.report(row[METRIC], int(row["round"]))
            if trial.should_prune():
                raise optuna.TrialPruned

    try:
        found = fb.solve(
            method, TASK.problem, TASK.clients, TASK.x0, TASK.y0,
            rounds=ROUNDS, eval_every=EVERY, metrics=TASK.metrics, callbacks=[report], progress=False,
        )  # fmt: skip
    except fb.errors.NumericalError as error:
        raise optuna.TrialPruned from error
    return found.history.rows[-1][METRIC]


def search(trials: int) -> optuna.Study:
    """Run a study with this number of trials, and return it."""
    study = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=0),
        pruner=optuna.pruners.HyperbandPruner(min_resource=EVERY, max_resource=ROUNDS),
    )
    study.optimize(objective, n_trials=trials)
    return study


if __name__ == "__main__":
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = search(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
    pruned = sum(trial.state == optuna.trial.TrialState.PRUNED for trial in study.trials)
    print(f"{len(study.trials)} trials, {pruned} ended early; {METRIC} {study.best_value:.4g} with {study.best_params}")

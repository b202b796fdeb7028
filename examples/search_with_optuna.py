"""A search of one's own by Optuna around `fb.solve`: any sampler, any pruner, any storage.

Run: python examples/search_with_optuna.py [TRIALS]        (needs optuna)

Runs that differ only in their numbers share their compiled programs. A trial reports the metric of each row, by which
the pruner may end it; a run that diverges is a trial that was ended, too.
"""

import sys

import optuna

import fedbilevel as fb
from fedbilevel.tasks import quadratic

ROUNDS, EVERY = 90, 10
TASK = quadratic(clients=4)
METRIC = "relative_error"


def objective(trial: optuna.Trial) -> float:
    """The metric at the end of a run with values that the sampler draws."""
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
    """A study of so many trials."""
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

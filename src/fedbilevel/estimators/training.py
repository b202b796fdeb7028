"""Run the training of the models of `fold_models`: one run of `solve` with few features, two with many."""

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sklearn.exceptions import ConvergenceWarning

import fedbilevel as fb
from fedbilevel.errors import NumericalWarning
from fedbilevel.estimators.columns import Numbers
from fedbilevel.estimators.fold_models import FoldModels, Posed
from fedbilevel.estimators.preparer import read_saved
from fedbilevel.extending import warn, write_text


class TrainedModels(NamedTuple):
    """The result of a training."""

    x: Numbers  # x of each feature
    y: Any  # the models; the last of them is trained on all rows
    # gradient and Hessian of the last model's training loss; None for many features
    last: tuple[Numbers, Numbers] | None


@dataclass
class Training:
    """A training, with its results that are not the models: `history` and `ledgers`.

    Args:
        models: the models.
        name: the name of the estimator, for warnings.
        clients, engine: the sites, and the engine that runs the exchanges with them.
        rounds: the largest number of exchanges; see `Penalised`.
        checkpoint, on_searched: see `Penalised._train`.
        history: the history of the search; None if there is none.
        ledgers: the costs of each run.
    """

    models: FoldModels
    name: str
    clients: Any
    engine: Any
    rounds: int
    checkpoint: Path | None
    on_searched: Callable[[], None]
    history: Any = None
    ledgers: list[Any] = field(default_factory=list)

    def few_features(self, given: Numbers | None) -> TrainedModels:
        """Find the penalties, and train the models, for at most WIDE features.

        Args:
            given: x of each feature; None: it is searched.
        """
        algorithm, problem, x0, y0 = self.models.posed()
        x0 = x0 if given is None else given
        with warnings.catch_warnings():  # the loss of held-out rows may end above its value at coefficients of 0
            warnings.simplefilter("ignore", NumericalWarning)
            result = self._solved(Posed(algorithm, problem, x0, y0), self.checkpoint, eval_every=1)
        if algorithm.search:
            self.history = result.history
        left, where = float(result.state.best.left), f"where {algorithm.tolerance:g} or less ends the search"
        if algorithm.search and not left <= algorithm.tolerance:
            self._warn(f"the projected gradient is {left:.1e} after {result.round} exchanges, {where}")
        elif not algorithm.finished(result.state):
            self._warn(f"the coefficients still move after {result.round} exchanges")
        known = result.state.known
        last = np.asarray(known.gradient[-1]), np.asarray(known.hessian[-1])
        return TrainedModels(np.asarray(result.x)[algorithm.of], result.y, last)

    def many_features(self, given: Numbers | None) -> TrainedModels:
        """Find the penalties, and train the last model, for more than WIDE features.

        Args:
            given: x of each feature; None: it is searched.
        """
        algorithm, problem, _, y = self.models.posed(searched=True)
        if given is None:
            shares, y = self._shares(self.checkpoint and self.checkpoint.with_suffix(".json"))
            self.on_searched()
        else:
            shares = 1 / (1 + given)
        result = self._solved(Posed(algorithm, problem, shares, y), self.checkpoint)
        if not algorithm.finished(result.state):
            self._warn(f"the coefficients still move after {result.round} steps of Newton's method")
        return TrainedModels(1 / shares - 1, {**result.y, "coef": np.asarray(result.y["coef"]) * np.sqrt(shares)}, None)

    def _shares(self, file: Path | None) -> tuple[Numbers, dict[str, Numbers]]:
        """Return each feature's share and the start of the last model, from a search or from a file with its result.

        The search itself is not saved. Steps at the sites adapt to measured curvature, and the measurements are lost
        when a site's process ends.
        """
        if file is not None and file.exists():
            content = read_saved(file, dict)
        else:
            stop = fb.stop_without_progress("outer_loss", patience=10)
            found = self._solved(self.models.posed(), eval_every=10, callbacks=[stop])
            self.history = found.history
            y = {name: np.mean(np.asarray(leaf), axis=0, keepdims=True).tolist() for name, leaf in found.y.items()}
            shares = np.asarray(found.x)[self.models.of].tolist()
            content = {"shares": shares, "y": y, "rounds": found.round, "stopped": bool(found.stopped)}
            if file is not None:
                write_text(file, json.dumps(content))
        if not content["stopped"]:
            self._warn(f"the validation loss still falls after {content['rounds']} rounds")
        return np.array(content["shares"]), {name: np.array(leaf) for name, leaf in content["y"].items()}

    def _solved(self, posed: Posed, checkpoint: Path | None = None, **options: Any) -> fb.Result:
        """Run `solve`, or resume it from a checkpoint. Add its costs to `ledgers`."""
        algorithm, problem, x0, y0 = posed
        options |= {"rounds": self.rounds, "engine": self.engine, "progress": False}
        if checkpoint is not None:
            options |= {"checkpoint": checkpoint, "checkpoint_every": 1, "resume": "auto"}
        result = fb.solve(algorithm, problem, self.clients, x0, y0, **options)
        self.ledgers.append(result.ledger)
        return result

    def _warn(self, why: str) -> None:
        warn(ConvergenceWarning(f"{self.name} has not converged: {why}. A larger `rounds` may help"))

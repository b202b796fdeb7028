"""Fit linear models to the rows of several sites, and find penalties and weights of sites by cross-validation.

This module makes the problem that the module `tables` states, for any outcome. y contains a model for each fold,
trained without this fold, and in its last entry the model that is used. x contains the penalties of the models. A
`Model` describes what the models have in common, such as which penalty belongs to each feature. A `SiteRows` contains
the rows of a client.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.client import Clients, RemoteClients
from fedbilevel.core.errors import is_count, require, unknown
from fedbilevel.core.metrics import Metric
from fedbilevel.core.problem import Bilevel, SingleLevel, WholeLoss
from fedbilevel.core.projections import box
from fedbilevel.core.tree import PyTree
from fedbilevel.tasks.outcomes import Batch, OutcomeKind
from fedbilevel.tasks.task import Floats, Task

LOG_PENALTY = -12.0, 0.0


@dataclass(frozen=True)
class SiteRows:
    """A site's training rows, and the rows on which metrics are measured: arrays by name, with an entry for each row.

    Both parts have "row", of shape (n, features), "site", the number of the site, and the arrays that the outcome
    needs. Training rows also have "fold". Both parts may have "weight".
    """

    name: str
    training: dict[str, Floats]
    measured: dict[str, Floats] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Model:
    """What all models of a problem have in common.

    Args:
        outcome: what the models predict.
        sites: the number of sites, M.
        penalty: p, the index of each feature's penalty, with an entry for each feature.
        classes: the number of classes, if a model has a coefficient for each feature and class; 0 if it has one
            coefficient for each feature.
        folds: the number of folds, K.
        ridge: the value of every penalty at the start.
        tuned: whether penalties and weights are tuned. If not, the problem has a single level, in which only the last
            model is trained and every penalty is `ridge`.
        weighted: whether x has a weight for each site.
    """

    outcome: OutcomeKind
    sites: int
    penalty: Sequence[int]
    classes: int = 0
    folds: int = 5
    ridge: float = 0.01
    tuned: bool = True
    weighted: bool = False

    def __post_init__(self) -> None:
        require(0 < self.ridge < np.inf, "ridge", self.ridge, "positive and finite")
        require(is_count(self.folds) and self.folds >= 2, "folds", self.folds, "a whole number, at least 2")

    def posed(self) -> tuple[Bilevel | SingleLevel, PyTree, PyTree]:
        """Return the problem, x0 and y0."""
        shape = (
            len(self.penalty),
            *([self.folds + 1] if self.tuned else []),
            *([self.classes] if self.classes else []),
        )
        if not self.tuned:
            return SingleLevel(self._loss(self._single)), jnp.zeros(shape), None
        x0 = {"penalty": jnp.full(max(self.penalty) + 1, jnp.log(self.ridge))}
        low, high = ({"penalty": bound} for bound in LOG_PENALTY)
        if self.weighted:
            x0["weight"] = jnp.zeros(self.sites)
            low["weight"], high["weight"] = -np.inf, np.inf
        return Bilevel(self._loss(self._outer), self._loss(self._inner), project_x=box(low, high)), x0, jnp.zeros(shape)

    def used(self, x: PyTree, y: PyTree) -> Array:
        """Return the coefficients of the model that is used. Their shape is (features,) or (features, classes)."""
        return y[:, -1] if self.tuned else x

    def losses(self, models: Array, batch: Batch, seen: Array) -> Array:
        """Return the loss of each row under each model.

        `models` has the shape (features, models) or (features, models, classes).
        """
        return self.outcome.losses(jnp.tensordot(batch["row"], models, 1), batch, seen)

    def loss_of(self, w: Array, batch: Batch) -> Array:
        """Return the mean loss of rows under one model."""
        seen = jnp.ones((len(batch["row"]), 1), bool)
        return jnp.mean(_weights(batch) * self.losses(w[:, None], batch, seen)[:, 0])

    def score_of(self, w: Array, batch: Batch) -> Array:
        """Return the outcome's score of rows under one model. The weights of rows are ignored."""
        return self.outcome.scored(batch["row"] @ w, batch)

    def _loss(self, function: Callable[..., Array]) -> Any:
        """Turn a loss of (…, rows, valid) into a loss that methods accept.

        If the loss is a mean over samples, the result is a loss of a batch; otherwise it is a `WholeLoss`.
        """
        if self.outcome.whole:
            return WholeLoss(function) if self.tuned else WholeLoss(lambda x, _, rows, valid: function(x, rows, valid))
        if self.tuned:
            return lambda x, y, batch: function(x, y, batch, jnp.ones(len(batch["row"]), bool))
        return lambda x, batch: function(x, batch, jnp.ones(len(batch["row"]), bool))

    def _outer(self, x: PyTree, y: Array, batch: Batch, valid: Array) -> Array:
        out = (batch["fold"][:, None] == jnp.arange(self.folds + 1)) & valid[:, None]
        return jnp.sum(_weights(batch)[:, None] * jnp.where(out, self.losses(y, batch, out), 0)) / jnp.sum(valid)

    def _inner(self, x: PyTree, y: Array, batch: Batch, valid: Array) -> Array:
        counted = jnp.append(jnp.full(self.folds, self.folds / (self.folds - 1)), 1.0)
        seen = (batch["fold"][:, None] != jnp.arange(self.folds + 1)) & valid[:, None]
        each = _weights(batch) * jnp.sum(jnp.where(seen, counted * self.losses(y, batch, seen), 0), axis=1)
        if self.weighted:
            each = site_weights(x)[batch["site"]] * each
        penalty = jnp.exp(x["penalty"])[np.asarray(self.penalty)]
        return jnp.sum(each) / jnp.sum(valid) + jnp.vdot(penalty, jnp.sum(y**2, axis=tuple(range(1, y.ndim))))

    def _single(self, x: Array, batch: Batch, valid: Array) -> Array:
        losses = jnp.where(valid, self.losses(x[:, None], batch, valid[:, None])[:, 0], 0)
        return jnp.sum(_weights(batch) * losses) / jnp.sum(valid) + self.ridge * jnp.sum(x**2)


def site_weights(x: Mapping[str, Array]) -> Array:
    """Return the sites' weights w, as an array of shape (M,). Their mean is 1."""
    return len(x["weight"]) * jax.nn.softmax(x["weight"])


def _weights(batch: Batch) -> Array:
    return batch.get("weight", jnp.ones(len(batch["row"]), batch["row"].dtype))


def task_of(
    name: str, model: Model, sites: Sequence[SiteRows], *, weights: Any, part: str, party: int | str = "all"
) -> Task:
    """Make the task from the rows of sites.

    The metrics are the mean loss and the score of all measured rows, and the score of each site whose measured rows
    have one. Clients measure the score on their own rows if it is a mean over rows.

    Args:
        name: the name of the task.
        model: the models.
        sites: the sites with their rows. A client of a federation passes only its own site. A server that does not have
            the sites' rows passes one made-up example, followed by the sites whose measured rows it has.
        weights: the clients' weights p_i; "size": proportional to the numbers of training rows; None: equal weights.
        part: the first word of the metrics' names, "test" or "validation".
        party: the number of a client in a federation, "server", or "all" in a simulation.
    """
    problem, x0, y0 = model.posed()
    samples = [site.training for site in sites if site.training]
    remote = party == "server" and len(samples) < model.sites  # with a single site, the example stands for it
    clients = RemoteClients(model.sites, samples[0], weights=weights) if remote else Clients(samples, weights=weights)
    own = Metric(lambda x, y, batch: model.score_of(model.used(x, y), batch), model.outcome.larger_is_better)
    return Task(
        name=name,
        problem=problem,
        clients=RemoteClients.of(clients) if party == "server" and isinstance(clients, Clients) else clients,
        x0=x0,
        y0=y0,
        metrics=_metrics(model, [site for site in sites if site.measured], part),
        metrics_per_client={} if model.outcome.has_score else {f"client_{model.outcome.score}": own},
    )


def _metrics(model: Model, sites: list[SiteRows], part: str) -> dict[str, Callable[[PyTree, PyTree], Array]]:
    score = model.outcome.score

    def scored(rows: Batch) -> Metric:
        return Metric(lambda x, y: model.score_of(model.used(x, y), rows), model.outcome.larger_is_better)

    each = {site.name: site.measured for site in sites if len(site.measured["row"])}
    if not each:
        return {}
    together = jax.tree.map(lambda *parts: np.concatenate(parts), *each.values())
    has_score = model.outcome.has_score or (lambda rows: True)
    known = {name: has_score(rows) for name, rows in each.items()}
    if not any(known.values()) and not has_score(together):
        return {}
    everyone = jax.tree.map(jnp.asarray, together)
    tested: dict[str, Batch] = {name: jax.tree.map(jnp.asarray, rows) for name, rows in each.items()}
    shares = jnp.array([len(rows["row"]) / len(everyone["row"]) for rows in tested.values()])

    def loss(x: PyTree, y: PyTree) -> Array:
        return shares @ jnp.stack([model.loss_of(model.used(x, y), rows) for rows in tested.values()])

    return {
        f"{part}_{score}": scored(everyone),
        f"{part}_loss": loss,
        **{f"{part}_{score}.{name}": scored(rows) for name, rows in tested.items() if known[name]},
    }


def weighting_of(weighting: str) -> str | None:
    """Return the weighting in the form that `Clients` takes: "size", or None for equal weights."""
    if weighting not in ("size", "equal"):
        raise unknown("weighting", weighting, ("size", "equal"))
    return "size" if weighting == "size" else None

"""Heart disease in four hospitals: a penalty per feature and a weight per hospital, found by cross-validation.

The patients, the features and the split of FLamby's Fed-Heart-Disease (Ogier du Terrail et al., NeurIPS 2022), one
client for each hospital; the bilevel problem is cross-validation's (Bennett et al., "Model selection via bilevel
optimization", IJCNN 2006). Hospital i's n_i training patients, with rows a_j and disease c_j of 0 or 1, are dealt into
K folds, k_j being the fold of j. y holds K + 1 logistic models: model k < K is trained without fold k, model K on
everyone. With ℓ the logistic loss,

    g_i = (1/n_i) Σ_j w_i [ℓ(a_jᵀy_K, c_j) + Σ_{k ≠ k_j} K/(K − 1) ℓ(a_jᵀy_k, c_j)] + Σ_k Σ_l exp(x.penalty_l) y_kl²
    f_i = (1/n_i) Σ_j ℓ(a_jᵀy_{k_j}, c_j)               w = M softmax(x.weight)

x starts at penalty_l = log(ridge) and weight = 0; penalties stay within LOG_PENALTY. The models have no term in common;
f sees each patient with the model that has not seen it, and never model K, the model that is used. Every entry of a
model has its penalty, those of the intercepts included: g is strongly convex in y.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.client import Clients, RemoteClients
from fedbilevel.core.errors import is_count, require, unknown
from fedbilevel.core.metrics import Metric
from fedbilevel.core.problem import Bilevel, SingleLevel
from fedbilevel.core.projections import box
from fedbilevel.core.tree import PyTree
from fedbilevel.data import load_heart
from fedbilevel.data.clients import dealt
from fedbilevel.data.loaders import FLAMBY, HOSPITALS, TRAINING, stratified
from fedbilevel.tasks.task import Floats, Task

Weighting = Literal["size", "equal"]
Batch = Mapping[str, Array]
LOG_PENALTY = -12.0, 0.0


def hospitals(
    *,
    only: Sequence[str] = (),
    tuned: bool = True,
    folds: int = 5,
    offsets: bool = True,
    ridge: float = 0.01,
    weighting: Weighting = "size",
    holdout: float = 0.0,
    seed: int = 0,
    party: int | str = "all",
) -> Task:
    """Fit a logistic model to four hospitals' patients; each hospital standardises by its own training patients.

    Args:
        only: hospitals to take, of "cleveland", "hungarian", "switzerland" and "va"; empty: all, in this order.
        tuned: whether penalties and weights are tuned. False: the single-level problem of the model alone, with `ridge`
            for every penalty, which FedAvg and FedLin solve.
        folds: K.
        offsets: give each hospital an intercept of its own beside the common intercept: a feature that is 1 for its
            patients.
        ridge: every penalty at the start.
        weighting: p_i, in both losses: by training patients ("size"), or "equal".
        holdout: the share of each hospital's training patients that is measured in place of its test patients.
        seed: of the split into training and test, 0 being FLamby's own, of the holdout and of the folds.
        party: in a federation, the number of a client: its task has its own patients alone, from its own file.

    Measured: accuracy and mean loss on all test patients, and each hospital's accuracy.
    """
    names = list(only) or list(HOSPITALS)
    for name in names:
        if name not in HOSPITALS:
            raise unknown("only", name, HOSPITALS)
    require(len(set(names)) == len(names), "only", names, "hospitals, each once")
    require(0 < ridge < np.inf, "ridge", ridge, "positive and finite")
    require(0 <= holdout < 1, "holdout", holdout, "at least 0 and below 1")
    require(is_count(folds) and folds >= 2, "folds", folds, "a whole number, at least 2")
    if weighting not in ("size", "equal"):
        raise unknown("weighting", weighting, ("size", "equal"))
    numbers = list(range(len(names)))
    if not isinstance(party, str):
        require(party in numbers, "party", party, f"one of 0 to {len(names) - 1}, the hospitals")
        numbers = [party]
    wards = [_ward(names[i], i, len(names) if offsets else 0, folds, holdout, seed) for i in numbers]
    clients = Clients(
        [ward.training for ward in wards],
        weights="size" if weighting == "size" else None,
    )
    features = wards[0].training["row"].shape[1]
    problem, x0, y0, model = _tuned(len(names), features, folds, ridge) if tuned else _single(features, ridge)
    return Task(
        name="hospitals",
        problem=problem,
        clients=RemoteClients.of(clients) if party == "server" else clients,
        x0=x0,
        y0=y0,
        metrics=_metrics(model, wards, "validation" if holdout else "test"),
        metrics_per_client={"client_accuracy": Metric(lambda x, y, batch: _accuracy(model(x, y), batch), True)},
    )


@dataclass(frozen=True)
class _Ward:
    """Hold a hospital's patients: arrays by name, with a row for each patient."""

    name: str
    training: dict[str, Floats]
    measured: dict[str, Floats]


def _ward(name: str, number: int, indicators: int, folds: int, holdout: float, seed: int) -> _Ward:
    """Load hospital `number` of the federation; its features are followed by `indicators` of hospitals and by 1."""
    found = load_heart(name)
    training, measured = stratified(found.labels, TRAINING, FLAMBY + seed)
    if holdout:
        kept, aside = stratified(found.labels[training], 1 - holdout, FLAMBY + seed)
        training, measured = training[kept], training[aside]
    own = found.rows[training].astype(float)
    spread = np.where(np.ptp(own, axis=0) > 0, own.std(0), 1)
    rows = (found.rows - own.mean(0)) / spread
    constant = [float(i == number) for i in range(indicators)] + [1.0]
    rows = np.column_stack([rows, np.tile(constant, (len(rows), 1))]).astype(np.float32)

    def some(chosen: np.ndarray) -> dict[str, Floats]:
        return {"row": rows[chosen], "label": found.labels[chosen]}

    fold = dealt(found.labels[training], folds, np.random.default_rng([seed, number, 7]))
    at = np.full(len(training), number, np.int32)
    return _Ward(name, {**some(training), "fold": fold, "hospital": at}, some(measured))


def hospital_weights(x: Mapping[str, Array]) -> Array:
    """Compute w, shape (M,), of mean 1."""
    return len(x["weight"]) * jax.nn.softmax(x["weight"])


def _losses(models: Array, batch: Batch) -> Array:
    """Compute the logistic loss of each patient by each model, a column of `models`: (n, models)."""
    z = batch["row"] @ models
    return jax.nn.softplus(z) - batch["label"][:, None] * z


Model = Callable[[PyTree, PyTree], Array]
"""(x, y) -> the coefficients of the model that is used, (features,)."""


def _tuned(count: int, features: int, folds: int, ridge: float) -> tuple[Bilevel, PyTree, PyTree, Model]:
    counted = jnp.append(jnp.full(folds, folds / (folds - 1)), 1.0)

    def outer(x: PyTree, y: Array, batch: Batch) -> Array:
        return jnp.mean(jnp.take_along_axis(_losses(y, batch), batch["fold"][:, None], axis=1))

    def inner(x: PyTree, y: Array, batch: Batch) -> Array:
        seen = jnp.where(batch["fold"][:, None] == jnp.arange(folds + 1), 0, counted)
        each = hospital_weights(x)[batch["hospital"]] * jnp.sum(seen * _losses(y, batch), axis=1)
        return jnp.mean(each) + jnp.vdot(jnp.exp(x["penalty"]), jnp.sum(y**2, axis=1))

    x0 = {"penalty": jnp.full(features, jnp.log(ridge)), "weight": jnp.zeros(count)}
    low, high = LOG_PENALTY
    within = box({"penalty": low, "weight": -jnp.inf}, {"penalty": high, "weight": jnp.inf})
    return Bilevel(outer, inner, project_x=within), x0, jnp.zeros((features, folds + 1)), lambda x, y: y[:, -1]


def _single(features: int, ridge: float) -> tuple[SingleLevel, PyTree, None, Model]:
    def loss(x: Array, batch: Batch) -> Array:
        return jnp.mean(_losses(x[:, None], batch)) + ridge * jnp.vdot(x, x)

    return SingleLevel(loss), jnp.zeros(features), None, lambda x, y: x


def _accuracy(model: Array, batch: Batch) -> Array:
    return jnp.mean((batch["row"] @ model > 0) == (batch["label"] > 0))


def _metrics(model: Model, wards: list[_Ward], part: str) -> dict[str, Callable[[PyTree, PyTree], Array]]:
    def accuracy_of(patients: Batch) -> Metric:
        return Metric(lambda x, y: _accuracy(model(x, y), patients), larger_is_better=True)

    each = {ward.name: jax.tree.map(jnp.asarray, ward.measured) for ward in wards}
    everyone = jax.tree.map(lambda *parts: jnp.concatenate(parts), *each.values())
    return {
        f"{part}_accuracy": accuracy_of(everyone),
        f"{part}_loss": lambda x, y: jnp.mean(_losses(model(x, y)[:, None], everyone)),
        **{f"{part}_accuracy.{name}": accuracy_of(patients) for name, patients in each.items()},
    }

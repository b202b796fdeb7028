"""Linear models of several sites' rows a_j, with a penalty for each feature that is found by cross-validation.

Each site i deals its n_i rows into K folds, alike in classes; k_j is the fold of row j. Model k, of coefficients w_k
and an intercept b_k that no penalty shrinks, is trained without fold k. With ℓ the loss of a row and λ_l the penalty of
feature l,

    g_i = Σ_k [K/((K − 1) n_i) Σ_{j: k_j ≠ k} ℓ(a_jᵀw_k + b_k, c_j) + Σ_l λ_l w_kl²]
    f_i = 1/n_i Σ_j ℓ(a_jᵀw_{k_j} + b_{k_j}, c_j)

and each site counts by its rows, so that both are those of the pooled rows. One run of SimFBO, with full batches and
steps that adapt, finds the λ whose models are best on rows that they have not seen. The model that is kept has these λ
and all rows, as scikit-learn's searches refit: Newton's method, which asks sites for gradients and for products with
their Hessians, trains it to rounding.

Of a feature that is uncorrelated to the others, with standard deviation s_l, a penalty leaves about the share
κ s_l²/(κ s_l² + λ_l) of the coefficient, κ being half of ℓ″, or of a bound of it. The run's variables are

    x_l = this share, from 0.001 to 0.999, 0.5 at the start     y_kl = w_kl s_l/√x_l     λ_l w_kl² = κ (1 − x_l) y_kl²

and rows are standardised, for which w and b make up. The Hessian then has the diagonal 2κ, whatever scales and
penalties are, and without correlations f is quadratic in x.
"""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray
from scipy.special import expit
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d, validate_data

import fedbilevel as fb
from fedbilevel.data import dealt
from fedbilevel.errors import ConfigurationError
from fedbilevel.estimators.columns import labels, moments, numbers, require_sizes, sites_of
from fedbilevel.extending import explain_call, explain_misspelt, is_count, require

Numbers = NDArray[Any]
Columns = dict[str, Numbers]


@explain_misspelt
class Penalised(BaseEstimator):  # type: ignore[misc]
    """Base of the estimators.

    Args:
        penalties: λ, a number or one for each feature; None: found by cross-validation.
        penalty_groups: a label for each feature; those of the same label, such as the indicators of one category, share
            a penalty in units of their variances. None: each feature has its own.
        cv: K, the number of folds.
        rounds: how many the run has, at most; it ends when in a hundred of them the validation loss has not fallen.
        random_state: the seed of the folds, a whole number.

    `fit` sets `coef_`, `intercept_` (but of Cox's model), `penalties_` (a Series by feature where X is a data frame),
    `sites_`, and `history_`, that of the run; None where penalties are given.
    """

    has_intercept, curvature = True, 1.0  # κ
    history_: Any
    _mean, _unit = 0.0, 1.0  # of the target that the model is trained on, where it is standardised
    _target: Any  # (y) -> what `_losses` needs, by row, and each row's stratum for the split, 0 or 1
    _losses: Any  # (z, rows, valid) -> ℓ of a site's rows, (n,), at z = a_jᵀw + b; where not `valid`, whatever

    def __init__(
        self,
        *,
        penalties: Any = None,
        penalty_groups: Sequence[Any] | None = None,
        cv: int = 5,
        rounds: int = 1000,
        random_state: int = 0,
    ) -> None:
        self.penalties = penalties
        self.penalty_groups = penalty_groups
        self.cv = cv
        self.rounds = rounds
        self.random_state = random_state

    @explain_call
    def fit(self, X: Any, y: Any, groups: Any = None) -> Any:
        """Find penalties and coefficients; returns the estimator.

        Args:
            X: numbers, (n, features), as a data frame or an array; `Preparer` makes them of categories and gaps.
            y: the target, (n,); of Cox's model (n, 2): times, and 1 for an event, 0 where it had not come by then.
            groups: the site of each row, (n,); None: all rows are one site's, with a warning.

        Raises:
            ValueError: what does not fit, mostly a ConfigurationError that names column or site.
        """
        if y is None:
            raise ConfigurationError(f"{type(self).__name__} requires y to be passed, but the target y is None")
        found = self._numbers(X, reset=True)
        check_consistent_length(found, y)
        self.sites_, members = sites_of(self, "fit", groups, len(found))
        parts = [np.flatnonzero(members == i) for i in range(len(self.sites_))]
        columns = [moments(f"{name} of X", found[:, k]) for k, name in enumerate(self._names())]
        centre, squares = np.array(columns).T
        spread = np.where(squares > 0, np.sqrt(squares / len(found)), 1)
        rows, scale = {"row": (found - centre) / spread, **self._target(y)}, self.curvature * spread**2
        own, self.history_ = np.arange(len(spread)), None
        with jax.enable_x64(True):
            given = None if self.penalties is None else self._given(len(spread))
            x = self._found(rows, parts) if given is None else scale / (scale + given)
            clients = self._clients(rows, parts, np.full(len(found), -1))  # which all rows train a model without
            y = fb.inner_solution(self._problem(own, 1), clients, x, self._start(len(spread), 1)).y
            self.coef_ = np.asarray(_coefficients(x, y, own))[0] * (self._unit / spread)
        self.penalties_ = scale * (1 - x) / x if given is None else given
        if self.has_intercept:
            self.intercept_ = float(self._mean + self._unit * np.asarray(y["intercept"])[0] - centre @ self.coef_)
        if hasattr(X, "iloc"):
            self.penalties_ = type(X.iloc[0])(self.penalties_, X.columns, name="penalty")
        return self

    def predict(self, X: Any) -> Numbers:
        """Compute a_jᵀw + b, (n,); of Cox's model the log hazard against a site's baseline."""
        check_is_fitted(self)
        return self._numbers(X) @ self.coef_ + getattr(self, "intercept_", 0.0)

    def _found(self, rows: Columns, parts: list[Numbers]) -> Any:
        """Find x_l of each feature, and set `history_`."""
        count, width = rows["row"].shape
        groups = np.arange(width) if self.penalty_groups is None else self.penalty_groups
        _, of = labels("penalty_groups", groups, width, "a label for each feature")
        require(is_count(self.cv) and 2 <= self.cv <= count, "cv", self.cv, f"2 to {count}, the number of rows")
        seed, fold = self.random_state, np.empty(count, np.int32)
        require(isinstance(seed, Integral) and seed >= 0, "random_state", seed, "a whole number from 0 on")
        for i, part in enumerate(parts):
            fold[part] = dealt(rows["stratum"][part], self.cv, np.random.default_rng([seed, i]))
        result = fb.solve(
            fb.layered(fb.SimFBO(local_steps=1, batch_size=None), fb.AdaptiveSteps(x_lr=0.02)),  # x is from 0 to 1
            self._problem(of, self.cv),
            self._clients(rows, parts, fold),
            np.full(np.max(of) + 1, 0.5),
            self._start(width, self.cv),
            rounds=self.rounds,
            eval_every=10,
            callbacks=[fb.stop_without_progress("outer_loss", patience=10)],
            engine=fb.Local(devices=1),
            progress=False,
        )
        self.history_ = result.history
        for row in self.history_.rows:  # losses are squares of what the target is measured in
            row.update({name: row[name] * self._unit**2 for name in ("outer_loss", "inner_loss") if name in row})
        return np.asarray(result.x)[of]

    def _start(self, width: int, models: int) -> dict[str, Numbers]:
        return {"coef": np.zeros((models, width)), **({"intercept": np.zeros(models)} if self.has_intercept else {})}

    def _problem(self, of: Numbers, models: int) -> fb.Bilevel:
        """State the problem, in which x[of[l]] is the share of feature l; a single model is trained on all rows."""
        every = np.arange(models)[:, None]

        def total(x: Array, y: Any, rows: Any, chosen: Array) -> Array:
            z = _coefficients(x, y, of) @ rows["row"].T + y.get("intercept", np.zeros(models))[:, None]
            return jnp.sum(jnp.where(chosen, jax.vmap(self._losses, (0, None, 0))(z, rows, chosen), 0))

        def outer(x: Array, y: Any, rows: Any, valid: Array) -> Array:
            return total(x, y, rows, valid & (rows["fold"] == every)) / jnp.sum(valid)

        def inner(x: Array, y: Any, rows: Any, valid: Array) -> Array:
            mean = total(x, y, rows, valid & (rows["fold"] != every)) / jnp.sum(valid) / (1 - (models > 1) / models)
            return mean + self.curvature * jnp.sum((1 - x[of]) * y["coef"] ** 2)

        return fb.Bilevel(fb.WholeLoss(outer), fb.WholeLoss(inner), project_x=fb.projections.box(0.001, 0.999))

    def _clients(self, rows: Columns, parts: list[Numbers], fold: Numbers) -> fb.Clients:
        """Make a client of each site."""
        all_rows = {**rows, "fold": fold}
        sites = [self._samples({name: values[part] for name, values in all_rows.items()}) for part in parts]
        return fb.Clients(sites, weights="size")

    def _samples(self, rows: Columns) -> Columns:
        """Return a site's samples as `_losses` wants them."""
        return rows

    def _given(self, width: int) -> Numbers:
        given = numbers("penalties", self.penalties)
        fits = given.shape in ((), (width,)) and bool(np.all(np.isfinite(given) & (given >= 0)))
        require(fits, "penalties", self.penalties, f"None, a number from 0 on, or {width} of them")
        return np.broadcast_to(given, width)

    def _names(self) -> list[str]:
        """Name the features in messages, by their columns or numbers."""
        return [f"column {name!r}" for name in getattr(self, "feature_names_in_", range(self.n_features_in_))]

    def _numbers(self, X: Any, reset: bool = False) -> Numbers:
        """Check the features."""
        for name, dtype in zip(getattr(X, "columns", ()), getattr(X, "dtypes", ()), strict=True):
            allowed = "numbers: Preparer makes them of categories; sites are groups, and no column"
            require(getattr(dtype, "kind", "f") in "biuf", f"column {name!r} of X", str(dtype), allowed)
        found = validate_data(self, X, reset=reset, dtype=np.float64, ensure_all_finite=False)
        for k, name in enumerate(self._names()):
            require_sizes(f"{name} of X", found[:, k], "make a code for a gap NaN, and let Preparer fill gaps")
        return found


def _coefficients(x: Any, y: Any, of: Numbers) -> Array:
    """Compute the models' w of features of variance 1, (models, features)."""
    return y["coef"] * jnp.sqrt(x[of])


class Ridge(RegressorMixin, Penalised):  # type: ignore[misc]
    """Linear regression: ℓ = (z − c)². With scikit-learn's `Ridge` on n rows, α = n λ."""

    def _target(self, y: Any) -> Columns:
        target = column_or_1d(numbers("y", y), warn=True)
        require_sizes("y", target, "leave rows without a target out")
        self._mean, squares = moments("y", target)
        self._unit = float(np.sqrt(squares / len(target))) or 1.0
        return {"target": (target - self._mean) / self._unit, "stratum": np.zeros(len(target), np.int32)}

    def _losses(self, z: Array, rows: Any, valid: Array) -> Array:
        return (z - rows["target"]) ** 2


class LogisticRegression(ClassifierMixin, Penalised):  # type: ignore[misc]
    """Logistic regression of two classes: ℓ = log(1 + eᶻ) − c z. With scikit-learn's on n rows, C = 1/(2 n λ)."""

    curvature = 0.125

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags

    def _target(self, y: Any) -> Columns:
        y = column_or_1d(np.asarray(y, object), warn=True)
        self.classes_, label = labels("y", y, len(y), "the class of each row")
        check_classification_targets(self.classes_[label])
        if len(self.classes_) != 2:
            few = "one class only" if len(self.classes_) == 1 else f"{len(self.classes_)} classes"
            raise ConfigurationError(f"y has {few}. Only binary classification is supported")
        return {"label": label.astype(np.float64), "stratum": label.astype(np.int32)}

    def _losses(self, z: Array, rows: Any, valid: Array) -> Array:
        return jax.nn.softplus(z) - rows["label"] * z

    def decision_function(self, X: Any) -> Numbers:
        """Compute the logits of the second class, (n,)."""
        return super().predict(X)

    def predict_proba(self, X: Any) -> Numbers:
        """Compute the probabilities of both classes, (n, 2)."""
        return expit(np.multiply.outer(self.decision_function(X), [-1, 1]))

    def predict(self, X: Any) -> Numbers:
        """Predict the likelier class of each row, (n,)."""
        positive = self.decision_function(X) > 0
        return self.classes_[positive.astype(int)]

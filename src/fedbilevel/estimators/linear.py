"""Linear models of several sites' rows a_j, with a penalty for each feature that is found on validation rows.

Each site i splits its rows at random into training and validation rows. With ℓ the loss of a row, w the coefficients
and b the intercept, which no penalty shrinks,

    g_i = mean of ℓ(a_jᵀw + b, c_j) over training rows + Σ_k λ_k w_k²        f_i = mean of ℓ over validation rows

and each site counts by its training rows, so that g is that of the pooled rows. One run of SimFBO, with full batches
and steps that adapt, finds the λ for which the trained model is best on validation rows. The model that is kept has
these λ and all rows, as scikit-learn's searches refit: Newton's method, which asks sites for gradients and for products
with their Hessians, trains it to rounding.

Of a feature that is uncorrelated to the others, with standard deviation s_k, a penalty leaves about the share
κ s_k²/(κ s_k² + λ_k) of the coefficient, κ being half of ℓ″, or of a bound of it. The run's variables are

    x_k = this share, from 0.001 to 0.999, 0.5 at the start        y_k = w_k s_k/√x_k        λ_k w_k² = κ (1 − x_k) y_k²

and rows are centred, which b makes up for. The Hessian then has the diagonal 2κ, whatever scales and penalties are, and
without correlations f is quadratic in x.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray
from scipy.special import expit
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d, validate_data

from fedbilevel.algorithms.simfbo import SimFBO
from fedbilevel.core.client import Clients
from fedbilevel.core.errors import ConfigurationError, is_number, require
from fedbilevel.core.problem import Bilevel, WholeLoss
from fedbilevel.core.projections import box
from fedbilevel.data.loaders import stratified
from fedbilevel.engines.history import stop_without_progress
from fedbilevel.engines.local.engine import Local
from fedbilevel.engines.solve import solve
from fedbilevel.oracles.exact import solve_inner
from fedbilevel.oracles.population import Population

Floats = NDArray[Any]
Rows = dict[str, Floats]


class Penalised(BaseEstimator):  # type: ignore[misc]
    """Base of the estimators.

    Args:
        penalties: λ, a number or one for each feature; None: found on validation rows.
        penalty_groups: a label for each feature; those of the same label, such as the indicators of one category, share
            a penalty in units of their variances. None: each feature has its own.
        validation: the share of each site's rows on which penalties are judged.
        rounds: how many the run has, at most; it ends when in a hundred of them the validation loss has not fallen.
        random_state: the seed of the split, a whole number.

    `fit` sets `coef_`, `intercept_` (but of Cox's model), `penalties_` (a Series by feature where X is a data frame),
    `sites_`, and `history_`, that of the run; None where penalties are given.
    """

    has_intercept, curvature = True, 1.0  # κ
    history_: Any
    _target: Any  # (y) -> what `_losses` needs, by row, and each row's stratum for the split, 0 or 1
    _losses: Any  # (z, rows, valid) -> ℓ of a site's rows, (n,), at z = a_jᵀw + b; where not `valid`, whatever

    def __init__(
        self,
        *,
        penalties: Any = None,
        penalty_groups: Sequence[Any] | None = None,
        validation: float = 0.5,
        rounds: int = 1000,
        random_state: int = 0,
    ) -> None:
        self.penalties = penalties
        self.penalty_groups = penalty_groups
        self.validation = validation
        self.rounds = rounds
        self.random_state = random_state

    def fit(self, X: Any, y: Any, groups: Any = None) -> Any:
        """Find penalties and coefficients; returns the estimator.

        Args:
            X: numbers, (n, features), as a data frame or an array; `Preparer` makes them of categories and gaps.
            y: the target, (n,); of Cox's model (n, 2): times, and 1 for an event, 0 where it had not come by then.
            groups: the site of each row, (n,); None: all rows are one site's.

        Raises:
            ValueError: what does not fit, mostly a ConfigurationError that names column or site.
        """
        require(y is not None, "y", y, "the target, an entry for each row")
        found = self._numbers(X, reset=True)
        sites = np.zeros(len(found), int) if groups is None else column_or_1d(groups)
        check_consistent_length(found, y, sites)
        require(all(site is not None and site == site for site in sites), "groups", "a gap", "the site of each row")
        self.sites_, members = np.unique(sites, return_inverse=True)
        parts = [np.flatnonzero(members == i) for i in range(len(self.sites_))]
        centre, spread = found.mean(0), np.where(np.ptp(found, axis=0) > 0, found.std(0), 1)
        rows = {"row": found - centre, **self._target(y)}
        y0: Any = {"coef": np.zeros(len(spread)), **({"intercept": np.zeros(())} if self.has_intercept else {})}
        with jax.enable_x64(True):
            own, scale, self.history_ = np.arange(len(spread)), self.curvature * spread**2, None
            x = (
                self._found(rows, parts, spread, y0)
                if self.penalties is None
                else scale / (scale + self._given(spread))
            )
            y = solve_inner(Population.of(self._problem(spread, own), self._clients(rows, parts)), x, y0).y
            self.coef_ = np.asarray(_coefficients(x, y, spread, own))
            self.penalties_ = scale * (1 - x) / x
        if self.has_intercept:
            self.intercept_ = float(y["intercept"] - self.coef_ @ centre)
        if hasattr(X, "iloc"):
            self.penalties_ = type(X.iloc[0])(self.penalties_, X.columns, name="penalty")
        return self

    def predict(self, X: Any) -> Floats:
        """Compute a_jᵀw + b, (n,); of Cox's model the log hazard against a site's baseline."""
        check_is_fitted(self)
        return self._numbers(X) @ self.coef_ + getattr(self, "intercept_", 0.0)

    def _found(self, rows: Rows, parts: list[Floats], spread: Floats, y0: Any) -> Any:
        """Find log λ of each feature on the sites' validation rows, and set `history_`."""
        share, labels = self.validation, np.arange(len(spread)) if self.penalty_groups is None else self.penalty_groups
        require(is_number(share) and 0 < share < 1, "validation", share, "above 0 and below 1")
        require(np.shape(labels) == spread.shape, "penalty_groups", labels, f"{len(spread)} labels, one a feature")
        of = np.unique(np.asarray(labels), return_inverse=True)[1]
        drawn = []
        for i, (site, part) in enumerate(zip(self.sites_, parts, strict=True)):
            if len(part) < 2:
                raise ConfigurationError(f"site {site} has 1 row; it needs 2, to train on one and judge by the other")
            drawn.append([part[half] for half in stratified(rows["stratum"][part], share, self.random_state + i)])
        result = solve(
            SimFBO(local_steps=1, batch_size=None),
            self._problem(spread, of, box(0.001, 0.999)),
            self._clients(rows, *zip(*drawn, strict=True)),
            np.full(np.max(of) + 1, 0.5),
            y0,
            rounds=self.rounds,
            eval_every=10,
            callbacks=[stop_without_progress("outer_loss", patience=10)],
            engine=Local(devices=1),
            progress=False,
        )
        self.history_ = result.history
        return np.asarray(result.x)[of]

    def _problem(self, spread: Floats, of: Floats, project_x: Any = None) -> Bilevel:
        """State the problem, in which x[of[k]] is the share of feature k."""

        def outer(x: Array, y: Any, rows: Any, valid: Array) -> Array:
            z = rows["row"] @ _coefficients(x, y, spread, of) + y.get("intercept", 0.0)
            return jnp.sum(jnp.where(valid, self._losses(z, rows, valid), 0)) / jnp.sum(valid)

        def inner(x: Array, y: Any, rows: Any, valid: Array) -> Array:
            return outer(x, y, rows, valid) + self.curvature * jnp.vdot(1 - x[of], y["coef"] ** 2)

        return Bilevel(WholeLoss(outer), WholeLoss(inner), project_x=project_x)

    def _clients(self, rows: Rows, *losses: Any) -> Clients:
        """Make a client of each site; for each loss are given the numbers of each site's rows."""
        taken = [[{name: values[part] for name, values in rows.items()} for part in parts] for parts in losses]
        return Clients(*[[self._samples(one) for one in each] for each in taken], weights="size")

    def _samples(self, rows: Rows) -> Rows:
        """Return a site's samples as `_losses` wants them."""
        return rows

    def _given(self, spread: Floats) -> Floats:
        given, width = np.asarray(self.penalties, float), len(spread)
        fits = given.shape in ((), (width,)) and bool(np.all(np.isfinite(given) & (given >= 0)))
        require(fits, "penalties", self.penalties, f"None, a number from 0 on, or {width} of them")
        return given

    def _numbers(self, X: Any, reset: bool = False) -> Floats:
        """Check the features."""
        found = validate_data(self, X, reset=reset, dtype=np.float64, ensure_all_finite="allow-nan")
        names = getattr(self, "feature_names_in_", range(found.shape[1]))
        for name, finite in zip(names, np.isfinite(found).all(0), strict=True):
            require(finite, f"column {name!r} of X", "a gap or infinity", "finite numbers: Preparer fills gaps")
        return found


def _coefficients(x: Any, y: Any, spread: Floats, of: Floats) -> Array:
    """Compute w of the run's variables."""
    return y["coef"] * jnp.sqrt(x[of]) / spread


class Ridge(RegressorMixin, Penalised):  # type: ignore[misc]
    """Linear regression: ℓ = (z − c)². With scikit-learn's `Ridge` on n rows, α = n λ."""

    def _target(self, y: Any) -> Rows:
        target = column_or_1d(y, dtype=np.float64, warn=True)
        require(bool(np.isfinite(target).all()), "y", "a gap or infinity", "finite numbers")
        return {"target": target, "stratum": np.zeros(len(target), np.int32)}

    def _losses(self, z: Array, rows: Any, valid: Array) -> Array:
        return (z - rows["target"]) ** 2


class LogisticRegression(ClassifierMixin, Penalised):  # type: ignore[misc]
    """Logistic regression of two classes: ℓ = log(1 + eᶻ) − c z. With scikit-learn's on n rows, C = 1/(2 n λ)."""

    curvature = 0.125

    def _target(self, y: Any) -> Rows:
        self.classes_, label = np.unique(column_or_1d(y, warn=True), return_inverse=True)
        require(len(self.classes_) == 2, "classes of y", self.classes_.tolist(), "two")
        return {"label": label.astype(np.float64), "stratum": label.astype(np.int32)}

    def _losses(self, z: Array, rows: Any, valid: Array) -> Array:
        return jax.nn.softplus(z) - rows["label"] * z

    def decision_function(self, X: Any) -> Floats:
        """Compute the logits of the second class, (n,)."""
        return super().predict(X)

    def predict_proba(self, X: Any) -> Floats:
        """Compute the probabilities of both classes, (n, 2)."""
        return expit(np.multiply.outer(self.decision_function(X), [-1, 1]))

    def predict(self, X: Any) -> Floats:
        """Predict the likelier class of each row, (n,)."""
        return self.classes_[(self.decision_function(X) > 0).astype(int)]

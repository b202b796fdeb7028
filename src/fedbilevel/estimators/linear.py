"""Fit linear models to the rows of several sites, and find the penalties by cross-validation.

Row j has the features a_j and the target c_j. Each site i divides its n_i rows into K folds with equal shares of the
classes; k_j is the fold of row j. There are K + 1 models; model k has the coefficients w_k and an intercept b_k, which
has no penalty. Model k < K is trained without fold k. Model K is trained on all rows, and is the model that is
returned. With the loss ℓ of a row and the penalty λ_l of feature l,

    g_i = Σ_k [1/(s_k n_i) Σ_{j: k_j ≠ k} ℓ(a_jᵀw_k + b_k, c_j) + Σ_l λ_l w_kl²]      s_k = 1 − 1/K, s_K = 1
    f_i = 1/n_i Σ_j ℓ(a_jᵀw_{k_j} + b_{k_j}, c_j)

The weight of a site is its number of rows, so that F and G are the losses of the pooled rows. The search minimises F
over λ: it finds the penalties with which models predict best on rows on which they were not trained.

Models are trained on standardised rows, and their coefficients are converted back. Features with the same penalty have
a common variable

    x = λ_l/(κ s_l²), from 1/999 to 999, 1 at the start

where s_l is the feature's standard deviation, and κ is half of ℓ″, or half of a bound of ℓ″. If a feature is
uncorrelated with the others, such a penalty leaves about the share 1/(1 + x) of its coefficient. With at most WIDE
features the search is exact (`penalty_search`). With more, fb.SimFBO finds these shares (`wide_search`). `fold_models`
has the losses of the models, and `training` runs the searches.
"""

from collections.abc import Callable, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from jax import Array
from scipy.special import expit
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d, validate_data

import fedbilevel as fb
from fedbilevel.data import dealt, generator_of_site, strata_of
from fedbilevel.errors import ConfigurationError
from fedbilevel.estimators import coefficient_errors
from fedbilevel.estimators.coefficient_errors import Minimum
from fedbilevel.estimators.columns import Numbers, labels, moments, numbers, refusal, require_sizes, sites_of
from fedbilevel.estimators.fold_models import FoldModels
from fedbilevel.estimators.training import Training
from fedbilevel.extending import explain_call, explain_misspelt, is_count, require

Columns = dict[str, Numbers]


@explain_misspelt
class Penalised(BaseEstimator):  # type: ignore[misc]
    """The base class of the estimators of linear models.

    Args:
        penalties: λ, a single number or a number for each feature; None: found by cross-validation.
        penalty_groups: "one": all features share one penalty, which is multiplied by the variance of each feature.
            "feature": each feature has a penalty of its own. A list with a label for each feature: features with the
            same label share a penalty.
        cv: K, the number of folds.
        rounds: the largest number of exchanges with the sites. The search usually ends after a few dozen exchanges,
            when the projected gradient is small. With more than 300 features, the search ends when the validation loss
            has not fallen for a hundred exchanges, and `rounds` has two meanings. It bounds the exchanges of the
            search. It also bounds the steps of Newton's method for the final model, and each of these steps has several
            exchanges. If one of the bounds is reached, `fit` issues a sklearn.exceptions.ConvergenceWarning.
        random_state: the seed of the folds, a whole number. A site's folds depend on it, the site's name, and its rows.

    `fit` sets `coef_`, `intercept_` (not for Cox's model), `penalties_` (a Series by feature if X is a data frame) and
    `sites_`. `history_` is the history of the search, or None if penalties are given. `ledgers_` has the costs of each
    run of exchanges: there is one run, or two if penalties of more than 300 features are searched.

    `standard_errors_` are the standard errors of `coef_`, and `covariance_` is the covariance of `coef_` and, in the
    last row and column, of the intercept. Both are None with more than 300 features. If H is the Hessian of the mean
    training loss of n rows, and Λ = diag λ, the covariance is (H + 2Λ)⁻¹ H (H + 2Λ)⁻¹/n. For `Ridge` it is multiplied
    by twice the residual variance, with n − tr H(H + 2Λ)⁻¹ degrees of freedom. If patients are passed to `fit`, rows of
    a patient may depend on each other: the covariance is (H + 2Λ)⁻¹ V (H + 2Λ)⁻¹/n², where V = m/(m − 1) Σ_c u_c u_cᵀ,
    and u_c is the sum over the rows of patient c of the gradients of their losses, less the mean gradient of all rows.
    There are m patients; a patient with rows at two sites counts as two. With a single patient both attributes are
    None.

    The errors describe how the coefficients vary about the values to which penalised coefficients tend, not about the
    true ones, and ignore that the penalties were chosen from the data (Gray, JASA 1992). Without a penalty they are the
    usual standard errors.
    """

    has_intercept, curvature = True, 1.0  # κ
    history_: Any
    ledgers_: list[Any]
    penalties_: Any
    _mean, _unit = 0.0, 1.0  # the target's mean and standard deviation, if the model standardises the target
    _varies = True  # False: the target is the same in all rows, so that its deviation is 0, and `_unit` is 1
    _target: Any  # (y) -> (arrays for `_losses`, each row's stratum for the folds, 0 or 1)
    _encoded: Any  # (y of some rows) -> arrays for `_losses`, after `fit` has seen all rows
    _losses: Any  # (z, rows, valid) -> ℓ of each row of a site at z = a_jᵀw + b; any number where not `valid`
    _scores: Any  # (z, design, rows) -> the scores of a site's rows, of shape (n, D); `rows` are those of `_samples`
    _minimum: Minimum | None  # the end of the last model's training; None with many features

    def __init__(
        self,
        *,
        penalties: Any = None,
        penalty_groups: str | Sequence[Any] = "one",
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
    def fit(self, X: Any, y: Any, groups: Any = None, patients: Any = None) -> Self:
        """Find the penalties and the coefficients. Return the estimator.

        Args:
            X: the features of each row, numbers in a data frame or an array; `Preparer` turns categories and gaps into
                numbers.
            y: the target of each row. For Cox's model, two columns: the time of each row, and 1 if the event came at
                this time, or 0 if it had not come by then.
            groups: the site of each row. None: all rows are treated as rows of one site, with a warning.
            patients: the patient of each row. All rows of a patient at a site are put into one fold, and count together
                in standard errors. None: each row is a different patient.

        Raises:
            ValueError: an argument is wrong. It is usually a ConfigurationError, which names the column or the site.
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
        rows = {"row": (found - centre) / spread, **self._target(y)}
        rows["fold"] = np.zeros(len(found), np.int32)
        if patients is not None:
            patients = labels("patients", patients, len(found), "whose each row is")[1]
        if self.penalties is None:
            self._check_folds(len(found))
            for site, part in zip(self.sites_, parts, strict=True):
                some = None if patients is None else patients[part]
                rows["fold"][part] = self._folds(site, rows["stratum"][part], some)
        own = [{name: values[part] for name, values in rows.items()} for part in parts]
        sites = [self._samples(one) for one in own]
        with jax.enable_x64(True):
            self._train(fb.Clients(sites, weights="size"), centre, spread, len(found), fb.Local(devices=1))
        if patients is not None:
            known = [(one, patients[part]) for one, part in zip(own, parts, strict=True)]
            self._count_patients(lambda question: [coefficient_errors.answer(self, *one, question) for one in known])
        if hasattr(X, "iloc"):
            self.penalties_ = type(X.iloc[0])(self.penalties_, X.columns, name="penalty")
        return self

    def predict(self, X: Any) -> Numbers:
        """Return the prediction a_jᵀw + b for each row.

        For Cox's model, this is the log hazard above the site's baseline.
        """
        check_is_fitted(self)
        return self._numbers(X) @ self.coef_ + getattr(self, "intercept_", 0.0)

    def _check_folds(self, count: int) -> None:
        seed = self.random_state
        require(is_count(self.cv) and 2 <= self.cv <= count, "cv", self.cv, f"2 to {count}, the number of rows")
        require(isinstance(seed, Integral) and seed >= 0, "random_state", seed, "a whole number from 0 on")

    def _folds(self, site: Any, stratum: Numbers, patients: Numbers | None) -> Numbers:
        """Divide a site's rows into folds with equal shares of the strata.

        All rows of a patient are in the same fold.
        """
        rng = generator_of_site(int(self.random_state), str(site))
        if patients is None:
            return dealt(stratum, self.cv, rng)
        strata, patient = strata_of(patients, stratum)
        return dealt(strata, self.cv, rng)[patient]

    def _train(
        self,
        clients: Any,
        centre: Numbers,
        spread: Numbers,
        rows: int,
        engine: Any,
        checkpoint: Path | None = None,
        on_searched: Callable[[], None] = lambda: None,
    ) -> None:
        """Find penalties and coefficients, and set the attributes of `fit`.

        The features have the means `centre` and the standard deviations `spread`.

        Args:
            checkpoint: the file to which the exact search is saved after each exchange, and from which it resumes. With
                many features, only the training of the last model is saved and resumed in this way; the result of the
                search is saved in a file of the same name with the suffix .json. None: nothing is saved.
            on_searched: a function that is called between the two runs that many features need.
        """
        scale, width = self.curvature * spread**2, len(spread)
        self.history_, self.ledgers_ = None, []  # forget those of an earlier fit
        given = None if self.penalties is None else self._given(width)
        models, name = self._models(width), type(self).__name__
        training = Training(models, name, clients, engine, self.rounds, checkpoint, on_searched)
        train = training.few_features if models.exact else training.many_features
        x, y, last = train(None if given is None else given / scale)
        self.history_, self.ledgers_ = training.history, training.ledgers
        for row in self.history_.rows if self.history_ else ():  # to squared units of the target
            row.update({loss: row[loss] * self._unit**2 for loss in ("outer_loss", "inner_loss") if loss in row})
        self.penalties_ = scale * x if given is None else given
        self.coef_ = np.asarray(y["coef"])[-1] * (self._unit / spread)
        if self.has_intercept:
            self.intercept_ = float(self._mean + self._unit * np.asarray(y["intercept"])[-1] - centre @ self.coef_)

        self._minimum = covariance = None
        if last is not None:
            w = np.append(y["coef"][-1], y["intercept"][-1]) if self.has_intercept else np.asarray(y["coef"])[-1]
            penalty = np.append(2 * self.curvature * x, 0.0)[: len(w)]
            unit = np.diag(np.append(1 / spread, 1.0) * self._unit)
            unit[-1, :width] = -self._unit * centre / spread
            gradient, hessian = last
            self._minimum = Minimum(w, gradient, hessian, penalty, unit[: len(w), : len(w)], rows)
            covariance = self._minimum.covariance(rows * self._dispersion(self._minimum) * hessian)
        self._keep_covariance(covariance)

    def _keep_covariance(self, covariance: Numbers | None) -> None:
        """Set `covariance_` and `standard_errors_`."""
        self.covariance_ = covariance
        self.standard_errors_ = None if covariance is None else np.sqrt(np.diag(covariance)[: len(self.coef_)])

    def _count_patients(self, ask: Callable[[dict[str, Any]], Sequence[Any]]) -> None:
        """Compute the errors anew, with the rows of a patient counted together.

        Args:
            ask: a function (question) -> the answers of the sites `sites_`, as `coefficient_errors.answer` makes them.
        """
        if self._minimum is not None:
            answers = dict(zip(map(str, self.sites_), ask(self._minimum.question), strict=True))
            self._keep_covariance(self._minimum.covariance_by_patient(answers))

    def _dispersion(self, minimum: Minimum) -> float:
        """Return the ratio of the variance of a row's score to the mean second derivative; 1 for a log likelihood."""
        return 1.0

    def _models(self, width: int) -> FoldModels:
        """Return the models for this number of features.

        The penalty of each feature is that of its group or, if penalties are given, its own.
        """
        search, groups = self.penalties is None, self.penalty_groups
        if not search:
            of = np.arange(width)
        elif isinstance(groups, str):
            allowed = "'one', 'feature', or a label for each feature"
            require(groups in ("one", "feature"), "penalty_groups", groups, allowed)
            of = np.zeros(width, int) if groups == "one" else np.arange(width)
        else:
            of = labels("penalty_groups", groups, width, "a label for each feature")[1]
        return FoldModels(self._losses, self.curvature, self.has_intercept, self.cv, of, search)

    def _samples(self, rows: Columns) -> Columns:
        """Return a site's samples in the form that `_losses` needs."""
        return rows

    def _given(self, width: int) -> Numbers:
        given = numbers("penalties", self.penalties)
        fits = given.shape in ((), (width,)) and bool(np.all(np.isfinite(given) & (given >= 0)))
        require(
            fits,
            "penalties",
            self.penalties,
            f"None, a number that is at least 0, or {width} such numbers (one for each column)",
        )
        return np.broadcast_to(given, width)

    def _names(self) -> list[str]:
        """Return names of the features for messages: the names of their columns or, if there are none, the numbers."""
        return [f"column {name!r}" for name in getattr(self, "feature_names_in_", range(self.n_features_in_))]

    def _numbers(self, X: Any, reset: bool = False) -> Numbers:
        """Return the features as an array of shape (n, features), after a check of each column."""
        for name, dtype in zip(getattr(X, "columns", ()), getattr(X, "dtypes", ()), strict=True):
            if getattr(dtype, "kind", "f") not in "biuf":
                field, got = f"column {name!r} of X", str(dtype)
                allowed = "numbers; Preparer turns categories into numbers, and groups has the site of each row"
                raise refusal(field, f"the type {got}", got, allowed)
        found = validate_data(self, X, reset=reset, dtype=np.float64, ensure_all_finite=False)
        for k, name in enumerate(self._names()):
            require_sizes(f"{name} of X", found[:, k], "Preparer fills gaps (NaN); replace codes for gaps by NaN first")
        return found


class Ridge(RegressorMixin, Penalised):  # type: ignore[misc]
    """A linear regression with a ridge penalty.

    The loss of a row with the target c is ℓ = (z − c)², where z is the prediction. In scikit-learn's `Ridge`, the
    penalty λ on n rows is α = n λ.
    """

    def _target(self, y: Any) -> Columns:
        target = column_or_1d(numbers("y", y), warn=True)
        require_sizes("y", target, "leave rows without a target out")
        self._mean, squares = moments("y", target)
        self._unit, self._varies = float(np.sqrt(squares / len(target))) or 1.0, bool(squares > 0)
        return self._encoded(target)

    def _encoded(self, target: Numbers) -> Columns:
        return {"target": (target - self._mean) / self._unit, "stratum": np.zeros(len(target), np.int32)}

    def _losses(self, z: Array, rows: Any, valid: Array) -> Array:
        return (z - rows["target"]) ** 2

    def _scores(self, z: Numbers, design: Numbers, rows: Any) -> Numbers:
        return 2 * (z - rows["target"])[:, None] * design

    def _dispersion(self, minimum: Minimum) -> float:
        """Return twice the residual variance.

        It follows from gradient and Hessian, since the loss of a standardised target is quadratic in w, and at w = 0 it
        is 1, or 0 if the target is constant.
        """
        w, gradient, hessian, *_, rows = minimum
        freedom = float(np.sum(minimum.inverse * hessian))
        residual = max(float(self._varies + gradient @ w - w @ hessian @ w / 2), 0.0)  # of a perfect fit, by rounding
        return 2 * residual * rows / max(rows - freedom, 1.0)


class LogisticRegression(ClassifierMixin, Penalised):  # type: ignore[misc]
    """A logistic regression of two classes with a ridge penalty.

    The loss of a row is ℓ = log(1 + eᶻ) − c z, where z is the predicted log odds, and c is 1 for the second class and
    otherwise 0.

    In scikit-learn's `LogisticRegression`, the penalty λ on n rows is C = 1/(2 n λ).
    """

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
        return self._encoded(label)

    def _encoded(self, label: Numbers) -> Columns:
        return {"label": label.astype(np.float64), "stratum": label.astype(np.int32)}

    def _losses(self, z: Array, rows: Any, valid: Array) -> Array:
        return jax.nn.softplus(z) - rows["label"] * z

    def _scores(self, z: Numbers, design: Numbers, rows: Any) -> Numbers:
        return (expit(z) - rows["label"])[:, None] * design

    def decision_function(self, X: Any) -> Numbers:
        """Return the predicted log odds of the second class for each row."""
        return super().predict(X)

    def predict_proba(self, X: Any) -> Numbers:
        """Return the predicted probabilities of both classes for each row, as an array of shape (n, 2)."""
        return expit(np.multiply.outer(self.decision_function(X), [-1, 1]))

    def predict(self, X: Any) -> Numbers:
        """Return the more probable class for each row."""
        positive = self.decision_function(X) > 0
        return self.classes_[positive.astype(int)]

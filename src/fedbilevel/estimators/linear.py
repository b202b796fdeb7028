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
features the search is exact (`penalty_search`). With more, fb.SimFBO finds these shares (`wide_search`).
"""

import json
import warnings
from collections.abc import Callable, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.special import expit
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d, validate_data

import fedbilevel as fb
from fedbilevel.data import dealt, generator_of_site, strata_of
from fedbilevel.errors import ConfigurationError, NumericalWarning
from fedbilevel.estimators import coefficient_errors
from fedbilevel.estimators.coefficient_errors import Minimum
from fedbilevel.estimators.columns import Numbers, labels, moments, numbers, refusal, require_sizes, sites_of
from fedbilevel.estimators.penalty_search import PenaltySearch
from fedbilevel.estimators.preparer import read_saved
from fedbilevel.estimators.wide_search import Newton, in_shares, share_search
from fedbilevel.extending import explain_call, explain_misspelt, is_count, require, warn, write_text

Columns = dict[str, Numbers]
LossOfRows = Callable[[Array, Any, Any, Array], Array]
"""A function (x, y, rows, valid) -> the mean loss of a site's rows, a scalar."""
WIDE = 300
"""The largest number of features for which the search is exact.

With n features and K folds, a reply of a site in the exact search has (K + 1) n² numbers.
"""
LARGEST = 999.0  # the upper bound of x


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
            on_searched: a function that is called between the two runs that many features need (see `_posed`).
        """
        scale, width, self.history_, self.ledgers_ = self.curvature * spread**2, len(spread), None, []
        given = None if self.penalties is None else self._given(width)
        if width <= WIDE:
            x, y, last = self._exact(clients, given, scale, engine, checkpoint)
        else:
            x, y, last = self._wide(clients, given, scale, engine, checkpoint, on_searched)
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

    def _posed(self, width: int, searched: bool = False) -> tuple[Any, fb.Bilevel, Numbers, dict[str, Numbers]]:
        """Return algorithm, problem, x0 and y0, the arguments of `solve` for this number of features.

        For many features there are two runs: the search and, when it has ended (`searched` is True), the training of
        the last model.
        """
        of, every = self._groups(width), np.arange(self.cv + 1)
        search, last = self.penalties is None and not searched, every[-1:]
        if width <= WIDE:
            names = tuple(map(str, of))
            algorithm = PenaltySearch(groups=names, curvature=self.curvature, largest=LARGEST, search=search)
            folds = every if search else last
            return algorithm, self._problem(of, folds), np.ones(np.max(of) + 1), self._start(width, len(folds))
        if search:
            problem = in_shares(*self._functions(of, every[:-1]), of, LARGEST)
            return share_search(), problem, np.full(np.max(of) + 1, 0.5), self._start(width, self.cv)
        each = np.arange(width)
        problem = in_shares(*self._functions(each, last), each)
        return Newton(), problem, np.full(width, 0.5), self._start(width, 1)

    def _exact(
        self, clients: Any, given: Numbers | None, scale: Numbers, engine: Any, checkpoint: Path | None
    ) -> tuple[Numbers, Any, Any]:
        """Find the penalties, unless `given` has them, and train the models, for at most WIDE features.

        Return x, the models (the last is trained on all rows), and the last model's training derivatives.
        """
        algorithm, problem, x0, y0 = self._posed(len(scale))
        x0 = x0 if given is None else given / scale
        with warnings.catch_warnings():  # the loss of held-out rows may end above its value at coefficients of 0
            warnings.simplefilter("ignore", NumericalWarning)
            result = self._solved((algorithm, problem, x0, y0), clients, engine, checkpoint, eval_every=1)
        if algorithm.search:
            self._keep(result.history)
        left, where = float(result.state.best.left), f"where {algorithm.tolerance:g} or less ends the search"
        if algorithm.search and not left <= algorithm.tolerance:
            self._warn(f"the projected gradient is {left:.1e} after {result.round} exchanges, {where}")
        elif not algorithm.finished(result.state):
            self._warn(f"the coefficients still move after {result.round} exchanges")
        known = result.state.known
        last = np.asarray(known.gradient[-1]), np.asarray(known.hessian[-1])
        return np.asarray(result.x)[algorithm.of], result.y, last

    def _wide(
        self,
        clients: Any,
        given: Numbers | None,
        scale: Numbers,
        engine: Any,
        checkpoint: Path | None,
        on_searched: Callable[[], None],
    ) -> tuple[Numbers, Any, None]:
        """Do the same as `_exact`, for more than WIDE features. Return x, the models, and None for derivatives."""
        algorithm, problem, _, y = self._posed(len(scale), searched=True)
        if given is None:
            shares, y = self._shares(len(scale), clients, engine, checkpoint and checkpoint.with_suffix(".json"))
            on_searched()
        else:
            shares = 1 / (1 + given / scale)
        result = self._solved((algorithm, problem, shares, y), clients, engine, checkpoint)
        if not algorithm.finished(result.state):
            self._warn(f"the coefficients still move after {result.round} steps of Newton's method")
        return 1 / shares - 1, {**result.y, "coef": np.asarray(result.y["coef"]) * np.sqrt(shares)}, None

    def _shares(self, width: int, clients: Any, engine: Any, file: Path | None) -> tuple[Numbers, dict[str, Numbers]]:
        """Return each feature's share and the start of the last model, from a search or from a file with its result.

        The search itself is not saved. Steps at the sites adapt to measured curvature, and the measurements are lost
        when a site's process ends.
        """
        if file is not None and file.exists():
            content = read_saved(file, dict)
        else:
            stop = fb.stop_without_progress("outer_loss", patience=10)
            found = self._solved(self._posed(width), clients, engine, eval_every=10, callbacks=[stop])
            self._keep(found.history)
            y = {name: np.mean(np.asarray(leaf), axis=0, keepdims=True).tolist() for name, leaf in found.y.items()}
            shares = np.asarray(found.x)[self._groups(width)].tolist()
            content = {"shares": shares, "y": y, "rounds": found.round, "stopped": bool(found.stopped)}
            if file is not None:
                write_text(file, json.dumps(content))
        if not content["stopped"]:
            self._warn(f"the validation loss still falls after {content['rounds']} rounds")
        return np.array(content["shares"]), {name: np.array(leaf) for name, leaf in content["y"].items()}

    def _solved(
        self, posed: tuple[Any, ...], clients: Any, engine: Any, checkpoint: Path | None = None, **options: Any
    ) -> fb.Result:
        """Run `solve` with the arguments of `_posed`, or resume it from a checkpoint. Add its costs to `ledgers_`."""
        algorithm, problem, x0, y0 = posed
        options |= {"rounds": self.rounds, "engine": engine, "progress": False}
        if checkpoint is not None:
            options |= {"checkpoint": checkpoint, "checkpoint_every": 1, "resume": "auto"}
        result = fb.solve(algorithm, problem, clients, x0, y0, **options)
        self.ledgers_.append(result.ledger)
        return result

    def _warn(self, why: str) -> None:
        warn(ConvergenceWarning(f"{type(self).__name__} has not converged: {why}. A larger `rounds` may help"))

    def _keep(self, history: Any) -> None:
        """Set `history_`. Its losses are converted to squared units of the target."""
        self.history_ = history
        for row in history.rows:
            row.update({name: row[name] * self._unit**2 for name in ("outer_loss", "inner_loss") if name in row})

    def _groups(self, width: int) -> Numbers:
        """Return the index of each feature's penalty: its group's index or, if penalties are given, its own."""
        if self.penalties is not None or isinstance(self.penalty_groups, str):
            known = self.penalties is not None or self.penalty_groups in ("one", "feature")
            require(known, "penalty_groups", self.penalty_groups, "'one', 'feature', or a label for each feature")
            each = self.penalties is not None or self.penalty_groups == "feature"
            return np.arange(width) if each else np.zeros(width, int)
        return labels("penalty_groups", self.penalty_groups, width, "a label for each feature")[1]

    def _start(self, width: int, models: int) -> dict[str, Numbers]:
        return {"coef": np.zeros((models, width)), **({"intercept": np.zeros(models)} if self.has_intercept else {})}

    def _problem(self, of: Numbers, folds: Numbers) -> fb.Bilevel:
        return fb.Bilevel(*map(fb.WholeLoss, self._functions(of, folds)))

    def _functions(self, of: Numbers, folds: Numbers) -> tuple[LossOfRows, LossOfRows]:
        """Return f and g for models that leave out these folds; feature l has the penalty κ x[of[l]].

        The fold `cv` contains no rows, so the model without this fold is trained on all rows. If it is the only model,
        f is its loss on all rows.
        """
        every, share = folds[:, None], np.where(folds < self.cv, 1 - 1 / self.cv, 1.0)[:, None]

        def losses(y: Any, rows: Any, chosen: Array) -> Array:
            z = y["coef"] @ rows["row"].T + y.get("intercept", np.zeros(len(folds)))[:, None]
            return jnp.where(chosen, jax.vmap(self._losses, (0, None, 0))(z, rows, chosen), 0)

        def outer(x: Array, y: Any, rows: Any, valid: Array) -> Array:
            return jnp.sum(losses(y, rows, valid & ((rows["fold"] == every) | (len(folds) == 1)))) / jnp.sum(valid)

        def inner(x: Array, y: Any, rows: Any, valid: Array) -> Array:
            mean = jnp.sum(losses(y, rows, valid & (rows["fold"] != every)) / share) / jnp.sum(valid)
            return mean + self.curvature * jnp.sum(x[of] * y["coef"] ** 2)

        return outer, inner

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
        self._unit = float(np.sqrt(squares / len(target))) or 1.0
        return self._encoded(target)

    def _encoded(self, target: Numbers) -> Columns:
        return {"target": (target - self._mean) / self._unit, "stratum": np.zeros(len(target), np.int32)}

    def _losses(self, z: Array, rows: Any, valid: Array) -> Array:
        return (z - rows["target"]) ** 2

    def _scores(self, z: Numbers, design: Numbers, rows: Any) -> Numbers:
        return 2 * (z - rows["target"])[:, None] * design

    def _dispersion(self, minimum: Minimum) -> float:
        """Return twice the residual variance.

        It follows from gradient and Hessian, since the loss of a standardised target is 1 at w = 0 and quadratic in w.
        """
        w, gradient, hessian, *_, rows = minimum
        freedom = float(np.sum(minimum.inverse * hessian))
        return 2 * float(1 + gradient @ w - w @ hessian @ w / 2) * rows / max(rows - freedom, 1.0)


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

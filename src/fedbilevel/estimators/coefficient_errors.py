"""Compute the covariance of coefficients, from the Hessian or, if patients have several rows, from their scores.

A model has D coefficients w of standardised rows; the last of them is the intercept, if there is one. H is the Hessian
of the mean training loss of n rows, and P the diagonal matrix with the second derivatives of the penalties. The score
s_j of row j is its part in the gradient of the summed training loss. More precisely, it is the derivative of this
gradient in the weight of the row, since a row of Cox's model also has a part in the losses of earlier rows. Then

    covariance of w = (H + P)⁻¹ V (H + P)⁻¹/n²

where V is the covariance of Σ_j s_j. If each row is of a different patient, and the model is right, V = n H, multiplied
for linear regression by twice the residual variance. If rows of a patient may depend on each other, V is estimated from
the scores that are summed by patient:

    V = m/(m − 1) Σ_c u_c u_cᵀ      u_c = Σ_{j of c} (s_j − s)      s = 1/n Σ_j s_j

Here c runs over the m patients of all sites. Patients of two sites count as different. The mean score s is not 0, since
at the minimum it is opposite to the gradient of the penalties. This is the sandwich estimator of Liang and Zeger
(Biometrika 1986) and, for Cox's model, of Lin and Wei (JASA 1989). It needs many patients: with fewer than some dozens,
or about as many as coefficients, it is too small.

Sites keep their rows. The server sends w and the mean score to each site, and the site replies with its Σ_c u_c u_cᵀ
and its number of patients.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedbilevel.errors import DataWarning
from fedbilevel.estimators.columns import Numbers, numbers, numbers_asked
from fedbilevel.estimators.measures import sums_by_patient
from fedbilevel.extending import is_count, require, warn

SCORES = "mean gradient"  # the entry of a question to sites that contains the mean score


class Minimum(NamedTuple):
    """The model at the end of its training, with the derivatives of the mean training loss of all rows."""

    w: Numbers  # (D,)
    gradient: Numbers  # (D,): s, without the penalties
    hessian: Numbers  # (D, D): H, without the penalties
    penalty: Numbers  # (D,): the diagonal of P
    unit: Numbers  # (D, D): the derivatives of `coef_` and `intercept_` in w
    rows: int  # n

    @property
    def inverse(self) -> Numbers:
        """Return (H + P)⁻¹."""
        return np.linalg.pinv(self.hessian + np.diag(self.penalty), hermitian=True)

    def covariance(self, of_scores: Numbers) -> Numbers:
        """Return the covariance of `coef_` and `intercept_`, from V, the covariance of the sum of scores."""
        half = self.unit @ self.inverse / self.rows
        return np.asarray(half @ of_scores @ half.T)

    @property
    def question(self) -> dict[str, Any]:
        """Return the question to the sites about the scores of their patients."""
        return {"model": self.w.tolist(), SCORES: self.gradient.tolist()}

    def covariance_by_patient(self, answers: Mapping[str, Any]) -> Numbers | None:
        """Return the covariance of `coef_` and `intercept_` from the answers of sites.

        The result is None, with a warning, if there is a single patient, or if a site did not answer, as a site with
        fewer than `min_count` patients does. If there are not more patients than coefficients, there is a warning too.

        Raises:
            ConfigurationError: an answer has another form than `answer` returns; the message names the site.
        """
        if silent := [site for site, answer in answers.items() if answer is None]:
            why = f"fewer than min_count patients at {', '.join(silent)}, which sent no sums over patients"
            warn(DataWarning(f"the coefficients have no standard errors: there are {why}"))
            return None
        total, patients = np.zeros_like(self.hessian), 0
        for site, answer in answers.items():
            fits = (
                isinstance(answer, dict) and answer.keys() == {"patients", "products"} and is_count(answer["patients"])
            )
            require(fits, f"scores of {site}", type(answer).__name__, "patients and products")
            products = numbers(f"products of {site}", answer["products"])
            fits = products.shape == total.shape and bool(np.isfinite(products).all())
            require(fits, f"products of {site}", products.shape, f"{total.shape}, finite")
            least = np.linalg.eigvalsh(products).min()
            fits = least >= -1e-9 * np.trace(products)
            require(fits, f"least eigenvalue of the products of {site}", float(least), "0 or more, up to rounding")
            total, patients = total + products, patients + answer["patients"]
        if patients == 1:
            warn(DataWarning("the coefficients have no standard errors: all rows are of one patient"))
            return None
        if patients <= len(self.w):
            sizes = f"{patients} patients and {len(self.w)} coefficients"
            warn(DataWarning(f"the standard errors of the coefficients are too small: there are {sizes}"))
        return self.covariance(total * patients / (patients - 1))


def answer(
    estimator: Any, rows: Mapping[str, Numbers], patients: Numbers, question: Mapping[str, Any]
) -> dict[str, Any]:
    """Answer a question of the server about the scores of a site's patients.

    Args:
        estimator: the estimator of the rows.
        rows: standardised rows and their encoded target, as `Penalised._samples` needs them.
        patients: the patient of each row.
        question: what `Minimum.question` returns.

    Returns:
        The number of patients, and Σ_c u_c u_cᵀ, in a form that JSON can store.
    """
    ordered = estimator._samples({**rows, "patient": patients})
    design = ordered["row"]
    design = np.column_stack([design, np.ones(len(design))]) if estimator.has_intercept else design
    w, mean = (numbers_asked(question, name, design.shape[1:]) for name in ("model", SCORES))
    scores = estimator._scores(design @ w, design, ordered)
    sums = sums_by_patient(scores - mean, ordered["patient"])
    return {"patients": len(sums), "products": (sums.T @ sums).tolist()}

"""Fit Cox's proportional hazards model to the rows of several sites. Each site has a baseline hazard of its own.

The loss is a stratified partial likelihood (Cox, "Regression models and life-tables", JRSS B 1972), with sites as
strata: no sum contains rows of two sites. Row j has the features a_j and the time t_j, and w are the coefficients. e_j
is 1 if the event came at t_j, and otherwise 0. Ties are treated by Breslow's method. The loss of row j is

    ℓ_j = e_j [log Σ_{k at the same site: t_k ≥ t_j} exp(a_kᵀw) − a_jᵀw]
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.data import in_order_of_time
from fedbilevel.errors import ConfigurationError
from fedbilevel.estimators.columns import Numbers, numbers, sites_of
from fedbilevel.estimators.linear import Columns, Penalised
from fedbilevel.estimators.measures import concordance, hazard_scores
from fedbilevel.extending import require


def no_event(path: str) -> ConfigurationError:
    """Return the error for rows without any event, from which no hazard can be estimated."""
    message = f"{path}: no row has an event, and at least one is needed"
    return ConfigurationError(path=path, got=0, allowed="at least one", message=message)


class CoxRegression(Penalised):
    """A Cox regression that is stratified by site, without an intercept. `predict` returns log hazards."""

    has_intercept, curvature = False, 0.5

    def _target(self, y: Any) -> Columns:
        made = self._encoded(y)
        if not made["event"].any():
            raise no_event("events")
        return made

    def _encoded(self, y: Any) -> Columns:
        structured = getattr(np.asarray(y).dtype, "names", None) is not None
        require(not structured, "y", "a structured array", "(n, 2): np.column_stack((y[time], y[event]))")
        target = numbers("y", y)
        require(target.ndim == 2 and target.shape[1] == 2, "shape of y", target.shape, "(n, 2): times and events")
        times, events = target.T
        wrong = times[~(np.isfinite(times) & (times >= 0))]
        require(not wrong.size, "times", wrong[:5].tolist(), "finite, and 0 or later")
        require(set(events) <= {0.0, 1.0}, "events", np.unique(events)[:5].tolist(), "1 for an event, 0 for none")
        return {"time": times, "event": events, "stratum": events.astype(np.int32)}

    def _samples(self, rows: Columns) -> Columns:
        """Return a site's samples, sorted by time, latest first.

        At a row's time, all rows up to the index `last` are at risk.
        """
        return in_order_of_time(rows)

    def _losses(self, z: Array, rows: Any, valid: Array) -> Array:
        most = jax.lax.stop_gradient(jnp.max(z))  # so that no exponential overflows
        at_risk = jnp.cumsum(jnp.where(valid, jnp.exp(z - most), 0))[rows["last"]]
        return rows["event"] * (most + jnp.log(jnp.where(valid, at_risk, 1)) - z)

    def _scores(self, z: Numbers, design: Numbers, rows: Any) -> Numbers:
        return -hazard_scores(z, design, rows["event"], rows["last"])

    def score(self, X: Any, y: Any, groups: Any = None) -> float:
        """Return Harrell's concordance, the share of pairs of rows that are predicted in the right order.

        A pair counts if both rows are of the same site, and one row has an event before the other row's time. The pair
        is in the right order if the row with this event has the higher predicted hazard; with equal hazards, it counts
        as one half. Without `groups`, all rows are treated as rows of one site, with a warning if the model was trained
        on several sites.
        """
        risk, target = self.predict(X), self._target(y)
        alone = groups is None and len(self.sites_) == 1
        _, sites = sites_of(self, "score", np.zeros(len(risk)) if alone else groups, len(risk))
        columns = target["time"], target["event"], risk
        measured = [concordance(*(column[sites == site] for column in columns)) for site in np.unique(sites)]
        right = sum(pairs * value for pairs, value, _ in measured if pairs)
        return float(np.divide(right, sum(pairs for pairs, *_ in measured)))

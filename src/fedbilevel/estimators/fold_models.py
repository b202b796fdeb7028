"""Define the K + 1 models of `linear`: their losses, and the arguments with which `solve` trains them.

With at most WIDE features there is one run: `penalty_search` finds the penalties and trains all models. With more
features there are two: `wide_search` finds the penalties together with the models of the folds, and then trains the
last model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import fedbilevel as fb
from fedbilevel.estimators.columns import Numbers
from fedbilevel.estimators.penalty_search import PenaltySearch
from fedbilevel.estimators.wide_search import Newton, in_shares, share_search

LossOfRows = Callable[[Array, Any, Any, Array], Array]
"""A function (x, y, rows, valid) -> the mean loss of a site's rows, a scalar."""
WIDE = 300
"""The largest number of features for which the search is exact.

With n features and K folds, a reply of a site in the exact search has (K + 1) n² numbers.
"""
LARGEST = 999.0  # the upper bound of x


class Posed(NamedTuple):
    """The arguments of `solve` for one run, except the clients and the options."""

    algorithm: Any
    problem: fb.Bilevel
    x0: Numbers
    y0: dict[str, Numbers]


@dataclass(frozen=True)
class FoldModels:
    """The models of all folds, and the last model, which is trained on all rows.

    Args:
        losses: a function (z, rows, valid) -> ℓ of each row of a site at z = a_jᵀw + b; any number where not `valid`.
        curvature: κ.
        has_intercept: whether the models have an intercept.
        cv: K, the number of folds.
        of: the index of each feature's penalty, with an entry for each feature.
        search: whether the penalties are searched; False: they are given.
    """

    losses: Any
    curvature: float
    has_intercept: bool
    cv: int
    of: Numbers
    search: bool

    @property
    def exact(self) -> bool:
        """Return whether the search is exact, so that there is a single run."""
        return len(self.of) <= WIDE

    def posed(self, searched: bool = False) -> Posed:
        """Return the arguments of `solve`.

        For many features there are two runs: the search and, when it has ended (`searched` is True), the training of
        the last model.
        """
        width, every = len(self.of), np.arange(self.cv + 1)
        search, last = self.search and not searched, every[-1:]
        if self.exact:
            names = tuple(map(str, self.of))
            algorithm = PenaltySearch(groups=names, curvature=self.curvature, largest=LARGEST, search=search)
            folds = every if search else last
            problem = fb.Bilevel(*map(fb.WholeLoss, self.functions(self.of, folds)))
            return Posed(algorithm, problem, np.ones(np.max(self.of) + 1), self.start(len(folds)))
        if search:
            problem = in_shares(*self.functions(self.of, every[:-1]), self.of, LARGEST)
            return Posed(share_search(), problem, np.full(np.max(self.of) + 1, 0.5), self.start(self.cv))
        each = np.arange(width)
        problem = in_shares(*self.functions(each, last), each)
        return Posed(Newton(), problem, np.full(width, 0.5), self.start(1))

    def start(self, models: int) -> dict[str, Numbers]:
        """Return the coefficients at which the training of this number of models starts. They are all 0."""
        intercept = {"intercept": np.zeros(models)} if self.has_intercept else {}
        return {"coef": np.zeros((models, len(self.of))), **intercept}

    def functions(self, of: Numbers, folds: Numbers) -> tuple[LossOfRows, LossOfRows]:
        """Return f and g for models that leave out these folds; feature l has the penalty κ x[of[l]].

        The fold `cv` contains no rows, so the model without this fold is trained on all rows. If it is the only model,
        f is its loss on all rows.
        """
        every, share = folds[:, None], np.where(folds < self.cv, 1 - 1 / self.cv, 1.0)[:, None]

        def losses(y: Any, rows: Any, chosen: Array) -> Array:
            z = y["coef"] @ rows["row"].T + y.get("intercept", np.zeros(len(folds)))[:, None]
            return jnp.where(chosen, jax.vmap(self.losses, (0, None, 0))(z, rows, chosen), 0)

        def outer(x: Array, y: Any, rows: Any, valid: Array) -> Array:
            return jnp.sum(losses(y, rows, valid & ((rows["fold"] == every) | (len(folds) == 1)))) / jnp.sum(valid)

        def inner(x: Array, y: Any, rows: Any, valid: Array) -> Array:
            mean = jnp.sum(losses(y, rows, valid & (rows["fold"] != every)) / share) / jnp.sum(valid)
            return mean + self.curvature * jnp.sum(x[of] * y["coef"] ** 2)

        return outer, inner

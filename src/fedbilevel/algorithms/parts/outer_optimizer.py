"""Replace a method's own steps on x by an optimizer of optax."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedbilevel.algorithms.parts.layers import Kept, Layer
from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.authored import with_x
from fedbilevel.core.config import static
from fedbilevel.core.errors import require
from fedbilevel.core.facts import Allows, No
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree, near

PARALLEL = 1e-4  # vectors are considered parallel if the cosine of their angle is below 1 by at most this
SIZES = (0.1, 1e3)  # the sizes of the gradients that are tried; an optimizer may clip a large gradient
STEPS = 3  # the number of updates for each gradient, since a warm-up may begin with updates that are 0


def require_direction(
    field: str,
    optimizer: optax.GradientTransformation,
    problem: Problem,
    like: PyTree,
    x_of: Callable[[PyTree], PyTree],
) -> None:
    """Refuse an optimizer that does not step along the gradient in x, if x is kept in a set other than a box.

    Suppose that each entry l of x has its own step size h_l, and that a step followed by a Euclidean projection leaves
    x unchanged. Then the vector with the entries h_l ∂Φ/∂x_l is normal to the set. At a minimum of Φ in the set, ∇Φ is
    normal to the set. If the h_l differ, ∇Φ is in general not normal at x, and x is not the minimum.

    Args:
        field: the field that has the optimizer, for the message.
        optimizer: the optimizer.
        problem: the problem. Its `couples_x` says whether the projection of an entry of x may depend on other entries.
        like: a tree with the structure and shapes of the iterate that the optimizer moves.
        x_of: iterate -> its x.

    Raises:
        ConfigurationError: one of the optimizer's first updates of x is not parallel to the gradient in x.
    """
    if not problem.couples_x:
        return
    zero = optax.tree.zeros_like(like)
    allowed = "an optimizer that steps along the gradient, such as optax.sgd, since x is kept in a set other than a box"
    for size in SIZES:
        gradient = jax.tree.map(lambda leaf, size=size: size * leaf, near(zero, np.random.default_rng(0)))
        state, x = optimizer.init(like), x_of(gradient)
        for _ in range(STEPS):
            updates, state = optimizer.update(gradient, state, zero)
            update = x_of(updates)
            along, most = abs(optax.tree.vdot(update, x)), optax.tree.norm(update) * optax.tree.norm(x)
            require(bool(along >= (1 - PARALLEL) * most), field, optimizer, allowed)


class OuterOptimizer(Layer):
    """Let an optimizer make the steps on x: the method's change of x in a round takes the place of a gradient.

    S. Reddi and others, "Adaptive Federated Optimization", ICLR 2021. The optimizer gets x before the round minus x
    after the round, which is in proportion to the method's own step size on x. This step size does not matter for Adam
    and AdaGrad, nor for `dog` and `prodigy` of `optax.contrib`, which choose their step sizes themselves.

    `fb.OuterOptimizer(method, optimizer=…)` is short for `fb.layered(method, fb.OuterOptimizer(optimizer=…))`.

    Args:
        optimizer: an optimizer of Optax; its learning rate is the step size on x. If `project_x` keeps x in a set other
            than a box, use an optimizer that steps along the gradient in x, such as `optax.sgd`. Adam has a step size
            for each entry, so that with the projection x would converge to a wrong point of the set.
    """

    kind, place = "outer_optimizer", "outer"

    optimizer: optax.GradientTransformation = static()

    def validate(self) -> None:
        known = isinstance(self.optimizer, optax.GradientTransformation)
        require(known, "OuterOptimizer.optimizer", self.optimizer, "an optax optimizer, such as optax.adam(0.05)")

    def check(self, method: Algorithm, problem: Problem, clients: Any, x: PyTree, y: PyTree) -> None:
        require_direction("OuterOptimizer.optimizer", self.optimizer, problem, x, lambda tree: tree)

    def allows(self, inside: Allows, method: Algorithm) -> Allows:
        return inside._replace(local_x=No("the optimizer of x is on the server"))

    def server_slot(self, method: Algorithm, x: PyTree, y: PyTree) -> optax.OptState:
        return self.optimizer.init(x)

    def after_round(self, method: Algorithm, problem: Problem, kept: Kept, before: Any, after: Any) -> tuple[Any, Kept]:
        taken = optax.tree.sub(before.x, after.x)
        updates, optimizer = self.optimizer.update(taken, kept, before.x)
        moved = optax.apply_updates(before.x, updates), optimizer
        some = optax.tree.norm(taken) != 0  # if x has not moved, nothing changes: `prodigy` would return NaN
        x, optimizer = jax.tree.map(partial(jnp.where, some), moved, (before.x, kept))
        return with_x(method, after, x, "in an OuterOptimizer"), optimizer

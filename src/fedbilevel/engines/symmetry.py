"""Check that the derivative of the inner loss in y is the gradient of one function, if leaves of y are clients' own.

Let J be the Jacobian of ∇y g in y. If ∇y g is the gradient of one function, J is symmetric, and methods may multiply by
J where the hypergradient has its transpose. `jax.lax.stop_gradient` and custom derivatives can make J asymmetric. In
Ditto, for example, a client's own model is pulled to the shared model, but the shared model ignores the pull. Methods
would then converge to an x that looks plausible and is wrong.

Let v have random entries for shared leaves and 0 for own leaves. Let u have the entries of Jv for own leaves, and 0 for
shared leaves. Then ⟨u, Jv⟩ = ‖u‖², and if J is symmetric, ⟨v, Ju⟩ = ‖u‖² too. In Ditto, ⟨v, Ju⟩ is 0, however weak the
pull is. The same is done with own and shared leaves exchanged.

- Central differences of ∇y g approximate products with J. JAX's derivative of ∇y g cannot be used: it treats the result
  of `stop_gradient` as a constant, so that it is symmetric even in Ditto. Differences need no second derivatives.
- Differences are inaccurate where ∇y g jumps, as in networks with ReLU, and where its third derivatives are large, as
  for features from 0 to 255. Therefore ⟨u, Jv⟩ and ⟨v, Ju⟩ are also computed by differences of a quarter of the length.
  If one of them changes by more than a twentieth of ‖u‖², the point shows nothing.
- The rounding error of a product is about ε‖∇y g‖‖v‖ over the length of the difference. If u is not much longer, the
  point shows nothing, either. In float32, a pull by a thousandth of the loss is still seen.
- To refuse a correct loss would be worse than to miss a wrong one. Therefore ⟨v, Ju⟩ may differ from ‖u‖² by a tenth of
  ‖u‖², and a loss is refused only if each of `LOOKS` points shows a larger difference. The loss passes at the first
  point that shows no larger difference, or shows nothing. In float32, wrong losses on features that are not scaled are
  often missed; in float64 the differences are shorter.
- If all of y is shared, or all of it is own, nothing is checked: then no division of y into two parts is known between
  which J could be asymmetric, and each run would have to compile another program.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from fedbilevel.core.errors import UnsupportedError
from fedbilevel.core.own_y import parted_y
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree, epsilon, is_none, near, on_device
from fedbilevel.machinery.kept import compiled
from fedbilevel.oracles.differences import Differences

LOOKS = 8  # the number of points at which ‖u‖² and ⟨v, Ju⟩ must differ before a loss is refused
ROUNDING = 20.0  # the norm of u must exceed the rounding error of a product by this factor
SHARE = 0.1  # the share of ‖u‖² by which ⟨v, Ju⟩ may differ from it
LENGTHS = 1.0, 0.25  # the lengths of the differences, in units of the usual length
CHANGE = 0.05  # the share of ‖u‖² by which ⟨u, Jv⟩ and ⟨v, Ju⟩ may change with the length of the difference
REFUSAL = (
    "the derivative of the inner loss in y is not the gradient of one function: shared leaves of y act on a client's "
    "own leaves (Bilevel.own), which do not act on the shared ones in the same way, or the reverse. The cause is a "
    "stop_gradient, as in Ditto, or a custom derivative, and x would end at a wrong point. Without stop_gradient, a "
    "pull such as weight * ((own - shared) ** 2).sum() acts on both, as in MR-MTL"
)


def check_symmetry(
    problem: Problem, x: PyTree, y: PyTree, rng: np.random.Generator, draw: Callable[[], PyTree]
) -> None:
    """Refuse an inner loss whose derivatives in the own and in the shared leaves of y belong to different functions.

    Such a loss contains `stop_gradient`, for example. y must have leaves of both kinds.

    Args:
        problem: the problem prepared for a run, whose losses take only the floating arrays of x and y.
        x, y: the start. Products are computed at random points near it.
        rng: draws these points, and the directions.
        draw: returns batches of inner samples along a leading axis; the mean of their losses is differentiated.

    Raises:
        ConfigurationError: the derivative is not the gradient of one function.
    """
    parts = parted_y(problem.own, y)
    if not all(map(jax.tree.leaves, parts)):
        return

    def product(x: PyTree, y: PyTree, batches: PyTree, v: PyTree) -> tuple[PyTree, Array]:
        """Return estimates of Jv by differences, and the rounding error of the first estimate.

        The estimates have a leading axis, with an entry for the difference of each length in `LENGTHS`.
        """

        def loss(y: PyTree) -> Array:
            return jnp.mean(jax.vmap(lambda batch: problem.inner(x, y, batch))(batches))

        error = epsilon(y) * optax.tree.norm(jax.grad(loss)(y)) / Differences().step(y, v)
        by_length = jax.vmap(lambda share: Differences().hess_of(loss, y, v, share))
        return by_length(jnp.asarray(LENGTHS)), error

    key, program = problem.key and ("symmetry", problem.key), None
    for _ in range(LOOKS):
        point = on_device((*near((x, y), rng), draw()))
        v = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), y)
        program = program or compiled(product, *point, on_device(v), key=key, quickly=True)
        times = partial(program, *point)
        if not any(is_lopsided(times, only(one, v), other) for one, other in (parts, parts[::-1])):
            return
    raise UnsupportedError(REFUSAL)


@np.errstate(invalid="ignore", over="ignore")  # with infinite products the answer is False
def is_lopsided(times: Callable[[PyTree], tuple[PyTree, Array]], v: PyTree, other: PyTree) -> bool:
    """Return whether J is asymmetric between two parts of y: the leaves where v is not 0, and the leaves of `other`.

    The answer is False if rounding, or the length of the differences, leaves it open.

    Args:
        times: a function of a direction with the shapes of y. It returns the direction's products with J, by
            differences of all `LENGTHS` along a leading axis, and the size of the rounding error of the first product.
        v: a direction with the shapes of y, which is 0 in the leaves of `other`.
        other: a tree with the structure of y, with None in place of the leaves of the first part.
    """
    jv, error = times(on_device(v))
    u = only(other, jax.tree.map(lambda leaf: np.asarray(leaf[0]), jv))
    there, back = dots(u, jv), dots(v, times(on_device(u))[0])
    size = there[0]  # ‖u‖²
    visible = size > (ROUNDING * float(error)) ** 2
    steady = max(np.ptp(there), np.ptp(back)) <= CHANGE * size
    return bool(visible and steady and abs(size - back[0]) > SHARE * size)


def dots(a: PyTree, stacked: PyTree) -> np.ndarray:
    """Return the inner product of a tree with each tree that `stacked` has along a leading axis of its leaves."""
    pairs = zip(jax.tree.leaves(stacked), jax.tree.leaves(a), strict=True)
    return np.sum([np.asarray(rows, float).reshape(len(rows), -1) @ np.ravel(leaf) for rows, leaf in pairs], axis=0)


def only(part: PyTree, tree: PyTree) -> PyTree:
    """Return `tree` with 0 for the leaves that `part` does not have. None, which marks fixed leaves, stays None."""

    def chosen(kept: object, leaf: np.ndarray | None) -> np.ndarray | None:
        return leaf if kept is not None or leaf is None else 0 * leaf

    return jax.tree.map(chosen, part, tree, is_leaf=is_none)

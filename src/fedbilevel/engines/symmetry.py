"""Check that the derivative of the inner loss in y is the gradient of one function, if leaves of y are clients' own.

Let J be the Jacobian of ∇y g in y. If ∇y g is the gradient of one function, J is symmetric, and methods may multiply by
J where the hypergradient has its transpose. `jax.lax.stop_gradient` and custom derivatives can make J asymmetric. In
Ditto, for example, a client's own model is pulled to the shared model, which ignores the pull. Methods would then end
at an x that looks plausible and is wrong.

Let v have random entries for shared leaves and 0 for own ones, and let u have the entries of Jv for own leaves and 0
for shared ones. Then ⟨u, Jv⟩ = ‖u‖², and if J is symmetric, ⟨v, Ju⟩ = ‖u‖² as well. In Ditto, ⟨v, Ju⟩ is 0, however
weak the pull is. The same is done with own and shared leaves exchanged.

- Central differences of ∇y g approximate products with J. JAX's derivative of ∇y g would not do: it treats the result
  of `stop_gradient` as a constant, so that it is symmetric in Ditto, too. Differences need no second derivatives.
- Differences are inaccurate where ∇y g jumps, as in networks with ReLU. Therefore ⟨v, Ju⟩ may differ from ‖u‖² by a
  tenth of it, and a loss is refused only if the two differ by more at each of `LOOKS` points. A correct loss passes at
  the first point.
- The rounding error of a product is about ε‖∇y g‖‖v‖ over the length of the difference. If u is not much longer, the
  point shows nothing, and the loss passes. In float32, a pull by a thousandth of the loss is still seen.
- If all of y is shared, or all of it is own, nothing is checked: it is not known which leaves could act on others in
  one direction only, and each run would have to compile another program.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from fedbilevel.core.errors import ConfigurationError
from fedbilevel.core.own_y import parted_y
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree, epsilon, near, on_device
from fedbilevel.machinery.kept import compiled
from fedbilevel.oracles.differences import Differences

LOOKS = 8  # points at which the two numbers must differ before a loss is refused
ROUNDING = 20.0  # u must be longer than so many times the rounding error of a difference
SHARE = 0.1  # the share of ‖u‖² by which the two numbers may differ
REFUSAL = (
    "the derivative of the inner loss in y is not the gradient of one function: shared leaves of y act on a client's "
    "own leaves (Bilevel.own), which do not act on the shared ones in the same way, or the reverse. The cause is a "
    "stop_gradient, as in Ditto, or a custom derivative, and x would end at a wrong point. Without stop_gradient, a "
    "pull such as weight * ((own - shared) ** 2).sum() acts on both, as in MR-MTL"
)


def check_symmetry(
    problem: Problem, x: PyTree, y: PyTree, rng: np.random.Generator, draw: Callable[[], PyTree]
) -> None:
    """Refuse an inner loss whose derivative in y is not the gradient of one function; y needs own and shared leaves.

    Args:
        problem: prepared for a run, as functions of the floating arrays of x and y alone.
        x, y: the start. Products are computed at random points near it.
        draw: returns batches of inner samples along a leading axis; the mean of their losses is differentiated.

    Raises:
        ConfigurationError: the derivative is not the gradient of one function.
    """
    parts = parted_y(problem.own, y)
    if not all(map(jax.tree.leaves, parts)):
        return

    def product(x: PyTree, y: PyTree, batches: PyTree, v: PyTree) -> tuple[PyTree, Array]:
        """Return Jv, of the shape of y, and the size of its rounding error."""

        def loss(y: PyTree) -> Array:
            return jnp.mean(jax.vmap(lambda batch: problem.inner(x, y, batch))(batches))

        error = epsilon(y) * optax.tree.norm(jax.grad(loss)(y)) / Differences().step(y, v)
        return Differences().hess_of(loss, y, v), error

    key, program = problem.key and ("symmetry", problem.key), None
    for _ in range(LOOKS):
        point = on_device((*near((x, y), rng), draw()))
        v = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), y)
        program = program or compiled(product, *point, on_device(v), key=key, quickly=True)
        times = partial(program, *point)
        if not any(is_lopsided(times, only(one, v), other) for one, other in (parts, parts[::-1])):
            return
    raise ConfigurationError(REFUSAL)


def is_lopsided(times: Callable[[PyTree], tuple[PyTree, Array]], v: PyTree, other: PyTree) -> bool:
    """Tell whether the leaves of `other`, for which v is 0, act on its leaves in another way than these act on them.

    Args:
        times: a direction like y -> its product with J, and the size of the rounding error.
    """
    jv, error = times(on_device(v))
    u = only(other, jax.tree.map(np.asarray, jv))
    there, back = dot(u, u), dot(v, times(on_device(u))[0])
    return there > (ROUNDING * float(error)) ** 2 and abs(there - back) > SHARE * there


def dot(a: PyTree, b: PyTree) -> float:
    """Return the inner product of two trees."""
    return sum(float(np.vdot(*pair)) for pair in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def only(part: PyTree, tree: PyTree) -> PyTree:
    """Return a tree like y with 0 for the leaves that `part` does not have."""
    return jax.tree.map(lambda kept, leaf: leaf if kept is not None else 0 * leaf, part, tree, is_leaf=_is_none)


def _is_none(leaf: object) -> bool:
    return leaf is None

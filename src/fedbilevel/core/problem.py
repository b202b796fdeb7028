"""What is to be solved: two losses, and who holds the data is said elsewhere (client.py)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedbilevel.core.errors import ConfigurationError, require
from fedbilevel.core.tree import PyTree, join

Loss = Callable[[PyTree, PyTree, PyTree], Array]
"""(x, y, batch) -> scalar: the mean over the batch, whose arrays have a leading sample axis."""


@dataclass(frozen=True)
class Bilevel:
    """min over x of F(x, y*(x)) with y*(x) = argmin over y of G(x, y); F and G are weighted means over clients.

    Args:
        outer: f(x, y, batch) -> scalar, the validation loss, a mean over the samples of the batch.
        inner: g(x, y, batch) -> scalar, the training loss, likewise; strongly convex in y for x to be defined.
            Terms without samples (regularisers) may be added to either.
    """

    outer: Loss
    inner: Loss

    def __post_init__(self) -> None:
        for name in ("outer", "inner"):
            require(
                callable(getattr(self, name)),
                f"Bilevel.{name}",
                getattr(self, name),
                "a function (x, y, batch)",
            )

    def with_fixed(self, x_fixed: PyTree, y_fixed: PyTree) -> "Bilevel":
        """The same problem in the floating arrays of x and y alone (see tree.split)."""
        if not jax.tree.leaves((x_fixed, y_fixed)):
            return self

        def rejoin(loss: Loss) -> Loss:
            return lambda x, y, batch: loss(join(x, x_fixed), join(y, y_fixed), batch)

        return Bilevel(rejoin(self.outer), rejoin(self.inner))

    def over_batches(self) -> "Bilevel":
        """The same problem with losses that also take a `Padded` batch."""
        return Bilevel(_mean_over(self.outer), _mean_over(self.inner))


class Padded(NamedTuple):
    """All samples of a client, padded to a common length; `mask` is False on the padding."""

    samples: PyTree
    mask: Array


def _mean_over(loss: Loss) -> Loss:
    """Extend a mean-of-samples loss to padded batches: the mean of its values on the true samples."""

    def mean_loss(x: PyTree, y: PyTree, batch: PyTree) -> Array:
        if not isinstance(batch, Padded):
            return loss(x, y, batch)
        one = jax.vmap(lambda sample: loss(x, y, jax.tree.map(lambda a: a[None], sample)))
        return jnp.sum(jnp.where(batch.mask, one(batch.samples), 0)) / jnp.sum(batch.mask)

    return mean_loss


def check_losses(problem: Bilevel, x: PyTree, y: PyTree, outer_batch: PyTree, inner_batch: PyTree) -> None:
    """Trace both losses once, without computing: each must give a real scalar."""
    for name, loss, batch in (("outer", problem.outer, outer_batch), ("inner", problem.inner, inner_batch)):
        shape = jax.eval_shape(loss, x, y, batch)
        if getattr(shape, "shape", None) != () or not jnp.issubdtype(shape.dtype, jnp.floating):
            raise ConfigurationError(
                f"the {name} loss must return one real number (the mean over the batch); it returned {shape}"
            )

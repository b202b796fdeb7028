"""Who takes part in a round and how much each one works: functions of the round's key alone, for every engine."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedbilevel.core.client import uniform_below

FLOYD_LIMIT = 2048  # Floyd's algorithm compares P²/2 pairs; beyond this a permutation of all M is quicker


class RoundKeys(NamedTuple):
    """The independent streams of one round."""

    cohort: Array
    work: Array
    algorithm: Array

    def of_fresh(self, number: Array | int) -> "RoundKeys":
        """The streams of the round's fresh cohort with that number; the algorithm's stream is the round's own."""
        return self._replace(cohort=jax.random.fold_in(self.cohort, number), work=jax.random.fold_in(self.work, number))


def round_keys(key: Array, round: Array | int) -> RoundKeys:
    """Streams of round `round` of the run that `key` seeds: resuming needs no more than the number of the round."""
    return RoundKeys(*jax.random.split(jax.random.fold_in(key, round), 3))


@partial(jax.jit, static_argnums=(1, 2))
def draw_cohort(key: Array, population: int, size: int) -> Array:
    """`size` distinct clients out of `population`, every subset equally likely; (size,) int32, in no special order.

    Everyone, in order, when size = population. Small cohorts cost O(size²), whatever the population (Floyd's
    algorithm: Bentley and Floyd, "A sample of brilliance", Communications of the ACM 30(9), 1987).
    """
    if size == population:
        return jnp.arange(population, dtype=jnp.int32)
    if size > FLOYD_LIMIT:
        return jax.random.permutation(key, population)[:size].astype(jnp.int32)

    def add(j: Array, chosen: Array) -> Array:
        top = population - size + j
        draw = uniform_below(jax.random.fold_in(key, j), top + 1)
        return chosen.at[j].set(jnp.where(jnp.any(chosen == draw), top, draw))

    return lax.fori_loop(0, size, add, jnp.full(size, -1, jnp.int32))


def draw_work(key: Array, ids: Array, bounds: tuple[int, int]) -> Array:
    """Local steps of each client of a cohort, uniform on low..high, both included; (P,) int32."""
    low, high = bounds
    one = lambda i: low + uniform_below(jax.random.fold_in(key, i), high + 1 - low)  # noqa: E731
    return jax.vmap(one)(ids)


def work_of(key: Array, ids: Array, local_steps: np.ndarray | Array | tuple[int, int] | None) -> Array | None:
    """Local steps of a cohort under `Clients.local_steps`; None leaves the number to the algorithm."""
    if local_steps is None:
        return None
    if isinstance(local_steps, tuple):
        return draw_work(key, ids, local_steps)
    return jnp.asarray(local_steps)[ids]

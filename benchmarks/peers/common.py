"""Functions that all hand-written programs share: trees, batches, cohorts, and means over clients."""

import jax
import jax.numpy as jnp


def move(point, lr, direction):
    """Return point − lr·direction, for trees."""
    return jax.tree.map(lambda a, d: a - lr * d, point, direction)


def dot(a, b):
    """Return ⟨a, b⟩, for trees."""
    return sum(jnp.vdot(u, v) for u, v in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def zeros(tree):
    """Return zeros of the same shapes."""
    return jax.tree.map(jnp.zeros_like, tree)


def batch(samples, size, key, count):
    """Draw `count` of a client's first `size` samples, with replacement; None: return all stored samples."""
    if count is None:
        return samples
    chosen = (jax.random.uniform(key, (count,)) * size).astype(jnp.int32)
    return jax.tree.map(lambda a: a[chosen], samples)


def asked(key, data, weights, cohort):
    """Draw a cohort without replacement, and return its data, weights and keys. With None, these are of all clients."""
    if cohort is not None:
        ids = jax.lax.top_k(jax.random.uniform(key, (len(weights),)), cohort)[1]  # 20 times as fast as random.choice
        data, weights = jax.tree.map(lambda a: a[ids], (data, weights))
    return data, weights, jax.random.split(key, len(weights))


def directions(problem, point, outer_batch, inner_batch):
    """Return the directions of x, y and v: ∇x f − ∇²xy g v, ∇y g and ∇²yy g v − ∇y f."""
    x, y, v = point

    def surrogate(x, y):
        slope = jax.grad(problem.inner, 1)(x, y, inner_batch)
        return problem.outer(x, y, outer_batch) - dot(slope, v), slope

    (dx, minus_dv), dy = jax.grad(surrogate, (0, 1), has_aux=True)(x, y)
    return dx, dy, jax.tree.map(jnp.negative, minus_dv)


def mean(phase, data, weights, keys, one_by_one=False):
    """Return Σ w_i phase(data_i, key_i), for trees.

    Clients are computed side by side, or one by one if a single client uses the whole processor.
    """
    if not one_by_one:
        return jax.tree.map(lambda a: jnp.tensordot(weights, a, 1), jax.vmap(phase)(data, keys))

    def add(total, client):
        data, weight, key = client
        return jax.tree.map(lambda t, a: t + weight * a, total, phase(data, key)), None

    shapes = jax.eval_shape(lambda: phase(*jax.tree.map(lambda a: a[0], (data, keys))))
    start = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return jax.lax.scan(add, start, (data, weights, keys))[0]

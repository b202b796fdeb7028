"""A client as a phase of a method sees it, made without an engine."""

import jax
import jax.numpy as jnp

from fedbilevel.core.client import Client, Samples


def client_alone(problem, outer, inner, id=0, batch_size=None):
    """Make a client with these samples; with arrays of one shape and a traced `id`, one program serves several."""
    rows = [jax.tree.map(jnp.asarray, part) for part in (outer, inner)]
    sizes = [len(jax.tree.leaves(part)[0]) for part in rows]
    samples = [Samples(part, jnp.asarray(0), jnp.asarray(n), n, True) for part, n in zip(rows, sizes, strict=True)]
    weight = jnp.asarray(1.0)
    return Client(problem.over_batches(), *samples, jnp.asarray(id), weight, None, batch_size=batch_size)

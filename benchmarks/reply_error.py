"""The error of a client's reply in float32, for two ways of adding up local steps.

A client makes τ steps of gradient descent on a 2NN (784-200-200-10), with batches of 20 of 200 samples. Two ways are
compared with the same steps in float64: the sum of the steps, with gradients at start + sum; and the iterate, from
which the start is subtracted at the end. The sum costs one more pass over the model per step. Errors are relative to
the norm of the reply.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.harness import head, row

SIZES = (784, 200, 200, 10)
SUMS = ("sum", "iterate")
QUICK = {"steps": [1, 10]}


def loss(weights, rows, labels):
    for place, w in enumerate(weights):
        rows = (jax.nn.relu(rows) if place else rows) @ w
    return optax.softmax_cross_entropy_with_integer_labels(rows, labels).mean()


def reply(how, dtype, tau, lr):
    """Return the change of the model by τ local steps of size lr."""
    rng = np.random.default_rng(0)
    start = [jnp.asarray(rng.normal(size=(a, b)) / a**0.5, dtype) for a, b in itertools.pairwise(SIZES)]
    rows, labels = jnp.asarray(rng.random((200, SIZES[0])), dtype), jnp.asarray(rng.integers(0, 10, 200))
    drawn = jnp.asarray(rng.integers(0, 200, (tau, 20)))
    add = optax.tree.add

    def step(at, k):
        return optax.tree.scale(dtype(-lr), jax.grad(loss)(at, rows[drawn[k]], labels[drawn[k]]))

    if how == "sum":
        zeros = optax.tree.zeros_like(start)
        return jax.lax.fori_loop(0, tau, lambda k, total: add(total, step(add(start, total), k)), zeros)
    return optax.tree.sub(jax.lax.fori_loop(0, tau, lambda k, at: add(at, step(at, k)), start), start)


def main(steps: tuple[int, ...] = (1, 10, 100, 1_000)) -> None:
    jax.config.update("jax_enable_x64", True)
    head("step size", "local steps", *SUMS)
    for lr, tau in itertools.product((0.1, 1e-3, 1e-5), steps):
        exact, *rounded = (
            jax.jit(lambda how=how, dtype=dtype, lr=lr, tau=tau: reply(how, dtype, tau, lr))()
            for how, dtype in (("sum", np.float64), *((how, np.float32) for how in SUMS))
        )
        off = (optax.tree.norm([a.astype(np.float64) - b for a, b in zip(one, exact, strict=True)]) for one in rounded)
        row(f"{lr:.0e}", f"{tau:,}", *(f"{float(one / optax.tree.norm(exact)):.0e}" for one in off))

"""A problem whose y*(x) is x, and what its linear rounds do in expectation."""

import jax.numpy as jnp
import numpy as np

import fedbilevel as fb

DIM = 1_000
"""The number of coordinates, each with samples of its own, over which an expectation is measured.

The mean of the square of so many nearly normal numbers is off by √(2/1,000) = 4 % in one round, and by less over many.
"""


def tracking(clients, apart, x_pull=0.0, **kinds):
    """Return the problem with f_i = ½‖y − ξ‖² + (r/2)‖x‖² and g = ½‖y − x‖², and its samples ξ.

    y*(x) = x and ∇Φ = x − E ξ + r x. The clients' E ξ differ by `apart`, and the samples of a client by 5.
    """
    rng = np.random.default_rng(0)
    rows = 5 * rng.normal(size=(clients, 50, DIM))
    rows += apart * rng.normal(size=(clients, 1, DIM)) - rows.mean(1, keepdims=True)

    def outer(x, y, batch):
        return jnp.sum((y - jnp.mean(batch, 0)) ** 2) / 2 + x_pull * jnp.sum(x**2) / 2

    return fb.Bilevel(outer, lambda x, y, batch: jnp.sum((y - x) ** 2) / 2 + 0 * jnp.sum(batch), **kinds), rows


def measured(square, method, problem, clients, start, rounds, **options):
    """Return the mean of a square over the points of rounds 0 to T − 1 and over all coordinates, and the result."""
    metrics = {"square": lambda x, y: jnp.mean(square(x) ** 2)}
    start = jnp.asarray(start)
    found = fb.solve(method, problem, clients, start, start, rounds=rounds, eval_every=1, metrics=metrics, **options)
    return np.mean(found.history["square"][:rounds]), found


def expected(slope, start, noise, rounds):
    """Return the mean over these rounds of E z₀² for z ← z − slope z + noise, where `noise` is the covariance."""
    moments, step, values = np.outer(start, start), np.eye(len(start)) - slope, []
    for _ in range(rounds):
        values.append(moments[0, 0])
        moments = step @ moments @ step.T + noise
    return np.mean(values)


def lyapunov(k, q):
    """Return the P that solves K P + P Kᵀ = Q."""
    eye = np.eye(len(k))
    return np.linalg.solve(np.kron(k, eye) + np.kron(eye, k), q.ravel()).reshape(q.shape)

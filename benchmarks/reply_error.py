"""How wrong a client's reply is in float32, by how its local steps are summed: python benchmarks/reply_error.py

τ steps of gradient descent on a 2NN (784-200-200-10), batches of 20 of 200 samples. Against the same in float64: the
sum of the steps, taken at start + sum; the iterate, from which the start is subtracted at the end; and the iterate with
Kahan's compensation. The sum and Kahan's cost a pass over the model a step, or three, more than the iterate.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax

SIZES = (784, 200, 200, 10)


def loss(weights, rows, labels):
    for place, w in enumerate(weights):
        rows = (jax.nn.relu(rows) if place else rows) @ w
    return optax.softmax_cross_entropy_with_integer_labels(rows, labels).mean()


def reply(how, dtype, tau, lr):
    """The change by τ local steps of size lr."""
    rng = np.random.default_rng(0)
    start = [jnp.asarray(rng.normal(size=(a, b)) / a**0.5, dtype) for a, b in itertools.pairwise(SIZES)]
    rows, labels = jnp.asarray(rng.random((200, SIZES[0])), dtype), jnp.asarray(rng.integers(0, 10, 200))
    drawn = jnp.asarray(rng.integers(0, 200, (tau, 20)))
    step = lambda at, k: optax.tree.scale(dtype(-lr), jax.grad(loss)(at, rows[drawn[k]], labels[drawn[k]]))  # noqa: E731
    nothing, add, sub = optax.tree.zeros_like(start), optax.tree.add, optax.tree.sub

    def kahan(k, carry):
        at, lost = carry
        wanted = sub(step(at, k), lost)
        moved = add(at, wanted)
        return moved, sub(sub(moved, at), wanted)

    if how == "sum":
        return jax.lax.fori_loop(0, tau, lambda k, total: add(total, step(add(start, total), k)), nothing)
    if how == "iterate":
        return sub(jax.lax.fori_loop(0, tau, lambda k, at: add(at, step(at, k)), start), start)
    end, lost = jax.lax.fori_loop(0, tau, kahan, (start, nothing))
    return sub(sub(end, start), lost)


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    print(f"{'step':>8}{'local steps':>13}{'sum':>10}{'iterate':>10}{'Kahan':>10}   error over the reply's own norm")
    for lr, tau in itertools.product((0.1, 1e-3, 1e-5), (1, 10, 100, 1_000)):
        exact = jax.jit(lambda lr=lr, tau=tau: reply("sum", np.float64, tau, lr))()
        errors = []
        for how in ("sum", "iterate", "kahan"):
            found = jax.jit(lambda how=how, lr=lr, tau=tau: reply(how, np.float32, tau, lr))()
            off = optax.tree.norm([a.astype(np.float64) - b for a, b in zip(found, exact, strict=True)])
            errors.append(float(off / optax.tree.norm(exact)))
        print(f"{lr:8.0e}{tau:13,}" + "".join(f"{error:10.0e}" for error in errors), flush=True)


if __name__ == "__main__":
    main()

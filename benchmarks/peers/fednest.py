"""FedNest by hand: federated SVRG on y, a Neumann series of means over the cohort, one step on x."""

import jax
import jax.numpy as jnp

from benchmarks.peers.common import asked, batch, mean, move, zeros


def program(problem, *, local_steps, batch_size, terms, random=False, cohort=None, one_by_one=False):
    """Return run((x, y), data, weights, (β, Neumann step, α), key, rounds) -> (x, y).

    With `random`, v is computed by products of random length.
    """

    @jax.jit
    def run(start, data, weights, steps, key, rounds):
        lr, shrink, outer_lr = steps

        def once(r, carry):
            x, y = carry
            cohort_key, length_key, *keys = jax.random.split(jax.random.fold_in(key, r), 7)
            own, w, _ = asked(cohort_key, data, weights, cohort)
            unbiased = w * (len(weights) / len(w))

            def over(phase, key, w=unbiased):
                return mean(phase, own, w, jax.random.split(key, len(w)), one_by_one)

            drawn = lambda own, key, kind="inner": batch(own[kind], own[f"{kind}_size"], key, batch_size)  # noqa: E731

            def drift(own, key):  # the change in addition to −lr·q; the first step is along q
                features, slope = problem.features(x, own["inner"]), jax.grad(problem.head, 1)

                def step(k, change):
                    point = jax.tree.map(lambda a, c, q: a + c - lr * k / local_steps * q, y, change, q)
                    some = batch(features, own["inner_size"], jax.random.fold_in(key, k), batch_size)
                    return move(move(change, lr / local_steps, slope(some, point)), -lr / local_steps, slope(some, y))

                return jax.lax.fori_loop(1, local_steps, step, zeros(y))

            q = over(lambda own, key: jax.grad(problem.inner, 1)(x, y, drawn(own, key)), keys[0])
            y = jax.tree.map(lambda a, q, d: a - lr * q + d, y, q, over(drift, keys[1], w / jnp.sum(w)))
            b = over(lambda own, key: jax.grad(problem.outer, 1)(x, y, drawn(own, key, "outer")), keys[2])

            def product(n, v):
                def hess_v(own, key):
                    return jax.jvp(lambda y: jax.grad(problem.inner, 1)(x, y, drawn(own, key)), (y,), (v,))[1]

                shorter = move(v, shrink, over(hess_v, jax.random.fold_in(keys[3], n)))
                return shorter if random else move(shorter, -shrink, b)

            count = jax.random.randint(length_key, (), 0, terms) if random else terms - 1
            v = jax.lax.fori_loop(0, count, product, jax.tree.map(lambda a: a * shrink * (terms if random else 1), b))

            def hypergradient(own, key):
                first, second = jax.random.split(key)
                along = lambda x: jax.jvp(lambda y: problem.inner(x, y, drawn(own, second)), (y,), (v,))[1]  # noqa: E731
                return jax.grad(lambda x: problem.outer(x, y, drawn(own, first, "outer")) - along(x))(x)

            return move(x, outer_lr, over(hypergradient, keys[4])), y

        return jax.lax.fori_loop(0, rounds, once, start)

    return run

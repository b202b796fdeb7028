"""SimFBO by hand: clients step on (x, y, v) at once; the server steps along the mean of the sums of directions."""

import jax
import jax.numpy as jnp

from benchmarks.peers.common import asked, directions, dot, mean, move, zeros


def program(problem, *, local_steps, batch_size, cohort=None, one_by_one=False):
    """Return run((x, y), data, weights, (three client's steps, three server's, radius), key, rounds) -> (x, y, v)."""

    @jax.jit
    def run(start, data, weights, steps, key, rounds):
        local, server, radius = steps[:3], steps[3:6], steps[6]

        def once(r, iterate):
            ids, w, keys = asked(jax.random.fold_in(key, r), jnp.arange(len(weights)), weights, cohort)

            def batch(kind, i, key):
                if batch_size is None:
                    return jax.tree.map(lambda a: a[i], data[kind])
                chosen = (jax.random.uniform(key, (batch_size,)) * data[f"{kind}_size"][i]).astype(jnp.int32)
                return jax.tree.map(lambda a: a[i, chosen], data[kind])

            def client(i, key):
                def step(here, key):
                    first, second = jax.random.split(key)
                    found = directions(problem, here, batch("outer", i, first), batch("inner", i, second))
                    return tuple(map(move, here, local, found)), None

                end, _ = jax.lax.scan(step, iterate, jax.random.split(key, local_steps))
                return tuple(
                    jax.tree.map(lambda a, b, lr=lr: (a - b) / lr, a, b)
                    for a, b, lr in zip(iterate, end, local, strict=True)
                )

            q = mean(client, ids, w * (len(weights) / len(w)), keys, one_by_one)
            x, y, v = map(move, iterate, server, q)
            norm = jnp.sqrt(dot(v, v))
            return x, y, jax.tree.map(lambda a: a * jnp.where(norm > radius, radius / norm, 1), v)

        return jax.lax.fori_loop(0, rounds, once, (*start, zeros(start[1])))

    return run

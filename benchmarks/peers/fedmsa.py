"""FedMSA by hand, with full batches: an exchange for the mean direction, and one for corrected local steps.

It follows Algorithm 1 of Tarzanagh, Li, Sharma, Oymak (2023), arXiv:2306.01648, and the paper's code,
github.com/ucr-optml/FedMSA. With full batches the momentum of the method cancels, and the differences of its local
estimates add up to the form used here.
"""

import jax
import jax.numpy as jnp

from benchmarks.peers.common import directions


def program(problem, *, local_steps):
    """Return run((x, y, v), data, weights, steps of (x, y, v), rounds) -> (x, y, v)."""

    def own(point, client):
        return directions(problem, point, client["outer"], client["inner"])

    @jax.jit
    def run(point, data, weights, steps, rounds):
        def mean(of_client):
            return [jnp.tensordot(weights, each, 1) for each in jax.vmap(of_client)(data)]

        def once(_, point):
            anchor = mean(lambda client: own(point, client))  # the first exchange

            def local(client):
                start = own(point, client)

                def step(_, here):
                    found = zip(here, steps, own(here, client), start, anchor, strict=True)
                    return tuple(z - lr * (d - before + common) for z, lr, d, before, common in found)

                return jax.lax.fori_loop(0, local_steps, step, point)

            return tuple(mean(local))  # the second exchange

        return jax.lax.fori_loop(0, rounds, once, point)

    return run

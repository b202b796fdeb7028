"""AFBO by hand: a loop over inner and outer exchanges, each of which uses the last answers of all clients."""

import jax
import jax.numpy as jnp

from benchmarks.peers.arrivals import IDLE, Lane, exchange
from benchmarks.peers.common import move
from benchmarks.peers.lfednest import descent, hypergradient


def program(problem, *, wait_for, ticks, local_steps, batch_size, terms):
    """Return run((x, y), data, weights, (η, β, Neumann step, α), key, rounds) -> (x, y).

    `ticks` has the time that an answer of each client takes.
    """

    @jax.jit
    def run(start, data, weights, steps, key, rounds):
        client_lr, lr, shrink, outer_lr = steps
        count, none = len(weights), jnp.zeros(len(weights), jnp.int32)

        def once(r, carry):
            x, y, *under_way = carry
            first, second = jax.random.split(jax.random.fold_in(key, r))
            walk = client_lr * local_steps  # the mean gradient is the sum of the local steps, divided by η

            def gradients(own, i):
                change = descent(problem, x, y, own, jax.random.fold_in(first, i), local_steps, batch_size, walk)
                return jax.tree.map(lambda a: -a / walk, change)

            g, *under_way = exchange(0, gradients, *under_way, ticks, wait_for, data, weights)
            y = move(y, lr, g)
            outer = lambda own, i: hypergradient(  # noqa: E731
                problem, x, y, own, jax.random.fold_in(second, i), batch_size, terms, shrink, False
            )
            h, *under_way = exchange(1, outer, *under_way, ticks, wait_for, data, weights)
            return move(x, outer_lr, h), y, *under_way

        empty = [jax.tree.map(lambda a: jnp.zeros((count, *a.shape), a.dtype), one) for one in (start[1], start[0])]
        lanes = [Lane(one, none > 0, one, none, jnp.int32(0), jnp.int32(0)) for one in empty]
        return jax.lax.fori_loop(0, rounds, once, (*start, lanes, none + IDLE, none))[:2]

    return run

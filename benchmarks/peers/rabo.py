"""RABO by hand, with one hidden layer: each class of capacity trains the neurons with the largest weights."""

import jax
import jax.numpy as jnp

from benchmarks.peers.common import mean, move
from benchmarks.peers.lfednest import descent, hypergradient


def cut(x, y, units):
    """Return the submodel with these hidden units."""
    small = [{"weight": x[0]["weight"][:, units], "bias": x[0]["bias"][units]}]
    return small, {"weight": y["weight"][units], "bias": y["bias"]}


def put(small, whole, units, part):
    """Return `small` in the places of these units, and zeros in all other places, in the shape of x or y."""
    empty = jax.tree.map(jnp.zeros_like, whole)
    if part == "x":
        weight, bias = empty[0]["weight"], empty[0]["bias"]
        return [{"weight": weight.at[:, units].set(small[0]["weight"]), "bias": bias.at[units].set(small[0]["bias"])}]
    return {"weight": empty["weight"].at[units].set(small["weight"]), "bias": small["bias"]}


def program(problem, *, kept, local_steps, batch_size, terms):
    """Return run((x, y), data, weights, (β, Neumann step, α), key, rounds) -> (x, y).

    `data` and `weights` are lists with an entry for each class of capacity; `kept` has the number of units of each
    class.
    """

    @jax.jit
    def run(start, data, weights, steps, key, rounds):
        lr, shrink, outer_lr = steps

        def once(r, carry):
            x, y = carry
            importance = (x[0]["weight"] ** 2).sum(0) + x[0]["bias"] ** 2 + (y["weight"] ** 2).sum(1)
            order = jnp.argsort(-importance, stable=True)
            units = [jnp.sort(order[:count]) for count in kept]

            def over(phase, part, whole, key):
                """Return the mean of each entry over the clients that hold it."""
                total, held = jax.tree.map(jnp.zeros_like, whole), jax.tree.map(jnp.zeros_like, whole)
                for number, (own, w, mine) in enumerate(zip(data, weights, units, strict=True)):
                    keys = jax.random.split(jax.random.fold_in(key, number), len(w))
                    small = mean(lambda o, k, mine=mine: phase(*cut(x, y, mine), o, k), own, w, keys)
                    ones = jax.tree.map(lambda a, w=w: jnp.full(a.shape, w.sum()), small)
                    total = jax.tree.map(jnp.add, total, put(small, whole, mine, part))
                    held = jax.tree.map(jnp.add, held, put(ones, whole, mine, part))
                return jax.tree.map(lambda t, h: t / jnp.where(h > 0, h, 1), total, held)

            first, second = jax.random.split(jax.random.fold_in(key, r))
            y = move(y, -1, over(lambda *a: descent(problem, *a, local_steps, batch_size, lr), "y", y, first))
            ask = lambda *a: hypergradient(problem, *a, batch_size, terms, shrink, False)  # noqa: E731
            return move(x, outer_lr, over(ask, "x", x, second)), y

        return jax.lax.fori_loop(0, rounds, once, start)

    return run

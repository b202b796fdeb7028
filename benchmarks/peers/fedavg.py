"""FedAvg by hand, on one device with clients side by side or in turn, or on all devices by shard_map."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from benchmarks.peers.common import asked, mean, move


def program(loss, *, local_steps, batch_size, cohort, one_by_one=False, devices=1):
    """Return a compiled function (x, data, weights, lr, key, rounds) -> x.

    The arrays in `data` have the shape (clients, samples, …).
    """

    def change(data, x, lr, i, key):
        def step(point, key):
            chosen = jax.random.randint(key, (batch_size,), 0, jax.tree.leaves(data)[0].shape[1])
            return move(point, lr, jax.grad(loss)(point, jax.tree.map(lambda a: a[i, chosen], data))), None

        end, _ = jax.lax.scan(step, x, jax.random.split(key, local_steps))
        return jax.tree.map(jnp.subtract, end, x)

    def means(x, data, lr, ids, weights, keys):
        total = mean(partial(change, data, x, lr), ids, weights, keys, one_by_one)
        return jax.lax.psum(total, "d") if devices > 1 else total

    if devices > 1:
        whole, part = PartitionSpec(), PartitionSpec("d")
        mesh = jax.sharding.Mesh(jax.devices()[:devices], ("d",))
        means = jax.shard_map(
            means, mesh=mesh, in_specs=(whole, whole, whole, part, part, part), out_specs=whole, check_vma=False
        )

    @jax.jit
    def run(x, data, weights, lr, key, rounds):
        def once(r, x):
            ids, w, keys = asked(jax.random.fold_in(key, r), jnp.arange(len(weights)), weights, cohort)
            return move(x, -len(weights) / cohort, means(x, data, lr, ids, w, keys))

        return jax.lax.fori_loop(0, rounds, once, x)

    return run

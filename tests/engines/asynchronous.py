"""A small asynchronous algorithm: the first replies move x and y, and each client keeps its last inner gradient."""

import jax
import jax.numpy as jnp

from fedbilevel import authoring
from fedbilevel.core.config import static
from fedbilevel.core.tree import XY


class Early(authoring.Algorithm):
    n: int = static(default=3)
    max_staleness: int | None = static(default=None)

    @property
    def asks(self):
        return authoring.Asks(first=self.n)

    def init(self, x, y):
        return XY(x, y)

    def init_client(self, x, y):
        return jnp.zeros_like(y)

    @authoring.phase
    def inner(self, client, at, key):
        g = jax.grad(client.problem.inner, 1)(*at, client.inner_batch(key, 4))
        return authoring.Reply(
            g - client.state, state=g, gradients=client.local_steps(2), metrics={"inner_size": jnp.sum(g)}
        )

    @authoring.phase
    def outer(self, client, at, key):
        return authoring.Reply(jax.grad(client.problem.outer, 0)(*at, client.outer_batch(key, 4)), gradients=1)

    def round(self, fed, state, key):
        def once(fed, y, key):
            return y - 0.1 * fed.sum_first(self.n, self.inner, (state.x, y), key, max_staleness=self.max_staleness)

        inner_key, outer_key = jax.random.split(key)
        y = fed.repeat(2, once, state.y, inner_key)
        return XY(state.x - 0.1 * fed.sum_first(self.n, self.outer, (state.x, y), outer_key), y)

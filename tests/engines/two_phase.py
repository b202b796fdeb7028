"""A small algorithm with all that algorithms may use: two phases, a loop of exchanges, client states, both means."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedbilevel import authoring
from fedbilevel.core.config import static


class State(NamedTuple):
    x: jax.Array
    y: jax.Array


class TwoPhase(authoring.Algorithm):
    """Make inner steps with a control variate that each client keeps, then one outer step on its mean."""

    inner: int = static(default=3)
    lr: float = 0.1

    def init(self, x, y):
        return State(x, y)

    def init_client(self, x, y):
        return {"control": jnp.zeros_like(y), "calls": jnp.zeros((), jnp.int32)}

    @authoring.phase
    def inner_gradient(self, client, message, key):
        gradient = jax.grad(client.problem.inner, 1)(*message, client.inner_batch(key, 4))
        control = 0.9 * client.state["control"] + 0.1 * gradient
        state = {"control": control, "calls": client.state["calls"] + 1}
        return authoring.Reply(gradient, state=state, metrics={"size": optax.tree.norm(gradient)}, gradients=1)

    @authoring.phase
    def correction(self, client, message, key):
        return authoring.Reply(client.state["control"] * client.state["calls"])

    def round(self, fed, state, key):
        loop, last = jax.random.split(key)

        def step(fed, y, key):
            return y - self.lr * fed.mean(self.inner_gradient, (state.x, y), key)

        y = fed.repeat(self.inner, step, state.y, loop)
        correction = fed.mean(self.correction, jnp.zeros(()), last, unbiased=True)
        return State(state.x + 0.01 * correction[: state.x.size], y)

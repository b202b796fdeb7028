"""Examples of the API reference: `make catalogue` copies each cell under the name that heads it."""

# %% setup
import jax
import jax.numpy as jnp
import numpy as np

import fedbilevel as fb
from fedbilevel.authoring import XY, Algorithm, Layer, Reply, config, conjugate_gradient, phase, positive, static

rows = np.random.default_rng(0).normal(size=(4, 20, 3))  # (clients, samples, features)
problem = fb.SingleLevel(lambda x, batch: jnp.mean((batch - x) ** 2))
clients = fb.Clients(outer=rows)

# %% conjugate_gradient
solution = conjugate_gradient(lambda v: 2 * v, jnp.ones(3))
assert np.allclose(solution.v, 0.5)


# %% config
@config
class Decay:
    """A number that falls.

    Args:
        rate: by which factor in a round.
    """

    rate: float = positive(default=0.9)


print(Decay(rate=0.5))


# %% Algorithm
class Descent(Algorithm):
    """Gradient descent on the mean loss.

    Args:
        batch_size: samples of each client in a round; None: all.
        lr: the step size.
    """

    solves = (fb.SingleLevel,)
    batch_size: int | None = static(default=None)
    lr: float = positive(default=0.1)

    def init(self, x, y):
        return XY(x, y)

    @phase
    def gradient(self, client, x, key):
        loss, gradient = jax.value_and_grad(client.problem.outer)(x, None, client.outer_batch(key))
        return Reply(gradient, metrics={"outer_loss": loss}, gradients=1)

    def round(self, fed, state, key):
        gradient = fed.mean(self.gradient, state.x, key)
        return state._replace(x=jax.tree.map(lambda x, g: x - self.lr * g, state.x, gradient))


result = fb.solve(Descent(), problem, clients, np.zeros(3), rounds=50)
print(result.x, rows.mean(axis=(0, 1)))


# %% Layer
class HalfStep(Layer):
    """Halve the update of every reply."""

    kind, place = "half_step", "kept"

    def reply(self, asked, kept, client, run):
        reply = run(asked, client)
        return reply._replace(update=jax.tree.map(lambda leaf: leaf / 2, reply.update)), kept


half = fb.solve(fb.layered(Descent(), HalfStep()), problem, clients, np.zeros(3), rounds=50)

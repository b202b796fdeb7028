"""FedAvg by FedJAX."""

import fedjax
import jax
import jax.numpy as jnp
import work

clock = work.Clock()
images, labels = work.data()


def loss(x, batch, key):
    a = jax.nn.relu(batch["x"] @ x[0] + x[1])
    a = jax.nn.relu(a @ x[2] + x[3])
    return -jnp.take_along_axis(jax.nn.log_softmax(a @ x[4] + x[5]), batch["y"][:, None], axis=1)[:, 0]


clients = fedjax.InMemoryFederatedData({i: {"x": images[i], "y": labels[i]} for i in range(work.CLIENTS)})
sampler = fedjax.client_samplers.UniformGetClientSampler(clients, work.COHORT, seed=0)
algorithm = fedjax.algorithms.fed_avg.federated_averaging(
    grad_fn=fedjax.grad(loss),
    client_optimizer=fedjax.optimizers.sgd(work.LR),
    server_optimizer=fedjax.optimizers.sgd(1.0),
    client_batch_hparams=fedjax.ShuffleRepeatBatchHParams(batch_size=work.BATCH),
)
state = algorithm.init([jnp.asarray(array) for array in work.start()])
for r in range(work.ROUNDS):
    state, _ = algorithm.apply(state, sampler.sample())
    jax.block_until_ready(state.params)
    clock.tick(r + 1)
some, truth = work.few()
clock.report(loss(state.params, {"x": some, "y": truth}, None).mean())

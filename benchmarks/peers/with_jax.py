"""FedAvg by hand in JAX (fedavg.py): clients side by side, or with `shard_map` in turn on a device for each core."""

import os
import sys
from pathlib import Path

import work

if SHARDED := sys.argv[1] == "shard_map":
    count = f"--xla_force_host_platform_device_count={os.cpu_count()}"
    os.environ["XLA_FLAGS"] = f"{count} --xla_cpu_multi_thread_eigen=false"
import jax
import jax.numpy as jnp
import optax

sys.path.append(str(Path(__file__).parents[2]))
from benchmarks.peers import fedavg

clock = work.Clock()
data = dict(zip(("image", "label"), map(jnp.asarray, work.data()), strict=True))
weights = jnp.full(work.CLIENTS, 1 / work.CLIENTS)


def loss(x, batch):
    a = jax.nn.relu(batch["image"] @ x[0] + x[1])
    a = jax.nn.relu(a @ x[2] + x[3])
    return optax.losses.softmax_cross_entropy_with_integer_labels(a @ x[4] + x[5], batch["label"]).mean()


run = fedavg.program(
    loss,
    local_steps=work.STEPS,
    batch_size=work.BATCH,
    cohort=work.COHORT,
    one_by_one=SHARDED,
    devices=jax.device_count() if SHARDED else 1,
)
x, done = work.start(), 0
for until in (1, *range(work.STRETCH, work.ROUNDS + 1, work.STRETCH)):
    x = jax.block_until_ready(run(x, data, weights, work.LR, jax.random.key(done), until - done))
    done = until
    clock.tick(done)
some, truth = work.few()
clock.report(loss(x, {"image": some, "label": truth}))

"""FedAvg by this library."""

from functools import partial

import jax
import optax
import work

import fedbilevel as fb

fb.tune_cpu()
clock = work.Clock()
images, labels = work.data()


def loss(x, batch):
    a = jax.nn.relu(batch["image"] @ x[0] + x[1])
    a = jax.nn.relu(a @ x[2] + x[3])
    return optax.losses.softmax_cross_entropy_with_integer_labels(a @ x[4] + x[5], batch["label"]).mean()


method = fb.FedAvg(lr=work.LR, local_steps=work.STEPS, batch_size=work.BATCH)
problem, clients = fb.SingleLevel(loss), fb.Clients(outer={"image": images, "label": labels})
play = partial(fb.solve, method, problem, clients, work.start(), cohort=work.COHORT)
play(rounds=1)
clock.tick(1)
found = play(rounds=work.ROUNDS, eval_every=work.STRETCH)
for row in found.history.rows[1:]:
    clock.tick(row["round"], row["seconds"])
some, truth = work.few()
clock.report(loss(found.x, {"image": some, "label": truth}))

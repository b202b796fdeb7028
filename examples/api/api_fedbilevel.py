"""Examples of the API reference: `make catalogue` copies each cell under the name that heads it."""

# %% setup
import jax.numpy as jnp
import numpy as np
import optax

import fedbilevel as fb


def outer(x, y, rows):  # validation loss; the last column is the target
    return jnp.mean((rows[:, :3] @ y - rows[:, 3]) ** 2)


def inner(x, y, rows):  # training loss; 10**x is a penalty for each feature
    return outer(x, y, rows) + jnp.sum(10**x * y**2)


rows = np.random.default_rng(0).normal(size=(4, 20, 4))  # (clients, samples, columns)
rows[..., 3] += rows[..., 0]
problem = fb.Bilevel(outer, inner)
clients = fb.Clients(outer=rows[:, :10], inner=rows[:, 10:])
x0, y0 = np.full(3, -1.0), np.zeros(3)
fixed = fb.SimFBO(local_steps=1, batch_size=None, client_lr=0.05, server_lr=0.05)

# %% solve
result = fb.solve(fb.SimFBO(), problem, clients, x0, y0, rounds=50, eval_every=10)
print(result.x, result.history["outer_loss"][-1], result.ledger.exchanges)

# %% stop_when
metrics = {"size": lambda x, y: jnp.sum(y**2)}
stop = fb.stop_when("size", above=0.5)
end = fb.solve(fixed, problem, clients, x0, y0, rounds=200, eval_every=10, metrics=metrics, callbacks=[stop])
print(end.round, end.stopped)

# %% stop_without_progress
stop = fb.stop_without_progress("outer_loss", patience=3)
end = fb.solve(fixed, problem, clients, x0, y0, rounds=200, eval_every=10, callbacks=[stop])

# %% sweep
found = fb.sweep(fixed, problem, clients, x0, y0, grid={"server_lr.x": [0.01, 0.1]}, select="outer_loss", rounds=20)
print(found)

# %% Clock
clock = fb.Clock(compute=0.1, network=1.0, stragglers=1, slowdown=5)
timed = fb.solve(fixed, problem, clients, x0, y0, rounds=10, engine=fb.Local(clock=clock))
print(timed.ledger.time)

# %% Cohort
drawn = fb.solve(fixed, problem, clients, x0, y0, rounds=10, cohort=fb.Cohort(3, replacement=True))

# %% Local
whole = fb.solve(fixed, problem, clients, x0, y0, rounds=10, engine=fb.Local(chunk=2))

# %% PerClient
per_client = {"fit": outer, "training_fit": fb.PerClient(outer, "inner")}
measured = fb.solve(fixed, problem, clients, x0, y0, rounds=10, metrics_per_client=per_client)
print(measured.history["fit.worst"][-1], measured.history["training_fit.mean"][-1])

# %% Reference
exact = fb.solve(fixed, problem, clients, x0, y0, rounds=2, engine=fb.Reference())

# %% Result
print(result.summary())
print(result.best.round, result.best.x)

# %% Bilevel
bounded = fb.Bilevel(outer, inner, project_x=fb.projections.box(-4.0, 2.0))

# %% Compositional
risk = fb.Compositional(
    outer=lambda y, batch: jnp.sum(jnp.sqrt(1 + y)),
    inner=lambda x, batch: jnp.mean((batch - x) ** 2, axis=0),
)

# %% Minimax
saddle = fb.Minimax(lambda x, y, batch: 0.5 * x @ x + x @ y - 0.5 * y @ y + jnp.mean(batch, axis=0) @ (x + y))

# %% SimpleBilevel
nearest = fb.SimpleBilevel(
    outer=lambda x: jnp.sum(x**2) / 2,
    inner=lambda x, batch: jnp.mean(jnp.abs(batch @ x - 1)),
    project=fb.projections.ball(10.0),
    strong_convexity=1.0,
)

# %% SingleLevel
mean = fb.SingleLevel(lambda x, batch: jnp.mean((batch - x) ** 2))

# %% WholeLoss
largest = fb.WholeLoss(lambda x, y, samples, valid: jnp.max(jnp.where(valid, samples @ y, -jnp.inf)))

# %% Clients
unequal = fb.Clients(outer=[rows[0, :4], rows[1, :7]], inner=[rows[0, 4:], rows[1, 7:]], weights="size")
divided = fb.Clients.split(list(rows), 0.8, seed=0)  # 16 samples of each client to train on, 4 to validate with

# %% Metric
accuracy = fb.Metric(lambda x, y: jnp.mean(y > 0), larger_is_better=True)

# %% Privacy
terms = fb.Privacy(clip=1.0, noise_multiplier=30.0, delta=1e-5, budget=4.0)
print(terms.epsilon_after(100))

# %% Ragged
two = fb.Ragged(rows.reshape(80, 4), start=np.array([0, 30]), size=np.array([30, 50]))
print(fb.Clients(outer=two).outer.row(0).shape)

# %% RemoteClients
known = fb.RemoteClients(4, rows[0, :1], rows[0, :1])  # for clients elsewhere: their number, an example of a sample

# %% XYV
steps = fb.XYV(x=0.01, y=0.1, v=0.1)

# %% check_hypergradient
report = fb.check_hypergradient(problem, clients, x0, y0)
print(report["cg"].relative_error)

# %% diagnose
diagnosis = fb.diagnose(problem, clients, x0, y0, rounds=100)
print(diagnosis.fields("simfbo"))

# %% reply_norms
print(fb.reply_norms(fixed, problem, clients, x0, y0, rounds=5))

# %% layered
robust = fb.layered(fixed, fb.parts.TrimmedMean(trim=1), fb.OuterOptimizer(optimizer=optax.adam(0.05)))

# %% AdaptiveSteps
cautious = fb.layered(fb.SimFBO(), fb.AdaptiveSteps(x_lr=0.02))

# %% Asynchronous
first_three = fb.layered(fixed, fb.Asynchronous(wait_for=3))

# %% OuterOptimizer
adam = fb.layered(fixed, fb.OuterOptimizer(optimizer=optax.adam(0.05)))
end = fb.solve(adam, problem, clients, x0, y0, rounds=20)

# %% Submodels
rolling = fb.Submodels(fb.SimFBO(), policy="rolling")

# %% Structure
structure = fb.Structure(x={"weight": "_ hidden", "bias": "hidden"}, y={"weight": "hidden"})

"""Examples of the API reference: `make catalogue` copies each cell under the name that heads it."""

# %% setup
import fedbilevel as fb
from fedbilevel.flower import Flower, InProcess, Limits, Site, Terms, client_app, server_app
from fedbilevel.tasks import quadratic

algorithm, task = fb.SimFBO(batch_size=8, client_lr=0.02, server_lr=0.02), quadratic(clients=3, samples=(8, 12))


def site(run_config, node_config):  # called at the client
    k = node_config["partition-id"]
    outer, inner = task.clients.outer.row(k), task.clients.inner.row(k)
    return Site(id=k, algorithm=algorithm, problem=task.problem, x0=task.x0, y0=task.y0, outer=outer, inner=inner)


# %% client_app
app = client_app(site)


# %% server_app
def main(grid, run_config):
    known = fb.RemoteClients.of(task.clients)
    fb.solve(algorithm, task.problem, known, task.x0, task.y0, rounds=5, engine=Flower(grid=grid))


server = server_app(main)

# %% Flower
engine = Flower(grid=InProcess(app, clients=3), terms=Terms(quorum=0.9))
known = fb.RemoteClients.of(task.clients)
result = fb.solve(algorithm, task.problem, known, task.x0, task.y0, rounds=3, engine=engine)
print(result.ledger.exchanges)

# %% InProcess
grid = InProcess(app, clients=3)

# %% Limits
limits = Limits(min_local_samples=50, max_seconds=60)

# %% Terms
terms = Terms(quorum=0.9, deadline=30)

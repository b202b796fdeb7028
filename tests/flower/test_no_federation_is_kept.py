"""If a federation in this process ends and its caller drops it, its arguments, objects and programs are freed."""

import gc
import weakref
from dataclasses import replace

import federations
import jax
import jax.numpy as jnp
import numpy as np
from closing_over import closing_over

import fedbilevel as fb
from fedbilevel.flower.client.site import ClientRuntime
from fedbilevel.flower.launch.in_process import InProcess
from fedbilevel.flower.server.engine import Flower, FlowerRun


def played(monkeypatch):
    """Run a federation of two clients; return weak references to its arguments and to what it made, by name."""
    rng = np.random.default_rng(0)
    scale, samples = jnp.asarray(rng.normal(size=3)), rng.normal(size=(2, 5, 3))
    made = {}

    def noted(kind):
        init = kind.__init__

        def noting(self, *arguments, **named):
            made[f"{kind.__name__} {len(made)}"] = weakref.ref(self)
            init(self, *arguments, **named)

        return noting

    functions = closing_over(scale)
    problem, clients = fb.Bilevel(functions.outer, functions.inner), fb.Clients(samples, samples.copy())
    algorithm, start = federations.Steps(batch_size=2), (jnp.zeros(2), jnp.zeros(3))
    task = replace(federations.TASK, problem=problem, clients=clients, x0=start[0], y0=start[1])
    app = federations.app(algorithm, task)
    with monkeypatch.context() as patched:
        for kind in (ClientRuntime, FlowerRun):
            patched.setattr(kind, "__init__", noted(kind))
        grid = InProcess(app, 2)
        engine, known = Flower(grid=grid), fb.RemoteClients.of(clients)
        result = fb.solve(
            algorithm, problem, known, *start, rounds=1, engine=engine, metrics={"size": functions.metric}
        )
    given = {**functions._asdict(), "problem": problem, "clients": clients, "result": result}
    given |= {"a constant": scale, "samples": clients.inner.values, "grid": grid, "engine": engine, "app": app}
    return {name: weakref.ref(thing) for name, thing in given.items()} | made


def test_no_federation_is_kept(monkeypatch):
    """After a federation none of its objects is kept, and a second federation adds no array to those that remain.

    The arrays that remain after the first one are in JAX's caches.
    """
    played(monkeypatch)
    gc.collect()
    arrays = len(jax.live_arrays())
    kept = played(monkeypatch)
    gc.collect()
    assert {name.split()[0] for name in kept} >= {"ClientRuntime", "FlowerRun", "grid", "problem"}
    assert [name for name, thing in kept.items() if thing() is not None] == []
    assert len(jax.live_arrays()) == arrays

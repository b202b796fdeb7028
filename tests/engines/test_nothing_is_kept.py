"""Is everything that was given to `solve` freed with its last reference, and are compiled programs freed on request?"""

import dataclasses
import gc
import weakref

import jax.numpy as jnp
import numpy as np
import pytest
from closing_over import closing_over

import fedbilevel as fb
from fedbilevel.authoring import XY, Algorithm
from fedbilevel.engines import machine
from fedbilevel.engines.local.rounds import Program
from fedbilevel.machinery.kept import _KEPT
from fedbilevel.tasks.quadratic import quadratic
from fixed_steps import fixed

pytestmark = pytest.mark.checked  # the checks of the losses keep nothing either


def of_batch(x, y, batch):
    return jnp.mean(batch["t"])


class Still(Algorithm):
    """A method that asks no client and moves nothing."""

    def init(self, x, y):
        return XY(x, y)

    def round(self, fed, state, key):
        return state


def solved(engine, algorithm=fixed(fb.SimFBO(local_steps=1, batch_size=2))):  # noqa: B008
    """Return weak references, by name, to what one `solve` was given and to what it compiled."""
    algorithm = dataclasses.replace(algorithm)
    rng = np.random.default_rng(0)
    scale, samples = jnp.asarray(rng.normal(size=3)), rng.normal(size=(4, 5, 3))

    made = closing_over(scale)

    def size_per_client(x, y, batch):
        return jnp.mean(batch @ (scale * y))

    problem, clients = fb.Bilevel(made.outer, made.inner), fb.Clients(samples, samples.copy())
    fb.Local.forget()
    start = jnp.zeros(2), jnp.zeros(3)
    measured = {"metrics": {"size": made.metric}, "metrics_per_client": {"own": size_per_client}}
    result = fb.solve(algorithm, problem, clients, *start, rounds=1, engine=engine, **measured)
    given = {**made._asdict(), "metric of clients": size_per_client}
    given |= {"problem": problem, "clients": clients, "result": result}
    given |= {"a constant": scale, "samples": clients.inner.values, "algorithm": algorithm}
    (given["program"],) = [one for one in _KEPT.values() if isinstance(one, Program)] or [Still()]
    return {name: weakref.ref(thing) for name, thing in given.items()}


@pytest.mark.parametrize(
    "engine",
    [fb.Local(), pytest.param(fb.Local(stream=True), marks=pytest.mark.slow)],
    ids=["resident", "streamed"],
)
def test_nothing_is_kept(engine):
    kept = solved(engine)
    gc.collect()
    assert [name for name, thing in kept.items() if thing() is not None] == ["program"]
    fb.Local.forget()
    gc.collect()
    assert [name for name, thing in kept.items() if thing() is not None] == []


@pytest.mark.parametrize(
    "options",
    [{}, {"on_divergence": "shrink"}, {"metrics_per_client": {"m": of_batch}}],
    ids=lambda options: "".join(options),
)
def test_samples_go_with_the_run_before_the_garbage_collector_comes(options, monkeypatch):
    """The samples are freed at the end of a run, before the garbage collector runs.

    If they were in a cycle of references, several runs would have all their samples in memory.
    """
    held, start = [], fb.Local.start

    def watched(*arguments):
        run = start(*arguments)
        held.extend(map(weakref.ref, (run, run.source)))
        return run

    monkeypatch.setattr(fb.Local, "start", watched)
    task, method = quadratic(clients=3), fixed(fb.SimFBO(local_steps=1, batch_size=2))
    gc.collect()
    gc.disable()
    try:
        fb.solve(method, task.problem, task.clients, task.x0, task.y0, rounds=1, **options)
        assert len(held) == 2
        assert [one() for one in held] == [None, None]
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [fb.FedNest(), fb.RABO()], ids=lambda one: type(one).__name__)
def test_checks_of_steps_keep_no_losses(algorithm):
    """The checks of steps, which compute eigenvalues of inner Hessians before the first round, keep no losses."""
    kept = solved(fb.Local(), algorithm)
    gc.collect()
    assert [name for name, thing in kept.items() if thing() is not None and not name.startswith("program")] == []


@pytest.mark.parametrize("has_it", [True, False])
def test_what_compiling_freed_is_given_back_after_every_solve(has_it, monkeypatch):
    """After every `solve`, memory that compiling has freed goes back by malloc_trim(0), if the C library has it."""
    given_back = []
    monkeypatch.setattr(machine, "_trim", lambda: given_back.append if has_it else None)
    solved(fb.Reference(), Still())
    assert given_back == [0] * has_it

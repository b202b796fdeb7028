"""In a series of runs what was traced is not traced again; its numbers are those of runs on their own, to the bit."""

import gc
import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedbilevel as fb
from fedbilevel.authoring import XY, Algorithm, Reply, phase, positive, static
from fedbilevel.core.kept import recalled
from fedbilevel.engines.engine import first_carry
from fedbilevel.engines.reference import Reference

RNG = np.random.default_rng(0)
SAMPLES = RNG.normal(size=(4, 5, 3))
UNEQUAL = [RNG.normal(size=(n, 3)) for n in (5, 3, 4, 5)]
CLIENTS = fb.Clients(SAMPLES, SAMPLES[::-1].copy())
SIMFBO = fb.SimFBO(local_steps=2, batch_size=2)
LATE = fb.Asynchronous(fb.FedBiO(batch_size=2), wait_for=2)


def outer(x, y, batch):
    return jnp.mean((batch @ y - jnp.sum(x)) ** 2)


def inner(x, y, batch):
    return outer(x, y, batch) + y @ y


class Descent(Algorithm):
    """As many steps on y as a leaf says, in one exchange."""

    steps: int = positive(default=1)
    scale: object = static(default=1)

    def init(self, x, y):
        return XY(x, y)

    @phase
    def go(self, client, state, key):
        def step(y):
            return y - 0.01 * jax.grad(client.problem.inner, 1)(state.x, y, client.inner_batch(key, 2)) * self.scale

        y = step(state.y)
        if isinstance(self.scale, float):
            y = y + step(y)
        return Reply(jax.lax.fori_loop(0, self.steps, lambda k, y: step(y), y))

    def round(self, fed, state, key):
        return XY(state.x, fed.mean(self.go, state, key))


class Branching(Descent):
    """One that only an engine that compiles nothing can play."""

    lr: float = positive(default=1.0)

    @phase
    def go(self, client, state, key):
        batch = client.outer_batch(key, None if self.lr > 1 else 2)
        return Reply(self.lr * jax.grad(client.problem.outer, 1)(state.x, state.y, batch))


PROBLEM = fb.Bilevel(outer, inner)
CASES = {
    "as it is": {},
    "another step": {"algorithm": replace(SIMFBO, server_lr=fb.XYV(0.02, 0.05, 0.05))},
    "a schedule": {"algorithm": replace(SIMFBO, server_lr=fb.XYV(optax.linear_schedule(0.1, 0.01, 3), 0.1, 0.1))},
    "another schedule": {"algorithm": replace(SIMFBO, server_lr=fb.XYV(optax.linear_schedule(0.1, 0.05, 3), 0.1, 0.1))},
    "another number of local steps": {"algorithm": replace(SIMFBO, local_steps=3)},
    "another batch size": {"algorithm": replace(SIMFBO, batch_size=3)},
    "all samples": {"algorithm": replace(SIMFBO, batch_size=None)},
    "another server optimizer": {"algorithm": replace(SIMFBO, server_optimizer=optax.adam(1.0))},
    "replies that come late": {"algorithm": LATE},
    "another seed": {"key": 1},
    "a cohort": {"cohort": 2},
    "unequal clients": {"clients": fb.Clients(UNEQUAL, UNEQUAL[::-1])},
    "other samples": {"clients": fb.Clients(2 * SAMPLES, SAMPLES)},
    "other weights": {"clients": fb.Clients(SAMPLES, SAMPLES[::-1].copy(), weights=[1, 2, 3, 4])},
    "clients with work of their own": {"clients": fb.Clients(SAMPLES, SAMPLES[::-1].copy(), local_steps=[1, 2, 3, 4])},
    "one after the other": {"engine": fb.Local(chunk=1)},
    "a clock": {"engine": fb.Local(clock=fb.Clock(compute=0.1, spread=0.5, availability=0.5, seed=3))},
    "a clock with another seed": {
        "engine": fb.Local(clock=fb.Clock(compute=0.1, spread=0.5, availability=0.5, seed=4))
    },
    "two devices": {"engine": fb.Local(devices=2)},
    "another loss": {"problem": fb.Bilevel(outer, lambda x, y, batch: inner(x, y, batch) + y @ y)},
    "another start": {"x0": jnp.ones(3)},
    "a loop": {"algorithm": Descent()},
    "a longer loop": {"algorithm": Descent(steps=3)},
    "a static field that is equal and of another type": {"algorithm": Descent(scale=1.0)},
    "a branch, uncompiled": {"algorithm": Branching(), "engine": Reference()},
    "another branch, uncompiled": {"algorithm": Branching(lr=2.0), "engine": Reference()},
    "other random bits": {"within": partial(jax.threefry_partitionable, False)},
}


def solved(algorithm=SIMFBO, problem=PROBLEM, clients=CLIENTS, x0=None, within=nullcontext, **options):
    start = jnp.ones(2) if x0 is None else x0
    options = {"rounds": 3, "key": 0, "count_flops": True} | options
    with within():
        return fb.solve(algorithm, problem, clients, start, jnp.zeros(3), **options)


def numbers(result):
    return [np.asarray(leaf) for leaf in jax.tree.leaves((result.x, result.y))], str(result.ledger)


@pytest.fixture(scope="module")
def in_series():
    """Each case in one series, after a run of the first, and once more in the opposite order."""
    with fb.Local.series():
        first = {name: numbers(solved(**case)) for name, case in CASES.items()}
        again = {name: numbers(solved(**CASES[name])) for name in reversed(CASES)}
    return first, again


@pytest.mark.parametrize("name", CASES)
def test_a_run_in_a_series_has_the_numbers_of_one_on_its_own(name, in_series):
    alone = numbers(solved(**CASES[name]))
    for found in in_series:
        np.testing.assert_equal(found[name], alone)


def counting():
    """A problem, and how often its losses were called."""
    calls = []

    def counted(loss):
        return lambda *given: calls.append(loss) or loss(*given)

    return fb.Bilevel(counted(outer), counted(inner)), calls


@pytest.mark.parametrize("algorithm", [SIMFBO, LATE], ids=["SimFBO", "FedBiO, asynchronous"])
def test_another_step_and_seed_call_no_loss_again(algorithm):
    problem, calls = counting()
    with fb.Local.series():
        solved(algorithm, problem)
        before = len(calls)
        solved(algorithm, problem, key=5)
        assert len(calls) == before > 0
        with fb.Local.series():  # a series within a series is the same one
            solved(algorithm, problem, key=6)
        assert len(calls) == before
    solved(algorithm, problem, key=7)
    assert len(calls) > before


def test_a_sweep_calls_the_losses_as_often_as_one_run():
    often = []
    for values in ([0.1], [0.1, 0.2, 0.3]):
        problem, calls = counting()
        grid, metrics = {"server_lr.x": values}, {"size": lambda x, y: x @ x}
        fb.sweep(
            SIMFBO, problem, CLIENTS, jnp.ones(2), jnp.zeros(3), grid=grid, select="size", rounds=2, metrics=metrics
        )
        often.append(len(calls))
    assert often[0] == often[1]


def test_nothing_of_a_series_is_kept_after_it():
    problem, _ = counting()
    left = weakref.ref(problem.inner)
    with fb.Local.series():
        solved(problem=problem)
        del problem
        gc.collect()
        assert left() is not None
    gc.collect()
    assert left() is None


def test_problems_that_solve_did_not_prepare_are_told_apart():
    ys = []
    with fb.Local.series():
        for problem in (PROBLEM, CASES["another loss"]["problem"]):
            carry = first_carry(SIMFBO, problem, CLIENTS, jnp.ones(2), jnp.zeros(3))
            run = fb.Local().start(SIMFBO, problem, CLIENTS, 4, jax.random.key(0), carry)
            ys.append(run.advance(carry, 2).carry.state.y)
    assert not np.array_equal(*ys)


def test_what_has_no_hash_is_made_anew():
    made = []
    with fb.Local.series():
        for _ in range(2):
            recalled(([],), lambda: made.append(1))
            recalled(None, lambda: made.append(2))
    assert made == [1, 2, 1, 2]

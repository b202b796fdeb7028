"""The spine: every engine gives the same state, history and ledger for every algorithm, to 1e-12 in float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from two_phase import TwoPhase

import fedbilevel as fb
from fedbilevel import authoring
from fedbilevel.engines.engine import first_carry
from fedbilevel.engines.local import engine as engine_module
from fedbilevel.tasks.quadratic import inner, outer, quadratic

COHORT = 5  # of 8: divided by neither the chunk nor the number of devices below
WORK = np.array([1, 2, 3, 4, 1, 2, 3, 4])
CASES = {
    "SimFBO, mini-batches": (fb.SimFBO(local_steps=3, batch_size=4), None),
    "SimFBO, work of each client": (
        fb.SimFBO(batch_size=4, local_optimizer=fb.parts.Momentum(decay=0.5), radius=0.5),
        WORK,
    ),
    "ShroFBO, ragged full batches, random work": (
        fb.ShroFBO(
            batch_size=None,
            local_optimizer=fb.parts.Proximal(pull=0.2),
            server_optimizer=optax.adam(1.0),
            independent_batches=True,
            server_lr=optax.exponential_decay(0.02, 2, 0.5),
        ),
        (1, 4),
    ),
    "two phases, a loop, client state": (TwoPhase(), None),
    "FedNest, random lengths, fresh cohorts": (
        fb.FedNest(
            hypergradient=fb.parts.Implicit(solver=fb.parts.Neumann(terms=2, sampling="random")),
            batch_size=4,
            outer_steps=2,
        ),
        WORK,
    ),
    "FedNest, merged exchanges": (
        fb.FedNest(
            inner=fb.parts.SVRG(rounds=2),
            hypergradient=fb.parts.Implicit(solver=fb.parts.CG(max_steps=3)),
            merged=True,
            batch_size=4,
        ),
        (1, 2),
    ),
    "FedNest-SGD, conjugate gradient": (
        fb.FedNestSGD(hypergradient=fb.parts.Implicit(solver=fb.parts.CG(max_steps=4)), batch_size=None),
        None,
    ),
    "LFedNest, random lengths": (
        fb.LFedNest(
            inner=fb.parts.LocalSGD(lr=0.1),
            hypergradient=fb.parts.LocalImplicit(solver=fb.parts.Neumann(sampling="random")),
            batch_size=4,
        ),
        (1, 4),
    ),
    "FedMBO, fresh cohorts": (
        fb.FedMBO(
            inner=fb.parts.LocalSGD(local_steps=2, rounds=2),
            hypergradient=fb.parts.Implicit(solver=fb.parts.Neumann(terms=3, sampling="random_per_client")),
            batch_size=4,
        ),
        None,
    ),
    "AggITD, Q = 2, 3, 5": (
        fb.AggITD(sampling="random", inner=fb.parts.LocalSGD(rounds=7), batch_size=4, outer_lr=0.01),
        WORK,
    ),
    "FedBiO": (fb.FedBiO(batch_size=None), (1, 4)),
    "FedBiOAcc": (fb.FedBiOAcc(local_steps=3, batch_size=4, horizon=5.0), None),
    "FedLin, single level": (fb.FedLin(batch_size=4), WORK),
    "FedAvg, single level": (fb.FedAvg(batch_size=None), (1, 4)),
    "FedAvg-S, minimax": (fb.FedAvgS(batch_size=None), (1, 4)),
    "AFBO, local": (
        fb.Asynchronous(
            fb.AFBO(
                batch_size=4,
                inner=fb.parts.MeanGradient(rounds=2),
                hypergradient=fb.parts.LocalImplicit(
                    solver=fb.parts.Neumann(terms=[2, 3, 1, 4, 2, 1, 3, 5], sampling="random")
                ),
            ),
            wait_for=2,
            delay_penalty=0.1,
        ),
        (1, 2),
    ),
    "AFBO, global": (
        fb.Asynchronous(
            fb.AFBO(batch_size=4, inner=fb.parts.MeanGradient(rounds=2), hypergradient=fb.parts.SystemSteps()),
            wait_for=3,
            max_staleness=2,
        ),
        WORK,
    ),
    "AFBO, waiting for all": (
        fb.AFBO(
            batch_size=4,
            inner=fb.parts.MeanGradient(local_steps=2),
            hypergradient=fb.parts.LocalImplicit(solver=fb.parts.Neumann(terms=2)),
        ),
        None,
    ),
    "asynchronous SimFBO": (fb.Asynchronous(fb.SimFBO(batch_size=4, local_steps=2), wait_for=1), None),
    "asynchronous ShroFBO, one never there": (fb.Asynchronous(fb.ShroFBO(batch_size=4), wait_for=3), (1, 2)),
    "RABO": (
        fb.RABO(
            batch_size=4,
            inner=fb.parts.LocalSGD(rounds=2),
            hypergradient=fb.parts.LocalImplicit(solver=fb.parts.Neumann(terms=3, sampling="random")),
        ),
        (1, 4),
    ),
    # on quadratics differences are exact for steps of any length, and long ones do not magnify rounding
    "RAFBO, global": (
        fb.RAFBO(
            batch_size=4,
            hypergradient=fb.parts.Implicit(
                solver=fb.parts.Neumann(terms=2, sampling="random"), second_order=fb.parts.Differences(perturbation=1e5)
            ),
        ),
        None,
    ),
    "RAFBO, drawn coordinates": (
        fb.RAFBO(batch_size=4, hypergradient=fb.parts.Coordinates(count=2, terms=2, perturbation=1e8)),
        WORK,
    ),
    "ADBO": (
        fb.ADBO(batch_size=4, consensus_steps=2, iterations=4, planes=2, wait_for=2, max_staleness=3),
        None,
    ),
    "FISM, walks of unequal length in random order": (fb.FISM(order="random", lr=0.1), None),
    "asynchronous FISM, drawn samples": (fb.Asynchronous(fb.FISM(lr=0.1), wait_for=2), (1, 4)),
    "BiFISTA, mini-batches": (fb.BiFISTA(batch_size=4, lr=0.1), None),
}
CLOCKS = {
    "AFBO, local": fb.Clock(spread=0.7, stragglers=2),
    "AFBO, global": fb.Clock(network=[1.0, 2.0, 0.5, 0.7, 3.0, 1.0, 1.0, 9.0], drift=0.5, period=4.0, availability=0.6),
    "asynchronous SimFBO": fb.Clock(spread=0.3, stragglers=3, slowdown=20.0),
    "asynchronous ShroFBO, one never there": fb.Clock(
        compute=0.1, drift=1.0, period=2.0, availability=[1.0, 1.0, 0.0, 1.0, 0.5, 1.0, 1.0, 1.0]
    ),
    "ADBO": fb.Clock(compute=0.3, spread=0.7, stragglers=1, drift=0.5, period=7.0, availability=0.8),
    "asynchronous FISM, drawn samples": fb.Clock(compute=0.1, spread=0.5, stragglers=2),
}
SINGLE_LEVEL = fb.SingleLevel(lambda x, batch: outer(x, jnp.tile(x, 2)[:8], batch))
SIMPLE_BILEVEL = fb.SimpleBilevel(
    lambda x: jnp.vdot(x, x) / 2 + jnp.sum(jnp.abs(x - 0.1)),
    lambda x, batch: inner(jnp.zeros(5), jnp.tile(x, 2)[:8], batch),
    fb.projections.box(-0.3, 0.5),
)
PROBLEMS = {  # of the cases that are not for the task's own
    "FedLin, single level": SINGLE_LEVEL,
    "FedAvg, single level": SINGLE_LEVEL,
    "FedAvg-S, minimax": fb.Minimax(lambda x, y, batch: outer(x, y, batch) - 2 * jnp.vdot(y, y)),
    "FISM, walks of unequal length in random order": SIMPLE_BILEVEL,
    "asynchronous FISM, drawn samples": SIMPLE_BILEVEL,
    "BiFISTA, mini-batches": SIMPLE_BILEVEL,
}
ENGINES = {
    "vmap": fb.Local(chunk=COHORT),
    "one by one": fb.Local(chunk=1),
    "chunks": fb.Local(chunk=2),
    "permuted cohort": fb.Local(chunk=COHORT),
    "two devices": fb.Local(devices=2),
    "two devices, chunks": fb.Local(devices=2, chunk=2),
    "two devices, chunks, streamed": fb.Local(devices=2, chunk=2, stream=True),
    "streamed": fb.Local(stream=True),
}
EVERY_ENGINE = {"two phases, a loop, client state"}  # others have one, which has it all
SOME = ("two devices, chunks, streamed",)
ASYNCHRONOUS = ("two devices, chunks",)  # streamed samples are not for them
SLOW = {
    "AFBO, global",
    "AFBO, local",
    "AFBO, waiting for all",
    "FISM, walks of unequal length in random order",  # tests of FISM hold Local itself against NumPy
    "FedAvg, single level",
    "FedAvg-S, minimax",
    "FedNest-SGD, conjugate gradient",
    "SimFBO, mini-batches",
    "SimFBO, work of each client",
    "asynchronous ShroFBO, one never there",
    "RAFBO, global",
    "RAFBO, drawn coordinates",
    "AggITD, Q = 2, 3, 5",
    "FedBiOAcc",
    "FedMBO, fresh cohorts",
    "LFedNest, random lengths",
    "ADBO",
    "FedBiO",
    "FedNest, merged exchanges",
    "asynchronous FISM, drawn samples",
    "BiFISTA, mini-batches",
}
PAIRS = [pytest.param(case, engine, marks=[pytest.mark.slow] if case in SLOW else [])
         for case in sorted(CASES) for engine in sorted(ENGINES)
         if engine in (ASYNCHRONOUS if CASES[case][0].asynchronous else SOME)
         or case in EVERY_ENGINE]  # fmt: skip


def three_rounds(case, engine):
    algorithm, work = CASES[case]
    task = quadratic(clients=8, samples=(3, 9), local_steps=work)
    problem = PROBLEMS.get(case, task.problem)
    y0 = None if isinstance(problem, fb.SingleLevel | fb.SimpleBilevel) else task.y0
    carry = first_carry(algorithm, problem, task.clients, task.x0, y0)
    cohort = len(task.clients) if algorithm.needs_everyone else COHORT
    engine = replace(engine, clock=CLOCKS.get(case, fb.Clock()))
    run = engine.start(algorithm, problem, task.clients, cohort, jax.random.key(1), carry)
    costs = []
    while int(carry.round) < 3:
        carry, _, round_costs = run.advance(carry, 3 - int(carry.round))
        costs.append(round_costs)
    run.close()
    return carry, jax.tree.map(lambda *leaves: np.concatenate(leaves), *costs)


@pytest.fixture(scope="module")
def reference():
    done = {}

    def result(case):
        if case not in done:
            done[case] = three_rounds(case, fb.Reference())
        return done[case]

    return result


@pytest.mark.filterwarnings("ignore::fedbilevel.errors.AbsenceWarning")
@pytest.mark.parametrize(("case", "engine"), PAIRS)
def test_agrees_with_the_reference(case, engine, reference, monkeypatch):
    """Sums of at most COHORT·32 terms of size about 1 in another order differ by some 1e-14; 1e-12 leaves room."""
    if engine == "permuted cohort":
        draw = engine_module.draw_cohort
        monkeypatch.setattr(engine_module, "draw_cohort", lambda *arguments: draw(*arguments)[::-1])
    expected, computed = reference(case), three_rounds(case, ENGINES[engine])
    assert jax.tree.structure(expected) == jax.tree.structure(computed)
    for path, want in jax.tree_util.tree_leaves_with_path(expected):
        have = dict(jax.tree_util.tree_leaves_with_path(computed))[path]
        np.testing.assert_allclose(have, want, rtol=1e-12, atol=1e-12, err_msg=jax.tree_util.keystr(path))


@pytest.mark.filterwarnings("ignore::fedbilevel.errors.AbsenceWarning")
@pytest.mark.parametrize("cases", [sorted(CASES.keys() - SLOW), pytest.param(sorted(SLOW), marks=pytest.mark.slow)])
def test_the_cases_move(cases, reference):
    """Agreement on a state that stood still would prove nothing."""
    for case in cases:
        state = reference(case)[0].state
        assert all(float(jnp.linalg.norm(leaf)) > 1e-3 for leaf in jax.tree.leaves((state.x, state.y))), case


def test_an_exchange_takes_phases_only():
    class Leaky(TwoPhase):
        def round(self, fed, state, key):
            return fed.mean(lambda client, message, key: authoring.Reply(message), state, key)

    task = quadratic(clients=3)
    for engine in (fb.Reference(), fb.Local()):
        with pytest.raises(fb.errors.ConfigurationError, match="takes one of its phases"):
            fb.solve(Leaky(), task.problem, task.clients, task.x0, task.y0, rounds=1, engine=engine)

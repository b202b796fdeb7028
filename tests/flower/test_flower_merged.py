"""Merged exchanges over Flower: the numbers of one machine, and as many questions as docs/reference/algorithms say."""

import dataclasses

import federations
import pytest

import fedbilevel as fb
from fedbilevel.flower.client.site import client_app
from fedbilevel.flower.launch.in_process import InProcess
from fedbilevel.flower.privacy import Privacy
from fedbilevel.tasks.quadratic import quadratic

M, ROUNDS, COHORT, T, N, K = 4, 3, 3, 2, 2, 3
CG = fb.parts.CG(max_steps=K, tolerance=1e-12)


def make(local_steps, solver):
    inner, hypergradient = fb.parts.SVRG(rounds=T, local_steps=local_steps), fb.parts.Implicit(solver=solver)
    return fb.FedNest(inner=inner, hypergradient=hypergradient, merged=True, batch_size=4, outer_lr=0.05)


def population(local_steps):
    return quadratic(clients=M, dim_x=2, dim_y=3, samples=(6, 6), local_steps=local_steps)


@pytest.mark.parametrize(("work", "on_y"), [pytest.param(None, T, marks=pytest.mark.slow), ([1, 3, 2, 1], 2 * T)])
def test_agrees_with_local_in_as_many_exchanges_as_the_formula_says(work, on_y):
    """K products in three dimensions, at a tolerance that a mean of three drawn Hessians does not reach before. The
    drift of y is asked for where the population has a word in the number of steps, whatever the field says."""
    algorithm, task = make(1, CG), population(work)
    same = {"rounds": ROUNDS, "cohort": COHORT, "key": 1}
    here = fb.solve(algorithm, task.problem, task.clients, task.x0, task.y0, **same)
    there = federations.solve(algorithm, InProcess(federations.app(algorithm, task), M), task=task, **same)
    federations.moved(there, task)
    federations.same(here, there)
    assert here.ledger == dataclasses.replace(there.ledger, ticks=here.ledger.ticks)  # no time passes there
    assert there.ledger.exchanges == ROUNDS * (on_y + K + 1)


@pytest.mark.filterwarnings("ignore::fedbilevel.core.errors.NumericalWarning")  # negative curvature, out of the noise
def test_noise_on_replies_does_not_decide_what_is_asked(tmp_path):
    """Everything a client sends is clipped and noised, here by ten times the size of a gradient."""
    algorithm, task = make(2, fb.parts.Neumann(terms=N)), population([1, 3, 2, 1])
    privacy = Privacy(clip=1.0, noise_multiplier=10.0, delta=1e-5)

    def answers(run, node):
        k = node["partition-id"]
        return federations.site(algorithm, k, task, privacy=privacy, folder=tmp_path / str(k))

    result = federations.solve(algorithm, InProcess(client_app(answers), M), task=task, rounds=ROUNDS, cohort=COHORT)
    assert result.ledger.exchanges_by_phase == {
        "inner.gradient": ROUNDS * T, "inner.corrected_descent": ROUNDS * T,
        "hypergradient.outer_gradient": ROUNDS, "hypergradient.hessian_product": ROUNDS * (N - 1),
        "hypergradient.hypergradient_given": ROUNDS,
    }  # fmt: skip

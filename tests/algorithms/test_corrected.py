"""Does CorrectedFBO end at the solution with any number of local steps, and is its round the one that it says?"""

import agreement
import numpy as np
import pytest
from test_simfbo import WORK, affine, relative_error, run, spread, weights_of

import fedbilevel as fb
from fedbilevel import authoring
from fedbilevel.tasks.quadratic import quadratic, solution
from fixed_steps import fixed

AGREEMENT = {
    "CorrectedFBO, mini-batches": agreement.Case(
        fixed(fb.CorrectedFBO(batch_size=4, local_optimizer=fb.parts.Momentum(decay=0.5), radius=0.5)),
        work=agreement.WORK,
        slow=True,
    ),
}
NEVER_LATE = {fb.CorrectedFBO: "paths follow the mean direction of the last round"}
FAR = fb.XYV(0.01, 0.1, 0.1)
"""Local steps that take 20 directions a good part of the way to each client's own solution."""


@pytest.mark.parametrize("work", [5, 20, WORK * 3], ids=["5", "20", "unequal"])
def test_it_ends_at_the_solution_whatever_the_local_steps(work):
    """d_i(z) of a quadratic is affine, so that the round is one affine map, whose fixed point is x*: to rounding. The
    paths without correction lead ShroFBO elsewhere."""
    task = quadratic(clients=8, condition=5).with_own(local_steps=np.broadcast_to(work, 8))
    exact, mean = solution(task.clients), float(np.mean(work))
    fields = {"batch_size": None, "client_lr": FAR, "server_lr": fb.XYV(*(lr / mean for lr in (0.1, 0.5, 0.5)))}
    corrected = run(fb.CorrectedFBO(**fields), task, 1_000)
    assert relative_error(corrected.x, exact.x) < 1e-10
    assert relative_error(corrected.y, exact.y) < 1e-10
    plain = run(fb.ShroFBO(**fields), task, 300)
    assert relative_error(plain.x, exact.x) > 1e-2


def test_it_ends_at_the_solution_by_steps_that_adapt():
    """The server then makes the longest step that is safe for a single direction, and clients a twentieth of it."""
    task = quadratic(condition=5)
    result = run(fb.CorrectedFBO(local_steps=20, batch_size=None), task, 600)
    assert relative_error(result.x, solution(task.clients).x) < 1e-8


@pytest.mark.parametrize("optimizer", [authoring.Plain(), fb.parts.Momentum(decay=0.6)], ids=["plain", "momentum"])
def test_equals_rounds_written_out(optimizer):
    """Four rounds in NumPy, the directions being S z − s with S and s made of the samples."""
    task = quadratic(clients=8, noise=0.0, samples=(4, 4)).with_own(local_steps=WORK)
    eta, gamma = fb.XYV(0.03, 0.2, 0.1), fb.XYV(0.05, 0.1, 0.2)
    method = fb.CorrectedFBO(batch_size=None, client_lr=eta, server_lr=gamma, local_optimizer=optimizer)
    state = run(method, task, 4, engine=fb.Reference()).state

    p, coefficients = task.clients.weights, weights_of(optimizer, WORK)
    z, mean = np.zeros(21), np.zeros(21)
    decay = getattr(optimizer, "decay", 0.0)
    for _ in range(4):
        replies = np.zeros((8, 21))
        for i, (tau, a) in enumerate(zip(WORK, coefficients, strict=True)):
            slopes, shift = affine(task, i)
            at, buffer = z, np.zeros(21)
            for k in range(tau):
                d = slopes @ at - shift
                replies[i] += a[k] * d / a.sum()
                buffer = decay * buffer + (d - (slopes @ z - shift) + mean)
                at = at - spread(eta) * buffer
        mean = p @ replies
        z = z - spread(gamma) * (p @ [a.sum() for a in coefficients]) * mean
    np.testing.assert_allclose(np.concatenate(state.inside.iterate), z, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(np.concatenate(state.mean), mean, rtol=1e-12, atol=1e-12)


def test_what_it_costs():
    """Two evaluations of the directions for each local step; replies as long as ShroFBO's; x, y and v twice down."""
    task = quadratic(clients=8).with_own(local_steps=WORK)
    ledgers = [run(fixed(m(batch_size=4)), task, 2).ledger for m in (fb.CorrectedFBO, fb.ShroFBO)]
    corrected, plain = ledgers
    assert corrected.gradients == 2 * plain.gradients == 2 * 2 * 2 * WORK.sum()
    assert corrected.hvps == 2 * plain.hvps
    assert corrected.bytes_up == plain.bytes_up
    assert corrected.bytes_down == 2 * plain.bytes_down
    assert corrected.exchanges == plain.exchanges == 2


def test_steps_that_are_anchored_already_are_refused():
    with pytest.raises(fb.errors.ConfigurationError) as refused:
        fb.CorrectedFBO(local_optimizer=fb.parts.Anchored())
    assert "CorrectedFBO.local_optimizer" in str(refused.value)

"""Does a run end where its algorithm reports that nothing is left to do, on every engine, and does it stay ended?

FISM's stopping rule is that of the paper: x, H and F, which is a sum over all samples, each change by no more than a
tolerance, relative to their earlier value plus 1. F at x_k is known only after the round that began there, so that the
run ends one round later.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.tasks.location import location

TASK = location(dim=2, targets=7, clients=3)  # the clients have 2, 2 and 3 balls
TOLERANCE, MOST = 0.07, 60
ALGORITHM = fb.FISM(lr=1.0, lr_decay=0.8, regularization=0.02, regularization_decay=0.1, tolerance=TOLERANCE)


def run(engine=None, **more):
    options = {"rounds": MOST, "key": 2, "metrics": TASK.metrics} | more
    return fb.solve(ALGORITHM, TASK.problem, TASK.clients, TASK.x0, engine=engine, **options)


def written_out():
    """Return (rounds, x) where the paper's rule ends the run, computed in NumPy."""
    balls = [TASK.clients.inner.row(i) for i in range(3)]
    anchor = -np.array(jax.grad(TASK.problem.outer)(jnp.zeros(2), None, None))  # ∇H(0) = −a, where a is the anchor
    x = np.array(TASK.x0)
    before = None
    for k in range(1, MOST + 1):
        gamma, penalty = 1.0 / k**0.8, 0.02 / k**0.1
        total = sum(
            max(np.linalg.norm(x - c) - r, 0.0)
            for ball in balls
            for c, r in zip(ball["center"], ball["radius"], strict=True)
        )
        now, ends = (x, np.sum((x - anchor) ** 2) / 2, total), []
        for ball in balls:
            z = x
            for c, r in zip(ball["center"], ball["radius"], strict=True):
                away = np.linalg.norm(z - c)
                g = (z - c) / away if away > r else 0.0
                z = np.clip(z - gamma * (g + penalty * (x - anchor)), -10, 10)
            ends.append(z)
        x = np.mean(ends, axis=0)  # clients are weighted by size
        if before is not None:
            pairs = zip(now, before, strict=True)
            if max(np.linalg.norm(new - old) / (np.linalg.norm(old) + 1) for new, old in pairs) <= TOLERANCE:
                return k, x
        before = now
    raise AssertionError("does not end")


@pytest.fixture(scope="module")
def local():
    return run(eval_every=10)


def test_it_ends_by_the_papers_rule(local):
    rounds, x = written_out()
    assert local.round == rounds < MOST
    np.testing.assert_allclose(local.x, x, rtol=0, atol=1e-12)
    assert local.stopped == "FISM has finished"
    assert local.rounds == MOST


def test_the_last_row_and_the_ledger_are_of_the_rounds_that_were(local):
    rounds = local.round
    assert rounds % 10
    assert local.history["round"].tolist() == [*range(0, rounds, 10), rounds]
    np.testing.assert_allclose(local.history["error"][-1], TASK.metrics["error"](local.x, local.y), rtol=1e-12)
    ledger = local.ledger
    assert (ledger.rounds, ledger.exchanges, ledger.replies) == (rounds, rounds, 3 * rounds)
    assert ledger.gradients == 7 * rounds
    assert ledger.bytes_up == 3 * rounds * (2 + 1 + 1) * 8


@pytest.mark.slow
@pytest.mark.parametrize("engine", [fb.Reference(), fb.Local(devices=2, chunk=1)])
def test_every_engine_ends_there(local, engine):
    other = run(engine, eval_every=10)
    assert (other.round, other.stopped) == (local.round, local.stopped)
    np.testing.assert_allclose(other.x, local.x, rtol=0, atol=1e-12)
    np.testing.assert_allclose(other.y, local.y, rtol=0, atol=1e-12)
    assert other.ledger == local.ledger
    assert other.history["round"].tolist() == local.history["round"].tolist()


def test_a_run_that_has_ended_is_not_taken_up_again(local, tmp_path):
    """A run that has ended is not continued.

    A run that is interrupted and resumed ends in the same round as one without an interruption. If it is resumed after
    its end, no round runs, and no row is added.
    """
    path = tmp_path / "run"
    half = run(rounds=7, eval_every=10, checkpoint=path)
    assert (half.round, half.stopped) == (7, "")
    whole = run(eval_every=10, checkpoint=path, resume=True)
    again = run(eval_every=10, checkpoint=path, resume=True)
    for result in (whole, again):
        assert (result.round, result.stopped) == (local.round, local.stopped)
        np.testing.assert_array_equal(result.x, local.x)
        assert result.ledger == local.ledger
    assert whole.history["round"].tolist() == again.history["round"].tolist()


@pytest.mark.parametrize(
    ("decides", "start", "slope", "preference", "lr"),
    [("x", -8.0, 0.01, 0.01, 1.0), ("F", -8.0, 1.0, 0.01, 0.01), ("H", 0.2, 1.0, 50.0, 0.1)],
)
def test_each_of_x_and_both_losses_keeps_a_run_going(decides, start, slope, preference, lr):
    """Each of x, F and H can be the one that keeps a run going: in each case, another of the three stops changing last.

    IRG is computed by hand on F = slope ½(x − 1)², for two clients with a sample each, and H = preference ½x². Without
    the last of the three changes, the run would end earlier.
    """
    a, b, penalty, tolerance = 0.6, 0.35, 0.01, 0.01
    x, measured = start, []
    for k in range(1, 400):
        measured.append((x, 2 * slope * (x - 1) ** 2 / 2, preference * x**2 / 2))
        x -= lr / k**a * (slope * (x - 1) + penalty / k**b * preference * x)

    changes = [
        {name: abs(new - old) / (abs(old) + 1) for name, new, old in zip("xFH", now, before, strict=True)}
        for before, now in itertools.pairwise(measured)
    ]

    def ends(names):
        return next(k for k, change in enumerate(changes, 2) if max(change[name] for name in names) <= tolerance)

    assert ends("xFH".replace(decides, "")) < ends("xFH")
    rows = {"a": np.ones((2, 1))}
    problem = fb.SimpleBilevel(
        lambda x: preference * x**2 / 2,
        lambda x, batch: slope * jnp.mean(batch["a"]) * (x - 1) ** 2 / 2,
        fb.projections.box(-9.0, 9.0),
    )
    steps = {"lr": lr, "lr_decay": a, "regularization": penalty, "regularization_decay": b}
    algorithm = fb.IRG(**steps, tolerance=tolerance)
    result = fb.solve(algorithm, problem, fb.Clients(rows, dict(rows)), jnp.asarray(start), rounds=500)
    assert result.round == ends("xFH")

"""Are adaptive steps on x those of AdaGrad, and do remarks name the entries of x that still move or never moved?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithms.parts.adagrad import REACH
from representatives import slow_but


def by_hand(x, gradient, rounds, size, lr=0.1):
    """Run AdaGrad on a leaf of x in NumPy, if no curvature changes; x has `size` entries in all."""
    start, squares, far = x, 0.0, 0.0
    least = REACH * lr * min(1, max(np.linalg.norm(x), 1) / size**0.5)
    for t in range(rounds):
        h, far = gradient(x), np.maximum(far, np.abs(x - start))
        squares = squares + h**2
        sums, grown = (squares, 1) if x.ndim < 2 else ((squares + squares.mean()) / 2, min(1, (t + 1) / 10))
        x = x - np.minimum(grown * np.clip(far, least, REACH * lr) / np.sqrt(sums), lr / np.abs(h)) * h
    return x


END, SLOPES = np.array([1.0, -2.0, 3.0]), np.array([1.0, 10.0, 1e-4])
OF_X = (
    fb.Bilevel(
        lambda x, y, batch: sum(jnp.sum(SLOPES * (leaf - 3 * batch.mean(0)) ** 2) for leaf in x.values()) / 2,
        lambda x, y, batch: jnp.vdot(y, y) / 2,
    ),
    fb.Clients([END[None], END[None]]),
)
ON_X_TOO = [fb.SimFBO, fb.FedNest, fb.AFBO, fb.AggITD, fb.RABO, fb.FedBiO, fb.LFedNest]


@pytest.mark.parametrize("rounds", [1, 12])
@pytest.mark.parametrize("method", slow_but(fb.SimFBO, of=ON_X_TOO))
def test_steps_on_x_are_those_of_adagrad(method, rounds):
    """Steps on x are those of AdaGrad, also in methods whose clients step on x.

    The hypergradient is ∇Φ = s(x − 3e) with s = (1, 10, 10^-4), and does not depend on y. An entry of a vector moves at
    its own pace, whatever its scale. In a matrix, an entry of small scale moves less.
    """
    start = {"vector": np.zeros(3), "matrix": np.zeros((1, 3))}
    run = fb.solve(method(batch_size=None), *OF_X, start, np.zeros(2), rounds=rounds)
    for name, leaf in start.items():
        expected = by_hand(leaf, lambda x: SLOPES * (x - 3 * END), rounds, size=6)
        np.testing.assert_allclose(run.x[name], expected, rtol=1e-6)
        moves = np.abs(np.ravel(expected))
        np.testing.assert_array_equal(moves > moves.max() / 2, [leaf.ndim == 1, True, leaf.ndim == 1])


def test_x_at_rest_stays():
    start = {"vector": 3 * END, "matrix": 3 * END[None]}
    at_rest = fb.solve(fb.SimFBO(batch_size=None), *OF_X, start, np.zeros(2), rounds=3)
    assert all(np.array_equal(at_rest.x[name], leaf) for name, leaf in start.items())
    assert at_rest.remarks == ()


@pytest.mark.slow
def test_entries_without_a_minimum_are_named():
    """Remarks on Φ = e^-x_0 + (x_1 − 2)² name x_0, whose optimum is ∞, and x_2, which is in no loss, but not x_1."""
    problem = fb.Bilevel(
        lambda x, y, batch: jnp.exp(-x["a"][0]) + (x["a"][1] - 2) ** 2 + 0 * jnp.mean(batch),
        lambda x, y, batch: jnp.vdot(y, y) / 2,
    )
    start = {"a": np.zeros(3)}
    run = fb.solve(fb.SimFBO(batch_size=None), problem, fb.Clients([np.ones((1, 1))]), start, np.zeros(1), rounds=300)
    remark, idle = run.remarks
    assert remark.startswith("1 of 3 entries of x (x['a'][0]) still moved steadily at the end")
    assert "x['a'][2]" in idle
    assert "project_x" in remark
    assert "still moved" in str(run)


def test_entries_at_their_bounds_do_not_move():
    """Entries of x that are pressed against the bounds of their box are not reported as moving.

    Φ = (x_0 − 2)²/2 + (x_1 + 2)²/2 presses x against the corner (1, −1) of the box, where x is after 50 rounds.
    """
    wanted = jnp.array([2.0, -2.0])
    problem = fb.Bilevel(
        lambda x, y, batch: jnp.sum((x - wanted) ** 2) / 2 + 0 * jnp.mean(batch),
        lambda x, y, batch: jnp.vdot(y, y) / 2,
        project_x=fb.projections.box(-1.0, 1.0),
    )
    given = problem, fb.Clients([np.ones((1, 1))]), np.zeros(2), np.zeros(1)
    runs = {rounds: fb.solve(fb.SimFBO(batch_size=None), *given, rounds=rounds) for rounds in (5, 200)}
    np.testing.assert_array_equal(runs[200].x, [1, -1])
    assert runs[200].remarks == ()
    assert "still moved" in str(runs[5].remarks)


@pytest.mark.slow
@pytest.mark.parametrize("method", [fb.SimFBO, fb.FedBiO, fb.FedNest, fb.AFBO, fb.RABO, fb.AggITD])
def test_a_hypergradient_far_below_x_is_not_rounded_off(method):
    """In single precision, x moves although ∇Φ = 10^-6 (x − 3e) is tiny.

    Near −4 the spacing of single precision is 5e-7, and a first step of 10^-3 h would be less. In ten rounds x moves by
    at least 2η.
    """
    problem = fb.Bilevel(lambda x, y, batch: 1e-6 * jnp.sum((x - 3) ** 2) / 2, lambda x, y, batch: jnp.vdot(y, y) / 2)
    clients = fb.Clients([np.ones((1, 1), np.float32)] * 2)
    start = np.full(3, -4, np.float32)
    run = fb.solve(method(batch_size=None), problem, clients, start, np.zeros(2, np.float32), rounds=10)
    assert run.x.dtype == np.float32
    assert np.all(np.asarray(run.x) > -3.8)


def cleaning(samples, rounds, **more):
    """Run hyper-cleaning with weights of 80 samples, of which `samples` has those that exist at each client."""
    u = np.random.default_rng(0).normal(size=(4, 20, 3))

    def weighted(x, y, batch):
        return jnp.mean(jax.nn.sigmoid(x[batch["i"]]) * (batch["u"] @ y - batch["t"]) ** 2) + 0.1 * (y @ y)

    problem = fb.Bilevel(lambda x, y, batch: jnp.mean((batch["u"] @ y - batch["t"]) ** 2), weighted, **more)
    clients = fb.Clients({"u": u, "t": u.sum(-1) + np.sin(9 * u[..., 0]), "i": samples})
    return fb.solve(fb.SimFBO(local_steps=1), problem, clients, np.zeros(80), np.zeros(3), rounds=rounds)


@pytest.mark.slow
def test_entries_of_x_that_never_move_are_named():
    """If clients have only the samples 0 to 19, a remark names the weights 20 to 79, but not after few rounds."""
    everywhere = np.tile(np.arange(20), (4, 1))
    result = cleaning(everywhere, 20)
    (remark,) = [one for one in result.remarks if "never moved" in one]
    assert remark.startswith("60 of 80 entries of x (x[20], x[21], x[22], x[23], x[24], …) never moved: ")
    assert np.flatnonzero(result.x == 0).tolist() == list(range(20, 80))
    assert not any("never moved" in one for one in cleaning(everywhere, 19).remarks)


@pytest.mark.slow
def test_entries_at_a_bound_of_x_have_moved():
    """Entries of x that stay at their bound are not reported as never moved.

    With x ≤ 0 and a start at 0, about half of the entries stay at 0. Their hypergradient is not 0.
    """
    result = cleaning(np.arange(80).reshape(4, 20), 20, project_x=fb.projections.box(-8, 0))
    assert np.any(result.x == 0)
    assert not any("never moved" in one for one in result.remarks)

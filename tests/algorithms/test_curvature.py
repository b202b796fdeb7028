"""What do clients measure of the inner curvature with the power method, and which steps does the server make of it?"""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alone import client_alone

import fedbilevel as fb
from fedbilevel.algorithms.parts.adagrad import AdaGrad
from fedbilevel.algorithms.parts.adaptive_steps import Steps
from fedbilevel.algorithms.parts.curvature import Measured, PowerMethod, ServerCurvature
from fedbilevel.algorithms.parts.layers import Asked
from fedbilevel.core.fed import Reply, Total
from fedbilevel.core.hyperparameters import OpenStep, open_steps


def test_the_server_s_step_is_the_longer_of_two_safe_ones():
    """The server's step is the longer of two safe steps, and NaN if the curvature is NaN.

    The first step is c over the larger of L Σ p a = 3·2 and Σ p a L, which is 9 or 4; it is safe even if clients drift
    apart. The second one is √r c/L, divided by Σ p a Σ p/a, which is 2·2 in the last case.
    """
    known = ServerCurvature(*map(jnp.asarray, (3.0, 2.0, 0.5, 9.0, 1.0, 0.0)))
    assert list(map(float, known.steps(1.0))) == pytest.approx([1 / 9, 0])
    assert list(map(float, known._replace(summed=jnp.asarray(4.0)).steps(1.0))) == pytest.approx([1 / 6, 0])
    alike = known._replace(agreement=jnp.asarray(0.81))
    assert list(map(float, alike.steps(0.5))) == pytest.approx([0.9 * 0.5 / 3, 0.9 * 0.5 / 3])
    assert list(map(float, alike._replace(inverse=jnp.asarray(2.0)).steps(1.0))) == pytest.approx([1 / 9, 0.3])
    assert list(map(float, ServerCurvature.unknown().steps(1.0))) == [0, 0]
    assert np.isnan(alike._replace(largest=jnp.asarray(jnp.nan)).steps(1.0)).all()


def test_x_waits_where_a_client_s_curvature_rises():
    """The factor of x's steps is Σ least_i / Σ L_i, and it falls if a client's curvature rises.

    For L_i = 8, 2, 16, 16 least_i is 8 at first. L_i then falls by at most 5 %, to 7.6, and least_i with it.
    When L_i rises to 16, least_i rises by half a percent at each measurement.
    """
    problem = fb.Bilevel(lambda x, y, b: jnp.vdot(y, y), lambda x, y, b: jnp.mean(b) * x * jnp.vdot(y, y) / 2)
    client = SimpleNamespace(problem=problem, inner_batch=lambda key, size: jnp.ones(1))
    power, expected = PowerMethod.begin(jnp.zeros(2), keep=True), []
    for x in (8.0, 2.0, 16.0, 16.0):
        seed = jnp.asarray(1, jnp.uint32)
        power, _ = power.measured(client, jnp.asarray(x), jnp.zeros(2), seed, None, jax.random.key(0))
        measured = Measured.of(power, jnp.ones(()), jnp.ones(()))
        expected.append(float(ServerCurvature.unknown().after(measured, jnp.ones(())).slower))
    assert expected == pytest.approx([1, 1, 7.6 * 1.005 / 16, 7.6 * 1.005**2 / 16])
    numbers = [Measured(*map(jnp.asarray, (1.0, 1, 1, 1, least, 1))) for least in (1.0, 0.4)]
    assert float(ServerCurvature.unknown().slower) == 1
    # the unbiased means of a cohort are those of all clients times the cohort's share of the weights
    for scale in (1, 7):
        mean = jax.tree.map(lambda a, b, scale=scale: scale * (0.75 * a + 0.25 * b), *numbers)
        assert float(ServerCurvature.unknown().after(mean, jnp.ones(())).slower) == pytest.approx(0.85)
    x, h = jnp.ones(3), jnp.asarray([1.0, 2.0, -3.0])
    usual, slow = (AdaGrad.begin(x).moved(x, 1e3 * h, 0.1, w)[0] - x for w in (1, 0.2))
    np.testing.assert_allclose(slow, -0.2 * 0.3 * np.sign(h), rtol=1e-6)
    np.testing.assert_allclose(usual, -0.1 * np.sign(h), rtol=1e-6)


def test_few_products_a_round_follow_a_hessian_that_turns_and_grows():
    """Three products in a round are enough to follow a Hessian that turns and grows, within 3 %.

    The eigenvalues are 10^x (1, ½), and their axes turn by a quarter while x goes from 0 to 3 in 300 rounds. The random
    vector is at most 0.3 of the start of a measurement. Two products leave 0.075 of it in the other direction, so that
    L_i is too low by ¾·0.075²/2 = 0.2 %. A round turns the axes by π/600, which is less.
    """

    def inner(x, y, batch):
        turn = x * jnp.pi / 6
        along = jnp.cos(turn) * y[0] + jnp.sin(turn) * y[1]
        return 0.25 * 10**x * (along**2 + jnp.vdot(y, y)) + 0 * jnp.mean(batch)

    problem = fb.Bilevel(lambda x, y, batch: jnp.mean(batch) * x, inner)
    method = fb.AdaptiveSteps(fb.SimFBO(batch_size=None, local_steps=1))
    client = client_alone(problem, np.ones((2,)), np.ones((2,)))
    kept = method.client_state(problem, jnp.zeros(()), jnp.zeros(2))

    @jax.jit
    def asked(kept, x):
        there = fb.XYV(x, jnp.zeros(2), jnp.zeros(2))
        own = dataclasses.replace(client, state=kept)
        reply: Reply = method.run_phase(
            "local_updates", own, (there, Steps(*map(jnp.asarray, (0.1, 0.1, 7)))), jax.random.key(0)
        )
        return reply.state, reply.update[1].largest, reply.hvps

    for place, x in enumerate(np.linspace(0, 3, 300)):
        kept, largest, hvps = asked(kept, x)
        assert 0.97 < float(largest) / 10**x < 1 + 1e-6
        # two products of SimFBO, and the products of the measurement; two of these try the first step
        assert int(hvps) == 2 + (12 if place == 0 else 3)


def test_a_direction_that_becomes_stiff_is_seen_after_the_power_method_has_settled():
    """If the curvature in a direction in which u has decayed grows fast, L_i is soon right again.

    One eigenvalue is 1, where u settles. From then on another one grows by a quarter in each round. L_i is never too
    low by a factor of 2.5, at which steps of 1/L_i would be unstable for several rounds.
    """

    def inner(x, y, batch):
        return 0.5 * (y[0] ** 2 + 1e-2 * x * y[1] ** 2 + 1e-3 * jnp.sum(y[2:] ** 2)) + 0 * jnp.mean(batch)

    problem = fb.Bilevel(lambda x, y, batch: jnp.mean(batch) * x, inner)
    client = client_alone(problem, np.ones((2,)), np.ones((2,)))
    power = PowerMethod.begin(jnp.zeros(50), keep=True)
    measured = jax.jit(
        lambda power, x, key: power.measured(client, x, jnp.zeros(50), jax.random.bits(key, dtype="uint32"), None, key)[
            0
        ]
    )
    keys = jax.random.split(jax.random.key(0), 250)
    for key in keys[:200]:
        power = measured(power, 1.0, key)
    assert float(power.largest) == pytest.approx(1, rel=0.01)
    ratios = []
    for round, key in enumerate(keys[200:]):
        power = measured(power, 1.25**round, key)
        ratios.append(max(1, 1e-2 * 1.25**round) / float(power.largest))
    assert 1.25**49 * 1e-2 > 500
    assert max(ratios) < 2.5
    assert ratios[-1] == pytest.approx(1, rel=0.05)


def test_the_curvature_of_a_cohort_is_the_mean_that_its_replies_are():
    """The curvature of a cohort of one is L = (M/P) p_i h_i, weighted like the reply q that the server uses.

    The two clients have the weights ¾ and ¼ and the inner losses g_i = h_i y²/2.
    """
    weights, curves = np.array([0.75, 0.25]), np.array([2.0, 8.0])
    clients = fb.Clients([{"h": np.array([h])} for h in curves], weights=weights)
    problem = fb.Bilevel(
        lambda x, y, batch: jnp.sum((y - 1) ** 2) + jnp.sum(x**2),
        lambda x, y, batch: jnp.mean(batch["h"]) * jnp.sum((y - x) ** 2) / 2,
    )
    given, zero = (fb.SimFBO(local_steps=1, batch_size=None), problem, clients), np.zeros(1)
    found = set()
    for key in range(6):  # until both clients have been drawn
        history = fb.solve(*given, zero, zero, rounds=1, cohort=1, key=key, engine=fb.Reference()).history
        found.add(round(float(history["curvature"][-1]), 3))
        if len(found) == 2:
            break
    assert found == {2 * 0.75 * 2.0, 2 * 0.25 * 8.0}


@pytest.mark.parametrize(("own", "expected"), [(4.0, 0.5 / 4), (0.0, 0.3)])
def test_a_client_steps_alone_by_its_own_curvature_where_that_is_known(own, expected):
    """A client that computes its own hypergradient takes c/L_i for the step of its series, if it has measured.

    If it has not, it takes c/L of all clients, which is in the message.
    """
    method, layer = fb.AFBO(batch_size=None), fb.AdaptiveSteps(y_lr=0.5)
    (alone,) = (step for step in open_steps(method).values() if step.kind == "alone")
    steps = Steps(jnp.asarray(0.3), jnp.asarray(0.1), jnp.asarray(1, jnp.uint32))
    assert float(layer._size(None, steps, jnp.asarray(own), alone)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "tau", "expected"), [("local", 4, 0.1), ("total", 4, 0.4), ("total", 20, 1.0), ("local", 1, 1.0)]
)
def test_several_local_steps_are_held_to_the_clients_own_curvature(kind, tau, expected):
    """A local step is at most 1/L_i = 1/10; if the step is that of all τ local steps together, it is at most τ/L_i.

    A single local step is that of the server, 1.
    """
    client = SimpleNamespace(local_steps=lambda count: count)
    steps, part = Steps(*jnp.ones(2), jnp.asarray(1, jnp.uint32)), fb.parts.LocalSGD(local_steps=tau)
    found = fb.AdaptiveSteps(y_lr=0.5)._size(client, steps, jnp.asarray(10.0), OpenStep(part, kind, "y"))
    assert float(found) == pytest.approx(expected)


@pytest.mark.parametrize(("product", "factor"), [([8.0, 0.0], 0.5 / 8 / 0.25), ([1.0, 0.0], 1.0), ([-8.0, 0.0], 1.0)])
def test_a_product_is_held_to_the_curvature_along_it(product, factor):
    """The step s of FedNest's p ← p − s H p is at most c⟨p, Hp⟩/‖Hp‖², unless ⟨p, Hp⟩ is negative.

    Here c = ½ is the field `y_lr` of `AdaptiveSteps`, p = (1, 0), and s would otherwise be ¼.
    """
    method, layer, p = fb.FedNest(batch_size=None), fb.AdaptiveSteps(y_lr=0.5), jnp.asarray([1.0, 0.0])
    known = layer.server_slot(method, jnp.zeros(2), jnp.zeros(2))._replace(inner=jnp.asarray(0.25))
    (phase,) = (name for name, phase in method.phases.items() if getattr(phase, "__multiplies__", False))
    asked = Asked(method, phase, (jnp.zeros(2), jnp.zeros(2), p), jax.random.key(0))
    total, _ = layer.exchange(asked, known, lambda again: Total.of_mean(jnp.asarray(product)))
    np.testing.assert_allclose(total.update, factor * np.asarray(product), rtol=1e-6)


def first_measured(inner, y, data, batch_size=None, keys=(0,)):
    """Return L_i and the number of products of a client's first measurement at y, once for each key."""
    problem = fb.Bilevel(lambda x, y, batch: jnp.mean(batch) * x, inner)
    client, begin = client_alone(problem, np.ones(2), data), PowerMethod.begin(y, keep=True)

    @jax.jit
    def measured(key):
        power, products = begin.measured(client, 0.0, y, key, batch_size, jax.random.key(key))
        return power.largest, products

    return [tuple(map(float, measured(jnp.asarray(key, "uint32")))) for key in keys]


def test_a_curvature_that_grows_along_the_first_steps_is_found():
    """L_i is raised until gradient descent meets no curvature above it, as computed by hand.

    For exp(y) − 55 y the curvature is exp(y), and the gradient exp(y) − 55. At y = 0, L is 1, and steps of 1/L end at
    54/L. For L = 1, 2, 4, 8 and 16, the curvature there is above L; for L = 16 it is exp(3.375) = 29. For 32 it is
    exp(1.69) = 5.4. The next step ends at 3.24, with a curvature of 25, and the one after it at 4.16, with 64, which
    is above 32. For L = 64 it ends at 3.70, with a curvature of 40 and a gradient of −14.6, less than half of the
    first. These are 10 products of the power method, one at y, and 9 for the steps.
    """

    def inner(x, y, batch):
        return jnp.exp(y) - 55 * y + 0 * jnp.mean(batch)

    assert first_measured(inner, jnp.zeros(()), np.ones(2)) == [(64, 20)]


@pytest.mark.parametrize("batch_size", [None, 1])
def test_a_trial_changes_nothing_for_a_quadratic_loss(batch_size):
    """On batches with other directions of curvature, too, a trial takes two products, and leaves L_i as it is.

    The losses of single samples are (a·y − 1)²/2, whose Hessian aaᵀ has rank 1. So the curvature along the gradient of
    a batch of one sample, |a|², may be many times the last product of the power method, which came from other batches.
    """
    a = np.random.default_rng(0).normal(size=(30, 20)) * np.geomspace(0.1, 10, 30)[:, None]

    def inner(x, y, batch):
        return jnp.mean((batch @ y - 1) ** 2) / 2

    for largest, products in first_measured(inner, jnp.zeros(20), a, batch_size, range(10)):
        assert products == 10 + 2
        if batch_size is None:
            assert largest == pytest.approx(np.linalg.eigvalsh(a.T @ a / 30)[-1], rel=0.05)

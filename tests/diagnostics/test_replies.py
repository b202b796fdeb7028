"""Does reply_norms report the norms of replies, and what noise does to x and y?

The norms are computed by hand, and the effect of the noise follows from its law.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel import authoring
from fedbilevel.core.tree import XY
from fedbilevel.tasks.quadratic import quadratic
from fixed_steps import fixed
from refusals import ANY, refuses

D, CLIENTS, ROUNDS, STEP = 400, 4, 9, 0.5
TARGETS = np.random.default_rng(0).normal(size=(CLIENTS, D)) * np.array([[1.0], [2.0], [3.0], [4.0]])
LENGTHS = np.linalg.norm(TARGETS, axis=1)


class Constant(authoring.Algorithm):
    """Clients reply with their targets, whatever the message; y moves by STEP times the mean, and x does not move."""

    def init(self, x, y):
        return XY(x, y)

    @authoring.phase
    def tell(self, client, message, key):
        target = client.outer_batch(key, None)["t"][0]
        return authoring.Reply({"first": target[:100], "rest": target[100:], "one": authoring.Public(jnp.ones(()))})

    def round(self, fed, state, key):
        mean = fed.mean(self.tell, state.y, key)
        return XY(state.x, state.y + STEP * jnp.concatenate([mean["first"], mean["rest"]]))


def looked_at(algorithm=None, cohort=None, **given):
    problem = fb.Bilevel(lambda x, y, b: jnp.mean(b["t"]) + y @ y + x[0], lambda x, y, b: y @ y)
    clients = fb.Clients([{"t": row[None]} for row in TARGETS])
    algorithm = algorithm or Constant()
    return fb.reply_norms(algorithm, problem, clients, np.zeros(1), np.zeros(D), rounds=ROUNDS, cohort=cohort, **given)


def test_norms_are_those_of_the_parts_and_of_what_a_clip_bounds():
    found = looked_at()
    assert found.numbers == {("tell", "all"): D, ("tell", "first"): 100, ("tell", "rest"): 300}
    by_hand = {"all": TARGETS, "first": TARGETS[:, :100], "rest": TARGETS[:, 100:]}
    for part, rows in by_hand.items():
        expected = np.tile(np.linalg.norm(rows, axis=1), ROUNDS)
        np.testing.assert_allclose(found.norms["tell", part], expected, rtol=1e-12)
    low, middle, high = (f"{size:.3g}" for size in np.percentile(np.tile(LENGTHS, ROUNDS), (10, 50, 90)))
    assert ["tell", "all", "400", "36", low, middle, high] in [line.split() for line in str(found).splitlines()]
    assert f"median {middle}" in repr(found)
    assert found.moved == {}
    assert len(looked_at(cohort=2).norms["tell", "all"]) == 2 * ROUNDS


@pytest.mark.parametrize(("clip", "z"), [(1e6, 1e-7), (50.0, 2.0)])
def test_noise_moves_y_by_its_law_and_clipped_replies_by_their_mean(clip, z):
    """Noise moves y by STEP·zC·√(nD/P) in n rounds, and clipped replies move it by their mean; no reply moves x.

    The sum of D squares is within four of its standard errors.
    """
    found = looked_at(privacy=fb.Privacy(clip=clip, noise_multiplier=z, delta=1e-5, budget=1e-6))
    moved = found.moved["y"]
    assert moved.by_noise == pytest.approx(STEP * z * clip * np.sqrt(ROUNDS * D / CLIENTS), rel=4 / np.sqrt(2 * D))
    mean = np.mean(TARGETS * np.minimum(1, clip / LENGTHS)[:, None], axis=0)
    assert moved.without == pytest.approx(ROUNDS * STEP * np.linalg.norm(mean), rel=1e-6)
    assert (found.moved["x"].by_noise, found.moved["x"].without) == (0, 0)
    hidden = moved.by_noise > moved.without
    assert hidden == (clip == 50.0)
    assert ("noise hides the progress; lower steps, clip or noise_multiplier" in str(found)) == hidden
    share = np.mean(clip < LENGTHS)
    assert f"clip = {clip:g} shortens {share:.0%} of replies; noise of zC = {z * clip:.3g} per number" in str(found)


@pytest.mark.slow
def test_each_phase_of_a_method_has_its_lines():
    task = quadratic(clients=3, samples=(3, 5))
    parts = task.problem, task.clients, task.x0, task.y0
    found = fb.reply_norms(fixed(fb.FedNest()), *parts, rounds=1)
    assert {phase for phase, _ in found.norms} >= {"inner.gradient", "hypergradient.hessian_product", "outer_descent"}


@pytest.mark.parametrize(("algorithm", "privacy", "refusal"), [
    (Constant(), 3, ("privacy", 3, "fedbilevel.Privacy")),
    (fb.SimFBO(), fb.Privacy(clip=1.0, noise_multiplier=1.0, delta=1e-5), ("", ANY, "SimFBO ", "", "privacy")),
])  # fmt: skip
def test_terms_that_are_not_allowed_are_refused_before_a_round_is_played(algorithm, privacy, refusal, monkeypatch):
    monkeypatch.setattr("fedbilevel.diagnostics.replies.Reference", None)
    with refuses(*refusal):
        looked_at(algorithm, privacy=privacy)


def test_norms_of_short_floats_are_not_cut_off_where_their_squares_are():
    """The norm of a float16 reply is right although the sum of squares is above 65,504, where float16 ends.

    The reply has 400 entries of 200, so its norm is 200·√400 = 4,000.
    """

    class Short(Constant):
        @authoring.phase
        def tell(self, client, message, key):
            return authoring.Reply({"first": jnp.full(100, 200, jnp.float16), "rest": jnp.full(300, 200, jnp.float16)})

    assert set(looked_at(Short()).norms["tell", "all"].tolist()) == {4000.0}


@pytest.mark.slow
def test_noise_that_reaches_x_through_y_is_seen():
    """Noise that reaches x through y is reported.

    Clients keep x, so that no reply moves it, but from the second round on, their own steps on x follow a y with noise.
    """
    losses = [lambda x, y, b: jnp.sum((x - y) ** 2) + jnp.sum(b["t"]), lambda x, y, b: jnp.sum((y - jnp.sum(x)) ** 2)]
    clients = fb.Clients([{"t": np.ones((1, 1))}] * 3)
    method = fb.SimFBO(client_lr=0.01, server_lr=0.1, local_steps=1)
    parts = fb.Bilevel(*losses, local="x"), clients, np.ones((3, 2)), np.zeros(2)
    found = fb.reply_norms(method, *parts, rounds=2, privacy=fb.Privacy(clip=1.0, noise_multiplier=1.0, delta=1e-5))
    assert found.moved["x"].by_noise > 0


@pytest.mark.slow
def test_a_run_that_noise_ends_is_infinitely_far():
    task = quadratic(clients=3, samples=(3, 5))
    parts = task.problem, task.clients, task.x0, task.y0
    terms = fb.Privacy(clip=1.0, noise_multiplier=1e150, delta=1e-5)
    found = fb.reply_norms(fb.SimFBO(client_lr=0.1, server_lr=1e4, local_steps=1), *parts, rounds=3, privacy=terms)
    assert (found.moved["y"].by_noise, found.moved["x"].by_noise) == (np.inf, np.inf)
    assert "y: noise moves it by inf" in str(found)

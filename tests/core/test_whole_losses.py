"""Do losses that are not means over samples get all of a client's samples, on every engine?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from refusals import refuses

SIZES = 3, 1, 5
WEIGHTS = np.array([0.5, 0.2, 0.3])
ROWS = [np.random.default_rng(i).uniform(1, 2, size=n) for i, n in enumerate(SIZES)]
TARGETS = [np.array([1.0]), np.array([2.0]), np.array([3.0])]


def largest(samples, valid):
    return jnp.max(jnp.where(valid, samples, -jnp.inf))


def problem():
    """Return g_i = ½(y − x·max_i)² and f_i = ½(y − c_i)²: y* = x m with m = Σ p_i max_i, and x* = Σ p_i c_i / m.

    max_i is the largest sample of client i. Neither half of the samples, nor the copies that pad shorter clients, give
    max_i.
    """
    inner = fb.WholeLoss(lambda x, y, samples, valid: (y - x * largest(samples["r"], valid)) ** 2 / 2)
    return fb.Bilevel(lambda x, y, batch: jnp.mean((y - batch["c"]) ** 2) / 2, inner)


def clients():
    return fb.Clients([{"c": c} for c in TARGETS], [{"r": r} for r in ROWS], weights=WEIGHTS)


@pytest.mark.parametrize(
    "engine",
    [
        fb.Local(chunk=3),
        pytest.param(fb.Local(chunk=1), marks=pytest.mark.slow),
        pytest.param(fb.Local(stream=True), marks=pytest.mark.slow),
        pytest.param(fb.Local(devices=2), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "method",
    [fb.SimFBO(local_steps=1, batch_size=None), pytest.param(fb.FedNest(batch_size=None), marks=pytest.mark.slow)],
    ids=["SimFBO", "FedNest"],
)
def test_the_closed_form(method, engine):
    """x ends at x* with one local step, or with corrected steps; other steps drift apart, since clients differ."""
    m = WEIGHTS @ [np.max(r) for r in ROWS]
    result = fb.solve(method, problem(), clients(), jnp.array(0.0), jnp.array(0.0), rounds=1500, engine=engine)
    np.testing.assert_allclose(result.x, WEIGHTS @ [c[0] for c in TARGETS] / m, rtol=1e-3)


def test_several_local_steps_and_products_take_all_samples():
    """Three local steps and a Neumann series of four terms, written out for g_i = ½ m_i (y − x m_i)², m_i = max_i.

    A step of size s turns y into y − s m_i (y − x m_i). At the mean y, client i's hypergradient is m_i² v, where
    v = Σ_k s (1 − s m_i)^k (y − c_i) approximates (y − c_i)/m_i. The mean over single samples would have other m_i.
    """

    def inner(x, y, samples, valid):
        m = largest(samples["r"], valid)
        return m * (y - x * m) ** 2 / 2

    outer = lambda x, y, batch: jnp.mean((y - batch["c"]) ** 2) / 2  # noqa: E731
    method = fb.LFedNest(
        inner=fb.parts.LocalSGD(local_steps=3, lr=0.3),
        hypergradient=fb.parts.LocalImplicit(solver=fb.parts.Neumann(terms=4, step=0.2)),
        outer_lr=0.5,
        batch_size=None,
    )
    found = fb.solve(method, fb.Bilevel(outer, fb.WholeLoss(inner)), clients(), 0.3, 0.1, rounds=1)
    m, c = np.array([np.max(r) for r in ROWS]), np.array([c[0] for c in TARGETS])
    ends = np.full(3, 0.1)
    for _ in range(3):
        ends -= 0.1 * m * (ends - 0.3 * m)  # the total size 0.3 in three steps
    y = WEIGHTS @ ends
    v = sum(0.2 * (1 - 0.2 * m) ** k for k in range(4)) * (y - c)
    assert float(found.y) == pytest.approx(y, rel=1e-12)
    assert float(found.x) == pytest.approx(0.3 - 0.5 * WEIGHTS @ (m**2 * v), rel=1e-12)


@pytest.mark.slow
def test_engines_agree():
    start = jnp.array(0.3), jnp.array(0.1)
    found = [
        fb.solve(fb.SimFBO(batch_size=None, local_steps=2), problem(), clients(), *start, rounds=3, engine=engine).x
        for engine in (fb.Reference(), fb.Local())
    ]
    np.testing.assert_allclose(*found, rtol=1e-12)


@pytest.mark.slow
def test_a_saddle_of_a_whole_loss():
    """The saddle of f_i = x·y·max_i − ½y² + ½x² is at 0; y* = x m from any start."""
    loss = fb.WholeLoss(lambda x, y, samples, valid: x * y * largest(samples["r"], valid) - y**2 / 2 + x**2 / 2)
    alone = fb.Clients([{"r": r} for r in ROWS], weights=WEIGHTS)
    result = fb.solve(fb.FedNest(batch_size=None), fb.Minimax(loss), alone, jnp.array(1.0), jnp.array(0.0), rounds=300)
    assert abs(result.x) < 1e-6
    with refuses("FedNest.batch_size", 32, "WholeLoss"):
        fb.solve(fb.FedNest(), fb.Minimax(loss), alone, jnp.array(1.0), jnp.array(0.0), rounds=1)


def test_a_partial_likelihood_is_that_of_the_whole_client():
    """The partial likelihood of Cox's model is that of the whole client, with and without padding.

    It is Σ over events of log Σ_{at risk} exp(risk) − risk.
    """
    rng = np.random.default_rng(3)
    time, risk, event = rng.exponential(size=4), rng.normal(size=4), np.array([1.0, 0.0, 1.0, 1.0])

    def cox(x, y, samples, valid):
        at_risk = (samples["t"][None] >= samples["t"][:, None]) & valid[None]
        hazard = jax.nn.logsumexp(jnp.where(at_risk, y * samples["z"][None], -jnp.inf), axis=1)
        each = samples["e"] * (hazard - y * samples["z"])
        return jnp.sum(jnp.where(valid, each, 0)) / jnp.sum(valid)

    by_hand = np.mean(
        [e * (np.log(sum(np.exp(0.7 * risk[time >= t]))) - 0.7 * z) for t, z, e in zip(time, risk, event, strict=True)]
    )
    samples = {"t": time, "z": risk, "e": event}
    padded = {name: np.concatenate([values, values[:2]]) for name, values in samples.items()}
    valid = np.arange(6) < 4
    loss = fb.WholeLoss(cox)
    np.testing.assert_allclose(loss(0.0, 0.7, jax.tree.map(jnp.asarray, samples)), by_hand, rtol=1e-12)
    np.testing.assert_allclose(loss.function(0.0, 0.7, padded, valid), by_hand, rtol=1e-12)


@pytest.mark.parametrize(
    ("method", "name", "size"),
    [(fb.SimFBO(), "SimFBO", 32), (fb.FedMBO(batch_size=4), "FedMBO", 4)],
    ids=["default", "given"],
)
def test_batches_are_refused(method, name, size):
    with refuses(f"{name}.batch_size", size, "WholeLoss"):
        fb.solve(method, problem(), clients(), jnp.array(0.0), jnp.array(0.0), rounds=1)


@pytest.mark.slow
def test_the_exact_hypergradient_and_steps_are_of_whole_losses():
    """The exact hypergradient and `diagnose` use whole losses.

    Φ(x) = Σ p_i ½(x m − c_i)² has ∇Φ(1) = m·(m − Σ p_i c_i), and ∇²yy G is 1.
    """
    m = WEIGHTS @ [np.max(r) for r in ROWS]
    found = fb.check_hypergradient(problem(), clients(), jnp.array(1.0), jnp.array(m))
    np.testing.assert_allclose(found.hypergradient, m * (m - WEIGHTS @ [c[0] for c in TARGETS]), rtol=1e-9)
    assert "1" in str(fb.diagnose(problem(), clients(), jnp.array(1.0), jnp.array(m)))


def test_what_takes_no_whole_loss_says_so():
    with refuses("SingleLevel.loss", fact="(x, batch)"):
        fb.SingleLevel(problem().inner)
    with refuses("WholeLoss.function", "(x, y, batch)", "(x, y, samples, valid)"):
        fb.WholeLoss(lambda x, y, batch: 0.0)

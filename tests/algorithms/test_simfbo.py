"""Does SimFBO compute what its paper says, and do its two theorems hold on closed forms?

The problem is the quadratic task: heterogeneous and weighted, with a cross term of no symmetry. Equal clients would
hide every mistake in the weights. Float64 is on throughout (conftest.py).
"""

import itertools

import agreement
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from matrices import members

import fedbilevel as fb
from fedbilevel import authoring
from fedbilevel.algorithms.simfbo import project_ball
from fedbilevel.engines.engine import Carry, Cohort
from fedbilevel.engines.virtual_time import ClockState
from fedbilevel.tasks.quadratic import quadratic, solution
from fixed_steps import fixed

AGREEMENT = {
    "SimFBO, mini-batches": agreement.Case(fixed(fb.SimFBO(local_steps=3, batch_size=4)), slow=True),
    "SimFBO, work of each client": agreement.Case(
        fixed(fb.SimFBO(batch_size=4, local_optimizer=fb.parts.Momentum(decay=0.5), radius=0.5)),
        work=agreement.WORK,
        slow=True,
    ),
    "SimFBO, local variance reduction": agreement.Case(
        fixed(fb.SimFBO(batch_size=4, local_optimizer=fb.parts.Anchored())), work=agreement.WORK, slow=True
    ),
    "ShroFBO, ragged full batches, random work": agreement.Case(
        fixed(
            fb.ShroFBO(
                batch_size=None,
                local_optimizer=fb.parts.Proximal(pull=0.2),
                server_optimizer=optax.adam(1.0),
                independent_batches=True,
                server_lr=optax.exponential_decay(0.02, 2, 0.5),
            )
        ),
        work=(1, 4),
    ),
}

WORK = np.array([1, 2, 3, 4, 5, 1, 2, 3])
SERVER = fb.XYV(x=0.04, y=1.0, v=1.0)
COEFFICIENTS = {
    "plain": authoring.Plain(),
    "momentum": fb.parts.Momentum(decay=0.6),
    "proximal": fb.parts.Proximal(pull=0.2),
}


def relative_error(x, exact):
    return float(jnp.linalg.norm(x - exact) / np.linalg.norm(exact))


def weights_of(coefficients, work):
    """Return the a_k, written out from the definitions in the paper's section 2.3 and in FedNova."""
    a = {
        "Plain": lambda tau: np.ones(tau),
        "Momentum": lambda tau: np.array([sum(0.6**j for j in range(tau - k)) for k in range(tau)]),
        "Proximal": lambda tau: np.array([0.8 ** (tau - 1 - k) for k in range(tau)]),
    }[type(coefficients).__name__]
    return [a(int(tau)) for tau in work]


def local_loop(coefficients, d, start, eta, tau):
    """Return z after τ steps: gradient steps, heavy ball, or FedProx.

    The loss of FedProx is the client's own plus (α/2η)‖z − start‖². `start` and `eta` are vectors: each entry has its
    own step size.
    """
    z, buffer = start, np.zeros_like(start)
    for _ in range(tau):
        if isinstance(coefficients, fb.parts.Momentum):
            buffer = coefficients.decay * buffer + d(z)
            z = z - eta * buffer
        elif isinstance(coefficients, fb.parts.Proximal):
            z = z - eta * (d(z) + coefficients.pull / eta * (z - start))
        else:
            z = z - eta * d(z)
    return z


def affine(task, i):
    """Return (S, s) with (d_x, d_y, d_v) = S z − s at z = (x, y, v), as directions are affine in z on a quadratic."""
    _, f, g = members(task)[i]
    zero = np.zeros((8, 8))
    slopes = np.block([[np.eye(5), f["E"], g["B"].T],  # ∇x f − ∇²xy g v = x + E y + Bᵀ v
                       [-g["B"], g["A"], zero],
                       [-f["E"].T, -f["D"], g["A"]]])  # fmt: skip
    return slopes, np.concatenate([np.zeros(5), g["c"], -f["D"] @ f["t"]])


def spread(xyv):
    """Return three numbers as a vector that has an entry for each of x, y and v."""
    return np.repeat(np.array(xyv), (5, 8, 8))


def run(algorithm, task, rounds, **options):
    return fb.solve(algorithm, task.problem, task.clients, task.x0, task.y0, rounds=rounds, **options)


def test_reaches_the_closed_form():
    """SimFBO reaches x*, y* and v* to rounding if τ = 1, batches are full, and all clients take part.

    Its rounds are then plain gradient steps on x, y and v.
    """
    task = quadratic(condition=10)
    algorithm = fixed(fb.SimFBO(local_steps=1, batch_size=None, client_lr=1.0, server_lr=fb.XYV(0.02, 0.5, 0.5)))
    result = run(algorithm, task, 2500)
    exact = solution(task.clients)
    assert relative_error(result.x, exact.x) < 1e-8
    assert relative_error(result.y, exact.y) < 1e-8
    assert relative_error(result.state.iterate.v, exact.v) < 1e-8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "momentum"])
def test_theorems_1_and_2(name):
    """With unequal work, SimFBO solves the problem with weights w_i ∝ p_i‖a_i‖₁, and ShroFBO the original problem.

    The local steps are so short that drift vanishes.
    """
    task = quadratic(clients=8, condition=5).with_own(local_steps=WORK)
    coefficients = COEFFICIENTS[name]
    norms = np.array([a.sum() for a in weights_of(coefficients, WORK)])
    w = task.clients.weights * norms
    common = {"batch_size": None, "client_lr": 1e-13, "local_optimizer": coefficients}
    server = fb.XYV(*(lr / norms.max() for lr in SERVER))
    reweighted, true = solution(task.clients, w / w.sum()).x, solution(task.clients).x
    assert relative_error(reweighted, true) > 1e-2  # otherwise the two theorems could not be distinguished
    simfbo = run(fixed(fb.SimFBO(server_lr=server, **common)), task, 1_600)
    shrofbo = run(fixed(fb.ShroFBO(server_lr=server, **common)), task, 1_600)
    assert relative_error(simfbo.x, reweighted) < 1e-8
    assert relative_error(shrofbo.x, true) < 1e-8


@pytest.mark.slow
def test_equal_work_makes_the_two_coincide_with_cohorts_and_unequal_weights_too():
    """With equal work, SimFBO and ShroFBO have the same rounds, also with cohorts and unequal weights.

    The estimate of ρ is then ‖a‖₁ in every round, whatever the cohort is.
    """
    task = quadratic(samples=(5, 5))
    a, b = (
        run(fixed(method(local_steps=3, batch_size=4)), task, 5, cohort=3).state for method in (fb.SimFBO, fb.ShroFBO)
    )
    np.testing.assert_allclose(*(np.concatenate(jax.tree.leaves(s.iterate)) for s in (a, b)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("method", "name"), [(fb.SimFBO, "momentum"), *((fb.ShroFBO, name) for name in sorted(COEFFICIENTS))]
)
def test_equals_local_loops_written_out(method, name):
    """Three rounds equal local loops and equations (4) to (8) in NumPy, with matrices in place of differentiation."""
    task = quadratic(clients=8, noise=0.0, samples=(4, 4)).with_own(local_steps=WORK)
    eta, gamma, radius = fb.XYV(0.03, 0.2, 0.1), fb.XYV(0.05, 0.1, 0.2), 0.4
    algorithm = method(
        batch_size=None, client_lr=eta, server_lr=gamma, radius=radius, local_optimizer=COEFFICIENTS[name]
    )
    state = run(algorithm, task, 3, engine=fb.Reference()).state.iterate
    expected = written_out(task, COEFFICIENTS[name], eta, gamma, radius, method is fb.ShroFBO)
    np.testing.assert_allclose(np.concatenate(state), expected, rtol=1e-12, atol=1e-12)
    assert float(jnp.linalg.norm(state.v)) <= radius * (1 + 1e-12)


def written_out(task, coefficients, eta, gamma, radius, normalised, rounds=3):
    p, norms = task.clients.weights, [a.sum() for a in weights_of(coefficients, WORK)]
    eta, gamma = spread(eta), spread(gamma)
    z, touched = np.zeros(21), False
    for _ in range(rounds):
        total = np.zeros(21)
        for i, tau in enumerate(WORK):
            slopes, shift = affine(task, i)
            end = local_loop(coefficients, lambda at, s=slopes, b=shift: s @ at - b, z, eta, tau)
            total += p[i] * (z - end) / eta / (norms[i] if normalised else 1)
        z = z - (p @ norms if normalised else 1) * gamma * total
        if np.linalg.norm(z[13:]) > radius:
            z[13:] *= radius / np.linalg.norm(z[13:])
            touched = True
    assert touched  # the projection changed v in some round
    return z


@pytest.mark.slow
def test_local_loops_of_drawn_length():
    """If the number of local steps is drawn in each round, equation (8) equals (5) for one client.

    τ is drawn from 1..4, and ρ is the client's ‖a‖₁ in that round.
    """
    task, coefficients = quadratic(clients=1, noise=0.0).with_own(local_steps=(1, 4)), COEFFICIENTS["momentum"]
    eta, gamma = fb.XYV(0.03, 0.2, 0.1), fb.XYV(0.05, 0.1, 0.2)
    algorithm = fixed(fb.ShroFBO(batch_size=None, client_lr=eta, server_lr=gamma, local_optimizer=coefficients))
    result = run(algorithm, task, 8, eval_every=1)
    work = np.diff(result.history["gradients"]).astype(int) // 2  # a step has a gradient of g and one of f
    assert set(work) > {1, 4}
    slopes, shift = affine(task, 0)
    z = np.zeros(21)
    for tau in work:
        end = local_loop(coefficients, lambda at: slopes @ at - shift, z, spread(eta), tau)
        z = z - spread(gamma) * (z - end) / spread(eta)
    np.testing.assert_allclose(np.concatenate(result.state.iterate), z, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("method", [fb.SimFBO, fb.ShroFBO])
def test_cohorts_are_unbiased(method, monkeypatch):
    """The mean of one round over all cohorts of P of M clients, which are equally likely, is the round of all clients.

    The round begins with a state from the middle of a run, with unequal work and weights. The new state is affine in
    the cohort's sum, so that states average as sums do. (ShroFBO would fail by about 10 % if the same cohort estimated
    ρ.)
    """
    task = quadratic(clients=4, samples=(5, 5)).with_own(local_steps=np.array([1, 4, 2, 3]))
    algorithm = fixed(method(batch_size=None))
    middle = run(algorithm, task, 2)

    def next_iterate(ids):
        monkeypatch.setattr(Cohort, "draw", lambda *_: jnp.asarray(ids))
        carry = Carry(jnp.asarray(2), middle.state, None, ClockState.start())
        engine = fb.Reference().start(algorithm, task.problem, task.clients, len(ids), jax.random.key(0), carry)
        return engine.advance(carry, 1).carry.state.iterate

    cohorts = [next_iterate(ids) for ids in itertools.combinations(range(4), 2)]
    for part, everyone in enumerate(next_iterate(range(4))):
        mean = np.mean([cohort[part] for cohort in cohorts], axis=0)
        np.testing.assert_allclose(mean, everyone, rtol=1e-12, atol=1e-12)
        assert np.std([cohort[part] for cohort in cohorts]) > 1e-3


@pytest.mark.slow
def test_independent_batches_have_the_same_mean():
    """With full batches, independent draws give the same numbers; ∇f is then computed separately for x and for v."""
    task = quadratic(clients=8, samples=(5, 5)).with_own(local_steps=WORK)
    a, b = (run(fixed(fb.SimFBO(batch_size=None, independent_batches=flag)), task, 3) for flag in (False, True))
    for left, right in zip(jax.tree.leaves(a.state), jax.tree.leaves(b.state), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-12, atol=1e-12)
    assert (b.ledger.gradients, b.ledger.hvps) == (3 * 3 * WORK.sum(), 3 * 2 * WORK.sum())


def test_server_optimizer_sees_q():
    """An optimizer on the server sees q: with heavy-ball momentum μ, m ← μm + q and iterate ← iterate − γm."""
    task, momentum = quadratic(samples=(5, 5)), optax.sgd(1.0, momentum=0.5)
    algorithm = fixed(fb.SimFBO(local_steps=1, batch_size=None, server_lr=SERVER, server_optimizer=momentum))
    both = zip(task.clients.weights, (affine(task, i) for i in range(len(task.clients))), strict=True)
    slopes, shift = (sum(part) for part in zip(*((p * s, p * b) for p, (s, b) in both), strict=True))
    q = -shift  # since the start is 0
    one = -spread(SERVER) * q
    two = one - spread(SERVER) * (0.5 * q + slopes @ one - shift)
    found = np.concatenate(run(algorithm, task, 2).state.iterate)
    np.testing.assert_allclose(found, two, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_schedules_are_read_at_the_round():
    """A schedule is read in each round.

    A run whose schedule is γ in round 0 and γ/2 from round 1 on equals two runs, one with γ and then one with γ/2.
    """
    task = quadratic(samples=(5, 5))
    halving = optax.piecewise_constant_schedule(0.2, {1: 0.5})
    scheduled = fixed(fb.SimFBO(batch_size=None, server_lr=fb.XYV(x=0.01, y=halving, v=0.1)))
    first = fixed(fb.SimFBO(batch_size=None, server_lr=fb.XYV(x=0.01, y=0.2, v=0.1)))
    second = fixed(fb.SimFBO(batch_size=None, server_lr=fb.XYV(x=0.01, y=0.1, v=0.1)))
    state = run(first, task, 1).state
    fed_state = run(scheduled, task, 2).state.iterate
    carry = Carry(jnp.asarray(1), state, None, ClockState.start())
    engine = fb.Local().start(second, task.problem, task.clients, 10, jax.random.key(0), carry)
    expected = engine.advance(carry, 1).carry.state.iterate
    for left, right in zip(fed_state, expected, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", sorted(COEFFICIENTS))
def test_coefficients_are_what_the_steps_make_of_each_gradient(name):
    """For any seven gradients d_k, the steps move z by −η Σ a_k d_k with the paper's a_k, whose sum is `total`."""
    gradients = np.random.default_rng(0).normal(size=7)
    for tau in (1, 2, 7):
        coming = iter(gradients)
        moved = -local_loop(COEFFICIENTS[name], lambda z, c=coming: next(c), np.zeros(1), np.ones(1), tau)
        (a,) = weights_of(COEFFICIENTS[name], [tau])
        assert moved == pytest.approx(a @ gradients[:tau], rel=1e-12)
        assert float(COEFFICIENTS[name].total(tau)) == pytest.approx(a.sum(), rel=1e-12)


def test_projection():
    v = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[4.0]])}  # its norm over the whole tree is 5
    inside = project_ball(v, 6.0)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, inside, v))
    assert float(optax.tree.norm(project_ball(v, 2.0))) == pytest.approx(2.0, rel=1e-15)
    assert float(project_ball(v, 2.0)["b"][0, 0]) == pytest.approx(1.6, rel=1e-15)
    zero = jax.tree.map(jnp.zeros_like, v)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, project_ball(zero, float("inf")), zero))


def test_ledger_counts_one_exchange_and_the_local_work():
    task = quadratic(clients=8, samples=(5, 5)).with_own(local_steps=WORK)
    result = run(fixed(fb.ShroFBO(batch_size=None)), task, 3)
    numbers = 5 + 8 + 8  # x, y and v in float64
    assert result.ledger.exchanges == 3
    assert result.ledger.bytes_down == 3 * 8 * numbers * 8
    assert result.ledger.bytes_up == 3 * 8 * (numbers + 2) * 8  # with ‖a_i‖₁ and 1
    assert result.ledger.gradients == result.ledger.hvps == 3 * 2 * WORK.sum()


@pytest.mark.parametrize(
    ("method", "apart"), [(fb.SimFBO, False), pytest.param(fb.ShroFBO, True, marks=pytest.mark.slow)]
)
def test_local_variance_reduction_is_full_batches_where_samples_differ_by_a_constant(method, apart):
    """If samples differ by constants, local variance reduction with batches equals full batches.

    Samples differ in c and t only. A draw then adds the same to a direction at z_k and at z_0, so that their difference
    does not contain it. Each client computes 2τ_i directions on draws and one on all samples.
    """
    task = quadratic(clients=8, noise=1.0, samples=(4, 4)).with_own(local_steps=WORK)
    common = {"client_lr": fb.XYV(0.03, 0.2, 0.1), "independent_batches": apart}
    anchored, drawn, whole = (
        run(fixed(method(local_optimizer=optimizer, batch_size=size, **common)), task, 4, engine=fb.Reference())
        for optimizer, size in [(fb.parts.Anchored(), 2), (fb.parts.Plain(), 2), (fb.parts.Plain(), None)]
    )
    np.testing.assert_allclose(*map(np.concatenate, (anchored.state.iterate, whole.state.iterate)), rtol=1e-11)
    assert relative_error(drawn.x, whole.x) > 1e-2
    assert anchored.ledger.hvps == 4 * 2 * (2 * WORK + 1).sum()
    assert anchored.ledger.gradients == anchored.ledger.hvps * (3 if apart else 2) / 2


@pytest.mark.slow
def test_v_may_begin_anywhere_in_the_ball():
    """A subclass may start v anywhere in the ball: from x*, y* and v* nothing moves."""
    task = quadratic(clients=4).with_own(local_steps=np.ones(4, int))
    exact = solution(task.clients)

    class Warm(fb.SimFBO):
        def init(self, x, y):
            return super().init(x, y)._replace(iterate=fb.XYV(x, y, jnp.asarray(exact.v)))

    for method, still in [(Warm, True), (fb.SimFBO, False)]:
        x = fb.solve(fixed(method(batch_size=None)), task.problem, task.clients, exact.x, exact.y, rounds=3).x
        assert (relative_error(x, exact.x) < 1e-12) == still


@pytest.mark.parametrize(
    ("coefficients", "tau", "exact"),
    [
        (fb.parts.Momentum(decay=0.9999), 5, sum((5 - j) * 0.9999**j for j in range(5))),
        (fb.parts.Proximal(pull=1e-5), 5, 5 - 10 * 1e-5),  # Σ_j (1 − α)^j, up to α²
        (fb.parts.Proximal(pull=1e-8), 3, 3.0),
    ],
)
def test_the_sum_of_coefficients_keeps_its_digits_in_float32(coefficients, tau, exact):
    with jax.enable_x64(False):
        small = jax.tree.map(jnp.float32, coefficients)
        assert float(small.total(tau)) == pytest.approx(exact, rel=1e-6)
        assert float(jax.jit(lambda t: small.total(t))(tau)) == pytest.approx(exact, rel=1e-6)

"""The papers' errors that docs/reference/errata.md lists: what is printed fails, and the corrected statement holds.

Each problem fulfils the paper's assumptions, if necessary on the points that are visited, and its numbers are known.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alone import client_alone
from tracking import expected, lyapunov, measured, tracking

import fedbilevel as fb
from fixed_steps import fixed

EXACTLY = fb.parts.Neumann(terms=1, step=1.0)
"""A series that is exact if ∇²yy g = I."""


# ------------------------------------------------------------------------------------------------------ RABO, RAFBO


def on_log_cosh(algorithm, rounds):
    """Run on f = log cosh y and g = ½(y − x)² for two clients, from (1, 1); return x and y before each round.

    ∇Φ = tanh x. f ≥ 0 has the Lipschitz constant 1, and so have its gradient, y*(x) = x and tanh. ∇²g is constant.
    There is no noise, and there are no masks.
    """
    problem = fb.Bilevel(lambda x, y, b: jnp.sum(jnp.log(jnp.cosh(y))), lambda x, y, b: jnp.sum((y - x) ** 2) / 2)
    clients, one = fb.Clients(np.ones((2, 1, 1)), np.ones((2, 1, 1))), jnp.ones(1)
    points = {"x": lambda x, y: x[0], "y": lambda x, y: y[0]}
    history = fb.solve(algorithm, problem, clients, one, one, rounds=rounds, eval_every=1, metrics=points).history
    return np.stack([history["x"], history["y"]])[:, :rounds]


def dual_pruning(method, alpha, beta, **fields):
    inner = fb.parts.LocalSGD(local_steps=1, lr=beta)
    return method(inner=inner, outer_lr=alpha, batch_size=None, **fields)


def written_out(alpha, beta, rounds):
    """Return the same points of RABO in NumPy: y ← y − β(y − x), x ← x − α tanh y."""
    x, y, points = 1.0, 1.0, []
    for _ in range(rounds):
        points.append((x, y))
        y = y - beta * (y - x)
        x = x - alpha * np.tanh(y)
    return np.transpose(points)


@pytest.mark.slow
def test_rabo_needs_a_step_on_y_in_proportion_to_that_on_x():
    """RABO's Corollary 1 and Theorem 2 allow steps on y that are too small: β ≤ 1/(NTQ).

    In Q rounds of T steps, y then changes by at most QTβ = 1/N of its largest distance from y*(x), and x moves along a
    gradient at a wrong y. The mean of ‖∇Φ‖² = tanh² x stays above ½ at any Q, where (26) says 2V₁/(αQ). Here
    V = Φ + (M/L)‖y − y*‖², V₁ = log cosh 1, T = 1 and N = C_x* = 2, without noise and masks.

    Theorem 1 itself allows any small β: its bound β ≥ 1/μ − 1/(2αLMμ) is negative for small α. It comes from
    2αLM(1 − βμ) ≤ 1. But line (34b) needs (2αLM + 2)(1 − βμ) ≤ 1, that is β ≥ (1 + 2αLM)/(2μ(1 + αLM)) > 1/(2μ). This
    contradicts β ≤ 1/(2ℓ) of the same theorem, since ℓ ≥ μ. The 2 is that of Lemma 6, from ‖a + b‖² ≤ 2‖a‖² + 2‖b‖².

    The corrected bound has (1 + βμ/2)‖a‖² + (1 + 2/(βμ))‖b‖² in its place. With e = y − y*(x) and h the direction of
    the step,

        V⁺ − V ≤ −(α/2)‖∇Φ‖² + [(α/2) M² − (M/L) βμ/2]‖e‖² + [(M/L)(1 + 2/(βμ)) L²α² − (α/2)(1 − αL_f)]‖h‖²,

    since ‖∇Φ − h‖ ≤ M‖y⁺ − y*(x)‖ and ‖y⁺ − y*(x)‖² ≤ (1 − βμ)‖e‖². The first bracket is negative if β ≥ 8αLM/μ, and
    the second one if also α(2L_f + 4LM) ≤ 1. Without noise, the mean is then at most 2V₁/(αQ). Here
    L_f = L = M = μ = ℓ = 1.
    """
    algorithm, mean_of = functools.partial(dual_pruning, fb.RABO), lambda points: np.mean(np.tanh(points[0]) ** 2)
    own = fb.parts.LocalImplicit(solver=EXACTLY)
    for rounds in (400, 1_600, 6_400):
        alpha = np.sqrt(2 / rounds) / 2
        small, enough, bound = 1 / (2 * rounds), 8 * alpha, 2 * np.log(np.cosh(1)) / (alpha * rounds)
        assert alpha <= 1 / 6
        assert enough <= 1 / 2
        assert 1 - 1 / (2 * alpha) < 0  # Theorem 1's bound from below on β
        # the condition that its proof needs fails at any β ≤ 1/(2ℓ)
        assert np.all((2 * alpha + 2) * (1 - np.linspace(0, 1 / 2)) > 1)
        if rounds == 400:
            for beta in (small, enough):
                found = on_log_cosh(algorithm(alpha=alpha, beta=beta, hypergradient=own), 60)
                np.testing.assert_allclose(found, written_out(alpha, beta, 60), rtol=1e-9, atol=1e-12)
        assert mean_of(written_out(alpha, small, rounds)) > 0.5 > 4 * bound
        points = written_out(alpha, enough, rounds)
        assert bound / 10 < mean_of(points) <= bound
        lyapunov = np.log(np.cosh(points[0])) + (points[0] - points[1]) ** 2
        # with Δ = V_{Q+1} − V₁, as printed, (26) would bound a mean of squares by less than 0
        assert lyapunov[-1] < lyapunov[0]


@pytest.mark.slow
@pytest.mark.parametrize(("alpha", "beta"), [(0.1, 1.0), (0.01, 1.0), (0.1, 1 / 200)])
def test_rafbo_with_the_printed_slopes_climbs(alpha, beta):
    """RAFBO with the printed slopes (10), which Theorem 2 and Remark 3 use, goes uphill at any α and any β ≤ 1.

    (10) makes δ → ∇²yx g and h = ∇x f + δᵀ∇y f, where ∇x f − ∇²xy g [∇²yy g]⁻¹ ∇y f is wanted. Here δ = −1 and
    h = −tanh y. y > 0 stays positive, x and y never fall, and ‖∇Φ‖ = tanh x is at least tanh 1 in every round. RAFBO by
    differences goes downhill with the same steps.
    """
    method, rounds = functools.partial(dual_pruning, fb.RAFBO, alpha, beta), 100
    x, y = on_log_cosh(method(hypergradient=fb.parts.PrintedSlopes()), rounds)
    assert np.all(np.diff(x) > 0)
    assert np.all(np.diff(y) >= 0)
    assert np.mean(np.tanh(x) ** 2) > np.tanh(1) ** 2
    if beta == 1.0:
        own = fb.parts.LocalImplicit(solver=EXACTLY, second_order=fb.parts.Differences())
        x, _ = on_log_cosh(method(hypergradient=own), rounds)
        assert np.mean(np.tanh(x) ** 2) < min(np.tanh(1) ** 2, 2 * np.log(np.cosh(1)) / (alpha * rounds))


def test_rabo_lemma_6_needs_the_square_of_a_lipschitz_constant():
    """RABO's Lemma 6 has a Lipschitz constant L where it needs L².

    ‖y⁺ − y*(x⁺)‖² ≤ 2‖y⁺ − y*(x)‖² + 2‖y*(x) − y*(x⁺)‖², and the last square is at most L²‖x⁺ − x‖², not L‖x⁺ − x‖².
    With y*(x) = 3x, y⁺ = y*(x) and a step of 1, the left side is 9, and the printed bound is 6.
    """
    left = (3.0 * 0 - 3.0 * 1) ** 2
    assert 2 * 3.0 * 1 < left <= 2 * 3.0**2 * 1


def test_rabo_the_bound_behind_remark_2_grows_with_the_clients():
    """The bound behind RABO's Remark 2 grows with the number N of clients, where the remark says that it falls.

    The last line of the proof of Theorem 1 has 4N(L_f + 4M_f)σ_f²/√(C_x* Q). If all N clients hold each entry,
    C_x* = N. Four times as many clients then double the bound, but halve the O(1/√(NQ)) of Remark 2.
    """
    printed, remark = (
        np.array([scale / np.sqrt(n * 1_000) for n, scale in rows])
        for rows in ([(8, 4 * 8), (32, 4 * 32)], [(8, 1), (32, 1)])
    )
    assert printed[1] / printed[0] == pytest.approx(2)
    assert remark[1] / remark[0] == pytest.approx(0.5)


def test_rabo_the_offset_l_belongs_into_the_exponent():
    """The offset l of L_VS belongs into the exponent.

    L_VS takes the logarithm of a sum with e^(Δf) + l. If l < 0, this sum can be negative, and then has no logarithm.
    e^(Δf + l) is positive.
    """
    margins, offset = np.array([-3.0, -2.0]), -0.5
    assert np.exp(margins).sum() + 2 * offset < 0 < np.exp(margins + offset).sum()


@pytest.mark.slow
def test_rabo_line_10_has_the_sign_of_the_other_direction():
    """Line 10 of RABO moves y in the wrong direction.

    As printed, G = (y_T − y₀)/β and y₀ − β mean G make 2y₀ − y_T. For g = ½y², T = 2 steps with β = ½ lead from y₀ = 1
    to y_T = ¼. As printed, y would be at 1¾, higher than at the start. The library's client step is β/T.
    """
    problem = fb.Bilevel(lambda x, y, b: jnp.sum(x * y), lambda x, y, b: y @ y / 2)
    inner = fb.parts.LocalSGD(local_steps=2, lr=2 * 0.5)
    method = fixed(fb.RABO(inner=inner, batch_size=None))
    rows, one = np.ones((2, 1, 1)), np.ones(1)
    (y,) = fb.solve(method, problem, fb.Clients(rows, rows), one, one, rounds=1).y
    assert y == pytest.approx(1 / 4, rel=1e-12)
    gradient = (1 / 4 - 1) / 0.5
    assert 1 - 0.5 * gradient == 1.75 > 1
    assert 1 + 0.5 * gradient == y


def printed_slopes(problem, x, y, mu):
    """Return the h of equation (10) for a single client with f = Σ y.

    For each entry p of x, this is the sum of the entries of δ_p.
    """
    part, rows = fb.parts.PrintedSlopes(perturbation=mu), jnp.ones((1, 1))
    client = client_alone(problem, rows, rows)
    return np.asarray(part.slopes(client, (jnp.asarray(x), jnp.asarray(y)), jax.random.key(0)).update)


@pytest.mark.slow
def test_rabo_lemma_3_is_about_slopes_and_not_about_the_hypergradient():
    """RABO's Lemma 3 bounds the error of slopes, not that of the hypergradient.

    With f = Σ y_p and g = Σ a_p y_p²/2 − c_p x_p² y_p/2 the hypergradient is c x/a. δ_p = −c_p (x_p + μ/2) differs from
    its limit by c_p μ/2. But this limit is −a_p times the hypergradient, entry by entry. So the relative error of (10)
    is between 1 + min a and 1 + max a = 2 at any small μ, whereas σ_J of Lemma 3 falls in proportion to μ.
    """
    rng = np.random.default_rng(0)
    a, c, x = np.linspace(0.2, 1.0, 5), rng.uniform(0.5, 1, 5), rng.normal(size=5)
    problem = fb.Bilevel(
        lambda x, y, b: jnp.sum(y) + 0 * jnp.sum(x), lambda x, y, b: jnp.sum(a * y**2 / 2 - c * x**2 * y / 2)
    )
    for mu in (1e-1, 1e-3, 1e-5):
        found, exact = printed_slopes(problem, x, np.zeros(5), mu), c * x / a
        np.testing.assert_allclose(found + c * x, -c * mu / 2, rtol=1e-4)  # the error of the differences
        assert 1.2 - mu < np.linalg.norm(found - exact) / np.linalg.norm(exact) < 2 + mu


def test_rabo_lemma_3_has_the_constant_of_the_wrong_derivative():
    """The constant of RABO's Lemma 3 is that of the wrong derivative.

    It is σ_J² = 2 P* ℓ_{g,1}² μ² ℓ_{f,0}²/4. But the error of a difference of ∇y g is at most μ/2 times the Lipschitz
    constant ℓ_{g,2} of ∇²g.

    g = y² − sin(kx) sin(ky)/k² has a ∇²g with the rows (sin sin, −cos cos) and (−cos cos, 2 + sin sin). Its norm is at
    most 4 = ℓ_{g,1} for all k, and ℓ_{g,2} ≥ k. At kx = π/2, y = 0 the slope is 0, and the difference is (1 − cos
    kμ)/(kμ) ≈ kμ/2.
    """
    k, mu = 100.0, 1e-3
    problem = fb.Bilevel(
        lambda x, y, b: jnp.sum(y) + 0 * jnp.sum(x),
        lambda x, y, b: jnp.sum(y**2 - jnp.sin(k * x) * jnp.sin(k * y) / k**2),
    )
    (error,) = printed_slopes(problem, [np.pi / 2 / k], [0.0], mu)
    assert error == pytest.approx((1 - np.cos(k * mu)) / (k * mu), rel=1e-9)
    assert error**2 > 100 * 2 * 4**2 * mu**2 / 4
    assert error**2 <= k**2 * mu**2 / 4


MASKED = fb.Bilevel(
    lambda x, y, b: (jnp.sum(y) - 1) ** 2 / 2,
    lambda x, y, b: jnp.sum((y - x) ** 2) / 2,
    structure=fb.Structure(x="_", y="units"),
)
UNEQUAL = fb.Bilevel(
    lambda x, y, b: jnp.sum((y - jnp.mean(b["t"])) ** 2) / 2,
    lambda x, y, b: jnp.sum((y - x - jnp.mean(b["c"]) * jnp.sin(x)) ** 2) / 2,
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["masks", "clients"])
def test_rabo_what_masks_and_unequal_clients_bend_stays_at_every_step(kind):
    """The errors that masks and unequal clients cause do not vanish with the step α, although RABO's (26) says so.

    (26) has α in front of E_h, which comes from w₁ and w₂, and in front of δ_f². Both would vanish with α → 0, αQ → ∞.
    Its proof puts an upper bound of E‖x⁺ − x‖² into U₁, whose factor −1/(2α) + L_f/2 is negative. Without this step,
    2α(N/C_x*)(σ_f² + δ_f² + E_h) of U₂ remains, and this over α/2 contains no α.

    The test has two points of rest, which do not depend on α, so that the mean of ‖∇Φ‖² over rounds is Φ'² there.

    Masks: f = ½(Σy − 1)², g = ½‖y − x‖² for all clients, y has two entries, and each of two clients holds one of them.
    A client's own h = y_i − 1 is 0 at x = y_i = 1, where Φ = ½(2x − 1)² has the slope 2.

    Clients: f_i = ½(y − t_i)², g_i = ½(y − x − c_i sin x)², t = (0, 2), c = (−½, ½). Then y* = x and Φ' = x − 1, but Σ
    h_i/2 = Σ (1 + c_i cos x)(x − t_i)/2 = x − 1 − cos(x)/2 is 0 at another point.
    """
    if kind == "masks":
        problem, start, slope = MASKED, (jnp.ones(1), jnp.ones(2)), 2.0
        clients = fb.Clients(np.ones((2, 1, 1)), np.ones((2, 1, 1)), capacity=[0.5, 0.5])
    else:
        x = 1.0
        for _ in range(50):
            x = 1 + np.cos(x) / 2
        problem, start, slope = UNEQUAL, (jnp.full(1, x), jnp.full(1, x)), x - 1
        samples = {"t": np.array([0.0, 2.0])[:, None], "c": np.array([-0.5, 0.5])[:, None]}
        clients = fb.Clients(samples, samples)
    assert abs(slope) > 0.1
    for alpha in (0.3, 0.003):
        method = dual_pruning(fb.RABO, alpha, 0.5, hypergradient=fb.parts.LocalImplicit(solver=EXACTLY))
        method = fb.Submodels(method, policy="covered") if kind == "masks" else method
        found = fb.solve(method, problem, clients, *start, rounds=5)
        np.testing.assert_allclose(found.x, start[0], rtol=1e-12)
        np.testing.assert_allclose(found.y, start[1], rtol=1e-12)
        moved = fb.solve(method, problem, clients, start[0] + 0.1, start[1] + 0.1, rounds=5)
        assert abs(moved.x[0] - start[0][0] - 0.1) > 1e-3 * alpha  # from another point, the same step does move x


# -------------------------------------------------------------------------------------------------- SimFBO, ShroFBO


@pytest.mark.slow
@pytest.mark.parametrize("runs", [[(4, 100)], [(4, 400), (8, 100), (8, 400)]])
def test_simfbo_table_1_has_the_rounds_of_full_participation(runs):
    """SimFBO's Table 1 has the rounds of full participation, O(1/ε), for partial participation.

    Theorems 1 and 2 say O(1/(Pε²)), and O(1/ε) if all clients take part and τ̄ is in proportion to 1/ε.

    For z = (x, y, v) as in test_rates_of_simfbo_theorem_1_and_shrofbo_theorem_2, the variance of the noise in v is
    s² = σ²/(Pτ) + V (n − P)/(P (n − 1)), where V is the variance of the clients' means. The second part comes from
    taking P of n clients, and does not depend on τ. With the best steps, the mean of ‖∇Φ‖² over four times as many
    rounds is then half as large. If all clients take part and τ grows with T, it is a quarter.
    """
    n, few, unit = 8, 4, np.array([0.25, 1, 1])
    problem, rows = tracking(n, 3.0)
    goal, sigma2, apart = rows.mean((0, 1)), rows.var(1).mean(), rows.mean(1).var(0).mean()
    k = np.array([[0, 0, 0.25], [-1, 1, 0], [0, -1, 1]])

    def best(p, tau, rounds):
        """Return the least mean over all steps, and the step that has it."""
        s2 = sigma2 / (p * tau) + apart * (n - p) / (p * (n - 1))
        of = lambda a: expected(a * k, [1.0, 1.0, 0.0], a**2 * s2 * np.diag([0, 0, 1.0]), rounds)  # noqa: E731
        return min((of(step), step) for step in np.geomspace(0.02, 0.6, 35))

    def run(p, tau, rounds, step):
        steps = fb.XYV(*(unit * step / tau))
        method = fb.SimFBO(client_lr=1e-13, server_lr=steps, batch_size=1, local_steps=tau)
        cohort = p if p < n else None
        found, _ = measured(lambda x: x - goal, method, problem, fb.Clients(rows), goal + 1, rounds, cohort=cohort)
        return found

    ends = {(p, rounds): best(p, rounds // 10, rounds) for p in (few, n) for rounds in (100, 400)}
    for p, rounds in runs:
        end, step = ends[p, rounds]
        assert run(p, rounds // 10, rounds, step) == pytest.approx(end, rel=0.1)
    ends = {case: end for case, (end, _) in ends.items()}
    assert ends[few, 400] / ends[few, 100] > 0.4
    assert ends[n, 400] / ends[n, 100] < 0.3
    assert best(few, 10**9, 400)[0] > 0.9 * ends[few, 400]  # no number of local steps helps


def test_simfbo_combinations_of_equation_4_are_no_variance_reduction():
    """The combinations of SimFBO's equation (4) do not reduce the variance as SVRG does.

    (4) combines directions at z_k on the samples of step k, with weights a_k that do not depend on the draws. SVRG's
    steps d(z_k; ξ_k) − d(z₀; ξ_k) + d(z₀) also need the draws at z₀. For d(z; ξ) = z + ξ with ξ = ±1, SVRG's steps have
    the same sum 1 + (1 − η) for every draw of two samples from z₀ = 1. The best weights miss it by a third of its size.
    """
    eta = 0.1
    draws = [(first, second) for first in (-1, 1) for second in (-1, 1)]
    directions = np.array([(1 + first, 1 - eta * (1 + first) + second) for first, second in draws])
    wanted = np.full(4, 1 + (1 - eta))
    weights = np.linalg.lstsq(directions, wanted)[0]
    assert np.sqrt(np.mean((directions @ weights - wanted) ** 2)) > wanted[0] / 3


def test_simfbo_equation_3_makes_heavy_ball_only_for_vanishing_steps():
    """SimFBO's equation (3) makes heavy ball only in the limit of small steps.

    (3) multiplies a client's k-th step by a_k. a = ((1 − μ^τ)/(1 − μ), …, 1) says how much of the k-th gradient is in
    the sum of the steps of heavy ball. So the local iterate of (3) makes its largest step first.

    For the direction d = z, μ = 0.9, η = 0.05 and τ = 10, from z = 1, heavy ball ends at −0.311, which is 1 − η Σ a_k
    d_k at its own points, and (3) ends at 0.093. For small η both are 1 − η Σ a_k + O(η²).
    """
    mu, tau = 0.9, 10
    a = (1 - mu ** (tau - np.arange(tau))) / (1 - mu)

    def heavy_ball(eta):
        z, velocity = 1.0, 0.0
        for _ in range(tau):
            velocity = mu * velocity + z
            z -= eta * velocity
        return z

    def printed(eta):
        return np.prod(1 - eta * a)

    problem = fb.Bilevel(lambda x, y, b: jnp.sum(x * y), lambda x, y, b: y @ y / 2)
    rows, start = jnp.ones((1, 1)), fb.XYV(jnp.zeros(1), jnp.ones(1), jnp.zeros(1))
    for eta in (0.05, 1e-5):
        method = fixed(fb.SimFBO(batch_size=None, client_lr=eta, local_steps=tau))
        method = replace(method, local_optimizer=fb.parts.Momentum(decay=mu))
        q = method.local_updates(client_alone(problem, rows, rows), start, jax.random.key(0)).update.y
        assert 1 - eta * float(q[0]) == pytest.approx(heavy_ball(eta), rel=1e-9)
    assert (heavy_ball(0.05), printed(0.05)) == (pytest.approx(-0.311, abs=1e-3), pytest.approx(0.093, abs=1e-3))
    assert abs(heavy_ball(1e-5) - printed(1e-5)) < (1e-5 * a.sum()) ** 2


# --------------------------------------------------------------------------------------------------- FedNest, AFBO


def series(terms):
    return fb.parts.Neumann(terms=terms, step=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("terms", [2, 5])
@pytest.mark.parametrize("name", ["FedNest", "AFBO"])
def test_the_bias_of_a_series_is_there_where_the_gradient_of_f_is_constant(name, terms):
    """The bias of a series is b = κ ℓ_{f,0} (1 − 1/κ)^N, not κ ℓ_{f,1} (1 − 1/κ)^N.

    FedNest's (15) and Theorem 3.1, and AFBO's Theorem 1, have ℓ_{f,1}, the Lipschitz constant of ∇f, which is 0 for
    f = ⟨c, y⟩. But the inverse is multiplied by ∇y f itself, and its bound is ℓ_{f,0} = |c|.

    With g = ½ h y² − x y, the error of the series of N terms with step s is H⁻¹(1 − sh)^N. For h = μ = ½, s = 1/ℓ = ½
    and κ = 4 this makes 2 |c| (3/4)^N.
    """
    c, kappa, alpha = np.array([0.6, -0.8]), 4, 0.1
    problem = fb.Bilevel(lambda x, y, b: c @ y + 0 * jnp.sum(x), lambda x, y, b: y @ y / 4 - x @ y)
    method = {
        "FedNest": lambda: fb.FedNest(hypergradient=fb.parts.Implicit(solver=series(terms))),
        "AFBO": lambda: fb.AFBO(hypergradient=fb.parts.LocalImplicit(solver=series(terms))),
    }[name]()
    method = replace(fixed(method), outer_lr=alpha, batch_size=None)
    rows = np.ones((2, 1, 1))
    x = fb.solve(method, problem, fb.Clients(rows, rows), np.zeros(2), np.zeros(2), rounds=1).x
    error = np.linalg.norm(-x / alpha - 2 * c)  # y*(x) = 2x
    assert error == pytest.approx(2 * 0.75**terms, rel=1e-9)
    assert error <= kappa * np.linalg.norm(c) * (1 - 1 / kappa) ** terms


@pytest.mark.slow
def test_fednest_inner_loss_of_a_composition_has_a_half():
    """FedNest's inner loss of a composition lacks a factor of one half.

    Section 2.4 takes ∇²yy g_i = I and ∇²xy g_i = −∇r_iᵀ. These belong to ½‖y − r(x)‖², and are half of those of
    ‖y − r(x)‖².
    """
    x, y = jnp.array([0.3, -0.7]), jnp.array([1.0, 2.0, -1.0])
    r = lambda x: jnp.array([jnp.sin(x[0]), x[0] * x[1], x[1] ** 2])  # noqa: E731
    for half, share in ((0.5, 1), (1.0, 2)):
        gradient = jax.grad(lambda x, y, half=half: half * jnp.sum((y - r(x)) ** 2), argnums=1)
        np.testing.assert_allclose(jax.jacobian(gradient, 1)(x, y), share * np.eye(3), atol=1e-15)
        np.testing.assert_allclose(jax.jacobian(gradient, 0)(x, y), -share * jax.jacobian(r)(x), rtol=1e-12)


@pytest.mark.slow
def test_fednest_theorem_31_needs_the_start_over_the_root_of_k():
    """The bound of FedNest's Theorem 3.1 needs the term of the start over √K, not over K.

    It bounds the mean of ‖∇f‖² by O(ᾱ σ²/√K + 1/(min(ᾱ₁, ᾱ₂, ᾱ₃) K) + b²). Without noise and bias this is O(1/K). But
    if α = ᾱ/√K is the least number of (16), the descent lemma leaves Δ/(αK) = Δ/(ᾱ√K), which Theorem 3.2 has.

    With f = ½‖y‖², g = ½‖y − x‖², T = 1 and β = β̄ α, y ← y − β(y − x), x ← x − α y, and ∇f = x. For z = (x, y) this is
    z ← z − α K z to first order in α, and the mean of x² is z₀ᵀRz₀/(αK) with KᵀR + RK = e_x e_xᵀ.
    """
    bar, ratio, means = 0.8, 4.0, {}
    problem, rows = tracking(2, 0.0)
    problem = fb.Bilevel(lambda x, y, b: y @ y / 2 + 0 * jnp.sum(x), problem.inner)
    for rounds in (100, 400, 1_600):
        alpha = bar / np.sqrt(rounds)
        beta = ratio * alpha
        slope = np.array([[alpha * beta, alpha * (1 - beta)], [-beta, beta]])
        means[rounds] = expected(slope, np.ones(2), 0, rounds)
        if rounds == 100:
            own = fb.parts.Implicit(solver=EXACTLY)
            method = fb.FedNest(inner=fb.parts.SVRG(local_steps=1, lr=beta), hypergradient=own, outer_lr=alpha)
            found, _ = measured(
                lambda x: x, replace(method, batch_size=None), problem, fb.Clients(rows), np.ones(2), rounds
            )
            assert found == pytest.approx(means[rounds], rel=1e-9)
    k, z = np.array([[0, 1.0], [-ratio, ratio]]), np.ones(2)
    left = z @ lyapunov(k.T, np.diag([1.0, 0])) @ z / bar
    off = [abs(mean * np.sqrt(rounds) / left - 1) for rounds, mean in means.items()]
    assert off[2] < off[1] < off[0] < 0.2  # the mean is a constant over √K
    assert off[2] < 0.05
    assert means[1_600] * 1_600 > 3.5 * means[100] * 100  # and no constant over K


def test_afbo_algorithm_1_as_printed_never_moves_y_in_one_inner_round():
    """AFBO's Algorithm 1, as printed, never moves y if there is one inner round.

    Line 12 takes y^(t+1) = y^(t,K−1), but line 10 makes y^(t,K) last. For K = 1, line 12 therefore takes the y from
    before. The loop of lines 5 to 7 has no step, so that its E gradients are E times the same one. The test has
    g = ½(y − x)² and x = 1, from y = 0.
    """
    x, beta, eta, rounds = 1.0, 0.5, 0.3, 20

    def gradients(y, moves):
        """Return four gradients, with a local step after each one if `moves`."""
        found = []
        for _ in range(4):
            found.append(y - x)
            y = y - eta * (y - x) * moves
        return found

    def end(last):
        y = 0.0
        for _ in range(rounds):
            y = [y, y - beta * np.mean(gradients(y, True))][last]  # y^(t,0) and y^(t,1)
        return y

    assert end(last=-2) == 0.0  # as printed
    assert abs(end(last=-1) - x) < 0.01
    assert gradients(0.0, False) == [-x] * 4
    assert len(set(gradients(0.0, True))) == 4


@pytest.mark.slow
def test_afbo_aphe_needs_a_product_of_random_length():
    """AFBO's APHE needs a product of random length.

    As H_i of section 3.2, APHE multiplies all of its N_i factors I − H/ℓ. Times N/ℓ, this tends to 0. If the length is
    drawn uniformly from 0 to N − 1, the mean is Σ_{n<N} (I − H/ℓ)^n/ℓ, which tends to H⁻¹. This is the default here.
    Whether l begins at 0, with a p_{i,−1} that is not defined, or at 1, changes one factor.

    The test has g = ½yᵀHy − xᵀy, f = ⟨c, y⟩ and ℓ = 2.
    """
    h, c, alpha, rows = np.array([0.5, 1.0, 1.5]), np.array([1.0, -2.0, 0.5]), 0.1, np.ones((2, 1, 1))
    problem = fb.Bilevel(lambda x, y, b: c @ y + 0 * jnp.sum(x), lambda x, y, b: y @ (h * y) / 2 - x @ y)
    ends = []
    for terms in (5, 40):
        method = fixed(fb.AFBO(hypergradient=fb.parts.LocalImplicit(solver=series(terms))))
        method = replace(method, outer_lr=alpha, batch_size=None)
        x = fb.solve(method, problem, fb.Clients(rows, rows), np.zeros(3), np.zeros(3), rounds=1).x
        printed = [terms / 2 * (1 - h / 2) ** factors * c for factors in (terms, terms - 1)]
        ends.append([np.linalg.norm(found - c / h) / np.linalg.norm(c / h) for found in (-x / alpha, *printed)])
    assert ends[1][0] < 1e-4 < ends[0][0] < 0.2
    assert min(ends[0][1:]) > 0.5
    assert min(ends[1][1:]) > 0.99


@pytest.mark.slow
def test_afbo_with_all_in_time_has_delays_of_0():
    """If all clients reply in time, AFBO's delays are 0, not 1.

    The text below Theorem 1, and Lemma 1, take τ_i = 1 for the synchronous case. But line 14 sets τ_i = 0 for a client
    that has just replied, and line 15 then steps along H^{t − τ_i} = H^t. With τ_i = 1 it would step along H^{t−1}.
    """
    alpha, rounds = 0.3, 6
    problem = fb.Bilevel(lambda x, y, b: 1 - jnp.cos(x[0]), lambda x, y, b: y @ y / 2)
    rows, one = np.ones((3, 1, 1)), np.ones(1)
    method = replace(
        fixed(fb.AFBO(hypergradient=fb.parts.LocalImplicit(solver=EXACTLY))), outer_lr=alpha, batch_size=None
    )
    method = fb.Asynchronous(method, wait_for=3)
    found = fb.solve(
        method, problem, fb.Clients(rows, rows), one, one, rounds=rounds, eval_every=1, engine=fb.Reference()
    )
    for phase in ("inner.gradients", "hypergradient.local_hypergradient"):
        np.testing.assert_array_equal(found.history[f"delay.{phase}"][1:], 0)
    at_once, late = [1.0], [1.0]
    for t in range(rounds):
        at_once.append(at_once[-1] - alpha * np.sin(at_once[-1]))
        late.append(late[-1] - alpha * np.sin(late[max(t - 1, 0)]))
    assert found.x[0] == pytest.approx(at_once[-1], rel=1e-12)
    assert abs(late[-1] - at_once[-1]) > 0.01


# ------------------------------------------------------------------------------------------------------------ FISM


def walked(lr, penalty, x, goal, scale, rounds, bound):
    """Run FISM for one client with one sample, f = scale/2 (x − goal)², H = ½(x − 1)² and |x| ≤ bound; return its x."""
    problem = fb.SimpleBilevel(
        lambda x: jnp.sum((x - 1) ** 2) / 2,
        lambda x, batch: scale * jnp.sum((x - goal) ** 2) / 2 + 0 * jnp.sum(batch),
        fb.projections.box(-bound, bound),
    )
    method = fb.FISM(lr=lr, regularization=penalty)
    return float(fb.solve(method, problem, fb.Clients(np.ones((1, 1, 1))), np.full(1, x), rounds=rounds).x[0])


def test_fism_lemma_5_has_the_bound_of_the_wrong_function():
    """FISM's Lemma 5 has the bound C_f where it needs C_H.

    The middle term of the lemma, 4m C_f²/(γ_k λ_k μ_H³)(1 − λ_{k−1}/λ_k)², comes from Lemma 4,
    ‖x*_k − x*_{k−1}‖ ≤ (C_H/μ_H)|1 − λ_{k−1}/λ_k|. Therefore it needs C_H, as β_k in the proof of Theorem 9 has.

    f = εx²/2 on |x| ≤ 1 has C_f = ε, H = ½(x − 1)² has μ_H = 1 and C_H = 2, and x*_k = λ_k/(ε + λ_k). From x₁ = x*₁,
    where FISM rests in its first round, V₂(x*₁) = 0.
    """
    epsilon, gamma, a, b = 1e-4, 0.5, 0.6, 0.35
    first, second = epsilon * 2 ** (b / 2), epsilon * 2 ** (-b / 2)  # λ₁ and λ₂
    rest, moved = (one / (epsilon + one) for one in (first, second))
    x2, x3 = (walked(gamma, first, rest, 0.0, epsilon, rounds, 1.0) for rounds in (1, 2))
    assert x2 == pytest.approx(rest, rel=1e-12)
    step = gamma / 2**a
    c_f, c_h, change = epsilon, 2.0, (1 - first / second) ** 2
    c = 4 * (c_f**2 + 2 * first**2 * c_h**2) + 2 * c_f * (c_f + first * c_h)
    left = (x3 - moved) ** 2
    assert left > 10 * (4 * c_f**2 / (step * second) * change + step**2 * c)  # as printed
    assert left <= 4 * c_h**2 / (step * second) * change + step**2 * c


def test_fism_estimate_2_begins_with_a_sum():
    """FISM's estimate (2) needs the square of a sum, ‖g + (λ/m)𝓗‖², not of a difference.

    The estimate is V_{k,j+1} ≤ V_{k,j} + γ²‖g − (λ/m)𝓗‖² − …. But the step of line 9 is along g + (λ/m)𝓗, and so is the
    square. At z = x the other terms are 0. f = ½(x − 1)² = H and λ/m = 1 make g = 𝓗 = −1 at x = 0; γ = ½ makes a step
    of 1.
    """
    end = walked(0.5, 1.0, 0.0, 1.0, 1.0, 1, 10.0)
    assert end**2 > 0.5**2 * (-1 - -1) ** 2
    assert end**2 == pytest.approx(0.5**2 * (-1 + -1) ** 2, rel=1e-12)


def test_fism_last_line_before_4_has_a_difference():
    """The last line before FISM's (4) needs a difference, … − F(x) − (Iλ/m) H(x).

    V_{k,I+1}(x) ≤ V_k(x) + γ²(4m²I A₁ + 2m² C_f A₂) − 2γ(F(x_k) + (Iλ/m) H(x_k) − F(x) + (Iλ/m) H(x)), as printed,
    would be below 0 at x = x_k, where its left side is a square. The last sign has to be −.

    m = I = λ = 1 and f = H = ½(x − 1)² on |x| ≤ 1 have C_f = C_H = 2, A₁ = C_f² + 2C_H² and A₂ = C_f + C_H. At x_k = 0,
    H = ½.
    """
    gamma, noise = 0.01, 0.01**2 * (4 * (4 + 2 * 4) + 2 * 2 * 4)
    left = walked(gamma, 1.0, 0.0, 1.0, 1.0, 1, 1.0) ** 2
    assert noise - 2 * gamma * (0.5 + 0.5) < 0 < left  # as printed
    assert left <= noise

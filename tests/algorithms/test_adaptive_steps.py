"""Do the steps of y and v follow the inner Hessian when x makes it a thousand times stiffer?

The inner losses are g_i = ½ 10^x yᵀA_i y − c_iᵀy with A_i = s_i Q diag(κ^-1..1) Qᵀ, so that the largest eigenvalue of
∇²yy G = Σ p_i ∇²yy g_i is 10^x Σ p_i s_i. The outer losses are f_i = ½ (x − 3)² + ½ε‖y − t_i‖².

The inner solution is y*(x) = 10^-x k with k = (Σ p A)⁻¹ Σ p c. For a small ε the solution is near x = 3:
Φ′(x) = x − 3 − ε ln 10 (y* − Σ p t)ᵀy*. ε is κ^-2, since |y*| is about κ at x = 0, so that steps on x stay small.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithms.parts.adagrad import REACH
from fedbilevel.parts import SVRG, Implicit, LocalImplicit, LocalSGD, MeanGradient, Neumann, SystemSteps
from fedbilevel.tasks import quadratic
from fixed_steps import fixed
from refusals import ANY, raises_with, refuses
from representatives import slow_but

SCALES, WEIGHTS, DIM = np.array([0.5, 1.0, 2.0]), np.array([0.4, 0.4, 0.2]), 4
LARGEST = float(WEIGHTS @ SCALES)  # the largest eigenvalue of ∇²yy G at x = 0
STEP = 0.5 / LARGEST  # suits the start, since it is below 2/L there


def stiff(x, y, batch):
    return jnp.mean(0.5 * 10**x * jnp.einsum("i,nij,j->n", y, batch["A"], y) - batch["c"] @ y)


def far(x, y, batch):
    """Compute f; ε is a number of each sample, so that one program serves every κ."""
    return 0.5 * (x - 3) ** 2 + 0.5 * jnp.mean(batch["ε"] * jnp.sum((y - batch["t"]) ** 2, axis=-1))


STIFFENING = fb.Bilevel(far, stiff)


def stiffening(condition):
    """Return the problem with its clients, and the x and y of its solution."""
    rng, epsilon = np.random.default_rng(0), condition**-2
    q = np.linalg.qr(rng.normal(size=(DIM, DIM)))[0]
    a = [scale * (q * np.geomspace(1 / condition, 1, DIM)) @ q.T for scale in SCALES]
    c, t = rng.normal(size=(2, 3, DIM))

    rows = (
        [{"t": t[i : i + 1], "ε": np.array([epsilon])} for i in range(3)],
        [{"A": a[i][None], "c": c[i : i + 1]} for i in range(3)],
    )
    k = np.linalg.solve(sum(p * own for p, own in zip(WEIGHTS, a, strict=True)), WEIGHTS @ c)
    low, high = 2.0, 4.0
    for _ in range(60):  # bisection, since Φ′ grows with x
        x = (low + high) / 2
        y = 10**-x * k
        rising = x - 3 - epsilon * np.log(10) * (y - WEIGHTS @ t) @ y > 0
        low, high = (low, x) if rising else (x, high)
    return (STIFFENING, fb.Clients(*rows, weights=WEIGHTS)), x, 10**-x * k


def played(algorithm, problem, rounds, **options):
    return fb.solve(algorithm, *problem, jnp.zeros(()), jnp.zeros(DIM), rounds=rounds, **options)


SGD, SERIES, ON_X = LocalSGD(local_steps=1), Neumann(), {"outer_lr": 0.02, "batch_size": None}
STEPS, LOOP = fb.XYV(x=0.02, y=None, v=None), {"local_steps": 1, "batch_size": None}
INNER, OWN, WHOLE = MeanGradient(local_steps=1), LocalImplicit(solver=SERIES), Implicit(solver=SERIES)
EXACT = {
    "SimFBO": fb.SimFBO(server_lr=STEPS, client_lr=0.02, **LOOP),
    "ShroFBO": fb.ShroFBO(server_lr=STEPS, client_lr=0.02, **LOOP),
    "FedBiO": fb.FedBiO(client_lr=STEPS, **LOOP),
    "AFBO, steps on v": fb.AFBO(inner=INNER, hypergradient=SystemSteps(), **ON_X),
}
"""Methods that also solve for v, so that the end is the solution."""
TRUNCATED = {
    "FedNest": fb.FedNest(inner=SVRG(local_steps=1), hypergradient=WHOLE, **ON_X),
    "FedMBO": fb.FedMBO(inner=SGD, hypergradient=WHOLE, **ON_X),
    "AFBO": fb.AFBO(inner=INNER, hypergradient=OWN, **ON_X),
    "RABO": fb.RABO(inner=SGD, hypergradient=OWN, **ON_X),
    "AggITD": fb.AggITD(inner=LocalSGD(local_steps=1, rounds=5), **ON_X),
}
"""Series of few terms, or own systems: x ends elsewhere, by no more than ε times what v is wrong by, and y at y*(x)."""
METHODS = EXACT | TRUNCATED


def half(method):
    """Give the method steps of ½/L on y and v."""
    return fb.AdaptiveSteps(method, y_lr=0.5)


def at_the_start(part):
    """Return the method, or the part, with the steps that suit the start as fixed numbers, so that nothing adapts."""
    changed = {}
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if isinstance(value, fb.XYV):
            changed[field.name] = fb.XYV(*(STEP if size is None else size for size in value))
        elif value is None and field.name in ("lr", "step"):
            changed[field.name] = STEP
        elif hasattr(value, "phases"):
            changed[field.name] = at_the_start(value)
    return dataclasses.replace(part, **changed)


NOT_FINITE = {"SimFBO", "ShroFBO", "FedBiO"}
"""Methods that are not finite before round 300 with fixed steps, since all their variables move in each local step."""


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_step_that_suits_the_start_does_not_suit_the_end(name):
    """With fixed steps that suit the start, every method diverges."""
    problem, x, _ = stiffening(10.0)
    method = at_the_start(METHODS[name])
    if name in NOT_FINITE:
        with raises_with(fb.errors.NonFiniteError):
            played(method, problem, 300)
    else:
        assert abs(float(played(method, problem, 300).x) - x) > 1e4


@pytest.mark.parametrize("condition", [10.0, pytest.param(100.0, marks=pytest.mark.slow), 1e4])
@pytest.mark.parametrize("name", slow_but("SimFBO", of=METHODS))
def test_none_diverges_where_x_makes_the_inner_problem_stiffer(name, condition):
    """No method diverges, and x comes near 3, where the inner problem is up to a thousand times stiffer than at the
    start. x takes 150 rounds for its first ln 20, and the slowest mode of y shrinks by the factor 1 − ½/κ in a round.
    At κ = 10 this leaves e^-57 after the other 1,150 rounds. At κ = 10⁴ the mode has hardly shrunk, and y is no farther
    off than at the start, where |y*(0)| = 10^x |y*(x)|."""
    problem, x, y = stiffening(condition)
    result = played(half(METHODS[name]), problem, 1_300)
    assert (
        0.95
        < float(result.state.slots["adaptive_steps"].curvature.largest) / (10 ** float(result.x) * LARGEST)
        < 1 + 1e-6
    )
    if condition == 10.0:
        assert abs(float(result.x) - x) < (1e-9 if name in EXACT else 1e-3)
        np.testing.assert_allclose(result.y, y * 10 ** (x - float(result.x)), rtol=1e-8)
    assert abs(float(result.x) - 3) < 0.15
    assert np.linalg.norm(result.y) <= 10**x * np.linalg.norm(y)


def left_of(run, a, tau=1, c=0.5):
    """Return the matrix that multiplies the error of y in a run in which x stays, from the curvatures of its history.
    Clients that are alike make τ steps of c/L, with the L from before the round. The server moves y as far as they did,
    or less by the factor by which L has risen in the round."""
    left, known = np.eye(DIM), run.history["curvature"]
    for before, after in itertools.pairwise(known):
        if before > 0:
            factor = min(before / after, 1)
            once = np.linalg.matrix_power(np.eye(DIM) - c / before * a, tau)
            left = ((1 - factor) * np.eye(DIM) + factor * once) @ left
    return left


@pytest.mark.parametrize("condition", [10.0, 100.0, 1e4])
@pytest.mark.parametrize("name", slow_but("SimFBO", "FedNest", of=["SimFBO", "FedNest", "AFBO", "RABO"]))
def test_the_error_in_y_falls_by_the_rate_of_half_of_1_over_L(name, condition):
    """If x stays, the run multiplies the error of y by the matrices I − ½A/L_n, with A = Σ p A_i. So y_N = y* + Π
    (I − ½A/L_n)(0 − y*). L_n is the curvature in the history. It is the largest eigenvalue, except for what the random
    vector takes from the power method. Round 0 only measures."""
    (problem, clients), _, _ = stiffening(condition)
    x_stays = METHODS[name], ("server_lr" if name == "SimFBO" else "outer_lr")
    step = fb.XYV(x=1e-12, y=None, v=None) if name == "SimFBO" else 1e-12
    method = half(dataclasses.replace(x_stays[0], **{x_stays[1]: step}))
    result = played(method, (problem, clients), 50, eval_every=1)
    a = sum(p * clients.inner.row(i)["A"][0] for i, p in enumerate(WEIGHTS))
    star = np.linalg.solve(a, sum(p * clients.inner.row(i)["c"][0] for i, p in enumerate(WEIGHTS)))
    np.testing.assert_allclose(result.y, star - left_of(result, a) @ star, rtol=1e-5)
    assert np.all(result.history["curvature"][1:] > 0.95 * LARGEST)
    assert np.all(result.history["curvature"] < (1 + 1e-6) * LARGEST)


@pytest.mark.slow
@pytest.mark.parametrize("method", [fb.SimFBO, fb.ShroFBO, fb.FedBiO])
def test_local_steps_and_their_sums_bear_unequal_work(method):
    """Clients with 20, 1 and 5 local steps come to x = 3.

    The local steps are c/(L Σ p τ), and at most 1/L_i. So each step on y, and each mean of such steps, is a
    contraction, and ShroFBO's ρh moves y by at most c/L. x waits for y, and needs 2,000 rounds to come to 3, where L is
    1,000 times as large as at the start.
    """
    (problem, clients), _, _ = stiffening(10.0)
    clients = fb.Clients(clients.outer, clients.inner, weights=WEIGHTS, local_steps=[20, 1, 5])
    result = played(fb.AdaptiveSteps(method(batch_size=None)), (problem, clients), 2000)
    curvature = result.state.slots["adaptive_steps"].curvature
    assert float(curvature.work) == pytest.approx(0.4 * 20 + 0.4 * 1 + 0.2 * 5, rel=1e-6)
    summed = 0.4 * 20 * 0.5 + 0.4 * 1 * 1.0 + 0.2 * 5 * 2.0  # Σ p τ s; the curvature is this times 10^x
    assert float(curvature.summed) == pytest.approx(10 ** float(result.x) * summed, rel=0.05)
    assert abs(float(result.x) - 3) < 0.01


def test_x_waits_in_a_run():
    """The step on x from round 60 to round 61 is shorter by the factor w, since L has grown 10-fold or more. It is
    |Δx| = w r |h|/√Σh². The last h² is the amount by which the sum of squares grows in this round."""
    problem, _, _ = stiffening(10.0)
    method = fb.SimFBO(batch_size=None, local_steps=10)
    before, after = (played(method, problem, rounds) for rounds in (60, 61))
    outer, slower = (
        after.state.slots["adaptive_steps"].outer,
        float(after.state.slots["adaptive_steps"].curvature.slower),
    )
    assert slower < 0.3
    h = np.sqrt(float(outer.norms) ** 2 - float(before.state.slots["adaptive_steps"].outer.norms) ** 2)
    expected = slower * min(float(outer.farthest), 0.1 * REACH) * h / float(outer.norms)
    assert abs(float(after.x - before.x)) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("method", slow_but(fb.FedBiO, of=[fb.SimFBO, fb.FedBiO, fb.ShroFBO]))
def test_clients_that_are_alike_go_on_by_all_their_local_steps(method):
    """If clients are alike (r = 1), their τ local steps act like those of one client: y_N = y* + Π (I − ½A/L_n)^τ
    (0 − y*). Round 0 only measures. FedBiO's replies are steps, which are 0 in round 0, so that r is known a round
    later, and the steps of round 1 are ½/(τL). With τ = 8, 1, 3, y comes to y* too."""
    (problem, clients), _, _ = stiffening(10.0)
    outer, inner = clients.outer.row(0), clients.inner.row(0)
    a, c = inner["A"][0], inner["c"][0]
    steps = {"client_lr" if method is fb.FedBiO else "server_lr": fb.XYV(x=1e-12, y=None, v=None)}
    made = fb.AdaptiveSteps(method(batch_size=None, local_steps=4, **steps), y_lr=0.5)
    star = np.linalg.solve(a, c)
    alike = problem, fb.Clients([outer] * 3, [inner] * 3, weights=WEIGHTS)
    run = played(made, alike, 6, eval_every=1)
    if method is fb.FedBiO:
        known = run.history["curvature"]
        first = np.linalg.matrix_power(np.eye(DIM) - 0.5 / 4 / known[1] * a, 4)
        later = np.eye(DIM)
        for before in known[2:-1]:
            later = np.linalg.matrix_power(np.eye(DIM) - 0.5 / before * a, 4) @ later
        left = later @ first
    else:
        left = left_of(run, a, tau=4)
    np.testing.assert_allclose(run.y, star - left @ star, rtol=1e-5, atol=1e-6)
    unequal = fb.Clients([outer] * 3, [inner] * 3, weights=WEIGHTS, local_steps=[8, 1, 3])
    np.testing.assert_allclose(played(made, (problem, unequal), 150).y, star, rtol=1e-4)
    if method is not fb.FedBiO:  # no drift: 9 steps of ½/(4L) along the mean of four gradients at one point
        short = dataclasses.replace(made, algorithm=dataclasses.replace(made.algorithm, client_lr=1e-12))
        run = played(short, alike, 10, eval_every=1)
        np.testing.assert_allclose(run.y, star - left_of(run, a) @ star, rtol=1e-5, atol=1e-6)


def test_clients_that_differ_do_not_drift_where_they_come_to_rest():
    """If clients differ, y comes to y* also with τ = 10 local steps. With local steps of 1/L, y would rest where the
    drifts cancel. At this point r goes to 0, and the drifts go to 0 with it."""
    (problem, clients), x, y = stiffening(10.0)
    run = played(fb.SimFBO(batch_size=None, local_steps=10), (problem, clients), 1_500)
    np.testing.assert_allclose(run.y * 10 ** (float(run.x) - x), y, rtol=0.02, atol=0.02 * np.abs(y).max())
    assert float(run.state.slots["adaptive_steps"].curvature.agreement) < 1e-4


FEDNEST = fb.FedNest(inner=SVRG(rounds=2), batch_size=None, outer_lr=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "often"),
    [(EXACT["SimFBO"], 1), (FEDNEST, 2)],
    ids=["SimFBO", "FedNest"],
)
def test_costs_are_the_methods_and_those_of_the_measures(method, often):
    """A run costs what the method costs with fixed steps, plus the products and the bytes of the measurements. Three
    clients measure in 7 rounds: each makes 12 products the first time and 3 each later time. A message has two numbers
    and a seed more; a reply that measures has six numbers more. FedNest measures with q, once in each of its T = 2
    inner rounds. If only the step on x adapts, no product is added."""
    problem, _, _ = stiffening(10.0)
    plain, followed = (played(one, problem, 7).ledger for one in (fixed(method), method))
    assert followed.hvps == plain.hvps + 3 * (12 + 3 * (7 * often - 1))
    assert followed.gradients == plain.gradients
    assert followed.bytes_down == plain.bytes_down + (2 * 8 + 4) * plain.replies
    assert followed.bytes_up == plain.bytes_up + 6 * 8 * 3 * 7 * often
    x_alone = fb.SimFBO(server_lr=fb.XYV(x=None, y=STEP, v=STEP), client_lr=0.02, **LOOP)
    assert played(x_alone, problem, 7).ledger.hvps == 3 * 7 * 2


def one_stiff(count):
    """Return a problem with clients of curvature 1 and one of curvature 1,000, with its start, and its solution x.
    f_i = ½‖y − o_i‖² + 0.05‖x‖² and g_i = ½c_i‖y − t_i − x‖², so that y* = Σct/Σc + x, x = (mean o − Σct/Σc)/1.1."""
    rng = np.random.default_rng(0)
    c, (t, o) = np.where(np.arange(count) == count // 2, 1e3, 1.0), rng.normal(size=(2, count, 1, 3))
    data = {"c": c[:, None], "t": t, "o": o}

    def outer(x, y, batch):
        return jnp.mean(jnp.sum((y - batch["o"]) ** 2, -1)) / 2 + 0.05 * jnp.sum(x**2)

    def inner(x, y, batch):
        return jnp.mean(batch["c"] * jnp.sum((y - batch["t"] - x) ** 2, -1)) / 2

    problem = fb.Bilevel(outer, inner), fb.Clients(outer=data, inner=data), np.zeros(3), np.zeros(3)
    return problem, (o.mean((0, 1)) - c @ t[:, 0] / c.sum()) / 1.1


@pytest.mark.parametrize(
    "method", slow_but(fb.SimFBO, of=[fb.SimFBO, fb.FedNest, fb.FedBiO, fb.ShroFBO, fb.AFBO, fb.RABO, fb.FedMBO])
)
def test_a_stiff_client_that_is_seldom_asked_ruins_nothing(method):
    """A stiff client that is seldom in a cohort spoils neither the steps on x nor y.

    Before it first takes part, its curvature is not known, and the steps that are allowed are 1,000 times too long for
    this client. Without protection, the steps on x were only 10^-6 to 10^-15 long after 600 rounds, and x was farther
    from the solution than 0 is. FedBiO and RABO were exceptions, because their clients choose steps by their own
    curvature.
    """
    problem, x = one_stiff(100)
    result = fb.solve(method(batch_size=None), *problem, rounds=600, cohort=10)
    assert float(result.history["x_step"][-1]) > 3e-4
    assert np.linalg.norm(result.x - x) < np.linalg.norm(x)
    assert np.max(np.abs(result.y)) < 5


@pytest.mark.slow
def test_the_round_that_meets_a_stiff_client_steps_by_its_curvature():
    """In the round in which a stiff client is first asked, y is the client's optimum, t + x. The cohort has one client,
    which makes one local step with c = 1: y ← y − (1/1000)·1000 (y − t − x)."""
    problem, _ = one_stiff(4)
    method = fb.SimFBO(local_steps=1, batch_size=None)
    run = lambda rounds: fb.solve(method, *problem, rounds=rounds, cohort=1, key=1, eval_every=1)  # noqa: E731
    known = run(11).history["curvature"]
    met = next(n for n, largest in enumerate(known) if largest > 2)
    assert known[met - 1] == pytest.approx(1)
    assert known[met] == pytest.approx(1e3)
    np.testing.assert_allclose(run(met).y, problem[1].inner.row(2)["t"][0] + run(met - 1).x, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [fb.SimFBO, fb.AFBO, fb.FedNest, fb.RABO, fb.AggITD],
)
def test_the_unit_of_the_outer_loss_is_no_matter(method):
    """x takes the same path if f is a million times as large, for example a sum in place of a mean, since v and h scale
    too. In SimFBO's round 0, h is 0, since v = 0 and f does not contain x. The clients' first steps must not be of
    arbitrary size then.
    """
    ((problem, clients), _, _), ends = stiffening(10.0), []
    scaled = fb.Bilevel(lambda x, y, batch: jnp.mean(batch["s"]) * jnp.mean((y - batch["t"]) ** 2), problem.inner)
    for scale in (1.0, 1e6):
        rows = [{"t": clients.outer.row(i)["t"], "s": np.array([scale])} for i in range(3)]
        same = fb.Clients(rows, clients.inner, weights=WEIGHTS)
        ends.append(float(played(method(batch_size=None), (scaled, same), 60).x))
    assert ends[0] != 0
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-6)


@pytest.mark.slow
def test_which_steps_are_given_is_a_program_of_its_own():
    """Methods with one given step size do not share a compiled program if it is in different fields."""
    problem, _, _ = stiffening(10.0)
    steps = [fb.SimFBO(server_lr=fb.XYV(**{**dict.fromkeys("xyv"), given: 0.05}), **LOOP) for given in "xyv"]
    parts = [
        fb.AFBO(inner=MeanGradient(lr=lr, local_steps=1), hypergradient=SystemSteps(lr=other), **ON_X)
        for lr, other in ((0.05, None), (None, 0.05))
    ]
    for methods in (steps, parts):
        ends = [np.asarray(played(one, problem, 4).y) for one in methods]
        for one, end in zip(methods, ends, strict=True):
            np.testing.assert_allclose(end, played(one, problem, 4, engine=fb.Reference()).y, rtol=1e-10)
        assert all(np.max(np.abs(a - b)) > 1e-9 for i, a in enumerate(ends) for b in ends[:i])


@pytest.mark.slow
def test_an_inner_loss_without_curvature_is_said():
    problem = fb.Bilevel(lambda x, y, batch: jnp.sum(x**2), lambda x, y, batch: jnp.sum(x) * jnp.sum(y))
    with pytest.warns(UserWarning, match="no curvature in y"):
        fb.solve(fb.SimFBO(batch_size=None), problem, fb.Clients([np.ones((1, 1))]), np.ones(2), np.ones(2), rounds=2)


def test_an_x_in_half_precision_needs_numbers_for_the_steps():
    problem = fb.Bilevel(lambda x, y, batch: jnp.sum(y**2), lambda x, y, batch: jnp.sum((y - x) ** 2))
    with refuses("dtype of x0", "float16", "numbers for the steps"):
        fb.solve(fb.SimFBO(), problem, fb.Clients([np.ones((1, 1))]), np.ones(2, np.float16), np.ones(2), rounds=1)


@pytest.mark.slow
def test_a_client_s_step_that_is_none_is_a_twentieth_of_the_servers():
    """A client's step that is None is a twentieth of the server's step, or of the smallest one of several steps."""
    problem, _, _ = stiffening(10.0)
    step = fb.XYV(x=0.02, y=STEP, v=STEP)
    steps = fb.XYV(*(size / 20 for size in step))
    common = {"local_steps": 3, "batch_size": None, "server_lr": step}
    engine = fb.Reference()
    one, other = (played(fb.SimFBO(client_lr=own, **common), problem, 3, engine=engine) for own in (None, steps))
    np.testing.assert_allclose(one.y, other.y, rtol=1e-12)
    given = {"outer_lr": 0.02, "hypergradient": LocalImplicit(solver=Neumann(step=STEP)), "batch_size": None}
    inner = {"rounds": 2, "lr": [STEP, STEP / 2], "local_steps": 3}
    one, same, other = (
        played(fb.AFBO(inner=MeanGradient(client_lr=own, **inner), **given), problem, 3, engine=engine)
        for own in (None, STEP / 40, STEP / 20)
    )
    np.testing.assert_allclose(one.y, same.y, rtol=1e-12)
    assert np.max(np.abs(other.y / one.y - 1)) > 1e-3


@pytest.mark.parametrize(
    "name", ["SimFBO", *(pytest.param(name, marks=pytest.mark.slow) for name in ("FedNest", "AggITD"))]
)
def test_engines_agree_and_a_run_goes_on_with_the_same_bits(name, tmp_path):
    problem, _, _ = stiffening(10.0)
    method = half(METHODS[name])
    whole = played(method, problem, 4, cohort=2)
    once = played(method, problem, 4, cohort=2, engine=fb.Reference())
    for one, other in zip(jax.tree.leaves(whole.state), jax.tree.leaves(once.state), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)
    played(method, problem, 2, cohort=2, checkpoint=tmp_path / "c.npz")
    again = played(method, problem, 4, cohort=2, checkpoint=tmp_path / "c.npz", resume=True)
    assert all(map(np.array_equal, jax.tree.leaves(whole.state), jax.tree.leaves(again.state)))


@pytest.mark.slow
def test_a_compositional_problem_has_an_inner_hessian_that_is_the_identity():
    """In a compositional problem L is 1, and y steps to r(x) at once, as with AdaptiveSteps(y_lr=1)."""
    mean = fb.Compositional(lambda y, batch: jnp.vdot(y, y) / 2, lambda x, batch: x * jnp.mean(batch))
    clients = fb.Clients([np.ones((2, 1)), np.ones((2, 1))])
    run = fb.solve(fb.FedNest(batch_size=None), mean, clients, np.ones(3), np.zeros(3), rounds=60, eval_every=1)
    assert run.history["curvature"][-1] == pytest.approx(1, rel=1e-6)
    assert np.linalg.norm(run.x) < 0.1  # x begins at a norm of √3


def test_what_cannot_be_adapted_says_why():
    problem = stiffening(10.0)[0]
    steps, sentinel = fb.AdaptiveSteps(fb.SimFBO()), object()
    given, (_, clients) = fixed(fb.SimFBO()), problem
    small = fb.Clients(clients.outer, clients.inner, capacity=0.5)
    own = fb.Clients(clients.outer, clients.inner, own={"client_lr.x": 0.1, "client_lr.v": 0.1})
    for make, refusal in (
        (lambda: fb.AdaptiveSteps(fb.SimFBO(), y_lr=2.0), ("AdaptiveSteps.y_lr", 2.0, "below 2")),
        (
            lambda: fb.AdaptiveSteps(fb.SimFBO(), y_lr=np.float32(2.5)),
            ("AdaptiveSteps.y_lr", np.float32(2.5), "below 2"),
        ),
        (lambda: fb.AdaptiveSteps(fb.SimFBO(), x_lr=float("inf")), ("AdaptiveSteps.x_lr", float("inf"))),
        (lambda: played(fb.SimFBO(), (problem[0], own), 1), ("Clients.own[client_lr.v]", "given", "server_lr")),
        (lambda: fb.AdaptiveSteps(fb.FedAvg()), ("AdaptiveSteps.algorithm", ANY, "None")),
        (lambda: fb.AdaptiveSteps(given), ("AdaptiveSteps.algorithm", ANY, "None")),
        (
            lambda: fb.AdaptiveSteps(steps),
            ("", ANY, "around SimFBO, 'steps': AdaptiveSteps and AdaptiveSteps"),
        ),
        (
            lambda: fb.Asynchronous(steps, wait_for=1),
            ("", ANY, "SimFBO cannot be Asynchronous"),
        ),
        (
            lambda: played(fb.Asynchronous(fb.SimFBO(), wait_for=1), problem, 1),
            ("", ANY, "server_lr.x, server_lr.y, server_lr.v"),
        ),
        (
            lambda: played(fb.SimFBO(), (problem[0], small), 1),
            ("", ANY, "SimFBO needs step sizes if clients have capacities"),
        ),
        (lambda: fb.Submodels(steps), ("", ANY, "SimFBO cannot be given Submodels")),
        (
            lambda: played(fb.Submodels(fb.FedNest()), problem, 1),
            ("", ANY, "hypergradient.solver.step, outer_lr, inner.lr"),
        ),
    ):
        with refuses(*refusal):
            make()
    assert jax.tree.map(lambda leaf: sentinel, steps).steps.y_lr is sentinel  # JAX's placeholders are not checked
    assert "depends on its data" in steps.allows.noise.why
    assert "the server's x" in steps.allows.local_x.why


@pytest.mark.slow
def test_a_long_series_by_steps_measured_there_is_the_inverse():
    """A series of 200 terms with s = 1/L is the inverse up to (1 − 1/κ)^200, which is 1e-9 at κ = 10."""
    task = quadratic(clients=3, dim_x=2, dim_y=3, samples=(2, 2), condition=10.0)
    whole = Implicit(solver=Neumann(terms=200))
    method = fb.FedNest(hypergradient=whole, batch_size=None)
    report = fb.check_hypergradient(task.problem, task.clients, task.x0 + 0.1, task.y0, estimators={"found": method})
    assert report["found"].relative_error < 1e-6


def test_an_estimate_apart_from_rounds_is_by_steps_measured_there():
    """check_hypergradient estimates a hypergradient apart from rounds, with steps that it measures there. A series of
    50 terms with s = 1/L is the inverse up to (1 − 1/κ)^50, which is 2e-9 at κ = 3. Each client of LFedNest has its
    own series, and the row "local" is the mean of the clients' exact hypergradients."""
    task = quadratic(clients=3, dim_x=2, dim_y=3, samples=(2, 2), condition=3.0)
    method = fb.LFedNest(hypergradient=fb.parts.LocalImplicit(solver=Neumann(terms=50)), batch_size=None)
    given = task.problem, task.clients, task.x0 + 0.1, task.y0
    report = fb.check_hypergradient(*given, estimators={"found": method}, draws=1)
    assert report["local"].relative_error > 1e-2
    np.testing.assert_allclose(report["found"].relative_error, report["local"].relative_error, rtol=1e-7)


@pytest.mark.slow
def test_where_clients_would_keep_much_they_begin_anew(monkeypatch):
    """If clients would have to keep too much, they start the power method anew at each measurement. No client state is
    then as large as y, measurements after the first take ten products in place of three, and the method ends at the
    same point."""
    problem, x, y = stiffening(10)
    method, sizes, begin = half(EXACT["SimFBO"]).algorithm, [], fb.Local.start

    def watched(engine, algorithm, problem, clients, cohort, key, carry):
        sizes.append(max(leaf.size for leaf in jax.tree.leaves(carry.clients)))
        return begin(engine, algorithm, problem, clients, cohort, key, carry)

    monkeypatch.setattr(fb.Local, "start", watched)
    ends = []
    for most in (3 * DIM * 8, 3 * DIM * 8 - 1):
        monkeypatch.setattr("fedbilevel.engines.solve.KEPT", most)
        ends.append(played(method, problem, 7))
    assert sizes == [3 * DIM, 3]
    assert ends[1].ledger.hvps - ends[0].ledger.hvps == 3 * 6 * (10 - 3)  # 3 clients, 6 rounds
    end = fb.solve(
        fb.AdaptiveSteps(method, y_lr=0.5, remember=False), *problem, jnp.zeros(()), jnp.zeros(DIM), rounds=2500
    )
    np.testing.assert_allclose(end.x, x, rtol=1e-2)
    np.testing.assert_allclose(end.y, y, rtol=1e-2, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("method", [fb.RABO, fb.LFedNest, fb.AFBO])
def test_batches_of_almost_no_curvature_do_not_make_a_client_step_far(method):
    """Batches with almost no curvature do not make a client's step so long that x leaves its solution, near 1. Most
    samples have a curvature of 2e-7, and the others of 2, so that 1/L_i may be 5e6 on a batch of one sample."""
    rng = np.random.default_rng(0)
    samples = {"a": np.where(rng.random((6, 20, 1)) < 0.3, 1.0, 1e-7)}
    targets = {"t": 1 + 0.1 * rng.normal(size=(6, 20, 2))}
    problem = fb.Bilevel(
        lambda x, y, batch: jnp.mean((y - batch["t"]) ** 2),
        lambda x, y, batch: jnp.mean(batch["a"] * (y - x) ** 2) + 1e-6 * jnp.sum(y**2),
    )
    result = fb.solve(
        method(batch_size=1), problem, fb.Clients(targets, samples), np.zeros(2), np.zeros(2), rounds=100, key=1
    )
    assert np.all(np.abs(result.x - 1) < 0.2)

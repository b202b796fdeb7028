"""Do RABO and RAFBO compute their equations, and is each estimator what it claims to be?

The quadratic task is heterogeneous and weighted, and its cross terms have no symmetry. Float64 is on (conftest.py).
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import WORK, Case
from alone import client_alone
from matrices import end_of_own, fedavg_on_y, hypergradient, members, neumann, outer_gradient

import fedbilevel as fb
from fedbilevel.algorithms.rabo import CoordinateSlopes
from fedbilevel.engines.recorder import count
from fedbilevel.tasks.compositional import compositional
from fedbilevel.tasks.quadratic import quadratic, solution
from fixed_steps import fixed
from refusals import ANY, refuses

AGREEMENT = {
    "RABO": Case(
        fixed(
            fb.RABO(
                batch_size=4,
                inner=fb.parts.LocalSGD(rounds=2),
                hypergradient=fb.parts.LocalImplicit(solver=fb.parts.Neumann(terms=3, sampling="random")),
            )
        ),
        work=(1, 4),
        slow=True,
    ),
    "RABO, global, by differences": Case(
        fixed(
            fb.RABO(
                batch_size=4,
                hypergradient=fb.parts.Implicit(
                    solver=fb.parts.Neumann(terms=2, sampling="random"),
                    second_order=fb.parts.Differences(perturbation=0.5),
                ),
            )
        ),
        slow=True,
    ),
    "RAFBO, printed": Case(
        fixed(fb.RAFBO(batch_size=4, hypergradient=fb.parts.PrintedSlopes(count=2, perturbation=1.0))), slow=True
    ),
    "RAFBO, drawn coordinates": Case(
        fixed(fb.RAFBO(batch_size=4, hypergradient=fb.parts.Coordinates(count=2, terms=2, perturbation=1.0))),
        work=WORK,
        slow=True,
    ),
}

CONDITION, TERMS = 5, 60  # with s = 1/ℓ = 1 the series is off by (1 − 1/κ)^60 < 2e-6
STEPS = {"inner": fb.parts.LocalSGD(local_steps=1, lr=1.0), "batch_size": None, "outer_lr": 0.2}
SERIES, SHORT = fb.parts.Neumann(terms=TERMS, step=1.0), fb.parts.Neumann(terms=3, step=0.7)
ONCE = fb.parts.Coordinates(terms=1, step=0.3)
X, Y = np.array([0.3, -1.0, 0.5]), np.array([1.0, 0.2, -0.7, 0.4])


def rabo(solver, kind=fb.parts.LocalImplicit):
    return fixed(fb.RABO(hypergradient=kind(solver=solver), **STEPS))


def rafbo(solver):
    return fixed(
        fb.RAFBO(hypergradient=fb.parts.LocalImplicit(solver=solver, second_order=fb.parts.Differences()), **STEPS)
    )


LOCAL = {
    "RABO, cg": rabo(fb.parts.CG(tolerance=1e-12)),
    "adjoint": rafbo(SERIES),
    "coordinate": fixed(fb.RAFBO(hypergradient=fb.parts.Coordinates(terms=TERMS, step=1.0), **STEPS)),
    "RABO, 3 terms": rabo(SHORT),
    "adjoint, 3 terms": rafbo(SHORT),
    "coordinate, 3 terms": fixed(fb.RAFBO(hypergradient=fb.parts.Coordinates(terms=3, step=0.7), **STEPS)),
    "coordinate, 1 term": fixed(fb.RAFBO(hypergradient=ONCE, **STEPS)),
    "printed": fixed(fb.RAFBO(hypergradient=fb.parts.PrintedSlopes(), **STEPS)),
}
GLOBAL = {
    "RABO, global": rabo(SERIES, fb.parts.Implicit),
    "adjoint, global": fixed(
        fb.RABO(hypergradient=fb.parts.Implicit(solver=SERIES, second_order=fb.parts.Differences()), **STEPS)
    ),
}


def run(algorithm, task, rounds, x0=None, y0=None, **options):
    x0, y0 = task.x0 if x0 is None else x0, task.y0 if y0 is None else y0
    return fb.solve(algorithm, task.problem, task.clients, x0, y0, rounds=rounds, **options)


def off(x, exact):
    return float(np.linalg.norm(x - exact) / np.linalg.norm(exact))


@pytest.fixture(scope="module")
def task():
    return quadratic(clients=5, dim_x=3, dim_y=4, condition=CONDITION, noise=0.0, samples=(2, 4))


def one_client(task):
    return client_alone(task.problem, task.clients.outer.row(0), task.clients.inner.row(0))


def ask_alone(method, client, at, key):
    """Return the reply of a client that computes its own hypergradient; the update has only this hypergradient."""
    if isinstance(method.hypergradient, CoordinateSlopes):
        return method.hypergradient.slopes(client, at, key)
    reply = method.hypergradient.local_hypergradient(client, at, key)
    return reply._replace(update=reply.update[0])


@pytest.fixture(scope="module")
def replies(task):
    """Return, for each method, the reply of one client that is asked for its hypergradient at (X, Y)."""

    @jax.jit
    def ask(x, y):
        at, key = (x, y), jax.random.key(0)
        return {name: ask_alone(method, one_client(task), at, key) for name, method in LOCAL.items()}

    return ask(jnp.asarray(X), jnp.asarray(Y))


@pytest.fixture(scope="module")
def dense(task):
    """Return this client's ∇x f, and the rest of its hypergradient, which comes through y."""
    _, f, g = members(task)[0]
    direct = X + f["E"] @ Y
    return direct, hypergradient(f, g, X, Y, np.linalg.solve(g["A"], outer_gradient(f, X, Y))) - direct


def through_y(replies, name, dense):
    return np.asarray(replies[name].update) - dense[0]


@pytest.mark.parametrize("name", ["RABO, cg", "adjoint", "coordinate"])
def test_estimates_are_the_dense_hypergradient(name, replies, dense):
    assert off(through_y(replies, name, dense), dense[1]) < 1e-5


def test_differences_see_the_same_series(replies, dense):
    """Differences give the same short series as exact products, up to rounding of size ε^⅔ or ε^½ times 10.

    Quadratic losses have no third derivatives, so that nothing else is left. The numbers have a size of up to 10.
    """
    exact, adjoint, coordinate = (
        through_y(replies, f"{name}, 3 terms", dense) for name in ("RABO", "adjoint", "coordinate")
    )
    assert off(exact, dense[1]) > 0.01
    assert off(adjoint, exact) < 10 * np.finfo(float).eps ** (2 / 3)
    assert off(coordinate, exact) < 10 * np.finfo(float).eps ** (1 / 2)


def test_what_is_printed_points_the_other_way(replies, dense):
    """The direction printed in the paper points away from the hypergradient.

    One inner step s makes −s times the printed δ. Through y, the printed direction is −Bᵀb where BᵀA⁻¹b is wanted, and
    A is positive definite. The cosine is −0.86 here, and −0.95 in the median over 200 draws of the task.
    """
    printed, once = (through_y(replies, name, dense) for name in ("printed", "coordinate, 1 term"))
    assert off(once, -ONCE.step * printed) < 1e-6
    cosine = printed @ dense[1] / np.linalg.norm(printed) / np.linalg.norm(dense[1])
    assert cosine < -0.5


def test_counts(replies):
    """The counts of a hypergradient are those of its equations.

    ∇x f and ∇y f take one pass. Then follow N products, or N pairs of gradients, or N steps from x and from each of the
    d = 3 points beside it.
    """
    gradients = {name: int(reply.gradients) for name, reply in replies.items()}
    products = {name: int(reply.hvps) for name, reply in replies.items()}
    assert (gradients["RABO, 3 terms"], products["RABO, 3 terms"]) == (1, 3)
    assert gradients["adjoint, 3 terms"] == 1 + 2 * 3
    assert gradients["coordinate, 3 terms"] == 1 + 3 * (1 + 3)
    assert gradients["printed"] == 1 + (1 + 3)
    assert all(count == 0 for name, count in products.items() if "RABO" not in name)


def test_drawn_coordinates_are_unbiased(task):
    """The mean over drawn coordinates is the hypergradient.

    With d the number of coordinates of x, and P those that are drawn, a draw has what comes through y along P, times
    d/|P|, and nothing elsewhere. Each coordinate is in a share |P|/d of 3,000 draws, within five standard errors.
    """
    count = 2
    algorithm = fixed(fb.RAFBO(hypergradient=fb.parts.Coordinates(count=count, terms=3, step=0.7), **STEPS))
    _, f, g = members(task)[0]
    direct = X + f["E"] @ Y
    rest = hypergradient(f, g, X, Y, neumann(g["A"], 0.7, 3) @ outer_gradient(f, X, Y)) - direct
    at = (jnp.asarray(X), jnp.asarray(Y))
    own = jax.vmap(lambda key: ask_alone(algorithm, one_client(task), at, key))
    drawn = np.asarray(jax.jit(own)(jax.random.split(jax.random.key(0), 3_000)).update) - direct
    chosen = np.abs(drawn) > 1e-6
    assert np.all(chosen.sum(1) == count)
    np.testing.assert_allclose(drawn, chosen * 3 / count * rest, atol=1e-6)
    share = count / 3
    assert np.all(np.abs(chosen.mean(0) - share) < 5 * np.sqrt(share * (1 - share) / len(drawn)))


@pytest.mark.parametrize(
    ("kind", "sign"),
    [(fb.parts.PrintedSlopes(), -1), (fb.parts.Coordinates(terms=1, step=1.0), 1)],
    ids=["printed", "coordinates"],
)
def test_the_squared_error_of_slopes_goes_as_the_square_of_the_perturbation(kind, sign):
    """The squared error of slopes is in proportion to the square of the perturbation μ.

    ∇y g_i = y − c_i x²/2, entry by entry, is not linear in x. Equation (10) gives −c_i (x + μ/2). One step s = 1 from y
    goes to c_i x²/2, whose difference quotient in x is c_i (x + μ/2).

    After a round on y, y = c̄x²/2. With w_i = ∇y f_i = y − t_i the round's h is ±Σ p_i c_i w_i (x + μ/2). Its squared
    error, as an estimate of the slopes, is μ²/4 Σ_p (Σ_i p_i c_ip w_ip)². The bound of Lemma 3, 2|P| ℓ² μ² ‖∇y f‖²/4,
    holds for it if ℓ is the Lipschitz constant of ∇²xy g: see test_errata.py.
    """

    def inner(x, y, batch):
        return y @ y / 2 - y @ (jnp.mean(batch["c"], axis=0) * x**2) / 2

    problem = fb.Bilevel(lambda x, y, b: jnp.sum((y - jnp.mean(b["t"], axis=0)) ** 2) / 2, inner)
    rng, p = np.random.default_rng(0), np.array([0.5, 0.2, 0.3])
    t, c = rng.normal(size=(2, 3, 3))
    clients = fb.Clients({"t": t[:, None]}, {"c": c[:, None]}, weights=p)

    def h(mu):
        method = fixed(fb.RAFBO(hypergradient=replace(kind, perturbation=mu), **STEPS))
        return (X - fb.solve(method, problem, clients, X, np.zeros(3), rounds=1).x) / method.outer_lr

    w = (p @ c) * X**2 / 2 - t
    for mu in (0.1, 0.2):
        error = h(mu) - sign * (p @ (c * w)) * X
        np.testing.assert_allclose(error @ error, mu**2 / 4 * np.sum((p @ (c * w)) ** 2), rtol=1e-9)
        assert error @ error <= 2 * 3 * np.max(c**2) * mu**2 * np.max(np.sum(w**2, axis=1)) / 4


def test_equals_the_equations_written_out(task):
    """Three rounds of RABO equal the equations in NumPy, with two inner rounds of two steps each."""
    inner = fb.parts.LocalSGD(rounds=2, local_steps=2, lr=0.5)
    algorithm = fixed(
        fb.RABO(inner=inner, hypergradient=fb.parts.LocalImplicit(solver=SHORT), outer_lr=0.2, batch_size=None)
    )
    x, y = X, Y
    for _ in range(3):
        for _ in range(2):
            y = fedavg_on_y(task, x, y, [2] * 5, 0.5)
        vs = [neumann(g["A"], 0.7, 3) @ outer_gradient(f, x, y) for _, f, g in members(task)]
        x = x - 0.2 * sum(p * hypergradient(f, g, x, y, v) for (p, f, g), v in zip(members(task), vs, strict=True))
    result = run(algorithm, task, 3, X, Y)
    np.testing.assert_allclose(result.x, x, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(result.y, y, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["RABO, cg", "RABO, global", "adjoint, global"])
def test_ends_where_its_hypergradients_vanish(name, task):
    """Methods with a global hypergradient end at x*; the others end where the mean of clients' own hypergradients is 0.

    The latter point is not x*. With one local step, inner rounds by FedAvg do not move y away from y*(x). A round has T
    + N + 1 exchanges with a global hypergradient, and T + 1 with clients' own.
    """
    exact, biased = solution(task.clients).x, end_of_own(task)
    assert off(biased, exact) > 0.05
    everywhere = name in GLOBAL
    result = run((LOCAL | GLOBAL)[name], task, 300)
    assert off(result.x, exact if everywhere else biased) < 1e-6
    assert result.ledger.exchanges == 300 * (1 + TERMS + 1 if everywhere else 2)
    if name == "adjoint, global":  # of 5 clients: one on y, one for ∇y f, two for each of N products, and one for ∇x f
        assert (result.ledger.gradients, result.ledger.hvps) == (300 * 5 * (1 + 1 + 2 * TERMS + 1), 0)


@pytest.mark.slow
def test_on_whole_models_methods_of_other_papers_are_the_same(task):
    """On whole models, LFedNest is RABO, and FedNest-SGD is FedMBO, if batches are full and there is one step on x.

    FedNest-SGD has one more exchange, whose drifts are 0. Sums in another order are off by rounding.
    """
    everyone, alone = fb.parts.Implicit(solver=SHORT), fb.parts.LocalImplicit(solver=SHORT)
    fields = {"inner": fb.parts.LocalSGD(rounds=2, lr=1.0), "outer_lr": 0.2, "batch_size": None}
    ends = []
    for method, other, kind, more in ((fb.FedMBO, fb.FedNestSGD, everyone, 1), (fb.RABO, fb.LFedNest, alone, 0)):
        one, same = (run(which(hypergradient=kind, **fields), task, 3) for which in (method, other))
        np.testing.assert_allclose(same.x, one.x, rtol=1e-13)
        np.testing.assert_allclose(same.y, one.y, rtol=1e-13)
        assert same.ledger.exchanges == one.ledger.exchanges + 3 * more
        ends.append(one.x)
    assert off(*ends) > 1e-3  # the two pairs differ, since the clients differ


@pytest.mark.slow
def test_with_products_that_are_means_over_all_it_is_fedmbo_draw_by_draw():
    drawn = quadratic(clients=5, dim_x=3, dim_y=4, condition=CONDITION, samples=(3, 3)).with_own(local_steps=(1, 3))
    fields = {"hypergradient": fb.parts.Implicit(solver=SHORT), "batch_size": 2}
    engine = fb.Reference()
    rabo, fedmbo = (run(method(**fields), drawn, 3, cohort=3, engine=engine) for method in (fb.RABO, fb.FedMBO))
    assert np.array_equal(rabo.x, fedmbo.x)
    assert np.array_equal(rabo.y, fedmbo.y)
    assert np.all(rabo.x != drawn.x0)
    assert np.all(rabo.y != drawn.y0)


def test_problems_that_need_no_inverse():
    """A compositional problem, in which v = ∇y f, needs no inverse; differences along coordinates solve it as well."""
    task = compositional(clients=4)
    x, y = (jnp.arange(1.0, 1.0 + start.size).reshape(start.shape) for start in (task.x0, task.y0))
    ask = jax.jit(lambda method: ask_alone(method, one_client(task), (x, y), jax.random.key(0)).update)
    exact = ask(fixed(fb.RABO(batch_size=None)))
    assert float(jnp.linalg.norm(exact)) > 1e-3
    np.testing.assert_allclose(
        ask(fixed(fb.RAFBO(hypergradient=fb.parts.Coordinates(), batch_size=None))), exact, rtol=1e-8
    )


@pytest.mark.parametrize(
    ("make", "refusal"),
    [
        (lambda: rabo(fb.parts.CG(), fb.parts.Implicit), ("RABO.hypergradient", ANY, "CG")),
        (
            lambda: rabo(fb.parts.Neumann(sampling="random_per_client"), fb.parts.Implicit),
            ("RABO.hypergradient", ANY, "Neumann(sampling=None or 'random')"),
        ),
        (
            lambda: fixed(fb.RABO(hypergradient=fb.parts.Coordinates())),
            ("RABO.hypergradient", ANY, "LocalImplicit(…) or Implicit(…)"),
        ),
        (
            lambda: fixed(fb.RAFBO(hypergradient=fb.parts.LocalImplicit())),
            ("RAFBO.hypergradient.second_order", ANY, "Differences(…)"),
        ),
        (
            lambda: fixed(fb.RAFBO(hypergradient=fb.parts.Implicit())),
            ("RAFBO.hypergradient", ANY, "LocalImplicit(…) or Coordinates(…) or PrintedSlopes(…)"),
        ),
        (lambda: fb.parts.PrintedSlopes(paired=True), ("field of PrintedSlopes", "paired")),
        (lambda: fb.parts.Implicit(paired=True), ("field of Implicit", "paired")),
        (lambda: fb.parts.Differences(perturbation=0.0), ("Differences.perturbation", 0.0)),
    ],
)
def test_wrong_fields(make, refusal):
    with refuses(*refusal):
        make()


PIXELS = 23
PAIRED = fb.parts.LocalImplicit(paired=True)
PAIRED_BY_DIFFERENCES = fb.parts.LocalImplicit(paired=True, second_order=fb.parts.Differences())
NINE = fb.parts.Neumann(terms=9)


def hypergradient_program(part, pixels, batch_size):
    """Return the program of a client's own hypergradient, where x is a layer of four features of `pixels` pixels."""

    def loss(x, y, batch):
        return jnp.mean((jnp.tanh(batch @ x) @ y) ** 2) + jnp.sum(y**2)

    images = jnp.ones((6, pixels))
    client = client_alone(fb.Bilevel(loss, loss), images, images, batch_size=batch_size)
    x, y = jnp.ones((pixels, 4)), jnp.ones(4)

    part = fixed(part)

    def own(key):
        if isinstance(part, CoordinateSlopes):
            return part.slopes(client, (x, y), key).update
        return part.own(client, x, y, key).h

    return jax.make_jaxpr(own)(jax.random.key(0)).jaxpr


def loops(jaxpr):
    """Yield the bodies of all loops in a program, as text."""
    for equation in jaxpr.eqns:
        for inner in (value for value in equation.params.values() if hasattr(value, "jaxpr")):
            if equation.primitive.name in ("while", "scan"):
                yield str(inner)
            yield from loops(inner.jaxpr)


@pytest.mark.parametrize(
    ("part", "batch_size"),
    [
        (PAIRED, 2),
        (fb.parts.LocalImplicit(solver=fb.parts.CG()), 2),
        (fb.parts.LocalImplicit(solver=NINE), 2),
        (fb.parts.LocalImplicit(), None),
        (PAIRED_BY_DIFFERENCES, 2),
        (fb.parts.LocalImplicit(solver=NINE, second_order=fb.parts.Differences()), 2),
    ],
    ids=range(6),
)
def test_products_do_not_see_what_features_were_made_of(part, batch_size):
    inside = list(loops(hypergradient_program(part, PIXELS, batch_size)))
    assert inside
    assert not any(f"{PIXELS}" in body for body in inside)


def test_pairs_need_a_partner_each():
    clients = fb.Clients([np.ones((3, 1))], [np.ones((2, 1))])
    problem = fb.Bilevel(lambda x, y, b: jnp.sum(x * y), lambda x, y, b: jnp.sum((x - y) ** 2))
    with refuses("LocalImplicit.paired", True, "(3, 2)"):
        fb.solve(fixed(fb.RABO(hypergradient=PAIRED)), problem, clients, jnp.ones(1), jnp.ones(1), rounds=1)


@pytest.mark.slow
def test_a_pairs_step_is_checked_against_a_batch():
    """The step of a series on pairs is checked against the curvature of the samples of an estimate: a batch, or all.

    Sample s curves only y_s, by 8. The largest eigenvalue of all four samples is 2, and that of two samples is 4, or 8
    if one is drawn twice: 0.6·4 ≥ 2 > 0.6·2.
    """

    def inner(x, y, batch):
        return 4 * jnp.mean(jnp.sum(batch * (y - x) ** 2, axis=1))

    problem = fb.Bilevel(lambda x, y, batch: jnp.mean(batch @ y), inner)
    clients, start = fb.Clients([np.eye(4)], [np.eye(4)]), (jnp.ones(4), jnp.ones(4))

    def once(batch_size, paired, all_samples=False):
        series = fb.parts.Neumann(step=0.6)
        hypergradient = fb.parts.LocalImplicit(solver=series, paired=paired, all_samples=all_samples)
        algorithm = fixed(fb.RABO(inner=fb.parts.LocalSGD(lr=0.1), hypergradient=hypergradient, batch_size=batch_size))
        fb.solve(algorithm, problem, clients, *start, rounds=1, engine=fb.Reference())

    once(2, paired=False)
    once(32, paired=True)  # a batch of all samples
    once(2, paired=True, all_samples=True)
    with refuses("Neumann.step", 0.6, "below 2/ℓ = 0."):
        once(2, paired=True)


def passes(part, pixels=10_000):
    """Return how often a client's hypergradient goes through the pixels of its samples.

    This is the number of operations, divided by the operations of a product of 2 samples with a matrix of 4 features.
    """
    return count(hypergradient_program(part, pixels, 2)) / (2 * 2 * pixels * 4)


@pytest.mark.parametrize("part", [PAIRED, PAIRED_BY_DIFFERENCES], ids=["exact", "differences"])
def test_a_pair_sees_its_samples_once(part):
    """A hypergradient on pairs goes through the pixels of its samples twice for f and twice for g.

    For each loss it computes the features, and then ∇x by differentiating backwards through them. Each of these passes
    takes 2·pixels·4 operations for each of the batch's 2 samples. All other operations on arrays like x are one for
    each entry.
    """
    assert 2 * 2 <= passes(part) < 5  # the rest: ∇x f − ∇²xy g v and the like


def test_each_printed_slope_takes_a_pass_of_its_own():
    """Each slope of the printed equation (10) takes a pass, so that (10) takes no fewer passes than the hypergradient
    (7).

    Both take two passes for f. For g, (10) takes one pass at x, and one at a shifted x for each of |P| slopes; (7)
    takes two. If (7) uses differences of gradients, it takes as many passes as with exact products, except for products
    on the 4 features, which are small beside 10,000 pixels.
    """
    one, nine = (passes(fb.parts.PrintedSlopes(count=count)) for count in (1, 9))
    assert nine - one == pytest.approx(8, rel=0.01)
    assert 2 + 1 + 1 <= one < 5.5  # the rest: ‖x‖, h and the like, a quarter for each entry of x
    assert one > passes(PAIRED)
    assert passes(PAIRED_BY_DIFFERENCES) == pytest.approx(passes(PAIRED), rel=5e-3)


def test_both_ends_of_a_difference_see_the_samples_once():
    """A difference of two gradients goes through the samples once, not once for each of its two points.

    With N = 2, the product has a batch of its own, whose features are computed once for both points. With exact
    products, f takes two passes, ∇²xy g two, and the product one.
    """
    twice = fb.parts.Neumann(terms=2)
    exact, differences = (
        passes(fb.parts.LocalImplicit(solver=twice, second_order=kind))
        for kind in (fb.parts.LocalImplicit().second_order, fb.parts.Differences())
    )
    assert 2 + 2 + 1 <= exact < 6
    assert differences == pytest.approx(exact, rel=5e-3)


@pytest.mark.slow
def test_each_hypergradient_is_asked_for_by_itself(task):
    """check_hypergradient can estimate RAFBO's and RABO's hypergradients apart from a run, but not AFBO's.

    At y*(x), RAFBO's estimate with `Coordinates` is the mean of the clients' own hypergradients, and RABO's is too.
    AFBO needs a v that only a run has.
    """
    alone = {
        "slopes": fixed(fb.RAFBO(hypergradient=fb.parts.Coordinates(terms=TERMS, step=1.0), batch_size=None)),
        "own": fixed(fb.RABO(hypergradient=fb.parts.LocalImplicit(solver=SERIES), batch_size=None)),
    }
    given = task.problem, task.clients, task.x0, task.y0
    report = fb.check_hypergradient(*given, estimators=alone, draws=1)
    assert report["slopes"].relative_error == pytest.approx(report["own"].relative_error, rel=1e-5)
    steps = fixed(fb.AFBO(hypergradient=fb.parts.SystemSteps()))
    with refuses("", fact="SystemSteps "):
        fb.check_hypergradient(*given, estimators={"steps": steps}, draws=1)

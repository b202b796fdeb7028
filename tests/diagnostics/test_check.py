"""Does check_hypergradient agree with closed forms on the quadratic task, and does it detect wrong estimators?"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.algorithms.fednest import LFedNest
from fedbilevel.core.algorithm import Algorithm, phase
from fedbilevel.core.client import Clients
from fedbilevel.core.config import positive
from fedbilevel.core.errors import NonFiniteError
from fedbilevel.core.fed import Reply
from fedbilevel.core.problem import Bilevel, Compositional, SingleLevel
from fedbilevel.diagnostics.check import check_hypergradient
from fedbilevel.oracles.exact import Inner
from fedbilevel.oracles.products import cross_v
from fedbilevel.tasks.quadratic import RIDGE, quadratic
from fedbilevel.tasks.saddle import saddle
from fixed_steps import fixed
from refusals import ANY, raises_with, refuses

EPS = np.finfo(np.float64).eps
CONDITION, TERMS, STEP, DRAWS = 10.0, 6, 0.9, 100
ROUNDING = 1000 * CONDITION * EPS  # two linear solves, and sums over clients, of numbers of order one


class Model(NamedTuple):
    """The coefficients of one client, or of the population, at one (x, y)."""

    f_x: np.ndarray
    f_y: np.ndarray
    hessian: np.ndarray
    cross: np.ndarray  # B, where ∇²xy g = −Bᵀ

    def hypergradient(self, inverse):
        return self.f_x + self.cross.T @ inverse @ self.f_y


@pytest.fixture(scope="module")
def task():
    return quadratic(clients=4, dim_x=4, dim_y=5, condition=CONDITION, samples=(2, 5), seed=3)


@pytest.fixture(scope="module")
def point():
    rng = np.random.default_rng(0)
    return rng.normal(size=4), rng.normal(size=5)


def models(clients, x, y):
    """Return each client's coefficients at (x, y)."""
    out = []
    for i in range(len(clients)):
        m = {k: a.mean(0) for rows in (clients.outer, clients.inner) for k, a in rows.row(i).items()}
        outer = clients.outer.row(i)
        dt = np.einsum("nij,nj->ni", outer["D"], outer["t"]).mean(0)
        out.append(Model(m["E"] @ y + RIDGE * x, m["D"] @ y - dt + m["E"].T @ x, m["A"], m["B"]))
    return out


def pooled(clients, own):
    return Model(
        *(sum(p * part for p, part in zip(clients.weights, parts, strict=True)) for parts in zip(*own, strict=True))
    )


def best_response(clients, x):
    own = models(clients, x, np.zeros(5))
    c = sum(p * clients.inner.row(i)["c"].mean(0) for i, p in enumerate(clients.weights))
    whole = pooled(clients, own)
    return np.linalg.solve(whole.hessian, whole.cross @ x + c)


class Noisy(Algorithm):
    """Estimate by ∇x f with normal noise of a known size.

    If `noise` is changed, the estimate changes, which shows that the method's numbers are used.
    """

    noise: float = positive(default=1.0)

    def init(self, x, y):
        raise AssertionError("the probe has a state of its own")

    def round(self, fed, state, key):
        raise AssertionError("the probe has rounds of its own")

    @phase
    def ask(self, client, at, key):
        x, y, v, noise = at
        grad = jax.grad(client.problem.outer)(x, y, client.outer_batch(key, None))
        cross = cross_v(client.problem, x, y, v, client.inner_batch(key, None))
        return Reply(grad - cross + noise)

    def hypergradient_at(self, fed, x, y, key):
        """Estimate with v = [∇²yy G]⁻¹ ∇y F, which the test sets as a constant."""
        noise = self.noise * jax.random.normal(key, x.shape)
        return fed.mean(self.ask, (x, y, jnp.asarray(Noisy.v), noise), key)


@pytest.fixture(scope="module")
def checked(task, point):
    """Return one report with right and wrong estimators, and what closed forms predict.

    The inputs are in float32, and JAX has the user's settings.
    """
    x, start = (np.asarray(a, np.float32).astype(np.float64) for a in point)
    y = best_response(task.clients, x)
    own = models(task.clients, x, y)
    whole = pooled(task.clients, own)
    h, eye = whole.hessian, np.eye(5)
    exact = whole.hypergradient(np.linalg.inv(h))
    powers = [np.linalg.matrix_power(eye - STEP * h, n) for n in range(TERMS)]
    wrong = [np.linalg.matrix_power(2 * eye - STEP * h, n) for n in range(TERMS)]
    given = {
        "right": lambda x, y: jnp.asarray(exact),
        "sign of v": lambda x, y: whole.hypergradient(-np.linalg.inv(h)),
        "(2I − ηH)": lambda x, y: whole.hypergradient(STEP * sum(wrong)),
        "y moves": lambda x, y: (
            jnp.asarray(exact) + 0 * x if np.allclose(y, best_response(task.clients, x)) else x * np.inf
        ),
        "noisy": Noisy(noise=0.5),
    }
    Noisy.v = np.linalg.solve(h, whole.f_y)
    report = check_hypergradient(
        task.problem,
        task.clients,
        jnp.asarray(x, jnp.float32),
        jnp.asarray(start, jnp.float32),
        estimators=given,
        steps=300,
        terms=TERMS,
        step=STEP,
        draws=DRAWS,
    )
    local = sum(p * m.hypergradient(np.linalg.inv(m.hessian)) for p, m in zip(task.clients.weights, own, strict=True))
    predicted = {
        "series": whole.hypergradient(STEP * sum(powers)),
        "local": local,
        "sign of v": whole.hypergradient(-np.linalg.inv(h)),
        "(2I − ηH)": whole.hypergradient(STEP * sum(wrong)),
    }
    return report, exact, predicted


def error(h, exact):
    return np.linalg.norm(h - exact) / np.linalg.norm(exact)


def test_the_yardstick_is_the_closed_form(checked):
    report, exact, _ = checked
    assert error(report.hypergradient, exact) <= ROUNDING
    assert report.hypergradient.dtype == np.float64
    assert not report.negative_curvature
    assert "less precision than float64" in str(report)


@pytest.mark.parametrize("name", ["cg", "right", "y moves", "unrolled"])
def test_what_is_right_is_said_to_be(checked, name):
    """Correct estimators are reported as correct.

    The error of unrolling is at most (1 − STEP·μ)^N (1 + N), where μ ≥ 1/κ of every client.
    """
    report, _, _ = checked
    truncation = (1 - STEP / CONDITION) ** 300 * 301 if name == "unrolled" else 0
    assert report[name].relative_error <= ROUNDING + 10 * truncation
    assert report[name].cosine == pytest.approx(1, abs=1e-8)


def test_finite_differences_agree_to_their_rounding(checked):
    """Finite differences agree to their rounding error, ε·|Φ|/h with h = ε^(1/3)·‖x‖.

    A direction takes four values, and slopes are of order one.
    """
    report, _, _ = checked
    assert report["finite differences"].relative_error <= 100 * EPS ** (2 / 3)


@pytest.mark.parametrize("name", ["series", "local", "sign of v", "(2I − ηH)"])
def test_errors_are_those_that_the_closed_form_predicts(checked, name):
    report, exact, predicted = checked
    expected = error(predicted[name], exact)
    assert expected > 1e-3
    assert report[name].relative_error == pytest.approx(expected, rel=1e-9)
    cosine = predicted[name] @ exact / np.linalg.norm(predicted[name]) / np.linalg.norm(exact)
    assert report[name].cosine == pytest.approx(cosine, rel=1e-9)


def test_an_algorithm_is_played_and_its_noise_measured(checked):
    """An algorithm is run, and the noise of its estimates is measured.

    It is unbiased, with 4 independent normal entries of deviation ½. The mean of n draws is then off by √(4/n)/2 on
    average. The estimate of this error from n draws has a relative standard deviation of about 1/√(8n), which is 3.5 %
    here. The test allows five such deviations.
    """
    report, exact, _ = checked
    row = report["noisy"]
    expected = 0.5 * 2 / np.sqrt(DRAWS) / np.linalg.norm(exact)
    assert row.standard_error == pytest.approx(expected, rel=5 / np.sqrt(8 * DRAWS))
    assert 0 < row.relative_error <= 4 * expected  # χ with 4 degrees of freedom is above 4·(½√4) once in 10⁶
    assert row.cost == "1 exchange"


def test_the_table_names_every_row(checked):
    report, _, _ = checked
    text = repr(report)
    assert all(row.name in text for row in report.rows)
    assert len(report.rows) == 10
    with refuses("estimate", "serie", near="series"):
        report["serie"]


def test_without_solving_the_yardstick_is_the_implicit_gradient_there(task, point):
    x, y = point
    report = check_hypergradient(task.problem, task.clients, x, y, solve_inner=False, steps=1)
    whole = pooled(task.clients, models(task.clients, x, y))
    assert error(report.hypergradient, whole.hypergradient(np.linalg.inv(whole.hessian))) <= ROUNDING
    c = sum(p * task.clients.inner.row(i)["c"].mean(0) for i, p in enumerate(task.clients.weights))
    inner = np.linalg.norm(whole.hessian @ y - whole.cross @ x - c)
    assert report.inner_gradient == pytest.approx(inner, rel=1e-12)
    assert "finite differences" not in {row.name for row in report.rows}
    assert "only if the inner gradient is 0" in str(report)


@pytest.mark.slow
def test_compositions_and_models_with_functions_in_them():
    """Compositional problems, and models that contain functions, are checked correctly.

    Φ(x) = F(R(x)) has a gradient without Hessians. x contains its activation. Clients have unequal weights and sizes.
    """
    rng = np.random.default_rng(2)
    draw = lambda n: {"u": rng.normal(size=(n, 3)), "t": rng.normal(size=(n, 2))}  # noqa: E731
    weights = np.array([0.3, 0.7])
    clients = Clients(outer=[draw(3), draw(4)], inner=[draw(5), draw(2)], weights=weights)

    def outer(y, batch):
        return jnp.mean(jnp.log(jnp.cosh(y["z"] - batch["t"])))

    def response(x, batch):
        return {"z": jnp.mean(x["act"](batch["u"] @ x["w"]), axis=0)}

    def objective(w):
        rows = [clients.inner.row(i) for i in range(2)]
        z = sum(p * response({"w": w, "act": jnp.tanh}, row)["z"] for p, row in zip(weights, rows, strict=True))
        return sum(p * outer({"z": z}, clients.outer.row(i)) for i, p in enumerate(weights))

    def local(w):
        """Return Σ p_i Jᵢᵀ ∇f_i(R(w)), where every client uses its own Jacobian and its own ∇f_i."""
        total = 0
        for i, p in enumerate(weights):
            own = lambda w, i=i: response({"w": w, "act": jnp.tanh}, clients.inner.row(i))["z"]  # noqa: E731
            mean = sum(
                q * response({"w": w, "act": jnp.tanh}, clients.inner.row(j))["z"] for j, q in enumerate(weights)
            )
            slope = jax.grad(lambda z, i=i: outer({"z": z}, clients.outer.row(i)))(mean)
            total = total + p * jax.vjp(own, w)[1](slope)[0]
        return np.asarray(total)

    w = jnp.asarray(rng.normal(size=(3, 2)))
    exact = np.asarray(jax.grad(objective)(w))
    seen = []

    def mine(x, y):
        seen.append(x["act"] is jnp.tanh)
        return {"w": jax.grad(objective)(x["w"]), "act": None}

    x, y = {"w": w, "act": jnp.tanh}, {"z": np.zeros(2)}
    report = check_hypergradient(Compositional(outer, response), clients, x, y, estimators={"mine": mine})
    assert error(np.asarray(report.hypergradient["w"]).ravel(), exact.ravel()) <= ROUNDING
    assert report["mine"].relative_error <= ROUNDING
    assert report["local"].relative_error == pytest.approx(error(local(w).ravel(), exact.ravel()), rel=1e-9)
    assert (
        report["finite differences"].relative_error <= 1e-8
    )  # ε·|Φ|/h is 1e-10 with slopes of a tenth; ten times as much is allowed
    assert seen == [True]


def test_what_was_not_solved_or_has_no_inverse_is_said(monkeypatch):
    """A note says if the inner problem was not solved, and how many clients have a Hessian that is not definite.

    Of three clients with the inner loss ½ a_i y² − xy, one has a negative a_i, and the mean of the a_i is positive. A
    solver that stays at the start takes the place of Newton's method, which solves this problem.
    """
    problem = Bilevel(lambda x, y, b: (y - 1) ** 2 + x**2, lambda x, y, b: jnp.mean(b) * y**2 / 2 - x * y)
    clients = Clients([np.array([a]) for a in (3.0, -1.0, 2.0)])
    options = {"solve_inner": True, "steps": 1, "terms": 1}
    report = check_hypergradient(problem, clients, np.ones(()), np.full((), 4.0), **options)
    assert report["local"].note == "1 of 3 clients' own Hessians are not positive definite"
    assert not [note for note in report.notes if "NOT solved" in note]
    still = lambda population, x, y: Inner(y, *(np.zeros(()) + n for n in (7.0, 5, 0)), np.zeros((), bool))  # noqa: E731
    monkeypatch.setattr("fedbilevel.diagnostics.check.solve_inner", still)
    report = check_hypergradient(problem, clients, np.ones(()), np.full((), 4.0), **options)
    (said,) = [note for note in report.notes if "NOT solved" in note]
    assert said == "the inner problem was NOT solved: its gradient is 7.0e+00 after 5 Newton steps"


def test_an_indefinite_inner_hessian_is_reported():
    problem = Bilevel(
        lambda x, y, b: jnp.mean(b) * jnp.sum(y) + x @ x,
        lambda x, y, b: jnp.mean(b) * (y[0] ** 2 - 0.5 * y[1] ** 2) - x @ y,
    )
    clients = Clients(outer=[np.ones(2)], inner=[np.ones(1)])
    report = check_hypergradient(problem, clients, np.ones(2), np.ones(2), solve_inner=False, steps=5000, terms=1)
    assert report.negative_curvature
    assert "diverged" in report["unrolled"].note  # it grows as (1 + ½)^5000
    assert report.smallest_curvature == pytest.approx(-1, rel=1e-12)
    assert "NEGATIVE CURVATURE" in str(report)


@pytest.mark.slow
def test_clients_of_a_minimax_problem_invert_no_hessian():
    """In a minimax problem, clients invert no Hessian, and the mean of ∇x f_i is ∇Φ itself.

    y*(x) is that of the federation, where Σ p_i ∇y f_i = 0, although every client's own ∇y f_i is far from 0.
    """
    task = saddle(clients=6, dim=3, ridge=2.0, centred=False, weighted=True, general=True)
    played = {"LFedNest": fixed(LFedNest(batch_size=None))}
    report = check_hypergradient(task.problem, task.clients, task.x0, task.y0, steps=1, draws=1, estimators=played)
    assert report["local"].relative_error <= ROUNDING
    assert report["LFedNest"].relative_error <= ROUNDING
    assert "∇y F vanishes" in report["local"].note


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"x": np.array([0, np.nan, 0, 0])}, ("x", ["value"], "finite")),
        ({"x": np.zeros(3)}, ("", ANY, "x: shape (3,); y: shape (5,)")),
        (
            {"problem": SingleLevel(lambda x, batch: x @ x)},
            ("problem", "SingleLevel", "Bilevel, Minimax or"),
        ),
        ({"terms": 0}, ("terms", 0)),
        ({"step": -1}, ("step", -1)),
        ({"estimators": {"cg": lambda x, y: x}}, ("the name of an estimator", "cg")),
        ({"estimators": {"mine": lambda x, y: x[:2]}}, ("estimators['mine']", "(2,)", "(4,)")),
        ({"estimators": {"mine": Noisy}}, ("estimators['mine']", ANY, "function")),
    ],
)
def test_wrong_input_is_refused(task, options, refusal):
    with refuses(*refusal):
        check_with(task, **options)


def test_an_estimator_that_returns_nan_is_named(task):
    with raises_with(NonFiniteError, names=("mine",)):
        check_with(task, estimators={"mine": lambda x, y: x * np.nan})


def check_with(task, **options):
    given = {"problem": task.problem, "clients": task.clients, "x": task.x0, "y": task.y0, "solve_inner": False}
    return check_hypergradient(**{**given, "steps": 1, "terms": 1, **options})

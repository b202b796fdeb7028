"""Does diagnose measure what closed forms say, and do methods converge with the fields that it suggests?"""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel import authoring
from fedbilevel.core.errors import ConfigurationError
from fedbilevel.diagnostics.diagnose import diagnose
from fedbilevel.diagnostics.suggested import SUGGESTED
from fedbilevel.tasks.hyper_representation import hyper_representation
from fedbilevel.tasks.quadratic import RIDGE, quadratic, solution
from refusals import ANY, refuses

EPS = np.finfo(np.float64).eps
OTHERS = sorted(SUGGESTED.keys() - {"simfbo", "fednest"})


class Coefficients:
    """Means over the population, and matrices that follow from them."""

    def __init__(self, clients):
        mean = {}
        for i, p in enumerate(clients.weights):
            for name, value in {**clients.outer.row(i), **clients.inner.row(i)}.items():
                mean[name] = mean.get(name, 0) + p * value.mean(0)
        self.A, self.B, self.D, self.E = (mean[name] for name in "ABDE")
        late, jacobian = np.linalg.inv(self.A), np.linalg.solve(self.A, self.B)
        half = self.E @ jacobian + 0.5 * jacobian.T @ self.D @ jacobian
        self.hessian = RIDGE * np.eye(self.B.shape[1]) + half + half.T
        # y and v each lag by A⁻¹: y = A⁻¹Bx enters E y and D y, and v = A⁻¹(D y + Eᵀx) enters Bᵀv
        slow = late @ jacobian
        self.lag = self.E @ slow + slow.T @ self.E.T + slow.T @ self.D @ jacobian + jacobian.T @ self.D @ slow


@pytest.fixture(scope="module")
def drawn():
    task = quadratic(clients=4, dim_x=4, dim_y=5, condition=50, samples=(2, 5), seed=3)
    return task, diagnose(task.problem, task.clients, task.x0, task.y0), Coefficients(task.clients)


def ends(matrix):
    return np.linalg.eigvalsh(matrix)[[0, -1]]


def test_spectra_are_the_dense_ones(drawn):
    """The spectra equal those of dense matrices.

    Lanczos makes as many steps as there are dimensions. Systems are solved to 1e-6, and the response is no more
    precise.
    """
    task, found, exact = drawn
    assert [found.mu, found.smoothness] == pytest.approx(ends(exact.A), rel=1e-12)
    assert found.condition == pytest.approx(np.linalg.cond(exact.A), rel=1e-10)
    assert found.radius >= np.linalg.norm(solution(task.clients).v)
    assert found.outer_smoothness == pytest.approx(ends(exact.D)[1], rel=1e-12)
    phi, late = found.measurements.response.curvature, found.measurements.response.lag
    solves = 1e-5 * found.condition
    scale = np.abs(ends(exact.hessian)).max()
    np.testing.assert_allclose([phi.smallest, phi.largest], ends(exact.hessian), rtol=0, atol=solves * scale)
    scale = np.abs(ends(exact.lag)).max()
    np.testing.assert_allclose([late.smallest, late.largest], ends(exact.lag), rtol=0, atol=solves * scale)


def test_the_equilibrium_is_that_of_the_closed_form(drawn):
    task, found, exact = drawn
    c = sum(p * task.clients.inner.row(i)["c"].mean(0) for i, p in enumerate(task.clients.weights))
    y = np.linalg.solve(exact.A, c)  # at x = 0
    np.testing.assert_allclose(found.measurements.response.y, y, rtol=0, atol=1e-12 * np.linalg.norm(y))


def test_clients_differ_by_what_the_closed_form_says(drawn):
    """Clients differ by their gradients ∇y g_i = A_i y − B_i x − c_i, which are −c_i at the start (0, 0)."""
    task, found, _ = drawn
    p, own = task.clients.weights, np.array([-task.clients.inner.row(i)["c"].mean(0) for i in range(4)])
    apart = p @ np.sum((own - p @ own) ** 2, axis=1)
    spread = found.measurements.spread
    assert spread.inner == pytest.approx(np.sqrt(apart), rel=1e-12)
    assert spread.inner_share == pytest.approx(apart / (p @ np.sum(own**2, axis=1)), rel=1e-12)
    assert spread.outer == pytest.approx(0, abs=1e-12)  # ∇x f = Ey + ρx is 0 at 0 for all clients
    assert spread.tops == pytest.approx([1] * 4, rel=1e-12)  # the spectra of the task end at 1
    assert found.measurements.sample == pytest.approx(1, rel=1e-12)


def test_the_fields_have_those_steps(drawn):
    _, found, exact = drawn
    chosen = found.fields("simfbo")
    y = 1 / ends(exact.A)[1]
    x = 1 / (np.abs(ends(exact.lag)).max() / y + 2 * ends(exact.hessian)[1])
    assert chosen["server_lr"] == pytest.approx(fb.XYV(x, y, y), rel=1e-3)
    assert chosen["local_steps"] == 1
    safe = {"y, v": 2 * y, "x": 2 / ends(exact.hessian)[1], "x, single loop": 4 * x}
    assert found.safe_steps() == pytest.approx(safe, rel=1e-3)
    assert found.safe_steps()["y, v"] == pytest.approx(2 * y, rel=1e-9)
    assert found.fields("shrofbo") == chosen


def test_mini_batches_and_cohorts_take_shorter_steps(drawn):
    """Mini-batches and cohorts take shorter steps.

    The largest curvature of every client and of every sample is 1. Cohorts multiply it by M·max p, since weights are
    unequal.
    """
    task, found, _ = drawn
    batch, both = (found.fields("simfbo", batch_size=8, **c) for c in ({}, {"cohort": 2}))
    assert 5 * batch["server_lr"].y == pytest.approx(1, rel=1e-9)
    assert 5 * both["server_lr"].y == pytest.approx(1 / (4 * task.clients.weights.max()), rel=1e-9)
    assert batch["client_lr"] == batch["server_lr"]
    assert batch["server_lr"].v == batch["server_lr"].y
    assert 5 * batch["server_lr"].x == pytest.approx(found.scales(8).outer_step(1.0), rel=1e-9)
    nested = found.fields("fednest", batch_size=8, cohort=2)
    assert isinstance(nested["hypergradient"].solver, fb.parts.Neumann)
    fb.FedNest(**nested)


def test_a_batch_has_the_smoothness_of_its_draws(drawn):
    """A batch of b draws has the smoothness L + (L_1 − L)/b, where L_1 is the smoothness of a single sample.

    L is the largest smoothness of a client, here 1. Cohorts of some clients multiply the smoothness by M·max p.
    """
    task, found, _ = drawn
    rough = replace(found, measurements=found.measurements._replace(sample=9.0))
    assert rough.scales(4).smoothness == pytest.approx(1 + 8 / 4, rel=1e-9)
    assert rough.scales(4, cohort=2).smoothness == pytest.approx(3 * 4 * task.clients.weights.max(), rel=1e-9)
    assert rough.scales().smoothness == found.smoothness


def test_the_rounds_that_are_needed_follow_from_the_steps(drawn):
    """An error falls to a thousandth when the slower of x and y has made log(1000) times 1/(curvature · step).

    The step of a round is the sum of all its local steps or inner rounds. The text says whether more rounds are needed
    than are planned.
    """
    _, found, _ = drawn
    response = found.measurements.response
    steep = response._replace(curvature=response.curvature._replace(smallest=1e6, largest=1e6))  # then y counts, too
    both = found, replace(found, measurements=found.measurements._replace(response=steep))
    for one, batch in itertools.product(both, (None, 8)):
        s, nested = one.scales(batch), one.fields("fednest", batch_size=batch)
        single = one.fields("simfbo", batch_size=batch)
        steps = {
            "simfbo": [single["local_steps"] * step for step in single["server_lr"][:2]],
            "fednest": [nested["outer_lr"], nested["inner"].rounds * nested["inner"].lr],
        }
        for name, (x, y) in steps.items():
            expected = np.log(1000) * max(1 / (x * s.phi_mu), 1 / (y * s.mu))
            assert one.rounds_needed(name, batch_size=batch) == pytest.approx(expected, rel=1e-12)
    needed = int(found.rounds_needed("simfbo"))
    for planned in (needed - 1, needed + 1):
        text = str(replace(found, rounds=planned))
        assert (f", more than the {planned} that are planned" in text) == (planned < needed)


def test_printed_it_begins_with_what_to_paste_and_then_says_why_in_ten_lines(drawn):
    _, found, _ = drawn
    lines = str(found).splitlines()
    assert len(lines) <= 10
    paste, _, why = str(found).partition("\nsimfbo: about ")
    made = eval(paste, {"fb": fb})  # it has three digits
    wanted = fb.SimFBO(**found.fields("simfbo"))
    leaves = zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True)
    assert all(got == pytest.approx(exact, rel=5.1e-3) for got, exact in leaves)
    assert jax.tree.structure(made) == jax.tree.structure(wanted)
    for words in (
        "with adaptive steps: no trouble is expected",
        f"κ = {found.condition:.3g}",
        "clients differ",
        "safe steps",
    ):
        assert words in why


def test_its_details_have_fields_for_every_method_or_why_there_are_none(drawn):
    _, found, _ = drawn
    fields = found.details.partition("\n\n")[0]
    assert fields.startswith("with adaptive steps: no trouble is expected; y and v need about")
    said = {}
    for line in fields.splitlines()[2:]:
        names, text = line.strip().split(": ", 1)
        said |= dict.fromkeys(names.split(", "), text)
    assert said.keys() == authoring.ALGORITHMS.keys()
    for name, algorithm in authoring.ALGORITHMS.items():
        if said[name].startswith("none; "):
            with pytest.raises(ConfigurationError) as refused:
                found.fields(name)
            assert str(refused.value) == f"no fields are suggested for {name}: {said[name].removeprefix('none; ')}"
        else:
            assert isinstance(eval(said[name].partition("; ")[0], {"fb": fb}), algorithm)
            for more in ({}, {"batch_size": 4}):
                algorithm(**found.fields(name, **more))
            assert f"lr={1 / found.smoothness:.3g}" in said[name] or "client_lr=fb.XYV(x=" in said[name]


def test_a_diagnosis_is_shown_in_six_lines(drawn):
    _, found, _ = drawn
    lines = repr(found).splitlines()
    assert len(lines) == 6
    assert max(map(len, lines)) <= 110
    assert f"κ = {found.condition:.3g}" in lines[1]
    assert "<table>" in found._repr_html_()


def converges(name, task, found):
    """Check that x converges to 1e-3 within twice the predicted number of rounds."""
    needed = found.rounds_needed(name)
    stop = [fb.stop_when("relative_error", below=1e-3)]
    options = {"eval_every": int(needed) // 50 + 1, "metrics": task.metrics, "callbacks": stop}
    algorithm, rounds = authoring.ALGORITHMS[name](**found.fields(name)), int(2 * needed) + 50
    result = fb.solve(algorithm, task.problem, task.clients, task.x0, task.y0, rounds=rounds, **options)
    assert result.history.rows[-1]["relative_error"] <= 1e-3


@pytest.mark.parametrize("seed", [7, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(20) if seed != 7)])
def test_what_it_suggests_converges(seed):
    """Methods converge with the suggested fields, for clients with κ from 2 to 50.

    Every other seed has no heterogeneity. If clients differ, their mean has a smaller κ than they; if not, it has the
    same κ.
    """
    condition = 2 * 25 ** (seed / 19)
    heterogeneity = 0.0 if seed % 2 else float(np.random.default_rng(seed).choice([0.3, 0.5, 1.0, 2.0]))
    task = quadratic(condition=condition, heterogeneity=heterogeneity, samples=(6, 6), seed=seed)
    exact = np.linalg.cond(Coefficients(task.clients).A)
    assert heterogeneity or exact == pytest.approx(condition, rel=1e-9)
    found = diagnose(task.problem, task.clients, task.x0, task.y0)
    assert found.condition == pytest.approx(exact, rel=1e-6)
    for name in ("fednest", "simfbo"):
        converges(name, task, found)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_what_it_suggests_for_other_methods_converges(name, drawn):
    task, found, _ = drawn
    converges(name, task, found)


@pytest.mark.slow
def test_work_that_the_population_gives_is_planned_for():
    """If clients have unequal numbers of local steps, ShroFBO's short steps leave a drift far below 1e-2."""
    task = quadratic(condition=5, clients=4).with_own(local_steps=np.array([1, 4, 2, 3]))
    found = diagnose(task.problem, task.clients, task.x0, task.y0)
    fields = found.fields("shrofbo")
    assert fields["local_steps"] == 4
    result = fb.solve(fb.ShroFBO(**fields), task.problem, task.clients, task.x0, task.y0, rounds=4000)
    exact = solution(task.clients).x
    assert np.linalg.norm(result.x - exact) <= 1e-2 * np.linalg.norm(exact)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SUGGESTED))
def test_what_it_suggests_trains_a_network(name):
    task = hyper_representation(data="digits")
    found = diagnose(task.problem, task.clients, task.x0, task.y0, rounds=300)
    assert "cannot be learnt in 300 rounds" in str(found)
    assert "Φ is not convex here" in str(found)
    algorithm = authoring.ALGORITHMS[name](**found.fields(name, batch_size=32, cohort=10))
    options = {"rounds": 300, "cohort": 10, "metrics": task.metrics}
    result = fb.solve(algorithm, task.problem, task.clients, task.x0, task.y0, **options)
    assert result.history.rows[-1]["test_accuracy"] >= 0.93


def bent(curvature):
    """Return a problem of one client with g = y₀² + ½ c y₁² − xᵀy, where c is `curvature`, and its start."""
    problem = fb.Bilevel(
        lambda x, y, b: jnp.mean(b) * jnp.sum(y) + x @ x,
        lambda x, y, b: jnp.mean(b) * (y[0] ** 2 + 0.5 * curvature * y[1] ** 2) - x @ y,
    )
    return problem, fb.Clients(outer=[np.ones(2)], inner=[np.ones(1)]), np.ones(2), np.ones(2)


def test_an_indefinite_inner_hessian_is_said():
    found = diagnose(*bent(-1.0))
    assert found.mu == pytest.approx(-1, rel=1e-12)
    assert "INDEFINITE" in str(found)
    assert found.condition == np.inf
    assert "with adaptive steps: trouble is expected, since y*(x) may not be defined" in str(found)


def test_few_rounds_leave_flat_directions_out():
    """With few rounds, flat directions are left out: with L = 2, μ = 1e-3, ten rounds reach curvatures from 0.2 on."""
    found = diagnose(*bent(1e-3), rounds=10)
    assert found.measurements.delta == pytest.approx(0.2, rel=1e-9)
    assert "cannot be learnt in 10 rounds" in str(found)
    assert "with adaptive steps: trouble is expected, since y and v need about" in str(found)


def test_wrong_input_is_refused(drawn):
    task, found, _ = drawn
    problem, clients, x, y = bent(0.0)
    flat = fb.Bilevel(problem.outer, lambda x, y, b: jnp.mean(b) * (x @ y))
    concave = fb.Bilevel(problem.outer, lambda x, y, b: jnp.mean(b) * (x @ y) - 10 * y @ y)
    for make, refusal in (
        (lambda: found.fields("fednst"), ("algorithm", "fednst", "", "fednest")),
        (lambda: found.fields("simfbo", batch_size=0), ("batch_size", 0)),
        (lambda: diagnose(task.problem, task.clients, task.x0, task.y0, rounds=0), ("rounds", 0)),
        (lambda: diagnose(task.problem, task.clients, task.x0 * np.nan, task.y0), ("x", ["value"], "finite")),
        (lambda: diagnose(flat, clients, x, y), ("", ANY, "c above 0")),
        (lambda: diagnose(concave, clients, x, y), ("", ANY, "as low as -20, ")),
    ):
        with refuses(*refusal):
            make()


def test_fields_where_the_minimum_does_not_exist():
    """No fields are suggested if y*(x) does not exist.

    g = y² − exp(½y²) − xy is convex only around 0, and a large x pushes y out of this region.
    """
    problem = fb.Bilevel(
        lambda x, y, b: jnp.mean(b) * jnp.sum(y) + x @ x,
        lambda x, y, b: jnp.mean(b) * (jnp.sum(y**2) - jnp.sum(jnp.exp(0.5 * y**2))) - x @ y,
    )
    clients = fb.Clients(outer=[np.ones(2)], inner=[np.ones(1)])
    near, far = (diagnose(problem, clients, np.array([x]), np.array([0.0])) for x in (0.1, 30.0))
    assert [found.measurements.response.negative_curvature for found in (near, far)] == [False, True]
    assert "simfbo" in near.details
    assert near.fields("simfbo")
    assert "simfbo" not in far.details
    with refuses("", fact="y*(x)"):
        far.fields("simfbo")

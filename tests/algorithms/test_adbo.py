"""Do ADBO and SDBO compute their equations, are the planes those of a plain h, and where do the methods end?

The simulation in NumPy has a table of every client's values at the server, and carries Jacobians forward. The library
does neither.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import Case
from matrices import inner_gradient, members, outer_gradient

import fedbilevel as fb
from fedbilevel.algorithms.adbo import ADBO, SDBO
from fedbilevel.core.errors import AbsenceWarning
from fedbilevel.engines.engine import first_carry
from fedbilevel.parts import Lagrangian, LinearizedADMM
from fedbilevel.tasks.quadratic import inner, outer, quadratic, solution
from refusals import raises_with, refuses

FEW = {"estimate": LinearizedADMM(steps=2), "lagrangian": Lagrangian(planes=2)}
AGREEMENT = {
    "ADBO": Case(
        fb.ADBO(batch_size=4, iterations=4, **FEW, wait_for=2, max_staleness=3),
        clock=fb.Clock(compute=0.3, spread=0.7, stragglers=1, drift=0.5, period=7.0, availability=0.8),
        slow=True,
    ),
    "SDBO": Case(fb.SDBO(batch_size=4, iterations=4, **FEW), slow=True),
}
NEVER_LATE = {fb.ADBO: "set its field wait_for", fb.SDBO: "it is meant for comparison with ADBO"}
LEARNS = {fb.ADBO: "hyper_cleaning", fb.SDBO: "hyper_cleaning"}

ROUNDS = 24
FIELDS = {
    "batch_size": None,
    "client_lr": fb.XYV(x=0.2, y=0.05, v=0.2),
    "server_lr": fb.XYV(x=0.02, y=0.025, v=0.2),
    "lagrangian": Lagrangian(planes=20),  # fewer than there are rounds, so that planes are dropped
    "estimate": LinearizedADMM(lr=0.7),
}
# chosen so that no two replies come at the same moment
TIMES = [1.0, 1.37, 2.71, 0.77, 5.03, 1.13, 0.91, 1.79, 8.11, 0.59]


@pytest.fixture(scope="module")
def task():
    return quadratic(noise=0.0, samples=(1, 3))


class Played:
    """Run the library's method; more rounds can follow."""

    def __init__(self, task, algorithm, engine, rounds=ROUNDS):
        x, y, count = task.x0, task.y0, len(task.clients)
        carry = first_carry(algorithm, task.problem, task.clients, x, y)
        self.rounds, self.tolerance = rounds, algorithm.lagrangian.tolerance
        self.run = engine.start(algorithm, task.problem, task.clients, count, jax.random.key(1), carry)
        self.carry, self.costs = carry, None
        self.more()

    def more(self):
        self.carry, _, self.costs, _ = self.run.advance(self.carry, self.rounds)
        return self.carry


def clocked(**fields):
    return fb.Local(clock=fb.Clock(**fields))


class Simulation:
    """Simulate the method event by event: Algorithm 1 with tables, and the departures of the module's docstring."""

    def __init__(self, task, algorithm, times):
        self.a, self.times, self.members = algorithm, times, members(task)
        self.p = np.array([p for p, *_ in self.members])
        dim_x, dim_y = len(task.x0), len(task.y0)
        self.x, self.z = np.zeros(dim_x), np.zeros(dim_y)
        self.own = [{"x": np.zeros(dim_x), "y": np.zeros(dim_y), "theta": np.zeros(dim_x)} for _ in self.p]
        self.planes, self.made = [], 0
        self.told = {}  # client -> θ_i of its last reply that has counted
        self.at_work, self.early, self.exchange, self.now = {}, [], 0, 0.0
        self.ages, self.dropped, self.oldest = [], 0, 0

    def estimate(self):
        """Return φ_i, φ_z and their Jacobians after K steps of linearised ADMM."""
        eta, mu = self.a.estimate.lr, self.a.estimate.penalty
        y, z = [own["y"] for own in self.own], self.z
        psi = [0 * one for one in y]
        to_y, to_psi = ([np.zeros((len(z), len(self.x)))] * len(y) for _ in range(2))
        to_z = np.zeros((len(z), len(self.x)))
        for k in range(self.a.estimate.steps):
            for i, (_, _, g) in enumerate(self.members):
                if k > 0:
                    psi[i], to_psi[i] = psi[i] + mu * (y[i] - z), to_psi[i] + mu * (to_y[i] - to_z)
                step = inner_gradient(g, self.x, y[i]) + psi[i] + mu * (y[i] - z)
                to_step = g["A"] @ to_y[i] - g["B"] + to_psi[i] + mu * (to_y[i] - to_z)
                y[i], to_y[i] = y[i] - eta * step, to_y[i] - eta * to_step
            z, to_z = (
                sum(p * one for p, one in zip(self.p, y, strict=True)),
                sum(p * one for p, one in zip(self.p, to_y, strict=True)),
            )
        return y, z, to_y, to_z

    def new_plane(self):
        self.early += [(i, *answer) for i, (_, *answer) in sorted(self.at_work.items())]
        self.at_work = {}  # all clients are waited for
        phi, phi_z, to_y, to_z = self.estimate()
        gaps, gap_z = [own["y"] - one for own, one in zip(self.own, phi, strict=True)], self.z - phi_z
        h = sum(p * gap @ gap for p, gap in zip(self.p, gaps, strict=True)) + gap_z @ gap_z
        plane = {
            "serial": self.made,
            "a": -2 * (sum(p * j.T @ gap for p, j, gap in zip(self.p, to_y, gaps, strict=True)) + to_z.T @ gap_z),
            "b": [2 * gap for gap in gaps],
            "c": 2 * gap_z,
            "lambda": 0.0,
            "n": 4 * max(h, self.a.lagrangian.tolerance),
            "made": (self.x, phi, phi_z, to_y, to_z, h),
        }
        # each client's y_i as the server knows it: from this plane, and later from the client's last reply
        plane["told"] = [own["y"] for own in self.own]
        plane["s"] = sum(p * b @ y for p, b, y in zip(self.p, plane["b"], plane["told"], strict=True))
        plane["kappa"] = h - self.a.lagrangian.tolerance - plane["a"] @ self.x - plane["s"] - plane["c"] @ self.z
        kept = [one for one in self.planes if one["lambda"] > 0] + [plane]
        kept = kept[-self.a.lagrangian.planes :]
        self.dropped += len(self.planes) + 1 - len(kept)
        self.planes, self.made = kept, self.made + 1

    def answer(self, i):
        """Ask client i; return its reply (θ_i, y_i)."""
        a, own, (_, f, _) = self.a, self.own[i], self.members[i]
        own["theta"] = own["theta"] + a.client_lr.v * (
            own["x"] - self.x - a.lagrangian.consensus_damping * own["theta"]
        )
        to_x = own["x"] + f["E"] @ own["y"] + own["theta"]
        to_y = outer_gradient(f, own["x"], own["y"]) + sum(one["lambda"] * one["b"][i] for one in self.planes)
        own["x"], own["y"] = own["x"] - a.client_lr.x * to_x, own["y"] - a.client_lr.y * to_y
        return own["theta"], own["y"]

    def collected(self):
        """Make an exchange; return the replies that count, as (client, exchange in which it was asked, θ_i, y_i)."""
        for i in range(len(self.p)):
            if i not in self.at_work:
                self.at_work[i] = (self.now + self.times[i], self.exchange, *self.answer(i))
        needed = self.a.wait_for - len(self.early)
        order = sorted(self.at_work, key=lambda i: self.at_work[i][0])
        done = order[: max(needed, 0)]
        late = [i for i in order if self.a.max_staleness and self.exchange - self.at_work[i][1] >= self.a.max_staleness]
        if late:
            done = order[: max(len(done), order.index(late[-1]) + 1)]
        counted = self.early + [(i, *self.at_work[i][1:]) for i in done]
        if done:
            self.now = self.at_work[done[-1]][0]
        self.early = []
        for i in done:
            del self.at_work[i]
        return counted

    def step(self):
        a, counted = self.a, self.collected()
        self.told |= {i: theta for i, _, theta, _ in counted}
        heard = sum(self.p[i] for i in self.told)
        for plane in self.planes:
            for i, _, _, y in counted:
                plane["told"][i] = y
            plane["s"] = sum(p * b @ y for p, b, y in zip(self.p, plane["b"], plane["told"], strict=True))
        self.ages[-1] += [(self.p[i] * (self.exchange - asked), self.p[i]) for i, asked, *_ in counted]
        self.oldest = max(self.oldest, *(self.exchange - asked for _, asked, *_ in counted))
        theta = sum(self.p[i] * one for i, one in self.told.items()) / heard
        self.x = self.x - a.server_lr.x * (sum(one["lambda"] * one["a"] for one in self.planes) - theta)
        self.z = self.z - a.server_lr.y * sum(one["lambda"] * one["c"] for one in self.planes)
        for one in self.planes:
            value = one["a"] @ self.x + one["s"] + one["c"] @ self.z + one["kappa"]
            change = a.server_lr.v * (value / one["n"] - a.lagrangian.plane_damping * one["lambda"])
            one["lambda"] = max(0.0, one["lambda"] + change)
        self.exchange += 1

    def play(self, rounds):
        for _ in range(rounds):
            self.new_plane()
            self.ages.append([])
            for _ in range(self.a.iterations):
                self.step()
        self.ages = [np.sum(of_round, axis=0) for of_round in self.ages]
        return self


def agrees(carry, told):
    """Compare to 1e-12: sums have ten terms of size about 1, and the steps contract.

    λ, and what it multiplies, is compared relative to Σ λ.
    """
    close, planes = {"rtol": 1e-12, "atol": 1e-12}, carry.state.planes
    np.testing.assert_allclose(carry.state.x, told.x, **close)
    np.testing.assert_allclose(carry.state.y, told.z, **close)
    for name in ("x", "y", "theta"):
        np.testing.assert_allclose(getattr(carry.clients, name), [own[name] for own in told.own], **close)
    assert sorted(s for s in planes.serial.tolist() if s >= 0) == [one["serial"] for one in told.planes]
    for one in told.planes:
        slot = planes.serial.tolist().index(one["serial"])
        for have, want in (
            (planes.outer[slot], one["a"]),
            (planes.consensus[slot], one["c"]),
            (planes.inner[slot], one["s"]),
            (planes.offset[slot], one["kappa"]),
            (planes.multiplier[slot], one["lambda"]),
            (carry.clients.b[:, slot], np.array(one["b"])),
        ):
            np.testing.assert_allclose(have, want, **close)


@pytest.fixture(scope="module")
def adbo(task):
    """Return the simulation and the library's run, with a bound on staleness."""
    algorithm = ADBO(**FIELDS, wait_for=4, max_staleness=3)
    return Simulation(task, algorithm, TIMES).play(ROUNDS), Played(task, algorithm, clocked(network=TIMES))


def test_adbo_is_the_algorithm_event_by_event(adbo):
    told, run = adbo
    agrees(run.carry, told)
    assert told.dropped > 0
    assert any(one["lambda"] > 0 for one in told.planes)


def test_nobody_counts_who_was_asked_longer_ago_than_the_bound(task, adbo):
    told, run = adbo
    age, weight = run.costs.metrics["local_step", "staleness"]
    np.testing.assert_allclose((age, weight), np.transpose(told.ages), rtol=1e-12)
    assert told.oldest == 3
    # without the bound, replies are older
    assert Simulation(task, ADBO(**FIELDS, wait_for=4), TIMES).play(ROUNDS).oldest > 3


def test_sdbo_is_the_algorithm_and_nears_the_solution(task):
    run = Played(task, SDBO(**FIELDS), clocked())
    everyone = ADBO(**FIELDS, wait_for=len(task.clients))
    agrees(run.carry, Simulation(task, everyone, [1.0] * len(task.clients)).play(ROUNDS))
    calls = {phase: np.unique(count.exchanges) for (phase, *_), count in run.costs.calls.items()}
    assert calls == {"consensus_step": [10], "consensus_adjoint": [10], "local_step": [10]}  # K, K and T exchanges
    assert SDBO().findings(run.carry.state).warning == ""
    errors = []
    for _ in range(10):
        state = run.more().state
        errors.append(float(task.metrics["relative_error"](state.x, state.y)))
    assert max(errors[-5:]) < 0.1  # it is 1 at the start; docs/reference/algorithms/adbo.md says why the rest stays


@pytest.mark.slow
def test_planes_are_of_those_who_are_there(task):
    """If a client is never there, the planes are those of the other clients alone.

    Once all these clients have replied, the server knows Σ p_i b_il·y_i / Σ p_i over them. This also holds for the
    plane that was made before they replied: the sums of changes in this plane are also divided by their total weight,
    0.895. Sums of nine terms of size about 1 are off by less than 1e-12.
    """
    away = 8
    there = np.delete(np.arange(len(TIMES)), away)
    clock = {"network": TIMES, "availability": [float(i != away) for i in range(len(TIMES))]}
    algorithm = ADBO(**FIELDS | {"estimate": LinearizedADMM(steps=2, lr=0.7)}, wait_for=len(there), iterations=3)
    with pytest.warns(AbsenceWarning):
        run = Played(task, algorithm, clocked(**clock), rounds=2)
    planes, own, p = run.carry.state.planes, run.carry.clients, task.clients.weights[there]
    slots = np.flatnonzero(planes.active)
    wanted = np.einsum("i,ilk,ik->l", p / p.sum(), np.asarray(own.b)[there][:, slots], np.asarray(own.y)[there])
    assert len(slots) == 2
    assert np.all(np.abs(planes.changes[slots]) > 1e-3)
    np.testing.assert_allclose(planes.inner[slots], wanted, rtol=1e-12, atol=1e-12)


def test_planes_cut_off_no_point_where_h_is_at_most_the_tolerance(adbo):
    """No plane cuts off a point at which h is at most the tolerance ε.

    On the quadratic task φ is affine and h is convex. So no plane is anywhere above h − ε, and at the point where a
    plane was made, it equals h − ε.
    """
    told, run = adbo
    rng, tolerance = np.random.default_rng(0), run.tolerance
    for plane in told.planes:
        x, phi, phi_z, to_y, to_z, h = plane["made"]

        def value(step, offsets, offset_z, plane=plane, made=(x, phi, phi_z, to_y, to_z)):
            """Return the left-hand side of the plane at x + step and φ(x + step) + offsets."""
            x, phi, phi_z, to_y, to_z = made
            inner = [b @ (f + j @ step + d) for b, f, j, d in zip(plane["b"], phi, to_y, offsets, strict=True)]
            return (
                plane["a"] @ (x + step)
                + told.p @ inner
                + plane["c"] @ (phi_z + to_z @ step + offset_z)
                + plane["kappa"]
            )

        for _ in range(20):
            offsets, offset_z = rng.normal(size=(len(phi), len(phi_z))), rng.normal(size=len(phi_z))
            size = np.sqrt(told.p @ (offsets**2).sum(1) + offset_z @ offset_z)
            shrink = np.sqrt(tolerance) / size
            assert value(rng.normal(size=len(x)), shrink * offsets, shrink * offset_z) <= 1e-10
        own = value(0 * x, np.array(plane["b"]) / 2, plane["c"] / 2)
        np.testing.assert_allclose(own, h - tolerance, rtol=1e-9, atol=1e-10)


def bent(x, y, batch):
    """Compute an inner loss whose Hessians depend on the point."""
    return inner(x, y, batch) + jnp.log(jnp.cosh(y[0] - x[0] * x[1])) + 0.1 * jnp.sum(y**4)


@pytest.mark.slow
def test_the_gradient_of_h_is_that_of_a_plain_h():
    """The gradient of h through all steps of the estimate is that of jax.grad for h written in one piece, to 1e-10.

    The gradient is taken at the points where the steps were made.
    """
    task = quadratic(clients=2, dim_x=2, dim_y=3, samples=(1, 3))
    algorithm = ADBO(batch_size=None, estimate=LinearizedADMM(steps=3, lr=0.3), iterations=1, wait_for=2)
    eta, mu = algorithm.estimate.lr, algorithm.estimate.penalty
    task = dataclasses.replace(task, problem=fb.Bilevel(outer=outer, inner=bent))
    run = Played(task, algorithm, fb.Reference(), rounds=1)
    before, after = run.carry, run.more()
    own = before.clients.y
    batches = [task.clients.inner.row(i) for i in range(2)]
    p = task.clients.weights

    def h(x, z):
        y, end, psi = list(own), z, [0 * one for one in own]
        for k in range(algorithm.estimate.steps):
            for i, batch in enumerate(batches):
                psi[i] = psi[i] + (mu * (y[i] - end) if k > 0 else 0)
                slope = jax.grad(bent, 1)(x, y[i], batch) + psi[i] + mu * (y[i] - end)
                y[i] = y[i] - eta * slope
            end = sum(weight * one for weight, one in zip(p, y, strict=True))
        apart = sum(weight * jnp.sum((a - b) ** 2) for weight, a, b in zip(p, own, y, strict=True))
        return apart + jnp.sum((before.state.y - end) ** 2)

    value, slope = jax.value_and_grad(h)(before.state.x, before.state.y)
    planes, slot = after.state.planes, 1
    assert float(value) > 0.01
    assert float(jnp.linalg.norm(slope)) > 0.01
    np.testing.assert_allclose(planes.outer[slot], slope, rtol=1e-10)
    np.testing.assert_allclose(planes.length[slot] / 4, value, rtol=1e-10)


@pytest.mark.parametrize(
    ("make", "refusal"),
    [
        (lambda: ADBO(wait_for=None), ("ADBO.wait_for", None)),
        (lambda: ADBO(max_staleness=-1), ("ADBO.max_staleness", -1)),
        (lambda: ADBO(estimate=3), ("ADBO.estimate", 3, "LinearizedADMM(…)")),
        (lambda: Lagrangian(tolerance=0.0), ("Lagrangian.tolerance", 0.0)),
    ],
)
def test_bad_fields_are_refused_by_name(make, refusal):
    with refuses(*refusal):
        make()


@pytest.mark.parametrize(
    ("algorithm", "cohort", "refusal"),
    [
        (ADBO(wait_for=11), None, ("ADBO.wait_for", 11, "at most 10")),
        (ADBO(), 5, ("cohort", 5, "ADBO")),
        (SDBO(), 5, ("cohort", 5, "SDBO")),
    ],
)
def test_what_does_not_fit_the_clients(algorithm, cohort, refusal, task):
    with refuses(*refusal):
        fb.solve(algorithm, task.problem, task.clients, task.x0, task.y0, rounds=1, cohort=cohort)


@pytest.mark.slow
def test_who_is_never_there_counts_nowhere(task):
    """If one client is never there, x nears the solution of the others, whose weights are normalised."""
    away = 8
    clock = fb.Clock(network=TIMES, availability=[float(i != away) for i in range(len(TIMES))])
    weights = np.where(np.arange(len(TIMES)) == away, 0, task.clients.weights)
    others = solution(task.clients, weights / weights.sum())
    everyone = solution(task.clients)
    algorithm = ADBO(**FIELDS, wait_for=4, max_staleness=3)
    with pytest.warns(AbsenceWarning):
        result = fb.solve(
            algorithm, task.problem, task.clients, task.x0, task.y0, rounds=200, engine=fb.Local(clock=clock)
        )
    size = np.linalg.norm(others.x)
    assert np.linalg.norm(result.x - others.x) < 0.1 * size < np.linalg.norm(result.x - everyone.x)


@pytest.mark.parametrize("method", [fb.ADBO, fb.SDBO])
def test_a_minimax_problem_is_refused(method):
    """A minimax problem is refused: clients lower the outer loss in y, and this loss has no minimum in y."""
    problem = fb.Minimax(lambda x, y, batch: jnp.mean(x * y - y**2 + 0 * batch))
    with raises_with(fb.errors.UnsupportedError, path="problem", got="Minimax"):
        fb.solve(method(), problem, fb.Clients(np.zeros((3, 4))), np.ones(()), np.ones(()), rounds=1)

"""Does FedEx compute what its paper says? The tests write rounds out in NumPy with the same draws."""

from dataclasses import replace
from itertools import combinations

import agreement
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrices import inner_gradient, members

import fedbilevel as fb
from fedbilevel.tasks.quadratic import quadratic
from refusals import refuses
from representatives import slow_but

AGREEMENT = {
    "FedEx": agreement.Case(fb.FedEx(configurations=5, lr=0.3, batch_size=4), work=agreement.WORK, slow=True),
    "FedEx, adaptive": agreement.Case(fb.FedEx(configurations=4, step_rule="adaptive", batch_size=None), slow=True),
}
NEVER_LATE = {fb.FedEx: "a late reply has a draw from an earlier θ"}
LEARNS = {fb.FedEx: "regularization"}

KEY, K, ROUNDS = 3, 4, 3
LR, SERVER_LR, DISCOUNT = 0.6, 0.7, 0.8
WORK, WEIGHTS = np.array([1, 3, 2]), np.array([0.5, 0.2, 0.3])
X0, Y0 = np.linspace(-1, 1, 5), np.linspace(2, 0, 8)


def population(weights=WEIGHTS):
    task = quadratic(clients=3, samples=(5, 5))
    clients = fb.Clients(task.clients.outer, task.clients.inner, weights=weights, local_steps=WORK)
    return replace(task, clients=clients)


def method(**fields):
    steps = {"lr": LR, "server_lr": SERVER_LR, "batch_size": None}
    return fb.FedEx(low=-2, high=3, configurations=K, discount=DISCOUNT, **steps, **fields)


def states(algorithm, task, rounds=ROUNDS, key=KEY, **options):
    """Return the state after each round."""
    found = []
    fb.solve(
        algorithm, task.problem, task.clients, X0, Y0, rounds=rounds, key=key, eval_every=1,
        callbacks=[lambda result, row: found.append(jax.tree.map(np.asarray, result.state))], **options,
    )  # fmt: skip
    return {int(round): state for round, state in zip(range(rounds + 1), found[-rounds - 1 :], strict=True)}


def drawn(round, theta, client):
    """Return the number of the configuration that a client draws, by the keys of the run, the round and the client."""
    key = jax.random.split(jax.random.split(jax.random.fold_in(jax.random.key(KEY), round), 3)[2])[1]
    key = jax.random.fold_in(jax.random.fold_in(key, client), 0)
    return int(jax.random.categorical(key, jnp.log(theta)))


def outer_loss(task, i, x, y):
    """Return the outer loss over all outer samples of a client."""
    row = task.clients.outer.row(i)
    gaps = y - row["t"]
    each = [0.5 * gap @ d @ gap + x @ e @ y for gap, d, e in zip(gaps, row["D"], row["E"], strict=True)]
    return np.mean(each) + 0.5 * x @ x


class WrittenOut:
    """Algorithm 2 over some clients, from a uniform θ."""

    def __init__(self, task, rule):
        self.task, self.rule = task, rule
        self.y, self.theta, self.losses, self.largest = Y0, np.full(K, 1 / K), [], []

    def round(self, configurations, cohort):
        weights = self.task.clients.weights[cohort] / self.task.clients.weights[cohort].sum()
        ages = DISCOUNT ** np.arange(len(self.losses))[::-1]
        baseline = ages @ self.losses / ages.sum() if self.losses else 0.0
        change, gradient, mean_loss = np.zeros(8), np.zeros(K), 0.0
        for i, p in zip(cohort, weights, strict=True):
            j = drawn(len(self.losses), self.theta, i)
            own, x = self.y, configurations[j]
            for _ in range(WORK[i]):
                own = own - LR * inner_gradient(members(self.task)[i][2], x, own)
            loss = outer_loss(self.task, i, x, own)
            change, mean_loss = change + p * (own - self.y), mean_loss + p * loss
            gradient[j] += p * (loss - baseline) / self.theta[j]
        self.losses.append(mean_loss)
        self.largest.append(np.abs(gradient).max())
        most = np.sqrt(2 * np.log(K))
        eta = {
            "aggressive": most / self.largest[-1],
            "adaptive": most / np.sqrt(np.sum(np.square(self.largest))),
            "constant": most,
        }[self.rule]
        self.y = self.y + SERVER_LR * change
        self.theta = self.theta * np.exp(-eta * gradient)
        self.theta = self.theta / self.theta.sum()


@pytest.mark.parametrize("rule", slow_but("aggressive", of=["aggressive", "adaptive", "constant"]))
def test_equals_the_rounds_written_out(rule):
    """The rounds equal Algorithm 2 with each step rule, for unequal weights and work, if all clients take part."""
    task = population()
    found, expected = states(method(step_rule=rule), task), WrittenOut(task, rule)
    for round in range(1, ROUNDS + 1):
        configurations = found[round].configurations
        expected.round(configurations, np.arange(3))
        np.testing.assert_allclose(found[round].y, expected.y, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(found[round].theta, expected.theta, rtol=1e-10, atol=1e-12)
        np.testing.assert_array_equal(found[round].x, configurations[np.argmax(expected.theta)])
    assert np.abs(found[ROUNDS].theta - 1 / K).max() > 0.05


@pytest.mark.slow
def test_a_cohorts_weights_are_normalised():
    """A cohort's weights are normalised: with two of three clients, a round is Algorithm 2 over one of the pairs."""
    task = population()
    found, pairs = states(method(), task, 1, cohort=2)[1], []
    for pair in map(np.array, combinations(range(3), 2)):
        expected = WrittenOut(task, "aggressive")
        expected.round(found.configurations, pair)
        pairs.append(np.allclose(found.y, expected.y, rtol=0, atol=1e-12) and np.allclose(found.theta, expected.theta))
    assert sum(pairs) == 1


def test_configurations_are_drawn_once_by_the_seed_the_first_is_the_start():
    task = population()
    first, other = (states(method(), task, key=key) for key in (KEY, KEY + 1))
    for found in (first, other):
        np.testing.assert_array_equal(found[1].configurations[0], X0)
        np.testing.assert_array_equal(found[1].configurations, found[ROUNDS].configurations)
        assert np.all((found[1].configurations[1:] >= -2) & (found[1].configurations[1:] < 3))
        assert len(np.unique(found[1].configurations)) == K * len(X0)
    assert not np.any(first[1].configurations[1:] == other[1].configurations[1:])
    np.testing.assert_array_equal(first[0].x, X0)


def test_without_bounds_configurations_are_within_one_of_the_start():
    x0 = {"a": jnp.full(400, 5.0), "b": jnp.asarray(-3.0)}
    found = fb.FedEx().draw_configurations(x0, jax.random.key(0))
    away = np.abs(np.asarray(found["a"]) - 5)
    assert found["a"].shape == (10, 400)
    assert found["b"].shape == (10,)
    assert 0.99 < away.max() <= 1
    assert np.all(away[0] == 0)


def penalised(clients=4):
    """Return a problem with the penalty exp(x), and its clients.

    The curvatures for configurations between −6 and 6 differ by up to e^12.
    """
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(clients, 2, 20, 3))
    labels = rows @ [1.0, -1.0, 0.5] + 0.1 * rng.normal(size=(clients, 2, 20))
    outer = lambda x, y, b: jnp.mean((b["row"] @ y - b["label"]) ** 2)  # noqa: E731
    inner = lambda x, y, b: outer(x, y, b) + jnp.exp(x) * y @ y  # noqa: E731
    samples = ({"row": rows[:, part], "label": labels[:, part]} for part in (0, 1))
    return fb.Bilevel(outer, inner), fb.Clients(*samples)


@pytest.mark.slow
def test_the_likeliest_configuration_has_the_least_loss():
    """With steps that adapt, the likeliest of five penalties is the one with the least loss.

    The losses of the penalties differ by far more than the clients do.
    """
    problem, clients = penalised()
    algorithm = fb.FedEx(low=-6.0, high=6.0, configurations=5, step_rule="adaptive", batch_size=None)
    result = fb.solve(algorithm, problem, clients, jnp.asarray(3.0), jnp.zeros(3), rounds=200)
    configurations = np.asarray(result.state.inside.configurations)

    def loss(x):  # at y*(x)
        rows, labels = (
            clients.inner.values[name].reshape(-1, *shape) for name, shape in (("row", (3,)), ("label", ()))
        )
        y = np.linalg.solve(rows.T @ rows / len(rows) + np.exp(x) * np.eye(3), rows.T @ labels / len(rows))
        return np.mean(
            (clients.outer.values["row"].reshape(-1, 3) @ y - clients.outer.values["label"].reshape(-1)) ** 2
        )

    assert float(result.x) == min(configurations, key=loss)
    assert np.max(result.state.inside.theta) > 0.5


@pytest.mark.slow
def test_steps_that_adapt_go_by_the_curvature_of_each_clients_own_configuration():
    """Steps that adapt follow the curvature for the configuration that each client has drawn.

    At x0 = −6 the curvature is about 2. With steps for this curvature, y would blow up at a client that draws the
    penalty e^6.
    """
    problem, clients = penalised()
    algorithm = fb.FedEx(low=5.0, high=6.0, configurations=2, batch_size=None)
    result = fb.solve(algorithm, problem, clients, jnp.asarray(-6.0), jnp.zeros(3), rounds=20, on_divergence="stop")
    assert np.all(np.isfinite(result.history["outer_loss"][1:]))
    assert np.max(result.history["outer_loss"][1:]) < 3 * result.history["outer_loss"][1]


@pytest.mark.filterwarnings("ignore::fedbilevel.errors.NumericalWarning")
def test_costs():
    """A round is one exchange: y, k configurations, θ and λ to the client; y, ∇̃ and a loss back."""
    task = population()
    result = fb.solve(method(), task.problem, task.clients, X0, Y0, rounds=2)
    assert (result.ledger.exchanges, result.ledger.gradients, result.ledger.hvps) == (2, 2 * WORK.sum(), 0)
    assert result.ledger.bytes_down == 2 * 3 * 8 * (8 + K * 5 + K + 1)
    assert result.ledger.bytes_up == 2 * 3 * 8 * (8 + K + 1)


@pytest.mark.slow
def test_bounds_outside_of_the_set_of_x_are_refused():
    problem, clients = penalised()
    problem = problem.with_x_in(fb.projections.box(-6.0, 6.0))
    for fields, wrong in (({"low": -6.0, "high": 6.0}, ""), ({"low": -6.0, "high": 7.0}, "high"), ({}, "high")):
        given = fb.FedEx(**fields, lr=1e-3, batch_size=None), problem, clients, jnp.asarray(5.5), jnp.zeros(3)
        if not wrong:
            fb.solve(*given, rounds=1, engine=fb.Reference())
            continue
        with refuses(f"FedEx.{wrong}"):
            fb.solve(*given, rounds=1)


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"low": 1.0}, ("FedEx.low, high", (1.0, None), "None")),
        ({"low": 2.0, "high": 1.0}, ("FedEx.low, high", (2.0, 1.0), "low < high")),
        ({"step_rule": "greedy"}, ("FedEx.step_rule", "greedy", "'aggressive'")),
        ({"discount": 1.0}, ("FedEx.discount", 1.0)),
    ],
)
def test_wrong_fields_are_refused(fields, refusal):
    with refuses(*refusal):
        fb.FedEx(**fields)

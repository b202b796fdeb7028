"""Does F2SA end at the minimiser of its penalised problem, at a distance of O(1/λ²), without second derivatives?"""

import agreement
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from benchmarks import transformer
from compiled_losses import with_compiled_losses
from matrices import hypergradient, inner_gradient, mean_matrices, outer_gradient

import fedbilevel as fb
from fedbilevel.core.tree import XYV
from fedbilevel.tasks.quadratic import quadratic, solution
from fixed_steps import fixed
from refusals import refuses
from representatives import slow_but

AGREEMENT = {
    "F2SA, mini-batches": agreement.Case(
        fixed(fb.F2SA(local_steps=2, batch_size=4, multiplier=20.0)), work=agreement.WORK, slow=True
    ),
}


def end(task, multiplier):
    """Return the x where ∇Φ_λ = 0, from the definition of Φ_λ.

    With y± = argmin G ± F/λ, which have a closed form, the gradient is

        (λ/2)[∇x G(x, y₊) − ∇x G(x, y₋)] + ½[∇x F(x, y₊) + ∇x F(x, y₋)],  ∇x G = −Bᵀy + …, ∇x F = x + E y.

    It is affine in x, so that its values at 0 and at the unit vectors determine where it is 0.
    """
    m = mean_matrices(task)

    def gradient(x):
        points = []
        for sign in (1, -1):
            matrix, right = m["A"] + sign * m["D"] / multiplier, m["B"] @ x + m["c"]
            points.append(np.linalg.solve(matrix, right - sign * (m["E"].T @ x - m["Dt"]) / multiplier))
        high, low = points
        return -multiplier / 2 * m["B"].T @ (high - low) + x + m["E"] @ (high + low) / 2

    offset = gradient(np.zeros(5))
    slopes = np.stack([gradient(unit) - offset for unit in np.eye(5)], axis=1)
    return np.linalg.solve(slopes, -offset)


def run(task, rounds, engine=None, **fields):
    method = fixed(
        fb.F2SA(
            local_steps=1, batch_size=None, client_lr=1.0, server_lr=fb.XYV(0.02, 0.5, 0.5), radius=np.inf, **fields
        )
    )
    problem = with_compiled_losses(task.problem)
    return fb.solve(method, problem, task.clients, task.x0, task.y0, rounds=rounds, engine=engine or fb.Local())


def distance(x, exact):
    return float(np.linalg.norm(np.asarray(x) - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("multiplier", slow_but(10.0, 1e4, of=[10.0, 30.0, 1e4]))
def test_it_ends_at_the_minimiser_of_the_penalised_problem(multiplier):
    """F2SA ends at the minimiser of the penalised problem, with the same steps as SimFBO.

    Differences of gradients lose λε to rounding, which is 2e-12 at λ = 1e4; the distance from x* is larger.
    """
    task = quadratic(condition=5)
    x = end(task, multiplier)
    assert distance(x, solution(task.clients).x) > 1e-8  # otherwise x would not be different from SimFBO's
    assert distance(run(task, 2_000, multiplier=multiplier).x, x) < 1e-10


def test_the_distance_from_the_solution_falls_with_the_square_of_the_multiplier():
    """The closed form has x_λ − x* = O(1/λ²): the distance falls a hundredfold if λ grows tenfold.

    The next term is O(1/λ⁴). At λ = 10 it changes the slope by up to 1/10² times a constant of the problem.
    """
    task = quadratic(condition=5)
    exact = solution(task.clients).x
    distances = [distance(end(task, multiplier), exact) for multiplier in (10.0, 1e2, 1e3, 1e4)]
    slopes = np.diff(np.log10(distances))
    np.testing.assert_allclose(slopes[0], -2, atol=0.1)
    np.testing.assert_allclose(slopes[1:], -2, atol=0.01)


@pytest.mark.parametrize(
    ("multiplier", "low", "high"),
    [
        pytest.param(1e3, 0, 3e-5, marks=pytest.mark.slow),
        (None, 0, 3e-5),
        pytest.param(1e2, 2e-4, 1e-3, marks=pytest.mark.slow),
        pytest.param(1e5, 1e-4, 3e-3, marks=pytest.mark.slow),
    ],
)
def test_the_floor_of_float32(multiplier, low, high):
    """In float32 the distance from x* is about 5/λ² + λε/30 with ε = 1.2e-7, and is smallest near λ = 1,000.

    Both constants are those of this problem. The bounds leave a factor of three or more.
    """
    single = lambda tree: jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), tree)  # noqa: E731
    task = quadratic(condition=5)
    outer, inner = (
        [single(rows.row(i)) for i in range(len(rows.size))] for rows in (task.clients.outer, task.clients.inner)
    )
    clients = fb.Clients(outer, inner, weights=task.clients.weights)
    method = fb.F2SA(
        local_steps=1, batch_size=None, client_lr=1.0, server_lr=fb.XYV(0.02, 0.5, 0.5), multiplier=multiplier
    )
    result = fb.solve(method, task.problem, clients, single(task.x0), single(task.y0), rounds=2_000)
    assert result.x.dtype == np.float32
    assert low <= distance(result.x, solution(task.clients).x) < high


@pytest.mark.slow
def test_the_multiplier_of_the_precision_reaches_the_solution():
    """With the default multiplier, F2SA comes close to the solution in float64.

    The distance is (ε(1 + ‖y‖))^⅔, about 1e-10, times a constant of the problem.
    """
    task = quadratic(condition=5)
    exact = solution(task.clients)
    result = run(task, 2_000)
    assert distance(result.x, exact.x) < 1e-7
    assert distance(result.y, exact.y) < 1e-7
    assert distance(result.state.iterate.v, exact.v) < 1e-7


@pytest.mark.parametrize(
    "multiplier", [np.inf, np.nan, np.array([1.0, np.inf]), 10**400], ids=["inf", "nan", "array", "integer"]
)
def test_a_multiplier_that_is_not_finite_is_refused(multiplier):
    """The points y ± v/λ are equal at λ = ∞, so that the difference quotient would be 0/0."""
    with refuses("F2SA.multiplier", multiplier, "finite"):
        fb.F2SA(multiplier=multiplier)


@pytest.mark.parametrize("independent", [False, True])
def test_a_local_step_written_out(independent):
    """A local step equals its definition for one client's quadratics.

    Full batches are used, so that independent draws make no difference.
    """
    task, multiplier = quadratic(clients=1, noise=0.0), 4.0
    f, g = ({name: leaf[0] for name, leaf in rows.row(0).items()} for rows in (task.clients.outer, task.clients.inner))
    x, y, v = np.linspace(-1, 1, 5), np.linspace(2, 0, 8), np.linspace(0, 1, 8)
    method = fb.F2SA(
        batch_size=None, local_steps=1, client_lr=1.0, server_lr=1.0, independent_batches=independent,
        multiplier=multiplier,
    )  # fmt: skip
    seen = {}

    class Seen(fb.F2SA):
        def directions(self, client, local, key):
            found = super().directions(client, XYV(jnp.asarray(x), jnp.asarray(y), jnp.asarray(v)), key)
            jax.debug.callback(lambda step: seen.update(step=step), found.step)
            return found

    method = Seen(**{name: getattr(method, name) for name in ("batch_size", "local_steps", "client_lr", "server_lr",
                                                              "independent_batches", "multiplier")})  # fmt: skip
    result = fb.solve(method, task.problem, task.clients, task.x0, task.y0, rounds=1, engine=fb.Reference())
    high, low, back = y - v / multiplier, y + v / multiplier, multiplier / 2
    f_y, g_y = [outer_gradient(f, x, at) for at in (high, low)], [inner_gradient(g, x, at) for at in (high, low)]
    d_x = hypergradient(f, g, x, y, v)  # ∇x f is affine in y, and ∇x g linear, so that the differences are exact
    d_y = (g_y[0] + g_y[1]) / 2 + (f_y[0] - f_y[1]) / (2 * multiplier)
    d_v = back * (g_y[1] - g_y[0]) - (f_y[0] + f_y[1]) / 2
    for got, expected in zip(seen["step"], (d_x, d_y, d_v), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-11)
    assert result.ledger.gradients == (12 if independent else 4)
    assert result.ledger.hvps == 0


@jax.custom_vjp
def once(y):
    """Compute ½‖y‖², whose gradient JAX cannot differentiate, since it is computed outside JAX.

    Some attention kernels compute their gradients in this way.
    """
    return jnp.vdot(y, y) / 2


def outside(y, scale):
    return jax.pure_callback(lambda y, scale: np.asarray(y * scale), y, y, scale, vmap_method="broadcast_all")


once.defvjp(lambda y: (once(y), y), lambda y, scale: (outside(y, jnp.broadcast_to(scale, y.shape)),))


def test_a_loss_that_can_be_differentiated_once_is_enough():
    """F2SA solves a problem whose inner loss can be differentiated only once; SimFBO refuses it.

    With g = ½‖y − x‖² and f = ½‖y − t‖² + ½‖x‖², y*(x) = x, so that x* is mean t/2 in each entry.
    """
    targets = np.array([[1.0, 3.0], [2.0, 5.0]])
    problem = fb.Bilevel(
        lambda x, y, t: (jnp.vdot(y - t[0], y - t[0]) + jnp.vdot(x, x)) / 2, lambda x, y, t: once(y - x)
    )
    clients = fb.Clients([row[None] for row in targets])
    start = {"x0": np.zeros(2), "y0": np.zeros(2)}
    steps = {"batch_size": None, "local_steps": 1, "client_lr": 1.0, "server_lr": 0.3}
    result = fb.solve(fb.F2SA(**steps), problem, clients, **start, rounds=100, engine=fb.Reference())
    np.testing.assert_allclose(result.x, targets.mean(0) / 2, atol=1e-5)
    with refuses("", fact="Pure call"):
        fb.solve(fb.SimFBO(**steps), problem, clients, **start, rounds=1, engine=fb.Reference())


@jax.custom_vjp
def counted(y, steps):
    """Compute ½‖y‖², whose gradient is a loop of JAX that only forward mode can differentiate."""
    return jnp.vdot(y, y) / 2


def added(kept, scale):
    y, steps = kept
    return jax.lax.fori_loop(0, steps, lambda k, total: total + scale * y / steps, jnp.zeros_like(y)), None


counted.defvjp(lambda y, steps: (counted(y, steps), (y, steps)), added)


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [lambda y: once(y), lambda y: counted(y, jnp.argmax(y) + 2)],
    ids=["outside", "loop"],
)
def test_methods_of_second_derivatives_say_what_they_cannot_differentiate(loss):
    """A method that needs second derivatives says that it cannot differentiate the gradient; F2SA runs.

    The inner loss is a loop over samples, and `Local` vectorises it over clients.
    """
    samples = {"t": np.random.default_rng(0).normal(size=(3, 2, 4))}

    def inner(x, y, batch):
        return jnp.mean(
            jax.vmap(lambda t: jax.lax.scan(lambda c, x: (c + loss(y - x - t), None), 0.0, x)[0])(batch["t"])
        )

    problem = fb.Bilevel(lambda x, y, batch: jnp.mean((y - batch["t"]) ** 2) + jnp.sum(x**2), inner)
    arguments = problem, fb.Clients(samples), np.zeros((2, 4)), np.zeros(4)
    steps = {"batch_size": None, "local_steps": 2, "client_lr": 0.1, "server_lr": 0.1}
    assert np.all(np.isfinite(fb.solve(fb.F2SA(**steps), *arguments, rounds=2).x))
    with refuses("", fact="fb.F2SA"):
        fb.solve(fb.SimFBO(**steps), *arguments, rounds=2)


@pytest.mark.slow
def test_a_transformer_whose_attention_has_no_second_derivatives(monkeypatch):
    """F2SA gives the same numbers with attention in blocks as with the whole matrix of attention weights.

    All of the transformer is y. The attention in blocks has no second derivatives.
    """
    monkeypatch.setattr(transformer, "BLOCK", 2)
    rng, y0 = np.random.default_rng(0), transformer.start(jax.random.key(0), side=4, width=4, layers=1, classes=3)
    clients = fb.Clients({"image": rng.normal(size=(2, 2, 4, 4)), "label": np.array([[0, 1], [2, 1]])})

    def posed(attention):
        def losses(y, batch):
            logits = transformer.logits(y, batch["image"], attention, heads=2)
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])

        def inner(x, y, batch):
            return jnp.mean(jnp.exp(x[batch["label"]]) * losses(y, batch)) + optax.tree.norm(y, squared=True) / 10

        return fb.Bilevel(lambda x, y, batch: jnp.mean(losses(y, batch)), inner), clients, np.zeros(3), y0

    steps = {"batch_size": None, "local_steps": 1, "client_lr": 0.1, "server_lr": 0.1}
    whole, blocks = (
        fb.solve(fb.F2SA(**steps), *posed(attention), rounds=2)
        for attention in (transformer.plain, transformer.in_blocks)
    )
    for have, want in zip(jax.tree.leaves(blocks.state), jax.tree.leaves(whole.state), strict=True):
        np.testing.assert_allclose(have, want, rtol=0, atol=1e-8)  # differences lose six digits
    assert np.linalg.norm(whole.x) > 1e-4
    with refuses("", fact="Reverse"):
        fb.solve(fb.SimFBO(**steps), *posed(transformer.in_blocks), rounds=1)

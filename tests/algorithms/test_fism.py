"""Do FISM and IR-IG compute what the paper writes, and do they end where its theorems say?"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import simple_bilevel as flat
from agreement import SIMPLE_BILEVEL, Case
from scipy import optimize

import fedbilevel as fb
from fedbilevel.tasks.location import location

AGREEMENT = {
    "FISM, walks of unequal length in random order": Case(
        fb.FISM(order="random", lr=0.1), problem=SIMPLE_BILEVEL, slow=True
    ),
    "asynchronous FISM, drawn samples": Case(
        fb.Asynchronous(fb.FISM(lr=0.1), wait_for=2),
        work=(1, 4),
        problem=SIMPLE_BILEVEL,
        clock=fb.Clock(compute=0.1, spread=0.5, stragglers=2),
        slow=True,
    ),
}
NEVER_LATE = {fb.IRIG: "a single client has all samples"}
LEARNS = {fb.FISM: "selection", fb.IRIG: "selection"}

SIZES, WEIGHTS, ROUNDS, DIM = (2, 4, 3), np.array([1.0, 2.0, 0.5]), 4, 3
LR, A, REGULARIZATION, B = 0.3, 0.7, 0.2, 0.25
LOW, HIGH = -0.3, 0.4
RNG = np.random.default_rng(0)
DATA = [{"a": RNG.normal(size=(n, DIM)), "b": RNG.normal(size=n)} for n in SIZES]
CENTER, START = np.array([0.5, -1.0, 0.1]), np.array([0.2, -0.1, 0.3])
NUMBERS = np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])  # the numbers of each client's samples
EVERY = {name: np.concatenate([one[name] for one in DATA]) for name in ("a", "b")}
CLIENTS = [{**one, "number": number} for one, number in zip(DATA, NUMBERS, strict=True)]
FIELDS = {"lr": LR, "lr_decay": A, "regularization": REGULARIZATION, "regularization_decay": B}


def tree(row):
    return {"w": jnp.asarray(row[:2]), "c": jnp.asarray(row[2])}


def flattened(x):
    return np.append(x["w"], x["c"])


def preference(x):
    row = jnp.append(x["w"], x["c"])
    return jnp.sum(row**2) / 2 + 0.3 * jnp.sum(jnp.abs(row - CENTER))


def absolute_loss(x, batch):
    return jnp.mean(jnp.abs(batch["a"] @ jnp.append(x["w"], x["c"]) - batch["b"]))


PROBLEM = fb.SimpleBilevel(preference, absolute_loss, fb.projections.box(LOW, HIGH))


def slope(x):
    """Return 𝓗, a subgradient of H at x."""
    return x + 0.3 * np.sign(x - CENTER)


def written_out(visits, refresh=False, shares=None, start=START):
    """Run Algorithm 1 line by line with f = |⟨a, x⟩ − b|; return (x_{K+1}, x̂_K). The paper's λ/m is λ here.

    visits[k][i] has the samples of client i's walk in round k, in their order. Replies are weighted by `shares`, or by
    p_i/n_i if `shares` is None.
    """
    x, total, steps, acted = start.copy(), np.zeros(DIM), 0.0, 0
    for k, walks in enumerate(visits, start=1):
        gamma, penalty = LR / k**A, REGULARIZATION / k**B
        h, ends = slope(x), []
        for walk in walks:
            z = x.copy()
            for j in walk:
                g = np.sign(EVERY["a"][j] @ z - EVERY["b"][j]) * EVERY["a"][j]
                free = z - gamma * (g + penalty * (slope(z) if refresh else h))
                z = np.clip(free, LOW, HIGH)
                acted += np.any(z != free)
            ends.append(z)
        total, steps = total + gamma * x, steps + gamma
        weights = WEIGHTS / [len(walk) for walk in walks] if shares is None else shares
        x = np.average(ends, axis=0, weights=weights)
    assert acted > 2
    return x, total / steps


ALL = fb.Clients(CLIENTS, weights=WEIGHTS)
IN_ORDER = [NUMBERS] * ROUNDS


def run(algorithm, clients=ALL, problem=PROBLEM, **options):
    return fb.solve(algorithm, problem, clients, tree(START), **{"rounds": ROUNDS, **options})


def same(result, expected):
    """Compare to 1e-12, since about 40 steps change numbers of size 1."""
    for have, want in zip((result.x, result.y), expected, strict=True):
        np.testing.assert_allclose(flattened(have), want, rtol=0, atol=1e-12)


def noting():
    """Return the problem, and a list to which its loss adds the number of each sample that it gets."""
    seen = []

    def loss(x, batch):
        if not isinstance(batch["number"], jax.core.Tracer):
            seen.append(int(batch["number"][0]))
        return absolute_loss(x, batch)

    return fb.SimpleBilevel(preference, loss, fb.projections.box(LOW, HIGH)), seen


def visited(algorithm, clients):
    """Run the reference engine; return the result and the samples that each client's walk went through."""
    problem, seen = noting()
    with jax.disable_jit():
        result = run(algorithm, clients, problem, engine=fb.Reference(), key=3)
    owner = np.repeat(np.arange(len(SIZES)), SIZES)
    walks, changes = [], np.flatnonzero(np.diff(owner[seen])) + 1
    for walk in np.split(np.array(seen), changes):
        walks.append(walk.tolist())
    return result, [walks[k : k + len(SIZES)] for k in range(0, len(walks), len(SIZES))]


def test_it_may_begin_anywhere():
    """x may begin outside of X, as the paper's x_1 does.

    The first projection brings x into X, and x̂ has the start among its terms.
    """
    outside = START + 2 * (HIGH - LOW)
    found = fb.solve(fb.FISM(**FIELDS), PROBLEM, ALL, tree(outside), rounds=ROUNDS)
    same(found, written_out(IN_ORDER, start=outside))


@pytest.mark.checked
def test_weights_that_are_not_the_papers_are_said():
    with pytest.warns(fb.errors.NumericalWarning, match=r"p_i/n_i.* Clients\(weights='size'\)"):
        run(fb.FISM(**FIELDS), rounds=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fb.errors.NumericalWarning)
        run(fb.FISM(**FIELDS), fb.Clients(CLIENTS, weights="size"), rounds=1)


@pytest.mark.parametrize("wrapped", [False, True])
def test_as_written(wrapped):
    """FISM equals Algorithm 1 line by line, also with `Asynchronous` if no reply is late.

    Clients and their weights are unequal, f and H have kinks, x meets sides of its box, and x is a tree. With
    `Asynchronous`, the server adds up the differences between new and old replies. Here these are four differences of
    size 1, whose rounding errors are small enough for the tolerance of `same`.
    """
    algorithm = fb.FISM(**FIELDS)
    result = run(fb.Asynchronous(algorithm, wait_for=3) if wrapped else algorithm)
    same(result, written_out(IN_ORDER))
    assert result.ledger.gradients == ROUNDS * sum(SIZES)


def test_walks_compute_no_losses():
    """Walks do not compute F, which no step needs; it is measured if a metric asks for it."""
    loss = fb.PerClient(lambda x, y, batch: absolute_loss(x, batch), "inner")
    result = run(fb.FISM(**FIELDS), metrics_per_client={"loss": loss})
    assert "inner_loss" not in result.history.columns
    own = [np.mean(np.abs(one["a"] @ flattened(result.x) - one["b"])) for one in DATA]
    assert result.history["loss.mean"][-1] == pytest.approx(np.average(own, weights=WEIGHTS), rel=1e-12)


def test_weights_by_size_are_the_papers_plain_mean():
    """If p_i is in proportion to n_i, all p_i/n_i are equal, and the mean over clients is the paper's plain mean.

    λ is then the paper's own λ over m.
    """
    result = run(fb.FISM(**FIELDS), fb.Clients(CLIENTS, weights="size"))
    same(result, written_out(IN_ORDER, shares=np.ones(3)))


@pytest.mark.slow
def test_random_order():
    """In random order a walk takes every sample once in each round, in a new order, and equals NumPy in this order."""
    result, visits = visited(fb.FISM(order="random", **FIELDS), ALL)
    assert len(visits) == ROUNDS
    for walks in visits:
        assert [sorted(walk) for walk in walks] == [part.tolist() for part in NUMBERS]
    assert len({tuple(map(tuple, walks)) for walks in [*visits, NUMBERS]}) == ROUNDS + 1
    same(result, written_out(visits))


@pytest.mark.parametrize(
    ("algorithm", "population", "lengths"),
    [
        (fb.FISM(local_steps=3, **FIELDS), None, [2, 3, 3]),
        pytest.param(fb.FISM(**FIELDS), np.array([1, 3, 9]), [1, 3, 3], marks=pytest.mark.slow),
    ],
)
def test_drawn_samples(algorithm, population, lengths):
    """A walk takes as many different samples as asked for, or all samples if there are fewer.

    Its weight is p_i over its length.
    """
    result, visits = visited(algorithm, fb.Clients(CLIENTS, weights=WEIGHTS, local_steps=population))
    # samples beyond a walk's length are masked
    visits = [[walk[:n] for walk, n in zip(walks, lengths, strict=True)] for walks in visits]
    for walks in visits:
        assert [len(set(walk)) for walk in walks] == [len(walk) for walk in walks] == lengths
        assert all(set(walk) <= set(part) for walk, part in zip(walks, NUMBERS, strict=True))
    assert len({tuple(walks[1]) for walks in visits}) > 1
    same(result, written_out(visits))
    assert result.ledger.gradients == ROUNDS * sum(lengths)


def test_fresh_subgradients_with_one_client_are_ir_ig():
    """With one client, and a subgradient of H at every step's own z, FISM is IR-IG, equation (1).

    With one client and without these fresh subgradients, FISM is another method.
    """
    visits = [[np.arange(sum(SIZES))]] * ROUNDS
    expected = written_out(visits, refresh=True, shares=np.ones(1))
    for algorithm in (fb.IRIG(**FIELDS), fb.FISM(refresh=True, **FIELDS)):
        result = run(algorithm, fb.Clients(CLIENTS).pooled())
        same(result, expected)
        assert result.ledger.gradients == 2 * ROUNDS * sum(SIZES)
    other, _ = written_out(visits, shares=np.ones(1))
    assert np.linalg.norm(other - expected[0]) > 1e-3


def test_weights_decide_where_it_rests():
    """The weights p_i decide where x rests: at the minimiser of Σ p_i f̄_i + λH, which linear algebra finds.

    From there, a round of steps γ moves x by O(γ²), so that steps of a tenth move x by a hundredth, up to O(γ) of that.
    From the minimiser for the plain mean over samples, a round moves x by O(γ).
    """

    def minimiser(share):
        hessian = flat.EVERY_ROW.T @ (share[:, None] * flat.EVERY_ROW) + REGULARIZATION * np.eye(flat.DIM)
        right = flat.EVERY_ROW.T @ (share * flat.EVERY_TARGET) + REGULARIZATION * flat.ANCHOR
        return np.linalg.solve(hessian, right)

    problem = flat.within(100)

    def moved(start, lr):
        algorithm = fb.FISM(lr=lr, regularization=REGULARIZATION)
        result = fb.solve(algorithm, problem, flat.CLIENTS, start, rounds=1)
        return float(np.linalg.norm(result.x - start))

    own, plain = minimiser(flat.SHARE), minimiser(np.full(sum(flat.SIZES), 1 / sum(flat.SIZES)))
    assert 98 < moved(own, 1e-3) / moved(own, 1e-4) < 102
    assert 9.8 < moved(plain, 1e-3) / moved(plain, 1e-4) < 10.2


def test_the_nearest_of_many_minimisers():
    """x ends near x*, the minimiser of F that is nearest to the anchor.

    x_k follows x_λ, whose distance from x* is O(λ). x ends within twice this distance, because x_k is behind x_λ, and
    the order of a walk has an effect of O(γ). The average still has the first iterates in it, and arrives later.
    """
    rounds = 4000
    result = flat.solved(fb.FISM(lr=0.5, regularization=0.1), rounds, every=rounds // 4)
    behind = np.linalg.norm(flat.on_path(0.1 / rounds**0.35) - flat.solution())
    assert result.history["error"][-1] < 2 * behind < 0.01
    for column in ("error", "average_error"):
        assert np.all(np.diff(result.history[column]) < 0)
    assert result.history["average_error"][-1] < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("first", [None, 2])
def test_where_balls_overlap(first):
    """x ends near the point common to all balls that is nearest to the anchor, in the location task.

    In one case the server waits for all replies. In the other one it goes on with two of three replies, and one client
    takes five times as long.

    F is 0 on what all balls have in common, and grows as a distance does outside. Therefore x_λ = x* already for some
    λ > 0. x is off by no more than its walks, which have three steps no longer than γ_K, since |∂f| ≤ 1.
    """
    task, rounds = location(dim=2, targets=9, clients=3), 2000
    balls = [task.clients.inner.row(i) for i in range(3)]
    centers, radii = (np.concatenate([ball[name] for ball in balls]) for name in ("center", "radius"))
    anchor = np.array(jax.grad(task.problem.outer)(jnp.zeros(2), None, None)) * -1  # ∇H(0) = −a, where a is the anchor
    found = optimize.minimize(
        lambda x: np.sum((x - anchor) ** 2) / 2,
        np.zeros(2),
        jac=lambda x: x - anchor,
        constraints={"type": "ineq", "fun": lambda x: radii**2 - np.sum((x - centers) ** 2, axis=1)},
        method="SLSQP",
        options={"ftol": 1e-12, "maxiter": 500},
    )
    assert found.success
    algorithm = fb.FISM(lr=2.0, regularization=0.1)
    algorithm = fb.Asynchronous(algorithm, wait_for=first, delay_penalty=0.0) if first else algorithm
    engine = fb.Local(clock=fb.Clock(spread=0.3, stragglers=1, slowdown=5.0))
    result = fb.solve(
        algorithm, task.problem, task.clients, task.x0, rounds=rounds, metrics=task.metrics, engine=engine
    )
    np.testing.assert_allclose(result.history["error"][-1], np.linalg.norm(result.x - found.x), rtol=0, atol=1e-6)
    assert result.history["error"][-1] < 3 * 2.0 / rounds**0.6 < 0.1 < result.history["error"][0]


@pytest.mark.slow
def test_the_rate_of_theorem_11():
    """The rate of Theorem 11, F(x̂_K) − F* = O(K^−b) with a = ½ + ε/2 and b = ½ − ε, holds for one family of problems.

    The problems are F = mean |s⟨v, x⟩|^p/p and H = ½‖x − hv‖². The test compares the rates with those derived here.

    F depends on t = ⟨v, x⟩ alone and is 0 at t = 0. With c the mean of s^p, x_λ has c t^{p−1} = λ (h − t). As long as t
    is much less than h, t = (λh/c)^{1/(p−1)}, so that F(x_k) falls as K^{−bp/(p−1)}.

    x̂_K has the mean of these t, weighted by γ_k. In the end this falls as K^{−b/(p−1)}, but only after K = 10,000.
    Therefore the expected rate of x̂_K is that of this sum itself. The theorem's bound holds for all p.

    x has a row for each of 16 instances, which differ in s, v and h, and which start on their paths. Standard errors
    are those of the mean of the instances' slopes, which are fitted over two decades.
    """
    p, instances, rounds, epsilon, first, last = 4, 16, 10_000, 0.2, 100, 10_000
    a, b, penalty, rng = 0.5 + epsilon / 2, 0.5 - epsilon, 0.003, np.random.default_rng(0)
    s, h = rng.uniform(0.7, 1.3, (2, 8, instances)), rng.uniform(100, 200, instances)
    v = rng.normal(size=(instances, 2))
    v /= np.linalg.norm(v, axis=1, keepdims=True)
    c = np.mean(s**p, axis=(0, 1))

    def on_path(k):
        """Return t of x_λ by Newton's method, in a row for each k."""
        weight = penalty / np.reshape(k, (-1, 1)) ** b
        t = (weight * h / c) ** (1 / (p - 1))
        for _ in range(20):
            t = t - (c * t ** (p - 1) - weight * (h - t)) / (c * (p - 1) * t ** (p - 2) + weight)
        return t

    problem = fb.SimpleBilevel(
        lambda x: jnp.sum((x - h[:, None] * v) ** 2) / 2,
        lambda x, batch: jnp.mean(jnp.sum(jnp.abs(batch * jnp.sum(v * x, axis=1)) ** p, axis=1)) / p,
        fb.projections.box(-300, 300),
    )
    seen = {}

    def look(result, row):
        if row is not None and row["round"] >= first:
            seen[row["round"]] = [np.sum(v * x, axis=1) for x in (result.x, result.y)]

    algorithm = fb.FISM(lr=0.5, lr_decay=a, regularization=penalty, regularization_decay=b)
    start = on_path(1)[0][:, None] * v
    fb.solve(algorithm, problem, fb.Clients(list(s)), start, rounds=rounds, eval_every=first, callbacks=[look])

    ks = np.unique(np.round(np.geomspace(first, last, 30) / first).astype(int)) * first

    def slopes(t):
        gaps = c * np.abs(t) ** p / p
        return np.polyfit(np.log(ks), np.log(gaps), 1)[0]

    def mean_and_error(values):
        return np.mean(values), np.std(values, ddof=1) / np.sqrt(instances)

    every = np.arange(1, rounds + 1)
    gamma = every**-a
    derived = np.mean(slopes((np.cumsum(gamma[:, None] * on_path(every), axis=0) / np.cumsum(gamma)[:, None])[ks - 1]))
    iterate, average = (slopes(np.array([seen[k][which] for k in ks])) for which in (0, 1))
    mean, error = mean_and_error(iterate)
    assert abs(mean + b * p / (p - 1)) < 3 * error < 0.01
    mean, error = mean_and_error(average)
    assert abs(mean - derived) < 2 * error < 0.02
    assert mean < -b - 2 * error


def test_two_constraints():
    """If f is constant, all points of X are minimisers, and x ends at the anchor's projection onto X.

    X is the intersection of a box and a half-space, and the projection is clip(a − t·1) with the sum 0.6, where
    bisection finds t. A round has three steps along one 𝓗 = x − a. It multiplies the remaining distance by 1 − 3γ_kλ_k,
    and the product of these factors over 100 rounds is 4e-8. Clients walk vectorised.
    """
    anchor = np.array([1.5, 0.4, 0.2, -2.0])
    at = lambda t: np.clip(anchor - t, -0.5, 0.8)  # noqa: E731
    exact = at(optimize.brentq(lambda t: at(t).sum() - 0.6, 0.0, 3.0, xtol=1e-15))
    problem = fb.SimpleBilevel(
        lambda x: jnp.sum((x - anchor) ** 2) / 2,
        lambda x, batch: jnp.mean(batch),
        fb.projections.intersection(fb.projections.half_space(1, 0.6), fb.projections.box(-0.5, 0.8)),
    )
    clients = fb.Clients([np.zeros(3), np.zeros(3)])
    result = fb.solve(fb.FISM(regularization=1.0), problem, clients, np.array([0.0, -0.4, 0.5, 0.0]), rounds=100)
    np.testing.assert_allclose(result.x, exact, rtol=0, atol=1e-6)


def test_cohorts():
    """With cohorts, replies are weighted such that the mean over cohorts is the mean over all clients.

    Two of three clients take part in a round. A reply has the weight p_i (M/P)/n_i, divided by the mean of the cohorts'
    sums of these weights in the rounds so far. If each cohort were divided by its own sum, the mean over cohorts would
    be another one.
    """
    problem, seen = noting()
    with jax.disable_jit():
        result = run(fb.FISM(**FIELDS), problem=problem, cohort=2, engine=fb.Reference(), key=0)
    owner, cohorts = np.repeat(np.arange(len(SIZES)), SIZES), []
    while seen:
        cohorts.append(int(owner[seen[0]]))
        del seen[: SIZES[cohorts[-1]]]
    x, shares, p = START.copy(), [], WEIGHTS / WEIGHTS.sum()
    for k, ids in enumerate(np.reshape(cohorts, (ROUNDS, 2)), start=1):
        gamma, penalty = LR / k**A, REGULARIZATION / k**B
        way, h = np.zeros(DIM), slope(x)
        for i in ids:
            z = x
            for a, b in zip(DATA[i]["a"], DATA[i]["b"], strict=True):
                z = np.clip(z - gamma * (np.sign(a @ z - b) * a + penalty * h), LOW, HIGH)
            way = way + p[i] * 3 / 2 / SIZES[i] * (z - x)
        shares.append(sum(p[i] * 3 / 2 / SIZES[i] for i in ids))
        x = np.clip(x + way / np.mean(shares), LOW, HIGH)
    assert len({round(share, 9) for share in shares}) > 1
    np.testing.assert_allclose(flattened(result.x), x, rtol=0, atol=1e-12)

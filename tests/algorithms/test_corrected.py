"""Does CorrectedFBO end at the solution with any number of local steps, and compute its equations?"""

import agreement
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks.peers import fedmsa
from test_simfbo import WORK, affine, relative_error, run, spread, weights_of

import fedbilevel as fb
from fedbilevel import authoring
from fedbilevel.engines.engine import first_carry
from fedbilevel.tasks.quadratic import quadratic, solution
from fixed_steps import fixed

AGREEMENT = {
    "CorrectedFBO, mini-batches": agreement.Case(
        fixed(fb.CorrectedFBO(batch_size=4, local_optimizer=fb.parts.Momentum(decay=0.5), radius=0.5)),
        work=agreement.WORK,
        slow=True,
    ),
}
NEVER_LATE = {fb.CorrectedFBO: "paths follow the mean direction of the last round"}
FAR = fb.XYV(0.01, 0.1, 0.1)
"""Steps so long that 20 of them lead a good part of the way to each client's own solution."""


@pytest.mark.parametrize(
    "work",
    [*(pytest.param(count, marks=pytest.mark.slow) for count in (5, 20)), WORK * 3],
    ids=["5", "20", "unequal"],
)
def test_it_ends_at_the_solution_whatever_the_local_steps(work):
    """CorrectedFBO ends at x*, to rounding, for any numbers of local steps; ShroFBO and SimFBO end elsewhere.

    On a quadratic, d_i(z) is affine. A round is then one affine map, and its fixed point is x*. The other two methods
    do not correct the paths of the clients.
    """
    task = quadratic(clients=8, condition=5, samples=(2, 2)).with_own(local_steps=np.broadcast_to(work, 8))
    exact, mean = solution(task.clients), float(np.mean(work))
    fields = {"batch_size": None, "client_lr": FAR, "server_lr": fb.XYV(*(lr / mean for lr in (0.1, 0.5, 0.5)))}
    corrected = run(fb.CorrectedFBO(**fields), task, 1_000)
    assert relative_error(corrected.x, exact.x) < 1e-10
    assert relative_error(corrected.y, exact.y) < 1e-10
    for plain in (fb.ShroFBO, fb.SimFBO):
        assert relative_error(run(plain(**fields), task, 300).x, exact.x) > 1e-2


@pytest.mark.slow
def test_with_one_local_step_there_is_no_path_to_correct():
    """With one local step, rounds are those of SimFBO for any mean m, since d_0 is taken at z, and both end at x*."""
    task = quadratic(clients=8, condition=5, samples=(2, 2))
    fields = {"local_steps": 1, "batch_size": None, "client_lr": FAR, "server_lr": fb.XYV(0.1, 0.5, 0.5)}
    corrected, plain = (run(method(**fields), task, 1_000) for method in (fb.CorrectedFBO, fb.SimFBO))
    assert relative_error(corrected.x, solution(task.clients).x) < 1e-10
    np.testing.assert_allclose(corrected.x, plain.x, rtol=1e-12)


@pytest.mark.slow
def test_it_ends_at_the_solution_by_steps_that_adapt():
    """CorrectedFBO also ends at the solution with steps that adapt.

    The server makes the longest step that is safe for a single direction, and clients a twentieth of it.
    """
    task = quadratic(clients=4, condition=5, samples=(2, 2))
    result = run(fb.CorrectedFBO(local_steps=20, batch_size=None), task, 600)
    assert relative_error(result.x, solution(task.clients).x) < 1e-8


@pytest.mark.parametrize("optimizer", [authoring.Plain(), fb.parts.Momentum(decay=0.6)], ids=["plain", "momentum"])
def test_equals_rounds_written_out(optimizer):
    """Four rounds equal the equations in NumPy, with the directions S z − s, where S and s are made of the samples."""
    task = quadratic(clients=8, noise=0.0, samples=(4, 4)).with_own(local_steps=WORK)
    eta, gamma = fb.XYV(0.03, 0.2, 0.1), fb.XYV(0.05, 0.1, 0.2)
    method = fb.CorrectedFBO(batch_size=None, client_lr=eta, server_lr=gamma, local_optimizer=optimizer)
    state = run(method, task, 4, engine=fb.Reference()).state

    p, coefficients = task.clients.weights, weights_of(optimizer, WORK)
    z, mean = np.zeros(21), np.zeros(21)
    decay = getattr(optimizer, "decay", 0.0)
    for _ in range(4):
        replies = np.zeros((8, 21))
        for i, (tau, a) in enumerate(zip(WORK, coefficients, strict=True)):
            slopes, shift = affine(task, i)
            at, buffer = z, np.zeros(21)
            for k in range(tau):
                d = slopes @ at - shift
                replies[i] += a[k] * d / a.sum()
                buffer = decay * buffer + (d - (slopes @ z - shift) + mean)
                at = at - spread(eta) * buffer
        mean = p @ replies
        z = z - spread(gamma) * (p @ [a.sum() for a in coefficients]) * mean
    np.testing.assert_allclose(np.concatenate(state.inside.iterate), z, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(np.concatenate(state.mean), mean, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_a_round_with_the_mean_direction_at_its_own_start_is_a_round_of_fedmsa():
    """If m is the mean direction at z, a round equals FedMSA's, by hand and by the program of benchmarks/peers.

    FedMSA, with full batches and without momentum, starts a client's estimate at the mean h = Σ p_i d_i(z) and updates
    it by differences, q_0 = h, z_{k+1} = z_k − ηq_k, q_{k+1} = q_k + d_i(z_{k+1}) − d_i(z_k); the server takes
    Σ p_i z_{i,τ}. Since Σ p_i (q_{i,k} − d_i(z_{i,k})) = 0, this is z − η Σ_k Σ p_i d_i(z_{i,k}) = z − ηρ Σ p_i h_i
    with ρ = τ, which is the round of CorrectedFBO with γ = η.
    """
    task, tau, eta = quadratic(clients=8, noise=0.0, samples=(4, 4)), 4, fb.XYV(0.03, 0.2, 0.1)
    p, z = task.clients.weights, np.random.default_rng(5).normal(size=21)
    maps = [affine(task, i) for i in range(8)]
    mean = sum(weight * (slopes @ z - shift) for weight, (slopes, shift) in zip(p, maps, strict=True))
    end = np.zeros(21)
    for weight, (slopes, shift) in zip(p, maps, strict=True):
        at, estimate = z, mean
        for _ in range(tau):
            moved = at - spread(eta) * estimate
            estimate = estimate + (slopes @ moved - shift) - (slopes @ at - shift)
            at = moved
        end += weight * at

    def parts(vector):
        return fb.XYV(*map(jnp.asarray, np.split(vector, [5, 13])))

    method = fb.CorrectedFBO(batch_size=None, local_steps=tau, client_lr=eta, server_lr=eta)
    given = method, task.problem, task.clients
    carry = first_carry(*given, parts(z).x, parts(z).y)
    inside = carry.state.inside._replace(iterate=parts(z))
    run = fb.Reference().start(*given, 8, jax.random.key(0), carry)
    state = run.advance(carry._replace(state=carry.state._replace(inside=inside, mean=parts(mean))), 1).carry.state
    np.testing.assert_allclose(np.concatenate(state.inside.iterate), end, rtol=1e-12, atol=1e-12)

    rows = {part: [getattr(task.clients, part).row(i) for i in range(8)] for part in ("outer", "inner")}
    data = {part: jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows[part]) for part in rows}
    program = fedmsa.program(task.problem, local_steps=tau)
    by_program = program(tuple(parts(z)), data, jnp.asarray(p), tuple(eta), 1)
    np.testing.assert_allclose(np.concatenate(by_program), end, rtol=1e-12, atol=1e-12)
    assert np.abs(end - (z - tau * spread(eta) * mean)).max() > 1e-3  # a plain step of the same length ends elsewhere


TAU = np.array([1, 2, 5, 9])
P = np.array([0.1, 0.2, 0.3, 0.4])


STARTS = np.tile(np.eye(3), (20, 1, 1))


def outer(x, y, batch):
    """Return Σ_r ⟨s_r, y_r⟩ for the starts s, so that v* = Ā⁻¹ for each problem; x has no influence on it."""
    return jnp.sum(x**2) + jnp.sum(y * STARTS)


def inner(x, y, batch):
    """Return Σ_r ½ y_rᵀA y_r over the rows y_r of y, added up over the problems."""
    return 0.5 * jnp.einsum("pri,npij,prj->", y, batch["A"], y) / len(batch["A"])


ROWS = fb.Bilevel(outer, inner)


def hessians(rng, top, common):
    """Draw symmetric matrices (4, 20, 3, 3), one for each of four clients in each of twenty problems.

    The eigenvalues are between 0.1 and `top`, and the largest of each matrix is `top`. With `common`, the four clients
    of a problem have the same matrix.
    """
    axes = np.linalg.qr(rng.normal(size=(4, 20, 3, 3)))[0]
    sizes = np.concatenate([rng.uniform(0.1, top, (4, 20, 2)), np.full((4, 20, 1), top)], axis=2)
    found = np.einsum("cpij,cpj,cpkj->cpik", axes, sizes, axes)
    return np.broadcast_to(found[:1], found.shape) if common else found


def maps_of_a_round(method, matrices, work):
    """Return the matrices (20, 6, 6) of a round on (y − y*, m_y), and on (v − v*, m_v), for twenty problems at once.

    y has three rows, each with its own start. v begins at 0, where v − v* has three rows as well. A round maps each row
    r_t = (e_t, m_t) to r_t Mᵀ. The starts r_0, which have m_0 = 0, and the rows r_1 after one round are together six
    independent rows, and determine M.
    """
    samples = {"A": matrices[:, None]}
    clients = fb.Clients(samples, samples, weights=P, local_steps=work)
    zero, mean = np.zeros_like(STARTS), np.einsum("c,cpij->pij", P, matrices)
    solutions = {"y": zero, "v": np.linalg.inv(mean)}
    rows = {"y": [np.concatenate([STARTS, zero], 2)], "v": [np.concatenate([-solutions["v"], zero], 2)]}
    for rounds in (1, 2):
        state = fb.solve(method, ROWS, clients, jnp.zeros(1), jnp.asarray(STARTS), rounds=rounds).state
        for name, at in rows.items():
            iterate, direction = getattr(state.inside.iterate, name), getattr(state.mean, name)
            at.append(np.concatenate([iterate - solutions[name], direction], 2))
    pairs = {name: [np.concatenate(at[t : t + 2], 1) for t in (0, 1)] for name, at in rows.items()}
    return [np.swapaxes(np.linalg.solve(*pairs[name]), 1, 2) for name in ("y", "v")]


def radius(method, matrices, work):
    """Return, for each problem, the spectral radius of the matrix by which a round multiplies the error of y.

    A round multiplies the error of v by the same matrix.
    """
    on_y, on_v = maps_of_a_round(method, matrices, work)
    np.testing.assert_allclose(on_v, on_y, rtol=1e-6, atol=1e-6)
    return np.abs(np.linalg.eigvals(on_y)).max(-1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:x does not change y")
@pytest.mark.parametrize("decay", [0.0, 0.7], ids=["plain", "momentum"])
def test_rounds_are_stable_under_the_condition_of_the_docstring(decay):
    """Rounds are stable if γρL + η(max‖a_i‖₁ − 1)L < 2, which is the condition in the method's docstring.

    The left side is 1.98 in all cases, with nearly all of it from γ, nearly all of it from η, and cases in between.
    """
    rng, top = np.random.default_rng(3), 4.0
    optimizer = fb.parts.Mixed(decay=decay)
    norms = np.array([float(optimizer.total(int(tau))) for tau in TAU])
    for share in (0.02, 0.3, 0.6, 0.98):
        gamma, eta = 1.98 * (1 - share) / (top * P @ norms), 1.98 * share / (top * (norms.max() - 1))
        steps = {"server_lr": fb.XYV(0.01, gamma, gamma), "client_lr": fb.XYV(0.01, eta, eta)}
        method = fb.CorrectedFBO(batch_size=None, local_optimizer=optimizer, **steps)
        assert radius(method, hessians(rng, top, common=False), TAU).max() < 1, share


@pytest.mark.filterwarnings("ignore:x does not change y")
def test_the_condition_is_sharp_for_two_steps_and_equal_hessians():
    """For two local steps and equal Hessians, rounds are stable exactly if γρL + ηL < 2, since β is then ηλ/2."""
    rng, top, work = np.random.default_rng(4), 4.0, np.full(4, 2)
    matrices = hessians(rng, top, common=True)
    for share in (0.3, 0.7):
        for size, stable in ((1.99, True), (2.01, False)):
            gamma, eta = size * (1 - share) / (2 * top), size * share / top
            steps = {"server_lr": fb.XYV(0.01, gamma, gamma), "client_lr": fb.XYV(0.01, eta, eta)}
            found = radius(fb.CorrectedFBO(batch_size=None, local_optimizer=fb.parts.Mixed(), **steps), matrices, work)
            assert np.all((found < 1) == stable), (share, size)


@pytest.mark.slow
def test_what_it_costs():
    """CorrectedFBO costs twice ShroFBO's gradients, products and bytes to the clients, and equally many bytes back.

    It evaluates the directions twice for each local step. Messages have x, y and v twice; replies are as long as
    ShroFBO's.
    """
    task = quadratic(clients=8).with_own(local_steps=WORK)
    ledgers = [run(fixed(m(batch_size=4)), task, 2).ledger for m in (fb.CorrectedFBO, fb.ShroFBO)]
    corrected, plain = ledgers
    assert corrected.gradients == 2 * plain.gradients == 2 * 2 * 2 * WORK.sum()
    assert corrected.hvps == 2 * plain.hvps
    assert corrected.bytes_up == plain.bytes_up
    assert corrected.bytes_down == 2 * plain.bytes_down
    assert corrected.exchanges == plain.exchanges == 2


def test_steps_that_are_anchored_already_are_refused():
    with pytest.raises(fb.errors.ConfigurationError) as refused:
        fb.CorrectedFBO(local_optimizer=fb.parts.Anchored())
    assert "CorrectedFBO.local_optimizer" in str(refused.value)

"""Do clients' own leaves of y and the shared ones solve the joint problem, and do own leaves stay with their client?

own_leaves.py has the problem and its closed form. Float64 is on throughout (conftest.py).
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from own_leaves import (
    ALL,
    CLIENTS,
    DIM_X,
    DIM_Y,
    MEMBERS,
    MIXED,
    OWN,
    POPULATION,
    RHO,
    SAMPLES,
    SHARED,
    SIMFBO,
    SINGLE,
    START,
    WEIGHTS,
    X0,
    closed_form,
    everyone,
    flat,
    inner,
    outer,
    run,
)

import fedbilevel as fb
from fedbilevel.algorithms.parts.composed import composed
from fedbilevel.engines.evaluation import PerClient
from fixed_steps import fixed
from refusals import ANY, raises_with, refuses

SERIES = fb.parts.LocalImplicit(solver=fb.parts.Neumann(terms=150, step=0.2))
SERIES_BY_DIFFERENCES = fb.parts.LocalImplicit(solver=SERIES.solver, second_order=fb.parts.Differences())
ROUNDS_ON_Y = fb.parts.LocalSGD(rounds=2, local_steps=2, lr=0.3)
MEANS = fb.parts.MeanGradient(rounds=2, local_steps=1, lr=0.2, client_lr=0.1)
BY_STEPS = fb.AFBO(batch_size=None, inner=MEANS, hypergradient=fb.parts.SystemSteps(lr=0.2), outer_lr=0.1)
EXACT_WHERE_MIXED = {
    "SimFBO": SIMFBO,
    "ShroFBO": fb.ShroFBO(**SINGLE, server_lr=0.2, client_lr=0.1),
    "F2SA": fb.F2SA(**SINGLE, server_lr=0.2, client_lr=0.1),
    "FedBiO": fb.FedBiO(**SINGLE, client_lr=0.2),
    "FedBiOAcc": fb.FedBiOAcc(**SINGLE, client_lr=0.2, forgetting=0.5),
    "AFBO": BY_STEPS,
    "AFBO, late": fb.Asynchronous(BY_STEPS, wait_for=2),
}
ALONE = {"batch_size": None, "hypergradient": SERIES, "outer_lr": 0.1}
EXACT_WHERE_ALL_ARE_OWN = {
    "SimFBO": SIMFBO,
    "AFBO": fb.AFBO(**ALONE, inner=MEANS),
    "RABO": fb.RABO(**ALONE, inner=ROUNDS_ON_Y),
    "FedBiO": EXACT_WHERE_MIXED["FedBiO"],
    "FedBiOAcc": EXACT_WHERE_MIXED["FedBiOAcc"],
    "RAFBO": fb.RAFBO(**ALONE | {"hypergradient": SERIES_BY_DIFFERENCES}, inner=ROUNDS_ON_Y),
    "LFedNest": fb.LFedNest(**ALONE, inner=ROUNDS_ON_Y),
}
SLOW = {"ShroFBO", "F2SA", "FedBiOAcc", "AFBO", "AFBO, late", "RABO", "RAFBO", "LFedNest"}


def some(methods):
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in methods]


@pytest.mark.parametrize("name", some(EXACT_WHERE_MIXED))
def test_the_joint_problem_with_shared_and_own_leaves(name):
    """Methods end at the solution of the joint problem with shared and own leaves.

    Errors fall by the factor 1 − 0.2·λ in a round, with λ ≥ 0.5 the least eigenvalue of the three systems, so that 600
    rounds leave none. The solutions with all of y shared, or with all of it own, are far away.
    """
    x, y = closed_form(SHARED)
    result = run(EXACT_WHERE_MIXED[name], rounds=1500 if "late" in name else 600)
    np.testing.assert_allclose(result.x, x, atol=1e-10)
    np.testing.assert_allclose(everyone(result), y, atol=1e-10)
    for other in (0, DIM_Y):
        assert np.linalg.norm(closed_form(other)[0] - x) > 0.1 * np.linalg.norm(x)


def test_meha_ends_where_the_derivatives_of_its_joint_saddle_problem_are_0():
    """MEHA ends where the derivatives of its joint saddle problem are 0.

    With Y as above, Θ of the same form, c = 10 and σ = 1, they are a linear system in (x, Y, Θ). With
    r_i(Y) = A_iE_iY − B_i x − c_i it is

        ρx − c Σ p_i B_iᵀE_i(Y − Θ) = 0
        Σ p_i E_iᵀ[E_iY − t_i + c (r_i(Y) − E_i(Y − Θ)/σ)] = 0,    Σ p_i E_iᵀ[r_i(Θ) + E_i(Θ − Y)/σ] = 0
    """
    penalty, size = 10.0, SHARED + CLIENTS * OWN
    takes = [np.zeros((DIM_Y, size)) for _ in MEMBERS]
    system, right = np.zeros((DIM_X + 2 * size,) * 2), np.zeros(DIM_X + 2 * size)
    for i, (p, e, (a, b, c, t)) in enumerate(zip(WEIGHTS, takes, MEMBERS, strict=True)):
        e[:SHARED, :SHARED], e[SHARED:, SHARED + i * OWN : SHARED + (i + 1) * OWN] = np.eye(SHARED), np.eye(OWN)
        hessian, pull, cross = p * e.T @ a @ e, p * e.T @ e, p * e.T @ b
        system += np.block(
            [
                [p * RHO * np.eye(DIM_X), -penalty * cross.T, penalty * cross.T],
                [-penalty * cross, pull + penalty * (hessian - pull), penalty * pull],
                [-cross, -pull, hessian + pull],
            ]
        )
        right += np.concatenate([np.zeros(DIM_X), p * e.T @ (t + penalty * c), p * e.T @ c])
    x, y, _ = np.split(np.linalg.solve(system, right), [DIM_X, DIM_X + size])
    method = fb.MEHA(**SINGLE, server_lr=fb.XYV(0.05, 0.2, 0.2), client_lr=0.1, penalty=penalty)
    result = run(method, rounds=4000)
    np.testing.assert_allclose(result.x, x, atol=1e-10)
    np.testing.assert_allclose(everyone(result), np.stack([e @ y for e in takes]), atol=1e-10)


@pytest.mark.parametrize("name", some(EXACT_WHERE_ALL_ARE_OWN))
def test_the_problem_of_everyones_own_y(name):
    """If all of y is own, methods end at the solution, and no message has an entry of y.

    The mean of the clients' own hypergradients is then the hypergradient. These are also the problems of FedBiO-Local
    and FedBiOAcc-Local. A Neumann series of n terms with step 0.2 leaves (1 − 0.2·λ)ⁿ of v with λ ≥ 1, which is 1e-14
    after 150 terms. RAFBO's differences of the gradients of a quadratic have no truncation error.
    """
    x, y = closed_form(0)
    result = run(EXACT_WHERE_ALL_ARE_OWN[name], ALL, rounds=400)
    np.testing.assert_allclose(result.x, x, atol=1e-10)
    np.testing.assert_allclose(everyone(result), y, atol=1e-10)
    # 2 numbers about the linear systems
    sent = {"SimFBO": DIM_X, "FedBiO": DIM_X, "FedBiOAcc": 2 * DIM_X}.get(name, DIM_X + 2)
    assert result.ledger.bytes_up == 400 * CLIENTS * sent * 8


def end_of_series(steps, terms):
    """Return the x where the mean of the clients' own hypergradients is 0, if all of y is own and series are cut off.

    A series of n terms with step s is v = P (y − t) with P = [I − (I − sA)ⁿ] A⁻¹. With y = A⁻¹(Bx + c), the mean of the
    hypergradients ρx + BᵀP(y − t) is 0 where

        [ρI + Σ p_i B_iᵀP_iA_i⁻¹B_i] x = Σ p_i B_iᵀP_i (t_i − A_i⁻¹c_i)
    """
    system, right = RHO * np.eye(DIM_X), np.zeros(DIM_X)
    for p, s, (a, b, c, t) in zip(WEIGHTS, steps, MEMBERS, strict=True):
        inverse = np.linalg.inv(a)
        series = (np.eye(DIM_Y) - np.linalg.matrix_power(np.eye(DIM_Y) - s * a, terms)) @ inverse
        system += p * b.T @ series @ inverse @ b
        right += p * b.T @ series @ (t - inverse @ c)
    return np.linalg.solve(system, right)


def run_with_series(**fields):
    hypergradient = fb.parts.LocalImplicit(**fields)
    return run(fb.RABO(**ALONE | {"hypergradient": hypergradient}, inner=ROUNDS_ON_Y), ALL, rounds=400)


@pytest.mark.slow
@pytest.mark.parametrize("step", [0.1, 0.2])
def test_a_series_of_default_length_ends_where_its_own_hypergradients_vanish(step):
    """With 20 terms, the default, x ends at `end_of_series`, which is 5e-3 (step 0.1) or 3e-4 (step 0.2) from x*."""
    end = end_of_series([step] * CLIENTS, 20)
    assert np.abs(end - closed_form(0)[0]).max() > 1e-4
    result = run_with_series(solver=fb.parts.Neumann(step=step))
    np.testing.assert_allclose(result.x, end, atol=1e-12)


@pytest.mark.slow
def test_the_error_that_the_default_series_leaves():
    """All defaults leave an error of 8e-5 in x: 20 terms with the step 1/L_i, which each client measures.

    With the true largest curvatures L_i, `end_of_series` is at the distance 8.2e-5 from x*. The power method finds L_i
    to a few per cent. If all L_i are a factor of 1 ± 0.1 off, then (1 − μ/L_i)²⁰ with μ/L_i ≈ 0.27 changes by e^∓0.75.
    So the distance changes by a factor of about 2 at most.
    """
    solution = closed_form(0)[0]
    expected = np.abs(end_of_series([1 / np.linalg.eigvalsh(a)[-1] for a, *_ in MEMBERS], 20) - solution).max()
    np.testing.assert_allclose(expected, 8.2e-5, rtol=0.01)
    assert expected / 2 < np.abs(run_with_series().x - solution).max() < 2 * expected


SLOWER = fb.SimFBO(**SINGLE, server_lr=0.05, client_lr=0.1)
LAYERS = {
    "TopK": (fb.layered(SLOWER, fb.parts.TopK(share=0.4)), 3000),
    "Asynchronous": (
        fb.Asynchronous(fb.SimFBO(**SINGLE, server_lr=0.1, client_lr=0.1), wait_for=2, delay_penalty=0.0),
        2500,
    ),
    "OuterOptimizer": (fb.OuterOptimizer(SIMFBO, optimizer=optax.sgd(0.5, momentum=0.5)), 800),
}


@pytest.mark.parametrize(
    "name", ["OuterOptimizer", *[pytest.param(name, marks=pytest.mark.slow) for name in ("TopK", "Asynchronous")]]
)
def test_layers_leave_the_solution_where_it_is(name):
    """Layers leave the solution x*, y* where it is.

    Where all directions are 0, EF21's memory, late replies and momentum change nothing, so that x* is a fixed point.
    """
    method, rounds = LAYERS[name]
    x, y = closed_form(SHARED)
    result = run(method, rounds=rounds)
    np.testing.assert_allclose(result.x, x, atol=1e-10)
    np.testing.assert_allclose(everyone(result), y, atol=1e-10)


def test_x_stays_in_its_set():
    """Only the last entry of x* lies outside of the box.

    x ends at the best point of the side of the box that bounds this entry.
    """
    bound = 0.15
    assert closed_form(SHARED)[0][-1] > bound
    box = fb.projections.box(np.full(DIM_X, -1.0), np.array([1.0, 1.0, bound]))
    x, y = closed_form(SHARED, last=bound)
    result = run(SIMFBO, fb.Bilevel(outer, inner, own=MIXED.own, project_x=box), rounds=600)
    np.testing.assert_allclose(result.x, x, atol=1e-10)
    np.testing.assert_allclose(everyone(result), y, atol=1e-10)


def test_noise_is_on_what_is_sent_and_not_on_own_leaves():
    """Privacy adds noise to what is sent, and none to a client's step on its own leaves.

    In one round, own leaves are the same as without privacy, up to the rounding of a sum.
    """
    privacy = fb.Privacy(clip=1e6, noise_multiplier=1e-7, delta=1e-5)  # nothing is clipped
    plain, noisy = run(SIMFBO, rounds=1), run(SIMFBO, rounds=1, privacy=privacy)
    off = np.abs(everyone(noisy) - everyone(plain)).max(0)
    assert off[:SHARED].min() > 1e-4
    np.testing.assert_allclose(off[SHARED:], 0, atol=1e-15)
    assert np.abs(noisy.x - plain.x).min() > 1e-4


def stiff(adapts):
    """Run with a first client of weight 0.1 and 40 times the curvature: L_1 = 40·λ, and Σ p_i L_i is about L_1/10."""
    samples = [{**one, "A": one["A"] * (40 if i == 0 else 1)} for i, one in enumerate(SAMPLES)]
    return run(adapts, ALL, rounds=600, clients=fb.Clients(samples, weights=WEIGHTS)), samples


@pytest.mark.parametrize(
    "name", ["SimFBO", *[pytest.param(name, marks=pytest.mark.slow) for name in ("FedBiO", "AFBO", "LFedNest")]]
)
def test_steps_that_adapt_are_each_clients_own(name):
    """With steps that adapt, own leaves follow the curvature of their client, and are y* at the end.

    The common step 1/Σ p_i L_i is above 2/L_1; with it, the own leaves of the first client would diverge. Under
    LFedNest x still moves by about 1e-3 in a round, and y follows it.
    """
    adapts = {
        "SimFBO": fb.SimFBO(**SINGLE),
        "FedBiO": fb.FedBiO(**SINGLE),
        "AFBO": fb.AFBO(batch_size=None, hypergradient=fb.parts.SystemSteps()),
        "LFedNest": fb.LFedNest(batch_size=None, hypergradient=fb.parts.LocalImplicit()),
    }
    result, samples = stiff(adapts[name])
    assert "halvings" not in result.history.rows[-1]
    curvatures = [np.linalg.eigvalsh(one["A"][0])[-1] for one in samples]
    assert 1 / (WEIGHTS @ curvatures) > 2 / curvatures[0]
    for i, one in enumerate(samples):
        y = np.linalg.solve(one["A"][0], one["B"][0] @ result.x + one["c"][0])
        np.testing.assert_allclose(flat(result.own(i)), y, atol=1e-3 if name == "LFedNest" else 1e-6)


def test_steps_written_out():
    """Three rounds equal NumPy: shared entries move by γ (M/P) Σ p_i d_i, and a client's own ones by γ d_i.

    Cohorts have two clients. A client that is not asked keeps its own leaves as they are.
    """
    lr, cohort = fb.XYV(0.05, 0.1, 0.2), 2
    result = run(fb.SimFBO(**SINGLE, server_lr=lr, client_lr=0.3), rounds=3, cohort=cohort, key=5)
    x, y, v = X0, np.tile(flat(START), (CLIENTS, 1)), np.zeros((CLIENTS, DIM_Y))
    for round in range(3):
        change = np.zeros(DIM_X), np.zeros(SHARED), np.zeros(SHARED)
        asked = fb.Cohort(cohort).draw(drawn_key(5, round), CLIENTS)
        moved = y.copy(), v.copy()
        for i in np.asarray(asked):
            a, b, c, t = MEMBERS[i]
            d_y, d_v = a @ y[i] - b @ x - c, a @ v[i] - (y[i] - t)
            directions = RHO * x + b.T @ v[i], d_y[:SHARED], d_v[:SHARED]
            change = [s + CLIENTS / cohort * WEIGHTS[i] * d for s, d in zip(change, directions, strict=True)]
            moved[0][i, SHARED:] -= lr.y * d_y[SHARED:]
            moved[1][i, SHARED:] -= lr.v * d_v[SHARED:]
        y, v = moved
        x = x - lr.x * change[0]
        y[:, :SHARED] -= lr.y * change[1]
        v[:, :SHARED] -= lr.v * change[2]
    np.testing.assert_allclose(result.x, x, atol=1e-14)
    np.testing.assert_allclose(everyone(result), y, atol=1e-14)


def drawn_key(seed, round):
    return jax.random.split(jax.random.fold_in(jax.random.key(seed), round), 3)[0]


MANY = {"local_steps": 3, "batch_size": 2}
CASES = {
    "SimFBO": fb.SimFBO(**MANY, server_lr=0.02, client_lr=0.03, local_optimizer=fb.parts.Momentum(decay=0.5)),
    "ShroFBO": fb.ShroFBO(**MANY, server_lr=0.02, client_lr=0.03),
    "AFBO, late": fixed(fb.Asynchronous(fb.AFBO(batch_size=2, hypergradient=fb.parts.SystemSteps()), wait_for=2)),
}


@pytest.mark.parametrize(
    "name", [pytest.param("SimFBO"), *some(["ShroFBO"]), pytest.param("AFBO, late", marks=pytest.mark.slow)]
)
def test_engines_agree(name):
    """With chunks, devices and a cohort of three, x, y, history and bytes are the reference's, to rounding."""
    clients = fb.Clients([{k: np.repeat(a, 2 + i % 2, 0) for k, a in one.items()} for i, one in enumerate(SAMPLES)])
    cohort = None if "late" in name else 3
    devices = min(2, jax.local_device_count())
    options = {"rounds": 2, "cohort": cohort, "clients": clients, "metrics_per_client": {"loss": outer}}
    chunk = 2 if cohort is None else 1
    a, b = (run(CASES[name], engine=e, **options) for e in (fb.Reference(), fb.Local(devices=devices, chunk=chunk)))
    np.testing.assert_allclose(a.x, b.x, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(everyone(a), everyone(b), rtol=1e-12, atol=1e-12)
    for column in ("loss.mean", "loss.worst", "outer_loss", "bytes_up", "bytes_down"):
        np.testing.assert_allclose(a.history[column], b.history[column], rtol=1e-12, err_msg=column)
    assert np.ptp(everyone(a)[:, SHARED:], 0).min() > 1e-4


def test_a_resumed_run_has_every_clients_leaves_to_the_bit(tmp_path):
    whole = run(SIMFBO, rounds=5, cohort=2)
    run(SIMFBO, rounds=2, cohort=2, checkpoint=tmp_path / "run")
    rest = run(SIMFBO, rounds=5, cohort=2, checkpoint=tmp_path / "run", resume=True)
    jax.tree.map(np.testing.assert_array_equal, (rest.x, rest.y, rest.best.y), (whole.x, whole.y, whole.best.y))


def test_metrics_are_of_each_clients_own_y():
    """Metrics of clients use each client's own y, also on inner samples and in blocks of several clients."""
    measures = {"f": outer, "g": PerClient(inner, "inner")}
    heads = {"heads": lambda x, y: jnp.sum(y["own"][1])}  # own leaves have the shape (M, OWN)
    result = run(SIMFBO, rounds=6, metrics=heads, metrics_per_client=measures)
    row = result.history.rows[-1]
    each = np.array([outer(result.x, result.own(i), SAMPLES[i]) for i in range(CLIENTS)])
    assert row["f.mean"] == pytest.approx(WEIGHTS @ each, rel=1e-12)
    assert row["f.worst"] == pytest.approx(each.max(), rel=1e-12)
    assert row["f.p50"] == pytest.approx(np.median(each), rel=1e-12)
    inner_losses = [inner(result.x, result.own(i), SAMPLES[i]) for i in range(CLIENTS)]
    assert row["g.worst"] == pytest.approx(float(max(inner_losses)), rel=1e-12)
    assert row["heads"] == pytest.approx(float(np.sum(result.y["own"][1])), rel=1e-12)


def test_a_result_is_read_back_with_its_own_leaves(tmp_path):
    result = run(SIMFBO, rounds=2)
    result.save(tmp_path / "result.npz")
    read = fb.Result.load(tmp_path / "result.npz")
    assert read.own_leaves == ("own",)
    np.testing.assert_array_equal(flat(read.own(2)), flat(result.own(2)))


def test_a_client_who_was_never_there():
    """For a client that was not in the run, own leaves solve A_oo o = (B x + c)_o − A_os s at the shared s and x."""
    result = run(SIMFBO, rounds=20)
    a, b, c, _ = MEMBERS[0]
    new = fb.personalise(MIXED, result, SAMPLES[0])
    right = (b @ result.x + c)[SHARED:] - a[SHARED:, :SHARED] @ result.y["shared"]
    np.testing.assert_allclose(new["own"], np.linalg.solve(a[SHARED:, SHARED:], right), atol=1e-12)
    np.testing.assert_array_equal(new["shared"], result.y["shared"])
    again = fb.personalise(MIXED, result, SAMPLES[0], start=START)
    np.testing.assert_allclose(again["own"], new["own"], atol=1e-12)


def test_a_network_that_is_not_convex_is_not_said_to_be_trained():
    bumpy = fb.Bilevel(outer, lambda x, y, batch: -jnp.sum(flat(y) ** 2) + 0 * batch["c"].sum(), own=MIXED.own)
    with pytest.raises(fb.errors.NumericalError, match=r"not convex in the client's own leaves"):
        fb.personalise(bumpy, run(SIMFBO, rounds=1), SAMPLES[0])


STARTS = {
    "SimFBO": (SIMFBO, {"y": START["own"], "v": np.zeros(OWN)}),
    "MEHA": (fb.MEHA(**SINGLE, server_lr=0.2), {"y": START["own"], "theta": START["own"]}),
    "FedBiOAcc": (
        EXACT_WHERE_MIXED["FedBiOAcc"],
        {"y": START["own"]} | dict.fromkeys(("v", "momentum of y", "momentum of v"), np.zeros(OWN)),
    ),
}


@pytest.mark.parametrize("name", STARTS)
def test_own_leaves_of_y_and_theta_start_at_y_and_all_others_at_0(name):
    method, starts = STARTS[name]
    kept = composed(method, MIXED).client_state(MIXED, X0, jax.tree.map(jnp.asarray, START))
    np.testing.assert_array_equal(jax.tree.leaves(kept), [starts[variable] for variable in sorted(starts)])


def test_a_client_keeps_its_own_leaves_alone_and_sends_none():
    method = composed(SIMFBO, MIXED)
    kept = method.client_state(MIXED, X0, jax.tree.map(jnp.asarray, START))
    assert [leaf.shape for leaf in jax.tree.leaves(kept)] == [(OWN,), (OWN,)]
    result = run(SIMFBO, rounds=3)
    assert result.ledger.bytes_up == result.ledger.bytes_down == 3 * CLIENTS * (DIM_X + 2 * SHARED) * 8


@pytest.mark.parametrize(
    ("algorithm", "problem", "refusal"),
    [
        (fb.FedNest(), MIXED, ("", ANY, "FedNest cannot leave parts of y")),
        (fixed(fb.FedMBO()), MIXED, ("", ANY, "FedMBO cannot leave parts of y")),
        (fixed(fb.AggITD()), MIXED, ("", ANY, "AggITD cannot leave parts of y")),
        (fixed(fb.LFedNest(joint=True)), ALL, ("", ANY, "joint=False")),
        (fixed(fb.LFedNest(inner=fb.parts.SVRG())), ALL, ("", ANY, "corrected by a mean")),
        (fb.Submodels(SIMFBO), MIXED, ("", ANY, "SimFBO cannot be given Submodels")),
        (fb.SimFBO(**SINGLE, server_lr=0.2, radius=1.0), MIXED, ("SimFBO.radius", 1.0, "inf")),
        (SIMFBO, fb.Bilevel(outer, inner, own=lambda path: path == "head"), ("", ANY, "'own', 'shared'")),
        (
            SIMFBO,
            fb.Bilevel(outer, inner, own=lambda path: path.find("own")),
            ("Bilevel.own('own')", 0, "True or False"),
        ),
    ],
)
def test_what_is_refused(algorithm, problem, refusal):
    with refuses(*refusal):
        run(algorithm, problem)


@pytest.mark.parametrize("method", [fb.RABO(), fb.RAFBO(), fb.LFedNest(), fb.AFBO()], ids=lambda method: method.label)
def test_a_method_that_needs_all_leaves_to_be_own_names_others_that_solve_the_problem(method):
    """The error names exactly the methods of EXACT_WHERE_MIXED, and MEHA, which all run on the mixed problem."""
    with raises_with(fb.errors.UnsupportedError, f"{method.label} needs a Bilevel.own") as error:
        run(method)
    named = str(error.value).partition("with shared and own leaves: ")[2]
    exact = {name for name in EXACT_WHERE_MIXED if not name.startswith("AFBO")} | {"MEHA"}
    assert named == f"{', '.join(sorted(exact))}, and AFBO with hypergradient=fb.parts.SystemSteps()"


def test_what_is_refused_beside_a_run():
    with refuses("Bilevel.own", ANY, "local = 'x'"):
        fb.Bilevel(outer, inner, own=lambda path: True, local="x")
    with refuses("Bilevel.own", "()", "(path)"):
        fb.Bilevel(outer, inner, own=lambda: True)
    shared = run(SIMFBO, fb.Bilevel(outer, inner), rounds=1)
    with refuses("Result.own", 0, "Bilevel.own"):
        shared.own(0)
    with refuses("Result.own: client", 4, "0 to 3"):
        run(SIMFBO, rounds=1).own(4)
    with refuses("personalise: problem", MIXED):
        fb.personalise(MIXED, shared, SAMPLES[0])
    with refuses("Bilevel.own", ANY, "one y for all clients"):
        fb.check_hypergradient(MIXED, POPULATION, X0, START)

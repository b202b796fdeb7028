"""Clients that hold submodels: agreement of engines, the mean over the holders of an entry, smaller messages."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import two_layers
from compiled_losses import with_compiled_losses
from two_layers import HIDDEN, OUTPUTS, STRUCTURE, inner, outer
from two_layers import PROBLEM as BILEVEL

import fedbilevel as fb
from fedbilevel.core.submodel import ClientSlot, UnitLayout, UnitPolicy
from fedbilevel.engines.recorder import known_flops
from fedbilevel.engines.submodels import classes
from fixed_steps import fixed
from refusals import ANY, raises_with, refuses
from representatives import slow_but

CLIENTS, INPUTS = 7, 5
CAPACITY = np.array([1, 0.5, 0.25, 0.5, 0.25, 0.5, 0.25])
KEPT = (CAPACITY * HIDDEN).astype(int)
start = partial(two_layers.start, INPUTS)


SINGLE = fb.SingleLevel(lambda x, batch: outer(x[0], x[1], batch), structure=fb.Structure(x=(STRUCTURE.x, STRUCTURE.y)))


DEEP = fb.Bilevel(  # one group within x, and one that reaches into y
    lambda x, y, batch: outer(x[1], y, {**batch, "input": jnp.tanh(batch["input"] @ x[0])}),
    lambda x, y, batch: inner(x[1], y, {**batch, "input": jnp.tanh(batch["input"] @ x[0])}),
    structure=fb.Structure(x=["_ first", {"weight": "first hidden", "bias": "hidden"}], y=STRUCTURE.y),
)


def deep_in_y(loss):
    return lambda x, y, batch: loss({"weight": x["weight"] @ y["middle"], "bias": x["bias"] @ y["middle"]}, y, batch)


DEEP_Y = fb.Bilevel(  # one group, within y
    deep_in_y(outer),
    deep_in_y(inner),
    structure=fb.Structure(x={"weight": "_ _", "bias": "_"}, y={"middle": "_ own", "weight": "own _"}),
)


def population(capacity=CAPACITY, ragged=False, **fields):
    """Return clients with unequal weights; if `ragged`, their numbers of samples are unequal, too.

    Reference compiles each phase for each number of samples and each capacity.
    """
    rng = np.random.default_rng(0)

    def rows(least):
        sizes = [least + ragged * (i % 2) for i in range(CLIENTS)]
        return [{"input": rng.normal(size=(n, INPUTS)), "target": rng.normal(size=(n, OUTPUTS))} for n in sizes]

    return fb.Clients(rows(4), rows(5), weights=np.arange(1, CLIENTS + 1), capacity=capacity, **fields)


ROWS = [
    {"input": rng.normal(size=(4, INPUTS)), "target": rng.normal(size=(4, OUTPUTS))}
    for rng in map(np.random.default_rng, range(3))
]


def solved(algorithm, *, clients=None, engine=None, problem=BILEVEL, rounds=2, cohort=None):
    x, y = start()
    single = isinstance(problem, fb.SingleLevel)
    if problem is DEEP:
        x = [jnp.asarray(np.random.default_rng(2).normal(size=(INPUTS, INPUTS))), x]
    if problem is DEEP_Y:
        y = {"middle": jnp.asarray(np.random.default_rng(2).normal(size=(HIDDEN, HIDDEN))), **y}
    return fb.solve(
        algorithm,
        with_compiled_losses(problem) if isinstance(engine, fb.Reference) else problem,
        population() if clients is None else clients,
        (x, y) if single else x,
        None if single else y,
        rounds=rounds,
        cohort=cohort,
        key=3,
        engine=engine or fb.Local(),
        eval_every=1,
    )


def everything(result):
    return jax.tree.leaves((result.x, result.y))


def same_numbers(a, b):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12), everything(a), everything(b))


MOMENTUM = fb.parts.Momentum(decay=0.5)
RANDOM = fb.parts.Implicit(solver=fb.parts.Neumann(terms=3, sampling="random"))
WORK = {"local_steps": (1, 3)}
TWO_KINDS = {"capacity": np.where(CAPACITY < 1, 0.5, 1.0)}
"""Two capacities, since Local compiles a phase for each; the slow cases have three."""
CASES = {
    "SimFBO, importance": (
        fixed(fb.SimFBO(local_steps=2, batch_size=3, local_optimizer=MOMENTUM)),
        BILEVEL,
        TWO_KINDS,
        None,
    ),
    "RABO, random units, work": (fb.Submodels(fixed(fb.RABO(batch_size=3)), policy="random"), BILEVEL, WORK, 4),
    "RABO, global, fresh cohorts": (
        fb.Submodels(fixed(fb.RABO(batch_size=3, hypergradient=RANDOM)), policy="covered"),
        BILEVEL,
        {},
        4,
    ),
    "ShroFBO, x alone": (fb.Submodels(fixed(fb.ShroFBO(batch_size=3)), policy="static", pruned="x"), DEEP, {}, 5),
    "FedBiO": (fixed(fb.FedBiO(batch_size=3, local_steps=2)), BILEVEL, {}, 4),
    "FedAvg, rolling": (fb.Submodels(fb.FedAvg(batch_size=3, local_steps=2), policy="rolling"), SINGLE, {}, 4),
    "FedAvg, weights": (fb.Submodels(fb.FedAvg(batch_size=3, local_steps=3), policy="weights"), SINGLE, {}, 4),
    "RABO, weights": (fb.Submodels(fixed(fb.RABO(batch_size=3)), policy="weights"), BILEVEL, {}, 5),
}


@pytest.mark.parametrize("case", slow_but("FedAvg, rolling", of=CASES))
def test_engines_agree(case):
    """Engines agree to 1e-12: sums of a few dozen terms of size about 1 in another order differ by about 1e-15."""
    algorithm, problem, fields, cohort = CASES[case]
    clients = population(**fields, ragged=True)
    want = solved(algorithm, clients=clients, engine=fb.Reference(), problem=problem, cohort=cohort)
    engine = fb.Local(devices=2, chunk=2, stream=True)
    have = solved(algorithm, clients=clients, engine=engine, problem=problem, cohort=cohort)
    same_numbers(have, want)
    assert replace(have.ledger, flops=want.ledger.flops) == want.ledger
    columns = [name for name in want.history.columns if name != "seconds"]
    assert {"coverage_x", "uncovered_x", "mask_noise_x"} <= set(columns)
    for name in columns:
        np.testing.assert_allclose(have.history[name], want.history[name], rtol=1e-12, err_msg=name)
    for after, before in zip(everything(want)[-3:], jax.tree.leaves(start()), strict=True):
        assert float(jnp.max(jnp.abs(after - before))) > 1e-4


SERIES = fb.parts.Implicit(solver=fb.parts.Neumann(terms=2, step=0.1))
LOCAL = fb.parts.LocalImplicit(solver=fb.parts.Neumann(terms=2, step=0.1))
ON_A_SLICE = {
    "FedNest": fixed(fb.FedNest(batch_size=None, hypergradient=SERIES, outer_steps=2)),
    "AggITD": fixed(fb.AggITD(batch_size=3, inner=fb.parts.LocalSGD(rounds=2, lr=0.1))),
    "FedBiOAcc": fixed(fb.FedBiOAcc(batch_size=3, local_steps=2)),
    "FedAvgS": fb.FedAvgS(batch_size=3, local_steps=2),
    "FedMBO": fixed(fb.FedMBO(batch_size=3, hypergradient=SERIES)),
    "FedNestSGD": fixed(fb.FedNestSGD(batch_size=3, hypergradient=LOCAL)),
    "LFedNest": fixed(fb.LFedNest(batch_size=3, hypergradient=LOCAL)),
    "AFBO": fixed(fb.AFBO(batch_size=3, hypergradient=LOCAL)),
    "AFBO, SystemSteps": fixed(fb.AFBO(batch_size=3, hypergradient=fb.parts.SystemSteps())),
    "F2SA": fixed(fb.F2SA(batch_size=3, local_steps=2, multiplier=20.0)),
    "MEHA": fixed(fb.MEHA(batch_size=3, local_steps=2)),
    "CorrectedFBO": fixed(fb.CorrectedFBO(batch_size=3, local_steps=2)),
}


def saddle(x, y, batch):
    return outer(x, y, batch) - jnp.sum(y["weight"] ** 2)


def magnitudes(*leaves):
    return np.sort(np.abs(np.concatenate([np.ravel(leaf) for leaf in leaves])))[::-1]


@pytest.mark.parametrize("name", slow_but("FedNest", of=ON_A_SLICE))
def test_where_all_hold_the_same_units_it_is_the_method_on_these(name):
    """If all clients hold the first half of the units, this half ends where a model of only these units ends.

    The entries of the other half do not move.
    """
    half, algorithm, (x, y) = HIDDEN // 2, ON_A_SLICE[name], start()
    problem = BILEVEL
    if name == "FedAvgS":
        problem = fb.Minimax(saddle, structure=STRUCTURE)
    rows = [{"input": rows["input"][:4], "target": rows["target"][:4]} for rows in ROWS]
    both = (rows,) if name == "FedAvgS" else (rows, rows)

    def ends(algorithm, capacity, x, y):
        clients = fb.Clients(*both, weights=(1, 2, 3), capacity=capacity)
        result = fb.solve(algorithm, problem, clients, x, y, rounds=2)
        return result.x | {"head": result.y["weight"]}

    cut = ends(fb.Submodels(algorithm, policy="static"), (0.5, 0.5, 0.5), x, y)
    small = {"weight": x["weight"][:, :half], "bias": x["bias"][:half]}
    whole = ends(algorithm, None, small, {"weight": y["weight"][:half]})
    for key, before in (x | {"head": y["weight"]}).items():
        axis = 0 if key == "head" else -1
        held, rest = (np.split(np.asarray(one), [half], axis) for one in (cut[key], before))
        np.testing.assert_allclose(held[0], whole[key], rtol=1e-12, atol=1e-14)
        np.testing.assert_array_equal(held[1], rest[1])
        assert np.max(np.abs(held[0] - rest[0])) > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_A_SLICE)
def test_where_all_hold_the_same_weights_it_is_the_method_on_the_masked_problem(name):
    """If all clients hold the same weights, a round equals a round on whole arrays whose losses are masked.

    Both rounds start from the same x and y. The masks set all weights that the clients do not hold to 0.
    """
    algorithm, (x, y) = ON_A_SLICE[name], start()
    halves = magnitudes(*x.values())[23], magnitudes(*y.values())[7]
    m, n = (
        {leaf: jnp.abs(value) >= least for leaf, value in part.items()}
        for part, least in zip((x, y), halves, strict=True)
    )

    def masked(loss):
        return lambda x, y, batch: loss(jax.tree.map(jnp.multiply, x, m), jax.tree.map(jnp.multiply, y, n), batch)

    def problem(change):
        if name == "FedAvgS":
            return fb.Minimax(change(saddle), structure=STRUCTURE)
        return fb.Bilevel(change(outer), change(inner), structure=STRUCTURE)

    both = (ROWS,) if name == "FedAvgS" else (ROWS, ROWS)
    half, whole = (fb.Clients(*both, weights=(1, 2, 3), capacity=capacity) for capacity in (np.full(3, 0.5), None))
    cut = fb.solve(fb.Submodels(algorithm, policy="weights"), problem(lambda loss: loss), half, x, y, rounds=1)
    want = fb.solve(algorithm, problem(masked), whole, x, y, rounds=1)
    for got, wanted, before in zip(everything(cut), everything(want), jax.tree.leaves((x, y)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-14)
        assert np.max(np.abs(got - before)) > 1e-6


ONE_STEP = fixed(fb.SimFBO(local_steps=1, batch_size=None))
AVERAGING = fb.Submodels(fb.FedAvg(local_steps=1, batch_size=None), policy="static")
STATIC = fb.Submodels(ONE_STEP, policy="static")


@pytest.fixture(scope="module")
def one_round():
    """Run a round of SimFBO on the first units, with full batches and one local step, which can be done by hand."""
    return solved(STATIC, rounds=1)


def test_an_entry_moves_by_the_mean_over_those_who_hold_it(one_round):
    """An entry moves by Σ p_i u_i over its holders / Σ p_i over its holders, where u_i is computed on sliced arrays."""
    clients, (x, y), algorithm = population(), start(), fixed(fb.SimFBO())
    total = {"weight": np.zeros((INPUTS, HIDDEN)), "bias": np.zeros(HIDDEN)}, {"weight": np.zeros((HIDDEN, OUTPUTS))}
    held = jax.tree.map(np.zeros_like, total)
    slopes_x, slopes_y = jax.jit(jax.grad(outer, 0)), jax.jit(jax.grad(inner, 1))
    for i, kept in enumerate(KEPT):
        mine = {"weight": x["weight"][:, :kept], "bias": x["bias"][:kept]}, {"weight": y["weight"][:kept]}
        d_x = slopes_x(*mine, clients.outer.row(i))  # v = 0 at the start
        d_y = slopes_y(*mine, clients.inner.row(i))
        places = {"weight": np.s_[:, :kept], "bias": np.s_[:kept]}, {"weight": np.s_[:kept]}
        for into, count, place, d in zip(total, held, places, (d_x, d_y), strict=True):
            for name in into:
                into[name][place[name]] += clients.weights[i] * d[name]
                count[name][place[name]] += clients.weights[i]
    for got, before, lr, into, count in zip(
        (one_round.x, one_round.y), (x, y), (algorithm.server_lr.x, algorithm.server_lr.y), total, held, strict=True
    ):
        for name in into:
            np.testing.assert_allclose(got[name], before[name] - lr * into[name] / count[name], rtol=1e-12)


def test_fiarse_is_its_algorithm_1():
    """FIARSE is its Algorithm 1: two local steps on whole arrays, with masks written out.

    A step uses the slopes of the masked loss, each times 1 + 2|w|θ/(|w| + θ)², for the weights that are at least θ at
    this step. Of 64 weights, clients hold 64, 32 or 16, in numbers of 8 bytes. A client that lacks any weight also gets
    64 bits and θ.
    """
    clients, w, lr = population(), (*start(),), 0.3
    method = fb.FedAvg(local_steps=2, batch_size=None, lr=lr)
    result = solved(fb.Submodels(method, policy="weights"), problem=SINGLE, rounds=1)
    total, counts, fallen = jax.tree.map(np.zeros_like, w), jax.tree.map(np.zeros_like, w), 0
    slopes_of = jax.jit(jax.grad(lambda w, rows: outer(*w, rows)))
    for i, capacity in enumerate(CAPACITY):
        kept = int(64 * capacity)
        least = magnitudes(*jax.tree.leaves(w))[kept - 1] if kept < 64 else 0.0
        sent = jax.tree.map(lambda leaf, least=least: jnp.abs(leaf) >= least, w)
        own = w
        for _ in range(2):
            mask = jax.tree.map(lambda leaf, sent, least=least: sent & (jnp.abs(leaf) >= least), own, sent)
            masked = jax.tree.map(lambda leaf, m: leaf * m, own, mask)
            slopes = slopes_of(masked, clients.outer.row(i))
            bias = jax.tree.map(lambda a, least=least: 1 + 2 * abs(a) * least / (abs(a) + least) ** 2, own)
            own = jax.tree.map(lambda a, s, m, b: a - lr * s * m * b, own, slopes, mask, bias)
            fallen += sum(int(jnp.sum(s & ~m)) for s, m in zip(*map(jax.tree.leaves, (sent, mask)), strict=True))
        p = clients.weights[i]
        total = jax.tree.map(lambda t, a, b, s, p=p: t + p * (a - b) * s, total, own, w, sent)
        counts = jax.tree.map(lambda c, s, p=p: c + p * s, counts, sent)
    want = jax.tree.map(lambda a, t, c: a + t / c, w, total, counts)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-13), result.x, want)
    assert fallen > 0  # some weight fell below θ after the first step
    numbers = int(64 * CAPACITY.sum())
    assert result.ledger.bytes_up == 8 * numbers
    assert result.ledger.bytes_down == 8 * numbers + int(np.sum(CAPACITY < 1)) * (64 // 8 + 8)
    assert result.history.rows[-1]["uncovered_x"] == 0


@pytest.mark.slow
def test_weights_of_a_bilevel_problem_have_the_masked_gradients():
    """In a bilevel problem, weights move along the gradients of the masked losses; x and y have a threshold each.

    The test makes one step with v = 0.
    """
    clients, (x, y), algorithm = population(np.full(CLIENTS, 0.5)), start(), ONE_STEP
    result = solved(fb.Submodels(algorithm, policy="weights"), clients=clients, rounds=1)
    thresholds = magnitudes(*x.values())[23], magnitudes(*y.values())[7]  # half of 5 · 8 + 8, and of 8 · 2
    masks = [
        {name: jnp.abs(leaf) >= least for name, leaf in part.items()}
        for part, least in zip((x, y), thresholds, strict=True)
    ]
    masked = [jax.tree.map(jnp.multiply, part, mask) for part, mask in zip((x, y), masks, strict=True)]
    for number, (got, before, mask) in enumerate(zip((result.x, result.y), (x, y), masks, strict=True)):
        rows, loss = ((clients.outer, outer), (clients.inner, inner))[number]
        slopes_of = jax.jit(jax.grad(loss, number))
        slopes = [slopes_of(*masked, rows.row(i)) for i in range(CLIENTS)]
        lr, p = algorithm.server_lr[number], clients.weights
        for name in before:
            mean = sum(p[i] * slopes[i][name] for i in range(CLIENTS)) / sum(p)
            np.testing.assert_allclose(got[name], before[name] - lr * mask[name] * mean, rtol=1e-12)


def test_weights_spare_bytes_and_no_operations():
    """Clients that hold half of the weights save hardly any operations.

    They save only the operations on single entries of x, y and v, which are less than a tenth of all operations here.
    """
    given = fb.Submodels(ONE_STEP, policy="weights"), BILEVEL, population(np.where(CAPACITY < 1, 0.5, 1.0)), *start()
    half, whole = sorted(known_flops(*given, classes(*given)).values())
    assert 0.9 * whole < half <= whole


@pytest.mark.slow
def test_one_variable_alone_can_be_cut():
    """With pruned = "x", only the group within x is cut: of 5 units, clients hold 5, 3 (2.5 rounded up) or 1.

    "y" has no group of its own here.
    """
    of_x, of_y = (fb.Submodels(ONE_STEP, policy="static", pruned=name) for name in "xy")
    bytes_up = solved(of_x, problem=DEEP, rounds=1).ledger.bytes_up
    kept = [{1: 5, 0.5: 3, 0.25: 1}[c] for c in CAPACITY]
    assert bytes_up == 8 * sum(INPUTS * k + k * HIDDEN + HIDDEN + 2 * HIDDEN * OUTPUTS for k in kept)
    with refuses("Clients.capacity", "0.25 to 1", "pruned = 'y'"):
        solved(of_y, problem=DEEP, rounds=1)


@pytest.mark.slow
def test_y_alone_can_be_cut():
    """With pruned = "y", only y and v are cut: of the 8 units within y, clients hold 8, 4 or 2.

    "x" has no group of its own here.
    """
    of_x, of_y = (fb.Submodels(ONE_STEP, policy="static", pruned=name) for name in "xy")
    result = solved(of_y, problem=DEEP_Y, rounds=1)
    assert result.ledger.bytes_up == 8 * sum(INPUTS * HIDDEN + HIDDEN + 2 * k * (HIDDEN + OUTPUTS) for k in KEPT)
    assert (result.history.rows[-1]["coverage_x"], result.history.rows[-1]["coverage_y"]) == (CLIENTS, 1)
    with refuses("Clients.capacity", "0.25 to 1", "pruned = 'x'"):
        solved(of_x, problem=DEEP_Y, rounds=1)


@pytest.mark.filterwarnings("ignore::fedbilevel.errors.AbsenceWarning")
def test_nothing_is_dealt_to_those_who_are_never_there():
    """No units are assigned to clients that are never there.

    Of seven clients of ½, two are away. The 5 others share 2 segments, and exactly min_coverage = 2 of them hold the
    second one. If all seven were counted, some units would be assigned to those that are away.
    """
    clock = fb.Clock(availability=[1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    algorithm, half = replace(AVERAGING, policy="covered", min_coverage=2, fixed=True), np.full(CLIENTS, 0.5)
    results = [
        solved(algorithm, clients=population(half), problem=SINGLE, engine=engine(clock=clock), rounds=1)
        for engine in (fb.Local, fb.Reference)
    ]
    for result in results:
        last = result.history.rows[-1]
        assert (last["coverage_x"], last["uncovered_x"]) == (2, 0)
    same_numbers(*results)


@pytest.mark.slow
def test_operations_fall_with_the_submodels():
    """A client of k units takes k times the operations of one unit, except for targets and single numbers."""
    given = STATIC, BILEVEL, population(np.where(np.arange(CLIENTS) < 3, 1.0, 0.5)), *start()
    half, whole = sorted(known_flops(*given, classes(*given)).values())
    assert 0.5 < half / whole < 0.6
    assert fb.solve(*given, rounds=1, count_flops=True).ledger.flops == 3 * whole + 4 * half


def test_messages_and_coverage_are_those_of_the_submodels(one_round):
    """Messages and coverage are those of the submodels.

    A client with k units holds k (5 + 1) numbers of x, and 2 k of y and of v, with 8 bytes each. All clients hold units
    0 and 1, four hold 2 and 3, and one of these holds 4 to 7.
    """
    numbers = int(np.sum(KEPT * (INPUTS + 1 + 2 * OUTPUTS)))
    assert one_round.ledger.bytes_down == one_round.ledger.bytes_up == 8 * numbers
    assert (one_round.ledger.exchanges, one_round.ledger.replies) == (1, CLIENTS)
    last = one_round.history.rows[-1]
    assert (last["coverage_x"], last["coverage_y"], last["uncovered_x"], last["uncovered_y"]) == (1, 1, 0, 0)


def test_mask_noise_is_in_the_history(one_round):
    """The history has the mask noise: the share of ‖x‖² and ‖y‖² outside of units 0 and 1, at the start of the round.

    The weakest clients hold only these two units.
    """
    (x, y), least = start(), min(KEPT)
    cut = {name: float(jnp.sum(leaf[..., least:] ** 2)) for name, leaf in x.items()}
    total = {name: float(jnp.sum(leaf**2)) for name, leaf in x.items()}
    last = one_round.history.rows[-1]
    assert last["mask_noise_x"] == pytest.approx(sum(cut.values()) / sum(total.values()), rel=1e-12)
    share = jnp.sum(y["weight"][least:] ** 2) / jnp.sum(y["weight"] ** 2)
    assert last["mask_noise_y"] == pytest.approx(float(share), rel=1e-12)


@pytest.mark.slow
def test_mask_noise_is_that_of_the_cohort_and_none_of_a_model_that_is_zero():
    """The mask noise of a round is the noise of the clients in its cohort, and 0 for a variable that is 0.

    Each cohort has one client. In eight rounds, clients of all capacities are drawn, so the history contains the noise
    of each capacity. y starts at 0.
    """
    x, y = start()
    algorithm = fb.Submodels(fixed(fb.SimFBO(local_steps=1, batch_size=None, server_lr=1e-12)), policy="static")
    given = algorithm, BILEVEL, population(), x, jax.tree.map(jnp.zeros_like, y)
    history = fb.solve(*given, rounds=8, cohort=1, key=0, eval_every=1).history
    total = sum(float(jnp.sum(leaf**2)) for leaf in x.values())
    left = {k: sum(float(jnp.sum(leaf[..., k:] ** 2)) for leaf in x.values()) / total for k in set(KEPT.tolist())}
    seen = {round(float(value), 9) for value in history["mask_noise_x"][1:]}
    assert seen == {round(value, 9) for value in left.values()}
    assert history.rows[1]["mask_noise_y"] == 0


def test_what_nobody_holds_stays_and_is_counted():
    x, y = start()
    result = solved(STATIC, clients=population(np.full(CLIENTS, 0.25)), rounds=1)
    np.testing.assert_array_equal(result.x["weight"][:, 2:], x["weight"][:, 2:])
    np.testing.assert_array_equal(result.y["weight"][2:], y["weight"][2:])
    assert float(jnp.min(jnp.abs(result.x["weight"][:, :2] - x["weight"][:, :2]))) > 0
    last = result.history.rows[-1]
    assert (last["uncovered_x"], last["uncovered_y"]) == (6 * (INPUTS + 1), 6 * OUTPUTS)
    assert (last["coverage_x"], last["coverage_y"]) == (CLIENTS, CLIENTS)


@pytest.mark.slow
def test_with_all_capacities_1_it_is_the_method_itself():
    """With all capacities 1, a run is the method itself: each sum is divided and multiplied by the same factor."""
    algorithm = fixed(fb.SimFBO(batch_size=3))
    whole, full = solved(algorithm, clients=population(None)), solved(algorithm, clients=population(np.ones(CLIENTS)))
    same_numbers(whole, full)
    assert whole.ledger.bytes_up == full.ledger.bytes_up
    assert "coverage_x" not in whole.history.columns


# an error, so that nothing is compiled after it
@pytest.mark.filterwarnings("error::fedbilevel.errors.CapacityWarning")
def test_a_method_without_submodels_says_that_it_trains_whole_models():
    method = fixed(fb.FedNest(batch_size=3, hypergradient=fb.parts.Implicit(solver=fb.parts.CG(max_steps=2))))
    with raises_with(fb.errors.CapacityWarning, " 6 clients "):
        solved(method, rounds=1)


COVERED_TWICE = fb.Submodels(fixed(fb.RABO()), policy="covered", min_coverage=2)
UNCUT_BIAS = fb.Bilevel(outer, inner, structure=fb.Structure(x={"weight": "_ hidden", "bias": "_"}))


@pytest.mark.parametrize(
    ("clients", "algorithm", "problem", "refusal"),
    [
        (
            population(np.full(CLIENTS, 0.01)),
            fixed(fb.RABO()),
            BILEVEL,
            ("capacity", 0.01, "'hidden'"),
        ),
        (population(), fixed(fb.RABO()), fb.Bilevel(outer, inner), ("Clients.capacity", "0.25 to 1", "structure")),
        (
            population(),
            fb.Asynchronous(fixed(fb.SimFBO()), wait_for=2),
            BILEVEL,
            ("Clients.capacity", "0.25 to 1", "SimFBO"),
        ),
        (
            population(),
            COVERED_TWICE,
            BILEVEL,
            ("Submodels.min_coverage", 2, "at most 1"),
        ),
        (population(), fixed(fb.RABO()), UNCUT_BIAS, ("", ANY, "submodel of capacity 0.5")),
    ],
)
def test_what_cannot_be_cut_is_refused(clients, algorithm, problem, refusal):
    with refuses(*refusal):
        solved(algorithm, clients=clients, problem=problem, rounds=1)


@pytest.mark.parametrize("capacity", [[1.0, 0.5], np.zeros(CLIENTS), np.full(CLIENTS, 1.5), "half", [np.nan] * CLIENTS])
def test_capacities_are_shares_of_one_each(capacity):
    with refuses("Clients.capacity"):
        population(capacity)


class TestPolicies:
    """The policies that choose which 3 of 8 units a client holds."""

    unit_layout = UnitLayout.of(STRUCTURE, *start())

    def units(self, round=0, id=0, rank=0, kept=3, peers=6, **fields):
        holder = ClientSlot(round, jax.random.key(0), id, rank, peers)
        importance = self.unit_layout.importance(*start())
        return UnitPolicy(**fields).units(self.unit_layout, {"hidden": kept}, importance, holder)["hidden"].tolist()

    def test_importance_takes_the_largest_sums_of_squares(self):
        x, y = start()
        squares = np.sum(x["weight"] ** 2, 0) + x["bias"] ** 2 + np.sum(y["weight"] ** 2, 1)
        assert self.units() == sorted(np.argsort(-squares)[:3].tolist())

    def test_static_takes_the_first_and_rolling_moves_on(self):
        assert self.units(policy="static", round=5) == [0, 1, 2]
        assert self.units(policy="rolling", round=5) == [5, 6, 7]
        assert self.units(policy="rolling", round=6) == [0, 6, 7]

    def test_random_units_are_each_clients_own_and_of_each_round(self):
        drawn = [self.units(policy="random", id=i, round=r) for i in range(4) for r in range(4)]
        assert all(len(set(units)) == 3 for units in drawn)
        assert len({tuple(units) for units in drawn}) > 8
        fixed = {tuple(self.units(policy="random", fixed=True, id=1, round=r)) for r in range(4)}
        assert len(fixed) == 1

    def test_segments_cover_all_units_as_evenly_as_can_be(self):
        """⌈8/3⌉ = 3 segments cover all units: each is held by two of 6 clients.

        The last segment overlaps the second one by a unit, which 4 clients hold.
        """
        for round in range(3):
            held = np.bincount([unit for j in range(6) for unit in self.units(policy="covered", rank=j, round=round)])
            assert sorted(held) == [2] * 7 + [4]
        rounds = {tuple(self.units(policy="covered", round=r)) for r in range(12)}
        assert len(rounds) == 3
        assert len({tuple(self.units(policy="covered", fixed=True, round=r)) for r in range(9)}) == 1

    @pytest.mark.parametrize("least", [1, 2])
    def test_a_coverage_can_be_asked_for(self, least):
        """With `min_coverage`, each of three segments is held by `least` of 10 clients, and the fourth by the others.

        A segment has 2 of the 8 units.
        """
        dealt = [self.units(policy="covered", min_coverage=least, kept=2, rank=j, peers=10) for j in range(10)]
        assert sorted(np.bincount(np.concatenate(dealt))) == [least] * 6 + [10 - 3 * least] * 2

    @pytest.mark.parametrize(
        ("fields", "path", "got", "fact", "near"),
        [
            ({"policy": "importence"}, "policy", "importence", "covered", "importance"),
            ({"pruned": "z"}, "pruned", "z", "both", ""),
            ({"policy": "static", "fixed": True}, "fixed", True, "policy = 'static'", ""),
            ({"policy": "weights", "fixed": True}, "fixed", True, "policy = 'weights'", ""),
            ({"policy": "random", "min_coverage": 2}, "min_coverage", 2, "None with policy = 'random'", ""),
            ({"policy": "covered", "min_coverage": 0}, "min_coverage", 0, "positive", ""),
        ],
    )
    def test_misspelt_or_meaningless_fields_are_refused(self, fields, path, got, fact, near):
        with refuses(f"Submodels.{path}", got, fact, near):
            UnitPolicy(**fields)


SWAPPED = np.stack([CAPACITY, CAPACITY[::-1]])
"""The capacities of two rounds; clients with a large capacity in the first round have a small one in the second."""


def test_capacities_by_round_are_those_of_the_rounds():
    """With capacities that change from round to round, two rounds equal two runs of one round each.

    Each of the two runs has the capacities of its round. Engines agree.
    """
    averaged = partial(solved, AVERAGING, problem=SINGLE, engine=fb.Reference())
    both = averaged(clients=population(SWAPPED))
    first = averaged(clients=population(SWAPPED[0]), rounds=1)
    second = fb.solve(AVERAGING, SINGLE, population(SWAPPED[1]), first.x, rounds=1, engine=fb.Reference())
    for mine, theirs in zip(everything(both), everything(second), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-12)
    assert both.ledger.bytes_up == first.ledger.bytes_up + second.ledger.bytes_up
    other = averaged(clients=population(SWAPPED), engine=fb.Local())
    for mine, theirs in zip(everything(both), everything(other), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-12)
    with refuses("rounds", 3, "at most 2"):
        averaged(clients=population(SWAPPED), rounds=3)


@pytest.mark.slow
def test_units_are_dealt_anew_to_those_who_share_a_capacity_in_a_round():
    """With "covered", units are assigned anew in each round, to the clients that share a capacity in that round.

    In either round, two of the four clients with capacity ½ hold each unit, whichever clients these are.
    """
    half = np.array([[1, 1, 1, 0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 1, 1, 0.5, 1, 0.5]])
    method = replace(AVERAGING, policy="covered", min_coverage=2)
    row = solved(method, problem=SINGLE, clients=population(half), engine=fb.Local(chunk=2))
    assert row.history["coverage_x"][1:].tolist() == [3 + 2, 3 + 2]

"""What remains of a run: the best row, and, if the run diverges, the last finite x and y or steps half as large."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.core.hyperparameters import at, halved
from fedbilevel.engines.divergence import grown
from fedbilevel.engines.history import History
from fedbilevel.errors import NonFiniteError, NumericalWarning
from fixed_steps import fixed
from refusals import refuses, warns_with
from representatives import slow_but

pytestmark = pytest.mark.checked  # the tests are about a run's warnings, and that there is no other one

START = jnp.full(3, -1.0), jnp.zeros(3)
STEPS = fb.XYV(x=0.8, y=0.2, v=0.2)
"""Steps with which the run diverges.

f prefers y = 0, so that every penalty 10^x grows, until 2·10^x is above 2/0.2, and the steps on y diverge.
"""


def problem():
    def inner(x, y, batch):
        return jnp.mean((batch["a"] @ y - batch["b"]) ** 2) / 2 + jnp.sum(10**x * y**2)

    return fb.Bilevel(lambda x, y, batch: jnp.sum(y**2) + jnp.mean(batch["b"] ** 2), inner)


def population():
    rng = np.random.default_rng(0)
    return fb.Clients([{"a": rng.normal(size=(20, 3)), "b": rng.normal(size=20)} for _ in range(3)])


def solve(rounds, method=None, **given):
    method = method or fixed(fb.SimFBO(local_steps=2, batch_size=None, server_lr=STEPS))
    return fb.solve(method, problem(), population(), *START, rounds=rounds, eval_every=5, **given)


def same(a, b):
    np.testing.assert_array_equal(a.x, b.x)
    np.testing.assert_array_equal(a.y, b.y)


def diverged(**given):
    with pytest.raises(NonFiniteError) as error:
        solve(500, **given)
    return error.value.result


def test_an_error_has_the_last_finite_state_and_the_best():
    last = diverged()
    assert 5 < last.round < 500
    same(last, solve(last.round))
    same(last.best, solve(last.best.round))
    assert last.best.value == np.nanmin(last.history["outer_loss"])


def test_the_error_says_how_far_x_had_gone_and_what_steps_on_y_it_allowed():
    """The error says how far x has moved, and which step sizes on y are allowed at the last x.

    L is the largest eigenvalue of ∇²yy G = Σ_i p_i A_iᵀA_i/n_i + 2 diag(10^x).
    """
    with pytest.raises(NonFiniteError) as error:
        solve(500)
    x, data = error.value.result.x, np.concatenate([population().outer.row(i)["a"] for i in range(3)])

    def largest(x):
        return np.linalg.eigvalsh(data.T @ data / 60 + 2 * np.diag(10 ** np.asarray(x)))[-1]

    far = np.linalg.norm(error.value.result.y)
    assert (
        f"an entry of x had moved by up to {np.max(x + 1):.3g}, and y by {far:.3g} in norm. The largest curvature of "
        f"the inner loss in y was L = {largest(x):.3g} ({largest(START[0]):.3g} at the start), so steps on y "
        f"must be below 2/L = {2 / largest(x):.3g}; bounds on x"
    ) in str(error.value)


STARTS_BADLY = {
    "a root of a negative number": (lambda x, y: jnp.sqrt(-1 - y @ y), 0, r"\bthe inner loss .*not finite .* negative"),
    "a logarithm of 0": (lambda x, y: jnp.sum(jnp.log(y)), 0, r"\bthe inner loss .*not finite .*start"),
    "a norm at 0": (
        lambda x, y: jnp.sqrt(y @ y),
        0,
        r"\ba derivative of the inner loss .*not finite .*start",
    ),
    "a second derivative at 0": (lambda x, y: jnp.sum(jnp.abs(y) ** 1.5), 0, r"\ba derivative of the inner loss "),
    "a concave loss": (
        lambda x, y: -10 * y @ y,
        1,
        r"-1\d\.\d.* ridge .* c above [5-9]",
    ),
    "a penalty that turns negative": (
        lambda x, y: x @ y**2,
        1,
        r"\bconvex in y at the start.* penalty .*negative",
    ),
}
"""For each case, a term of the inner loss, the start of y, and the words of the error."""


@pytest.mark.parametrize(
    "case",
    slow_but("a norm at 0", of=STARTS_BADLY),
)
def test_what_no_smaller_step_mends_is_said_without_steps(case):
    term, start, words = STARTS_BADLY[case]

    def inner(x, y, batch):
        return jnp.mean((batch["a"] @ y - batch["b"]) ** 2) / 2 + term(x, y) + 1e-3 * jnp.sum(10**x * y**2)

    losses = fb.Bilevel(lambda x, y, batch: jnp.mean((batch["a"] @ y - batch["b"]) ** 2), inner)
    method = fixed(fb.SimFBO(local_steps=2, batch_size=None, server_lr=STEPS))
    with pytest.raises(NonFiniteError, match=words) as error:
        fb.solve(method, losses, population(), jnp.full(3, 0.1), jnp.full(3, float(start)), rounds=10_000)
    assert "steps may help" not in str(error.value)
    assert "lower" not in str(error.value)
    assert re.fullmatch(r"(the|a derivative of the) (inner|curvature).* \(round \d+.* not finite\)", str(error.value))


@pytest.mark.slow
def test_a_loss_that_is_not_finite_a_step_away_is_named():
    """A loss that is not finite after a step from the start is named.

    log(σ(s)) is taken at s = −3,000, where σ is 0, after one step on y of any size that the inner loss allows.
    """
    problem = fb.Bilevel(
        lambda x, y, batch: -jnp.mean(jnp.log(jax.nn.sigmoid(3000 * y[0] + 0 * batch))),
        lambda x, y, batch: jnp.mean((y + 1 + batch) ** 2) + jnp.sum(jnp.exp(x) * y**2),
    )
    method = fixed(fb.SimFBO(local_steps=2, batch_size=None, server_lr=STEPS))
    with pytest.raises(NonFiniteError, match=r"outer loss, .* 1/L on y .*log_sigmoid") as found:
        fb.solve(method, problem, fb.Clients(np.zeros((3, 4))), np.zeros(1), np.zeros(1), rounds=20)
    assert "smaller steps" not in str(found.value)


@pytest.mark.parametrize("adapts", [True, False])
def test_a_poisson_regression_diverges_with_given_steps_only(adapts):
    """Steps that adapt solve a Poisson regression, and an error with given steps says that the curvature grows.

    The mean count is e⁹, and the intercept starts at 0. There L is 1, so that a step of size 1/L leads to an intercept
    of 8,102, whose exponential is infinite. With the penalty exp(−9) the solution is 9 − 2·9 exp(−18), almost 9.
    """

    def loss(x, y, batch):
        return jnp.mean(jnp.exp(y["b"]) - batch * y["b"])

    problem = fb.Bilevel(loss, lambda x, y, batch: loss(x, y, batch) + jnp.exp(x) * y["b"] ** 2)
    given = problem, fb.Clients(np.full((3, 4), np.exp(9.0))), np.array(-9.0), {"b": np.zeros(())}
    method = fb.SimFBO(batch_size=None)
    if adapts:
        result = fb.solve(method, *given, rounds=20)
        assert float(result.y["b"]) == pytest.approx(9, rel=1e-4)
        assert "halvings" not in result.history.columns
    else:
        with pytest.raises(NonFiniteError, match=r"L = 1 .*curvature grows .*logarithm of the mean count") as found:
            fb.solve(
                fb.SimFBO(batch_size=None, client_lr=1.0, server_lr=fb.XYV(x=0.1, y=1.0, v=1.0)), *given, rounds=20
            )
        assert "log_sigmoid" not in str(found.value)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["outer", "inner"])
@pytest.mark.parametrize("method", [fb.FedMBO, fb.AggITD])
def test_a_nan_in_a_loss_ends_a_run_of_a_method_that_measures_none(method, which):
    """A NaN in a loss ends the run of a method that does not measure losses.

    The NaN is added to the loss as a constant, whose derivative is 0. So the numbers that are exchanged would all be
    finite, and would not show the NaN.
    """
    losses = {"outer": problem().outer, "inner": problem().inner}
    losses[which] = lambda x, y, batch, loss=losses[which]: loss(x, y, batch) + jnp.log(-1.0)
    with pytest.raises(NonFiniteError, match=rf"\bthe {which} loss .*not finite .*start"):
        fb.solve(method(batch_size=None), fb.Bilevel(**losses), population(), *START, rounds=1)


@pytest.mark.slow
def test_a_start_that_is_at_fault_is_said_at_once(recwarn):
    """If the start itself causes the error, it is raised at once.

    A run without given steps then does not try smaller steps first.
    """
    losses = fb.Bilevel(problem().outer, lambda x, y, batch: problem().inner(x, y, batch) + jnp.sqrt(y @ y))
    with pytest.raises(NonFiniteError, match=r"\ba derivative of the inner loss .*not finite .*start"):
        fb.solve(fb.SimFBO(batch_size=None), losses, population(), *START, rounds=5)
    assert not [one for one in recwarn if "half as large" in str(one.message)]


def warned_of(rounds, lr, **given):
    """Return the warnings of a run from x = 8 with f = x²/2, where x ← (1 − lr)x."""
    problem = fb.SingleLevel(lambda x, batch: jnp.mean((x - batch) ** 2) / 2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fb.solve(
            fb.FedAvg(lr=lr, local_steps=1, batch_size=None),
            problem,
            fb.Clients([np.zeros(2)] * 2),
            jnp.full((), 8.0),
            rounds=rounds,
            **given,
        )
    return [str(one.message) for one in said if one.category is NumericalWarning]


def test_a_run_that_grows_is_warned_of_once_on_its_way_and_at_its_end():
    """A run that grows is warned of once on its way and once at its end.

    With x ← −2x, x² is 64·4ⁿ after n rounds, which is 1,024 times the start after five rounds.
    """
    metrics = {"height": lambda x, y: x**2, "fit": fb.Metric(lambda x, y: x**2, larger_is_better=True)}
    on_the_way, at_the_end = warned_of(12, 3.0, eval_every=2, metrics=metrics)
    assert (
        on_the_way
        == "round 6: height has grown from 64 to 2.621e+05: the run diverges; lower lr (fb.diagnose suggests steps)"
    )
    assert at_the_end.startswith("round 12: height has grown from 64 to 1.074e+09: the run diverges; ")
    assert len(warned_of(5, 3.0, metrics=metrics)) == 1
    assert warned_of(4, 3.0, metrics=metrics) == []
    assert warned_of(5, 0.5, metrics=metrics) == []
    del metrics["height"]
    assert warned_of(5, 3.0, metrics=metrics) == []


def test_what_has_grown():
    """A loss has grown if it is above 1,000·max(start, 1), and above 10 times its median before.

    The median is taken over the earlier rows or, if there is one row, over its rounds. A loss that only fluctuates
    about a level has not grown, even if it began far below this level.
    """
    rows = [{"round": 0}, {"round": 4, "outer_loss": 4000.0}]
    assert grown(History(rows)) == ""
    assert grown(History(rows), {"outer_loss": [0.1, 9, 70]}) == "round 4: outer_loss has grown from 0.1 to 4000"
    assert grown(History(rows), {"outer_loss": [4.1, 9, 70]}) == ""
    assert grown(History(rows), {"outer_loss": [0.1, 3000, 8000]}) == ""
    rows = [{"round": n, "outer_loss": loss} for n, loss in enumerate((5.0, 400.0, 5001.0))]
    assert grown(History(rows)).startswith("round 2: outer_loss has grown from 5 ")
    assert grown(History([*rows, {"round": 3, "outer_loss": 5500.0}, {"round": 4, "outer_loss": 5600.0}])) == ""


@pytest.mark.parametrize(
    ("losses", "diverges"),
    [
        # noise about 0: the median is near 0, and the median size is 28
        ((0.5, -30.0, 25.0, -28.0, 12.0, 30.0), False),
        ((-50.0, -20.0, 12.0, 15.0), False),  # 15 is less than the size of the start
        ((0.5, -3.0, 2.5, -2.8, 12.0, 40.0), True),
    ],
)
def test_a_loss_of_either_sign_is_measured_by_its_size(losses, diverges):
    """A loss of either sign is compared by its size.

    In a minimax problem, one loss is the negative of the other, and both may be below 0.
    """
    rows = [{"round": n, "inner_loss": loss} for n, loss in enumerate(losses)]
    assert bool(grown(History(rows), began={"inner_loss": losses[0]})) == diverges


def test_a_method_that_measures_no_loss_is_warned_of_by_the_norm_of_its_point():
    """If a method measures no loss, the norm of its point is watched.

    With x ← −2x from 8, the norm is 2²⁰ times 8 after 20 rounds, which is over a million times.
    """
    assert warned_of(19, 3.0) == []
    (text,) = warned_of(20, 3.0)
    assert text.startswith("round 20: the norm of x and y has grown from 8 to 8.389e+06: the run diverges; lower lr (")
    assert grown(History([{"round": 0, "time": 1.0}, {"round": 1, "time": 1e9}])) == ""  # there is no loss


def test_the_best_row_is_chosen_by_the_column_that_is_told():
    metrics = {"size_accuracy": fb.Metric(lambda x, y: jnp.sum(y**2), larger_is_better=True)}
    result = solve(10, metrics=metrics, best_by="size_accuracy")
    rows = result.history["size_accuracy"]
    assert result.best.column == "size_accuracy"
    assert result.best.value == np.max(rows)
    assert result.best.round == result.history["round"][np.argmax(rows)] != 10
    assert f"size_accuracy {100 * np.max(rows):.2f} % at round {result.best.round}" in str(result)


def test_half_the_steps_from_the_row_before_the_best():
    """A diverging run returns to the row before the best one, and continues with step sizes half as large.

    The best row is the second one here. So the run returns to round 0, and equals a run with steps half as large from
    the start.
    """
    last = diverged()
    assert last.best.round == 5
    rounds = last.round + 5
    with pytest.warns(NumericalWarning, match=r"returns to round 0, .* half as large \(return 1 of at most 3\)"):
        shrunk = solve(rounds, on_divergence="shrink")
    assert list(shrunk.history["halvings"][-2:]) == [1, 1]
    halves = {"client_lr": fb.XYV(x=0.005, y=0.05, v=0.05), "server_lr": fb.XYV(x=STEPS.x / 2, y=0.1, v=0.1)}
    half = fixed(fb.SimFBO(local_steps=2, batch_size=None, **halves))
    same(shrunk, solve(rounds, half))


def counted(*lrs, engine=None, layer=None):
    """Return the number of gradients in the ledger of a run whose steps on y are so long that its first round fails."""
    method = fixed(fb.SimFBO(local_steps=3, batch_size=None, client_lr=fb.XYV(0.05, *lrs, 0.05), server_lr=0.05))
    method = fb.layered(method, layer) if layer else method
    with pytest.raises(NonFiniteError) as error:
        solve(5, method, engine=engine, on_divergence="shrink")
    return error.value.ledger.gradients


@pytest.mark.slow
def test_rounds_that_failed_are_charged():
    """Rounds that failed are in the ledger: the first round fails once with the given steps, and three times with
    halved ones.

    A round has G gradients.
    """
    once = solve(1).ledger.gradients / 2 * 3  # `solve` has two local steps
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)
        assert counted(1e300) == 4 * once


@pytest.mark.parametrize(
    "engine", [pytest.param(fb.Reference(), marks=pytest.mark.slow), fb.Local()], ids=["Reference", "Local"]
)
def test_a_late_reply_that_is_not_finite_is_charged(engine):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)
        assert counted(1e300, engine=engine, layer=fb.Asynchronous(wait_for=2)) > 0


def test_every_step_is_halved_and_nothing_else():
    """Every step size is halved, also numbers and schedules in a tuple, and step sizes of parts.

    No other field changes.
    """
    inner = fb.parts.MeanGradient(rounds=2, lr=[0.4, lambda round: 0.2 + round], client_lr=0.02)
    half = at(halved(fb.Asynchronous(fixed(fb.AFBO(inner=inner, outer_lr=0.6)), wait_for=2)), 1)
    method = half.algorithm
    assert (method.inner.lr, method.inner.client_lr, method.outer_lr) == ((0.2, 0.6), 0.01, 0.3)
    assert (half.late.wait_for, method.inner.rounds, method.batch_size) == (2, 2, 32)
    assert method.hypergradient.solver.step == fixed(fb.AFBO()).hypergradient.solver.step / 2
    assert halved(fixed(fb.SimFBO(radius=3.0))).radius == 3.0


def test_what_was_halved_is_halved_after_a_resumption(tmp_path):
    given = {"on_divergence": "shrink", "checkpoint": tmp_path / "run.npz"}
    with pytest.warns(NumericalWarning, match="half as large"):
        whole = solve(200, on_divergence="shrink")
    with pytest.warns(NumericalWarning, match="half as large"):
        solve(100, **given)
    again = solve(200, resume=True, **given)
    same(again, whole)
    same(again.best, whole.best)
    assert again.history["halvings"][-1] == whole.history["halvings"][-1] > 0
    assert again.ledger.exchanges == whole.ledger.exchanges > 200  # the costs of withdrawn rounds stay in the ledger


SMALLER = fixed(fb.SimFBO(local_steps=2, batch_size=None, server_lr=fb.XYV(x=0.01, y=0.01, v=0.01)))


@pytest.mark.parametrize(
    "smaller",
    slow_but(SMALLER, of=[SMALLER, fb.SimFBO(local_steps=2, batch_size=None)]),
    ids=["numbers", "None"],
)
def test_a_checkpoint_of_a_diverged_run_can_be_gone_on_from(tmp_path, smaller):
    """By force, the checkpoint of a diverged run can be continued with smaller steps.

    It continues as a new run from x and y of the best row. Batches are whole, so that only the random vectors that
    measure the curvature depend on keys. Steps that are None have a state of another kind.
    """
    path = tmp_path / "run.npz"
    last = diverged(checkpoint=path)
    with warns_with(fb.errors.CheckpointWarning, f"round {last.best.round}", path=path):
        on = solve(last.best.round + 5, smaller, checkpoint=path, resume="force")
    assert [row["round"] for row in on.history.rows if row["round"] > last.best.round] == [last.best.round + 5]
    new = fb.solve(smaller, problem(), population(), last.best.x, last.best.y, rounds=5)
    for leaf, expected in ((on.x, new.x), (on.y, new.y)):
        np.testing.assert_allclose(leaf, expected, rtol=0 if smaller is SMALLER else 1e-3)


def test_a_run_that_diverges_again_and_again_ends(tmp_path):
    """A run that diverges again and again ends.

    Its steps are still 8 times too large after three halvings. A resumed run has ended, too.
    """
    wild = fixed(fb.SimFBO(local_steps=1, batch_size=None, server_lr=fb.XYV(x=0.1, y=1e3, v=0.1)))
    given = {"on_divergence": "shrink", "checkpoint": tmp_path / "run.npz", "checkpoint_every": 1000}
    with pytest.warns(NumericalWarning, match="return 3 of at most 3"):
        result = solve(500, wild, **given)
    assert "the run diverges" in result.stopped
    assert result.round < 500
    again = solve(500, wild, resume=True, **given)
    assert (again.round, again.stopped) == (result.round, result.stopped)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::fedbilevel.core.errors.NumericalWarning")
@pytest.mark.parametrize("method", [fb.SimFBO, fb.FedBiO])
def test_a_run_without_steps_that_no_step_suits_ends_at_finite_numbers(method, tmp_path):
    """A run without given steps, which no step suits, ends at finite numbers, also if it is resumed.

    g = ln(1 + e^-y) + x y²/2 is convex for x > 0 only. f wants y = 100 and therefore x = σ(-y)/y, which is 0 up to
    rounding, so that x crosses 0 however short its steps are.
    """
    problem = fb.Bilevel(
        lambda x, y, batch: jnp.mean((y - batch) ** 2) / 2,
        lambda x, y, batch: jax.nn.softplus(-y) + x * y**2 / 2 + 0 * jnp.mean(batch),
    )
    clients = fb.Clients([np.full(4, 100.0)] * 2)
    result = fb.solve(method(batch_size=None), problem, clients, jnp.asarray(0.3), jnp.zeros(()), rounds=300)
    assert np.isfinite([result.x, result.y]).all()
    assert "the run diverges" in result.stopped
    assert "project_x" in result.stopped
    assert result.remarks == ()
    assert result.history["halvings"][-1] <= 3
    given = {"rounds": 300, "checkpoint": tmp_path / "run.npz", "checkpoint_every": 1}
    ends = [
        fb.solve(method(batch_size=None), problem, clients, jnp.asarray(0.3), jnp.zeros(()), **given, resume=resume)
        for resume in (False, True)
    ]
    assert [(end.round, end.stopped) for end in ends] == [(result.round, result.stopped)] * 2


@pytest.mark.parametrize(
    ("name", "value", "path", "fact", "near"),
    [
        ("on_divergence", "half", "on_divergence", "'stop', 'shrink'", ""),
        ("best_by", 3, "best_by", "column", ""),
        ("best_by", "outer_los", "best_by", "inner_loss", "outer_loss"),
    ],
)
def test_wrong_choices_are_refused(name, value, path, fact, near):
    with refuses(path, value, fact, near):
        solve(5, **{name: value})


def test_the_best_is_in_the_file_of_a_result(tmp_path):
    result = solve(10)
    result.save(tmp_path / "result.npz")
    read = fb.Result.load(tmp_path / "result.npz", *START)
    same(read.best, result.best)
    assert read.best[2:] == result.best[2:]

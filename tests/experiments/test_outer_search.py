"""Do searches over x make the trials that they should, are all costs counted, and are wrong settings refused?"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel import experiments
from fedbilevel.core.errors import NumericalError
from fedbilevel.engines import posed
from fedbilevel.experiments import outer_search
from fedbilevel.experiments.compare import comparison, legend, load_groups
from fedbilevel.experiments.outer_search import TPE, Halving, Random, SearchRun, box_of
from fedbilevel.experiments.runner import build
from fedbilevel.experiments.series import comparison_specs
from fedbilevel.tasks.quadratic import outer, quadratic
from refusals import ANY, raises_with, refuses, warns_with
from representatives import slow_but

optuna = pytest.importorskip("optuna")
BOUNDS = {"low": -1.0, "high": 1.0}
TASK = quadratic(clients=3, dim_x=2, dim_y=3, samples=(2, 3))


def searched(method, amount, task=TASK, callbacks=(), unit="exchanges", privacy=None, **given):
    return SearchRun(method, task, (unit, amount), 0, callbacks, 99, given, privacy=privacy).play()


def validation_loss(x, y):
    """Return F, the mean of the clients' outer losses with the clients' weights."""
    losses = [outer(x, y, TASK.clients.outer.row(i)) for i in range(len(TASK.clients))]
    return float(np.dot(TASK.clients.weights, losses))


@pytest.fixture
def trials(monkeypatch):
    """Return a list to which each trial adds the x, the y and the number of rounds with which it begins."""
    found = []

    def noting(method, problem, clients, x, y, **given):
        found.append((np.asarray(x), np.asarray(y), given["rounds"]))
        return fb.solve(method, problem, clients, x, y, **given)

    monkeypatch.setattr(outer_search, "solve", noting)
    return found


def test_trials_begin_at_x0_and_go_on_from_the_best_y(trials):
    """The first trial is at x0, and every trial begins with the best y so far.

    With a budget of 18 exchanges, trials train y in 4, 4, 4 and 2 exchanges, and each measures the outer loss in one
    more.
    """
    points = []
    note = lambda result, row: points.append((np.asarray(result.x), np.asarray(result.y)))  # noqa: E731
    result = searched(Random(**BOUNDS, trial_exchanges=4, batch_size=None), 18, callbacks=[note])
    assert [rounds for *_, rounds in trials] == [4, 4, 4, 2]  # and a measurement after each
    np.testing.assert_array_equal(trials[0][0], TASK.x0)
    assert all(np.all(np.abs(x) <= 1) for x, *_ in trials)
    assert len({x.tobytes() for x, *_ in trials}) == 4
    for (_, y, _), (_, best) in zip(trials, points, strict=False):  # the first of the points is the start
        np.testing.assert_array_equal(y, best)
    losses = result.history["outer_loss"][1:]
    assert np.argmin(losses) == max(i for i in range(4) if losses[i] == min(losses))
    assert min(losses) == pytest.approx(validation_loss(result.x, result.y), rel=1e-9)


def test_the_outer_loss_may_need_all_samples_of_a_client():
    """A search measures a `WholeLoss` on each client's own samples, and not as a mean over single samples.

    F is the mean of the clients' root mean square errors, computed again with NumPy. Clients have 2 and 3 samples.
    """
    samples = [np.array([0.0, 4.0]), np.array([1.0, 2.0, 9.0])]

    def root(x, y, rows, valid):
        return jnp.sqrt(jnp.sum(jnp.where(valid, (y - rows) ** 2, 0)) / jnp.sum(valid))

    problem = fb.Bilevel(fb.WholeLoss(root), lambda x, y, rows: jnp.mean((y - rows) ** 2) + jnp.exp(x) * y**2)
    clients = fb.Clients(samples, samples)
    task = replace(TASK, problem=problem, clients=clients, x0=jnp.zeros(()), y0=jnp.zeros(()), metrics={})
    result = searched(Random(**BOUNDS, trial_exchanges=4, batch_size=None), 18, task)
    losses = [np.sqrt(np.mean((float(result.y) - rows) ** 2)) for rows in samples]
    assert min(result.history["outer_loss"][1:]) == pytest.approx(np.dot(clients.weights, losses), rel=1e-9)


def test_every_exchange_is_counted():
    """The ledger of a search has the costs of all exchanges, those that train y and those that measure the outer loss.

    Of 13 exchanges, 10 train and 3 measure. A measurement sends the 2 + 3 numbers of x and y to 3 clients, and each
    replies with one number. In training, each client computes a gradient in each of 5 local steps.
    """
    result = searched(Random(**BOUNDS, trial_exchanges=4, batch_size=None), 13)
    ledger, size = result.ledger, 8
    assert ledger.exchanges_by_phase == {"train": 10, "validation": 3}
    assert result.history["exchanges"].tolist() == [0, 5, 10, 13]
    assert result.history["time"].tolist() == [0, 5, 10, 13]
    alone = fb.solve(
        Random(**BOUNDS, batch_size=None), TASK.problem, TASK.clients, TASK.x0, TASK.y0, rounds=10
    ).ledger  # sends as much as all trials do in ten exchanges of training
    assert ledger.bytes_down == alone.bytes_down + 3 * 3 * size * (2 + 3)
    assert ledger.bytes_up == alone.bytes_up + 3 * 3 * size
    assert ledger.gradients == alone.gradients == 10 * 3 * 5
    assert ledger.hvps > alone.hvps  # each trial measures the curvature anew


def test_a_budget_of_bytes_or_of_evaluations_is_shared_by_all_trials():
    """All trials together stay within a budget of bytes, or of evaluations up to the error of an estimate.

    The bytes of an exchange are known, so that the bytes of 13 exchanges allow the same trials as 13 exchanges. The
    evaluations of a trial are estimated from earlier trials. With full batches, a client computes a gradient in each of
    5 local steps. Since steps adapt, it also computes 3 products in each exchange, and 10 in the first exchange of a
    trial. Measuring the outer loss costs no evaluations.
    """
    method = Random(**BOUNDS, trial_exchanges=4, batch_size=None)
    by_exchanges = searched(method, 13).ledger
    by_bytes = searched(method, by_exchanges.bytes_down + by_exchanges.bytes_up, unit="bytes").ledger
    assert by_bytes.exchanges_by_phase == by_exchanges.exchanges_by_phase == {"train": 10, "validation": 3}
    each = 3 * (4 * 5 + 10 + 3 * 3)
    for amount, trials in ((3 * each, 3), (3 * each - 1, 3), (each, 1)):
        ledger = searched(method, amount, unit="evaluations").ledger
        assert ledger.exchanges_by_phase["validation"] == trials
        assert amount - each < ledger.gradients + ledger.hvps <= amount + 3 * 7  # a short trial has 12 products, too


def test_under_privacy_all_trials_share_one_account():
    """The ε of a search is that of a single run with as many exchanges, because clients reply in every exchange.

    A trial that would exceed the budget is shortened, or not begun. With very little noise, the losses are those of a
    search without privacy, and a loss above the clip is clipped.
    """
    method = Random(**BOUNDS, trial_exchanges=4, batch_size=None, lr=0.05)
    plain = searched(method, 13)
    quiet = fb.Privacy(clip=1e4, noise_multiplier=1e-9, delta=1e-5)
    same = searched(method, 13, privacy=quiet)
    np.testing.assert_allclose(same.history["outer_loss"][1:], plain.history["outer_loss"][1:], rtol=1e-3)
    assert same.ledger.exchanges_by_phase == {"train": 10, "validation": 3}
    clipped = searched(method, 5, privacy=fb.Privacy(clip=0.5, noise_multiplier=1e-9, delta=1e-5))
    assert clipped.history["outer_loss"][-1] == pytest.approx(0.5, rel=1e-3)
    noisy = fb.Privacy(clip=1.0, noise_multiplier=30.0, delta=1e-5)
    run = searched(method, 100, privacy=replace(noisy, budget=noisy.epsilon_after(12)))
    assert run.history["exchanges"].tolist() == [0, 5, 10, 12]
    assert run.history["epsilon"].tolist() == [noisy.epsilon_after(n) for n in (0, 5, 10, 12)]
    assert "privacy budget spent" in run.stopped
    assert abs(run.history["outer_loss"][1] - plain.history["outer_loss"][1]) > 0.1


def test_every_seed_trial_and_measurement_draws_with_a_key_of_its_own(monkeypatch):
    """No two runs of private searches with two seeds have the same key, neither trials nor measurements.

    With the same noise in two measurements, their difference would be exact.
    """
    keys = []

    def noting(*given, **named):
        keys.append(tuple(jax.random.key_data(named["key"]).tolist()))
        return fb.solve(*given, **named)

    monkeypatch.setattr(outer_search, "solve", noting)
    method = Random(**BOUNDS, trial_exchanges=4, batch_size=None, lr=0.05)
    quiet = fb.Privacy(clip=1e4, noise_multiplier=1e-9, delta=1e-5)
    for seed in (0, 1):
        SearchRun(method, TASK, ("exchanges", 10), seed, (), 99, {}, privacy=quiet).play()
    assert len(keys) == len(set(keys)) == 8  # for each seed, two trials, each with a measurement


def explosive(far=0.5):
    """Return the task with an inner loss that is infinite if an entry of x is above `far`. At x0 it is finite."""
    problem = TASK.problem

    def inner(x, y, rows):
        return problem.inner(x, y, rows) * jnp.where(jnp.max(x) > far, jnp.inf, 1.0)

    return replace(TASK, problem=fb.Bilevel(problem.outer, inner), metrics={})


@pytest.mark.parametrize("private", slow_but(True, of=[False, True]))
def test_a_trial_that_diverges_is_charged_and_the_search_goes_on(private, monkeypatch):
    """A trial that diverges is charged for its exchanges, and the search goes on.

    An infinite inner loss makes y infinite in the first exchange of a trial, which is then the only one of this trial.
    """
    told, real, drawn = [], optuna.Study.tell, []

    def noting(method, problem, clients, x, y, **given):
        if isinstance(method, Random):
            drawn.append((x, given["rounds"]))
        return fb.solve(method, problem, clients, x, y, **given)

    monkeypatch.setattr(outer_search, "solve", noting)
    monkeypatch.setattr(optuna.Study, "tell", lambda *given, **named: told.append(real(*given, **named)) or told[-1])
    privacy = fb.Privacy(clip=1e4, noise_multiplier=1e-9, delta=1e-5) if private else None
    method = Random(**BOUNDS, trial_exchanges=4, batch_size=None, lr=0.05)
    result = searched(method, 22, explosive(), privacy=privacy)
    far = [bool(np.max(x) > 0.5) for x, _ in drawn]
    assert 0 < sum(far) < len(far)
    spent = np.cumsum([0, *(1 if f else rounds + 1 for f, (_, rounds) in zip(far, drawn, strict=True))])
    assert result.history["exchanges"].tolist() == spent.tolist()
    assert spent[-1] == 21  # the 22nd exchange alone cannot both train and measure
    assert result.history.rows[-1]["diverged"] == sum(far)
    assert [trial.state.name for trial in told] == ["PRUNED" if f else "COMPLETE" for f in far]
    assert result.ledger.exchanges_by_phase["train"] + result.ledger.exchanges_by_phase["validation"] == 21
    alone = searched(method, 5, TASK, privacy=privacy).ledger
    assert result.ledger.gradients == alone.gradients // 4 * result.ledger.exchanges_by_phase["train"]
    if private:
        assert result.ledger.epsilon == privacy.epsilon_after(21)


@pytest.mark.slow
def test_a_search_that_is_begun_anew_charges_its_diverged_trials_again():
    """A search that begins anew after an interruption has the costs of one that nobody interrupted.

    Both are charged for their trials that diverge.
    """
    method = Random(**BOUNDS, trial_exchanges=4, batch_size=None, lr=0.05)

    def stop(result, row):
        if row.get("diverged"):
            raise KeyboardInterrupt

    whole = searched(method, 30, explosive())
    with pytest.raises(KeyboardInterrupt):
        searched(method, 30, explosive(), callbacks=[stop])
    again = searched(method, 30, explosive())
    assert whole.history["diverged"][-1] > 0
    assert again.ledger == whole.ledger
    np.testing.assert_array_equal(again.history["exchanges"], whole.history["exchanges"])


EXPLOSIVE = """
from dataclasses import replace
import fedbilevel as fb
import jax.numpy as jnp
from fedbilevel.tasks.quadratic import quadratic

TASK = quadratic(clients=3, dim_x=2, dim_y=3, samples=(2, 3))

def inner(x, y, rows):
    return TASK.problem.inner(x, y, rows) * jnp.where(jnp.max(x) > 0.5, jnp.inf, 1.0)

def task():
    return replace(TASK, problem=fb.Bilevel(TASK.problem.outer, inner))
"""


@pytest.mark.slow
def test_the_table_says_how_many_trials_diverged(tmp_path, run):
    (tmp_path / "own.py").write_text(EXPLOSIVE)
    given = ["compare", f"{tmp_path / 'own.py'}:task", "--algorithms", "simfbo", "--against", "random"]
    given += ["--exchanges", "30", "--search-box=-1:1", "--set", "Random.lr=0.05", "--set", "Random.trial_exchanges=4"]
    code, _, error = run(*given, "--quiet", "--out", tmp_path / "both")
    assert code == 0, error
    groups = load_groups([tmp_path / "both"])
    column = next(column for column in comparison(groups).columns if column.heading == "diverged")
    last = groups[1].runs[0].summary["last_row"]
    assert last["diverged"] > 0
    assert [list(cell.values) for cell in column.cells] == [[0.0], [last["diverged"]]]


def test_an_outer_loss_that_is_not_finite_is_a_trial_that_diverges(trials):
    """A trial whose outer loss is not finite counts as diverged, and costs its training and one measurement.

    The loss is infinite at the start of such a trial, so that there is no training. In 30 exchanges, five other trials
    train y in 4 exchanges each.
    """
    far = replace(
        TASK,
        problem=fb.Bilevel(
            lambda x, y, rows: TASK.problem.outer(x, y, rows) * jnp.where(jnp.max(x) > 0.5, jnp.inf, 1.0),
            TASK.problem.inner,
        ),
        metrics={},
    )
    result = searched(Random(**BOUNDS, trial_exchanges=4, batch_size=None, lr=0.05), 30, far)
    assert result.history.rows[-1]["diverged"] == sum(float(np.max(x)) > 0.5 for x, *_ in trials) > 0
    assert result.ledger.exchanges == sum(result.ledger.exchanges_by_phase.values()) == 29
    assert result.ledger.exchanges_by_phase["train"] == result.ledger.rounds == 20
    assert np.max(result.x) <= 0.5


@pytest.mark.parametrize(("unit", "amount"), slow_but(("exchanges", 5), of=[("exchanges", 5), ("evaluations", 300)]))
def test_a_search_ends_though_no_trial_can_begin(unit, amount):
    """A search ends with an error if its trials diverge at their start, even if they use nothing of the budget.

    The outer loss is infinite everywhere. To measure it costs an exchange, but no evaluations.
    """
    nowhere = replace(
        TASK, metrics={}, problem=fb.Bilevel(lambda x, y, rows: jnp.inf + 0 * jnp.sum(y), TASK.problem.inner)
    )
    with raises_with(NumericalError, " diverged"):
        searched(Random(**BOUNDS, trial_exchanges=4, batch_size=None), amount, nowhere, unit=unit)


def test_a_budget_that_allows_no_trial_is_said():
    result = searched(Random(**BOUNDS, trial_exchanges=4, batch_size=None), 30, unit="evaluations")
    assert "30 evaluations" in result.stopped
    assert (len(result.history), result.ledger.exchanges) == (1, 0)


@pytest.mark.slow
def test_a_search_whose_trials_all_diverge_names_the_field_to_change():
    method = Random(**BOUNDS, trial_exchanges=4, batch_size=None, lr=1e200)
    with raises_with(NumericalError, "Random.lr = 1e+200") as error:
        searched(method, 5)
    assert error.value.ledger.exchanges == 4


@pytest.mark.parametrize("name", ["outer_loss", "diverged"])
def test_a_metric_has_no_name_of_a_column_of_a_search(name):
    with refuses("metrics", name):
        searched(Random(**BOUNDS), 18, replace(TASK, metrics={name: lambda x, y: x @ x}))


@pytest.mark.slow
@pytest.mark.checked
def test_the_losses_of_a_search_are_checked_once(monkeypatch):
    """Check that the first of three trials checks the losses, and that runs with other clients check theirs as always.

    A callback makes a run with other clients at the start and after each of the three trials.
    """
    seen, other = [], quadratic(clients=2, dim_x=2, dim_y=3, samples=(2, 3))
    monkeypatch.setattr(posed, "first_look", lambda problem, clients, *given: seen.append(clients))

    def within(result, row):
        fb.solve(fb.SimFBO(), other.problem, other.clients, other.x0, other.y0, rounds=1)

    searched(Random(**BOUNDS, trial_exchanges=4, batch_size=None), 15, callbacks=[within])
    assert sum(clients is TASK.clients for clients in seen) == 1
    assert sum(clients is other.clients for clients in seen) == 4


def test_metrics_are_of_the_best_point_and_choose_nothing():
    """Metrics are measured at the best point so far, and do not influence the search."""
    other = replace(TASK, metrics={"distance": lambda x, y: -jnp.vdot(x, x)})
    method = Random(**BOUNDS, trial_exchanges=3, batch_size=None)
    one, two = (searched(method, 20, task) for task in (TASK, other))
    np.testing.assert_array_equal(one.x, two.x)
    assert one.history["outer_loss"].tolist()[1:] == two.history["outer_loss"].tolist()[1:]
    losses, distances = one.history["outer_loss"][1:], two.history["distance"][1:]
    better = losses < np.minimum.accumulate(np.append(np.inf, losses))[:-1]
    assert np.all((distances[1:] == distances[:-1]) | better[1:])
    assert distances[-1] == -float(jnp.vdot(two.x, two.x))


@pytest.mark.slow
def test_halving_ends_trials_after_a_ninth_and_a_third():
    """Trials of 9 exchanges end after 1, 3 or 9 exchanges, which means after 1, 2 or 6 more than at the rung before."""
    result = searched(Halving(**BOUNDS, trial_exchanges=9, batch_size=None), 60)
    trained = np.diff(result.history["exchanges"]) - 1
    whole = trained[result.history["exchanges"][1:] <= 60 - 12]  # before trials are shortened
    assert set(whole) == {1, 2, 6}  # rungs at 1, 3 and 9
    assert np.sum(whole == 1) > np.sum(whole == 2) > np.sum(whole == 6)
    assert result.ledger.exchanges in (59, 60)


@pytest.mark.parametrize(
    ("method", "left", "rounds"),
    [
        (Random(**BOUNDS), 100, 20),
        (Random(**BOUNDS), 21, 20),
        (TPE(**BOUNDS), 20, 19),
        (TPE(**BOUNDS), 1, 0),
        (Halving(**BOUNDS), 48, 45),
        (Halving(**BOUNDS), 47, 44),
        (Halving(**BOUNDS), 6, 5),
        (Halving(**BOUNDS), 7, 5),  # a sixth exchange needs a second measurement
    ],
)
def test_the_last_trial_is_shortened(method, left, rounds):
    """The last trial has as many exchanges as the rest of the budget allows, with one measurement at each of its rungs.

    A trial of Random and TPE trains for up to 20 exchanges, with one measurement at its end. One of Halving has rungs
    at 5, 15 and 45 exchanges.
    """
    assert method.affordable(left) == rounds


@pytest.mark.parametrize(
    ("project", "box"),
    [
        (None, None),
        (fb.projections.box(-2.0, 1.0), (-2.0, 1.0)),
        (fb.projections.box(-np.inf, 1.0), None),
        (fb.projections.box(jnp.asarray([0.0, 1.0, 0.0]), 2.0), None),
        (fb.projections.ball(1.0), None),
        (fb.projections.simplex(), None),
    ],
)
def test_the_bounds_of_a_set_are_found(project, box):
    """The set of x has bounds for a search if it is a finite box with the same bounds for all entries."""
    assert box_of(project, jnp.zeros(3)) == box


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Return the folder and the arguments of a comparison of SimFBO with TPE and FedEx, on two seeds."""
    folder = tmp_path_factory.mktemp("rivals") / "both"
    settings = ["run.exchanges=12", "trial_exchanges=5", "task.clients=3", "samples=[4, 4]"]  # seeds share programs
    given = {"settings": settings, "against": ["tpe", "fedex"], "search_box": (-1.0, 1.0), "seeds": [0, 1]}
    experiments.compare_algorithms("quadratic", ["simfbo"], out=folder, **given)
    return folder, given


@pytest.mark.slow
def test_rivals_are_rows_and_curves_as_others(compared, run, tmp_path):
    """A search and FedEx are rows and curves of a comparison, like methods, and have the same budget of exchanges."""
    folder, _ = compared
    groups = load_groups([folder])
    assert legend(groups) == ["SimFBO", "search: TPE", "FedEx"]
    for group in groups:
        for one in group.runs:
            assert one.metric == "relative_error"
            assert one.summary["last_row"]["exchanges"] in (11, 12)
            assert one.history["relative_error"][0] == pytest.approx(1)
    spec = groups[1].runs[0].spec
    assert (spec.algorithm.fields["low"], spec.algorithm.fields["trial_exchanges"]) == (-1, 5)
    assert run("report", folder, "--out", tmp_path / "page.html")[0] == 0
    assert "search: TPE" in (tmp_path / "page.html").read_text("utf-8")


def test_a_setting_of_a_rivals_name_is_its_own():
    """A setting with the name of a search applies to this search only."""
    settings = ["run.exchanges=12", "trial_exchanges=5", "Halving.trial_exchanges=9"]
    specs = comparison_specs(
        "quadratic", ["simfbo"], settings=settings, against=["tpe", "halving"], search_box=(-1.0, 1.0)
    )
    own = [specs[f"search-{name}"].algorithm.fields["trial_exchanges"] for name in ("TPE", "Halving")]
    assert own == [5, 9]


def test_a_finished_search_is_read_and_an_unfinished_one_begins_anew(compared):
    folder, given = compared
    place = experiments.Folder(folder / "search-TPE" / "seed-1")
    summary = json.loads(place.summary.read_text())
    untouched = (folder / "search-TPE" / "seed-0" / "summary.json").stat().st_mtime_ns
    for file in (place.summary, place.result, place.ledger, place.history):  # as if it had been killed
        file.unlink()
    with warns_with(fb.errors.CheckpointWarning, path=place.path):
        experiments.compare_algorithms("quadratic", ["simfbo"], out=folder, **given)
    again = json.loads(place.summary.read_text())
    assert {**again, **dict.fromkeys(SECONDS)} | {"last_row": 0} == {**summary, **dict.fromkeys(SECONDS)} | {
        "last_row": 0
    }
    assert (folder / "search-TPE" / "seed-0" / "summary.json").stat().st_mtime_ns == untouched


def test_an_interrupted_search_leaves_nothing_behind(tmp_path):
    """An interrupted search leaves no files, since it has no checkpoint and writes its history only at its end."""
    spec = comparison_specs("quadratic", ["simfbo"], settings=["run.exchanges=9"], against=["tpe"], search_box=(-1, 1))

    def stop(result, row):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        experiments.run(spec["search-TPE"], tmp_path / "run", callbacks=[stop])
    assert [path.name for path in (tmp_path / "run").glob("[!.]*")] == []


SECONDS = ("seconds_in_rounds", "seconds_compiling_this_time", "seconds_this_time")
QUADRATIC = ["compare", "quadratic", "--algorithms", "simfbo", "--quiet"]
BOX = "--search-box=-1:1"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            [*QUADRATIC, "--against", "tpr", "--exchanges", "9"],
            "unknown search 'tpr' of --against; did you mean 'tpe'?",
        ),
        ([*QUADRATIC, "--against", ",", "--exchanges", "9", BOX], "argument --against: ',' names no search"),
        ([*QUADRATIC, "--against", "tpe", BOX], "--exchanges = None is not allowed"),
        ([*QUADRATIC, "--against", "tpe", "--time", "9", BOX], "given with --against, or --bytes or --evaluations"),
        ([*QUADRATIC, "--against", "tpe", "--exchanges", "9"], "give --search-box LOW:HIGH"),
        (
            [*QUADRATIC, "--against", "tpe", "--exchanges", "9", "--search-box=1:0"],
            "must be of the form LOW:HIGH, with LOW",
        ),
        ([*QUADRATIC, "--against", "tpe", "--exchanges", "9", "--search-box=1:2"], "x0 is the first trial"),
        (
            ["compare", "classification", "--algorithms", "fedavg", "--against", "tpe", "--exchanges", "9", BOX],
            "TPE solves Bilevel",
        ),
        ([*QUADRATIC, "--exchanges", "9", BOX], "it must be given with --against"),
        (["compare", "runs", "--against", "tpe", BOX], "--against, --search-box: only allowed with --algorithms"),
        (["compare", "quadratic", "--algorithms", "simfbo,simfbo", "--against", "tpe"], "names that are all different"),
    ],
)
def test_wrong_commands_are_refused(arguments, words, run, tmp_path):
    code, _, error = run(*arguments, "--out", tmp_path / "out")
    assert (code, words in error) == (2, True), error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        (
            ["privacy.clip=1.0", "privacy.noise_multiplier=1.0", "privacy.delta=1e-5"],
            ("TPE.lr", None, "privacy"),
        ),
        (
            ["privacy.clip=1.0", "privacy.noise_multiplier=1.0", "privacy.delta=1e-5", "TPE.lr=0.1", "run.cohort=2"],
            ("run.cohort", 2, "privacy"),
        ),
        (["submodels.policy=random"], ("", ANY, "TPE cannot be given Submodels")),
        (["clients.capacity=0.5", "task.units=3"], ("clients.capacity", "given", "TPE")),
        (["asynchronous.wait_for=2"], ("", ANY, "TPE cannot be Asynchronous")),
        (["run.metrics_per_client=true"], ("run.metrics_per_client", True, "TPE")),
        (["task.dim_x=1001"], ("x0", "1,001 entries", "at most 1,000 entries")),
        (["run.x_bounds=[-0.5, 0.5]"], ("TPE.low", -1.0, "run.x_bounds")),
    ],
)
def test_specs_that_a_search_cannot_play_are_refused(settings, refusal):
    settings = ["run.exchanges=9", *settings]

    def refused():
        specs = comparison_specs("quadratic", ["simfbo"], settings=settings, against=["tpe"], search_box=(-1, 1))
        build(specs["search-TPE"])

    with refuses(*refusal):
        refused()


def test_the_bounds_of_the_spec_or_of_the_tasks_set_are_taken():
    """Without given bounds, searches take those of the task's set of x, for regularization −12 and 0."""
    specs = comparison_specs("regularization", ["simfbo"], settings=["run.exchanges=9"], against=["random", "fedex"])
    assert list(specs) == ["simfbo", "search-Random", "fedex"]
    for spec in (specs["search-Random"], specs["fedex"]):
        assert (spec.algorithm.value.low, spec.algorithm.value.high) == (-12, 0)


def test_what_installs_optuna_is_said(monkeypatch):
    """Without Optuna, the error names the command that installs it."""
    monkeypatch.setitem(sys.modules, "optuna", None)
    specs = comparison_specs("quadratic", ["simfbo"], settings=["run.exchanges=9"], against=["tpe"], search_box=(-1, 1))
    with refuses("", fact='pip install ".[sweep]"'):
        build(specs["search-TPE"])


@pytest.mark.slow
def test_x_may_be_a_tree(trials):
    """A search may be over a tree of arrays, and returns a tree of the same shapes."""

    def inner(x, y, batch):
        return jnp.mean((y - batch) ** 2) + jnp.exp(x["a"]) * y**2 + jnp.sum(jnp.exp(x["b"])) * y**2

    problem = fb.Bilevel(lambda x, y, batch: jnp.mean((y - batch) ** 2), inner)
    clients = fb.Clients(jnp.ones((2, 4)), jnp.ones((2, 4)))
    x0 = {"a": jnp.zeros(()), "b": jnp.zeros(2)}
    task = replace(TASK, problem=problem, clients=clients, x0=x0, y0=jnp.zeros(()), metrics={})
    result = searched(TPE(low=-2.0, high=1.0, trial_exchanges=3, batch_size=None), 8, task)
    assert jax.tree.map(jnp.shape, result.x) == jax.tree.map(jnp.shape, x0)

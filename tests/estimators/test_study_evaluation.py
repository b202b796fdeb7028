"""No part of a study is fitted to held-out rows, and its report has the numbers of these rows in one place."""

import json

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, roc_auc_score

from fedbilevel.estimators import StudyModel
from fedbilevel.estimators.evaluation import Report, _bounded, _check, _root, _said, _share, held_out
from fedbilevel.estimators.site_table import SiteTable
from refusals import refuses
from site_tables import study, tables

SHARE, LEAST = 0.4, 4


@pytest.fixture(scope="module")
def logistic():
    return study("logistic", holdout=SHARE, min_count=LEAST).fit(tables())


@pytest.fixture(scope="module")
def ridge():
    return study("ridge", holdout=SHARE, min_count=LEAST).fit(tables())


@pytest.fixture(scope="module")
def cox():
    return study("cox", holdout=SHARE, min_count=LEAST, times=range_of_days()).fit(tables())


def range_of_days():
    return [5, 10, 20, 40, 80, 400]


def held(model):
    """Return, for each site, the predictions and the target of the rows that are held out of its table."""
    found = {}
    for site, frame in tables().items():
        rows, target, _ = SiteTable(model.agreement.study, site, frame).held_out
        score = model.agreement.preparer.transform(rows) @ model.estimator.coef_
        found[site] = (score + getattr(model.estimator, "intercept_", 0)).to_numpy(), target
    return found


def without_held_out(given):
    """Return the tables of all sites without the rows that the study holds out."""
    frames = tables()
    return {site: frame.drop(SiteTable(given, site, frame).held_out[0].index) for site, frame in frames.items()}


def test_nothing_is_fitted_to_held_out_rows(logistic):
    alone = study("logistic", min_count=LEAST).fit(without_held_out(logistic.agreement.study))
    assert logistic.agreement.text == alone.agreement.text
    np.testing.assert_array_equal(logistic.estimator.coef_, alone.estimator.coef_)
    assert "no rows were held out" in str(alone.report)


def test_patients_are_held_out_whole_and_classes_alike():
    """All rows of a patient are held out, or none, and a quarter of the patients of each class is held out.

    A patient is of the class "yes" if one of the patient's rows is.
    """
    given, frame = study("logistic", holdout=0.25), tables()["west"]
    table = SiteTable(given, "west", frame)
    apart = table.held_out[0].index
    assert not set(frame.patient[apart]) & set(frame.patient.drop(apart))
    worst = (frame.ill == "yes").groupby(frame.patient).max()
    there = worst[frame.patient[apart].unique()]
    assert there.sum() == round(0.25 * worst.sum())
    assert (~there).sum() == round(0.25 * (~worst).sum())


def test_a_share_of_each_class_is_held_out():
    stratum = np.repeat([0, 1], [40, 8])
    rows = held_out(0.25, stratum, None, np.random.default_rng(0))
    assert np.bincount(stratum[rows]).tolist() == [10, 2]


def test_the_report_has_the_numbers_of_the_held_out_rows_in_one_place(logistic):
    """The measures in the report are those of scikit-learn on the held-out rows, or bounds that contain them.

    Within sites, AUROC is the mean over sites weighted by their pairs, and AUPRC is the mean weighted by positive
    rows. Over all rows the report has bounds of both. The calibration slope is that of a regression on all scores.
    """
    found, report = held(logistic), logistic.report.content
    areas, precisions, pairs, positives = [], [], [], []
    for site, (score, target) in found.items():
        label = (target.ill == "yes").to_numpy()
        one = report["sites"][site]
        areas.append(roc_auc_score(label, score))
        precisions.append(average_precision_score(label, score))
        pairs.append(label.sum() * (~label).sum())
        positives.append(label.sum())
        assert one["auroc"]["value"] == pytest.approx(areas[-1], abs=1e-12)
        assert one["auprc"]["value"] == pytest.approx(precisions[-1], abs=1e-12)
        assert (one["rows"], one["positive"]) == (len(label), label.sum())
    within, overall = report["within sites"], report["overall"]
    assert within["auroc"]["value"] == pytest.approx(np.average(areas, weights=pairs), abs=1e-12)
    assert within["auprc"]["value"] == pytest.approx(np.average(precisions, weights=positives), abs=1e-12)
    score = np.concatenate([one for one, _ in found.values()])
    label = np.concatenate([target.ill == "yes" for _, target in found.values()])
    for name, measure in (("auroc", roc_auc_score), ("auprc", average_precision_score)):
        assert overall[name]["least"] - 1e-12 <= measure(label, score) <= overall[name]["most"] + 1e-12
        assert overall[name]["least"] <= overall[name]["value"] <= overall[name]["most"]
    made = LogisticRegression(C=np.inf, tol=1e-12, max_iter=1000).fit(score[:, None], label)
    assert overall["calibration"]["slope"]["value"] == pytest.approx(made.coef_[0, 0], abs=1e-6)
    patients = {site: SiteTable(logistic.agreement.study, site, frame).held_out[2] for site, frame in tables().items()}
    patient = np.concatenate([[f"{site} {one}" for one in members] for site, members in patients.items()])
    design, chance = np.stack([np.ones(len(label)), score], 1), made.predict_proba(score[:, None])[:, 1]
    inverse = np.linalg.inv(design.T @ (design * (chance * (1 - chance))[:, None]))
    scores = pd.DataFrame((label - chance)[:, None] * design).groupby(patient).sum().to_numpy()
    m, products = len(scores), inverse @ scores.T @ scores @ inverse
    slope = overall["calibration"]["slope"]
    assert m < len(label)
    half = 1.959964 * np.sqrt(m / (m - 1) * products[1, 1])  # a sandwich, with the rows of each patient added up
    assert (slope["high"] - slope["low"]) / 2 == pytest.approx(half, rel=1e-5)
    curve = pd.DataFrame(report["curve"])
    assert curve.rows.sum() == len(label)
    assert curve.rows @ curve.observed == pytest.approx(label.sum())
    assert curve.rows @ curve.predicted == pytest.approx(np.sum(1 / (1 + np.exp(-score))))
    assert curve.predicted.is_monotonic_increasing


def test_pairs_of_two_sites_are_bounded_by_their_groups():
    """Pairs of rows of two sites give bounds of AUROC and AUPRC, because only the groups of these rows are known.

    A pair has a positive and a negative row, and is right if the positive row has the higher prediction. Site a has
    AUROC 0.8, so that 20 of its 5·5 pairs are right. In 4·4 of its pairs the positive row is in the higher group, and
    in 1·1 pair in the lower one, so that of the 8 pairs within its groups 20 − 16 = 4 are right. Site b has one group,
    and AUROC 0.75, so that 3 of its 2·2 pairs are right. Within groups 7 of 12 pairs are right. The group of b overlaps
    both groups of a. So of the 5·2 + 2·5 pairs of the two sites none is known to be right, all may be, and 7/12 of them
    are assumed to be. All 7·7 pairs are counted.
    """
    groups = {"a": np.array([[0, 10, 4, 1, 0.5], [10, 50, 1, 4, 4]]), "b": np.array([[0, 50, 2, 2, 2]])}
    made = _bounded(groups, {"a": 0.8, "b": 0.75})
    assert made["auroc"]["least"] == pytest.approx(23 / 49)
    assert made["auroc"]["most"] == pytest.approx(43 / 49)
    assert made["auroc"]["value"] == pytest.approx((23 + 20 * 7 / 12) / 49)
    # a positive row's precision is largest if all positive and no negative rows of overlapping groups are above it
    above = [6 / 6] * 4 + [7 / 8] + [7 / 7] * 2
    assert made["auprc"]["most"] == pytest.approx(np.mean(above))
    worst = [i / (i + 3) for i in (1, 2, 3, 4)] + [5 / 12] + [i / (i + 7) for i in (1, 2)]
    assert made["auprc"]["least"] == pytest.approx(np.mean(worst))


@pytest.mark.slow
def test_errors_of_ridge_regression_are_those_of_the_rows_in_one_place(ridge):
    """RMSE, bias and R² of ridge regression are those of the held-out rows, and their intervals count patients.

    With m patients, an error is √(m/(m − 1) · Σ over patients of the squared sum of their rows' influences).
    """
    found, report = held(ridge), ridge.report.content
    errors = {site: target.days.to_numpy() - score for site, (score, target) in found.items()}
    days = {site: target.days for site, (_, target) in found.items()}
    every, every_day = np.concatenate([*errors.values()]), pd.concat(days.values())
    for one, error, total in (
        *((report["sites"][site], errors[site], len(errors[site]) * days[site].var(ddof=0)) for site in errors),
        (report["overall"], every, len(every) * every_day.var(ddof=0)),
        (report["within sites"], every, sum(((one - one.mean()) ** 2).sum() for one in days.values())),
    ):
        assert one["rmse"]["value"] == pytest.approx(np.sqrt(np.mean(error**2)), rel=1e-10)
        assert one["bias"]["value"] == pytest.approx(error.mean(), rel=1e-8)
        assert one["r2"]["value"] == pytest.approx(1 - np.sum(error**2) / total, rel=1e-8)
        assert one["rows"] == len(error)
    patients = SiteTable(ridge.agreement.study, "west", tables()["west"]).held_out[2]
    by_patient = pd.Series(errors["west"] - errors["west"].mean()).groupby(patients)
    m, bias = by_patient.ngroups, report["sites"]["west"]["bias"]
    error = np.sqrt(m / (m - 1) * np.sum(by_patient.sum() ** 2)) / len(errors["west"])
    assert (bias["high"] - bias["low"]) / 2 == pytest.approx(1.959964 * error, rel=1e-6)
    squares = pd.Series(errors["west"] ** 2 - np.mean(errors["west"] ** 2)).groupby(patients)
    relative = np.sqrt(m / (m - 1) * np.sum(squares.sum() ** 2)) / np.sum(errors["west"] ** 2)
    root = report["sites"]["west"]["rmse"]
    for bound, sign in (("low", -1), ("high", 1)):  # by the delta method, for the logarithm
        assert np.log(root[bound] / root["value"]) == pytest.approx(sign * 1.959964 * relative / 2, rel=1e-6)


def test_concordance_of_pairs_within_sites(cox):
    found, report = held(cox), cox.report.content
    right = pairs = 0.0
    for site, (risk, target) in found.items():
        own = [0.0, 0.0]
        for i, j in np.ndindex(len(risk), len(risk)):
            if target.died.iloc[i] and target.days.iloc[i] < target.days.iloc[j]:
                own[0] += (risk[i] > risk[j]) + (risk[i] == risk[j]) / 2
                own[1] += 1
        assert report["sites"][site]["concordance"]["value"] == pytest.approx(own[0] / own[1], rel=1e-12)
        right, pairs = right + own[0], pairs + own[1]
    assert report["within sites"]["concordance"]["value"] == pytest.approx(right / pairs, rel=1e-12)


def test_baselines_and_curves_are_part_of_the_model_and_its_report(cox, tmp_path):
    """A Cox model with `times` has the baseline hazard of each site, and its report has Kaplan-Meier curves.

    Loops over the fitted rows of a site give each step of its baseline: the rows at risk, the events, and Breslow's
    cumulative hazard, which is the sum over events of 1/Σ exp(risk), with Σ over the rows at risk. The survival of a
    row is exp(−exp(risk) · hazard). A saved model gives the same survival.
    """
    table = SiteTable(cox.agreement.study, "west", tables()["west"])
    risk = cox.agreement.preparer.transform(table.features).to_numpy() @ cox.estimator.coef_
    days, died = table.target.to_numpy(float).T
    before = 0.0
    for end, at_risk, events, hazard in cox.baselines["west"]:
        assert at_risk == np.sum(days > before)
        assert events == np.sum(died[(days > before) & (days <= end)])
        each = [1 / np.exp(risk)[days >= t].sum() for t in days[(died == 1) & (days <= end)]]
        assert hazard == pytest.approx(np.sum(each), rel=1e-10)
        assert np.sum((days > before) & (days <= end)) >= LEAST
        before = end
    cox.save(tmp_path / "model.json")
    model, frame = StudyModel.load(tmp_path / "model.json"), tables()["west"].iloc[:3]
    ends = [step[0] for step in cox.baselines["west"]]
    hazards = np.array([step[3] for step in cox.baselines["west"]])
    expected = np.exp(-np.outer(np.exp(cox.predict(frame, "west")), hazards))
    np.testing.assert_allclose(model.predict_survival(frame, ends, "west"), expected, rtol=1e-12)
    np.testing.assert_array_equal(model.predict_survival(frame, [0.0], "west"), 1)
    with refuses("times", fact="from 0 to"):
        model.predict_survival(frame, [401.0], "west")
    with refuses("site with a baseline", "wets", near="west"):
        model.predict_survival(frame, [1.0], "wets")
    assert [*cox.report.content["kaplan meier"]] == ["all sites", "north", "south", "west"]
    assert "survival by Kaplan and Meier, west" in str(cox.report)


@pytest.mark.parametrize("estimator", ["ridge", "logistic"])
def test_fitted_rows_are_not_evaluated(estimator, request):
    """A site evaluates held-out rows only, also if a server asks for curves of a model that has none."""
    model = request.getfixturevalue(estimator)
    table = SiteTable(model.agreement.study, "west", tables()["west"])
    asked = question(model)
    assert table.answer(model.agreement, asked | {"curves": True}) == table.answer(model.agreement, asked)


def test_coefficients_are_reported_with_their_errors(ridge):
    content = ridge.report.content["coefficients"]
    assert [*content] == ridge.agreement.names
    assert [one["error"] for one in content.values()] == ridge.estimator.standard_errors_.tolist()


def question(model):
    return {"coef": model.estimator.coef_.tolist(), "intercept": model.estimator.intercept_}


def test_groups_of_predictions_have_the_rows_that_min_count_demands(logistic):
    given, agreement = logistic.agreement.study, logistic.agreement
    for site, frame in tables().items():
        groups = SiteTable(given, site, frame).answer(agreement, question(logistic))["groups"]
        assert min(negative + positive for _, _, negative, positive, _ in groups) >= LEAST


def test_a_question_of_another_form_is_refused(logistic):
    """A site refuses a question that lacks an entry, or whose entries have another form than those that it expects."""
    table, asked = SiteTable(logistic.agreement.study, "south", tables()["south"]), question(logistic)
    width = len(asked["coef"])
    for wrong, refusal in (
        ([], ("question", "list")),
        ({}, ("coef of the question", "missing")),
        ({"coef": asked["coef"]}, ("intercept of the question", "missing")),
        (asked | {"coef": asked["coef"][1:]}, ("coef of the question", (width - 1,), f"({width},)")),
        (asked | {"intercept": [0.5]}, ("intercept of the question", (1,), "()")),
        (asked | {"at": [1.0]}, ("at of the question", (1,), "pairs")),
    ):
        with refuses(*refusal):
            table.answer(logistic.agreement, wrong)


def test_of_too_few_rows_of_a_class_nothing_is_told(logistic):
    """A site does not answer a question if fewer than `min_count` of its held-out rows are of a class."""
    table = SiteTable(logistic.agreement.study, "south", tables()["south"])
    rows = table.held_out[0].index
    for few, told in ((LEAST, True), (LEAST - 1, False)):
        target = pd.DataFrame({"ill": np.where(np.arange(len(rows)) < few, "yes", "no")}, index=rows)
        table.held_out = table.held_out[0], target, table.held_out[2]
        for asked in ({}, {"at": [[0, 1], [0, 0]]}):
            assert (table.answer(logistic.agreement, question(logistic) | asked) is not None) == told


def test_a_site_that_is_undefined_is_named_and_the_others_are_reported():
    frames = tables()
    frames["west"] = frames["west"].assign(ill="yes")
    model = study("logistic", holdout=SHARE, min_count=LEAST).fit(frames)
    content = model.report.content
    assert content["undefined"] == {"west": "fewer than 4 held-out rows of a class"}
    assert [*content["sites"]] == ["north", "south"]
    assert "west: undefined, fewer than 4 held-out rows of a class" in str(model.report)


def test_one_site_alone_has_its_own_measures_overall():
    """If only one site can be evaluated, the overall measures are those of this site, and no bounds are needed."""
    frames = {site: frame if site == "south" else frame.assign(ill="yes") for site, frame in tables().items()}
    report = study("logistic", holdout=SHARE, min_count=LEAST).fit(frames).report
    content = report.content
    assert [*content["sites"]] == ["south"]
    for name in ("auroc", "auprc"):
        assert content["overall"][name] == pytest.approx(content["sites"]["south"][name], rel=1e-12)
    assert "the exact overall" not in str(report)


def test_what_min_count_hides_does_not_change_what_is_told(logistic):
    """A site's answers do not depend on the name of a rare category, nor on a number that is alone in its column.

    `min_count` hides both from the server, and they count as gaps in predictions, too.
    """
    given, frames = logistic.agreement.study, tables()
    first = SiteTable(given, "north", frames["north"]).answer(logistic.agreement, question(logistic))
    other = frames["north"].replace({"kind": {"z": "rarer yet"}}).assign(dose=np.where(np.arange(40) == 5, 9.0, np.nan))
    assert SiteTable(given, "north", other).answer(logistic.agreement, question(logistic)) == first


def test_a_report_is_written_as_json_and_for_people(logistic, tmp_path):
    logistic.report.save(tmp_path)
    content = json.loads((tmp_path / "report.json").read_text())
    assert content == json.loads(json.dumps(logistic.report.content))
    lines = (tmp_path / "report.txt").read_text().splitlines()
    places = [next(n for n, line in enumerate(lines) if line.startswith(name)) for name in ("within sites", "overall")]
    assert places == sorted(places)
    one = content["within sites"]["auroc"]
    assert f"{one['value']:.3f} ({one['low']:.3f} to {one['high']:.3f})" in lines[places[0]]


def test_a_class_that_held_out_rows_alone_have_is_named(logistic):
    table = SiteTable(logistic.agreement.study, "south", tables()["south"])
    features, target, patients = table.held_out
    table.held_out = features, target.replace({"ill": {"no": "perhaps"}}), patients
    with refuses("class in the column 'ill'", "perhaps", "['no', 'yes']"):
        table.samples(logistic.agreement)


@pytest.mark.parametrize(
    ("share", "path", "fact"),
    [
        *((share, "holdout", "0 to below 1") for share in (-0.1, 1.0, True)),
        ("a half", "site of holdout", "['north', 'south', 'west']"),
    ],
)
def test_a_wrong_share_is_named(share, path, fact):
    with refuses(path, share, fact):
        study("logistic", holdout=share)


@pytest.mark.parametrize("answer", [[], {"auroc": [0.5, 0.1]}, {"auroc": [0.5, float("nan")], "groups": []}])
def test_an_answer_of_another_form_is_refused(answer):
    with refuses("evaluation of south", fact="auroc, groups"):
        _check("south", answer, ("auroc", "groups"))


@pytest.mark.parametrize("squares", [[-1.0, 0.1], [1.0, -0.1]])
def test_mean_squares_below_0_are_refused(squares):
    with refuses("evaluation of south", "dict"):
        _check("south", {"squares": squares}, ("squares",))


def test_a_perfect_order_has_no_interval():
    """An AUROC of 1 has no interval. From 1 to 1, it would contain the true AUROC in no case in which this is below 1.

    With 8 positive and 8 negative rows and a true AUROC of 0.95, every fourth sample has the AUROC 1.
    """
    assert _share(1.0, 0.0) == {"value": 1.0}
    assert _said({"auroc": _share(1.0, 0.0)}, "auroc") == "1.000"


def test_the_root_of_any_mean_square_has_a_finite_interval():
    found = _root({"value": 1e-300, "high": 1.0})
    assert 0 <= found["low"] <= found["value"] <= found["high"] < np.inf


def test_perfect_predictions_are_pointed_out():
    """A column that contains the outcome predicts all rows; a reader of the report should not believe the model."""

    def content(*values):
        sites = {f"s{i}": {"rows": 9, "auroc": {"value": value}} for i, value in enumerate(values)}
        return {"estimator": "logistic", "target": "ill", "holdout": 0.5, "undefined": {}, "sites": sites}

    for values, said in (((1.0, 1.0), True), ((1.0, 0.99), False), ((), False)):
        assert ("no column contains the outcome" in str(Report(content(*values)))) == said
    errors = {"s": {"rows": 9, "r2": {"value": 1.0}}}
    assert "outcome" not in str(Report(content() | {"estimator": "ridge", "sites": errors}))


def test_names_of_columns_end_no_line_of_the_report():
    frames = {site: frame.rename(columns={"age": "age\nrmse"}) for site, frame in tables().items()}
    lines = str(study("ridge").fit(frames).report).split("\n")
    assert any(line.startswith("age rmse  ") for line in lines)
    assert not any(line.startswith("rmse") for line in lines)

"""A study has the numbers of an estimator on the pooled rows, uses only what sites send, and its model predicts."""

import copy
import json

import numpy as np
import pandas as pd
import pytest

from fedbilevel.errors import ConfigurationError, DataWarning
from fedbilevel.estimators import CoxRegression, LogisticRegression, Preparer, Ridge, Study, StudyModel
from fedbilevel.estimators.agreement import Agreement, DifferentColumnsError, _other_units, _other_words
from fedbilevel.estimators.site_table import SiteTable
from refusals import raises_with, refuses
from representatives import slow_but
from site_tables import SITES, TARGETS, fitted, study, table, tables

KINDS = {"logistic": LogisticRegression, "ridge": Ridge, "cox": CoxRegression}


def pooled(given, frames):
    """Return X, y, sites and patients of the rows of all sites in one place, prepared as the study prepares them."""
    own = [SiteTable(given, site, frames[site]) for site in given.sites]
    preparer = Preparer.sum_of({one.site: one.summaries for one in own})
    X = pd.concat([preparer.transform(one.features) for one in own], ignore_index=True)
    y = pd.concat([one.target for one in own], ignore_index=True)
    sizes = [len(one.target) for one in own]
    patients = np.concatenate([one.patients for one in own])
    return X, y if given.event else y.iloc[:, 0], np.repeat(given.sites, sizes), patients


@pytest.mark.parametrize("kind", slow_but("logistic", of=KINDS))
def test_a_study_has_the_numbers_of_the_estimator_on_the_pooled_rows(kind):
    given, frames, model = study(kind), tables(), fitted(kind)
    X, y, sites, patients = pooled(given, frames)
    groups = ["site" if name.startswith("site_") else "all" for name in X.columns]
    alone = KINDS[kind](cv=3, rounds=300, penalty_groups=groups).fit(X, y, groups=sites, patients=patients)
    made = model.estimator
    assert list(X.columns) == model.agreement.names
    assert ("site_north" in X.columns) == (kind != "cox")
    np.testing.assert_allclose(made.coef_, alone.coef_, rtol=0, atol=1e-10)
    np.testing.assert_allclose(made.penalties_, alone.penalties_, rtol=1e-9)
    np.testing.assert_allclose(made.standard_errors_, alone.standard_errors_, rtol=1e-9)  # as exact as penalties
    usual = KINDS[kind](penalties=alone.penalties_).fit(X, y, groups=sites)  # as if each row were of another patient
    assert np.abs(made.standard_errors_ / usual.standard_errors_ - 1).max() > 0.02
    centre, spread = model.agreement.scales
    np.testing.assert_allclose(centre, X.mean(), atol=1e-12)
    np.testing.assert_allclose(spread, X.std(ddof=0), rtol=1e-12)
    assert np.abs(made.coef_).max() > 0.1


def test_each_column_group_or_feature_may_have_a_penalty():
    agreement = fitted("ridge").agreement

    def labels(**more):
        return Agreement(study("ridge", **more), agreement.rows, agreement.features, agreement.target).penalty_groups()

    assert [name.partition("_")[0] for name in agreement.names] == [
        "age",
        "dose",
        *["kind"] * 3,
        *["code"] * 2,
        *["site"] * 3,
    ]
    assert labels() == ["all"] * 7 + ["site"] * 3
    assert labels(penalty="column") == ["age", "dose", *["kind"] * 3, *["code"] * 2, *["site"] * 3]
    assert len(set(labels(penalty="feature"))) == 8
    assert labels(groups={"measured": ["age", "dose"]}) == ["group measured"] * 2 + ["all"] * 5 + ["site"] * 3
    # a group may have the name that another penalty has
    assert labels(groups={"all": ["age"]}) == ["group all"] + ["all"] * 6 + ["site"] * 3
    with refuses("column in groups", "doses", near="dose"):
        labels(groups={"measured": ["doses"]})


@pytest.mark.slow
def test_what_a_site_does_not_tell_is_not_used():
    """A study uses neither the single dose of the site north nor the name of a rare category of the site south.

    With another number and another name, the coefficients are the same.
    """
    frames = tables()
    assert SiteTable(study("ridge"), "north", frames["north"]).summaries["dose"] == {
        "count": 0,
        "mean": 0.0,
        "squares": 0.0,
    }
    changed = dict(frames)
    changed["north"] = frames["north"].assign(dose=np.where(frames["north"].index == 7, -9.0, np.nan))
    changed["south"] = frames["south"].replace({"kind": {"z": "a very rare one"}})
    one, other = fitted("ridge").estimator, study("ridge").fit(changed).estimator
    np.testing.assert_array_equal(one.coef_, other.coef_)
    told = study("ridge", min_count=1).fit(frames).estimator
    assert "kind_z" in told.feature_names_in_


def test_a_category_that_a_server_makes_up_is_a_gap_at_every_site():
    """A category that only the server names counts as a gap at a site, also if rows of the site have it.

    So a server learns nothing about a rare category by sending an agreement with its name.
    """
    given, frame = study("ridge"), table(1)
    one = SiteTable(given, "south", frame)
    agreement = fitted("ridge").agreement
    features = json.loads(json.dumps(agreement.features))
    features["kind"]["categories"]["z"] = 20
    forged = Agreement(given, agreement.rows, features, agreement.target)
    place = forged.names.index("kind_z")
    assert len(set(one.samples(forged)["row"][:, place])) == 1
    assert (frame.kind == "z").sum() == 3


def test_sums_do_not_depend_on_the_order_of_sites():
    given = study("ridge")
    told = {site: SiteTable(given, site, frame).statistics() for site, frame in tables().items()}
    one = Agreement.of(given, [told[site] for site in SITES])
    other = Agreement.of(study("ridge", sites=SITES[::-1]), [told[site] for site in SITES[::-1]])
    assert one.text == other.text
    assert Agreement.read(given, one.text) == one


@pytest.mark.parametrize("kind", slow_but("logistic", "ridge", of=KINDS))
def test_a_saved_model_predicts_one_patient(kind, tmp_path):
    """A saved model predicts a patient from the columns of a site, which have words and gaps.

    The expected number is a sum over the coefficients in the file.
    """
    frames = tables()
    fitted(kind).save(tmp_path / "model.json")
    model, file = StudyModel.load(tmp_path / "model.json"), json.loads((tmp_path / "model.json").read_text())
    patient = frames["south"].drop(columns=[*TARGETS[kind].values(), "patient"]).iloc[[4]].assign(age=np.nan, kind="b")
    told, coef = file["agreement"]["features"], file["coef"]
    dose = (patient.dose.iloc[0] - told["dose"]["mean"]) / np.sqrt(told["dose"]["squares"] / told["dose"]["count"])
    risk = file["intercept"] + coef["dose"] * dose + coef["kind_b"] + coef[f"code_{patient.code.iloc[0]:.0f}"]
    risk += coef.get("site_south", 0)
    if kind == "logistic":
        assert file["predicts"] == "the probability of ill = yes"
        np.testing.assert_allclose(model.predict_proba(patient, site="south"), 1 / (1 + np.exp(-risk)), rtol=1e-12)
        assert model.predict(patient, site="south") == ["yes" if risk > 0 else "no"]
        new = risk - coef["site_south"]  # of a hospital that was not in the study
        np.testing.assert_allclose(model.predict_proba(patient), 1 / (1 + np.exp(-new)), rtol=1e-12)
    else:
        np.testing.assert_allclose(model.predict(patient, site="south"), risk, rtol=1e-12)
        with refuses("predict_proba", kind, "logistic"):
            model.predict_proba(patient)
    with refuses("site", "sout", near="south"):
        model.predict(patient, site="sout")
    with refuses("column", "dose"):
        model.predict(patient.drop(columns="dose"), site="south")


def test_the_positive_class_can_be_chosen():
    frames = tables()
    one, other = fitted("logistic"), study("logistic", positive="no").fit(frames)
    np.testing.assert_allclose(one.estimator.coef_, -other.estimator.coef_, atol=1e-7)
    assert (one.estimator.classes_.tolist(), other.estimator.classes_.tolist()) == (["no", "yes"], ["yes", "no"])
    with refuses("positive", "nay", "['no', 'yes']"):
        study("logistic", positive="nay").fit(frames)


def test_sites_that_differ_from_the_others_take_part():
    """A site takes part if it has one class, a constant column or a column of gaps, or if some rows have no target."""
    frames = tables()
    frames["north"] = frames["north"].assign(ill="yes", age=61.0, code=np.nan)
    frames["south"] = frames["south"].assign(ill=frames["south"].ill.where(frames["south"].index > 9))
    with pytest.warns(DataWarning, match="north: all rows .* same class.* site = 'north'"):
        model = study("logistic").fit(frames)
    assert model.agreement.rows == 40 + 64 + 74
    assert np.isfinite(model.estimator.coef_).all()
    offsets = dict(zip(model.agreement.names, model.estimator.coef_, strict=True))
    assert offsets["site_north"] > max(offsets["site_south"], offsets["site_west"])


@pytest.mark.parametrize(
    ("means", "deviations", "suspect"),
    [
        ((62, 65, 58, 878), (11, 11, 12, 130), ["d"]),  # years and months
        ((80, 0.9, 85), (30, 0.3, 25), ["b"]),  # creatinine in µmol/l and in mg/dl
        ((60, 720), (10, 120), ["a", "b"]),
        ((250, 0, 230), (40, 0, 45), ["b"]),  # 0 was not measured
        ((62, 70, 45), (11, 9, 12), []),
        ((0.02, 1.0, 0.5), (0.14, 0.0, 0.5), []),
        ((1, 1), (0, 0), []),
        ((2019, 2021), (0, 0), []),  # the year of a study
        ((2019, 2021, 2021), (0, 0, 0), []),
        ((4.0, 100.0, 5.0), (3.0, 80.0, 4.0), ["b"]),  # a site with much sicker patients is asked, too
    ],
)
def test_a_site_with_another_unit_is_found(means, deviations, suspect):
    given = [{"count": 50, "mean": float(m), "squares": 50.0 * s**2} for m, s in zip(means, deviations, strict=True)]
    found = _other_units(dict(zip("abcd", given, strict=False)))
    assert [name for name in found if len(name) == 1] == suspect


def test_a_site_with_another_unit_is_warned_of():
    frames = tables()
    frames["west"] = frames["west"].assign(age=frames["west"].age * 12)
    statistics = [SiteTable(study("ridge"), site, frame).statistics() for site, frame in frames.items()]
    with pytest.warns(DataWarning, match=r"column 'age' differ strongly between sites: [\d.]+ \(west\) and .* \(med"):
        Agreement.of(study("ridge"), statistics)


@pytest.mark.parametrize(
    ("words", "suspect"),
    [
        ((["f", "m"], ["f", "m"], ["female", "male"]), {"c": ["female", "male"]}),
        ((["1", "2"], ["f", "m"]), {"a": ["1", "2"], "b": ["f", "m"]}),
        ((["f", "m"], ["f"], []), {}),  # a site that hides all categories is not compared
        ((["f"], ["m"], ["f", "m"]), {}),
        ((["x", "y"], ["y", "z"], ["z"]), {}),  # a category of a single site is usual
        ((["f"], list("uvwxyz")), {"a": ["f"], "b": list("uvwxy")}),
    ],
)
def test_a_site_with_other_words_is_found(words, suspect):
    given = [{"categories": dict.fromkeys(each, 9), "rarer": False} for each in words]
    assert _other_words(dict(zip("abcd", given, strict=False))) == suspect


WORDS = {"a": "one", "b": "two", "c": "three"}


def test_a_site_with_other_words_is_warned_of():
    frames = tables()
    frames["west"] = frames["west"].assign(kind=frames["west"].kind.map(WORDS))
    statistics = [SiteTable(study("ridge"), site, frame).statistics() for site, frame in frames.items()]
    with pytest.warns(
        DataWarning, match=r"column 'kind' .* single site only: west has one, three, two\. Do all"
    ) as caught:
        Agreement.of(study("ridge"), statistics)
    assert len(caught) == 1  # the column of the sites themselves is not compared


HERE = "table of north"


@pytest.mark.parametrize(
    ("change", "path", "got", "fact", "where"),
    [
        (lambda one: one.drop(columns="ill"), "column", "ill", "dose", HERE),
        (lambda one: one.drop(columns="dose"), "column 'dose' of north", "missing", "drop = ['dose']", ""),
        (lambda one: one.assign(dose="high"), "column 'dose' of south", "numbers", "words, as in north", ""),
        (
            lambda one: one.assign(ill=np.resize(["a", "b", "c"], len(one))),
            "classes of 'ill'",
            ["a", "b", "c"],
            "two",
            HERE,
        ),
        (lambda one: one.assign(ill="perhaps"), "classes of 'ill'", ["no", "perhaps", "yes"], "two", ""),
        (lambda one: one.assign(site="x"), "column 'site'", "a feature", "offsets = false", HERE),
        (lambda one: one.iloc[:7], "the number of rows with a target", 7, "8 or more", HERE),
        (lambda one: one.assign(patient=np.nan), "column 'patient'", "a gap", "the patient of each row", HERE),
        (
            lambda one: one.join(one[["age"]], rsuffix="2").rename(columns={"age2": "age"}),
            "X",
            "DataFrame",
            "'age'",
            HERE,
        ),
        (
            lambda one: one.join(one[["ill"]], rsuffix="2").rename(columns={"ill2": "ill"}),
            "X",
            "DataFrame",
            "'ill'",
            HERE,
        ),
    ],
)
def test_what_does_not_fit_is_named(change, path, got, fact, where):
    frames = tables()
    frames["north"] = change(frames["north"])
    with refuses(path, got, fact, where=where):
        study("logistic").fit(frames)


LISTS = "a list of columns"


@pytest.mark.parametrize(
    ("fields", "path", "fact", "near"),
    [
        ({"estimator": "logit"}, "estimator", "ridge", "logistic"),
        ({"target": ""}, "target", "", ""),
        ({"event": "died"}, "event", "Cox", ""),
        ({"event": "", "estimator": "cox"}, "event", "Cox", ""),
        ({"sites": ["a", "a"]}, "sites", "once", ""),
        ({"groups": ["age"]}, "groups", LISTS, ""),
        ({"groups": {"mine": "age"}}, "groups", LISTS, ""),
        ({"offsets": "no"}, "offsets", "true or false", ""),
        ({"penalty": "two"}, "penalty", "column", ""),
        ({"cv": 1}, "cv", "2 or more", ""),
        ({"positive": 5}, "positive", "", ""),
        ({"rounds": 0}, "rounds", "", ""),
        ({"holdout": "c"}, "site of holdout", "['a', 'b']", ""),
        ({"holdout": "a", "sites": ["a"]}, "holdout", "several sites", ""),
        ({"holdout": 1}, "holdout", "below 1", ""),
    ],
)
def test_a_wrong_study_is_refused(fields, path, fact, near):
    """A wrong field of a study is refused; in each case the first of the fields is the wrong one."""
    given = {"estimator": "logistic", "sites": ["a", "b"], "target": "ill"}
    with refuses(path, next(iter(fields.values())), fact, near):
        Study.read({**given, **fields})


def test_a_misspelt_field_of_a_study_is_refused():
    with refuses("field of [study]", "targets", near="target"):
        Study.read({"estimator": "logistic", "sites": ["a", "b"], "target": "ill", "targets": "x"})


def test_a_column_to_leave_out_that_no_site_has_is_an_error():
    frames = {site: frame.drop(columns="patient") for site, frame in tables().items()}
    given = Study(estimator="ridge", sites=SITES, target="days", categorical=("code",), drop=("ill", "died", "kins"))
    with (
        pytest.warns(DataWarning, match="has no column 'kins'"),
        refuses("column of all tables in drop", "kins", near="kind"),
    ):
        given.fit(frames)


@pytest.mark.parametrize(
    ("kind", "column", "wrong", "fact"),
    [
        ("cox", "days", -1.0, "a time from 0 "),
        ("cox", "days", np.inf, "a time from 0 "),
        ("cox", "days", "soon", "a time from 0 "),
        ("ridge", "days", -np.inf, "a number from -1e+100 to 1e+100"),
        ("logistic", "age", np.inf, "a number from -1e+100 to 1e+100"),
        ("cox", "age", 1e101, "a number from -1e+100 to 1e+100"),
    ],
)
def test_values_that_are_not_allowed_are_reported_with_their_column_and_site_and_the_number_of_rows(
    kind, column, wrong, fact
):
    """The error has the number of rows also if rows without a target, which are left out, come before the wrong ones.

    A held-out row is checked like any other. Times of 0 are allowed: events may come on the first day.
    """
    frames, target = tables(), TARGETS[kind]["target"]
    values = frames["west"][column].astype(object if wrong == "soon" else float)
    values[[7, 8, 30]] = wrong
    frames["west"] = frames["west"].assign(**{column: values}, ill="yes")
    frames["west"].loc[[0, 2], target] = np.nan
    with refuses(f"column {column!r}", [wrong], fact, where="table of west") as found:
        study(kind, holdout=0.5, min_count=4).fit(frames)
    assert " 3 rows" in str(found.value)
    first = frames["north"].assign(days=np.where(np.arange(40) < 5, 0, frames["north"].days))
    assert SiteTable(study(kind), "north", first).left_out == 0


def test_standard_errors_in_a_file_are_numbers(tmp_path):
    file = tmp_path / "model.json"
    fitted("ridge").save(file)
    content = json.loads(file.read_text())
    for wrong in ({"intercept_error": float("nan")}, {"standard_errors": content["standard_errors"] | {"age": -1.0}}):
        file.write_text(json.dumps(content | wrong))
        with raises_with(ConfigurationError, path="standard errors") as found:
            StudyModel.load(file)
        assert found.value.where.startswith(str(file))


def test_a_wrong_value_in_a_file_is_reported_with_its_field(tmp_path):
    file = tmp_path / "model.json"
    fitted("ridge").save(file)
    content = json.loads(file.read_text())
    content["study"]["estimator"] = "ridg"
    file.write_text(json.dumps(content))
    with raises_with(ConfigurationError, path="estimator", got="ridg", near="ridge") as found:
        StudyModel.load(file)
    assert found.value.where.startswith(str(file))


def test_a_column_to_leave_out_may_be_missing_at_a_site():
    with pytest.warns(DataWarning, match="has no column 'dose'"):
        SiteTable(study("logistic", drop=("dose", "days", "died")), "north", table(0).drop(columns="dose"))


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_a_warning_about_a_table_names_the_site():
    frames = tables()
    frames["south"].loc[[1, 2], "dose"] = -999.0
    with pytest.warns(DataWarning, match="^table of south: .*column 'dose'") as warned:
        study("ridge", rounds=3).fit(frames)
    assert sum("table of" in str(one.message) for one in warned) == 1


@pytest.mark.parametrize(("wrong", "told"), [([True, False], 2), (["yes", "no"], 2), ([1, 2], 1)])
def test_events_are_1_or_0(wrong, told):
    frame = table(0)
    with refuses("column 'died'", [*map(str, wrong)][-told:], "1"):
        SiteTable(study("cox"), "north", frame.assign(died=np.resize(wrong, len(frame))))


def test_a_study_without_an_event_says_so():
    frames = {name: frame.assign(died=0) for name, frame in tables().items()}
    with refuses("events 'died'", 0, "at least one"):
        study("cox").fit(frames)
    rows, target = np.ones((3, 1)), np.column_stack((np.arange(3.0), np.zeros(3)))
    with refuses("events", 0, "at least one"):
        CoxRegression(penalties=0.1).fit(rows, target, groups=["a", "a", "b"])


def test_tables_and_sites_must_be_the_same():
    frames = tables()
    with refuses("site of the tables", "nort", near="north"):
        study("ridge").fit({**frames, "nort": frames["north"]})
    with refuses("table of site 'west'", "missing"):
        study("ridge").fit({site: frames[site] for site in ("north", "south")})


def test_the_error_of_a_column_that_a_site_lacks_can_be_copied():
    error = DifferentColumnsError("north and south", "age", ["age", "sex"])
    copied = copy.copy(error)
    assert (str(copied), copied.columns) == (str(error), ["age", "sex"])

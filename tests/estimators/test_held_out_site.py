"""A model is not fitted to the rows of a site that is held out, which is evaluated as a site outside the study."""

from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

import fedbilevel as fb
from fedbilevel.estimators import measures
from fedbilevel.estimators.site_table import SiteTable
from refusals import refuses
from representatives import slow_but
from site_tables import SITES, TARGETS, fitted, study, tables

OTHERS = ("north", "west")


@pytest.mark.parametrize("kind", slow_but("ridge", of=TARGETS))
def test_the_model_is_that_of_the_other_sites(kind):
    """The model is that of a study of the other sites, whatever numbers the rows of the held-out site have."""
    frames = tables()
    given = study(kind, holdout="south")
    model = given.fit(frames)
    alone = study(kind, sites=OTHERS).fit({site: frames[site] for site in OTHERS})
    assert model.agreement.text == alone.agreement.text
    np.testing.assert_array_equal(model.estimator.coef_, alone.estimator.coef_)
    changed = frames | {"south": frames["south"].assign(age=30.0, dose=-1.0)}
    np.testing.assert_array_equal(given.fit(changed).estimator.coef_, alone.estimator.coef_)
    assert [*model.report.content["sites"]] == ["south"]
    np.testing.assert_array_equal(model.predict(frames["south"], "south"), alone.predict(frames["south"]))


def test_the_report_is_about_all_rows_of_the_site_with_the_offset_0():
    frames = tables()
    model = study("logistic", holdout="south").fit(frames)
    kept = frames["south"]
    assert not any(name == "site_south" for name in model.agreement.names)
    rare = kept.assign(kind=kept.kind.where(kept.kind != "z"))
    score = model.predict_proba(rare)
    content = model.report.content
    assert content["holdout"] == "south"
    assert content["undefined"] == {}
    assert not {"within sites", "overall"} & content.keys()
    one = content["sites"]["south"]
    assert (one["rows"], one["positive"]) == (len(kept), (kept.ill == "yes").sum())
    assert one["auroc"]["value"] == pytest.approx(roc_auc_score(kept.ill == "yes", score), abs=1e-12)
    text = str(model.report)
    assert "all rows of south, predicted as rows of a site that was not in the study, with the offset 0" in text
    assert "all rows of `south` are held out and not counted here" in model.card()
    assert "Sites: `north`, `west`" in model.card()
    assert "south" not in model.sheet()


@pytest.mark.slow
def test_a_cox_model_with_times_is_evaluated_at_a_site_without_a_baseline():
    """A Cox model with `times` is evaluated at a held-out site, which has no baseline.

    Its concordance and its calibration slope are over all its rows. The curves and baselines are those of the other
    sites.
    """
    frames, given = tables(), study("cox", holdout="south", times=(5, 20, 60, 200), min_count=4)
    model = given.fit(frames)
    alone = replace(given, sites=OTHERS, holdout=0.0).fit({site: frames[site] for site in OTHERS})
    assert model.baselines == alone.baselines
    assert model.report.content["kaplan meier"] == alone.report.content["kaplan meier"]
    kept = frames["south"]
    risk, target = model.predict(kept), kept[["days", "died"]].to_numpy(float)
    slope, _ = measures.hazard_slope(*target.T, risk)
    pairs, concordance, _ = measures.concordance(*target.T, risk)
    one = model.report.content["sites"]["south"]
    assert (one["rows"], one["events"], pairs > 300) == (len(kept), target[:, 1].sum(), True)
    assert one["concordance"]["value"] == pytest.approx(concordance, rel=1e-12)
    assert one["calibration"]["slope"]["value"] == pytest.approx(slope, rel=1e-9)
    printed = str(model.report).split("\n")
    assert printed[2].split() == ["rows", "events", "concordance", "slope"]
    assert f"{slope:.3f} (" in printed[3]
    with refuses("site", "south", "(north, west)"):
        model.predict_survival(kept, [20], "south")
    assert model.predict_survival(kept, [20], "north").shape == (len(kept), 1)


def test_the_offset_of_a_site_that_was_not_in_the_study_is_the_mean_of_the_offsets():
    """The offset of a site that was not in the study, 0, is the weighted mean of the offsets of the study's sites.

    The weights are the variances of the sites' indicators. The mean is 0 because the intercept has no penalty, and
    takes up what is common to all offsets.
    """
    model = fitted("logistic")
    offsets = dict(zip(model.agreement.names, model.estimator.coef_, strict=True))
    share = np.array([model.agreement.features["site"]["categories"][site] for site in SITES]) / model.agreement.rows
    mean = np.average([offsets[f"site_{site}"] for site in SITES], weights=share * (1 - share))
    assert abs(mean) < 1e-9
    assert min(abs(offsets[f"site_{site}"]) for site in SITES) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("kind", TARGETS)
def test_reference_has_the_numbers_of_local(kind):
    frames = tables()
    given = study(kind, holdout="south", penalty="one")
    one, other = given.fit(frames), given.fit(frames, fb.Reference())
    np.testing.assert_allclose(one.estimator.coef_, other.estimator.coef_, rtol=0, atol=1e-10)
    assert str(one.report) == str(other.report)


@pytest.mark.slow
def test_each_site_may_be_held_out_in_turn():
    areas = {}
    for site in SITES:
        report = replace(study("logistic"), holdout=site).fit(tables()).report.content
        areas[site] = report["sites"][site]["auroc"]["value"]
    assert len({*areas.values()}) == 3
    assert all(0.5 < area < 1 for area in areas.values())


def test_the_site_says_nothing_of_its_rows_before_the_questions():
    """A held-out site sends no statistics of its rows, and its samples for training do not depend on them.

    Only the number of its rows is known.
    """
    frames = tables()
    given = study("logistic", holdout="south")
    own = SiteTable(given, "south", frames["south"])
    statistics = own.statistics()
    assert statistics["rows"] == 0
    for one in [*statistics["features"].values(), *statistics["target"].values()]:
        assert one in ({"count": 0, "mean": 0.0, "squares": 0.0}, {"categories": {}, "rarer": False})
    assert {*own.described().values()} == {"nothing"}
    agreement = given.fit(frames).agreement
    samples = own.samples(agreement)
    assert len(samples["row"]) == len(frames["south"])
    other = SiteTable(given, "south", frames["south"].sample(frac=1, random_state=0).assign(age=30.0))
    for name, one in other.samples(agreement).items():
        np.testing.assert_array_equal(one, samples[name])


def test_a_word_that_no_other_site_has_is_named():
    frames = tables()
    frames["south"] = frames["south"].assign(code=7.0)
    with refuses("category of column 'code'", "7", where="table of south"):
        study("logistic", holdout="south").fit(frames)

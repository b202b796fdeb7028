"""Cox's model of the tables of real centres has the coefficients that lifelines has for the pooled rows.

The constants have what lifelines 0.30.3 printed for the rows of `lung` and `cgd`, with `CoxPHFitter().fit(…,
strata=["site"], fit_options={"precision": 1e-12})`, and for the errors by patient with `cluster_col="id"`. The file
tables/README.md says where the rows are from. Events of a centre at the same time are rare. The rows of `lung` have
none; in those of `cgd` the order of rows breaks the three ties, so that the methods of Breslow and Efron are the same.
"""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedbilevel.estimators import CoxRegression

TABLES = Path(__file__).parent / "tables"


def lung():
    """Return features, (time, event), institution, and no patients, since each row is a different patient."""
    rows = pd.read_csv(TABLES / "lung.csv").dropna(subset=["inst", "ph.ecog"])
    return rows[["age", "sex", "ph.ecog"]], np.column_stack([rows.time, rows.status - 1]), rows.inst, None


def cgd():
    """Return features, (rank of the time between infections, event), centre, and patient."""
    rows = pd.read_csv(TABLES / "cgd.csv")
    order = np.lexsort((np.arange(len(rows)), -rows.status, rows.tstop - rows.tstart))
    rows["treated"], rows["autosomal"] = 1.0 * (rows.treat != "placebo"), 1.0 * (rows.inherit == "autosomal")
    target = np.column_stack([np.argsort(order) + 1, rows.status])
    return rows[["treated", "age", "steroids", "autosomal"]], target, rows.center, rows.id


LIFELINES = {  # coefficients, and standard errors
    lung: (
        [0.00956134169652116, -0.5473566768481519, 0.5972532446801831],
        [0.010291850905658942, 0.18184471920680004, 0.13782283300471956],
    ),
    cgd: (
        [-1.1601052281577229, -0.022242850084891384, 1.0133916199721125, 0.18168122386572305],
        [0.2778821508171349, 0.015496325235554612, 0.6055155565878308, 0.2745139765686871],
    ),
}
BY_PATIENT = [0.300474988564062, 0.01542260232121736, 0.7261630742046372, 0.29583844880030213]  # of cgd


@pytest.mark.slow
@pytest.mark.parametrize("table", LIFELINES)
def test_a_model_of_real_centres_has_the_coefficients_of_lifelines(table):
    X, target, site, _ = table()
    made = CoxRegression(penalties=0.0).fit(X, target, groups=site)
    assert len(made.sites_) == {lung: 18, cgd: 13}[table]
    np.testing.assert_allclose((made.coef_, made.standard_errors_), LIFELINES[table], rtol=0, atol=1e-8)


def test_errors_by_patient_are_those_of_lifelines():
    """The errors of `cgd` by patient are those of lifelines, which has no factor m/(m − 1) for its m = 128 patients."""
    X, target, site, patient = cgd()
    made = CoxRegression(penalties=0.0).fit(X, target, groups=site, patients=patient)
    np.testing.assert_allclose(made.standard_errors_, np.sqrt(128 / 127) * np.array(BY_PATIENT), rtol=0, atol=1e-8)

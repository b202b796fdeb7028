"""A person who follows the scoring sheet line by line comes to the predictions of the model."""

import re

import numpy as np
import pandas as pd
import pytest

from fedbilevel.data.columns import deviation
from fedbilevel.estimators import StudyModel
from representatives import slow_but
from site_tables import TARGETS, study, tables

GAP = "missing"


def model_of(kind, folder, **more):
    more |= {"times": [5, 20, 60]} if kind == "cox" else {}
    study(kind, **more).fit(tables()).save(folder / "model.json")
    return StudyModel.load(folder / "model.json")


def blocks(sheet):
    """Return the parts of the sheet between blank lines, each as a list of lines, and each line as a list of cells."""
    cut = [block.split("\n") for block in sheet.strip().split("\n\n")]
    return [[[cell for cell in line.split("  ") if cell.strip()] for line in block] for block in cut]


def points(sheet):
    """Read from the sheet the start, the coefficient and the term for a gap of each number, and the terms of words."""
    start, numbers, words = None, {}, {}
    for block in blocks(sheet.partition("Example")[0]):
        first = [cell.strip() for cell in block[0]]
        if first[0] == "start":
            start = float(first[1])
        elif first[0] == "number":
            numbers = {line[0].strip(): (float(line[1]), float(line[2])) for line in block[1:]}
        elif first[1:] == ["add"]:
            words[first[0]] = {line[0].strip().partition(",")[0]: float(line[1]) for line in block[1:]}
    return start, numbers, words


def precision(sheet):
    """Read from the sheet to how many decimals a term is rounded, and by how much S may then be wrong."""
    decimals, bound = re.search(
        r"Round each term to (\d+) decimals. S then differs .* by ([\d.]+) at most", sheet
    ).groups()
    return int(decimals), float(bound)


def by_hand(sheet, row, site):
    start, numbers, words = points(sheet)
    total, (decimals, _) = start, precision(sheet)
    for name, (each, missing) in numbers.items():
        total += missing if np.isnan(row[name]) else round(each * row[name], decimals)
    for name, known in words.items():
        word = site if name == "site" else row[name]
        word = GAP if pd.isna(word) else f"{word:g}" if isinstance(word, float) else word
        total += known[word] if word in known else known[GAP]
    return total


@pytest.mark.parametrize("kind", slow_but("ridge", of=TARGETS))
def test_a_person_who_follows_the_sheet_predicts_as_the_model_does(kind, tmp_path):
    """A person who follows the sheet predicts as the model does, up to the difference that the sheet announces.

    The rows are all those of a site, with gaps and with a rare word. If the model has offsets, they are also predicted
    as rows of a site that was not in the study.
    """
    model = model_of(kind, tmp_path)
    sheet, rows = model.sheet(), tables()["south"][["age", "dose", "kind", "code"]]
    assert rows.age.isna().any()
    assert (rows.kind == "z").any()
    unit = tables()["south"].days.std() if kind == "ridge" else 1.0
    for site in ("south",) if kind == "cox" else ("south", "a site that was not in the study"):
        sums = np.array([by_hand(sheet, row, site) for _, row in rows.iterrows()])
        known = model.predict(rows, site if site == "south" else "")
        if kind == "logistic":
            share = model.predict_proba(rows, site if site == "south" else "")
            np.testing.assert_allclose(1 / (1 + np.exp(-sums)), share, rtol=0, atol=1e-5)
            assert [*known] == ["yes" if total > 0 else "no" for total in sums]
            known = np.log(share / (1 - share))
        assert np.ptp(sums) > 0.1 * unit
        wrong = np.abs(sums - known)
        assert 0 < wrong.max() <= precision(sheet)[1] <= 1e-4 * unit


def test_the_sheet_is_as_precise_as_it_says_far_from_the_means(tmp_path):
    """The sheet is as precise as it says also for numbers ten standard deviations away from their means.

    There the rounding of a coefficient counts most.
    """
    model = model_of("logistic", tmp_path)
    sheet, told = model.sheet(), model.agreement.features
    wrong = []
    for sign in (-1, 1):
        row = {"kind": "a", "code": 1.0}
        row |= {name: told[name]["mean"] + sign * 10 * deviation(told[name]) for name in ("age", "dose")}
        share = model.predict_proba(pd.DataFrame({name: [value] for name, value in row.items()}), "west")[0]
        wrong.append(abs(by_hand(sheet, row, "west") - np.log(share / (1 - share))))
    assert max(wrong) <= precision(sheet)[1]


@pytest.mark.slow
def test_a_sheet_without_numbers_asks_for_no_rounding():
    sheet = study("logistic", columns=("kind", "code")).fit(tables()).sheet()
    assert "S differs from the model's S by 0.000020 at most.\n" in sheet
    assert "Round" not in sheet


@pytest.mark.parametrize("kind", slow_but("ridge", of=TARGETS))
def test_the_example_has_the_prediction_of_the_model_to_the_printed_digits(kind, tmp_path):
    model = model_of(kind, tmp_path)
    *terms, total = model.sheet().partition("made up:\n\n")[2].split("\n\n")[0].split("\n")
    row, site = {"age": np.nan, "dose": np.nan, "kind": None, "code": None}, "north"
    for name, value, *_ in map(str.split, terms[1:]):
        if name == "site":
            site = value
        elif value != "is":
            row[name] = float(value) if name in ("age", "dose") else value
    assert np.isnan(row["dose"])
    assert None not in row.values()
    np.testing.assert_allclose(sum(float(term.split()[-1]) for term in terms), float(total.split()[-1]), atol=1e-9)
    frame = pd.DataFrame({name: [value] for name, value in row.items()})
    results = model.sheet().strip().split("\n\n")[-1].split("\n")
    if kind == "logistic":
        assert results == [f"probability of yes = {model.predict_proba(frame, site)[0]:.3f}"]
    elif kind == "ridge":
        assert results == [f"days = {model.predict(frame, site)[0]:.2f}"]
    else:
        survival = model.predict_survival(frame, [60], site)[0, 0]
        assert results == [
            f"relative hazard = {np.exp(model.predict(frame, site)[0]):.3f}",
            f"probability to be without the event up to 60 at north = {survival:.3f}",
        ]


def test_survival_follows_from_the_hazards_of_the_sheet(tmp_path):
    model = model_of("cox", tmp_path)
    sheet, rows = model.sheet(), tables()["west"][["age", "dose", "kind", "code"]]
    block = next(block for block in blocks(sheet) if block[0][0].strip() == "west: time")
    hazards = {float(line[0]): float(line[1]) for line in block[1:]}
    assert len(hazards) > 1
    for time, hazard in hazards.items():
        shares = [np.exp(-hazard * np.exp(by_hand(sheet, row, "west"))) for _, row in rows.iterrows()]
        np.testing.assert_allclose(shares, model.predict_survival(rows, [time], "west")[:, 0], atol=1e-4)


@pytest.mark.slow
def test_a_column_of_which_no_site_told_is_not_on_the_sheet(tmp_path):
    frames = {site: frame.assign(scan=np.nan) for site, frame in tables().items()}
    sheet = study("logistic", positive="no").fit(frames).sheet()
    assert "Not used, because no site sent statistics of them: scan\n" in sheet
    assert "the probability that ill is no\n" in sheet
    assert "more probable class is no if S is above 0, and otherwise yes" in sheet
    assert "scan" not in points(sheet)[1]


def test_names_of_columns_end_no_line():
    """A line break in the name of a column does not begin a new line of the sheet."""
    frames = {site: frame.rename(columns={"age": "age\nstart"}) for site, frame in tables().items()}
    sheet = study("ridge").fit(frames).sheet()
    assert sum(line.startswith("start") for line in sheet.split("\n")) == 2
    assert any(line.startswith("age start ") for line in sheet.split("\n"))

"""Are the hospitals' files read as FLamby prepares them, and files with other content refused?"""

import os
from pathlib import Path

import numpy as np
import pytest

import hospital_files
from fedbilevel import data
from fedbilevel.data import loaders
from refusals import raises_with


@pytest.fixture
def folder(monkeypatch, tmp_path):
    hospital_files.write(tmp_path, monkeypatch)
    return tmp_path / "heart"


def file_of(folder, hospital):
    return folder / f"processed.{hospital}.data"


@pytest.mark.parametrize("hospital", loaders.HOSPITALS)
def test_columns_are_kept_or_made_into_indicators(folder, hospital):
    """Columns are kept, or made into indicators, and a patient is left out if a column that is kept has `?` or NaN.

    The expected rows are made from the lines of the file.
    """
    found = data.load_heart(hospital)
    complete, diseased = hospital_files.SIZES[hospital]
    assert found.rows.shape == (complete, 13)
    assert found.labels.sum() == diseased
    for row, label, line in zip(found.rows, found.labels, hospital_files.lines(hospital)[:complete], strict=True):
        age, sex, pain, pressure, chol, fbs, ecg, rate, angina, peak, _, _, _, num = line.split(",")
        plain = [float(one) for one in (age, sex, pressure, chol, fbs, rate, angina, peak)]
        indicators = [pain == "2", pain == "3", pain == "4", ecg == "1", ecg == "2"]
        np.testing.assert_array_equal(row, np.array([*plain, *indicators], np.float32))
        assert label == (num != "0")


@pytest.mark.parametrize(
    ("change", "line", "got", "allowed"),
    [
        (lambda text: text[: text.index("\n") + 1], "", "1 lines", "18"),
        (lambda text: text.replace(",?,", ",", 1), ", line 1", "other content", "14 numbers"),
        (lambda text: text.replace(",?,", ",inf,", 1), ", line 1", "other content", "14 numbers"),
        (lambda text: "?" + text[text.index(",") :], "", "15 patients without a missing value", "16 and 15"),
        (lambda text: text.replace(",0\n", ",1\n"), "", "16 patients without a missing value, 16 of", "16 and 15"),
    ],
)
def test_other_content_is_refused(folder, change, line, got, allowed):
    """A file with other content is refused, by an error whose fields `got` and `allowed` begin with these texts."""
    file = file_of(folder, "switzerland")
    file.write_text(change(file.read_text()))
    with raises_with(data.DataError, path=f"{file}{line}") as error:
        data.load_heart("switzerland")
    assert error.value.got.startswith(got)
    assert error.value.allowed.startswith(allowed)


def test_unknown_names_are_refused_and_no_other_file_is_touched(folder):
    hospitals = ["cleveland", "hungarian", "switzerland", "va"]
    with raises_with(data.DataError, path="hospital", got="zurich", allowed=hospitals, near=""):
        data.load_heart("zurich")
    for hospital in ("cleveland", "hungarian", "switzerland"):
        file_of(folder, hospital).write_text("not this one's")
    assert len(data.load_heart("va").labels) == 24


def test_both_classes_are_divided_in_proportion():
    """Both classes are divided in the same proportion, here 33 of 50 and 99 of 150, by a draw that the seed decides."""
    labels = (np.arange(200) % 4 == 0).astype(np.int32)
    chosen, rest = loaders.stratified(labels, 0.66, 5)
    assert sorted([*chosen, *rest]) == list(range(200))
    assert (labels[chosen].sum(), labels[rest].sum()) == (33, 17)
    again, other = loaders.stratified(labels, 0.66, 5)[0], loaders.stratified(labels, 0.66, 6)[0]
    np.testing.assert_array_equal(chosen, again)
    assert set(chosen) != set(other)
    assert sorted(map(len, loaders.stratified(labels[:10], 0.7, 0))) == [3, 7]  # no patient is lost to rounding
    assert list(map(len, loaders.stratified(labels, 0.001, 0))) == [1, 199]
    one_healthy = (np.arange(46) > 0).astype(np.int32)  # the only healthy one cannot be in both parts
    assert list(map(len, loaders.stratified(one_healthy, 0.66, 43))) == [30, 16]


@pytest.mark.skipif("FEDBILEVEL_DATA" not in os.environ, reason="FEDBILEVEL_DATA is not set")
def test_the_real_files_have_the_counts_that_flamby_publishes():
    if not (Path(os.environ["FEDBILEVEL_DATA"]) / "heart").is_dir():
        pytest.skip("no folder heart")
    found = {}
    for hospital in loaders.HOSPITALS:
        patients = data.load_heart(hospital)
        parts = loaders.stratified(patients.labels, loaders.TRAINING, loaders.FLAMBY)
        found[hospital] = (len(patients.labels), *map(len, parts))
    assert found == {
        "cleveland": (303, 199, 104),
        "hungarian": (261, 172, 89),
        "switzerland": (46, 30, 16),
        "va": (130, 85, 45),
    }

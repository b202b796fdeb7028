"""`fedbilevel predict` writes the predictions of a model for the table of a site; its errors name what is wrong."""

import io
import re
import sys
import warnings

import numpy as np
import pandas as pd
import pytest

from fedbilevel.cli import main
from fedbilevel.data import DataError
from fedbilevel.data.table_files import read_table
from fedbilevel.estimators import StudyModel
from fedbilevel.estimators.model_in_use import warn_of_far_numbers
from refusals import raises_with
from representatives import slow_but
from site_tables import TARGETS, fitted, tables


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a folder with a model of ridge regression, and the table of the site south without its target columns."""
    folder = tmp_path_factory.mktemp("models")
    fitted("ridge").save(folder / "ridge.json")
    tables()["south"].drop(columns=["ill", "days", "died"]).to_csv(folder / "south.csv", index=False)
    return folder


@pytest.mark.parametrize("kind", slow_but("logistic", "ridge", of=TARGETS))
def test_predictions_are_those_of_the_model(kind, saved, tmp_path, capsys):
    """The command prints and writes the predictions of the model that a file holds.

    They are computed here from the prepared columns and the coefficients; `test_study` computes one row by hand.
    """
    fitted(kind).save(saved / f"{kind}.json")
    model, frame, out = StudyModel.load(saved / f"{kind}.json"), tables()["south"], tmp_path / "out.csv"
    given = ["predict", str(saved / f"{kind}.json"), str(saved / "south.csv"), "--site", "south"]
    assert main([*given, "--out", str(out)]) == 0
    assert main(given) == 0
    shown = capsys.readouterr()
    assert shown.out == out.read_text()
    assert ("ill = yes" in shown.err) == (kind == "logistic")
    made, score = pd.read_csv(out), model.prepared(frame, "south").to_numpy() @ model.estimator.coef_
    score += getattr(model.estimator, "intercept_", 0.0)
    assert list(made.row) == list(range(1, len(frame) + 1))
    if kind == "logistic":
        np.testing.assert_allclose(made.probability, 1 / (1 + np.exp(-score)), rtol=1e-12)
        assert list(made["class"]) == list(np.where(score > 0, "yes", "no"))
    else:
        np.testing.assert_allclose(made["number" if kind == "ridge" else "log_hazard"], score, rtol=1e-12)


def test_without_a_site_the_offset_is_zero_and_a_line_says_so(saved, capsys):
    given = ["predict", str(saved / "ridge.json"), str(saved / "south.csv")]
    assert main(given) == 0
    new = capsys.readouterr()
    assert main([*given, "--site", "south"]) == 0
    south = capsys.readouterr()
    assert "without --site, the rows count as rows of a site that was not in the study (north, south, west)" in new.err
    assert "--site" not in south.err
    model = StudyModel.load(saved / "ridge.json")
    offset = dict(zip(model.agreement.names, model.estimator.coef_, strict=True))["site_south"]
    made = [pd.read_csv(io.StringIO(one.out)).number for one in (south, new)]
    np.testing.assert_allclose(made[0] - made[1], offset, rtol=1e-9)


def test_a_table_with_tabs_is_read_and_its_gaps_are_those_of_the_study(saved, tmp_path, capsys):
    frame = tables()["south"]
    gaps = frame.assign(age=frame.age.astype(object).where(frame.age.notna(), "?"))
    gaps.to_csv(tmp_path / "south.tsv", sep="\t", index=False)
    shown = []
    for table in (saved / "south.csv", tmp_path / "south.tsv"):
        assert main(["predict", str(saved / "ridge.json"), str(table), "--site", "south"]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]


WRONG = {
    "no such file": ("south.csv", "", r"nowhere.csv cannot be read: .*No such file"),
    "another ending": (
        "patients.txt",
        "age\n1\n",
        r"patients.txt is not a table: it must be a .csv, .tsv or .parquet file",
    ),
    "nothing": ("empty.csv", "", r"empty.csv has no lines; expected a first line that names the columns"),
    "a longer row": (
        "longer.csv",
        "age,dose,kind,code\n50,1,a,1,\n",
        r"longer.csv, line 2 has 5 entries; expected 4",
    ),
    "a name twice": ("twice.csv", "age,age,kind,code\n50,1,a,1\n", r"twice.csv has the column 'age' twice"),
    "no rows": ("rows.csv", "age,dose,kind,code\n", r"rows.csv has no rows"),
    "another name": (
        "names.csv",
        "age,doses,kind,code\n50,1,a,1\n",
        r"no column 'dose' of the study; it has age, code, doses, kind; did you mean 'doses'",
    ),
    "a new category": ("words.csv", "age,dose,kind,code\n50,1,a,3\n", r"category '3' of column 'code'"),
    "a word": ("word.csv", "age,dose,kind,code\nold,1,a,1\n", r"column 'age' .*'old'.* 1 row;"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_table_is_an_error_that_says_what_is_wrong(case, saved, tmp_path, capsys):
    name, text, said = WRONG[case]
    table = tmp_path / ("nowhere.csv" if case == "no such file" else name)
    if case != "no such file":
        table.write_text(text)
    out = tmp_path / "out.csv"
    assert main(["predict", str(saved / "ridge.json"), str(table), "--site", "south", "--out", str(out)]) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1, shown.err
    assert re.search(said, shown.err), shown.err
    assert not out.exists()


def test_a_warning_about_the_table_appears_once(tmp_path, capsys):
    fitted("logistic").save(tmp_path / "model.json")
    table = tables()["south"].head(2)
    kind = table["kind"].dropna().iloc[0]
    table.assign(kind=[kind, f"{kind} "]).to_csv(tmp_path / "table.csv", index=False)
    assert main(["predict", str(tmp_path / "model.json"), str(tmp_path / "table.csv"), "--site", "south"]) == 0
    assert capsys.readouterr().err.count("differ only by blanks") == 1


def test_numbers_that_are_far_from_those_of_the_study_are_warned_of(saved, tmp_path, capsys):
    """A code for a gap, or another unit, changes a prediction, but is a number like any other."""
    frame = tables()["south"].head(3)
    frame.assign(age=[700.0, -999.0, 50.0]).to_csv(tmp_path / "far.csv", index=False)
    frame.assign(age=[70.0, np.nan, 50.0]).to_csv(tmp_path / "near.csv", index=False)
    for file, said in (("near.csv", []), ("far.csv", [("age", "-999, 700", "2 rows")])):
        assert main(["predict", str(saved / "ridge.json"), str(tmp_path / file), "--site", "south"]) == 0
        warned = re.findall(r"warning: column '(\w+)' has numbers .* \((.*)\) in (2 rows)", capsys.readouterr().err)
        assert warned == said


@pytest.mark.parametrize(("number", "rows"), [(1.0, []), (0.5, []), (2.0, ["2"]), (-9.0, ["-9"])])
def test_a_rare_one_is_not_far_from_a_column_of_zeros(number, rows):
    """Three of 1,000 patients have 1, which is 18 standard deviations from the mean, but neither a code nor a unit."""
    statistics = {"dialysis": {"count": 1000, "mean": 0.003, "squares": 1000 * 0.003 * 0.997}}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warn_of_far_numbers(statistics, pd.DataFrame({"dialysis": [0.0, number]}))
    assert [re.search(r"\((.*?)\)", str(one.message))[1] for one in seen] == rows


def test_an_unknown_site_and_a_model_that_is_none_are_refused(saved, tmp_path, capsys):
    table = str(saved / "south.csv")
    assert main(["predict", str(saved / "ridge.json"), table, "--site", "sout"]) == 2
    assert "site 'sout'; did you mean 'south'" in capsys.readouterr().err
    for text in ("{", "{}", '{"study": 1}'):
        (tmp_path / "model.json").write_text(text)
        assert main(["predict", str(tmp_path / "model.json"), table]) == 2
        shown = capsys.readouterr().err
        assert "model.json is not the file of a model" in shown
        assert ("it has no entry 'study'" in shown) == (text == "{}")
    assert main(["predict", str(tmp_path / "none.json"), table]) == 2
    assert "none.json' cannot be read" in capsys.readouterr().err


def test_neither_model_nor_table_is_overwritten(saved, tmp_path, capsys):
    before = (saved / "south.csv").read_bytes()
    assert (
        main(["predict", str(saved / "ridge.json"), str(saved / "south.csv"), "--out", str(saved / "south.csv")]) == 2
    )
    assert "--out = " in capsys.readouterr().err
    assert (saved / "south.csv").read_bytes() == before


def test_parquet_is_read_by_pandas(saved, tmp_path, capsys, monkeypatch):
    """A Parquet file is read by pandas, and gives the same predictions as a CSV file.

    pandas before 3.1 reads the decimal digits of a CSV file with an error of some units in the last place. Predictions
    are sums of few such numbers of size below 100, so that 1e-12 is a wide margin.

    pandas needs pyarrow for it, so that this test replaces the reader; another test reads a real file. If pyarrow or
    pandas is missing, the error names it.
    """
    frame = tables()["south"]
    given = ["predict", str(saved / "ridge.json"), str(tmp_path / "south.parquet"), "--site", "south"]
    monkeypatch.setattr(pd, "read_parquet", lambda file: frame)
    assert main(given) == 0
    of_parquet = capsys.readouterr().out
    assert main([*given[:2], str(saved / "south.csv"), *given[3:]]) == 0
    of_csv = capsys.readouterr().out
    one, other = (pd.read_csv(io.StringIO(text)) for text in (of_parquet, of_csv))
    assert list(one) == list(other)
    np.testing.assert_allclose(one.number, other.number, rtol=1e-12, atol=1e-12)

    def missing(file):
        raise ImportError("Unable to find a usable engine")

    monkeypatch.setattr(pd, "read_parquet", missing)
    assert main(given) == 2
    monkeypatch.setitem(sys.modules, "pandas", None)
    with raises_with(DataError, "[tables]", path=str(saved / "south.csv")):
        read_table(saved / "south.csv")
    assert "south.parquet needs pyarrow, which is not installed: pip install pyarrow" in capsys.readouterr().err


def test_a_parquet_file_gives_the_predictions_of_a_csv_file(saved, tmp_path, capsys):
    """A file that pyarrow wrote, with its own gaps and texts, gives the same predictions as a CSV file.

    They agree to 1e-12, as in the test before.
    """
    pytest.importorskip("pyarrow")
    frame = tables()["south"]
    assert frame.age.isna().any()
    frame.to_parquet(tmp_path / "south.parquet")
    shown = []
    for table in (saved / "south.csv", tmp_path / "south.parquet"):
        assert main(["predict", str(saved / "ridge.json"), str(table), "--site", "south"]) == 0
        shown.append(pd.read_csv(io.StringIO(capsys.readouterr().out)))
    pd.testing.assert_frame_equal(*shown, rtol=1e-12, atol=1e-12)

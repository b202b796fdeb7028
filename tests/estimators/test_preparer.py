"""Sites that exchange sums and counts prepare their tables as if all rows were in one place; errors name a column."""

import errno
import json
import os
import re
import warnings
from itertools import permutations

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

from fedbilevel.data import DataError
from fedbilevel.data.table_files import read_table
from fedbilevel.errors import ConfigurationError, DataWarning
from fedbilevel.estimators import Preparer
from refusals import ANY, raises_with, refuses


def site(**columns):
    return pd.DataFrame({"age": [50.0, 60.0], "sex": ["f", "m"], "pain": [1, 4], **columns})


SITES = [
    site(age=[np.nan, np.nan]),
    site(age=[np.nan, 80.1], sex=["m", "x"]),
    site(age=[50.0, 59.3], sex=["m", None], pain=[2.0, np.nan]),  # pandas stores integers with a gap as floats
]


@pytest.fixture
def files(tmp_path):
    """Return a file of statistics for each site. With `min_count` 1, the files leave nothing out."""
    for number, rows in enumerate(SITES):
        Preparer(categorical=["pain"]).fit(rows).save(tmp_path / f"{number}.json", min_count=1)
    return [tmp_path / f"{number}.json" for number in range(3)]


def test_sites_that_tell_sums_agree_on_what_all_rows_in_one_place_do(files):
    """Files of statistics give the features that all rows in one place give, to rounding.

    They give the same features, to the bit, in any order of the files.
    """
    everyone = pd.concat(SITES)
    expected = Preparer(categorical=["pain"]).fit_transform(everyone)
    made = [Preparer.load(*order) for order in permutations(files)]
    for preparer in made:
        pd.testing.assert_frame_equal(preparer.transform(everyone), expected, rtol=1e-14)
        assert preparer.columns_ == made[0].columns_
    assert made[0].columns_["sex"] == {"categories": {"f": 1, "m": 3, "x": 1}, "rarer": False}
    assert made[0].columns_["pain"] == {"categories": {"1": 2, "2": 1, "4": 2}, "rarer": False}


def test_a_file_is_read_to_the_bit_and_added_to(files, tmp_path):
    """A file gives back its statistics to the bit, and a file that is the sum of two others can be added to a third."""
    rows = np.random.default_rng(0).lognormal(3, 2, (40, 9))
    preparer = Preparer().fit(pd.DataFrame(rows, columns=list("abcdefghi")))
    preparer.save(tmp_path / "told.json")
    assert Preparer.load(tmp_path / "told.json").columns_ == preparer.columns_
    Preparer.load(*files[:2]).save(tmp_path / "two.json", min_count=1)
    three, whole = (Preparer.load(*some).columns_ for some in ([tmp_path / "two.json", files[2]], files))
    assert three["sex"] == whole["sex"]
    np.testing.assert_allclose([*three["age"].values()], [*whole["age"].values()], rtol=1e-14)


def test_a_file_has_a_line_for_each_column_and_no_rows(files):
    """A file has one line for each column, and no rows.

    The numbers 50.0 and 59.3 have the mean 54.65, and the sum of squared deviations 2 (9.3/2)² = 43.245.
    """
    lines = files[2].read_text("utf-8").splitlines()
    assert (lines[0], lines[-1]) == ("{", "}")
    assert lines[2:4] == [
        '"sex": {"categories": {"m": 1}, "rarer": false},',
        '"pain": {"categories": {"2": 1}, "rarer": false}',
    ]
    age = json.loads("{" + lines[1].removesuffix(",") + "}")["age"]
    assert age == {"count": 2, "mean": 54.65, "squares": pytest.approx(43.245, rel=1e-14)}


def test_what_few_rows_tell_is_left_out(tmp_path):
    """A file leaves out statistics of fewer than `min_count` rows, and these rows then count as gaps.

    By default `min_count` is 8, so that a column with seven numbers is left out, and a category with seven rows. After
    that the site's own rows with these numbers and this category count as gaps. If no category was left out, an
    unknown one is an error, because it may be misspelt.
    """
    rows = pd.DataFrame({"age": [50.0] * 7 + [np.nan] * 8, "sex": ["f"] * 7 + ["m"] * 8, "name": [*"abcdefghijklmno"]})
    rows["same"] = 0.1
    Preparer().fit(rows).save(tmp_path / "told.json")
    preparer = Preparer.load(tmp_path / "told.json")
    assert preparer.columns_ == {
        "age": {"count": 0, "mean": 0, "squares": 0},
        "sex": {"categories": {"m": 8}, "rarer": True},
        "name": {"categories": {}, "rarer": True},
        "same": {"count": 15, "mean": 0.1, "squares": 0},
    }
    made = preparer.transform(rows)
    assert preparer.get_feature_names_out().tolist() == list(made) == ["age", "sex_m", "same"]
    assert made["age"].tolist() == [0] * 15
    assert made["sex_m"].tolist() == [0] * 7 + [1] * 8
    Preparer().fit(rows).save(tmp_path / "all.json", min_count=7)
    whole = Preparer.load(tmp_path / "all.json")
    assert whole.columns_["sex"] == {"categories": {"f": 7, "m": 8}, "rarer": False}
    with refuses("category of column 'sex'", "fem"):
        whole.transform(rows.replace({"sex": {"f": "fem"}}))
    both = Preparer.load(tmp_path / "all.json", tmp_path / "told.json")
    assert both.columns_["sex"] == {"categories": {"f": 7, "m": 16}, "rarer": True}
    both.save(tmp_path / "sum.json", min_count=7)
    assert Preparer.load(tmp_path / "sum.json").columns_ == both.columns_
    with refuses("min_count", 0):
        both.save(tmp_path / "sum.json", min_count=0)


def test_a_category_that_is_treated_as_a_gap_is_warned_of(tmp_path):
    """A misspelt category changes a prediction. If a site has hidden rare categories, it is no error, but a warning."""
    Preparer().fit(pd.DataFrame({"sex": ["f"] * 7 + ["m"] * 8})).save(tmp_path / "a.json")
    preparer, rows = Preparer.load(tmp_path / "a.json"), pd.DataFrame({"sex": ["m", "man", "man", None]})
    with pytest.warns(DataWarning, match=r"column 'sex' .*'man'.* 2 rows: .* gaps.* known are: m$"):
        made = preparer.transform(rows)
    assert made["sex_m"].tolist() == [1, 0, 0, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        preparer.transform(rows[::3])


def test_texts_in_a_column_of_numbers_are_shown():
    preparer = Preparer().fit(pd.DataFrame({"age": [50.0, 60.0]}))
    with refuses("column 'age'", ["26,5", "old"], "decimal point") as told:
        preparer.transform(pd.DataFrame({"age": ["50", "26,5", None, "old", "old"]}))
    assert "3 rows" in str(told.value)


def test_numbers_are_standardised_and_gaps_filled():
    """Numbers are standardised, gaps are filled with means, and categories become indicators.

    The numbers 50, 59 and 80 have the mean 63 and the deviation √((13² + 4² + 17²)/3) = √158.
    """
    rows = site(age=[50.0, 59.0], sex=["m", None], pain=[2, 4])
    preparer = Preparer(categorical=["pain"]).fit(pd.concat([SITES[0], site(age=[np.nan, 80.0], sex=["m", "x"]), rows]))
    made = preparer.transform(rows.set_axis(["p", "q"]))
    expected = {
        "age": [-13 / 158**0.5, -4 / 158**0.5],
        "sex_f": [0.0, 0.0],
        "sex_m": [1.0, 0.0],
        "sex_x": [0.0, 0.0],
        "pain_1": [0.0, 0.0],
        "pain_2": [1.0, 0.0],
        "pain_4": [0.0, 1.0],
    }
    pd.testing.assert_frame_equal(made, pd.DataFrame(expected, index=["p", "q"]))
    assert preparer.get_feature_names_out().tolist() == list(expected)
    assert preparer.transform(SITES[0])["age"].tolist() == [0.0, 0.0]


def test_pandas_own_types_and_constant_columns():
    frame = pd.DataFrame(
        {
            "count": pd.array([1, None, 3], dtype="Int64"),
            "kind": pd.Categorical(["u", "v", "u"]),
            "code": pd.Categorical([-2.0, None, 1.5]),
            "yes": [True, False, True],
            "same": 0.1,
        }
    )
    preparer = Preparer().fit(frame)
    made = preparer.transform(frame)
    assert list(made) == ["count", "kind_u", "kind_v", "code_-2", "code_1.5", "yes", "same"]
    np.testing.assert_allclose(made["count"], [-1, 0, 1])
    np.testing.assert_allclose(made["yes"], np.array([1, -2, 1]) / 2**0.5)
    assert made["code_-2"].tolist() == [1, 0, 0]
    assert made["same"].tolist() == [0, 0, 0]
    np.testing.assert_allclose(preparer.transform(frame.assign(same=1.1))["same"], 1)


@pytest.mark.parametrize(
    ("frame", "path", "got", "fact", "near"),
    [
        (site().drop(columns="sex"), "column 'sex' of X", "missing", "['age', 'pain']", ""),
        (site(aeg=[1, 2]), "column of X", "aeg", "age", "age"),
        (site(age=["50", "old"]), "column 'age'", ["old"], "number", ""),
        (site(age=["50", "51"]), "type of column 'age'", ANY, "numbers", ""),  # ANY: it depends on pandas' version
        (site(age=[np.inf, 1]), "column 'age', row 0", np.inf, "from -1e+100 to 1e+100", ""),
        (site(sex=["w", "m"]), "category of column 'sex'", "w", "['f', 'm']", ""),
        (np.zeros((2, 3)), "X", "ndarray", "pandas.DataFrame", ""),
    ],
)
def test_rows_that_do_not_fit_are_named(frame, path, got, fact, near):
    with refuses(path, got, fact, near):
        Preparer().fit(site()).transform(frame)


@pytest.mark.parametrize(
    ("frame", "path", "got", "fact"),
    [
        (site().drop(columns="pain"), "categorical column", "pain", "['age', 'sex']"),
        (site(pain_1=[1, 2]), "column 'pain_1'", "made twice", "once"),
        (site(age=[np.nan, 1e155]), "column 'age', row 1", 1e155, "from -1e+100 to 1e+100"),
        (site(age=[1e-200, 2e-200]), "standard deviation of column 'age'", "below 1e-100", "1e-100 or more"),
        (site().set_axis([1, 2, "pain"], axis=1), "X", "DataFrame", "texts as names of columns"),
        (site().set_axis(["age", "age", "pain"], axis=1), "X", "DataFrame", "each once"),
    ],
)
def test_rows_that_can_tell_nothing_are_named(frame, path, got, fact):
    """A table of which no statistics can be made is refused, and the error names what is wrong with it."""
    with refuses(path, got, fact):
        Preparer(categorical=["pain"]).fit(frame)


@pytest.mark.parametrize(
    ("frame", "path", "got", "fact", "near"),
    [
        (site().drop(columns="sex"), "column 'sex' of {}", "missing", "['age', 'pain']", ""),
        (site(aeg=[1, 2]), "column of {}", "aeg", "age", "age"),
        (site(sex=[np.nan, np.nan]), "column 'sex' of {}", "numbers", "0.json", ""),
    ],
)
def test_a_site_with_other_columns_is_named(frame, path, got, fact, near, files, tmp_path):
    Preparer(categorical=["pain"]).fit(frame).save(tmp_path / "site.json")
    with refuses(path.format(tmp_path / "site.json"), got, fact, near):
        Preparer.load(*files, tmp_path / "site.json")


NUMBER = {"count": 9, "mean": 0.5, "squares": 2.0}


@pytest.mark.parametrize(
    "told",
    [
        "",
        "{",
        "[]",
        "[" * 100_000,
        '{"age": {"count": 8, "mean": 0.5, "squares": 1.0}, "age": {"count": 9, "mean": 0.5, "squares": 1.0}}',
        '{"age": {"count": 8, "count": 9, "mean": 0.5, "squares": 1.0}}',
        *(
            json.dumps({"age": one})
            for one in (
                7,
                {},
                {"categories": {"f": 8}},
                {"categories": ["f"], "rarer": False},
                {"categories": {"f": 0}, "rarer": False},
                {"categories": {"f": "8"}, "rarer": False},
                {"categories": {"f": 8}, "rarer": 1},
                {"count": 9, "mean": 0.5},
                {**NUMBER, "count": -1},
                {**NUMBER, "count": 9.5},
                {**NUMBER, "count": 10**400},
                {**NUMBER, "count": 10**90},
                {**NUMBER, "count": True},
                {"categories": {"f": 10**90}, "rarer": False},
                {**NUMBER, "mean": float("nan")},
                {**NUMBER, "mean": 1e101},
                {**NUMBER, "mean": "0.5"},
                {**NUMBER, "squares": -1.0},
                {**NUMBER, "squares": float("inf")},
                {**NUMBER, "categories": 7},
                {"categories": {"f": 8}, "rarer": False, "count": 8},
            )
        ),
    ],
)
def test_what_save_does_not_write_is_refused(told, files, tmp_path):
    (tmp_path / "site.json").write_text(told)
    with raises_with(DataError, path=str(tmp_path / "site.json")):
        Preparer.load(*files, tmp_path / "site.json")


def test_files_are_there_and_each_once(files, tmp_path):
    """A file that is missing, too long, no regular file or named twice is refused."""
    with raises_with(DataError, "pipe or a device", path=os.devnull):
        Preparer.load(os.devnull)
    (tmp_path / "long.json").write_bytes(b"{}" + bytes(2**24))
    with raises_with(DataError, f"{2**24:,} bytes", path=str(tmp_path / "long.json")):
        Preparer.load(tmp_path / "long.json")
    with raises_with(DataError, os.strerror(errno.ENOENT), path=str(tmp_path / "no.json")):
        Preparer.load(tmp_path / "no.json")
    (tmp_path / "link.json").symlink_to(files[0])
    for some in (
        [],
        [files[0], files[0]],
        [files[0], f"{tmp_path}/./{files[0].name}"],
        [files[0], tmp_path / "link.json"],
    ):
        with refuses("files", fact="each once"):
            Preparer.load(*some)


def test_names_of_other_sites_do_nothing_to_the_terminal_that_shows_them(files, tmp_path):
    red, told = "\x1b[31m", {"categories": {"\x1b[31mf": 9}, "rarer": False}
    (tmp_path / "site.json").write_text(json.dumps({"sex": told, red: NUMBER}))
    theirs = Preparer.load(tmp_path / "site.json")
    for rows in (
        site().drop(columns=["age", "pain"]),
        site(),
        site(**{red: [1, 2]}).drop(columns=["sex", "age", "pain"]),
    ):
        with pytest.raises(ConfigurationError) as caught:
            theirs.transform(rows)
        assert "[31m" in str(caught.value)
        assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (["M", "M ", "m"], r"column 'a' has names that differ only by blanks, .* different: 'M', 'M ', 'm'\."),
        (["New York", "NewYork\u200b", "x"], r"'New York', 'NewYork\\u200b'\."),
        (["e\u0301", "\xe9", "x"], "'e\u0301', '\xe9'"),
        (pd.Categorical(["M", "m", "x"]), "'M', 'm'"),
        (
            ["50", "61,5", "?"],
            r"'a' has 3 texts as categories; 2 are numbers, but not '\?'\. .*decimal point; leave .*read_csv.*\['\?'\]",
        ),
        (
            np.array([1, 2.5, 3], object),
            r"column 'a' has 3 texts as categories; 3 are numbers\. .*, use pd\.to_numeric",
        ),
        (["1,23", "4,5", "x"], r"2 are numbers, .*decimal point; .* read_csv\(…, decimal=\",\", na_values=\['x'\]\);"),
        (["1.234,5", "1,5", "-9"], r"without points .* read_csv\(…, decimal=\",\", thousands=\"\.\"\);"),
        (["M", "F", "x"], None),
        (["250", "V58", "E11"], None),
        (["a1", "a 2", "inf"], None),
        (pd.Categorical([1, 2, 3]), None),
    ],
)
def test_categories_that_are_probably_none_are_warned_of(column, words):
    """Texts as categories are warned of if they are probably several spellings of one category, or numbers."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = Preparer().fit(pd.DataFrame({"a": column})).get_feature_names_out()
    assert len(made) == 3
    assert [one.category for one in caught] == [DataWarning] * (words is not None)
    assert words is None or re.search(words, str(caught[0].message))


@pytest.mark.parametrize("texts", ["{}.23 kg", "2024-01-{:02}", "P{}"])
def test_texts_of_which_most_have_a_single_row_are_warned_of(texts):
    """A column of texts is warned of if most of the texts have a single row.

    Of 22 rows, the first and the last have the same text, so that 20 of 21 texts have one row each. There is no warning
    if each row comes twice, if the column is named in `categorical`, or if there are only 19 rows.
    """
    column = [texts.format(number) for number in [*range(1, 22), 1]]
    with pytest.warns(DataWarning, match=r"'a' .*\b21 .*\b20 "):
        Preparer().fit(pd.DataFrame({"a": column}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Preparer().fit(pd.DataFrame({"a": column * 2}))
        Preparer(categorical=["a"]).fit(pd.DataFrame({"a": column}))
        Preparer().fit(pd.DataFrame({"a": [f"P{number}" for number in range(19)]}))


@pytest.mark.parametrize("ones", [30, 1])
def test_a_code_for_gaps_among_0_and_1_is_warned_of(ones):
    column = np.repeat([1.0, 0.0], [ones, 90])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Preparer().fit(pd.DataFrame({"a": column}))
    with pytest.warns(DataWarning, match=rf"1 of {91 + ones} .*'a'.* -999\b"):
        Preparer().fit(pd.DataFrame({"a": [*column, -999.0]}))


def test_codes_that_are_named_are_not_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Preparer(categorical=["a"]).fit(pd.DataFrame({"a": ["1", "2", "?"]}))


def test_spellings_of_other_sites_and_later_rows_are_warned_of(tmp_path):
    for name, sex in (("one", ["M", "F"] * 8), ("other", ["m", "F"] * 8)):
        Preparer().fit(pd.DataFrame({"sex": [*sex, "rare"]})).save(tmp_path / name)
    with pytest.warns(DataWarning, match="column 'sex' .*: 'M', 'm'"):
        Preparer.load(tmp_path / "one", tmp_path / "other")
    with pytest.warns(DataWarning, match="column 'sex' .*: 'M', 'M '"):
        assert Preparer.load(tmp_path / "one").transform(pd.DataFrame({"sex": ["M "]}))["sex_M"].tolist() == [0]


def test_codes_that_one_site_reads_as_numbers_and_another_as_texts_are_warned_of(tmp_path):
    """A code such as "01" is 1 at a site where all codes are numbers, and stays "01" where one code has a letter."""
    for name, codes in (("one", "01,02"), ("other", "01,02,A3")):
        (tmp_path / f"{name}.csv").write_text("code,age\n" + "".join(f"{code},5\n" for code in codes.split(",") * 9))
        Preparer(categorical=["code"]).fit(read_table(tmp_path / f"{name}.csv")).save(tmp_path / name)
    with pytest.warns(DataWarning, match="column 'code' .*: '01', '1'; '02', '2'"):
        Preparer.load(tmp_path / "one", tmp_path / "other")


def test_fit_forgets_and_a_clone_knows_nothing():
    preparer = Preparer().fit(site(more=[1, 2])).fit(site())
    assert preparer.get_feature_names_out().tolist() == ["age", "sex_f", "sex_m", "pain"]
    assert preparer.columns_["pain"] == {"count": 2, "mean": 2.5, "squares": 4.5}
    with pytest.raises(NotFittedError):
        clone(preparer).save("nowhere.json")


@pytest.mark.parametrize("values", [pd.date_range("2026-01-01", periods=3), np.array([1j, 2, 3])])
def test_dates_and_complex_numbers_are_no_categories_unasked(values):
    """Dates and complex numbers are refused, unless `categorical` names their column.

    As categories they would become an indicator for each day. `save` would leave out all of these, so that the column
    would vanish.
    """
    frame = pd.DataFrame({"when": values})
    with refuses("type of column 'when'", fact="`categorical`"):
        Preparer().fit(frame)
    assert len(Preparer(categorical=["when"]).fit(frame).get_feature_names_out()) == 3


@pytest.mark.parametrize("code", [-999.0, 1e6, -3.4e38])
def test_a_code_for_a_gap_is_warned_of(code):
    """A number such as −999 that is probably a code for a gap is warned of.

    The other 119 numbers have mean 50 and standard deviation 10. The code's share of the sum of squared deviations is
    about (code − 50)²/((code − 50)² + 119·10²). This is 0.99 for −999, and more for the other codes.
    """
    ages = np.random.default_rng(0).normal(50, 10, 120)
    Preparer().fit(pd.DataFrame({"age": ages}))
    ages[7] = code
    with pytest.warns(DataWarning, match=rf"1 of 120 .*'age'.* {re.escape(f'{code:g}')}, .*(9.|100)%"):
        Preparer().fit(pd.DataFrame({"age": ages}))

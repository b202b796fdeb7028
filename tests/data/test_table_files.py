"""CSV files as pandas reads them: gaps, words, numbers, codes."""

import csv

import numpy as np
import pandas as pd
import pytest

from fedbilevel.data import DataError
from fedbilevel.data.table_files import GAPS, numbers_of, read_table, read_texts, words_of

TEXT = '﻿age,ward,"code, old",all\n61,b,1.0,\n?,"a ""x""",2,NA\n 59.5 ,NULL,,\n\n1e2,é,3,nan\n'


def test_a_file_is_read_as_pandas_reads_it(tmp_path):
    (tmp_path / "a.csv").write_text(TEXT, "utf-8")
    texts, frame = read_texts(tmp_path / "a.csv", ["?"]), pd.read_csv(tmp_path / "a.csv", na_values="?")
    assert [*texts] == [*frame.columns] == ["age", "ward", "code, old", "all"]
    for name in ("age", "code, old", "all"):
        np.testing.assert_array_equal(numbers_of(texts[name]), frame[name])
    assert numbers_of(texts["ward"]) is None
    assert texts["ward"].tolist() == ["b", 'a "x"', None, "é"]
    assert words_of(texts["ward"]).tolist() == texts["ward"].tolist()
    assert words_of(texts["code, old"]).tolist() == ["1", "2", None, "3"]
    assert words_of(np.array(["01", "2.50", None], object)).tolist() == ["1", "2.5", None]


def test_gaps_are_those_of_pandas():
    from pandas._libs.parsers import STR_NA_VALUES

    assert GAPS == STR_NA_VALUES


SEMICOLONS = "separated by semicolons; a .csv file must have commas between entries, and a decimal point"


@pytest.mark.parametrize("read", [read_texts, read_table])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a,b\n1\n", "line 2: 1 entries; the header has 2"),
        (b"a,b\n1,2,\n3,4,\n", "line 2: 3 entries; the header has 2"),
        (b'\n\na,b\n \n1,"2\n3"\n\n"4\n",5,\n', "line 8: 3 entries; the header has 2"),
        (b"a,a\n1,2\n", "column 'a' twice"),
        (b"a,\n1,2\n", "column '' twice or without a name"),
        (b"", "is empty; its first line must name the columns"),
        (b"\n \n", "is empty; its first line must name the columns"),
        (b"a\n\xff\n", "is not a text in UTF-8"),
        (b'a,b\n1,"2\n', "cannot be read"),
        ("größe;b\n1,5;2\n".encode(), SEMICOLONS),
    ],
)
def test_other_files_are_refused(tmp_path, read, content, words):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(DataError, match=words):
        read(tmp_path / "a.csv")


def test_a_file_with_commas_is_no_file_with_tabs(tmp_path):
    (tmp_path / "a.tsv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match=r"separated by commas; a \.tsv file must have tabs between entries"):
        read_table(tmp_path / "a.tsv")


@pytest.mark.parametrize("entry", ["x" * 200_000, '"a"b', 'a"b'])
def test_entries_that_pandas_reads_are_read(tmp_path, entry):
    (tmp_path / "a.csv").write_text(f"a,b\n{entry},2\n")
    limit = csv.field_size_limit()
    assert read_table(tmp_path / "a.csv").a.tolist() == [entry.replace('"a"', "a")]
    assert csv.field_size_limit() == limit


def test_a_column_has_one_type_however_long_the_file_is(tmp_path):
    """Pandas reads long files in parts, and would find numbers in some of them and words in others."""
    (tmp_path / "a.csv").write_text("a,b\n" + "1,2\n" * 300_000 + "x,2\n")
    assert {type(one) for one in read_table(tmp_path / "a.csv").a} == {str}

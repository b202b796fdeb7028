"""Are CSV files read as pandas reads them, with the same gaps, words and numbers, and are malformed ones refused?"""

import numpy as np
import pandas as pd
import pytest

from fedbilevel.data import DataError
from fedbilevel.data.table_files import GAPS, numbers_of, read_table, read_texts, rows_of, words_of
from refusals import raises_with

TEXT = '﻿age,ward,"code, old",all\n61,b,1.0,\n?,"a ""x""",2,NA\n 59.5 ,NULL,,\n\n1e2,é,3,nan\n'


def test_a_file_is_read_as_pandas_reads_it(tmp_path):
    (tmp_path / "a.csv").write_text(TEXT, "utf-8")
    texts, frame = read_texts(tmp_path / "a.csv", ["?"]), pd.read_csv(tmp_path / "a.csv", na_values="?")
    assert read_table(tmp_path / "a.csv", ["?"]).equals(frame)
    assert [*texts] == [*frame.columns] == ["age", "ward", "code, old", "all"]
    for name in ("age", "code, old", "all"):
        np.testing.assert_array_equal(numbers_of(texts[name]), frame[name])
    assert numbers_of(texts["ward"]) is None
    assert texts["ward"].tolist() == ["b", 'a "x"', None, "é"]
    assert words_of(texts["ward"]).tolist() == texts["ward"].tolist()
    assert words_of(texts["code, old"]).tolist() == ["1", "2", None, "3"]
    assert words_of(np.array(["01", "2.50", None], object)).tolist() == ["1", "2.5", None]


@pytest.mark.parametrize("entry", ["1_2", "١٢"])
def test_a_name_that_only_python_reads_as_a_number_is_a_word(tmp_path, entry):
    """Wards called 1_2 and 12 are two wards, as for pandas, although Python's `float` gives 12 for both."""
    (tmp_path / "a.csv").write_text(f"ward\n{entry}\n12\n", "utf-8")
    texts = read_texts(tmp_path / "a.csv")["ward"]
    assert numbers_of(texts) is None
    assert words_of(texts).tolist() == read_table(tmp_path / "a.csv").ward.tolist() == [entry, "12"]


def test_gaps_are_those_of_pandas():
    from pandas._libs.parsers import STR_NA_VALUES

    assert GAPS == STR_NA_VALUES


@pytest.mark.parametrize("read", [read_texts, read_table])
@pytest.mark.parametrize(
    ("content", "line", "got", "fact"),
    [
        (b"a,b\n1\n", 2, "1 entries", "expected 2"),
        (b"a,b\n1,2,\n3,4,\n", 2, "3 entries", "expected 2"),
        (b'\n\na,b\n \n1,"2\n3"\n\n"4\n",5,\n', 8, "3 entries", "expected 2"),
        (b"a,a\n1,2\n", None, "the column 'a' twice or without a name", ""),
        (b"a,\n1,2\n", None, "the column '' twice or without a name", ""),
        (b"", None, "no lines", ""),
        (b"\n \n", None, "no lines", ""),
        (b"a\n\xff\n", 2, None, "UTF-8"),
        (b"a,b\n" + b"1,2\n" * 5000 + b"\xff,2\n1,2\n", 5002, None, "UTF-8"),
        (b'a,b\n1,2\n1,"2\n3,4\n', 3, None, "quote in this row"),
        (b'a,b\n"a"b,2\n', 2, None, "quote in this row"),
        (b'a,b\n1,5" pipe\n2,"6\n3,4\n4,7" x\n5,1\n', 3, None, "quote in this row"),
        ("größe;b\n1,5;2\n".encode(), None, "semicolons", "commas"),
    ],
)
def test_other_files_are_refused(tmp_path, read, content, line, got, fact):
    (tmp_path / "a.csv").write_bytes(content)
    path = f"{tmp_path / 'a.csv'}{'' if line is None else f', line {line}'}"
    with raises_with(DataError, fact, path=path, got=got):
        read(tmp_path / "a.csv")


def test_a_file_with_commas_is_no_file_with_tabs(tmp_path):
    (tmp_path / "a.tsv").write_text("a,b\n1,2\n")
    with raises_with(DataError, path=str(tmp_path / "a.tsv"), got="commas", allowed="tabs"):
        read_table(tmp_path / "a.tsv")


@pytest.mark.parametrize("entry", ["x" * 200_000, 'a"b', '5" pipe', '"a\nb"', '"a\r\nb"'])
def test_entries_with_quotes_and_long_ones_are_read(tmp_path, entry):
    (tmp_path / "a.csv").write_bytes(f"a,b\n{entry},2\n".encode())
    read = entry.strip('"').replace("\r", "")
    assert read_table(tmp_path / "a.csv").a.tolist() == read_texts(tmp_path / "a.csv")["a"].tolist() == [read]


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        (b"a,b\r\r,5\r1,2\r", [[None, 5], [1, 2]]),
        (b"a,b\n1,2\n \r,5\n", [[1, 2], [None, 5]]),
        (b"a,b\r\n1,2\r\n\r,5\r\n", [[1, 2], [None, 5]]),
    ],
)
def test_no_end_of_a_line_moves_entries_to_another_column(tmp_path, content, rows):
    (tmp_path / "a.csv").write_bytes(content)
    np.testing.assert_array_equal(read_table(tmp_path / "a.csv"), np.array(rows, float))
    texts = read_texts(tmp_path / "a.csv")
    np.testing.assert_array_equal(np.stack([numbers_of(texts["a"]), numbers_of(texts["b"])], 1), np.array(rows, float))


def test_several_files_with_long_entries_are_read_at_once(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    (tmp_path / "b.csv").write_text("a,b\n" + "x" * 200_000 + ",2\n")
    short, long = (rows_of(tmp_path / name, ",") for name in ("a.csv", "b.csv"))
    assert next(short) == next(long)
    assert len(list(short)) == len(list(long)) == 1


def test_a_column_has_one_type_however_long_the_file_is(tmp_path):
    """A column has one type, however long the file is.

    Pandas reads long files in parts, and would find numbers in some parts and words in others.
    """
    (tmp_path / "a.csv").write_text("a,b\n" + "1,2\n" * 300_000 + "x,2\n")
    assert {type(one) for one in read_table(tmp_path / "a.csv").a} == {str}

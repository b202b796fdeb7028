"""CSV files as pandas reads them: gaps, words, numbers, codes."""

import numpy as np
import pandas as pd
import pytest

from fedbilevel.data import DataError
from fedbilevel.data.table_files import GAPS, numbers_of, read_texts, words_of

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


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a,b\n1\n", "row 2: 1 entries; the header has 2"),
        (b"a,a\n1,2\n", "column 'a' twice"),
        (b"a,\n1,2\n", "column '' twice or without a name"),
        (b"", "is empty; its first line must name the columns"),
        (b"a\n\xff\n", "is not a CSV file in UTF-8"),
    ],
)
def test_other_files_are_refused(tmp_path, content, words):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(DataError, match=words):
        read_texts(tmp_path / "a.csv")

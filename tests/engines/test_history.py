"""Do columns and rows have the measured numbers, also after a file was read?"""

import numpy as np

from fedbilevel.engines.history import History
from refusals import refuses

ROWS = [{"round": 0, "seconds": 0.0}, {"round": 5, "seconds": 0.1, "loss": 0.1 + 0.2}, {"round": 10, "loss": 1e-300}]


def test_a_column_is_nan_where_a_row_lacks_it():
    history = History(ROWS)
    assert len(history) == 3
    assert history["round"].tolist() == [0, 5, 10]
    np.testing.assert_array_equal(history["loss"], [np.nan, 0.1 + 0.2, 1e-300])


def test_columns_stand_in_the_order_of_their_appearance():
    assert History(ROWS).columns == ["round", "seconds", "loss"]
    assert History().columns == []


def test_a_history_is_a_mapping_of_columns_by_name():
    history = History(ROWS)
    assert list(history) == history.columns
    assert "loss" in history
    assert "los" not in history
    assert 0 not in history
    assert {name: len(history[name]) for name in history} == {"round": 3, "seconds": 3, "loss": 3}


def test_a_misspelt_column_is_answered_with_the_nearest():
    with refuses("column of the history", "los", near="loss"):
        History(ROWS)["los"]


def test_lines_of_json_give_back_the_same_numbers_also_from_a_file(tmp_path):
    text = History(ROWS).to_jsonl()
    assert len(text.splitlines()) == 3
    assert History.from_jsonl(text + "\n  \n") == History(ROWS)
    assert History.from_jsonl("") == History()
    path = tmp_path / "new" / "history.jsonl"
    assert History(ROWS).to_jsonl(path) == path.read_text() == text
    assert History.from_jsonl(path) == History(ROWS)


def test_metrics_come_first_then_losses_and_only_of_these_one_value_is_the_best():
    """The first columns are metrics and then losses, and only these have a best value.

    This holds although row 0 has no losses yet, and although a method's own numbers are recorded before the losses.
    """
    rows = [
        {"round": 0, "gap.worst": 1.0, "curvature": 0.0},
        {"round": 5, "gap.worst": 3.0, "curvature": 7.0, "inner_loss": 2.0, "outer_loss": 4.0},
        {"round": 9, "gap.worst": 2.0, "curvature": 5.0, "outer_loss": 4.5},
    ]
    history = History(rows, {"gap": True})
    assert history.judged == ["gap.worst", "outer_loss", "inner_loss"]
    assert history.measured == [*history.judged, "curvature"]
    assert history.in_words() == {
        "gap.worst": "1 → 2, best 3 at round 5",
        "outer_loss": "4 → 4.5, best 4 at round 5",
        "inner_loss": "2, measured once, at round 5",
        "curvature": "0 → 5",
    }


def test_two_histories_share_no_rows():
    one, other = History(), History()
    one.rows.append({"round": 0})
    assert len(other) == 0

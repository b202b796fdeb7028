"""Is the status of a federated run correct in the forms for programs, which are JSON and metrics for Prometheus?"""

import json
import re

import pytest

from fedbilevel.cli import main
from fedbilevel.engines import lock
from fedbilevel.experiments import Folder

pytest.importorskip("flwr")
LATE = {"code": "late", "why": "no reply", "who": "", "how": ""}
LINES = [
    {"round": 0, "exchange": 0, "phase": "y", "answered": [0], "refused": {"1": LATE, "3": LATE}, "bytes_down": 40,
     "bytes_up": 24, "seconds": 0.25},
    {"round": 0, "undone": "why", "without": [0]},
    {"round": 1, "exchange": 2, "phase": "x", "answered": [0, 1], "refused": {"3": LATE}, "epsilon": 1.25,
     "bytes_down": 80, "bytes_up": 48, "seconds": 0.5},
]  # fmt: skip
ENDED = {"ended": "too few", "kind": "ExchangeError"}
METRIC = re.compile(r'fedbilevel_([a-z_]+)\{run="((?:[^"\\\n]|\\["\\n])*)"\} (\S+)')


@pytest.fixture
def run(tmp_path):
    """Return the folder of a federated run whose log has two exchanges and an unfinished last line."""
    folder = tmp_path / 'a "run" of\\ours'
    folder.mkdir()
    (folder / "exchanges.jsonl").write_text("\n".join([*map(json.dumps, LINES), '{"round": 2, "exch']))
    return folder


def test_the_status_as_json(run, capsys):
    assert main(["flower", "status", str(run), "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    modified = table.pop("modified")
    assert modified == pytest.approx((run / "exchanges.jsonl").stat().st_mtime)
    (absent,) = table.pop("absent")
    assert (absent["client"], absent["round"], absent["ever_counted"], absent["code"]) == (3, 1, False, "late")
    assert absent["how"].startswith("start its SuperNode if it has stopped")  # from the code, not from the file
    assert table == {
        "finished": False, "exchanges": 2, "round": 1, "exchange": 2, "phase": "x", "epsilon": 1.25, "replied": [0, 1],
        "bytes_down": 120, "bytes_up": 72, "seconds": 0.75, "unread_lines": 1, "ended": None,
    }  # fmt: skip
    with (run / "exchanges.jsonl").open("a") as file:
        file.write("\n" + json.dumps(ENDED))
    assert main(["flower", "status", str(run), "--json"]) == 5
    assert json.loads(capsys.readouterr().out)["ended"] == {"kind": "ExchangeError", "why": "too few"}


def test_the_phase_of_the_last_exchange_is_named(run, capsys):
    """`status` names the phase of the last exchange.

    The round alone would be ambiguous: in a study with many features, rounds begin again with 0 after the search.
    """
    assert main(["flower", "status", str(run)]) == 0
    last = "last: round 1, exchange 2 (x), 2 replied"
    assert capsys.readouterr().out.startswith(f"not finished, and no process runs it; {last}")
    place = Folder(run)
    with lock.exclusive(place.lock, place.path):
        assert main(["flower", "status", str(run)]) == 0
    assert capsys.readouterr().out.startswith(f"not finished; {last}")


def test_metrics_for_prometheus_are_written_whole(run, tmp_path, capsys):
    """Metrics are written in Prometheus's text format, and no temporary file remains.

    The format has a HELP and a TYPE line before each sample, escapes backslashes and quotation marks in labels, and
    ends with the end of a line.
    """
    (run / "model.json").write_text("{}")
    file = tmp_path / "metrics" / "run.prom"
    assert main(["flower", "status", str(run), "--prometheus", str(file)]) == 0
    assert capsys.readouterr().out == ""
    assert [one.name for one in file.parent.iterdir()] == ["run.prom"]
    text = file.read_text()
    assert text.endswith("\n")
    lines, found = text.splitlines(), {}
    assert len(lines) % 3 == 0
    for meaning, kind, sample in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        name, label, value = METRIC.fullmatch(sample).groups()
        assert json.loads(f'"{label}"') == run.name
        assert meaning.startswith(f"# HELP fedbilevel_{name} ")
        assert kind == f"# TYPE fedbilevel_{name} {'counter' if name.endswith('_total') else 'gauge'}"
        found[name] = float(value)
    modified = found.pop("last_exchange_timestamp_seconds")
    assert modified == (run / "exchanges.jsonl").stat().st_mtime
    assert found == {
        "finished": 1, "failed": 0, "exchanges_total": 2, "round": 1, "clients_replied": 2, "clients_absent": 1,
        "bytes_down_total": 120, "bytes_up_total": 72, "exchange_seconds_total": 0.75, "epsilon": 1.25,
    }  # fmt: skip


def test_attempts_at_an_exchange_are_one_exchange(tmp_path, capsys):
    """Several attempts at an exchange count as one exchange.

    A second attempt asks only the clients that have not replied, and replies to both attempts count.
    """
    first = {"round": 0, "exchange": 0, "phase": "y", "attempt": 0, "answered": [0, 2], "refused": {"1": LATE}}
    again = first | {"attempt": 1, "answered": []}
    (tmp_path / "exchanges.jsonl").write_text("\n".join(map(json.dumps, [first, again])))
    assert main(["flower", "status", str(tmp_path)]) == 0
    assert "exchange 0 (y), 2 replied\nclient 1, round 0: no reply" in capsys.readouterr().out
    with (tmp_path / "exchanges.jsonl").open("a") as file:
        file.write("\n" + json.dumps(again | {"exchange": 1, "answered": [1]}))
    assert main(["flower", "status", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["replied"] == [1]


def test_a_run_without_noise_has_no_privacy_loss(run, tmp_path):
    """Without noise, the metrics have no ε, because an ε of 0 would mean that the replies reveal nothing."""
    (run / "exchanges.jsonl").write_text(json.dumps(LINES[0]))
    assert main(["flower", "status", str(run), "--prometheus", str(tmp_path / "run.prom")]) == 0
    assert "epsilon" not in (tmp_path / "run.prom").read_text()


def test_what_is_of_a_run_is_not_of_a_connection(capsys):
    """`status --connection`, which is about a connection, refuses `--json`, which is about a run."""
    assert main(["flower", "status", "--connection", "there", "--json"]) == 2
    assert "--connection = 'with --json' is not allowed" in capsys.readouterr().err

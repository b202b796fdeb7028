"""Studies over Flower, run in this process, give the same numbers as on one machine, and sites keep to their limits."""

import errno
import json
import os

import federations
import numpy as np
import pandas as pd
import pytest
from flwr.app import Message
from sklearn.exceptions import ConvergenceWarning
from study_nodes import Nodes, alone, phases

from fedbilevel.core.errors import ExchangeError
from fedbilevel.estimators import StudyModel
from fedbilevel.estimators.site_table import SiteTable
from fedbilevel.experiments import Folder
from fedbilevel.experiments.federation_status import Status
from fedbilevel.experiments.study import client_app, serve, site
from fedbilevel.flower.refusal import Code
from fedbilevel.flower.wire import QUESTION, RequestMessage, decode
from refusals import ANY, codes, raises_with, refuses
from representatives import slow_but
from site_tables import SITES, TARGETS, fitted, study, tables

pytestmark = pytest.mark.usefixtures("posed_once")

COX = {"kind": "cox", "times": [5, 20, 60]}


@pytest.mark.parametrize("kind", slow_but("ridge", of=TARGETS))
def test_sites_that_keep_their_tables_have_the_numbers_of_one_machine(kind, files, tmp_path, capsys):
    given, place = study(kind), tmp_path / "run"
    serve(given, Nodes(client_app(given), files), {"out": str(place), "poll": 0.1})
    model, here = StudyModel.load(place / "model.json"), fitted(kind)
    for name in ("coef_", "penalties_", "standard_errors_"):
        np.testing.assert_allclose(getattr(model.estimator, name), getattr(here.estimator, name), rtol=1e-9, atol=1e-10)
    assert model.intercept_error == (None if kind == "cox" else pytest.approx(here.intercept_error, rel=1e-10))
    rows = tables()["south"].drop(columns=list(TARGETS[kind].values()))
    np.testing.assert_allclose(
        model.estimator.coef_ @ model.prepared(rows, "south").T, here.estimator.coef_ @ here.prepared(rows, "south").T
    )
    lines = [json.loads(line) for line in (place / "exchanges.jsonl").read_text().splitlines()]
    assert [line["phase"] for line in lines[:3]] == ["a question", "an agreement", "derivatives"]
    assert lines[-1]["phase"] == "a question"  # about the scores of patients
    assert all(line["answered"] == [0, 1, 2] for line in lines)
    assert len(lines) < 45
    assert Status.of(Folder(place)).lines[0].startswith("finished; last: round ")
    said = capsys.readouterr().out
    assert ("predicts the probability of ill = yes" in said) == (kind == "logistic")
    assert f"model {(place / 'model.json').resolve()}" in said
    assert ("Positive class: `yes`" in (place / "model-card.md").read_text()) == (kind == "logistic")
    assert (place / "scoring-sheet.txt").read_text() == model.sheet()
    down, up = (sum(line[name] for line in lines) for name in ("bytes_down", "bytes_up"))
    sent = f"{3 * len(lines)} requests to sites, {down:,} bytes to them and {up:,} bytes from them"
    card = (place / "model-card.md").read_text()
    assert f"- Costs: {len(lines)} exchanges in all attempts in this folder: {sent}\n" in card
    assert "\n- Differential privacy: none: no noise was added" in card
    with refuses("out"):
        serve(given, None, {"out": str(place)})


def leaves(content):
    """Return all numbers of a report: place → number."""
    if isinstance(content, dict | list):
        pairs = content.items() if isinstance(content, dict) else enumerate(content)
        return {(name, *place): leaf for name, one in pairs for place, leaf in leaves(one).items()}
    return {(): content} if isinstance(content, int | float) else {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", TARGETS)
def test_a_site_that_is_held_out_takes_part_and_changes_no_number(kind, files, tmp_path):
    given, place = study(kind, holdout="south"), tmp_path / "run"
    nodes = Nodes(client_app(given), files, {"min-local-samples": 40, "state-folder": str(tmp_path / "state")})
    serve(given, nodes, {"out": str(place), "poll": 0.1})
    model, here = StudyModel.load(place / "model.json"), given.fit(tables())
    np.testing.assert_allclose(model.estimator.coef_, here.estimator.coef_, rtol=0, atol=1e-10)
    there = json.loads((place / "report.json").read_text())
    assert leaves(here.report.content) == pytest.approx(leaves(there), rel=1e-10, abs=1e-10)
    assert [*there["sites"]] == ["south"]


@pytest.mark.parametrize("more", slow_but(COX, of=[{"kind": "logistic"}, COX]), ids=["logistic", "cox"])
def test_the_report_has_the_numbers_of_one_machine(more, files, tmp_path):
    given, place = study(**more, holdout=0.4, min_count=4), tmp_path / "run"
    serve(given, Nodes(client_app(given), files), {"out": str(place), "poll": 0.1})
    here, there = given.fit(tables()), json.loads((place / "report.json").read_text())
    assert leaves(here.report.content) == pytest.approx(leaves(there), rel=1e-7, abs=1e-9)
    assert [*there["sites"]] == [*SITES]
    assert (place / "report.txt").read_text().startswith(f"{more['kind']} regression of")
    model = StudyModel.load(place / "model.json")
    assert leaves(model.baselines) == pytest.approx(leaves(dict(here.baselines)), rel=1e-7)


def test_a_site_that_is_not_there_ends_the_study_with_its_name(files, tmp_path):
    given = study("ridge")
    grid = Nodes(client_app(given), files, delay=lambda client, _: np.inf if client == 1 else 0)
    place = tmp_path / "run"
    with raises_with(ExchangeError, "sites: 0 north, 1 south, 2 west", replies=2, needed=3) as error:
        serve(given, grid, {"out": str(place), "deadline": 2.0, "join": 1.0, "attempts": 2})
    assert codes(error) == {1: Code.LATE}
    assert not (place / "model.json").exists()
    status = Status.of(Folder(place))
    said, ended = status.lines, status.ended
    assert said[1].startswith("south (client 1), round 0: ")
    assert "1 more" not in str(error.value)
    assert "(south (client 1): " in str(error.value)
    assert isinstance(ended, ExchangeError)
    assert str(ended).endswith("run', the study starts from the beginning")  # nothing is saved before the search


@pytest.mark.parametrize(("late", "code"), [((1, 2), Code.STALLED), ((1,), Code.LATE)])
def test_where_most_sites_are_late_with_an_answer_it_may_be_no_sites_fault(late, code, files):
    def delay(client, message):
        return np.inf if client in late and decode(RequestMessage, message).phase == QUESTION else 0.0

    nodes = Nodes(client_app(study("ridge")), files, delay=delay)
    with raises_with(ExchangeError, "", replies=3 - len(late), needed=3) as error:
        alone(study("ridge"), nodes, deadline=2.0, join=1.0, attempts=2)
    assert codes(error) == dict.fromkeys(late, code)
    assert ("of 2 online clients are late at the same time" in str(error.value)) == (code is Code.STALLED)


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("[]", ("agreement", "list", "rows, features and target")),
        ("{}", ("agreement", "dict", "rows, features and target")),
        ('{"rows": 0, "features": {}, "target": {}}', ("agreement", "dict", "rows, features and target")),
        ('{"rows": 9, "features": {"age": 3}, "target": {}}', ("", ANY, "'age'")),
    ],
)
def test_an_agreement_that_is_none_is_refused(text, refusal, files):
    with refuses(*refusal):
        site(study("ridge"), {}, {"partition-id": 0, **files[0]}, text)


@pytest.mark.parametrize(
    ("change", "code", "fact"),
    [
        ({"min-local-samples": 50}, Code.FLOOR, "its floor of 50"),
        ({"max-requests": 1}, Code.LIMIT, "at most 1 requests in all"),
        ({"max-bytes": 5}, Code.LIMIT, "limit of 5"),
        ({"clip": 1.0, "noise-multiplier": 1.0, "delta": 1e-5}, Code.SETTINGS, "ConfigurationError; "),
        ({"tabel": "x"}, Code.SETTINGS, "ConfigurationError; "),
    ],
)
def test_a_site_keeps_to_its_limits_from_the_first_message(change, code, fact, files, caplog):
    given = study("ridge")
    nodes = Nodes(client_app(given), [files[0] | change, *files[1:]])
    with raises_with(ExchangeError, replies=2, needed=3) as error:
        alone(given, nodes, attempts=1, join=0.2, deadline=1.0)
    assert codes(error) == {0: code}
    assert fact in error.value.refusals[0].why
    if "clip" in change:
        assert "left out: a study has no privacy by noise" in caplog.text


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_requests_and_the_agreement_are_in_the_state_folder(files, tmp_path, caplog):
    """The state folder has the number of all requests, and the agreement, with which another process continues.

    Requests for statistics, for the agreement and for phases count alike.
    """
    given, folder = study("ridge", rounds=2), tmp_path / "state"
    every = {"state-folder": str(folder)}
    apps = []
    caplog.set_level("INFO", logger="fedbilevel.client")

    def another(message: Message, context):  # a new process for each message, as in Flower's own SuperNode
        apps.append(client_app(given))
        return apps[-1](message, context)

    model = alone(given, Nodes(another, files, every))
    np.testing.assert_allclose(model.estimator.coef_, given.fit(tables()).estimator.coef_, atol=1e-10)
    counted = json.loads((folder / "client-0-requests.json").read_text())["total"]
    assert counted == len(apps) / 3
    assert json.loads((folder / "client-1-agreement.json").read_text())["run"] == federations.NAME
    described = [text for text in caplog.messages if "; folder " in text]
    assert len(described) == len(apps)
    assert "north (client 0): samples 40 rows for the model, 0 held out, and 0" in described[0]
    assert all(" rows for the model" in text for text in described)  # before the agreement, and after it
    assert all(f"; folder {folder};" in text for text in described)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_another_table_is_noticed_where_a_site_asks_for_it(files, tmp_path):
    given = study("ridge", rounds=2)
    app = client_app(given)
    every = {"state-folder": str(tmp_path / "state"), "same-data": True}
    alone(given, Nodes(app, files, every))
    alone(given, Nodes(client_app(given), files, every), name="a0" * 8)
    table = tables()["west"].assign(age=50.0)
    table.to_csv(tmp_path / "west.csv", index=False)
    with raises_with(ExchangeError, "samples have changed") as error:
        alone(given, Nodes(client_app(given), files, every), "b0" * 8, attempts=1, join=0.2, deadline=1.0)
    assert codes(error) == {2: Code.SETTINGS}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_another_study_of_the_same_table_is_not_another_table(files, tmp_path, caplog):
    """Another study of the same table is not taken for another table, although its prepared samples differ.

    With min_count = 3 instead of 8, the rare category z of `kind` gets a column.
    """
    every = {"state-folder": str(tmp_path / "state"), "same-data": True}
    for name, given in ("a0" * 8, study("ridge", rounds=1)), ("b0" * 8, study("ridge", rounds=1, min_count=3)):
        alone(given, Nodes(client_app(given), files, every), name)
    assert "its prepared samples differ" not in caplog.text
    assert len([*(tmp_path / "state").glob("client-0-samples-*.json")]) == 2


def test_a_site_with_another_study_does_not_take_part(files):
    """A site with another study does not take part and sends no statistics, since the greeting compares the studies."""
    given, asked = study("ridge"), []
    good, other = client_app(given), client_app(study("ridge", min_count=1))

    def app(message, context):
        request: RequestMessage = decode(RequestMessage, message)
        asked.append((context.node_config["partition-id"], request.phase))
        return (other if context.node_config["partition-id"] == 1 else good)(message, context)

    with raises_with(ExchangeError, "hyperparameters.study is ") as error:
        alone(given, Nodes(app, files), attempts=1, join=0.2, deadline=1.0)
    assert codes(error) == {1: Code.CONTRACT}
    assert (1, QUESTION) not in asked
    assert (0, QUESTION) in asked


def test_a_column_that_a_site_lacks_is_named_at_the_server_and_at_this_site_alone(files, caplog):
    caplog.set_level("INFO", logger="fedbilevel.client")
    table = tables()["west"].drop(columns="dose")
    table.to_csv(files[2]["table"], index=False)
    given = study("ridge")
    words = "column 'dose' is missing in the table of west: a column must be in the table of every site, or left out"
    with refuses("column 'dose' of west", "missing", "'dose'"):
        alone(given, Nodes(client_app(given), files))
    assert [text.startswith(f"the study ends: {words}") for text in caplog.messages if "dose" in text][-1:] == [True]
    assert not [text for text in caplog.messages if "refused" in text]  # the site may be right, and cannot correct it
    for wrong in ("[]", "{}", '{"columns": [1]}'):
        answer = site(given, {}, {"partition-id": 2, **files[2]}, "").answer
        with refuses("question" if wrong == "[]" else "columns of the question"):
            answer(wrong)


def test_sites_that_have_gone_are_told_once_of_a_column_that_a_site_lacks(files, tmp_path):
    tables()["west"].drop(columns="dose").to_csv(files[2]["table"], index=False)
    given, place, asked = study("ridge"), tmp_path / "run", []

    def delay(client, message):
        asked.append((client, decode(RequestMessage, message).phase))
        return np.inf if client == 1 and asked.count((1, QUESTION)) > 1 else 0

    with refuses("column 'dose' of west", "missing"):
        serve(given, Nodes(client_app(given), files, delay=delay), {"out": str(place), "deadline": 2.0})
    assert [asked.count((client, QUESTION)) for client in range(3)] == [2, 2, 2]


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_the_log_of_a_site_has_what_it_told(files, caplog):
    caplog.set_level("INFO", logger="fedbilevel.client")
    given = study("ridge", rounds=3)
    alone(given, Nodes(client_app(given), files))
    told = [text for text in caplog.messages if text.startswith("north (client 0) answers: ")]
    assert len(told) == 2
    assert json.loads(told[1].partition("answers: ")[2])["patients"] == 20
    statistics = json.loads(told[0].partition("answers: ")[2])
    assert statistics["rows"] == 40
    assert "z" not in statistics["features"]["kind"]["categories"]


@pytest.mark.parametrize(
    ("change", "path", "got", "fact"),
    [
        ({"partition-id": 3}, "partition-id", 3, "0 (north), 1 (south) or 2 (west)"),
        ({"site": "west"}, "site", "west", "north, the site with partition-id = 0"),
        ({"table": ""}, "table", "", ".csv, .tsv or .parquet"),
        ({"noise-multiplier": 1.0}, "noise-multiplier", "given", "left out"),
        ({"settable": "run.*"}, "settable", "given", "left out"),
        ({"tell-metrics": True}, "tell-metrics", "given", "left out"),
        ({"settable": "run.*", "tell-metrics": True}, "settable, tell-metrics", "given", "left out"),
    ],
)
def test_a_wrong_field_of_a_node_configuration_is_named(change, path, got, fact, files):
    with refuses(f"node configuration: {path}", got, fact):
        site(study("ridge"), {}, {"partition-id": 0, **files[0], **change}, "")


def test_a_table_that_is_not_there_and_an_unknown_name_of_a_node_configuration_are_named(files, tmp_path):
    given = {"partition-id": 0, **files[0]}
    place = "node configuration: table"
    with refuses("nowhere.csv", fact=os.strerror(errno.ENOENT), where=place):
        site(study("ridge"), {}, {**given, "table": "nowhere.csv"}, "")
    (tmp_path / "long.csv").write_text("age,kind\n1,a,2\n")
    with refuses(f"{tmp_path / 'long.csv'}, line 2", "3 entries", "2,", where=place):
        site(study("ridge"), {}, {**given, "table": str(tmp_path / "long.csv")}, "")
    with refuses(place, "no_such_module:read"):
        site(study("ridge"), {}, {**given, "table": "no_such_module:read"}, "")
    with refuses("name in the node configuration", "aprove", near="approve"):
        site(study("ridge"), {}, {**given, "aprove": "ask"}, "")


def test_a_table_may_come_from_a_function(monkeypatch, tmp_path):
    (tmp_path / "own_table.py").write_text("import site_tables\n\ndef read():\n    return site_tables.table(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    made = site(study("ridge"), {}, {"partition-id": 0, "table": "own_table:read"}, "")
    assert made.outer["digest"].shape == (40, 2)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"holdout": "south"}])
def test_sites_search_for_the_penalties_of_many_features(more, files, tmp_path, monkeypatch):
    """If there are many features, sites search for the penalties by SimFBO, and train the last model in a second run.

    The search is stopped here while the loss still falls. WIDE = 5 makes the study one with many features.
    """
    monkeypatch.setattr("fedbilevel.estimators.fold_models.WIDE", 5)
    given, place = study("ridge", rounds=12, penalty="feature", **more), tmp_path / "run"
    with pytest.warns(ConvergenceWarning, match="validation loss .* 12 rounds"):
        serve(given, Nodes(client_app(given), files), {"out": str(place), "poll": 0.1})
    with pytest.warns(ConvergenceWarning, match="validation loss .* 12 rounds"):
        here = given.fit(tables())
    there = StudyModel.load(place / "model.json")
    assert len(set(here.estimator.penalties_)) > 5
    for name in ("coef_", "penalties_"):
        expected = getattr(here.estimator, name)
        np.testing.assert_allclose(getattr(there.estimator, name), expected, rtol=1e-10, atol=1e-10)
    assert there.estimator.standard_errors_ is None
    told = [json.loads(line)["phase"] for line in (place / "exchanges.jsonl").read_text().splitlines()]
    assert list(dict.fromkeys(told)) == ["a question", "an agreement", "local_updates", "gradient", "product"]
    assert told.count("local_updates") == 12
    assert not [*place.glob("search-*")]


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("folder", slow_but(False, of=[True, False]))
def test_a_table_that_changes_within_a_study_is_refused(folder, files, tmp_path, monkeypatch):
    """A site whose table changes within a study is refused when it reads the table again for the last model.

    The changed table has the same rows, of which two are exchanged.
    """
    monkeypatch.setattr("fedbilevel.estimators.fold_models.WIDE", 5)
    given, table = study("ridge", rounds=2, penalty="feature"), tables()["west"]

    def change(client, message):
        if decode(RequestMessage, message).phase == "local_updates":
            table.iloc[[1, 0, *range(2, len(table))]].to_csv(files[2]["table"], index=False)
        return 0

    nodes = Nodes(client_app(given), files, {"state-folder": str(tmp_path / "state")} if folder else None, delay=change)
    with raises_with(ExchangeError, "data have changed") as error:
        alone(given, nodes, attempts=1, join=0.2, deadline=2.0)
    assert codes(error) == {2: Code.SETTINGS}


def test_a_fingerprint_is_of_all_that_a_study_uses(files):
    def fingerprint(**changes):
        return SiteTable(study("ridge"), "west", tables()["west"].assign(**changes)).fingerprint()

    table, same = tables()["west"], fingerprint()
    assert fingerprint(ill="no") == same  # the study drops this column
    changed = [fingerprint(days=table.days + 1), fingerprint(patient=0), fingerprint(age=table.dose, dose=table.age)]
    assert len({same, *changed}) == 4


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_requests_of_the_last_model_are_not_counted_to_the_last_round_of_the_search(files, tmp_path, monkeypatch):
    """Requests in the run of the last model are not counted to the last round of the search.

    Both runs begin with round 0. No round has more than 6 requests to a site, and the run of the last model has more in
    all.
    """
    monkeypatch.setattr("fedbilevel.estimators.fold_models.WIDE", 5)
    given, place = study("ridge", rounds=4, penalty="feature"), tmp_path / "run"
    serve(given, Nodes(client_app(given), files, {"max-requests-per-round": 6}), {"out": str(place), "poll": 0.1})
    asked = phases(place)
    assert len(asked) - asked.index("gradient") > 6


@pytest.mark.slow
def test_sites_may_have_more_columns_than_rows(files, tmp_path):
    """Sites may have more columns than rows.

    Each table has 320 further columns. One column of each table is constant, or has no numbers.
    """
    many, rng = tables(), np.random.default_rng(1)
    for number, name in enumerate(SITES):
        more = pd.DataFrame(rng.normal(size=(len(many[name]), 320)), columns=[f"c{k}" for k in range(320)])
        more[f"c{number}"] = [1.5, np.nan, 2.0][number]
        many[name] = pd.concat([many[name], more], axis=1)
        many[name].to_csv(files[number]["table"], index=False)
    given, place = study("logistic", rounds=20, penalty="feature"), tmp_path / "run"
    with pytest.warns(ConvergenceWarning, match="validation loss .* 20 rounds") as warned:
        serve(given, Nodes(client_app(given), files), {"out": str(place), "poll": 0.1})
    assert {one.category for one in warned} == {ConvergenceWarning}
    with pytest.warns(ConvergenceWarning, match="validation loss .* 20 rounds"):
        here = given.fit(many)
    there = StudyModel.load(place / "model.json")
    for name in ("coef_", "penalties_"):
        expected = getattr(here.estimator, name)
        assert len(expected) > 320
        np.testing.assert_allclose(getattr(there.estimator, name), expected, rtol=1e-10, atol=1e-10)

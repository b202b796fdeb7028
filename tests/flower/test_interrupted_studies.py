"""Studies over Flower can be interrupted and submitted again: tests check what is saved, and what continues."""

import errno
from dataclasses import replace

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning
from study_nodes import Killed, Nodes, killed_after, killed_at, phases

from fedbilevel.core.errors import CheckpointError, ConfigurationError, ExchangeError, InUse
from fedbilevel.engines import lock
from fedbilevel.engines.saver import FORCE
from fedbilevel.estimators import StudyModel
from fedbilevel.estimators.evaluation import Report
from fedbilevel.experiments import Folder
from fedbilevel.experiments.study import SavedSearch, client_app, serve
from refusals import raises_with
from site_tables import fitted, study, tables

pytestmark = pytest.mark.usefixtures("posed_once")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_a_model_is_saved_after_its_report(files, tmp_path, monkeypatch):
    """The model is saved after the report, so that a study whose report could not be saved can be submitted again.

    A folder with a model is refused. Whatever was to be saved after the model would then be lost.
    """
    given, place = study("ridge", rounds=3), tmp_path / "run"

    def full(report, folder):
        raise OSError("no space left")

    with monkeypatch.context() as broken:
        broken.setattr(Report, "save", full)
        with pytest.raises(OSError, match="no space left"):
            serve(given, Nodes(client_app(given), files), {"out": str(place), "poll": 0.1})
    assert not (place / "model.json").exists()
    serve(given, Nodes(client_app(given), files), {"out": str(place), "poll": 0.1})
    assert (place / "report.json").exists()
    assert (place / "model.json").exists()


@pytest.mark.parametrize("kind", [ConfigurationError, CheckpointError, ExchangeError])
def test_only_an_exchange_may_succeed_if_it_is_repeated(kind, files, tmp_path, monkeypatch):
    """The message of an error that would come again does not say how the study continues if it is submitted again."""

    def wrong(*_):
        raise kind("something is wrong", **{"remedy": FORCE} if kind is CheckpointError else {})

    monkeypatch.setattr("fedbilevel.experiments.study.played", wrong)
    with raises_with(kind, "sites: 0 north, 1 south") as raised:
        serve(study("ridge"), Nodes(client_app(study("ridge")), files), {"out": str(tmp_path / "run")})
    if kind is CheckpointError:  # a study has no option resume="force"
        assert raised.value.remedy == "choose another folder"
    assert ("the study starts from the beginning" in str(raised.value)) == (kind is ExchangeError)


def test_a_study_that_is_running_is_not_disturbed_by_a_second_one(files, tmp_path):
    """If a study is submitted while another one runs in its folder, it ends before it asks a site.

    The folder does not say that the first study has ended.
    """
    place = Folder(tmp_path / "run")
    grid = Nodes(client_app(study("ridge")), files, delay=lambda *_: pytest.fail("something was sent"))
    with lock.exclusive(place.lock, place.path):
        with raises_with(InUse, "is in use by process", path=place.path):
            serve(study("ridge"), grid, {"out": str(place.path)})
        assert not place.exchanges.exists()


def test_a_full_disk_of_the_server_is_an_interruption(files, tmp_path, monkeypatch):
    """If the server's disk is full, the message says that the study continues as soon as there is room again."""

    def full(*_):
        raise CheckpointError("could not write x: No space left on device", errno=errno.ENOSPC)

    monkeypatch.setattr("fedbilevel.experiments.study.played", full)
    place = tmp_path / "run"
    again = f"when the server can write there, submit the study again with out='{place}': the study starts from the "
    with raises_with(CheckpointError, again, errno=errno.ENOSPC) as raised:
        serve(study("ridge"), Nodes(client_app(study("ridge")), files), {"out": str(place)})
    assert "sites:" not in str(raised.value)  # no site is the cause


@pytest.mark.parametrize(
    ("wide", "then"),
    [
        (300, "the search for penalties continues"),
        pytest.param(5, "the study starts from the beginning", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_study_says_whether_its_search_continues(wide, then, files, tmp_path, monkeypatch):
    monkeypatch.setattr("fedbilevel.estimators.fold_models.WIDE", wide)
    given = study("ridge", rounds=20)
    asked = dict.fromkeys(range(3), 0)

    def absent(client, _):
        """Let client 1 leave after ten messages, when the search has begun."""
        asked[client] += 1
        return np.inf if client == 1 and asked[1] > 10 else 0

    grid = Nodes(client_app(given), files, delay=absent)
    with pytest.raises(ExchangeError, match=f"sites: 0 north.*run', {then}"):
        serve(given, grid, {"out": str(tmp_path / "run"), "deadline": 1.0, "join": 0.5, "attempts": 1, "poll": 0.1})


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_a_study_whose_server_was_killed_goes_on_where_it_was(files, tmp_path, capsys):
    given, place, whole = study("ridge", rounds=10), tmp_path / "run", tmp_path / "whole"
    serve(given, Nodes(client_app(given), files), {"out": str(whole), "poll": 0.1})
    with pytest.raises(Killed):
        serve(given, killed_after(40, Nodes(client_app(given), files)), {"out": str(place), "poll": 0.1})
    before = phases(place).count("derivatives")
    assert before > 5
    assert not (place / "model.json").exists()
    capsys.readouterr()
    serve(given, Nodes(client_app(given), files), {"out": str(place), "poll": 0.1})
    assert "found a saved search at" in capsys.readouterr().out
    assert phases(place).count("derivatives") == phases(whole).count("derivatives")
    assert phases(place).count("a question") == 3  # twice about statistics, and once about the scores of patients
    assert (place / "model.json").read_bytes() == (whole / "model.json").read_bytes()
    assert not [*place.glob("search-*")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_a_study_of_other_tables_begins_anew(files, tmp_path, capsys):
    given, place = study("ridge", rounds=10), tmp_path / "run"
    with pytest.raises(Killed):
        serve(given, killed_after(40, Nodes(client_app(given), files)), {"out": str(place), "poll": 0.1})
    changed = tables() | {"west": tables()["west"].assign(age=lambda frame: frame.age + 1)}
    changed["west"].to_csv(tmp_path / "west.csv", index=False)
    serve(given, Nodes(client_app(given), files), {"out": str(place), "poll": 0.1})
    said = capsys.readouterr().out
    assert "found a saved search" not in said
    assert "starting a new search: the saved search is of other tables or of another study" in said
    model = StudyModel.load(place / "model.json")
    np.testing.assert_allclose(model.estimator.coef_, given.fit(changed).estimator.coef_, rtol=0, atol=1e-10)


def test_only_a_search_of_the_same_tables_is_said_to_continue(tmp_path):
    search, agreement = SavedSearch(Folder(tmp_path)), fitted("ridge").agreement
    assert search.then() == "the study starts from the beginning"
    (tmp_path / "search-words.txt").touch()
    (tmp_path / f"search-{'1' * 16}.npz").mkdir()
    (tmp_path / "search-0000.npz").touch()
    assert search.files() == []
    (tmp_path / f"search-{'0' * 16}.npz").touch()
    assert search.then() == "its saved search continues if study and tables are the same"
    checkpoint = search.of(agreement)
    assert search.then() == "the study starts from the beginning"
    checkpoint.touch()
    assert search.then() == "the search for penalties continues"
    checkpoint.with_suffix(".json").touch()
    assert search.then() == "the training of the last model continues"
    assert search.of(replace(agreement, rows=agreement.rows + 1)) != checkpoint
    assert search.then() == "the study starts from the beginning"
    assert len(search.files()) == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_with_many_features_the_last_model_goes_on_where_it_was(files, tmp_path, monkeypatch, capsys):
    """With many features, the training of the last model continues where it was interrupted.

    The search is not repeated, and all bits of the model are those of a study that was not interrupted.
    """
    monkeypatch.setattr("fedbilevel.estimators.fold_models.WIDE", 5)
    given, place, whole = study("logistic", rounds=6, penalty="feature"), tmp_path / "run", tmp_path / "whole"
    serve(given, Nodes(client_app(given), files), {"out": str(whole), "poll": 0.1})
    with pytest.raises(Killed):
        serve(given, killed_at("gradient", 7, Nodes(client_app(given), files)), {"out": str(place), "poll": 0.1})
    assert phases(place).count("gradient") == 2
    capsys.readouterr()
    with pytest.warns(ConvergenceWarning, match="validation loss .* 6 rounds"):
        serve(given, Nodes(client_app(given), files), {"out": str(place), "poll": 0.1})
    assert "found a saved search at" in capsys.readouterr().out
    assert phases(place).count("local_updates") == 6
    assert phases(place).count("gradient") == phases(whole).count("gradient")
    assert (place / "model.json").read_bytes() == (whole / "model.json").read_bytes()
    assert not [*place.glob("search-*")]

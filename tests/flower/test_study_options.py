"""The commands of a study: `flower new` writes its app and has options for it, and `flower check` checks a site."""

import re
import tomllib
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from flwr.app import Context, RecordDict
from study_nodes import Nodes

from fedbilevel.cli import main
from fedbilevel.estimators import Study, StudyModel
from fedbilevel.experiments import read_study
from site_tables import SITES, study, tables

pytestmark = pytest.mark.usefixtures("posed_once")

NEW = ["flower", "new", "app", "--estimator", "logistic", "--target", "ill", "--sites", ",".join(SITES)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_the_command_writes_an_app_whose_parties_play_the_study(files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "app")
    more = [
        "--categorical",
        "code",
        "--patient",
        "patient",
        "--drop",
        "days,died",
        "--positive",
        "no",
        "--rounds",
        "3",
        "--holdout",
        "0.25",
    ]
    assert main([*NEW, *more]) == 0
    assert "app   app" in capsys.readouterr().out
    given = read_study(tmp_path / "app" / "app" / "study.toml")
    assert given == study("logistic", positive="no", rounds=3, cv=5, holdout=0.25)
    config = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert not {"settings", "quorum"} & config.keys()
    client, server = (import_module(f"app.{party}_app").app for party in ("client", "server"))
    context = Context(1, 1, {}, RecordDict(), config | {"out": "run"})
    server(Nodes(client, files), context)
    assert "predicts the probability of ill = no" in capsys.readouterr().out
    assert "Positive class: `no`" in Path("run/model-card.md").read_text()
    model = StudyModel.load("run/model.json")
    np.testing.assert_allclose(model.estimator.coef_, given.fit(tables()).estimator.coef_, atol=1e-10)
    assert "partition-id=2 site='west' table=" in (tmp_path / "app" / "README.md").read_text()


def test_the_command_holds_a_site_out(files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert (
        main([*NEW, "--categorical", "code", "--drop", "days,died", "--patient", "patient", "--holdout", "west"]) == 0
    )
    assert read_study(tmp_path / "app" / "app" / "study.toml").holdout == "west"
    assert main(["flower", "check", "app", "--node-config", f"partition-id=2 table='{files[2]['table']}'"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "0 rows for the model, 74 held out" in said
    assert "sends age: nothing" in said


def test_a_site_looks_at_what_it_will_tell(files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*NEW, "--categorical", "code", "--drop", "days,died,patient"]) == 0
    assert main(["flower", "check", "app", "--node-config", f"partition-id=0 table='{files[0]['table']}'"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "client 0, north" in said
    assert "sends dose: nothing" in said
    assert "digest" not in said  # `flower check` shows the number of rows, and not this array of the protocol
    assert ", and that there are rarer categories" in said
    frame = pd.read_csv(files[0]["table"])
    frame.assign(code=np.arange(len(frame)) // 3).to_csv("rare.csv", index=False)
    assert main(["flower", "check", "app", "--node-config", "partition-id=0 table='rare.csv'"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "sends code: only that each category has too few rows to be named; 100% of rows" in said
    Path("latin.csv").write_bytes(b"age,ill\n60,yes\xfc\n")
    Path("empty.csv").touch()
    wrongs = {"latin.csv": "the file is not a text in UTF-8", "empty.csv": "has no lines"}
    for source in ("nowhere.csv", "latin.csv", "empty.csv", "nowhere.module:table", "json:nothing"):
        assert main(["flower", "check", "app", "--node-config", f"partition-id=0 table='{source}'"]) == 2
        printed = " ".join(capsys.readouterr().err.split())
        wrong = wrongs.get(source, "cannot be read")
        assert re.search(f"node configuration: table:? '?{re.escape(source)}'?(, line 2:)? {wrong}", printed)
        assert printed.count(wrong) == 1


@pytest.mark.parametrize(
    ("column", "wrong", "said"),
    [
        (
            "days",
            -3,
            "column 'days' has a value that is not allowed (-3.0) in 2 rows; allowed: a time from 0 to 1e+100",
        ),
        ("days", "inf", "column 'days' has a value that is not allowed (inf) in 2 rows; allowed: a time from 0"),
        ("died", 2, "column 'died' has a value that is not allowed ('2') in 2 rows; allowed: 1 if the event came"),
        (
            "age",
            "-inf",
            "column 'age' has a value that is not allowed (-inf) in 2 rows; allowed: a number from -1e+100",
        ),
    ],
)
def test_a_site_finds_values_that_are_not_allowed_before_a_study_begins(
    column, wrong, said, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    of_cox = ["--estimator", "cox", "--target", "days", "--event", "died", "--sites", ",".join(SITES), "--drop", "ill"]
    assert main(["flower", "new", "app", *of_cox, "--categorical", "code", "--patient", "patient"]) == 0
    frame = tables()["north"]
    frame[column] = frame[column].astype(object)
    frame.loc[[4, 9], column] = wrong
    frame.to_csv("north.csv", index=False)
    assert main(["flower", "check", "app", "--node-config", "partition-id=0 table='north.csv'"]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_every_field_of_a_study_is_an_option(tmp_path, monkeypatch, capsys):
    """Each field of a study is an option of `flower new`, whose help has the words of the class."""
    monkeypatch.chdir(tmp_path)
    values = {"sites": "north, south,2", "categorical": "a,b", "columns": "a,b,c", "drop": "d", "gaps": "-9,?"}
    values |= {"estimator": "cox", "target": "days", "event": "died", "patient": "p", "penalty": "column", "cv": "3"}
    values |= {"rounds": "50", "random-state": "4", "min-count": "5", "holdout": "2", "times": "5,20.5"}
    several = ["--groups", "lab=a,b", "--groups", "rest=c", "--no-offsets"]
    assert main(["flower", "new", "app", *(f"--{name}={value}" for name, value in values.items()), *several]) == 0
    expected = Study(
        estimator="cox", sites=("north", "south", "2"), target="days", event="died", patient="p", cv=3, rounds=50,
        categorical=("a", "b"), columns=("a", "b", "c"), drop=("d",), gaps=("-9", "?"), offsets=False,
        penalty="column", groups={"lab": ("a", "b"), "rest": ("c",)}, random_state=4, min_count=5, holdout="2",
        times=(5, 20.5),
    )  # fmt: skip
    assert read_study(tmp_path / "app" / "app" / "study.toml") == expected
    assert {field.name for field in fields(Study)} == {"positive"} | {
        name.replace("-", "_") for name in ("groups", "offsets", *values)
    }
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["flower", "new", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "--gaps A,B,… texts that mean a missing value, in addition to those that pandas reads as missing (default: ?)"
        in said
    )
    assert "--positive VALUE for logistic regression, the class whose probability is predicted" in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--cv", "1"], "cv = 1 .* a whole number of folds, 2 or more"),
        (["--cv", "some"], "cv = 'some' .* a whole number of folds"),
        (["--min-count", "2.5"], "min_count = 2.5 .* a positive integer"),
        (["--times", "9,5"], "times = .* rising numbers above 0"),
        (["--groups", "age"], "--groups = 'age' .* NAME=A,B"),
        (["--groups", "a=age", "--groups", "b=age"], "groups = .* each column once"),
        (["--task", "quadratic"], "--estimator = 'with --task' .* a study has no task"),
        (["--penalty", "some"], "penalty = 'some' .* one or column or feature"),
        (["--event", "died"], "event = 'died' .* only Cox's model"),
    ],
)
def test_options_that_do_not_fit_are_named(options, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*NEW, *options]) == 2
    assert re.search(words, " ".join(capsys.readouterr().err.split()))
    assert not (tmp_path / "app").exists()


def test_an_option_that_every_study_needs_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["flower", "new", "app", "--estimator", "logistic", "--sites", "a,b"]) == 2
    assert "a study needs --target: the column that is predicted" in " ".join(capsys.readouterr().err.split())

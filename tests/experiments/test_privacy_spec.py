"""Do runs, comparisons and sweeps apply the terms of privacy in a spec, and show what ε they cost?"""

import json
import math

import pytest
from command_line import outcome

import fedbilevel as fb
from fedbilevel import experiments
from fedbilevel.cli import main
from fedbilevel.errors import ConfigurationError
from fedbilevel.experiments.compare import comparison, load_groups
from fedbilevel.experiments.federation import require_real
from refusals import refuses

SMALL = ["clients=4", "samples=[3, 3]", "client_lr=0.01", "server_lr=0.05", "run.eval_every=2"]
TERMS = ["privacy.clip=1", "privacy.noise_multiplier=20", "privacy.delta=1e-5"]
PRIVACY = fb.Privacy(clip=1, noise_multiplier=20, delta=1e-5)


def command(*words, settings=(*SMALL, *TERMS)):
    return main([*words, *(word for setting in settings for word in ("--set", setting))])


def spec(*settings):
    return experiments.configure(task="quadratic", algorithm="simfbo", settings=[*SMALL, *settings])


def test_a_run_has_the_terms_of_its_spec_and_says_what_they_cost(tmp_path, capsys):
    assert command("run", "quadratic", "--algorithm", "simfbo", "--rounds", "4", "--out", str(tmp_path / "run")) == 0
    said, loaded = capsys.readouterr().out, experiments.load_run(tmp_path / "run")
    assert loaded.spec.privacy.terms == PRIVACY
    assert loaded.history["epsilon"].tolist() == [PRIVACY.epsilon_after(replies) for replies in (0, 2, 4)]
    assert f"ε = {PRIVACY.epsilon_after(4):.4g} at δ = 1e-05" in said
    assert loaded.ledger["delta"] == 1e-5
    whole = spec(*TERMS, "run.rounds=6")
    experiments.run(whole, tmp_path / "whole", plot=False)
    experiments.resume(tmp_path / "run", rounds=6, plot=False)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


@pytest.mark.checked
def test_a_run_that_its_budget_ends_is_finished_and_exits_with_6(tmp_path, capsys):
    budget = f"privacy.budget={PRIVACY.epsilon_after(3)!r}"
    command_line = ("run", "quadratic", "--algorithm", "simfbo", "--rounds", "9", "--out", str(tmp_path / "run"))
    assert command(*command_line, settings=[*SMALL, *TERMS, budget]) == 6
    said = capsys.readouterr()
    assert "privacy budget spent after round 3" in said.out.replace("\n", " ")
    assert said.err == ""
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rounds"] == 3
    assert main(["run", "--resume", str(tmp_path / "run"), "--quiet"]) == 6


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        (["privacy.clip=0"], ("privacy.clip", 0, "above 0")),
        (["privacy.clip=true"], ("privacy.clip", True)),
        (["privacy.clip=1"], ("privacy.noise_multiplier", None, "privacy.clip")),
        (["privacy.budget=4"], ("privacy.clip", None, "privacy.budget")),
        (["privacy.clipp=1"], ("field of privacy", "clipp", "", "clip")),
    ],
)
def test_wrong_terms_are_named(settings, refusal):
    with refuses(*refusal):
        spec(*settings)


def test_all_wrong_terms_are_named_at_once():
    with pytest.raises(ConfigurationError) as error:
        spec("privacy.clip=nan", "privacy.delta=1")
    clip, delta = error.value.wrong
    assert (clip.path, delta.path, delta.got) == ("privacy.clip", "privacy.delta", 1)
    assert math.isnan(clip.got)
    assert "below 1" in delta.allowed


def test_a_federation_takes_no_terms_from_a_spec():
    with refuses("", fact="node configuration", where="[privacy]"):
        require_real(spec(*TERMS))


@pytest.mark.slow
def test_runs_are_compared_by_what_they_cost(tmp_path):
    """A comparison shows the ε of each run, here after two replies.

    A run without privacy has no ε. If no run has privacy, there is no such column.
    """
    terms = {f"privacy.noise_multiplier={z}": fb.Privacy(1, z, 1e-5).epsilon_after(2) for z in (20, 50)}
    for i, more in enumerate([[TERMS[0], noise, TERMS[2]] for noise in terms] + [[]]):
        experiments.run(spec(*more, "run.rounds=2"), tmp_path / f"run-{i}", plot=False)
    groups = load_groups([tmp_path / f"run-{i}" for i in range(3)])
    columns = {column.heading: column.cells for column in comparison(groups).columns}
    assert [list(cell.values) for cell in columns["ε"]] == [*([cost] for cost in terms.values()), []]
    assert str(columns["ε"][-1]) == "–"
    assert "ε" not in {column.heading for column in comparison(groups[2:]).columns}


def test_terms_are_swept_and_each_point_says_its_epsilon(tmp_path, capsys):
    grid = ["sweep", "quadratic", "--algorithm", "simfbo", "--rounds", "2", "--out", str(tmp_path / "sweep")]
    fixed = [*SMALL, TERMS[0], TERMS[2]]
    assert command(*grid, "--grid", "privacy.noise_multiplier=20,50", settings=fixed) == 0
    said = capsys.readouterr().out
    for z in (20, 50):
        assert f"{fb.Privacy(1, z, 1e-5).epsilon_after(2):.4g}" in said
    assert "ε" in said

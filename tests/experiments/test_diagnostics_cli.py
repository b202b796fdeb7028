"""Do `fedbilevel check` and `fedbilevel diagnose` print what the library's functions return?"""

from __future__ import annotations

import re
import shlex

import pytest

from fedbilevel import cli
from fedbilevel.authoring import ALGORITHMS
from fedbilevel.cli.run import _described
from fedbilevel.core.tables import changed, plain
from fedbilevel.experiments import configure

SMALL = ["quadratic", "--set", "task.clients=3", "--set", "samples=[3, 3]"]


@pytest.mark.slow
@pytest.mark.checked
def test_check_prints_the_report_with_the_methods_asked_for(run) -> None:
    code, shown, error = run(
        "check", *SMALL, "--algorithm", "fednest", "--set", "fednest.hypergradient.solver=cg", "--draws", 2
    )
    assert (code, error) == (0, "")
    errors = {
        line.split()[0]: float(line.split()[2]) for line in shown.splitlines() if re.match(r"(fednest|cg) ", line)
    }
    assert errors["cg"] < 1e-10
    assert errors["fednest"] < 0.01  # its solver stops at a residual of 1e-3, and full batches leave no noise


@pytest.mark.checked
@pytest.mark.parametrize("source", ["task", "spec"])
def test_diagnose_prints_commands_that_ask_for_what_it_found(source, run, monkeypatch, tmp_path) -> None:
    """The commands that `diagnose` prints set the fields that it found, both for a task and for a spec.

    If the spec is of one algorithm, its fields must not appear in the command of another algorithm.
    """
    spec = tmp_path / "spec.toml"
    spec.write_text(configure(task="quadratic", settings=SMALL[2::2]).to_toml())
    given = SMALL if source == "task" else ["--spec", spec]
    from fedbilevel.diagnostics import diagnose as module

    reports = []
    measure = module.diagnose
    monkeypatch.setattr(module, "diagnose", lambda *args, **more: reports.append(measure(*args, **more)) or reports[0])
    asked = ["--algorithm", "simfbo", "--algorithm", "fednest", "--set", "simfbo.batch_size=none"]
    code, shown, error = run("diagnose", *given, "--seed", 2, *asked)
    assert (code, error) == (0, "")
    commands, _, why = shown.partition("\n\n")
    assert "κ = " in why
    assert "aggitd" not in why
    commands = re.split(r"\n(?=fedbilevel run)", commands)
    for name, command in zip(("simfbo", "fednest"), commands, strict=True):
        _, *words = shlex.split(command.replace("\\\n", " "))
        found, _ = _described(cli.parser().parse_args(words))
        assert (found.run.seed, found.task.fields["seed"], found.task.fields["clients"]) == (2, 2, 3)
        fields = reports[0].fields(name)
        made = changed(ALGORITHMS[name], fields, "algorithm", [])
        for field in fields:
            assert_near(found.algorithm.fields[field], plain(getattr(made, field)))


@pytest.mark.slow
def test_diagnose_says_all_else_on_request(run) -> None:
    """`diagnose` prints at most ten lines, and `--all` prints more below the same lines."""
    _, short, _ = run("diagnose", "quadratic")
    _, whole, _ = run("diagnose", "quadratic", "--all")
    assert whole.startswith(short)
    assert len(short.splitlines()) <= 10
    assert "aggitd: fb.AggITD(inner=" in whole


def assert_near(got: object, wanted: object) -> None:
    """Check that two values are equal, except that numbers may be rounded to three digits.

    Rounding to three digits changes a number by at most half of the last digit, which is 0.5 % of 1.00.
    """
    if isinstance(wanted, dict):
        assert isinstance(got, dict)
        assert got.keys() == wanted.keys()
        for name, value in wanted.items():
            assert_near(got[name], value)
    else:
        assert got == (pytest.approx(wanted, rel=5.1e-3) if isinstance(wanted, float) else wanted)


@pytest.mark.slow
def test_diagnose_tells_norms_of_replies_and_what_noise_does(run) -> None:
    """`diagnose --replies 2` shows the norms of the replies of two rounds, and the effect of noise on x and y.

    SimFBO has one phase, whose updates have 5 + 8 + 8 numbers in three parts. Two clients make 4 replies in two rounds,
    and a cohort of five makes 10. Noise of 10·100 on each of 21 numbers has the norm 1000·√21.
    """
    terms = ("--set", "privacy.clip=10", "--set", "privacy.noise_multiplier=100", "--set", "privacy.delta=1e-5")
    asked = ("diagnose", "quadratic", "--algorithm", "simfbo", "--replies", 2, "--set", "clients=3")
    code, shown, _ = run(*asked, *terms, "--cohort", 2)
    assert code == 0
    lines = [line.split() for line in shown.splitlines()]
    assert [line[1:4] for line in lines if line[:1] == ["local_updates"]] == [
        ["all", "21", "4"], ["x", "5", "4"], ["y", "8", "4"], ["v", "8", "4"]
    ]  # fmt: skip
    assert f"noise of zC = 1e+03 per number has a norm of {1000 * 21**0.5:.3g}" in shown
    assert shown.count("noise hides the progress; lower steps, clip or noise_multiplier") == 2
    _, shown, _ = run(*asked)
    assert "noise" not in shown
    _, shown, _ = run(*asked, "--cohort", 5, "--set", "run.replacement=true")
    assert "local_updates  all   21       10 " in shown
    code, _, error = run(*asked, "--all")
    assert (code, error) == (2, "fedbilevel: --all cannot be given with --replies, which measures only replies\n")

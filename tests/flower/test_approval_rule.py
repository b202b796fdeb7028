"""A site with approve="FILE.toml" takes part in runs that fit the rule in the file; all others wait for a person."""

import json
import math
import re
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from functools import partial
from pathlib import Path

import federations
import pytest
from federations import memory
from study_nodes import Nodes, alone
from test_site import greeted, request

import fedbilevel as fb
from fedbilevel.core.privacy import Privacy
from fedbilevel.experiments import configure
from fedbilevel.experiments.federation import client_app as app_of_spec
from fedbilevel.experiments.federation import serve, site
from fedbilevel.experiments.study import client_app as app_of_study
from fedbilevel.flower.client import approval_rule
from fedbilevel.flower.client.approval import Approvals
from fedbilevel.flower.client.approval_rule import ApprovalRule, Proposal
from fedbilevel.flower.client.approval_rule import today as of_the_clock
from fedbilevel.flower.client.site import ClientRuntime
from fedbilevel.flower.wire import digest
from refusals import ANY, refuses
from site_tables import study

TODAY = date(2027, 1, 31)
STUDY = Proposal(study("ridge").text, "a1" * 16, False)
SPEC = Proposal(configure(task="quadratic", algorithm="simfbo", settings=["run.rounds=2"]).to_toml(), None, True)
FITS = f"""
until = {TODAY + timedelta(days=1)}
app = ["{"0" * 32}", "{"a1" * 16}"]
allow.estimator = ["logistic", "ridge"]
allow.categorical = [["sex"], ["code"]]
allow.offsets = [true]
least.sites = 3
most.rounds = 300
most.holdout = 0
"""


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr(approval_rule, "today", lambda: TODAY)


def test_today_is_the_date_in_utc():
    before, found, after = datetime.now(UTC).date(), of_the_clock(), datetime.now(UTC).date()
    assert before <= found <= after


def written(folder, text):
    (folder / "rule.toml").write_text(text)
    return folder / "rule.toml"


def mismatch(folder, text, proposal=STUDY):
    return ApprovalRule.read(written(folder, text))[0].mismatch(proposal)


def test_a_run_has_to_fit_every_entry(tmp_path):
    assert mismatch(tmp_path, FITS) == ""
    for old, new, why in (
        (f"{TODAY + timedelta(days=1)}", f"{TODAY - timedelta(days=1)}", "the rule ended on"),
        ("a1" * 16, "b1" * 16, f"the app {'a1' * 16} is not in app"),
        ("until", "privacy = true\nuntil", "this site adds no noise"),
        ('"ridge"', '"cox"', "estimator = 'ridge' is not in allow"),
        ('["code"]', '["codes"]', "categorical = ['code'] is not in allow"),
        ("[true]", "[1]", "offsets = True is not in allow"),
        ("sites = 3", "sites = 4", "sites = ['north', 'south', 'west'], but least is 4"),
        ("rounds = 300", "rounds = 299", "rounds = 300, but most is 299"),
        ("least.sites", "least.estimator", "estimator = 'ridge', but least is 3"),
        ("least.sites", "least.offsets", "offsets = True, but least is 3"),
    ):
        assert old in FITS
        assert why in mismatch(tmp_path, FITS.replace(old, new)), new


def test_an_entry_of_a_field_that_the_run_does_not_have_does_not_fit(tmp_path):
    said = mismatch(tmp_path, FITS.replace("most.rounds", "most.round"))
    assert "'round'" in said
    assert "did you mean 'rounds'?" in said


def test_fields_of_a_spec_have_paths(tmp_path):
    """A rule names a field of a spec by its path: a key with dots, in quotes or not.

    `flower check` does not know the hash of the app, and the rule's entry `app` is then not compared.
    """
    text = 'privacy = true\napp = ["a1"]\nallow."task.name" = ["quadratic"]\n[allow.algorithm]\nname = ["simfbo"]\n'
    text += "[most]\nrun.rounds = 2\n"
    assert mismatch(tmp_path, text, SPEC) == ""
    assert "is not in allow" in mismatch(tmp_path, text.replace('"simfbo"', '"fedbio"'), SPEC)
    assert "most is 1" in mismatch(tmp_path, text.replace("rounds = 2", "rounds = 1"), SPEC)
    assert "has no hash" in mismatch(tmp_path, text, SPEC._replace(app=""))
    assert "'estimator'" in mismatch(tmp_path, FITS, SPEC)


def test_the_rule_of_the_page_is_one(tmp_path):
    """The rule in docs/how-to/approval-rule.md can be read, and approves its study until its last day."""
    page = (Path(__file__).parents[2] / "docs/how-to/approval-rule.md").read_text()
    (text,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    rule, _ = ApprovalRule.read(written(tmp_path, text))
    (app,) = rule.app
    posed = partial(study, "logistic", target="disease", drop=(), categorical=("sex", "cp"))
    proposal = Proposal(posed(columns=("age", "sex", "cp")).text, app, False)
    assert rule.mismatch(proposal) == ""
    assert replace(rule, until=TODAY).mismatch(proposal) == ""
    assert replace(rule, until=TODAY - timedelta(days=1)).mismatch(proposal)
    assert "columns" in rule.mismatch(Proposal(posed(columns=("age", "sex", "cp", "diagnosis")).text, app, False))


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ('allows.estimator = ["ridge"]', ("entry", "allows", "", "allow")),
        ("most.rounds = 3", ("allow and app", "missing")),
        ('allow.estimator = "ridge"', ("allow.estimator", "ridge")),
        ("allow.estimator = []", ("allow.estimator", [])),
        ("allow = 3", ("allow", 3)),
        ('app = []\nallow.estimator = ["ridge"]', ("app", [])),
        ('app = ["a1"]\n[allow.task]', ("table task", "empty")),
        ('app = ["a1"]\n[most.run]\n[least]\nsites = 2', ("table run", "empty")),
        ('app = ["a1"]\n[most]', ("most", "an empty table")),
        (f'app = ["a1"]\nmost.rounds = 1{"0" * 400}', ("bound of rounds", 10**400)),
        ('app = "a1"', ("app", "a1")),
        ('app = ["a1"]\nuntil = "2027-06-30"', ("until", "2027-06-30")),
        ('app = ["a1"]\nuntil = 2027-06-30T10:00:00', ("until", datetime(2027, 6, 30, 10))),
        ('app = ["a1"]\nprivacy = 1', ("privacy", 1)),
        ('app = ["a1"]\nleast.sites = "3"', ("bound of sites", "3")),
        ('app = ["a1"]\nmost.rounds = nan', ("bound of rounds", math.nan)),
        ('allow."a.b" = [1]\nallow.a.b = [2]', ("path", "a", "each field once")),
        ("until = ", ("", ANY, "cannot be read")),
    ],
)
def test_a_wrong_rule_is_refused_before_the_site_starts(text, refusal, tmp_path):
    path = written(tmp_path, text)
    with refuses(*refusal, where=f"rule {path}"):
        federations.site(federations.Steps(), 0, folder=tmp_path, approve=str(path))


def test_a_node_configuration_names_the_rule(tmp_path):
    spec, node = configure(task="quadratic", algorithm="simfbo"), {"partition-id": 0, "state-folder": str(tmp_path)}
    path = str(written(tmp_path, 'allow.task.name = ["quadratic"]'))
    assert site(spec, {}, node | {"approve": path}).approve == path
    with refuses("node configuration: state-folder", "none", path):
        site(spec, {}, {"partition-id": 0, "approve": path})
    with refuses("node configuration: approve", "rule", "the .toml file of a rule"):
        site(spec, {}, node | {"approve": "rule"})
    folder = folder_with_the_name_of_a_rule(tmp_path)
    with refuses("", fact="Is a directory", where=f"rule {folder}"):
        site(spec, {}, node | {"approve": str(folder)})
    with refuses("", fact="home", where="rule ~nouser/rule.toml"):
        site(spec, {}, node | {"approve": "~nouser/rule.toml"})


def folder_with_the_name_of_a_rule(folder):
    (folder / "folder.toml").mkdir()
    return folder / "folder.toml"


def test_true_is_not_1_within_lists_and_tables(tmp_path):
    for allowed, text, same in (
        ("[[1]]", '{"field": [true]}', False),
        ("[[true]]", '{"field": [true]}', True),
        ("[[1, 2]]", '{"field": [1]}', False),
        ("[{a = 1}]", '{"field": {"a": true}}', False),
        ("[{a = 1}]", '{"field": {"a": 1.0}}', True),
        ("[{a = 1}]", '{"field": {"b": 1}}', False),
    ):
        assert (mismatch(tmp_path, f"allow.field = {allowed}", Proposal(text, "", False)) == "") is same, allowed


def test_a_number_of_a_run_that_no_float_holds_is_above_every_bound(tmp_path):
    said = mismatch(tmp_path, 'app = ["a1"]\nmost.rounds = 3', Proposal(f'{{"rounds": 1{"0" * 400}}}', "a1", False))
    assert "but most is 3" in said


def test_without_the_hash_of_the_app_the_check_says_what_it_depends_on(tmp_path):
    """If a check does not know the app's hash, it says that the rule approves the run only if `app` has this hash."""
    with_app, without = written(tmp_path, FITS), tmp_path / "without.toml"
    without.write_text('allow.estimator = ["ridge"]')
    approvals, unknown = Approvals(tmp_path), STUDY._replace(app=None)
    assert approvals.described(unknown, str(with_app)).endswith("approves, if the app's hash is in app")
    assert approvals.described(STUDY, str(with_app)).endswith("approves")
    assert approvals.described(unknown, str(without)).endswith("approves")


def test_without_its_file_a_rule_approves_nothing_and_persons_still_do(tmp_path, caplog):
    """A site whose rule has no file starts, and takes part only in runs that a person has approved.

    Its log says at the start, and with the refusals, that there is no such file.
    """
    caplog.set_level("INFO")
    name, rule = digest(STUDY.text), tmp_path / "rule.toml"
    client = runtime(tmp_path, rule, subject=STUDY.text)
    assert f"rule {rule}: there is no such file" in caplog.text
    caplog.clear()
    refused = [client.respond(request(client), memory()) for _ in range(5)]
    assert {one.code for one in refused} == {"approval"}
    assert "no such file" not in refused[0].refused
    assert caplog.text.count(f"rule {rule}: there is no such file") == 3  # the first, second and fourth refusal
    Approvals(tmp_path).change(name, "Ada", approve=True)
    client = runtime(tmp_path, rule, subject=STUDY.text)
    assert client.respond(request(client), memory()).refused == ""


def runtime(folder, rule, **more):
    return ClientRuntime(
        federations.site(federations.Steps(), 0, folder=folder, approve=str(rule), **more), app="a1" * 16
    )


def lines(folder):
    return [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]


def test_the_audit_says_by_which_rule_a_run_was_approved(tmp_path):
    """The audit has the file and the hash of the rule that approved a run, or the person who approved it.

    The file is read for each request, so that a change takes effect at once. A person can also approve a run that does
    not fit the rule.
    """
    rule, name = written(tmp_path, FITS), digest(STUDY.text)
    client = runtime(tmp_path, rule, subject=STUDY.text)
    assert client.respond(request(client), memory()).refused == ""
    assert (tmp_path / f"approved-{name}.txt").read_text() == STUDY.text
    assert not (tmp_path / f"asked-{name}.txt").exists()
    written(tmp_path, FITS.replace('"ridge"', '"cox"'))
    refused = client.respond(request(client), memory())
    assert refused.code == "approval"
    assert "ridge" not in refused.refused  # the server is not told why the run does not fit
    assert "it does not fit rule" in client.approval()
    assert "estimator = 'ridge' is not in allow" in client.approval()
    assert (tmp_path / f"asked-{name}.txt").read_text() == STUDY.text
    Approvals(tmp_path).change(name, "Ada", approve=True)
    assert client.respond(request(client), memory()).refused == ""
    rule.unlink()
    assert client.respond(request(client), memory()).refused == ""  # because Ada has approved the run
    Approvals(tmp_path).change(name, "Ada", approve=False)
    assert client.respond(request(client), memory()).refused
    first, second, _, third, *_ = lines(tmp_path)
    assert (first["event"], first["by"]) == ("sent", f"rule {rule} ({digest(FITS)}) approves")
    assert (second["event"], "by" in second) == ("refused", False)
    assert third["by"].startswith("Ada approved at ")


@pytest.mark.parametrize("approve", ["rule", "ask"])
def test_own_numbers_in_a_message_need_the_approved_text(approve, tmp_path):
    """A site refuses a client's own number in a message if the approved text does not state this number.

    Otherwise a server could replace the fields that the rule bounds, or that a person has read. The number
    0.30000001192092896 is the stated bound 0.3, rounded to float32, and is accepted.
    """
    for number, (table, own, refused) in enumerate(
        (
            ("", "{}", ""),
            ("", '{"local_steps": 50}', "does not state local_steps = 50"),
            ("", '{"client_lr.x": 9.0}', "does not state client_lr.x = 9.0"),
            ("[clients]\nlocal_steps = [1, 3]", '{"local_steps": 3}', ""),
            ("[clients]\nlocal_steps = [1, 3]", '{"local_steps": 50}', "does not state local_steps = 50"),
            ("[clients]\nlocal_steps = [1, 3]", '{"client_lr.x": 9.0}', "does not state client_lr.x"),
            ("[clients.client_lr]\nx = {low = 0.1, high = 0.3}", '{"client_lr.x": 0.30000001192092896}', ""),
            ("[clients.client_lr]\nx = {low = 0.1, high = 0.3}", '{"client_lr.x": 0.31}', "client_lr.x = 0.31"),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        text = f"[task]\nname = 'one'\n{table}\n"
        rule = written(tmp_path, 'allow.task.name = ["one"]') if approve == "rule" else approve
        if approve == "ask":
            Approvals(folder).change(digest(text), "Ada", approve=True)
        method = fb.SimFBO(local_steps=1)
        client = ClientRuntime(federations.site(method, 0, folder=folder, approve=str(rule), subject=text))
        phase = next(iter(client.contract.calls.values())).phase
        response = client.respond(request(client, of=phase, own=own), memory())
        assert refused in response.refused, response.refused
        assert response.code == ("contract" if refused else "")


def test_the_numbers_of_the_site_itself_need_no_approval(tmp_path):
    """A number that the site sets itself replaces the number in a message, which then needs no approval."""
    rule = written(tmp_path, 'allow.task.name = ["one"]')
    more = {"subject": "[task]\nname = 'one'", "own": {"local_steps": 2}, "approve": str(rule), "folder": tmp_path}
    client = ClientRuntime(federations.site(fb.SimFBO(local_steps=1), 0, **more))
    phase = next(iter(client.contract.calls.values())).phase
    assert client.respond(request(client, of=phase, own='{"local_steps": 50}'), memory()).refused == ""


def test_a_rule_that_bounds_the_method_bounds_own_numbers_too(tmp_path):
    given = ["algorithm.local_steps=1", "task.clients=2", "clients.local_steps=[50, 50]"]
    text = configure(task="quadratic", algorithm="simfbo", settings=given).to_toml()
    spec, rule = Proposal(text, None, False), 'allow.task.name = ["quadratic"]\n'
    assert mismatch(tmp_path, rule, spec) == ""
    assert "clients.local_steps is given" in mismatch(tmp_path, rule + "most.algorithm.local_steps = 1", spec)
    both = rule + "most.algorithm.local_steps = 1\nallow.clients.local_steps = [[50, 50]]"
    assert mismatch(tmp_path, both, spec) == ""


def test_a_rule_may_demand_privacy(tmp_path):
    rule = written(tmp_path, f'privacy = true\napp = ["{"a1" * 16}"]')
    private = Privacy(clip=1.0, noise_multiplier=1.0, delta=1e-5)
    for number, (terms, code) in enumerate(((None, "approval"), (private, ""))):
        folder = tmp_path / str(number)
        client = runtime(folder, rule, subject="a text", privacy=terms)
        assert greeted(client, client.contract.text).code == code


def test_a_study_runs_at_sites_whose_rule_it_fits(files, tmp_path):
    given = study("ridge")
    rule = written(tmp_path, 'allow.estimator = ["ridge"]\nleast.sites = 3')
    every = {"state-folder": str(tmp_path / "state"), "approve": str(rule)}
    assert alone(given, Nodes(app_of_study(given), files, every)).estimator.coef_.size
    by = {line.get("by") for line in lines(tmp_path / "state")}
    assert by == {f"rule {rule} ({digest(rule.read_text())}) approves"}


def test_own_numbers_of_a_spec_reach_sites_whose_rule_it_fits(tmp_path):
    given = ["task.clients=2", "run.rounds=1", "clients.local_steps=[1, 3]", "clients.client_lr.x=[0.01, 0.1]"]
    spec = configure(task="quadratic", algorithm="simfbo", settings=given)
    rule = written(tmp_path, 'allow.task.name = ["quadratic"]')
    every = {"min-batch-size": 1, "min-local-samples": 1, "state-folder": str(tmp_path), "approve": str(rule)}
    serve(spec, Nodes(app_of_spec(spec), [{}, {}], every), {"out": str(tmp_path / "run"), "deadline": 20.0})
    assert {line["event"] for line in lines(tmp_path)} == {"sent"}

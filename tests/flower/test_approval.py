"""A site with approve="ask" takes part in what a person there has approved, and in nothing else."""

import json
import re

import federations
import pytest
from federations import memory
from study_nodes import Nodes, alone
from test_site import greeted, request

import fedbilevel as fb
from fedbilevel.cli import main
from fedbilevel.core.errors import ExchangeError
from fedbilevel.estimators import Study
from fedbilevel.experiments import configure, read_spec
from fedbilevel.experiments.federation import client_app as app_of_spec
from fedbilevel.experiments.federation import serve, site
from fedbilevel.experiments.study import client_app as app_of_study
from fedbilevel.flower.client.approval import Approvals
from fedbilevel.flower.client.approval_rule import Proposal
from fedbilevel.flower.client.audit import Audit
from fedbilevel.flower.client.limits import Limits
from fedbilevel.flower.client.site import ClientRuntime
from fedbilevel.flower.refusal import Code, Refusal
from fedbilevel.flower.wire import digest
from refusals import codes, raises_with, refuses
from site_tables import study

STEPS = federations.Steps()
TEXT = "min over x of f, as agreed with north on Monday"
HASH = digest(TEXT)


def runtime(folder, **more):
    return ClientRuntime(federations.site(STEPS, 0, folder=folder, approve="ask", **more))


def approve(folder, *words):
    return main(["flower", "approve", str(folder), *words])


def events(folder):
    return [json.loads(line)["event"] for line in (folder / "audit.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("subject", ["", TEXT])
def test_what_is_not_approved_gets_no_reply(subject, tmp_path, capsys):
    """A site refuses a greeting, a phase and a request for metrics until a person has approved the run.

    The refusal has the run's hash and the command that approves it, and no path of the site. An approval can be
    withdrawn. The audit has a line for each request and each change of the approval.
    """
    client = runtime(tmp_path, subject=subject)
    name = digest(subject or client.general.text)
    for ask in (
        lambda: greeted(client, client.contract.text),
        lambda: client.respond(request(client), memory()),
        lambda: client.respond(request(client, phase="per-client metrics"), memory()),
    ):
        response = ask()
        assert (response.code, response.payload, response.contract, response.metrics) == ("approval", b"", "", "{}")
        remedy = f"to approve it: fedbilevel flower approve FOLDER {name} --by NAME"
        assert response.refused == f"{name} is not approved at this site; {remedy}"
        assert str(tmp_path) not in response.refused
    assert json.loads((tmp_path / "client-0-requests.json").read_text())["total"] == 3  # refused requests count, too
    assert (tmp_path / f"asked-{name}.txt").read_text() == (subject or client.general.text)
    assert approve(tmp_path, name, "--by", "Dr. Ada") == 0
    assert f"asked-{name}.txt" in capsys.readouterr().out
    assert client.respond(request(client), memory()).refused == ""
    assert approve(tmp_path, name, "--by", "Dr. Ada", "--withdraw") == 0
    assert client.respond(request(client), memory()).code == "approval"
    assert events(tmp_path) == ["refused"] * 3 + ["approved", "sent", "withdrawn", "refused"]
    assert Audit(tmp_path).verify().broken == ""
    line, sent = map(json.loads, (tmp_path / "audit.jsonl").read_text().splitlines()[3:5])
    assert (line["subject"], line["by"]) == (name, "Dr. Ada")
    assert sent["by"].startswith("Dr. Ada approved at 20")


def test_all_is_the_default_and_asks_nobody(tmp_path):
    """A site replies without an approval if its field `approve` is left out, which means "all"."""
    assert ClientRuntime(federations.site(STEPS, 0)).respond(request(runtime(tmp_path)), memory()).refused == ""


def test_without_a_folder_nothing_is_approved(tmp_path):
    client = ClientRuntime(federations.site(STEPS, 0, approve="ask", subject=TEXT))
    assert "it has no state-folder" in greeted(client, client.contract.text).refused
    with refuses("Site.approve", "some", "'ask', 'all'"):
        federations.site(STEPS, 0, approve="some")


def test_floors_are_not_told_before_approval(tmp_path):
    """Before an approval a site does not say that it has fewer samples than its floor, since this tells of its data."""
    limits = Limits(min_local_samples=7)
    assert greeted(runtime(tmp_path, subject=TEXT, limits=limits), "").code == "approval"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["12", "--by", "Ada"], r"HASH = '12' .* 32 hexadecimal digits"),
        (["g" * 32, "--by", "Ada"], "HASH = 'g"),
        ([HASH, "--by", ""], "--by = '' .* the name"),
        ([HASH, "--by", "Ada\n", "--withdraw"], "--by = .* the name"),
        ([HASH, "--by", "Ada", "--withdraw"], f"HASH = '{HASH}' .* the hash of a text that is approved"),
    ],
)
def test_a_wrong_approval_is_named(words, said, tmp_path, capsys):
    assert approve(tmp_path, *words) == 2
    assert re.search(said, " ".join(capsys.readouterr().err.split()))
    assert not (tmp_path / "approvals.json").exists()
    assert not (tmp_path / "audit.jsonl").exists()


def test_a_folder_that_is_not_there_is_no_new_one(tmp_path, capsys):
    assert approve(tmp_path / "stat", HASH, "--by", "Ada") == 2
    assert "a folder" in capsys.readouterr().err
    assert not (tmp_path / "stat").exists()


def test_damaged_approvals_approve_nothing(tmp_path):
    client = runtime(tmp_path, subject=TEXT)
    for text in ("", "[]", "{", f'{{"{HASH}": 3}}'):
        (tmp_path / "approvals.json").write_text(text)
        assert client.respond(request(client), memory()).refused
    Approvals(tmp_path).path.unlink()
    Approvals(tmp_path).change(HASH, "Ada", approve=True)
    assert client.respond(request(client), memory()).refused == ""


def test_a_server_does_not_fill_the_folder_with_what_it_asks(tmp_path):
    """Of 30 texts that are not approved, the folder keeps 20, as `approval.TEXTS` allows."""
    for number in range(30):
        with pytest.raises(Refusal):
            Approvals(tmp_path).require(Proposal(f"{TEXT} {number}", "", False), "ask")
    assert len(list(tmp_path.glob("asked-*.txt"))) == 20


# Specs

APP = configure(task="quadratic", algorithm="simfbo", settings=["task.clients=2", "run.rounds=2"])


def nodes_of(app, folders):
    free = {"min-batch-size": 1, "min-local-samples": 1, "approve": "ask"}
    return Nodes(app, [free | {"state-folder": str(folder)} for folder in folders])


def test_a_spec_is_approved_with_the_settings_of_the_run(tmp_path, capsys, monkeypatch):
    """A person approves a spec with all its settings.

    A server may set another number of rounds. The spec then has another hash, which is not approved.
    """
    monkeypatch.chdir(tmp_path)
    folders = [tmp_path / "0", tmp_path / "1"]
    (tmp_path / "spec.toml").write_text(APP.to_toml())
    spec = read_spec(tmp_path / "spec.toml")
    config = "min-batch-size=1 min-local-samples=1 partition-id=0 approve='ask'"
    for folder in folders:
        folder.mkdir()
        check = ["flower", "check", "spec.toml", "--node-config", f"{config} state-folder='{folder}'"]
        assert main(check) == 0
        said = " ".join(capsys.readouterr().out.split())
        (name,) = re.findall(f"fedbilevel flower approve {folder} ([0-9a-f]{{32}}) --by NAME", said)
        assert approve(folder, name, "--by", "Ada") == 0
        assert main(check) == 0
        assert re.search(f"approval +{name}, which Ada approved at 20", capsys.readouterr().out)
    terms = {"deadline": 1.0, "attempts": 1, "join": 0.2}
    serve(spec, nodes_of(app_of_spec(spec), folders), {"out": "done", **terms})
    assert events(folders[0])[-1] == "sent"
    more, nodes = {"settings": "run.rounds=3"}, nodes_of(app_of_spec(spec), folders)
    for context in nodes.contexts.values():
        context.run_config.update(more)  # Flower gives the settings of a run to clients in this way
    with raises_with(ExchangeError, replies=0) as error:
        serve(spec, nodes, {"out": "more", **more, **terms})
    assert {*codes(error).values()} == {Code.APPROVAL}
    (asked,) = folders[0].glob("asked-*.txt")
    assert f"{asked.stem.removeprefix('asked-')} is not approved" in str(error.value)
    assert "rounds = 3" in asked.read_text()


def test_approval_needs_a_folder():
    with refuses("node configuration: state-folder", "none", "approve = 'ask'"):
        site(APP, {}, {"partition-id": 0, "approve": "ask"})


# Studies


def test_a_study_is_approved_once_for_both_of_its_contracts(files, tmp_path):
    """One approval of a study holds for its two contracts, before and after the sites' agreement."""
    given = study("ridge")
    every = {"state-folder": str(tmp_path / "state"), "approve": "ask"}
    with raises_with(ExchangeError, f"{digest(given.text)} is not approved") as error:
        alone(given, Nodes(app_of_study(given), files, every), attempts=1, join=0.2, deadline=1.0)
    assert {*codes(error).values()} == {Code.APPROVAL}
    text = (tmp_path / "state" / f"asked-{digest(given.text)}.txt").read_text()
    assert Study.read(text) == given
    assert events(tmp_path / "state") == ["refused"] * 3
    assert approve(tmp_path / "state", digest(given.text), "--by", "Ada") == 0
    model = alone(given, Nodes(app_of_study(given), files, every), name="a0" * 8)
    assert model.estimator.coef_.size
    lines = [json.loads(line) for line in (tmp_path / "state" / "audit.jsonl").read_text().splitlines()]
    phases = {line["phase"]: line["subject"] for line in lines if line["event"] == "sent"}
    assert phases == dict.fromkeys(["greeting", "a question", "an agreement", "derivatives"], digest(given.text))
    assert len({line["contract"] for line in lines if line["event"] == "sent"}) == 2


def test_the_refusal_of_what_is_not_approved_names_who_can_mend_it(tmp_path):
    client = runtime(tmp_path, subject=TEXT)
    refusal = client.respond(request(client), memory())
    with pytest.raises(fb.errors.FedbilevelError) as caught:
        refusal.check()
    assert "the site can fix this: read the request (asked-HASH.txt" in caught.value.line

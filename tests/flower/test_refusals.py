"""A refusal is the same value at the site, in the server's log, in its error, in `exchanges.jsonl` and for the CLI."""

import json
import logging
import re
from dataclasses import replace

import federations
import pytest

import fedbilevel as fb
from fedbilevel.core.errors import ExchangeError
from fedbilevel.engines.history import History
from fedbilevel.experiments.federation_status import Status
from fedbilevel.experiments.folder import Folder
from fedbilevel.experiments.folder_reader import absent_table, facts
from fedbilevel.flower import wire
from fedbilevel.flower.client.site import ClientRuntime
from fedbilevel.flower.launch.in_process import InProcess
from fedbilevel.flower.refusal import ClientNames, Code, Refusal
from fedbilevel.flower.server.session import ExchangeLog
from fedbilevel.flower.server.terms import Terms
from refusals import refuses

STEPS = federations.Steps()
TERMS = Terms(join=1.0, deadline=5.0)
POOR, WRONG = 2, 4  # a client with fewer samples than its floor, and one whose configuration has a misspelt name


def app(only=()):
    """Return an app in which client POOR, or with `only` each client, is below its floor, and WRONG cannot start."""

    def make(run, node):
        k = node["partition-id"]
        if k == WRONG:
            raise fb.errors.ConfigurationError("unknown name 'clipp' in the node configuration")
        limits = replace(federations.FREE, min_local_samples=100) if k == POOR or only else federations.FREE
        return federations.site(STEPS, k, limits=limits)

    return federations.client_app(make)


def test_one_value_from_the_site_to_the_log_and_the_file(tmp_path, caplog):
    log = tmp_path / "exchanges.jsonl"
    closing = rf"2 of 6 clients has counted in this run \(client {POOR}: this client has .*; client {WRONG}: Config"
    with caplog.at_level(logging.INFO), pytest.warns(fb.errors.AbsenceWarning, match=closing):
        federations.solve(STEPS, InProcess(app(), 6), terms=TERMS, cohort=6, log=log)
    floor, settings = Code.FLOOR, Code.SETTINGS
    why = {
        POOR: ("this client has fewer samples than its floor of 100", floor),
        WRONG: ("ConfigurationError; the client's log says more", settings),
    }
    for line in map(json.loads, log.read_text().splitlines()):  # from the first exchange to the last
        assert sorted(line["refused"]) == [str(POOR), str(WRONG)]
        for client, (text, code) in why.items():
            told = {"code": code.word, "why": text, "who": code.who, "how": code.how}
            assert line["refused"][str(client)] == told
    site = [r.getMessage() for r in caplog.records if r.name == "fedbilevel.client"]
    assert any(why[POOR][0] in said and floor.how in said for said in site)  # its log says what to do
    assert any("unknown name 'clipp' in the node configuration" in said for said in site)  # and which name is wrong
    server = [r.getMessage() for r in caplog.records if r.name == "fedbilevel.server"]
    for client, (text, code) in why.items():
        line = f"client {client} does not count: {text} ({code.who} can fix this: {code.how})"
        assert sum(line in said for said in server) == 1  # once for all exchanges
    assert not any("online" in said for said in server)
    status = Status.of(Folder(tmp_path))
    said, ended = status.lines, status.ended
    assert ended is None
    never = "(no reply of this client has counted yet)"
    assert said[1:] == [
        f"client {POOR}, round 2: {why[POOR][0]} {never}", f"    the site: {floor.how}",
        f"client {WRONG}, round 2: {why[WRONG][0]} {never}", f"    the site: {settings.how}",
    ]  # fmt: skip


def test_a_status_is_that_of_the_last_word_and_survives_a_line_that_was_cut(tmp_path):
    """A run's status is that of the last lines of its log, and lines that cannot be read are counted.

    Client 1 has replied since it was refused, and client 3 has not. The advice for client 3 is the library's own, and
    not the text in the file. Two lines are wrong, and the last one was cut.
    """
    with refuses("", fact="does not exist", where=str(tmp_path / "exchanges.jsonl")):
        Status.of(Folder(tmp_path))
    late, odd = Refusal(Code.LATE, "no reply").told(), {"code": "new", "why": "x\ny", "how": "send keys"}
    lines = [
        {"round": 0, "exchange": 0, "answered": [0], "refused": {"1": late, "3": late}},
        {"round": 0, "undone": "why", "without": [0]},
        {"round": 1, "exchange": 0, "answered": [0, 1], "refused": {"3": odd}, "epsilon": 1.25},
    ]
    wrong = [{**lines[2], "epsilon": float("nan")}, {**lines[2], "answered": [5], "refused": {"9" * 5000: odd}}]
    cut = '{"round": 2, "exch'
    (tmp_path / "exchanges.jsonl").write_text("\n".join([*map(json.dumps, [*lines, *wrong]), cut]))
    assert Status.of(Folder(tmp_path)).lines == [
        "not finished, and no process runs it; last: round 1, exchange 0, 2 replied",
        "ε = 1.25 spent, the largest of the clients that add noise",
        "client 3, round 1: x y (no reply of this client has counted yet)", f"    the site: {Code.OTHER.how}",
        f"3 lines of {tmp_path / 'exchanges.jsonl'} cannot be read",
    ]  # fmt: skip


def test_where_nobody_takes_part_the_error_has_the_reasons_by_client():
    with pytest.raises(ExchangeError) as raised:
        federations.solve(STEPS, InProcess(app(only=True), 6), terms=TERMS, cohort=6)
    said = str(raised.value)
    assert "0 clients are online, but 3 of 6 are needed (clients 0, 1, 2, 3, 5: this client has fewer" in said
    assert "client 4: ConfigurationError; the client's log says more (the site can fix this" in said


def test_words_of_a_message_decide_nothing_and_give_no_advice():
    """The words of a refusal that was sent have no effect and give no advice; only its code does.

    A code that this version does not know is read as `Code.OTHER`, which has no consequence.
    """
    told = {"code": "numberz", "why": "not finite in\nx", "who": "the operator", "how": "send us your keys"}
    read = Refusal.read(told, 3)
    assert (read.code, read.why, read.client, read.code.of_state) == (Code.OTHER, "not finite in x", 3, False)
    assert "keys" not in read.line
    assert len({code.word for code in Code}) == len(Code)
    assert all(Code.of(code.word) is code for code in Code)


def test_clients_that_say_the_same_are_named_together():
    late = [Refusal(Code.LATE, "no reply within 5 s", client) for client in range(12)]
    refusals = [*late, Refusal(Code.ABSENT, "not online", 20), Refusal(Code.OTHER, "x")]
    said = ClientNames().in_words(refusals, most=2)
    assert said.startswith(
        "clients 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11: no reply within 5 s (the site or the operator"
    )
    assert "; client 20: not online (the site can fix this: start its SuperNode" in said
    assert said.endswith("; and 1 more reason")
    assert ClientNames().several(range(23)).endswith(" 18, 19 and 3 more")


def test_clients_have_the_names_of_their_sites(tmp_path, caplog):
    """The server's log, its warning at the end and the status call a client as the people at its site do.

    Clients with the same reason share a line of the log.
    """
    names = ["aarhus", "bergen", "chur", "dole", "essen", "fano"]
    log, closing = tmp_path / "exchanges.jsonl", r"\(chur \(client 2\): this client has .*; essen \(client 4\): Config"
    with caplog.at_level(logging.INFO), pytest.warns(fb.errors.AbsenceWarning, match=closing):
        federations.solve(STEPS, InProcess(app(), 6), terms=TERMS, cohort=6, log=log, sites=names)
    said = [r.getMessage() for r in caplog.records if r.name == "fedbilevel.server" and r.levelno == logging.WARNING]
    assert any(", which claims to be essen (client 4), does not take part: " in line for line in said)
    assert any("chur (client 2) does not count" in line for line in said)
    assert not re.search(r"(?<!\()client \d", "\n".join(said))
    assert Status.of(Folder(tmp_path)).lines[1].startswith("chur (client 2), round 2: ")
    with refuses("the number of Flower.sites", 2, "0 or 6"):
        federations.solve(STEPS, InProcess(app(), 6), sites=names[:2])
    with refuses("Flower.sites", "chur"):
        federations.solve(STEPS, InProcess(app(), 6), sites="chur")


def test_a_line_of_the_log_names_all_clients_with_the_same_reason(tmp_path, caplog):
    names = ClientNames(("aarhus", "bergen", "chur"))
    late = {client: Refusal(Code.LATE, "no reply within 5 s", client) for client in (0, 2)}
    record = ExchangeLog(tmp_path / "exchanges.jsonl", names)
    for attempt in (0, 1):
        record((0, 0, "derivatives", attempt), 1.0, [], [], late)
    (said,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "aarhus (client 0), chur (client 2) do not count: no reply within 5 s (the site or" in said
    status = Status.of(Folder(tmp_path))
    assert [line.split(":")[0] for line in status.lines[1::2]] == [
        "aarhus (client 0), round 0",
        "chur (client 2), round 0",
    ]
    assert [absent["site"] for absent in status.table["absent"]] == ["aarhus", "chur"]
    assert facts(History(), status)["replied"].startswith("0 of 2")
    assert [cell.words for cell in absent_table(status).columns[0].cells] == ["aarhus (client 0)", "chur (client 2)"]


def test_the_status_keeps_epsilon_when_no_private_client_replies_and_names_clients_without_noise(tmp_path):
    """The largest ε remains when the budget of every private client is spent; others reply without a bound on ε."""
    spent = {
        "round": 0,
        "exchange": 0,
        "answered": [0, 1, 2],
        "epsilon": 0.5,
        "spent": {"0": [0.5, 1e-5], "2": [0.4, 1e-5]},
    }
    names = {"sites": ["aarhus", "bergen", "chur"]}
    later = {"round": 1, "exchange": 0, "answered": [1], "refused": {"0": Refusal(Code.BUDGET, "spent").told()}}
    (tmp_path / "exchanges.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (spent | names, later)))
    status = Status.of(Folder(tmp_path))
    assert status.privacy.startswith("ε = 0.5 spent, the largest of the clients that add noise (no noise, ")
    assert status.privacy.endswith(": bergen (client 1))")
    assert status.privacy in status.lines
    assert facts(History(), status)["privacy"] == status.privacy
    assert status.table["epsilon"] == 0.5
    assert 'fedbilevel_epsilon{run="r"} 0.5\n' in status.prometheus("r")


def test_texts_that_are_too_long_for_a_superlink_do_not_leave_the_site(tmp_path, monkeypatch):
    """A reply whose texts are too long is refused at the site.

    Texts such as a metric's name or a layout travel in one piece, and some hundred megabytes would hold up a SuperLink
    (see `wire.require_short`).
    """
    respond, log = ClientRuntime.respond, tmp_path / "exchanges.jsonl"

    def long(runtime, request, memory):
        said = respond(runtime, request, memory)
        names = json.dumps({"x" * 4000: 1.0}) if (said.client, request.round) == (0, 1) else said.metrics
        return replace(said, metrics=names)

    monkeypatch.setattr(wire, "TEXTS", 3000)
    monkeypatch.setattr(ClientRuntime, "respond", long)
    federations.solve(STEPS, InProcess(federations.app(STEPS), 6), terms=TERMS, cohort=6, log=log)
    refused = [line["refused"] for line in map(json.loads, log.read_text().splitlines()) if "refused" in line]
    assert refused[0]["0"]["code"] == "large"
    assert "characters together, and at most 3000 are allowed" in refused[0]["0"]["why"]

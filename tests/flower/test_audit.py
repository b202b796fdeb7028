"""The audit of a site has lines about what was sent and refused, and no value of the data.

Nothing is sent without a line. The audit can still be read after a process was killed or the disk was full, and a
change of its file is noticed.
"""

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import federations
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federations import memory
from study_nodes import Nodes
from test_site import greeted, request

import fedbilevel as fb
from fedbilevel.cli import main
from fedbilevel.core.errors import CheckpointError
from fedbilevel.core.privacy import Privacy
from fedbilevel.experiments.study import client_app as app_of_study
from fedbilevel.experiments.study import serve
from fedbilevel.flower.client import site as sites
from fedbilevel.flower.client.audit import Audit
from fedbilevel.flower.client.site import ClientRuntime, client_app
from fedbilevel.flower.launch.in_process import InProcess
from fedbilevel.flower.refusal import Code
from fedbilevel.flower.wire import METRICS, digest
from refusals import raises_with, refuses
from site_tables import SITES, study, tables

STEPS = federations.Steps()


def runtime(folder, **more):
    return ClientRuntime(federations.site(STEPS, 0, folder=folder, **more))


def lines(folder):
    return [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]


def test_a_line_says_what_left(tmp_path):
    """A line has the request, the norm and the bytes of the update that was sent, and the hash of the line before.

    The update is the gradient of a batch at x = y = 1, which is computed here without the site. The line has its
    Euclidean norm, and 24 bytes: 8 for each of its 3 numbers.
    """
    site = runtime(tmp_path)
    greeted(site, site.contract.text)
    assert site.respond(request(site), memory()).refused == ""
    assert site.respond(request(site, phase="gradient"), memory()).code == "contract"
    greeting, sent, refused = lines(tmp_path)
    key = jax.random.fold_in(jax.random.key(5), 0)
    batch = sites._samples(sites.Ragged.listed("inner", [federations.TASK.clients.inner.row(0)])).batch(key, 4)
    gradient = jax.grad(federations.TASK.problem.inner, 1)(jnp.ones(2), jnp.ones(3), batch)
    assert sent["norm"] == pytest.approx(float(np.linalg.norm(gradient)), rel=1e-12)
    common = {
        "client": 0,
        "run": federations.NAME,
        "app": "",
        "subject": digest(site.subject),
        "contract": site.contract.digest,
    }
    assert {name: value for name, value in sent.items() if name not in ("time", "norm", "before")} == {
        "event": "sent", "request": 2, **common, "round": 2, "exchange": 1, "phase": "y_gradient", "bytes": 24,
    }  # fmt: skip
    assert (greeting["event"], greeting["phase"], greeting["bytes"]) == ("sent", "greeting", 0)
    assert (refused["event"], refused["phase"], refused["code"]) == ("refused", "gradient", "contract")
    assert refused["why"].startswith("unknown phase 'gradient'")
    assert "norm" not in refused
    assert greeting["before"] == ""
    raw = (tmp_path / "audit.jsonl").read_bytes().split(b"\n")
    assert [sent["before"], refused["before"]] == [hashlib.sha256(line).hexdigest() for line in raw[:2]]


def test_a_line_has_the_privacy_that_was_spent(tmp_path):
    """A line has the ε and δ that the client's replies have spent so far.

    For one reply with z = 30 and δ = 1e-5, docs/explanation/privacy.md prints ε = 0.242. Two replies spend more.
    """
    terms = Privacy(clip=1.0, noise_multiplier=30.0, delta=1e-5)
    site = runtime(tmp_path, privacy=terms)
    for _ in range(2):
        site.respond(request(site), memory())
    first, second = lines(tmp_path)
    assert first["epsilon"] == pytest.approx(0.242, abs=5e-4)
    assert second["epsilon"] == terms.epsilon_after(2) > first["epsilon"]
    assert first["delta"] == 1e-5


def test_no_value_of_the_data_is_in_the_audit(tmp_path):
    """The lines of a run have only the known fields, and no value of a sample, rounded to four digits."""
    app = federations.app(STEPS, folder=tmp_path, tells_metrics=True, metrics_per_client={"loss": fb_loss})
    federations.solve(STEPS, InProcess(app, clients=6), metrics_per_client={"loss": fb_loss})
    entries = lines(tmp_path)
    text = json.dumps([line | {"time": ""} for line in entries])  # a time may have the digits of a sample
    assert {line["phase"] for line in entries} == {"greeting", "y_gradient", "x_gradient", METRICS}
    known = {"time", "event", "client", "request", "run", "app", "subject", "contract", "round", "exchange", "phase",
             "bytes", "norm", "before"}  # fmt: skip
    assert {name for line in entries for name in line} == known
    values = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(federations.TASK.clients.inner.values)])
    assert values.size > 50
    assert not [value for value in values if f"{value:.4g}" in text and abs(value) > 1e-3 and value % 1]


@pytest.mark.usefixtures("posed_once")
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_a_study_leaves_an_audit_at_each_site_without_values_of_its_table(files, tmp_path, capsys):
    """A site of a study has a line for each text and each update that it sent, and no number of its table in them.

    The bytes in the lines of all sites are those that the server has received. A text has no norm.
    """
    given, place = study("ridge", rounds=3, holdout=0.4, min_count=4), tmp_path / "run"
    own = [{**one, "state-folder": str(tmp_path / one["site"])} for one in files]
    serve(given, Nodes(app_of_study(given), own), {"out": str(place), "poll": 0.1})
    received = [json.loads(line) for line in (place / "exchanges.jsonl").read_text().splitlines()]
    every = {site: lines(tmp_path / site) for site in SITES}
    for site, entries in every.items():
        sent = [line["phase"] for line in entries if line["phase"] != "greeting"]
        assert sent == [line["phase"] for line in received]
        assert {line["event"] for line in entries} == {"sent"}
        assert {line["subject"] for line in entries} == {digest(given.text)}
        assert {line["phase"] for line in entries if "norm" in line} == {"derivatives"}
        text = json.dumps([line | {"time": ""} for line in entries])
        values = tables()[site][["age", "dose"]].to_numpy().ravel()
        assert not [value for value in values if f"{value:.4g}" in text and value % 1]
        assert main(["flower", "audit", str(tmp_path / site)]) == 0
        assert f"{len(entries)} lines in an unbroken chain" in capsys.readouterr().out
    sums = [
        sum(line["bytes"] for entries in every.values() for line in entries),
        sum(line["bytes_up"] for line in received),
    ]
    assert sums[0] == sums[1]


def fb_loss(x, y, batch):
    return federations.TASK.problem.outer(x, y, batch)


HOSTILE = "x" * 10**6 + "\x1b[2J\n"


def test_words_of_a_server_are_cut_and_command_no_terminal(tmp_path):
    """The audit shortens the words of a server, here of a million characters, and replaces their control characters."""
    site = runtime(tmp_path)
    for changes in ({"phase": HOSTILE}, {"run": HOSTILE}, {"contract": HOSTILE}):
        assert site.respond(request(site, **changes), memory()).refused
        assert not site.respond(request(site), memory()).refused
    assert (tmp_path / "audit.jsonl").stat().st_size < 10_000
    assert "\x1b" not in (tmp_path / "audit.jsonl").read_text()
    assert Audit(tmp_path).verify().count == 6


def test_refusals_that_cost_a_server_nothing_do_not_fill_the_disk(tmp_path):
    """Of refusals in a row, only the first, second, fourth, eighth, and so on, have a line in the audit.

    This holds for requests above a limit, of another contract, or with a name that no run has. Of the 100 refusals here
    those with the numbers 1, 2, 4, …, 64 have lines.
    """
    site = runtime(tmp_path, limits=replace(federations.FREE, max_requests=2))
    for _ in range(2):
        assert not site.respond(request(site), memory()).refused
    for number in range(100):
        changes = ({}, {"run": "no name"}, {"contract": "another"})[number % 3]
        assert site.respond(request(site, **changes), memory()).refused
    assert [line.get("refusals", 1) for line in lines(tmp_path)[2:]] == [1, 2, 4, 8, 16, 32, 64]
    assert Audit(tmp_path).verify().broken == ""
    again = runtime(tmp_path, limits=replace(federations.FREE, max_requests=3))
    assert not again.respond(request(again), memory()).refused
    assert again.respond(request(again), memory()).code == "limit"
    assert "refusals" not in lines(tmp_path)[-1]


def test_a_site_that_cannot_be_made_has_a_line(tmp_path):
    """If a site cannot be made, the audit in the folder that its node configuration names has a line about the refusal.

    The line has the text that is sent to the server. The text of the error, which may have a value of the data, is not
    in the line.
    """

    def make(run, node):
        raise ValueError("a value of 37.25 in row 3")

    grid = InProcess(client_app(make), clients=1)
    for context in grid.contexts.values():
        context.node_config["state-folder"] = str(tmp_path)
    with pytest.raises(fb.errors.ExchangeError):
        federations.solve(STEPS, grid, terms=fb_terms())
    (line, *_) = lines(tmp_path)
    assert (line["event"], line["code"], line["why"]) == ("refused", "failed", "ValueError; the client's log says more")
    assert line["app"] == hashlib.sha256(f"test_audit.py {hashed(__file__)}\n".encode()).hexdigest()[:32]


def hashed(file):
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def fb_terms():
    from fedbilevel.flower.server.terms import Terms

    return Terms(attempts=1, join=0.1, deadline=1.0)


# A disk that is full


def test_nothing_leaves_without_a_line(tmp_path, monkeypatch):
    """If the disk is too full for a line, nothing is sent.

    The part of the line that was written is removed, so that the chain is unbroken when there is room again.
    """
    site, write = runtime(tmp_path), os.write
    site.respond(request(site), memory())
    before = (tmp_path / "audit.jsonl").read_bytes()

    def full(descriptor, content):
        if b"norm" in content:
            write(descriptor, content[:30])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, content)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        response = site.respond(request(site), memory())
    assert (response.payload, response.code) == (b"", "audit")
    assert response.refused == "this client's audit cannot be written, and nothing is sent without a line in the audit"
    after = (tmp_path / "audit.jsonl").read_bytes()
    assert after.startswith(before)
    assert lines(tmp_path)[-1]["code"] == "audit"  # there was room for the line about the refusal
    assert site.respond(request(site), memory()).refused == ""
    assert Audit(tmp_path).verify().count == 3


def test_a_full_disk_is_named_at_the_server_and_once_in_the_sites_log(tmp_path, monkeypatch, caplog):
    """If a site cannot count a request because its disk is full, the server learns this, and no path of the site.

    The line for the audit cannot be written either, and the site's log does not complain about this once more.
    """
    site = runtime(tmp_path)

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        response = site.respond(request(site), memory())
    assert (response.payload, response.code) == (b"", "disk")
    assert response.refused == "a file of its state-folder cannot be read or written: No space left on device"
    (line,) = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert f"{tmp_path}/client-0-requests.json" in line
    assert Code.DISK.how in line
    assert site.respond(request(site), memory()).refused == ""


def test_a_folder_that_cannot_be_written_refuses(tmp_path, caplog):
    """A site whose audit cannot be written refuses every request, and names the audit's file in its log.

    Of three requests the first two have a line in the log. In this test a folder is in the place of the audit's file,
    because root may write to any file.
    """
    site = runtime(tmp_path)
    (tmp_path / "audit.jsonl").mkdir()
    for _ in range(3):
        assert site.respond(request(site), memory()).code == "audit"
    said = [text for text in caplog.messages if str(tmp_path / "audit.jsonl") in text]
    assert said == caplog.messages  # the log has no other line
    assert ["times since" in text for text in said] == [False, True]


def test_a_refusal_without_a_line_is_in_the_log_once(tmp_path, caplog):
    """A refusal that cannot be written to the audit is logged, and so is the error of the audit.

    Of refusals with the same reason only the first, second, fourth, and so on, are logged: two of the three here.
    """
    site = runtime(tmp_path)
    (tmp_path / "audit.jsonl").mkdir()
    for _ in range(3):
        assert site.respond(replace(request(site), contract="other"), memory()).code == "contract"
    said = ["cannot be written" in text for text in caplog.messages]
    assert said == [False, True, False, True]  # two lines for the first request, and two for the second


# A process that is killed

KILLED = """
import os, signal, sys
from pathlib import Path
from fedbilevel.flower.client.audit import Audit

write = os.write
def half(descriptor, content):
    write(descriptor, content[: len(content) // 2])
    os.kill(os.getpid(), signal.SIGKILL)

audit = Audit(Path(sys.argv[1]))
audit.append("sent", number=1)
os.write = half
audit.append("sent", number=2)
"""


def test_a_line_that_a_kill_cut_is_kept_and_said(tmp_path):
    """A line that was cut when its process was killed is kept; the next line has its number of bytes and its hash."""
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    audit, file = Audit(tmp_path), tmp_path / "audit.jsonl"
    cut = file.read_bytes()
    assert not cut.endswith(b"\n")
    report = audit.verify()
    assert (report.count, report.cut, report.broken) == (1, [2], "")
    audit.append("sent", number=3)
    assert file.read_bytes().startswith(cut + b"\n")
    raw = file.read_bytes().splitlines()
    note, last = json.loads(raw[2]), json.loads(raw[3])
    assert (note["event"], note["bytes"]) == ("cut", len(raw[1]))
    assert note["before"] == hashlib.sha256(raw[1]).hexdigest()
    assert last["before"] == hashlib.sha256(raw[2]).hexdigest()
    report = audit.verify()
    assert (report.count, report.cut, report.broken) == (3, [2], "")
    file.write_bytes(b"\n".join([raw[0], raw[1][:-1], *raw[2:], b""]))  # the cut line is a part of the chain, too
    assert audit.verify().broken.startswith("line 2 ")


# A change of the file


@pytest.fixture
def audit(tmp_path):
    audit = Audit(tmp_path)
    for number in range(5):
        audit.append("sent", number=number)
    return audit


CHANGES = {
    "a number": (lambda raw: [*raw[:2], raw[2].replace(b'"number": 2', b'"number": 9'), *raw[3:]], "line 3 "),
    "a line taken out": (lambda raw: [*raw[:2], *raw[3:]], "line 2 "),
    "the first taken out": (lambda raw: raw[1:], "line 1 "),
    "two exchanged": (lambda raw: [raw[0], raw[2], raw[1], *raw[3:]], "line 1 "),
    "a line put in": (lambda raw: [*raw[:2], b'{"event": "sent", "before": ""}', *raw[2:]], "line 2 "),
    "no JSON": (lambda raw: [*raw[:2], b"{", *raw[2:]], "line 3 "),
    "nested lists": (lambda raw: [*raw[:2], b"[" * 600 + b"]" * 600, *raw[2:]], "line 3 "),
    "an empty line": (lambda raw: [*raw[:2], b"", *raw[2:]], "line 3 "),
    "a number for JSON": (lambda raw: [*raw[:2], b"3", *raw[2:]], "line 3 "),
    "a line without end": (lambda raw: [*raw[:2], b"x" * 2**20, *raw[2:]], "line 3 "),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_the_first_broken_line_is_said(change, audit, capsys):
    changed, said = CHANGES[change]
    raw = audit.path.read_bytes().split(b"\n")[:-1]
    audit.path.write_bytes(b"\n".join([*changed(raw), b""]))
    assert audit.verify().broken.startswith(said)
    assert main(["flower", "audit", str(audit.path.parent)]) == 2
    assert f"{audit.path}: {said}" in capsys.readouterr().err


def test_the_command_says_what_is_there(audit, capsys):
    """`flower audit` prints the number of lines and the last hash; `--holds HASH` shows whether lines are missing."""
    hashes = [hashlib.sha256(line).hexdigest() for line in audit.path.read_bytes().splitlines()]
    command = ["flower", "audit", str(audit.path.parent)]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "5 lines in an unbroken chain" in said
    assert f"last hash {hashes[-1]}" in said
    assert main([*command, "--holds", hashes[2]]) == 0
    raw = audit.path.read_bytes().splitlines(keepends=True)
    audit.path.write_bytes(b"".join(raw[:2]))  # lines are missing at the end, which the chain alone does not show
    assert main(command) == 0
    assert main([*command, "--holds", hashes[2]]) == 2
    assert "the hash of a line of" in capsys.readouterr().err
    none = Audit(audit.path.parent / "none")
    with refuses("", fact="is missing", where=str(none.path)):
        none.verify()


def test_lines_that_are_missing_at_the_end_are_noticed_by_the_count_of_requests(tmp_path, capsys):
    site = runtime(tmp_path)
    for _ in range(3):
        site.respond(request(site), memory())
    raw = (tmp_path / "audit.jsonl").read_bytes().splitlines(keepends=True)
    assert main(["flower", "audit", str(tmp_path)]) == 0
    assert "client 0" not in capsys.readouterr().out
    (tmp_path / "audit.jsonl").write_bytes(b"".join(raw[:1]))
    assert main(["flower", "audit", str(tmp_path)]) == 0
    assert "client 0: 3 requests were counted, but the last line is for request 1" in capsys.readouterr().out


def test_an_audit_with_a_line_that_is_none_of_ours_is_not_continued(audit):
    audit.path.write_bytes(audit.path.read_bytes() + b"x" * 2**20)
    with raises_with(CheckpointError, "longer than any line of an audit", path=audit.path):
        audit.append("sent")

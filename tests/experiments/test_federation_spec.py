"""Does a federation that runs a spec give the numbers of a simulation, and are wrong configurations explained?"""

import contextlib
import errno
import json
import logging
import os
import re
import runpy
import shutil
import tomllib
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from recorders import InMemory, Service

import fedbilevel as fb
from fedbilevel.cli import main
from fedbilevel.core.errors import AbsenceWarning, CheckpointWarning, warn
from fedbilevel.engines import checkpoint
from fedbilevel.experiments import configure, federation, load_run, read_spec, run
from fedbilevel.experiments.federation import names_of_sites, write_app
from fedbilevel.experiments.federation_status import Status
from fedbilevel.experiments.folder import Folder
from fedbilevel.experiments.names import SEARCHES
from fedbilevel.flower import versions
from fedbilevel.flower.launch import processes
from fedbilevel.flower.launch.in_process import InProcess
from fedbilevel.flower.refusal import Code, Refusal
from fedbilevel.flower.server.engine import in_a_sentence, server_app
from fedbilevel.flower.server.terms import Terms
from fedbilevel.flower.wire import METRICS, RequestMessage, decode
from fedbilevel.tasks.quadratic import quadratic
from refusals import ANY, codes, raises_with, refuses, warns_with

EXAMPLE = Path(__file__).parents[2] / "examples" / "two-folders"
NODE = {"partition-id": 0}


@pytest.fixture(scope="module")
def spec():
    settings = ["task.clients=3", "task.samples=[8, 8]", "run.rounds=4", "run.eval_every=2", "batch_size=8"]
    return configure(task="quadratic", algorithm="simfbo", settings=settings)


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory):
    """Return a copy of the example with two folders, in which make_data.py has run."""
    place = tmp_path_factory.mktemp("hospitals")
    for file in EXAMPLE.glob("*.*"):
        shutil.copy(file, place)
    with contextlib.chdir(place):
        runpy.run_path("make_data.py", run_name="__main__")
    return place


def assert_same_result(mine, theirs, tolerance):
    with np.load(mine / "result.npz") as a, np.load(theirs / "result.npz") as b:
        names = [name for name in a.files if not name.startswith("__")]
        assert len(names) >= 2
        assert set(a.files) == set(b.files)
        for name in names:
            np.testing.assert_allclose(a[name], b[name], rtol=tolerance, atol=tolerance, err_msg=name)


def test_a_spec_gives_the_same_numbers_as_a_simulation(spec, tmp_path):
    """A federation gives the same numbers as a simulation of its spec, to 1e-12.

    Settings in the run configuration apply to the server and to the clients.
    """
    config = {"settings": "run.rounds=2 'algorithm.batch_size=16'", "out": str(tmp_path / "a")}
    grid = InProcess(federation.client_app(spec), 3, run_config={"settings": config["settings"]})
    federation.serve(spec, grid, config)
    run(spec.replace(run={"rounds": 2}, algorithm={"batch_size": 16}), tmp_path / "b")
    a, b = load_run(tmp_path / "a"), load_run(tmp_path / "b")
    assert a.spec.algorithm.fields["batch_size"] == 16
    for mine, theirs in zip(a.history.rows, b.history.rows, strict=True):
        assert mine.keys() == theirs.keys() - {"flops"}  # the server counts no operations, as it has no samples
        for name in mine.keys() - {"seconds", "time"}:  # a federation has its own time
            np.testing.assert_allclose(mine[name], theirs[name], rtol=1e-12, err_msg=name)
    own = {"ticks": 0, "flops": None, "virtual": None}  # real time in a federation
    assert a.ledger | own == b.ledger | own
    exchanges = [json.loads(line) for line in (tmp_path / "a" / "exchanges.jsonl").read_text().splitlines()]
    assert [line["answered"] for line in exchanges] == [[0, 1, 2]] * 2
    assert sum(line["bytes_down"] for line in exchanges) == a.ledger["bytes_down"]


@pytest.mark.parametrize(
    ("given", "task", "clients", "rounds"),
    [
        ([], "hyper_representation", 4, 50),
        (["--clients", "3", "--rounds", "7"], "hyper_representation", 3, 7),
        (["--spec", "SPEC", "--set", "run.rounds=5"], "quadratic", 3, 5),
    ],
)
def test_a_demo_plays_the_task_that_is_asked_for(given, task, clients, rounds, spec, tmp_path, monkeypatch):
    (tmp_path / "spec.toml").write_text(spec.to_toml())
    played = []
    monkeypatch.setattr(federation, "play_demo", lambda spec, count, out, persistent, log: played.append((spec, count)))
    given = [str(tmp_path / "spec.toml") if one == "SPEC" else one for one in given]
    assert main(["flower", "demo", *given]) == 0
    ((asked, count),) = played
    assert (asked.task.name, count, asked.run.rounds) == (task, clients, rounds)


def test_a_demo_without_flower_writes_nothing(spec, tmp_path, monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda: None)
    with refuses("", fact='pip install ".[flower]"'):
        federation.play_demo(spec, 2, tmp_path / "demo", persistent=True)
    assert not (tmp_path / "demo").exists()


@pytest.mark.parametrize("when", ["start", "run"])
def test_a_demo_that_is_interrupted_says_that_all_is_stopped_and_where_its_files_are(
    when, spec, tmp_path, monkeypatch, capsys
):
    class Interrupted:
        """Stands for the processes of a federation; Ctrl-C comes while they start, or while the run goes on."""

        address, credentials = "127.0.0.1:1", SimpleNamespace(ca=tmp_path / "ca.crt")

        def __init__(self, *_, **__):
            pass

        def __enter__(self):
            if when == "start":
                raise KeyboardInterrupt
            return self

        def __exit__(self, *_):
            print("end of the processes")

        def run(self, app, config):
            raise KeyboardInterrupt

    monkeypatch.setattr(processes, "Federation", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        federation.play_demo(spec, 2, tmp_path / "demo", persistent=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("all stopped; ")
    assert lines[-1].endswith(str((tmp_path / "demo").resolve()))
    assert lines[-3:-1] == ["stopping all processes", "end of the processes"] or when == "start"
    assert ("stopping all processes" in lines) == (when == "run")


@pytest.mark.slow
def test_a_server_records_in_trackers_what_it_knows(spec, tmp_path, monkeypatch):
    """A tracker of the server gets its rows, parameters and files, but not the log of exchanges."""
    service = Service()
    monkeypatch.setitem(federation.BY_NAME, "in_memory", lambda: InMemory(service))
    config = {"out": str(tmp_path / "a"), "log": "in_memory"}
    federation.serve(spec, InProcess(federation.client_app(spec), 3, run_config={"log": "in_memory"}), config)
    (kept,) = service.runs.values()
    assert kept.rows == load_run(tmp_path / "a").history.rows
    assert (kept.steps, kept.ending) == ([0, 2, 4], "finished")
    assert kept.run.flat_parameters()["algorithm.batch_size"] == 8
    files = {"spec.toml", "history.jsonl", "ledger.json", "result.npz", "summary.json", "plot.png"}
    assert set(kept.files) == files
    assert (tmp_path / "a" / "exchanges.jsonl").is_file()  # this file is not recorded


def test_an_unfinished_run_goes_on_under_its_name(spec, tmp_path):
    """A federated run that stopped early continues under the same name, and ends with the numbers of a simulation."""
    config = {"out": str(tmp_path / "a"), "attempts": 1, "join": 0.1}
    grid = InProcess(federation.client_app(spec), 3)
    late = lambda client, message: np.inf if message.content["fields"]["round"] == 2 else 0.0  # noqa: E731
    lost = InProcess(federation.client_app(spec), 3, delay=late)
    with raises_with(fb.errors.ExchangeError, round=2):
        federation.serve(spec, lost, config)
    name = (tmp_path / "a" / "federation").read_text()
    federation.serve(spec, grid, config)
    run(spec, tmp_path / "b")
    assert_same_result(tmp_path / "a", tmp_path / "b", 1e-12)
    assert (tmp_path / "a" / "federation").read_text() == name
    asked = []
    watched = InProcess(federation.client_app(spec), 3, delay=lambda client, message: asked.append(message) or 0.0)
    federation.serve(spec, watched, config)
    assert asked == []  # since the run is finished


@pytest.mark.slow
def test_a_run_that_too_few_clients_came_to_starts_again_in_its_folder(spec, tmp_path):
    """A run that too few clients joined leaves only its log, and `serve` starts it again in the same folder."""
    spec, out = spec.replace(run={"rounds": 1}), tmp_path / "a"
    config = {"out": str(out), "quorum": 1.0, "attempts": 1, "join": 0.1, "deadline": 0.1}
    app = federation.client_app(spec)
    for _ in range(2):
        with raises_with(fb.errors.ExchangeError, round=None, replies=2, needed=3):
            federation.serve(spec, InProcess(app, 2), config)
        assert [file.name for file in out.iterdir() if not file.name.startswith(".")] == ["exchanges.jsonl"]
        status = Status.of(Folder(out))
        said, ended = status.lines, status.ended
        assert said == ["no exchange has ended"]
        assert re.search("2 clients are online, but 3 .* the run ended before its first exchange", str(ended))
        assert isinstance(ended, fb.errors.ExchangeError)
    with warns_with(CheckpointWarning, "(exchanges.jsonl)", path=out):
        federation.serve(spec, InProcess(app, 3), config)
    assert load_run(out).summary["rounds"] == 1
    assert Status.of(Folder(out)).ended is None


def test_the_status_of_what_is_no_file_is_refused(tmp_path):
    """The status of a run is refused if its log is a pipe, since reading it might never end."""
    os.mkfifo(tmp_path / "exchanges.jsonl")
    with refuses("", fact="is not a regular file", where=str(tmp_path / "exchanges.jsonl")):
        Status.of(Folder(tmp_path))


def test_a_run_that_cannot_begin_writes_nothing_into_the_folder_of_something_else(spec, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    config = {"out": str(tmp_path), "join": 0.1}
    with refuses("", fact="is not empty", where=str(tmp_path)):
        federation.serve(spec, InProcess(federation.client_app(spec), 3), config)
    assert [file.name for file in tmp_path.iterdir() if not file.name.startswith(".")] == ["notes.txt"]


def test_clients_read_their_own_folders_and_the_server_none(hospitals, tmp_path, monkeypatch):
    """Each client reads its own folder, the server only the test set, and the numbers are those of a simulation."""
    monkeypatch.chdir(hospitals)
    spec = read_spec("spec.toml").replace(run={"rounds": 3})
    run(spec, tmp_path / "b")
    (server := tmp_path / "server").mkdir()
    shutil.copy("data/test.csv", server)

    def of(node):
        return {**node, "folder": str(hospitals / "data" / ("north", "south")[node["partition-id"]])}

    app = federation.client_app(spec)
    grid = InProcess(app, 2)
    for context in grid.contexts.values():
        context.node_config = of(context.node_config)
    federation.serve(spec.replace(task={"folder": str(server)}), grid, {"out": str(tmp_path / "a")})
    assert_same_result(tmp_path / "a", tmp_path / "b", 1e-5)  # samples and their products are float32


@pytest.mark.parametrize(
    ("node", "refusal"),
    [
        ({}, ("node configuration: partition-id", None)),
        ({"partition-id": 3}, ("node configuration: partition-id", 3, "below 3")),
        ({"partition-id": "0"}, ("partition-id", "0")),
        ({**NODE, "clipp": 1.0}, ("name in the node configuration", "clipp", "", "clip")),
        ({**NODE, "settable": "run.* task.dimx"}, ("field in settable", "task.dimx", "", "task.dim_x")),
        ({**NODE, "max-memory": 0}, ("Limits.max_memory", 0)),
        ({**NODE, "clip": 1.0}, ("node configuration", "clip alone", "noise-multiplier, delta")),
        (
            {**NODE, "clip": 1.0, "noise-multiplier": 1.0, "delta": 1e-5},
            ("node configuration: state-folder", "none", "account"),
        ),
        ({**NODE, "max-local-steps": 0}, ("Limits.max_local_steps", 0)),
        ({**NODE, "samples": "many"}, ("task.samples", "many")),
        ({**NODE, "layers": "Median, TopKK"}, ("layer of Limits.layers", "TopKK", "", "TopK")),
        ({**NODE, "layers": 3}, ("layers", 3)),
    ],
)
def test_node_configuration_says_what_a_site_allows_or_is_told_what_is_wrong(spec, node, refusal, tmp_path):
    """Limits and privacy of a site are read from its node configuration, and wrong entries are refused by name."""
    with refuses(*refusal):
        federation.site(spec, {}, node)
    limits = {"max-local-steps": 7, "max-batch-size": 9, "max-seconds": 5, "max-bytes": 100}
    privacy = {"clip": 2, "noise-multiplier": 3.0, "delta": 1e-5, "budget": 4.0, "state-folder": str(tmp_path)}
    site = federation.site(spec, {}, {**NODE, **limits, **privacy})
    assert (site.limits.max_local_steps, site.limits.max_batch_size) == (7, 9)
    assert (site.limits.max_seconds, site.limits.max_bytes) == (5.0, 100)
    assert site.limits.layers is None
    assert federation.site(spec, {}, {**NODE, "layers": "TopK, Median"}).limits.layers == ("TopK", "Median")
    assert (site.privacy.clip, site.privacy.noise_multiplier, site.privacy.budget) == (2.0, 3.0, 4.0)


@pytest.mark.parametrize(
    ("settings", "node", "refused"),
    [
        ("run.rounds=9 algorithm.batch_size=16 local_steps=2", {}, ""),
        ("task.dim_x=9 task.clients=3", {}, "task.dim_x"),  # the app has 3 clients
        ("dim_x=9", {"dim_x": 4}, ""),  # the site's own value takes precedence
        ("task.dim_x=9 noise=0.5", {"settable": "algorithm.* task.noise"}, "task.dim_x"),
        ("noise=0.5", {"settable": "algorithm.* task.noise"}, ""),
        ("run.rounds=9", {"settable": ""}, "run.rounds"),
        ("clients.local_steps=2", {"settable": "clients.*"}, ""),
        ("asynchronous.wait_for=2 clients.local_steps=2", {}, "asynchronous.wait_for, clients.local_steps"),
    ],
)
def test_a_site_names_the_fields_that_a_server_may_set(settings, node, refused, spec, monkeypatch):
    """A site refuses settings of other fields before it makes the task, and tells the server which fields these are."""
    made, seen_by = [], federation.seen_by
    monkeypatch.setattr(federation, "seen_by", lambda spec, party: made.append(spec) or seen_by(spec, party))
    refusal = raises_with(Refusal, f"set {refused} at this client", code=Code.SETTABLE)
    with refusal if refused else nullcontext() as said:
        site = federation.site(spec, {"settings": settings}, {**NODE, **node})
        assert site.x0.shape == (node.get("dim_x", 5),)
    assert bool(made) == (not refused)
    if refused:
        assert said.value.code is Code.SETTABLE
        assert "add the field to settable" in said.value.line


def test_a_search_over_x_is_refused_before_anything_is_written(tmp_path):
    settings = ["run.exchanges=100", "algorithm.low=-1", "algorithm.high=1"]
    spec = configure(task="quadratic", algorithm=f"{SEARCHES}:TPE", settings=settings)
    with refuses("algorithm", "search: TPE") as caught:
        write_app(spec, tmp_path / "app")
    assert caught.value.path == "algorithm"
    assert not (tmp_path / "app").exists()


@pytest.mark.parametrize(
    ("config", "refusal"),
    [
        ({"quorom": 0.5}, ("name in the run configuration", "quorom", "", "quorum")),
        ({"settings": "run.pooled=true"}, ("run.pooled", True)),
        ({"settings": "run.round=3"}, ("field of run", "round", "", "rounds")),
        ({"settings": "run.rounds='3"}, ("", ANY, "No closing quotation")),
        ({"attempts": 1.5}, ("attempts", 1.5)),
        ({"settings": "task.name=saddle"}, ("settings", ("saddle", "simfbo"), "('quadratic', 'simfbo')")),
        ({"settings": "algorithm.name=shrofbo"}, ("settings", ("quadratic", "shrofbo"), "('quadratic', 'simfbo')")),
        ({"quorum": 2}, ("Terms.quorum", 2.0)),
        ({"norm-factor": 0.5}, ("Terms.norm_factor", 0.5, "None")),
        ({"log": "tensorboard,mlfow"}, ("tracker of log", "mlfow", "", "mlflow")),
        ({"message-factor": 0.0}, ("Terms.message_factor", 0.0)),
    ],
)
def test_a_wrong_run_configuration_is_told_what_is_wrong(spec, config, refusal, tmp_path):
    with refuses(*refusal):
        federation.serve(spec, InProcess(federation.client_app(spec), 3), {**config, "out": str(tmp_path / "a")})
    assert not (tmp_path / "a").exists()


def test_the_app_of_a_task_of_ours(tmp_path, capsys):
    """`flower new` writes an app for a task of the library, and does not overwrite a folder."""
    folder = tmp_path / "My-App"
    assert main(["flower", "new", str(folder), "--task", "quadratic", "--clients", "3", "--rounds", "7"]) == 0
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    assert project["project"]["dependencies"] == []  # not fedbilevel, which is on no package index
    app = project["tool"]["flwr"]["app"]
    assert app["components"] == {f"{name}app": f"my_app.{name}_app:app" for name in ("server", "client")}
    assert set(app["config"]) == {"settings", "out", "client-keys", "log", *federation.SERVER}
    made = read_spec(folder / "my_app" / "spec.toml")
    assert (made.run.rounds, made.task.fields["clients"]) == (7, 3)
    assert main(["flower", "new", str(folder), "--task", "quadratic"]) == 2
    assert "not empty" in capsys.readouterr().err


@pytest.mark.slow
def test_a_file_that_needs_its_neighbours_and_a_name_that_is_no_package_are_refused(spec, tmp_path):
    """An app is refused if its task needs a second file, or if its name is not a name for a package."""
    (tmp_path / "neighbour_of_it.py").write_text("A = 1\n")
    (tmp_path / "mine.py").write_text("import neighbour_of_it\nfrom fedbilevel.tasks import quadratic as task\n")
    of_two = configure(task=f"{tmp_path / 'mine.py'}:task")
    for made, name, refusal in (
        (of_two, "app", ("", ANY, "an installed package")),
        (spec, "3-apps", ("DIR", str(tmp_path / "3-apps"), "letter")),
    ):
        with refuses(*refusal):
            write_app(made, tmp_path / name)
        assert not (tmp_path / name).exists()


def test_keys_are_made_once(tmp_path, capsys):
    command = ["flower", "keys", str(tmp_path / "keys"), "--clients", "2", "--host", "server.example.org"]
    assert main(command) == 0
    assert {file.name for file in (tmp_path / "keys").iterdir()} >= {"ca.crt", "server.key", "client-0", "client-1.pub"}
    assert main(command) == 2
    assert "would be overwritten" in capsys.readouterr().err


@pytest.mark.slow
def test_a_server_that_ends_early_says_why_what_is_kept_and_how_to_go_on(spec, tmp_path, capsys):
    """If a server ends early, its error and `status` say why, what is kept, and how to continue.

    Flower lists this error for a failed run. The exit code of `status` is the one that `run` has for such an error.
    """
    out, grid = tmp_path / "a", InProcess(federation.client_app(spec), 3)
    for context in grid.contexts.values():
        context.node_config["max-requests"] = 3  # a greeting, and one exchange in each of two rounds
    with raises_with(fb.errors.ExchangeError, "the last checkpoint is kept") as error:
        federation.serve(spec, grid, {"out": str(out), "attempts": 1})
    assert codes(error) == dict.fromkeys(range(3), Code.LIMIT)
    assert main(["flower", "status", str(out)]) == 5
    said = capsys.readouterr()
    assert "not finished; last: round 2" in said.out
    assert f"submit the run again with out='{out}'" in said.err
    federation.serve(spec, InProcess(federation.client_app(spec), 3), {"out": str(out)})
    assert main(["flower", "status", str(out)]) == 0
    assert "finished; last: round 3" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_diverges_has_failed_though_its_numbers_are_finite(spec, tmp_path, capsys):
    out, steep = tmp_path / "a", spec.replace(algorithm={"client_lr": 30.0})
    with raises_with(fb.errors.NumericalError, f"its result is in {out}"):
        federation.serve(steep, InProcess(federation.client_app(steep), 3), {"out": str(out)})
    assert load_run(out).summary["rounds"] == 4
    assert main(["flower", "status", str(out)]) == 3
    assert "has grown" in capsys.readouterr().err


BARE = """
from dataclasses import replace
from fedbilevel.tasks.quadratic import outer, quadratic
def task():
    made = quadratic(clients=2, samples=(8, 8))
    return replace(made, metrics={}, metrics_per_client={"fit": lambda x, y, batch: outer(x, y, batch)})
"""
PRIVATE = {"clip": 1.0, "noise-multiplier": 0.1, "delta": 1e-5}


@pytest.mark.parametrize(("tell", "private", "settings", "metric"), [
    ([0, 1], [], [], "fit.mean"),
    pytest.param([1], [0], [], "fit.mean", marks=pytest.mark.slow),
    pytest.param([], [], [], "outer_loss", marks=pytest.mark.slow),
    ([], [0, 1], [], "exchanges"),
    pytest.param([0, 1], [], ["asynchronous.wait_for=1"], "outer_loss", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_server_without_a_test_set_shows_the_mean_of_what_clients_tell(tell, private, settings, metric, tmp_path):
    """A server without a test set shows the mean of the numbers that clients report.

    These are the task's metrics on each client's own samples, or else f on the clients' batches. With privacy, clients
    report neither, and only the costs are known. A client is asked in each of the three rows. If all clients decline,
    each is asked only once, and with late replies no client is asked.
    """
    (tmp_path / "bare.py").write_text(BARE)
    steps = ["batch_size=8", "run.rounds=2", "run.eval_every=1", "server_lr=0.1", "client_lr=0.1", *settings]
    spec, out = configure(task=f"{tmp_path / 'bare.py'}:task", algorithm="simfbo", settings=steps), tmp_path / "run"
    grid = InProcess(federation.client_app(spec), 2)
    for client, context in enumerate(grid.contexts.values()):
        context.node_config["tell-metrics"] = client in tell
        context.node_config |= PRIVATE | {"state-folder": str(tmp_path / str(client))} if client in private else {}
    asked = []
    push, grid.push_messages = grid.push_messages, lambda messages: push([asked.append(m) or m for m in messages])
    with (
        nullcontext() if len(tell) == 2 else pytest.warns(fb.errors.AbsenceWarning, match=f"from only {len(tell)} of 2")
    ):
        federation.serve(spec, grid, {"out": str(out)})
    ended = load_run(out)
    assert ended.metric == metric
    assert ended.summary["final"] == (row := ended.history.rows[-1])[metric]
    assert (out / "plot.png").is_file()
    if metric == "fit.mean":
        task = quadratic(clients=2, samples=(8, 8))
        fits = [float(task.problem.outer(task.x0, task.y0, task.clients.outer.row(client))) for client in tell]
        assert ended.history.rows[0]["fit.mean"] == pytest.approx(np.average(fits, weights=task.clients.weights[tell]))
        assert row["fit.clients"] == len(tell)
    requests = sum(decode(RequestMessage, message).phase == METRICS for message in asked)
    assert requests == 2 * (0 if settings else 3 if tell else 1)


def test_a_full_disk_ends_a_server_in_a_sentence(spec, tmp_path, monkeypatch, capsys):
    out, save, saved = tmp_path / "a", checkpoint.save, []

    def full(path, *given, **options):
        saved.append(path)
        if len(saved) == 3:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        save(path, *given, **options)

    monkeypatch.setattr(checkpoint, "save", full)
    with raises_with(fb.errors.CheckpointError, "is kept", path=out / "checkpoint.npz", errno=errno.ENOSPC):
        federation.serve(spec, InProcess(federation.client_app(spec), 3), {"out": str(out)})
    assert main(["flower", "status", str(out)]) == 4
    assert "No space left on device" in capsys.readouterr().err


def test_a_run_whose_numbers_fail_is_not_to_be_submitted_again(spec, tmp_path):
    """The error of a run with numbers that are not finite does not suggest to submit the run again."""
    out, steep = tmp_path / "a", spec.replace(algorithm={"client_lr": 1e200})
    with raises_with(fb.errors.NumericalError, round=0, phase="local_updates", replies=0) as error:
        federation.serve(steep, InProcess(federation.client_app(steep), 3), {"out": str(out), "attempts": 1})
    assert codes(error) == dict.fromkeys(range(3), Code.NUMBERS)
    assert str(error.value).endswith("the last checkpoint is kept")
    assert main(["flower", "status", str(out)]) == 3


NORTH = "partition-id=0 folder='data/north'"
HIDES = "clip=1.0 noise-multiplier=30.0 delta=1e-5"


def test_a_site_is_looked_at_before_it_starts(hospitals, tmp_path, monkeypatch, capsys):
    """`flower check` shows a site's samples, privacy and settable fields before the site joins a federation."""
    monkeypatch.chdir(hospitals)
    node = f"{NORTH} state-folder='{tmp_path}' {HIDES}"
    assert main(["flower", "check", "spec.toml", "--node-config", node]) == 0
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert said.keys() == {"client", "samples", "folder", "privacy", "floors", "settable", "run", "approval"}
    assert said["settable"] == "algorithm.* run.*"
    assert said["samples"].startswith("63 outer, 125 inner, of ['features'] float32[1, 10]")
    assert said["privacy"] == "clip 1, noise 30; ε = 0.242 for a reply, 0 so far, at δ = 1e-05, no budget"


def test_a_site_is_told_what_leaves_it_because_of_layers(tmp_path, monkeypatch, capsys):
    """`flower check` says what each layer of the run sends, and refuses a run with a layer that is not in `layers`."""
    monkeypatch.chdir(tmp_path)
    spec = configure(task="quadratic", algorithm="simfbo", settings=["task.clients=3", "asynchronous.wait_for=2"])
    (tmp_path / "spec.toml").write_text(spec.to_toml())
    check = ["flower", "check", "spec.toml", "--node-config"]
    node, tells = "partition-id=0 min-batch-size=1 min-local-samples=1", fb.Asynchronous.tells
    assert main([*check, f"{node} layers='Median,Asynchronous'"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("layers")]
    assert line.split(maxsplit=1)[1] == f"Asynchronous: {tells}"
    assert main([*check, f"{node} layers='Median'"]) == 2
    error = capsys.readouterr().err
    assert f"the layer Asynchronous (layers = 'Median'): {tells} (add the layer to layers " in error


def test_the_four_hospitals_have_names_without_only():
    """The sites of the task hospitals have names, whether or not `task.only` selects some of them."""
    for settings, names in (([], ["cleveland", "hungarian", "switzerland", "va"]), (["task.only=['va']"], ["va"])):
        assert [*names_of_sites(configure(task="hospitals", settings=settings))] == names


def test_a_site_is_told_what_its_budget_allows_of_a_run(hospitals, tmp_path, monkeypatch, capsys):
    """`flower check` says after how many rounds of a run the site's privacy budget is spent.

    The run has 60 rounds of one exchange, and the site has already sent 10 replies to another run. A budget of ε after
    70 replies therefore allows all 60 rounds, and one of ε after 25 replies allows 15. The budget 0.5 allows none.
    """
    monkeypatch.chdir(hospitals)
    command = ["flower", "check", "spec.toml", "--node-config"]
    node, terms = f"{NORTH} state-folder='{tmp_path}' {HIDES}", fb.Privacy(1.0, 30.0, 1e-5)
    assert main([*command, node]) == 0
    (tmp_path / "account.json").write_text('{"30.0": 10}')
    capsys.readouterr()
    for budget, allowed in ((terms.epsilon_after(70), 60), (terms.epsilon_after(25) + 1e-9, 15), (0.5, 0)):
        code, (out, error) = main([*command, f"{node} budget={budget!r}"]), capsys.readouterr()
        assert (code == 0) == (allowed > 0) == ("privacy budget spent" not in error)
        said = out.splitlines()[-1]
        one, all_of_it = terms.epsilon_after(11), terms.epsilon_after(70)
        assert f"run        ε = {one:.4g} after 1 round, ε = {all_of_it:.4g} after 60 rounds, if" in said
        assert said.endswith("1 exchange a round" + f"; the budget is spent after {allowed} rounds" * (allowed < 60))


def test_looking_at_a_site_does_not_use_up_what_its_log_is_to_say(hospitals, tmp_path, monkeypatch, capsys, caplog):
    """`flower check` finds changed samples each time, so that the site itself will still find and log the change."""
    monkeypatch.chdir(hospitals)
    (tmp_path / "client-0-samples.json").write_text('{"other": 1}')
    for _ in range(2):
        assert main(["flower", "check", "spec.toml", "--node-config", f"{NORTH} state-folder='{tmp_path}'"]) == 0
        assert "differ from its earlier ones" in capsys.readouterr().out
    assert "differ from its earlier ones" not in caplog.text  # it is printed, and not logged


@pytest.mark.parametrize(
    ("node", "more", "message"),
    [
        (f"{NORTH} clipp=1.0", [], "'clipp' in the node configuration; did you mean 'clip'"),
        (
            f"{NORTH} same-data=yes",
            [],
            "--node-config cannot be read; texts need quotes, as in site='north': The provided",
        ),
        (NORTH.replace("0", "-1"), [], "partition-id = -1 is not allowed: it must be the client's number, 0 or more"),
        (
            f"{NORTH} {HIDES}",
            [],
            "node configuration: state-folder = 'none' is not allowed: it must be a folder if clip",
        ),
        (f"{NORTH} min-local-samples=64", [], "fewer samples than its floor of 64 (lower min-local-samples"),
        ("partition-id=0 folder='data/nrth'", [], "data/nrth/validation.csv not found"),
        (
            "partition-id=1 folder='holes'",
            [],
            "Clients.inner['features']: it holds NaN or infinity, first in sample 2, entry [0] (counted from 0)",
        ),
        (NORTH, ["--superlink", "127.0.0.1:1"], "with --root-certificates or --insecure"),
        (NORTH, ["--superlink", "127.0.0.1:1", "--insecure"], "127.0.0.1:1 does not answer: "),
        (NORTH, ["--superlink", "https://127.0.0.1:1", "--insecure"], "it must be HOST:PORT, without https://"),
        (NORTH, ["--superlink", "127.0.0.1:1", "--root-certificates", "a.crt"], "--root-certificates = 'a.crt' is not"),
    ],
)
def test_a_site_that_could_not_take_part_is_told_why(node, more, message, hospitals, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(hospitals)
    if "holes" in node:
        monkeypatch.chdir(shutil.copytree(hospitals, tmp_path / "a"))
        shutil.copytree(hospitals / "data" / "south", "holes")
        rows = Path("holes/train.csv").read_text().splitlines()
        rows[3] = "nan" + rows[3][rows[3].index(",") :]
        Path("holes/train.csv").write_text("\n".join(rows))
    assert main(["flower", "check", "spec.toml", "--node-config", node, *more]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "why"), [('{}["label"]', "KeyError: 'label'"), ("(1, 2)[party]", "tuple index out of")]
)
def test_a_task_that_cannot_be_made_of_a_sites_data_is_refused_in_a_sentence(line, why, tmp_path):
    (tmp_path / "mine.py").write_text(f"def mine(party='all'):\n    return {line}\n")
    spec = configure(task=f"{tmp_path / 'mine.py'}:mine", algorithm="simfbo")
    with refuses("task", f"{tmp_path / 'mine.py'}:mine", f"party = 7: {why}"):
        federation.site(spec, {}, {"partition-id": 7})


def test_flowers_log_has_an_error_of_ours_as_a_sentence(caplog):
    """An error of fedbilevel is one sentence in Flower's log. Other errors keep their traceback."""
    logger = logging.getLogger("flwr")
    logger.addFilter(in_a_sentence)
    try:
        for error in (fb.errors.ExchangeError("too few\nclients"), RuntimeError("ours to mend")):
            logger.error("%s raised an exception", "ServerApp", exc_info=error)
        logger.error("Exit Code: 201\n\nAn unhandled exception occurred in the ServerApp.")
    finally:
        logger.removeFilter(in_a_sentence)
    first, second = caplog.records
    assert (first.getMessage(), first.exc_info) == ("fedbilevel: too few clients", None)
    assert (second.getMessage(), second.exc_info[1].args) == ("ServerApp raised an exception", ("ours to mend",))


def test_a_server_app_prints_warnings_in_a_line_each(capfd):
    """A server app prints each warning in one line.

    Python's own format would add the line of Flower's code that called the app.
    """

    def main(grid, config):
        warn(AbsenceWarning("1 of 3 clients never counted\nin this run"))

    grid = InProcess(lambda message, context: None, 1)
    server_app(main)(grid, Context(1, 0, {}, RecordDict(), {}))
    assert capfd.readouterr().err == "fedbilevel: warning: 1 of 3 clients never counted in this run\n"


def test_of_bounds_on_norms_0_is_none():
    """In a run configuration, a bound of 0 on norms means that there is no bound."""
    assert federation.terms({}) == Terms()
    assert federation.terms({"norm-factor": 0.0}) == Terms(norm_factor=None)
    assert federation.terms({"norm-factor": 50.0, "norm-bound": 0.0}) == Terms(norm_factor=50.0)
    assert federation.terms({"norm-bound": 3.0}) == Terms(norm_bound=3.0)
    assert federation.terms({"message-factor": 2.0}) == Terms(message_factor=2.0)

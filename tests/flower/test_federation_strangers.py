"""Processes of a federation refuse strangers and wrong requests: a line in a log says so, and nothing is run."""

from contextlib import contextmanager

import pytest
from federation_app import ALGORITHM, CLIENTS, SAME, Trial, write_app

from fedbilevel.flower.launch import children, credentials
from fedbilevel.flower.launch.processes import free_ports

pytestmark = pytest.mark.slow
CAREFUL = 3  # this client allows few local steps


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    trial = Trial(tmp_path_factory.mktemp("strangers"), ports=24200)
    trial.federation.node_configs[CAREFUL] += f" max-local-steps={ALGORITHM['two-phase']['inner']}"
    with trial:
        yield trial
    assert trial.left() == []


@contextmanager
def written(trial, client):
    """Yield a function that returns what was added to a client's log since the block began."""
    log = trial.federation.log(f"client-{client}")
    before = len(log.read_text())
    yield lambda: log.read_text()[before:]


def states(trial):
    """Return the files in which clients keep their states: path → content."""
    return {file: file.read_bytes() for file in (trial.folder / "states").rglob("*.npz")}


def test_a_supernode_without_a_registered_key(trial, tmp_path):
    """A SuperNode whose key is not registered is not connected, and a run has the numbers of a run without it."""
    federation = trial.federation
    own = credentials.make(tmp_path / "own", clients=1).clients[0]
    command = [*federation.commands.node(0), "--max-retries", "0"]
    command[command.index("--auth-supernode-private-key") + 1] = str(own)
    command[command.index("--port") + 1] = str(*free_ports(1, 24300))
    log = tmp_path / "log"
    stranger = children.spawn(command, log, federation.environment("stranger"))
    try:
        run = trial.play("two-phase", [])
        assert run.absent() == set()
        assert run.difference() <= SAME
        assert federation.online() == CLIENTS
        text = log.read_text()
    finally:
        children.stop([stranger])
    assert "the SuperNode ended with status 1" in text
    assert "connected to the SuperLink" not in text


@pytest.mark.parametrize("wrong", [{"phase": "init_client"}, {"contract": "0" * 32}, {"own": '{"steps": 9}'}], ids=str)
def test_a_message_that_no_client_answers(wrong, trial):
    """All clients refuse a request for a method that is no phase, of another contract, or with a number of no field.

    They reply to the correct request that follows, and their states are as if the wrong request had not come.
    """
    with written(trial, 0) as log:
        run = trial.play("two-phase", [("server", 1, 1, "ask", {"instead": wrong})], attempts=2)
        assert "refused: " in log()
    assert run.refusals() == ["contract"] * CLIENTS
    assert run.absent() == set()
    assert run.difference() <= SAME


def test_an_algorithm_with_other_hyperparameters(trial):
    """If the clients' app has another step size than the server's app, no client takes part, and the run says why."""
    write_app(trial.folder / "other", "two-phase")
    package = trial.folder / "other" / "other"
    theirs = (package / "spec.toml").read_text()
    assert "lr = 0.1" in theirs
    (package / "spec_of_clients.toml").write_text(theirs.replace("lr = 0.1", "lr = 0.2"))
    client = package / "client_app.py"
    client.write_text(client.read_text().replace("spec.toml", "spec_of_clients.toml"))
    before = states(trial)
    with written(trial, 0) as log:
        run = trial.submit("other", [], trial.out(), join=5.0)
        with pytest.raises(AssertionError, match="the run failed"):
            run.finish()
        assert "refused: hyperparameters.lr is 0.1 at the server and 0.2 at the site" in log()
    assert "does not take part: hyperparameters.lr is 0.1 at the server and 0.2 at the site" in run.text
    assert "0 clients are online, but 2 of 4 are needed" in run.text
    assert states(trial) == before


def test_hyperparameters_out_of_a_clients_limits(trial):
    """A client whose limit is below a hyperparameter runs nothing, keeps nothing and is absent; the others continue."""
    before = states(trial)
    settings = {"settings": "algorithm.inner=3 run.rounds=1", "join": 10.0}
    with written(trial, CAREFUL) as log:
        run = trial.play("two-phase", [], **settings)
        assert "refused: inner = 3 is above this client's limit of 1 steps" in log()
    assert "does not take part: inner = 3 is above this client's limit of 1 steps" in run.text
    assert {client for client, *_ in run.absent()} == {CAREFUL}
    assert run.difference() <= SAME
    new = set(states(trial)) - set(before)
    assert sorted(int(file.parent.name) for file in new) == [client for client in range(CLIENTS) if client != CAREFUL]


def test_a_registered_key_in_another_clients_place(trial, tmp_path):
    """A client whose registered key is that of another client does not take part, and the others continue.

    According to the server's files, clients 0 and 1 have each other's keys.
    """
    for client in range(CLIENTS):
        key = trial.federation.credentials.public({0: 1, 1: 0}.get(client, client))
        (tmp_path / f"client-{client}.pub").write_bytes(key.read_bytes())
    run = trial.play("two-phase", [], join=10.0, **{"client-keys": str(tmp_path)})
    for client in (0, 1):
        assert f"does not take part: the node claims to be client {client}, which has another key" in run.text
    assert {client for client, *_ in run.absent()} == {0, 1}
    assert run.difference() <= SAME

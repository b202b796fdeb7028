"""If the server has the public keys of its clients, no node with another key can take a client's place."""

import federations
import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from study_nodes import Nodes

import fedbilevel as fb
from fedbilevel.core.errors import ExchangeError
from fedbilevel.experiments.study import client_app, serve
from fedbilevel.flower.launch import credentials
from fedbilevel.flower.launch.in_process import InProcess
from fedbilevel.flower.refusal import Code
from fedbilevel.flower.server.engine import Flower
from fedbilevel.flower.server.roster import Roster, public_keys
from fedbilevel.flower.server.terms import Terms
from fedbilevel.flower.wire import QUESTION, RequestMessage, decode, draw_up
from refusals import codes, raises_with, refuses
from site_tables import study

ONLINE = federations.app(federations.Steps())


def registered(grid, folder, numbers):
    """Return this grid, whose nodes have now registered public keys, in the form in which Flower keeps them.

    Args:
        folder: the folder of the keys.
        numbers: for each node, the number of its key.
    """
    read = [load_ssh_public_key((folder / f"client-{number}.pub").read_bytes()) for number in numbers]
    public = dict(enumerate(map(public_key_to_bytes, read), start=1))
    grid.get_nodes = lambda: [NodeInfo(node_id=node, public_key=public.get(node, b"")) for node in grid.get_node_ids()]
    return grid


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys") / "keys"
    credentials.make(folder, 7)
    return folder


def solve(grid, keys, **terms):
    task, known = federations.TASK, fb.RemoteClients.of(federations.TASK.clients)
    engine = Flower(grid=grid, name=federations.NAME, keys=keys, terms=Terms(join=1.0, attempts=1, **terms))
    algorithm = federations.Steps()
    return fb.solve(algorithm, task.problem, known, task.x0, task.y0, rounds=1, cohort=4, key=1, engine=engine)


def test_everyone_with_the_clients_own_key(keys):
    """If all nodes have the keys of their clients, a run has the same numbers as a run without keys."""
    bound = solve(registered(InProcess(ONLINE, 6), keys, range(6)), keys, quorum=1.0)
    federations.same(bound, solve(InProcess(ONLINE, 6), None, quorum=1.0))


def test_a_registered_key_does_not_take_another_clients_place(keys, caplog):
    """A node does not take part if its registered key is not the key of the client that it claims to be.

    Node 3 has a key that belongs to no client, and claims to be client 2. Nodes 5 and 6 have each other's keys.
    """
    with raises_with(ExchangeError, replies=3, needed=4) as told:
        solve(registered(InProcess(ONLINE, 6), keys, [0, 1, 6, 3, 5, 4]), keys, quorum=0.6)
    refused = [record.getMessage() for record in caplog.records if record.name == "fedbilevel.server"]
    claims = "does not take part: the node claims to be client"
    assert [f"node {k + 1} {claims} {k}, which has another key" for k in (2, 4, 5)] == [
        line.partition(" (the operator can fix this: compare client-keys")[0]
        for line in refused
        if "another key" in line
    ]
    assert "client 4: the node claims to be client 5, which has another key" in str(told.value)  # it has 4's key


def test_nodes_without_keys_are_nobody(keys):
    """A node that has registered no key takes no client's place."""
    with raises_with(ExchangeError, replies=0):
        solve(InProcess(ONLINE, 6), keys)


def with_silent_nodes(silent, offline):
    """Return a federation of six clients in which some never answer a greeting, and some are not online."""
    grid = InProcess(ONLINE, 6, delay=lambda client, message: 1e5 if client in silent else 0.0)
    for client in offline:
        grid.leave(client)
    return grid


@pytest.mark.parametrize(
    ("with_keys", "silent", "offline", "found"),
    [
        (True, [4], [5], {4: Code.LATE, 5: Code.ABSENT}),
        (False, [4], [], {4: Code.LATE}),
        (False, [4, 5], [], {4: Code.LATE, 5: Code.LATE}),
        (False, [4], [5], {4: Code.ABSENT, 5: Code.ABSENT}),  # the silent node is one of them, or a stranger
    ],
)
def test_silent_nodes_are_late_only_if_they_can_be_all_absent_clients(keys, with_keys, silent, offline, found):
    """A client is late, and not offline, if its node is online and silent; the keys say which node this is.

    Without keys, a silent node may be a stranger, so clients are late only if every absent client may be a silent node.
    """
    replies = 6 - len(silent) - len(offline)
    grid = registered(with_silent_nodes(silent, offline), keys, range(6))
    with raises_with(ExchangeError, "has not answered the server's greeting", replies=replies, needed=6) as told:
        solve(grid, keys if with_keys else None, quorum=1.0)
    assert codes(told) == found


def test_keys_are_read_once_for_all_absent_clients(keys):
    """The server asks the SuperLink once for the keys of nodes, however many clients have no node."""
    grid = registered(with_silent_nodes([2], [3, 4, 5]), keys, range(6))
    task = federations.TASK
    contract = draw_up(
        federations.Steps(), task.problem, task.x0, task.y0, fb.RemoteClients.of(task.clients).examples()
    )
    roster = Roster(grid, contract, "run", 6, Terms(), grid.clock, keys=public_keys(keys, 6))
    roster.refresh()
    asked, get_nodes = [], grid.get_nodes
    grid.get_nodes = lambda: asked.append(1) or get_nodes()
    failed = roster.send(dict.fromkeys(range(2, 6), RequestMessage(run="run", contract="")))
    absent = dict.fromkeys((3, 4, 5), Code.ABSENT)
    assert {client: why.code for client, why in failed.items()} == {2: Code.LATE, **absent}
    assert asked == [1]


@pytest.mark.usefixtures("posed_once")
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_a_study_asks_a_site_with_another_key_no_question(files, keys, tmp_path):
    """A study in which a site has another key than its client ends, and names the client, which gets no question.

    The node of the site south has a key that belongs to no site. With the keys of the sites the study has a model.
    """
    given, asked = study("ridge", rounds=1), []
    good = client_app(given)

    def app(message, context):
        asked.append((context.node_config["site"], decode(RequestMessage, message).phase))
        return good(message, context)

    def run(numbers, place):
        grid = registered(Nodes(app, files), keys, numbers)
        serve(given, grid, {"out": str(place), "client-keys": str(keys), "join": 1.0, "attempts": 1})

    with raises_with(ExchangeError) as error:
        run([0, 6, 2], tmp_path / "other")
    assert codes(error)[1] == Code.KEY
    assert {phase for site, phase in asked if site == "south"} == {""}  # only greetings
    run([0, 1, 2], tmp_path / "own")
    assert (tmp_path / "own" / "model.json").exists()
    assert ("south", QUESTION) in asked


def test_keys_that_cannot_be_used_are_refused_before_the_first_message(keys, tmp_path):
    with refuses("", fact="client 0 of 6 has no public key: No such file", where=str(tmp_path / "client-0.pub")):
        solve(InProcess(ONLINE, 6), tmp_path)
    for client in range(6):
        (tmp_path / f"client-{client}.pub").write_bytes((keys / f"client-{client}.pub").read_bytes())
    (tmp_path / "client-4.pub").write_bytes((keys / "client-1.pub").read_bytes())
    fourth = str(tmp_path / "client-4.pub")
    with refuses("", fact="the same key as client 1", where=fourth):
        solve(InProcess(ONLINE, 6), tmp_path)
    for damaged in (b"", b"ssh-ed25519 \xff", b"-----BEGIN PUBLIC KEY-----\nx", (keys / "client-4").read_bytes()):
        (tmp_path / "client-4.pub").write_bytes(damaged)
        with refuses("", fact="no public key", where=fourth):
            solve(InProcess(ONLINE, 6), tmp_path)

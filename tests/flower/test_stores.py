"""A client's state changes once for each reply that counts, whatever is repeated or resumed."""

import errno
import os
import re

import federations
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federations import memory
from flwr.app import RecordDict
from test_site import request
from two_phase import TwoPhase

import fedbilevel as fb
from fedbilevel.core.errors import CheckpointError, ExchangeError
from fedbilevel.engines import checkpoint
from fedbilevel.flower.client.site import ClientRuntime
from fedbilevel.flower.client.store import ContextStore, FolderStore, Versions
from fedbilevel.flower.launch.in_process import InProcess
from fedbilevel.flower.refusal import Code, Refusal
from fedbilevel.flower.wire import RequestMessage
from refusals import raises_with

ALGORITHM = TwoPhase(inner=2)  # exchanges 0 and 1 change what a client keeps, exchange 2 reads it
KEPT = Versions(((3, 1), (3, 2), (4, 1)), tuple({"c": np.full(2, v), "n": np.int32(v)} for v in (1.0, 2.0, 3.0)))
LIKE = {"c": np.zeros(2), "n": np.int32(0)}
OTHER = {"c": np.zeros(3), "n": np.int32(0)}


def test_which_state_a_message_sees():
    """A message continues from the state after the client's last reply that counted.

    The latest state of the client here is that after exchange 2 of round 5.
    """
    kept = Versions(((4, 2), (5, 1), (5, 2)), ("s", "b", "n"))
    seen = lambda counted, round: kept.up_to(counted, round).states[-1:]  # noqa: E731
    assert Versions().up_to((5, 2), 7) == Versions()  # the client begins anew
    assert seen((5, 2), 6) == seen((6, 0), 6) == ("n",)
    assert seen((5, 1), 6) == ("b",)  # the last reply did not count
    assert seen((4, 2), 5) == seen((5, 0), 5) == ("s",)  # no reply of round 5 counted, or the round is repeated
    assert seen((-1, -1), 0) == ()  # the run begins again
    with raises_with(Refusal, code=Code.STATE) as error:
        kept.up_to((4, 1), 4)
    assert re.findall(r"round (\d+)", error.value.why) == ["5", "4"]
    assert Versions().up_to((-1, -1), 0, differences=True) == Versions()  # none of its replies has counted
    with raises_with(Refusal, code=Code.STATE):
        Versions().up_to((5, 2), 7, differences=True)  # the server has the sum of changes that it sent
    with raises_with(Refusal, code=Code.STATE):
        kept.up_to((6, 1), 7, differences=True)  # the states are an older copy: the sum also has its later changes
    assert kept.up_to((5, 1), 6, differences=True).states == ("s", "b")


def test_which_states_are_kept():
    """A client keeps its latest states, and those at the start of this round and of the round before.

    The server may find that the client's last reply of the round before did not count. For this case, the client also
    keeps the state before this reply.
    """
    kept = Versions()
    for round in range(4):
        for exchange in range(3):
            kept = kept.then((round, exchange), (round, exchange))
            assert kept.tags == kept.states
    assert kept.tags == ((1, 2), (2, 1), (2, 2), (3, 1), (3, 2))
    again = kept.up_to((1, 2), 2)  # round 2 is repeated
    assert again.then((2, 0), "new").tags == ((1, 2), (2, 0))
    one = Versions()
    for round in range(9):
        one = one.then((round, 0), round)
    assert one.tags == ((6, 0), (7, 0), (8, 0))  # with one exchange in each round


@pytest.fixture(params=["folder", "context"])
def store(request, tmp_path):
    return FolderStore(tmp_path, 0) if request.param == "folder" else ContextStore(RecordDict())


def test_there_and_back(store):
    """A store returns the states of a run as they were saved, and refuses those of another model."""
    assert store.load(federations.NAME, LIKE) == Versions()
    store.save(federations.NAME, KEPT)
    back = store.load(federations.NAME, LIKE)
    assert back.tags == KEPT.tags
    assert jax.tree.all(jax.tree.map(np.array_equal, KEPT.states, back.states))
    assert store.load("f" * 16, LIKE) == Versions()
    with pytest.raises((Refusal, CheckpointError), match=r"another (algorithm or )?model"):
        store.load(federations.NAME, OTHER)


def test_only_names_of_runs_are_names_of_files(tmp_path):
    runtimes = [ClientRuntime(federations.site(ALGORITHM, 0, folder=folder)) for folder in (tmp_path, None)]
    for name in ("../../etc/passwd", "", "abc", "0123456789ABCDEF", "g" * 16, "a" * 65, "0123456789abcdef\n"):
        for runtime in runtimes:
            for phase in ("", "inner_gradient"):
                asked = RequestMessage(run=name, contract=runtime.contract.text, phase=phase)
                assert runtime.respond(asked, memory()).refused == f"{name!r} is not the name of a run"
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        ".audit.lock",
        ".client-0-requests.lock",
        "audit.jsonl",
        "client-0-requests.json",
        "client-0-samples.json",
    ]


def test_clients_may_share_a_folder(tmp_path):
    for client in (1, 10):
        FolderStore(tmp_path, client).save(federations.NAME, Versions(((client, 0),), KEPT.states[:1]))
    tags = [FolderStore(tmp_path, client).load(federations.NAME, LIKE).tags for client in (1, 10)]
    assert tags == [((1, 0),), ((10, 0),)]
    assert FolderStore(tmp_path, 0).load(federations.NAME, LIKE) == Versions()


def test_only_the_latest_runs_are_kept(tmp_path):
    """A folder keeps the states of the latest 20 runs, so that a server that names new runs does not fill the disk.

    The first run is used after each other one, and is therefore always among the latest.
    """
    neighbour, store = FolderStore(tmp_path, 10), FolderStore(tmp_path, 1)  # names of files that begin alike
    neighbour.save(federations.NAME, KEPT)
    names = [f"{number:08x}" for number in range(25)]
    for time, name in enumerate(names):
        store.save(name, KEPT)
        os.utime(store.path(name), (time, time))
        store.save(names[0], KEPT)
        os.utime(store.path(names[0]), (time + 0.5, time + 0.5))
    there = [name for name in names if store.load(name, LIKE).tags]
    assert there == [names[0], *names[6:]]
    assert neighbour.load(federations.NAME, LIKE).tags


def test_the_folder_holds_the_old_state_or_the_new_one(tmp_path, monkeypatch):
    """If the disk is full in the middle of a write, the folder has the old state; a damaged file is refused."""
    store = FolderStore(tmp_path, 0)
    store.save(federations.NAME, KEPT)

    def full(array):
        yield b"half"
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "bytes_of", full)
        with raises_with(CheckpointError, path=store.path(federations.NAME), errno=errno.ENOSPC):
            store.save(federations.NAME, Versions(((5, 0),), KEPT.states[:1]))
    assert store.load(federations.NAME, LIKE).tags == KEPT.tags
    assert [path.name for path in tmp_path.iterdir()] == [f"client-0-run-{federations.NAME}.npz"]
    store.path(federations.NAME).write_bytes(b"half")
    with raises_with(CheckpointError, path=store.path(federations.NAME), errno=None, differences={}):
        store.load(federations.NAME, LIKE)


@pytest.fixture(scope="module")
def runtime():
    return ClientRuntime(federations.site(ALGORITHM, 0))


def calls(runtime, store, round, exchange, counted=None):
    """Return a reply's bytes and how often the client's state was changed, or the text of the refusal.

    By default the reply in the exchange before counted last.
    """
    start = (round - 1, 2) if round else (-1, -1)
    counted = counted or ((round, exchange - 1) if exchange else start)
    phase, message = ("correction", np.zeros(())) if exchange == 2 else ("inner_gradient", np.ones(5))
    places = {"round": round, "exchange": exchange, "counted_round": counted[0], "counted_exchange": counted[1]}
    asked = request(runtime, phase, **places, payload=message.tobytes())
    response = runtime.respond(asked, store)
    if response.refused:
        return response.refused
    kept = store.load(federations.NAME, runtime.contract.state)
    return response.payload, int(kept.states[-1]["calls"])


def test_a_repeated_message_is_applied_once(runtime, store):
    first = calls(runtime, store, 0, 0)
    assert first[1] == 1
    assert calls(runtime, store, 0, 0) == first
    second = calls(runtime, store, 0, 1)
    assert second[1] == 2
    assert calls(runtime, store, 0, 1) == second
    correction = calls(runtime, store, 0, 2)
    assert calls(runtime, store, 0, 2) == correction
    assert calls(runtime, store, 0, 0) == first  # the server repeats the round
    assert calls(runtime, store, 0, 1) == second
    assert calls(runtime, store, 0, 2) == correction
    assert calls(runtime, store, 1, 0)[1] == 3
    assert calls(runtime, store, 0, 1) == second  # the server repeats the round before
    assert calls(runtime, store, 1, 0)[1] == 3
    assert calls(runtime, store, 2, 0)[1] == 4
    assert calls(runtime, store, 0, 1) == "this client's state is of round 2, and cannot return to round 0"
    assert calls(runtime, store, 2, 0)[1] == 4


def test_a_reply_without_a_state_leaves_the_state_as_it_is(store):
    """A client that sends changes of its state continues after a reply of a phase that does not change the state."""

    class Adding(TwoPhase):
        asks = fb.authoring.Asks(differences=True)

    adding = ClientRuntime(federations.site(Adding(inner=2), 0))
    assert [calls(adding, store, *place)[1] for place in ((0, 0), (0, 1), (0, 2), (1, 0))] == [1, 2, 2, 3]


def test_an_answer_that_did_not_count_leaves_no_trace(runtime, store):
    expected = calls(runtime, store, 0, 0)
    calls(runtime, store, 0, 1)  # lost
    assert calls(runtime, store, 1, 0, counted=(0, 0))[1] == 2
    assert calls(runtime, store, 1, 0, counted=(0, 0))[1] == 2  # lost, and asked again
    assert calls(runtime, store, 2, 0, counted=(0, 0))[1] == 2  # lost, and asked in the next round
    assert calls(runtime, store, 2, 1, counted=(2, 0))[1] == 3
    assert expected[1] == 1


@pytest.mark.parametrize("folder", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["folder", "context"])
def test_a_run_resumed_in_the_middle_of_a_round(folder, tmp_path):
    """A run that is resumed in the middle of a round has the numbers of an uninterrupted run.

    All replies in exchange 1 of round 1 are lost after clients have changed their states, and the server is resumed.
    With a folder the clients are started again, too. Without one they continue, since their states are in Flower's
    memory.
    """
    task = federations.TASK
    whole = fb.solve(ALGORITHM, task.problem, task.clients, task.x0, task.y0, rounds=3, cohort=4, key=1, eval_every=3)

    def make(run, node):
        place = tmp_path / str(node["partition-id"]) if folder else None
        return federations.site(ALGORITHM, node["partition-id"], folder=place)

    def lost(response, message):
        raise RuntimeError("lost")

    app = federations.client_app(make)
    faults = {(client, 1, 1): lost for client in range(6)}
    grid = InProcess(federations.misbehaving(app, faults), 6)
    options = {"checkpoint": tmp_path / "checkpoint.npz", "eval_every": 3}
    with raises_with(ExchangeError, round=1, phase="inner_gradient", replies=0, needed=2):
        federations.solve(ALGORITHM, grid, **options)
    grid.client_app = federations.client_app(make) if folder else app
    resumed = federations.solve(ALGORITHM, grid, resume=True, **options)
    federations.same(resumed, whole)
    federations.moved(resumed)
    assert jnp.isfinite(resumed.x).all()

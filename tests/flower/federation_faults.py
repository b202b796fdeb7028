"""Faults in a federation of real processes, a function for each fault.

A function starts a run with its fault. It returns how far the result is from that of a run in which the faulty clients
are absent from the exchanges that the fault concerns. A client that fails in exchange e of round t is left out until
this round ends, and is asked again in the next round.
"""

import signal
from functools import partial

from federation_app import EXCHANGES, FORGETFUL, ROUNDS, SAME, rest_of

from fedbilevel.flower.launch.children import signal_group, stop

PLACE = (2, 0, 0)  # client 2 in round 0, in the first of the round's two exchanges
ABSENT = rest_of(*PLACE)
LATE = ("server", 1, 1)  # the server in round 1, after the first exchange has changed the clients' states


def nothing(trial, algorithm="lfednest"):
    """Nothing fails: all clients reply in all exchanges."""
    run = trial.play(algorithm, [])
    assert run.absent() == set()
    assert len(run.exchanges()) == ROUNDS * EXCHANGES
    return run.difference()


def answered_wrongly(trial, do, code, algorithm="lfednest"):
    """Client 2 fails in one exchange, as `do` says, and works again in the next round."""
    run = trial.play(algorithm, [(*PLACE, do)], **{"norm-bound": 1e6})
    assert run.absent() == ABSENT
    assert code in run.refusals()
    return run.difference()


def sleeps(trial):
    """Client 2 takes longer than the deadline, is still busy when the next round begins, and replies in that round."""
    deadline = 30.0
    run = trial.play("lfednest", [(*PLACE, "sleep", {"seconds": deadline + 2})], deadline=deadline)
    assert run.absent() == ABSENT
    assert "late" in run.refusals()
    return run.difference()


BETWEEN = ("server", 1, 0, "wait")  # the server waits between two rounds


def client_killed(trial):
    """All processes of client 2 get SIGKILL in an exchange, and are started again between two rounds."""
    run = trial.submit("two-phase", [(*PLACE, "kill all"), BETWEEN], trial.out(), deadline=30.0)
    run.until(*PLACE, "kill all")
    trial.federation.nodes.pop(PLACE[0]).wait(30)
    restarted(trial, run, PLACE[0])
    assert run.absent() == ABSENT
    return run.difference()


def node_restarted(trial):
    """A SuperNode is stopped between two rounds, as an operator stops it, and another one is started.

    It is the SuperNode of the client without a folder, so that this client begins the next round without its state.
    """
    run = trial.submit("two-phase", [BETWEEN], trial.out())
    run.until(*BETWEEN)
    child = trial.federation.nodes.pop(FORGETFUL)
    signal_group(child, signal.SIGTERM)
    child.wait(60)
    restarted(trial, run, FORGETFUL)
    assert run.absent() <= rest_of(FORGETFUL, 1)
    return powerful(run)


def superlink_killed(trial):
    """The SuperLink and its child processes get SIGKILL in the middle of a round, and it is started again.

    Its database is kept, so that it still knows the nodes, which connect again. Flower marks the run as failed. The run
    continues when it is submitted again.
    """

    def restart():
        stop([trial.federation.superlink], grace=0)
        trial.federation.restart_superlink()

    return resubmitted(trial, "wait", restart)


def restarted(trial, run, client):
    """Start a client's processes again between two rounds, and let the run continue to its end.

    A SuperLink that identifies nodes by their keys refuses the new node while it believes that the old one is still
    connected. This lasts for up to a minute.
    """
    run.until(*BETWEEN)
    trial.federation.start_node(client)
    trial.federation.wait_online(1, 150, within=0.0)
    trial.go()
    run.finish()


def resubmitted(trial, do, then=lambda: None):
    """Submit a run a second time after its server has ended in the middle of round 1.

    By then clients have changed their states in this round, and the checkpoint has the state before it. The second
    server repeats the round, and no message counts twice: the result is that of an uninterrupted run, except that the
    client without a folder has lost its state.
    """
    out = trial.out()
    run = trial.submit("two-phase", [(*LATE, do)], out)
    run.until(*LATE, do)
    run.give_up()
    then()
    assert not (out / "summary.json").exists()
    again = trial.play("two-phase", [], out)
    assert again.absent() == set()
    return powerful(again)


def powerful(run):
    """Return the run's difference, after a check that the forgetful client's loss of its state changes the result."""
    assert run.difference() > 1e3 * SAME
    return run.difference(forgets=[(FORGETFUL, 1)])


FAULTS = {
    "none": nothing,
    "none, client state": partial(nothing, algorithm="two-phase"),
    "raises": partial(answered_wrongly, do="raise", code="flower"),
    "NaN": partial(answered_wrongly, do="nan", code="bound"),
    # The reply is spoiled on its way, after the client has changed its state. The change must have no effect.
    "NaN, client state": partial(answered_wrongly, do="nan", code="bound", algorithm="two-phase"),
    "wrong shape": partial(answered_wrongly, do="shape", code="malformed"),
    "wrong number of bytes": partial(answered_wrongly, do="bytes", code="malformed"),
    "huge norm": partial(answered_wrongly, do="huge", code="bound"),
    "worker killed": partial(answered_wrongly, do="kill", code="flower"),
    "sleeps past the deadline": sleeps,
    "client killed": client_killed,
    "SuperNode restarted, no folder": node_restarted,
    "SuperLink restarted": superlink_killed,
    "server killed": partial(resubmitted, do="kill"),
}
"""The faults by name. Each takes a trial, and returns the largest difference of x and y from what they should be."""

__all__ = ["FAULTS", "SAME"]

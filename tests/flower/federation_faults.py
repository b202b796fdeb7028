"""Faults in a federation of real processes, a function for each fault.

A function plays a run and returns how far its result is from the run in which the clients with the fault were absent
in the exchanges concerned. A client that fails in exchange e of round t is left out until this round ends, and is asked
again in the next round.
"""

import signal
from functools import partial

from federation_app import EXCHANGES, FORGETFUL, ROUNDS, SAME, rest_of

from fedbilevel.flower.launch.children import signal_group, stop

PLACE = (2, 0, 0)  # client 2, round 0, the first of its two exchanges
ABSENT = rest_of(*PLACE)
LATE = ("server", 1, 1)  # clients have been asked, and their state has changed, in this round


def nothing(trial, algorithm="lfednest"):
    """Everybody answers."""
    run = trial.play(algorithm, [])
    assert run.absent() == set()
    assert len(run.exchanges()) == ROUNDS * EXCHANGES
    return run.difference()


def answered_wrongly(trial, do, code, algorithm="lfednest"):
    """Client 2 does something wrong in an exchange and is well again."""
    run = trial.play(algorithm, [(*PLACE, do)], **{"norm-bound": 1e6})
    assert run.absent() == ABSENT
    assert code in run.refusals()
    return run.difference()


def sleeps(trial):
    """Client 2 takes longer than the deadline; the next round finds it at work still, and waits for it."""
    deadline = 30.0
    run = trial.play("lfednest", [(*PLACE, "sleep", {"seconds": deadline + 2})], deadline=deadline)
    assert run.absent() == ABSENT
    assert "late" in run.refusals()
    return run.difference()


BETWEEN = ("server", 1, 0, "wait")  # the server waits between two rounds


def client_killed(trial):
    """kill -9 for all processes of a client in an exchange; they come back while the server waits between rounds."""
    run = trial.submit("two-phase", [(*PLACE, "kill all"), BETWEEN], trial.out(), deadline=30.0)
    run.until(*PLACE, "kill all")
    trial.federation.nodes.pop(PLACE[0]).wait(30)
    restarted(trial, run, PLACE[0])
    assert run.absent() == ABSENT
    return run.difference()


def node_restarted(trial):
    """A SuperNode is stopped between two rounds, as an operator does it, and another one is started."""
    run = trial.submit("two-phase", [BETWEEN], trial.out())
    run.until(*BETWEEN)
    child = trial.federation.nodes.pop(FORGETFUL)
    signal_group(child, signal.SIGTERM)
    child.wait(60)
    restarted(trial, run, FORGETFUL)
    assert run.absent() <= rest_of(FORGETFUL, 1)
    return powerful(run)


def superlink_killed(trial):
    """kill -9 for the SuperLink and all it started, in mid round; it comes back with its database.

    Flower calls the run failed, and knows the nodes, which connect again. The run, submitted again, goes on.
    """

    def restart():
        stop([trial.federation.superlink], grace=0)
        trial.federation.restart_superlink()

    return resubmitted(trial, "wait", restart)


def restarted(trial, run, client):
    """Start a client's processes again between two rounds, and go on to the end. A SuperLink that knows its nodes by
    keys refuses one while it believes that it never left: for up to a minute."""
    run.until(*BETWEEN)
    trial.federation.start_node(client)
    trial.federation.wait_online(1, 150, within=0.0)
    trial.go()
    run.finish()


def resubmitted(trial, do, then=lambda: None):
    """A run whose server ends in the middle of round 1, submitted again.

    Clients have answered by then, and the server has not heard. The round is played again, and no message counts twice:
    the result is that of the unbroken run, but for a client without a folder.
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
    """The run's difference; that the forgetful client loses what it kept is to be seen in the result."""
    assert run.difference() > 1e3 * SAME
    return run.difference(forgets=[(FORGETFUL, 1)])


FAULTS = {
    "none": nothing,
    "none, client state": partial(nothing, algorithm="two-phase"),
    "raises": partial(answered_wrongly, do="raise", code="flower"),
    "NaN": partial(answered_wrongly, do="nan", code="bound"),
    # it is spoiled on its way: the client has changed its state by then, and is not told to take that back
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
"""By name; each takes a trial and returns the largest difference of x and y from what they should be."""

__all__ = ["FAULTS", "SAME"]

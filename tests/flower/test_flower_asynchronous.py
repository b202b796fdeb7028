"""Asynchronous methods over Flower have the numbers of a simulation with the same clock, also after faults."""

import json
from functools import cache
from typing import NamedTuple

import federations
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flwr.app import Error, Message

import fedbilevel as fb
from fedbilevel import authoring
from fedbilevel.core.config import static
from fedbilevel.engines.virtual_time import TICK, ClockState
from fedbilevel.flower.launch.in_process import InProcess
from fedbilevel.flower.server.terms import Terms
from fedbilevel.flower.wire import RequestMessage, decode
from fixed_steps import fixed

TASK = federations.TASK
LR, ROUNDS = 0.05, 6
PATIENT = Terms(deadline=1e6, poll=1e3)


class State(NamedTuple):
    round: jax.Array
    x: jax.Array
    y: jax.Array
    last_x: jax.Array  # Σ p_i · (the last reply of client i, as a gradient)
    last_y: jax.Array
    kept: dict  # Σ p_i · (what client i keeps), when clients were last asked for it


class Differences(authoring.Algorithm):
    """Let clients keep their last gradients in x and in y, and send the differences from them.

    The server adds up the differences to the means of the last gradients. A round has exchanges for y in a loop, and
    then one for x. From round `probe` on, all clients then also send what they keep.
    """

    n: int = static(default=2)
    inner: int = static(default=2)
    max_staleness: int | None = static(default=None)
    probe: int = static(default=99)

    @property
    def asks(self):
        return authoring.Asks(first=self.n)

    def init(self, x, y):
        return State(jnp.zeros((), int), x, y, jnp.zeros_like(x), jnp.zeros_like(y), self.init_client(x, y))

    def init_client(self, x, y):
        return {"x": jnp.zeros_like(x), "y": jnp.zeros_like(y)}

    @authoring.phase
    def y_step(self, client, message, key):
        loss, new = jax.value_and_grad(client.problem.inner, 1)(*message, client.inner_batch(key, 4))
        return authoring.Reply(new - client.state["y"], {**client.state, "y": new}, {"inner": loss}, gradients=1)

    @authoring.phase
    def x_step(self, client, message, key):
        new = jax.grad(client.problem.outer)(*message, client.outer_batch(key, 4))
        return authoring.Reply(new - client.state["x"], {**client.state, "x": new}, gradients=2)

    @authoring.phase
    def what_is_kept(self, client, message, key):
        return authoring.Reply(client.state)

    def round(self, fed, state, key):
        def step(fed, carry, key):
            y, last = carry
            last = last + fed.sum_first(self.n, self.y_step, (state.x, y), key, max_staleness=self.max_staleness)
            return y - LR * last, last

        y, last_y = fed.repeat(self.inner, step, (state.y, state.last_y), key)
        last_x = state.last_x + fed.sum_first(self.n, self.x_step, (state.x, y), key, max_staleness=self.max_staleness)

        def request(fed, kept, key):
            return fed.mean(self.what_is_kept, jnp.zeros(()), key)

        kept = fed.repeat(jnp.where(state.round >= self.probe, 1, 0), request, state.kept, key)
        return State(state.round + 1, state.x - LR * last_x, y, last_x, last_y, kept)


def following(clock, exchanges, units):
    """Return a clock's delays for rounds of `exchanges` exchanges; `units` has the gradients and products by phase."""
    pace = clock.pace(6)

    @cache
    def seconds(number, phase):
        now = ClockState(jnp.asarray(number), jnp.asarray(0), jnp.asarray(0))
        return np.asarray(pace.durations(now, jnp.arange(6), units.get(phase, 0))) * TICK

    def delay(client, message):
        request: RequestMessage = decode(RequestMessage, message)
        return seconds(request.round * exchanges + request.exchange, request.phase)[client] if request.phase else 0.0

    return delay


def both(algorithm, clock, exchanges, units, **options):
    """Return the results of a run on this machine and over Flower."""
    same = {"rounds": ROUNDS, "key": 1, "eval_every": 1, "metrics": {"norm": lambda x, y: x @ x}, **options}
    here = fb.solve(algorithm, TASK.problem, TASK.clients, TASK.x0, TASK.y0, engine=fb.Local(clock=clock), **same)
    grid = InProcess(federations.app(algorithm), 6, delay=following(clock, exchanges, units))
    there = federations.solve(algorithm, grid, cohort=None, terms=PATIENT, **same)
    return here, there


UNITS = {"y_step": 1, "x_step": 2}
SPREAD = {"network": 1.0, "spread": 0.6, "stragglers": 2}
INNER = fb.parts.MeanGradient(rounds=2, local_steps=2)
AFBO = fb.Asynchronous(
    fixed(fb.AFBO(inner=INNER, hypergradient=fb.parts.SystemSteps(), batch_size=4)), wait_for=2, delay_penalty=0
)
CASES = {
    "work, no ties": (
        Differences(max_staleness=2), fb.Clock(compute=0.3, network=1.0, spread=0.6, stragglers=2, seed=3), 3, UNITS
    ),
    "ties, a mean": (Differences(n=1, max_staleness=1, probe=0), fb.Clock(network=[1, 2, 1, 3, 1, 7]), 4, UNITS),
    "AFBO": (AFBO, fb.Clock(compute=0.2, **SPREAD, seed=3), 3, {"inner.gradients": 2, "outer_directions": 3}),
}  # fmt: skip
SLOW = {"AFBO", "work, no ties"}


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow) if c in SLOW else c for c in CASES])
def test_agrees_with_local(case):
    """An asynchronous run has the state, history with staleness, ledger and time of `Local` with the same clock.

    The tolerance of 1e-12 is derived in tests/engines/test_agreement.py.
    """
    here, there = both(*CASES[case])
    federations.same(here, there)
    np.testing.assert_allclose(there.history["time"], here.history["time"], rtol=0, atol=1e-9)
    assert here.ledger == there.ledger
    federations.moved(there)
    assert np.nanmax(here.history["staleness"]) > 0


def flower_error(response, message):
    return Message(Error(code=8, reason="ClientApp stopped responding"), reply_to=message)


def compared(lines, trace):
    """Compare the states of clients with the server's sums in the rounds in which both must agree; return (kind,
    round).

    The kind is x or y. Both must agree if all clients were idle at the end of a round, and if all replies that had
    arrived by then have counted. The second condition holds after the first exchange of the kind in the next round, if
    this exchange took no time.
    """
    complete = {line["round"] for line in lines if line["phase"] == "what_is_kept" and len(line["answered"]) == 6}
    found = []
    for line in lines:
        round, kind = line["round"], line["phase"][0]
        if kind in "xy" and line["seconds"] == 0 and round - 1 in complete:
            here, there = getattr(trace[round + 1], f"last_{kind}"), trace[round].kept[kind]
            np.testing.assert_allclose(here, there, rtol=0, atol=1e-12)
            assert float(jnp.linalg.norm(here)) > 1e-6
            found.append((kind, round))
    return found


def test_a_lost_answer_leaves_no_trace_in_what_its_client_keeps(tmp_path):
    """The weighted sum of what clients keep is the server's sum, although some replies were lost or late.

    All clients are idle at the end of a round. The next exchange of a kind that takes no time counts the replies that
    have arrived. Clients 1 and 4 have computed replies that are lost, and one of client 2 comes too late. If a client
    kept a trace of such a reply, the sums would differ for ever.
    """
    algorithm, log = Differences(n=1, inner=1, probe=0), tmp_path / "log.jsonl"
    faults = {(1, 2, 0): flower_error, (4, 3, 1): flower_error, (4, 4, 0): flower_error}

    def delay(client, message):
        request: RequestMessage = decode(RequestMessage, message)
        late = (client, request.round, request.exchange) == (2, 4, 0)
        return 150.0 if late else 1.0 + 0.3 * client if request.phase else 0.0

    grid = InProcess(federations.misbehaving(federations.app(algorithm), faults), 6, delay=delay)
    trace = {}
    note = lambda result, row: trace.update({result.round: result.state})  # noqa: E731
    options = {"cohort": None, "rounds": 12, "terms": Terms(deadline=100.0), "log": log, "callbacks": [note]}
    federations.solve(algorithm, grid, **options)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    refused = {client for line in lines for client in line.get("refused", {})}
    assert refused == {"1", "2", "4"}
    assert {kind for kind, round in compared(lines, trace) if round > 7} == {"x", "y"}


class Killed(BaseException):
    """Ends a run at once, since no handler of errors catches it."""


def test_a_run_that_was_killed_goes_on(tmp_path):
    """A run continues after it was killed in the middle of a round, and again after it was stopped between two rounds.

    Replies that had arrived early are in the checkpoint. Replies that were under way at the checkpoint no longer count.
    This also holds for a reply that had counted in the round that is now repeated, and whose client has replied to
    another request since. So the weighted sum of the clients' states is the server's sum.
    """
    algorithm, log, asked = Differences(inner=1, probe=9), tmp_path / "log.jsonl", []

    def delay(client, message):
        request: RequestMessage = decode(RequestMessage, message)
        if request.round >= 3 and request.phase == "x_step":
            asked.append(request.round)
            if len(asked) == 5:
                raise Killed
        return 1.0 + 0.7 * client if request.phase else 0.0

    grid = InProcess(federations.app(algorithm), 6, delay=delay)
    trace = {}
    note = lambda result, row: trace.update({result.round: result.state})  # noqa: E731
    options = {"cohort": None, "log": log, "callbacks": [note], "checkpoint": tmp_path / "checkpoint.npz"}
    options |= {"checkpoint_every": 1}
    with pytest.raises(Killed):
        federations.solve(algorithm, grid, rounds=14, **options)
    for rounds in (11, 14):
        federations.solve(algorithm, grid, rounds=rounds, resume=True, **options)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["round"] for line in lines if line["exchange"] == 0].count(asked[4]) == 2  # it was repeated
    assert {round for _, round in compared(lines, trace)} == {10, 11, 12, 13}

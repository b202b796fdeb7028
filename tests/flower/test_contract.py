"""Server and sites each draw up the contract of a run from their own code, and find the differences between the two.

The contract says which calls a round may make.
"""

import json
import re
from dataclasses import replace

import federations
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from agreement import MINIMAX, SIMPLE_BILEVEL, SINGLE_LEVEL
from two_phase import TwoPhase

import fedbilevel as fb
from fedbilevel import authoring
from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core.config import static
from fedbilevel.core.hyperparameters import at
from fedbilevel.core.tree import XY
from fedbilevel.flower.client.site import ClientRuntime
from fedbilevel.flower.launch.in_process import InProcess
from fedbilevel.flower.wire import disagreement, draw_up, layout
from fixed_steps import fixed
from refusals import refuses

TASK = federations.TASK
EXAMPLES = TASK.clients.examples()


def contract(algorithm, problem=TASK.problem, y=TASK.y0, x=TASK.x0):
    return draw_up(algorithm, problem, x, y, EXAMPLES)


def problem_for(cls):
    kinds = getattr(cls, "solves", (fb.Bilevel,))
    if fb.SingleLevel in kinds:
        return SINGLE_LEVEL, None
    if fb.SimpleBilevel in kinds:
        return SIMPLE_BILEVEL, None
    return TASK.problem if fb.Bilevel in kinds else MINIMAX, TASK.y0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_call_of_a_round_is_in_it(name):
    """The contract of a method has all calls that its rounds make, and no others.

    Two rounds are traced with a `fed` that repeats each loop twice, and finds each call by the layout of its message.
    """
    algorithm = fixed(ALGORITHMS[name]())
    problem, y = problem_for(type(algorithm))
    made = contract(algorithm, problem, y)
    found = set()

    class Noting:
        def __init__(self):
            self.problem, self.sampled, self.repetition = problem, False, 0

        def mean(self, phase, message, key, *, unbiased=False, fresh=None):
            asked = now.phase_name(phase), layout(jax.tree.map(jnp.asarray, message))
            call = next(c for c in made.calls.values() if (c.phase, layout(c.message)) == asked)
            found.add(call.name)
            return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), call.update)

        def sum_first(self, n, *asked, max_staleness=None):
            return self.mean(*asked)

        def repeat(self, n, body, carry, key, *, until=None):
            for i in range(2):
                carry = body(self, carry, jax.random.fold_in(key, i))
            return carry

    def round(x, y, key):
        state = now.init(x, y)
        for _ in range(2):  # the second round begins with the state after the first one
            state = now.round(Noting(), state, key)
        return state

    now = at(algorithm, jnp.zeros((), jnp.int32))
    jax.eval_shape(round, TASK.x0, y, jax.random.key(0))
    assert found == set(made.calls)
    assert {call.phase for call in made.calls.values()} <= algorithm.phases.keys()


def test_both_sides_draw_up_the_same():
    """Server and client draw up the same contract.

    The server does so from the shapes of samples, and the client from its own samples, of another number.
    """
    server = contract(fixed(fb.SimFBO(batch_size=4)))
    client = ClientRuntime(federations.site(fixed(fb.SimFBO(batch_size=4)), 2)).contract
    assert server.text == client.text
    assert server.digest == client.digest


START = fixed(fb.SimFBO(batch_size=4))
OTHERS = {
    "another number": (replace(START, client_lr=0.3), {}, "client_lr.v is 0.1 at the server and 0.3 at the site"),
    "another count": (fixed(fb.SimFBO(batch_size=5)), {}, "batch_size is 4 at the server and 5 at the site"),
    "another method": (fixed(fb.ShroFBO(batch_size=4)), {}, "algorithm is SimFBO at the server and ShroFBO at the"),
    "a schedule": (replace(START, client_lr=optax.constant_schedule(0.1)), {}, "hyperparameters.client_lr"),
    "other dtypes": (fixed(fb.SimFBO(batch_size=4)), {"x": jnp.zeros(2, jnp.float32)}, "x is float64[2] at the server"),
}  # fmt: skip


@pytest.mark.parametrize("other", OTHERS)
def test_a_difference_is_found_and_named(other):
    algorithm, more, expected = OTHERS[other]
    mine, theirs = contract(fixed(fb.SimFBO(batch_size=4))), contract(algorithm, **more)
    assert mine.digest != theirs.digest
    assert expected in disagreement(mine.text, theirs.text).why


def test_another_number_of_features_is_a_difference_of_the_samples():
    """If sites have another number of features, the difference that is reported is that of the samples.

    The shapes of the calls follow from it, and are not reported. The site or the operator can correct it.
    """
    fit = lambda x, y, batch: jnp.mean((batch["u"] @ y) ** 2) + jnp.sum(jnp.exp(x) * y**2)  # noqa: E731

    def of(features, dtype=float):
        zeros, example = np.zeros(features), {"u": jax.ShapeDtypeStruct((1, features), dtype)}
        return draw_up(START, fb.Bilevel(fit, fit), zeros, zeros, (example, example)).text

    said = disagreement(server=of(8), site=of(9))
    assert said.why == "outer samples['u'] is of shape [8] at the server and of shape [9] at the site"
    assert "the site or the operator" in said.line
    assert of(8, np.float32) == of(8)  # samples of another dtype change no call


def test_schedules_that_differ_later_are_found():
    a, b = (fixed(fb.SimFBO(client_lr=optax.piecewise_constant_schedule(0.1, {50: scale}))) for scale in (0.5, 0.1))
    mine, theirs = contract(a), contract(b)
    assert (
        "schedules.client_lr.v is ['0.1', '0.1', '0.1', '0.05', '0.05'] at the server"
        in disagreement(mine.text, theirs.text).why
    )
    assert contract(a).digest == mine.digest


def test_rules_that_differ_in_a_later_inner_round_are_found():
    """Step sizes that differ only in later inner rounds are found.

    The contract has β_{t,k} for t and k in 0, 1, 10, 100 and 1000, which gives 25 numbers.
    """

    def of(falls):
        inner = fb.parts.MeanGradient(lr=lambda t, k: 0.1 / (1 + t + falls * k))
        return contract(fixed(fb.AFBO(inner=inner)))

    mine, theirs = of(1), of(2)
    assert len(mine.schedules()["inner.lr"]) == 25
    assert mine.schedules()["inner.lr"][:2] == ["0.1", "0.05"]
    assert "schedules.inner.lr is ['0.1', '0.05'," in disagreement(mine.text, theirs.text).why


def test_a_schedule_may_begin_at_0():
    """A schedule of step sizes may begin at 0, as a warm-up does, although a constant step size of 0 is refused."""
    made = contract(fixed(fb.SimFBO(server_lr=optax.linear_schedule(0.0, 0.1, 10))))
    assert "['0', '0.01', '0.1', '0.1', '0.1']" in str(made.schedules())


def test_a_fresh_cohort_keeps_nothing():
    class Forgetful(TwoPhase):
        asks = authoring.Asks(fresh_cohorts=1)

        @authoring.phase
        def keeping(self, client, message, key):
            return authoring.Reply(message, state=message)

        def round(self, fed, state, key):
            return state._replace(y=fed.mean(self.keeping, state.y, key, fresh=0))

    with refuses("", fact="Reply.state is float64[3]", where="Forgetful.keeping"):
        contract(Forgetful())


def test_another_version_differs(monkeypatch):
    """If the versions of fedbilevel differ, this difference is reported, and no other one."""
    mine = contract(fixed(fb.SimFBO())).text
    monkeypatch.setattr("fedbilevel.flower.wire.__version__", "0.0.1")
    said = disagreement(mine, contract(fixed(fb.SimFBO()), x=TASK.x0[:1]).text).why
    assert re.fullmatch(r"fedbilevel is \S+ at the server and 0\.0\.1 at the site", said)


@pytest.mark.parametrize("term", ["hyperparameters", "calls"])
def test_what_is_missing_is_a_difference(term):
    """A term that one side lacks is a difference, even if the other side has None for it."""
    mine = json.loads(contract(fixed(fb.SimFBO(batch_size=4))).text)
    mine[term]["optional"] = None
    theirs = {**mine, term: {name: value for name, value in mine[term].items() if name != "optional"}}
    mine, theirs = json.dumps(mine), json.dumps(theirs)
    assert disagreement(mine, theirs).why == f"{term}.optional is None at the server and missing at the site"
    assert disagreement(theirs, mine).why == f"{term}.optional is missing at the server and None at the site"


@pytest.mark.parametrize("text", ["", "[]", "1", "{", "[" * 10**5])
def test_what_is_no_contract(text):
    """A text that is not a contract is reported as one that cannot be read."""
    assert disagreement(contract(TwoPhase()).text, text).why == "a contract cannot be read"


def test_no_values_are_in_it():
    """A contract has the shapes of x0, y0 and the clients' states, and none of their values."""
    made = contract(TwoPhase(), x=TASK.x0 + 3.14159, y=TASK.y0 + 2.71828)
    assert made.text == contract(TwoPhase()).text
    assert json.loads(made.text)["state"] == ["['calls'] int32[]", "['control'] float64[3]"]


class Odd(authoring.Algorithm):
    """Send, reply or keep something odd, which `what` names."""

    what: str = static(default="")

    def init(self, x, y):
        return XY(x, y)

    def init_client(self, x, y):
        return jax.random.key(0) if self.what == "key kept" else None

    @authoring.phase
    def phase(self, client, message, key):
        if self.what == "nothing":
            assert message == (None, ())
            return authoring.Reply({"x": jnp.ones(2), "none": None})
        if self.what == "number":  # a weakly typed number of JAX, which leaves single precision as it is
            return authoring.Reply(message[0] * message[1])
        return authoring.Reply(key if self.what == "key in reply" else jnp.ones(2))

    def round(self, fed, state, key):
        x, y = state
        messages = {"key in message": {"k": key}, "nothing": (None, ()), "number": (jnp.asarray(0.5), x)}
        message = messages.get(self.what, x)
        if self.what == "changing" and not isinstance(x, jax.core.Tracer):
            message = x[:1]
        reply = fed.mean(self.phase, message, key)
        return XY(x - (reply["x"] if self.what == "nothing" else reply), y)


@pytest.mark.parametrize(("what", "place"), [
    ("key in message", "the message of phase phase: ['k']"),
    ("key in reply", "the update of phase phase: value"),
    ("key kept", "the state of clients: value"),
])  # fmt: skip
def test_keys_are_refused(what, place):
    """A PRNG key in a message, in an update or in the state of clients is refused."""
    with refuses(place, "a PRNG key"):
        contract(Odd(what=what))


def run(what, engine=None, dtype=float):
    task = replace(TASK, x0=TASK.x0.astype(dtype))
    clients = task.clients if engine else fb.RemoteClients.of(task.clients)
    engine = engine or federations.Flower(grid=InProcess(federations.app(Odd(what=what), task), 6))
    return fb.solve(Odd(what=what), task.problem, clients, task.x0, task.y0, rounds=2, engine=engine)


def test_empty_messages_and_missing_leaves():
    """A message without arrays and an update with a missing leaf can be sent.

    The update of each client is 1, so that x falls by 1 in each of two rounds, from 0.
    """
    np.testing.assert_allclose(run("nothing").x, -2.0, rtol=0, atol=1e-15)


def test_weak_numbers_stay_weak():
    """A message's weakly typed number stays weakly typed over Flower, as in the compiled engine.

    It is multiplied by x in single precision, and the product is in single precision.
    """
    result = run("number", dtype=jnp.float32)
    assert result.x.dtype == run("number", fb.Local(), jnp.float32).x.dtype == jnp.float32


def test_messages_of_changing_shape_are_refused():
    with refuses("message of phase phase", "value float64[1]"):
        run("changing")

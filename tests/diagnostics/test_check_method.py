"""Does check_method pass correct methods, and name the mistakes of others?"""

import itertools
import os
import signal
import warnings
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.authoring import XY, Algorithm, Allows, Facts, No, OwnParts, Reply, UnitPolicy, phase, positive, static
from fedbilevel.diagnostics.method import (
    Runs,
    another_seed,
    checks,
    not_over_flower,
    over_flower,
    with_layers,
    with_own_leaves,
)
from fedbilevel.diagnostics.report import outcome
from fedbilevel.engines.local.engine import Local
from fedbilevel.tasks.quadratic import quadratic
from representatives import slow_but

TASK = quadratic(clients=4, samples=(3, 5), seed=6)  # clients of two kinds, each of which is compiled by itself
MINE = TASK.problem, TASK.clients, TASK.x0, TASK.y0


class Descent(Algorithm):
    """A step on y along the mean gradient of the inner loss.

    Args:
        lr: the step.
    """

    lr: float = positive(default=0.1)

    def init(self, x, y):
        return XY(x, y)

    @phase(takes=("x", "y"), gives="y")
    def gradient(self, client, at, key):
        """Reply with the gradient."""
        return Reply(jax.grad(client.problem.inner, 1)(*at, client.inner_batch(key, 2)), gradients=1)

    def round(self, fed, state, key):
        mean = fed.mean(self.gradient, tuple(state), key)
        return state._replace(y=jax.tree.map(lambda y, slope: y - self.lr * slope, state.y, mean))


class Patient(Descent):
    """Steps that declare that replies may be late, and that clients may hold a part of the model."""

    allows = Allows(late=("gradient",), submodels=UnitPolicy())


class Still(Descent):
    """Rounds that change nothing."""

    def round(self, fed, state, key):
        return state


class Counting(Descent):
    """Steps whose length is counted outside of the program, so that it differs in each round, whatever the seed."""

    count = itertools.count(1).__next__

    def round(self, fed, state, key):
        length = jax.pure_callback(lambda _: np.asarray(float(type(self).count())), jnp.zeros(()), state.y[0])
        return state._replace(y=state.y - 1e-3 * length)


class Neighbours(Descent):
    """Replies made of the arrays which `Local` shares among all clients, not of the client's own samples."""

    @phase(takes=("x", "y"), gives="y")
    def gradient(self, client, at, key):
        """Reply with the mean of c over these arrays."""
        return Reply(jnp.mean(client.inner.values["c"], axis=0))


class Keyless(Descent):
    """Replies whose samples are always drawn with the same key.

    Args:
        batch_size: the number of samples.
    """

    batch_size: int | None = static(default=2)

    @phase(takes=("x", "y"), gives="y")
    def gradient(self, client, at, key):
        """Reply with the gradient."""
        batch = client.inner_batch(jax.random.key(3), self.batch_size)
        return Reply(jax.grad(client.problem.inner, 1)(*at, batch), gradients=1)


class Elsewhere(Descent):
    """A method that claims to end at the solution, but never moves x."""

    facts = Facts(paper="none", good_for="nothing", exchanges="one", up="1 like y", bias="nothing", cost="a gradient")


class Fragile(Descent):
    """Rounds that fail with a KeyError if the round asks only some of the clients."""

    def round(self, fed, state, key):
        return super().round(fed, {}["state"] if fed.sampled else state, key)


class Both(Descent):
    """A method with a step on x and a step on y. Leaves of y can stay at the clients, and x can lie in a set."""

    allows = Allows(own_y={"gradients": OwnParts(("y",), (("y", lambda method: method.lr),))})

    @phase(takes=("x", "y"), gives=("x", "y"))
    def gradients(self, client, at, key):
        """Reply with the gradients of the outer loss in x, and of the inner loss in y."""
        batch = client.inner_batch(key, 2)
        of_x = jax.grad(client.problem.outer)(*at, client.outer_batch(key, 2))
        return Reply((of_x, jax.grad(client.problem.inner, 1)(*at, batch)), gradients=2)

    def round(self, fed, state, key):
        mean = fed.mean(self.gradients, tuple(state)[:2], key)
        return state._replace(
            **{
                name: jax.tree.map(lambda z, slope: z - self.lr * slope, getattr(state, name), slopes)
                for name, slopes in zip("xy", mean, strict=True)
            }
        )


class Uphill(Both):
    """Own leaves of y move up the gradient, as the declared size of the step has the wrong sign."""

    allows = Allows(own_y={"gradients": OwnParts(("y",), (("y", lambda method: -method.lr),))})


class NotAPhase(Both):
    """The declaration names a phase that the method does not have."""

    allows = Allows(own_y={"gradiens": OwnParts(("y",), (("y", lambda method: method.lr),))})


class OtherPhase(Both):
    """The declaration names another phase than the one for which a round asks."""

    allows = Allows(own_y={"gradient": OwnParts(("y",), (("y", lambda method: method.lr),))})


class OtherVariable(Both):
    """The declaration names a step on a variable that no message has."""

    allows = Allows(own_y={"gradients": OwnParts(("y",), (("yy", lambda method: method.lr),))})


class NoPhase(Both):
    """The declaration names no phase."""

    allows = Allows(own_y={})


class OtherReply(Both):
    """The metrics of a reply are wrong, but only if leaves of y are the clients' own."""

    @phase(takes=("x", "y"), gives=("x", "y"))
    def gradients(self, client, at, key):
        """Reply with the gradients of `Both`."""
        reply = super().gradients(client, at, key)
        return reply if client.problem.own is None else reply._replace(metrics=3)


class Copied(NamedTuple):
    """Hold x, y, and a copy of x."""

    x: Any
    y: Any
    copy: Any


class Copies(Both):
    """Rounds begin at a copy of x, which the projection onto a set does not reach."""

    def init(self, x, y):
        return Copied(x, y, jax.tree.map(jnp.copy, x))

    def round(self, fed, state, key):
        moved = super().round(fed, Copied(state.copy, state.y, None), key)
        return Copied(moved.x, moved.y, jax.tree.map(lambda x: x + 0, moved.x))


class Halves(Both):
    """The state has half of x, so that x cannot be replaced."""

    def init(self, x, y):
        return HalfX(x / 2, y)

    def round(self, fed, state, key):
        moved = super().round(fed, XY(state.x, state.y), key)
        return HalfX(moved.x / 2, moved.y)


class HalfX(NamedTuple):
    """Hold half of x, and y."""

    half: Any
    y: Any

    @property
    def x(self):
        return 2 * self.half


def outcomes(report):
    return {check.name: check.outcome for check in report.checks}


@pytest.mark.slow
def test_a_method_that_is_right():
    report = fb.check_method(Patient(), *MINE, rounds=2)
    found = outcomes(report)
    assert not report.failed, report
    assert list(found.values()) == ["passed"] * 10 + ["refused", "allowed", "refused", "refused", "passed"]
    assert [name for name in found if found[name] in ("refused", "allowed")] == [
        "the solution of a quadratic problem", "clients of limited capacity", "an x that clients keep",
        "leaves of y that are each client's own",
    ]  # fmt: skip


WRONG = {
    Still: ({"rounds move the state", "noised replies"}, {"a seed repeats a run"}),
    Counting: (
        {"a seed repeats a run", "one client after the other", "chunks of one client",
         "streamed samples", "a cohort of 2", "over Flower"},
        {"rounds move the state", "another seed"},
    ),
    Neighbours: (
        {"one client after the other", "streamed samples", "a cohort of 2", "over Flower"},
        {"rounds move the state", "chunks of one client"},
    ),
    Keyless: ({"another seed"}, {"rounds move the state", "a seed repeats a run"}),
    Elsewhere: ({"the solution of a quadratic problem"}, {"rounds move the state"}),
}  # fmt: skip
"""For each method, the checks that fail, and some checks that it passes."""


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_is_found(kind):
    failed, passed = WRONG[kind]
    with jax.enable_x64(True):
        runs = Runs(kind(), *MINE, rounds=2, key=0)
        found = [outcome(*check) for check in checks(runs, runs.run(Local())) if check[0] in failed | passed]
    assert {one.name: one.outcome for one in found} == dict.fromkeys(failed, "failed") | dict.fromkeys(passed, "passed")
    assert all(isinstance(one.error, fb.errors.CheckError) == (one.name in failed) for one in found)


OWN_LEAVES, IN_A_SET = "leaves of y that are each client's own", "an x in a set"


@pytest.mark.parametrize(
    ("kind", "own", "in_a_set"),
    [
        (Both, "passed", "passed"),
        (Uphill, "failed with a single client and its own leaves of y, y differs", None),
        (NotAPhase, "failed unknown phase 'gradiens' in own_y of NotAPhase; did you mean 'gradients'?", None),
        (OtherPhase, "failed OtherPhase.allows.own_y = ['gradient'] is not allowed", None),
        (OtherVariable, "failed unknown variable 'yy' in own_y of OtherVariable.gradients; did you mean 'y'?", None),
        (NoPhase, "failed NoPhase.allows.own_y = [] is not allowed", None),
        (OtherReply, "failed OtherReply.gradients: Reply.metrics is", None),
        pytest.param(
            *(Copies, "passed", "failed state.copy is a copy of x that stays outside of the box"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(Halves, "passed", "refused Halves: with a project_x the state's x must be among its leaves"),
            marks=pytest.mark.slow,
        ),
        (Descent, "refused it needs all of y on the server", "passed"),
    ],
)
def test_what_a_method_cannot_do_with_own_leaves_and_in_a_set_is_said(kind, own, in_a_set):
    """The outcomes of both checks for correct methods, wrong ones of each kind, and methods that refuse.

    Only an `UnsupportedError` counts as a refusal. Other errors, as of a wrong declaration, are failures. If `in_a_set`
    is None, the method does the same as `Both` with an x in a set.
    """
    expected = {OWN_LEAVES: own} | ({IN_A_SET: in_a_set} if in_a_set else {})
    with jax.enable_x64(True):
        runs = Runs(kind(), *MINE, rounds=3, key=0)
        plain = runs.run(Local()) if in_a_set else None  # only the check with a set compares with it
        found = {one[0]: outcome(*one) for one in checks(runs, plain) if one[0] in expected}
    for name, words in expected.items():
        assert f"{found[name].outcome} {found[name].detail}".startswith(words), found[name]


def test_what_fails_is_named_in_a_report_of_all_checks():
    with pytest.raises(fb.errors.CheckError) as error:
        fb.check_method(Fragile(), *MINE, rounds=2)
    first, *table = str(error.value).splitlines()
    found = [line for line in table if "  failed" in line]
    assert [line.split("  ")[0] for line in found] == ["a cohort of 2"], error.value
    assert (first, len(table)) == ("1 of 15 checks failed", 16)
    assert "KeyError: 'state'" in found[0]
    assert isinstance(error.value.__cause__, KeyError)


def test_what_a_method_does_not_allow_is_refused_as_in_a_run():
    found = [dict(checks(Runs(method, *MINE, rounds=2, key=0), plain=None)) for method in (fb.SimFBO(), Descent())]
    assert [isinstance(one["noised replies"], No) for one in found] == [True, False]  # steps that adapt refuse noise
    assert found[1]["late replies"].why == "it does not say which of its phases may be late"
    assert not isinstance(fb.SimFBO(server_lr=0.05, client_lr=0.02).allows.late, No)


@pytest.mark.parametrize(("rounds", "clients"), [(1, MINE[1]), (3, MINE[1].pooled())])
def test_too_few_rounds_or_clients_are_refused(rounds, clients):
    with pytest.raises(fb.errors.ConfigurationError):
        fb.check_method(Descent(), MINE[0], clients, *MINE[2:], rounds=rounds)


def with_capacities(capacity):
    task = quadratic(clients=2, samples=(3, 3), units=2).with_own(capacity=capacity)
    return Runs(Patient(), task.problem, task.clients, task.x0, task.y0, rounds=2, key=0)


@pytest.mark.slow
def test_sites_over_flower_hold_what_their_clients_can():
    with jax.enable_x64(True):
        runs = with_capacities([0.5, 1])
        assert not_over_flower(runs) is None
        assert over_flower(runs, runs.run(Local())).startswith(("differ by", "equal to the bit"))


def test_capacities_by_round_are_not_tried_over_flower():
    refusal = not_over_flower(with_capacities([[0.5, 1], [1, 0.5]]))
    assert "capacities by round" in refusal.why


def test_another_seed_is_not_judged_where_each_client_has_one_sample():
    task = quadratic(clients=2, samples=(1, 1))
    with jax.enable_x64(True):
        runs = Runs(Descent(), task.problem, task.clients, task.x0, task.y0, rounds=2, key=0)
        keyless = replace(runs, method=Keyless())
        assert "one sample" in another_seed(keyless, keyless.run(Local()))


@pytest.mark.parametrize(
    "layer", slow_but(None, of=[None, fb.parts.TopK(share=0.5), fb.Asynchronous(wait_for=2)]), ids=str
)
def test_own_leaves_of_a_single_client_are_compared_only_without_such_layers(layer):
    """A single client with its own leaves of y ends where it ends with a shared y, unless a layer makes a difference.

    TopK sends the largest entries of all leaves that are sent, and own leaves are not sent. Asynchronous waits for two
    replies, which a single client does not give.
    """
    method = fb.SimFBO(local_steps=1, server_lr=0.1, client_lr=0.1)
    with jax.enable_x64(True):
        found = with_own_leaves(Runs(fb.layered(method, layer) if layer else method, *MINE, rounds=3, key=0))
    assert isinstance(found, str)
    assert ("a single client ends where it ends with a shared y" in found) == (layer is None)


def test_late_replies_are_tried_with_a_compressor_of_the_method():
    """`Asynchronous` keeps the last replies together with the compressor."""
    method = fb.SimFBO(local_steps=1, server_lr=0.1, client_lr=0.1)
    with jax.enable_x64(True):
        runs = Runs(fb.layered(method, fb.parts.TopK(share=0.5)), *MINE, rounds=3, key=0)
        named = dict(checks(runs, runs.run(Local())))
    assert not isinstance(named["late replies"], No)
    assert isinstance(named["late replies"](), str)


def test_a_report_names_the_layers_of_the_method():
    method = fb.SimFBO(server_lr=0.1, client_lr=0.1)
    assert with_layers(method) == "SimFBO"
    assert with_layers(fb.layered(method, fb.Asynchronous(wait_for=2), fb.parts.TopK())) == (
        "SimFBO with TopK, Asynchronous"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_checks_when_the_present_run_ends(number):
    """The signal comes in the first run; the checks have no other error that ends them all, and no later check runs."""

    class Signals(Descent):
        def round(self, fed, state, key):
            os.kill(os.getpid(), number)
            return super().round(fed, state, key)

    handler = signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
    try:
        with warnings.catch_warnings(action="ignore"), pytest.raises((KeyboardInterrupt, SystemExit)):
            fb.check_method(Signals(), *MINE)
    finally:
        signal.signal(number, handler)


def test_a_missing_fact_is_named():
    with pytest.raises(fb.errors.ConfigurationError, match=r"^Facts: .*'bias'"):
        Facts(paper="none", good_for="nothing", exchanges="one", up="1 like y", cost="a gradient")

"""Does check_method pass what is right, and name what is wrong?"""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.authoring import XY, Algorithm, Facts, No, Reply, phase, positive, static
from fedbilevel.diagnostics.method import Runs, another_seed, checks, not_over_flower, over_flower
from fedbilevel.engines.local.engine import Local
from fedbilevel.tasks.quadratic import quadratic

TASK = quadratic(clients=4, samples=(3, 5))
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
        return state._replace(y=state.y - self.lr * fed.mean(self.gradient, tuple(state), key))


class Still(Descent):
    """Rounds that change nothing."""

    def round(self, fed, state, key):
        return state


class Counting(Descent):
    """Steps whose length is counted outside of the program: another one in each round, whatever the seed is."""

    count = itertools.count(1).__next__

    def round(self, fed, state, key):
        length = jax.pure_callback(lambda _: np.asarray(float(type(self).count())), jnp.zeros(()), state.y[0])
        return state._replace(y=state.y - 1e-3 * length)


class Neighbours(Descent):
    """Replies made of arrays that `Local` shares among all clients, in place of a batch of the client's own samples."""

    @phase(takes=("x", "y"), gives="y")
    def gradient(self, client, at, key):
        """Reply with the mean of c over what the arrays hold."""
        return Reply(jnp.mean(client.inner.values["c"], axis=0))


class Keyless(Descent):
    """Replies whose samples are drawn by a key that is always the same.

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
    """A method that says that nothing remains between its end and the solution, and never moves x."""

    facts = Facts(paper="none", good_for="nothing", exchanges="one", up="1 like y", bias="nothing", cost="a gradient")


class Fragile(Descent):
    """Rounds that look a name up in an empty dict where a round asks a part of the clients."""

    def round(self, fed, state, key):
        return super().round(fed, {}["state"] if fed.sampled else state, key)


def outcomes(report):
    return {check.name: check.outcome for check in report.checks}


def test_a_method_that_is_right():
    report = fb.check_method(Descent(), *MINE)
    found = outcomes(report)
    assert not report.failed
    assert [found[name] for name in ("late replies", "noised replies", "an x in a set")] == [
        "refused", "passed", "allowed"
    ]  # fmt: skip
    assert "it does not say which of its phases may be late" in repr(report)
    assert sum(outcome == "passed" for outcome in found.values()) == 9
    assert found["over Flower"] == "passed"


@pytest.mark.parametrize(
    ("method", "failed"),
    [
        (Still(), {"rounds move the state", "noised replies"}),
        (Counting(), {"a seed repeats a run", "one client after the other", "chunks of one client",
                      "streamed samples", "a cohort of 2", "over Flower"}),
        (Neighbours(), {"one client after the other", "streamed samples", "a cohort of 2", "over Flower"}),
        (Keyless(), {"another seed"}),
        (Elsewhere(), {"the solution of a quadratic problem"}),
        (Fragile(), {"a cohort of 2"}),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(method, failed):
    with pytest.raises(fb.errors.CheckError) as error:
        fb.check_method(method, *MINE)
    text = str(error.value)
    assert text.startswith(f"{len(failed)} of 15 checks failed")
    assert {line.split("  ")[0] for line in text.splitlines() if "  failed" in line} == failed
    assert isinstance(error.value.__cause__, KeyError if isinstance(method, Fragile) else fb.errors.CheckError)


def test_late_replies_are_tried_where_they_are_allowed():
    found = outcomes(fb.check_method(fb.SimFBO(batch_size=2, server_lr=0.05, client_lr=0.02), *MINE))
    assert found["late replies"] == "passed"
    assert not isinstance(fb.SimFBO().allows.late, No)


def test_steps_that_adapt_refuse_noise_as_in_a_run():
    found = [dict(checks(Runs(method, *MINE, rounds=3, key=0), plain=None)) for method in (fb.SimFBO(), Descent())]
    assert [isinstance(one["noised replies"], No) for one in found] == [True, False]


@pytest.mark.parametrize(("rounds", "clients"), [(1, MINE[1]), (3, MINE[1].pooled())])
def test_too_few_rounds_or_clients_are_refused(rounds, clients):
    with pytest.raises(fb.errors.ConfigurationError):
        fb.check_method(Descent(), MINE[0], clients, *MINE[2:], rounds=rounds)


def with_capacities(capacity):
    task = quadratic(clients=4, samples=(3, 5), units=4).with_own(capacity=capacity)
    method = fb.SimFBO(server_lr=0.05, client_lr=0.02)
    return Runs(method, task.problem, task.clients, task.x0, task.y0, rounds=2, key=0)


def test_sites_over_flower_hold_what_their_clients_can():
    with jax.enable_x64(True):
        runs = with_capacities([0.5, 1, 0.5, 1])
        assert not_over_flower(runs) is None
        assert over_flower(runs, runs.run(Local())).startswith(("differ by", "equal to the bit"))


def test_capacities_by_round_are_not_tried_over_flower():
    refusal = not_over_flower(with_capacities([[0.5, 1, 0.5, 1], [1, 0.5, 1, 1]]))
    assert "capacities by round" in refusal.why


def test_another_seed_is_not_judged_where_each_client_has_one_sample():
    task = quadratic(clients=2, samples=(1, 1))
    with jax.enable_x64(True):
        runs = Runs(Descent(), task.problem, task.clients, task.x0, task.y0, rounds=2, key=0)
        keyless = replace(runs, method=Keyless())
        assert "one sample" in another_seed(keyless, keyless.run(Local()))

"""Federations in this process: clients of a quadratic task, some of which misbehave, and the reference for their runs.

The reference is a run without the replies that do not count because of the misbehaviour.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import Message, RecordDict

import fedbilevel as fb
from fedbilevel import authoring
from fedbilevel.core.config import static
from fedbilevel.core.tree import XY
from fedbilevel.engines import reference
from fedbilevel.engines.engine import draw_cohort
from fedbilevel.flower.client.limits import Limits
from fedbilevel.flower.client.site import Site, client_app
from fedbilevel.flower.client.store import ContextStore
from fedbilevel.flower.server.engine import Flower
from fedbilevel.flower.server.terms import Terms
from fedbilevel.flower.wire import RequestMessage, ResponseMessage, decode, encode
from fedbilevel.tasks.quadratic import quadratic

NAME = "0123456789abcdef"
TASK = quadratic(clients=6, dim_x=2, dim_y=3, samples=(6, 6))  # clients of equal size share compiled phases
FREE = Limits(min_batch_size=1, min_local_samples=1)  # allows few samples and small batches
SAME = 1e-12  # for rounding in some 10 sums of about a dozen terms of size 1 or less, compiled or not


class Steps(authoring.Algorithm):
    """Make a step on y and then a step on x in each round, with one exchange for each; clients keep no state."""

    batch_size: int | None = static(default=4)
    lr: float = 0.1

    def init(self, x, y):
        return XY(x, y)

    @authoring.phase
    def y_gradient(self, client, message, key):
        loss, gradient = jax.value_and_grad(client.problem.inner, 1)(*message, client.inner_batch(key, self.batch_size))
        return authoring.Reply(gradient, metrics={"inner": loss}, gradients=1)

    @authoring.phase
    def x_gradient(self, client, message, key):
        batch = client.outer_batch(key, self.batch_size)
        return authoring.Reply({"g": jax.grad(client.problem.outer)(*message, batch)}, gradients=1)

    def round(self, fed, state, key):
        x, y = state
        first, last = jax.random.split(key)
        y = y - self.lr * fed.mean(self.y_gradient, (x, y), first)
        return XY(x - self.lr * fed.mean(self.x_gradient, (x, y), last, unbiased=True)["g"], y)


def site(algorithm, k, task=TASK, problem=None, limits=FREE, **more):
    """Return the site of client k of a task."""
    clients = task.clients
    problem = problem or task.problem
    one = clients.inner is clients.outer or isinstance(problem, fb.Minimax)
    own = {"outer": clients.outer.row(k), "inner": None if one else clients.inner.row(k), "limits": limits, **more}
    y0 = None if isinstance(problem, fb.SingleLevel) else task.y0
    return Site(id=k, algorithm=algorithm, problem=problem, x0=task.x0, y0=y0, **own)


def memory():
    """Return a client's store in Flower's memory, which is still empty."""
    return ContextStore(RecordDict())


def app(algorithm, task=TASK, problem=None, **more):
    """Return the ClientApp of all clients. It keeps their samples and programs, which several runs may share."""
    return client_app(lambda run, node: site(algorithm, node["partition-id"], task, problem, **more))


def solve(algorithm, grid, *, task=TASK, terms=None, log=None, name=NAME, rounds=3, cohort=4, key=1, sites=(), **more):
    """Run an algorithm over a grid, and return the result."""
    engine = Flower(grid=grid, name=name, log=log, terms=terms or Terms(), sites=sites)
    known = fb.RemoteClients.of(task.clients)
    more |= {"rounds": rounds, "cohort": cohort, "key": key}
    return fb.solve(algorithm, task.problem, known, task.x0, task.y0, engine=engine, **more)


def without(monkeypatch, algorithm, absent, *, task=TASK, rounds=3, cohort=4, key=1):
    """Return the result of `Reference` for a run without the replies (client, round, exchange) in `absent`."""

    class Absent(reference.ReferenceFed):
        exchanges = 0

        def sum(self, *arguments, **options):
            number, self.exchanges = self.exchanges, self.exchanges + 1
            whole = self.members
            self.members = [(i, own) for i, own in whole if (i, self.round, number) not in absent]
            try:
                return super().sum(*arguments, **options)
            finally:
                self.members = whole

    with monkeypatch.context() as patch:
        patch.setattr(reference, "ReferenceFed", Absent)
        return fb.solve(algorithm, task.problem, task.clients, task.x0, task.y0,
                        rounds=rounds, cohort=cohort, key=key, engine=fb.Reference())  # fmt: skip


def cohorts(rounds=3, cohort=4, population=6, key=1):
    """Return the clients that are drawn in each round."""
    keys = [reference.round_keys(jax.random.key(key), round) for round in range(rounds)]
    return [draw_cohort(one.cohort, population, cohort).tolist() for one in keys]


def misbehaving(good, faults):
    """Return a ClientApp that replies as `good` does, except where `faults[client, round, exchange]` is given.

    This fault is a function of the good reply and of the message. It returns another reply, or a message of Flower.
    """

    def respond(message, context):
        reply = good(message, context)
        request: RequestMessage = decode(RequestMessage, message)
        place = context.node_config["partition-id"], request.round, request.exchange
        if not request.phase or place not in faults:
            return reply
        fault = faults[place]
        changed = fault(decode(ResponseMessage, reply), message)
        return Message(encode(changed), reply_to=message) if isinstance(changed, ResponseMessage) else changed

    return respond


def same(a, b, tolerance=SAME):
    """Assert that two results have the same state and the same rows of the history.

    Times are not compared, nor are bytes down, since one of the two runs may have asked fewer clients.
    """
    assert jax.tree.structure(a.state) == jax.tree.structure(b.state)
    for one, other in zip(jax.tree.leaves(a.state), jax.tree.leaves(b.state), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
    assert len(a.history.rows) == len(b.history.rows)
    for one, other in zip(a.history.rows, b.history.rows, strict=True):
        assert set(one) == set(other)
        for column in set(one) - {"seconds", "time", "bytes_down"}:
            np.testing.assert_allclose(one[column], other[column], rtol=tolerance, atol=tolerance, err_msg=column)


def moved(result, task=TASK):
    """Assert that x and y have moved, since agreement on a state that stood still would prove nothing."""
    assert all(float(jnp.linalg.norm(a - b)) > 1e-3 for a, b in ((result.x, task.x0), (result.y, task.y0)))

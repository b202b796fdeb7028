"""A server knows the shapes and weights of clients elsewhere, and none of their samples."""

import jax
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.tasks.quadratic import quadratic
from refusals import refuses


def test_of_clients_keeps_what_a_server_may_know():
    task = quadratic(clients=3, samples=(3, 9)).with_own(local_steps=(1, 4))
    remote = fb.RemoteClients.of(task.clients)
    assert len(remote) == 3
    assert remote.own == task.clients.own
    np.testing.assert_array_equal(remote.weights, task.clients.weights)
    for mine, theirs in zip(remote.examples(), (task.clients.outer, task.clients.inner), strict=True):
        row = theirs.row(1)
        assert jax.tree.structure(mine) == jax.tree.structure(row)
        assert [(s.shape[0], s.shape[1:], s.dtype) for s in jax.tree.leaves(mine)] == [
            (1, a.shape[1:], a.dtype) for a in jax.tree.leaves(row)
        ]


def test_examples_keep_no_values():
    remote = fb.RemoteClients(2, {"a": np.full((7, 3), 5.0), "b": np.arange(7)})
    assert (remote.outer["a"].shape, remote.outer["b"].shape) == ((1, 3), (1,))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(remote.outer))


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"count": 0}, ("RemoteClients.count", 0)),
        ({"weights": [1.0, 2.0, 3.0]}, ("RemoteClients.weights", [1.0, 2.0, 3.0], "(2,)")),
        ({"weights": "size"}, ("RemoteClients.weights", "size")),
        ({"local_steps": (3, 1)}, ("RemoteClients.local_steps", (3, 1))),
    ],
)
def test_wrong_values_are_named(fields, refusal):
    with refuses(*refusal):
        fb.RemoteClients(**{"count": 2, "outer": np.ones((1, 3)), **fields})


def test_engines_that_simulate_need_samples():
    task = quadratic(clients=3)
    remote = fb.RemoteClients.of(task.clients)
    for engine in (fb.Local(), fb.Reference()):
        with refuses("clients", "RemoteClients"):
            fb.solve(fb.SimFBO(), task.problem, remote, task.x0, task.y0, rounds=1, engine=engine)

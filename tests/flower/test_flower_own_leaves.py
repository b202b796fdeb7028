"""Leaves of y that are a client's own stay at its site: no message of a federation has them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federations import FREE, NAME, TASK

import fedbilevel as fb
from fedbilevel.flower.client.site import ClientRuntime, Site, client_app
from fedbilevel.flower.launch.in_process import InProcess
from fedbilevel.flower.server.engine import Flower
from fedbilevel.flower.wire import RequestMessage, ResponseMessage, decode
from fedbilevel.tasks.quadratic import inner, outer
from refusals import raises_with, refuses

START = {"own": np.array([0.3]), "shared": np.array([-0.2, 0.1])}
METHOD = fb.SimFBO(local_steps=2, batch_size=4, server_lr=0.05, client_lr=0.1)


def whole(y):
    return jnp.concatenate([y["own"], y["shared"]])


PROBLEM = fb.Bilevel(
    lambda x, y, batch: outer(x, whole(y), batch),
    lambda x, y, batch: inner(x, whole(y), batch),
    own=lambda path: path == "own",
)


DITTO = fb.Bilevel(
    PROBLEM.outer,
    lambda x, y, batch: inner(x, whole(y), batch) + jnp.sum((y["own"] - jax.lax.stop_gradient(y["shared"])) ** 2),
    own=PROBLEM.own,
)


def run(clients, **options):
    given = {"rounds": 3, "cohort": 4, "key": 1, "eval_every": 1, **options}
    return fb.solve(METHOD, PROBLEM, clients, TASK.x0, START, **given)


def site(_, node, problem=PROBLEM):
    k, clients = node["partition-id"], TASK.clients
    samples = {"outer": clients.outer.row(k), "inner": clients.inner.row(k)}
    return Site(id=k, algorithm=METHOD, problem=problem, x0=TASK.x0, y0=START, limits=FREE, **samples)


def test_no_message_has_an_entry_of_an_own_leaf(tmp_path):
    """No message has an entry of an own leaf, even in a resumed run, and x and the shared leaves are the reference's.

    Payloads have the size of x and of the shared entries of y and v. The eight bytes of an own entry, after any round,
    are nowhere in what is sent.
    """
    sent: list[bytes] = []

    app = client_app(site)

    def read(message, context):
        reply = app(message, context)
        request, response = decode(RequestMessage, message), decode(ResponseMessage, reply)
        assert not response.refused
        if request.phase:
            floats = TASK.x0.size + 2 * START["shared"].size
            assert len(request.payload) == len(response.payload) == 8 * floats
            sent.extend([request.payload, response.payload, response.metrics.encode(), request.own.encode()])
        return reply

    seen = []
    expected = run(TASK.clients, engine=fb.Reference(), callbacks=[lambda result, row: seen.append(result.y["own"])])
    grid = InProcess(read, 6)
    options = {"engine": Flower(grid=grid, name=NAME), "checkpoint": tmp_path / "run"}
    run(fb.RemoteClients.of(TASK.clients), **options | {"rounds": 2})
    result = run(fb.RemoteClients.of(TASK.clients), **options, resume=True)
    np.testing.assert_allclose(result.x, expected.x, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(result.y["shared"], expected.y["shared"], rtol=1e-12, atol=1e-12)
    assert len(sent) == 4 * 3 * 4
    entries = {float(entry) for own in seen[1:] for entry in np.ravel(own)} - {0.3}
    assert len(entries) >= 6
    for entry in entries:
        near = [np.nextafter(entry, side) for side in (-np.inf, np.inf)]  # compiled sums may differ in the last bit
        for one in (entry, *near):
            assert not any(np.float64(one).tobytes() in message for message in sent)
    assert result.y["own"] is None
    with refuses("", fact="Site.folder"):
        result.own(0)
    new = fb.personalise(PROBLEM, result, TASK.clients.inner.row(0), start=START)
    assert new["own"].shape == (1,)
    with refuses("personalise: start", None):
        fb.personalise(PROBLEM, result, TASK.clients.inner.row(0))


@pytest.mark.checked
def test_a_site_refuses_a_pull_to_a_model_that_ignores_it():
    """A site refuses an inner loss that pulls own leaves toward shared ones, if the pull has no gradient in these.

    The server cannot check this, since it has no samples.
    """
    with raises_with(fb.errors.UnsupportedError, "Bilevel.own"):
        ClientRuntime(site(None, {"partition-id": 0}, DITTO))
    ClientRuntime(site(None, {"partition-id": 0}))


def test_metrics_of_each_client_are_refused():
    engine, clients = Flower(grid=InProcess(client_app(site), 6), name=NAME), fb.RemoteClients.of(TASK.clients)
    with refuses("metrics_per_client", fact="left out"):
        run(clients, engine=engine, metrics_per_client={"f": PROBLEM.outer})

"""Metrics of single clients over Flower are those of a simulation, over the clients whose operators permit them."""

from types import SimpleNamespace

import federations as own
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.core.privacy import Privacy
from fedbilevel.engines.evaluation import spread
from fedbilevel.flower.client.limits import Limits
from fedbilevel.flower.client.site import ClientRuntime, client_app
from fedbilevel.flower.launch.in_process import InProcess
from fedbilevel.flower.server.engine import ClientMetrics
from fedbilevel.flower.wire import METRICS as METRICS_ASKED
from fedbilevel.flower.wire import RequestMessage, to_bytes
from refusals import refuses, warns_with

METRICS = {"fit": own.TASK.problem.outer, "inner_fit": fb.PerClient(own.TASK.problem.inner, "inner")}
ONE = {"fit": METRICS["fit"]}
ALGORITHM = own.Steps(batch_size=None)


def grid(tells, metrics=METRICS):
    """Return a grid of six clients, of which those in `tells` permit `metrics`."""

    def site(run, node):
        k = node["partition-id"]
        return own.site(ALGORITHM, k, metrics_per_client=metrics, tells_metrics=k in tells)

    return InProcess(client_app(site), 6)


def solve(tells, metrics=METRICS, **more):
    return own.solve(ALGORITHM, grid(tells, metrics), rounds=1, **{"metrics_per_client": METRICS, **more})


@pytest.fixture(scope="module")
def everyone():
    return solve(range(6))


def test_where_everyone_tells_the_numbers_are_those_of_a_simulation(everyone):
    task = own.TASK
    parts = task.problem, task.clients, task.x0, task.y0
    theirs = fb.solve(ALGORITHM, *parts, rounds=1, cohort=4, key=1, metrics_per_client=METRICS)
    assert len(everyone.history) == len(theirs.history) == 2
    for mine, row in zip(everyone.history.rows, theirs.history.rows, strict=True):
        names = [name for name in row if "fit." in name]
        assert len(names) == 24
        assert [mine[name] for name in names] == pytest.approx([row[name] for name in names], rel=1e-9)
        assert mine["fit.clients"] == mine["inner_fit.clients"] == 6


def test_a_site_does_not_tell_unless_it_is_let(everyone):
    with warns_with(fb.errors.AbsenceWarning, " 0 of 6 "):
        result = solve([])
    assert [row["fit.clients"] for row in result.history.rows] == [0, 0]
    assert not any(name.startswith("fit.") for name in set(result.history.columns) - {"fit.clients"})
    np.testing.assert_array_equal(result.x, everyone.x)
    assert result.ledger.bytes_up == everyone.ledger.bytes_up  # evaluation is not a cost of the algorithm


def test_the_columns_are_of_those_who_tell(everyone):
    some = [1, 5]
    with warns_with(fb.errors.AbsenceWarning, " 2 of 6 "):
        row = solve(some, ONE, metrics_per_client=ONE).history.rows[0]
    x, y, clients = own.TASK.x0, own.TASK.y0, own.TASK.clients
    values = np.array([float(METRICS["fit"](x, y, clients.outer.row(k))) for k in some])
    for name, value in spread("fit", values, clients.weights[some]).items():
        assert row[name] == pytest.approx(value, rel=1e-6)
    assert row["fit.clients"] == 2


@pytest.mark.parametrize(("metrics", "why"), [
    ({"other": METRICS["fit"]}, "its metrics are other, and fit was requested"),
    ({"fit": lambda x, y, batch: jnp.nan * jnp.sum(x)}, "its metrics are not finite"),
])  # fmt: skip
def test_what_is_no_answer_to_the_request_does_not_count(metrics, why):
    with warns_with(fb.errors.AbsenceWarning, why):
        assert solve([0], metrics, metrics_per_client=ONE).history.rows[0]["fit.clients"] == 0


def test_a_site_counts_such_requests_and_checks_what_it_is_sent(tmp_path):
    """A site counts requests for metrics, and refuses points that are not finite or have other shapes than x and y."""
    told = {"metrics_per_client": ONE, "tells_metrics": True, "folder": tmp_path}
    runtime = ClientRuntime(own.site(ALGORITHM, 0, limits=Limits(max_requests=1, min_local_samples=1), **told))
    here = jax.tree.map(np.asarray, (own.TASK.x0, own.TASK.y0))
    nowhere = jax.tree.map(lambda leaf: leaf * np.nan, here)

    def said(point, contract=runtime.contract.digest):
        request = RequestMessage(run=own.NAME, contract=contract, phase=METRICS_ASKED, payload=to_bytes(point))
        return runtime.respond(request, runtime.store)

    assert [said(nowhere).code, said(here, "no").code, said(here[0]).code] == ["numbers", "contract", "malformed"]
    want = float(METRICS["fit"](*here, own.TASK.clients.outer.row(0)))
    assert said(here).numbers() == pytest.approx({"fit": want}, rel=1e-6)
    assert said(here).code == "limit"


def test_with_privacy_nothing_is_told(tmp_path):
    privacy = Privacy(clip=1.0, noise_multiplier=1.0, delta=1e-5)
    with refuses("Site.tells_metrics", True, "False"):
        own.site(ALGORITHM, 0, privacy=privacy, folder=tmp_path, metrics_per_client=METRICS, tells_metrics=True)


@pytest.mark.parametrize(("algorithm", "submodel_plan", "fact"), [
    (fb.Asynchronous(fb.SimFBO(), wait_for=2), None, "asynchronous"),
    (ALGORITHM, object(), "submodels"),
])  # fmt: skip
def test_a_run_whose_x_and_y_the_server_cannot_send_whole_is_refused_by_name(algorithm, submodel_plan, fact):
    with refuses("metrics_per_client", fact=fact):
        ClientMetrics(SimpleNamespace(algorithm=algorithm, submodel_plan=submodel_plan), METRICS)

"""Do clients that keep blocks of x, and step on them, get the x that a server would compute?

The losses of a client are those of the quadratic task, in the client's own row of x.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithms.parts.composed import composed
from fedbilevel.tasks.quadratic import inner, outer, quadratic
from fixed_steps import fixed
from refusals import ANY, refuses

CLIENTS, DIM_X, DIM_Y = 4, 3, 4
START = np.tile([0.3, -0.2, 0.1], (CLIENTS, 1))
AFBO = {"batch_size": 2, "inner": fb.parts.MeanGradient(rounds=2, local_steps=2), "outer_lr": 0.3}
BY_STEPS = fixed(fb.AFBO(hypergradient=fb.parts.SystemSteps(), **AFBO))
METHODS = {
    "SimFBO": fixed(
        fb.SimFBO(batch_size=2, local_steps=3, server_lr=0.1, local_optimizer=fb.parts.Momentum(decay=0.5))
    ),
    "F2SA": fixed(fb.F2SA(batch_size=2, local_steps=3, multiplier=20.0)),
    "MEHA": fixed(fb.MEHA(batch_size=2, local_steps=3, server_lr=fb.XYV(0.1, 0.1, 0.1))),
    "AFBO, local": fixed(fb.AFBO(hypergradient=fb.parts.LocalImplicit(solver=fb.parts.Neumann(terms=2)), **AFBO)),
    "AFBO, global": BY_STEPS,
    "AFBO, all are first": fb.Asynchronous(BY_STEPS, wait_for=CLIENTS, delay_penalty=0.0),
}


def split_quadratic(local):
    """Return the problem and its clients; x has a row for each client, and each sample has the number of its row."""
    task = quadratic(clients=CLIENTS, dim_x=DIM_X, dim_y=DIM_Y, samples=(2, 4))

    def rows(data):
        return [{**data.row(i), "row": np.full(data.size[i], i)} for i in range(CLIENTS)]

    def of_row(loss):
        def own(x, y, batch):
            values = {name: leaf for name, leaf in batch.items() if name != "row"}
            return loss(x[jnp.minimum(batch["row"][0], x.shape[0] - 1)], y, values)

        return own

    clients = fb.Clients(rows(task.clients.outer), rows(task.clients.inner), weights=task.clients.weights)
    return fb.Bilevel(outer=of_row(outer), inner=of_row(inner), local=local), clients


def run(algorithm, rounds=5, x0=START, local="x", **options):
    problem, clients = split_quadratic(local)
    return fb.solve(algorithm, problem, clients, jnp.asarray(x0), jnp.zeros(DIM_Y), rounds=rounds, **options)


SLOW = {"F2SA", "MEHA", "AFBO, all are first", "AFBO, local", "AFBO, global"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in METHODS]
)
def test_the_same_rows_with_and_without_the_server(name):
    """Rows of x are the same whether clients or the server keep x, and without the server no message has x.

    Messages and replies then have y, for some methods v, and one or two numbers, and are shorter by exactly x.
    """
    algorithm = METHODS[name]
    metrics = {"x": lambda x, y: jnp.sum(x**2)}
    kept, sent = run(algorithm, metrics=metrics), run(algorithm, local=None, metrics=metrics)
    np.testing.assert_allclose(kept.x, sent.x, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(kept.y, sent.y, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(kept.history["x"], sent.history["x"], rtol=1e-12)
    moved = np.linalg.norm(np.asarray(kept.x) - START, axis=1)
    assert np.all(moved > 1e-3)
    size = START.size * 8
    exchanges_with_x_up = 5 * CLIENTS
    exchanges_with_x_down = kept.ledger.replies
    assert sent.ledger.bytes_down - kept.ledger.bytes_down == size * exchanges_with_x_down
    assert sent.ledger.bytes_up - kept.ledger.bytes_up == size * exchanges_with_x_up


def test_the_start_is_the_callers_and_serves_again():
    start = jnp.asarray(START)
    first, again = (run(METHODS["SimFBO"], x0=start, rounds=2) for _ in range(2))
    np.testing.assert_array_equal(start, START)
    np.testing.assert_array_equal(first.x, again.x)


@pytest.mark.slow
def test_both_engines_agree_where_clients_are_late():
    """The engines agree if clients are late; each block then moves once for each reply of its client."""
    algorithm = fb.Asynchronous(BY_STEPS, wait_for=2, delay_penalty=0.0)
    clock = fb.Clock(network=(1.0, 1.7, 0.6, 5.3), spread=0.4)
    a, b = (run(algorithm, 2, engine=engine(clock=clock)) for engine in (fb.Local, fb.Reference))
    np.testing.assert_allclose(a.x, b.x, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(a.y, b.y, rtol=1e-12, atol=1e-12)
    assert float(jnp.linalg.norm(a.x - START)) > 1e-3


def test_a_run_that_goes_on_from_a_checkpoint_has_its_blocks(tmp_path):
    algorithm = METHODS["SimFBO"]
    whole = run(algorithm, 5)
    run(algorithm, 2, checkpoint=tmp_path / "run")
    rest = run(algorithm, 5, checkpoint=tmp_path / "run", resume=True)
    np.testing.assert_array_equal(rest.x, whole.x)


@pytest.mark.parametrize(
    ("algorithm", "x0", "refusal"),
    [
        (fixed(fb.SimFBO()), START[:3], ("Bilevel.local", "x", f"length {CLIENTS}")),
        (fixed(fb.SimFBO()), START + np.arange(CLIENTS)[:, None], ("Bilevel.local", "x", "all clients")),
        (
            fixed(fb.FedNest()),
            START,
            ("", ANY, "FedNest cannot leave x to its clients"),
        ),
        (
            fixed(fb.CorrectedFBO()),
            START,
            ("", ANY, "CorrectedFBO cannot leave x to its clients"),
        ),
        (
            fb.Asynchronous(fixed(fb.SimFBO()), wait_for=2, delay_penalty=1.0),
            START,
            ("Asynchronous.delay_penalty", 1.0, "0 if clients keep x"),
        ),
    ],
)
def test_what_is_refused(algorithm, x0, refusal):
    with refuses(*refusal):
        run(algorithm, x0=jnp.asarray(x0))


def test_another_word_for_local_is_refused():
    with refuses("Bilevel.local", "X", near="x"):
        split_quadratic("X")


def test_a_client_keeps_its_row_alone():
    problem, _ = split_quadratic("x")
    kept = composed(fixed(fb.SimFBO()), problem).client_state(problem, jnp.asarray(START), jnp.zeros(DIM_Y))
    assert [leaf.shape for leaf in jax.tree.leaves(kept)] == [(1, DIM_X)]


def test_a_metric_per_client_gets_the_block_of_its_client():
    """As losses do, a metric of client i gets block i of x, with leaves of shape (1, ...)."""

    def first(x, y, batch):
        assert x.shape == (1, DIM_X)
        return x[0, 0]

    whole = fb.WholeLoss(lambda x, y, samples, valid: first(x, y, samples))
    result = run(METHODS["SimFBO"], metrics_per_client={"alone": first, "whole": whole})
    for name in ("alone", "whole"):
        ends = [result.history[f"{name}.{kind}"][-1] for kind in ("best", "worst")]
        np.testing.assert_allclose(ends, [np.min(result.x[:, 0]), np.max(result.x[:, 0])], rtol=1e-12)
    assert ends[0] < ends[1]

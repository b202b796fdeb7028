"""Does x, kept and stepped by clients block by block, become what a server would have made of it?

A client's losses are the quadratic task's, in its own row of x alone.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.tasks.quadratic import inner, outer, quadratic

CLIENTS, DIM_X, DIM_Y = 4, 3, 4
START = np.tile([0.3, -0.2, 0.1], (CLIENTS, 1))
AFBO = {"batch_size": 2, "inner_rounds": 2, "local_steps": 2, "outer_lr": 0.3}
METHODS = {
    "SimFBO": fb.SimFBO(batch_size=2, local_steps=3, server_lr=0.1, coefficients=fb.Momentum(decay=0.5)),
    "AFBO, local": fb.AFBO(inverse="series", neumann_terms=2, **AFBO),
    "AFBO, global": fb.AFBO(hypergradient="global", **AFBO),
    "AFBO, all are first": fb.Asynchronous(fb.AFBO(hypergradient="global", **AFBO), wait_for=CLIENTS),
}


def split_quadratic():
    """(problem, clients): x has a row for each client; a sample knows whose it is."""
    task = quadratic(clients=CLIENTS, dim_x=DIM_X, dim_y=DIM_Y, samples=(2, 4))

    def rows(data):
        return [{**data.row(i), "row": np.full(data.size[i], i)} for i in range(CLIENTS)]

    def of_row(loss):
        def own(x, y, batch):
            values = {name: leaf for name, leaf in batch.items() if name != "row"}
            return loss(x[jnp.minimum(batch["row"][0], x.shape[0] - 1)], y, values)

        return own

    clients = fb.Clients(rows(task.clients.outer), rows(task.clients.inner), weights=task.clients.weights)
    return fb.Bilevel(outer=of_row(outer), inner=of_row(inner)), clients


def run(algorithm, rounds=5, x0=START, **options):
    problem, clients = split_quadratic()
    return fb.solve(algorithm, problem, clients, jnp.asarray(x0), jnp.zeros(DIM_Y), rounds=rounds, **options)


def with_own_x(algorithm):
    if isinstance(algorithm, fb.Asynchronous):
        return fb.Asynchronous(with_own_x(algorithm.algorithm), wait_for=algorithm.wait_for)
    fields = {name: getattr(algorithm, name) for name in algorithm.__dataclass_fields__}
    return type(algorithm)(**{**fields, "own_x": True})


SLOW = {"AFBO, all are first", "AFBO, local", "AFBO, global"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in METHODS]
)
def test_the_same_rows_with_and_without_the_server(name):
    """And no x in any message: what goes down and up is y and, for some, v, less the one or two numbers beside them."""
    algorithm = METHODS[name]
    metrics = {"x": lambda x, y: jnp.sum(x**2)}
    kept, sent = run(with_own_x(algorithm), metrics=metrics), run(algorithm, metrics=metrics)
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


@pytest.mark.slow
def test_both_engines_agree_where_clients_are_late():
    """Each block then moves once for each answer of its client."""
    algorithm = fb.Asynchronous(fb.AFBO(hypergradient="global", own_x=True, **AFBO), wait_for=2)
    clock = fb.Clock(network=(1.0, 1.7, 0.6, 5.3), spread=0.4)
    a, b = (run(algorithm, 2, engine=engine(clock=clock)) for engine in (fb.Local, fb.Reference))
    np.testing.assert_allclose(a.x, b.x, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(a.y, b.y, rtol=1e-12, atol=1e-12)
    assert float(jnp.linalg.norm(a.x - START)) > 1e-3


def test_a_run_that_goes_on_from_a_checkpoint_has_its_blocks(tmp_path):
    algorithm = with_own_x(METHODS["SimFBO"])
    whole = run(algorithm, 5)
    run(algorithm, 2, checkpoint=tmp_path / "run")
    rest = run(algorithm, 5, checkpoint=tmp_path / "run", resume=True)
    np.testing.assert_array_equal(rest.x, whole.x)


@pytest.mark.parametrize("method", [fb.SimFBO, fb.AFBO])
def test_an_x_that_is_not_split_or_differs_is_refused(method):
    algorithm = method(own_x=True)
    for x0, words in (
        (START[:3], f"a leading axis of {CLIENTS}, the clients"),
        (START + np.arange(CLIENTS)[:, None], "all start with the same block"),
    ):
        with pytest.raises(fb.ConfigurationError) as error:
            run(algorithm, x0=jnp.asarray(x0))
        assert words in str(error.value)


def test_shrofbo_has_no_own_x():
    with pytest.raises(fb.ConfigurationError, match=r"ShroFBO\.own_x = True"):
        fb.ShroFBO(own_x=True)


def test_a_client_keeps_its_row_alone():
    kept = fb.SimFBO(own_x=True).init_client(jnp.asarray(START), jnp.zeros(DIM_Y))
    assert [leaf.shape for leaf in jax.tree.leaves(kept)] == [(1, DIM_X)]

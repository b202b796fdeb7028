"""Does a run whose clients' own leaves are on disk have the numbers of one that has them in memory?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from own_leaves import MIXED, SIMFBO, SINGLE, inner, outer, run

import fedbilevel as fb
from fedbilevel.core.tree import is_table
from representatives import slow_but

STREAMED = {"cohort": 2, "engine": fb.Local(stream=True), "metrics_per_client": {"f": outer}}


@pytest.mark.parametrize("name", slow_but("SimFBO", of=["SimFBO", "steps that adapt"]))
def test_a_run_whose_own_leaves_are_on_disk_has_the_numbers_of_one_in_memory(name):
    """A run with own leaves on disk has the numbers of a run in memory.

    The same program computes them. It gets the states of the cohort instead of a table of all states.
    """
    method = SIMFBO if name == "SimFBO" else fb.SimFBO(**SINGLE)
    there = run(method, rounds=6, **STREAMED)
    here = run(method, rounds=6, **STREAMED | {"engine": fb.Local()})
    assert is_table(there.y["own"])
    assert is_table(there.best.y["own"])
    for got, expected in ((there, here), (there.best, here.best)):
        np.testing.assert_allclose(got.x, expected.x, rtol=1e-12)
        np.testing.assert_allclose(flat_rows(got.y), flat_rows(expected.y), rtol=1e-12)
    np.testing.assert_allclose(there.history["f.worst"], here.history["f.worst"], rtol=1e-12)
    assert there.best.round < 6
    assert not np.array_equal(there.best.y["own"], there.y["own"])


def flat_rows(y):
    return np.concatenate([np.asarray(y["own"]).ravel(), y["shared"]])


def test_a_killed_run_with_own_leaves_on_disk_is_resumed_to_the_bit(tmp_path):
    """A killed run with own leaves on disk is resumed to the bit.

    The rounds after the last checkpoint have changed the table; the resumed run does not contain their changes twice.
    """

    class Killed(BaseException):
        """End the run as `kill -9` would: nothing more is saved."""

    def kill(result, row):
        if result.round == 4:
            raise Killed

    options = STREAMED | {"eval_every": 1, "rounds": 5}
    whole = run(SIMFBO, **options)
    given = {"checkpoint": tmp_path / "run", "checkpoint_every": 3}
    with pytest.raises(Killed):
        run(SIMFBO, **options, **given, callbacks=[kill])
    rest = run(SIMFBO, **options, **given, resume=True)
    assert is_table(rest.y["own"])
    jax.tree.map(np.testing.assert_array_equal, (rest.x, rest.y, rest.best.y), (whole.x, whole.y, whole.best.y))


@pytest.mark.parametrize("from_disk", [True, False])
def test_a_run_is_resumed_on_disk_or_in_memory(tmp_path, from_disk):
    engines = fb.Local(stream=True), fb.Local()
    whole = run(SIMFBO, cohort=2, rounds=5)
    given = {"cohort": 2, "checkpoint": tmp_path / "run"}
    run(SIMFBO, rounds=2, **given, engine=engines[not from_disk])
    rest = run(SIMFBO, rounds=5, **given, engine=engines[from_disk], resume=True)
    np.testing.assert_allclose(flat_rows(rest.y), flat_rows(whole.y), rtol=1e-12)


def test_a_run_that_diverges_goes_back_to_tables_of_an_earlier_row():
    method = fb.SimFBO(**SINGLE, server_lr=0.2 * 8, client_lr=0.1)
    options = {"rounds": 60, "cohort": 2, "eval_every": 2, "on_divergence": "shrink"}
    with pytest.warns(fb.errors.NumericalWarning, match="half as large"):
        there = run(method, **options, engine=fb.Local(stream=True))
    with pytest.warns(fb.errors.NumericalWarning, match="half as large"):
        here = run(method, **options)
    assert there.history["halvings"][-1] == here.history["halvings"][-1] > 0
    np.testing.assert_allclose(flat_rows(there.y), flat_rows(here.y), rtol=1e-6)


def test_own_leaves_that_are_not_finite_are_not_written_to_disk():
    """Own leaves that are not finite are not written to disk.

    g has the term −10³⁰ Σ o⁸ in the own leaves o, which grow without the server's numbers.
    """
    lost = fb.Bilevel(outer, lambda x, y, batch: inner(x, y, batch) - 1e30 * jnp.sum(y["own"] ** 8), own=MIXED.own)
    with pytest.raises(fb.errors.NonFiniteError) as error:
        run(SIMFBO, lost, rounds=50, cohort=2, engine=fb.Local(stream=True), on_divergence="stop")
    assert np.all(np.isfinite(error.value.result.y["own"]))


def test_a_run_whose_own_leaves_are_not_finite_saves_the_state_before_the_round(tmp_path):
    """If own leaves become NaN, the error's result and the checkpoint have the state before this round.

    The gradient of √0 · 0 is NaN. This term has no derivative in the server's variables, which stay finite.
    """

    def broken(x, y, batch):
        far = jnp.abs(y["own"]) > 0.4
        return inner(x, y, batch) + jnp.sum(jnp.sqrt(jnp.where(far, 0.0, 1.0) * (1 + 0 * y["own"])))

    lost = fb.Bilevel(outer, broken, own=MIXED.own)
    options = {"cohort": 2, "engine": fb.Local(stream=True), "on_divergence": "stop", "eval_every": 50}
    with pytest.raises(fb.errors.NonFiniteError) as error:
        run(SIMFBO, lost, rounds=50, **options, checkpoint=tmp_path / "run")
    last = error.value.result
    whole = run(SIMFBO, lost, rounds=last.round, **options)
    jax.tree.map(np.testing.assert_array_equal, (last.x, last.y), (whole.x, whole.y))
    with np.load(tmp_path / "run") as arrays:
        assert arrays[".round"] == last.round > 0


@pytest.mark.parametrize(
    "given", slow_but({}, {"stream": True}, of=[{}, {"chunk": 1, "devices": 2}, {"stream": True}]), ids=str
)
def test_a_round_that_is_not_finite_changes_no_own_leaves(given):
    """If x is not finite after a round, the clients of this round have the own leaves of before.

    The derivative of 0 · √(a − x₂) is NaN if x₂ is above a. Own leaves do not depend on it in this round.
    """
    lost = fb.Bilevel(lambda x, y, batch: outer(x, y, batch) + 0 * jnp.sqrt(0.2 - x[2]), inner, own=MIXED.own)
    options = {"cohort": 2, "engine": fb.Local(**given), "eval_every": 50}
    with pytest.raises(fb.errors.NonFiniteError) as error:
        run(SIMFBO, lost, rounds=50, **options)
    last = error.value.result
    whole = run(SIMFBO, lost, rounds=last.round, **options)
    assert last.round > 0
    jax.tree.map(np.testing.assert_array_equal, (last.x, last.y), (whole.x, whole.y))

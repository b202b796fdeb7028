"""Every engine gives the same state, history and ledger for every algorithm, to 1e-12 in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import COHORT, TWO_PHASES, cases, two_rounds, unwrapped
from two_phase import TwoPhase

import fedbilevel as fb
from fedbilevel import authoring
from fedbilevel.tasks.quadratic import quadratic
from refusals import refuses

TWO = min(2, jax.local_device_count())  # a machine may have only one GPU
ENGINES = {
    "vmap": fb.Local(chunk=COHORT),
    "one by one": fb.Local(chunk=1),
    "chunks": fb.Local(chunk=2),
    "permuted cohort": fb.Local(chunk=COHORT),
    "two devices": fb.Local(devices=TWO),
    "two devices, chunks": fb.Local(devices=TWO, chunk=2),
    "two devices, chunks, streamed": fb.Local(devices=TWO, chunk=2, stream=True),
    "streamed": fb.Local(stream=True),
}
MORE = {"vmap", "one by one", "chunks", "two devices", "streamed"}
"""Engines with only one of the settings that the others combine."""
SOME = ("two devices, chunks, streamed",)
ASYNCHRONOUS = ("two devices, chunks",)  # asynchronous methods cannot stream samples
CASES = cases()
SLOW = {name for name, case in CASES.items() if case.slow}
PAIRS = [
    pytest.param(name, engine, marks=[pytest.mark.slow] if case.slow or engine in MORE else [])
    for name, case in sorted(CASES.items())
    for engine in sorted(ENGINES)
    if name == TWO_PHASES or engine in (ASYNCHRONOUS if case.algorithm.asks.asynchronous else SOME)
]


@pytest.fixture(scope="module")
def reference():
    done = {}

    def result(case):
        if case not in done:
            done[case] = two_rounds(case, fb.Reference())
        return done[case]

    return result


def test_every_method_has_a_case():
    """Every method has a case, except for IRIG, which is for a single client."""
    methods = {cls for cls in authoring.ALGORITHMS.values() if cls.__module__.startswith("fedbilevel.")}
    assert methods - {type(unwrapped(case.algorithm)) for case in CASES.values()} == {fb.IRIG}


@pytest.mark.filterwarnings("ignore::fedbilevel.errors.AbsenceWarning")
@pytest.mark.parametrize(("case", "engine"), PAIRS)
def test_agrees_with_the_reference(case, engine, reference, monkeypatch):
    """Each engine agrees with Reference to 1e-12.

    Sums of at most COHORT·32 terms of size about 1 in another order differ by about 1e-14, so that 1e-12 leaves room.
    """
    expected = reference(case)
    if permuted := engine == "permuted cohort":
        fb.Local.forget()
        draw = fb.Cohort.draw
        monkeypatch.setattr(fb.Cohort, "draw", lambda *arguments: draw(*arguments)[::-1])
    computed = two_rounds(case, ENGINES[engine])
    if permuted:
        fb.Local.forget()
    assert jax.tree.structure(expected) == jax.tree.structure(computed)
    for path, want in jax.tree_util.tree_leaves_with_path(expected):
        have = dict(jax.tree_util.tree_leaves_with_path(computed))[path]
        np.testing.assert_allclose(have, want, rtol=1e-12, atol=1e-12, err_msg=jax.tree_util.keystr(path))


@pytest.mark.filterwarnings("ignore::fedbilevel.errors.AbsenceWarning")
@pytest.mark.parametrize("cases", [sorted(CASES.keys() - SLOW), pytest.param(sorted(SLOW), marks=pytest.mark.slow)])
def test_the_cases_move(cases, reference):
    """In every case x and y move by more than 1e-4, which is 10⁸ times the tolerance.

    If the state did not move, agreement would prove nothing.
    """
    for case in cases:
        state = reference(case)[0].state
        assert all(float(jnp.linalg.norm(leaf)) > 1e-4 for leaf in jax.tree.leaves((state.x, state.y))), case


def test_an_exchange_takes_phases_only():
    class Leaky(TwoPhase):
        def round(self, fed, state, key):
            return fed.mean(lambda client, message, key: authoring.Reply(message), state, key)

    task = quadratic(clients=3)
    for engine in (fb.Reference(), fb.Local()):
        with refuses("", fact="['correction', 'inner_gradient'], got <lambda>", where="Leaky"):
            fb.solve(Leaky(), task.problem, task.clients, task.x0, task.y0, rounds=1, engine=engine)

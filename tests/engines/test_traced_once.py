"""How often does one `solve` call the user's functions? JAX traces each once for arguments of the same shapes.

A run may call a function with batches of three sizes. The checks before the first round use two samples and one sample.
Batches of one sample also occur where the samples of a padded batch, or of a population, are taken one by one. The
rounds use batches of the size that clients draw.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.cli import main
from fedbilevel.engines.local import rounds as rounds_module
from fedbilevel.engines.local.fed import LocalFed
from fedbilevel.engines.progress import COMPILING
from fedbilevel.engines.recorder import Recorder
from fixed_steps import fixed
from representatives import slow_but

pytestmark = pytest.mark.checked  # the checks of the losses also call the functions

SAMPLES = [np.random.default_rng(i).normal(size=(n, 3)) for i, n in enumerate((4, 6))]
CLIENTS = fb.Clients(SAMPLES, [2 * rows for rows in SAMPLES])
BATCHES = {"outer": 2, "inner": 2}  # for two samples, which is also the batch size, and for one
LOCAL = fb.parts.LocalImplicit(solver=fb.parts.Neumann(terms=3, step=0.01))
CASES = {
    "SimFBO": (fixed(fb.SimFBO(batch_size=2)), BATCHES),
    # clients are unequal, so that samples are taken one by one
    "SimFBO, all samples": (fixed(fb.SimFBO(batch_size=None)), BATCHES),
    "LFedNest": (fixed(fb.LFedNest(batch_size=2, hypergradient=LOCAL)), BATCHES),
    "RABO": (fixed(fb.RABO(batch_size=2, hypergradient=LOCAL)), BATCHES),
    "AFBO, asynchronous": (fb.Asynchronous(fixed(fb.AFBO(batch_size=2, hypergradient=LOCAL)), wait_for=1), BATCHES),
    "FedAvg": (fb.FedAvg(batch_size=2), {"loss": 2}),
    # H with the samples, which it ignores, and without them
    "FISM": (fb.FISM(), {"preference": 3, "inner": 2, "project": 1}),
}


class Traced(Exception):
    """Raised when all is traced, since the test needs no compiled program."""


def problem_for(algorithm, counted):
    def loss(x, y, batch):
        return jnp.mean((batch @ y - jnp.sum(x)) ** 2) + jnp.vdot(y, y)

    kind = algorithm.kinds_of_problem[0]
    if kind is fb.SimpleBilevel:
        preference = counted("preference", lambda x: jnp.vdot(x, x))
        project = counted("project", fb.projections.box(-1.0, 1.0))
        return kind(preference, counted("inner", lambda x, batch: loss(x, jnp.ones(3), batch)), project)
    if kind is fb.SingleLevel:
        return kind(counted("loss", lambda x, batch: loss(x, jnp.ones(3), batch)))
    if kind is fb.Minimax:
        return kind(counted("loss", lambda x, y, batch: -loss(x, y, batch) + jnp.vdot(x, x)))
    return fb.Bilevel(counted("outer", loss), counted("inner", lambda *at: loss(*at) + at[1] @ at[1]))


def calls(algorithm, monkeypatch, **options):
    """Return how often a `solve` calls each function."""
    found = {}

    def counted(name, function):
        def watched(*arguments):
            found[name] = found.get(name, 0) + 1
            return function(*arguments)

        return watched

    def stop(what):
        if what.startswith(COMPILING):
            raise Traced

    problem = problem_for(algorithm, counted)
    start = [jnp.ones(2)] if isinstance(problem, fb.SingleLevel | fb.SimpleBilevel) else [jnp.ones(2), jnp.zeros(3)]
    clients = fb.Clients(SAMPLES) if isinstance(problem, fb.Minimax) else CLIENTS
    fb.Local.forget()
    monkeypatch.setattr(rounds_module, "report_stage", stop)
    fb.Local.forget()
    with pytest.raises(Traced):
        fb.solve(algorithm, problem, clients, *start, rounds=3, **options)
    return found


@pytest.mark.parametrize("case", slow_but("SimFBO", "FedAvg", "FISM", of=CASES))
def test_a_function_is_called_once_for_arguments_of_the_same_shapes(case, monkeypatch):
    algorithm, expected = CASES[case]
    assert calls(algorithm, monkeypatch) == expected


def test_each_run_calls_them_anew_and_counting_operations_for_shapes_of_its_own_alone(monkeypatch):
    """Each run calls the functions again, and counting operations adds no call for shapes that were already traced.

    The calls are repeated because a variable that a function reads may have changed. JAX would not notice this, because
    its cache has the function as its key.
    """
    for options in ({}, {}, {"count_flops": True}):
        assert calls(fixed(fb.SimFBO(batch_size=2)), monkeypatch, **options) == BATCHES


@pytest.mark.parametrize("length", slow_but("--rounds", of=["--exchanges", "--rounds"]))
def test_a_command_traces_a_round_twice(length, monkeypatch, tmp_path):
    """A command traces a round twice.

    The first time only shapes are traced, from which operations and bytes are counted. The second time is for the
    program, with an engine's clients, sums and keys. A budget is turned into a number of rounds by four rounds of this
    program.
    """
    fb.Local.forget()
    rounds, whole = [], fb.FedBiO.round
    monkeypatch.setattr(fb.FedBiO, "round", lambda self, fed, *at: rounds.append(type(fed)) or whole(self, fed, *at))
    command = ["run", "quadratic", "--algorithm", "fedbio", length, "8", "--quiet", "--out", str(tmp_path / "run")]
    assert main(command) == 0
    assert set(rounds) == {Recorder, LocalFed}
    assert len(rounds) == 2

"""Every method runs with clients that clip and noise their replies, or is refused by name.

Tests check which numbers are noised, and that a simulation under privacy has the numbers of a federation.
"""

import re
from collections import Counter
from dataclasses import replace
from typing import ClassVar

import federations
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from agreement import SIMPLE_BILEVEL, cases, unwrapped
from test_site import request

import fedbilevel as fb
from fedbilevel import authoring
from fedbilevel.algorithms.parts import private
from fedbilevel.core.client import Client
from fedbilevel.core.errors import ExchangeError
from fedbilevel.core.privacy import NoiseError, Privacy, check_noise
from fedbilevel.flower import privacy
from fedbilevel.flower.client.phases import SitePhases
from fedbilevel.flower.client.site import ClientRuntime, client_app
from fedbilevel.flower.launch.in_process import InProcess
from fedbilevel.flower.refusal import Code
from fedbilevel.flower.server.terms import Terms
from fedbilevel.flower.wire import from_bytes, to_bytes
from fedbilevel.tasks.quadratic import inner, outer, quadratic
from fixed_steps import fixed
from refusals import codes, raises_with
from representatives import slow_but

CLIENTS = 3
SPLIT = fb.Bilevel(lambda x, y, b: outer(x[0], y, b), lambda x, y, b: inner(x[0], y, b), local="x")
STEP, TERMS = fb.parts.LocalSGD(local_steps=1), fb.parts.Neumann(terms=2)
GLOBAL, GLOBAL_CG = fb.parts.Implicit(solver=TERMS), fb.parts.Implicit(solver=fb.parts.CG())
LOCAL, LOCAL_CG = fb.parts.LocalImplicit(solver=TERMS), fb.parts.LocalImplicit(solver=fb.parts.CG())
MEAN_GRADIENT = fb.parts.MeanGradient(local_steps=1)
CASES = {  # at least one for each method; a method that is not here has its cases of agreement, which are added below
    "AFBO": (
        fb.Asynchronous(fixed(fb.AFBO(batch_size=None, inner=MEAN_GRADIENT, hypergradient=LOCAL_CG)), wait_for=2),
        None,
    ),
    "AFBO, own x": (fixed(fb.AFBO(batch_size=None, inner=MEAN_GRADIENT, hypergradient=LOCAL)), SPLIT),
    "BiFISTA": (fb.BiFISTA(lr=0.1), SIMPLE_BILEVEL),
    "FedMBO": (fixed(fb.FedMBO(batch_size=None, inner=STEP, hypergradient=GLOBAL)), None),
    "FedNest": (fixed(fb.FedNest(batch_size=None, inner=fb.parts.SVRG(local_steps=1), hypergradient=GLOBAL)), None),
    "FedNestSGD": (fixed(fb.FedNestSGD(batch_size=None, inner=STEP, hypergradient=GLOBAL)), None),
    "IRG": (fb.IRG(lr=0.1), SIMPLE_BILEVEL),
    "ShroFBO, the first two": (fb.Asynchronous(fixed(fb.ShroFBO(batch_size=None)), wait_for=2), None),
    "SimFBO, the first one": (fb.Asynchronous(fixed(fb.SimFBO(batch_size=None, local_steps=2)), wait_for=1), None),
}
REFUSED = {
    "ADBO": (fb.ADBO(), "SDBO's clients send values"),
    "FISM": (fb.FISM(), "divides by the mean of 1/n_i"),
    "IRIG": (fb.IRIG(), "divides by the mean of 1/n_i"),
    "IRG, tolerance": (fb.IRG(tolerance=0.1), "tolerance = 0.1 compares sums over all samples"),
    "BiFISTA, tolerance": (fb.BiFISTA(tolerance=0.1), "tolerance = 0.1 compares sums over all samples"),
    "FedNest, cg": (
        fixed(fb.FedNest(hypergradient=GLOBAL_CG)),
        "mistakes noise on products for negative curvature; use a Ne",
    ),
    "FedNestSGD, cg": (
        fixed(fb.FedNestSGD(hypergradient=GLOBAL_CG)),
        "noise on products for negative curvature",
    ),
    "FedMBO, cg": (fixed(fb.FedMBO(hypergradient=GLOBAL_CG)), "noise on products for negative curvature"),
}
TESTED = {type(unwrapped(algorithm)) for algorithm, _ in (CASES | REFUSED).values()}
CASES |= {
    name: (fixed(case.algorithm), case.problem)
    for name, case in cases().items()
    if type(unwrapped(case.algorithm)) not in TESTED
}
ROUNDS = 3
LARGEST = 9.42  # the largest standard normal number that `gaussian` can make


def test_every_method_is_here():
    """Each method that is registered has a case, or is among the methods that are refused."""
    named = {type(unwrapped(algorithm)) for algorithm, _ in (CASES | REFUSED).values()}
    assert named >= set(authoring.ALGORITHMS.values())


@pytest.fixture
def noise_of_the_run(monkeypatch):
    """Let sites draw their noise as a simulation does: from the phase's key and the number of the client's reply."""
    counts, streams = Counter(), []
    client = SitePhases.client

    def noting(phases, request, state):
        key = jax.random.wrap_key_data(jnp.asarray(np.frombuffer(request.key, np.uint32)), impl=request.key_kind)
        for number in (phases.id, private.NOISE, 0 if request.fresh else counts[phases.id]):
            key = jax.random.fold_in(key, number)
        counts[phases.id] += not request.fresh
        streams.append(key)
        return client(phases, request, state)

    monkeypatch.setattr(SitePhases, "client", noting)
    monkeypatch.setattr(privacy, "gaussian", lambda _, count: np.asarray(jax.random.normal(streams[-1], (count,))))


SIMULATED = {
    "SimFBO": (fixed(fb.SimFBO(batch_size=2, local_steps=2)), 2),
    "SimFBO, the first two": (fb.Asynchronous(fixed(fb.SimFBO(batch_size=2)), wait_for=2), None),
    "FedNest, fresh cohorts": (
        fixed(fb.FedNest(batch_size=2, inner=fb.parts.SVRG(local_steps=1), hypergradient=GLOBAL)),
        2,
    ),
    "ShroFBO, public counts": (fixed(fb.ShroFBO(batch_size=None)), 2),
    "ShroFBO, top-k": (fb.layered(fixed(fb.ShroFBO(batch_size=None)), fb.parts.TopK(share=0.4)), 2),
    "SimFBO, the first two, top-k": (
        fb.layered(fixed(fb.SimFBO(batch_size=2)), fb.Asynchronous(wait_for=2), fb.parts.TopK(share=0.4)),
        None,
    ),
}


@pytest.mark.filterwarnings("ignore::fedbilevel.core.errors.NumericalWarning")
@pytest.mark.parametrize("case", slow_but("ShroFBO, public counts", of=SIMULATED))
def test_a_simulation_under_privacy_is_a_federation_under_privacy(case, tmp_path, noise_of_the_run):
    """If both draw the same noise, a simulation and a federation have the same x, y, costs and ε of each row.

    The tolerance of 1e-12 is for rounding in sums of a few numbers of size 1.
    """
    (algorithm, cohort), terms = SIMULATED[case], Privacy(clip=0.5, noise_multiplier=0.3, delta=1e-5)
    task = quadratic(clients=CLIENTS, dim_x=2, dim_y=3, samples=(4, 4))

    def site(run, node):
        k = node["partition-id"]
        return federations.site(algorithm, k, task, privacy=terms, folder=kept_in(tmp_path / str(k), k))

    grid = InProcess(client_app(site), CLIENTS, delay=lambda client, message: 1.0)
    same = {"rounds": ROUNDS, "cohort": cohort, "key": 1, "eval_every": 1}
    there = federations.solve(algorithm, grid, task=task, **same)
    here = fb.solve(algorithm, task.problem, task.clients, task.x0, task.y0, privacy=terms, **same)
    for a, b in [(here.x, there.x), (here.y, there.y)]:
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
    for name in ("round", "exchanges", "bytes_up", "bytes_down"):
        assert here.history[name].tolist() == there.history[name].tolist()
    assert {"outer_loss", "inner_loss"}.isdisjoint(here.history.columns)
    fresh = case == "FedNest, fresh cohorts"  # then the simulation's ε is an upper bound
    mine, theirs = here.history["epsilon"][1:], there.history["epsilon"][1:]
    assert np.all(mine >= theirs) if fresh else mine.tolist() == theirs.tolist()


def kept_in(folder, number):
    """Make a client's folder with a fixed secret and an empty account, and return it."""
    folder.mkdir(parents=True)
    (folder / "secret").write_bytes(bytes([number] * 32))
    (folder / "secret").chmod(0o600)
    (folder / "account.json").write_text("{}")
    return folder


def played(case, folder=None, privacy=None):
    """Return the result of a case, in which client 1 is the slowest; this matters for asynchronous methods."""
    algorithm, problem = CASES[case]
    task = quadratic(clients=CLIENTS, dim_x=2, dim_y=3, samples=(4, 4))
    if not isinstance(algorithm, fb.BiFISTA | fb.IRG | fb.SDBO):  # which refuse local steps
        task = task.with_own(local_steps=[1, 2, 3])
    if isinstance(problem, fb.SimpleBilevel | fb.SingleLevel):
        task = replace(task, x0=0.1 * jnp.ones(2), y0=None)
    if problem is SPLIT:
        task = replace(task, x0=jnp.zeros((CLIENTS, 2)))
    if isinstance(problem, fb.Minimax):
        task = replace(task, clients=fb.Clients(task.clients.outer, weights=task.clients.weights))
    task = replace(task, problem=problem or task.problem)

    def site(run, node):
        k = node["partition-id"]
        noised = {} if privacy is None else {"privacy": privacy, "folder": kept_in(folder / str(k), k)}
        return federations.site(algorithm, k, task, **noised)

    grid = InProcess(client_app(site), CLIENTS, delay=lambda client, message: [1.0, 5.0, 1.1][client])
    return federations.solve(algorithm, grid, task=task, rounds=ROUNDS, cohort=None, key=0, eval_every=1)


@pytest.mark.filterwarnings("ignore::fedbilevel.core.errors.NumericalWarning")
@pytest.mark.parametrize("case", slow_but("ShroFBO, the first two", of=CASES))
def test_noise_is_in_what_tells_of_data_alone(case, tmp_path):
    """Numbers that depend on data get noise, and all other numbers of a state and a history are exact or withheld.

    The first noise has the deviation σ = 1e-9, with a clip that no reply reaches. Each of the at most 30 numbers of a
    reply is off by at most 9.42σ, in at most 15 exchanges of a run. They reach the state through maps with Lipschitz
    constants below 10 over all rounds. So the state is off by less than 9.42·√30·15·10·σ < 1e4·σ. With σ = 1 the
    numbers that do not depend on data are still exactly those of a run without noise.
    """
    plain = played(case)
    close = played(case, tmp_path / "close", Privacy(clip=1e6, noise_multiplier=1e-15, delta=1e-5))
    for exact, noised in zip(jax.tree.leaves(plain.state), jax.tree.leaves(close.state), strict=True):
        np.testing.assert_allclose(noised, exact, rtol=0, atol=1e4 * 1e-9)
    assert any(not np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (plain.state, close.state)), strict=True))
    noisy = played(case, tmp_path / "noisy", Privacy(clip=1.0, noise_multiplier=1.0, delta=1e-5))
    assert bookkeeping(case, noisy.state) == bookkeeping(case, plain.state)
    for rows in zip(plain.history.rows, noisy.history.rows, strict=True):
        mine, theirs = ({k: row[k] for k in BOOKS & row.keys()} for row in rows)
        assert mine == theirs
        assert not {"outer_loss", "inner_loss"} & rows[1].keys()


BOOKS = {"round", "exchanges", "replies", "bytes_up", "bytes_down", "staleness", "delay"}
BOOKS |= {"delay.inner.gradients", "delay.hypergradient.local_hypergradient"}
COUNTS = {"weight", "age", "exchanges", "work", "rounds", "without", "everyone", "made", "k", "steps", "public"}


def bookkeeping(case, state):
    """Return the numbers of a state that do not depend on data: path → number.

    With a local hypergradient these include the numbers that clients withhold, which are 0, and `negative_curvature`.
    With other hypergradients the server itself meets negative curvature, in noised products.
    """
    own = isinstance(getattr(unwrapped(CASES[case][0]), "hypergradient", None), fb.parts.LocalImplicit)
    named = COUNTS | {"withheld", "negative_curvature"} if own else COUNTS
    leaves = jax.tree_util.tree_leaves_with_path(state)
    found = {jax.tree_util.keystr(path): np.asarray(leaf).tolist() for path, leaf in leaves}
    return {path: value for path, value in found.items() if named & set(path.split("."))}


@pytest.mark.parametrize("case", REFUSED)
def test_a_method_that_noise_would_spoil_is_refused_by_name(case):
    algorithm, why = REFUSED[case]
    with raises_with(NoiseError, f"{type(algorithm).__name__} does not", where="Site.privacy") as error:
        check_noise("Site.privacy", algorithm)
    assert re.search(why, str(error.value))


def test_both_sides_are_told_why_a_method_is_refused(tmp_path):
    """If noise would spoil a method, the client gets an error at once, and the server's error has the same reason."""
    privacy = Privacy(clip=1.0, noise_multiplier=1.0, delta=1e-5)
    algorithm = fixed(fb.FedNest(hypergradient=GLOBAL_CG))
    with raises_with(NoiseError, "FedNest", where="Site.privacy"):
        federations.site(algorithm, 0, privacy=privacy, folder=tmp_path)
    grid = InProcess(federations.app(algorithm, privacy=privacy, folder=tmp_path), 6)
    with raises_with(ExchangeError, "Site.privacy: FedNest does not support noisy replies", replies=0) as error:
        federations.solve(algorithm, grid, terms=Terms(join=1.0))
    assert codes(error) == dict.fromkeys(range(6), Code.METHOD)


def asked(runtime, round, message, **more):
    """Return the update with which a client replies to a message of the only phase."""
    (call,) = runtime.contract.calls.values()
    asked = request(runtime, call.phase, round=round, exchange=0, payload=to_bytes(message), **more)
    response = runtime.respond(asked, None)
    assert response.refused == ""
    return from_bytes(response.payload, call.update)


def test_counts_do_not_eat_the_clip(tmp_path):
    """Public counts have no part in the norm that is clipped.

    A reply of ShroFBO has an h, whose norm is the clip C here, and the counts τ = 50 and 1. The h is sent unchanged, up
    to noise of at most 9.42·zC, and the counts are sent exactly. If they were clipped as one vector, h would be
    multiplied by C/√(C² + 50² + 1).
    """
    algorithm = fixed(fb.ShroFBO(batch_size=None, local_steps=50, client_lr=1e-6))
    start = algorithm.init(federations.TASK.x0, federations.TASK.y0).iterate
    (h, tau, one) = asked(ClientRuntime(federations.site(algorithm, 0, folder=tmp_path / "plain")), 0, start)
    size = float(optax.tree.norm(h))
    privacy = Privacy(clip=size * (1 + 1e-9), noise_multiplier=1e-9, delta=1e-5)
    runtime = ClientRuntime(federations.site(algorithm, 0, privacy=privacy, folder=kept_in(tmp_path / "0", 0)))
    (sent, *counts) = asked(runtime, 0, start)
    assert size < 25  # half of τ, so that a common clip would change h by much
    assert [count.public for count in counts] == [tau.public, one.public] == [50, 1]
    for mine, theirs in zip(sent, h, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=LARGEST * 1e-9 * privacy.clip)


def test_noise_does_not_add_up_over_differences(tmp_path):
    """If replies are sent as differences, their noise does not add up.

    After 100 replies the sum of the differences is the last update with the noise of one reply, so that each entry is
    off by at most 9.42σ. If each difference had noise of its own, entries would be off by 10σ in the root mean square,
    and some of the 8 entries by more.
    """
    algorithm, sigma = fb.Asynchronous(fixed(fb.SimFBO(batch_size=None, local_steps=1)), wait_for=1), 0.5
    privacy = Privacy(clip=5e5, noise_multiplier=1e-6, delta=1e-5)
    runtime = ClientRuntime(federations.site(algorithm, 0, privacy=privacy, folder=kept_in(tmp_path / "0", 3)))
    iterate = algorithm.init(federations.TASK.x0, federations.TASK.y0).inside.iterate
    total, joins, exchanges = optax.tree.zeros_like(iterate), 0.0, 0.0
    counted = {}
    for round in range(100):
        change = asked(runtime, round, (iterate, np.asarray(round, np.int32)), **counted)
        counted = {"counted_round": round, "counted_exchange": 0}
        total = optax.tree.add(total, change.update)
        joins, exchanges = joins + change.joins.public, exchanges + change.exchanges.public
    assert (float(joins), float(exchanges)) == (1.0, 100.0)
    exact = algorithm.algorithm.local_updates(reference_client(runtime), iterate, jax.random.key(0)).update
    off = max(float(jnp.max(jnp.abs(a - b))) for a, b in zip(total, exact, strict=True))
    assert sigma / 2 < off <= LARGEST * sigma  # that all 8 numbers are below σ/2 has the chance 0.0005


def reference_client(runtime):
    return Client(runtime.problem, runtime.outer, runtime.inner, jnp.asarray(0), jnp.asarray(0.25), None)


class Peek(authoring.Layer):
    """A layer outside of privacy that keeps what it sees, and tries to send a metric."""

    kind, place = "peek", "coded"
    seen: ClassVar[list] = []

    def reply(self, asked, kept, client, run):
        self.seen.append((client.outer, client.inner, getattr(client.state, "inside", None)))
        return run(asked, client)._replace(metrics={"seen": jnp.ones(())}), kept


LATE_AND_SHORT = {
    "late": fb.Asynchronous(wait_for=2),
    "short": fb.parts.TopK(share=0.4),
    "a layer of one's own": Peek(),
}


@pytest.mark.parametrize(
    ("name", "x64"),
    [
        pytest.param(name, x64, marks=[pytest.mark.slow] * (x64 != (name == "short")))
        for name in LATE_AND_SHORT
        for x64 in (False, True)
    ],
)
def test_layers_outside_of_privacy_see_what_is_noised_in_both_precisions(name, x64, tmp_path):
    """Layers outside of privacy see the noised reply and no samples, in both precisions; their metrics are not sent."""
    algorithm = fb.layered(fixed(fb.SimFBO(batch_size=2)), LATE_AND_SHORT[name])
    terms = Privacy(clip=0.5, noise_multiplier=0.3, delta=1e-5)
    with jax.enable_x64(x64):
        task = quadratic(clients=CLIENTS, dim_x=2, dim_y=3, samples=(4, 4))

        def site(run, node):
            folder = tmp_path / str(node["partition-id"])
            folder.mkdir(exist_ok=True)
            return federations.site(algorithm, node["partition-id"], task, privacy=terms, folder=folder)

        result = federations.solve(algorithm, InProcess(client_app(site), CLIENTS), task=task, rounds=2, cohort=None)
    assert np.isfinite(result.x).all()
    assert "seen" not in result.history.columns
    if name == "a layer of one's own":
        assert Peek.seen[-1] == (None, None, None)
    assert result.ledger.epsilon > 0

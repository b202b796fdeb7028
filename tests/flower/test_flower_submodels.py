"""Clients with submodels over Flower have the numbers of `Local` and small messages; wrong sizes are refused."""

import gc
import json
import weakref
from dataclasses import replace
from functools import cache, partial

import federations
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import two_layers
from test_site import asked
from two_layers import HIDDEN, OUTPUTS, PROBLEM, inner, outer

import fedbilevel as fb
from fedbilevel.core.privacy import Privacy
from fedbilevel.core.submodel import UnitLayout
from fedbilevel.core.tree import nbytes
from fedbilevel.experiments import configure, federation, load_run, run
from fedbilevel.flower.client.site import ClientRuntime, Site, client_app
from fedbilevel.flower.launch.in_process import InProcess
from fedbilevel.flower.server.engine import Flower
from fedbilevel.flower.server.session import SubmodelPrograms
from fedbilevel.flower.server.terms import Terms
from fedbilevel.flower.wire import RequestMessage, decode, layout
from fixed_steps import fixed
from refusals import raises_with, refuses

INPUTS = 3
CAPACITY = (1.0, 0.5, 0.25, 0.5, 0.25)
UNITS = [int(share * HIDDEN) for share in CAPACITY]
ROUNDS = 2
IMPORTANCE = fixed(fb.SimFBO(local_steps=2, batch_size=3))
RABO = fixed(
    fb.RABO(
        inner=fb.parts.LocalSGD(rounds=1, local_steps=2),
        hypergradient=fb.parts.LocalImplicit(solver=fb.parts.Neumann(terms=2)),
        batch_size=3,
    )
)
RANDOM = fb.Submodels(RABO, policy="random")
WEIGHTS = fb.Submodels(RABO, policy="weights")
start = partial(two_layers.start, INPUTS)


@cache
def population():
    """Return five clients of unequal weight, with six samples for each loss."""
    rng = np.random.default_rng(0)
    rows = [{"input": rng.normal(size=(6, INPUTS)), "target": rng.normal(size=(6, OUTPUTS))} for _ in range(10)]
    return fb.Clients(rows[:5], rows[5:], weights=np.arange(1, 6), capacity=CAPACITY)


def numbers_of(units):
    """Return how many numbers of x, y and v a message of SimFBO has for so many units; a reply has as many."""
    return units * (INPUTS + 1 + 2 * OUTPUTS)


def site(algorithm, k, capacity, problem=PROBLEM, **more):
    (x, y), clients = start(), population()
    samples = {"outer": clients.outer.row(k), "inner": clients.inner.row(k)}
    more = {"limits": federations.FREE, "capacity": capacity, **samples, **more}
    return Site(id=k, algorithm=algorithm, problem=problem, x0=x, y0=y, **more)


def app(algorithm, capacity=CAPACITY):
    return client_app(lambda run, node: site(algorithm, node["partition-id"], capacity[node["partition-id"]]))


def solved(algorithm, clients, *, problem=PROBLEM, rounds=ROUNDS, **more):
    return fb.solve(algorithm, problem, clients, *start(), rounds=rounds, key=3, eval_every=1, **more)


def over(response, log=None, **terms):
    second = lambda client, message: float(bool(decode(RequestMessage, message).phase))  # noqa: E731  as in Local's clock
    return Flower(grid=InProcess(response, len(CAPACITY), delay=second), log=log, terms=Terms(**terms))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "cohort"),
    [(IMPORTANCE, None), (RANDOM, 4), (WEIGHTS, 4)],
    ids=["importance", "random units", "weights"],
)
def test_agrees_with_local(algorithm, cohort, tmp_path):
    """A run with submodels over Flower has the state, ledger and history of `Local`, with its coverage and bytes.

    The tolerance of 1e-12 in float64 is derived in tests/engines/test_agreement.py.
    """
    log = tmp_path / "exchanges.jsonl"
    here = solved(algorithm, population(), cohort=cohort)
    there = solved(algorithm, fb.RemoteClients.of(population()), cohort=cohort, engine=over(app(algorithm), log))
    federations.same(here, there)
    assert replace(here.ledger, flops=None) == there.ledger
    assert {"coverage_x", "coverage_y", "uncovered_x", "mask_noise_x"} <= set(there.history.columns)
    np.testing.assert_allclose(here.history["mask_noise_y"], there.history["mask_noise_y"], rtol=1e-12)
    np.testing.assert_array_equal(here.history["bytes_down"], there.history["bytes_down"])
    for a, b in zip(jax.tree.leaves((here.x, here.y)), jax.tree.leaves(start()), strict=True):
        assert float(jnp.max(jnp.abs(a - b))) > 1e-4  # agreement on a state that stood still would prove nothing
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert sum(line["bytes_down"] for line in lines) == there.ledger.bytes_down
    assert sum(line["bytes_up"] for line in lines) == there.ledger.bytes_up
    if algorithm is IMPORTANCE:
        assert there.ledger.bytes_down == there.ledger.bytes_up == ROUNDS * 8 * sum(map(numbers_of, UNITS))


def test_an_answer_of_the_size_of_the_whole_does_not_count(tmp_path):
    """A reply of the size of the whole model does not count.

    Its client counts as absent, but the ledger has the bytes that were sent to it.
    """

    def enlarged(response, message):
        (call,) = ClientRuntime(site(IMPORTANCE, 1, None)).contract.calls.values()
        return replace(response, layout=layout(call.update), payload=bytes(nbytes(call.update)))

    liar = federations.misbehaving(app(IMPORTANCE), {(1, 0, 0): enlarged})
    log = tmp_path / "exchanges.jsonl"
    result = solved(IMPORTANCE, fb.RemoteClients.of(population()), engine=over(liar, log), rounds=1)
    line = json.loads(log.read_text())
    assert line["answered"] == [0, 2, 3, 4]
    assert "float64[8], and" in line["refused"]["1"]["why"]
    sizes = [8 * numbers_of(k) for k in UNITS]
    assert result.ledger.bytes_down == sum(sizes)
    assert result.ledger.bytes_up == sum(sizes) - sizes[1]
    assert (result.ledger.exchanges, result.ledger.replies) == (1, 4)


def test_a_client_of_another_capacity_is_not_admitted():
    """A client does not take part if its capacity is another one than the server knows.

    Client 1 has a quarter of the units, or all, and the server expects half of them.
    """
    for capacity, said in {0.25: "units.hidden is 4 at the server and 2", None: "and missing at the site"}.items():
        wrong = app(IMPORTANCE, (1.0, capacity, 0.25, 0.5, 0.25))
        engine = over(wrong, quorum=1.0, join=1.0, deadline=1.0)
        with raises_with(fb.errors.ExchangeError, said, replies=4):
            solved(IMPORTANCE, fb.RemoteClients.of(population()), engine=engine)


def test_a_client_serves_messages_of_its_own_size_alone(tmp_path):
    """A client refuses messages of the whole model's size, and privacy clips and noises its small update."""
    privacy = Privacy(clip=1.0, noise_multiplier=1.0, delta=1e-5)
    runtime = ClientRuntime(site(IMPORTANCE, 2, 0.25, privacy=privacy, folder=tmp_path))
    (call,), (whole,) = runtime.contract.calls.values(), runtime.general.calls.values()
    assert (nbytes(call.message), nbytes(whole.message)) == (8 * numbers_of(2), 8 * numbers_of(HIDDEN))
    large = bytes(nbytes(whole.message))
    for other in ({"call": whole.name}, {"contract": runtime.general.digest}, {"payload": large}):
        assert asked(runtime, call.phase, **other).refused
    response = asked(runtime, call.phase)
    assert (response.refused, response.layout, len(response.payload)) == ("", layout(call.update), nbytes(call.update))
    assert np.all(np.frombuffer(response.payload) != 0)  # noise in every entry
    assert response.epsilon > 0


@pytest.mark.parametrize(
    ("algorithm", "problem", "fact"),
    [
        (fb.Asynchronous(fixed(fb.SimFBO()), wait_for=2), PROBLEM, ""),
        (IMPORTANCE, fb.Bilevel(outer, inner), "structure"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_both_sides(algorithm, problem, fact):
    with refuses("Clients.capacity", fact=fact):
        ClientRuntime(site(algorithm, 1, 0.5, problem=problem))
    with refuses("Clients.capacity", fact=fact):
        solved(algorithm, fb.RemoteClients.of(population()), engine=over(app(IMPORTANCE)), problem=problem)


@pytest.mark.slow
def test_capacities_of_a_spec_reach_both_sides(tmp_path):
    """The capacities of a spec reach server and clients, whose numbers are those of a simulation of the spec.

    The problem has one level. In float32, sums of some hundred terms of size 1 or less agree to 1e-4 after one round.
    """
    settings = ["clients=3", "cohort=3", "hidden=[4]", "capacity=[1, 0.5, 0.25]", "rounds=1"]
    spec = configure(task="classification", algorithm="fedavg", settings=settings)
    assert federation.site(spec, {}, {"partition-id": 2}).capacity == 0.25
    federation.serve(spec, InProcess(federation.client_app(spec), 3), {"out": str(tmp_path / "a")})
    run(spec, tmp_path / "b")
    there, here = (load_run(tmp_path / name) for name in "ab")
    assert there.ledger["bytes_up"] == here.ledger["bytes_up"]
    mine, theirs = there.history.rows[-1], here.history.rows[-1]
    for name in mine.keys() - {"seconds", "time"}:
        np.testing.assert_allclose(mine[name], theirs[name], rtol=1e-4, err_msg=name)
    assert mine["coverage_x"] == 1


def test_capacities_are_shares():
    with refuses("Site.capacity", 2):
        site(IMPORTANCE, 0, 2)
    with refuses("RemoteClients.capacity"):
        fb.RemoteClients(2, np.ones((1, 3)), capacity=[1.0])


def test_what_cuts_messages_goes_with_the_anatomy():
    """The compiled function that cuts messages is freed together with the layout of units to which it belongs."""

    def phase():
        pass

    phase.__takes_and_gives__ = ("y", "y")
    unit_layout = UnitLayout.of(fb.Structure(y="hidden"), jnp.zeros(3), jnp.zeros(4))
    programs = SubmodelPrograms(unit_layout)
    assert programs.cut(phase, jnp.arange(4.0), {"hidden": jnp.array([1, 3])}).tolist() == [1.0, 3.0]
    kept = [weakref.ref(thing) for thing in (unit_layout, programs.cut)]
    del unit_layout, programs
    gc.collect()
    assert [thing() for thing in kept] == [None, None]

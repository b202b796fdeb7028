"""What does one round of each method draw, and how is a cohort weighted? One table has a row for every method.

Closed forms with full batches, and the agreement of engines, cannot show this. The losses of a round note which samples
of which client they get. The expected numbers follow from the method's equations and fields, and are in its row.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel import authoring
from fedbilevel.authoring import Algorithm
from fedbilevel.parts import (
    CG,
    SVRG,
    Coordinates,
    Differences,
    Implicit,
    LinearizedADMM,
    LocalImplicit,
    LocalSGD,
    MeanGradient,
    Neumann,
    PrintedSlopes,
    SystemSteps,
)
from fixed_steps import fixed

CLIENTS, SAMPLES, DRAWN = 512, 64, 3
T, N = 3, 3  # the local steps, and the terms of a series: N terms take N − 1 products
SERIES = Neumann(terms=N)
SGD, DRAWS = LocalSGD(local_steps=T), {"batch_size": DRAWN}
LOOP, NESTED = {"local_steps": T, **DRAWS}, {"inner": SGD, **DRAWS}
OWN = LocalImplicit(solver=SERIES)


class Row(NamedTuple):
    """What a round of a method draws, in batches of DRAWN samples.

    Attributes:
        outer, inner: the draws for f and for g. A draw for several products, or for both ends of a difference, is one.
        both: the draws of pairs, which are for f and for g at once.
        cohorts: the round's own cohort, and fresh ones.
        exchanges: the exchanges on y.
    """

    method: Algorithm
    outer: int
    inner: int
    both: int = 0
    cohorts: int = 1
    exchanges: int = 1


TABLE = {
    # y: q, and one draw for each local step after the first, used at two points. x: the same on f. h: one draw of each.
    "FedNest": Row(
        fixed(fb.FedNest(inner=SVRG(local_steps=T), hypergradient=Implicit(solver=SERIES), outer_steps=T, **DRAWS)),
        outer=1 + 1 + (T - 1),
        inner=1 + (T - 1) + (N - 1) + 1,
        cohorts=1 + (N + 1),  # ∇y F, each product and h ask fresh clients
    ),
    # all products of conjugate gradient share one draw
    "FedNest, conjugate gradient": Row(
        fixed(fb.FedNest(inner=SVRG(local_steps=T), hypergradient=Implicit(solver=CG(max_steps=2)), **DRAWS)),
        outer=1 + 1,
        inner=1 + (T - 1) + 1 + 1,
    ),
    "FedNest-SGD": Row(
        fixed(fb.FedNestSGD(hypergradient=Implicit(solver=SERIES, fresh_cohorts=False), outer_steps=2, **NESTED)),
        outer=1 + 1 + 1,
        inner=T + (N - 1) + 1,
    ),
    "LFedNest": Row(fixed(fb.LFedNest(hypergradient=OWN, outer_steps=2, **NESTED)), outer=2, inner=T + 2 * (N - 1 + 1)),
    # the draws for y are those of FedNest; joint steps on y and x make the same draws in fewer exchanges
    "LFedNest, SVRG": Row(
        fixed(fb.LFedNest(inner=SVRG(local_steps=T), hypergradient=OWN, **DRAWS)),
        outer=1,
        inner=1 + (T - 1) + (N - 1 + 1),
    ),
    "LFedNest, joint": Row(fixed(fb.LFedNest(hypergradient=OWN, joint=True, **NESTED)), outer=1, inner=T + (N - 1 + 1)),
    "LFedNest, SVRG, joint": Row(
        fixed(fb.LFedNest(inner=SVRG(local_steps=T), hypergradient=OWN, joint=True, **DRAWS)),
        outer=1,
        inner=1 + (T - 1) + (N - 1 + 1),
    ),
    # support and query samples are pairs: one draw serves f, all products and the cross derivative
    "LFedNest, pairs": Row(
        fixed(fb.LFedNest(hypergradient=LocalImplicit(solver=SERIES, paired=True), outer_steps=2, **NESTED)),
        outer=2,
        inner=T + 2,
        both=2,
    ),
    "FedMBO": Row(
        fixed(fb.FedMBO(hypergradient=Implicit(solver=SERIES), **NESTED)),
        outer=1 + 1,
        inner=T + (N - 1) + 1,
        cohorts=1 + (N + 1),
    ),
    "RABO": Row(fixed(fb.RABO(hypergradient=OWN, **NESTED)), outer=1, inner=T + (N - 1) + 1),
    # both gradients of a difference share one draw
    "RAFBO": Row(
        fixed(fb.RAFBO(hypergradient=LocalImplicit(solver=SERIES, second_order=Differences()), **NESTED)),
        outer=1,
        inner=T + (N - 1) + 1,
    ),
    # the slopes along all coordinates of x compare responses to the same N batches
    "RAFBO, coordinates": Row(
        fixed(fb.RAFBO(hypergradient=Coordinates(terms=N, step=0.1), **NESTED)), outer=1, inner=T + N
    ),
    # all of equation (10) shares one draw
    "RAFBO, printed": Row(fixed(fb.RAFBO(hypergradient=PrintedSlopes(), **NESTED)), outer=1, inner=T + 1),
    # N exchanges: each has y and ∇y F, and each after the first has a product; then one with f and the cross derivative
    "AggITD": Row(
        fixed(fb.AggITD(inner=LocalSGD(rounds=N, local_steps=T, lr=0.1), **DRAWS)),
        outer=N + 1,
        inner=N * T + (N - 1) + 1,
        exchanges=N,
    ),
    "AFBO": Row(
        fixed(fb.AFBO(inner=MeanGradient(local_steps=T), hypergradient=OWN, **DRAWS)), outer=1, inner=T + (N - 1) + 1
    ),
    "AFBO, steps on v": Row(
        fixed(fb.AFBO(inner=MeanGradient(local_steps=T), hypergradient=SystemSteps(), **DRAWS)), outer=1, inner=T + 1
    ),
    # one draw of f and one of g serve x, y and v
    "SimFBO": Row(fixed(fb.SimFBO(**LOOP)), outer=T, inner=T),
    "F2SA": Row(fixed(fb.F2SA(**LOOP)), outer=T, inner=T),
    "MEHA": Row(fixed(fb.MEHA(**LOOP)), outer=T, inner=T),
    # as in the paper's analysis: f separately for x and v, g separately for x, y and v
    "SimFBO, independent batches": Row(fixed(fb.SimFBO(**LOOP, independent_batches=True)), outer=2 * T, inner=3 * T),
    "ShroFBO": Row(fixed(fb.ShroFBO(**LOOP)), outer=T, inner=T),
    # a step and its anchor share samples
    "CorrectedFBO": Row(fixed(fb.CorrectedFBO(**LOOP)), outer=T, inner=T),
    "FedBiO": Row(fixed(fb.FedBiO(**LOOP)), outer=T, inner=T),
    # both directions of a momentum share samples
    "FedBiOAcc": Row(fixed(fb.FedBiOAcc(**LOOP)), outer=T, inner=T),
    # the outer losses are of all samples
    "FedEx": Row(fixed(fb.FedEx(**LOOP)), outer=0, inner=T),
    "FedAvg-S": Row(fb.FedAvgS(**LOOP), outer=T, inner=0),
    "FedLin": Row(fb.FedLin(**LOOP), outer=1 + (T - 1), inner=0),
    "FedAvg": Row(fb.FedAvg(**LOOP), outer=T, inner=0),
    "IRG": Row(fb.IRG(**DRAWS), outer=0, inner=1),
    "BiFISTA": Row(fb.BiFISTA(lr=0.1, **DRAWS), outer=0, inner=1),
    # the K steps of a plane and the way back through them share samples
    "SDBO": Row(fb.SDBO(iterations=1, estimate=LinearizedADMM(steps=2), **DRAWS), outer=1, inner=2),
    "ADBO": Row(fb.ADBO(iterations=1, estimate=LinearizedADMM(steps=2), **DRAWS), outer=1, inner=2),
}
WALKS = {fb.FISM, fb.IRIG}
"""Methods that draw single samples without repetition; test_fism.py tests their draws."""

NORMALISED = {"FedEx"}
"""Methods that divide their means by the weight of the cohort; test_fedex.py tests them."""

OTHERS = {
    "FedNest, conjugate gradient": "FedNest",
    "FedNest-SGD": "FedNest and FedMBO",
    "LFedNest, pairs": "LFedNest",
    "RABO": "FedMBO and AFBO",
    "RAFBO": "FedMBO and AFBO",
    "SimFBO, independent batches": "SimFBO",
    "F2SA": "SimFBO",
    "MEHA": "SimFBO",
    "CorrectedFBO": "ShroFBO",
    "BiFISTA": "IRG",
}
"""Rows whose means weight a cohort by the same lines of code as those of another row, which is tested."""


class Watched:
    """Losses that note the client and the places of each batch of DRAWN samples."""

    def __init__(self) -> None:
        self.seen: dict[str, set[tuple[int, ...]]] = {"outer": set(), "inner": set()}

    def note(self, name: str, batch: Any) -> Any:
        """Note the batch, and return its factor of the loss."""
        if batch["place"].shape == (DRAWN,):
            jax.debug.callback(lambda c, p: self.seen[name].add((int(c[0]), *p.tolist())), batch["of"], batch["place"])
        return jnp.mean(batch["a"])

    def outer(self, x: Any, y: Any, batch: Any) -> Any:
        return self.note("outer", batch) * (x @ x / 2 + x @ y + y @ y / 2)

    def inner(self, x: Any, y: Any, batch: Any) -> Any:
        """Compute a loss with two curvatures, so that conjugate gradient takes two products."""
        return self.note("inner", batch) * (y**2 @ jnp.array([1.0, 3.0]) / 2 - x @ y)


def population(clients: int) -> dict[str, Any]:
    """Return the samples of the clients, with equally many samples for both losses.

    If a method used the same key for both losses, it would therefore draw the same indices for both.
    """
    of, place = np.mgrid[:clients, :SAMPLES]
    return {"of": of, "place": place, "a": 1 + np.random.default_rng(0).uniform(size=of.shape)}


def one_round(method: Algorithm, outer: Any, inner: Any, rows: Any, weights: Any = None, **options: Any) -> fb.Result:
    """Run one round from x = y = 1, on the kind of problem that the method solves, made of these two losses."""
    one, kind = jnp.ones(2), method.solves[0]
    problem, y0, samples = fb.Bilevel(outer, inner), one, (rows, dict(rows))
    if kind is fb.Minimax:
        problem, samples = fb.Minimax(lambda x, y, batch: outer(x, y, batch) - 2 * y @ y), (rows,)
    elif kind is fb.SingleLevel:
        problem, y0 = fb.SingleLevel(lambda x, batch: outer(x, one, batch)), None
    elif kind is fb.SimpleBilevel:
        preference = lambda x: (x - 1) @ (x - 1) / 2  # noqa: E731  its slope is 0 at the start
        problem = fb.SimpleBilevel(preference, lambda x, batch: inner(one, x, batch), fb.projections.ball(9.0))
        y0 = None
    clients = fb.Clients(*samples, weights=weights)
    return fb.solve(method, problem, clients, one, y0, rounds=1, **options)


def test_every_method_has_a_row():
    methods = {cls for cls in authoring.ALGORITHMS.values() if cls.__module__.startswith("fedbilevel.")}
    assert methods - {type(row.method) for row in TABLE.values()} == WALKS


@pytest.mark.parametrize("name", [name for name in TABLE if name != "ADBO"])  # ADBO has the phases of SDBO
def test_draws_are_shared_where_equations_share_them_and_apart_elsewhere(name):
    """A method shares draws exactly where its equations do, and a fresh cohort has other clients.

    Two cohorts of one of 512 clients are the same with a chance of 1/512; two draws are never the same.
    """
    row, watched = TABLE[name], Watched()
    rows = population(CLIENTS if row.method.asks.cohorts else 1)
    with jax.disable_jit():
        one_round(row.method, watched.outer, watched.inner, rows, cohort=1, key=5, engine=fb.Reference())
    jax.effects_barrier()
    outer, inner = watched.seen["outer"], watched.seen["inner"]
    found = {"outer": len(outer), "inner": len(inner), "both": len(outer & inner)}
    assert found == {"outer": row.outer, "inner": row.inner, "both": row.both}
    assert len({draw[0] for draw in outer | inner}) == row.cohorts


@pytest.mark.filterwarnings("ignore::fedbilevel.errors.InfluenceWarning")
@pytest.mark.parametrize(
    "name", [name for name, row in TABLE.items() if row.method.asks.cohorts and name not in {*OTHERS, *NORMALISED}]
)
def test_a_cohort_counts_by_its_weight(name):
    """Steps of a cohort are in proportion to the weight M p_i of its client, here 1.5 or 0.5 for weights of ¾ and ¼.

    The two clients are alike, f does not depend on y, and g does not depend on x. The steps are compared to those with
    weights of ½: one step on x, and one on y in each exchange of a round.
    """
    row = TABLE[name]
    outer, inner = (lambda x, y, b: x @ x / 2 + b["a"][0] * 0), (lambda x, y, b: (y + 1) @ (y + 1) / 2 + b["a"][0] * 0)
    rows, method = {"a": np.zeros((2, 4))}, replace(row.method, batch_size=None)
    like, unlike = (
        one_round(method, outer, inner, rows, weights, cohort=1, engine=fb.Reference())
        for weights in (None, (0.75, 0.25))
    )

    def step(end: Any, exchanges: int) -> float:
        """Return the share of the remaining distance to −1 that one of `exchanges` equal exchanges covers.

        The variable starts at 1.
        """
        return 1 - ((float(end[0]) + 1) / 2) ** (1 / exchanges)

    assert step(like.x, 1) > 0
    scales = [step(unlike.x, 1) / step(like.x, 1)]
    if like.y is not None and step(like.y, 1) > 0:
        scales.append(step(unlike.y, row.exchanges) / step(like.y, row.exchanges))
    assert all(min(abs(scale - 1.5), abs(scale - 0.5)) < 1e-9 for scale in scales)

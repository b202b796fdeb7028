"""A federation over Flower's messages has the state, the ledger and the history of a run on one machine."""

import json
from dataclasses import replace

import federations
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from agreement import MINIMAX, SINGLE_LEVEL
from two_phase import TwoPhase

import fedbilevel as fb
from fedbilevel.core.tree import split
from fedbilevel.flower.launch.in_process import InProcess
from fedbilevel.flower.server.engine import Flower
from fedbilevel.flower.wire import RequestMessage, decode
from fedbilevel.tasks.quadratic import quadratic
from fixed_steps import fixed
from refusals import refuses
from representatives import slow_but

ROUNDS, COHORT = 3, 3
SIZES = {"equal": (6, 6), "ragged": (3, 4)}  # at most two sizes, so that few programs are compiled
CASES = {
    "FedNest, steps that adapt": (fb.FedNest(batch_size=4, inner=fb.parts.SVRG(rounds=2)), "equal", None, None),
    "ShroFBO, ragged full batches, random work, a schedule": (
        fixed(fb.ShroFBO(batch_size=None, server_lr=optax.exponential_decay(0.02, 2, 0.5))), "ragged", (1, 4), None
    ),
    "SimFBO, numbers of each client": (
        fixed(fb.SimFBO(batch_size=4, local_optimizer=fb.parts.Mixed())),
        "equal",
        {
            "client_lr.x": [0.01, 0.02, 0.03, 0.04, 0.05],
            "local_optimizer.decay": (0.0, 0.5),
            "local_steps": lambda round, client, key: 1 + (round + client) % 3,
        },
        None,
    ),
    "AFBO, steps by inner round": (
        fixed(fb.AFBO(batch_size=4, inner=fb.parts.MeanGradient(rounds=2, lr=(0.5, 0.2)))),
        "equal",
        {"local_steps": np.arange(30).reshape(3, 2, 5) % 4 + 1},
        None,
    ),
    "FedMBO, fresh cohorts": (
        fixed(fb.FedMBO(
            inner=fb.parts.LocalSGD(rounds=2),
            hypergradient=fb.parts.Implicit(solver=fb.parts.Neumann(terms=2, sampling="random_per_client")),
            batch_size=4,
        )), "equal", None, None
    ),
    "two phases, a loop, client state": (TwoPhase(), "equal", None, None),
    "SimFBO, top-k": (fb.layered(fixed(fb.SimFBO(batch_size=4)), fb.parts.TopK(share=0.3)), "equal", None, None),
    "SimFBO, steps that adapt, trimmed mean": (
        fb.layered(fb.SimFBO(batch_size=4), fb.parts.TrimmedMean()), "equal", None, None
    ),
    "FedAvg, single level": (fb.FedAvg(batch_size=4), "equal", None, SINGLE_LEVEL),
    "FedAvg, local epochs, ragged": (fb.FedAvg(batch_size=2, local_epochs=2), "ragged", None, SINGLE_LEVEL),
    "FedNest-SGD, local epochs, ragged": (
        fixed(fb.FedNestSGD(
            inner=fb.parts.LocalSGD(local_epochs=1),
            hypergradient=fb.parts.Implicit(solver=fb.parts.Neumann(terms=2)),
            batch_size=2,
        )), "ragged", None, None
    ),
    "FedAvg-S, minimax, ragged, work of each": (fb.FedAvgS(batch_size=None), "ragged", [1, 2, 3, 1, 2], MINIMAX),
}  # fmt: skip
QUICK = (
    "SimFBO, numbers of each client",
    "two phases, a loop, client state",
    "FedAvg, local epochs, ragged",
)
"""These cases have every kind of exchange, of own numbers and of samples; the others are more methods and problems."""


def both(case, log):
    """Return the results of a case on this machine and over Flower."""
    algorithm, sizes, work, problem = CASES[case]
    own = work if isinstance(work, dict) else {} if work is None else {"local_steps": work}
    task = quadratic(clients=5, dim_x=2, dim_y=3, samples=SIZES[sizes])
    problem = problem or task.problem
    y0 = None if isinstance(problem, fb.SingleLevel) else task.y0
    one = problem is MINIMAX
    inner = None if one else task.clients.inner
    clients = fb.Clients(task.clients.outer, inner, weights=task.clients.weights, own=own)
    second = lambda client, message: float(bool(decode(RequestMessage, message).phase))  # noqa: E731  as in Local's clock
    grid = InProcess(federations.app(algorithm, task, problem), len(task.clients), delay=second)
    same = {"rounds": ROUNDS, "cohort": COHORT, "key": 1, "eval_every": 2, "metrics": {"norm": lambda x, y: x @ x}}
    engine = Flower(grid=grid, log=log)
    here = fb.solve(algorithm, problem, clients, task.x0, y0, **same)
    there = fb.solve(algorithm, problem, fb.RemoteClients.of(clients), task.x0, y0, **same, engine=engine)
    moved = jnp.linalg.norm(here.x - task.x0) + (0 if y0 is None else jnp.linalg.norm(here.y - y0))
    assert float(moved) > 1e-3  # agreement on a state that stood still would prove nothing
    return here, there


@pytest.mark.filterwarnings("ignore::fedbilevel.core.errors.NumericalWarning")
@pytest.mark.parametrize("case", slow_but(*QUICK, of=CASES))
def test_agrees_with_local(case, tmp_path):
    """A run over Flower has the state, history and ledger of `Local`, and its log of exchanges adds up to the ledger.

    The tolerance of 1e-12 in float64 is derived in tests/engines/test_agreement.py.
    """
    here, there = both(case, tmp_path / "exchanges.jsonl")
    federations.same(here, there)
    assert here.ledger == there.ledger  # including its time
    lines = [json.loads(line) for line in (tmp_path / "exchanges.jsonl").read_text().splitlines()]
    assert sum(line["bytes_down"] for line in lines) == there.ledger.bytes_down
    assert sum(line["bytes_up"] for line in lines) == there.ledger.bytes_up
    assert sum(len(line["answered"]) for line in lines) == there.ledger.replies
    by_phase = {phase: sum(line["phase"] == phase for line in lines) for phase in there.ledger.exchanges_by_phase}
    assert by_phase == there.ledger.exchanges_by_phase
    assert all(line["seconds"] >= 0 and line["asked"] == COHORT for line in lines)


@pytest.mark.slow
def test_two_calls_of_solve_agree():
    """A second run on the same clients, which keep their runtimes, does not use the states of the first run."""
    algorithm, task = TwoPhase(), federations.TASK
    grid = InProcess(federations.app(algorithm), 6)
    known, start = fb.RemoteClients.of(task.clients), (task.x0, task.y0)
    results = [fb.solve(algorithm, task.problem, known, *start, rounds=2, engine=Flower(grid=grid)) for _ in range(2)]
    federations.same(*results, tolerance=0)
    federations.same(results[0], fb.solve(algorithm, task.problem, task.clients, *start, rounds=2))
    with refuses("clients", "Clients", "RemoteClients"):
        fb.solve(algorithm, task.problem, task.clients, *start, rounds=2, engine=Flower(grid=grid))


def test_replies_of_fresh_cohorts_do_not_count_for_what_clients_keep():
    """Each request names its client's last reply that counted, among those that were not for a fresh cohort."""
    series = fb.parts.Implicit(solver=fb.parts.Neumann(terms=1))
    method = fixed(fb.FedMBO(inner=fb.parts.LocalSGD(local_steps=1), hypergradient=series, batch_size=None))
    own, said = {}, []

    def note(client, message):
        request = decode(RequestMessage, message)
        if request.phase:
            said.append((request.counted_round, request.counted_exchange) == own.get(client, (-1, -1)))
            if not request.fresh:
                own[client] = request.round, request.exchange
        return 0.0

    federations.solve(method, InProcess(federations.app(method), 6, delay=note), rounds=2, cohort=None)
    assert len(said) > len(own) * 2
    assert all(said)


@pytest.mark.slow
def test_models_with_fixed_leaves():
    """Models with leaves that are not arrays, here modules of Equinox, get the same numbers as from the engine `Local`.

    Such leaves stay on each side, and the structure of the tree is never sent.
    """
    eqx = pytest.importorskip("equinox")
    x0 = eqx.nn.MLP(3, 2, 3, 1, activation=jnp.tanh, key=jax.random.key(0), dtype=float)
    y0 = eqx.nn.Linear(2, 1, use_bias=False, key=jax.random.key(1), dtype=float)

    def loss(x, y, batch):
        gap = jax.vmap(lambda u: y(x(u)))(batch["u"])[:, 0] - batch["t"]
        return jnp.mean(gap**2) + 0.1 * jnp.sum(y.weight**2)

    rng = np.random.default_rng(0)
    samples = [{"u": rng.normal(size=(4, 3)), "t": rng.normal(size=4)} for _ in range(2)]
    clients = fb.Clients(samples, samples, weights=[1.0, 2.0])
    task = replace(federations.TASK, problem=fb.Bilevel(loss, loss), clients=clients, x0=x0, y0=y0)
    algorithm = fixed(fb.SimFBO(local_steps=1, batch_size=None, client_lr=0.05, server_lr=0.1))
    here = fb.solve(algorithm, task.problem, task.clients, x0, y0, rounds=2)
    engine = Flower(grid=InProcess(federations.app(algorithm, task), 2))
    there = fb.solve(algorithm, task.problem, fb.RemoteClients.of(task.clients), x0, y0, rounds=2, engine=engine)
    assert there.x.activation is jnp.tanh
    federations.same(*(replace(end, state=split((end.x, end.y))[0]) for end in (here, there)))

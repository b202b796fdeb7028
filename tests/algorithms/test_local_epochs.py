"""Are local epochs batches without replacement? NumPy repeats them with the same keys, for unequal clients."""

from dataclasses import replace

import agreement
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alone import client_alone
from compiled_losses import with_compiled_losses

import fedbilevel as fb
from fedbilevel.core.client import Samples
from fedbilevel.engines.engine import round_keys
from fedbilevel.experiments import configure, resolve
from fedbilevel.parts import SVRG, Implicit, LocalImplicit, LocalSGD, MeanGradient, Neumann
from fedbilevel.tasks.quadratic import quadratic
from fixed_steps import fixed
from refusals import refuses
from representatives import slow_but

SIZES, BATCH, DIM, SEED = (7, 2, 6, 4, 3), 3, 3, 5
"""SIZES are numbers of samples: with a rest, fewer than a batch, without a rest, with a rest, and exactly one batch."""
WEIGHTS = np.array([1.0, 2.0, 0.5, 1.5, 1.0])
# batches in an epoch, with the short last batch and without it
SHORT, DROPPED = np.array([3, 1, 2, 2, 1]), np.array([2, 1, 2, 1, 1])
SINGLE_LEVEL = fb.SingleLevel(lambda x, batch: 0.5 * jnp.mean((batch["a"] @ x - batch["b"]) ** 2))
BILEVEL = fb.Bilevel(
    lambda x, y, batch: 0.5 * jnp.mean((batch["a"] @ y - batch["b"]) ** 2) + 0.05 * jnp.vdot(x, x),
    lambda x, y, batch: 0.5 * jnp.mean((batch["a"] @ y - batch["b"]) ** 2) + 0.5 * jnp.vdot(y - x, y - x),
)
MINIMAX = fb.Minimax(
    lambda x, y, batch: jnp.mean((batch["a"] @ x - batch["b"]) * (batch["a"] @ y)) - jnp.vdot(y, y) + jnp.vdot(x, x)
)
MARKS = fb.SingleLevel(lambda x, batch: jnp.mean(x[batch["number"]]))
"""A loss whose gradient is 1 at the numbers of a batch's samples, divided by the number of samples in the batch."""
SERIES = Neumann(terms=2)
METHODS = {
    "FedAvg": (fb.FedAvg(lr=0.2), SINGLE_LEVEL),
    "FedLin": (fb.FedLin(outer_lr=0.2), SINGLE_LEVEL),
    "FedAvgS": (fb.FedAvgS(), MINIMAX),
    "FedNestSGD": (fixed(fb.FedNestSGD(inner=LocalSGD(rounds=2), hypergradient=Implicit(solver=SERIES))), BILEVEL),
    "FedNest": (fixed(fb.FedNest(inner=SVRG(), hypergradient=Implicit(solver=SERIES))), BILEVEL),
    "FedNestSGD, steps that adapt": (fb.FedNestSGD(hypergradient=Implicit(solver=SERIES)), BILEVEL),
    "LFedNest, joint": (fixed(fb.LFedNest(joint=True, hypergradient=LocalImplicit(solver=SERIES))), BILEVEL),
    "AFBO": (fixed(fb.AFBO(hypergradient=LocalImplicit(solver=SERIES))), BILEVEL),
    "AggITD": (fixed(fb.AggITD(inner=LocalSGD(rounds=2, lr=0.1))), BILEVEL),
}


def with_epochs(method, epochs, drop_last=False, batch_size=BATCH):
    """Return the method with local epochs."""
    said = {"local_epochs": epochs, "drop_last": drop_last}
    if hasattr(method, "inner"):
        return replace(method, batch_size=batch_size, inner=replace(method.inner, **said))
    return replace(method, batch_size=batch_size, **said)


def rows():
    rng = np.random.default_rng(0)
    return [{"a": rng.normal(size=(n, DIM)) * (1 + n / 5), "b": rng.normal(size=n)} for n in SIZES]


def solved(method, problem, engine=None, rounds=2, **options):
    clients = fb.Clients(rows(), None if isinstance(problem, fb.Minimax) else rows(), weights=WEIGHTS)
    y0 = None if isinstance(problem, fb.SingleLevel) else np.full(DIM, 0.5)
    engine = engine or fb.Local()
    return fb.solve(method, problem, clients, np.ones(DIM), y0, rounds=rounds, key=SEED, engine=engine, **options)


def batches(key, size, epochs, drop_last):
    """Return the places of the samples of each step, by plain loops."""
    found = []
    for epoch in range(epochs):
        drawn = jax.random.bits(jax.random.fold_in(key, epoch), (size,), jnp.uint32)
        order = np.argsort(np.asarray(drawn), kind="stable")
        cut = [order[at : at + BATCH] for at in range(0, size, BATCH)]
        if drop_last and len(cut) > 1 and len(cut[-1]) < BATCH:
            cut.pop()
        found += cut
    return found


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("epochs", slow_but(1, of=[1, 2]))
def test_fedavg_in_plain_loops(epochs, drop_last):
    method = with_epochs(fb.FedAvg(lr=0.1), epochs, drop_last)
    x, p = np.ones(DIM), WEIGHTS / WEIGHTS.sum()
    for round in range(3):
        key, ends = round_keys(jax.random.key(SEED), round).algorithm, []
        for i, data in enumerate(rows()):
            z = x
            for chosen in batches(jax.random.fold_in(key, i), SIZES[i], epochs, drop_last):
                a, b = data["a"][chosen], data["b"][chosen]
                z = z - 0.1 * a.T @ (a @ z - b) / len(chosen)
            ends.append(z)
        x = p @ np.array(ends)
    result = solved(method, SINGLE_LEVEL, rounds=3)
    np.testing.assert_allclose(result.x, x, rtol=1e-12, atol=1e-12)
    assert result.ledger.gradients == 3 * epochs * (DROPPED if drop_last else SHORT).sum()


@pytest.mark.parametrize(("drop_last", "tau"), [(False, 6), (True, 4)])
def test_steps_are_as_many_as_is_said_before_they_are_drawn(drop_last, tau):
    """The number of steps that is known before any draw is the number of batches that are drawn.

    Two epochs of 7 samples in batches of 3 have 6 batches, or 4 without the short ones.
    """
    rows, part = {"a": np.ones((7, 2))}, LocalSGD(local_epochs=2, drop_last=drop_last)
    client = client_alone(BILEVEL, rows, rows, batch_size=3)
    assert int(part.tau(client)) == int(part.steps(client, jax.random.key(0)).tau) == tau


@pytest.mark.parametrize("drop_last", slow_but(False, of=[False, True]))
def test_fedlin_in_plain_loops(drop_last):
    """FedLin with local epochs equals plain loops, with the steps α/τ_i by the client's own τ_i.

    q is on a batch with replacement, which makes no difference here, since a client's samples are copies of one sample.
    """
    data = [{name: np.repeat(values[:1], len(values), 0) for name, values in one.items()} for one in rows()]
    for one in data[:1]:
        one["b"] = rows()[0]["b"]  # only client 0 has different samples
    data[0]["a"] = np.zeros_like(data[0]["a"])  # client 0's gradient is 0, whatever is drawn
    alpha, p, x = 0.3, WEIGHTS / WEIGHTS.sum(), np.ones(DIM)
    gradient = lambda one, z: one["a"].T @ (one["a"] @ z - one["b"]) / len(one["b"])  # noqa: E731
    q = sum(w * gradient(one, x) for w, one in zip(p, data, strict=True))
    ends = []
    for one, tau in zip(data, 2 * (DROPPED if drop_last else SHORT), strict=True):
        z = x
        for _ in range(tau):
            z = z - alpha / tau * (gradient(one, z) - gradient(one, x) + q)
        ends.append(z)
    clients, method = fb.Clients(data, weights=WEIGHTS), with_epochs(fb.FedLin(outer_lr=alpha), 2, drop_last)
    result = fb.solve(method, SINGLE_LEVEL, clients, x, rounds=1, key=SEED)
    np.testing.assert_allclose(result.x, p @ np.array(ends), rtol=1e-12, atol=1e-12)
    assert result.ledger.gradients == sum(2 * tau - 1 for tau in 2 * (DROPPED if drop_last else SHORT))


def marks(epochs, drop_last, engine):
    """Return, for two rounds and each client, Σ 1/(batch size) over the steps in which each sample was taken."""
    first = np.cumsum(SIZES) - SIZES
    samples = [{"number": start + np.arange(n)} for start, n in zip(first, SIZES, strict=True)]
    method, clients = with_epochs(fb.FedAvg(lr=1.0), epochs, drop_last), fb.Clients(samples, weights=WEIGHTS)
    start = np.zeros(sum(SIZES))
    ends = [fb.solve(method, MARKS, clients, start, rounds=n, key=SEED, engine=engine).x for n in (1, 2)]
    p = np.repeat(WEIGHTS / WEIGHTS.sum(), SIZES)
    return [np.split((before - after) / p, first[1:]) for before, after in zip([start, *ends], ends, strict=False)]


@pytest.mark.parametrize(
    "engine",
    [fb.Local(), pytest.param(fb.Local(chunk=1), marks=pytest.mark.slow)],
    ids=["together", "one by one"],
)
def test_every_sample_is_seen_once_in_an_epoch(engine):
    rounds = marks(1, False, engine)
    for found in rounds:
        for n, seen in zip(SIZES, found, strict=True):
            rest = n % BATCH
            expected = sorted([1 / BATCH] * (n - rest) + [1 / max(rest, 1)] * rest)
            np.testing.assert_allclose(sorted(seen), expected, rtol=1e-12)
    assert not np.allclose(*map(np.concatenate, rounds))  # the order differs between rounds
    for n, seen in zip(SIZES, marks(3, False, engine)[0], strict=True):
        assert seen.sum() == pytest.approx(3 * -(-n // BATCH))
        if n % BATCH == 0:
            np.testing.assert_allclose(seen, 3 / BATCH, rtol=1e-12)


@pytest.mark.slow
def test_what_is_dropped_changes_from_epoch_to_epoch():
    once, often = (marks(epochs, True, fb.Local())[0] for epochs in (1, 12))
    for n, seen, more in zip(SIZES, once, often, strict=True):
        full, width = max(1, n // BATCH), min(n, BATCH)
        np.testing.assert_allclose(sorted(seen), sorted([0.0] * (n - full * width) + [1 / width] * full * width))
        assert more.sum() == pytest.approx(12 * full)
        assert np.all(more > 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_engines_agree(name):
    """Engines agree on each method with local epochs, with two devices and chunks that divide neither.

    FedAvg is also streamed.
    """
    method, problem = METHODS[name]
    method = with_epochs(method, 2, drop_last=name in ("FedLin", "FedNest"))
    here = solved(method, with_compiled_losses(problem), fb.Reference())
    there = solved(method, problem, fb.Local(chunk=2, devices=2, stream=name == "FedAvg"))
    np.testing.assert_allclose(there.x, here.x, rtol=1e-12, atol=1e-12)
    if here.y is not None:
        np.testing.assert_allclose(there.y, here.y, rtol=1e-12, atol=1e-12)
    assert there.ledger == here.ledger


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FedNestSGD", "FedNest", "AFBO"])
def test_inner_rounds_count_their_gradients(name):
    """In each inner round, local epochs cost one more gradient for each step beyond the first (FedNest two).

    The tests of these methods check the costs with τ = 1.
    """
    method, problem = METHODS[name]
    rounds = method.inner.rounds
    one = replace(method, batch_size=BATCH, inner=replace(method.inner, local_steps=1))
    before, after = (solved(m, problem, rounds=1).ledger.gradients for m in (one, with_epochs(method, 2)))
    more = (2 * SHORT - 1).sum() * rounds
    assert after - before == (2 * more if name == "FedNest" else more)


def test_steps_are_those_of_the_samples_as_they_are_drawn_in_features():
    """With two epochs, the steps are those of the drawn samples, in each of two inner rounds.

    With E ≥ 2 epochs, numbers that do not depend on y are computed once for each sample; with E = 1 they are not. The
    steps must not depend on this.
    """
    x, y = np.ones(DIM), np.full(DIM, 0.5)
    method = with_epochs(METHODS["FedNestSGD"][0], 2)
    result = solved(method, BILEVEL, rounds=1)
    key = jax.random.split(round_keys(jax.random.key(SEED), 0).algorithm)[0]
    for inner_round in range(method.inner.rounds):
        ends = []
        for i, one in enumerate(rows()):
            own = jax.random.fold_in(jax.random.fold_in(key, inner_round), i)
            z, drawn = y, batches(own, SIZES[i], 2, False)
            for chosen in drawn:
                a, b = one["a"][chosen], one["b"][chosen]
                z = z - method.inner.lr / len(drawn) * (a.T @ (a @ z - b) / len(chosen) + z - x)
            ends.append(z)
        y = WEIGHTS / WEIGHTS.sum() @ np.array(ends)
    np.testing.assert_allclose(result.y, y, rtol=1e-12)


@pytest.mark.parametrize(("sizes", "epochs"), slow_but(((6, 6), 3), of=[((6, 6), 1), ((6, 6), 3), ((6, 7), 1)]))
def test_floating_point_operations(sizes, epochs):
    """An epoch takes as many floating-point operations as the same number of steps with replacement.

    The draw of the order of samples uses only integers, which do not count. If clients have unequal numbers of samples,
    the number of operations is not known.
    """
    rng = np.random.default_rng(0)
    clients = fb.Clients([{"a": rng.normal(size=(n, DIM)), "b": rng.normal(size=n)} for n in sizes])
    methods = fb.FedAvg(batch_size=BATCH, local_epochs=epochs), fb.FedAvg(batch_size=BATCH, local_steps=2 * epochs)
    flops = [
        fb.solve(method, SINGLE_LEVEL, clients, np.ones(DIM), rounds=1, count_flops=True).ledger.flops
        for method in methods
    ]
    assert flops[0] == (flops[1] if sizes == (6, 6) else None)


def test_padding_has_no_part_in_a_short_batch():
    """A short batch contains no padding: neither other clients' samples nor the NaN beyond a client's window."""
    values = {"a": jnp.array([np.nan, 1.0, 2.0, 3.0, 4.0, np.nan, np.nan])}
    window = Samples(values, jnp.asarray(1), jnp.asarray(4), longest=6, equal=False)
    alone = Samples({"a": values["a"][1:5]}, jnp.asarray(0), jnp.asarray(4), longest=4, equal=True)
    seen = []
    for samples in (window, alone):
        tau, draw = samples.in_epochs(jax.random.key(3), 2, 3, False)
        assert int(tau) == 4
        steps = [samples.batch(draw(k), 3) for k in range(4)]
        seen.append([np.asarray(step.samples["a"])[np.asarray(step.mask)] for step in steps])
        assert [len(each) for each in seen[-1]] == [3, 1, 3, 1]
        assert sorted(np.concatenate(seen[-1][:2])) == sorted(np.concatenate(seen[-1][2:])) == [1, 2, 3, 4]
    for one, other in zip(*seen, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("epochs", [0, -1, 1.5, True, "1"])
@pytest.mark.parametrize("of", [fb.FedAvg, fb.FedLin, fb.FedAvgS, LocalSGD, SVRG, MeanGradient])
def test_epochs_are_positive_whole_numbers(of, epochs):
    with refuses(f"{of.__name__}.local_epochs", epochs):
        of(local_epochs=epochs)


@pytest.mark.parametrize(
    ("make", "refusal"),
    [
        (
            lambda: fb.FedAvg(local_epochs=1, batch_size=None),
            ("FedAvg.batch_size", None, "local_epochs"),
        ),
        (
            lambda: fb.FedNest(inner=SVRG(local_epochs=1), batch_size=None),
            ("FedNest.batch_size", None, "inner.local_epochs"),
        ),
        (lambda: fb.FedAvg(drop_last=True), ("FedAvg.drop_last", True, "local_epochs")),
        (lambda: fb.SimFBO(local_epochs=1), ("field of SimFBO", "local_epochs", "", "local_steps")),
    ],
)
def test_what_does_not_go_together_is_refused_when_it_is_made(make, refusal):
    with refuses(*refusal):
        make()


@pytest.mark.parametrize(
    ("method", "path"),
    [(fb.FedAvg(local_epochs=2), "local_epochs"), (fb.FedNest(inner=SVRG(local_epochs=2)), "inner.local_epochs")],
    ids=["FedAvg", "FedNest"],
)
def test_clients_with_steps_of_their_own_are_refused(method, path):
    task = quadratic(clients=3)
    problem, y0 = (agreement.SINGLE_LEVEL, None) if isinstance(method, fb.FedAvg) else (task.problem, task.y0)
    clients = task.with_own(local_steps=[1, 2, 3]).clients
    with refuses("Clients.own['local_steps']", "1 to 3, one for each client", f"{method.label}.{path} = 2"):
        fb.solve(method, problem, clients, task.x0, y0, rounds=1)


def test_a_loss_that_takes_all_samples_has_no_epochs():
    whole = fb.WholeLoss(lambda x, y, samples, valid: jnp.vdot(x - y, x - y))
    problem = fb.Bilevel(lambda x, y, batch: jnp.vdot(y, y), whole)
    clients = fb.Clients(rows(), rows())
    with refuses("FedNest.inner.local_epochs", 1, "WholeLoss"):
        fb.solve(fb.FedNest(inner=SVRG(local_epochs=1)), problem, clients, np.ones(2), np.ones(2), rounds=1)


def test_in_specs():
    spec = configure(task="classification", algorithm="fedavg", settings=["local_epochs=2", "drop_last=true"])
    assert (spec.algorithm.fields["local_epochs"], spec.algorithm.fields["drop_last"]) == (2, True)
    assert resolve(spec.tables()) == spec
    nested = configure(task="quadratic", algorithm="fednest", settings=["inner.local_epochs=1", "batch_size=8"])
    assert nested.algorithm.fields["inner"]["local_epochs"] == 1
    for wrong, refusal in (
        (["local_epochs=0"], ("algorithm.local_epochs", 0)),
        (["local_epochs=1", "batch_size=None"], ("FedAvg.batch_size", None, "local_epochs")),
        (["local_epochs=1", "clients.local_steps=3"], ("clients.local_steps", "3", "local_epochs = 1")),
    ):
        with refuses(*refusal):
            configure(task="classification", algorithm="fedavg", settings=wrong)

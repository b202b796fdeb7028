"""A run that ended worse than it began says so, also if its rows, of few clients and samples, cannot show it."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.core.problem import Padded
from fedbilevel.engines import ends
from fedbilevel.engines.ends import BLOCK, blocks, descent, losses_at, reread
from fedbilevel.errors import NumericalWarning
from fedbilevel.tasks import quadratic
from refusals import warns_with

pytestmark = pytest.mark.checked  # the tests are about the checks after a run

TARGETS = np.random.default_rng(0).normal(scale=5, size=(20, 3))
TARGETS -= TARGETS.mean()
START, END = np.mean(TARGETS**2) / 2, np.mean((TARGETS - 1) ** 2) / 2
STEP = 1e-9  # the step on x


def squares(x, y, batch):
    return jnp.mean((y - batch) ** 2) / 2


def wrong(x, y, batch):
    """Compute `squares` with a wrong derivative in x, which moves x to 1, by a third of the way in each step."""
    still = jax.lax.stop_gradient(x)
    return squares(x, y, batch) + (still - 1) / (3 * STEP) * (x - still)


PROBLEM = fb.Bilevel(wrong, lambda x, y, batch: jnp.mean((y - x) ** 2 + 0 * batch) / 2)
"""x goes from 0 to 1, and y follows it, so that the outer loss of all clients rises from START to END."""
TRAINED = fb.Bilevel(squares, lambda x, y, batch: jnp.mean((y - 1 - x) ** 2 + 0 * batch) / 2)
"""y goes from 0 to 1 while x stays at 0. The outer loss rises as much, but with y trained it is END at the start."""


def solve(target=1.0, clients=None, problem=PROBLEM, **options):
    """Run SimFBO from x = y = 0 with cohorts of two of 20 different clients; `target` multiplies their targets."""
    method = fb.SimFBO(local_steps=1, batch_size=2, server_lr=fb.XYV(x=STEP, y=0.5, v=0.5))
    clients = clients or fb.Clients(target * TARGETS)
    given = {"rounds": 60, "cohort": 2, "progress": False} | options
    return fb.solve(method, problem, clients, jnp.zeros(()), jnp.zeros(()), **given)


@pytest.mark.parametrize("rounds", [60, 120])
def test_a_y_that_was_not_trained_is_no_better_start(rounds):
    """A start at which y was not trained does not count as better: there is a remark, but no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        said = [solve(problem=TRAINED, key=key, rounds=rounds).remarks for key in range(4)]
    words = (
        f"outer_loss of all clients on all their samples ended at {END:.4g}, above {START:.4g} at the start, where y "
        f"was not trained: with y trained there it is {END:.4g}"
    )
    assert said == [(words,)] * 4


def converged(samples, rounds):
    """Return the quadratic task and the result of a run on it, in which a warning is an error."""
    task = quadratic(clients=3, condition=2, samples=samples)
    method = fb.SimFBO(local_steps=1, batch_size=None, server_lr=fb.XYV(x=0.2, y=0.5, v=0.5), client_lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return task, fb.solve(method, task.problem, task.clients, task.x0, task.y0, rounds=rounds, progress=False)


@pytest.mark.slow
def test_a_converged_run_is_not_worse_than_its_start():
    """A converged run does not count as worse than its start, where y was not trained.

    The outer loss of the quadratic task is lower there than at the solution.
    """
    task, result = converged(samples=(2, 2), rounds=60)
    assert float(task.metrics["relative_error"](result.x, result.y)) < 1e-2
    assert "where y was not trained: with y trained there it is" in result.remarks[0]


@pytest.mark.slow
def test_a_row_of_rounds_in_which_y_was_not_trained_is_no_better_than_the_end():
    """A row of rounds in which y was not trained does not count as better than the end.

    The best row, of round 10, has an outer loss of 15.1. This is the mean over ten rounds, and the loss of the last of
    them is 16.9. The run ends at 16.6.
    """
    task, result = converged(samples=(2, 3), rounds=200)
    assert float(task.metrics["relative_error"](result.x, result.y)) < 1e-6
    assert result.best.round == 10
    assert result.best.value < 15.2 < 16.5 < result.history["outer_loss"][-1]


@pytest.mark.parametrize("held", [0, 2**24])
def test_y_is_trained_on_all_samples(monkeypatch, held):
    """y is trained on all samples of clients with unequal sizes and weights: y*(x) = Σ p_i mean_i + x.

    Whether the samples stay on the device between two gradients makes no difference.
    """
    monkeypatch.setattr(ends, "HELD", held)
    rng = np.random.default_rng(4)
    samples = [rng.normal(size=(size, 2)) for size in (3, 2 * BLOCK + 1, 40)]
    clients = fb.Clients(samples, weights=[1, 2, 3])
    problem = fb.Bilevel(
        squares, lambda x, y, batch: jnp.sum((y["a"] - x - batch) ** 2 * jnp.array([1, 30])) / len(batch)
    )
    found = descent(problem.prepared(), clients, np.array(2.0), {"a": np.zeros(2)}, evaluations=100)
    expected = clients.weights @ [own.mean(0) for own in samples] + 2
    np.testing.assert_allclose(found.y["a"], expected, rtol=1e-4)


def test_stacks_are_held_up_to_their_size_with_padding(monkeypatch):
    """The samples of clients stay on the device only if their stacks, with padding, have at most HELD bytes.

    99 clients with one sample and a client with 200 samples have 299 numbers of 4 bytes. Each of the 99 is padded to
    200 numbers, so that its stack takes at least 800 bytes, and all stacks take at least 80,000 bytes.
    """
    clients = fb.Clients([np.zeros(size, np.float32) for size in [*[1] * 99, 200]])
    read = []
    monkeypatch.setattr(ends, "blocks", lambda *given: (read.append(1) or one for one in blocks(*given)))
    for held, again in ((2000, True), (10**6, False)):
        monkeypatch.setattr(ends, "HELD", held)
        stacks = reread(clients, "inner", whole=False, variables=8)
        read.clear()
        assert sum(float(jnp.sum(weights)) for _, weights in stacks()) == pytest.approx(1, rel=1e-5)
        assert bool(read) == again


def test_training_stops_at_its_limit():
    """Training stops after the step in which it reaches its limit of gradients, and y that is not trained is left.

    With ten different curvatures, conjugate gradients need about ten steps of two gradients. After two gradients the
    norm of the gradient is still above a tenth of the norm at first.
    """
    calls = []

    def counted(x, y, batch):
        jax.debug.callback(lambda: calls.append(1))
        return jnp.sum(jnp.geomspace(1, 1e3, 10) * (y - 1) ** 2) + x + 0 * jnp.sum(batch)

    problem = fb.Bilevel(squares, counted).prepared()
    clients, x, y = fb.Clients(np.zeros((1, 1, 1))), jnp.zeros(()), jnp.zeros(10)
    assert not descent(problem, clients, x, y, evaluations=2).settled
    jax.effects_barrier()
    assert 2 <= len(calls) <= 10
    np.testing.assert_allclose(descent(problem, clients, x, y, evaluations=500).y, 1, rtol=1e-3)


@pytest.mark.filterwarnings("ignore::fedbilevel.core.errors.NumericalWarning")
def test_rows_that_cannot_tell():
    """The end is compared on all clients, since rows cannot show a small rise.

    The losses of cohorts differ by more than the loss of all clients rises, which is 4 %. All runs report the same
    numbers.
    """
    said = [solve(key=key, rounds=120).remarks for key in range(4)]
    assert 1.02 * START < END < 1.1 * START
    words = f"outer_loss of all clients on all their samples ended at {END:.4g}, worse than {START:.4g} at the start"
    assert all(words in " ".join(remarks) for remarks in said)


def test_the_warning_names_the_best_row():
    with warns_with(NumericalWarning, "of all clients on all their samples ended at"):
        result = solve(key=1, rounds=120)
    assert result.best.round < 120


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::fedbilevel.core.errors.NumericalWarning")
def test_every_engine_says_the_same(tmp_path):
    """Every engine gives the same remark, and so does a resumed run.

    A run that was continued by force with another start has no such remark.
    """
    local = solve(key=1)
    assert "of all clients" in local.remarks[0]
    assert solve(key=1, engine=fb.Reference()).remarks == local.remarks
    given = {"key": 1, "checkpoint": tmp_path / "run.npz", "checkpoint_every": 30}
    with pytest.raises(RuntimeError):
        solve(**given, callbacks=[raise_at_30])
    assert solve(**given, resume=True).remarks == local.remarks
    assert solve(**given, resume=True).remarks == local.remarks
    with pytest.warns(UserWarning, match="with other arguments"):
        forced = solve(**given | {"key": 2, "rounds": 61}, resume="force")
    assert "of all clients" not in str(forced.remarks)
    again = solve(**given | {"key": 2, "rounds": 62}, resume=True)
    assert "of all clients" not in str(again.remarks)


def rising(x, y, batch):
    """Compute x² with a derivative of the opposite sign."""
    still = jax.lax.stop_gradient(x)
    return still**2 - 2 * still * (x - still) + jnp.mean(0 * y * batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("outer", "options"),
    [
        (wrong, {"cohort": 2}),
        (rising, {"eval_every": 2, "metrics": {"height": lambda x, y: jnp.exp(x**2)}}),
    ],
    ids=["", "after halvings"],
)
def test_a_remark_names_no_step_that_is_only_a_default(outer, options):
    """A remark does not name a step that is only a default.

    All steps of LFedNest adapt, and its factor inner.server_lr is 1 unless it is given.
    """
    problem, start = fb.Bilevel(outer, PROBLEM.inner), jnp.asarray(float(outer is rising))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        given = {"rounds": 60, "progress": False} | options
        result = fb.solve(fb.LFedNest(batch_size=2), problem, fb.Clients(TARGETS), start, start, **given)
    assert any("with step sizes half as large" in str(one.message) for one in warned) == (outer is rising)
    assert "fb.AdaptiveSteps(x_lr=0.02)" in result.remarks[0]
    assert "server_lr" not in str([one.message for one in warned])


def raise_at_30(result, row):
    if result.round >= 30:
        raise RuntimeError("a stop")


def test_what_rows_seem_to_say_is_compared_with_all_clients():
    """A run whose rows seem to get worse has no remark if the loss of all clients does not.

    The outer loss of all clients is least at y = 1. By their rows, some of these runs end worse than they began.
    """
    shifted = fb.Clients(TARGETS + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        said = [solve(key=key, clients=shifted, rounds=20).remarks for key in range(6)]
    assert said == [()] * 6


@pytest.mark.filterwarnings("ignore::fedbilevel.core.errors.NumericalWarning")
@pytest.mark.parametrize(
    "options",
    [
        {"privacy": fb.Privacy(clip=1e3, noise_multiplier=1e-9, delta=1e-5)},
        {"best_by": "x", "metrics": {"x": lambda x, y: x**2}},
        {"rounds": 4},
    ],
    ids=["private", "another column", "too few gradients"],
)
def test_where_it_is_not_computed(options, monkeypatch):
    """The comparison is left out under privacy, if `best_by` is not the outer loss, and for short runs.

    Under privacy, a client sends no loss without noise. In a short run, the two evaluations would take longer than the
    run.
    """
    monkeypatch.setattr("fedbilevel.engines.posed.losses_at", pytest.fail)
    assert "of all clients" not in str(solve(**options).remarks)


def out_of_memory(*_):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")


@pytest.mark.filterwarnings("ignore::fedbilevel.core.errors.NumericalWarning")
@pytest.mark.parametrize("losses_at", [out_of_memory, lambda *_: [np.nan, 1.0]], ids=["memory", "not finite"])
def test_a_result_is_not_lost_by_it(losses_at, monkeypatch):
    """If the comparison runs out of memory, or meets a NaN in a sample that no round has read, the result is not lost.

    There is then no remark that the run ended worse.
    """
    monkeypatch.setattr("fedbilevel.engines.posed.losses_at", losses_at)
    result = solve(key=1)
    assert result.round == 60
    assert "of all clients" not in str(result.remarks)


@pytest.mark.slow
def test_an_inner_variable_that_raises_the_loss_is_no_worse_end():
    """In a minimax problem, a loss that rises because y is trained is not reported as a worse end.

    max over y of 3y + xy − y²/2 + x²/2 is (3 + x)²/2 + x²/2 ≥ 2.25, and at y = 0 the loss is 0.
    """
    problem = fb.Minimax(lambda x, y, batch: 3 * y + x * y - y**2 / 2 + x**2 / 2 + 0 * jnp.mean(batch))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = fb.solve(fb.FedNest(), problem, fb.Clients(TARGETS), 0.0, 0.0, rounds=60, progress=False)
    np.testing.assert_allclose([result.x, result.history["outer_loss"][-1]], [-1.5, 2.25], rtol=1e-2)
    assert result.remarks == ()


def test_the_outer_losses_of_unequal_clients():
    """The outer losses of unequal clients count each sample once, in blocks of one client and at most BLOCK samples."""
    rng = np.random.default_rng(1)
    sizes = [3, 2 * BLOCK, 700, 1, BLOCK, 40]
    samples = [rng.normal(size=(size, 2)) for size in sizes]
    clients = fb.Clients(samples, weights=rng.uniform(1, 3, len(sizes)))
    problem = fb.Bilevel(lambda x, y, batch: jnp.mean((batch @ y - x) ** 2), lambda x, y, batch: jnp.sum(y**2))
    points = [(np.array(rng.normal()), rng.normal(size=2)) for _ in range(2)]
    expected = [np.dot(clients.weights, [np.mean((own @ y - x) ** 2) for own in samples]) for x, y in points]
    np.testing.assert_allclose(losses_at(problem.prepared(), clients, "outer", points), expected, rtol=1e-12)
    lengths = {
        jax.tree.leaves(stacked)[0].shape[1] for _, stacked, _ in blocks(clients, "outer", whole=False, variables=24)
    }
    assert lengths == {BLOCK}


def test_many_small_clients_need_few_stacks():
    """Small samples are evaluated together up to STACK bytes, in stacks of equal size, and large ones up to BLOCK.

    10,000 clients with 5 samples of 16 bytes have 50,000 samples. With 256 bytes of variables for each sample,
    2**22 / (16 + 256) = 15,420 samples fit into a stack, and 15,420 / 5 = 3,084 blocks. So there are 4 stacks, of 2,500
    blocks. With a megabyte of variables a stack has 256 / 5 = 51 blocks, so there are 10,000 / 51 = 197 stacks (rounded
    up).
    """
    clients = fb.Clients(np.zeros((10_000, 5, 2)))
    for variables, stacks, size in ((256, 4, 2500), (2**20, 197, 51)):
        found = list(blocks(clients, "outer", whole=False, variables=variables))
        assert (len(found), len(found[0][0])) == (stacks, size)
        assert sum(np.sum(weights) for *_, weights in found) == pytest.approx(1)


def test_few_long_clients_do_not_pad_many_short_ones():
    """If few clients have many samples, clients with few samples are padded to the next power of 4.

    3,000 clients with 3 samples are padded to 4 samples each, and 100 clients with 30 samples to 64. Padded to the
    1,000 samples of the longest client, they would be 3,100,000 samples in place of 12,000 and 6,400. The losses are
    those of the samples alone, whether a loss is a mean over samples or takes all samples of a client.
    """
    rng = np.random.default_rng(6)
    sizes = [*[3] * 3000, *[30] * 100, 1000]
    samples = [rng.normal(size=size) for size in sizes]
    clients = fb.Clients(samples, weights=rng.uniform(1, 3, len(sizes)))
    found = list(blocks(clients, "outer", whole=True, variables=8))
    assert {stacked.mask.shape[1] for _, stacked, _ in found if isinstance(stacked, Padded)} == {4, 64}
    assert sum(np.sum(weights) for *_, weights in found) == pytest.approx(1)
    expected = clients.weights @ [np.mean(own**2) for own in samples]
    whole = fb.WholeLoss(lambda x, y, batch, valid: jnp.sum(valid * (batch - y) ** 2) / jnp.sum(valid))
    for outer in (whole, lambda x, y, batch: jnp.mean((batch - y) ** 2)):
        problem = fb.Bilevel(outer, lambda x, y, batch: y**2).prepared()
        np.testing.assert_allclose(losses_at(problem, clients, "outer", [(np.zeros(()), np.zeros(()))]), [expected])


def test_the_outer_losses_of_whole_clients():
    """A WholeLoss gets all samples of a client; so does a loss that is not a mean, if clients are equal and small."""
    rng = np.random.default_rng(2)
    samples = [rng.normal(size=size) for size in (300, 5, 1)]
    whole = fb.WholeLoss(lambda x, y, batch, valid: jnp.max(jnp.where(valid, batch, -jnp.inf)) * y)
    problem = fb.Bilevel(whole, lambda x, y, batch: y**2)
    clients = fb.Clients(samples)
    expected = np.mean([own.max() for own in samples]) * 2
    points = [(np.zeros(()), np.array(2.0))]
    np.testing.assert_allclose(losses_at(problem.prepared(), clients, "outer", points), [expected])
    root = fb.Bilevel(lambda x, y, batch: y * jnp.sqrt(jnp.mean(batch**2)), lambda x, y, batch: y**2)
    equal = fb.Clients(np.stack([samples[0][:40], samples[0][40:80]]))
    expected = np.mean([np.sqrt(np.mean(samples[0][i : i + 40] ** 2)) for i in (0, 40)]) * 2
    np.testing.assert_allclose(losses_at(root.prepared(), equal, "outer", [(np.zeros(()), np.array(2.0))]), [expected])


def test_the_outer_losses_where_each_client_has_its_own_x():
    rng = np.random.default_rng(3)
    samples, x = rng.normal(size=(300, 4)), rng.normal(size=300)
    problem = fb.Bilevel(lambda x, y, batch: jnp.mean((x[0] * y - batch) ** 2), lambda x, y, batch: y**2, local="x")
    expected = np.mean((x[:, None] * 2 - samples) ** 2)
    np.testing.assert_allclose(
        losses_at(problem.prepared(), fb.Clients(samples), "outer", [(x, np.array(2.0))]), [expected]
    )


def test_padding_is_left_out():
    clients = fb.Clients([np.arange(1.0, 4), np.arange(1.0, 3)])
    for owner, stacked, weights in blocks(clients, "outer", whole=False, variables=16):
        short = isinstance(stacked, Padded)
        assert owner.tolist() == [int(short)]
        np.testing.assert_allclose(weights, [1 / 2])
        if short:
            assert stacked.mask.tolist() == [[True, True, False]]

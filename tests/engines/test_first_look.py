"""Are losses that would give wrong but plausible numbers named before the first round, and no others?"""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
import hospital_files
from fedbilevel.core.tree import split
from fedbilevel.engines.first_look import ALIKE, ENOUGH, Evidence, FirstLook, first_look
from fedbilevel.errors import InfluenceWarning
from fedbilevel.tasks import TASKS
from refusals import refuses
from representatives import slow_but

pytestmark = pytest.mark.checked  # the tests are about the checks before a run

RNG = np.random.default_rng(0)
U, CLASSES = RNG.normal(size=(4, 20, 3)), RNG.permutation(np.arange(80) % 3).reshape(4, 20)
SAMPLES = {"u": U, "t": U.sum(-1), "i": np.arange(80).reshape(4, 20), "other": np.tile(np.arange(20)[::-1], (4, 1))}
X, Y = np.full(3, -1.0), np.zeros(3)
ZEROS = np.zeros((3, 4)), {"w": np.zeros(4), "b": 0.0}


def fit(x, y, batch):
    return jnp.mean((batch["u"] @ y - batch["t"]) ** 2)


def ridge(x, y, batch):
    return fit(x, y, batch) + jnp.sum(10**x * y**2)


def summed(x, y, batch):
    return jnp.sum((batch["u"] @ y - batch["t"]) ** 2)


def broadcast(x, y, batch):
    return jnp.mean((batch["u"] @ y[:, None] - batch["t"]) ** 2)


def weighted(x, y, batch):
    return jnp.mean(jax.nn.sigmoid(x[batch["i"]]) * (batch["u"] @ y - batch["t"]) ** 2) + y @ y


def network(x, y, batch):
    hidden = jnp.tanh(batch["u"] @ x)
    return jnp.mean((hidden @ y["w"] + y["b"] - batch["t"]) ** 2) + jnp.sum(y["w"] ** 2)


def together(x, y, samples, valid):
    """Compute a sum over a client's samples, each of which refers to another sample."""
    each = (samples["u"] @ y - samples["t"][samples["other"]]) ** 2
    return jnp.sum(jnp.where(valid, each, 0)) + 10**x @ y**2


def drawing(x, y, batch, key):
    return ridge(x, y, batch) + jax.random.normal(key, (3,)) @ y


def plus(loss, term):
    return lambda x, y, batch: loss(x, y, batch) + term(x, y)


def composed(reduce):
    return fb.Compositional(lambda y, batch: y @ y, lambda x, batch: reduce(batch["u"], 0) * x)


def said(problem, clients=SAMPLES, x=X, y=Y):
    """Return the warnings before the first round."""
    (x, x_fixed), (y, y_fixed) = split(x), split(y)
    clients = fb.Clients(clients) if isinstance(clients, dict) else clients
    prepared = problem.with_fixed(x_fixed, y_fixed).prepared()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        first_look(prepared, clients, x, y, prepared.traced(x, y, clients.examples()))
    return [str(one.message) for one in found]


def solved(problem, x):
    method = fb.SimFBO(local_steps=1, batch_size=None, server_lr=0.01, client_lr=1.0)
    return fb.solve(method, problem, fb.Clients(SAMPLES), x, Y, rounds=2, engine=fb.Reference())


def scanned(x, y, batch):
    step = lambda carry, xi: (carry + jax.lax.stop_gradient(xi) * jnp.sum(y**2), None)  # noqa: E731
    return fit(x, y, batch) + jax.lax.scan(step, 0.0, x)[0]


@jax.custom_vjp
def square(a):
    return a**2


square.defvjp(lambda a: (a**2, a), lambda a, g: (2 * a * g,))


def simple(outer, **more):
    return fb.SimpleBilevel(outer, lambda x, batch: jnp.mean(batch["t"]), fb.projections.ball(1.0), **more)


STAYS = "^no gradient will move x: the outer loss has no derivative in x"
NO_MEAN = "loss is not a mean over the samples"
WRONG = {
    "the wrong order": (
        fb.Bilevel(ridge, fit),
        r"^x does not change y\*: .* Bilevel\(outer, inner\) takes the val",
    ),
    "an outer loss of x alone": (
        fb.Bilevel(lambda x, y, b: x @ x, ridge),
        r"^y\* does not change the outer loss",
    ),
    "x shifts the inner loss": (fb.Bilevel(fit, plus(fit, lambda x, y: x @ x)), STAYS),
    "a weight of 0": (fb.Bilevel(fit, plus(fit, lambda x, y: 0.0 * jnp.sum((y - x) ** 2))), STAYS),
    "stop_gradient": (fb.Bilevel(fit, lambda x, y, b: ridge(jax.lax.stop_gradient(x), y, b)), STAYS),
    "round": (fb.Bilevel(fit, lambda x, y, b: ridge(jnp.round(x), y, b)), STAYS),
    "stop_gradient in a loop": (fb.Bilevel(fit, scanned), STAYS),
    "an outer loss of neither": (
        fb.Bilevel(lambda x, y, b: jnp.mean(b["t"]), ridge),
        f"{STAYS}, and the outer loss has",
    ),
    "an inner loss of x alone": (
        fb.Bilevel(ridge, lambda x, y, b: x @ x),
        r"^x does not change y\*: the inner loss h",
    ),
    "a composition without x": (fb.Compositional(lambda y, b: y @ y, lambda x, b: b["u"].mean(0)), STAYS),
    "a saddle without x": (fb.Minimax(lambda x, y, b: -fit(x, y, b)), "the loss has no derivative in x"),
    "one level without x": (fb.SingleLevel(lambda x, b: jnp.mean(b["t"])), "the loss has no derivative in x"),
    "a preference without x": (simple(lambda x: jnp.ones(())), "no loss has a derivative in x"),
    "x beyond a clip": (fb.Bilevel(fit, plus(fit, lambda x, y: jnp.clip(x, 0, 9) @ y**2)), STAYS),
    "a sum": (fb.Bilevel(summed, ridge), rf"^the outer {NO_MEAN}.* looks like a sum"),
    "a sum and a penalty": (
        fb.Bilevel(fit, plus(summed, lambda x, y: 10**x @ y**2)),
        rf"^the inner {NO_MEAN}.* looks like a",
    ),
    "(n, 1) and (n,)": (fb.Bilevel(broadcast, ridge), rf"^the outer {NO_MEAN}.* shapes \(n, 1\) and \(n,\)"),
    "a sum within": (composed(jnp.sum), rf"^the inner {NO_MEAN}.* looks like a sum"),
}
SOUND = {
    "README": (fb.Bilevel(fit, ridge), X, Y),
    "weights by sample": (fb.Bilevel(fit, weighted), np.zeros(80), Y),
    "a network": (fb.Bilevel(network, network), RNG.normal(size=(3, 4)), ZEROS[1]),
    "a composition": (composed(jnp.mean), X, Y),
    "all of a client's samples": (fb.Bilevel(fb.WholeLoss(together), fb.WholeLoss(together)), X, Y),
    "a loss that draws": (fb.Bilevel(drawing, drawing), X, Y),
    "derivatives of one's own": (fb.Bilevel(fit, plus(fit, lambda x, y: jnp.sum(square(x * y)))), X, Y),
    "a subgradient of one's own": (simple(lambda x: jnp.ones(()), subgradient=lambda x: x), X, None),
    "an infinite loss": (fb.Bilevel(lambda *at: fit(*at) / 1e-320, ridge), X, Y),
    "one level": (fb.SingleLevel(lambda x, b: fit(None, x, b)), X, None),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said(case):
    problem, words = WRONG[case]
    (text,) = said(problem, y=None if isinstance(problem, fb.SingleLevel | fb.SimpleBilevel) else Y)
    assert re.search(words, text)


def rare(share, *shape):
    """Return 1 for this share of the samples, evenly spread, and 0 for the others."""
    return (np.arange(np.prod(shape)) % round(1 / share) == 0).astype(float).reshape(shape)


def crossed(x, y, batch):
    """Compute entropies of (n, 1) outputs and (n,) labels, which are broadcast to (n, n)."""
    return jnp.mean(jax.nn.softplus((batch["u"] @ y)[:, None]) - (batch["u"] @ y)[:, None] * batch["l"])


def of_positives(x, y, batch):
    return jnp.sum(batch["l"] * jax.nn.softplus(-(batch["u"] @ y)))


def hinges(x, y, batch):
    return jnp.sum(jax.nn.relu(jnp.abs(batch["u"] @ y - batch["t"]) - 4))


FEW_TELL = {
    "labels of which half are 1": (crossed, {"u": U, "l": rare(0.5, 4, 20)}, r"\(n, 1\) and \(n,\)"),
    "labels of which a tenth is 1": (crossed, {"u": U, "l": rare(0.1, 4, 20)}, r"\(n, 1\) and \(n,\)"),
    "a sum over few labelled": (
        lambda x, y, b: jnp.sum(b["w"] * (b["u"] @ y - b["t"]) ** 2),
        SAMPLES | {"w": rare(0.08, 4, 20)},
        "looks like a sum",
    ),
    "a sum over positives": (of_positives, {"u": U, "l": rare(0.1, 4, 20)}, "looks like a sum"),
    "a sum of hinges": (hinges, SAMPLES | {"t": 5 * rare(0.1, 4, 20)}, "looks like a sum"),
}
"""Losses that are not means over samples, which only few samples, or few pairs of samples, show."""


@pytest.mark.parametrize(
    ("penalty", "large"), slow_but((0.0, False), (1.0, True), of=[(0.0, False), (1.0, False), (1.0, True)])
)
@pytest.mark.parametrize("case", FEW_TELL)
def test_no_mean_is_said_where_few_samples_differ(case, penalty, large, monkeypatch):
    """A loss that is not a mean over samples is found although only few samples differ.

    A penalty makes the loss of all other samples a number other than 0. If samples are large, a look has four pairs of
    them, and not 16.
    """
    if large:
        monkeypatch.setattr("fedbilevel.engines.first_look.LOOK", 0)
    loss, samples, words = FEW_TELL[case]
    fit = lambda x, y, b: jnp.mean((b["u"] @ y - 1) ** 2)  # noqa: E731
    problem = fb.Bilevel(
        lambda x, y, b: loss(x, y, b) + jnp.mean(b["penalty"]) * (y @ y), plus(fit, lambda x, y: 10**x @ y**2)
    )
    (text,) = said(problem, samples | {"penalty": np.full((4, 20), penalty)})
    assert re.search(rf"^the outer {NO_MEAN}.*{words}", text)


@pytest.mark.parametrize("case", FEW_TELL)
def test_the_mean_of_the_same_is_sound(case):
    """The mean of the same losses is not warned of, also if one leaf is the same for all samples."""
    loss, samples, _ = FEW_TELL[case]
    mean = lambda x, y, b: jnp.mean(jax.vmap(lambda one: loss(x, y, jax.tree.map(lambda a: a[None], one)))(b))  # noqa: E731
    assert (
        said(
            fb.Bilevel(plus(mean, lambda x, y: y @ y), plus(mean, lambda x, y: 10**x @ y**2)),
            samples | {"n": np.ones((4, 20))},
        )
        == []
    )


@pytest.mark.slow
def test_a_leaf_of_x_that_no_loss_reads_is_named():
    problem = fb.Bilevel(fit, lambda x, y, batch: ridge(x["p"], y, batch) + x["r"][0] ** 2)
    (text,) = said(problem, x={"p": X, "q": np.ones(2), "r": (np.ones(()),)})
    assert text.startswith(
        "no derivative moves x['q'], x['r'][0], which will stay as at the start (seen near the start"
    )
    with pytest.warns(InfluenceWarning, match="no derivative moves"):
        result = solved(problem, {"p": X, "q": np.ones(2), "r": (np.ones(()),)})
    assert np.array_equal(result.x["q"], np.ones(2))
    assert float(result.x["r"][0]) == 1
    assert not np.array_equal(result.x["p"], X)


@pytest.mark.parametrize("case", SOUND)
def test_nothing_is_said_of_sound_losses(case):
    problem, x, y = SOUND[case]
    assert said(problem, x=x, y=y) == []


def test_a_leaf_that_is_the_same_in_all_samples_needs_few_looks(monkeypatch):
    """If a leaf is the same in all samples of each client, the losses are evaluated at ten points, not at 50.

    One or two evaluations follow, which tell whether x moves.
    """
    looks, called = [], FirstLook.__call__
    monkeypatch.setattr(FirstLook, "__call__", lambda look, *at: looks.append(1) or called(look, *at))
    assert said(fb.Bilevel(fit, ridge), SAMPLES | {"same": np.ones((4, 20))}) == []
    assert len(looks) <= ALIKE + 2


def test_looks_go_on_until_a_sum_would_have_been_seen():
    """A sum over few samples shows first in pairs of different samples, of which more have one of these samples.

    Further pairs are needed until ENOUGH pairs of a sample with itself could have shown that the loss is a sum.
    """
    mixed = np.array([[5], [2]])
    assert Evidence(np.array([ENOUGH - 1, 1]), mixed).why_no_mean().startswith("a sample's share")
    assert not Evidence(np.array([ENOUGH - 1, 1]), mixed).enough(1, single=False)
    assert Evidence(np.array([ENOUGH, 2]), mixed).enough(1, single=False)
    assert Evidence(np.array([ENOUGH, 2]), mixed).why_no_mean().startswith("a batch with two copies")


def test_samples_of_a_look_are_bounded(monkeypatch):
    """A look has as many pairs of samples, at least four, as take at most LOOK bytes, and 16 if these are enough.

    A sample has six numbers of 8 bytes, which both losses read, and a pair has two samples: 192 bytes.
    """
    rows = {"u": np.ones((4, 20, 5)), "t": np.ones((4, 20))}
    clients, counts = fb.Clients(rows), []
    called = FirstLook.__call__
    monkeypatch.setattr(FirstLook, "__call__", lambda look, *at: counts.append(look.pairs) or called(look, *at))
    problem = fb.Bilevel(lambda x, y, b: jnp.mean(b["u"] @ y - b["t"]), lambda x, y, b: jnp.mean((b["u"] @ y - x) ** 2))
    for size in (192 * 16, 192 * 16 - 1, 192 * 7, 0):
        monkeypatch.setattr("fedbilevel.engines.first_look.LOOK", size)
        counts.clear()
        said(problem, clients, x=np.zeros(()), y=np.zeros(5))
        assert set(counts) == {{192 * 16: 16, 192 * 16 - 1: 14, 192 * 7: 6, 0: 4}[size]}


def test_clients_of_one_sample_need_few_looks(monkeypatch):
    """The losses are evaluated at few points if no client has two samples, since no pair can show whether they mix."""
    looks, called = [], FirstLook.__call__
    monkeypatch.setattr(FirstLook, "__call__", lambda look, *at: looks.append(1) or called(look, *at))
    assert said(fb.Bilevel(fit, ridge), {"u": U[:, :1], "t": U[:, :1].sum(-1)}) == []
    assert len(looks) <= 3
    looks.clear()
    assert said(fb.Bilevel(fit, ridge), {"u": U[:1, :1], "t": U[:1, :1].sum(-1)}) == []
    assert len(looks) <= ALIKE + 2


def test_solve_says_it_at_the_users_line_and_x_stays():
    """`solve` warns at the user's line, and after rounds with derivatives x has not moved by a bit."""
    with pytest.warns(InfluenceWarning, match="no gradient will move x") as caught:
        result = solved(WRONG["round"][0], X)
    assert caught[0].filename == __file__
    assert np.array_equal(result.x, X)


def test_x_of_few_clients_is_found():
    """The influence of x is found although it enters the loss of only two clients in a hundred.

    Their samples are in the first sixteen pairs or in later ones.
    """
    held = (np.arange(100) % 50 == 0)[:, None] * np.ones((100, 2))
    samples = {"u": RNG.normal(size=(100, 2, 3)), "t": np.ones((100, 2)), "held": held}
    own = lambda x, y, batch: fit(x, y, batch) + jnp.mean(batch["held"]) * (10**x @ y**2)  # noqa: E731
    assert said(fb.Bilevel(fit, own), samples) == []


@pytest.mark.slow
def test_a_start_that_is_left_by_no_derivative_is_named():
    """A start from which no derivative moves x is named.

    At x = 0 and w = 0 the hidden layer is 0, and so are all derivatives in w and x. Only b moves.
    """
    (text,) = said(fb.Bilevel(network, network), x=ZEROS[0], y=ZEROS[1])
    assert text.startswith("x will not move from this start: ")
    result = fb.solve(fb.FedBiO(), fb.Bilevel(network, network), fb.Clients(SAMPLES), *ZEROS, rounds=2)
    assert not np.any(result.x)


def test_targets_that_are_rarely_other_than_0_are_no_such_start():
    """Targets that are nearly always 0 are not reported: at y = 0 one sample in 200 has a derivative other than 0."""
    t = np.where(np.arange(4000) % 200 == 0, 1.0, 0.0).reshape(4, 1000)
    assert said(fb.Bilevel(fit, ridge), {"u": RNG.normal(size=(4, 1000, 3)), "t": t}) == []


# few_shot downloads characters
QUICK = ("quadratic", "hyper_representation", "classification", "location", "saddle", "compositional")
"""Tasks that have losses of each kind; the others have losses like these."""


@pytest.mark.parametrize("name", slow_but(*QUICK, of=sorted(TASKS)))
def test_nothing_is_said_of_the_librarys_own_tasks(name, tmp_path, monkeypatch):
    if name == "hospitals":
        hospital_files.write(tmp_path, monkeypatch)
    task = TASKS[name]()
    assert said(task.problem, task.clients, task.x0, task.y0) == []


LOOK_UPS = {
    "an index": lambda scores, c: scores[jnp.arange(len(c)), c],
    "an index from 1": lambda scores, c: scores[jnp.arange(len(c)), (c + 1) - 1],
    "vmap": jax.vmap(lambda scores, c: scores[c]),
    "take_along_axis": lambda scores, c: jnp.take_along_axis(scores, c[:, None], axis=1),
    "take": lambda scores, c: jnp.take(jnp.eye(3), c, axis=0) * scores,
    "floats": lambda scores, c: scores[jnp.arange(len(c)), c.astype(float).astype(int)],
    "one_hot": lambda scores, c: jax.nn.one_hot(c, 3) * scores,
}
"""Functions (scores, classes) -> the scores of the classes."""
SCORES = np.ones(()), np.zeros((3, 3))


def entropy(look_up):
    """Return the loss of a linear model of three classes, with a ridge in which x has an influence."""

    def loss(x, y, batch):
        return -jnp.mean(look_up(jax.nn.log_softmax(batch["u"] @ y), batch["c"])) + x * jnp.sum(y**2)

    return fb.Bilevel(loss, loss)


def said_of(classes, look_up):
    return said(entropy(look_up), {"u": U, "c": classes}, *SCORES)


@pytest.mark.parametrize("name", slow_but("an index", "one_hot", of=LOOK_UPS))
def test_labels_beyond_the_classes_are_refused_or_warned_of(name):
    """Labels beyond the classes are refused, or warned of.

    The labels are 1, 2, 3 for three classes, or -1, which JAX treats as the last class or as none.
    """
    assert said_of(CLASSES, LOOK_UPS[name]) == []
    words = r"Clients\.outer\['c'\]: the value in sample \d+ of client \d .*the outer loss .*entry {} .* 0 to 2\. "
    if name == "one_hot":  # a label that is in no class may be intended
        assert re.match(words.format(3), said_of(CLASSES + 1, LOOK_UPS[name])[0])
    else:
        with refuses("", fact="entry 3 of an axis whose entries are 0 to 2", where="Clients.outer['c']"):
            said_of(CLASSES + 1, LOOK_UPS[name])
    outer, inner = said_of(np.where(CLASSES == 2, -1, CLASSES), LOOK_UPS[name])
    assert re.match(words.format(-1), outer)
    assert inner.startswith("Clients.inner['c']")


def test_labels_that_the_loss_compares_may_be_masked():
    masked = lambda scores, c: jnp.where(c >= 0, LOOK_UPS["take_along_axis"](scores, c)[:, 0], 0)  # noqa: E731
    assert said_of(np.where(CLASSES == 2, -100, CLASSES), masked) == []


def test_padding_is_no_sample():
    padded = {"u": np.pad(U, ((0, 0), (0, 1), (0, 0))), "c": np.pad(CLASSES, ((0, 0), (0, 1)), constant_values=99)}
    clients = fb.Clients(padded, outer_sizes=np.full(4, 20))
    assert said(entropy(LOOK_UPS["an index"]), clients, *SCORES) == []


@pytest.mark.parametrize("look", slow_but(fb.check_hypergradient, of=[fb.diagnose, fb.check_hypergradient]))
def test_diagnose_and_check_say_it_too(look):
    with pytest.warns(InfluenceWarning, match="x does not change y"):
        look(WRONG["the wrong order"][0], fb.Clients(SAMPLES), X, Y)
    with refuses("", fact="entry 3 of an axis whose entries are 0 to 2", where="Clients.outer['c']"):
        look(entropy(LOOK_UPS["vmap"]), fb.Clients({"u": U, "c": CLASSES + 1}), *SCORES)

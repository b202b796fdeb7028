"""Is an inner loss refused if its derivative in y is not the gradient of one function, and no other loss?

Some leaves of y are each client's own, and others are shared. In Ditto, the shared model pulls the own models, but its
derivative does not contain this pull.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_f2sa import once

import fedbilevel as fb
from fedbilevel.core.tree import split
from fedbilevel.engines.first_look import first_look
from fedbilevel.errors import UnsupportedError
from refusals import raises_with
from representatives import slow_but

pytestmark = pytest.mark.checked  # the tests are about a check before a run

RNG = np.random.default_rng(0)
FEATURES, CLASSES = 6, 3
SAMPLES = {"u": RNG.normal(size=(4, 8, FEATURES)), "c": RNG.integers(0, CLASSES, (4, 8))}
MODEL = np.zeros((FEATURES, CLASSES))
PAIR = {"own": MODEL, "shared": MODEL}
fixed = jax.lax.stop_gradient


def entropy(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["c"]).mean()


def fit(model, batch):
    return entropy(batch["u"] @ model, batch)


def outer(x, y, batch):
    return fit(y["own"], batch)


def pulled(seen, weight=1.0, power=2):
    """Return a loss of own and shared models, with a penalty that pulls the own model to `seen(shared model)`.

    If `seen` is `stop_gradient`, the penalty has no derivative in the shared model.
    """

    def inner(x, y, batch):
        pull = jnp.sum(jnp.abs(y["own"] - seen(y["shared"])) ** power)
        return fit(y["own"], batch) + fit(y["shared"], batch) + weight * 10**x * pull

    return inner


def on_features(seen):
    """Return a loss of a network with a shared head, and of each client's own head, whose inputs are `seen(features)`.

    The features are those of the network. If `seen` is `stop_gradient`, the own head does not train the network.
    """

    def inner(x, y, batch):
        features = jax.nn.relu(batch["u"] @ y["body"])
        both = entropy(features @ y["head"], batch) + entropy(seen(features) @ y["own"], batch)
        return both + 10**x * optax.tree.norm(y, squared=True)

    return inner


@jax.custom_vjp
def reversed_gradient(a):
    return a


reversed_gradient.defvjp(lambda a: (a, None), lambda _, slope: (-slope,))


def squares(x, y, batch):
    """Compute a pull whose gradient JAX cannot differentiate."""
    return fit(y["own"], batch) + fit(y["shared"], batch) + 10**x * once(jnp.ravel(y["own"] - y["shared"]))


NETWORK = {
    "body": RNG.normal(size=(FEATURES, 16)),
    "head": RNG.normal(size=(16, CLASSES)),
    "own": RNG.normal(size=(16, CLASSES)),
}
ASYMMETRIC = {
    "Ditto": (pulled(fixed), PAIR),
    "Ditto, weakly pulled": (pulled(fixed, weight=1e-3), PAIR),
    "a shared model pulled to own ones that do not see it": (
        lambda x, y, batch: fit(y["own"], batch) + 10**x * jnp.sum((y["shared"] - fixed(y["own"])) ** 2),
        PAIR,
    ),
    "a head on features that it cannot train": (on_features(fixed), NETWORK),
    "a head that trains features the other way": (on_features(reversed_gradient), NETWORK),
}
SYMMETRIC = {
    "MR-MTL": (pulled(lambda shared: shared), PAIR),
    "MR-MTL, pulled by less than rounding": (pulled(lambda shared: shared, weight=1e-9), PAIR),
    "a pull with corners": (pulled(lambda shared: shared, power=1), PAIR),
    "models that do not meet": (
        lambda x, y, b: fit(y["own"], b) + fit(y["shared"], b) + 10**x * jnp.sum(y["own"] ** 2),
        PAIR,
    ),
    "a head on features": (on_features(lambda features: features), NETWORK),
    "a pull without second derivatives": (squares, PAIR),
}
PIXELS, DIGITS = 64, 10


def drawn(rng, *shape):
    return rng.normal(size=shape) * shape[0] ** -0.5


# Third derivatives of these losses are large if the features are not scaled, such as pixels from 0 to 255.
UNSCALED = {
    "a tanh network with a first layer of each client's own": (
        lambda y, batch: jnp.tanh(batch["u"] @ y["own"]) @ y["shared"],
        lambda rng: {"own": drawn(rng, PIXELS, 32), "shared": drawn(rng, 32, DIGITS)},
    ),
    "a ReLU network with a head of each client's own": (
        lambda y, batch: jax.nn.relu(jax.nn.relu(batch["u"] @ y["first"]) @ y["second"]) @ y["own"],
        lambda rng: {
            "first": drawn(rng, PIXELS, 32),
            "second": drawn(rng, 32, 32),
            "own": drawn(rng, 32, DIGITS),
        },
    ),
    "logits of an own and a shared model": (
        lambda y, batch: batch["u"] @ (y["own"] + y["shared"]),
        lambda rng: dict.fromkeys(["own", "shared"], np.zeros((PIXELS, DIGITS))),
    ),
}
TYPES = [np.float64, np.float32]


def floating(y, kind):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, kind) if isinstance(leaf, np.ndarray) else leaf, y)


def look(inner, y, kind, own=lambda path: path == "own", samples=SAMPLES):
    problem = fb.Bilevel(inner, inner, own=own)
    samples = {"u": samples["u"].astype(kind), "c": samples["c"]}
    x, y = split((jnp.zeros((), kind), floating(y, kind)))[0]
    clients, prepared = fb.Clients(samples), problem.prepared()
    first_look(prepared, clients, x, y, prepared.traced(x, y, clients.examples()))


@pytest.mark.parametrize("kind", slow_but(np.float64, of=TYPES))
@pytest.mark.parametrize("case", ASYMMETRIC)
def test_what_acts_in_one_direction_is_refused(case, kind):
    with raises_with(UnsupportedError, "stop_gradient"):
        look(*ASYMMETRIC[case], kind)


@pytest.mark.parametrize("kind", slow_but(np.float64, of=TYPES))
@pytest.mark.parametrize(
    "case",
    # MR-MTL itself is run below
    slow_but("MR-MTL, pulled by less than rounding", "a pull with corners", "a head on features", of=SYMMETRIC),
)
def test_gradients_of_one_function_pass(case, kind):
    look(*SYMMETRIC[case], kind)


@pytest.mark.parametrize("seed", slow_but(0, of=[0, 1]))
@pytest.mark.parametrize("largest", slow_but(255, of=[64, 255]))
@pytest.mark.parametrize("case", UNSCALED)
def test_gradients_of_one_function_pass_in_float32_on_features_that_are_not_scaled(case, largest, seed):
    rng = np.random.default_rng(seed)
    samples = {"u": largest * rng.random((8, 30, PIXELS)), "c": rng.integers(0, DIGITS, (8, 30))}
    logits, model = UNSCALED[case]

    def inner(x, y, batch):
        return entropy(logits(y, batch), batch) + 1e-4 * 10**x * optax.tree.norm(y, squared=True)

    look(inner, model(rng), np.float32, samples=samples)


FIXED = {"count": 3, "table": jnp.arange(3), "function": jnp.tanh, "nothing": None}


def beside_fixed(inner):
    """Return an inner loss of a y that has its model beside leaves that are not floating arrays."""
    return lambda x, y, batch: inner(x, {"own": y["own"], "shared": y["shared"]}, batch)


@pytest.mark.parametrize("leaf", slow_but("table", of=FIXED))
def test_y_may_have_leaves_that_are_no_floating_arrays(leaf):
    y = {**PAIR, leaf: FIXED[leaf]}
    look(beside_fixed(SYMMETRIC["MR-MTL"][0]), y, np.float64)
    with raises_with(UnsupportedError, "MR-MTL"):
        look(beside_fixed(ASYMMETRIC["Ditto"][0]), y, np.float64)


@pytest.mark.parametrize("own", [None, lambda path: True])
def test_a_y_whose_leaves_are_all_shared_or_all_own_is_not_checked(own):
    look(*ASYMMETRIC["Ditto"], np.float64, own)


STEPS = {"local_steps": 1, "batch_size": None, "server_lr": 0.1, "client_lr": 1.0}


@pytest.mark.parametrize(
    "method", [fb.SimFBO(**STEPS), pytest.param(fb.F2SA(**STEPS), marks=pytest.mark.slow)], ids=["SimFBO", "F2SA"]
)
def test_solve_refuses_ditto_and_runs_mr_mtl(method):
    """`solve` refuses Ditto and runs MR-MTL; F2SA also runs if JAX cannot differentiate the gradient."""
    arguments = fb.Clients(SAMPLES), 0.0, PAIR
    own = lambda path: path == "own"  # noqa: E731
    with raises_with(UnsupportedError, "Bilevel.own"):
        fb.solve(method, fb.Bilevel(outer, ASYMMETRIC["Ditto"][0], own=own), *arguments, rounds=1)
    inner = squares if isinstance(method, fb.F2SA) else SYMMETRIC["MR-MTL"][0]
    assert fb.solve(method, fb.Bilevel(outer, inner, own=own), *arguments, rounds=1).rounds == 1

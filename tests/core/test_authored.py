"""Is each return value of a user's method checked before the first round, with an error that names class and hook?"""

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.authoring import XYV, Algorithm, Asks, Reply, fraction, phase, static
from fedbilevel.core.authored import difference
from refusals import refuses


class State(NamedTuple):
    x: Any
    y: Any


class Descent(Algorithm):
    """A correct method; each case below makes one hook of it wrong."""

    def init(self, x, y):
        return State(x, y)

    @phase
    def gradient(self, client, message, key):
        return Reply(jax.grad(client.problem.inner, argnums=1)(*message, client.inner_batch(key, None)), gradients=1)

    def round(self, fed, state, key):
        return State(state.x, state.y - 0.1 * fed.mean(self.gradient, state, key))


SAMPLES = [np.ones((3, 2)), np.zeros((4, 2))]


def solved(cls, engine=None):
    inner = lambda x, y, batch: jnp.mean((batch - y - x) ** 2)  # noqa: E731
    outer = lambda x, y, batch: jnp.mean((batch - y) ** 2)  # noqa: E731
    clients = fb.Clients(outer=SAMPLES, inner=SAMPLES, local_steps=np.array([1, 2]))
    return fb.solve(cls(), fb.Bilevel(outer, inner), clients, np.zeros(2), np.zeros(2), rounds=2, engine=engine)


def looped(self, client, message, key):
    for _ in range(client.local_steps(1)):
        pass
    return Reply(message.y)


def branched(self, client, message, key):
    return Reply(message.y if jnp.sum(message.y) > 0 else message.x)


def rounded(self, fed, state, key):
    return state if float(jnp.sum(state.y)) > 0 else State(state.y, state.x)


PHASES = {
    "no reply": (lambda self, client, at, key: at.y, "returned float64[2]: it must return a Reply(update)"),
    "nothing": (lambda self, client, at, key: None, "returned None: it must return a Reply(update)"),
    "two updates": (lambda self, client, at, key: Reply(at.x, at.y), "Reply.state is float64[2], from a client that"),
    "one tuple": (lambda self, client, at, key: Reply(at.x, None, at.y), "as one tuple: Reply((dx, dy))"),
    "a vector metric": (
        lambda self, client, at, key: Reply(at.y, metrics={"m": at.y}),
        "the metric 'm' is float64[2]: it must be one number",
    ),
    "range": (looped, "jax.lax.fori_loop(0, n, …) for range(n)"),
    "if": (branched, "jnp.where or jax.lax.cond for `if`"),
}
SERVER = {
    "a tuple": (
        "init",
        lambda self, x, y: (x, y),
        "returned tuple of [0] (2,), [1] (2,): it must return a state with the attributes x and y",
    ),
    "another x": ("init", lambda self, x, y: State(x.sum(), y), "x must be like x0: it is float64[], not float64[2]"),
    "another type": (
        "round",
        lambda self, fed, state, key: tuple(state),
        "got tuple of [0] (2,), [1] (2,), not State of",
    ),
    "another shape": (
        "round",
        lambda self, fed, state, key: State(jnp.outer(state.x, state.x), state.y),
        "must return a state with the shapes and dtypes that init returned: .x is float64[2, 2], not float64[2]",
    ),
    "if": ("round", rounded, "leave out int(…) and float(…)"),
}


def made(hook, function):
    """Return `Descent` with this hook; some mistakes show where the class is made, and all others in `solve`."""
    function.__name__ = hook  # an exchange finds a phase by this name
    return type("Mine", (Descent,), {hook: phase(function) if hook == "gradient" else function})


@pytest.mark.parametrize(
    ("hook", "function", "words"),
    [*(("gradient", *case) for case in PHASES.values()), *SERVER.values()],
    ids=[*PHASES, *(f"server: {name}" for name in SERVER)],
)
def test_a_wrong_return_is_refused_with_class_and_hook(hook, function, words):
    with pytest.raises(fb.errors.ConfigurationError) as error:
        solved(made(hook, function))
    # the error begins with the user's line that raised it
    assert str(error.value).rpartition("`: ")[2].startswith(f"Mine.{hook}")
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("hook", "function", "words"),
    [("gradient", *PHASES["no reply"]), ("gradient", *PHASES["two updates"]), SERVER["another type"]],
)
def test_the_reference_says_the_same(hook, function, words):
    with pytest.raises(fb.errors.ConfigurationError) as error:
        solved(made(hook, function), fb.Reference())
    assert words in str(error.value)


def test_what_is_right_passes():
    """A correct method passes.

    The mean over two entries of (b − y)² has the slope y − b in each entry. b is 1 for one client and 0 for the other.
    So y steps by 0.1 (½ − y): by 0.05 to 0.05, and by 0.045 to 0.095.
    """
    np.testing.assert_allclose(solved(Descent).y, [0.095, 0.095], rtol=1e-12)


def test_what_a_client_keeps_has_one_form():
    """A client's state keeps its form; a number would be spread over the two entries that the client keeps."""

    class Mine(Descent):
        def init_client(self, x, y):
            return y

        @phase
        def gradient(self, client, message, key):
            return Reply(message.y, state=jnp.zeros(()))

    with refuses("", fact="it is float64[], not float64[2]", where="Mine.gradient"):
        solved(Mine)


def test_a_phase_that_takes_no_key_is_refused_where_it_is_written():
    with refuses("", fact="(self, client, message, key), got (self, client, message)", where="Mine.gradient"):

        class Mine(Descent):
            @phase
            def gradient(self, client, message):
                return Reply(message.y)


def test_a_value_without_annotation_is_no_silent_constant():
    with refuses("Mine.decay", 0.9, "decay: float ="):
        type("Mine", (Descent,), {"decay": 0.9})
    with refuses("Mine.local_steps", 3, "local_steps: int ="):
        type("Mine", (fb.FedBiO,), {"local_steps": 3})  # the field of the base class would still be 5
    with refuses("Mine.client_lr", XYV(1, 1, 1), "client_lr: XYV ="):
        type("Mine", (fb.FedBiO,), {"client_lr": XYV(1, 1, 1)})


def test_a_property_in_place_of_a_field_is_to_be_one():
    made = property(lambda self: XYV(1, 1, 1))
    with refuses("Mine.client_lr", made, "client_lr: … ="):
        type("Mine", (fb.FedBiO,), {"client_lr": made})
    held = type("Held", (Descent,), {"inner": property(lambda self: fb.parts.LocalSGD())})
    with refuses("", fact="['gradient'], got descent of a LocalSGD", where="Held"):
        held().phase_name(held().inner.descent)


def test_values_that_are_meant_to_be_constants_are_left_alone():
    class Mine(Descent):
        decay: float = fraction(default=0.9)
        terms: int = static(default=3)
        LIMIT: ClassVar = 7
        _hidden = 3
        asks = Asks(fresh_cohorts=2)
        local_steps = property(lambda self: 5)

    assert (Mine(decay=0.5).decay, Mine().asks.fresh_cohorts, Mine().local_steps, Mine.LIMIT) == (0.5, 2, 5, 7)


def test_trees_are_compared_by_structure_shape_and_dtype():
    key = jax.random.key(0)
    assert difference((1.0, 2, key), (jnp.ones(()), jnp.ones((), int), key)) == ""
    assert difference((1.0,), [1.0]) == "got tuple of [0] (), not list of [0] ()"
    assert difference({"a": jnp.ones(2)}, {"a": jnp.ones(3)}) == "['a'] is float64[2], not float64[3]"

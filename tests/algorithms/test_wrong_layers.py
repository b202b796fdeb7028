"""If a user's layer returns something wrong, does the error name layer, function, and what is allowed?"""

import warnings
from abc import abstractmethod
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithms.parts.layers import Layer, layered
from fedbilevel.algorithms.parts.memory import warn_unless_contraction
from fedbilevel.authoring import Coded, Compressor
from fedbilevel.core.config import static
from fedbilevel.core.tree import XYV
from fedbilevel.errors import ConfigurationError, NumericalWarning
from fedbilevel.tasks.quadratic import quadratic

METHOD = fb.SimFBO(local_steps=1, batch_size=None, server_lr=XYV(0.2, 0.1, 0.1), client_lr=0.1)
TASK = quadratic(clients=4, dim_x=6, dim_y=3, samples=(2, 2))


class Own(Layer):
    kind, place = "own", "kept"


def first_entries(tree):
    return jax.tree.map(lambda leaf: leaf[:1], tree)


def run(layer, *others, method=METHOD, **options):
    given = TASK.problem, TASK.clients, TASK.x0, TASK.y0
    return fb.solve(layered(method, layer, *others), *given, rounds=1, **options)


def refused(make, text):
    with pytest.raises(ConfigurationError, match=text):
        make()


class ShortReply(Own):
    def reply(self, asked, kept, client, run):
        reply = run(asked, client)
        return reply._replace(update=first_entries(reply.update)), kept


class ShortTotal(Own):
    def exchange(self, asked, kept, ask):
        total = ask(asked)
        return total._replace(update=first_entries(total.update)), kept


class ShortOnBothSides(ShortReply):
    def exchange(self, asked, kept, ask):
        return ask(asked), kept


@pytest.mark.parametrize("others", [(), (fb.Asynchronous(wait_for=2),)])
@pytest.mark.parametrize("engine", [fb.Local(), fb.Reference()])
def test_an_update_of_another_shape_is_no_mean_of_all_entries(engine, others):
    """An update of another shape is refused: x has 6 entries and y 3, and one entry would be added to all of them."""
    text = r"ShortReply\.reply: Reply\.update .*\.x is float\d+\[1\], not .*\[6\]"
    refused(lambda: run(ShortReply(), *others, engine=engine), text)


def test_a_total_of_another_shape_is_refused():
    refused(lambda: run(ShortTotal()), r"ShortTotal\.exchange: Total\.update .*\.x is .*\[1\], not .*\[6\]")
    refused(
        lambda: run(ShortOnBothSides()), r"ShortOnBothSides\.exchange: .*local_updates, .*\[0\] is .*\[1\], not .*\[6\]"
    )
    heavy = type("Heavy", (Own,), {"exchange": lambda self, asked, kept, ask: (ask(asked)._replace(weight=ROW), kept)})
    refused(lambda: run(heavy()), r"Heavy\.exchange: Total\.weight .*\[3\]")


ROW = np.ones(3)


def replying(**changes):
    """Return a layer that changes some fields of its replies."""
    reply = lambda self, asked, kept, client, run: (run(asked, client)._replace(**changes), kept)  # noqa: E731
    return type("Changing", (Own,), {"reply": reply})()


def test_metrics_and_counts_of_a_layer_are_single_numbers():
    refused(lambda: run(replying(metrics={"v": ROW})), r"Changing\.reply: .*'v' .*float64\[3\]")
    refused(lambda: run(replying(gradients=ROW)), r"Changing\.reply: Reply\.gradients .*float64\[3\]")
    refused(lambda: run(replying(update=[1.0])), r"Changing\.reply: Reply\.update .*list of \[0\]")
    refused(lambda: run(replying(state=ROW)), r"Changing\.reply: Reply\.state .*float64\[3\], not None")


def test_what_never_leaves_a_client_may_be_left_out_and_coded_parts_and_dtypes_may_differ():
    class Half(Layer):
        kind, place = "half", "coded"

        def reply(self, asked, kept, client, run):
            reply = run(asked, client)
            part = lambda leaf: Coded(leaf.astype(jnp.float16), upcast)  # noqa: E731
            return reply._replace(update=jax.tree.map(part, reply.update)), kept

    found = run(Half())
    np.testing.assert_allclose(found.x, run(None).x, atol=2e-3)


def upcast(wire):
    return wire.astype(jnp.float32)


class AtClient(Own):
    def client_slot(self, method, problem, x, y):
        return jnp.zeros(3)


class AtServer(Own):
    def server_slot(self, method, x, y):
        return jnp.zeros(3)


@pytest.mark.parametrize(
    ("new", "got"), [(None, "got None"), (np.zeros(3, np.int32), r"it is int32\[3\]"), (np.zeros(4), r"it is .*\[4\]")]
)
@pytest.mark.parametrize("function", ["reply", "exchange", "before_round", "after_round"])
def test_a_layer_keeps_what_it_began_with(function, new, got):
    functions = {
        "reply": lambda self, asked, kept, client, run: (run(asked, client), new),
        "exchange": lambda self, asked, kept, ask: (ask(asked), new),
        "before_round": lambda self, method, kept: (method, new),
        "after_round": lambda self, method, problem, kept, before, after: (after, new),
    }
    side, slot = (AtClient, "client_slot") if function == "reply" else (AtServer, "server_slot")
    layer = type("Forgets", (side,), {function: functions[function]})()
    text = rf"Forgets\.{function}: .*{slot} .*{got}.*, not float64\[3\]"
    refused(lambda: run(layer), text)


@pytest.mark.parametrize(
    ("function", "body", "text"),
    [
        (
            "before_round",
            lambda self, method, kept: method,
            "returned SimFBO of ",
        ),
        (
            "after_round",
            lambda self, method, problem, kept, before, after: None,
            "returned None",
        ),
        (
            "after_round",
            lambda self, method, problem, kept, before, after: after,
            "returned State of ",
        ),
        (
            "after_round",
            lambda self, method, problem, kept, before, after: (first_entries(after), kept),
            r".*`after`: .*x is float\d+\[1\], not float\d+\[6\]",
        ),
        ("findings", lambda self, method, kept, found: {"a": 1.0}, "returned dict of .*Findings"),
        ("remarks", lambda self, method, kept: "hello", "returned 'hello'"),
    ],
)
def test_a_function_that_returns_something_else_is_named(function, body, text):
    refused(lambda: run(type("Wrong", (Own,), {function: body})()), rf"Wrong\.{function} {text}")


def test_a_code_that_nothing_decodes_is_named():
    class Codes(Compressor):
        def coded(self, tree):
            return jax.tree.map(lambda leaf: Coded(leaf, None), tree)

    refused(lambda: run(Codes()), r"Codes\.coded: Coded\.decode .*None")
    undecoded = replying(update=Coded(jnp.ones(3), "sum"))
    refused(lambda: run(undecoded), r"Changing\.reply: Coded\.decode .*'sum'")


def test_two_of_one_place_or_kind_are_both_named_with_what_to_do():
    other = type("Other", (Layer,), {"kind": "other", "place": "kept"})()
    text = "SimFBO, 'kept': Own and Other.*`place`"
    refused(lambda: layered(METHOD, Own(), other, fb.parts.Median()), text)
    same = type("Same", (Layer,), {"kind": "own", "place": "state"})()
    refused(lambda: layered(METHOD, Own(), same), "Own and Same .*'own'")


@pytest.mark.parametrize("name", ["replies", "on_reply", "respond", "before", "change", "lable"])
def test_public_names_of_a_layer_are_its_functions_and_fields(name):
    made = {"kind": "x", "place": "kept", name: lambda self: None}
    refused(lambda: type("Misspelt", (Layer,), made), rf"Misspelt\.{name} .*underscore")


def test_fields_helpers_and_functions_that_a_class_declares_abstract_are_names_of_ones_own():
    class Scaled(Own):
        factor: float = 2.0

        def reply(self, asked, kept, client, run):
            reply = run(asked, client)
            return reply._replace(update=self._scaled(reply.update)), kept

        def _scaled(self, update):
            return jax.tree.map(lambda leaf: self.factor * leaf, update)

        @property
        def label(self):
            return "Scaled"

    class General(Layer):
        place = "kept"

        @abstractmethod
        def of(self, update): ...

    class Special(General):
        kind = "special"

        def of(self, update):
            return update

    assert Special().of(1) == 1
    assert replace(Scaled(), factor=3.0)._scaled(1.0) == 3.0
    moved = [np.asarray(run(layer).x) - TASK.x0 for layer in (Scaled(factor=1.0), Scaled())]
    np.testing.assert_allclose(moved[1], 2 * moved[0], rtol=1e-5, atol=1e-6)


class Signs(Compressor):
    """Send only the signs of a reply, with or without a factor: the mean size of the entries.

    Without the factor, each difference moves every entry by 1.
    """

    scaled: bool = static(default=True)

    def coded(self, tree):
        def one(array):
            scale = jnp.mean(jnp.abs(array)) if self.scaled else jnp.ones((), array.dtype)
            return Coded((jnp.sign(array).astype(jnp.int8), scale), product)

        return jax.tree.map(one, tree)


def product(wire):
    return wire[0] * wire[1]


def test_a_code_that_is_no_contraction_is_warned_of():
    """A code that is not a contraction is warned of.

    For entries of size 0.001, the signs are off by about 1000 times their size, which is 10⁶ in the square.
    """
    with pytest.warns(NumericalWarning, match=r"Signs\.coded .*contraction.* 0\.001"):
        run(Signs(scaled=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for code in (Signs(), fb.parts.TopK(share=0.2)):
            warn_unless_contraction(code, (jnp.zeros(6), jnp.zeros((2, 3))))

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
from fedbilevel.algorithms.parts.memory import check_compressor
from fedbilevel.authoring import Coded, Compressor
from fedbilevel.core.config import static
from fedbilevel.core.tree import XYV
from fedbilevel.errors import ConfigurationError, NumericalWarning
from fedbilevel.tasks.quadratic import quadratic
from representatives import slow_but

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


@pytest.mark.slow
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


def test_what_leaves_a_client_is_said_in_a_text():
    for silent in (None, "  ", "a line\nand another"):
        refused(lambda silent=silent: type("Silent", (Own,), {"tells": silent}), r"Silent\.tells = ")


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


def coding(function, decode=None):
    """Return a compressor that applies `function` to each array, and decodes by `decode`; None: nothing is decoded."""
    one = function if decode is None else lambda array: Coded(function(array), decode)
    return type("Codes", (Compressor,), {"coded": lambda self, tree: jax.tree.map(one, tree)})()


@pytest.mark.slow
def test_a_code_that_is_no_contraction_is_warned_of():
    """A code that is not a contraction is warned of.

    For entries of size 0.001, the signs are off by about 1000 times their size, which is 10⁶ in the square.
    """
    with pytest.warns(NumericalWarning, match=r"Signs\.coded .*contraction.* 0\.001") as found:
        run(Signs(scaled=False))
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for code in (Signs(), fb.parts.TopK(share=0.2)):
            check_compressor(code, (jnp.zeros(6), jnp.zeros((2, 3))))


def test_a_code_of_zeros_is_no_contraction():
    """C(v) = 0 sends nothing, and is as far from v as 0 is: ‖C(v) − v‖² = ‖v‖²."""
    with pytest.warns(NumericalWarning, match="is 1 "):
        check_compressor(coding(jnp.zeros_like), jnp.zeros(6))


def test_a_compressor_that_draws_its_own_numbers_is_refused():
    """Half of the entries are kept, by draws of NumPy; two draws for 50 entries are equal with probability 2⁻⁵⁰.

    A draw from a fixed seed gives the same code each time, and is allowed.
    """
    drawing = lambda seed: coding(lambda array: array * np.random.default_rng(seed).integers(2, size=array.shape))  # noqa: E731
    check_compressor(drawing(0), jnp.zeros(50))
    refused(lambda: check_compressor(drawing(None), jnp.zeros(50)), r"Codes\.coded: .*deterministic.*asked\.key")


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (coding(lambda array: array, first_entries), r"decoding .*\.x is float\d+\[1\], not float\d+\[6\]"),
        (coding(lambda array: array, lambda wire: "text"), r"Coded\.decode .*\.x is str 'text'"),
        (coding(lambda array: "text"), r"update .*\.x is str 'text'"),
        (coding(lambda array: None), r"decoding .*got "),
    ],
)
def test_a_wrong_code_is_found_before_a_run(code, text):
    refused(
        lambda: layered(METHOD, code).check(TASK.problem, TASK.clients, TASK.x0, TASK.y0), rf"Codes\.coded: .*{text}"
    )


class NotArrays(Own):
    """Keep a state that is not made of arrays, on one side.

    Args:
        make: the function that returns this state, "client_slot" or "server_slot".
        slot: the state.
    """

    make: str = static(default="client_slot")
    slot: object = static(default="text")

    def client_slot(self, method, problem, x, y):
        return self.slot if self.make == "client_slot" else None

    def server_slot(self, method, x, y):
        return self.slot if self.make == "server_slot" else None


@pytest.mark.parametrize("make", ["client_slot", "server_slot"])
@pytest.mark.parametrize(
    ("slot", "leaf"), [("text", "it is str 'text'"), ((0.0, ("n", jnp.sum)), r"\[1\]\[0\] is str")]
)
def test_the_state_of_a_layer_is_made_of_arrays(make, slot, leaf):
    refused(lambda: run(NotArrays(make=make, slot=slot)), rf"NotArrays\.{make}: .*{leaf}")


@pytest.mark.parametrize(
    ("base", "name", "function", "wanted"),
    [
        (Own, "reply", lambda self, asked, client, run: None, r"\(self, asked, kept, client, run\)"),
        (Compressor, "coded", lambda self, tree, key: tree, r"\(self, tree\)"),
        (fb.parts.Median, "check", lambda self: None, r"\(self, method, problem, clients, x, y\)"),
    ],
)
def test_functions_with_other_arguments_are_refused_when_the_class_is_made(base, name, function, wanted):
    refused(lambda: type("Wrong", (base,), {name: function}), wanted)
    type("Right", (base,), {"_helper": function, name: lambda self, *given, more=None: None})


def test_a_field_that_is_used_as_a_size_is_named_with_the_function_of_the_layer():
    class Share(Compressor):
        share: float = 0.5

        def coded(self, tree):
            count = lambda array: max(1, int(self.share * array.size))  # noqa: E731
            return jax.tree.map(lambda array: array.at[count(array) :].set(0), tree)

    refused(lambda: run(Share()), r"Share\.coded is traced .*static\(")


@pytest.mark.parametrize("resume", slow_but("force", of=[True, "force"]))
def test_a_checkpoint_with_the_state_of_another_layer_is_refused_by_the_name_of_the_layer(resume, tmp_path):
    file = tmp_path / "run.npz"
    run(fb.parts.TopK(), checkpoint=file)
    with pytest.raises(fb.errors.CheckpointError, match=r"the layer TopK, which is missing now; start a new run"):
        run(None, checkpoint=file, resume=resume)

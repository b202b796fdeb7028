"""A site accepts only the layers that its limits name, except those because of which nothing more leaves it."""

from dataclasses import replace

import federations
import jax.numpy as jnp
import optax
import pytest
from federations import TASK, memory

import fedbilevel as fb
from fedbilevel import authoring, parts
from fedbilevel.algorithms.parts.layers import Around
from fedbilevel.algorithms.parts.memory import Memory
from fedbilevel.core.errors import ExchangeError
from fedbilevel.flower.client.limits import LAYERS, Limits, layer_name
from fedbilevel.flower.client.site import ClientRuntime
from fedbilevel.flower.launch.in_process import InProcess
from fedbilevel.flower.refusal import Code
from fedbilevel.flower.server.terms import Terms
from fedbilevel.flower.wire import RequestMessage
from refusals import codes, raises_with, refuses
from test_class_rules import below, classes

METHOD = fb.SimFBO(local_steps=1, batch_size=None, server_lr=0.1, client_lr=0.1)
SHORT = fb.layered(METHOD, parts.TopK(share=0.5))


class Undeclared(authoring.Layer):
    """A user's own layer that does not declare `tells`."""

    kind, place = "undeclared", "kept"


class Declared(authoring.Layer):
    """A user's own layer that declares `tells`."""

    kind, place = "declared", "kept"
    tells = "the client sends a number of its own"


def naming(*layers):
    return replace(federations.FREE, layers=layers)


def greeted(algorithm, limits, problem=None):
    """Return a client's response to the greeting of a server that runs the same method."""
    runtime = ClientRuntime(federations.site(algorithm, 0, problem=problem, limits=limits))
    return runtime.respond(RequestMessage(run=federations.NAME, contract=runtime.general.text), memory())


def test_the_layers_that_a_site_can_name_are_all_layers_of_the_library():
    final = [cls for cls in classes() if issubclass(cls, Around) and not any(below(cls))]
    assert sorted(cls.__name__ for cls in final) == list(LAYERS)


def test_a_run_with_a_layer_that_no_site_accepts_ends_and_runs_if_they_accept_it():
    """A refusal names the layer, what leaves the client because of it, and the option with its value."""
    terms = Terms(join=0.2, deadline=2.0, attempts=1)
    with raises_with(ExchangeError, replies=0) as error:
        federations.solve(SHORT, InProcess(federations.app(SHORT, limits=naming("Krum", "Median")), 6), terms=terms)
    assert {*codes(error).values()} == {Code.LAYER}
    for refusal in error.value.refusals:
        assert all(part in refusal.why for part in ("TopK", "layers = 'Krum, Median'", parts.TopK.tells))
        assert "layers in the node configuration" in refusal.line
    accepted = federations.solve(SHORT, InProcess(federations.app(SHORT, limits=naming("Krum", "TopK")), 6))
    federations.same(accepted, federations.solve(SHORT, InProcess(federations.app(SHORT), 6)))
    federations.moved(accepted)


class Halved(parts.TopK):
    """A user's own class of a layer of the library, whose sentence says nothing of this class."""


class Hidden(authoring.Layer):
    """A user's own layer that gives the name of a module of the library as its own."""

    kind, place = "hidden", "kept"
    __module__ = "fedbilevel.algorithms.parts.top_k"


OWN_OF_HERE = f"{__name__}:"
REFUSED = {
    "TopK": (SHORT, "TopK"),
    "late replies in another wrapper": (fb.layered(fb.Submodels(METHOD), fb.Asynchronous(wait_for=2)), "Asynchronous"),
    "late replies": (fb.Asynchronous(METHOD, wait_for=2), "Asynchronous"),
    "a robust rule": (fb.layered(METHOD, parts.Krum()), "Krum"),
    "steps that adapt": (fb.SimFBO(local_steps=1, batch_size=None), "AdaptiveSteps"),
    "an own layer": (fb.layered(METHOD, Declared()), f"{OWN_OF_HERE}Declared"),
    "an own layer without `tells`": (fb.layered(METHOD, Undeclared()), f"{OWN_OF_HERE}Undeclared"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_layer_is_refused_unless_it_is_named(case):
    algorithm, name = REFUSED[case]
    refused = greeted(algorithm, naming())
    assert refused.code == Code.LAYER.word
    assert f"the layer {name} (layers = ''): " in refused.refused
    assert refused.contract == ""
    assert greeted(algorithm, naming(name)).refused == ""
    assert greeted(algorithm, federations.FREE).refused == ""


def test_one_of_two_layers_is_not_enough():
    both = fb.layered(SHORT, fb.Asynchronous(wait_for=2))
    assert "the layers TopK, Asynchronous " in greeted(both, naming()).refused
    assert "the layer Asynchronous " in greeted(both, naming("TopK")).refused
    assert "the layer TopK " in greeted(both, naming("Asynchronous")).refused
    assert greeted(both, naming("Asynchronous", "TopK")).refused == ""


ALWAYS = {
    "no layer": (METHOD, {}),
    "own leaves of y": (METHOD, {"own": lambda path: True}),
    "own blocks of x": (METHOD, {"local": "x"}),
    "x in a set": (METHOD, {"project_x": lambda x: jnp.clip(x, -1, 1)}),
    "an optimizer of x": (fb.OuterOptimizer(METHOD, optimizer=optax.sgd(1.0)), {}),
}


def test_a_layer_that_claims_to_be_of_the_library_is_refused():
    assert greeted(fb.layered(METHOD, Hidden()), naming(*LAYERS)).code == Code.LAYER.word


def test_a_layer_in_a_field_of_another_layer_counts():
    nested = fb.layered(METHOD, Memory(compressor=Halved(share=0.5)))
    refused = greeted(nested, naming("Memory"))
    assert f"the layer {OWN_OF_HERE}Halved (layers = 'Memory'): " in refused.refused
    assert "does not declare" in refused.refused
    assert parts.TopK.tells not in refused.refused
    assert greeted(nested, naming("Memory", f"{OWN_OF_HERE}Halved")).refused == ""


@pytest.mark.parametrize("case", ALWAYS)
def test_what_a_problem_requires_and_what_sends_nothing_more_is_always_accepted(case):
    algorithm, of_problem = ALWAYS[case]
    problem = fb.Bilevel(TASK.problem.outer, TASK.problem.inner, **of_problem)
    runtime = ClientRuntime(federations.site(algorithm, 0, problem=problem, limits=naming()))
    assert (case == "no layer") == (runtime.site.algorithm is METHOD)
    assert greeted(algorithm, naming(), problem).refused == ""
    assert "layers" not in runtime.described()


def test_privacy_of_the_site_itself_is_always_accepted(tmp_path):
    privacy = fb.Privacy(clip=1.0, noise_multiplier=1.0, delta=1e-5)
    site = federations.site(METHOD, 0, limits=naming(), privacy=privacy, folder=tmp_path)
    runtime = ClientRuntime(site)
    asked = RequestMessage(run=federations.NAME, contract=runtime.general.text)
    assert runtime.respond(asked, memory()).refused == ""


def test_names_of_layers_are_checked():
    """A misspelt name is an error. A name with a module is that of a user's own layer, which the site cannot check."""
    with refuses("layer of Limits.layers", "TopKK", near="TopK"):
        Limits(layers=["Median", "TopKK"])
    with refuses("layer of Limits.layers", "Undeclared"):
        Limits(layers=["Undeclared"])
    with refuses("layer of Limits.layers", "fedbilevel.parts:TopK"):
        Limits(layers=["fedbilevel.parts:TopK"])
    for wrong in ("TopK", 3, [parts.TopK()], {"TopK": 1}):
        with refuses("Limits.layers", wrong):
            Limits(layers=wrong)
    assert layer_name(Undeclared()) == f"{OWN_OF_HERE}Undeclared"
    assert Limits(layers=[layer_name(Undeclared())]).layers == (f"{OWN_OF_HERE}Undeclared",)
    assert Limits.of({"layers": " TopK,Median , "}).layers == ("TopK", "Median")
    assert Limits.of({"layers": ""}).layers == ()
    assert Limits.of({}).layers is None


def test_a_site_describes_what_leaves_it_because_of_each_layer():
    both = fb.layered(SHORT, Undeclared())
    described = ClientRuntime(federations.site(both, 0)).described()["layers"]
    assert described.startswith(f"{OWN_OF_HERE}Undeclared: ")
    assert described.endswith(f"; TopK: {parts.TopK.tells}")

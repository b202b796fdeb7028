"""May an exchange name only the algorithm's own phases?"""

from types import SimpleNamespace

import jax.numpy as jnp
import pytest

import fedbilevel as fb
from fedbilevel import authoring
from fedbilevel.core.algorithm import ALGORITHMS
from refusals import refuses


class Keeps(authoring.Algorithm):
    """Count the rounds in which a client took part."""

    def init(self, x, y):
        return SimpleNamespace(x=x, y=y)

    def init_client(self, x, y):
        return {"seen": jnp.zeros((), int)}

    def round(self, fed, state, key):
        return state

    def unmarked(self, client, message, key):
        return authoring.Reply(message)

    @authoring.phase
    def visit(self, client, message, key):
        return authoring.Reply(message, state={"seen": client.state["seen"] + 1})


def test_the_allow_list_is_what_is_marked():
    assert set(Keeps().phases) == {"visit"}
    assert set(fb.SimFBO().phases) == {"local_updates"}
    assert set(fb.ShroFBO().phases) == {"normalised_updates"}
    assert set(fb.Asynchronous(fb.SimFBO(), wait_for=1).phases) == {"local_updates"}


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda client, message, key: authoring.Reply(message), "<lambda>"),
        (Keeps.visit, "visit"),
        # an equal configuration, but another object, whose fields may differ from those of the client
        (Keeps().visit, "visit"),
        (fb.SimFBO().local_updates, "local_updates"),
        (Keeps().unmarked, "unmarked"),
        ("visit", "'visit'"),
    ],
)
def test_anything_else_is_refused(function, named):
    with refuses("", fact=f"['visit'], got {named}", where="Keeps"):
        Keeps().phase_name(function)


def test_a_method_without_the_mark_is_refused_though_it_is_the_algorithms():
    algorithm = Keeps()
    with refuses("", fact="got unmarked of a Keeps", where="Keeps"):
        algorithm.phase_name(algorithm.unmarked)


@pytest.mark.parametrize("engine", [fb.Local(), fb.Reference()])
def test_a_round_that_sends_code_is_stopped_in_every_engine(engine):
    class SendsCode(fb.SimFBO):
        def round(self, fed, state, key):
            return state._replace(
                iterate=fed.mean(lambda client, message, key: authoring.Reply(message), state.iterate, key)
            )

    loss = lambda x, y, batch: jnp.mean((y - batch) ** 2) + x**2  # noqa: E731
    clients = fb.Clients([jnp.ones(2).__array__()], [jnp.ones(2).__array__()])
    with refuses("", fact="['local_updates'], got <lambda>", where="SendsCode"):
        fb.solve(SendsCode(), fb.Bilevel(loss, loss), clients, jnp.ones(()), jnp.ones(()), rounds=1, engine=engine)


def test_a_method_without_a_round_is_no_algorithm():
    class Half(authoring.Algorithm):
        def init(self, x, y):
            return x

    with pytest.raises(TypeError, match="round"):
        Half()


def made(name, **body):
    """Return a class with this name on the command line, as a user's module would define it."""
    return type("Made", (Keeps,), {"name": name, "__module__": "users", "__qualname__": "Made", **body})


def test_a_class_with_a_name_is_listed(monkeypatch):
    monkeypatch.setattr("fedbilevel.core.algorithm.ALGORITHMS", dict(ALGORITHMS))
    from fedbilevel.core import algorithm

    first = made("made-up")
    assert algorithm.ALGORITHMS["made-up"] is first
    # the class of a notebook's cell that was run twice
    assert made("made-up") is algorithm.ALGORITHMS["made-up"] is not first
    assert "Keeps" not in {cls.__name__ for cls in algorithm.ALGORITHMS.values()}  # `Keeps` has no name


def test_a_name_is_taken_once():
    before = dict(ALGORITHMS)
    with refuses("Made.name", "simfbo", "SimFBO"):
        made("simfbo")
    assert before == ALGORITHMS

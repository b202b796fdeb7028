"""Are arguments that do not fit together refused with a sentence, before anything is compiled?"""

import importlib.util
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.authoring import XY, Algorithm, Reply, phase, static
from refusals import ANY, refuses, warns_with


def outer(x, y, batch):
    return jnp.mean((batch["u"] @ y["w"] + y["b"] - batch["t"]) ** 2)


def inner(x, y, batch):
    return outer(x, y, batch) + jnp.sum(jnp.exp(x) * y["w"] ** 2)


def entries(features=3):
    return [{"u": np.ones((n, features), np.float32), "t": np.ones(n, np.float32)} for n in (4, 2)]


PROBLEM, CLIENTS = fb.Bilevel(outer, inner), fb.Clients(entries(), entries())
X, Y = jnp.zeros(3), {"w": jnp.zeros(3), "b": jnp.zeros(())}
WRONG = {
    "a list for clients": (
        {"clients": entries()},
        ("", ANY, "fedbilevel.Clients(outer, inner"),
    ),
    "a function for the problem": ({"problem": outer}, ("problem", ANY, "Bilevel")),
    "whole numbers": (
        {"x0": np.zeros(3, int)},
        ("x0", ANY, "0.0"),
    ),
    "x0 of another shape": (
        {"x0": jnp.zeros(2)},
        ("", ANY, "x: shape (2,); y: ['b'] (), ['w'] (3,); batch: "),
    ),
    "y0 of another shape": (
        {"y0": {"w": jnp.zeros(5), "b": jnp.zeros(())}},
        ("", ANY, "['w'] (5,); batch: ['t'] (1,), ['u'] (1, 3)"),
    ),
    "other samples": (
        {"clients": fb.Clients(entries(4), entries())},
        ("", ANY, "x: shape (3,); y: ['b'] (), ['w'] (3,); batch: ['t'] (1,), ['u'] (1, 4)"),
    ),
    "a missing key": (
        {"clients": fb.Clients([{"v": np.ones(2)}], entries()[:1])},
        ("", ANY, "KeyError: 'u'"),
    ),
    "a metric of one argument": (
        {"metrics": {"m": lambda x: 0.0}},
        ("metrics['m']", "(x)", "(x, y)"),
    ),
    "a metric that fails": (
        {"metrics": {"m": lambda x, y: y["q"]}, "engine": fb.Reference()},
        ("", ANY, "KeyError: 'q'"),
    ),
    "columns taken for an array": (
        {"problem": fb.Bilevel(lambda x, y, batch: batch[:, 0].sum(), inner)},
        ("", ANY, "batch['t']"),
    ),
    "a list for an array": (
        {"x0": [0.0, 0.0, 0.0]},
        ("", ANY, "x[0]; np.asarray"),
    ),
    "a list within y0": (
        {"y0": {"w": [0.0, 0.0, 0.0], "b": 0.0}},
        ("", ANY, "y['w'][0]; np.asarray"),
    ),
    "no return": (
        {"problem": fb.Bilevel(lambda x, y, batch: None, inner)},
        ("", ANY, "without `return`?", "", "the outer loss"),
    ),
    "a loss and more": (
        {"problem": fb.Bilevel(outer, lambda *given: (inner(*given), given[1]))},
        ("", ANY, "a tuple: return only the loss", "", "the inner loss"),
    ),
    "a callback without a list": ({"callbacks": fb.stop_when("m", above=1)}, ("callbacks", ANY, "list")),
    "callbacks that are used up": ({"callbacks": iter([print])}, ("callbacks", ANY, "list")),
    "a metric for each client without a name": ({"metrics_per_client": outer}, ("metrics_per_client",)),
    "a metric called 3": ({"metrics": {3: lambda x, y: 0.0}}, ("the name of a metric", 3)),
    "a callback of one argument": (
        {"callbacks": [lambda row: None]},
        ("callbacks[0]", "(row)", "(result, row)"),
    ),
}


def run(**changed):
    given = {"problem": PROBLEM, "clients": CLIENTS, "x0": X, "y0": Y, "rounds": 2} | changed
    return fb.solve(fb.SimFBO(local_steps=1, batch_size=2), **given)


@pytest.mark.parametrize("field", ["key", "x0"])
def test_a_run_within_a_transformation_is_refused(field):
    values = {"key": jax.random.split(jax.random.key(0)), "x0": jnp.zeros((2, 3))}[field]
    with refuses(field, "traced by JAX", "jax.vmap"):
        jax.vmap(lambda value: run(**{field: value}).x)(values)


LIKE_TORCH = """
def mse_loss(one, other):
    return one.size() - other.size()

class Tensor:
    detach = backward = None
"""
"""A stand-in for PyTorch, which may not be installed."""


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y, batch: sys.modules["torch"].mse_loss(y["w"], batch["t"]),
        lambda x, y, batch: y["w"].detach().sum(),
        lambda x, y, batch: y["w"].sum().backward(),
    ],
)
def test_pytorch_in_a_loss_is_answered_with_from_torch(loss, tmp_path, monkeypatch):
    """A loss that uses PyTorch is answered with from_torch.

    Either a line of PyTorch fails, or the loss uses a method that JAX's arrays lack. The original errors say neither.
    """
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(LIKE_TORCH)
    spec = importlib.util.spec_from_file_location("torch", tmp_path / "torch" / "__init__.py")
    monkeypatch.setitem(sys.modules, "torch", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(sys.modules["torch"])
    with refuses("", fact="fedbilevel.torch.from_torch("):
        run(problem=fb.Bilevel(loss, inner))


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused_with_what_was_given(case):
    changed, refusal = WRONG[case]
    with refuses(*refusal) as raised:
        run(**changed)
    # the cause is the user's own error
    assert isinstance(raised.value.__cause__, TypeError) or not case.endswith("0 of another shape")


@pytest.mark.parametrize(
    ("make", "refusal"),
    [
        (
            lambda: fb.Bilevel(lambda x, y: 0.0, inner),
            ("Bilevel.outer", "(x, y)", "(x, y, batch)"),
        ),
        (
            lambda: fb.Bilevel(outer, lambda x, y, batch, more: 0.0),
            ("Bilevel.inner", "(x, y, batch, more)", "(x, y, batch)"),
        ),
        (
            lambda: fb.Minimax(lambda x, y: 0.0),
            ("Minimax.loss", "(x, y)", "(x, y, batch), or (x, y, batch, key)"),
        ),
        (
            lambda: fb.Compositional(outer, lambda x, b: x),
            ("Compositional.outer", "(x, y, batch)", "(y, batch), or (y, batch, key)"),
        ),
        (
            lambda: fb.SingleLevel(outer),
            ("SingleLevel.loss", "(x, y, batch)", "(x, batch), or (x, batch, key)"),
        ),
        (
            lambda: fb.SimpleBilevel(outer, lambda x, b: 0.0, fb.projections.ball(1.0)),
            ("SimpleBilevel.outer", "(x, y, batch)", "(x), or None"),
        ),
    ],
)
def test_losses_with_other_arguments_are_refused_when_the_problem_is_made(make, refusal):
    with refuses(*refusal):
        make()


def test_losses_may_take_their_arguments_in_any_way():
    """Losses are called by position, so that all signatures that Python allows, and none at all, are accepted."""
    for loss in (lambda *a: 0.0, jax.jit(outer), lambda x, y, batch, scale=2.0: 0.0, np.hypot):
        fb.Bilevel(loss, loss)


class Wrong(Algorithm):
    """A method whose phase has a mistake, or draws numbers that only JAX's own keys support."""

    mistake: bool = static(default=True)

    def init(self, x, y):
        return XY(x, y)

    @phase
    def draw(self, client, message, key):
        TRACED.append(self.mistake)
        return Reply(jnp.ones(3) @ jnp.ones(2) if self.mistake else jax.random.poisson(key, 3.0, (3,)))

    def round(self, fed, state, key):
        return state._replace(x=fed.mean(self.draw, state.x, key).astype(state.x.dtype))


TRACED: list[bool] = []


def test_a_mistake_in_a_method_is_met_once_and_keys_of_jaxs_own_kind_are_found():
    with pytest.raises(TypeError, match="dot_general") as found:
        fb.solve(Wrong(), PROBLEM, CLIENTS, X, Y, rounds=2)
    assert found.value.__context__ is None
    assert TRACED.count(True) == 1
    drawn = fb.solve(Wrong(mistake=False), PROBLEM, CLIENTS, X, Y, rounds=2).x
    reference = fb.solve(Wrong(mistake=False), PROBLEM, CLIENTS, X, Y, rounds=2, engine=fb.Reference()).x
    np.testing.assert_array_equal(drawn, reference)


def test_a_whole_number_in_a_start_is_warned_of_since_it_stays():
    loss = fb.SingleLevel(lambda x, batch: jnp.sum(x["a"] ** 2) + x["b"] + jnp.mean(batch["t"]))
    with warns_with(fb.errors.InfluenceWarning, "x0['b'] = 0 "):
        result = fb.solve(fb.FedAvg(), loss, fb.Clients(entries()), {"a": np.ones(2), "b": 0}, rounds=1)
    assert result.x["b"] == 0

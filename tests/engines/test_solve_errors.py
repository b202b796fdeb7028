"""Are arguments that do not fit together refused with a sentence, before anything is compiled?"""

import importlib.util
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.authoring import XY, Algorithm, Reply, phase, static


def outer(x, y, batch):
    return jnp.mean((batch["u"] @ y["w"] + y["b"] - batch["t"]) ** 2)


def inner(x, y, batch):
    return outer(x, y, batch) + jnp.sum(jnp.exp(x) * y["w"] ** 2)


def entries(features=3):
    return [{"u": np.ones((n, features), np.float32), "t": np.ones(n, np.float32)} for n in (4, 2)]


PROBLEM, CLIENTS = fb.Bilevel(outer, inner), fb.Clients(entries(), entries())
X, Y = jnp.zeros(3), {"w": jnp.zeros(3), "b": jnp.zeros(())}
GIVEN = r"; it was given x: shape \(3,\); y: \['b'\] \(\), \['w'\] \(3,\); batch: \['t'\] \(1,\), \['u'\] "
WRONG = {
    "a list for clients": (
        {"clients": entries()},
        r"clients = an object of type list is not allowed: .*fedbilevel\.Clients\(outer, inner",
    ),
    "a function for the problem": ({"problem": outer}, "problem = <function outer .* it must be a Bilevel, Minimax"),
    "whole numbers": (
        {"x0": np.zeros(3, int)},
        r"x0 = .* one array of floats \(write 0\.0 in place of 0, or use \.ast",
    ),
    "x0 of another shape": (
        {"x0": jnp.zeros(2)},
        r"the inner loss fails \(TypeError: .*\(2,\).*; it was given x: shape \(2,\); y: .*\['w'\] \(3,\); batch",
    ),
    "y0 of another shape": (
        {"y0": {"w": jnp.zeros(5), "b": jnp.zeros(())}},
        r"the outer loss fails \(TypeError: .*y: .*\['w'\] \(5,\); batch: \['t'\] \(1,\), \['u'\] \(1, 3\)$",
    ),
    "other samples": (
        {"clients": fb.Clients(entries(4), entries())},
        r"the outer loss fails \(.*" + GIVEN + r"\(1, 4\)$",
    ),
    "a missing key": (
        {"clients": fb.Clients([{"v": np.ones(2)}], entries()[:1])},
        r"the outer loss fails \(KeyError: 'u'\).* batch: \['v'\] \(1,\)$",
    ),
    "a metric of one argument": (
        {"metrics": {"m": lambda x: 0.0}},
        r"metrics\['m'\] takes \(x\); .* a function \(x, y\)",
    ),
    "a metric that fails": (
        {"metrics": {"m": lambda x, y: y["q"]}, "engine": fb.Reference()},
        r"metrics\['m'\] fails \(KeyError: 'q'\); it was given x: shape \(3,\); y: ",
    ),
    "columns taken for an array": (
        {"problem": fb.Bilevel(lambda x, y, batch: batch[:, 0].sum(), inner)},
        r"batch is a dict with parts such as batch\['t'\]; .* such as frame\.to_numpy\(\)$",
    ),
    "a list for an array": (
        {"x0": [0.0, 0.0, 0.0]},
        r"x is a list with .* x\[0\]; np\.asarray turns it into one array$",
    ),
    "a list within y0": (
        {"y0": {"w": [0.0, 0.0, 0.0], "b": 0.0}},
        r"y\['w'\] is a list with parts such as y\['w'\]\[0\]; np\.asarray turns it into one array$",
    ),
    "no return": (
        {"problem": fb.Bilevel(lambda x, y, batch: None, inner)},
        r"^the outer loss must return one real number .*; it returned None: does it end without `return`\?$",
    ),
    "a loss and more": (
        {"problem": fb.Bilevel(outer, lambda *given: (inner(*given), given[1]))},
        r"^the inner loss must return one real number .*; it returned 5 numbers: 0 \(\) float\d\d, 1\.b",
    ),
    "a callback without a list": ({"callbacks": fb.stop_when("m", above=1)}, r"callbacks = .* a list of functions"),
    "callbacks that are used up": ({"callbacks": iter([print])}, r"callbacks = .* a list of functions"),
    "a metric for each client without a name": ({"metrics_per_client": outer}, r"metrics_per_client = .* by name"),
    "a metric called 3": ({"metrics": {3: lambda x, y: 0.0}}, r"the name of a metric = 3 .* a text"),
    "a callback of one argument": (
        {"callbacks": [lambda row: None]},
        r"callbacks\[0\] takes \(row\); .*\(result, row\)",
    ),
}


def run(**changed):
    given = {"problem": PROBLEM, "clients": CLIENTS, "x0": X, "y0": Y, "rounds": 2} | changed
    return fb.solve(fb.SimFBO(local_steps=1, batch_size=2), **given)


@pytest.mark.parametrize("field", ["key", "x0"])
def test_a_run_within_a_transformation_is_refused(field):
    values = {"key": jax.random.split(jax.random.key(0)), "x0": jnp.zeros((2, 3))}[field]
    with pytest.raises(fb.errors.ConfigurationError, match=f"^{field} is traced by JAX: a run cannot be"):
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
    with pytest.raises(fb.errors.ConfigurationError, match=r"the outer loss fails .*fedbilevel\.torch\.from_torch\("):
        run(problem=fb.Bilevel(loss, inner))


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused_with_what_was_given(case):
    changed, words = WRONG[case]
    with pytest.raises(fb.errors.ConfigurationError, match=words) as raised:
        run(**changed)
    # the cause is the user's own error
    assert isinstance(raised.value.__cause__, TypeError) or "TypeError" not in words


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: fb.Bilevel(lambda x, y: 0.0, inner),
            r"Bilevel\.outer takes \(x, y\); it must be a function \(x, y, batch\)",
        ),
        (lambda: fb.Bilevel(outer, lambda x, y, batch, more: 0.0), r"Bilevel\.inner takes \(x, y, batch, more\); "),
        (
            lambda: fb.Minimax(lambda x, y: 0.0),
            r"Minimax\.loss takes \(x, y\); .*\(x, y, batch\), or \(x, y, batch, key\) if it draws random numbers$",
        ),
        (
            lambda: fb.Compositional(outer, lambda x, b: x),
            r"Compositional\.outer takes .*\(y, batch\), or \(y, batch, key\) if it draws random numbers$",
        ),
        (
            lambda: fb.SingleLevel(outer),
            r"SingleLevel\.loss takes .*\(x, batch\), or \(x, batch, key\) if it draws random numbers$",
        ),
        (
            lambda: fb.SimpleBilevel(outer, lambda x, b: 0.0, fb.projections.ball(1.0)),
            r"SimpleBilevel\.outer .*\(x\), or None",
        ),
    ],
)
def test_losses_with_other_arguments_are_refused_when_the_problem_is_made(make, words):
    with pytest.raises(fb.errors.ConfigurationError, match=words):
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
    with pytest.warns(fb.errors.InfluenceWarning, match=r"x0\['b'\] = 0 is a whole number and stays .* write 0\.0 "):
        result = fb.solve(fb.FedAvg(), loss, fb.Clients(entries()), {"a": np.ones(2), "b": 0}, rounds=1)
    assert result.x["b"] == 0

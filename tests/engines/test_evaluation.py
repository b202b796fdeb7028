"""Is each metric one finite number, and does the compiled program get its data as arguments, not as constants?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.core.errors import NonFiniteError
from fedbilevel.core.tree import split
from fedbilevel.engines.evaluation import Evaluation
from refusals import raises_with, refuses

X, Y = jnp.array([1.0, 2.0]), {"w": jnp.array([3.0])}
NONE = {"w": None}  # y has no fixed leaves


def evaluate(metric, x=X, y=Y, round=7):
    return Evaluation({"m": metric}, None, NONE)(round, x, y)["m"]


def test_metrics_are_computed_by_name():
    evaluation = Evaluation(
        {"sum": lambda x, y: jnp.sum(x) + y["w"][0], "count": lambda x, y: jnp.sum(x > 1), "one": lambda x, y: 1.0},
        None,
        NONE,
    )
    row = evaluation(0, X, Y)
    assert row == {"sum": 6.0, "count": 1.0, "one": 1.0}
    assert all(type(value) is float for value in row.values())
    assert evaluation(1, 2 * X, Y)["sum"] == 9.0


def test_a_metric_is_traced_once():
    calls = []
    evaluation = Evaluation({"m": lambda x, y: calls.append(1) or jnp.sum(x)}, None, NONE)
    assert [evaluation(r, X * r, Y)["m"] for r in range(4)] == [0.0, 3.0, 6.0, 9.0]
    assert len(calls) == 1


def test_a_metric_sees_the_whole_model():
    model = {"w": jnp.array([0.5]), "activation": jnp.exp, "depth": 2}
    variable, fixed = split(model)
    metric = lambda x, y: x["activation"](x["w"])[0] * x["depth"]  # noqa: E731
    assert Evaluation({"m": metric}, fixed, NONE)(0, variable, Y)["m"] == pytest.approx(2 * np.exp(0.5), rel=1e-15)


@pytest.mark.parametrize(
    ("metric", "shape"),
    [
        (lambda x, y: x, ["float64[2]"]),
        (lambda x, y: y["w"], ["float64[1]"]),
        (lambda x, y: (x[0], x[1]), ["float64[]", "float64[]"]),
        (lambda x, y: None, []),
        (lambda x, y: 1j * x[0], ["complex128[]"]),
        (lambda x, y: jax.random.key(0), ["key<fry>[]"]),
    ],
)
def test_a_metric_that_is_not_one_number_is_refused(metric, shape):
    with refuses("the value of metrics['m']", shape, "one real number"):
        evaluate(metric)


@pytest.mark.parametrize(("x", "value"), [(-1.0, "nan"), (0.0, "-inf")])
def test_a_value_that_is_not_finite_stops_and_says_where(x, value):
    with raises_with(NonFiniteError, f"m is {value}", round=7, during="evaluation", client=None, names=("m",)):
        evaluate(lambda x, y: jnp.log(x[0]), x=jnp.array([x]))


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_data_of_a_metric_are_arguments_of_its_program(kind, monkeypatch):
    """The text of a metric's program contains the shape of the data, but none of their 50 000 numbers."""
    data = kind(np.random.default_rng(0).normal(size=(50_000, 2)))
    programs, jit = [], jax.jit

    class Spy:
        def __init__(self, function):
            self.compiled = jit(function)

        def trace(self, *args):
            traced = self.compiled.trace(*args)
            programs.append(traced.lower().as_text())
            return traced

    def metric(x, y):
        return jnp.mean(data @ x)

    monkeypatch.setattr(jax, "jit", Spy)
    value = evaluate(metric)
    assert value == pytest.approx(float(np.mean(np.asarray(data) @ np.asarray(X))), abs=1e-12)
    assert len(programs) == 1
    signature = programs[0].split("@main", 1)[1].split("->")[0]
    assert "tensor<50000x2xf64>" in signature
    assert not [line for line in programs[0].splitlines() if "constant" in line and "50000x2" in line]

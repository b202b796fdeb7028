"""Are losses refused that are not one real number, and are models split and joined again without changes?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.core.problem import Padded, check_losses
from fedbilevel.core.tree import join, nonfinite_leaves, split
from refusals import ANY, refuses

SAMPLES = [np.arange(6.0).reshape(3, 2), np.ones((1, 2))]


def good(x, y, batch):
    return jnp.mean((batch @ y - x) ** 2)


BAD = {
    "a vector": lambda x, y, batch: jnp.mean((batch @ y - x) ** 2, keepdims=True),
    "a value per sample": lambda x, y, batch: (batch @ y - x) ** 2,
    "a complex number": lambda x, y, batch: jnp.mean(batch @ y - x) * 1j,
    "nothing": lambda x, y, batch: None,
    "a tuple": lambda x, y, batch: (jnp.mean((batch @ y - x) ** 2), {}),
}


@pytest.mark.parametrize("which", ["outer", "inner"])
@pytest.mark.parametrize("case", BAD)
def test_a_loss_returns_one_real_number(which, case):
    problem = fb.Bilevel(**{"outer": good, "inner": good, which: BAD[case]})
    got = {
        "a vector": "an array of shape (1,)",
        "a value per sample": "an array of shape (",
        "nothing": "None",
        "a tuple": "a tuple",
    }
    with refuses("", fact=f"it returned {got.get(case, '')}", where=f"the {which} loss"):
        check_losses(problem, jnp.ones(()), jnp.ones(2), SAMPLES[0], SAMPLES[0])


def failing(x, y, batch):
    return batch["a"]


def in_numpy(x, y, batch):
    return jnp.mean(batch @ y) + np.sum(np.exp(x))


@pytest.mark.parametrize(
    ("loss", "line", "fact"),
    [
        (failing, 'return batch["a"]', " x: shape ();"),
        (in_numpy, "return jnp.mean(batch @ y) + np.sum(np.exp(x))", " jnp "),
    ],
)
def test_a_loss_that_fails_is_explained_beginning_with_its_own_line(loss, line, fact):
    place = f"{__file__}:{loss.__code__.co_firstlineno + 1}, `{line}`: the outer loss "
    with refuses("", fact=fact) as error:
        check_losses(fb.Bilevel(loss, good), jnp.ones(()), jnp.ones(2), SAMPLES[0], SAMPLES[0])
    assert str(error.value).startswith(place)
    assert "core/problem.py" not in str(error.value)


def test_a_missing_axis_of_clients_is_explained():
    """If each row became a client, a sample is a single number, and a loss of rows fails with an IndexError."""
    problem = fb.Bilevel(lambda x, y, rows: jnp.mean(rows[:, 0]), good)
    with refuses("", fact="pass rows[None]"):
        check_losses(problem, jnp.ones(()), jnp.ones(2), SAMPLES[0][:, 0], SAMPLES[0])


@pytest.mark.parametrize(
    ("make", "of", "got", "near"),
    [
        (lambda: fb.Bilevel(good, good, x_bounds=(0, 1)), "Bilevel", "x_bounds", "project_x"),
        (lambda: fb.Minimax(good, structur=None), "Minimax", "structur", "structure"),
        (lambda: fb.SimpleBilevel(good, good, projct=1), "SimpleBilevel", "projct", "project"),
        (lambda: fb.Clients(outers=1), "Clients", "outers", "outer"),
        (lambda: fb.Metric(good, higher_is_better=True), "Metric", "higher_is_better", "larger_is_better"),
    ],
)
def test_a_misspelt_argument_is_answered_with_the_nearest(make, of, got, near):
    with refuses(f"argument of {of}", got, near=near):
        make()


@pytest.mark.parametrize(
    ("call", "refusal"),
    [
        (
            lambda: fb.solve(round=3),
            ("argument of solve", "round", "", "rounds"),
        ),
        (lambda: fb.solve(1, 2, 3, 4, rounds=5, seed=6), ("argument of solve", "seed", "", "key")),
        (lambda: fb.solve(1, 2, 3, 4), ("", ANY, "'rounds'", "", "solve")),
        (lambda: fb.solve(1, 2, 3, 4, 5, 6), ("", ANY, "too many positional arguments", "", "solve")),
        (lambda: fb.Clients.split(SAMPLES), ("", ANY, "'seed'", "", "Clients.split")),
        (lambda: fb.Clients.split(SAMPLES, sed=0), ("argument of Clients.split", "sed", "", "seed")),
        (
            lambda: fb.Bilevel(good),
            ("", ANY, "'inner'", "", "Bilevel"),
        ),
        (lambda: fb.SimFBO(0.1), ("", ANY, "batch_size", "", "SimFBO")),
    ],
)
def test_a_call_that_does_not_fit_is_answered_in_one_sentence(call, refusal):
    with refuses(*refusal) as error:
        call()
    assert "\n" not in str(error.value)


def test_checking_computes_nothing():
    def loss(x, y, batch):
        calls.append(isinstance(x, jax.core.Tracer))
        return good(x, y, batch)

    calls: list[bool] = []
    check_losses(fb.Bilevel(loss, loss), jnp.ones(()), jnp.ones(2), SAMPLES[0], SAMPLES[0])
    assert calls
    assert all(calls)


@pytest.mark.parametrize("which", ["outer", "inner"])
def test_a_problem_is_made_of_functions(which):
    with refuses(f"Bilevel.{which}", 3, "(x, y, batch)"):
        fb.Bilevel(**{"outer": good, "inner": good, which: 3})


TREE = {
    "weight": np.ones((2, 3), np.float32),
    "half": jnp.ones(2, jnp.bfloat16),
    "number": 0.5,
    "count": 3,
    "table": np.arange(4),
    "mask": np.array([True, False]),
    "key": jax.random.key(0),
    "activation": jnp.tanh,
    "name": "linear",
    "nothing": None,
}


def test_split_takes_the_floating_leaves_and_join_gives_the_tree_back():
    variable, fixed = split(TREE)
    assert {name for name, leaf in variable.items() if leaf is not None} == {"weight", "half", "number"}
    assert {name for name, leaf in fixed.items() if leaf is None} == {"weight", "half", "number", "nothing"}
    again = join(variable, fixed)
    assert jax.tree.structure(again) == jax.tree.structure(TREE)
    for name in TREE.keys() - variable.keys():
        assert again[name] is TREE[name]
    assert again["half"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(again["weight"], TREE["weight"])


def test_with_fixed_is_the_same_problem_in_the_variables_alone():
    def loss(x, y, batch):
        assert x["power"] == 2
        return jnp.mean(y["activation"](batch @ y["w"]) ** x["power"]) * x["scale"]

    x, y = {"scale": jnp.asarray(0.5), "power": 2}, {"w": jnp.array([1.0, -0.5]), "activation": jnp.sin}
    (x_variable, x_fixed), (y_variable, y_fixed) = split(x), split(y)
    problem = fb.Bilevel(loss, loss)
    fixed = problem.with_fixed(x_fixed, y_fixed)
    value, gradients = jax.value_and_grad(fixed.inner, (0, 1))(x_variable, y_variable, SAMPLES[0])
    assert float(value) == float(loss(x, y, SAMPLES[0]))
    assert jax.tree.structure(gradients) == jax.tree.structure((x_variable, y_variable))


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_what_is_not_finite_is_found_and_named(bad):
    tree = {"a": jnp.ones(3), "b": [np.arange(2), np.array([1.0, bad])]}
    assert nonfinite_leaves(tree) == ["['b'][1]"]
    assert nonfinite_leaves(jnp.asarray(bad)) == ["value"]
    tree["b"][1] = np.ones(2)
    assert nonfinite_leaves(tree) == []


def test_compositional_losses_take_padded_batches():
    """A padded batch of a compositional problem gives ½‖y − mean r‖², and not a mean of ½‖y − r‖² over samples."""
    problem = fb.Compositional(lambda y, batch: y @ y, lambda x, batch: x * jnp.mean(batch["a"]))
    rows, x, y = {"a": np.array([1.0, 4.0, 7.0])}, jnp.asarray([1.0, 2.0]), jnp.asarray([0.5, -1.0])
    padded = Padded({"a": jnp.asarray([1.0, 4.0, 7.0, 9.0])}, jnp.asarray([True, True, True, False]))
    expected = problem.inner(x, y, rows)
    np.testing.assert_allclose(expected, 0.5 * ((0.5 - 4) ** 2 + (-1 - 8) ** 2), rtol=1e-15)
    np.testing.assert_allclose(problem.over_batches().inner(x, y, padded), expected, rtol=1e-14)
    np.testing.assert_allclose(problem.over_batches().outer(x, y, padded), problem.outer(x, y, rows), rtol=1e-14)


def test_what_a_compositional_loss_makes_of_zero_padding_is_left_out():
    """In a compositional problem, padding of zeros does not reach the mean; log 0 = −∞ times 0 would be NaN."""
    problem = fb.Compositional(lambda y, batch: y, lambda x, batch: jnp.mean(jnp.log(batch)) * x).over_batches()
    rows, (x, y) = jnp.asarray([1.0, 4.0, 7.0]), jnp.asarray([2.0, 0.5])
    padded = Padded(jnp.append(rows, 0.0), jnp.asarray([True, True, True, False]))
    whole, cut = (jax.value_and_grad(problem.inner, 1)(x, y, batch) for batch in (padded, rows))
    np.testing.assert_allclose(whole, cut, rtol=1e-14)


def test_a_minimax_problem_has_one_set_of_samples():
    problem = fb.Minimax(lambda x, y, batch: jnp.mean(batch["a"]) * x @ y - y @ y + x @ x)
    samples = {"a": np.ones((2, 3))}
    with refuses("", fact="a Minimax problem has one loss: leave Clients.inner out"):
        fb.solve(fb.FedNest(), problem, fb.Clients(samples, samples), jnp.ones(2), jnp.ones(2), rounds=1)

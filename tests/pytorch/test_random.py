"""A module of PyTorch that draws random numbers needs a key, and draws from the right distributions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import fedbilevel as fb  # noqa: E402
from fedbilevel.errors import ConfigurationError  # noqa: E402
from fedbilevel.torch import from_torch  # noqa: E402
from fedbilevel.torch import layers as table  # noqa: E402

pytestmark = pytest.mark.torch
KEY = jax.random.key(0)
COUNT = 40_000
ROOM = 5 / COUNT**0.5
"""Five standard errors of a mean of COUNT numbers with variance 1."""


def drawn(name, *args):
    name = f"aten.{name}" if "." in name else f"aten.{name}.default"
    return table.RULES[name](lambda: KEY, *args)


ZERO = jnp.zeros(COUNT)
MOMENTS = {  # name: (a draw, mean, variance)
    "rand": (lambda: drawn("rand", [COUNT]), 1 / 2, 1 / 12),
    "randn": (lambda: drawn("randn", [COUNT]), 0, 1),
    "rand_like": (lambda: drawn("rand_like", ZERO), 1 / 2, 1 / 12),
    "randn_like": (lambda: drawn("randn_like", ZERO), 0, 1),
    "bernoulli": (lambda: drawn("bernoulli", ZERO + 0.3), 0.3, 0.21),
    "bernoulli.p": (lambda: drawn("bernoulli.p", ZERO, 0.3), 0.3, 0.21),
    "uniform": (lambda: drawn("uniform", ZERO, -1.0, 3.0), 1, 4 / 3),
    "normal_functional": (lambda: drawn("normal_functional", ZERO, 1.0, 2.0), 1, 4),
    "dropout": (lambda: drawn("dropout", ZERO + 2, 0.25, True), 2, 4 / 3),  # 2/0.75 with probability 0.75
    "native_dropout": (lambda: drawn("native_dropout", ZERO + 2, 0.25, True)[0], 2, 4 / 3),
}
IN_LAYERS = ["scaled_dot_product_attention.default", "lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input"]


def test_every_operator_that_draws_is_here():
    named = [name if "." in name else f"{name}.default" for name in [*MOMENTS, *IN_LAYERS]]
    assert {f"aten.{name}" for name in named} == table.DRAWING


@pytest.mark.parametrize("name", MOMENTS)
def test_moments(name):
    """Each operator that draws has the right mean and the right variance.

    Means are within 5 standard errors. A squared deviation from the mean has a standard deviation of at most √2 times
    the variance, as it has for normal numbers, so that the bound on variances is at least 7 standard errors.
    """
    draw, mean, variance = MOMENTS[name]
    numbers = np.asarray(draw())
    assert numbers.shape == (COUNT,)
    assert abs(numbers.mean() - mean) < ROOM * variance**0.5
    assert abs(numbers.var() - variance) < 2 * ROOM * variance


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.first, self.second = nn.Linear(4, 4), nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x):
        return self.first(self.a(x)), self.second(self.a(x))


def test_a_module_that_draws_takes_a_key():
    x = torch.ones(2000, 4)
    module = Dropping()
    apply, start = from_torch(module, x)
    with pytest.raises(ConfigurationError, match=r"in first \(Dropout\): .*\.eval\(\).*key=key"):
        apply(start, x.numpy())
    first, second = apply(start, x.numpy(), key=KEY)
    again, _ = apply(start, x.numpy(), key=KEY)
    other, _ = apply(start, x.numpy(), key=jax.random.key(1))
    np.testing.assert_array_equal(first, again)
    whole = np.asarray(module.a(x).detach())
    for one, two in ((first, second), (first, other)):  # each number is doubled or becomes 0, with probability ½ each
        np.testing.assert_allclose(np.where(one == 0, 2 * whole, one), 2 * whole, rtol=1e-6)
        assert abs(np.mean((one != 0) & (two != 0)) - 0.25) < 5 * (0.1875 / first.size) ** 0.5
    apply, start = from_torch(module.eval(), x)
    np.testing.assert_allclose(apply(start, x.numpy())[0], whole, rtol=1e-6)


def test_clients_draw_apart():
    """Two clients that `vmap` computes with two keys draw different numbers."""
    apply, start = from_torch(Dropping(), torch.ones(2, 4))
    first, _ = jax.vmap(lambda key: apply(start, np.ones((50, 4), np.float32), key=key))(jax.random.split(KEY, 2))
    assert np.any((first[0] == 0) != (first[1] == 0))


def test_attention_drops_its_weights():
    """Attention with dropout drops entries of its weights.

    If all values are 1, each output is the sum of the weights that are kept, divided by their share, so its mean is 1.
    """
    q, v = jax.random.normal(KEY, (500, 8, 4)), jnp.ones((500, 8, 1))
    attention = table.RULES["aten.scaled_dot_product_attention.default"]
    sums = np.asarray(attention(lambda: KEY, q, q, v, None, 0.4))
    weights = np.asarray(jax.nn.softmax(q @ q.swapaxes(1, 2) / 2))
    variance = (weights**2).sum(-1).mean() * 0.4 / 0.6
    assert abs(sums.mean() - 1) < 5 * (variance / sums.size) ** 0.5
    assert 0.8 * variance < sums.var() < 1.2 * variance


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_drop_between_them(kind):
    """Recurrent layers have dropout between two layers, and none after the last one.

    The output is that of the second layer on what dropout leaves of the first layer's output.
    """
    module, x = kind(3, 5, 2, dropout=0.5, batch_first=True), torch.randn(4, 6, 3)
    apply, start = from_torch(module, x)
    with pytest.raises(ConfigurationError, match=r"\.eval\(\)"):
        apply(start, x.numpy())
    got, *_ = apply(start, x.numpy(), key=KEY)
    assert np.all(np.asarray(got) != 0)
    one, two = kind(3, 5, batch_first=True), kind(5, 5, batch_first=True)
    with torch.no_grad():
        for name, p in module.named_parameters():
            dict((one if "l0" in name else two).named_parameters())[name.replace("l1", "l0")].copy_(p)
    kept = np.asarray(one(x)[0].detach())
    keys = (jax.random.fold_in(jax.random.fold_in(KEY, n), 0) for n in range(20))
    assert any(_matches(got, two, kept, key) for key in keys)
    apply, start = from_torch(module.eval(), x)
    np.testing.assert_allclose(apply(start, x.numpy())[0], module(x)[0].detach(), atol=1e-6)


def _matches(got, second, kept, key):
    dropped = np.asarray(table.RULES["aten.dropout.default"](lambda: key, jnp.asarray(kept.swapaxes(0, 1)), 0.5, True))
    expected = second(torch.from_numpy(np.array(dropped.swapaxes(0, 1))))[0].detach().numpy()
    return np.allclose(got, expected, atol=1e-6)


def test_dropout_draws_by_the_key_of_a_loss():
    """Dropout draws by the key that a loss gets, so that a run depends on its seed only.

    The loss is linear in the weights, so that a step shows which inputs each of the two samples kept.
    """
    network = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1, bias=False))
    apply, weights = from_torch(network, torch.zeros(1, 3))
    loss = fb.SingleLevel(lambda x, batch, key: jnp.mean(apply(x, batch["u"], key=key)))
    rows = np.arange(1.0, 7.0, dtype=np.float32).reshape(2, 3)
    method = fb.FedAvg(lr=1.0, local_steps=1, batch_size=None)
    moved = [
        fb.solve(method, loss, fb.Clients([{"u": rows}]), weights, rounds=1, key=key, engine=engine).x["1.weight"]
        for key, engine in ((0, fb.Local()), (0, fb.Reference()), (1, fb.Local()))
    ]
    np.testing.assert_allclose(moved[0], moved[1], rtol=1e-5)
    assert not np.allclose(moved[0], moved[2])
    each = 2 * (np.asarray(weights["1.weight"]) - moved[0])  # in each column it is 0, 2u_1, 2u_2, or their sum
    sums = np.array([[0, a, b, a + b] for a, b in 2 * rows.T])
    assert np.all(np.min(np.abs(sums - each.T), axis=1) < 1e-4)

"""A module of PyTorch becomes a function of arrays or is refused, and trained arrays can be loaded into the module."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import fedbilevel as fb  # noqa: E402
from fedbilevel.errors import ConfigurationError  # noqa: E402
from fedbilevel.torch import from_torch, load, parameters, split  # noqa: E402
from refusals import refuses  # noqa: E402

CLOSE = 1e-6  # about ten roundings of numbers of order 1 in float32
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(3, 4, generator=GENERATOR)


def module_of(forward, **parts):
    """Return a module with these parts and this function as its forward, which is called as forward(self, *inputs)."""
    made = type("Made", (nn.Module,), {"forward": forward})()
    for name, part in {"a": nn.Linear(4, 4), **parts}.items():
        setattr(made, name, part)
    return made


def with_buffer(forward):
    made = module_of(forward)
    made.register_buffer("calls", torch.zeros(()))
    return made


def without_gradients(self, x):
    with torch.no_grad():
        h = self.a(x)
    return self.a(h)


def counting(self, x):
    self.calls += 1
    return self.a(x)


def in_place(self, x):
    x += 1
    return self.a(x)


def agree(got, expected, tolerance=CLOSE):
    got, expected = np.asarray(got), expected.detach().numpy()
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)


MOMENTS = nn.Module()
MOMENTS.register_buffer("mean", torch.zeros(4))
MOMENTS.register_buffer("var", torch.ones(4))
REFUSED = {
    "batch norm": (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), r"^1 \(BatchNorm1d\) mixes .*GroupNorm.*Layer"),
    "batch norm without statistics": (nn.BatchNorm1d(4, track_running_stats=False).eval(), "GroupNorm"),
    "functional batch norm": (
        module_of(lambda self, x: nn.functional.batch_norm(self.a(x), None, None, training=True)),
        "mixes the samples of a batch.*GroupNorm",
    ),
    "functional batch norm with statistics": (
        module_of(lambda self, x: nn.functional.batch_norm(self.a(x), *self.b.buffers(), training=True), b=MOMENTS),
        "mixes the samples of a batch and changes b.mean, .* training=True.*GroupNorm",
    ),
    "batch norm trained in forward": (
        module_of(lambda self, x: self.b.train()(self.a(x)), b=nn.BatchNorm1d(4)).eval(),
        r"changes b.running_mean, .*\.train\(\), which \.eval\(\) .* does not undo.*GroupNorm.* from forward",
    ),
    "statistics of instances": (
        nn.Sequential(nn.Unflatten(1, (1, 4)), nn.InstanceNorm1d(1, track_running_stats=True)),
        r"^1 \(InstanceNorm1d\) keeps running statistics.*track_running_stats=False, or call \.eval\(\)",
    ),
    "buffer": (with_buffer(counting), r"changes calls in place: call \.eval\(\)"),
    "input in place": (module_of(in_place), r"changes \w+ in place.*\.clone\(\)"),
    "branch": (module_of(lambda self, x: self.a(x) if x.sum() > 0 else x), "depend on the data.*torch.where"),
    "item": (module_of(lambda self, x: self.a(x) * x.sum().item()), r"in forward \(Made\).*\.item\(\).*keep it"),
    "mask": (module_of(lambda self, x: self.a(x[x > 0].sum() + x)), "torch.where"),
    "no_grad": (module_of(without_gradients), r"no_grad.*\.detach\(\)"),
    "decorated no_grad": (module_of(torch.no_grad()(lambda self, x: self.a(x))), r"no_grad.*\.detach\(\)"),
    "operator": (module_of(lambda self, x: torch.linalg.cholesky(x.T @ x + 1)), r"cholesky.* in forward .*not supp"),
    "cond": (
        module_of(lambda self, x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))),
        "control flow is not supported: use torch.where",
    ),
    "rule's own": (nn.Embedding(4, 3, scale_grad_by_freq=True), r"in forward \(Embedding\): .*scale_grad_by_freq"),
}  # fmt: skip


@pytest.mark.torch
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_function_is_refused_in_one_sentence(name):
    module, said = REFUSED[name]
    example = torch.tensor([1, 2]) if isinstance(module, nn.Embedding) else X
    with pytest.raises(ConfigurationError, match=said) as error:
        from_torch(module, example)
    assert "\n" not in str(error.value)


def test_what_is_no_module_and_no_tensor_is_refused():
    with refuses("module", "function", "torch.nn.Module"):
        from_torch(lambda x: x, X)
    with refuses("module", "OptimizedModule", "module._orig_mod"):
        from_torch(torch.compile(nn.Linear(4, 4)), X)
    with refuses("module", "DataParallel", "module.module"):
        from_torch(nn.DataParallel(nn.Linear(4, 4)), X)
    with refuses("example", 3, "tensor"):
        from_torch(module_of(lambda self, x, n: x * n), X, 3)
    with refuses("batch_axis", -1, "from 0"):
        from_torch(nn.Linear(4, 4), X, batch_axis=-1)


def test_tensors_and_modules_as_variables_are_refused():
    module, rows = nn.Linear(4, 2), np.zeros((2, 3, 4), np.float32)
    problem = fb.Bilevel(lambda x, y, u: jnp.sum(y), lambda x, y, u: jnp.sum(y**2 - x * y))
    for start, said in (dict(module.named_parameters()), r"\['bias'\], a Parameter"), (module, "a Linear"):
        with pytest.raises(ConfigurationError, match=f"^{said} of PyTorch .*from_torch"):
            fb.solve(fb.SimFBO(), problem, fb.Clients(rows), 0.0, start, rounds=1)


def test_inputs_that_differ_from_the_example_are_refused():
    apply, start = from_torch(nn.Linear(4, 2), X)
    with pytest.raises(ConfigurationError, match=r"\(7, 5\).* \(any, 4\).*batch_axis"):
        apply(start, np.zeros((7, 5), np.float32))
    with pytest.raises(ConfigurationError, match="nested in another way"):
        apply(start, np.zeros((7, 4)), np.zeros((7, 4)))
    with pytest.raises(ConfigurationError, match="the parameters lack bias"):
        apply({"weight": start["weight"]}, np.zeros((7, 4)))
    apply, start = from_torch(nn.Embedding(4, 3), torch.tensor([1, 2]))
    with pytest.raises(ConfigurationError, match=r"float32.* int64"):
        apply(start, np.zeros(2, np.float32))


def test_the_batch_may_have_any_length_and_the_example_one_sample():
    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    apply, start = from_torch(module, X[:1])
    for length in (1, 2, 9):
        batch = torch.randn(length, 4, generator=GENERATOR)
        agree(apply(start, batch.numpy()), module(batch))
    recurrent = nn.GRU(4, 5)  # samples on axis 1
    sequence = torch.randn(6, 3, 4, generator=GENERATOR)
    apply, start = from_torch(recurrent, sequence[:, :1], batch_axis=1)
    agree(apply(start, sequence.numpy())[0], recurrent(sequence)[0])
    with pytest.raises(ConfigurationError, match=r"axis 0 .* batch_axis"):
        from_torch(module_of(lambda self, x: self.a(x.view(3, 4))), X)
    fixed, start = from_torch(module, X, batch_axis=None)
    with pytest.raises(ConfigurationError, match=r"\(3, 4\)"):
        fixed(start, np.zeros((2, 4)))


def test_inputs_and_outputs_may_be_nested():
    module = nn.LSTM(4, 5, batch_first=True)
    sequence, h, c = torch.randn(2, 6, 4), torch.randn(1, 2, 5), torch.randn(1, 2, 5)
    apply, start = from_torch(module, sequence, (h, c), batch_axis=None)
    out, (last, _) = apply(start, sequence.numpy(), (h.numpy(), c.numpy()))
    expected, (expected_last, _) = module(sequence, (h, c))
    agree(out, expected)
    agree(last, expected_last)
    named, _ = from_torch(module_of(lambda self, x: {"out": self.a(x["in"]), "none": None}), {"in": X})
    assert named(parameters(module_of(None)), {"in": X.numpy()}).keys() == {"out", "none"}


def test_derivatives_end_where_pytorchs_do():
    """Derivatives stop where PyTorch's do: at `.detach()`, at frozen parameters, and at the norm of a zero array."""
    module = module_of(lambda self, x: self.b(self.a(x).tanh().detach()) + x.mul(0).norm(), b=nn.Linear(4, 4))
    module.b.bias.requires_grad_(False)
    apply, start = from_torch(module, X)
    assert list(start) == ["a.weight", "a.bias", "b.weight"]
    agree(apply(start, X.numpy()), module(X))
    slope, by_input = jax.grad(lambda p, x: jnp.sum(apply(p, x) ** 2), argnums=(0, 1))(start, X.numpy())
    module(X).square().sum().backward()
    assert not np.any(slope["a.weight"])
    assert not np.any(by_input)
    agree(slope["b.weight"], module.b.weight.grad, 1e-5)


def test_tied_parameters_are_one():
    """Tied parameters are one variable with the gradient of PyTorch, and if they are frozen they are no variable."""
    module = module_of(lambda self, x: self.b(self.a(x).relu()), b=nn.Linear(4, 4))
    module.b.weight = module.a.weight
    apply, start = from_torch(module, X)
    assert list(start) == ["a.weight", "a.bias", "b.bias"]
    slope = jax.grad(lambda p: jnp.sum(apply(p, X.numpy()) ** 2))(start)
    module(X).square().sum().backward()
    agree(slope["a.weight"], module.a.weight.grad, 1e-5)
    module.a.weight.requires_grad_(False)
    apply, start = from_torch(module, X)
    assert list(start) == ["a.bias", "b.bias"]
    agree(apply(start, X.numpy()), module(X))


def test_statistics_and_modes_are_those_of_the_module():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    module(torch.randn(50, 4))
    apply, start = from_torch(module.eval(), X)
    agree(apply(start, X.numpy()), module(X))
    module.train()
    assert module(X).shape == (3, 4)
    frozen = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval().requires_grad_(False)
    sequence = torch.randn(3, 5, 8)
    apply, start = from_torch(frozen, sequence)
    assert start == {}
    agree(apply(start, sequence.numpy()), frozen(sequence), 5 * CLOSE)
    assert torch.backends.mha.get_fastpath_enabled()


def test_constants_are_not_taken_for_parameters():
    """A `state_dict` with buffers and frozen or tied parameters is refused as parameters, and each of them is named.

    The buffers are the statistics of batch norm, and the number of batches that they come from, which is an integer.
    """
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).eval()
    module[2].weight = module[0].weight
    module[2].bias.requires_grad_(False)
    apply, start = from_torch(module, X)
    everything = {name: jnp.asarray(a.numpy()) for name, a in module.state_dict().items()}
    fixed = "1.num_batches_tracked, 1.running_mean, 1.running_var, 2.bias, 2.weight"
    with pytest.raises(ConfigurationError, match=f"{fixed}: "):
        apply(everything, X.numpy())
    agree(apply(start | {"head": jnp.ones(3)}, X.numpy()), module(X))  # an entry of another module is allowed


@pytest.mark.torch
def test_a_run_trains_around_the_statistics_of_batch_norm():
    """A run leaves the statistics of batch norm as they were, also the number of batches, which is an integer.

    PyTorch computes the same loss with the result.
    """
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    module(torch.randn(50, 4, generator=GENERATOR))
    before = {name: kept.clone() for name, kept in module.eval().named_buffers()}
    apply, start = from_torch(module, X)
    x0, y0 = split(start, lambda name: not name.startswith("2."))
    u = torch.randn(3, 8, 4, generator=GENERATOR)

    def loss(x, y, batch):
        return jnp.mean((apply(x | y, batch).squeeze(-1) - batch.sum(-1)) ** 2)

    problem = fb.Bilevel(loss, lambda x, y, batch: loss(x, y, batch) + 0.01 * sum(jnp.vdot(w, w) for w in y.values()))
    clients = fb.Clients(u.numpy())
    result = fb.solve(fb.SimFBO(local_steps=2, batch_size=None), problem, clients, x0, y0, rounds=5, progress=False)
    load(module, result.x | result.y)
    assert before.keys() == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert all(torch.equal(kept, before[name]) for name, kept in module.named_buffers())
    flat = u.reshape(-1, 4)
    agree(loss(result.x, result.y, flat.numpy()), ((module(flat).squeeze(-1) - flat.sum(-1)) ** 2).mean(), 1e-5)


def test_an_integer_of_a_buffer_is_not_cut_to_32_bits():
    module = module_of(lambda self, x: self.a(x) * self.calls)
    module.register_buffer("calls", torch.tensor(2**40))
    apply, start = from_torch(module, X)
    agree(apply(start, X.numpy()) / 2**40, module(X) / 2**40)
    with jax.enable_x64(False), pytest.raises(ConfigurationError, match=f"{2**40}.* 32 bits"):
        from_torch(module, X)


def test_parameters_are_copied_out_and_in():
    """Arrays of parameters share no memory with the module, neither when they are read nor after `load`."""
    module = nn.Linear(4, 2)
    before = parameters(module)
    held = np.array(before["weight"])
    with torch.no_grad():
        module.weight.add_(1)
    np.testing.assert_array_equal(before["weight"], held)
    arrays = {"weight": held.astype(np.float64), "bias": np.ones(2)}
    assert load(module, arrays) is module
    arrays["weight"][:] = 0
    agree(held, module.weight, 0)
    assert module.weight.dtype == torch.float32
    assert module.weight.requires_grad


def test_what_does_not_fit_is_not_loaded():
    module = nn.Linear(4, 2)
    before = parameters(module)
    with refuses("parameter", "wieght", near="weight"):
        load(module, {"bias": np.ones(2), "wieght": np.zeros((2, 4))})
    with refuses("weight", (4, 2), "(2, 4)"):
        load(module, {"bias": np.ones(2), "weight": np.zeros((4, 2))})
    agree(before["bias"], module.bias, 0)


def test_one_module_is_divided_by_names():
    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    apply, start = from_torch(module, X)
    x, y = split(start, lambda name: name.startswith("0."))
    assert (list(x), list(y)) == (["0.weight", "0.bias"], ["2.weight", "2.bias"])
    agree(apply(x | y, X.numpy()), module(X))
    with refuses("chosen", "0.", "function"):
        split(start, "0.")
    with refuses("chosen", "true for 0 of 4 names", "0.weight, 0.bias, 2.weight"):
        split(start, lambda name: name.startswith("head."))


def test_arrays_and_tensors_that_are_taken_for_each_other_are_explained():
    with refuses("example", "ndarray", "torch.tensor(array, dtype=…"):
        from_torch(nn.Linear(4, 3), X.numpy())
    for wrong in (nn.Linear(4, 4), torch.sin, torch.from_numpy, lambda y: y * torch.ones(4), torch.as_tensor):
        problem = fb.Bilevel(lambda x, y, batch, wrong=wrong: wrong(y).sum(), lambda x, y, batch: (x * y**2).sum())
        with pytest.raises(ConfigurationError, match=r"the outer loss .*fedbilevel\.torch\.from_torch\("):
            fb.solve(fb.SimFBO(), problem, fb.Clients(np.zeros((2, 3))), 0.0, np.zeros(4), rounds=1)


def test_apply_computes_in_the_dtype_of_the_parameters():
    """The function computes in the dtype of its parameters, also if the module names another dtype."""
    module = module_of(lambda self, x: self.a(x).float() + torch.full((4,), 0.1, dtype=torch.float32))
    apply, start = from_torch(module, X)
    wide = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), start)
    double = module_of(lambda self, x: self.a(x) + 0.1).double()
    load(double, wide)
    got = apply(wide, X.numpy())
    assert got.dtype == jnp.float64
    agree(got, double(X.double()), 1e-7)  # the graph has 0.1 in float32
    half = nn.Linear(4, 4).bfloat16()
    apply, start = from_torch(half, X.bfloat16())
    assert apply(start, X.numpy()).dtype == jnp.bfloat16
    held = half.weight.float()
    agree(load(half, start).weight.float().detach(), held, 0)


def test_promotion_is_pytorchs():
    """Types are promoted as in PyTorch: scalars do not widen arrays, and integers plus floats are floats."""
    forward = lambda self, x: x * torch.tensor(2.0, dtype=torch.float64) + torch.arange(4) + (x > 0).sum()  # noqa: E731
    apply, start = from_torch(module_of(forward), X)
    got = apply(start, X.numpy())
    assert got.dtype == jnp.float32
    agree(got, forward(None, X), 5 * CLOSE)


def test_clients_are_vectorised():
    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    apply, start = from_torch(module, X)
    factors = np.array([0.5, 1.0, 2.0], np.float32)
    stacked = jax.tree.map(lambda a: jnp.stack([a * f for f in factors]), start)
    batches = torch.randn(3, 5, 4, generator=GENERATOR)
    got = jax.jit(jax.vmap(apply))(stacked, batches.numpy())
    for i, factor in enumerate(factors):
        load(module, jax.tree.map(lambda a, f=factor: a * f, start))
        agree(got[i], module(batches[i]))


def test_missing_pytorch_is_named_with_its_command(monkeypatch):
    import fedbilevel.torch

    monkeypatch.setattr(fedbilevel.torch, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"PyTorch.*\[torch\]"):
        _ = fedbilevel.torch.from_torch

"""Each rule has the values, gradients and second derivatives of its operator of PyTorch, in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fedbilevel.torch import layers as table  # noqa: E402

DRAW = np.random.default_rng(0)
# 10⁴ units of rounding; sums of at most a thousand terms of order 1, each of at most three operations, err by far less
CLOSE = 1e-12


def normal(*shape):
    return DRAW.normal(size=shape)


class Fixed(np.ndarray):
    """An array argument, in which an operator of PyTorch cannot be differentiated."""


def fixed(array):
    return array.view(Fixed)


A, B, ROW = normal(2, 3, 4), normal(2, 3, 4), normal(4)
UNIT, ABOVE = DRAW.uniform(0.1, 0.9, (2, 3, 4)), DRAW.uniform(1.1, 2, (2, 3, 4))
WHOLE, OTHER = DRAW.integers(1, 9, (2, 3, 4)), DRAW.integers(1, 9, (2, 3, 4))
MASK, MASKS = A > 0, B > 0.5
TIES = np.array([[0.0, 1.0, 1.0], [-1.0, -1.0, 0.0], [2.0, 0.5, 2.0]])  # kinks, edges and equal maxima
HOLES = np.array([1.0, np.nan, np.inf, -np.inf])
IMAGE, VOLUME = normal(2, 4, 7, 8), normal(1, 2, 4, 5, 4)
SERIES, START = normal(5, 2, 3), normal(4, 2, 6)
ENTRIES = [(A,), (TIES,)]
BOTH = [(A, B), (A, ROW), (TIES, TIES.T.copy()), (A, np.array(0.5))]
NUMBER = [(A, 0.7), (TIES, 1.0)]
COMPARED = [(A, B), (TIES, TIES.T.copy()), (WHOLE, OTHER)]
REDUCED = [(A, [1]), (A, [0, -1], True), (A, [])]
LABELS = np.array([[0, 3], [1, 2]])


def recurrent(gates, layers, both, biases=True, projection=0):
    """Draw the weights of PyTorch's recurrent layers with width 6, for the inputs SERIES."""
    width, directions = 6, 2 if both else 1
    out, weights = projection or width, []
    for layer in range(layers):
        for _ in range(directions):
            inputs = 3 if layer == 0 else directions * out
            weights += [normal(gates * width, inputs), normal(gates * width, out)]
            weights += [normal(gates * width), normal(gates * width)] if biases else []
            weights += [normal(projection, width)] if projection else []
    return [w / 3 for w in weights]


def rest(layers, both, biases=True, first=False):
    return biases, layers, 0.0, False, both, first


STACKED = [
    [recurrent(4, 2, True), *rest(2, True)],
    [recurrent(4, 1, False, biases=False), *rest(1, False, biases=False)],
]


def recurrences(gates, start=START):
    return [
        (SERIES, start, recurrent(gates, 2, True), *rest(2, True)),
        (SERIES, start[:1], recurrent(gates, 1, False, biases=False), *rest(1, False, biases=False)),
        (SERIES.swapaxes(0, 1).copy(), start[:2], recurrent(gates, 2, False), *rest(2, False, first=True)),
    ]


def lstms():
    for x, h, *others in recurrences(4):
        yield (x, [h, h[::-1].copy()], *others)
    projected = recurrent(4, 1, False, projection=2)
    yield (SERIES, [normal(1, 2, 2), START[:1]], projected, *rest(1, False))


CASES = {
    "abs atan asinh ceil cos cosh erf erfc exp exp2 expm1 floor neg relu round sigmoid sign silu sin sinh": ENTRIES,
    "tan tanh trunc detach alias clone lift_fresh_copy logical_not leaky_relu softplus hardtanh gelu": ENTRIES,
    "acos asin atanh erfinv log log10 log1p log2 reciprocal rsqrt sqrt": [(UNIT,)],
    "acosh": [(ABOVE,)],
    "elu": [(A,), (A, 0.5, 2.0, 3.0)],  # without TIES, as its second derivative is not unique at 0
    "isnan": [(HOLES,)],
    "isinf": [(HOLES,)],
    "nan_to_num": [(HOLES,), (HOLES, 3.0, 5.0, -5.0)],
    "bitwise_not": [(WHOLE,), (MASK,)],
    "clamp": [(A, -0.5, 0.5), (TIES, 0.0, 1.0), (A, None, 0.1)],
    "clamp.Tensor": [(A, -abs(B), abs(B)), (A, None, B)],
    "rsub.Tensor mul.Tensor maximum minimum": BOTH,
    "add.Scalar sub.Scalar rsub.Scalar mul.Scalar remainder.Scalar fmod.Scalar div.Scalar": NUMBER,
    "remainder.Tensor fmod.Tensor div.Tensor atan2": [(A, B)],
    "eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor": COMPARED,
    "eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar": NUMBER,
    "bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor": [(WHOLE, OTHER), (MASK, MASKS)],
    "bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar": [(WHOLE, 5)],
    "logical_and logical_or logical_xor": [(MASK, MASKS), (A, B)],
    "add.Tensor": [*BOTH, (A, B, {"alpha": 2.0})],
    "sub.Tensor": [*BOTH, (A, B, {"alpha": 2.0})],
    "div.Tensor_mode": [(A, B, {"rounding_mode": mode}) for mode in (None, "floor", "trunc")],
    "div.Scalar_mode": [(A, 0.3, {"rounding_mode": mode}) for mode in (None, "floor", "trunc")],
    "pow.Tensor_Scalar": [(A, 3), (A, 0), (UNIT, 0.5), (TIES, 2.0), (A, -1)],
    "pow.Scalar": [(2.0, A)],
    "pow.Tensor_Tensor": [(UNIT, B)],
    "where.self": [(MASK, A, B)],
    "where.Scalar": [(MASK, 1.0, 2.0)],
    "where.ScalarSelf": [(MASK, 1.0, B)],
    "where.ScalarOther": [(MASK, A, 2.0)],
    "masked_fill.Scalar": [(A, MASK, 2.0)],
    "masked_fill.Tensor": [(A, MASK, np.array(2.0))],
    "sum": [(A,), (WHOLE,)],
    "sum.dim_IntList": [*REDUCED, (A, [1], False, {"dtype": np.dtype("float32")})],
    "mean": [(A,)],
    "mean.dim": REDUCED,
    "amax": [*REDUCED, (TIES, [1])],
    "amin": [*REDUCED, (TIES, [1])],
    "any all": [(MASK,)],
    "any.dim all.dim": [(MASK, 1), (MASK, -1, True)],
    "any.dims all.dims": [(MASK, [0, 1]), (MASK, None, True)],
    "max min": ENTRIES,
    "max.dim": [(A, 1), (TIES, -1, True)],
    "min.dim": [(A, 1), (TIES, -1, True)],
    "argmax": [(A,), (A, 1), (TIES, -1, True)],
    "argmin": [(A,), (A, 1), (TIES, -1, True)],
    "logsumexp": [(A, [1]), (A, [0, -1], True)],
    "cumsum": [(A, 1)],
    "cumprod": [(A, -1)],
    "prod": [(A,)],
    "prod.dim_int": [(A, 1, True), (TIES, 1)],
    "var.correction": [(A, [1]), (A, None, {"correction": 0.0, "keepdim": True})],
    "std.correction": [(A, [1]), (A, None, {"correction": 0.0, "keepdim": True})],
    "_softmax": [(A, 1, False)],
    "softmax.int": [(A, -1)],
    "_log_softmax": [(A, 1, False)],
    "log_softmax.int": [(A, -1)],
    "linalg_vector_norm": [(A, 2, [1], True), (A, 1), (A, math.inf, [-1])],
    "sort": [(A, 1), (A, -1, True)],
    "topk": [(A, 2, 1), (A, 2, -1, False)],
    "view": [(A, [6, -1])],
    "_unsafe_view": [(A, [4, 6])],
    "reshape": [(A, [-1])],
    "permute": [(A, [2, 0, -2])],
    "transpose.int": [(A, 0, -1)],
    "t": [(A[0],), (ROW,)],
    "squeeze": [(A[:, :1],)],
    "squeeze.dim": [(A[:, :1], 1), (A, 1)],
    "squeeze.dims": [(A[:, :1], [0, 1])],
    "unsqueeze": [(A, -1), (A, 1)],
    "expand": [(A[:, :1], [5, -1, 3, 4])],
    "cat": [([A, B], 1), ([np.zeros(0), A], 0)],
    "stack": [([A, B], -1)],
    "unbind.int": [(A, 1)],
    "repeat": [(A, [2, 1, 3, 1])],
    "flip": [(A, [0, -1])],
    "roll": [(A, [1, -2], [0, 2]), (A, [5])],
    "tril": [(A,), (A, 1)],
    "triu": [(A, -1)],
    "copy": [(A, ROW)],
    "_to_copy": [(A,), (WHOLE, {"dtype": np.dtype("float64")})],
    "sym_size.int": [(A, 1)],
    "sym_numel": [(A,)],
    "split.Tensor": [(A, 2, 1), (A, 3, -1)],
    "split_with_sizes": [(A, [1, 3], 2)],
    "constant_pad_nd": [(A, [1, 2, 0, 3], 0.5), (A, [-1, 1])],
    "empty.memory_format": [([2, 3], {"dtype": np.dtype("float64")})],
    "empty_permuted": [([2, 3], [1, 0], {"dtype": np.dtype("float64")})],
    "full": [([2, 3], 0.5)],
    "full_like": [(A, 0.5), (A, 2, {"dtype": np.dtype("int64")})],
    "scalar_tensor": [(0.5,)],
    "arange.start_step": [(0, 7, 2), (1.0, 2.0, 0.25)],
    "_assert_tensor_metadata": [(A,)],
    "_assert_scalar": [(1, "holds")],
    "_assert_async.msg": [(np.array(True), "holds")],
    "sym_constrain_range": [(3, {"min": 0, "max": 4})],
    "sym_constrain_range_for_size": [(3, {"min": 0, "max": 4})],
    "select.int": [(A, 1, -1)],
    "slice.Tensor": [(A, 1, 1), (A, -1, 0, 9223372036854775807, 2), (A, 0, -1)],
    "gather": [(A[0], 1, LABELS)],
    "index_select": [(A, 1, np.array([2, 0, 0]))],
    "index.Tensor": [
        (A, [None, np.array([2, 0]), np.array([1, -1])]),
        (A, [np.array([[1], [0]]), None, np.array([3, 1])]),
    ],
    "select_scatter": [(A, B[:, 0], 1, 2)],
    "slice_scatter": [(A, B[:, :2], 1, 1)],
    "scatter.src": [(A[0], 1, LABELS, B[0, :2, :2])],
    "scatter.value": [(A[0], 1, LABELS, 2.0)],
    "scatter_add": [(A[0], -1, np.array([[0, 0], [1, 3]]), B[0, :2, :2])],
    "index_add": [(A, 1, np.array([2, 2]), B[:, :2]), (A, 1, np.array([0, 2]), B[:, :2], {"alpha": 2.0})],
    "index_put": [(A, [np.array([1])], B[:1]), (A, [None, np.array([1, 1])], B[:, :2], True)],
    "embedding": [(A[0], LABELS % 3), (A[0], LABELS % 3, 1)],
    "mm": [(A[0], B[0].T.copy())],
    "bmm": [(A, B.swapaxes(1, 2).copy())],
    "matmul": [(A, ROW), (A, B[0].T.copy())],
    "mv": [(A[0], ROW)],
    "dot": [(ROW, B[0, 0])],
    "addmm": [(normal(3), A[0], B[0].T.copy()), (normal(3, 3), A[0], B[0].T.copy(), {"beta": 0.5, "alpha": 2.0})],
    "baddbmm": [(normal(2, 3, 3), A, B.swapaxes(1, 2).copy(), {"beta": 0.5, "alpha": 2.0})],
    "linear": [(A, normal(5, 4), normal(5)), (A, normal(5, 4))],
    "convolution": [
        (IMAGE, normal(6, 2, 3, 3), normal(6), [2, 1], [1, 2], [1, 2], False, [0, 0], 2),
        (IMAGE, normal(4, 1, 3, 2), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 4),
        (IMAGE[:, :, 0], normal(3, 4, 3), normal(3), [2], [1], [1], False, [0], 1),
        (VOLUME, normal(3, 2, 2, 2, 2), None, [1], [1], [1], False, [0], 1),
        (IMAGE, normal(4, 3, 3, 3), normal(6), [2, 3], [1, 0], [1, 2], True, [1, 0], 2),
        (IMAGE[:, :, 0], normal(4, 2, 3), None, [2], [1], [1], True, [1], 1),
    ],
    "scaled_dot_product_attention": [
        (A, B, A + B),
        (A, B, A + B, None, 0.0, True),
        (A, B, A + B, np.tril(np.ones((3, 3), bool), -1), 0.0, False, {"scale": 0.3}),
        (A, B, A + B, normal(3, 3)),
        (normal(2, 4, 3, 5), normal(2, 2, 3, 5), normal(2, 2, 3, 5), {"enable_gqa": True}),
    ],
    "layer_norm": [(A, [4], ROW, B[0, 0], 1e-3), (A, [3, 4])],
    "group_norm": [(IMAGE, 2, normal(4), normal(4), 1e-3), (IMAGE, 4)],
    "_native_batch_norm_legit_no_training": [
        (IMAGE, normal(4), normal(4), fixed(normal(4)), fixed(normal(4) ** 2 + 1), 0.1, 1e-3)
    ],
    "instance_norm": [
        (IMAGE, normal(4), normal(4), None, None, True, 0.1, 1e-3, False),
        (IMAGE, None, None, fixed(normal(4)), fixed(normal(4) ** 2 + 1), False, 0.1, 1e-3, False),
    ],
    "max_pool1d": [(IMAGE[0], [3], [2], [1])],
    "max_pool2d": [
        (IMAGE, [3, 2], [2, 2], [1, 0]),
        (IMAGE, [2, 2], [], 0, 2),
        (IMAGE, [3, 3], [2, 2], [0, 1], 1, True),
    ],
    "max_pool3d": [(VOLUME, [2, 2, 2])],
    "avg_pool1d": [(IMAGE[0], [3], [2], [1])],
    "avg_pool2d": [
        (IMAGE, [3, 2], [2, 2], [1, 1]),
        (IMAGE, [3, 3], [2, 2], [1, 1], True, False),
        (IMAGE, [3, 3], [3, 3], [1, 1], True),
        (IMAGE, [2, 2], [], 0, False, True, 3),
    ],
    "avg_pool3d": [(VOLUME, [2, 2, 2])],
    "adaptive_avg_pool1d": [(IMAGE[0], [3])],
    "adaptive_avg_pool2d": [(IMAGE, [3, 5]), (IMAGE, [1, 1]), (IMAGE, [7, 3])],
    "adaptive_avg_pool3d": [(VOLUME, [2, 3, 4])],
    "adaptive_max_pool2d": [(IMAGE, [3, 5]), (IMAGE, [1, 4]), (IMAGE[0], [7, 2]), (TIES[None], [2, 1])],
    "adaptive_max_pool3d": [(VOLUME, [2, 3, 4])],
    "upsample_nearest1d.vec": [(IMAGE[0], None, [2.0]), (IMAGE[0], [5], None)],
    "upsample_nearest2d.vec": [(IMAGE, None, [2.0, 1.3]), (IMAGE, [10, 3], None), (IMAGE, None, [0.4, 1.0])],
    "upsample_nearest3d.vec": [(VOLUME, None, [2.0, 1.5, 0.5])],
    "upsample_linear1d.vec": [(IMAGE[0], None, False, [2.0]), (IMAGE[0], [1], True, None)],
    "upsample_bilinear2d.vec": [
        (IMAGE, None, False, [2.0, 1.3]),
        (IMAGE, [10, 3], False, None),
        (IMAGE, [10, 3], True, None),
        (IMAGE, None, True, [0.4, 2.0]),
    ],
    "upsample_trilinear3d.vec": [(VOLUME, None, False, [2.0, 1.5, 0.5])],
    "lstm.input": list(lstms()),
    "gru.input": recurrences(3),
    "rnn_tanh.input": recurrences(1),
    "rnn_relu.input": recurrences(1),
    "nll_loss_forward": [
        (A[0], np.array([1, 0, 3]), None, 1, -100),
        (A[0], np.array([1, 0, 3]), fixed(abs(ROW)), 2, 0),
        (ROW, np.array(2), None, 1, -100),
    ],
    "nll_loss2d_forward": [(IMAGE, DRAW.integers(0, 4, (2, 7, 8)), None, 1, 2)],
}

CASES = {
    f"aten.{name}" if "." in name else f"aten.{name}.default": cases
    for names, cases in CASES.items()
    for name in names.split()
}
DRAWN = table.DRAWING - CASES.keys()
"""Operators whose results are random: test_random.py compares their moments."""

NO_DERIVATIVE = ("aten.detach.default", "aten.copy.default")
"""Operators whose derivatives are not compared here.

The derivative of a detached array is 0, which test_bridge.py checks. PyTorch has no derivative of a copy.
"""

UNDEFINED = ("aten.empty.memory_format", "aten.empty_permuted.default")


def operator(name):
    """Return the operator of PyTorch with this name."""
    _, packet, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


def tree_map(tree, leaf):
    return [tree_map(a, leaf) for a in tree] if isinstance(tree, list | tuple) else leaf(tree)


def leaves(tree):
    return [a for part in tree for a in leaves(part)] if isinstance(tree, list | tuple) else [tree]


def is_floating(a):
    return type(a) is np.ndarray and a.dtype == np.float64


def taken_apart(case):
    """Return the arguments and the keyword arguments of a case."""
    return (case[:-1], case[-1]) if isinstance(case[-1], dict) else (case, {})


def by_torch(name, case, weights, directions):
    """Return PyTorch's results, and the first and second derivatives of a weighted sum of the floating ones.

    The derivatives are None if PyTorch has none.
    """
    args, kwargs = taken_apart(case)
    inputs = []

    def leaf(a):
        if not isinstance(a, np.ndarray):
            return a
        tensor = torch.from_numpy(np.array(a))
        if is_floating(a):
            inputs.append(tensor.requires_grad_())
        return tensor

    kwargs = {key: getattr(torch, str(a)) if isinstance(a, np.dtype) else a for key, a in kwargs.items()}
    results = leaves(operator(name)(*tree_map(args, leaf), **kwargs))
    found = [a.detach().numpy() if isinstance(a, torch.Tensor) else a for a in results]
    smooth = [a for a in results if isinstance(a, torch.Tensor) and a.requires_grad]
    if not smooth or name in NO_DERIVATIVE:
        return found, None, None
    total = sum((a * torch.from_numpy(weights(a.shape))).sum() for a in smooth)
    first = torch.autograd.grad(total, inputs, create_graph=True, allow_unused=True, materialize_grads=True)
    product = sum((a * torch.from_numpy(d)).sum() for a, d in zip(first, directions, strict=True))
    second = [torch.zeros_like(a) for a in inputs]
    if product.requires_grad:
        second = torch.autograd.grad(product, inputs, allow_unused=True, materialize_grads=True)
    return found, [a.numpy(force=True) for a in first], [a.numpy(force=True) for a in second]


def by_rule(name, case, weights, directions, smooth):
    args, kwargs = taken_apart(case)
    first = [None] if name in table.DRAWING else []

    def run(values):
        remaining = iter(values)
        fill = lambda a: next(remaining) if is_floating(a) else jnp.asarray(a) if isinstance(a, np.ndarray) else a  # noqa: E731
        return leaves(table.RULES[name](*first, *tree_map(args, fill), **kwargs))

    def total(values):
        results = run(values)
        floats = [a for a in results if a is not None and jnp.issubdtype(a.dtype, jnp.floating)]
        return sum(jnp.sum(a * weights(a.shape)) for a in floats), results

    def product(values):
        slopes, results = jax.grad(total, has_aux=True)(values)
        return sum(jnp.vdot(a, d) for a, d in zip(slopes, directions, strict=True)), (slopes, results)

    values = [jnp.asarray(a) for a in leaves(list(args)) if is_floating(a)]
    if not smooth:
        return run(values), None, None
    curved, (slopes, results) = jax.jit(jax.grad(product, has_aux=True))(values)
    return results, slopes, curved


def agree(got, expected, what):
    for a, b in zip(got, expected, strict=True):
        if a is None:  # a result that no model uses
            continue
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape, what
        scale = max(1.0, float(np.abs(b[np.isfinite(b)]).max(initial=0)))
        np.testing.assert_allclose(a, b, rtol=0, atol=CLOSE * scale, err_msg=what)


@pytest.mark.torch
@pytest.mark.parametrize("name", CASES)
def test_a_rule_is_pytorchs_operator(name, monkeypatch):
    """A rule has the values and the derivatives of PyTorch's operator.

    PyTorch's plain kernels are used, because mkldnn's LSTM and the fused attention have no second derivatives.
    """
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    for number, case in enumerate(CASES[name]):
        rng = np.random.default_rng(number)
        kept = {}
        weights = lambda shape: kept.setdefault(tuple(shape), np.random.default_rng(7).normal(size=tuple(shape)))  # noqa: B023, E731
        directions = [rng.normal(size=a.shape) for a in leaves(list(taken_apart(case)[0])) if is_floating(a)]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            values, first, second = by_torch(name, case, weights, directions)
        got, own_first, own_second = by_rule(name, case, weights, directions, smooth=first is not None)
        if name in UNDEFINED:
            assert [a.shape for a in got] == [a.shape for a in values]
            continue
        agree(got, values, f"{name}, case {number}")
        if first is not None:
            agree(own_first, first, f"gradient of {name}, case {number}")
            agree(own_second, second, f"second derivatives of {name}, case {number}")


def test_every_rule_has_a_case_and_every_name_is_pytorchs():
    assert CASES.keys() | DRAWN == table.RULES.keys()
    for name in table.RULES:
        assert isinstance(operator(name), torch._ops.OpOverload)

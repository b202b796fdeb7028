"""Published models give the logits, gradients and Hessian products of torch.func; their weights are random here."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.func import functional_call, grad  # noqa: E402

from fedbilevel.torch import from_torch, split  # noqa: E402

pytestmark = pytest.mark.torch
WIDE, SINGLE = 1e-10, 1e-5
"""Bounds on the norm of an error, divided by the norm of the exact result, in float64 and in float32.

Rounding errors in networks of this depth are about 1e-15 and 1e-6.
"""

GENERATOR = torch.Generator().manual_seed(0)


def images(*shape):
    return torch.randn(*shape, generator=GENERATOR)


def words(*shape):
    return torch.randint(0, 30, shape, generator=GENERATOR)


@pytest.fixture(scope="module")
def torchvision():
    """Import torchvision, also its build for GPUs beside PyTorch for CPUs.

    This build cannot load the operators of torchvision, which are declared here instead. The models do not use them.
    """
    try:
        return pytest.importorskip("torchvision")
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return pytest.importorskip("torchvision")


@pytest.fixture
def transformers(torchvision):
    return pytest.importorskip("transformers")


TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "num_labels": 5,
}


def test_resnet18(torchvision):
    module = torchvision.models.resnet18(norm_layer=lambda channels: nn.GroupNorm(4, channels), num_classes=5)
    check(module, images(2, 3, 32, 32))


@contextlib.contextmanager
def differentiable():
    """Replace PyTorch's hardsigmoid, which has no second derivatives, by a composition of operators that have them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Hardsigmoid, "forward", lambda self, x: nn.functional.relu6(x + 3) / 6)
        yield


def test_mobilenet(torchvision):
    groups = lambda channels: nn.GroupNorm(8, channels)  # noqa: E731
    module = torchvision.models.mobilenet_v3_small(norm_layer=groups, num_classes=5).eval()
    check(module, images(2, 3, 32, 32), truth_with=differentiable())


def test_convnext():
    timm = pytest.importorskip("timm")
    small = {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16), "num_classes": 5}
    check(timm.models.convnext.ConvNeXt(in_chans=3, ls_init_value=0.5, **small), images(2, 3, 32, 32))


def test_bert(transformers):
    config = transformers.BertConfig(vocab_size=30, max_position_embeddings=16, **TINY)
    module = transformers.BertForSequenceClassification(config).eval()
    mask = torch.ones(3, 7, dtype=torch.int64)
    mask[1, 4:] = 0
    check(module, words(3, 7), mask)


def test_vit(transformers):
    config = transformers.ViTConfig(image_size=16, patch_size=4, **TINY)
    check(transformers.ViTForImageClassification(config).eval(), images(2, 3, 16, 16))


@contextlib.contextmanager
def wide():
    """Compute Llama's norms and angles in float64, so that the result is exact.

    Llama computes them in float32, whatever the dtype of its weights is.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def test_llama(transformers):
    sizes = {"vocab_size": 30, "max_position_embeddings": 16, "num_key_value_heads": 2, "use_cache": False}
    module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **TINY))
    check(module, words(3, 7), truth_with=wide())


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 8), nn.Linear(12, 5)
        self.cell = nn.LSTM(8, 6, 2, batch_first=True, bidirectional=True)

    def forward(self, tokens):
        return self.head(self.cell(self.embed(tokens))[0][:, -1])


def test_lstm():
    check(Recurrent(), words(3, 7))


def test_transformer_encoder():
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True)
    check(nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(96, 5)), images(3, 6, 16))


def logits_of(out):
    """Return the logits of a model; if it has logits for each position, return those of the last one."""
    logits = getattr(out, "logits", out)
    return logits[:, -1] if logits.ndim == 3 else logits


def check(module, *inputs, truth_with=contextlib.nullcontext()):  # noqa: B008
    """Compare the function of a module with PyTorch in float64.

    The module is translated in float32, as it is, and the function runs in the dtype of its parameters. PyTorch uses
    the kernels that have second derivatives, neither mkldnn's nor the fused attention.
    """
    draw = np.random.default_rng(1)
    v = {name: draw.normal(size=tuple(p.shape)) for name, p in module.named_parameters()}
    labels = np.arange(len(inputs[0])) % 5
    names = list(v)
    is_x = set(names[: len(names) // 2]).__contains__
    apply, start = from_torch(module, *(a[:1] for a in inputs))
    module, exact = module.double(), tuple(a.double() if a.is_floating_point() else a for a in inputs)
    plain = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with plain, torch.backends.mkldnn.flags(enabled=False), truth_with:
        truth = by_torch(module, exact, torch.from_numpy(labels), {k: torch.from_numpy(a) for k, a in v.items()}, is_x)
    for dtype, room in ((np.float64, WIDE), (np.float32, SINGLE)):
        cast = lambda tree: jax.tree.map(lambda a: np.asarray(a, dtype), tree)  # noqa: B023, E731
        found = jax.jit(by_jax(apply, is_x))(cast(start), cast(v), [a.numpy() for a in inputs], labels)
        assert jax.tree.leaves(found)[0].dtype == dtype
        errors = {what: error(found[what], truth[what]) for what in truth}
        assert max(errors.values()) < room, errors


def by_torch(module, inputs, labels, v, is_x):
    start = {name: p.detach() for name, p in module.named_parameters()}
    logits = lambda p: logits_of(functional_call(module, p, inputs))  # noqa: E731
    loss = lambda p: nn.functional.cross_entropy(logits(p), labels)  # noqa: E731
    dot = lambda tree: sum((tree[name] * v[name]).sum() for name in tree)  # noqa: E731
    x, y = split(start, is_x)
    found = {
        "logits": {"": logits(start)},
        "gradient": grad(loss)(start),
        "hessian": grad(lambda p: dot(grad(loss)(p)))(start),
        "mixed": grad(lambda x: dot(grad(lambda y: loss(x | y))(y)))(x),
    }
    return {what: {name: a.detach().numpy() for name, a in tree.items()} for what, tree in found.items()}


def by_jax(apply, is_x):
    """Return a function that computes logits, gradient, Hessian product and mixed product in JAX.

    Its Hessian product is forward over reverse, and that of `by_torch` is reverse over reverse.
    """

    def everything(start, v, inputs, labels):
        logits = lambda p: logits_of(apply(p, *inputs))  # noqa: E731
        x, y = split(start, is_x)

        def loss(p):
            return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits(p)), labels[:, None], 1))

        dot = lambda tree: sum(jnp.vdot(tree[name], v[name]) for name in tree)  # noqa: E731
        gradient, hessian = jax.jvp(jax.grad(loss), (start,), (v,))
        mixed = jax.grad(lambda x: dot(jax.grad(lambda y: loss(x | y))(y)))(x)
        return {"logits": {"": logits(start)}, "gradient": gradient, "hessian": hessian, "mixed": mixed}

    return everything


def error(got, expected):
    flat = lambda tree: np.concatenate([np.ravel(np.asarray(tree[name], np.float64)) for name in sorted(tree)])  # noqa: E731
    assert got.keys() == expected.keys()
    assert np.linalg.norm(flat(expected)) > 1e-3  # a comparison with 0 would show nothing
    return float(np.linalg.norm(flat(got) - flat(expected)) / np.linalg.norm(flat(expected)))

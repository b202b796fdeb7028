"""The problems on which libraries and hand-written programs are compared: plain functions and arrays."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel import tasks
from fedbilevel.tasks import networks
from fedbilevel.tasks.location import distances
from fedbilevel.tasks.quadratic import outer

RIDGE = 5e-4  # the factor of the penalty on the head of a network


def problem(outer, features, head, **rest):
    """Make a problem whose inner loss is head(features(x, batch), y)."""

    inner = lambda x, y, batch: head(features(x, batch), y)  # noqa: E731
    return SimpleNamespace(outer=outer, inner=inner, features=features, head=head, **rest)


def quadratic(clients=6, samples=(5, 10), dtype=np.float32):
    """Draw the library's quadratic task for many clients at once.

    The inner Hessians of clients differ, and so do their eigenvectors.
    """
    rng, dim_x, dim_y, most = np.random.default_rng(0), 5, 8, samples[1]
    axes = np.linalg.qr(rng.normal(size=(clients, dim_y, dim_y)))[0]
    own = {
        "A": np.einsum("cij,j,ckj->cik", axes, np.geomspace(0.1, 1, dim_y), axes),
        "B": rng.normal(size=(clients, dim_y, dim_x)) / np.sqrt(dim_x * dim_y),
        "c": rng.normal(size=(clients, dim_y)),
        "D": np.einsum("ci,ij->cij", 1 + rng.uniform(size=(clients, dim_y)), np.eye(dim_y)),
        "E": rng.normal(size=(clients, dim_x, dim_y)) / (2 * np.sqrt(dim_x * dim_y)),
        "t": rng.normal(size=(clients, dim_y)),
    }
    rows = {name: np.repeat(a[:, None], most, axis=1) for name, a in own.items()}
    for name in "ct":
        rows[name] = rows[name] + 0.1 * rng.normal(size=rows[name].shape)
    rows = {name: a.astype(dtype) for name, a in rows.items()}
    sizes = [rng.integers(samples[0], most + 1, clients).astype(np.int32) for _ in range(2)]
    weights = rng.uniform(0.5, 2.0, clients)

    def features(x, batch):
        return {"A": batch["A"], "b": jnp.einsum("nij,j->ni", batch["B"], x) + batch["c"]}

    def head(rows, y):
        return jnp.mean(0.5 * jnp.einsum("i,nij,j->n", y, rows["A"], y) - rows["b"] @ y)

    return problem(
        outer, features, head,
        data={"outer": {k: rows[k] for k in "DEt"}, "inner": {k: rows[k] for k in "ABc"},
              "outer_size": sizes[0], "inner_size": sizes[1]},
        weights=(weights / weights.sum()).astype(dtype), x=jnp.zeros(dim_x, dtype), y=jnp.zeros(dim_y, dtype),
    )  # fmt: skip


def images(clients=100, samples=300, pixels=784, hidden=200, classes=10, network="mlp", dtype=np.float32):
    """Draw random images of MNIST's shapes, which cost as much as real images.

    x is the body of a network, and y is its head, with a ridge penalty.
    """
    rng = np.random.default_rng(0)

    def half():
        drawn = rng.normal(size=(clients, samples, pixels)).astype(dtype)
        return {"image": drawn, "label": rng.integers(0, classes, size=(clients, samples)).astype(np.int32)}

    model = made(network, pixels, hidden, classes)
    x, y = jax.tree.map(lambda leaf: leaf.astype(dtype), model.init(jax.random.key(0)))

    def forward(x, batch):
        return {"hidden": model.features(x, batch["image"]), "label": batch["label"]}

    def entropy(rows, y):
        return networks.cross_entropy(rows["hidden"] @ y["weight"] + y["bias"], rows["label"])

    def head(rows, y):
        return entropy(rows, y) + RIDGE * sum((leaf**2).sum() for leaf in jax.tree.leaves(y))

    sizes = np.full(clients, samples, np.int32)
    return problem(
        lambda x, y, batch: entropy(forward(x, batch), y), forward, head,
        data={"outer": half(), "inner": half(), "outer_size": sizes, "inner_size": sizes},
        weights=np.full(clients, 1 / clients, dtype), x=x, y=y, structure=model.structure,
    )  # fmt: skip


def made(network, pixels, hidden, classes):
    """Return a network: the library's MLP or CNN, or a transformer."""
    if network == "mlp":
        return networks.mlp((pixels,), (hidden,), classes)
    if network == "transformer":
        return transformer(classes)
    cnn = networks.cnn((28, 28, 1), (8, 16, 64), classes)
    return cnn._replace(features=lambda x, image: cnn.features(x, image.reshape(-1, 28, 28, 1)))


def transformer(classes):
    """Return a network with a transformer block with 4 heads and width 64, over 28 rows of 28 pixels."""
    shapes = {
        "in": (28, 64), "place": (28, 64), "qkv": (64, 192), "mix": (64, 64), "up": (64, 128), "down": (128, 64),
    }  # fmt: skip

    def init(key):
        *keys, last = jax.random.split(key, len(shapes) + 1)
        drawn = zip(shapes.items(), keys, strict=True)
        x = {name: jax.random.normal(key, shape) / shape[0] ** 0.5 for (name, shape), key in drawn}
        return x, networks.dense(last, 64, classes)

    def body(x, image):
        a = image.reshape(-1, 28, 28) @ x["in"] + x["place"]
        q, k, v = jnp.split((jax.nn.standardize(a) @ x["qkv"]).reshape(*a.shape[:2], 4, 48), 3, axis=-1)
        seen = jax.nn.softmax(jnp.einsum("bihd,bjhd->bhij", q, k) / 4, axis=-1)
        a = a + jnp.einsum("bhij,bjhd->bihd", seen, v).reshape(a.shape) @ x["mix"]
        return jax.nn.standardize(a + jax.nn.relu(jax.nn.standardize(a) @ x["up"]) @ x["down"]).mean(1)

    return networks.with_head(init, body, None, None)


def location(targets=1000, dtype=np.float32):
    """Draw the library's location task; the balls of each client are padded to the same number."""
    task = tasks.location(dim=10, targets=targets, clients=8, layout="scattered")
    balls, place = task.clients.inner, np.arange(task.clients.inner.size.max())
    there = place < balls.size[:, None]
    chosen = balls.start[:, None] + np.where(there, place, 0)
    return SimpleNamespace(
        task=task, outer=lambda x: task.problem.outer(x, None, None), inner=distances, project=task.problem.project,
        data={name: a[chosen].astype(dtype) for name, a in balls.values.items()}, weights=there, x=task.x0, y=task.x0,
    )  # fmt: skip

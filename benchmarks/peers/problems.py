"""The problems on which libraries and hand-written programs are compared: plain functions and arrays."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np


def made(outer, features, head, **rest):
    """Make a problem whose inner loss is head(features(x, batch), y)."""

    inner = lambda x, y, batch: head(features(x, batch), y)  # noqa: E731
    return SimpleNamespace(outer=outer, inner=inner, features=features, head=head, **rest)


def quadratic(clients=6, dim_x=5, dim_y=8, samples=(5, 10), seed=0, dtype=np.float32):
    """Draw the library's quadratic task for many clients at once.

    The inner Hessians of clients differ, and so do their eigenvectors.
    """
    rng = np.random.default_rng(seed)
    most = samples[1]
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

    def outer(x, y, batch):
        gap = y - batch["t"]
        value = 0.5 * jnp.einsum("ni,nij,nj->n", gap, batch["D"], gap) + jnp.einsum("i,nij,j->n", x, batch["E"], y)
        return jnp.mean(value) + 0.5 * jnp.vdot(x, x)

    def features(x, batch):
        return {"A": batch["A"], "b": jnp.einsum("nij,j->ni", batch["B"], x) + batch["c"]}

    def head(rows, y):
        return jnp.mean(0.5 * jnp.einsum("i,nij,j->n", y, rows["A"], y) - rows["b"] @ y)

    return made(
        outer, features, head,
        data={"outer": {k: rows[k] for k in "DEt"}, "inner": {k: rows[k] for k in "ABc"},
              "outer_size": sizes[0], "inner_size": sizes[1]},
        weights=(weights / weights.sum()).astype(dtype), x=jnp.zeros(dim_x, dtype), y=jnp.zeros(dim_y, dtype),
    )  # fmt: skip


def images(
    clients=100, samples=300, pixels=784, hidden=200, classes=10, ridge=5e-4, network="mlp", seed=0, dtype=np.float32
):
    """Draw random images of MNIST's shapes, which cost as much as real images.

    x is the body of a network, and y is its head, with a ridge penalty.
    """
    rng = np.random.default_rng(seed)

    def half():
        drawn = rng.normal(size=(clients, samples, pixels)).astype(dtype)
        return {"image": drawn, "label": rng.integers(0, classes, size=(clients, samples)).astype(np.int32)}

    def layer(into, out):
        bound = into**-0.5
        return {"weight": jnp.asarray(rng.uniform(-bound, bound, (into, out)), dtype), "bias": jnp.zeros(out, dtype)}

    def of_layer(x, image):
        return jax.nn.relu(image @ x[0]["weight"] + x[0]["bias"])

    body, x, width = (of_layer, [layer(pixels, hidden)], hidden) if network == "mlp" else BODIES[network](dtype)

    def forward(x, batch):
        return {"hidden": body(x, batch["image"]), "label": batch["label"]}

    def entropy(rows, y):
        scores = jax.nn.log_softmax(rows["hidden"] @ y["weight"] + y["bias"])
        return -jnp.mean(jnp.take_along_axis(scores, rows["label"][:, None], 1))

    def head(rows, y):
        return entropy(rows, y) + ridge * sum((leaf**2).sum() for leaf in jax.tree.leaves(y))

    sizes = np.full(clients, samples, np.int32)
    return made(
        lambda x, y, batch: entropy(forward(x, batch), y), forward, head,
        data={"outer": half(), "inner": half(), "outer_size": sizes, "inner_size": sizes},
        weights=np.full(clients, 1 / clients, dtype), x=x, y=layer(width, classes),
    )  # fmt: skip


def cnn(dtype):
    """Return two convolutions and a layer, from the library's networks, for both programs: (body, its start, width)."""
    from fedbilevel.tasks import networks

    network = networks.cnn((28, 28, 1), (8, 16, 64), 10)
    x = jax.tree.map(lambda leaf: leaf.astype(dtype), network.init(jax.random.key(0))[0])
    return lambda x, image: network.features(x, image.reshape(-1, 28, 28, 1)), x, 64


def transformer(dtype):
    """Return a transformer block with 4 heads and width 64, over 28 rows of 28 pixels: (body, its start, width)."""
    shapes = {
        "in": (28, 64), "place": (28, 64), "qkv": (64, 192), "mix": (64, 64), "up": (64, 128), "down": (128, 64),
    }  # fmt: skip
    keys = jax.random.split(jax.random.key(0), len(shapes))
    drawn = zip(shapes.items(), keys, strict=True)
    x = {name: jax.random.normal(key, shape, dtype) / shape[0] ** 0.5 for (name, shape), key in drawn}

    def normed(a):
        return (a - a.mean(-1, keepdims=True)) / jnp.sqrt(a.var(-1, keepdims=True) + 1e-5)

    def body(x, image):
        a = image.reshape(-1, 28, 28) @ x["in"] + x["place"]
        q, k, v = jnp.split((normed(a) @ x["qkv"]).reshape(*a.shape[:2], 4, 48), 3, axis=-1)
        seen = jax.nn.softmax(jnp.einsum("bihd,bjhd->bhij", q, k) / 4, axis=-1)
        a = a + jnp.einsum("bhij,bjhd->bihd", seen, v).reshape(a.shape) @ x["mix"]
        return normed(a + jax.nn.relu(normed(a) @ x["up"]) @ x["down"]).mean(1)

    return body, x, 64


BODIES = {"cnn": cnn, "transformer": transformer}


def location(clients=8, targets=1000, dim=10, seed=0, dtype=np.float32):
    """Draw FISM's location problem: the point nearest to an anchor, of all with the least mean distance to balls."""
    rng = np.random.default_rng(seed)
    anchor, start = rng.uniform(-10, 10, (2, dim)).astype(dtype)
    most = -(-targets // clients)
    data = {
        "center": rng.uniform(-10, 10, (clients, most, dim)).astype(dtype),
        "radius": rng.uniform(0, 1, (clients, most)).astype(dtype),
    }
    sizes = np.array([targets // clients + (i < targets % clients) for i in range(clients)], np.int32)

    def distances(x, batch):
        square = jnp.sum((x - batch["center"]) ** 2, axis=-1)
        outside = square > batch["radius"] ** 2
        return jnp.mean(jnp.where(outside, jnp.sqrt(jnp.where(outside, square, 1)) - batch["radius"], 0))

    return SimpleNamespace(
        outer=lambda x: jnp.sum((x - anchor) ** 2) / 2, inner=distances, project=lambda x: jnp.clip(x, -10, 10),
        data=data, sizes=sizes, weights=np.arange(most) < sizes[:, None], x=jnp.asarray(start), y=jnp.asarray(start),
    )  # fmt: skip

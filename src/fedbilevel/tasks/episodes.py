"""Losses and accuracies of few-shot tasks: `way` characters, told apart by a few supporting images of each.

Images of B tasks are (B, way, n, 28, 28) uint8; `features` takes them so.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from fedbilevel.core.tree import PyTree
from fedbilevel.tasks.networks import EVALUATION_BATCH, cross_entropy

HEAD_STEPS = 300  # when a head is fitted to the support of a test episode
EPISODES_AT_A_TIME = 10  # that are adapted together when measuring accuracy: bounds the memory of activations

Features = Callable[[PyTree, Array], Array]
"""(backbone, images (..., 28, 28) uint8) -> (..., width)."""
Adapt = Callable[[PyTree, Array], PyTree]
"""(x, support images (way, shot, 28, 28)) -> x."""


def bounded(features: Features) -> Features:
    """z/√(1 + mean z²), of each image: of mean square below 1; one that is alone still says how large it is."""

    def divided(x: PyTree, images: Array) -> Array:
        found = features(x, images)
        return found * lax.rsqrt(1 + jnp.mean(jnp.square(found), axis=-1, keepdims=True))

    return divided


class Episodes(NamedTuple):
    """Test episodes: places in `images`, (used, 28, 28) uint8."""

    images: np.ndarray
    support: np.ndarray  # (episodes, way, shot)
    query: np.ndarray  # (episodes, way, queries)


def draw_episodes(images: np.ndarray, count: int, way: int, shot: int, queries: int, seed: int) -> Episodes:
    """Episodes of different characters, drawn from (characters, drawings, 28, 28), and for each its drawings."""
    rng = np.random.default_rng([seed, 3])
    characters, drawings = images.shape[:2]
    chosen = np.stack([rng.permutation(characters)[:way] for _ in range(count)])
    order = rng.permuted(np.broadcast_to(np.arange(drawings), (count, way, drawings)), axis=-1)[..., : shot + queries]
    used, place = np.unique(chosen[..., None] * drawings + order, return_inverse=True)
    place = place.reshape(order.shape)
    return Episodes(images.reshape(-1, *images.shape[2:])[used], place[..., :shot], place[..., shot:])


def labels_of(way: int, each: int) -> Array:
    """(way·each,): that many images of each of the characters 0..way − 1, one character after the other."""
    return jnp.repeat(jnp.arange(way), each)


def heads_loss(features: Features, x: PyTree, heads: PyTree, images: Array) -> Array:
    """Mean cross entropy of B tasks, each under its own head: {"weight": (B, width, way), "bias": (B, way)}."""
    tasks, way, each = images.shape[:3]
    found = features(x, images).reshape(tasks, way * each, -1)
    logits = found @ heads["weight"] + heads["bias"][:, None]
    return cross_entropy(logits.reshape(-1, way), jnp.tile(labels_of(way, each), tasks))


def prototype_logits(support: Array, query: Array) -> Array:
    """(way·queries, way): −‖query − prototype‖², a prototype being the mean of a character's support.

    support: (way, shot, width), query: (way, queries, width). Snell, Swersky, Zemel, NeurIPS 2017, equations 1 and 2.
    """
    gap = query.reshape(-1, 1, query.shape[-1]) - support.mean(axis=1)
    return -jnp.sum(jnp.square(gap), axis=-1)


def prototype_loss(features: Features, x: PyTree, batch: dict[str, Array]) -> Array:
    """Mean cross entropy of `prototype_logits`."""
    support, query = (features(x, batch[part]) for part in ("support", "query"))
    tasks, way, each, _ = query.shape
    logits = jax.vmap(prototype_logits)(support, query).reshape(-1, way)
    return cross_entropy(logits, jnp.tile(labels_of(way, each), tasks))


def plain_loss(features: Features, x: tuple[PyTree, PyTree], images: Array) -> Array:
    """Mean cross entropy of one episode, (way, n, 28, 28), under the head of `way` columns that x has."""
    return cross_entropy(plain_logits(features, x, images), labels_of(*images.shape[:2]))


def plain_logits(features: Features, x: tuple[PyTree, PyTree], images: Array) -> Array:
    """(way·n, way)."""
    backbone, head = x
    found = features(backbone, images.reshape(-1, *images.shape[2:]))
    return found @ head["weight"] + head["bias"]


def adapted(features: Features, lr: float, steps: int, first_order: bool) -> Adapt:
    """`steps` gradient steps of x on an episode's support; of first order, the gradients count as constants.

    Finn, Abbeel, Levine, ICML 2017, algorithm 2 and section 5.2.
    """

    def adapt(x: PyTree, support: Array) -> PyTree:
        def step(x: PyTree, _: None) -> tuple[PyTree, None]:
            gradient = jax.grad(lambda x: plain_loss(features, x, support))(x)
            if first_order:
                gradient = lax.stop_gradient(gradient)
            return optax.tree.add_scale(x, -lr, gradient), None

        return lax.scan(step, x, None, length=steps)[0]

    return adapt


def adapted_loss(features: Features, adapt: Adapt, x: PyTree, batch: dict[str, Array]) -> Array:
    """Mean over tasks of the loss on the query images after adaptation to the support."""

    def one(support: Array, query: Array) -> Array:
        return plain_loss(features, adapt(x, support), query)

    return jnp.mean(jax.vmap(one)(batch["support"], batch["query"]))


def fitted_head(support: Array, ridge: float) -> dict[str, Array]:
    """The head on (way, shot, width) features that minimises mean cross entropy + ridge·‖head‖².

    By accelerated gradient steps from 0 (Nesterov's for strong convexity μ = 2·ridge and smoothness L, of which
    ½‖[φ 1][φ 1]ᵀ‖/n + 2·ridge is a bound: softmax's Hessian is at most ½).
    """
    way, shot, width = support.shape
    flat, labels = support.reshape(-1, width), labels_of(way, shot)
    smoothness = 0.5 * jnp.linalg.norm(flat @ flat.T + 1) / len(flat) + 2 * ridge
    root = jnp.sqrt(2 * ridge / smoothness)
    momentum = (1 - root) / (1 + root)

    def loss(head: dict[str, Array]) -> Array:
        return cross_entropy(flat @ head["weight"] + head["bias"], labels) + ridge * optax.tree.vdot(head, head)

    def step(_: int, pair: Any) -> Any:
        head, ahead = pair
        new = optax.tree.add_scale(ahead, -1 / smoothness, jax.grad(loss)(ahead))
        return new, optax.tree.add_scale(new, momentum, optax.tree.sub(new, head))

    zero = {"weight": jnp.zeros((width, way), flat.dtype), "bias": jnp.zeros(way, flat.dtype)}
    return lax.fori_loop(0, HEAD_STEPS, step, (zero, zero))[0]


def accuracy_of_features(
    features: Features, episodes: Episodes, logits: Callable[[Array, Array], Array]
) -> Callable[[PyTree], Array]:
    """backbone -> share of the query images whose logits, (support, query features) -> (way·queries, way), are right.

    Every image goes through the backbone once, however many episodes it is in.
    """
    images, support, query = (jnp.asarray(leaf) for leaf in episodes)
    labels = labels_of(*query.shape[1:])

    def measure(x: PyTree) -> Array:
        found = lax.map(lambda image: features(x, image[None])[0], images, batch_size=EVALUATION_BATCH)

        def one(places: tuple[Array, Array]) -> Array:
            return jnp.argmax(logits(found[places[0]], found[places[1]]), axis=-1) == labels

        return jnp.mean(lax.map(one, (support, query), batch_size=EVALUATION_BATCH).astype(float))

    return measure


def accuracy_after_adaptation(features: Features, episodes: Episodes, adapt: Adapt) -> Callable[[PyTree], Array]:
    """(backbone, head) -> share of the query images that are right after adaptation to each episode's support."""
    images, support, query = (jnp.asarray(leaf) for leaf in episodes)
    labels = labels_of(*query.shape[1:])

    def measure(x: PyTree) -> Array:
        def one(places: tuple[Array, Array]) -> Array:
            own = adapt(x, images[places[0]])
            return jnp.argmax(plain_logits(features, own, images[places[1]]), axis=-1) == labels

        return jnp.mean(lax.map(one, (support, query), batch_size=EPISODES_AT_A_TIME).astype(float))

    return measure

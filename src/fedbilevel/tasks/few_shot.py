"""Few-shot learning: x is a backbone, and y has a head for every task of every client.

    f_i(x, y) = mean_j CE(y_j(φ(x))) on the query images of task j,
    g_i(x, y) = mean_j [CE(y_j(φ(x))) on the support images of task j + ridge·‖y_j‖²],   j over the tasks of client i.

In a task, N = `way` characters of a client have to be distinguished (meta-learning). This is the few-shot problem of
RABO (Li et al. 2025, section V-A), except that each task has a linear head y_j of its own. In the paper, one MLP is the
head of all tasks; `shared` and `head_hidden` give this form. A column of a shared head belongs to a different character
in each task. So f stays at the level of chance, log N, or above, unless tasks are memorised. (We also tried a shared
head with a column for each character. None of its columns came near the values that minimise g.) If a head has hidden
layers, g is not convex in y.

A task belongs to one client, and no two tasks share a head. So ∇²yy g is block diagonal, with a block for each task,
and a client needs only the blocks of its own tasks. If all clients hold the whole model and invert these blocks
exactly, the mean of their local hypergradients is the hypergradient.

The features are φ = z/√(1 + mean z²), where z is the output of the backbone. Without the division, z and the curvature
of g in y would grow during training, until every step size is too large. Single-level objectives use the same φ, so
that results can be compared.

Images of B tasks have the shape (B, way, n, side, side) and are uint8.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from fedbilevel.core.client import Clients
from fedbilevel.core.errors import is_count, is_number, require, require_count, unknown
from fedbilevel.core.metrics import Metric
from fedbilevel.core.problem import Bilevel, Problem, SingleLevel
from fedbilevel.core.ragged import Ragged
from fedbilevel.core.submodel import Structure
from fedbilevel.core.tree import PyTree
from fedbilevel.data import Characters, Drawings, iid, load_characters, pack_arrays
from fedbilevel.data.characters import SIDE, by_alphabet
from fedbilevel.tasks import networks
from fedbilevel.tasks.images import NETWORKS
from fedbilevel.tasks.networks import EVALUATION_BATCH, cross_entropy, in_passes
from fedbilevel.tasks.task import Task, require_memory

Objective = Literal["bilevel", "joint", "protonet", "maml", "fomaml"]


def few_shot(
    *,
    data: str = "strokes",
    side: int = SIDE,
    network: str = "conv4",
    hidden: Sequence[int] = (32,),
    head_hidden: Sequence[int] = (),
    shared: bool = False,
    clients: int = 10,
    partition_by: Literal["iid", "alphabets"] = "iid",
    tasks: int = 20,
    way: int = 5,
    shot: int = 1,
    queries: int | None = 5,
    holdout: float = 0.0,
    objective: Objective = "bilevel",
    ridge: float = 0.01,
    adaptation_steps: int = 1,
    adaptation_lr: float = 0.4,
    test_episodes: int = 200,
    seed: int = 0,
) -> Task:
    """Deal characters out to clients and make few-shot tasks of them.

    Each few-shot task is one sample. The accuracy is measured on other alphabets.

    Args:
        data: "strokes" (generated) or "omniglot".
        side: the number of pixels along an image's edge, a divisor of 28. If it is smaller than 28, each pixel is the
            mean of a square of pixels. A network with convolutions then needs less time.
        network: "conv4", or another network of hyper_representation.
        hidden: for "conv4" one number of channels or four; for another network as in hyper_representation.
        head_hidden: the widths of the hidden layers of each head, with ReLU. Submodels can leave out units of these
            layers. Empty: linear heads.
        shared: whether all tasks have one head, as in the paper of RABO.
        clients: the number of clients, M.
        partition_by: "iid" deals out characters, and "alphabets" whole alphabets.
        tasks: the number of tasks of each client. The characters of a client are shuffled and dealt out to its tasks,
            and shuffled again when fewer than `way` are left.
        way: N, the number of characters of a task.
        shot: K, the number of support images of each character, drawn for each task.
        queries: the number of query images of each character, which differ from its support images; None: all other
            images.
        holdout: the share of the training characters that is held out. If it is above 0, the metric is
            "validation_accuracy", on tasks of these characters, in place of "test_accuracy".
        objective: "bilevel", or a single-level objective. "joint" is (f + g)/2 with x = (backbone, heads/√M). With this
            factor, a step on the server's mean over M clients moves a head as far as a step of its client alone.
            "protonet" is prototypical networks, where x is the backbone (Snell et al. 2017). In "maml", x is the
            backbone and a head of `way` columns. Both are adapted to the support images of a task before the loss on
            its query images is computed (Finn et al. 2017); "fomaml" is "maml" without second derivatives.
        ridge: the factor of ‖y_j‖². A larger factor makes the inner problem easier, and makes the columns of a head
            similar to the means of classes.
        adaptation_steps, adaptation_lr: the number and the size of the adaptation steps of "maml" and "fomaml".
        test_episodes: the number of new tasks over which "test_accuracy" is a mean. These tasks are the same at each
            evaluation. A new head is fitted to the support images of each, even if y is shared; with "protonet", "maml"
            and "fomaml", prototypes are computed or x is adapted instead.
        seed: the seed of the partition, the tasks, the starting point and the test episodes.
    """
    counts = {"tasks": tasks, "shot": shot, "adaptation_steps": adaptation_steps, "test_episodes": test_episodes}
    for name, count in {**counts, "clients": clients}.items():
        require_count(name, count)
    require(is_count(way) and way >= 2, "way", way, "a whole number, at least 2")
    for field, value in (("adaptation_lr", adaptation_lr), ("ridge", ridge)):
        require(is_number(value) and value > 0, field, value, "a positive number")
    for field, widths in (("hidden", hidden), ("head_hidden", head_hidden)):
        require(isinstance(widths, Sequence), field, widths, "a list of widths, e.g. [16]")
    require(all(map(is_count, head_hidden)), "head_hidden", head_hidden, "positive widths, or empty for linear heads")
    for field, got, allowed in (("network", network, NETWORKS), ("objective", objective, OBJECTIVES)):
        if got not in allowed:
            raise unknown(field, got, allowed)
    require(not head_hidden or objective != "protonet", "head_hidden", head_hidden, "empty: 'protonet' has no head")
    require(isinstance(shared, bool), "shared", shared, "True or False")
    require(not shared or objective in ("bilevel", "joint"), "shared", shared, "True only for 'bilevel' and 'joint'")
    require(is_number(holdout) and 0 <= holdout < 1, "holdout", holdout, "at least 0 and below 1")
    require(is_count(side) and SIDE % side == 0, "side", side, f"a divisor of {SIDE}")
    characters = smaller(load_characters(data), side)
    if holdout:
        characters = held_out_characters(characters, holdout, seed)
    part = "validation" if holdout else "test"
    held = _dealt(characters.train, clients, partition_by, way, seed)
    left = characters.train.images.shape[1] - shot
    require(left >= 1, "shot", shot, f"at most {left + shot - 1}, since a character has {left + shot} drawings")
    require_count("queries", queries, optional=True)
    asked = left if queries is None else queries
    require(asked <= left, "queries", queries, f"at most {left}, since a character has {left + shot} drawings")
    require_memory(clients * way * (shot + asked) * characters.train.images[0, 0].nbytes / 8, tasks=tasks)
    require_memory(way * characters.test.images.shape[1], test_episodes=test_episodes)
    most = len(characters.test.images)
    require(way <= most, "way", way, f"at most {most}, the number of {part} characters")

    net = NETWORKS[network](characters.train.images.shape[2:], tuple(hidden), way)
    backbone, last = net.init(jax.random.key(seed))
    head, head_structure = head_of(last, net.structure.y, head_hidden, seed)
    features = bounded(_standardising(net, characters))
    setting = Setting(
        features=features,
        ridge=ridge,
        tasks=None if shared else clients * tasks,
        clients=clients,
        adapt=adapted(features, adaptation_lr, adaptation_steps, objective == "fomaml"),
        structure=Structure(net.structure.x, head_structure),
        backbone=backbone,
        head=head,
        test=draw_episodes(characters.test.images, test_episodes, way, shot, asked, seed),
    )
    problem, x0, y0, accuracy = OBJECTIVES[objective](setting)
    query, support = _draw_tasks(characters.train.images, held, tasks, way, shot, asked, seed)
    both = {"query": query.values["image"], "support": support.values["image"], "task": query.values["task"]}
    outer, inner = (query, support) if objective == "bilevel" else (replace(query, values=both), None)
    return Task(
        name="few_shot",
        problem=problem,
        clients=Clients(outer=outer, inner=inner),
        x0=x0,
        y0=y0,
        metrics={f"{part}_accuracy": Metric(accuracy, larger_is_better=True)},
    )


class Setting(NamedTuple):
    """The network, starting values, constants and test episodes of a few-shot problem."""

    features: Features
    ridge: float
    tasks: int | None  # the number of tasks of all clients together; None: all tasks share a head
    clients: int
    adapt: Adapt
    structure: Structure  # the structure of the backbone and of one head
    backbone: PyTree
    head: PyTree  # the starting value of every head
    test: Episodes

    @property
    def heads(self) -> PyTree:
        """Return a head for each task, as leaves of shape (tasks, …), or the shared head."""
        ahead = () if self.tasks is None else (self.tasks,)
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (*ahead, *leaf.shape)), self.head)

    @property
    def structure_of_heads(self) -> PyTree:
        return jax.tree.map(lambda words: words if self.tasks is None else f"_ {words}", self.structure.y)

    def of_tasks(self, y: PyTree, batch: dict[str, Array]) -> PyTree:
        """Return the heads of a batch's tasks, or the shared head.

        The heads of tasks are leaves of shape (B, …); the leaves of the shared head have the shape (1, …).
        """
        return jax.tree.map(lambda leaf: leaf[None] if self.tasks is None else leaf[batch["task"]], y)


Made = tuple[Problem, PyTree, PyTree, Callable[[PyTree, PyTree], Array]]
"""The problem, x0, y0, and the accuracy as a function of (x, y)."""


def _bilevel(setting: Setting) -> Made:
    def outer(x: PyTree, y: PyTree, batch: dict[str, Array]) -> Array:
        return heads_loss(setting.features, x, setting.of_tasks(y, batch), batch["image"])

    def inner(x: PyTree, y: PyTree, batch: dict[str, Array]) -> Array:
        heads = setting.of_tasks(y, batch)
        return heads_loss(setting.features, x, heads, batch["image"]) + _penalty(setting, heads)

    problem = Bilevel(outer, inner, structure=Structure(setting.structure.x, setting.structure_of_heads))
    return problem, setting.backbone, setting.heads, _accuracy_of_new_heads(setting)


def _joint(setting: Setting) -> Made:
    """Make the single-level problem in x = (backbone, heads / unit), where unit = √M, or 1 for a shared head.

    A head belongs to one client, so the server's mean over M clients divides its step by M. In units of √M, the
    gradient is √M times as large, and a step moves the head M times as far, which cancels the division.
    """
    unit = 1.0 if setting.tasks is None else setting.clients**0.5

    def loss(x: PyTree, batch: dict[str, Array]) -> Array:
        heads = optax.tree.scale(unit, setting.of_tasks(x[1], batch))
        outer, inner = (heads_loss(setting.features, x[0], heads, batch[part]) for part in ("query", "support"))
        return (outer + inner + _penalty(setting, heads)) / 2

    problem = SingleLevel(loss, structure=Structure(x=(setting.structure.x, setting.structure_of_heads)))
    accuracy = _accuracy_of_new_heads(setting)
    heads = optax.tree.scale(1 / unit, setting.heads)
    return problem, (setting.backbone, heads), None, lambda x, y: accuracy(x[0], y)


def _penalty(setting: Setting, heads: PyTree) -> Array:
    """Return the mean of ridge·‖y_j‖² over tasks."""
    return setting.ridge * optax.tree.vdot(heads, heads) / len(jax.tree.leaves(heads)[0])


def _accuracy_of_new_heads(setting: Setting) -> Callable[[PyTree, PyTree], Array]:
    def logits(x: PyTree, support: Array, query: Array) -> Array:
        fit = descended_head if "hidden" in setting.head else fitted_head
        return head_logits(fit(support, setting.head, setting.ridge), query.reshape(-1, query.shape[-1]))

    return episode_accuracy(setting.test, logits, setting.features)


def _protonet(setting: Setting) -> Made:
    def loss(x: PyTree, batch: dict[str, Array]) -> Array:
        support, query = (setting.features(x, batch[part]) for part in ("support", "query"))
        tasks, way, each, _ = query.shape
        logits = jax.vmap(prototype_logits)(support, query).reshape(-1, way)
        return cross_entropy(logits, jnp.tile(labels_of(way, each), tasks))

    problem = SingleLevel(loss, structure=Structure(x=setting.structure.x))
    accuracy = episode_accuracy(setting.test, lambda x, *parts: prototype_logits(*parts), setting.features)
    return problem, setting.backbone, None, accuracy


def _maml(setting: Setting) -> Made:
    def query_loss(x: PyTree, support: Array, query: Array) -> Array:
        return plain_loss(setting.features, setting.adapt(x, support), query)

    def loss(x: PyTree, batch: dict[str, Array]) -> Array:
        return jnp.mean(jax.vmap(query_loss, (None, 0, 0))(x, batch["support"], batch["query"]))

    def logits(x: PyTree, support: Array, query: Array) -> Array:
        return plain_logits(setting.features, setting.adapt(x, support), query)

    problem = SingleLevel(loss, structure=Structure(x=(setting.structure.x, setting.structure.y)))
    return problem, (setting.backbone, setting.head), None, episode_accuracy(setting.test, logits)


OBJECTIVES: dict[str, Callable[[Setting], Made]] = {
    "bilevel": _bilevel,
    "fomaml": _maml,
    "joint": _joint,
    "maml": _maml,
    "protonet": _protonet,
}


def _standardising(net: networks.Network, characters: Characters) -> Features:
    def features(x: PyTree, images: Array) -> Array:
        flat = images.reshape(-1, *images.shape[-2:])
        pixels = (flat.astype(float) / 255 - characters.mean) / characters.std
        return net.features(x, net.prepare(pixels)).reshape(*images.shape[:-2], -1)  # type: ignore[arg-type]

    return features


def smaller(characters: Characters, side: int) -> Characters:
    """Replace squares of pixels by their means, so that the images have the shape (side, side)."""
    if side == SIDE:
        return characters

    def part(drawings: Drawings) -> Drawings:
        squares = drawings.images.reshape(*drawings.images.shape[:2], side, SIDE // side, side, SIDE // side)
        return replace(drawings, images=squares.mean((3, 5)).round().astype(np.uint8))

    train, test = part(characters.train), part(characters.test)
    return replace(characters, train=train, test=test, std=float((train.images / 255).std()))


def held_out_characters(characters: Characters, share: float, seed: int) -> Characters:
    """Take a random share of the training characters for testing, in place of the test characters."""
    train, total = characters.train, len(characters.train.images)
    aside, rest = np.split(np.random.default_rng([seed, 5]).permutation(total), [max(1, round(share * total))])
    taken, left = (replace(train, images=train.images[part], alphabet=train.alphabet[part]) for part in (aside, rest))
    return replace(characters, train=left, test=taken)


def _dealt(train: Drawings, clients: int, by: str, way: int, seed: int) -> list[np.ndarray]:
    if by not in ("iid", "alphabets"):
        raise unknown("partition_by", by, ("iid", "alphabets"))
    apart = len(train.images if by == "iid" else train.alphabets)
    parts = "characters" if by == "iid" else "alphabets"
    allowed = f"at most {apart}, the number of training {parts}, with partition_by = {by!r}"
    require(clients <= apart, "clients", clients, allowed)
    held = (iid if by == "iid" else by_alphabet)(train.alphabet, clients, seed=seed)
    fewest = min(map(len, held))
    require(way <= fewest, "way", way, f"at most {fewest}, the number of characters of the client with the fewest")
    return held


def _draw_tasks(
    images: np.ndarray, held: list[np.ndarray], tasks: int, way: int, shot: int, queries: int, seed: int
) -> tuple[Ragged, Ragged]:
    """Draw the query and the support images of each client's tasks.

    The tasks of all clients are numbered together.
    """
    rng = np.random.default_rng([seed, 4])
    characters = np.concatenate([_deal(rng, own, tasks, way) for own in held])  # (all tasks, way)
    order = rng.permuted(np.broadcast_to(np.arange(images.shape[1]), (*characters.shape, images.shape[1])), axis=-1)
    number = np.arange(len(characters), dtype=np.int32)
    parts = np.split(number, len(held))

    def samples(drawings: slice) -> Ragged:
        chosen = images[characters[..., None], order[..., drawings]]
        return Ragged(*pack_arrays({"image": chosen, "task": number}, parts))

    return samples(slice(shot, shot + queries)), samples(slice(shot))


def _deal(rng: np.random.Generator, own: np.ndarray, tasks: int, way: int) -> np.ndarray:
    """Deal a client's characters out to its tasks. No task has a character twice.

    The result has the shape (tasks, way).
    """
    each = len(own) // way
    packs = [rng.permutation(own)[: each * way].reshape(each, way) for _ in range(-(-tasks // each))]
    return np.concatenate(packs)[:tasks]


HEAD_STEPS = 300  # the number of steps that fit a head to the support images of a test episode
EPISODES_AT_A_TIME = 10  # the number of test episodes that are evaluated together, which bounds memory

Features = Callable[[PyTree, Array], Array]
"""A function from a backbone and uint8 images of shape (..., side, side) to features of shape (..., width)."""
Adapt = Callable[[PyTree, Array], PyTree]
"""A function from x and support images of shape (way, shot, side, side) to the adapted x."""


def bounded(features: Features) -> Features:
    """Divide the features z of each image by √(1 + mean z²), so that their mean square is below 1."""

    def divided(x: PyTree, images: Array) -> Array:
        z = features(x, images)
        return z * lax.rsqrt(1 + jnp.mean(jnp.square(z), axis=-1, keepdims=True))

    return divided


class Episodes(NamedTuple):
    """The images of test episodes, and the episodes as indices of images."""

    images: np.ndarray  # uint8 of shape (images, side, side)
    support: np.ndarray  # indices of images, of shape (episodes, way, shot)
    query: np.ndarray  # indices of images, of shape (episodes, way, queries)


def draw_episodes(images: np.ndarray, count: int, way: int, shot: int, queries: int, seed: int) -> Episodes:
    """Draw episodes from images of shape (characters, drawings, side, side).

    For each episode, `way` characters are drawn, then drawings of each character.
    """
    rng = np.random.default_rng([seed, 3])
    characters, drawings = images.shape[:2]
    chosen = np.stack([rng.permutation(characters)[:way] for _ in range(count)])
    order = rng.permuted(np.broadcast_to(np.arange(drawings), (count, way, drawings)), axis=-1)[..., : shot + queries]
    used, place = np.unique(chosen[..., None] * drawings + order, return_inverse=True)
    place = place.reshape(order.shape)
    return Episodes(images.reshape(-1, *images.shape[2:])[used], place[..., :shot], place[..., shot:])


def labels_of(way: int, each: int) -> Array:
    """Return the labels of `each` images per character, for `way` characters in order.

    The labels are way·each numbers from 0 to way − 1.
    """
    return jnp.repeat(jnp.arange(way), each)


def head_of(last: PyTree, words: PyTree, hidden: Sequence[int], seed: int) -> tuple[PyTree, PyTree]:
    """Return the starting value of a head, with random hidden layers and a last layer of zeros, and its structure.

    If all layers were zero, only the last bias would have a nonzero gradient, and gradient descent could not train the
    other parameters.
    """
    widths = [last["weight"].shape[0], *hidden]
    groups = [words["weight"].split()[0], *(f"head{i + 1}" for i in range(len(hidden)))]
    head: dict[str, Any] = {"weight": jnp.zeros((widths[-1], len(last["bias"]))), "bias": jnp.zeros_like(last["bias"])}
    structure = networks.head(groups[-1])
    if hidden:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), 1), len(hidden))
        sides = zip(keys, itertools.pairwise(widths), strict=True)
        head["hidden"] = [networks.dense(key, into, out) for key, (into, out) in sides]
        structure["hidden"] = [{"weight": f"{into} {out}", "bias": out} for into, out in itertools.pairwise(groups)]
    return head, structure


def head_logits(head: PyTree, features: Array) -> Array:
    """Return the logits, of shape (…, n, way), of features of shape (…, n, width) under a head.

    For features of shape (B, n, width), the head may have leaves of shape (B, …): a head for each task.
    """
    for layer in head.get("hidden", ()):
        features = jax.nn.relu(features @ layer["weight"] + layer["bias"][..., None, :])
    return features @ head["weight"] + head["bias"][..., None, :]


def heads_loss(features: Features, x: PyTree, heads: PyTree, images: Array) -> Array:
    """Return the mean cross entropy of B tasks.

    `heads` has leaves of shape (B, …), a head for each task, or leaves of shape (1, …), a shared head.
    """
    tasks, way, each = images.shape[:3]
    logits = head_logits(heads, features(x, images).reshape(tasks, way * each, -1))
    return cross_entropy(logits.reshape(-1, way), jnp.tile(labels_of(way, each), tasks))


def prototype_logits(support: Array, query: Array) -> Array:
    """Return the logits −‖query − prototype‖², as an array of shape (way·queries, way).

    The prototype of a character is the mean of its support features. Source: Snell, Swersky, Zemel, NeurIPS 2017,
    equations 1 and 2.

    Args:
        support: features of shape (way, shot, width).
        query: features of shape (way, queries, width).
    """
    gap = query.reshape(-1, 1, query.shape[-1]) - support.mean(axis=1)
    return -jnp.sum(jnp.square(gap), axis=-1)


def plain_loss(features: Features, x: tuple[PyTree, PyTree], images: Array) -> Array:
    """Return the mean cross entropy of an episode's images, of shape (way, n, side, side), for x = (backbone, head)."""
    return cross_entropy(plain_logits(features, x, images), labels_of(*images.shape[:2]))


def plain_logits(features: Features, x: tuple[PyTree, PyTree], images: Array) -> Array:
    """Return the logits of an episode's images, of shape (way·n, way), for x = (backbone, head)."""
    backbone, head = x
    return head_logits(head, features(backbone, images.reshape(-1, *images.shape[2:])))


def adapted(features: Features, lr: float, steps: int, first_order: bool) -> Adapt:
    """Return a function that takes `steps` gradient steps on x with the support images of an episode.

    If `first_order` is True, the gradients are treated as constants when the function is differentiated. Source: Finn,
    Abbeel, Levine, ICML 2017, algorithm 2 and section 5.2.
    """

    def adapt(x: PyTree, support: Array) -> PyTree:
        def step(x: PyTree, _: None) -> tuple[PyTree, None]:
            gradient = jax.grad(lambda x: plain_loss(features, x, support))(x)
            if first_order:
                gradient = lax.stop_gradient(gradient)
            return optax.tree.add_scale(x, -lr, gradient), None

        return lax.scan(step, x, None, length=steps)[0]

    return adapt


def fitted_head(support: Array, start: PyTree, ridge: float) -> PyTree:
    """Fit a linear head to features (way, shot, width): minimise the mean cross entropy plus ridge·‖head‖².

    Nesterov's accelerated gradient method is used, with the strong convexity μ = 2·ridge and the bound
    L = ½‖[φ 1][φ 1]ᵀ‖/n + 2·ridge of the smoothness, which holds since the Hessian of the softmax loss is at most ½.
    """
    flat = support.reshape(-1, support.shape[-1])
    smoothness = 0.5 * jnp.linalg.norm(flat @ flat.T + 1) / len(flat) + 2 * ridge
    root = jnp.sqrt(2 * ridge / smoothness)
    momentum = (1 - root) / (1 + root)
    loss = support_loss(support, ridge)

    def step(_: int, pair: Any) -> Any:
        head, ahead = pair
        new = optax.tree.add_scale(ahead, -1 / smoothness, jax.grad(loss)(ahead))
        return new, optax.tree.add_scale(new, momentum, optax.tree.sub(new, head))

    return lax.fori_loop(0, HEAD_STEPS, step, (start, start))[0]


def descended_head(support: Array, start: PyTree, ridge: float) -> PyTree:
    """Fit a head with hidden layers to features (way, shot, width) by gradient steps with adaptive sizes.

    The loss is the mean cross entropy plus ridge·‖head‖². A step −s·d along the gradient d is accepted if it lowers the
    loss by at least s‖d‖²/2; then s becomes 1.5 times as large. Otherwise the step is rejected, and s is halved.
    """
    loss = support_loss(support, ridge)

    def step(_: int, pair: Any) -> Any:
        head, size = pair
        value, slope = jax.value_and_grad(loss)(head)
        new = optax.tree.add_scale(head, -size, slope)
        lower = loss(new) <= value - size / 2 * optax.tree.vdot(slope, slope)
        return optax.tree.where(lower, (new, 1.5 * size), (head, size / 2))

    return lax.fori_loop(0, HEAD_STEPS, step, (start, jnp.ones((), support.dtype)))[0]


def support_loss(support: Array, ridge: float) -> Callable[[PyTree], Array]:
    """Return the loss of a head: the mean cross entropy on features (way, shot, width) plus ridge·‖head‖²."""
    flat, labels = support.reshape(-1, support.shape[-1]), labels_of(*support.shape[:2])
    return lambda head: cross_entropy(head_logits(head, flat), labels) + ridge * optax.tree.vdot(head, head)


def episode_accuracy(
    episodes: Episodes, logits: Callable[[PyTree, Array, Array], Array], features: Features | None = None
) -> Callable[[PyTree, PyTree], Array]:
    """Return the function from (x, y) to the share of query images whose largest logit is at their label.

    Args:
        episodes: the test episodes.
        logits: a function from (x, support, query) to logits (way·queries, way). Support and query are images or, if
            `features` is given, features.
        features: a function that computes the features of images. Each image's features are computed once for all
            episodes.
    """
    images, support, query = (jnp.asarray(leaf) for leaf in episodes)
    labels = labels_of(*query.shape[1:])

    def measure(x: PyTree, y: PyTree) -> Array:
        inputs = images if features is None else in_passes(lambda image: features(x, image[None])[0], images)

        def correct(places: tuple[Array, Array]) -> Array:
            return jnp.argmax(logits(x, inputs[places[0]], inputs[places[1]]), axis=-1) == labels

        at_a_time = EPISODES_AT_A_TIME if features is None else EVALUATION_BATCH
        return jnp.mean(lax.map(correct, (support, query), batch_size=at_a_time).astype(float))

    return measure

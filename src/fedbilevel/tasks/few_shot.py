"""Few-shot learning: x is a backbone, y the heads of all clients' tasks.

    f_i(x, y) = mean_j CE(y_j(φ(x))) on the query images of task j,
    g_i(x, y) = mean_j [CE(y_j(φ(x))) on its support images + ridge·‖y_j‖²],   j over the tasks of client i.

A task tells N = `way` of a client's characters apart: meta-learning. RABO's few-shot problem (Li et al. 2025, section
V-A), with a linear head y_j for each task; the paper's one MLP for all is `shared` and `head_hidden`. A shared y's
columns mean other characters in each task: beyond what it learns by heart, its f is no less than chance's, log N. (One
head with a column for each of all characters was tried: no column came near its minimiser.) With hidden layers g is not
convex in y. As no two tasks share a head, ∇²yy g is block diagonal, client by client and task by task: where all hold
the whole model and invert exactly, clients' own hypergradients have the federation's as their mean. φ = z/√(1 + mean
z²), z being what the backbone gives: that would grow as x learns, and with it the curvature of g in y, until no step
size holds. Single-level objectives have the same φ, so that methods differ in nothing else.

Images of B tasks are (B, way, n, 28, 28) uint8; `Features` takes them so.
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
from fedbilevel.data.characters import by_alphabet
from fedbilevel.tasks import networks
from fedbilevel.tasks.images import NETWORKS
from fedbilevel.tasks.networks import EVALUATION_BATCH, cross_entropy, in_passes
from fedbilevel.tasks.task import Task, require_memory

Objective = Literal["bilevel", "joint", "protonet", "maml", "fomaml"]


def few_shot(
    *,
    data: str = "strokes",
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
    """Deal characters out to clients, who make tasks of them; a sample is a task. Measured on other alphabets.

    Args:
        data: "strokes" (generated) or "omniglot".
        network, hidden: "conv4" with its channels, a number or four; or another network of hyper_representation.
        head_hidden: the widths of each head's hidden layers, with ReLU, whose units submodels cut too; empty: linear.
        shared: one head for all tasks, as RABO's paper prints it.
        clients: M.
        partition_by: "iid", or "alphabets", which stay whole.
        tasks: the number of tasks of each client. They are dealt from its shuffled characters, which are shuffled anew
            when fewer than `way` are left.
        way: N, the characters of a task.
        shot: K, the support images of each character, drawn for each task.
        queries: the query images of each character, other drawings; None takes all that are left.
        holdout: the share of the training characters that is set aside; "validation_accuracy", on tasks made of them,
            is then measured in place of "test_accuracy".
        objective: "bilevel"; or a single-level objective: "joint", (f + g)/2 in x = (backbone, heads/√M), so that the
            server's mean over M clients moves heads as far as that over their one owner would; "protonet", whose
            x is the backbone (Snell et al. 2017); "maml" and "fomaml", whose x is the backbone and a head of `way`
            columns, adapted to a task's support before its queries count (Finn et al. 2017).
        ridge: as above; the larger, the easier is the inner problem and the more does a head look like class means.
        adaptation_steps, adaptation_lr: of "maml" and "fomaml", which leaves out second derivatives.
        test_episodes: how many new tasks "test_accuracy" is a mean over, the same at each evaluation. On their support
            a new head is fitted (shared or not: y is of training tasks), prototypes are taken or x is adapted, as the
            objective has it.
        seed: of the partition, the tasks, the starting point and the test episodes.
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
    require(not shared or objective in ("bilevel", "joint"), "shared", shared, "for 'bilevel' and 'joint' alone")
    require(is_number(holdout) and 0 <= holdout < 1, "holdout", holdout, "at least 0 and below 1")
    found = held_out_characters(load_characters(data), holdout, seed) if holdout else load_characters(data)
    part = "validation" if holdout else "test"
    held = _dealt(found.train, clients, partition_by, way, seed)
    left = found.train.images.shape[1] - shot
    require(left >= 1, "shot", shot, f"at most {left + shot - 1}: of {left + shot} drawings")
    require_count("queries", queries, optional=True)
    asked = left if queries is None else queries
    require(asked <= left, "queries", queries, f"at most {left}: a character has {left + shot} drawings")
    require_memory(clients * way * (shot + asked) * found.train.images[0, 0].nbytes / 8, tasks=tasks)
    require_memory(way * found.test.images.shape[1], test_episodes=test_episodes)
    require(way <= len(found.test.images), "way", way, f"at most {len(found.test.images)}, the {part} characters")

    net = NETWORKS[network](found.train.images.shape[2:], tuple(hidden), way)
    backbone, last = net.init(jax.random.key(seed))
    head, head_structure = head_of(last, net.structure.y, head_hidden, seed)
    features = bounded(_standardising(net, found))
    setting = Setting(
        features=features,
        ridge=ridge,
        tasks=None if shared else clients * tasks,
        clients=clients,
        adapt=adapted(features, adaptation_lr, adaptation_steps, objective == "fomaml"),
        structure=Structure(net.structure.x, head_structure),
        backbone=backbone,
        head=head,
        test=draw_episodes(found.test.images, test_episodes, way, shot, asked, seed),
    )
    problem, x0, y0, accuracy = OBJECTIVES[objective](setting)
    query, support = _draw_tasks(found.train.images, held, tasks, way, shot, asked, seed)
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
    """Hold the network, the start values, the constants and the test episodes that losses and metrics are made from."""

    features: Features
    ridge: float
    tasks: int | None  # of all clients; None: they share a head
    clients: int
    adapt: Adapt
    structure: Structure  # of the backbone and one head
    backbone: PyTree
    head: PyTree  # where every head begins
    test: Episodes

    @property
    def heads(self) -> PyTree:
        """Return a head for each task, leaves (tasks, …), or the one that they share."""
        ahead = () if self.tasks is None else (self.tasks,)
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (*ahead, *leaf.shape)), self.head)

    @property
    def structure_of_heads(self) -> PyTree:
        return jax.tree.map(lambda words: words if self.tasks is None else f"_ {words}", self.structure.y)

    def of_tasks(self, y: PyTree, batch: dict[str, Array]) -> PyTree:
        """Return the heads of a batch's tasks, leaves (B, …), or, with leaves (1, …), the one that they share."""
        return jax.tree.map(lambda leaf: leaf[None] if self.tasks is None else leaf[batch["task"]], y)


Made = tuple[Problem, PyTree, PyTree, Callable[[PyTree, PyTree], Array]]
"""Problem, x0, y0, accuracy."""


def _bilevel(setting: Setting) -> Made:
    def outer(x: PyTree, y: PyTree, batch: dict[str, Array]) -> Array:
        return heads_loss(setting.features, x, setting.of_tasks(y, batch), batch["image"])

    def inner(x: PyTree, y: PyTree, batch: dict[str, Array]) -> Array:
        heads = setting.of_tasks(y, batch)
        return heads_loss(setting.features, x, heads, batch["image"]) + _penalty(setting, heads)

    problem = Bilevel(outer, inner, structure=Structure(setting.structure.x, setting.structure_of_heads))
    return problem, setting.backbone, setting.heads, _accuracy_of_new_heads(setting)


def _joint(setting: Setting) -> Made:
    """Make the single-level problem in x = (backbone, heads / unit).

    A head belongs to one client, so that the server's mean over M clients moves it by an M-th of what its client did.
    In units of √M its gradient is √M times as large, and its step M times: it moves as if its owner were alone.
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
    """Compute the mean over tasks of ridge·‖y_j‖²."""
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


def _standardising(net: networks.Network, found: Characters) -> Features:
    def features(x: PyTree, images: Array) -> Array:
        flat = images.reshape(-1, *images.shape[-2:])
        pixels = (flat.astype(float) / 255 - found.mean) / found.std
        return net.features(x, net.prepare(pixels)).reshape(*images.shape[:-2], -1)  # type: ignore[arg-type]

    return features


def held_out_characters(found: Characters, share: float, seed: int) -> Characters:
    """Put this share of the training characters, drawn at random, in place of the test characters."""
    train, total = found.train, len(found.train.images)
    aside, rest = np.split(np.random.default_rng([seed, 5]).permutation(total), [max(1, round(share * total))])
    taken, left = (replace(train, images=train.images[part], alphabet=train.alphabet[part]) for part in (aside, rest))
    return replace(found, train=left, test=taken)


def _dealt(train: Drawings, clients: int, by: str, way: int, seed: int) -> list[np.ndarray]:
    if by not in ("iid", "alphabets"):
        raise unknown("partition_by", by, ("iid", "alphabets"))
    apart = len(train.images if by == "iid" else train.alphabets)
    parts = "characters" if by == "iid" else "alphabets"
    require(clients <= apart, "clients", clients, f"at most {apart}, the training {parts}, with partition_by = {by!r}")
    held = (iid if by == "iid" else by_alphabet)(train.alphabet, clients, seed=seed)
    fewest = min(map(len, held))
    require(way <= fewest, "way", way, f"at most {fewest}, the characters of the client that has fewest")
    return held


def _draw_tasks(
    images: np.ndarray, held: list[np.ndarray], tasks: int, way: int, shot: int, queries: int, seed: int
) -> tuple[Ragged, Ragged]:
    """Draw the query and support images of each client's tasks, and number the tasks through the federation."""
    rng = np.random.default_rng([seed, 4])
    characters = np.concatenate([_deal(rng, own, tasks, way) for own in held])  # (all tasks, way)
    order = rng.permuted(np.broadcast_to(np.arange(images.shape[1]), (*characters.shape, images.shape[1])), axis=-1)
    number = np.arange(len(characters), dtype=np.int32)
    parts = np.split(number, len(held))

    def samples(drawings: slice) -> Ragged:
        found = images[characters[..., None], order[..., drawings]]
        return Ragged(*pack_arrays({"image": found, "task": number}, parts))

    return samples(slice(shot, shot + queries)), samples(slice(shot))


def _deal(rng: np.random.Generator, own: np.ndarray, tasks: int, way: int) -> np.ndarray:
    """Deal (tasks, way) characters from shuffled packs; no character is twice in a task."""
    each = len(own) // way
    packs = [rng.permutation(own)[: each * way].reshape(each, way) for _ in range(-(-tasks // each))]
    return np.concatenate(packs)[:tasks]


HEAD_STEPS = 300  # when a head is fitted to the support of a test episode
EPISODES_AT_A_TIME = 10  # that are adapted together when measuring accuracy: bounds the memory of activations

Features = Callable[[PyTree, Array], Array]
"""(backbone, images (..., 28, 28) uint8) -> (..., width)."""
Adapt = Callable[[PyTree, Array], PyTree]
"""(x, support images (way, shot, 28, 28)) -> x."""


def bounded(features: Features) -> Features:
    """Divide the features z of each image by √(1 + mean z²): their mean square is below 1, and grows with z."""

    def divided(x: PyTree, images: Array) -> Array:
        found = features(x, images)
        return found * lax.rsqrt(1 + jnp.mean(jnp.square(found), axis=-1, keepdims=True))

    return divided


class Episodes(NamedTuple):
    """Hold test episodes, as places in `images`, (used, 28, 28) uint8."""

    images: np.ndarray
    support: np.ndarray  # (episodes, way, shot)
    query: np.ndarray  # (episodes, way, queries)


def draw_episodes(images: np.ndarray, count: int, way: int, shot: int, queries: int, seed: int) -> Episodes:
    """Draw episodes from images (characters, drawings, 28, 28): different characters, and drawings of each."""
    rng = np.random.default_rng([seed, 3])
    characters, drawings = images.shape[:2]
    chosen = np.stack([rng.permutation(characters)[:way] for _ in range(count)])
    order = rng.permuted(np.broadcast_to(np.arange(drawings), (count, way, drawings)), axis=-1)[..., : shot + queries]
    used, place = np.unique(chosen[..., None] * drawings + order, return_inverse=True)
    place = place.reshape(order.shape)
    return Episodes(images.reshape(-1, *images.shape[2:])[used], place[..., :shot], place[..., shot:])


def labels_of(way: int, each: int) -> Array:
    """Return the labels of `each` images of every character 0..way − 1, in order: (way·each,)."""
    return jnp.repeat(jnp.arange(way), each)


def head_of(last: PyTree, words: PyTree, hidden: Sequence[int], seed: int) -> tuple[PyTree, PyTree]:
    """Return where a head begins and its structure: drawn hidden layers below a last one of zeros.

    With zeros in all layers only the last bias would have a gradient: a saddle, which no descent leaves.
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


def head_logits(head: PyTree, found: Array) -> Array:
    """Compute the logits of features, (…, n, width), under a head; under B heads, with leaves (B, …), if … is B."""
    for layer in head.get("hidden", ()):
        found = jax.nn.relu(found @ layer["weight"] + layer["bias"][..., None, :])
    return found @ head["weight"] + head["bias"][..., None, :]


def heads_loss(features: Features, x: PyTree, heads: PyTree, images: Array) -> Array:
    """Compute the mean cross entropy of B tasks under their heads, leaves (B, …), or under one with leaves (1, …)."""
    tasks, way, each = images.shape[:3]
    logits = head_logits(heads, features(x, images).reshape(tasks, way * each, -1))
    return cross_entropy(logits.reshape(-1, way), jnp.tile(labels_of(way, each), tasks))


def prototype_logits(support: Array, query: Array) -> Array:
    """Compute −‖query − prototype‖², (way·queries, way), a prototype being the mean of a character's support.

    support: (way, shot, width), query: (way, queries, width). Snell, Swersky, Zemel, NeurIPS 2017, equations 1 and 2.
    """
    gap = query.reshape(-1, 1, query.shape[-1]) - support.mean(axis=1)
    return -jnp.sum(jnp.square(gap), axis=-1)


def plain_loss(features: Features, x: tuple[PyTree, PyTree], images: Array) -> Array:
    """Compute the mean cross entropy of an episode, (way, n, 28, 28), under the head of `way` columns in x."""
    return cross_entropy(plain_logits(features, x, images), labels_of(*images.shape[:2]))


def plain_logits(features: Features, x: tuple[PyTree, PyTree], images: Array) -> Array:
    """Compute the logits of an episode's images under the head in x, (way·n, way)."""
    backbone, head = x
    return head_logits(head, features(backbone, images.reshape(-1, *images.shape[2:])))


def adapted(features: Features, lr: float, steps: int, first_order: bool) -> Adapt:
    """Return the map that takes `steps` gradient steps of x on an episode's support.

    With `first_order` the gradients count as constants.

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


def fitted_head(support: Array, start: PyTree, ridge: float) -> PyTree:
    """Fit the linear head on (way, shot, width) features that minimises mean cross entropy + ridge·‖head‖².

    By accelerated gradient steps (Nesterov's for strong convexity μ = 2·ridge and smoothness L, of which
    ½‖[φ 1][φ 1]ᵀ‖/n + 2·ridge is a bound: softmax's Hessian is at most ½).
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
    """Lower the same loss of a head with hidden layers by gradient steps from `start`.

    A step that lowers it by half of what its slope promises, or more, is taken, and the next is half as long again; any
    other is not, and the next is half as long.
    """
    loss = support_loss(support, ridge)

    def step(_: int, pair: Any) -> Any:
        head, size = pair
        value, slope = jax.value_and_grad(loss)(head)
        new = optax.tree.add_scale(head, -size, slope)
        lower = loss(new) <= value - size / 2 * optax.tree.vdot(slope, slope)
        return jax.tree.map(lambda a, b: jnp.where(lower, a, b), (new, 1.5 * size), (head, size / 2))

    return lax.fori_loop(0, HEAD_STEPS, step, (start, jnp.ones((), support.dtype)))[0]


def support_loss(support: Array, ridge: float) -> Callable[[PyTree], Array]:
    """Return the mean cross entropy on (way, shot, width) features + ridge·‖head‖², of a head."""
    flat, labels = support.reshape(-1, support.shape[-1]), labels_of(*support.shape[:2])
    return lambda head: cross_entropy(head_logits(head, flat), labels) + ridge * optax.tree.vdot(head, head)


def episode_accuracy(
    episodes: Episodes, logits: Callable[[PyTree, Array, Array], Array], features: Features | None = None
) -> Callable[[PyTree, PyTree], Array]:
    """Return (x, y) -> the share of the query images that `logits` gets right.

    logits: (x, support, query) -> (way·queries, way); its support and query are images, or, with `features`, theirs.
    Features are computed once for each image, however many episodes it is in.
    """
    images, support, query = (jnp.asarray(leaf) for leaf in episodes)
    labels = labels_of(*query.shape[1:])

    def measure(x: PyTree, y: PyTree) -> Array:
        found = images if features is None else in_passes(lambda image: features(x, image[None])[0], images)

        def correct(places: tuple[Array, Array]) -> Array:
            return jnp.argmax(logits(x, found[places[0]], found[places[1]]), axis=-1) == labels

        at_a_time = EPISODES_AT_A_TIME if features is None else EVALUATION_BATCH
        return jnp.mean(lax.map(correct, (support, query), batch_size=at_a_time).astype(float))

    return measure

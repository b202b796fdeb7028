"""Few-shot learning: x is a backbone, y a linear head with a column for each training character.

f_i(x, y) = E CE(z(x, y), c) on query images,   g_i(x, y) = E CE(z(x, y), c) + ridge·(N/C)·‖y‖² on support images

An episode is N = `way` of a client's characters, and z an image's logits under the columns of these alone. The task of
RABO and RAFBO (Li et al.), made well posed: there y is one head of N columns, which mean other characters in each
episode, so that no y minimises g. Here a column is pulled by a share N/C of the episodes, C being all training
characters, and the ridge on it is as strong, beside that, as `ridge` is for the head of one episode.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from fedbilevel.core.client import Clients, Ragged
from fedbilevel.core.errors import require, require_count, unknown
from fedbilevel.core.problem import Bilevel, Problem, SingleLevel
from fedbilevel.core.submodel import Structure
from fedbilevel.core.tree import PyTree
from fedbilevel.data import Characters, Drawings, iid, load_characters, pack_arrays
from fedbilevel.data.characters import by_alphabet
from fedbilevel.tasks import episodes as losses
from fedbilevel.tasks import networks
from fedbilevel.tasks.backbones import BACKBONES
from fedbilevel.tasks.images import NETWORKS
from fedbilevel.tasks.task import Task, in_turn

Objective = Literal["bilevel", "joint", "protonet", "maml", "fomaml"]
KNOWN = {**NETWORKS, **BACKBONES}


def few_shot(
    *,
    data: str = "strokes",
    network: str = "conv4",
    hidden: Sequence[int] = (32,),
    clients: int = 10,
    partition_by: Literal["iid", "alphabets"] = "iid",
    way: int = 5,
    shot: int = 1,
    queries: int | None = 5,
    objective: Objective = "bilevel",
    ridge: float = 0.01,
    adaptation_steps: int = 1,
    adaptation_lr: float = 0.4,
    capacities: Sequence[float] = (),
    test_episodes: int = 200,
    local_steps: Any = None,
    seed: int = 0,
) -> Task:
    """Deal characters out to clients; a sample is a character, `way` of them an episode. Measured on other alphabets.

    An algorithm's batch_size counts characters and must be a multiple of `way`.

    Args:
        data: "strokes" (generated) or "omniglot".
        network, hidden: "conv4" with its channels, once or four times; or "mlp" or "cnn" as in hyper_representation.
        clients: M.
        partition_by: "iid", or "alphabets", which stay whole.
        way: N, the characters of an episode.
        shot: K, the support images of each: of its drawings in an order of its own the first.
        queries: query images of each, the drawings after those; None takes all that are left.
        objective: "bilevel"; or single-level ones: "joint", (f + g)/2 in x = (backbone, head); "protonet", whose x is
            the backbone (Snell et al. 2017); "maml" and "fomaml", of which x is the backbone and a head of `way`
            columns, adapted to an episode's support before its queries count (Finn et al. 2017).
        ridge: of a head; above.
        adaptation_steps, adaptation_lr: of "maml" and "fomaml", which leaves out second derivatives.
        capacities: the shares of the model that clients can hold, dealt out in turn; empty: all hold all.
        test_episodes: how many episodes "test_accuracy" is a mean over, the same at each evaluation. On their support a
            new head is fitted, prototypes are taken or x is adapted, as the objective has it.
        local_steps: see Clients.
        seed: of the partition, the drawings' order, the starting point and the test episodes.
    """
    require_count("way", way)
    require(way >= 2, "way", way, "at least 2")
    require_count("shot", shot)
    require_count("adaptation_steps", adaptation_steps)
    require(adaptation_lr > 0, "adaptation_lr", adaptation_lr, "positive")
    require_count("test_episodes", test_episodes)
    require(ridge > 0, "ridge", ridge, "positive")
    for field, got, allowed in (("network", network, KNOWN), ("objective", objective, OBJECTIVES)):
        if got not in allowed:
            raise unknown(field, got, allowed)
    require_count("clients", clients)
    found = load_characters(data)
    held = _dealt(found.train, clients, partition_by, way, seed)
    left = found.train.images.shape[1] - shot
    require(left >= 1, "shot", shot, f"at most {left + shot - 1}: of {left + shot} drawings")
    require_count("queries", queries, optional=True)
    asked = left if queries is None else queries
    require(asked <= left, "queries", queries, f"at most {left}: a character has {left + shot} drawings")
    require(way <= len(found.test.images), "way", way, f"at most {len(found.test.images)}, the test characters")

    characters = len(found.train.images)
    net = KNOWN[network](found.train.images.shape[2:], tuple(hidden), characters)
    backbone, head = net.init(jax.random.key(seed))
    setting = Setting(
        features=_standardising(net, found),
        way=way,
        ridge=ridge,
        share=way / characters,
        adapt=losses.adapted(_standardising(net, found), adaptation_lr, adaptation_steps, objective == "fomaml"),
        structure=net.structure,
        backbone=backbone,
        head=jax.tree.map(jnp.zeros_like, head),
        test=losses.draw_episodes(found.test.images, test_episodes, way, shot, asked, seed),
    )
    problem, x0, y0, accuracy = OBJECTIVES[objective](setting)
    outer, inner = _samples(found.train.images, held, shot, asked, seed, both=objective != "bilevel")
    return Task(
        name="few_shot",
        problem=problem,
        clients=Clients(
            outer=outer,
            inner=inner,
            local_steps=local_steps,
            capacity=in_turn(capacities, clients),
            distinct=True,
        ),
        x0=x0,
        y0=y0,
        metrics={"test_accuracy": accuracy},
    )


class Setting(NamedTuple):
    """What the objectives are made from."""

    features: losses.Features
    way: int
    ridge: float
    share: float  # N/C
    adapt: losses.Adapt
    structure: Structure
    backbone: PyTree
    head: PyTree
    test: losses.Episodes


Made = tuple[Problem, PyTree, PyTree, Callable[[PyTree, PyTree], Array]]
"""Problem, x0, y0, accuracy."""


def _bilevel(setting: Setting) -> Made:
    outer, inner = _outer_and_inner(setting)
    problem = Bilevel(
        _counted(lambda x, y, batch: outer(x, y, batch["image"], batch["character"])),
        _counted(lambda x, y, batch: inner(x, y, batch["image"], batch["character"])),
        structure=setting.structure,
    )
    accuracy = _accuracy_of_new_heads(setting)
    return problem, setting.backbone, setting.head, lambda x, y: accuracy(x)


def _joint(setting: Setting) -> Made:
    outer, inner = _outer_and_inner(setting)

    def loss(x: PyTree, batch: dict[str, Array]) -> Array:
        outer_loss = outer(*x, batch["query"], batch["character"])
        return (outer_loss + inner(*x, batch["support"], batch["character"])) / 2

    problem = SingleLevel(_counted(loss), structure=Structure(x=(setting.structure.x, setting.structure.y)))
    accuracy = _accuracy_of_new_heads(setting)
    return problem, (setting.backbone, setting.head), None, lambda x, y: accuracy(x[0])


def _outer_and_inner(setting: Setting) -> tuple[Callable[..., Array], Callable[..., Array]]:
    """f and g of (x, y, images, character)."""

    def outer(x: PyTree, y: PyTree, images: Array, character: Array) -> Array:
        return losses.head_loss(setting.features, setting.way, x, y, images, character)

    def inner(x: PyTree, y: PyTree, images: Array, character: Array) -> Array:
        return outer(x, y, images, character) + setting.ridge * setting.share * optax.tree.vdot(y, y)

    return outer, inner


def _accuracy_of_new_heads(setting: Setting) -> Callable[[PyTree], Array]:
    def logits(support: Array, query: Array) -> Array:
        head = losses.fitted_head(support, setting.ridge)
        return query.reshape(-1, query.shape[-1]) @ head["weight"] + head["bias"]

    return losses.accuracy_of_features(setting.features, setting.test, logits)


def _protonet(setting: Setting) -> Made:
    def loss(x: PyTree, batch: dict[str, Array]) -> Array:
        return losses.prototype_loss(setting.features, setting.way, x, batch)

    problem = SingleLevel(_counted(loss), structure=Structure(x=setting.structure.x))
    accuracy = losses.accuracy_of_features(setting.features, setting.test, losses.prototype_logits)
    return problem, setting.backbone, None, lambda x, y: accuracy(x)


def _maml(setting: Setting) -> Made:
    def loss(x: PyTree, batch: dict[str, Array]) -> Array:
        return losses.adapted_loss(setting.features, setting.adapt, setting.way, x, batch)

    head = jax.tree.map(lambda leaf: leaf[..., : setting.way], setting.head)
    problem = SingleLevel(_counted(loss), structure=Structure(x=(setting.structure.x, setting.structure.y)))
    accuracy = losses.accuracy_after_adaptation(setting.features, setting.test, setting.adapt)
    return problem, (setting.backbone, head), None, lambda x, y: accuracy(x)


OBJECTIVES: dict[str, Callable[[Setting], Made]] = {
    "bilevel": _bilevel,
    "fomaml": _maml,
    "joint": _joint,
    "maml": _maml,
    "protonet": _protonet,
}


def _counted(loss: Callable[..., Array]) -> Callable[..., Array]:
    """The loss, which of a single character, as shapes are checked with, is no number: it is no episode."""

    def counted(*arguments: PyTree) -> Array:
        if len(arguments[-1]["character"]) == 1:
            return jnp.nan * optax.tree.sum(arguments[:-1])  # nor is its gradient
        return loss(*arguments)

    return counted


def _standardising(net: networks.Network, found: Characters) -> losses.Features:
    def features(x: PyTree, images: Array) -> Array:
        flat = images.reshape(-1, *images.shape[-2:])
        pixels = (flat.astype(float) / 255 - found.mean) / found.std
        return net.features(x, net.prepare(pixels)).reshape(*images.shape[:-2], -1)  # type: ignore[arg-type]

    return features


def _dealt(train: Drawings, clients: int, by: str, way: int, seed: int) -> list[np.ndarray]:
    """The training characters of each client."""
    if by not in ("iid", "alphabets"):
        raise unknown("partition_by", by, ("iid", "alphabets"))
    apart = len(train.images if by == "iid" else train.alphabets)
    parts = "characters" if by == "iid" else "alphabets"
    require(clients <= apart, "clients", clients, f"at most {apart}, the training {parts}, with partition_by = {by!r}")
    held = (iid if by == "iid" else by_alphabet)(train.alphabet, clients, seed=seed)
    fewest = min(map(len, held))
    require(way <= fewest, "way", way, f"at most {fewest}, the characters of the client that has fewest")
    return held


def _samples(
    images: np.ndarray, held: list[np.ndarray], shot: int, queries: int, seed: int, both: bool
) -> tuple[Ragged, Ragged | None]:
    """Outer and inner samples, row for row of the same characters; or `both` in the outer ones."""
    rng = np.random.default_rng([seed, 4])
    order = rng.permuted(np.broadcast_to(np.arange(images.shape[1]), images.shape[:2]), axis=1)
    rows = np.arange(len(images), dtype=np.int32)
    support = images[rows[:, None], order[:, :shot]]
    query = images[rows[:, None], order[:, shot : shot + queries]]
    if both:
        return Ragged(*pack_arrays({"support": support, "query": query, "character": rows}, held)), None
    outer, inner = (pack_arrays({"image": part, "character": rows}, held) for part in (query, support))
    return Ragged(*outer), Ragged(*inner)

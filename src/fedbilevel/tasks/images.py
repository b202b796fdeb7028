"""Load labelled images, deal them out to clients and build their network: helpers of all tasks with images."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.errors import ConfigurationError, require, require_count, unknown
from fedbilevel.core.problem import Problem
from fedbilevel.core.ragged import Ragged
from fedbilevel.core.tree import PyTree
from fedbilevel.data import LOADERS, TABLES, Dataset, load, load_table, pack, partition, standardise
from fedbilevel.data.clients import Indices
from fedbilevel.tasks import networks
from fedbilevel.tasks.networks import BACKBONES

P = TypeVar("P", bound=Problem)
NETWORKS = {"mlp": networks.mlp, "cnn": networks.cnn, **BACKBONES}
WITH_LINEAR = {"linear": networks.linear, **NETWORKS}


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """A set of labelled images with their published pixels, and a network that takes standardised pixels.

    `part` says on which images metrics are measured: "test", or "validation" if held-out training images take the place
    of the test images.
    """

    data: Dataset
    model: networks.Network
    part: str

    def dealt(self, clients: int, by: str, options: Mapping[str, Any] | None, seed: int) -> list[Indices]:
        """Deal the training images out to clients, and return the indices of each client's images."""
        return partition(by, self.data.train_labels, clients, seed=seed, **dict(options or {}))

    def rows(self, chosen: Sequence[Indices]) -> Ragged:
        """Pack each client's training images and labels as {"image", "label"}, with pixels prepared for the network.

        `chosen` has the indices of each client's images.
        """
        arrays, start, size = pack(self.data.train_images, self.data.train_labels, chosen)
        return Ragged({**arrays, "image": self.model.prepare(self.standard(arrays["image"]))}, start, size)

    def standard(self, images: np.ndarray) -> np.ndarray:
        """Return standardised images, float32."""
        return standardise(images, self.data.mean, self.data.std)

    def accuracy(self) -> Callable[[PyTree, PyTree], Array]:
        """Return the function from (body, head) to the accuracy on the images of `part`."""
        return networks.accuracy(self.model, self.standard(self.data.test_images), self.data.test_labels)

    def training_accuracy(self, count: int, seed: int) -> Callable[[PyTree, PyTree], Array]:
        """Return the function from (body, head) to the accuracy on `count` training images, which are drawn now."""
        require_count("train_samples", count)
        total = len(self.data.train_labels)
        require(count <= total, "train_samples", count, f"at most {total}, the number of training images")
        drawn = np.random.default_rng([seed, 3]).choice(total, count, replace=False)
        chosen = self.standard(self.data.train_images[drawn])
        return networks.accuracy(self.model, chosen, self.data.train_labels[drawn])

    def own_accuracy(self, body: PyTree, head: PyTree, batch: PyTree) -> Array:
        """Return the accuracy on a client's own images, a batch {"image", "label"}."""
        logits = self.model.logits(body, head, batch["image"])
        return jnp.mean(jnp.argmax(logits, axis=-1) == batch["label"])

    def class_accuracies(self) -> Callable[[PyTree, PyTree], Array]:
        """Return the function from (body, head) to an array with the accuracy on each class of the images of `part`."""
        counts = np.bincount(self.data.test_labels, minlength=self.data.classes)
        if not counts.all():
            path, remedy = f"number of {self.part} images of class {counts.argmin()}", "use a larger holdout"
            message = (
                f"class {counts.argmin()} has no {self.part} image, so that its accuracy cannot be measured; {remedy}"
            )
            raise ConfigurationError(path=path, got=0, allowed=f"1 or more: {remedy}", message=message)
        right = networks.correctness(self.model, self.standard(self.data.test_images), self.data.test_labels)
        truth = jnp.asarray(self.data.test_labels)
        return lambda body, head: jax.ops.segment_sum(right(body, head), truth, len(counts)) / counts


def load_images(
    data: str,
    network: str,
    hidden: Sequence[int],
    *,
    ratio: float = 1.0,
    holdout: float = 0.0,
    seed: int = 0,
    known: Mapping[str, Callable[..., networks.Network]] = NETWORKS,
) -> LabelledImages:
    """Load a set of images and build its network.

    A share of the training images is held out, and the others are thinned by `ratio`.

    Args:
        data: "digits" (part of scikit-learn), "mnist", "fashion-mnist" or "cifar-10".
        network, hidden: "mlp" with hidden widths, "cnn" with (channels, channels, dense width), "conv4" with
            (channels,), "resnet12" or "resnet18" with four numbers of channels.
        ratio: the number of training images of the last class, divided by that of the first class; see `long_tailed`.
        holdout: the share of the training images that takes the place of the test images.
        seed: the seed by which held-out images are drawn.
        known: the allowed networks; `WITH_LINEAR` for a task whose y is the whole network.
    """
    require(network in known, "network", network, f"one of {sorted(known)}")
    require(0 <= holdout < 1, "holdout", holdout, "at least 0 and below 1")
    require(0 < ratio <= 1, "ratio", ratio, "above 0 and at most 1")
    dataset = load(data)
    if holdout:
        dataset = held_out(dataset, holdout, seed)
    if ratio < 1:
        dataset = long_tailed(dataset, ratio)
    model = known[network](dataset.train_images.shape[1:], tuple(hidden), dataset.classes)
    return LabelledImages(dataset, model, "validation" if holdout else "test")


def load_rows(data: str, holdout: float, seed: int) -> Dataset:
    """Load a table or a set of images.

    If `holdout` is above 0, this share of the training rows takes the place of the test rows.
    """
    require(0 <= holdout < 1, "holdout", holdout, "at least 0 and below 1")
    if data not in TABLES and data not in LOADERS:
        raise unknown("data", data, [*TABLES, *LOADERS])
    dataset = load_table(data) if data in TABLES else load(data)
    return held_out(dataset, holdout, seed) if holdout else dataset


def long_tailed(data: Dataset, ratio: float) -> Dataset:
    """Thin the training images, so that their numbers fall exponentially from the first class to the last.

    Let n be the number of training images divided by the number C of classes. Class c keeps its images with the ranks
    from 0 to at most n·ratio^(c/(C − 1)), and at least one image. For MNIST and the ratio 0.01, 14,818 images (5,923,
    3,597, …, 61) are left, as in the experiments of FedNest.
    """
    labels, classes = data.train_labels, data.classes
    most = len(labels) / classes * ratio ** (np.arange(classes) / (classes - 1))
    kept = np.sort(np.concatenate([np.flatnonzero(labels == c)[: int(most[c]) + 1] for c in range(classes)]))
    return replace(data, train_images=data.train_images[kept], train_labels=labels[kept])


def held_out(data: Dataset, share: float, seed: int) -> Dataset:
    """Take a random share of the training images for testing, in place of the test images."""
    order = np.random.default_rng([seed, 1]).permutation(len(data.train_labels))
    aside, rest = np.split(order, [max(1, round(share * len(order)))])
    return replace(
        data,
        test_images=data.train_images[aside],
        test_labels=data.train_labels[aside],
        train_images=data.train_images[rest],
        train_labels=data.train_labels[rest],
    )

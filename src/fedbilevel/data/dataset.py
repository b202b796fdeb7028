"""A labelled image data set in memory, and the one way pixels become network input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbilevel.data.errors import DataError

Images = NDArray[Any]
Labels = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images and labels, in the order and the split their makers published.

    train_images, test_images: (n, height, width) or (n, height, width, channel); uint8 in 0..255, or float in
    [0, 1]. train_labels, test_labels: (n,) int32 in 0..classes - 1. mean, std: per channel (one number if the
    images have none), of the training pixels scaled to [0, 1].
    """

    name: str
    train_images: Images
    train_labels: Labels
    test_images: Images
    test_labels: Labels
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def standardised(self) -> Dataset:
        """This data set with both image arrays as `standardise(images, self.mean, self.std)`, float32."""
        return replace(
            self,
            train_images=standardise(self.train_images, self.mean, self.std),
            test_images=standardise(self.test_images, self.mean, self.std),
        )


def standardise(images: Images, mean: float | Sequence[float], std: float | Sequence[float]) -> NDArray[np.float32]:
    """(pixel - mean) / std, per channel, with the pixels of uint8 images first divided by 255.

    images: (n, height, width[, channel]), uint8 in 0..255 or float in [0, 1]. mean, std: one number, or one
    per channel (the last axis), in units of the [0, 1] scale. Returns float32 of the same shape. DataError if
    the shapes do not fit or an std is not positive.
    """
    centre, scale = np.atleast_1d(np.asarray(mean, np.float32)), np.atleast_1d(np.asarray(std, np.float32))
    if centre.shape != scale.shape or centre.ndim != 1 or centre.size not in (1, images.shape[-1]):
        raise DataError(
            f"mean and std have shapes {centre.shape} and {scale.shape}; allowed: one number, or one per "
            f"channel of images of shape {images.shape}."
        )
    if not np.all(scale > 0):
        raise DataError(f"std is {std}; every entry must be above zero.")
    full = 255 if images.dtype == np.uint8 else 1
    out: NDArray[np.float32] = np.divide(images, full, dtype=np.float32, casting="same_kind")
    out -= centre
    out /= scale
    return out

"""Sets of handwritten characters for few-shot learning: `load_characters`, and the set that is generated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbilevel.data import files, omniglot
from fedbilevel.data.drawings import SIDE, Drawings
from fedbilevel.data.errors import DataError, unknown_name
from fedbilevel.data.partitions import Indices, Seed, iid

STROKES_MEAN, STROKES_STD = 0.1158, 0.2889  # of the training pixels of `strokes()`; the tests derive them again
PIXELS = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Characters:
    """Characters to train on, and others, of other alphabets, to test with.

    mean, std: of the training pixels scaled to [0, 1].
    """

    name: str
    train: Drawings
    test: Drawings
    mean: float
    std: float


def load_characters(name: str, *, progress: files.Progress | None = None) -> Characters:
    """The characters called `name`: "omniglot", or "strokes", which are generated and need no file.

    The files of Omniglot are looked for and downloaded as `load` does it; see `omniglot.read`.

    DataError if the name is unknown, a file is damaged, a download fails, or Pillow is missing.
    """
    if name not in CHARACTERS:
        raise unknown_name("set of characters", name, CHARACTERS)
    return CHARACTERS[name](progress)


def by_alphabet(alphabet: NDArray[np.integer], clients: int, *, seed: Seed) -> list[Indices]:
    """Whole alphabets at random, their number equal to within one: per client, its characters in a random order.

    alphabet: (characters,) the number of each one's alphabet. DataError with more clients than alphabets.
    """
    known = np.unique(alphabet)
    if not 1 <= clients <= len(known):
        raise DataError(f"clients is {clients}; allowed: 1 to {len(known)}, the number of alphabets.")
    rng = seed if isinstance(seed, np.random.Generator) else np.random.default_rng([7, seed])
    dealt = iid(known, clients, seed=rng)
    return [rng.permutation(np.flatnonzero(np.isin(alphabet, known[own]))) for own in dealt]


def strokes(
    *, alphabets: tuple[int, int] = (10, 5), characters: int = 20, drawings: int = 20, seed: int = 0
) -> Characters:
    """Made-up characters of two to four strokes, each stroke a quadratic curve; a second's work, the same everywhere.

    The strokes of an alphabet start and end at the same few points and are about equally bent, slanted and thick. Each
    drawing of a character moves its points a little, then turns, scales, shears and shifts it as a whole.

    Args:
        alphabets: how many to train on, and how many to test with.
        characters: of each alphabet.
        drawings: of each character.
        seed: of all of it.
    """
    rng = np.random.default_rng([seed, 2])
    train, test = (
        Drawings(
            np.concatenate([_alphabet(rng, characters, drawings) for _ in range(count)]),
            np.repeat(np.arange(count, dtype=np.int32), characters),
            tuple(f"{part} {number + 1}" for number in range(count)),
        )
        for part, count in zip(("training", "test"), alphabets, strict=True)
    )
    return Characters("strokes", train, test, STROKES_MEAN, STROKES_STD)


def _alphabet(rng: np.random.Generator, characters: int, drawings: int) -> NDArray[np.uint8]:
    """(characters, drawings, SIDE, SIDE). Uniform draws, and operations that IEEE 754 rounds the same everywhere."""
    grid = np.stack(np.meshgrid([-0.6, 0, 0.6], [-0.6, 0, 0.6]), axis=-1).reshape(9, 2)  # the image is [−1, 1]²
    points = (grid + rng.uniform(-0.15, 0.15, grid.shape))[rng.permutation(9)[:6]]
    bend, slant = rng.uniform(0.1, 0.7), rng.uniform(-0.3, 0.3)
    pen = rng.uniform(0.06, 0.1)  # half the width of a line
    fewest = int(rng.integers(2, 4))
    images = []
    for _ in range(characters):
        count = fewest + int(rng.integers(0, 2))
        ends = points[[rng.permutation(6)[:2] for _ in range(count)]]  # (count, 2, 2)
        ends = ends + rng.uniform(-0.1, 0.1, ends.shape)
        middle = (ends[:, 0] + ends[:, 1]) / 2 + bend * rng.uniform(-1, 1, (count, 2))
        curves = np.stack([ends[:, 0], middle, ends[:, 1]], axis=1)
        images.append(_drawn(rng, curves, slant, pen, drawings))
    return np.stack(images)


def _drawn(rng: np.random.Generator, curves: PIXELS, slant: float, pen: float, drawings: int) -> NDArray[np.uint8]:
    """Several drawings of a character, whose curves (count, 3, 2) are given by three control points each."""
    moved = curves + rng.uniform(-0.09, 0.09, (drawings, *curves.shape))
    matrix = np.array([[1.0, slant], [0.0, 1.0]]) + rng.uniform(-0.2, 0.2, (drawings, 2, 2))
    shift = rng.uniform(-0.12, 0.12, (drawings, 2))
    x, y = (
        matrix[:, row, 0, None, None] * moved[..., 0]
        + matrix[:, row, 1, None, None] * moved[..., 1]
        + shift[:, row, None, None]
        for row in (0, 1)
    )  # (drawings, count, 3) both
    time = np.arange(17) / 16
    bernstein = np.stack([(1 - time) * (1 - time), 2 * time * (1 - time), time * time])  # (3, 17)
    along = [sum(bernstein[k] * part[..., k, None] for k in range(3)).reshape(drawings, -1) for part in (x, y)]
    centre = (2 * np.arange(SIDE) + 1) / SIDE - 1
    squares = [(centre - part[..., None]) ** 2 for part in along]  # (drawings, points, SIDE)
    nearest = np.full((drawings, SIDE, SIDE), np.inf)
    for column, row in zip(squares[0].swapaxes(0, 1), squares[1].swapaxes(0, 1), strict=True):
        np.minimum(nearest, row[:, :, None] + column[:, None, :], out=nearest)
    width = pen * rng.uniform(0.8, 1.2, (drawings, 1, 1))
    ink = np.clip((width - np.sqrt(nearest)) * SIDE / 2 + 0.5, 0, 1)  # a pixel's edge is 2/SIDE long
    return np.rint(255 * ink).astype(np.uint8)


def _omniglot(progress: files.Progress | None) -> Characters:
    return Characters("omniglot", *omniglot.read(progress), omniglot.MEAN, omniglot.STD)


def _strokes(progress: files.Progress | None) -> Characters:
    return strokes()


CHARACTERS: dict[str, Callable[[Any], Characters]] = {"omniglot": _omniglot, "strokes": _strokes}

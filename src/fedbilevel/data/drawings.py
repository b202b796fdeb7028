"""Characters, each drawn several times."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SIDE = 28  # pixels of an image's edge


@dataclass(frozen=True, eq=False)
class Drawings:
    """Several drawings of each character.

    images: (characters, drawings, 28, 28) uint8, ink 255 on 0. alphabet: (characters,) int32, the number of each one's
    alphabet among `alphabets`, which are names.
    """

    images: NDArray[np.uint8]
    alphabet: NDArray[np.int32]
    alphabets: tuple[str, ...]

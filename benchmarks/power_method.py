"""How much the power method of `AdaptiveSteps` underestimates the largest curvature while a direction becomes stiff.

The Hessian is diagonal: one entry is 1, and the others are between 1 and 10^-SPREAD. When the vector of the power
method has converged, another entry grows from 0.01 by a factor in each round, up to 10⁶. A cell has the largest
curvature divided by the measured one, in the worst round of the worst of 25 draws. In rows "at rest", no entry grows
for 100 rounds. A step of 1/L is stable if the ratio is at most 2. MIX is the length of the random vector that is added
to the stored one, and AGAIN the number of products (algorithms/parts/curvature.py). A penalty 10^x grows at most by the
factor 1.26 in a round; 1.58 is the factor for twice this change of x.
"""

import numpy as np

from benchmarks.harness import head, row
from fedbilevel.algorithms.parts.curvature import AGAIN, FALL, MIX

SCHEMES = [(0.0, 1), (0.0, AGAIN), (0.03, AGAIN), (0.1, AGAIN), (MIX, AGAIN), (1.0, AGAIN), (MIX, 2), (MIX, 5)]
DRAWS = 25
QUICK = {"draws": 1}


def measured(vector, largest, diagonal, rng, mix, products):
    """Continue the power method. Return the next vector, and the curvature that a client reports."""
    random = rng.normal(size=len(diagonal))
    vector = vector / np.linalg.norm(vector) + mix * random / np.linalg.norm(random)
    for _ in range(products):
        vector = vector / np.linalg.norm(vector)
        vector = diagonal * vector
    return vector, max(np.linalg.norm(vector), FALL * largest)


def lowest(size, spread, growth, mix, products, seed):
    """Simulate 60 rounds in which an entry grows, or 100 rounds in which no entry grows. Return the worst ratio."""
    rng = np.random.default_rng(seed)
    diagonal = 10 ** rng.uniform(-spread, 0, size)
    diagonal[0], diagonal[-1] = 1, 0.01
    vector, largest, worst = rng.normal(size=size), 0.0, 1.0
    for _ in range(300):
        vector = diagonal * vector / np.linalg.norm(vector)
    for _ in range(60 if growth > 1 else 100):
        diagonal[-1] = min(diagonal[-1] * growth, 1e6)
        vector, largest = measured(vector, largest, diagonal, rng, mix, products)
        worst = max(worst, diagonal.max() / largest)
    return worst


def main(draws: int = DRAWS) -> None:
    head("entries", "spread", "another grows by", *(f"MIX {mix:g}, AGAIN {products}" for mix, products in SCHEMES))
    for spread in (0.3, 2):
        for size in (5, 39, 400, 3000):
            for growth in (1.0, 1.26, 1.58):
                cells = [max(lowest(size, spread, growth, *one, seed) for seed in range(draws)) for one in SCHEMES]
                row(size, spread, growth if growth > 1 else "at rest", *(f"{cell:.3g}" for cell in cells))

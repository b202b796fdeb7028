"""Steps for ill-conditioned quadratics, where those of plain descent would take millions of rounds.

SimFBO. With full batches and one local step, z = (x, y, v) moves by z ← z − Γ J z about the solution, Γ being the step
sizes and J as in measure.py. Heavy ball with decay β (Polyak, "Some methods of speeding up the convergence of iteration
methods", 1964) turns every eigenvalue λ of ΓJ into the roots of

    ζ² − (1 + β − λ) ζ + β = 0

Where x is slow enough all λ are real and positive, and β = (1 − √λ_min)² needs the root of the rounds. In one dimension
they are real up to γ_x φ = 4γλ/27, where 2γλ is the limit of plain descent (see measure.py). Complex ones bound β.

FedNest. With y solved so well that x moves by exact hypergradients, a step 1/λ takes the error in the eigenvector of
∇²Φ with eigenvalue λ away altogether (Richardson's iteration, 1911), and a cycle through the spectrum all of it. A long
step throws what inexactness has left far along the steep directions; hence each goes where the gradient is largest.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from fedbilevel.core.tree import XYV
from fedbilevel.diagnostics.measure import Affine

SLOWER = 2.0 ** -np.arange(5)  # what x may be slowed down by
LOSSES = np.geomspace(1, 1e-6, 241)  # 1 − β
HASTE = 1.5  # x must also be stable when it is so much faster
INEXACT = 0.03  # of an error is thought to remain where it should vanish
REDUCTION = 1e-3  # of a cycle


class ServerMomentum(NamedTuple):
    """For SimFBO."""

    slower: float  # the factor on x's step
    decay: float  # β
    radius: float  # the error's factor a round


def best_momentum(affine: Affine, server: XYV) -> ServerMomentum:
    """On a grid: what has the least spectral radius even when x is in haste."""
    dims = (affine.dim_x, affine.dim_y, affine.dim_y)
    best, least = ServerMomentum(1.0, 0.0, math.inf), math.inf
    for slower in SLOWER:
        calm, hasty = (
            _radius(
                np.linalg.eigvals(
                    np.repeat([server.x * slower * speed, server.y, server.v], dims)[:, None] * affine.jacobian
                )
            )
            for speed in (1.0, HASTE)
        )
        worst = np.maximum(calm, hasty)
        at = int(worst.argmin())
        if worst[at] < least:
            best, least = ServerMomentum(float(slower), float(1 - LOSSES[at]), float(calm[at])), worst[at]
    return best


def _radius(eigenvalues: np.ndarray) -> np.ndarray:
    """The largest |ζ|, for every 1 − β of LOSSES."""
    decay = 1 - LOSSES[:, None]
    middle = (1 + decay - eigenvalues) / 2
    root = np.sqrt(middle**2 - decay + 0j)
    return np.maximum(abs(middle + root), abs(middle - root)).max(axis=1)


class HeavyBall(optax.GradientTransformation):  # type: ignore[misc]
    """optax.sgd(1.0, decay), which as a dictionary is what a spec calls it.

    Commands round to three digits, up to 1 at worst: there it is rounded down, as less momentum is stable too.
    """

    decay: float

    def _asdict(self) -> dict[str, Any]:
        return {"name": "momentum", "decay": math.floor(1e3 * self.decay) / 1e3}


@functools.cache
def heavy_ball(decay: float) -> HeavyBall:
    """The optimizer of a decay: one object per decay, so that a program compiled with it is used again."""
    made = HeavyBall(*optax.sgd(1.0, decay))
    made.decay = decay
    return made


class Cycle(tuple[float, ...]):
    """A schedule: step sizes, over and over. A spec has none such: as a dictionary it is its shortest step alone."""

    __slots__ = ()

    def __call__(self, round: Array | int) -> Array:
        return jnp.asarray(tuple(self))[round % len(self)]

    def _asdict(self) -> dict[str, Any]:
        shortest = min(self)
        return {"schedule": "linear", "start": shortest, "end": shortest, "steps": 1}


def cycle(phi: np.ndarray) -> Cycle:
    """Steps that reduce the error a thousandfold; phi: the eigenvalues of ∇²Φ, all positive."""
    left, steps = np.ones(len(phi)), list[float]()
    while left.max() > REDUCTION:
        step = 1 / phi[np.argmax(phi * left)]
        steps.append(float(step))
        left = left * np.maximum(abs(1 - step * phi), INEXACT)
    return Cycle(steps)

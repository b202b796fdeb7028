"""AdaGrad for x, whose numerator is the distance that an entry has come.

With h_t the hypergradient of round t, j an entry of x, d the number of entries, η the field `x_lr`, R = REACH,
a = SHARED, and w_t ≤ 1 how much x waits for y (`ServerCurvature.slower`),

    x_j ← x_j − min(w_t r_{t,j} / s_{t,j},  η / |h_{t,j}|) h_{t,j}

    r_{t,j} = min(Rη, max(r_0, max_{u≤t} |x_{u,j} − x_{0,j}|)),    r_0 = Rη min(1, max(‖x_0‖, 1) / √d)

    s_{t,j}² = Σ_{u≤t} h_{u,j}²                             where x, or a leaf of it, is a number or a vector
    s_{t,j}² = Σ_{u≤t} ((1 − a) h_{u,j}² + a mean of h_u²)  where it has two dimensions or more, the mean over that leaf

No entry moves by more than η in a round, and the unit of the outer loss has no influence.

Entries of a vector, such as penalties, are unlike quantities, and every one has a sum of its own. With one sum for all
of them, a bound on the length of a move lets all of the move go into one entry: with 39 penalties 10^x, one of them
could grow 18-fold in a round, and the inner curvature with it. Entries of a matrix, such as the weights of a network,
are alike and many. With sums of their own alone, weights that matter for few samples, such as those of pixels at the
rim of an image, would move as far as all others, and what they learn would be noise. (Adafactor, too, treats matrices
otherwise than vectors.)

The numerator is DoG's. Small entries, such as the weights of a network, start with small steps; entries that have far
to go get longer ones, up to Rη.

η = 0.1 changes a penalty 10^x by a quarter at most, and a weight exp(x) by a tenth. What depends on several entries of
x can change by more: where an inner curvature is 10^(x_1 + … + x_d), a smaller η is needed.

REACH and SHARED come from sweeps (benchmarks/results/family.txt). With a larger REACH the worst tenth of ends rises a
little on random problems, since x overshoots; with 1, x is too slow on quadratics, whose solutions are far away. With a
larger SHARED linear representations end a little higher; with less than a half, a network whose clients have few digits
of MNIST each is less accurate.

Sources: J. Duchi, E. Hazan and Y. Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic
Optimization", JMLR 2011. A. Défossez, L. Bottou, F. Bach and N. Usunier, "A Simple Convergence Proof of Adam and
Adagrad", TMLR 2022, for losses that are not convex. M. Ivgi, O. Hinder and Y. Carmon, "DoG is SGD's Best Friend", ICML
2023. N. Shazeer and M. Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", ICML 2018.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from fedbilevel.core.tree import PyTree, move, over

REACH = 3  # the largest numerator, in units of η
SHARED = 0.5  # of the sums of a matrix's entries: the part that all of them have in common
STEADY = 0.9  # an entry moves steadily where the sum of its moves is at least this part of the sum of their lengths
SHOWN = 5  # entries that a remark names at most
SETTLED = 20  # rounds after which a hypergradient that was always 0 is worth a word


class AdaGrad(NamedTuple):
    """What the server remembers of the hypergradients and of x."""

    norms: PyTree  # √(Σ h²) by entry, of which no square over- or underflows
    start: PyTree  # x_0
    farthest: PyTree  # max |x_s − x_0|
    step: Array  # ‖x_{t+1} − x_t‖ / ‖h_t‖ of the last round
    rounds: Array  # t
    way: PyTree  # Σ_s (s/t)³ (x_{s+1} − x_s): how far each entry has come in the last quarter of the rounds or so
    path: PyTree  # the same sum of |x_{s+1} − x_s|

    @classmethod
    def begin(cls, x: PyTree) -> AdaGrad:
        zeros = optax.tree.zeros_like(x)
        return cls(zeros, x, zeros, jnp.zeros(()), jnp.zeros(()), zeros, zeros)

    def moved(self, x: PyTree, h: PyTree, lr: Any, slower: Any = 1) -> tuple[PyTree, AdaGrad]:
        """Return the next x and the next memory, given the hypergradient h at x, η = lr and w = slower."""
        size = max(1, sum(leaf.size for leaf in jax.tree.leaves(x)))
        least = REACH * lr * jnp.minimum(1, jnp.maximum(optax.tree.norm(self.start), 1) / size**0.5)

        def change(h: Array, norm: Array, farthest: Array) -> Array:
            sums = norm if norm.ndim < 2 else with_mean(norm)
            adagrad = over(slower * jnp.clip(farthest, least, REACH * lr), sums)
            return (-jnp.minimum(adagrad, over(lr, jnp.abs(h))) * h).astype(h.dtype)

        norms = jax.tree.map(jnp.hypot, self.norms, h)
        distance = jax.tree.map(lambda x, start: jnp.abs(x - start), x, self.start)
        farthest = jax.tree.map(jnp.maximum, self.farthest, distance)
        changes = jax.tree.map(change, h, norms, farthest)
        step = over(optax.tree.norm(changes), optax.tree.norm(h)).astype(self.step.dtype)
        fading = (self.rounds / (self.rounds + 1)) ** 3
        way = move(changes, fading, self.way)
        path = move(jax.tree.map(jnp.abs, changes), fading, self.path)
        memory = AdaGrad(norms, self.start, farthest, step, self.rounds + 1, way, path)
        return optax.tree.add(x, changes), memory

    def idle(self) -> str:
        """Name the entries of vectors whose hypergradient was 0 in all of SETTLED rounds or more, beside others; or "".

        Entries of matrices are left out: some weights of a network have no influence, as those of pixels that are
        always 0.
        """
        norms = jax.tree_util.tree_leaves_with_path(self.norms)
        places = [
            (path, index) for path, norm in norms if norm.ndim == 1 for index in np.flatnonzero(np.asarray(norm) == 0)
        ]
        if not places or self.rounds < SETTLED or not any(np.any(norm) for _, norm in norms):
            return ""
        size = sum(norm.size for _, norm in norms)
        entries = [f"x{jax.tree_util.keystr(path)}[{index}]" for path, index in places]
        return (
            f"{some(entries, size)} never moved: their hypergradient was exactly 0 in all rounds. "
            "Either no loss reads them, or no round has drawn a client or sample that does"
        )

    def remark(self, lr: float) -> str:
        """Name the entries of x that still move steadily, by η/2 or more in the last quarter of the rounds; or ""."""
        ways, paths = jax.tree_util.tree_leaves_with_path(self.way), jax.tree.leaves(self.path)
        distance = {}
        for (place, way), path in zip(ways, paths, strict=True):
            steady = (np.abs(way) > STEADY * np.asarray(path)) & (np.asarray(path) > lr / 2)
            for index in np.argwhere(steady).tolist():
                entry = f"x{jax.tree_util.keystr(place)}{index or ''}"
                distance[entry] = float(np.abs(way[tuple(index)]))
        if not distance:
            return ""
        size = sum(way.size for _, way in ways)
        farthest_first = sorted(distance, key=lambda entry: -distance[entry])
        entries = "x was" if size == 1 else f"{some(farthest_first, size)} were"
        return (
            f"{entries} still moving steadily at the end: either the run needs more rounds, or the outer loss has no "
            "minimum there, as of a penalty that wants to be infinite or 0; then bound x with project_x"
        )


def some(entries: list[str], size: int) -> str:
    """Name the first SHOWN of these entries of x, which has `size` of them."""
    more = f" and {len(entries) - SHOWN} more" if len(entries) > SHOWN else ""
    return f"{', '.join(entries[:SHOWN])}{more} of {size:,} entries of x"


def with_mean(norms: Array) -> Array:
    """√((1 − SHARED) norms² + SHARED ⟨norms²⟩), of which no square over- or underflows."""
    return jnp.hypot((1 - SHARED) ** 0.5 * norms, SHARED**0.5 * root_mean_square(norms))


def root_mean_square(leaf: Array) -> Array:
    """√⟨leaf²⟩, of which no square over- or underflows."""
    largest = jnp.max(jnp.abs(leaf), initial=0)
    return largest * jnp.sqrt(jnp.mean(over(leaf, largest) ** 2))

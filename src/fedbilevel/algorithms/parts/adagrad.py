"""Adapt the steps on x by AdaGrad, with the distance of each entry from its start in the numerator, as in DoG.

Let h_t be the hypergradient of round t = 0, 1, …, j an entry of x, d the number of entries, η the field `x_lr`,
R = REACH, a = SHARED and T = WARM_UP. The factor w_t ≤ 1 shortens steps so that y can follow x
(`ServerCurvature.slower`). The step is

    x_j ← x_j − min(w_t q_t r_{t,j} / s_{t,j},  η / |h_{t,j}|) h_{t,j}

    q_t = 1                   for a leaf of x that is a number or a vector
    q_t = min(1, (t + 1)/T)   for a leaf with two dimensions or more

    r_{t,j} = min(Rη, max(r_0, max_{u≤t} |x_{u,j} − x_{0,j}|)),    r_0 = Rη min(1, max(‖x_0‖, 1) / √d)

    s_{t,j}² = Σ_{u≤t} h_{u,j}²                             for a number or a vector
    s_{t,j}² = Σ_{u≤t} ((1 − a) h_{u,j}² + a mean of h_u²)  for two dimensions or more, with the mean over this leaf

No entry moves by more than η in a round, and the scale of the outer loss does not matter.

The entries of a vector, such as penalties, are different quantities, and every entry has its own sum. If they shared a
sum, a bound on the length of a step would allow one entry to take the whole step. With 39 penalties 10^x, for example,
one penalty could grow 18-fold in a round, and so could the inner curvature. The entries of a matrix, such as the
weights of a network, are many and of one kind. If each weight had only its own sum, weights that matter for few
samples, such as those of pixels at the border of an image, would move as far as all others, and would learn noise.
(Adafactor also treats matrices and vectors differently.)

In the first rounds the sums have few terms, so that all weights of a network move by similar lengths, and their moves
add up in the next layer. Such moves can make a network useless for the rest of the run: the next hypergradients are
larger by many powers of ten, and they stay in AdaGrad's sums. Therefore the steps of matrices grow linearly over the
first T rounds, which is the usual warm-up.

The numerator is that of DoG. Entries with small values, such as the weights of a network, have short steps at first.
Entries that move far get longer steps, up to Rη.

η = 0.1 changes a penalty 10^x by at most a quarter in a round, and a weight exp(x) by at most a tenth. A quantity that
depends on several entries of x can change by more: if an inner curvature is 10^(x_1 + … + x_d), a smaller η is needed.

If x is kept in a set, the server then projects x onto this set. The fixed points must be those of projected descent,
where −h is normal to the set at x. With a step size for each entry, −D h would be normal instead, where D is the
diagonal matrix of the step sizes. For a box both conditions mean the same, since the normals of a box have the signs of
the active bounds. For a ball, a simplex or a half-space the conditions differ: x would converge to another point of the
boundary. Unless the projection acts on each entry by itself (`acts_on_entries`), all entries of x therefore have the
same step size, with the mean of all sums for s², the largest |h_{t,j}| and the largest r_{t,j}.

REACH and SHARED come from sweeps (benchmarks/results/family.txt). With a larger REACH, the worst tenth of final losses
on random problems rises a little, since x overshoots. With REACH = 1, x is too slow on quadratics, whose solutions are
far away. With a larger SHARED, linear representations have a slightly higher loss at the end. With a SHARED below a
half, a network is less accurate if each client has few digits of MNIST. With a WARM_UP of 5 or less, such networks are
spoilt in some runs of FedMBO, RABO and FedNest-SGD. With 20, SimFBO is slower.

Sources: J. Duchi, E. Hazan and Y. Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic
Optimization", JMLR 2011. A. Défossez, L. Bottou, F. Bach and N. Usunier, "A Simple Convergence Proof of Adam and
Adagrad", TMLR 2022, for losses that are not convex. M. Ivgi, O. Hinder and Y. Carmon, "DoG is SGD's Best Friend", ICML
2023. P. Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", arXiv:1706.02677, for the warm-up.
N. Shazeer and M. Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", ICML 2018.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.flatten_util import ravel_pytree

from fedbilevel.core.problem import Project
from fedbilevel.core.tree import PyTree, move, over, scaled

REACH = 3  # the largest numerator, in units of η
SHARED = 0.5  # the weight of the mean over a matrix in the sums of its entries
WARM_UP = 10  # the number of rounds over which the steps of a matrix grow to their full length
STEADY = 0.9  # an entry moves steadily if its displacement is more than this share of the length of its path
SHOWN = 5  # the largest number of entries that a remark names
SETTLED = 20  # after this number of rounds, a remark names the entries whose hypergradient was always 0


class AdaGrad(NamedTuple):
    """Hold the server's record of the hypergradients and of x."""

    norms: PyTree  # √(Σ h²) for each entry, computed without overflow or underflow of squares
    start: PyTree  # x_0, the x at the start
    farthest: PyTree  # for each entry, the largest |x_s − x_0| so far
    step: Array  # ‖x_{t+1} − x_t‖ / ‖h_t‖ of the last round
    rounds: Array  # t, the number of rounds so far
    way: PyTree  # Σ_s (s/t)³ (x_{s+1} − x_s): the displacement of each entry in about the last quarter of the rounds
    path: PyTree  # Σ_s (s/t)³ |x_{s+1} − x_s|: the length of the path of each entry in these rounds

    @classmethod
    def begin(cls, x: PyTree) -> AdaGrad:
        zeros = optax.tree.zeros_like(x)
        return cls(zeros, x, zeros, jnp.zeros(()), jnp.zeros(()), zeros, zeros)

    def moved(
        self,
        x: PyTree,
        h: PyTree,
        lr: Any,
        slower: Any = 1,
        one_step: bool = False,
        project: Project | None = None,
    ) -> tuple[PyTree, AdaGrad]:
        """Return the x after a step, before its projection, and the record after the step.

        Args:
            x: the present x.
            h: the hypergradient at x.
            lr: η, the largest change of an entry.
            slower: w ≤ 1, the factor that shortens the step on x so that y can follow.
            one_step: whether all entries of x have the same step size.
            project: the projection by which the server then keeps x in a set, if any. The record has the moves that
                remain after the projection: an entry that is pressed against a bound does not move.
        """
        count = max(1, sum(leaf.size for leaf in jax.tree.leaves(x)))
        least = REACH * lr * jnp.minimum(1, jnp.maximum(optax.tree.norm(self.start), 1) / count**0.5)
        grown = jnp.minimum(1, (self.rounds + 1) / WARM_UP)

        def size_of(h: Array, sums: Array, farthest: Array, warm: Any) -> Array:
            adagrad = over(slower * warm * jnp.clip(farthest, least, REACH * lr), sums)
            return jnp.minimum(adagrad, over(lr, jnp.abs(h)))

        def change(h: Array, norm: Array, farthest: Array) -> Array:
            sums = norm if norm.ndim < 2 else with_mean(norm)
            warm = 1 if norm.ndim < 2 else grown
            return (-size_of(h, sums, farthest, warm) * h).astype(h.dtype)

        norms = jax.tree.map(jnp.hypot, self.norms, h)
        distance = jax.tree.map(lambda x, start: jnp.abs(x - start), x, self.start)
        farthest = jax.tree.map(jnp.maximum, self.farthest, distance)
        if one_step:
            warm = grown if any(leaf.ndim > 1 for leaf in jax.tree.leaves(x)) else 1
            every = [ravel_pytree(tree)[0] for tree in (h, norms, farthest)]
            size = size_of(jnp.max(jnp.abs(every[0])), root_mean_square(every[1]), jnp.max(every[2]), warm)
            changes = scaled(-size, h)
        else:
            changes = jax.tree.map(change, h, norms, farthest)
        step = over(optax.tree.norm(changes), optax.tree.norm(h)).astype(self.step.dtype)
        after = optax.tree.add(x, changes)
        made = changes if project is None else optax.tree.sub(project(after), x)
        fading = (self.rounds / (self.rounds + 1)) ** 3
        way = move(made, fading, self.way)
        path = move(jax.tree.map(jnp.abs, made), fading, self.path)
        memory = AdaGrad(norms, self.start, farthest, step, self.rounds + 1, way, path)
        return after, memory

    def idle(self) -> str:
        """Return a sentence that names the entries of vectors whose hypergradient was 0 in all rounds; "" for none.

        The result is also "" after fewer than SETTLED rounds, and if the hypergradient of all entries was 0. Entries of
        matrices are not named, because in a network it is normal that some weights have no influence, such as the
        weights of pixels that are always 0.
        """
        norms = jax.tree_util.tree_leaves_with_path(self.norms)
        if self.rounds < SETTLED or not any(np.any(norm) for _, norm in norms):
            return ""
        places = [
            (path, index) for path, norm in norms if norm.ndim == 1 for index in np.flatnonzero(np.asarray(norm) == 0)
        ]
        if not places:
            return ""
        size = sum(norm.size for _, norm in norms)
        entries = [f"x{jax.tree_util.keystr(path)}[{index}]" for path, index in places]
        return (
            f"{some(entries, size)} never moved: their hypergradient was exactly 0 in all rounds. "
            "Either no loss depends on them, or no round has drawn a client or sample whose loss does"
        )

    def remark(self, lr: float) -> str:
        """Return a sentence that names the entries of x that still move steadily; "" for none.

        An entry moves steadily if the path that it took in about the last quarter of the rounds is longer than `lr`/2
        and nearly straight. `lr` is η, the largest change of an entry in a round.
        """
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
        entries = "x" if size == 1 else some(farthest_first, size)
        return (
            f"{entries} still moved steadily at the end: either the run needs more rounds, or the outer loss has no "
            f"minimum along {'x' if size == 1 else 'these entries'}, for example because the best penalty is infinite "
            "or 0; in the second case bound x with project_x"
        )


def some(entries: list[str], size: int) -> str:
    """Return a phrase with the number of these entries, out of all `size` entries of x, and the first SHOWN of them."""
    count = f"all {size:,}" if len(entries) == size else f"{len(entries):,} of {size:,}"
    more = ", …" if len(entries) > SHOWN else ""
    return f"{count} entries of x ({', '.join(entries[:SHOWN])}{more})"


def with_mean(norms: Array) -> Array:
    """Return √((1 − SHARED) norms² + SHARED ⟨norms²⟩), without overflow or underflow of squares."""
    return jnp.hypot((1 - SHARED) ** 0.5 * norms, SHARED**0.5 * root_mean_square(norms))


def root_mean_square(leaf: Array) -> Array:
    """Return √⟨leaf²⟩, the root of the mean square, without overflow or underflow of squares."""
    largest = jnp.max(jnp.abs(leaf), initial=0)
    return largest * jnp.sqrt(jnp.mean(over(leaf, largest) ** 2))

"""The losses of a whole population, their gradients and products, without a loop over clients.

A client's loss is a mean over its samples (plus terms without samples), so with w_s = p_i/n_i for sample s of client i

    F(x, y) = Σ_s w_s f(x, y, [s]),    Σ_s w_s = 1,    and G likewise.

Samples are stored in chunks; within a chunk they are vectorised, and sums stream over the chunks. All is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedbilevel.core.client import Clients
from fedbilevel.core.errors import require, require_count
from fedbilevel.core.problem import Loss, Padded, Problem
from fedbilevel.core.ragged import Ragged, check_finite
from fedbilevel.core.tree import PyTree, is_floating, on_device
from fedbilevel.oracles.differences import value_and_derivative

CHUNK = 256  # samples that are vectorised together


def hess_v(total: WeightedLoss, x: PyTree, y: PyTree, v: PyTree) -> PyTree:
    """Return ∇²yy F·v, like y. Not compiled: JAX would keep the loss, and with it all that it closes over."""
    return total.stream(lambda loss: value_and_derivative(lambda y: jax.grad(loss, 1)(x, y), y, v)[1])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WeightedLoss:
    """A loss as a weighted sum over samples: a pytree, so that its data are arguments of whatever is compiled.

    Where g is not a mean over samples but g = ½‖y − r(x)‖², r being such a mean (compositional problems), `value`
    differs from G by a function of x alone: ∇y G and all products are exact.
    """

    samples: PyTree  # leaves (chunks, size, ...)
    weights: Array  # (chunks, size): w_s; 0 on the padding of the last chunk
    loss: Loss = field(metadata={"static": True})

    @jax.jit
    def value(self, x: PyTree, y: PyTree) -> Array:
        """Return F(x, y), a scalar."""
        return self.stream(lambda loss: loss(x, y))

    @jax.jit
    def gradients(self, x: PyTree, y: PyTree) -> tuple[PyTree, PyTree]:
        """Return ∇x F and ∇y F."""
        return self.stream(lambda loss: jax.grad(loss, (0, 1))(x, y))

    @jax.jit
    def products(self, x: PyTree, y: PyTree, v: PyTree) -> tuple[PyTree, PyTree]:
        """Return ∇²xy F·v, like x, and ∇²yy F·v, like y: a single forward-over-reverse pass."""
        return self.stream(lambda loss: jax.jvp(lambda y: jax.grad(loss, (0, 1))(x, y), (y,), (v,))[1])

    @jax.jit
    def hess_v(self, x: PyTree, y: PyTree, v: PyTree) -> PyTree:
        """Return ∇²yy F·v, like y."""
        return hess_v(self, x, y, v)

    def stream(self, of_chunk: Callable[[Callable[[PyTree, PyTree], Array]], PyTree]) -> PyTree:
        """Add up `of_chunk`(that chunk's share of the loss) over chunks, which must be linear in the loss."""

        def share(part: tuple[PyTree, Array]) -> PyTree:
            samples, weights = part
            # the same real type throughout: as samples are stored, or double precision where that is in force
            samples = jax.tree.map(lambda a: a.astype(weights.dtype) if is_floating(a) else a, samples)

            def loss(x: PyTree, y: PyTree) -> Array:
                each = jax.vmap(lambda sample: self.loss(x, y, jax.tree.map(lambda a: a[None], sample)))
                return jnp.vdot(weights, each(samples))

            return of_chunk(loss)

        parts = (self.samples, self.weights)
        if len(self.weights) == 1:
            return share(jax.tree.map(lambda a: a[0], parts))
        shape = jax.eval_shape(lambda parts: share(jax.tree.map(lambda a: a[0], parts)), parts)
        zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shape)
        add = lambda total, part: (jax.tree.map(jnp.add, total, share(part)), None)  # noqa: E731
        return lax.scan(add, zero, parts)[0]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Population:
    """F and G of all clients, or of as many samples as were taken."""

    outer: WeightedLoss
    inner: WeightedLoss

    @classmethod
    def of(cls, problem: Problem, clients: Clients, max_samples: int | None = None) -> Population:
        """Take everyone's samples, or at most `max_samples` of each loss, spread evenly over the clients' samples.

        A subsample keeps each client's weight where it takes any of that client's samples. Leaves that are memory maps
        are read only where a sample is taken.
        """
        require_count("max_samples", max_samples, optional=True)
        every = np.arange(len(clients))

        def total(name: str) -> WeightedLoss:
            loss, rows = _loss_and_samples(problem, clients, name)
            index, weights = chosen(rows, every, clients.weights, max_samples)
            samples, share = on_device(_chunked(rows, index, weights))
            return WeightedLoss(samples, share, loss)

        return cls(total("outer"), total("inner"))

    @classmethod
    def each(cls, problem: Problem, clients: Clients, ids: Sequence[int], max_samples: int | None = None) -> Population:
        """Stack the losses of single clients: every leaf has a leading axis of len(ids), for vmap or lax.map.

        At most `max_samples` of each loss, for all those clients together.
        """
        require(len(ids) > 0, "ids", ids, "at least one client")
        share = None if max_samples is None else max(1, max_samples // len(ids))

        def total(name: str) -> WeightedLoss:
            loss, rows = _loss_and_samples(problem, clients, name)
            longest = int(rows.size[list(ids)].max()) if share is None else min(share, int(rows.size[list(ids)].max()))
            return _stacked(loss, rows, [chosen(rows, np.array([i]), np.ones(1), share) for i in ids], longest)

        return cls(total("outer"), total("inner"))

    @classmethod
    def batches(cls, problem: Problem, clients: Clients, ids: Sequence[int], size: int, seed: int) -> Population:
        """Stack the losses of single clients as `each` does, on a batch of each, drawn as clients draw theirs."""

        def total(name: str) -> WeightedLoss:
            loss, rows = _loss_and_samples(problem, clients, name)
            rng = np.random.default_rng(seed)
            places = [rows.start[i] + rng.integers(rows.size[i], size=size) for i in ids]
            return _stacked(loss, rows, [(index, np.full(size, 1 / size)) for index in places], size)

        return cls(total("outer"), total("inner"))

    @property
    def counts(self) -> tuple[int, int]:
        """How many samples of the outer and of the inner loss there are."""
        return int(np.count_nonzero(self.outer.weights)), int(np.count_nonzero(self.inner.weights))

    @jax.jit
    def hypergradient(self, x: PyTree, y: PyTree, v: PyTree) -> tuple[PyTree, PyTree]:
        """Return ∇x F − ∇²xy G·v, like x, and what v leaves of its system, ∇²yy G·v − ∇y F, like y."""
        (f_x, f_y), (cross, hess) = self.outer.gradients(x, y), self.inner.products(x, y, v)
        return jax.tree.map(jnp.subtract, f_x, cross), jax.tree.map(jnp.subtract, hess, f_y)


def chosen(rows: Ragged, ids: np.ndarray, p: np.ndarray, limit: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Choose all samples of the rows `ids`, or `limit` of them: places in the flat arrays, and weights summing to 1.

    Of a row that keeps k of its n samples each has weight p_i/k; what a row that keeps none had goes to the others.
    """
    sizes = rows.size[ids]
    ends = np.cumsum(sizes)
    total = int(ends[-1])
    place = np.arange(total) if limit is None or total <= limit else np.arange(limit) * total // limit
    owner = np.searchsorted(ends, place, side="right")
    kept = np.bincount(owner, minlength=len(ids))
    weights = p[owner] / kept[owner]
    return rows.start[ids][owner] + place - (ends - sizes)[owner], weights / weights.sum()


def _stacked(loss: Loss, rows: Ragged, parts: Sequence[tuple[np.ndarray, np.ndarray]], length: int) -> WeightedLoss:
    """Stack a loss for each of `parts`, (places, weights of these), padded to `length` samples."""
    chunks = [_chunked(rows, index, weights, length) for index, weights in parts]
    samples, weight = on_device(jax.tree.map(lambda *leaves: np.stack(leaves), *chunks))
    return WeightedLoss(samples, weight, loss)


def _chunked(
    rows: Ragged, index: np.ndarray, weights: np.ndarray, length: int | None = None
) -> tuple[PyTree, np.ndarray]:
    """Read the samples at `index`, as (chunks, size, ...), padded with copies of the first; and weights, there 0."""
    length = length or len(index)
    chunks = -(-length // CHUNK)
    size = -(-length // chunks)  # even chunks: less padding
    padding = chunks * size - len(index)
    index = np.concatenate([index, np.repeat(index[:1], padding)])
    weights = np.concatenate([weights, np.zeros(padding)])

    def take(path: tuple, leaf: np.ndarray) -> np.ndarray:
        taken = leaf[index]
        if isinstance(leaf, np.memmap):  # whatever is not was checked when the population was described
            check_finite(f"samples{jax.tree_util.keystr(path)}", taken, lambda row: rows.place(int(index[row])))
        return np.asarray(taken).reshape(chunks, size, *leaf.shape[1:])

    return jax.tree_util.tree_map_with_path(take, rows.values), weights.reshape(chunks, size)


def _loss_and_samples(problem: Problem, clients: Clients, name: str) -> tuple[Loss, Ragged]:
    """Return a loss and its samples; of a loss that takes all of a client's samples, these together as one sample."""
    loss: Loss = getattr(problem, name)
    rows: Ragged = getattr(clients, name)
    if name not in problem.whole:
        return loss, rows
    offset, count = np.arange(rows.size.max()), len(rows.size)
    places = rows.start[:, None] + np.minimum(offset, rows.size[:, None] - 1)
    tables = Padded(jax.tree.map(lambda leaf: leaf[places], rows.values), jnp.asarray(offset < rows.size[:, None]))
    one_each = Ragged(tables, np.arange(count), np.ones(count, np.int64))
    return (lambda x, y, batch: loss(x, y, jax.tree.map(lambda leaf: leaf[0], batch))), one_each

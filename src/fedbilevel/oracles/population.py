"""Compute the losses of a whole population, their gradients and second-order products, without a loop over clients.

A client's loss is a mean over its samples, plus terms without samples. Let client i have the weight p_i and n_i
samples, and let w_s = p_i/n_i be the weight of each of these samples s. Then

    F(x, y) = Σ_s w_s f(x, y, [s])    and    G(x, y) = Σ_s w_s g(x, y, [s]),    with Σ_s w_s = 1.

Samples are stored in chunks. A compiled loop goes through the chunks and adds up; within a chunk, samples are
vectorised.
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

CHUNK = 256  # the number of samples that are vectorised together


def hess_v(total: WeightedLoss, x: PyTree, y: PyTree, v: PyTree) -> PyTree:
    """Return ∇²yy F·v, in the shape of y; F is the loss `total`.

    The function is not compiled, since JAX would keep the loss and all data in its closure.
    """
    return total.stream(lambda loss: value_and_derivative(lambda y: jax.grad(loss, 1)(x, y), y, v)[1])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WeightedLoss:
    """Hold a loss F as a weighted sum over samples, in a pytree, so that its data are arguments of compiled functions.

    In a compositional problem g = ½‖y − r(x)‖² is not a mean over samples, although r is. For such a problem `value`
    differs from G by a function of x alone, while ∇y G and all products with second derivatives are exact.
    """

    samples: PyTree  # the samples, with leaves of shape (chunks, size, ...)
    weights: Array  # the weights w_s, of shape (chunks, size), with 0 for the padding of the last chunk
    loss: Loss = field(metadata={"static": True})

    @jax.jit
    def value(self, x: PyTree, y: PyTree) -> Array:
        """Return F(x, y), a scalar."""
        return self.stream(lambda loss: loss(x, y))

    @jax.jit
    def gradients(self, x: PyTree, y: PyTree) -> tuple[PyTree, PyTree]:
        """Return ∇x F, in the shape of x, and ∇y F, in the shape of y."""
        return self.stream(lambda loss: jax.grad(loss, (0, 1))(x, y))

    @jax.jit
    def products(self, x: PyTree, y: PyTree, v: PyTree) -> tuple[PyTree, PyTree]:
        """Return ∇²xy F·v and ∇²yy F·v, in the shapes of x and y, by a single forward-over-reverse pass."""
        return self.stream(lambda loss: jax.jvp(lambda y: jax.grad(loss, (0, 1))(x, y), (y,), (v,))[1])

    @jax.jit
    def hess_v(self, x: PyTree, y: PyTree, v: PyTree) -> PyTree:
        """Return ∇²yy F·v, in the shape of y."""
        return hess_v(self, x, y, v)

    def stream(self, of_chunk: Callable[[Callable[[PyTree, PyTree], Array]], PyTree]) -> PyTree:
        """Return the sum of `of_chunk`(the loss of a chunk) over all chunks; `of_chunk` must be linear in the loss."""

        def share(part: tuple[PyTree, Array]) -> PyTree:
            samples, weights = part
            # floating samples take the weights' type: float64 if JAX computes in double precision, else float32
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
    """Hold F and G over the samples of all clients, or over a subsample of them."""

    outer: WeightedLoss
    inner: WeightedLoss

    @classmethod
    def of(cls, problem: Problem, clients: Clients, max_samples: int | None = None) -> Population:
        """Build F and G from all samples, or from at most `max_samples` of each loss, spread evenly over all samples.

        A subsample keeps the weights of the clients that have samples in it, scaled to sum to 1. From memory-mapped
        arrays, only the rows of these samples are read.
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
        """Stack the losses of single clients: every leaf has a leading axis of length len(ids), for vmap or lax.map.

        With `max_samples`, each client gives at most max_samples/len(ids) samples of each loss, and at least one.
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
        """Stack the losses of single clients, each on a batch of `size` samples drawn with replacement.

        Every leaf has a leading axis of length len(ids), as in `each`.
        """

        def total(name: str) -> WeightedLoss:
            loss, rows = _loss_and_samples(problem, clients, name)
            rng = np.random.default_rng(seed)
            places = [rows.start[i] + rng.integers(rows.size[i], size=size) for i in ids]
            return _stacked(loss, rows, [(index, np.full(size, 1 / size)) for index in places], size)

        return cls(total("outer"), total("inner"))

    @property
    def counts(self) -> tuple[int, int]:
        """Return the numbers of samples of the outer and of the inner loss."""
        return int(np.count_nonzero(self.outer.weights)), int(np.count_nonzero(self.inner.weights))

    @jax.jit
    def hypergradient(self, x: PyTree, y: PyTree, v: PyTree) -> tuple[PyTree, PyTree]:
        """Return ∇x F − ∇²xy G·v, in x's shape, and the residual ∇²yy G·v − ∇y F of v's linear system, in y's shape."""
        (f_x, f_y), (cross, hess) = self.outer.gradients(x, y), self.inner.products(x, y, v)
        return jax.tree.map(jnp.subtract, f_x, cross), jax.tree.map(jnp.subtract, hess, f_y)


def chosen(rows: Ragged, ids: np.ndarray, p: np.ndarray, limit: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of samples of some clients in the flat arrays, and the weights of these samples.

    If k of a client's samples are taken, each has the weight p_i/k. The weights are then scaled to sum to 1. So if no
    sample of a client is taken, the client's weight is distributed over the other clients.

    Args:
        rows: the samples of all clients.
        ids: numbers of clients.
        p: the weights of these clients.
        limit: the largest number of samples, which are spread evenly over these clients' samples; None: all samples.
    """
    sizes = rows.size[ids]
    ends = np.cumsum(sizes)
    total = int(ends[-1])
    place = np.arange(total) if limit is None or total <= limit else np.arange(limit) * total // limit
    owner = np.searchsorted(ends, place, side="right")
    taken = np.bincount(owner, minlength=len(ids))
    weights = p[owner] / taken[owner]
    return rows.start[ids][owner] + place - (ends - sizes)[owner], weights / weights.sum()


def _stacked(loss: Loss, rows: Ragged, parts: Sequence[tuple[np.ndarray, np.ndarray]], length: int) -> WeightedLoss:
    """Stack one loss for each pair (places, weights) of `parts`, padded to `length` samples."""
    chunks = [_chunked(rows, index, weights, length) for index, weights in parts]
    samples, weight = on_device(jax.tree.map(lambda *leaves: np.stack(leaves), *chunks))
    return WeightedLoss(samples, weight, loss)


def _chunked(
    rows: Ragged, index: np.ndarray, weights: np.ndarray, length: int | None = None
) -> tuple[PyTree, np.ndarray]:
    """Return the samples at `index` as leaves of shape (chunks, size, ...), and their weights, of shape (chunks, size).

    The padding repeats the first sample, with weight 0.
    """
    length = length or len(index)
    chunks = -(-length // CHUNK)
    size = -(-length // chunks)  # chunks of equal size need less padding than full chunks and a rest
    padding = chunks * size - len(index)
    index = np.concatenate([index, np.repeat(index[:1], padding)])
    weights = np.concatenate([weights, np.zeros(padding)])

    def take(path: tuple, leaf: np.ndarray) -> np.ndarray:
        taken = leaf[index]
        if isinstance(leaf, np.memmap):  # arrays in memory were checked when the clients were made
            check_finite(f"samples{jax.tree_util.keystr(path)}", taken, lambda row: rows.place(int(index[row])))
        return np.asarray(taken).reshape(chunks, size, *leaf.shape[1:])

    return jax.tree_util.tree_map_with_path(take, rows.values), weights.reshape(chunks, size)


def _loss_and_samples(problem: Problem, clients: Clients, name: str) -> tuple[Loss, Ragged]:
    """Return a loss and its samples; for a loss of all samples of a client at once, these samples form one sample."""
    loss: Loss = getattr(problem, name)
    rows: Ragged = getattr(clients, name)
    if name not in problem.whole:
        return loss, rows
    offset, count = np.arange(rows.size.max()), len(rows.size)
    places = rows.start[:, None] + np.minimum(offset, rows.size[:, None] - 1)
    tables = Padded(jax.tree.map(lambda leaf: leaf[places], rows.values), jnp.asarray(offset < rows.size[:, None]))
    one_each = Ragged(tables, np.arange(count), np.ones(count, np.int64))
    return (lambda x, y, batch: loss(x, y, jax.tree.map(lambda leaf: leaf[0], batch))), one_each

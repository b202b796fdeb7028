"""Evaluate losses and metrics before the first round, to detect mistakes that lead to plausible but wrong numbers.

The questions are: Does x change y*, and does y change the outer loss? Does every leaf of x move? Is a loss the mean of
its values on single samples? Are samples used as indices beyond the end of an axis? If leaves of y are each client's
own, is the derivative in y the gradient of one function (symmetry.py)? Is a metric per client a mean? Everything is
computed at random points near the start, on a few samples of a few clients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr

from fedbilevel.core.card import counted, listed
from fedbilevel.core.client import Clients
from fedbilevel.core.errors import ConfigurationError, DataWarning, InfluenceWarning, NumericalWarning, warn
from fedbilevel.core.local_x import local_block
from fedbilevel.core.problem import BLOCKED, DrawingLoss, Padded, Problem, WholeLoss, why_it_vanishes
from fedbilevel.core.ragged import Ragged
from fedbilevel.core.tree import PyTree, epsilon, join, near, on_device
from fedbilevel.engines.evaluation import Measure, PerClient
from fedbilevel.engines.process_group import current_group
from fedbilevel.engines.symmetry import check_symmetry
from fedbilevel.machinery.indexing import indexed_axes
from fedbilevel.machinery.kept import compiled
from fedbilevel.oracles.differences import value_and_derivative
from fedbilevel.oracles.population import chosen

PAIRS = 16  # the largest number of pairs of samples in a look; see `FirstLook.pairs`
LOOK = 2**26  # if the samples of all PAIRS pairs would take more than these bytes, a look has fewer pairs
LOOKS = 50  # without evidence in this many looks, a derivative is assumed to be 0, and a loss to be a mean
ENOUGH = 4  # the number of pairs of each kind that suffices; only pairs that could show that a loss is no mean count
ALIKE = 10  # if no pair of this many looks differs in a leaf, such as a client's matrix, all samples are assumed equal
FEWEST = 2  # the least number of pairs whose loss must differ from the mean; a single pair may differ by rounding
LONGEST = 64  # the largest number of a client's samples for a loss that takes all of them
TOLERANCE = 1e-4  # because of rounding, a pair's loss may differ by this share from the mean of its samples' losses
ROWS = 2**22  # the largest number of samples whose labels are read
MAPPED_ROWS = 2**12  # the largest number of samples whose labels are read from a memory-mapped array
SHARE = 0.25  # a loss is judged to be no mean if more than this share of the pairs that could show it do show it


class Seen(NamedTuple):
    """Hold what is known of the losses after a look at them before a run, at one point (x, y, v) and on few samples.

    Args:
        moves: the name of a derivative, such as "g_xy" (the product of ∇²xy g with v) -> whether it is not 0.
        leaves: for each leaf of x, in order, whether the gradients by which x is updated are not 0 there.
        reach: for y and for v: which of their entries a gradient step moves.
        values: for each loss that should be a mean, its values on the pairs.
    """

    moves: dict[str, Any]
    leaves: list[Any]
    reach: tuple[PyTree, PyTree]
    values: dict[str, OnPairs]


class OnPairs(NamedTuple):
    """Hold the values of a loss on pairs of samples.

    Args:
        pairs: the value on each pair, an array of shape (pairs,).
        alone: the value on each single sample, an array of shape (pairs, 2).
        differs: whether the two samples of a pair differ in a leaf, an array of shape (pairs, leaves).
    """

    pairs: Any
    alone: Any
    differs: Any


def first_look(problem: Problem, clients: Clients, x: PyTree, y: PyTree, programs: Mapping[str, ClosedJaxpr]) -> None:
    """Warn if x does not influence the outer loss through y*, if x will not move, or if a loss is no mean over samples.

    If there are several processes, only samples of the first process's clients are read.

    Args:
        problem: the problem prepared for a run, whose losses take only the floating arrays of x and y.
        clients: the population, whose samples are on this machine.
        x, y: the start.
        programs: the traced programs of the problem's functions, by name.

    Raises:
        ConfigurationError: samples index an axis beyond its end, or the derivative of the inner loss in y is not the
            gradient of one function (see `check_symmetry`).
    """
    rng, share = np.random.default_rng(0), len(clients) // current_group().processes
    held = {"outer": clients.outer, "inner": clients.inner}
    rows = {name: Ragged(own.values, own.start[:share], own.size[:share]) for name, own in held.items()}
    for name in problem.own_losses:
        if name not in problem.whole:  # a loss of all samples may use indices of samples
            check_indices(name, programs[f"{name} loss"], rows[name])
    look = FirstLook(problem, rows, rng, count=programs["outer loss"].in_avals[-1].shape[0])
    if problem.own is not None:
        check_symmetry(problem, x, y, rng, lambda: look.batches("inner", look.clients()))
    x, still = x if problem.local is None else local_block(x), jax.tree.map(np.zeros_like, y)
    moves, leaves, evidence = dict[str, bool](), [False] * len(jax.tree.leaves(x)), dict[str, Evidence]()
    for looks in range(1, LOOKS + 1):
        seen = look(*near((x, y, still), rng))
        moves = {name: moves.get(name, False) or bool(moved) for name, moved in seen.moves.items()}
        leaves = [before or bool(moved) for before, moved in zip(leaves, seen.leaves, strict=True)]
        evidence = {name: evidence.get(name, Evidence()).and_on(values) for name, values in seen.values.items()}
        why = why_it_vanishes(problem, moves)
        enough = {name: found.enough(looks, rows[name].size.max() == 1) for name, found in evidence.items()}
        if not why and all(leaves) and all(enough.values()):
            break
    for name, found in evidence.items():
        if text := found.why_no_mean():
            warn(NumericalWarning(f"the {name} loss is not a mean over the samples of its batch: {text}"))
    near_start = f"(seen near the start, on samples of {counted(min(share, LOOKS * look.pairs), 'client')})"
    if why:
        warn(InfluenceWarning(f"{why} {near_start}"))
        return
    if not (all(leaves) or getattr(problem, "subgradient", None)):
        paths = [f"x{jax.tree_util.keystr(path)}" for path, _ in jax.tree_util.tree_leaves_with_path(x)]
        fixed = listed([path for path, moved in zip(paths, leaves, strict=True) if not moved])
        text = f"no derivative moves {fixed}, which will stay as at the start {near_start}"
        warn(InfluenceWarning(f"{text}. Remove from x the leaves that no loss reads; {BLOCKED}"))
    if problem.implicit_term != "none" and not leaves_the_start(look, x, (y, still)):
        text = "x will not move from this start: all derivatives that move it are 0 there, and stay 0 as y moves"
        warn(InfluenceWarning(f"{text}. Unless it is the solution, start at random numbers, such as random weights"))


def leaves_the_start(look: FirstLook, x: PyTree, start: tuple[PyTree, PyTree]) -> bool:
    """Return whether x has a gradient that is not 0 at the start of y and v, or where gradient steps on them lead."""
    reach = jax.tree.map(lambda leaf: np.zeros(leaf.shape, bool), start)
    for _ in range(LOOKS):
        seen = look(x, *jax.tree.map(np.where, reach, near(start, look.rng), start))
        if seen.moves["f_x"] or seen.moves["g_xy"]:
            return True
        reach = jax.tree.map(np.logical_or, reach, seen.reach)
    return False


@dataclass
class FirstLook:
    """Evaluate the losses, on other pairs of samples in each call; if `count` is 1, on single samples.

    Each pair has samples of one client. In the first half of the pairs, both samples are the same.
    """

    problem: Problem
    rows: Mapping[str, Ragged]
    rng: np.random.Generator
    count: int
    program: Callable[..., Seen] | None = None

    def __call__(self, x: PyTree, y: PyTree, v: PyTree) -> Seen:
        ids, weights = self.clients(), self.rng.normal(size=self.pairs)
        given = on_device((x, y, v, weights, {name: self.batches(name, ids) for name in self.rows}))
        key = self.problem.key and ("first look", self.problem.key)
        self.program = self.program or compiled(self.seen, *given, key=key, quickly=True)
        return self.program(*given)

    @cached_property
    def pairs(self) -> int:
        """Return the number of pairs of a look: PAIRS, or an even number of at least 4 if samples are large.

        The samples of a look take at most LOOK bytes, unless those of 4 pairs take more. The losses and their
        derivatives take some multiple of this.
        """
        pair = sum(
            self.samples_of(name) * leaf.dtype.itemsize * math.prod(leaf.shape[1:])
            for name, own in self.rows.items()
            for leaf in jax.tree.leaves(own.values)
        )
        return min(PAIRS, 2 * max(LOOK // (2 * max(pair, 1)), 2))

    def samples_of(self, name: str) -> int:
        """Return the number of samples that a loss takes at once: `count`, or up to LONGEST if it needs all."""
        return min(LONGEST, int(self.rows[name].size.max())) if name in self.problem.whole else self.count

    def clients(self) -> np.ndarray:
        """Draw the client of each pair, as an array of shape (pairs,)."""
        clients = len(self.rows["outer"].size)
        return np.resize(self.rng.choice(clients, min(clients, self.pairs), replace=False), self.pairs)

    def batches(self, name: str, ids: np.ndarray) -> PyTree:
        """Draw a pair of samples of each client in `ids`, or one sample if `count` is 1: leaves (pairs, count, ...).

        In the first half of the pairs, one sample is drawn and taken twice. For a loss that needs all samples of a
        client, up to LONGEST samples are drawn."""
        rows, whole, count = self.rows[name], name in self.problem.whole, self.samples_of(name)
        own = [self.rng.choice(rows.size[i], min(count, rows.size[i]), replace=False) for i in ids]
        own = own if whole else [*(places[:1] for places in own[: self.pairs // 2]), *own[self.pairs // 2 :]]
        index = rows.start[ids][:, None] + np.stack([np.resize(places, count) for places in own])
        values = jax.tree.map(lambda leaf: np.asarray(leaf[index]), rows.values)
        return Padded(values, np.arange(count) < rows.size[ids][:, None]) if whole else values

    def seen(self, x: PyTree, y: PyTree, v: PyTree, weights: Array, batches: Mapping[str, PyTree]) -> Seen:
        """Evaluate the losses on all pairs, and differentiate them.

        Derivatives are sums over pairs with random weights, so that those of different pairs do not cancel.
        """
        problem = self.problem

        def on_pairs(name: str, x: PyTree, y: PyTree) -> Array:
            return jax.vmap(lambda pair: getattr(problem, name)(x, y, pair))(batches[name])

        def slopes(name: str, y: PyTree) -> tuple[PyTree, PyTree]:
            return jax.grad(lambda x, y: weights @ on_pairs(name, x, y), (0, 1))(x, y)

        def values(name: str) -> OnPairs:
            loss = getattr(problem, name)
            if name == "inner" and not problem.inner_is_mean:  # only its derivative in y, y − r(x), is a mean
                loss = lambda x, y, batch: sum(map(jnp.sum, jax.tree.leaves(jax.grad(problem.inner, 1)(x, y, batch))))  # noqa: E731
            alone = jax.vmap(lambda one: loss(x, y, jax.tree.map(lambda leaf: leaf[None], one)))
            differs = [
                jnp.any(leaf[:, :1] != leaf[:, 1:], range(1, leaf.ndim)) for leaf in jax.tree.leaves(batches[name])
            ]
            on_each = jax.vmap(lambda pair: (loss(x, y, pair), alone(pair)))(batches[name])
            return OnPairs(*on_each, jnp.stack(differs, 1))

        f_x, f_y = slopes("outer", y)
        (g_x, g_y), (g_xy, g_yy) = value_and_derivative(lambda y: slopes("inner", y), y, v)
        named = {"f_x": f_x, "f_y": f_y, "g_x": g_x, "g_y": g_y, "g_xy": g_xy}
        moves = {name: sum(jnp.any(leaf != 0) for leaf in jax.tree.leaves(slope)) for name, slope in named.items()}
        through = g_x if problem.implicit_term == "none" else g_xy
        either = jax.tree.map(lambda a, b: jnp.any((a != 0) | (b != 0)), f_x, through)
        reach = jax.tree.map(lambda a: a != 0, g_y), jax.tree.map(lambda a, b: (a != 0) | (b != 0), f_y, g_yy)
        no_means = (*problem.whole, *problem.draws) if self.count > 1 else problem.own_losses
        return Seen(
            moves,
            jax.tree.leaves(either),
            reach,
            {name: values(name) for name in problem.own_losses if name not in no_means},
        )


class Evidence(NamedTuple):
    """Count the pairs of samples that could show that a loss is not a mean, and the pairs that did show it.

    A sample that adds nothing to the loss, such as one without a label, cannot distinguish a sum from a mean. Two
    samples with the same label cannot show that a loss combines the label of one with the output of the other. Pairs
    are therefore counted by the leaves in which their samples differ.

    Args:
        doubled: two numbers of pairs of a sample with itself: the pairs that could show that the loss is not a mean,
            and the pairs whose loss is not the loss of the sample.
        mixed: two numbers for each leaf, as an array of shape (2, leaves), of pairs whose two samples differ in this
            leaf: all these pairs, and the pairs whose loss is not the mean of the losses of the two samples.
    """

    doubled: np.ndarray = np.zeros(2, int)
    mixed: np.ndarray = np.zeros((2, 1), int)

    def enough(self, looks: int, single: bool) -> bool:
        """Return whether no further pairs are needed.

        Args:
            looks: the number of looks so far.
            single: whether each client has a single sample, so that no two samples of a pair can differ.
        """
        alike = (self.mixed[0] == 0) & (single or looks >= ALIKE)
        mixed = np.all(alike | (self.mixed[0] >= ENOUGH))
        doubled = self.doubled[0] >= ENOUGH or (single and looks >= ALIKE)  # a client's only sample is always idle
        return bool(doubled and (self.why_no_mean() or mixed))

    @np.errstate(invalid="ignore")  # comparisons with the NaN of infinite losses are False
    def and_on(self, values: OnPairs) -> Evidence:
        """Return the counts with further pairs added; `values` has the values of a loss on these pairs at one point."""
        pairs, alone, differs = np.asarray(values.pairs, float), np.asarray(values.alone, float), values.differs
        size = np.maximum(np.abs(pairs), np.abs(alone).max(1))
        off = np.abs(pairs - alone.mean(1)) > max(TOLERANCE, 30 * epsilon(values.pairs)) * size
        each, counts = np.unique(alone, return_counts=True)
        often = counts.max() > 2  # a value that occurs twice may be that of one sample, which a pair has twice
        idle = often & (alone[:, 0] == each[counts.argmax()])  # this may be the loss of a sample that adds nothing
        (doubled, mixed), tells = np.split(off, 2), (off | ~idle)[: len(off) // 2]
        differs = np.asarray(differs)[len(off) // 2 :]
        return Evidence(
            self.doubled + np.stack([tells.sum(), doubled.sum()]),
            self.mixed + np.stack([differs.sum(0), (differs & mixed[:, None]).sum(0)]),
        )

    def why_no_mean(self) -> str:
        """Return why the losses of pairs of samples are not the means of the single samples' losses; "" if they are."""
        found = (np.any((off >= FEWEST) & (off > SHARE * tell)) for tell, off in (self.doubled, self.mixed))
        twice, mixed = map(bool, found)
        if twice:
            return (
                "a batch with two copies of a sample has another loss than this sample alone. It looks like a sum over "
                "samples: write .mean() in place of the .sum() over samples, but keep the .sum() of a penalty, because "
                "it does not depend on samples. If the loss needs all of a client's samples at once, wrap it in "
                "fb.WholeLoss"
            )
        if mixed:
            return (
                "a sample's share of the loss depends on the other samples. One cause is a difference of arrays of "
                "shapes (n, 1) and (n,), which JAX broadcasts to (n, n): give both the same shape, for example by "
                "[:, 0]. Others are the root of a mean, a largest value, and values that are centred within a batch: "
                "such a loss needs all of a client's samples at once, so wrap it in fb.WholeLoss"
            )
        return ""


def check_indices(name: str, program: ClosedJaxpr, rows: Ragged) -> None:
    """Check the samples that a loss uses as indices, such as classes.

    An index beyond the end of an axis, such as class C of C outputs (0 to C − 1), is an error if entries are read at
    it. Negative indices, and other uses of an index, cause a warning.

    Raises:
        ConfigurationError: a sample gathers an entry beyond the end of an axis.
    """
    leaves = jax.tree_util.tree_leaves_with_path(rows.values)
    first = len(program.in_avals) - len(leaves)
    for axis in sorted(indexed_axes(program)):
        if axis.argument < first:
            continue
        path, leaf = leaves[axis.argument - first]
        limit, clients = MAPPED_ROWS if isinstance(leaf, np.memmap) else ROWS, len(rows.size)
        places, _ = chosen(rows, np.arange(clients), np.ones(clients), limit)
        table = np.asarray(leaf[places]).reshape(len(places), -1) + axis.shift
        low, high = table.min(1), table.max(1)
        beyond = bool(high.max() >= axis.length)
        sample = high.argmax() if beyond else low.argmin()
        if not beyond and low[sample] >= 0:
            continue
        where = f"Clients.{name}{jax.tree_util.keystr(path)}"
        text = (
            f"the value {rows.place(int(places[sample]))} makes the {name} loss take entry "
            f"{int((high if beyond else low)[sample])} of an axis whose entries are 0 to {axis.length - 1}. JAX "
            "reports no error for this. If it is a label, number the classes from 0, in the same way for all clients, "
            "and give the model an output for each class"
        )
        if axis.operation == "gather" and beyond:
            raise ConfigurationError(text, where=where)
        warn(DataWarning(f"{where}: {text}"))  # a warning only: the user may want entries from the end, or none


def warn_of_no_means(
    metrics: Mapping[str, PerClient], clients: Clients, x: PyTree, y: PyTree, fixed: tuple[PyTree, PyTree]
) -> None:
    """Warn of metrics per client that are no means over samples, such as the root of a mean, by pairs of samples.

    If there are several processes, only samples of the first process's clients are read.

    Args:
        metrics: the metrics by name.
        clients: the population, whose samples are on this machine.
        x, y: the floating arrays of the start, as a client has them.
        fixed: the other leaves of x and y.
    """
    rng, share = np.random.default_rng(0), len(clients) // current_group().processes
    for name, metric in metrics.items():
        rows: Ragged = getattr(clients, metric.samples)
        several = np.flatnonzero(rows.size[:share] > 1)
        if isinstance(metric.function, WholeLoss | DrawingLoss) or not several.size:
            continue
        ids = np.resize(rng.choice(several, min(len(several), PAIRS), replace=False), PAIRS)
        places = np.stack([rows.start[i] + rng.choice(rows.size[i], 2, replace=False) for i in ids])
        pairs = jax.tree.map(lambda leaf, at=places: np.asarray(leaf[at]), rows.values)

        def seen(x: PyTree, y: PyTree, pairs: PyTree, function: Measure = metric.function) -> tuple[Array, Array]:
            x, y = join(x, fixed[0]), join(y, fixed[1])
            alone = jax.vmap(lambda one: function(x, y, jax.tree.map(lambda leaf: leaf[None], one)))
            return jax.vmap(lambda pair: (function(x, y, pair), alone(pair)))(pairs)

        given = on_device((*near((x, y), rng), pairs))
        values = compiled(seen, *given, quickly=True)(*given)
        inexact = max(TOLERANCE, 4 * epsilon(values, x, y))  # numbers of 16 bits have large rounding errors
        whole, alone = (np.asarray(value, np.float64) for value in values)
        with np.errstate(invalid="ignore"):  # comparisons with NaN are False
            off = np.abs(whole - alone.mean(1)) > inexact * np.maximum(np.abs(whole), np.abs(alone).max(1))
        if np.sum(off) >= FEWEST:
            text = f"metrics_per_client[{name!r}] is not a mean over the samples of its batch, but a client's value is "
            how = "the mean of its values on single samples: wrap it in fb.WholeLoss, which gets all samples at once"
            warn(NumericalWarning(text + how))

"""Define problems, which hold the losses to be minimised; `Clients` (client.py) hold the data."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.extend.core import ClosedJaxpr

from fedbilevel.core.card import Card, Shown, described
from fedbilevel.core.errors import ConfigurationError, explain_misspelt, is_number, require, unknown
from fedbilevel.core.inputs import declares_key, explained, require_function
from fedbilevel.core.own_y import IsOwn, own_paths
from fedbilevel.core.submodel import Structure
from fedbilevel.core.tree import PyTree, join
from fedbilevel.machinery.kept import has_rules, hash_of, shapes_of

Loss = Callable[[PyTree, PyTree, PyTree], Array]
"""(x, y, batch) -> scalar: the mean over the batch, whose arrays have a leading axis of samples.

A loss that draws random numbers (dropout, augmentation, noise) declares a fourth argument, (x, y, batch, key). It is
called with one sample at a time, as arrays of shape (1, ...), and with a key that depends on the client, the round, the
step and the sample. All derivatives on a batch use the same keys."""

OF_LOSSES = 0x6C6F7373  # folded into the key that draws a batch's samples, to make another key, for the losses' draws
F = TypeVar("F", bound=Callable[..., Any])
ImplicitTerm = Literal["inverse", "identity", "none"]
LocalVariable = Literal["x"]
BLOCKED = "stop_gradient, rounding and comparisons let no derivative pass"
Project = Callable[[PyTree], PyTree]
"""x -> the point of a closed convex set that is nearest to x."""


class WholeLoss:
    """Wrap a loss that is not a mean over samples, and so needs all samples of a client at once.

    Examples are a partial likelihood, an AUC, and a penalty that depends on a whole table. A problem can have such
    losses, as in `Bilevel(outer, WholeLoss(inner))`. Methods then need `batch_size=None`. F and G are the weighted
    means over clients, as for other losses.

    Args:
        function: (x, y, samples, valid) -> scalar. The leading axis of `samples` has the same length for all clients.
            `valid` is an array of booleans, which is True for the client's own samples. The other samples are copies,
            and have to be masked out: `jnp.sum(jnp.where(valid, each, 0)) / jnp.sum(valid)` is a mean.
    """

    def __init__(self, function: Callable[[PyTree, PyTree, PyTree, Array], Array]) -> None:
        require_function("WholeLoss.function", function, "x, y, samples, valid")
        self.function = function

    def __call__(self, x: PyTree, y: PyTree, batch: PyTree) -> Array:
        if not isinstance(batch, Padded):
            batch = Padded(batch, jnp.ones(len(jax.tree.leaves(batch)[0]), bool))
        return self.function(x, y, batch.samples, batch.mask)


class Keyed(NamedTuple):
    """Hold a batch for a loss that draws random numbers: the samples, and a key for each sample."""

    samples: PyTree
    keys: Array


def with_keys(batch: PyTree, key: Array) -> PyTree:
    """Give each sample of a batch a key of its own, derived from `key` and the sample's place.

    `key` may be the key with which the batch was drawn.
    """
    if isinstance(batch, Padded):
        return Padded(with_keys(batch.samples, key), batch.mask)
    places = jnp.arange(len(jax.tree.leaves(batch)[0]))
    return Keyed(batch, jax.vmap(partial(jax.random.fold_in, jax.random.fold_in(key, OF_LOSSES)))(places))


class DrawingLoss:
    """Average over a batch a function that draws random numbers.

    The function has the arguments (*point, sample, key), and this object has the arguments (*point, batch). Each sample
    has a key of its own. If a batch has no keys, the same keys are used in every call.
    """

    def __init__(self, function: Callable[..., PyTree]) -> None:
        self.function = function

    def __call__(self, *arguments: PyTree) -> PyTree:
        *point, batch = arguments
        samples, keys = batch if isinstance(batch, Keyed) else with_keys(batch, jax.random.key(0))
        one = lambda sample, key: self.function(*point, jax.tree.map(lambda a: a[None], sample), key)  # noqa: E731
        return jax.tree.map(partial(jnp.mean, axis=0), jax.vmap(one)(samples, keys))


def read_loss(field: str, function: Any, arguments: str) -> Any:
    """Check that a function takes these arguments; return it, as a `DrawingLoss` if it also takes a `key`."""
    if declares_key(function, arguments):
        return DrawingLoss(function)
    require_function(field, function, arguments, f", or ({arguments}, key) if it draws random numbers")
    return function


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Problem(Shown):
    """Base class of all kinds of problem: an outer and an inner loss of (x, y, batch).

    Attributes:
        implicit_term: how v in ∇Φ(x) = ∇x F − ∇²xy G·v is computed at y = y*(x). "inverse": v solves ∇²yy G·v = ∇y F.
            "identity": v is ∇y F, since ∇²yy G is the identity. "none": v is not needed, since ∇y F is 0.
        inner_is_mean: whether the inner loss is the mean of its values on single samples. If it is not, it accepts
            padded batches itself.
        own_losses: the names of the losses that the user has written. The other loss is derived from these, or is 0.
    """

    outer: Loss
    inner: Loss
    structure: Structure | None
    local: LocalVariable | None
    project_x: Project | None
    couples_x: bool  # whether the projection of an entry of x may depend on other entries
    own: IsOwn | None
    implicit_term: ClassVar[ImplicitTerm]
    inner_is_mean: ClassVar[bool] = True
    own_losses: ClassVar[tuple[str, ...]] = ("outer", "inner")
    whole: tuple[str, ...]  # the losses, "outer" or "inner", that need all samples of a client
    draws: tuple[str, ...]  # the losses that need a key
    takes_padded: bool  # whether the losses accept a `Padded` batch
    key: Hashable | None  # identifies the programs that were compiled from this problem; see `keyed`

    def card(self) -> Card:
        said = {
            "structure": "parts of x and y that small clients may leave out",
            "local": "x stays with its clients",
            "own": "leaves of y are each client's own",
            "project_x": "x stays in a convex set",
        }
        given = {name: words for name, words in said.items() if getattr(self, name) is not None}
        return Card(type(self).__name__, {"problem": str(inspect.getdoc(type(self))).partition("\n")[0]} | given)

    def _set(
        self,
        outer: Loss,
        inner: Loss,
        structure: Structure | None = None,
        local: LocalVariable | None = None,
        project_x: Project | None = None,
        own: IsOwn | None = None,
        declared: Mapping[str, object] | None = None,
    ) -> None:
        """Check and set the fields; `declared` has the user's functions, if the losses are derived from them."""
        declared = declared or {"outer": outer, "inner": inner}
        whole = tuple(name for name, loss in declared.items() if isinstance(loss, WholeLoss))
        draws = tuple(name for name, loss in declared.items() if isinstance(loss, DrawingLoss))
        known = structure is None or isinstance(structure, Structure)
        require(known, f"{type(self).__name__}.structure", structure, "a Structure, or None if nothing can be cut")
        if local not in (None, "x"):
            raise unknown(f"{type(self).__name__}.local", local, ["x"])
        if own is not None:
            require_function(f"{type(self).__name__}.own", own, "path", " -> whether the leaf is each client's own")
            require(local is None, f"{type(self).__name__}.own", own, "None with local = 'x'")
        vars(self).update(outer=outer, inner=inner, structure=structure, local=local, own=own)
        vars(self).update(whole=whole, draws=draws, takes_padded=False)
        self._keep_x_in(project_x)

    def _keep_x_in(self, project_x: Project | None) -> None:
        if project_x is not None:
            require_function(f"{type(self).__name__}.project_x", project_x, "x", " -> the nearest point of a set")
            allowed = "None with local = 'x', since the server does not have x and cannot project it"
            require(self.local is None, f"{type(self).__name__}.project_x", project_x, allowed)
        vars(self).update(project_x=project_x, couples_x=project_x is not None, key=None)

    def with_couples_x(self, couples_x: bool) -> Self:
        """Return a copy with this value of `couples_x`, which is also part of the copy's key.

        The value says whether the projection of an entry of x may depend on other entries of x.
        """
        changed = copy.copy(self)
        vars(changed).update(couples_x=couples_x, key=self.key and (self.key, couples_x))
        return changed

    def with_x_in(self, project_x: Project | None) -> Self:
        """Return a copy of this problem whose x stays in the set onto which `project_x` projects; None: x is free."""
        changed = copy.copy(self)
        changed._keep_x_in(project_x)
        return changed

    def with_own(self, own: IsOwn | None) -> Self:
        """Return a copy of this problem in which `own` says which leaves of y are each client's own; None: no leaf."""
        changed = copy.copy(self)
        vars(changed).update(own=own, key=None)
        return changed

    def with_losses(self, change: Callable[[Loss], Loss], inner: Callable[[Loss], Loss] | None = None) -> Self:
        """Return a copy of this problem with losses changed by `change`; if given, `inner` changes the inner loss."""
        changed = copy.copy(self)
        vars(changed).update(
            outer=change(self.outer), inner=(inner or change)(self.inner), takes_padded=False, key=None
        )
        return changed

    def with_fixed(self, x_fixed: PyTree, y_fixed: PyTree) -> Self:
        """Return a copy of this problem whose losses take only the floating arrays of x and y.

        Before the user's losses are called, all other leaves of x and y, which are `x_fixed` and `y_fixed`, are put
        back in their places.
        """
        if not jax.tree.leaves((x_fixed, y_fixed)):
            return self
        return self.with_losses(lambda loss: lambda x, y, batch: loss(join(x, x_fixed), join(y, y_fixed), batch))

    def prepared(self) -> Self:
        """Return a copy for one run, whose functions JAX traces once for arguments of the same shapes."""
        made = self.with_losses(_jitted).over_batches().with_losses(_jitted)._padded()
        return made if made.project_x is None else made.with_x_in(_jitted(made.project_x))

    def traced(self, x: PyTree, y: PyTree, examples: tuple[PyTree, PyTree]) -> dict[str, ClosedJaxpr]:
        """Check the losses as `check_losses` does, and return the traced programs of the problem's functions, by name.

        Losses are traced on two samples, since on a single sample a sum looks like a mean. If one of the losses cannot
        be evaluated on two samples, both losses are traced on one sample.

        Args:
            x, y: the point, as for `solve`.
            examples: a sample of the outer loss, and a sample of the inner loss.
        """
        two = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape[1:]), leaf.dtype), examples)
        sets = {} if self.project_x is None else {"projection": jax.make_jaxpr(self.project_x)(x)}
        with suppress(Exception):  # whatever a user's function raises
            return check_losses(self, x, y, *two) | sets
        return check_losses(self, x, y, *examples) | sets

    def keyed(self, x: PyTree, y: PyTree, examples: tuple[PyTree, PyTree], programs: Mapping[str, ClosedJaxpr]) -> Self:
        """Return a copy with an identifier, its `key`; problems with equal identifiers share their compiled programs.

        The identifier depends on what the functions of the problem compute: on their traced programs, which `traced`
        returns and `programs` contains. If a loss contains functions with their own rules for derivatives, it also
        depends on the first and second derivatives of this loss.
        """
        with_rules = [
            program
            for name, loss, batch in zip(("outer", "inner"), (self.outer, self.inner), examples, strict=True)
            if has_rules(programs[f"{name} loss"])
            for program in _derivatives(loss, x, y, batch)
        ]
        plain = [value for value in vars(self).values() if isinstance(value, bool | int | float | str | None)]
        plain += own_paths(self.own, y)
        found = hash_of(*programs.values(), *with_rules)
        key = found and (type(self), str(plain), found, shapes_of(jax.tree.leaves((x, y, examples))))
        changed = copy.copy(self)
        vars(changed).update(key=key)
        return changed

    def over_batches(self) -> Self:
        """Return a copy of this problem whose losses also accept a `Padded` batch.

        The loss of such a batch is the mean over its valid samples. If a loss is NaN, its derivatives are also NaN, so
        that no method continues from this point.
        """
        if self.takes_padded:
            return self
        as_it_is, mean = (lambda loss: loss), self.inner_is_mean and "inner" not in self.whole
        outer = as_it_is if "outer" in self.whole else _mean_over
        return self.with_losses(outer, _mean_over if mean else as_it_is).with_losses(_spoiling)._padded()

    def _padded(self) -> Self:
        vars(self).update(takes_padded=True)
        return self


def _derivatives(loss: Loss, x: PyTree, y: PyTree, batch: PyTree) -> list[ClosedJaxpr]:
    """Trace the first derivatives of a loss in x and y, and, if possible, its second derivatives."""
    slopes = jax.grad(loss, (0, 1))

    def total(x: PyTree, y: PyTree, batch: PyTree) -> Array:
        return sum((jnp.sum(leaf) for leaf in jax.tree.leaves(slopes(x, y, batch))), jnp.zeros(()))

    programs = [jax.make_jaxpr(slopes)(x, y, batch)]
    with suppress(Exception):  # whatever a user's rule raises
        programs.append(jax.make_jaxpr(jax.grad(total, (0, 1)))(x, y, batch))
    return programs


@explain_misspelt
@dataclass(frozen=True, init=False, eq=False, repr=False)
class Bilevel(Problem):
    """Minimise F(x, y*(x)) over x, with y*(x) = argmin over y of G(x, y); F and G are weighted means over clients.

    A loss may have terms that need no samples, such as penalties. A loss that draws random numbers (dropout,
    augmentation, noise) is a function (x, y, batch, key). It is called with one sample at a time, as
    arrays of shape (1, ...), and with a key that depends on the client, the round, the step and the sample.

    Args:
        outer: f(x, y, batch) -> scalar, the validation loss, a mean over the samples of the batch.
        inner: g(x, y, batch) -> scalar, the training loss, a mean over the samples of the batch; strongly convex in y,
            so that y*(x) is a single point.
        structure: which parts of x and y can be left out, for clients of limited capacity; None: no part.
        local: "x" if x has a block for each client, and a client's losses read only the client's own block. The leaves
            of x then have the shape (M, ...). Losses, and metrics per client, get a client's block with leaves of
            shape (1, ...). Each client keeps its block: no message contains a part of x, and the server of a
            federation never sees x. None: the server has x.
        project_x: x -> the nearest point of a closed convex set, in which x stays; `fedbilevel.projections` has such
            functions, for example `projections.box(-8, 4)`. The server projects x at the end of every round. If x is a
            model, the function gets its floating arrays, with None in place of all other leaves. None: x is not
            constrained.
        own: path -> whether a leaf of y is each client's own, such as `lambda path: path.startswith("head/")`. A path
            is a text like "head/weight", or "" if y is a single array. A client keeps its own leaves and trains them by
            itself; no message contains them. The other leaves are shared. None: all of y is shared.
    """

    implicit_term: ClassVar[ImplicitTerm] = "inverse"

    def __init__(
        self,
        outer: Loss,
        inner: Loss,
        *,
        structure: Structure | None = None,
        local: LocalVariable | None = None,
        project_x: Project | None = None,
        own: IsOwn | None = None,
    ) -> None:
        outer = read_loss("Bilevel.outer", outer, "x, y, batch")
        inner = read_loss("Bilevel.inner", inner, "x, y, batch")
        self._set(outer, inner, structure, local, project_x, own)


@explain_misspelt
@dataclass(frozen=True, init=False, eq=False, repr=False)
class Minimax(Bilevel):
    """Minimise over x the maximum over y of F(x, y): the bilevel problem with g = −f.

    Both losses use the samples `Clients.outer`.

    Args:
        loss: f(x, y, batch) -> scalar, a mean over the samples of the batch; strongly concave in y.
        structure: which parts of x and y can be left out, for clients of limited capacity; None: no part.
        project_x: x -> the nearest point of a closed convex set, in which x then stays; None: x may go anywhere.
    """

    implicit_term: ClassVar[ImplicitTerm] = "none"
    own_losses: ClassVar[tuple[str, ...]] = ("outer",)

    def __init__(self, loss: Loss, *, structure: Structure | None = None, project_x: Project | None = None) -> None:
        loss = read_loss("Minimax.loss", loss, "x, y, batch")
        both = {"outer": loss, "inner": loss}
        self._set(loss, lambda x, y, batch: -loss(x, y, batch), structure, project_x=project_x, declared=both)


@explain_misspelt
@dataclass(frozen=True, init=False, eq=False, repr=False)
class Compositional(Bilevel):
    """Minimise F(R(x)) over x: the bilevel problem with g = ½‖y − r(x)‖²; F and R are weighted means over clients.

    Args:
        outer: f(y, batch) -> scalar, a mean over the samples of the batch.
        inner: r(x, batch) -> a pytree with the shapes of y, a mean over the samples of the batch.
        structure: which parts of x and y can be left out, for clients of limited capacity; None: no part.
        project_x: x -> the nearest point of a closed convex set, in which x then stays; None: x may go anywhere.
    """

    implicit_term: ClassVar[ImplicitTerm] = "identity"
    inner_is_mean: ClassVar[bool] = False

    def __init__(
        self,
        outer: Callable[[PyTree, PyTree], Array],
        inner: Callable[[PyTree, PyTree], PyTree],
        *,
        structure: Structure | None = None,
        project_x: Project | None = None,
    ) -> None:
        outer = read_loss("Compositional.outer", outer, "y, batch")
        inner = read_loss("Compositional.inner", inner, "x, batch")

        mean_inner = _mean_over(inner)

        def distance(x: PyTree, y: PyTree, batch: PyTree) -> Array:
            gap = optax.tree.sub(y, mean_inner(x, batch))
            return optax.tree.vdot(gap, gap) / 2

        given = {"outer": outer, "inner": inner}
        self._set(lambda x, y, batch: outer(y, batch), distance, structure, project_x=project_x, declared=given)


@explain_misspelt
@dataclass(frozen=True, init=False, eq=False, repr=False)
class SingleLevel(Problem):
    """Minimise F(x) over x, the ordinary federated problem; y is empty and `y0` is None.

    Args:
        loss: f(x, batch) -> scalar, a mean over the samples of the batch.
        structure: which parts of x can be left out, for clients of limited capacity; None: no part.
        project_x: x -> the nearest point of a closed convex set, in which x then stays; None: x may go anywhere.
    """

    implicit_term: ClassVar[ImplicitTerm] = "none"
    own_losses: ClassVar[tuple[str, ...]] = ("outer",)

    def __init__(
        self,
        loss: Callable[[PyTree, PyTree], Array],
        *,
        structure: Structure | None = None,
        project_x: Project | None = None,
    ) -> None:
        loss = read_loss("SingleLevel.loss", loss, "x, batch")
        nothing = lambda x, y, batch: jnp.zeros(())  # noqa: E731
        given = {"outer": loss}
        self._set(lambda x, y, batch: loss(x, batch), nothing, structure, project_x=project_x, declared=given)


@explain_misspelt
@dataclass(frozen=True, init=False, eq=False, repr=False)
class SimpleBilevel(Problem):
    """Minimise H(x) among the minimisers x of F over X: one variable, and a preference among many solutions.

    Here F is the weighted mean over clients of their mean losses. `y0` is None, since x is the only variable. Both H
    and f may have kinks: there, JAX's gradient is used as a subgradient.

    Args:
        outer: H(x) -> scalar, strongly convex. Only the server needs it; None at the clients of a federation.
        inner: f(x, batch) -> scalar, a mean over the samples of the batch; convex.
        subgradient: x -> 𝓗(x), a subgradient of H, in the shape of x. It gets x in the same form as `project`. None:
            JAX's gradient of H.
        project: x -> the nearest point of X, a compact convex set; `fedbilevel.projections` has such functions. If x is
            a model, the function gets its floating arrays, with None in place of all other leaves.
        strong_convexity: μ > 0 with H(u) ≥ H(v) + ⟨𝓗(v), u − v⟩ + (μ/2)‖u − v‖² for all u and v in X; None: μ is
            measured at random points of X.
    """

    implicit_term: ClassVar[ImplicitTerm] = "none"
    project: Project
    subgradient: Callable[[PyTree], PyTree] | None
    strong_convexity: float | None
    known: bool  # whether the problem has H; the server's problem has it, and the clients' problem may lack it

    def __init__(
        self,
        outer: Callable[[PyTree], Array] | None,
        inner: Callable[[PyTree, PyTree], Array],
        project: Project,
        *,
        subgradient: Callable[[PyTree], PyTree] | None = None,
        strong_convexity: float | None = None,
    ) -> None:
        if outer is not None:
            require_function("SimpleBilevel.outer", outer, "x", ", or None on a client")
        require_function("SimpleBilevel.inner", inner, "x, batch")
        require_function("SimpleBilevel.project", project, "x", " -> the nearest point of X")
        if subgradient is not None:
            require_function("SimpleBilevel.subgradient", subgradient, "x", ", or None")
            require(outer is not None, "SimpleBilevel.subgradient", subgradient, "None if outer is None")
        mu = strong_convexity
        fits = mu is None or (is_number(mu) and mu > 0)
        require(fits, "SimpleBilevel.strong_convexity", mu, "positive and finite, or None")
        vars(self).update(project=project, subgradient=subgradient, strong_convexity=mu, known=outer is not None)

        def h(x: PyTree, y: PyTree, batch: PyTree) -> Array:
            return jnp.zeros(()) if outer is None else outer(x)

        self._set(h, lambda x, y, batch: inner(x, batch))

    def prepared(self) -> Self:
        changed, subgradient = super().prepared(), self.subgradient and _jitted(self.subgradient)
        vars(changed).update(project=_jitted(self.project), subgradient=subgradient)
        return changed

    def traced(self, x: PyTree, y: PyTree, examples: tuple[PyTree, PyTree]) -> dict[str, ClosedJaxpr]:
        others = {"projection": self.project, "subgradient": self.subgradient}
        found = {name: jax.make_jaxpr(function)(x) for name, function in others.items() if function is not None}
        return super().traced(x, y, examples) | found

    def preference(self, x: PyTree) -> tuple[Array, PyTree]:
        """Return the outer loss H(x), and a subgradient 𝓗 ∈ ∂H(x), in the shape of x."""
        if self.subgradient is not None:
            return self.outer(x, None, None), self.subgradient(x)
        return jax.value_and_grad(self.outer)(x, None, None)


class Padded(NamedTuple):
    """Hold all samples of a client, padded to a common length; `mask` is False on the padding."""

    samples: PyTree
    mask: Array


def _mean_over(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Return `function`, which is a mean over the samples of a batch, as a function that also takes a `Padded` batch.

    `function` takes (*point, batch). For a `Padded` batch, the result is the mean over the valid samples.
    """

    def mean_function(*arguments: PyTree) -> PyTree:
        *point, batch = arguments
        if not isinstance(batch, Padded):
            return function(*point, batch)
        each = jax.vmap(lambda sample: function(*point, jax.tree.map(lambda a: a[None], sample)))(batch.samples)
        count = jnp.sum(batch.mask)

        def mean(leaf: Array) -> Array:
            mask = batch.mask.reshape(-1, *[1] * (leaf.ndim - 1))
            return jnp.sum(jnp.where(mask, leaf, 0), axis=0) / count  # leaves out all values of the padding, also NaN

        return jax.tree.map(mean, each)

    return mean_function


def _spoiling(loss: Loss) -> Loss:
    """Return the loss with derivatives that are NaN wherever the loss is NaN.

    JAX's own derivative can be finite there. For example, if an array is read beyond its end, JAX returns NaN as a
    constant, whose derivative is 0.
    """

    def spoiled(x: PyTree, y: PyTree, batch: PyTree) -> Array:
        value = loss(x, y, batch)
        if not hasattr(value, "dtype"):  # `check_losses` reports it
            return value
        return value * jnp.where(jnp.isnan(value), jnp.nan, 1).astype(value.dtype)

    return spoiled


def _jitted(function: F) -> F:
    """Return a new function that computes the same, and that JAX traces once for arguments of the same shapes.

    It is a new function object, since JAX caches traces by the function object.
    """
    made: Any = jax.jit(lambda *arguments: function(*arguments), inline=True)
    return made


def check_losses(
    problem: Problem, x: PyTree, y: PyTree, outer_batch: PyTree, inner_batch: PyTree
) -> dict[str, ClosedJaxpr]:
    """Trace both losses once, without computing them, and return the traced programs, by name.

    Raises:
        ConfigurationError: a loss cannot be called with x, y and its batch, or does not return a real scalar.
    """
    programs = {}
    for name, loss, batch in (("outer", problem.outer, outer_batch), ("inner", problem.inner, inner_batch)):
        with explained(f"the {name} loss", x=x, y=y, batch=batch):
            programs[f"{name} loss"], shape = jax.make_jaxpr(loss, return_shape=True)(x, y, batch)
        if getattr(shape, "shape", None) != () or not jnp.issubdtype(shape.dtype, jnp.floating):
            got = getattr(shape, "dtype", described(shape))
            if shape is None:
                got = "None: does it end without `return`?"
            elif getattr(shape, "shape", ()):
                got = f"an array of shape {shape.shape}; jnp.mean reduces an array to one number"
            elif isinstance(shape, tuple | list | dict):
                got = f"a {type(shape).__name__}: return only the loss"
            text = f"it must return one real number (the mean over the batch); it returned {got}"
            raise ConfigurationError(text, where=f"the {name} loss")
    return programs


def why_it_vanishes(problem: Problem, moves: Mapping[str, bool]) -> str:
    """Return the reason why x does not move, or does not move through y*; "" if nothing is wrong.

    The reason is derived from the gradient ∇x F − ∇²xy G·v, where v = 0 if ∇y F = 0.

    Args:
        problem: the problem.
        moves: for each of the derivatives "f_x", "f_y", "g_x", "g_y" and "g_xy", whether it differs from 0 anywhere.
    """
    f_x, f_y, g_x, g_y, g_xy = (moves[name] for name in ("f_x", "f_y", "g_x", "g_y", "g_xy"))
    if isinstance(problem, SimpleBilevel):
        why = "" if problem.subgradient or f_x or g_x else "no loss has a derivative in x"
    elif isinstance(problem, SingleLevel | Minimax):
        why = "" if f_x else "the loss has no derivative in x"
    else:
        why = "" if g_xy else "the derivative of the inner loss in y does not depend on x"
        why = why if g_y else "the inner loss has no derivative in y"
        why = why if f_y else "the outer loss has no derivative in y"
        if why and f_x:
            claim = "x does not change y*" if f_y else "y* does not change the outer loss"
            order = "Are the losses in the right order? Bilevel(outer, inner) takes the validation loss first"
            return f"{claim}: {why}. x moves only along the derivative of the outer loss in x. {order}"
        why = why and f"the outer loss has no derivative in x, and {why}"
    return why and f"no gradient will move x: {why} ({BLOCKED})"

"""Assign submodels to clients, from the clients' capacities and the algorithm's choice of units."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.algorithm import Algorithm, takes_and_gives
from fedbilevel.core.card import span
from fedbilevel.core.client import Clients, RemoteClients
from fedbilevel.core.errors import CapacityWarning, ConfigurationError, require, warn
from fedbilevel.core.facts import No
from fedbilevel.core.fed import Phase
from fedbilevel.core.problem import Problem, SingleLevel, check_losses
from fedbilevel.core.submodel import ClientSlot, UnitLayout, Units
from fedbilevel.core.tree import PyTree
from fedbilevel.core.weights import WeightLayout
from fedbilevel.engines.costs import Dtypes, RoundCosts, Sums
from fedbilevel.engines.recorder import CapacityClass
from fedbilevel.machinery.kept import kept

CAPACITY = "Clients.capacity"

STREAM = 2**32 - 1  # folded into the run's key for the choice of units; no round has this number


@dataclass(frozen=True, eq=False)
class SubmodelPlan:
    """Hold the part of the assignment of submodels to clients that is fixed for a run.

    Clients of the same capacity form a class; the class of the largest capacity comes first.
    """

    unit_layout: UnitLayout
    kept: tuple[dict[str, int], ...]  # for each class, the number of units of each group
    places: tuple[int, ...]  # for each class, the largest number of its clients in any round
    peers: tuple[int, ...]  # for each class, the smallest number of its available clients in any round
    number: np.ndarray  # the class of each client, of shape (M,), or (T, M) if it changes with the round
    rank: np.ndarray  # each client's number within its class, in the shape of `number`

    @property
    def classes(self) -> list[CapacityClass]:
        """List the layout of all units, and the numbers of kept units, for each class of clients of equal capacity."""
        return [(self.unit_layout, sizes) for sizes in self.kept]

    def member(self, round: int, client: int) -> tuple[int, int]:
        """Return the class of a client in a round, and its number among its peers."""
        place = client if self.number.ndim == 1 else (round, client)
        return int(self.number[place]), int(self.rank[place])

    @cached_property
    def traced(self) -> str:
        """Return a text of everything in the plan on which a compiled program depends.

        The classes of the clients are arguments of the program, and not part of the text.
        """
        return repr((self.unit_layout, self.kept, self.places, self.peers))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SubmodelPlan) and self.traced == other.traced

    def __hash__(self) -> int:
        return hash(self.traced)

    @classmethod
    def of(
        cls,
        algorithm: Algorithm,
        problem: Problem,
        clients: Clients | RemoteClients,
        x: PyTree,
        y: PyTree,
        never_available: np.ndarray | tuple[()] = (),
    ) -> SubmodelPlan | None:
        """Plan which units clients hold; return None if all clients hold the whole model.

        All clients hold the whole model if no capacities are given, or if the algorithm does not support submodels.
        `never_available` has the ids of clients that are never available; submodels are divided among the others.
        """
        if clients.capacity is None:
            return None
        name, weak = algorithm.label, int(np.sum(clients.capacity < 1))
        policy = algorithm.allows.submodels
        if isinstance(policy, No):
            if weak:
                clients_are = "1 client" if weak == 1 else f"{weak} clients"
                text = f"{name} trains whole models, also on {clients_are} with a capacity below 1: {policy.why}"
                warn(CapacityWarning(text))
            return None
        if problem.structure is None and not weak:
            return None
        shares = span(clients.capacity, ".3g")
        if problem.structure is None:
            message = f"{CAPACITY} is given, but the problem has no structure by which to cut"
            allowed = "None, or a problem with a structure"
            raise ConfigurationError(path=CAPACITY, got=shares, allowed=allowed, message=message)
        stateless = not algorithm.asks.asynchronous and algorithm.client_state(problem, x, y) is None
        require(
            stateless,
            CAPACITY,
            shares,
            f"None: with these fields {name} keeps whole models on clients",
        )
        by_weight = policy.policy == "weights"
        unit_layout = UnitLayout.of(problem.structure, x, y, "both" if by_weight else policy.pruned)
        if by_weight:
            biased = isinstance(problem, SingleLevel)
            unit_layout = WeightLayout.over(unit_layout, x, y, policy.pruned, biased=biased)
        if weak and not unit_layout.sizes:
            reach = "" if policy.pruned == "both" else f" with pruned = {policy.pruned!r}"
            message = f"{CAPACITY} is given, but the structure has no group of units to cut{reach}"
            allowed = f"None, or a structure with a group of units{reach}"
            raise ConfigurationError(path=CAPACITY, got=shares, allowed=allowed, message=message)
        capacities, number = np.unique(-clients.capacity, return_inverse=True)
        number = number.reshape(clients.capacity.shape).astype(np.int32)
        available = ~np.isin(np.arange(len(clients)), never_available)
        rank, peers, places = np.zeros_like(number), [], []
        for of_class in range(len(capacities)):
            members = number == of_class
            present = members & available
            before = np.cumsum(present, axis=-1) - 1
            rank[present] = before[present]
            places.append(int(np.max(np.sum(members, axis=-1))))
            peers.append(max(1, int(np.min(np.sum(present, axis=-1)))))
        sizes = tuple(unit_layout.kept(-float(capacity)) for capacity in capacities)
        for capacity, units in zip(-capacities, sizes, strict=True):
            check = partial(_check_cut, unit_layout, units, float(capacity), problem, clients, x, y)
            kept(problem.key and ("cut", problem.key, repr((unit_layout, units))), check)
        return cls(unit_layout, sizes, tuple(places), tuple(peers), number, rank)


def _check_cut(
    unit_layout: UnitLayout,
    of_class: dict[str, int],
    capacity: float,
    problem: Problem,
    clients: Clients | RemoteClients,
    x: PyTree,
    y: PyTree,
) -> None:
    """Trace both losses on a submodel: if the structure is incomplete, the arrays' shapes do not fit together."""
    if isinstance(unit_layout, WeightLayout):  # a submodel has the same losses as the whole model
        return
    units = unit_layout.shapes_of(of_class)
    small_x, small_y = jax.eval_shape(partial(unit_layout.cut, ("x", "y")), (x, y), units)
    try:
        check_losses(problem, small_x, small_y, *clients.examples())
    except Exception as error:  # an error of any library with which the losses are made
        raise ConfigurationError(
            f"the losses fail on the submodel of capacity {capacity:g} that the structure cuts: {error}; "
            "check_structure says which groups of units are not described completely"
        ) from error


def classes(algorithm: Algorithm, problem: Problem, clients: Any, x: PyTree, y: PyTree) -> list[CapacityClass]:
    """List the classes of capacity, without warnings; [] if all clients hold the whole model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CapacityWarning)  # the engine issues it
        submodel_plan = SubmodelPlan.of(algorithm, problem, clients, x, y) if isinstance(clients, Clients) else None
    return [] if submodel_plan is None else submodel_plan.classes


class Holders(NamedTuple):
    """Hold, for some clients, how many of them hold each entry of (x, y), and how much of the model they lack."""

    counts: PyTree  # for each entry of (x, y), how many of these clients hold it
    noise: tuple[Array, ...]  # for x and for y, the largest share of the squared norm that one of these clients lacks


class WholeModels:
    """Describe a round in which all clients hold the whole model, with the methods of `RoundSubmodels`.

    Every client is sent whole messages, sums over clients stay as they are, and there is no coverage to measure.
    """

    alike = True

    def units(self, number: int, id: Array | int = 0, rank: Array | int = 0) -> Units:
        return {}

    def units_of(self, client: int) -> Units:
        return {}

    def representative(self, client: int) -> int:
        return 0

    def cut(self, phase: Phase, message: PyTree, units: Units) -> PyTree:
        return message

    def put_back(self, phase: Phase, sums: Sums, units: Units) -> Sums:
        return sums

    def holders(self, units: Units, count: Array) -> Holders:
        return Holders((None, None), ())

    def covered(self, round_costs: RoundCosts, holders: Iterable[Holders]) -> RoundCosts:
        return round_costs


class RoundSubmodels:
    """Choose the submodels of a round, from x and y at its start."""

    def __init__(
        self, submodel_plan: SubmodelPlan, algorithm: Algorithm, key: Array, round: Array | int, x: PyTree, y: PyTree
    ) -> None:
        policy = algorithm.allows.submodels
        assert not isinstance(policy, No)
        self.submodel_plan, self.unit_layout, self.policy = submodel_plan, submodel_plan.unit_layout, policy
        self.key, self.round, self.model = jax.random.fold_in(key, STREAM), round, (x, y)
        self.importance = submodel_plan.unit_layout.importance(x, y)

    @property
    def alike(self) -> bool:
        """Return whether all clients of a class hold the same units."""
        return self.policy.alike

    def units(self, number: int, id: Array | int = 0, rank: Array | int = 0) -> Units:
        """Choose the units of a client of class `number`.

        If all clients of a class hold the same units, `id` and `rank` do not matter.
        """
        holder = ClientSlot(self.round, self.key, id, rank, self.submodel_plan.peers[number])
        return self.policy.units(self.unit_layout, self.submodel_plan.kept[number], self.importance, holder)

    def units_of(self, client: int) -> Units:
        """Choose the units that this client holds in the round."""
        number, rank = self.submodel_plan.member(int(self.round), client)
        return self.units(number, client, rank)

    def representative(self, client: int) -> int:
        """Return the smallest id of a client that holds the same units as this client."""
        classes = self.submodel_plan.number
        return int(np.argmax(classes == classes[client])) if self.alike else client

    def cut(self, phase: Phase, message: PyTree, units: Units) -> PyTree:
        """Return the part of a phase's message for a client that holds these units."""
        return cut(self.unit_layout, phase, message, units)

    def put_back(self, phase: Phase, sums: Sums, units: Units) -> Sums:
        """Turn sums over clients that hold these units into whole arrays, with the weight of each entry's holders."""
        return put_back(self.unit_layout, phase, sums, units)

    def covered(self, round_costs: RoundCosts, holders: Iterable[Holders]) -> RoundCosts:
        """Add metrics of the coverage by submodels to a round's costs; `holders` has one entry per group of clients."""
        return covered(round_costs, list(holders))

    def holders(self, units: Units, count: Array) -> Holders:
        """Return the `Holders` for `count` clients that hold these units."""
        x_and_y, model = ("x", "y"), self.model
        mask = self.unit_layout.held(x_and_y, model, units, jnp.ones(()))
        noise = jax.tree.map(lambda m, leaf: jnp.sum((1 - m) * jnp.square(leaf)), mask, model)
        whole = jax.tree.map(lambda leaf: jnp.sum(jnp.square(leaf)), model)
        shares = (_share(left, of) for left, of in zip(noise, whole, strict=True))
        counts = self.unit_layout.held(x_and_y, model, units, count)
        return Holders(counts, tuple(jnp.where(count > 0, share, 0) for share in shares))


def models_of_round(
    submodel_plan: SubmodelPlan | None, algorithm: Algorithm, key: Array, round: Array | int, state: Any
) -> WholeModels | RoundSubmodels:
    """Return what clients hold in a round that begins at this state of the server."""
    if submodel_plan is None:
        return WholeModels()
    return RoundSubmodels(submodel_plan, algorithm, key, round, state.x, state.y)


def _share(part: PyTree, whole: PyTree) -> Array:
    """Return Σ part / Σ whole over all leaves; 0 if Σ whole is 0."""
    some, total = (jnp.asarray(sum(jax.tree.leaves(tree)), float) for tree in (part, whole))
    return jnp.where(total > 0, some / jnp.where(total > 0, total, 1), 0)


def cut(unit_layout: UnitLayout, phase: Phase, message: PyTree, units: Units) -> PyTree:
    """Return the part of a phase's message for a client that holds these units."""
    return unit_layout.sent(takes_and_gives(phase)[0], message, units)


def put_back(unit_layout: UnitLayout, phase: Phase, sums: Sums, units: Units) -> Sums:
    """Turn sums over clients that hold these units into whole arrays, with the weight of each entry's holders.

    The holders of an entry are the clients that hold it. Outside of these units, sums and weights are 0.
    """
    gives = takes_and_gives(phase)[1]
    held = unit_layout.held(gives, sums.update, units, sums.weight)
    put = partial(unit_layout.put, gives)
    dtypes = Dtypes.of(jax.eval_shape(put, sums.rounded, units))
    return sums._replace(update=put(sums.update, units), held=held, dtypes=dtypes)


def covered(round_costs: RoundCosts, holders: list[Holders]) -> RoundCosts:
    """Add metrics of the coverage of x and y by submodels to a round's costs.

    `holders` has an entry for each group of clients. The metrics are:

    - coverage_x: the smallest number of clients that hold an entry, over entries that some client holds (C_x* of RABO).
    - uncovered_x: the number of entries that no client holds, which are not updated.
    - mask_noise_x: the least w₁² for which RABO's Assumption 5 is true in this round: ‖x − x⊙m_i‖² ≤ w₁²‖x‖² for each
      client's mask m_i.

    coverage_y, uncovered_y and mask_noise_y (w₂²) are the same for y.
    """
    counts = reduce(partial(jax.tree.map, jnp.add), [group.counts for group in holders])
    noises = reduce(partial(jax.tree.map, jnp.maximum), [group.noise for group in holders])
    metrics, weight = dict(round_costs.metrics), jnp.ones(())
    for part, tree, noise in zip("xy", counts, noises, strict=True):
        leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.size]
        if leaves:
            least = jnp.min(jnp.stack([jnp.min(jnp.where(leaf > 0, leaf, jnp.inf)).astype(float) for leaf in leaves]))
            nobody = sum(jnp.sum(leaf == 0) for leaf in leaves)
            metrics["submodels", f"coverage_{part}"] = least, weight
            metrics["submodels", f"uncovered_{part}"] = jnp.asarray(nobody, float), weight
            metrics["submodels", f"mask_noise_{part}"] = noise, weight
    return round_costs._replace(metrics=metrics)

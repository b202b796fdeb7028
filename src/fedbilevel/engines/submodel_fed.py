"""The exchanges of a round with clients who hold submodels: one vectorised group per capacity, on smaller arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedbilevel.core.algorithm import parts_of
from fedbilevel.core.fed import Reply
from fedbilevel.core.tree import PyTree
from fedbilevel.engines.costs import RoundCosts, Sums, add_costs, empty_costs, exchange_costs, in_parts, normalise
from fedbilevel.engines.local.fed import ExchangeState, LocalFed, Members, ProgramLayout, sum_over_clients
from fedbilevel.engines.submodels import covered, put_back


class SubmodelFed(LocalFed):
    """See `Fed`. Each class of capacity is sent its part of the message, and its sum is put back into the whole."""

    members: tuple[Members, ...]  # type: ignore[assignment]

    def __init__(self, *given: Any) -> None:
        *given_, self.held = given
        super().__init__(*given_)

    def mean(
        self,
        phase: Callable[..., Reply],
        message: PyTree,
        key: Array,
        *,
        unbiased: bool = False,
        fresh: int | Array | None = None,
    ) -> PyTree:
        groups: Any = self.members if fresh is None else self.draw(fresh)
        sums, spent, entries = [], [], []
        for number, members in enumerate(groups):
            of_class, units, (down, up) = self.sums_of(phase, message, key, fresh, number, members)
            sums.append(of_class)
            spent.append(units)
            name = self.algorithm.phase_name(phase)
            entry = exchange_costs(name, down, of_class, of_class.responders, update=up, exchanges=int(number == 0))
            entries.append(entry)
        everyone = jax.tree.map(lambda *columns: jnp.concatenate(columns), *groups)
        ticks = self.wait_for(everyone, None if self.pace.compute is None else jnp.concatenate(spent))
        time = empty_costs()._replace(time=in_parts(ticks))
        self.round_costs = reduce(add_costs, [self.round_costs, *entries, time])
        total = reduce(lambda a, b: jax.tree.map(jnp.add, a, b), sums)
        return normalise(total, self.layout.available_population, unbiased)

    def sums_of(
        self, phase: Callable[..., Reply], message: PyTree, key: Array, fresh: Any, number: int, members: Members
    ) -> tuple[Sums, Any, tuple[PyTree, PyTree]]:
        """The sums of a class, what each of its members computed, and the shapes of what went down to one and up."""
        takes, gives = parts_of(phase)
        unit_layout, alike = self.held.unit_layout, self.held.alike
        same = self.held.units(number)
        small = unit_layout.cut(takes, message, same) if alike else None
        shapes: list[PyTree] = [None, None]

        def one(member: Members, state: PyTree) -> tuple[Sums, tuple[PyTree, Any]]:
            units = same if alike else self.held.units(number, member.id, member.rank)
            part = small if alike else unit_layout.cut(takes, message, units)
            sums, kept = self.question(phase, part, key, fresh)[1](member, state)
            shapes[:] = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (part, sums.update))
            if not alike:
                sums = put_back(unit_layout, gives, sums, units)
            return sums, (kept, None if self.pace.compute is None else sums.gradients + sums.hvps)

        gaps = self.layout.cohort < self.layout.population
        sums, (_, spent) = sum_over_clients(one, members, None, chunk_of(self.layout, number), gaps)
        if self.layout.axis:
            sums = lax.psum(sums, self.layout.axis)
        return (put_back(unit_layout, gives, sums, same) if alike else sums), spent, (shapes[0], shapes[1])

    def again(self, underway: ExchangeState) -> SubmodelFed:
        given = self.layout, self.algorithm, self.data, self.pace, self.members, underway, self.draw
        return SubmodelFed(*given, self.held)

    def total_costs(self) -> RoundCosts:
        """The costs of the round, at its end, with how many clients of its cohort hold each entry of x and y."""
        return covered(self.round_costs, [self.holders(number, members) for number, members in enumerate(self.members)])

    def holders(self, number: int, members: Members) -> PyTree:
        """(x, y) filled with the number of members who hold an entry."""

        def one(member: Members, _: Any) -> tuple[Any, tuple[None, None]]:
            units = self.held.units(number, member.id, member.rank)
            return self.held.held(units, member.counts), (None, None)

        if self.held.alike:
            counts = jnp.sum(members.counts)
            counts = lax.psum(counts, self.layout.axis) if self.layout.axis else counts
            return self.held.held(self.held.units(number), counts)
        total, _ = sum_over_clients(one, members, None, 1)
        return lax.psum(total, self.layout.axis) if self.layout.axis else total


def chunk_of(layout: ProgramLayout, number: int) -> int:
    """How many clients of a class to vectorise together: no more than a cohort has of them on average."""
    assert layout.submodel_plan is not None
    average = -(-layout.cohort * layout.submodel_plan.places[number] // layout.population)
    return max(1, min(layout.chunk, average))

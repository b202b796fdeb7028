"""The exchanges of a round over Flower with clients who hold submodels: `engines.local.fed`, where clients are real."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache, partial, reduce
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.core.algorithm import parts_of
from fedbilevel.core.errors import ConfigurationError
from fedbilevel.core.fed import Reply
from fedbilevel.core.submodel import UnitLayout, Units
from fedbilevel.core.tree import PyTree
from fedbilevel.engines.costs import ExchangeCount, ExchangeKind, RoundCosts, Sums
from fedbilevel.engines.submodels import SubmodelPlan, covered, put_back
from fedbilevel.flower.contract import Contract
from fedbilevel.flower.fed import FlowerFed, Metrics
from fedbilevel.flower.gathering import Gathering, Question, Wording
from fedbilevel.flower.lanes import Arrival


class SubmodelFlowerFed(FlowerFed):
    """See `FlowerFed`. Each client is sent its part of the message; entries are averaged over those who hold them.

    The server alone knows which units these are: a client sees arrays of its own size.
    """

    def __init__(self, *given: Any) -> None:
        *given_, self.held = given
        super().__init__(*given_)
        self.first_of_class = np.unique(self.held.submodel_plan.number, return_index=True)[1]
        self.units: Callable[[int], Units] = cache(self.units_of)
        self.heard: set[int] = set()  # of the round's own cohort, who has answered

    def like(self, client: int) -> int:
        """The first client who holds the same units."""
        return int(self.first_of_class[self.held.submodel_plan.number[client]]) if self.held.alike else client

    def units_of(self, client: int) -> Units:
        submodel_plan = self.held.submodel_plan
        return self.held.units(int(submodel_plan.number[client]), client, int(submodel_plan.rank[client]))

    def wording(self, phase: str, message: PyTree) -> Callable[[int], Wording]:
        function = getattr(type(self.algorithm), phase)

        @cache
        def part(client: int) -> Wording:
            small = cut(self.held.unit_layout, function, message, self.units(client))
            return self.worded(self.run.roster.contract_of(client), phase, small)

        return lambda client: part(self.like(client))

    def total(self, phase: str, answers: list[Arrival]) -> Sums:
        """The weighted sums, put back into the whole; where all of a class hold the same, once for the class."""
        function, totals = getattr(type(self.algorithm), phase), []
        groups: dict[int, list[Arrival]] = {}
        for one in answers:
            groups.setdefault(self.like(one.client), []).append(one)
        for client, some in groups.items():
            totals.append(whole(self.held.unit_layout, function, super().total(phase, some), self.units(client)))
        return reduce(partial(jax.tree.map, np.add), totals)

    def first(self, *_: Any, **__: Any) -> PyTree:
        raise ConfigurationError("clients who hold submodels answer together: fed.first is not for them")

    def enter(self, question: Question, gathering: Gathering, sums: Sums, metrics: Metrics) -> None:
        super().enter(question, gathering, sums, metrics)
        if not question.fresh:
            self.heard |= {one.client for one in gathering.answers}

    def costs(self, question: Question, gathering: Gathering, sums: Sums) -> dict[ExchangeKind, ExchangeCount]:
        asked = Counter(question.wording(client).call.size for client in gathering.asked)
        answered = Counter(one.counted.call.size for one in gathering.answers)
        return {
            size: ExchangeCount(*np.array([number == 0, sent, answered[size]], np.int32))
            for number, (size, sent) in enumerate(asked.items())
        }

    def total_costs(self) -> RoundCosts:
        """The costs of the round, at its end, with how many of those who answered hold each entry of x and y."""
        alike = Counter(map(self.like, sorted(self.heard or self.own)))
        holders = [self.held.held(self.units(client), jnp.asarray(float(number))) for client, number in alike.items()]
        return covered(self.round_costs, holders)


def cut(unit_layout: UnitLayout, phase: Callable[..., Reply], message: PyTree, units: Units) -> PyTree:
    """A client's part of a phase's message."""
    return programs(unit_layout).cut(phase, message, units)


def whole(unit_layout: UnitLayout, phase: Callable[..., Reply], sums: Sums, units: Units) -> Sums:
    """The sums of those who hold these units, put back into the whole."""
    put: Sums = programs(unit_layout).whole(phase, sums, units)
    return put


class Programs(NamedTuple):
    """`cut` and `whole` of one unit_layout, compiled."""

    cut: Any
    whole: Any


PROGRAMS: WeakKeyDictionary[UnitLayout, Programs] = WeakKeyDictionary()


def programs(unit_layout: UnitLayout) -> Programs:
    """They go when the unit_layout does: see `site.program`."""
    known: Any = ref(unit_layout)

    def cut(phase: Callable[..., Reply], message: PyTree, units: Units) -> PyTree:
        return known().cut(parts_of(phase)[0], message, units)

    def whole(phase: Callable[..., Reply], sums: Sums, units: Units) -> Sums:
        return put_back(known(), parts_of(phase)[1], sums, units)

    if unit_layout not in PROGRAMS:
        PROGRAMS[unit_layout] = Programs(jax.jit(cut, static_argnums=0), jax.jit(whole, static_argnums=0))
    return PROGRAMS[unit_layout]


def contracts(general: Contract, submodel_plan: SubmodelPlan) -> dict[int, Contract]:
    """What is agreed with each client."""
    by_class = [general.cut(submodel_plan.unit_layout, kept) for kept in submodel_plan.kept]
    return {client: by_class[number] for client, number in enumerate(submodel_plan.number.tolist())}

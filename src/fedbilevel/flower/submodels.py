"""The exchanges of a round over Flower with clients who hold submodels: `engines.submodel_fed`, where they are real."""

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
from fedbilevel.core.submodel import Anatomy, Units
from fedbilevel.core.tree import PyTree
from fedbilevel.engines import book
from fedbilevel.engines.submodels import Cutting, covered, put_back
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
        self.first_of_class = np.unique(self.held.cutting.number, return_index=True)[1]
        self.units: Callable[[int], Units] = cache(self.units_of)
        self.heard: set[int] = set()  # of the round's own cohort, who has answered

    def like(self, client: int) -> int:
        """The first client who holds the same units."""
        return int(self.first_of_class[self.held.cutting.number[client]]) if self.held.alike else client

    def units_of(self, client: int) -> Units:
        cutting = self.held.cutting
        return self.held.units(int(cutting.number[client]), client, int(cutting.rank[client]))

    def wording(self, phase: str, message: PyTree) -> Callable[[int], Wording]:
        function = getattr(type(self.algorithm), phase)

        @cache
        def part(client: int) -> Wording:
            small = cut(self.held.anatomy, function, message, self.units(client))
            return self.worded(self.run.roster.contract_of(client), phase, small)

        return lambda client: part(self.like(client))

    def total(self, phase: str, answers: list[Arrival]) -> book.Sums:
        """The weighted sums, put back into the whole; where all of a class hold the same, once for the class."""
        function, totals = getattr(type(self.algorithm), phase), []
        groups: dict[int, list[Arrival]] = {}
        for one in answers:
            groups.setdefault(self.like(one.client), []).append(one)
        for client, some in groups.items():
            totals.append(whole(self.held.anatomy, function, super().total(phase, some), self.units(client)))
        return reduce(partial(jax.tree.map, np.add), totals)

    def first(self, *_: Any, **__: Any) -> PyTree:
        raise ConfigurationError("clients who hold submodels answer together: fed.first is not for them")

    def enter(self, question: Question, gathering: Gathering, sums: book.Sums, metrics: Metrics) -> None:
        super().enter(question, gathering, sums, metrics)
        if not question.fresh:
            self.heard |= {one.client for one in gathering.answers}

    def costs(self, question: Question, gathering: Gathering, sums: book.Sums) -> dict[book.Call, book.Count]:
        asked = Counter(question.wording(client).call.size for client in gathering.asked)
        answered = Counter(one.counted.call.size for one in gathering.answers)
        return {
            size: book.Count(*np.array([number == 0, sent, answered[size]], np.int32))
            for number, (size, sent) in enumerate(asked.items())
        }

    def told(self) -> book.Book:
        """The book at the end of the round, with how many of those who answered hold each entry of x and y."""
        alike = Counter(map(self.like, sorted(self.heard or self.own)))
        holders = [self.held.held(self.units(client), jnp.asarray(float(number))) for client, number in alike.items()]
        return covered(self.book, holders)


def cut(anatomy: Anatomy, phase: Callable[..., Reply], message: PyTree, units: Units) -> PyTree:
    """A client's part of a phase's message."""
    return programs(anatomy).cut(phase, message, units)


def whole(anatomy: Anatomy, phase: Callable[..., Reply], sums: book.Sums, units: Units) -> book.Sums:
    """The sums of those who hold these units, put back into the whole."""
    put: book.Sums = programs(anatomy).whole(phase, sums, units)
    return put


class Programs(NamedTuple):
    """`cut` and `whole` of one anatomy, compiled."""

    cut: Any
    whole: Any


PROGRAMS: WeakKeyDictionary[Anatomy, Programs] = WeakKeyDictionary()


def programs(anatomy: Anatomy) -> Programs:
    """They go when the anatomy does: see `site.program`."""
    known: Any = ref(anatomy)

    def cut(phase: Callable[..., Reply], message: PyTree, units: Units) -> PyTree:
        return known().cut(parts_of(phase)[0], message, units)

    def whole(phase: Callable[..., Reply], sums: book.Sums, units: Units) -> book.Sums:
        return put_back(known(), parts_of(phase)[1], sums, units)

    if anatomy not in PROGRAMS:
        PROGRAMS[anatomy] = Programs(jax.jit(cut, static_argnums=0), jax.jit(whole, static_argnums=0))
    return PROGRAMS[anatomy]


def contracts(general: Contract, cutting: Cutting) -> dict[int, Contract]:
    """What is agreed with each client."""
    by_class = [general.cut(cutting.anatomy, kept) for kept in cutting.kept]
    return {client: by_class[number] for client, number in enumerate(cutting.number.tolist())}

"""Messages and sums of clients that hold submodels: cut for one client, put back into the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import jax

from fedbilevel.core.algorithm import parts_of
from fedbilevel.core.fed import Reply
from fedbilevel.core.submodel import UnitLayout, Units
from fedbilevel.core.tree import PyTree
from fedbilevel.engines.costs import Sums
from fedbilevel.engines.submodels import SubmodelPlan, put_back
from fedbilevel.flower.wire.contract import Contract


def cut_message(unit_layout: UnitLayout, phase: Callable[..., Reply], message: PyTree, units: Units) -> PyTree:
    """The part of a phase's message that a client with these units is sent."""
    return programs(unit_layout).cut(phase, message, units)


def restored_sums(unit_layout: UnitLayout, phase: Callable[..., Reply], sums: Sums, units: Units) -> Sums:
    """The sums over clients that hold these units, with the shapes of the whole model."""
    restored: Sums = programs(unit_layout).restore(phase, sums, units)
    return restored


class SubmodelPrograms(NamedTuple):
    """`cut_message` and `restored_sums` for one unit layout, compiled."""

    cut: Any
    restore: Any


PROGRAMS: WeakKeyDictionary[UnitLayout, SubmodelPrograms] = WeakKeyDictionary()


def programs(unit_layout: UnitLayout) -> SubmodelPrograms:
    """The compiled programs of a unit layout, which are freed with it."""
    known: Any = ref(unit_layout)

    def cut(phase: Callable[..., Reply], message: PyTree, units: Units) -> PyTree:
        return known().cut(parts_of(phase)[0], message, units)

    def restore(phase: Callable[..., Reply], sums: Sums, units: Units) -> Sums:
        return put_back(known(), parts_of(phase)[1], sums, units)

    if unit_layout not in PROGRAMS:
        PROGRAMS[unit_layout] = SubmodelPrograms(jax.jit(cut, static_argnums=0), jax.jit(restore, static_argnums=0))
    return PROGRAMS[unit_layout]


def contracts(general: Contract, submodel_plan: SubmodelPlan) -> dict[int, Contract]:
    """Client -> the contract with it, from `general`, that of the whole model."""
    by_class = [general.cut(submodel_plan.unit_layout, kept) for kept in submodel_plan.kept]
    return {client: by_class[number] for client, number in enumerate(submodel_plan.number.tolist())}

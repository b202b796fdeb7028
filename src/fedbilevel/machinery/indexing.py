"""Which arguments of a traced function index an axis, and how long that axis is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "checkpoint")
SAME_ENTRIES = ("broadcast_in_dim", "reshape", "squeeze", "transpose", "convert_element_type")
SHIFTS = {"add": 1, "sub": -1, "lt": 0}  # how many times a whole number is added by an operation with it
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


class IndexedAxis(NamedTuple):
    """An axis that an argument indexes.

    Args:
        argument: its number.
        shift: what is added to it.
        length: how many entries the axis has.
        operation: "gather", or "one_hot".
    """

    argument: int
    shift: int
    length: int
    operation: str


class Origin(NamedTuple):
    """The argument that a value comes from: with a number added, but for shapes and types; or compared with one."""

    argument: int
    shift: int = 0
    compared: bool = False


def indexed_axes(program: ClosedJaxpr) -> set[IndexedAxis]:
    """Find the axes that arguments index.

    Indices that are computed otherwise than by adding a whole number, and loops, are not seen. Arguments that the
    function compares with anything are left out: it may mask some of their entries.
    """
    found, compared = set[IndexedAxis](), set[int]()

    def walk(program: ClosedJaxpr | Jaxpr, given: Sequence[Any]) -> list[Any]:
        jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
        known: dict[Any, Any] = dict(zip(jaxpr.invars, given, strict=True))

        def read(variables: Sequence[Any]) -> list[Any]:
            return [None if isinstance(one, Literal) else known.get(one) for one in variables]

        for step in jaxpr.eqns:
            known |= zip(step.outvars, origins(step, read(step.invars)), strict=False)
        return read(jaxpr.outvars)

    def origins(step: JaxprEqn, given: list[Any]) -> list[Any]:
        """Return the origins of an operation's results; of columns put together a list; none of what is computed."""
        name, params, of_arguments = step.primitive.name, step.params, [isinstance(one, Origin) for one in given]
        if params.get("name") == "_one_hot":
            add("one_hot", given[:1], params["jaxpr"].out_avals[0].shape[-1:])
        elif name in CALLS:
            return walk(params.get("jaxpr") or params["call_jaxpr"], given)
        elif name in SAME_ENTRIES:
            return given
        elif name == "concatenate":
            return [given]
        elif name == "gather":
            shape: Any = step.invars[0].aval
            lengths = np.subtract(shape.shape, params["slice_sizes"]) + 1
            indices = given[1] if isinstance(given[1], list) else given[1:]
            add(name, indices, lengths[list(params["dimension_numbers"].start_index_map)].tolist())
        elif name == "select_n" and all(of_arguments) and given[0] == given[1]._replace(compared=True):
            return given[1:2]  # JAX's own counting from the end: i + n in place of i where i < 0
        elif name in SHIFTS and of_arguments[0] and (number := _whole(step.invars[1])) is not None:
            return [Origin(given[0].argument, given[0].shift + SHIFTS[name] * number, compared=name == "lt")]
        else:
            read = [one for one, known in zip(given, of_arguments, strict=True) if known]
            compared.update(one.argument for one in read if one.compared or name in COMPARISONS)
        return []

    def add(operation: str, indices: Sequence[Any], lengths: Sequence[int]) -> None:
        if len(indices) == len(lengths):
            pairs = [pair for pair in zip(indices, lengths, strict=True) if isinstance(pair[0], Origin)]
            found.update(IndexedAxis(origin.argument, origin.shift, length, operation) for origin, length in pairs)

    walk(program, [Origin(number) for number in range(len(program.in_avals))])
    return {axis for axis in found if axis.argument not in compared}


def _whole(operand: Any) -> int | None:
    """Return the value of a literal that is a whole number."""
    value = np.asarray(operand.val) if isinstance(operand, Literal) else np.zeros(())
    return int(value) if value.dtype.kind in "iu" else None

"""Find the arguments of a traced function that index an axis, and the length of that axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "checkpoint")
SAME_ENTRIES = ("broadcast_in_dim", "reshape", "squeeze", "transpose", "convert_element_type")
SHIFTS = {"add": 1, "sub": -1, "lt": 0}  # operations with a whole number n: the result's shift is this factor times n
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


class IndexedAxis(NamedTuple):
    """An axis that is indexed by an argument of a function.

    Args:
        argument: the number of the argument.
        shift: the whole number that is added to the argument to get the index.
        length: the number of entries along the axis.
        operation: "gather" or "one_hot".
    """

    argument: int
    shift: int
    length: int
    operation: str


class Origin(NamedTuple):
    """The argument from which a value in a program comes.

    Args:
        argument: the number of the argument. Changes of the argument's shape or type are ignored.
        shift: the whole number that was added to the argument.
        compared: whether the value is a boolean that says if the argument is less than a number.
    """

    argument: int
    shift: int = 0
    compared: bool = False


def indexed_axes(program: ClosedJaxpr) -> set[IndexedAxis]:
    """Return the axes that are indexed by arguments of a traced function.

    An axis is found only if its index is an argument, or an argument plus a whole number, and only outside of loops. If
    the function compares an argument with other values, the axes that this argument indexes are left out, because the
    function may use the comparison to ignore some entries of the argument.
    """
    axes, compared = set[IndexedAxis](), set[int]()

    def walk(program: ClosedJaxpr | Jaxpr, inputs: Sequence[Any]) -> list[Any]:
        jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
        origin_of: dict[Any, Any] = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(variables: Sequence[Any]) -> list[Any]:
            return [None if isinstance(variable, Literal) else origin_of.get(variable) for variable in variables]

        for step in jaxpr.eqns:
            origin_of |= zip(step.outvars, origins(step, read(step.invars)), strict=False)
        return read(jaxpr.outvars)

    def origins(step: JaxprEqn, inputs: list[Any]) -> list[Any]:
        """Return the origins of an operation's results.

        For concatenated columns this is a list of origins; for unknown operations, nothing.
        """
        name, params, of_arguments = step.primitive.name, step.params, [isinstance(each, Origin) for each in inputs]
        if params.get("name") == "_one_hot":
            add("one_hot", inputs[:1], params["jaxpr"].out_avals[0].shape[-1:])
        elif name in CALLS:
            return walk(params.get("jaxpr") or params["call_jaxpr"], inputs)
        elif name in SAME_ENTRIES:
            return inputs
        elif name == "concatenate":
            return [inputs]
        elif name == "gather":
            shape: Any = step.invars[0].aval
            lengths = np.subtract(shape.shape, params["slice_sizes"]) + 1
            indices = inputs[1] if isinstance(inputs[1], list) else inputs[1:]
            add(name, indices, lengths[list(params["dimension_numbers"].start_index_map)].tolist())
        elif name == "select_n" and all(of_arguments) and inputs[0] == inputs[1]._replace(compared=True):
            return inputs[1:2]  # JAX itself replaces i by i + n if i < 0, to count from the end
        elif name in SHIFTS and of_arguments[0] and (number := _whole(step.invars[1])) is not None:
            return [Origin(inputs[0].argument, inputs[0].shift + SHIFTS[name] * number, compared=name == "lt")]
        else:
            arguments = [each for each, is_argument in zip(inputs, of_arguments, strict=True) if is_argument]
            compared.update(each.argument for each in arguments if each.compared or name in COMPARISONS)
        return []

    def add(operation: str, indices: Sequence[Any], lengths: Sequence[int]) -> None:
        if len(indices) == len(lengths):
            pairs = [pair for pair in zip(indices, lengths, strict=True) if isinstance(pair[0], Origin)]
            axes.update(IndexedAxis(origin.argument, origin.shift, length, operation) for origin, length in pairs)

    walk(program, [Origin(number) for number in range(len(program.in_avals))])
    return {axis for axis in axes if axis.argument not in compared}


def _whole(operand: Any) -> int | None:
    """Return the value of a literal that is a whole number, else None."""
    value = np.asarray(operand.val) if isinstance(operand, Literal) else np.zeros(())
    return int(value) if value.dtype.kind in "iu" else None

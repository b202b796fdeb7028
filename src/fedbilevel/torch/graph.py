"""Store and run a traced module without PyTorch: its operators in order, each with a function of JAX arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.errors import ConfigurationError
from fedbilevel.extending import errors_in
from fedbilevel.torch.operations import Rule

Parameters = dict[str, Array]
"""Arrays by their names in the module, such as "head.weight"."""


class Ref(NamedTuple):
    """Refer to the result `name` of an earlier step, in the arguments of a step."""

    name: str


class Input(NamedTuple):
    """Describe an input: its name, its shape, with None for an axis of any length, and its dtype in PyTorch."""

    name: str
    shape: tuple[int | None, ...]
    dtype: np.dtype


class Step(NamedTuple):
    """Describe the application of an operator: `name` = rule(*args, **kwargs).

    The results are cast to PyTorch's `dtypes`. `draws` says whether the rule draws random numbers.
    """

    name: str
    rule: Rule
    draws: bool
    args: Any
    kwargs: dict[str, Any]
    dtypes: Any
    where: str  # the operator and its layer, for messages


@dataclass(frozen=True)
class Graph:
    """Hold a module's operators, constants, inputs and outputs.

    `home` is the dtype of most of the module's parameters. A run computes in the dtype of the given parameters instead.
    """

    parameters: dict[str, str]  # the names in the module, by names in the graph
    constants: dict[str, np.ndarray]
    inputs: list[Input]
    steps: list[Step]
    outputs: list[Any]
    home: np.dtype

    def run(self, parameters: Mapping[str, Array], inputs: Sequence[Any], key: Array | None) -> list[Any]:
        """Return the outputs, computed in the dtype of the parameters. Each operator that draws gets its own key."""
        floats = [a.dtype for a in parameters.values() if jnp.issubdtype(a.dtype, jnp.floating)]
        working = jnp.result_type(*floats) if floats else jax.dtypes.canonicalize_dtype(self.home)
        resolve = functools.partial(_resolved, home=self.home, working=working)
        values: dict[str, Any] = {name: jnp.asarray(parameters[own]) for name, own in self.parameters.items()}
        values |= {name: jnp.asarray(a, resolve(a.dtype)) for name, a in self.constants.items()}
        values |= {a.name: _fitting(got, a, resolve(a.dtype)) for a, got in zip(self.inputs, inputs, strict=True)}

        def leaf(value: Any) -> Any:
            if isinstance(value, Ref):
                return values[value.name]
            return resolve(value) if isinstance(value, np.dtype) else value

        for number, step in enumerate(self.steps):
            first = [functools.partial(_key, key, number, step.where)] if step.draws else []
            with errors_in(step.where):
                result = step.rule(*first, *mapped(step.args, leaf), **mapped(step.kwargs, leaf))
            values[step.name] = _cast(result, step.dtypes, resolve)
        return mapped(self.outputs, leaf)

    def check(self, parameters: Mapping[str, Array]) -> None:
        """Trace the graph once, on two samples, so that rules check their arguments.

        Raises:
            ConfigurationError: a rule refuses its arguments, or an integer of a buffer has more bits than JAX supports.
        """
        for a in self.constants.values():
            if a.dtype.kind in "iu" and np.any(a.astype(jax.dtypes.canonicalize_dtype(a.dtype)) != a):
                raise ConfigurationError(
                    f"a buffer holds {np.max(np.abs(a))}, and JAX has integers of 32 bits: first call "
                    'jax.config.update("jax_enable_x64", True)'
                )
        shapes = [tuple(2 if n is None else n for n in a.shape) for a in self.inputs]
        dtypes = [jax.dtypes.canonicalize_dtype(a.dtype) for a in self.inputs]
        inputs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        jax.eval_shape(self.run, parameters, inputs, jax.eval_shape(lambda: jax.random.key(0)))


def mapped(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    """Apply `leaf` to every leaf of nested lists, tuples and dicts."""
    if isinstance(tree, list | tuple) and not isinstance(tree, Ref):
        return [mapped(a, leaf) for a in tree]
    return {name: mapped(a, leaf) for name, a in tree.items()} if isinstance(tree, dict) else leaf(tree)


def _resolved(dtype: np.dtype, home: np.dtype, working: np.dtype) -> np.dtype:
    """Return the dtype to compute in: `working` for the dtype `home`; 64 bits become 32 unless JAX has 64 enabled."""
    return working if dtype == home else jax.dtypes.canonicalize_dtype(dtype)


def _key(key: Array | None, number: int, where: str) -> Array:
    if key is None:
        raise ConfigurationError(
            "it draws random numbers: call .eval() on the module before from_torch, or call apply(…, key=key)"
        )
    return jax.random.fold_in(key, number)


def _cast(result: Any, dtypes: Any, resolve: Callable[[np.dtype], np.dtype]) -> Any:
    """Cast results to PyTorch's dtypes, since its promotion differs from JAX's, e.g. for tensors without axes."""
    if isinstance(dtypes, list):
        return [_cast(a, dtype, resolve) for a, dtype in zip(result, dtypes, strict=True)]
    if dtypes is None or result is None:  # a number, or a result that no rule uses, so that it is not computed
        return result
    return jnp.asarray(result, resolve(dtypes))


def _fitting(got: Any, expected: Input, dtype: np.dtype) -> Array:
    array = jnp.asarray(got)
    shape = expected.shape
    if array.ndim != len(shape) or any(b not in (None, a) for a, b in zip(array.shape, shape, strict=True)):
        shown = str(shape).replace("None", "any")
        raise ConfigurationError(
            f"an input has shape {array.shape}, and the example had {shown}: call from_torch with an example of that "
            "shape, and with the axis whose length may differ as batch_axis"
        )
    if jnp.issubdtype(array.dtype, jnp.floating) and not jnp.issubdtype(expected.dtype, jnp.floating):
        raise ConfigurationError(
            f"an input has dtype {array.dtype}, and the example had {expected.dtype}: convert the input"
        )
    return array.astype(dtype)

"""A traced module without PyTorch: its operators in order, each with a function of JAX arrays, and how they are run."""

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
from fedbilevel.torch.operations import Rule

Parameters = dict[str, Array]


class Ref(NamedTuple):
    """Stands in the arguments of a step for the result `name` of an earlier one."""

    name: str


class Input(NamedTuple):
    """What the caller gives: its shape, None where the length is free, and its dtype in PyTorch."""

    name: str
    shape: tuple[int | None, ...]
    dtype: np.dtype


class Step(NamedTuple):
    """One operator: `name` = rule(*args, **kwargs); its arrays get `dtypes`, those that they have in PyTorch."""

    name: str
    rule: Rule
    draws: bool
    args: Any
    kwargs: dict[str, Any]
    dtypes: Any
    where: str  # operator and layer, for messages


@dataclass(frozen=True)
class Graph:
    """A module's operators. `home` is the dtype of most of its numbers: in its place stands that of the parameters."""

    parameters: dict[str, str]  # name in the graph: name in the module
    constants: dict[str, np.ndarray]
    inputs: list[Input]
    steps: list[Step]
    outputs: list[Any]
    home: np.dtype

    def run(self, parameters: Mapping[str, Array], inputs: Sequence[Any], key: Array | None) -> list[Any]:
        """The outputs, in the dtype of the parameters. Operators draw with keys folded in by their number."""
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
            try:
                result = step.rule(*first, *mapped(step.args, leaf), **mapped(step.kwargs, leaf))
            except ConfigurationError as error:
                raise ConfigurationError(f"{step.where}: {error}") from None
            values[step.name] = _cast(result, step.dtypes, resolve)
        return mapped(self.outputs, leaf)

    def check(self, parameters: Mapping[str, Array]) -> None:
        """Raise ConfigurationError if a rule refuses its arguments: trace once, on two samples; or if an integer of a
        buffer has more bits than JAX."""
        for a in self.constants.values():
            if a.dtype.kind in "iu" and np.any(a.astype(jax.dtypes.canonicalize_dtype(a.dtype)) != a):
                text = f"a buffer holds {np.max(np.abs(a))}, and JAX has integers of 32 bits"
                raise ConfigurationError(f'{text}: jax.config.update("jax_enable_x64", True) before')
        shapes = [tuple(2 if n is None else n for n in a.shape) for a in self.inputs]
        dtypes = [jax.dtypes.canonicalize_dtype(a.dtype) for a in self.inputs]
        inputs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        jax.eval_shape(self.run, parameters, inputs, jax.eval_shape(lambda: jax.random.key(0)))


def mapped(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    """Apply `leaf` to what stands in nested lists and dicts."""
    if isinstance(tree, list | tuple) and not isinstance(tree, Ref):
        return [mapped(a, leaf) for a in tree]
    return {name: mapped(a, leaf) for name, a in tree.items()} if isinstance(tree, dict) else leaf(tree)


def _resolved(dtype: np.dtype, home: np.dtype, working: np.dtype) -> np.dtype:
    """The dtype to compute in; 64 bits are 32 unless JAX has them switched on."""
    return working if dtype == home else jax.dtypes.canonicalize_dtype(dtype)


def _key(key: Array | None, number: int, where: str) -> Array:
    if key is None:
        raise ConfigurationError(
            "it draws random numbers: call .eval() on the module before from_torch, or pass apply(…, key=key)"
        )
    return jax.random.fold_in(key, number)


def _cast(result: Any, dtypes: Any, resolve: Callable[[np.dtype], np.dtype]) -> Any:
    """In PyTorch's dtypes: its promotion is not JAX's, for example with tensors of no axes."""
    if isinstance(dtypes, list):
        return [_cast(a, dtype, resolve) for a, dtype in zip(result, dtypes, strict=True)]
    if dtypes is None or result is None:  # a number, or a result that no rule of ours computes as none uses it
        return result
    return jnp.asarray(result, resolve(dtypes))


def _fitting(got: Any, expected: Input, dtype: np.dtype) -> Array:
    array = jnp.asarray(got)
    shape = expected.shape
    if array.ndim != len(shape) or any(b not in (None, a) for a, b in zip(array.shape, shape, strict=True)):
        shown = str(shape).replace("None", "any")
        raise ConfigurationError(
            f"an input has shape {array.shape}, and the example had {shown}: give from_torch an example of that shape, "
            "and as batch_axis the axis whose length may differ"
        )
    if jnp.issubdtype(array.dtype, jnp.floating) and not jnp.issubdtype(expected.dtype, jnp.floating):
        raise ConfigurationError(f"an input has dtype {array.dtype}, and the example had {expected.dtype}: convert it")
    return array.astype(dtype)

"""Translate modules and parameters from PyTorch to JAX and back; the only file that imports PyTorch.

`torch.export` traces a module once. Its decompositions then replace every operator that has no rule in this package,
and turn changes in place into pure functions. The remaining operators become a `Graph`. Tracing would drop
`torch.no_grad` and batch statistics; modules with them are therefore refused.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from torch import nn
from torch.export import Dim, ExportedProgram, default_decompositions, export
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from fedbilevel.errors import ConfigurationError
from fedbilevel.extending import require, unknown
from fedbilevel.torch.graph import Graph, Input, Parameters, Ref, Step, mapped
from fedbilevel.torch.layers import DRAWING, RULES
from fedbilevel.torch.operations import BATCH_NORM, GROUP_NORM, REFUSED, Rule

PLACEMENT = ("device", "layout", "memory_format", "pin_memory", "requires_grad")
"""The arguments of operators that say where and how PyTorch stores a tensor; they are left out."""

WRAPPERS = {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}
"""The classes that wrap a module (the first is that of torch.compile), and the attribute in which they have it."""


def from_torch(module: nn.Module, *example: Any, batch_axis: int | None = 0) -> tuple[Callable[..., Any], Parameters]:
    """Translate a module of PyTorch into a function of its parameters for JAX.

    Args:
        module: the module, in the mode in which it should run, `train()` or `eval()`. It is not changed.
        example: an example of the arguments of its `forward`: tensors, also in tuples, lists and dicts. Only shapes and
            dtypes matter.
        batch_axis: the axis of every input whose length may differ from the example; None: no axis may.

    Returns:
        apply: `apply(parameters, *inputs, key=None)` returns the result of `module(*inputs)`, with arrays of JAX in
            place of tensors. It computes in the dtype of `parameters`. Modules that draw random numbers, such as
            dropout in training, need a `key` of `jax.random`; the same key draws the same numbers.
        parameters: the module's trainable parameters by name, as `parameters(module)` returns them. Buffers, and
            parameters whose `requires_grad` is False, are constants of `apply`.

    Raises:
        ConfigurationError: the module cannot become a function; the message says what to change.
    """
    kind = type(module).__name__
    require(isinstance(module, nn.Module), "module", kind, "a torch.nn.Module")
    require(kind not in WRAPPERS, "module", kind, f"the wrapped module, module.{WRAPPERS.get(kind)}")
    axis = batch_axis is None or (isinstance(batch_axis, int) and batch_axis >= 0)
    require(axis, "batch_axis", batch_axis, "an axis, counted from 0, or None")
    _refuse_batch_statistics(module)
    program = _traced(module, example, batch_axis)
    graph = _graph(program, module)
    expected, out = program.call_spec.in_spec, program.call_spec.out_spec
    constant = {*module.state_dict()} - {*parameters(module)}

    def apply(parameters: Mapping[str, Any], *inputs: Any, key: Any = None) -> Any:
        flat, spec = pytree.tree_flatten((inputs, {}))
        if spec != expected:
            raise ConfigurationError(
                "the inputs are nested in another way than the example: pass inputs to apply that are nested like the "
                "example of from_torch"
            )
        if missing := sorted(set(graph.parameters.values()) - set(parameters)):
            raise ConfigurationError(
                f"the parameters lack {', '.join(missing)}: give all parameters that from_torch returned"
            )
        if fixed := sorted(constant & set(parameters)):
            raise ConfigurationError(
                f"the parameters have {', '.join(fixed)}: buffers, and frozen or tied parameters, are constants of "
                "this function; give only the parameters that from_torch returned"
            )
        return pytree.tree_unflatten(graph.run(parameters, flat, key), out)

    start = parameters(module)
    graph.check(start)
    return apply, start


def parameters(module: nn.Module) -> Parameters:
    """Return copies of a module's trainable parameters as arrays of JAX, by name.

    Tied parameters are returned once, under their first name.
    """
    return {name: jnp.asarray(_numpy(p)) for name, p in module.named_parameters() if p.requires_grad}


def split(parameters: Parameters, chosen: Callable[[str], bool]) -> tuple[Parameters, Parameters]:
    """Divide parameters into two dictionaries (x, y): x has the names for which `chosen` is true, and y the others.

    `x | y` joins them again.

    Raises:
        ConfigurationError: `chosen` is true for all names or for none.
    """
    require(callable(chosen), "chosen", chosen, "a function of a name, such as lambda name: name.startswith('head.')")
    x = {name: a for name, a in parameters.items() if chosen(name)}
    names = f"{', '.join([*parameters][:8])}{', …' * (len(parameters) > 8)}"
    some = f"a function that is true for some of the names, but not for all: {names}"
    require(0 < len(x) < len(parameters), "chosen", f"true for {len(x)} of {len(parameters)} names", some)
    return x, {name: a for name, a in parameters.items() if name not in x}


def load(module: nn.Module, parameters: Mapping[str, Any]) -> nn.Module:
    """Copy parameters into a module, in its dtypes and on its devices, and return the module.

    Raises:
        ConfigurationError: the module has no parameter of a name, or one of another shape. The module is then
            unchanged.
    """
    targets = dict(module.named_parameters())
    arrays = {name: np.asarray(a) for name, a in parameters.items()}
    for name, array in arrays.items():
        if name not in targets:
            raise unknown("parameter", name, targets)
        shape = tuple(targets[name].shape)
        require(array.shape == shape, name, array.shape, f"an array of shape {shape}")
    with torch.no_grad():
        for name, array in arrays.items():
            wide = array.astype(np.float32) if array.dtype == jnp.bfloat16 else array  # NumPy has no bfloat16
            targets[name].copy_(torch.from_numpy(np.array(wide)))
    return module


def _refuse_batch_statistics(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and (part.training or part.running_mean is None):
            raise ConfigurationError(
                f"{name or 'the module'} ({type(part).__name__}) mixes the samples of a batch: {GROUP_NORM}"
            )
        if isinstance(part, nn.modules.instancenorm._InstanceNorm) and part.training and part.track_running_stats:
            raise ConfigurationError(
                f"{name or 'the module'} ({type(part).__name__}) keeps running statistics, which would not change "
                "here: make it with track_running_stats=False, or call .eval() to use its present statistics"
            )


def _traced(module: nn.Module, example: tuple[Any, ...], batch_axis: int | None) -> ExportedProgram:
    """Trace a module into functional operators of PyTorch, and decompose the operators that are not in RULES."""
    for argument in pytree.tree_leaves(example):
        allowed = "a tensor, such as torch.tensor(array, dtype=…); fix other arguments in a module around this one"
        got = type(argument).__name__ if hasattr(argument, "shape") else argument
        require(isinstance(argument, torch.Tensor), "example", got, allowed)
    free = None
    if batch_axis is not None:
        batch = Dim("batch")  # all inputs share this length; torch.export treats a length of 1 as a constant
        example = pytree.tree_map(
            lambda a: torch.cat([a, a], batch_axis) if a.shape[batch_axis:][:1] == (1,) else a, example
        )
        free = pytree.tree_map(lambda a: {batch_axis: batch} if a.ndim > batch_axis else None, example)
    table = default_decompositions()
    for operator in [operator for operator in table if str(operator) in RULES]:
        del table[operator]
    try:
        with _quietly():
            program = export(module, example, dynamic_shapes=free)
            _refuse_no_grad(program)
            program = program.run_decompositions(table)
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(_reason(error, module, batch_axis)) from error
    operators = {str(node.target) for node in program.graph.nodes}
    mixing = any(name.startswith(BATCH_NORM) for name in operators)
    for spec in program.graph_signature.output_specs:
        if spec.kind.name.endswith("MUTATION") and mixing:
            raise ConfigurationError(
                f"forward mixes the samples of a batch and changes {spec.target}, by a batch norm with training=True "
                "or by a call of .train(), which .eval() on the module does not undo: use nn.GroupNorm or "
                "nn.LayerNorm, or remove the batch norm or the call from forward"
            )
        if spec.kind.name.endswith("MUTATION"):
            raise ConfigurationError(
                f"forward changes {spec.target} in place: call .eval() on the module, or change a .clone() of it"
            )
    return program


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Silence warnings and diagnostics of tracing, and turn off the fused encoder layer, which has no rule here."""
    fused = torch.backends.mha.get_fastpath_enabled()
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.backends.mha.set_fastpath_enabled(False)
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        logging.disable(disabled)


def _refuse_no_grad(program: ExportedProgram) -> None:
    """Refuse torch.no_grad in a traced module: decomposing drops it, and derivatives would be wrong."""
    graphs = [part.graph for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    if any("set_grad_enabled" in str(node.target) for graph in graphs for node in graph.nodes):
        raise ConfigurationError("forward uses torch.no_grad() or enable_grad(): use .detach() on the result instead")


def _reason(error: Exception, module: nn.Module, batch_axis: int | None) -> str:
    message = str(error)
    if "data-dependent" in message:
        return (
            "forward has branches or shapes that depend on the data: use torch.where in place of a branch, "
            "and only shapes that do not depend on the data"
        )
    if "Constraints violated" in message:
        return (
            f"forward works only for one length of axis {batch_axis} of the inputs, but the length of batch_axis has "
            "to be free: pass the axis of the samples as batch_axis, or None if all inputs have the same shapes"
        )
    line = next((line for line in message.splitlines() if line.strip()), type(error).__name__)
    return f"torch.export cannot trace {type(module).__name__}: {line}"


def _graph(program: ExportedProgram, module: nn.Module) -> Graph:
    """Translate an exported program into a graph without PyTorch."""
    steps = [_step(node) for node in program.graph.nodes if node.op not in ("placeholder", "output")]
    first = {id(p): name for name, p in module.named_parameters() if p.requires_grad}  # the first of tied names
    trainable = {name: first[id(p)] for name, p in module.named_parameters(remove_duplicate=False) if id(p) in first}
    metas = {node.name: node.meta.get("val") for node in program.graph.nodes}
    learnt: dict[str, str] = {}
    constants, inputs = dict[str, np.ndarray](), list[Input]()
    for spec in program.graph_signature.input_specs:
        name = spec.arg.name
        if spec.kind == InputKind.USER_INPUT:
            shape = tuple(n if isinstance(n, int) else None for n in metas[name].shape)
            inputs.append(Input(name, shape, _dtype(metas[name].dtype)))
        elif spec.kind == InputKind.PARAMETER and spec.target in trainable:
            learnt[name] = trainable[spec.target]
        else:
            constants[name] = _numpy(program.state_dict.get(spec.target, program.constants.get(spec.target)))
    outputs = mapped(program.graph.output_node().args[0], _plain)
    return Graph(learnt, constants, inputs, steps, outputs, _home(module))


def _step(node: Any) -> Step:
    path, kind = (("", ""), *node.meta.get("nn_module_stack", {}).values())[-1]
    where = f"{node.target} in {path or 'forward'} ({str(kind).rpartition('.')[2]})"
    if node.op != "call_function":
        raise ConfigurationError("control flow is not supported: use torch.where", where=where)
    kwargs = {name: mapped(value, _plain) for name, value in node.kwargs.items() if name not in PLACEMENT}
    draws = str(node.target) in DRAWING
    return Step(node.name, _rule(node.target, where), draws, mapped(node.args, _plain), kwargs, _dtypes(node), where)


def _rule(target: Any, where: str) -> Rule:
    """Return the rule of an operator; an operator on sizes, which are whole numbers here, is its own rule."""
    name = str(target)
    if name in RULES:
        return RULES[name]
    if getattr(target, "__module__", "") in ("_operator", "math"):
        return target
    if target in (torch.sym_max, torch.sym_min):
        return max if target is torch.sym_max else min
    for refused, why in REFUSED.items():
        if name.startswith(refused):
            raise ConfigurationError(f"it {why}", where=where)
    raise ConfigurationError("this operator is not supported: write forward with others", where=where)


def _plain(value: Any) -> Any:
    """Return a Ref for a node, so that PyTorch's graph is not kept, and NumPy's dtype for one of PyTorch."""
    if isinstance(value, torch.fx.Node):
        return Ref(value.name)
    return _dtype(value) if isinstance(value, torch.dtype) else value


def _dtypes(node: Any) -> Any:
    """Return the dtypes of a node's arrays, and None for numbers."""
    return mapped(node.meta.get("val"), lambda a: _dtype(a.dtype) if isinstance(a, torch.Tensor) else None)


def _dtype(dtype: torch.dtype) -> np.dtype:
    return jnp.dtype(str(dtype).removeprefix("torch."))


def _home(module: nn.Module) -> np.dtype:
    """Return the dtype of most floating-point parameters of a module, counted by entries."""
    counts = Counter[torch.dtype]()
    for p in module.parameters():
        if p.dtype.is_floating_point:
            counts[p.dtype] += p.numel()
    return _dtype(counts.most_common(1)[0][0] if counts else torch.get_default_dtype())


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return a copy as a NumPy array; without a copy, JAX may share memory that PyTorch changes in place."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.float().numpy().astype(jnp.bfloat16)
    return np.array(tensor.numpy())

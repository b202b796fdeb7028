"""From PyTorch to JAX and back: `from_torch`, `parameters`, `load`. The only file that knows PyTorch.

`torch.export` traces a module once. Its own decompositions then replace every operator that has no rule here, which
also makes what happens in place a plain function; what is left becomes a `Graph`. PyTorch's `no_grad` and batch
statistics do not survive that, and are looked for before.
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
"""Arguments that say where and how PyTorch stores a tensor."""

WRAPPERS = {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}
"""Classes around a module, that of torch.compile first, and where they have it."""


def from_torch(module: nn.Module, *example: Any, batch_axis: int | None = 0) -> tuple[Callable[..., Any], Parameters]:
    """Translate a module into a function of its parameters.

    Args:
        module: in the mode, `train()` or `eval()`, in which it is to run. It stays as it is.
        example: what its `forward` takes: tensors, also in tuples, lists and dicts. Only shapes and dtypes count.
        batch_axis: the axis of every input whose length may differ from the example's; None if there is none.

    Returns:
        apply: `apply(parameters, *inputs, key=None)` returns what `module(*inputs)` does, with arrays of JAX in place
            of tensors. It computes in the dtype of `parameters`. Modules that draw random numbers, as dropout does in
            training, need a `key` of `jax.random`; the same key draws the same numbers.
        parameters: the module's trainable parameters by name, as `parameters(module)`. Buffers, and parameters whose
            `requires_grad` is False, are constants of `apply`.

    Raises:
        ConfigurationError: the module cannot become a function; the message says what to change.
    """
    kind = type(module).__name__
    require(isinstance(module, nn.Module), "module", kind, "a torch.nn.Module")
    require(kind not in WRAPPERS, "module", kind, f"the module inside that: module.{WRAPPERS.get(kind)}")
    axis = batch_axis is None or (isinstance(batch_axis, int) and batch_axis >= 0)
    require(axis, "batch_axis", batch_axis, "an axis, counted from 0, or None")
    _refuse_batch_statistics(module)
    program = _traced(module, example, batch_axis)
    graph = _graph(program, module)
    given, out = program.call_spec.in_spec, program.call_spec.out_spec
    constant = {*module.state_dict()} - {*parameters(module)}

    def apply(parameters: Mapping[str, Any], *inputs: Any, key: Any = None) -> Any:
        flat, spec = pytree.tree_flatten((inputs, {}))
        if spec != given:
            raise ConfigurationError("the inputs are nested otherwise than the example: give apply what from_torch got")
        if missing := sorted(set(graph.parameters.values()) - set(parameters)):
            raise ConfigurationError(f"the parameters lack {', '.join(missing)}: give all that from_torch returned")
        if fixed := sorted(constant & set(parameters)):
            what = "buffers, frozen or tied, and constants of this function: give no more than from_torch returned"
            raise ConfigurationError(f"the parameters have {', '.join(fixed)}, which are {what}")
        return pytree.tree_unflatten(graph.run(parameters, flat, key), out)

    start = parameters(module)
    graph.check(start)
    return apply, start


def parameters(module: nn.Module) -> Parameters:
    """Return copies of the trainable parameters, by name; tied ones once, under their first name."""
    return {name: jnp.asarray(_numpy(p)) for name, p in module.named_parameters() if p.requires_grad}


def split(parameters: Parameters, chosen: Callable[[str], bool]) -> tuple[Parameters, Parameters]:
    """Divide parameters by their names: those that are `chosen`, and the others; `x | y` puts them together again."""
    require(callable(chosen), "chosen", chosen, "a function of a name, such as lambda name: name.startswith('head.')")
    x = {name: a for name, a in parameters.items() if chosen(name)}
    names = f"{', '.join([*parameters][:8])}{', …' * (len(parameters) > 8)}"
    some = f"a function that is true of some names, and not of all: {names}"
    require(0 < len(x) < len(parameters), "chosen", f"true of {len(x)} of {len(parameters)} names", some)
    return x, {name: a for name, a in parameters.items() if name not in x}


def load(module: nn.Module, parameters: Mapping[str, Any]) -> nn.Module:
    """Copy parameters into the module, in its own dtypes and on its own devices, and return it.

    Raises:
        ConfigurationError: a name that the module does not have, or another shape; the module is unchanged then.
    """
    own = dict(module.named_parameters())
    arrays = {name: np.asarray(a) for name, a in parameters.items()}
    for name, array in arrays.items():
        if name not in own:
            raise unknown("parameter", name, own)
        require(array.shape == tuple(own[name].shape), name, array.shape, f"an array of shape {tuple(own[name].shape)}")
    with torch.no_grad():
        for name, array in arrays.items():
            wide = array.astype(np.float32) if array.dtype == jnp.bfloat16 else array  # which NumPy does not know
            own[name].copy_(torch.from_numpy(np.array(wide)))
    return module


def _refuse_batch_statistics(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and (part.training or part.running_mean is None):
            raise ConfigurationError(
                f"{name or 'the module'} ({type(part).__name__}) mixes the samples of a batch: {GROUP_NORM}"
            )
        if isinstance(part, nn.modules.instancenorm._InstanceNorm) and part.training and part.track_running_stats:
            raise ConfigurationError(
                f"{name or 'the module'} ({type(part).__name__}) keeps running statistics, which would stay as they "
                "are: make it with track_running_stats=False, or call .eval() to use those that it has"
            )


def _traced(module: nn.Module, example: tuple[Any, ...], batch_axis: int | None) -> ExportedProgram:
    """The module as PyTorch's own operators, functional, without those that other operators can replace."""
    for given in pytree.tree_leaves(example):
        allowed = "a tensor, as torch.tensor(array, dtype=…) makes: fix others in a module around this one"
        got = type(given).__name__ if hasattr(given, "shape") else given
        require(isinstance(given, torch.Tensor), "example", got, allowed)
    free = None
    if batch_axis is not None:
        batch = Dim("batch")  # one for all inputs; a length of 1 would be taken for a constant
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
                "or by .train(), which .eval() on the module does not undo: use nn.GroupNorm or nn.LayerNorm, or leave "
                "that out of forward"
            )
        if spec.kind.name.endswith("MUTATION"):
            raise ConfigurationError(
                f"forward changes {spec.target} in place: call .eval() on the module, or .clone() what is changed"
            )
    return program


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """No warnings and diagnostics of tracing; no fused encoder layer, which would be one opaque operator."""
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
    """Decomposing would drop it, and derivatives would be wrong."""
    graphs = [part.graph for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    if any("set_grad_enabled" in str(node.target) for graph in graphs for node in graph.nodes):
        raise ConfigurationError("forward uses torch.no_grad() or enable_grad(): use .detach() on the result instead")


def _reason(error: Exception, module: nn.Module, batch_axis: int | None) -> str:
    said = str(error)
    if "data-dependent" in said:
        return "forward branches on data, or makes shapes of it: use torch.where, and shapes that are known before"
    if "Constraints violated" in said:
        return f"axis {batch_axis} of the inputs may not vary: pass the axis of the samples as batch_axis, or None"
    line = next((line for line in said.splitlines() if line.strip()), type(error).__name__)
    return f"torch.export cannot trace {type(module).__name__}: {line}"


def _graph(program: ExportedProgram, module: nn.Module) -> Graph:
    """The program without PyTorch."""
    steps = [_step(node) for node in program.graph.nodes if node.op not in ("placeholder", "output")]
    first = {id(p): name for name, p in module.named_parameters() if p.requires_grad}  # of tied ones the first
    trainable = {name: first[id(p)] for name, p in module.named_parameters(remove_duplicate=False) if id(p) in first}
    metas = {node.name: node.meta.get("val") for node in program.graph.nodes}
    known: dict[str, str] = {}
    constants, inputs = dict[str, np.ndarray](), list[Input]()
    for spec in program.graph_signature.input_specs:
        name = spec.arg.name
        if spec.kind == InputKind.USER_INPUT:
            shape = tuple(n if isinstance(n, int) else None for n in metas[name].shape)
            inputs.append(Input(name, shape, _dtype(metas[name].dtype)))
        elif spec.kind == InputKind.PARAMETER and spec.target in trainable:
            known[name] = trainable[spec.target]
        else:
            constants[name] = _numpy(program.state_dict.get(spec.target, program.constants.get(spec.target)))
    outputs = mapped(program.graph.output_node().args[0], _plain)
    return Graph(known, constants, inputs, steps, outputs, _home(module))


def _step(node: Any) -> Step:
    path, kind = (("", ""), *node.meta.get("nn_module_stack", {}).values())[-1]
    where = f"{node.target} in {path or 'forward'} ({str(kind).rpartition('.')[2]})"
    if node.op != "call_function":
        raise ConfigurationError(f"{where}: control flow has no rule: use torch.where")
    kwargs = {name: mapped(value, _plain) for name, value in node.kwargs.items() if name not in PLACEMENT}
    draws = str(node.target) in DRAWING
    return Step(node.name, _rule(node.target, where), draws, mapped(node.args, _plain), kwargs, _dtypes(node), where)


def _rule(target: Any, where: str) -> Rule:
    """The rule of an operator, or that of sizes, which are whole numbers by now."""
    name = str(target)
    if name in RULES:
        return RULES[name]
    if getattr(target, "__module__", "") in ("_operator", "math"):
        return target
    if target in (torch.sym_max, torch.sym_min):
        return max if target is torch.sym_max else min
    for refused, why in REFUSED.items():
        if name.startswith(refused):
            raise ConfigurationError(f"{where}: it {why}")
    raise ConfigurationError(f"{where}: this operator has no rule: write forward with others")


def _plain(value: Any) -> Any:
    """A node as a Ref, so that the graph need not be kept, and PyTorch's dtypes as NumPy's."""
    if isinstance(value, torch.fx.Node):
        return Ref(value.name)
    return _dtype(value) if isinstance(value, torch.dtype) else value


def _dtypes(node: Any) -> Any:
    """The dtypes of a node's arrays, None for numbers."""
    return mapped(node.meta.get("val"), lambda a: _dtype(a.dtype) if isinstance(a, torch.Tensor) else None)


def _dtype(dtype: torch.dtype) -> np.dtype:
    return jnp.dtype(str(dtype).removeprefix("torch."))


def _home(module: nn.Module) -> np.dtype:
    """The dtype that most of the module's floating numbers have."""
    counts = Counter[torch.dtype]()
    for p in module.parameters():
        if p.dtype.is_floating_point:
            counts[p.dtype] += p.numel()
    return _dtype(counts.most_common(1)[0][0] if counts else torch.get_default_dtype())


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    """A copy: JAX may otherwise share PyTorch's memory, which optimizers change in place."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.float().numpy().astype(jnp.bfloat16)
    return np.array(tensor.numpy())

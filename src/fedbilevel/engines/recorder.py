"""Trace a round to find its exchanges, and count the floating-point operations of clients on the traced phases.

XLA's analysis of operations is not used: it needs a compiled program, and counts the body of a loop only once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

from fedbilevel.core.algorithm import Algorithm, takes_and_gives
from fedbilevel.core.client import Client, Clients, Samples
from fedbilevel.core.config import is_concrete
from fedbilevel.core.errors import ConfigurationError
from fedbilevel.core.fed import LoopBody, Means, Phase, Reply, Total
from fedbilevel.core.hyperparameters import at
from fedbilevel.core.local_x import server_x
from fedbilevel.core.own_y import server_y
from fedbilevel.core.problem import Problem
from fedbilevel.core.ragged import Ragged
from fedbilevel.core.submodel import UnitLayout
from fedbilevel.core.tree import PyTree, is_floating, nbytes
from fedbilevel.engines.costs import ExchangeKind, Sums, weigh
from fedbilevel.engines.fingerprint import method_key
from fedbilevel.machinery.kept import kept, of_array, shapes_of


class RecordedExchange(NamedTuple):
    """Describe one exchange of a round by shapes."""

    phase: str
    message: PyTree
    reply: Reply
    early: bool  # whether `fed.sum_first` makes the exchange
    state: PyTree  # the client's state; None in a fresh cohort
    times: float  # the most times that a round makes the exchange; infinite if the number depends on values of the run


def exchanges_of(
    algorithm: Algorithm,
    problem: Problem,
    x: PyTree,
    y: PyTree,
    examples: tuple[PyTree, PyTree],
) -> list[RecordedExchange]:
    """Find the exchanges of a round by tracing it.

    Args:
        algorithm, problem: as for `solve`.
        x, y: the variables at the start of the run; only shapes matter.
        examples: one sample of each loss, as `RemoteClients.examples` gives them.
    """

    def traced() -> list[RecordedExchange]:
        exchanges: list[RecordedExchange] = []

        def round(number: Array, x: PyTree, y: PyTree, examples: tuple[PyTree, PyTree], key: Array) -> Any:
            now, state = at(algorithm, number), algorithm.client_state(problem, x, y)
            fed = Recorder(now, problem, state, examples, exchanges)
            return now.round(fed, now.init(server_x(problem, x), server_y(problem.own, y)), key)

        jax.eval_shape(round, np.int32(0), x, y, examples, jax.random.key(0))
        return exchanges

    return list(kept(key_of_round(algorithm, problem, x, y, "exchanges"), traced))


def key_of_round(algorithm: Algorithm, problem: Problem, x: PyTree, y: PyTree, *more: Hashable) -> Hashable | None:
    """Return a key of everything on which the trace of a round depends; None if the traced functions may change.

    The key includes the method's whole numbers, since these may be lengths of loops, and the values in `more`.
    """
    method = method_key(algorithm)
    if problem.key is None or method is None:
        return None
    whole = [of_array(leaf) for leaf in jax.tree.leaves(algorithm) if not is_floating(leaf)]
    return problem.key, method, *more, *whole, shapes_of((x, y))


def _shapes(tree: PyTree) -> PyTree:
    """Replace every array or number of a tree by its shape, its dtype, and whether the dtype is weak."""

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        like = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
        return jax.ShapeDtypeStruct(like.shape, like.dtype, weak_type=like.weak_type)

    return jax.tree.map(shape, tree)


MANY = 10_000  # the number of replies that a robust rule gets while it is traced: enough for any rule


@dataclass(eq=False)
class Recorder(Means):
    """Record the exchanges of a round while it is traced: a `Fed` with a single client, whose samples are examples."""

    algorithm: Algorithm
    problem: Problem
    state: PyTree
    examples: tuple[PyTree, PyTree]
    exchanges: list[RecordedExchange]
    sampled: bool = False
    repetition: int = 0
    times: float = 1.0  # how many times the enclosing loops repeat an exchange

    def sum(self, phase: Phase, message: PyTree, key: Array, *, fresh: Any = None, each: bool = False) -> Total:
        sums = self.asked(phase, message, key, fresh, early=False)
        rows = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (MANY, *leaf.shape)), sums.row) if each else None
        return sums.total(1, rows)

    def sum_first(
        self, n: int, phase: Phase, message: PyTree, key: Array, *, max_staleness: int | None = None
    ) -> PyTree:
        return self.asked(phase, message, key, None, early=True).rounded

    def asked(self, phase: Phase, message: PyTree, key: Array, fresh: Any, early: bool) -> Sums:
        name = self.algorithm.phase_name(phase)
        message = jax.tree.map(jnp.asarray, message)
        client = self.client(None if fresh is not None else self.state)
        reply = self.algorithm.run_phase(name, client, message, key)
        check_plain(f"the update of phase {name}", reply.update)
        found = name, _shapes(message), _shapes(reply), early, _shapes(client.state), self.times
        self.exchanges.append(RecordedExchange(*found))
        return weigh(reply, client.weight, jnp.ones(()))

    def repeat(
        self, n: int | Array, body: LoopBody, carry: PyTree, key: Array, *, until: Callable[[Any], Array] | None = None
    ) -> PyTree:
        outside, self.times = self.times, self.times * (int(n) if is_concrete(n) else math.inf)
        carry = body(self, carry, key)
        self.times = outside
        return carry

    def client(self, state: PyTree) -> Client:
        outer, inner = (Samples(sample, jnp.asarray(0), jnp.asarray(1), 1, True) for sample in self.examples)
        return Client(self.problem, outer, inner, jnp.asarray(0, jnp.int32), jnp.asarray(1.0), state)


def check_plain(what: str, tree: PyTree) -> None:
    """Raise a ConfigurationError if a tree has PRNG keys, which cannot be sent or kept as bytes."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
            place = f"{what}: {jax.tree_util.keystr(path) or 'value'}"
            allowed = "an array without PRNG keys, such as jax.random.key_data of a key"
            message = f"{place} is a PRNG key; use the key that a phase gets, or send jax.random.key_data of it"
            raise ConfigurationError(path=place, got="a PRNG key", allowed=allowed, message=message)


CapacityClass = tuple[UnitLayout, Mapping[str, int]]
"""A capacity: (the layout of units, the number of units kept in each group)."""


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


CALLS = _names("checkpoint closed_call core_call custom_jvp_call custom_vjp_call jit pjit remat2 shard_map")
LOOPS_AND_BRANCHES = _names("cond scan while")
MOVES = _names(
    "broadcast_in_dim concatenate convert_element_type copy dynamic_slice dynamic_update_slice gather "
    "optimization_barrier pad pcast pvary reduce_precision reshape rev scatter slice split squeeze stop_gradient "
    "transpose"
)
REDUCTIONS = _names(
    "argmax argmin cumlogsumexp cummax cummin cumprod cumsum psum reduce_max reduce_min reduce_prod reduce_sum"
)
SCATTERS = _names("scatter-add scatter-max scatter-min scatter-mul scatter-sub")
WINDOWS = _names("reduce_window_max reduce_window_min reduce_window_sum select_and_gather_add")
EXPENSIVE = _names("cholesky fft householder_product io_callback pure_callback sort triangular_solve")
"""Primitives that cost more than one operation per entry, although operand and result may have the same shape."""


def calls_of(
    algorithm: Algorithm, problem: Problem, clients: Clients, x: PyTree, y: PyTree, cut: CapacityClass | None = None
) -> list[tuple[RecordedExchange, ExchangeKind, int | None]]:
    """List the exchanges of a round, each with its kind and with the operations that a client's reply takes.

    Operations are counted by `count`; None: their number is not known. Phases are traced and not computed. For a full
    batch, the number of samples is that of the client with the most samples, because engines pad batches to this
    length. Local steps that differ between clients are loops of unknown length.

    Args:
        algorithm, problem, clients: as for `solve`.
        x, y: the variables at the start of the run; only shapes matter.
        cut: the capacity of clients that hold submodels; None: clients hold the whole model.
    """
    same = _same(clients)
    unknown = {name: jax.ShapeDtypeStruct((), jnp.int32) for name in clients.own if name not in same}
    rows, over_batches = (clients.outer, clients.inner), problem.over_batches()
    given = np.int32(0), tuple(map(_longest, rows)), jax.random.key(0), unknown

    def phase(
        name: str, message: PyTree, state: PyTree, round: Array, values: tuple[PyTree, PyTree], key: Array, own: Any
    ) -> Reply:
        outer, inner = (_whole(each, leaves) for each, leaves in zip(rows, values, strict=True))
        client = Client(over_batches, outer, inner, jnp.asarray(0, jnp.int32), jnp.asarray(1.0), state, own | same)
        return at(algorithm, round).run_phase(name, client, message, key)

    found = []
    for exchange in exchanges_of(algorithm, problem, x, y, clients.examples()):
        name, message = exchange.phase, exchange.message
        if cut is not None:
            unit_layout, sizes = cut
            takes, _ = takes_and_gives(algorithm.phases[name])
            message = jax.eval_shape(partial(unit_layout.sent, takes), message, unit_layout.shapes_of(sizes))
        traced, reply = jax.make_jaxpr(partial(phase, name), return_shape=True)(message, exchange.state, *given)
        found.append((exchange, (name, nbytes(message), nbytes(reply.update)), count(traced.jaxpr)))
    return found


def flops_of_calls(
    algorithm: Algorithm, problem: Problem, clients: Clients, x: PyTree, y: PyTree, cut: Sequence[CapacityClass] = ()
) -> dict[ExchangeKind, int | None]:
    """Count a client's operations for each kind of exchange in a round: see `calls_of`.

    If exchanges of a phase have the same bytes but different operations, the larger number is used.

    Args:
        algorithm, problem, clients, x, y: as for `calls_of`.
        cut: all capacities of clients, if they hold submodels. An exchange then has an entry for each capacity, since
            messages to smaller clients have fewer bytes.
    """
    costs = dict[ExchangeKind, int | None]()
    for capacity in cut or (None,):
        for _, call, cost in calls_of(algorithm, problem, clients, x, y, capacity):
            before = costs.get(call, 0)
            costs[call] = None if cost is None or before is None else max(cost, before)
    return costs


def known_flops(
    algorithm: Algorithm, problem: Problem, clients: Any, x: PyTree, y: PyTree, cut: Sequence[CapacityClass] = ()
) -> dict[ExchangeKind, int] | None:
    """Call `flops_of_calls`; return None if the cost of an operation is not known, and for remote clients."""
    if not isinstance(clients, Clients):
        return None

    def counted() -> dict[ExchangeKind, int] | None:
        try:
            costs = flops_of_calls(algorithm, problem, clients, x, y, cut)
        except jax.errors.JAXTypeError:  # the round branches on values, which only an engine without compilation allows
            return None
        known = {call: cost for call, cost in costs.items() if cost is not None}
        return known if len(known) == len(costs) else None

    return kept(None if cut else _key(algorithm, problem, clients, x, y), counted)


def _key(algorithm: Algorithm, problem: Problem, clients: Clients, x: PyTree, y: PyTree) -> Hashable | None:
    """Return a cache key from everything that determines the operations of clients with whole models."""
    rows = clients.outer, clients.inner
    sizes = [(int(own.size.max()), bool(np.all(own.size == own.size[0]))) for own in rows]
    return key_of_round(algorithm, problem, x, y, "operations", *sizes, *sorted(clients.own), repr(_same(clients)))


def _same(clients: Clients) -> dict[str, Any]:
    """Return the own numbers that are the same for all clients: these may be lengths of loops."""
    ends = {name: values.ends for name, values in clients.own.items() if values.ends}
    return {name: low for name, (low, high) in ends.items() if low == high}


def _longest(rows: Ragged) -> PyTree:
    """Return the shapes of the samples of the client that has the most samples."""
    longest = int(rows.size.max())
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((longest, *leaf.shape[1:]), leaf.dtype), rows.example())


def _whole(rows: Ragged, values: PyTree) -> Samples:
    """Return all samples of the client that has the most samples, in the form that engines use."""
    longest, equal = int(rows.size.max()), bool(np.all(rows.size == rows.size[0]))
    return Samples(values, jnp.asarray(0), jnp.asarray(longest), longest, equal)


def count(jaxpr: Jaxpr) -> int | None:
    """Count the floating-point operations of a program; return None if the cost of some part is not known.

    These operations are counted:

    - A product of matrices (m, n) and (n, k): 2·m·n·k.
    - A convolution: 2 for each product of an entry and a weight, without padding.
    - An elementwise operation: 1 per entry of the result, for exp as for +.
    - A reduction: 1 per entry of the operand; over windows, 1 per entry of each window.
    - A loop: its length times its body. A branch: its most expensive alternative.

    Moving data, random bits, operations on integers, and values on which no result depends are counted as 0. The cost
    is not known for loops that end by a condition or whose length is data, for sorting floating-point numbers, for
    matrix decompositions, and for calls out of JAX. A value that is computed twice is counted twice, even if XLA
    computes it once.
    """
    return _of_program(dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0])


def _of_program(jaxpr: Jaxpr) -> int | None:
    return _sum(_of_equation(equation) for equation in jaxpr.eqns)


def _sum(costs: Iterable[int | None]) -> int | None:
    total = 0
    for cost in costs:
        if cost is None:
            return None
        total += cost
    return total


def _of_equation(equation: JaxprEqn) -> int | None:
    name = equation.primitive.name
    if name in CALLS or name in LOOPS_AND_BRANCHES:
        return _of_inner(name, equation.params)
    operands, results = equation.invars, equation.outvars
    if name in MOVES or not any(_is_inexact(v) for v in (*operands, *results)):
        return 0
    if name in REDUCTIONS:
        return sum(map(_size, operands))
    if name in SCATTERS:
        return _size(operands[2])  # the updates; the array and the indices come before them
    if name in WINDOWS:
        return math.prod(equation.params["window_dimensions"]) * _size(results[0])
    if name == "select_and_scatter_add":
        return math.prod(equation.params["window_dimensions"]) * _size(operands[0])
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        return 2 * _size(results[0]) * math.prod(_shape(operands[0])[axis] for axis in contracted)
    if name == "conv_general_dilated":
        return _of_convolution(equation)
    known = name not in EXPENSIVE and not any(jaxprs_in_params(equation.params)) and _is_by_entry(equation)
    return _size(results[0]) if known else None


def _of_inner(name: str, params: dict[str, Any]) -> int | None:
    """Count the operations of a call, a loop or a branch, from the programs among its parameters."""
    costs = [_of_program(program) for program in jaxprs_in_params(params)]
    total = _sum(costs)
    if total is None or (name == "while" and total > 0):
        return None
    if name == "cond":
        return max(cost for cost in costs if cost is not None)
    return int(params["length"]) * total if name == "scan" else total


def _of_convolution(equation: JaxprEqn) -> int:
    """Return the operations of a convolution.

    Their number is 2 × batch × output features × input features of a group × pairs. A pair is an output position and a
    weight of the kernel that reads the image there. Pairs are counted along each axis, and the counts multiplied.
    """
    params = equation.params
    numbers = params["dimension_numbers"]
    places, kernel, out = numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:]
    image, weights, result = (_shape(v) for v in (*equation.invars, equation.outvars[0]))
    pairs = 1
    for axis, stride in enumerate(params["window_strides"]):
        spread, apart = params["lhs_dilation"][axis], params["rhs_dilation"][axis]
        first = np.arange(result[out[axis]]) * stride - params["padding"][axis][0]
        place = first[:, None] + np.arange(weights[kernel[axis]]) * apart
        inside = (place >= 0) & (place <= (image[places[axis]] - 1) * spread)
        pairs *= int(np.sum(inside & (place % spread == 0)))  # a dilated image has zeros between its entries
    return 2 * result[numbers.out_spec[0]] * result[numbers.out_spec[1]] * weights[numbers.rhs_spec[1]] * pairs


def _is_by_entry(equation: JaxprEqn) -> bool:
    """Return whether an equation has one result, and all operands have its shape, up to axes of length 1."""
    shape = _shape(equation.outvars[0])

    def fits(of: tuple[int, ...]) -> bool:
        return of == () or (len(of) == len(shape) and all(n in (1, m) for n, m in zip(of, shape, strict=True)))

    return len(equation.outvars) == 1 and all(fits(_shape(v)) for v in equation.invars)


def _is_inexact(v: Any) -> bool:
    return bool(jnp.issubdtype(v.aval.dtype, jnp.inexact))


def _shape(v: Any) -> tuple[int, ...]:
    return tuple(v.aval.shape)


def _size(v: Any) -> int:
    return math.prod(_shape(v))

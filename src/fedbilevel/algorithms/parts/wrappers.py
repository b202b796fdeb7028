"""Methods that change another method. `Submodels` chooses the units that clients of small capacity hold; with
`Asynchronous` the server goes on with the first replies, and with the last replies of all others.

The method inside `Asynchronous` is written as if every exchange waited for all. Here its `fed.mean` is the mean of
everyone's last replies to that phase, as soon as some new ones are there. No table of them is needed: a client keeps
what it last replied and sends the difference; the server adds differences up. With u_i the last reply of client i and
t_i the exchange (of that phase, counted from 0) in which it was asked for it, after exchange t

    total = Σ p_i u_i        weight = Σ p_i        age = Σ p_i (t − t_i)         over those that have ever replied

so that the server knows the mean, total/weight, also before everyone has replied, and the mean delay, without any
client's own values and at the cost of a single model, however many clients there are. A reply carries two numbers more.

Rounding: a table is summed anew each time, this sum carries all roundings since the start, which grow as the square
root of their number. 18 clients of unequal weights, 20,000 exchanges of one reply each, replies of mean 0 and standard
deviation 1 that never settle: in float32 the mean was off by 1.0e-6 (root mean square) and the delay by 1.5e-5 of
itself, in float64 by 1.8e-15 and 1.3e-14. Where replies settle differences vanish, and what is added with them: with
replies that shrink by 0.001 each time the mean was off by 1.5e-7, all of it from the first 2,000 exchanges. Clients
count exchanges in integers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedbilevel.core.algorithm import Algorithm, check_algorithm, refuse_unless_allowed, takes_and_gives
from fedbilevel.core.authored import with_x
from fedbilevel.core.client import Client, Clients, RemoteClients
from fedbilevel.core.config import positive_integer, static, wrapped
from fedbilevel.core.errors import ConfigurationError, require
from fedbilevel.core.facts import Allows, Asks, Findings, No
from fedbilevel.core.fed import Fed, LastReply, LoopBody, Means, Phase, Reply, ReplyDelta, Total
from fedbilevel.core.local_x import server_x
from fedbilevel.core.problem import Problem
from fedbilevel.core.submodel import NUMBER, UnitPolicy
from fedbilevel.core.tree import PyTree

ROUNDING = 1e-5  # what sums of weights may fall short of 1 by in float32, without anyone being missing


class Wrapper(Algorithm):
    """A method that changes another method: what a subclass does not say itself is what the method inside says.

    Args:
        algorithm: the method inside.
    """

    algorithm: Algorithm = wrapped(kw_only=False)

    @property
    def label(self) -> str:
        return self.algorithm.label

    @property
    def kinds_of_problem(self) -> tuple[type[Problem], ...]:
        return self.algorithm.kinds_of_problem

    @property
    def batch_size(self) -> int | None:
        return self.algorithm.batch_size

    @property
    def phases(self) -> dict[str, Phase]:
        return self.algorithm.phases

    @property
    def asks(self) -> Asks:
        return self.algorithm.asks

    @property
    def allows(self) -> Allows:
        return self.algorithm.allows

    def check(self, problem: Problem, clients: Clients | RemoteClients, x: PyTree, y: PyTree) -> None:
        self.algorithm.check(problem, clients, x, y)

    def init(self, x: PyTree, y: PyTree) -> Any:
        return self.algorithm.init(x, y)

    def client_state(self, problem: Problem, x: PyTree, y: PyTree) -> PyTree:
        return self.algorithm.client_state(problem, x, y)

    def round(self, fed: Fed, state: Any, key: Array) -> Any:
        return self.algorithm.round(fed, state, key)

    def run_phase(self, name: str, client: Client, message: PyTree, key: Array) -> Reply:
        return self.algorithm.run_phase(name, client, message, key)

    def hypergradient_at(self, fed: Fed, x: PyTree, y: PyTree, key: Array) -> PyTree:
        return self.algorithm.hypergradient_at(fed, x, y, key)

    def finished(self, state: Any) -> Any:
        return self.algorithm.finished(state)

    def findings(self, state: Any) -> Findings:
        return self.algorithm.findings(state)

    def remarks(self, state: Any) -> tuple[str, ...]:
        return self.algorithm.remarks(getattr(state, "inside", state))


class Submodels(UnitPolicy, Wrapper):
    """A method that trains submodels, with another choice of units than its own, which is by importance.

    Of no effect where the clients have no capacities.

    Args:
        algorithm: the method, which must be able to train submodels.
    """

    def validate(self) -> None:
        check_algorithm(self.algorithm)
        refuse_unless_allowed(self.algorithm, "submodels", "cannot be given Submodels")

    @property
    def allows(self) -> Allows:
        return self.algorithm.allows._replace(submodels=self)


class OptimizedState(NamedTuple):
    """The server's state."""

    inside: Any  # the state of the method inside
    optimizer: optax.OptState

    @property
    def x(self) -> PyTree:
        return self.inside.x

    @property
    def y(self) -> PyTree:
        return self.inside.y


class OuterOptimizer(Wrapper):
    """A method whose steps on x are an optimizer's: it is fed with what a round takes from x, in place of a gradient.

    S. Reddi and others, "Adaptive Federated Optimization", ICLR 2021. The method's own step on x scales what it is fed;
    Adam, AdaGrad, and `dog` and `prodigy` of `optax.contrib`, which find their step, take the direction alone.

    Args:
        algorithm: the method.
        optimizer: an optax optimizer; its learning rate is the step on x.
    """

    optimizer: optax.GradientTransformation = static()

    def validate(self) -> None:
        check_algorithm(self.algorithm)
        known = isinstance(self.optimizer, optax.GradientTransformation)
        require(known, "OuterOptimizer.optimizer", self.optimizer, "an optax optimizer, such as optax.adam(0.05)")

    @property
    def allows(self) -> Allows:
        return self.algorithm.allows._replace(local_x=No("the optimizer of x is the server's"))

    def init(self, x: PyTree, y: PyTree) -> OptimizedState:
        return OptimizedState(self.algorithm.init(x, y), self.optimizer.init(x))

    def round(self, fed: Fed, state: OptimizedState, key: Array) -> OptimizedState:
        inside = self.algorithm.round(fed, state.inside, key)
        taken = optax.tree.sub(state.x, inside.x)
        updates, optimizer = self.optimizer.update(taken, state.optimizer, state.x)
        after = optax.apply_updates(state.x, updates), optimizer
        some = optax.tree.norm(taken) != 0  # else x and optimizer stay: of a first 0 `prodigy` makes NaN
        x, optimizer = jax.tree.map(partial(jnp.where, some), after, (state.x, state.optimizer))
        return OptimizedState(with_x(self, inside, x, "in an OuterOptimizer"), optimizer)

    def finished(self, state: OptimizedState) -> Any:
        return self.algorithm.finished(state.inside)

    def findings(self, state: OptimizedState) -> Findings:
        return self.algorithm.findings(state.inside)


class LastReplies(NamedTuple):
    """What the server keeps of everyone's last replies to a phase."""

    total: PyTree
    weight: Array
    age: Array
    exchanges: Array  # made so far

    @classmethod
    def none(cls, like: PyTree) -> LastReplies:
        """Begin before the first exchange, for updates with the shapes of `like`."""
        total = jax.tree.map(jnp.zeros_like, like)
        return cls(total, jnp.zeros(()), jnp.zeros(()), jnp.zeros((), jnp.int32))

    def after(self, delta: ReplyDelta) -> LastReplies:
        """Go on by an exchange, whose replies are summed, Σ p_i, in `delta`.

        All earlier replies become one exchange older, those replaced by t_i − (their last t_i) younger; a first
        reply brings t − t_i = (t + 1) − (t_i − (−1)).
        """
        joins, exchanges = delta.joins.public, delta.exchanges.public
        age = self.age + self.weight + (self.exchanges + 1) * joins - exchanges
        total = optax.tree.add(self.total, delta.update)
        return LastReplies(total, self.weight + joins, age, self.exchanges + 1)

    @property
    def mean(self) -> PyTree:
        """Σ p_i u_i / Σ p_i over the clients that have ever replied; 0 where nobody has."""
        weight = jnp.where(self.weight > 0, self.weight, 1)
        return jax.tree.map(lambda leaf: leaf / weight.astype(leaf.dtype), self.total)

    @property
    def delay(self) -> Array:
        """Σ p_i (t − t_i) over all clients, in exchanges of this phase; t_i = −1 for those that have never replied."""
        missing = jnp.where(self.weight > 1 - ROUNDING, 0, 1 - self.weight)
        return self.age + missing * self.exchanges


class State(NamedTuple):
    """The server's state."""

    inside: Any  # the state of the method inside
    replies: dict[str, LastReplies]  # by phase

    @property
    def x(self) -> PyTree:
        return self.inside.x

    @property
    def y(self) -> PyTree:
        return self.inside.y


class ClientState(NamedTuple):
    """A client's state, kept between rounds."""

    inside: PyTree  # what the method inside has it keep
    replies: dict[str, LastReply]  # by phase


class Asynchronous(Wrapper):
    """A method that goes on as soon as some clients have replied, with the last replies of all others.

    Args:
        algorithm: the method, whose exchanges must be able to do with replies to earlier messages.
        wait_for: how many replies an exchange waits for.
        max_staleness: also wait for every client that was asked so many exchanges (of the same phase) ago, or more, and
            for every client that has been unavailable, or busy with another phase, for longer; None: no bound.
        delay_penalty: c; means are divided by 1 + c·(mean delay of the replies in them, in exchanges of that phase),
            and so are the server's steps along them.
    """

    wait_for: int = positive_integer()
    max_staleness: int | None = positive_integer(default=None, optional=True)
    delay_penalty: float = static(default=0.0)

    def validate(self) -> None:
        check_algorithm(self.algorithm)
        c = self.delay_penalty
        number = isinstance(c, int | float) and not isinstance(c, bool) and isfinite(c) and c >= 0
        require(number, "Asynchronous.delay_penalty", c, "a number, at least 0")
        refuse_unless_allowed(self.algorithm, "late", "cannot be Asynchronous")

    @property
    def asks(self) -> Asks:
        return self.algorithm.asks._replace(first=self.wait_for)

    @property
    def allows(self) -> Allows:
        return self.algorithm.allows._replace(late=No("it is inside Asynchronous already"))

    def check(self, problem: Problem, clients: Clients | RemoteClients, x: PyTree, y: PyTree) -> None:
        alone = self.delay_penalty == 0 or problem.local is None
        own = "0 where clients keep x: they make the steps on it, and do not know the mean delay"
        require(alone, "Asynchronous.delay_penalty", self.delay_penalty, own)
        few = f"at most {len(clients)}, the number of clients"
        require(self.wait_for <= len(clients), "Asynchronous.wait_for", self.wait_for, few)
        self.algorithm.check(problem, clients, x, y)

    def init(self, x: PyTree, y: PyTree) -> State:
        return State(self.algorithm.init(x, y), self.of_phases(LastReplies.none, x, y))

    def client_state(self, problem: Problem, x: PyTree, y: PyTree) -> ClientState:
        last = self.of_phases(LastReply.none, server_x(problem, x), y)
        return ClientState(self.algorithm.client_state(problem, x, y), last)

    def of_phases(self, none: Callable[[PyTree], Any], x: PyTree, y: PyTree) -> dict[str, Any]:
        """Apply `none` to zeros in the shape of each asynchronous phase's update."""
        return {name: none(template(self.gives(name), x, y)) for name in self.algorithm.allows.late or ()}

    def gives(self, name: str) -> PyTree:
        """Return the declared shape of a phase's update."""
        return takes_and_gives(self.algorithm.phases[name])[1]

    def run_phase(self, name: str, client: Client, message: PyTree, key: Array) -> Reply:
        content, exchange = message
        kept: ClientState = client.state
        reply = self.algorithm.run_phase(name, replace(client, state=kept.inside), content, key)
        delta, last = ReplyDelta.since(kept.replies[name], reply.update, exchange)
        inside = kept.inside if reply.state is None else reply.state
        return reply._replace(update=delta, state=ClientState(inside, {**kept.replies, name: last}))

    def round(self, fed: Fed, state: State, key: Array) -> State:
        last = LastRepliesFed(fed, self, state.replies)
        inside = self.algorithm.round(last, state.inside, key)
        return State(inside, last.kept)

    def finished(self, state: State) -> Any:
        return self.algorithm.finished(state.inside)

    def findings(self, state: State) -> Findings:
        """Add the mean delay of replies to those of the method inside: `delay`, or `delay.PHASE` for each phase."""
        found, single = self.algorithm.findings(state.inside), len(state.replies) == 1
        delays = {"delay" if single else f"delay.{name}": kept.delay for name, kept in state.replies.items()}
        return found._replace(columns=found.columns | delays)


class KeepingFed(Means):
    """A `Fed` that a wrapper gives the method inside; its loops carry what it keeps from exchange to exchange."""

    def __init__(self, fed: Fed, kept: Any, sampled: bool) -> None:
        self.fed, self.kept, self.sampled = fed, kept, sampled
        self.problem, self.repetition = fed.problem, fed.repetition

    def repeat(
        self, n: int | Array, body: LoopBody, carry: PyTree, key: Array, *, until: Callable[[Any], Array] | None = None
    ) -> PyTree:
        """Repeat exchanges in a loop that carries what is kept with it."""

        def threaded(fed: Fed, both: tuple[Any, Any], key: Array) -> tuple[Any, Any]:
            inside: Any = copy.copy(self)
            inside.fed, inside.kept, inside.problem, inside.repetition = fed, both[1], fed.problem, fed.repetition
            return body(inside, both[0], key), inside.kept

        done = None if until is None else (lambda both: until(both[0]))
        carry, self.kept = self.fed.repeat(n, threaded, (carry, self.kept), key, until=done)
        return carry


class LastRepliesFed(KeepingFed):
    """A `Fed` whose mean is that of everyone's last replies, some of which are new; it keeps these by phase."""

    def __init__(self, fed: Fed, wrapper: Asynchronous, replies: dict[str, LastReplies]) -> None:
        super().__init__(fed, replies, sampled=False)
        self.wrapper = wrapper

    def sum(self, phase: Phase, message: PyTree, key: Array, *, fresh: Any = None, each: bool = False) -> Total:
        return Total.of_mean(self.mean(phase, message, key))

    def mean(
        self, phase: Phase, message: PyTree, key: Array, *, unbiased: bool = False, fresh: int | Array | None = None
    ) -> PyTree:
        name = self.wrapper.phase_name(phase)
        last, wait_for, max_staleness = self.kept[name], self.wrapper.wait_for, self.wrapper.max_staleness
        delta = self.fed.sum_first(wait_for, phase, (message, last.exchanges), key, max_staleness=max_staleness)
        last = last.after(delta)
        self.kept = {**self.kept, name: last}
        if self.wrapper.delay_penalty == 0:
            return last.mean
        slower = 1 + self.wrapper.delay_penalty * last.delay

        def shortened(kind: str, part: PyTree) -> PyTree:
            return part if kind == NUMBER else jax.tree.map(lambda leaf: (leaf / slower).astype(leaf.dtype), part)

        return jax.tree.map(shortened, self.wrapper.gives(name), last.mean)

    def sum_first(self, n: int, phase: Phase, *message: Any, **options: Any) -> PyTree:
        raise ConfigurationError(f"{self.wrapper.label} asks fed.sum_first itself, and cannot be Asynchronous")


def template(gives: PyTree, x: PyTree, y: PyTree) -> PyTree:
    """Make zeros in the shape of an update, from what its phase declares to give."""
    shapes = {"x": x, "y": y, NUMBER: jnp.zeros(())}
    return jax.tree.map(lambda kind: shapes[kind], gives)

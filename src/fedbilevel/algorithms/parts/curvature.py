"""Steps of y and v that follow the curvature: as x moves, so does the inner Hessian, and with it the steps it allows.

A client keeps a unit vector u_i. When a phase that `measures` asks it, it makes a product with its own Hessian at the x
and y of the message: a step of the power method, which goes on from the round before,

    u ← ∇²yy g_i(x, y) u,   L_i = ‖u‖,   u ← u/‖u‖                               FIRST times when it has made none

L_i comes to the largest eigenvalue, from below, and L = Σ p_i L_i to a bound of that of ∇²yy G, from above. Both follow
a rise at once, and a fall by the factor FALL in a round. In the next round c/L, c the `fraction`, is

    a step on y or v that is the same for all, or the total of a client's τ_i local steps
    with L Σ p_i a_i for L where the server moves along sums of a_i local directions: SimFBO, ShroFBO, FedBiO
    with L_i for L where each client solves a system of its own: `LocalImplicit`, `Coordinates`

and no local step of several is above 1/L_i. In round 0 L is not known, and these steps are 0. Where local steps are at
most 1/L_i, (I − sH_i)^τ is a contraction, and so is the mean of these.

A message carries one number more, and a reply to a phase that measures two. Steps on x stay the method's own: where
these overshoot, no step on y and v helps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedbilevel.algorithms.parts.local_steps import LocalDirections, Plain
from fedbilevel.algorithms.parts.wrappers import Wrapper
from fedbilevel.core.algorithm import check_algorithm, takes_and_gives
from fedbilevel.core.client import Client, Clients, RemoteClients
from fedbilevel.core.config import positive
from fedbilevel.core.errors import ConfigurationError, require
from fedbilevel.core.facts import Allows, Findings, No
from fedbilevel.core.fed import Fed, LoopBody, Phase, Reply
from fedbilevel.core.own import as_client
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import XYV, PyTree, scaled
from fedbilevel.oracles.products import hess_v

FIRST = 10  # products of a client that has made none
FALL = 0.95  # what is left of a curvature, at least, from one measure to the next
PRODUCTS = 0x4C  # of a phase's key, the stream of the products


class Stiffness(NamedTuple):
    """What the server knows of all clients."""

    largest: Array  # Σ p_i L_i; 0 before anyone has measured
    work: Array  # Σ p_i a_i, directions in a sum that the server moves along

    @classmethod
    def unknown(cls) -> Stiffness:
        return cls(jnp.zeros(()), jnp.zeros(()))

    def after(self, measured: Stiffness) -> Stiffness:
        """Follow what was measured: a rise at once, a fall by FALL at most."""
        return jax.tree.map(lambda old, new: jnp.maximum(FALL * old, new), self, measured)

    def step(self, fraction: Any) -> Array:
        """Return c/(L Σ p_i a_i); 0 where that is not known."""
        total = self.largest * self.work
        return jnp.where(total > 0, fraction / jnp.where(total > 0, total, 1), 0)


class Vector(NamedTuple):
    """What a client keeps of the power method."""

    unit: PyTree
    largest: Array  # L_i; 0 before its first product


class ClientState(NamedTuple):
    """A client's state, kept between rounds."""

    inside: PyTree  # what the method inside has it keep
    vector: Vector


class State(NamedTuple):
    """The server's state."""

    inside: Any  # the state of the method inside
    curvature: Stiffness

    @property
    def x(self) -> PyTree:
        return self.inside.x

    @property
    def y(self) -> PyTree:
        return self.inside.y


class CurvatureSteps(Wrapper):
    """A method whose steps on y and v are c/L, L the largest curvature of the inner loss where x now is.

    Its own fields for these steps have no effect. The history has L as `curvature`.

    Args:
        algorithm: the method.
        fraction: c, below 2: from one round to the next L may grow by 2/c before a step is too long for it.
    """

    fraction: float = positive(default=0.5)

    def validate(self) -> None:
        check_algorithm(self.algorithm)
        name, c = self.algorithm.label, self.fraction
        require(not isinstance(c, int | float) or c < 2, "CurvatureSteps.fraction", c, "below 2")
        allowed = "a method whose phases say where they measure curvature, such as SimFBO, FedNest or AFBO"
        require(any(map(measures, self.algorithm.phases.values())), "CurvatureSteps.algorithm", name, allowed)
        at_once = "a method that waits for everyone: late replies are made of steps of other rounds"
        require(not self.algorithm.asks.asynchronous, "CurvatureSteps.algorithm", f"{name} in Asynchronous", at_once)

    @property
    def allows(self) -> Allows:
        return Allows(
            late=No("its steps are those of this round's curvature, and late replies are made of other ones"),
            submodels=No("curvature is that of the whole y, and a client that holds a part has another one"),
            noise=No("a client's curvature tells of its data, and steps by a noised one may be of any size"),
            local_x=No("its steps on y are measured at the x that the server sends"),
            project_x=self.algorithm.allows.project_x,
        )

    def check(self, problem: Problem, clients: Clients | RemoteClients, x: PyTree, y: PyTree) -> None:
        kind = type(problem).__name__
        require(problem.implicit_term != "identity", "problem", kind, "one whose inner Hessian is not the identity")
        with_steps(self.algorithm, lambda part, kind: 0.0).check(problem, clients, x, y)

    def init(self, x: PyTree, y: PyTree) -> State:
        return State(self.algorithm.init(x, y), Stiffness.unknown())

    def client_state(self, problem: Problem, x: PyTree, y: PyTree) -> ClientState:
        vector = Vector(unit(optax.tree.random_like(jax.random.key(PRODUCTS), y)), jnp.zeros(()))
        return ClientState(self.algorithm.client_state(problem, x, y), vector)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        step = state.curvature.step(self.fraction)
        method = with_steps(self.algorithm, lambda part, kind: step)
        measured = MeasuringFed(fed, self, method, step, state.curvature)
        inside = method.round(measured, state.inside, key)
        return State(inside, measured.known)

    def hypergradient_at(self, fed: Fed, x: PyTree, y: PyTree, key: Array) -> PyTree:
        """Estimate it as the method inside does, with its own fields: there is no round before, to measure in."""
        alone = MeasuringFed(fed, self, self.algorithm, None, Stiffness.unknown())
        return self.algorithm.hypergradient_at(alone, x, y, key)

    def finished(self, state: State) -> Any:
        return self.algorithm.finished(state.inside)

    def findings(self, state: State) -> Findings:
        found = self.algorithm.findings(state.inside)
        return found._replace(columns=found.columns | {"curvature": state.curvature.largest})

    def run_phase(self, name: str, client: Client, message: PyTree, key: Array) -> Reply:
        content, step = message
        # what a client of a fresh cohort keeps is out of reach
        own = client.state or ClientState(None, Vector(None, jnp.zeros(())))
        vector, inside = own.vector, replace(client, state=own.inside)
        if step is None:
            return self.kept(self.algorithm.run_phase(name, inside, content, key), client)
        phase, measured = self.algorithm.phases[name], None
        if measures(phase):
            vector, products = self.measure(takes_and_gives(phase)[0], client, content, key)
            measured = Stiffness(vector.largest, self.directions_of(client))
        method = with_steps(self.algorithm, lambda part, kind: self.size(part, kind, client, step, vector.largest))
        reply = method.run_phase(name, inside, content, key)
        if measured is None:
            return self.kept(reply, client)
        state = ClientState(inside.state if reply.state is None else reply.state, vector)
        return reply._replace(update=(reply.update, measured), state=state, hvps=reply.hvps + products)

    def kept(self, reply: Reply, client: Client) -> Reply:
        """Put what the method inside has the client keep beside the vector, which stays."""
        return reply if reply.state is None else reply._replace(state=client.state._replace(inside=reply.state))

    def measure(self, takes: PyTree, client: Client, content: PyTree, key: Array) -> tuple[Vector, Array]:
        """Go on with the power method on a batch of its own; return what to keep, and how many products it took."""
        at: dict[str, PyTree] = {}
        jax.tree.map(lambda kind, part: at.setdefault(kind, part), takes, content)
        kept: Vector = client.state.vector
        products = jnp.where(kept.largest > 0, 1, FIRST)
        stream = jax.random.fold_in(key, PRODUCTS)

        def once(n: Array, found: Vector) -> Vector:
            batch = client.inner_batch(jax.random.fold_in(stream, n), self.batch_size)
            product = hess_v(client.problem, at["x"], at["y"], found.unit, batch)
            return Vector(unit(product), optax.tree.norm(product).astype(found.largest.dtype))

        found = jax.lax.fori_loop(0, products, once, kept)
        return found._replace(largest=jnp.maximum(found.largest, FALL * kept.largest)), products

    def directions_of(self, client: Client) -> Array:
        """Return a_i: how many directions a sum has that the server moves along; 1 where it is a mean."""
        method = as_client(self.algorithm, client.own)
        if not isinstance(method, LocalDirections):
            return jnp.ones(())
        return jnp.asarray(getattr(method, "local_optimizer", Plain()).total(client.local_steps(method.local_steps)))

    def size(self, part: Any, kind: str, client: Client, step: Array, own: Array) -> Array:
        """Return a client's step: that of all clients, or what its own curvature `own` bears, where that is known."""
        bears = jnp.where(own > 0, 1 / jnp.where(own > 0, own, 1), jnp.inf)
        if kind == "alone":
            return jnp.where(own > 0, self.fraction * bears, step)
        if kind == "shared":
            return step
        tau = client.local_steps(part.local_steps)
        if kind == "drift":
            return jnp.minimum(step, self.fraction * bears) / tau
        several = bears * (tau if kind == "total" else 1)
        return jnp.where(tau > 1, jnp.minimum(step, several), step)


def measures(phase: Phase) -> bool:
    """Say whether curvature is measured with a phase."""
    return bool(getattr(phase, "__measures__", False))


def unit(vector: PyTree) -> PyTree:
    """Return the vector at length 1, or as it is where it is 0."""
    norm = optax.tree.norm(vector)
    return scaled(1 / jnp.where(norm > 0, norm, 1), vector)


def with_steps(method: Any, size: Callable[[Any, str], Any], alone: bool = False) -> Any:
    """Return a method, or a part, whose steps on y and v are size(part, their kind), "alone" where systems are own."""
    changed = copy.copy(method)
    alone = alone or getattr(method, "alone", False)
    for field in fields(method):
        value, kind = getattr(method, field.name), field.metadata.get("curvature")
        if kind:
            one = size(method, "alone" if alone else kind)
            value = value._replace(y=one, v=one) if isinstance(value, XYV) else one
        elif is_dataclass(value) and not isinstance(value, type):
            value = with_steps(value, size, alone)
        object.__setattr__(changed, field.name, value)  # nothing is checked again: numbers are of a traced round
    return changed


class MeasuringFed:
    """A `Fed` whose messages carry the step, and whose replies what clients measure."""

    def __init__(self, fed: Fed, wrapper: CurvatureSteps, method: Any, step: Array | None, known: Stiffness):
        self.fed, self.wrapper, self.method, self.step, self.known = fed, wrapper, method, step, known
        self.problem, self.sampled, self.repetition = fed.problem, fed.sampled, fed.repetition

    def mean(
        self, phase: Phase, message: PyTree, key: Array, *, unbiased: bool = False, fresh: int | Array | None = None
    ) -> PyTree:
        asked = self.wrapper.phases[self.method.phase_name(phase)]
        update = self.fed.mean(asked, (message, self.step), key, unbiased=unbiased, fresh=fresh)
        if self.step is None or not measures(phase):
            return update
        update, measured = update
        self.known = self.known.after(measured)
        return update

    def sum_first(self, n: int, phase: Phase, *message: Any, **options: Any) -> PyTree:
        raise ConfigurationError(f"{self.wrapper.label} asks fed.sum_first, and cannot have CurvatureSteps")

    def repeat(
        self, n: int | Array, body: LoopBody, carry: PyTree, key: Array, *, until: Callable[[Any], Array] | None = None
    ) -> PyTree:
        """Repeat exchanges in a loop that carries what is measured with it."""

        def threaded(fed: Fed, both: tuple[Any, Stiffness], key: Array) -> tuple[Any, Stiffness]:
            inside = MeasuringFed(fed, self.wrapper, self.method, self.step, both[1])
            return body(inside, both[0], key), inside.known

        done = None if until is None else (lambda both: until(both[0]))
        carry, self.known = self.fed.repeat(n, threaded, (carry, self.known), key, until=done)
        return carry

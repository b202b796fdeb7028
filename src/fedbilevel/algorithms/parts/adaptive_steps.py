"""Steps that nobody chooses: those of y and v follow the inner curvature, those of x the hypergradients so far.

They are for the fields of a method that are None, each by itself.

y and v. As x moves, so does the inner Hessian, and with it the steps it allows. A client keeps a unit vector u_i. When
a phase that `measures` asks it, it makes a product with its own Hessian at the x and y of the message: a step of the
power method, which goes on from the round before,

    u ← ∇²yy g_i(x, y) u,   L_i = ‖u‖,   u ← u/‖u‖                               FIRST times when it has made none

L_i comes to the largest eigenvalue, from below, and L = Σ p_i L_i to a bound of that of ∇²yy G, from above. Both follow
a rise at once, and a fall by the factor FALL in a round. In the next round c/L, c = `y_lr`, is

    a step on y or v that is the same for all, or the total of a client's τ_i local steps
    with L Σ p_i a_i, or Σ p_i a_i L_i if that is more, for L where the server moves along sums of a_i local directions:
        SimFBO, ShroFBO, FedBiO
    with L_i for L where each client solves a system of its own: `LocalImplicit`, `Coordinates`

and no local step of several is above 1/L_i. In round 0 L is not known, and these steps are 0. Where local steps are at
most 1/L_i, (I − sH_i)^τ is a contraction, and so is the mean of these.

x. What a round takes from x is its step times a direction h_t, an estimate of the hypergradient, of d entries. With
η = `x_lr`, AdaGrad-norm in root mean squares moves the entries of x in their first step by η, whatever the scale of h:

    α_t = η √d / √(Σ_{s≤t} ‖h_s‖²),   x ← x − α_t h_t

R. Ward, X. Wu and L. Bottou, "AdaGrad stepsizes: sharp convergence over nonconvex landscapes", JMLR 2020; in bilevel
optimization AdaSDBO (NeurIPS 2025) has it without clients. Their numerators are to be chosen; √d is because the entries
of x, not its norm, have a known order where they are logarithms, logits or weights. In round t clients step by α_{t−1},
in round 0 by PROBE, and the server makes α_t of it.

A message carries two numbers more, and a reply to a phase that measures three.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedbilevel.algorithms.parts.local_steps import LocalDirections, Plain
from fedbilevel.algorithms.parts.wrappers import KeepingFed, OuterOptimizer, Submodels, Wrapper
from fedbilevel.core.algorithm import Algorithm, check_algorithm, refuse_unless_allowed, takes_and_gives
from fedbilevel.core.authored import with_x
from fedbilevel.core.client import Client, Clients, RemoteClients
from fedbilevel.core.config import OpenStep, open_steps, positive
from fedbilevel.core.errors import ConfigurationError, require
from fedbilevel.core.facts import Allows, Findings, No
from fedbilevel.core.fed import Fed, Phase, Reply
from fedbilevel.core.own import as_client, replaced
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree, move, scaled
from fedbilevel.oracles.products import hess_v

FIRST = 10  # products of a client that has made none
FALL = 0.95  # what is left of a curvature, at least, from one measure to the next
PRODUCTS = 0x4C  # of a phase's key, the stream of the products
PROBE = 1e-3  # clients' step on x before any h is known


class Stiffness(NamedTuple):
    """What the server knows of all clients."""

    largest: Array  # Σ p_i L_i; 0 before anyone has measured
    work: Array  # Σ p_i a_i, directions in a sum that the server moves along
    summed: Array  # Σ p_i a_i L_i

    @classmethod
    def unknown(cls) -> Stiffness:
        return cls(jnp.zeros(()), jnp.zeros(()), jnp.zeros(()))

    def after(self, measured: Stiffness) -> Stiffness:
        """Follow what was measured: a rise at once, a fall by FALL at most."""
        return jax.tree.map(lambda old, new: jnp.maximum(FALL * old, new), self, measured)

    def step(self, fraction: Any) -> Array:
        """Return c over the larger of L Σ p_i a_i and Σ p_i a_i L_i; 0 where they are not known."""
        total = jnp.maximum(self.largest * self.work, self.summed)
        return jnp.where(total == 0, 0, fraction / jnp.where(total == 0, 1, total))  # NaN goes on, to be found in y


class Squares(NamedTuple):
    """What the server keeps of the hypergradients so far."""

    total: Array  # Σ ‖h_s‖²/d
    step: Array  # α of the last round, PROBE before

    @classmethod
    def none(cls) -> Squares:
        return cls(jnp.zeros(()), jnp.asarray(PROBE))

    def after(self, h: PyTree, lr: Any) -> tuple[Squares, Array]:
        """Add h; return what to keep, and α_t, which is 0 as long as every h was 0."""
        size = sum(leaf.size for leaf in jax.tree.leaves(h))
        total = self.total + (optax.tree.norm(h, squared=True) / size).astype(self.total.dtype)
        step = jnp.where(total > 0, lr / jnp.sqrt(jnp.where(total > 0, total, 1)), 0)
        return Squares(total, jnp.where(total > 0, step, PROBE)), step


class Steps(NamedTuple):
    """The server's steps of a round, which messages carry."""

    outer: Array
    inner: Array


class Vector(NamedTuple):
    """What a client keeps of the power method."""

    unit: PyTree
    largest: Array  # L_i; 0 before its first product

    @classmethod
    def first(cls, y: PyTree) -> Vector:
        return cls(unit(optax.tree.random_like(jax.random.key(PRODUCTS), y)), jnp.zeros(()))


class ClientState(NamedTuple):
    """A client's state, kept between rounds."""

    inside: PyTree  # what the method inside has it keep
    vector: Vector


class State(NamedTuple):
    """The server's state."""

    inside: Any  # the state of the method inside
    curvature: Stiffness
    squares: Squares

    @property
    def x(self) -> PyTree:
        return self.inside.x

    @property
    def y(self) -> PyTree:
        return self.inside.y


class AdaptiveSteps(Wrapper):
    """A method whose steps that are None adapt: on y and v to the inner curvature, on x to the hypergradients so far.

    `solve` puts it around each method that has such steps. The history has L as `curvature`, and the step on x as
    `x_step`, where these are adapted.

    Args:
        algorithm: the method.
        y_lr: c, the steps on y and v in units of 1/L, below 2: from one round to the next L may grow by 2/c before a
            step is too long for it.
        x_lr: η, by how much the first step changes the entries of x, in root mean square.
    """

    y_lr: float = positive(default=1.0)
    x_lr: float = positive(default=0.2)

    def validate(self) -> None:
        check_algorithm(self.algorithm)
        c, name = self.y_lr, "AdaptiveSteps.algorithm"
        require(not isinstance(c, int | float) or c < 2, "AdaptiveSteps.y_lr", c, "below 2")
        allowed = "a method with steps that are None, such as SimFBO(), FedNest() or AFBO()"
        twice = isinstance(self.algorithm, AdaptiveSteps)
        require(bool(self.adapted) and not twice, name, self.algorithm.label + " in AdaptiveSteps" * twice, allowed)
        measuring = self.adapted == {"x"} or any(map(self.measures, self.algorithm.phases.values()))
        require(measuring, name, self.algorithm.label, "a method with a phase that measures: @phase(…, measures=True)")
        at_once = "a method that waits for everyone: late replies are made of steps of other rounds"
        require(not self.algorithm.asks.asynchronous, name, f"{self.algorithm.label} in Asynchronous", at_once)

    @property
    def allows(self) -> Allows:
        numbers = f"; give numbers for {', '.join(open_steps(self.algorithm))}"
        return Allows(
            late=No(f"its steps are those of this round's curvature, and late replies are made of other ones{numbers}"),
            submodels=No(f"curvature is that of the whole y, and a client that holds a part has another one{numbers}"),
            noise=No(f"a client's curvature tells of its data, and steps by a noised one may be of any size{numbers}"),
            local_x=No(f"its steps are found from the x that the server has{numbers}"),
            project_x=self.algorithm.allows.project_x,
        )

    @property
    def adapted(self) -> set[str]:
        """Say of which of x, y and v steps are adapted."""
        return {step.of for step in open_steps(self.algorithm).values()}

    def check(self, problem: Problem, clients: Clients | RemoteClients, x: PyTree, y: PyTree) -> None:
        if clients.capacity is not None and not isinstance(self.algorithm.allows.submodels, No):
            refuse_unless_allowed(self, "submodels", "needs steps where Clients.capacity is given")
        with_steps(self.algorithm, lambda open_: 0.0).check(problem, clients, x, y)

    def init(self, x: PyTree, y: PyTree) -> State:
        return State(self.algorithm.init(x, y), Stiffness.unknown(), Squares.none())

    def client_state(self, problem: Problem, x: PyTree, y: PyTree) -> ClientState:
        return ClientState(self.algorithm.client_state(problem, x, y), Vector.first(y))

    def round(self, fed: Fed, state: State, key: Array) -> State:
        measuring = self.measuring(fed, state)
        inside, squares = measuring.method.round(measuring, state.inside, key), state.squares
        if "x" in self.adapted:
            h = scaled(1 / measuring.steps.outer, optax.tree.sub(state.x, inside.x))
            squares, step = squares.after(h, self.x_lr)
            inside = with_x(self, inside, move(state.x, -step, h), "where its step adapts")
        return State(inside, measuring.kept, squares)

    def hypergradient_at(self, fed: Fed, x: PyTree, y: PyTree, key: Array) -> PyTree:
        """Estimate it as the method inside does, with the steps that a round at (x, y) would leave to the next."""
        first, estimate = jax.random.split(key)
        before = AdaptiveSteps.round(self, fed, AdaptiveSteps.init(self, x, y), first)
        measuring = self.measuring(fed, before)
        return measuring.method.hypergradient_at(measuring, x, y, estimate)

    def measuring(self, fed: Fed, state: State) -> MeasuringFed:
        """Make the `Fed` of a round, with the method that has the steps of this state."""
        steps = Steps(state.squares.step, state.curvature.step(self.y_lr))
        method = with_steps(self.algorithm, lambda open_: steps.outer if open_.of == "x" else steps.inner)
        return MeasuringFed(fed, self, method, steps, state.curvature)

    def finished(self, state: State) -> Any:
        return self.algorithm.finished(state.inside)

    def findings(self, state: State) -> Findings:
        found = self.algorithm.findings(state.inside)
        of_y = {"curvature": state.curvature.largest} if self.adapted - {"x"} else {}
        of_x = {"x_step": state.squares.step} if "x" in self.adapted else {}
        return found._replace(columns=found.columns | of_y | of_x)

    def run_phase(self, name: str, client: Client, message: PyTree, key: Array) -> Reply:
        content, steps = message
        kept = client.state or ClientState(None, Vector(None, jnp.zeros(())))  # a fresh cohort's is out of reach
        inside, phase = replace(client, state=kept.inside), self.algorithm.phases[name]
        vector, products = kept.vector, None
        if self.measures(phase):
            vector, products = self.measure(takes_and_gives(phase)[0], client, kept.vector, content, key)
        method = with_steps(self.algorithm, partial(self.size, client, steps, vector.largest))
        reply = method.run_phase(name, inside, content, key)
        if client.state is not None:
            reply = reply._replace(state=ClientState(kept.inside if reply.state is None else reply.state, vector))
        if products is None:
            return reply
        work = self.directions_of(client)
        measured = Stiffness(vector.largest, work, (work * vector.largest).astype(vector.largest.dtype))
        return reply._replace(update=(reply.update, measured), hvps=reply.hvps + products)

    def measures(self, phase: Phase) -> bool:
        """Say whether curvature is measured with a phase."""
        return self.adapted != {"x"} and bool(getattr(phase, "__measures__", False))

    def measure(self, takes: PyTree, client: Client, kept: Vector, content: PyTree, key: Array) -> tuple[Vector, Array]:
        """Go on with the power method on a batch of its own; return what to keep, and how many products it took."""
        at: dict[str, PyTree] = {}
        jax.tree.map(lambda kind, part: at.setdefault(kind, part), takes, content)
        kept = Vector.first(at["y"]) if kept.unit is None else kept
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

    def size(self, client: Client, steps: Steps, own: Array, open_: OpenStep) -> Array:
        """Return a client's step: that of all clients, or what its own curvature `own` bears, where that is known."""
        if open_.of == "x":
            return steps.outer
        step, bears = steps.inner, jnp.where(own > 0, 1 / jnp.where(own > 0, own, 1), jnp.inf)
        if open_.kind == "alone":
            return jnp.where(own > 0, self.y_lr * bears, step)
        if open_.kind == "shared":
            return step
        tau = client.local_steps(open_.part.local_steps)
        several = bears * (tau if open_.kind == "total" else 1)
        return jnp.where(tau > 1, jnp.minimum(step, several), step)


def adaptive(algorithm: Algorithm, problem: Problem) -> Algorithm:
    """Return a method as it runs on a problem: in AdaptiveSteps where it has steps that are None, and are used.

    Raises:
        ConfigurationError: they are inside a wrapper that allows no such steps.
    """
    solved = problem.implicit_term == "inverse"  # there is a system for v
    if not any(solved or "hypergradient" not in path for path in open_steps(algorithm)):
        return algorithm
    if isinstance(algorithm, AdaptiveSteps):
        return algorithm
    if isinstance(algorithm, OuterOptimizer):
        return replace(algorithm, algorithm=adaptive(algorithm.algorithm, problem))
    if isinstance(algorithm, Wrapper):
        entry = "submodels" if isinstance(algorithm, Submodels) else "late"
        refuse_unless_allowed(AdaptiveSteps(algorithm.algorithm), entry, f"needs steps in {type(algorithm).__name__}")
    return AdaptiveSteps(algorithm)


def unit(vector: PyTree) -> PyTree:
    """Return the vector at length 1, or as it is where it is 0."""
    norm = optax.tree.norm(vector)
    return scaled(1 / jnp.where(norm > 0, norm, 1), vector)


def with_steps(method: Algorithm, size: Callable[[OpenStep], Any]) -> Any:
    """Return a method with a number for each step that is None."""
    changed: Any = method
    for path, open_ in open_steps(method).items():
        changed = replaced(changed, path.split("."), size(open_))
    return changed


class MeasuringFed(KeepingFed):
    """A `Fed` whose messages carry the steps, and whose replies what clients measure, which it keeps."""

    def __init__(self, fed: Fed, wrapper: AdaptiveSteps, method: Any, steps: Steps, known: Stiffness) -> None:
        super().__init__(fed, known, fed.sampled)
        self.wrapper, self.method, self.steps = wrapper, method, steps

    def mean(
        self, phase: Phase, message: PyTree, key: Array, *, unbiased: bool = False, fresh: int | Array | None = None
    ) -> PyTree:
        asked = self.wrapper.phases[self.method.phase_name(phase)]
        update = self.fed.mean(asked, (message, self.steps), key, unbiased=unbiased, fresh=fresh)
        if not self.wrapper.measures(phase):
            return update
        update, measured = update
        self.kept = self.kept.after(measured)
        return update

    def sum_first(self, n: int, phase: Phase, *message: Any, **options: Any) -> PyTree:
        raise ConfigurationError(f"{self.wrapper.label} asks fed.sum_first, and cannot have AdaptiveSteps")

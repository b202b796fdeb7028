"""Steps that nobody chooses: those of y and v follow the inner curvature, those of x the hypergradients so far.

They are for the fields of a method that are None, each by itself.

y and v. As x moves, so does the inner Hessian, and with it the steps it allows. A client keeps a unit vector u_i. When
a phase that `measures` asks it, it makes a product with its own Hessian at the x and y of the message: a step of the
power method, which goes on from the round before,

    u ← ∇²yy g_i(x, y) u,   L_i = ‖u‖,   u ← u/‖u‖                               FIRST times when it has made none

L_i comes to the largest eigenvalue, from below, and L = Σ p_i L_i to a bound of that of ∇²yy G, from above. Both follow
a rise at once, and a fall by the factor FALL in a round. In the next round c/L, c = `y_lr`, is

    a step on y or v that is the same for all, or the total of a client's τ_i local steps
    with L_i for L where each client solves a system of its own: `LocalImplicit`, `Coordinates`

and no local step of several is above 1/L_i. In round 0 L is not known, and these steps are 0. A cohort may be stiffer
than those before it: what clients reply for y and v is shortened to the step that L bears with what they measured for
it. Products with the Hessian, of which fresh cohorts measure nothing, are shortened so that c/L is c⟨v, Hv⟩/‖Hv‖² at
most, which never is below c/λ, λ the largest eigenvalue of H.

Where the server moves along the mean q of sums q_i of a_i local directions (SimFBO, ShroFBO, FedBiO), two steps are
safe. One is that of a single step along the mean gradient, c/(L Σ p a), or c/(Σ p a L_i) if that is less: clients then
need not drift at all, and their local steps bring nothing but larger batches. The other is a client's own, η ≤ 1/L_i:
(I − ηH_i)^a is a contraction, and so is the mean of these, a times as fast where clients are alike; where they are not,
it comes to rest elsewhere. How much they are alike is seen in what they reply for y:

    r = ‖q‖² / Σ p_i ‖q_i‖²      1: all go the same way;  0: they go apart, or are at rest, and only drift is left

So clients step by η = c √r/L, and the server by the larger of c √r/(L Σ p a Σ p/a) and the safe step of the first kind,
or by this where clients' steps are given.
Divya Jhunjhunwala et al., "FedExP", ICLR 2023, extrapolate by 1/r where we shorten clients' steps by √r.

x. What a round takes from x is its step times a direction h_t, an estimate of the hypergradient, of d entries. With
η = `x_lr`, it is the step of AdaGrad-norm, whose numerator is as far as x has come, as in DoG, within bounds:

    α_t = r_t / √(Σ_{s≤t} ‖h_s‖²),   r_t = min(η √d, max(η, η‖x_0‖, max_{s≤t} ‖x_s − x_0‖)),   x ← x − α_t h_t

R. Ward, X. Wu and L. Bottou, "AdaGrad stepsizes: sharp convergence over nonconvex landscapes", JMLR 2020; in bilevel
optimization AdaSDBO (NeurIPS 2025) has it without clients. M. Ivgi, O. Hinder and Y. Carmon, "DoG is SGD's best
friend", ICML 2023. The bound η √d is a change by η in root mean square, an order that is known where the entries of x
are logarithms, logits or weights of samples: x does not outrun y. Those of a network are many, and better not all moved
so far at once: its first step is η of its length. A step that the server alone makes is LONG, so that h is not rounded
off in x, and is made α_t. A client's own in round t + 1 is α_t, but with η √d/20 for r_t where that is less: else it
leaves where its step on y is safe; times α_t/α_{t−1}, at most 1 and at least PROBE: else it does where h has just
grown. Before any h it is 0 where the server alone makes steps that count; else PROBE, and ten times as much in each
round, up to 1.

A message carries three numbers more, and a reply to a phase that measures five.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedbilevel.algorithms.parts.local_steps import LocalDirections, LocalWork, Plain
from fedbilevel.algorithms.parts.wrappers import KeepingFed, OuterOptimizer, Submodels, Wrapper
from fedbilevel.core.algorithm import Algorithm, check_algorithm, refuse_unless_allowed, takes_and_gives
from fedbilevel.core.authored import with_x
from fedbilevel.core.client import Client, Clients, RemoteClients
from fedbilevel.core.config import TIED, OpenStep, is_concrete, open_steps, positive, static
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
LONG = 1e6  # the server's step on x, from which h is found
FLAT = (
    "the inner loss has no curvature in y where the run is, so that steps on y that adapt are 0: give numbers for them"
)


class Measured(NamedTuple):
    """What a client tells with its reply."""

    largest: Array  # L_i
    work: Array  # a_i, directions in a sum that the server moves along
    inverse: Array  # 1/a_i
    summed: Array  # a_i L_i
    square: Array  # ‖q_i‖²


class Stiffness(NamedTuple):
    """What the server knows of all clients."""

    largest: Array  # Σ p_i L_i; 0 before anyone has measured
    work: Array  # Σ p_i a_i
    inverse: Array  # Σ p_i/a_i
    summed: Array  # Σ p_i a_i L_i
    agreement: Array  # r

    @classmethod
    def unknown(cls) -> Stiffness:
        return cls(*jnp.zeros((len(cls._fields),)))

    def after(self, measured: Measured, square: Array) -> Stiffness:
        """Follow what was measured, and ‖q‖²: a rise of what curves at once, a fall by FALL at most."""
        agreement = over(square, measured.square)
        rises = (jnp.maximum(FALL * old, new) for old, new in zip(self[:-1], measured[:-1], strict=True))
        largest, work, inverse, summed = rises
        return Stiffness(largest, work, inverse, summed, jnp.minimum(agreement, 1).astype(self.agreement.dtype))

    def steps(self, fraction: Any) -> tuple[Array, Array]:
        """Return the server's step on y and v, and a client's; 0 where nothing is known."""
        safe = over(fraction, jnp.maximum(self.largest * self.work, self.summed))
        own = jnp.sqrt(self.agreement) * over(fraction, self.largest)
        return jnp.maximum(safe, over(own, self.work * self.inverse)), own


class Squares(NamedTuple):
    """What the server keeps of the hypergradients so far."""

    total: Array  # Σ ‖h_s‖²
    step: Array  # α of the last round, 0 before
    own: Array  # a client's step
    start: PyTree  # x_0
    far: Array  # max ‖x_s − x_0‖

    @classmethod
    def none(cls, x: PyTree) -> Squares:
        return cls(jnp.zeros(()), jnp.zeros(()), jnp.asarray(PROBE), x, jnp.zeros(()))

    def after(self, x: PyTree, h: PyTree, lr: Any) -> Squares:
        """Add h, found at x."""
        norm = lambda tree: optax.tree.norm(tree).astype(self.total.dtype)  # noqa: E731
        bound = lr * sum(leaf.size for leaf in jax.tree.leaves(h)) ** 0.5
        far = jnp.maximum(self.far, norm(optax.tree.sub(x, self.start)))
        r = jnp.minimum(bound, jnp.maximum(lr * jnp.maximum(1, norm(self.start)), far))
        total = self.total + norm(h) ** 2
        step = over(r, jnp.sqrt(total))
        own = over(jnp.minimum(r, TIED * bound), jnp.sqrt(total)) * jnp.clip(over(step, self.step), PROBE, 1)
        return Squares(total, step, jnp.where(total == 0, jnp.minimum(10 * self.own, 1), own), self.start, far)


class Steps(NamedTuple):
    """The steps of a round, which messages carry."""

    outer: Array  # a client's, on x
    inner: Array
    drift: Array  # a client's, on y and v, where they only decide how far it drifts


class Vector(NamedTuple):
    """What a client keeps of the power method."""

    unit: PyTree  # None: it begins anew each time
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
        remember: whether a client keeps u_i, which is as large as y; else it makes FIRST products each time. `solve`
            sets it to False where simulated clients would keep more than half a gigabyte.
    """

    y_lr: float = positive(default=1.0)
    x_lr: float = positive(default=0.2)
    remember: bool = static(default=True)

    def validate(self) -> None:
        check_algorithm(self.algorithm)
        c, first, name = self.y_lr, self.x_lr, "AdaptiveSteps.algorithm"
        require(not is_concrete(first) or first < float("inf"), "AdaptiveSteps.x_lr", first, "finite")
        require(not is_concrete(c) or c < 2, "AdaptiveSteps.y_lr", c, "below 2")
        allowed = "a method with steps that are None, such as SimFBO(), FedNest() or AFBO()"
        twice = isinstance(self.algorithm, AdaptiveSteps)
        require(bool(self.adapted) and not twice, name, self.algorithm.label + " in AdaptiveSteps" * twice, allowed)
        measuring = self.adapted == {"x"} or any(map(self.measures, self.algorithm.phases.values()))
        require(measuring, name, self.algorithm.label, "a method with a phase that measures: @phase(…, measures=True)")
        at_once = "a method that waits for everyone: late replies are made of steps of other rounds"
        require(not self.algorithm.asks.asynchronous, name, f"{self.algorithm.label} in Asynchronous", at_once)

    @property
    def allows(self) -> Allows:
        open_ = (path for path, step in open_steps(self.algorithm).items() if step.kind != "drift")
        numbers = f"; give numbers for {', '.join(open_)}"
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
        drifts = {path for path, step in open_steps(self.algorithm).items() if step.kind == "drift" and step.of != "x"}
        own = sorted(drifts.intersection(clients.own))
        numbers = "left out, or server_lr given: a server's step that adapts is found from those of clients, too"
        require(not own, f"Clients.own[{', '.join(own)}]", "given", numbers)
        if clients.capacity is not None and not isinstance(self.algorithm.allows.submodels, No):
            refuse_unless_allowed(self, "submodels", "needs steps where Clients.capacity is given")
        with_steps(self.algorithm, lambda open_: 0.0).check(problem, clients, x, y)

    def init(self, x: PyTree, y: PyTree) -> State:
        return State(self.algorithm.init(x, y), Stiffness.unknown(), Squares.none(x))

    def client_state(self, problem: Problem, x: PyTree, y: PyTree) -> ClientState:
        vector = Vector.first(y) if self.remember else Vector(None, jnp.zeros(()))
        return ClientState(self.algorithm.client_state(problem, x, y), vector)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        measuring = self.measuring(fed, state)
        inside, squares = measuring.method.round(measuring, state.inside, key), state.squares
        if "x" in self.adapted:
            h = scaled(1 / self.taken(measuring.steps), optax.tree.sub(state.x, inside.x))
            squares = squares.after(state.x, h, self.x_lr)
            inside = with_x(self, inside, move(state.x, -squares.step, h), "where its step adapts")
        return State(inside, measuring.kept, squares)

    def hypergradient_at(self, fed: Fed, x: PyTree, y: PyTree, key: Array) -> PyTree:
        """Estimate it as the method inside does, with the steps that a round at (x, y) would leave to the next."""
        first, estimate = jax.random.split(key)
        before = AdaptiveSteps.round(self, fed, AdaptiveSteps.init(self, x, y), first)
        measuring = self.measuring(fed, before)
        return measuring.method.hypergradient_at(measuring, x, y, estimate)

    def measuring(self, fed: Fed, state: State) -> MeasuringFed:
        """Make the `Fed` of a round, with the method that has the steps of this state."""
        open_ = {(step.kind, step.of) for step in open_steps(self.algorithm).values()}
        drifts = all(("drift", of) in open_ for kind, of in open_ if kind == "shared" and of != "x")
        known = state.curvature if drifts else state.curvature._replace(agreement=jnp.zeros(()))
        quiet = jnp.logical_and(state.squares.total == 0, not self.clients_move_x)
        steps = Steps(jnp.where(quiet, 0, state.squares.own), *known.steps(self.y_lr))
        method = with_steps(self.algorithm, lambda open_: self.taken(steps) if open_.of == "x" else steps.inner)
        return MeasuringFed(fed, self, method, steps, known)

    def taken(self, steps: Steps) -> Any:
        """Return the step on x of the method inside, from which h is found."""
        return steps.outer if self.clients_move_x else LONG

    @property
    def clients_move_x(self) -> bool:
        """Say whether what a round takes from x are steps of clients."""
        return any(open_.kind in ("local", "local x") for open_ in open_steps(self.algorithm).values())

    @property
    def shared(self) -> set[str]:
        """Say which of y, v and the products for v are multiplied by a step that adapts and is the same for all."""

        def one(part: Any) -> bool:
            return part.local_steps == 1 and getattr(part, "local_epochs", None) is None

        return {
            "product" if "hypergradient" in path.split(".") else step.of
            for path, step in open_steps(self.algorithm).items()
            if step.kind == "shared" or (step.kind in ("total", "local") and one(step.part))
        }

    def finished(self, state: State) -> Any:
        return self.algorithm.finished(state.inside)

    def findings(self, state: State) -> Findings:
        found, known = self.algorithm.findings(state.inside), state.curvature
        of_y = {"curvature": known.largest} if self.adapted - {"x"} else {}
        of_x = {"x_step": state.squares.step} if "x" in self.adapted else {}
        flat = bool(of_y) and float(known.work) > 0 and float(known.largest) == 0
        return found._replace(columns=found.columns | of_y | of_x, warning=FLAT if flat else found.warning)

    def run_phase(self, name: str, client: Client, message: PyTree, key: Array) -> Reply:
        content, steps = message
        kept = client.state or ClientState(None, Vector(None, jnp.zeros(())))  # a fresh cohort's is out of reach
        inside, phase = replace(client, state=kept.inside), self.algorithm.phases[name]
        vector, products = kept.vector, None
        if self.measures(phase):
            vector, products = self.measure(takes_and_gives(phase)[0], client, kept.vector, content, key)
        batched = replace(client, batch_size=self.batch_size)
        method = with_steps(self.algorithm, partial(self.size, batched, steps, vector.largest))
        reply = method.run_phase(name, inside, content, key)
        if client.state is not None:
            vector = vector if self.remember else vector._replace(unit=None)
            reply = reply._replace(state=ClientState(kept.inside if reply.state is None else reply.state, vector))
        if products is None:
            return reply
        work = self.directions_of(client)
        told = vector.largest, work, 1 / work, work * vector.largest, square_of_y(phase, reply.update)
        measured = Measured(*(number.astype(vector.largest.dtype) for number in told))
        return reply._replace(update=(reply.update, measured), hvps=reply.hvps + products)

    def measures(self, phase: Phase) -> bool:
        """Say whether curvature is measured with a phase."""
        return self.adapted != {"x"} and bool(getattr(phase, "__measures__", False))

    def measure(self, takes: PyTree, client: Client, kept: Vector, content: PyTree, key: Array) -> tuple[Vector, Array]:
        """Go on with the power method on a batch of its own; return what to keep, and how many products it took."""
        at: dict[str, PyTree] = {}
        jax.tree.map(lambda kind, part: at.setdefault(kind, part), takes, content)
        anew = kept.unit is None
        kept = Vector(Vector.first(at["y"]).unit, kept.largest) if anew else kept
        products = jnp.where((kept.largest > 0) & (not anew), 1, FIRST)
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
            return steps.outer if open_.kind == "drift" else self.taken(steps)
        step, bears = steps.inner, jnp.where(own > 0, 1 / jnp.where(own > 0, own, 1), jnp.inf)
        if open_.kind == "alone":
            return jnp.where(own > 0, self.y_lr * bears, step)
        if open_.kind in ("drift", "short"):
            return jnp.minimum(steps.drift if open_.kind == "drift" else TIED * step, bears)
        part: Any = open_.part
        if isinstance(part, LocalWork):
            tau = part.tau(client)
        else:
            tau = client.local_steps(part.local_steps) if hasattr(part, "local_steps") else 1
        several = bears * (1 if open_.kind == "local" else tau)
        return jnp.where(tau > 1, jnp.minimum(step, several), step)


def adaptive(algorithm: Algorithm, problem: Problem, remember: bool = True) -> Algorithm:
    """Return a method as it runs on a problem: in AdaptiveSteps where it has steps that are None, and are used.

    `remember`: see `AdaptiveSteps`.

    Raises:
        ConfigurationError: they are inside a wrapper that allows no such steps.
    """
    solved = problem.implicit_term == "inverse"  # there is a system for v
    if not any(solved or "hypergradient" not in path.split(".") for path in open_steps(algorithm)):
        return algorithm
    if isinstance(algorithm, AdaptiveSteps):
        return algorithm
    if isinstance(algorithm, OuterOptimizer):
        return replace(algorithm, algorithm=adaptive(algorithm.algorithm, problem, remember))
    if isinstance(algorithm, Wrapper):
        entry = "submodels" if isinstance(algorithm, Submodels) else "late"
        refuse_unless_allowed(AdaptiveSteps(algorithm.algorithm), entry, f"needs steps in {type(algorithm).__name__}")
    return AdaptiveSteps(algorithm, remember=remember)


def square_of_y(phase: Phase, update: PyTree) -> Array:
    """Return the squared norm of the first part of an update that is shaped like y: that of y itself, not of v."""
    parts: list[PyTree] = []
    jax.tree.map(lambda kind, part: parts.append(part) if kind == "y" else None, takes_and_gives(phase)[1], update)
    return jnp.asarray(optax.tree.norm(parts[:1], squared=True))


def over(numerator: Any, denominator: Any) -> Array:
    """Return the quotient, or 0 where the denominator is 0; NaN goes on, to be found in x or y."""
    return jnp.where(denominator == 0, 0, numerator / jnp.where(denominator == 0, 1, denominator))


def unit(vector: PyTree) -> PyTree:
    """Return the vector at length 1, or as it is where it is 0."""
    return scaled(over(1, optax.tree.norm(vector)), vector)


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
        self.wrapper, self.method, self.steps, self.agreement = wrapper, method, steps, known.agreement

    def mean(
        self, phase: Phase, message: PyTree, key: Array, *, unbiased: bool = False, fresh: int | Array | None = None
    ) -> PyTree:
        asked = self.wrapper.phases[self.method.phase_name(phase)]
        update = self.fed.mean(asked, (message, self.steps), key, unbiased=unbiased, fresh=fresh)
        if self.wrapper.measures(phase):
            update, measured = update
            self.kept = self.kept.after(measured, square_of_y(phase, update))
            bears, _ = self.kept._replace(agreement=self.agreement).steps(self.wrapper.y_lr)
            return self.shortened(bears, ("y", "v"), phase, update)
        if getattr(phase, "__multiplies__", False):
            curves, square = optax.tree.vdot(message[-1], update), optax.tree.norm(update, squared=True)
            bears = jnp.where(curves < 0, jnp.inf, self.wrapper.y_lr * over(curves, square))
            return self.shortened(bears, ("product",), phase, update)
        return update

    def shortened(self, bears: Array, names: Sequence[str], phase: Phase, update: PyTree) -> PyTree:
        """Shorten what of an update the server moves along by steps that are the same for all, to the step it bears."""
        factor, parts = jnp.minimum(over(bears, self.steps.inner), 1), iter(names)

        def one(kind: str, part: PyTree) -> PyTree:
            return scaled(factor, part) if kind == "y" and next(parts, "") in self.wrapper.shared else part

        return jax.tree.map(one, takes_and_gives(phase)[1], update)

    def sum_first(self, n: int, phase: Phase, *message: Any, **options: Any) -> PyTree:
        raise ConfigurationError(f"{self.wrapper.label} asks fed.sum_first, and cannot have AdaptiveSteps")

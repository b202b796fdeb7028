"""Adaptive step sizes: the steps of a method that are None, each by itself.

Steps on y and v follow the inner curvature. As x moves, the inner Hessian changes, and with it the steps that it
allows. When a phase that `measures` asks a client, the client measures its largest curvature L_i and reports it
(curvature.py). L = Σ p_i L_i bounds the largest curvature of the inner loss of all clients. With c = `y_lr`, steps are

    c/L     a step on y or v that is the same for all, or the total of a client's τ_i local steps
    c/L_i   where each client solves a linear system of its own: `LocalImplicit`, `Coordinates`

One of several local steps is never longer than 1/L_i. In round 0 the server does not know L, and its steps are 0. A
cohort may have a larger L than the cohorts before it. Therefore the server scales replies for y and v down to the step
that the L measured with them allows. Products with the Hessian, with which fresh cohorts measure nothing, are scaled
down so that c/L is at most c⟨v, Hv⟩/‖Hv‖², which is at least c/λ, λ being the largest eigenvalue of H.

SimFBO, ShroFBO and FedBiO move along the mean q of sums q_i of a_i local directions. Two steps are safe. One is that of
a single step along the mean gradient, the smaller of c/(L Σ p a) and c/(Σ p a L_i); clients then need not move, and
their local steps only average over more samples. The other is the client's own, η ≤ 1/L_i: each (I − ηH_i)^a is a
contraction, and so is their mean, which is a times as fast where clients are alike. Where they differ, its fixed point
is another. How much they are alike shows in their replies for y:

    r = ‖q‖² / Σ p_i ‖q_i‖²        1: all move in the same direction;  0: they move apart, and only drift remains

Clients step by η = c √r/L, and the server by the larger of c √r/(L Σ p a Σ p/a) and the safe step of the first kind; by
the latter where clients' steps are given. (Divya Jhunjhunwala et al., "FedExP", ICLR 2023, extrapolate by 1/r where
clients' steps are shortened by √r here.)

Leaves of y that are each client's own, and their part of v, move by c/(a_i L_i); core/own_y.py says why that is stable.
Where a client's own steps adapt (`LocalSGD`, FedBiO), its changes of them are scaled down to 1/L_i.

Steps on x are AdaGrad's, along the hypergradient h of the round, and shorter where the inner curvature has risen
(adagrad.py, curvature.py). h is what the method takes from x, divided by the method's own step: the server's step is
LONG, so that h is not lost by rounding. Where clients step on x themselves, their steps are SHORT, so that they find h
at the x of the server, and their replies are scaled by LONG/SHORT. With longer steps a client would run away whose own
hypergradient is many times the mean.

A message carries two numbers and a seed more, and a reply to a phase that measures six.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedbilevel.algorithms.parts.adagrad import AdaGrad
from fedbilevel.algorithms.parts.curvature import STREAM, Measured, PowerMethod, ServerCurvature
from fedbilevel.algorithms.parts.layers import Ask, Asked, Inside, Kept, Layer, layered, layers_at
from fedbilevel.algorithms.parts.local_steps import JointSteps, LocalWork, Plain
from fedbilevel.core.algorithm import Algorithm, refuse_unless_allowed, takes_and_gives
from fedbilevel.core.authored import with_x
from fedbilevel.core.client import Client
from fedbilevel.core.config import is_concrete, positive, static
from fedbilevel.core.errors import require
from fedbilevel.core.facts import Allows, Findings, No
from fedbilevel.core.fed import Phase, Reply, Total
from fedbilevel.core.hyperparameters import TIED, OpenStep, open_steps, replaced
from fedbilevel.core.own import as_client
from fedbilevel.core.own_y import parted_y
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree, join, over, scaled

LONG = 1e12  # the server's step on x, from which h is found
SHORT = 1e-12  # a client's own, too short to move x
FLAT = (
    "the inner loss has no curvature in y where the run is, so that steps on y that adapt are 0: give numbers for them"
)


class Steps(NamedTuple):
    """The steps on y and v that a message carries, and what the random vector of a measurement is drawn by."""

    inner: Array
    drift: Array  # a client's, where they only decide how far it drifts
    seed: Array


class Sized(NamedTuple):
    """A message of the method's, and the steps."""

    message: PyTree
    steps: Steps


class WithMeasured(NamedTuple):
    """An update of the method's, and what was measured with it."""

    update: PyTree
    measured: Measured


class Known(NamedTuple):
    """What the server keeps."""

    curvature: ServerCurvature
    outer: AdaGrad
    inner: Array  # the step on y and v of this round
    agreement: Array  # r of the round before, which this round's steps go by


class AdaptiveSteps(Layer):
    """Adapt the steps of a method that are None: on y and v to the inner curvature, on x to the hypergradients so far.

    `solve` puts it around each method that has such steps; `fb.AdaptiveSteps(method, …)` is short for
    `fb.layered(method, fb.AdaptiveSteps(…))`. The history has the curvature L as `curvature`, and the
    length of a move of x over that of the hypergradient as `x_step`, where these steps are adapted.

    Args:
        y_lr: c, the steps on y and v in units of 1/L, below 2. A step stays stable where L is measured too low by a
            factor of up to 2/c.
        x_lr: η, the most that a round changes an entry of x. Give less, such as 0.02, where x is too fast for y, or
            where a penalty depends on several entries.
        remember: whether a client keeps the vector of its power method, which is as large as y; if not, it makes 10
            products in place of 3 each time. `solve` sets it to False where simulated clients would keep more than half
            a gigabyte.
    """

    kind, place, learns = "adaptive_steps", "steps", True

    y_lr: float = positive(default=1.0)
    x_lr: float = positive(default=0.1)
    remember: bool = static(default=True)

    def validate(self) -> None:
        c, first = self.y_lr, self.x_lr
        require(not is_concrete(first) or first < float("inf"), "AdaptiveSteps.x_lr", first, "finite")
        require(not is_concrete(c) or c < 2, "AdaptiveSteps.y_lr", c, "below 2")

    def fits(self, method: Algorithm) -> None:
        name, allowed = "AdaptiveSteps.algorithm", "a method with steps that are None, such as SimFBO() or AFBO()"
        require(bool(adapted(method)), name, method.label, allowed)
        measuring = adapted(method) == {"x"} or any(measures(method, phase) for phase in method.phases.values())
        require(measuring, name, method.label, "a method with a phase that measures: @phase(…, measures=True)")
        at_once = "a method that waits for everyone: late replies are made of steps of other rounds"
        require(not method.asks.asynchronous, name, f"{method.label} with first replies", at_once)

    def allows(self, inside: Allows, method: Algorithm) -> Allows:
        open_ = (path for path, step in open_steps(method).items() if step.kind != "drift")
        numbers = f"; give numbers for {', '.join(open_)}"
        return Allows(
            late=No(f"its steps are those of this round's curvature, and late replies are made of other ones{numbers}"),
            submodels=No(f"curvature is that of the whole y, and a client that holds a part has another one{numbers}"),
            noise=No(f"a client's curvature tells of its data, and steps by a noised one may be of any size{numbers}"),
            local_x=No(f"its steps are found from the x that the server has{numbers}"),
            project_x=inside.project_x,
            own_y=inside.own_y,
        )

    def check(self, method: Algorithm, problem: Problem, clients: Any, x: PyTree, y: PyTree) -> None:
        drifts = {path for path, step in open_steps(method).items() if step.kind == "drift" and step.of != "x"}
        own = sorted(drifts.intersection(clients.own))
        numbers = "left out, or server_lr given: a server's step that adapts is found from those of clients, too"
        require(not own, f"Clients.own[{', '.join(own)}]", "given", numbers)
        if clients.capacity is not None and not isinstance(method.allows.submodels, No):
            without = self.allows(method.allows, method)
            refuse_unless_allowed(method, "submodels", "needs steps where Clients.capacity is given", without)

    def server_slot(self, method: Algorithm, x: PyTree, y: PyTree) -> Known:
        curvature, zero = ServerCurvature.unknown(), jnp.zeros(())
        return Known(curvature, AdaGrad.begin(x), zero, zero)

    def client_slot(self, method: Algorithm, problem: Problem, x: PyTree, y: PyTree) -> PowerMethod:
        return PowerMethod.begin(y, self.remember)

    def before_round(self, method: Algorithm, kept: Known) -> tuple[Algorithm, Known]:
        """Give the method the steps of what is known."""
        open_ = {(step.kind, step.of) for step in open_steps(method).values()}
        drifts = all(("drift", of) in open_ for kind, of in open_ if kind == "shared" and of != "x")
        agreement = kept.curvature.agreement if drifts else jnp.zeros(())
        kept = kept._replace(agreement=agreement)
        inner, _ = self._steps(kept)
        begun = with_steps(method, lambda open_: LONG if open_.of == "x" else inner)
        return begun, kept._replace(inner=inner)

    def _steps(self, kept: Known) -> tuple[Array, Array]:
        """Return the steps, of the server and of clients, that what is known by now allows."""
        return kept.curvature._replace(agreement=kept.agreement).steps(self.y_lr)

    def exchange(self, asked: Asked, kept: Known, ask: Ask) -> tuple[Total, Known]:
        """Send the steps with the message, and scale the replies to the steps that curvature allows."""
        phase, message = asked.method.phases[asked.phase], asked.message
        steps = Steps(*self._steps(kept), jax.random.bits(jax.random.fold_in(asked.key, STREAM), dtype="uint32"))
        mean = ask(replace(asked, message=Sized(message, steps))).mean(asked.unbiased)
        if measures(asked.method, phase):
            mean, measured = mean  # a WithMeasured
            kept = kept._replace(curvature=kept.curvature.after(measured, square_of_y(phase, mean)))
            factor, shared = allowed(self._steps(kept)[0], kept.inner), shared_steps(asked.method)
            mean = rescaled(phase, mean, "y", [factor if of in shared else 1 for of in "yv"])
        elif getattr(phase, "__multiplies__", False) and "product" in shared_steps(asked.method):
            along, square = optax.tree.vdot(message[-1], mean), optax.tree.norm(mean, squared=True)
            most = jnp.where(along < 0, jnp.inf, self.y_lr * over(along, square))
            mean = rescaled(phase, mean, "y", [allowed(most, kept.inner)])
        if clients_move_x(asked.method):
            mean = rescaled(phase, mean, "x", [LONG / SHORT])
        return Total.of_mean(mean), kept

    def reply(self, asked: Asked, kept: PowerMethod | None, client: Client, run: Inside) -> tuple[Reply, Kept]:
        """Measure the client's curvature, and run the phase with the steps that it allows."""
        method, (message, steps) = asked.method, asked.message
        power = PowerMethod.begin(None, keep=False) if kept is None else kept  # out of reach in a fresh cohort
        phase, products = method.phases[asked.phase], None
        if measures(method, phase):
            x, y = measured_at(phase, method, client, message, asked.key)
            power, products = power.measured(client, x, y, steps.seed, method.batch_size, asked.key)
        batched = replace(client, batch_size=method.batch_size)
        sized = with_steps(method, partial(self._size, batched, steps, power.largest))
        reply = run(replace(asked, method=sized, message=message), client)
        reply = self._own_steps(asked, client, steps, power.largest, reply)
        after = None if kept is None else power
        if products is None:
            return reply, after
        measured = Measured.of(power, directions_of(method, client), square_of_y(phase, reply.update))
        return reply._replace(update=WithMeasured(reply.update, measured), hvps=reply.hvps + products), after

    def _size(self, client: Client, steps: Steps, own: Array, open_: OpenStep) -> Any:
        """Return a client's step: that of all clients, or what its own curvature `own` bears, where that is known."""
        if open_.of == "x":
            return 0.0 if open_.kind == "drift" else SHORT
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

    def _own_steps(self, asked: Asked, client: Client, steps: Steps, largest: Array, reply: Reply) -> Reply:
        """Bring own entries of y and v to the client's own step: to c/(a_i L_i) where the server's step adapts, down to
        1/L_i where the client's does."""
        if (own := client.problem.own) is None or isinstance(parts := asked.method.allows.own_y, No):
            return reply
        of_server = over(self.y_lr, largest * directions_of(asked.method, client))
        of_client = jnp.where(largest > 0, allowed(over(1, largest), steps.inner), 1)
        adapts = {step.of for step in open_steps(asked.method).values() if step.kind in ("local", "total")}
        given = parts[asked.phase].gives
        sizes = iter(
            [of_server if size(asked.method) is None else of_client if name in adapts else 1 for name, size in given]
        )

        def one(kind: str, part: PyTree) -> PyTree:
            if kind != "y":
                return part
            shared, mine = parted_y(own, part)
            return join(shared, scaled(next(sizes), mine))

        return reply._replace(
            update=jax.tree.map(one, takes_and_gives(asked.method.phases[asked.phase])[1], reply.update)
        )

    def after_round(
        self, method: Algorithm, problem: Problem, kept: Known, before: Any, after: Any
    ) -> tuple[Any, Known]:
        """Move x along the hypergradient, which is what the round took from x over its step."""
        if "x" not in adapted(method):
            return after, kept
        h = scaled(1 / LONG, optax.tree.sub(before.x, after.x))
        x, outer = kept.outer.moved(before.x, h, self.x_lr, kept.curvature.slower)
        return with_x(method, after, x, "where its step adapts"), kept._replace(outer=outer)

    def findings(self, method: Algorithm, kept: Known, found: Findings) -> Findings:
        of, known = adapted(method), kept.curvature
        of_y = {"curvature": known.largest} if of - {"x"} else {}
        of_x = {"x_step": kept.outer.step} if "x" in of else {}
        flat = bool(of_y) and float(known.work) > 0 and float(known.largest) == 0
        return found._replace(columns=found.columns | of_y | of_x, warning=FLAT if flat else found.warning)

    def remarks(self, method: Algorithm, kept: Known) -> tuple[str, ...]:
        if "x" not in adapted(method):
            return ()
        return tuple(filter(None, (kept.outer.remark(float(self.x_lr)), kept.outer.idle())))


def adaptive(algorithm: Algorithm, problem: Problem, remember: bool = True) -> Algorithm:
    """Return a method as it runs on a problem: in AdaptiveSteps where it has steps that are None, and are used.

    `remember`: see `AdaptiveSteps`.

    Raises:
        ConfigurationError: another layer, or a wrapper, does not allow such steps.
    """
    solved = problem.implicit_term == "inverse"  # there is a system for v
    used = any(solved or "hypergradient" not in path.split(".") for path in open_steps(algorithm))
    has = any(isinstance(layer, AdaptiveSteps) for layer in layers_at(algorithm))
    return layered(algorithm, AdaptiveSteps(remember=remember)) if used and not has else algorithm


def adapted(method: Algorithm) -> set[str]:
    """Say of which of x, y and v steps are adapted."""
    return {step.of for step in open_steps(method).values()}


def measures(method: Algorithm, phase: Phase) -> bool:
    """Say whether curvature is measured with a phase."""
    return adapted(method) != {"x"} and bool(getattr(phase, "__measures__", False))


def measured_at(phase: Phase, method: Algorithm, client: Client, message: PyTree, key: Array) -> tuple[PyTree, PyTree]:
    """Return the x and y at which a client measures its curvature: the phase's own choice, or those of the message."""
    choose: Any = getattr(phase, "__measures__", True)
    if callable(choose):
        x, y = choose(method, client, message, key)
    else:
        x, y = (next(parts_like(kind, takes_and_gives(phase)[0], message)) for kind in "xy")
    return x, y


def clients_move_x(method: Algorithm) -> bool:
    """Say whether replies contain changes of x by clients' own steps, so that the server adds them up."""
    return any(step.of == "x" and step.kind in ("local", "local x") for step in open_steps(method).values())


def shared_steps(method: Algorithm) -> set[str]:
    """Say which of y, v and the products for v are multiplied by a step that adapts and is the same for all."""

    def one(part: Any) -> bool:
        return part.local_steps == 1 and getattr(part, "local_epochs", None) is None

    return {
        "product" if "hypergradient" in path.split(".") else step.of
        for path, step in open_steps(method).items()
        if step.kind == "shared" or (step.kind in ("total", "local") and one(step.part))
    }


def directions_of(method: Algorithm, client: Client) -> Array:
    """Return a_i: how many directions a sum has that the server moves along; 1 where it is a mean."""
    own = as_client(method, client.own)
    if not isinstance(own, JointSteps):
        return jnp.ones(())
    return jnp.asarray(getattr(own, "local_optimizer", Plain()).total(client.local_steps(own.local_steps)))


def allowed(most: Array, step: Array) -> Array:
    """Return the factor that brings a move by the server's step on y and v down to one by the step `most`."""
    return jnp.minimum(over(most, step), 1)


def parts_like(kind: str, declared: PyTree, tree: PyTree) -> Iterator[PyTree]:
    """Yield the parts of a message or update that are declared to be shaped like x or y, in their order."""
    parts: list[PyTree] = []
    jax.tree.map(lambda one, part: parts.append(part) if one == kind else None, declared, tree)
    return iter(parts)


def square_of_y(phase: Phase, update: PyTree) -> Array:
    """Return the squared norm of the first part of an update that is shaped like y: that of y itself, not of v."""
    return jnp.asarray(optax.tree.norm([*parts_like("y", takes_and_gives(phase)[1], update)][:1], squared=True))


def rescaled(phase: Phase, update: PyTree, kind: str, factors: Sequence[Any]) -> PyTree:
    """Multiply the first parts of an update that are declared to be shaped like x or y by these factors."""
    in_order = iter(factors)

    def one(declared: str, part: PyTree) -> PyTree:
        return scaled(next(in_order, 1), part) if declared == kind else part

    return jax.tree.map(one, takes_and_gives(phase)[1], update)


def with_steps(method: Algorithm, size: Callable[[OpenStep], Any]) -> Any:
    """Return a method with a number for each step that is None."""
    changed: Any = method
    for path, open_ in open_steps(method).items():
        changed = replaced(changed, path.split("."), size(open_))
    return changed

"""Adapt the step sizes of a method that are None.

Steps on y and v follow the inner curvature, since the inner Hessian, and with it the largest stable step, changes as x
moves. When the server asks a client for a phase that `measures`, the client also measures its largest curvature L_i and
reports it (curvature.py). L = Σ p_i L_i bounds the largest curvature of the inner loss of all clients. With c = `y_lr`,
the steps are

    c/L     for a step on y or v that is the same for all clients, or for the total of a client's τ_i local steps
    c/L_i   if each client solves its own linear system: `LocalImplicit`, `Coordinates`; at most the server's step

The bound by the server's step is needed if a client has samples of few classes. Such a client may measure almost no
curvature on one batch, and then draw samples of much larger curvature for a product with the Hessian. Without the
bound, its series would grow by many orders of magnitude. Steps on x would then remain short for the rest of the run,
since AdaGrad keeps the large hypergradient in its sums.

If a method steps on y along the gradient of more than the inner loss, as MEHA does, then L and L_i are the curvatures
of all these terms (`added_curvature`). If a client makes several local steps, each is at most 1/L_i. In round 0 the
server does not know L, and its steps are 0. A cohort may have a larger L than the cohorts before it. The server
therefore scales replies for y and v down to the step that is allowed by the L measured with them. Products with the
Hessian come from fresh cohorts, which measure nothing. These products are scaled down so that the step is at most
c⟨v, Hv⟩/‖Hv‖². This bound is at least c/λ, where λ is the largest eigenvalue of H.

In SimFBO, ShroFBO and FedBiO, client i replies with q_i, the sum of a_i local directions, and the server steps along
the mean q of the q_i. In this paragraph Σ p a stands for Σ p_i a_i, and so on. Two kinds of step are safe. The first is
a step of the server that is stable even if clients do not move: the smaller of c/(L Σ p a) and c/(Σ p a L). The second
is a step of the clients, η ≤ 1/L_i. Then each (I − ηH_i)^{a_i} is a contraction, and so is the mean of these maps. If
clients are similar, such steps make y a times as fast. If clients differ, the mean of the maps has another fixed point.
The replies for y show how similar clients are:

    r = ‖q‖² / Σ p_i ‖q_i‖²        1: all move in the same direction;  0: they move apart, and only drift remains

Clients step by η = c √r/L. The server steps by the larger of c √r/(L Σ p a Σ p/a) and the safe step of the first kind.
If the fields give the clients' steps, the server takes the safe step of the first kind. (Divya Jhunjhunwala et al.,
"FedExP", ICLR 2023, lengthen the server's step by 1/r; here clients' steps are shortened by √r.)

Leaves of y that are each client's own, and their part of v, move by c/(a_i L_i); core/own_y.py says why this is stable.
If the clients' own steps adapt (`LocalSGD`, FedBiO), a client's changes of these leaves are scaled down to 1/L_i.

Steps on x are AdaGrad's, along the hypergradient h of the round. They are shorter after the inner curvature has risen
(adagrad.py, curvature.py). To obtain h, the method runs its round with the step size LONG on x, and h is the change of
x divided by −LONG. With a short step, the change of x would be lost to rounding. If clients step on x themselves, their
step size is SHORT, and their replies are multiplied by LONG/SHORT. So they compute h at the x of the server. With
longer steps, a client whose own hypergradient is many times the mean would diverge.

With this layer, a message has two more numbers and a seed, and a reply to a phase that measures has six more numbers.
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
from fedbilevel.algorithms.parts.curvature import STREAM, Added, Measured, PowerMethod, ServerCurvature
from fedbilevel.algorithms.parts.layers import Ask, Asked, Inside, Kept, Layer, layered, layers_at
from fedbilevel.algorithms.parts.local_steps import JointSteps, LocalWork, Plain
from fedbilevel.core.algorithm import Algorithm, own_parts, refuse_unless_allowed, takes_and_gives
from fedbilevel.core.authored import with_x
from fedbilevel.core.client import Client
from fedbilevel.core.config import is_concrete, positive, static
from fedbilevel.core.errors import require
from fedbilevel.core.facts import Allows, Findings, No
from fedbilevel.core.fed import Phase, Reply, Total
from fedbilevel.core.field_types import Number
from fedbilevel.core.hyperparameters import TIED, OpenStep, open_steps, replaced
from fedbilevel.core.own import as_client
from fedbilevel.core.own_y import parted_y
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree, join, over, scaled

LONG = 1e12  # the server's step on x; the change of x divided by LONG is h
SHORT = 1e-12  # a client's own step on x, too short to move x
FLAT = (
    "the inner loss has no curvature in y at this point, so that adapted steps on y are 0. If the losses are in the "
    "right order, Bilevel(outer, inner), give numbers for these steps"
)


class Steps(NamedTuple):
    """Hold the step sizes on y and v that a message contains, and the seed of a measurement's random vector."""

    inner: Array  # the server's step size on y and v
    drift: Array  # a client's step size, for methods in which it only determines how far clients drift apart
    seed: Array


class Sized(NamedTuple):
    """Hold a message of the method together with the steps."""

    message: PyTree
    steps: Steps


class WithMeasured(NamedTuple):
    """Hold an update of the method together with the client's measurement of its curvature."""

    update: PyTree
    measured: Measured


class Known(NamedTuple):
    """Hold the state of the layer on the server."""

    curvature: ServerCurvature
    outer: AdaGrad
    inner: Array  # the step size on y and v in this round
    agreement: Array  # r of the round before, from which the step sizes of this round are computed


class AdaptiveSteps(Layer):
    """Adapt the step sizes of a method that are None: for y and v to the inner curvature, for x to the hypergradients.

    `solve` puts this layer around each method that has such steps. `fb.AdaptiveSteps(method, …)` is short for
    `fb.layered(method, fb.AdaptiveSteps(…))`. If these steps are adapted, the history has the columns `curvature`,
    which is L, and `x_step`, the length of the change of x divided by that of the hypergradient.

    Args:
        y_lr: c, a number below 2. The step sizes on y and v are c/L, where L is the largest curvature of the inner
            loss. They remain stable if the measured L is too low by a factor of at most 2/c.
        x_lr: η, the largest change of an entry of x in a round. Choose a smaller value, such as 0.02, if x is too fast
            for y, or if a penalty depends on several entries of x.
        remember: whether a client keeps the vector of its power method, which is as large as y. Then a measurement
            takes 3 products with a Hessian, and otherwise 10. A client's first measurement takes 12, or more if the
            curvature grows along its first steps. With MEHA, which measures the curvatures of both losses, these
            numbers are 6, 20 and 24. `solve` sets this field to False if simulated clients would keep more than half a
            gigabyte.
    """

    kind, place, learns = "adaptive_steps", "steps", True
    tells = (
        "if steps on y or v adapt, the client also sends numbers that depend on its samples: the largest curvature in "
        "y of the loss along which it steps (the inner loss; with MEHA, the inner loss and a share of the outer loss), "
        "the smallest value of this curvature so far, the number of directions that its reply adds up, and the squared "
        "norm of its reply for y"
    )

    y_lr: Number = positive(default=1.0)
    x_lr: Number = positive(default=0.1, finite=True)
    remember: bool = static(default=True)

    def validate(self) -> None:
        require(not is_concrete(self.y_lr) or self.y_lr < 2, "AdaptiveSteps.y_lr", self.y_lr, "below 2")

    def fits(self, method: Algorithm) -> None:
        name, allowed = "AdaptiveSteps.algorithm", "a method with step sizes that are None, such as SimFBO() or AFBO()"
        require(bool(adapted(method)), name, method.label, allowed)
        measuring = adapted(method) == {"x"} or any(measures(method, phase) for phase in method.phases.values())
        require(measuring, name, method.label, "a method with a phase that measures: @phase(…, measures=True)")
        at_once = "a method that waits for all replies: late replies were computed with the steps of other rounds"
        require(not method.asks.asynchronous, name, f"{method.label} with first replies", at_once)

    def allows(self, inside: Allows, method: Algorithm) -> Allows:
        open_ = (path for path, step in open_steps(method).items() if step.kind != "drift")
        numbers = f"; give numbers for {', '.join(open_)}"
        return Allows(
            late=No(f"its steps follow this round's curvature, and late replies have steps of other rounds{numbers}"),
            submodels=No(f"its steps follow the curvature in the whole y, and that of a part of y differs{numbers}"),
            noise=No(f"a client's curvature depends on its data, and with noise steps could have any size{numbers}"),
            local_x=No(f"its steps are computed from the server's x{numbers}"),
            project_x=inside.project_x,
            own_y=inside.own_y,
        )

    def check(self, method: Algorithm, problem: Problem, clients: Any, x: PyTree, y: PyTree) -> None:
        drifts = {path for path, step in open_steps(method).items() if step.kind == "drift" and step.of != "x"}
        own = sorted(drifts.intersection(clients.own))
        numbers = "left out, or used with a number for server_lr: if that adapts, it depends on the clients' steps too"
        require(not own, f"Clients.own[{', '.join(own)}]", "given", numbers)
        narrow = [str(leaf.dtype) for leaf in jax.tree.leaves(x) if float(jnp.finfo(leaf.dtype).max) < LONG]
        wide = "float32, float64 or bfloat16: steps that adapt need numbers up to 1e12. Or give numbers for the steps"
        require(not narrow or "x" not in adapted(method), "dtype of x0", narrow and narrow[0], wide)
        if clients.capacity is not None and not isinstance(method.allows.submodels, No):
            without = self.allows(method.allows, method)
            refuse_unless_allowed(method, "submodels", "needs step sizes if clients have capacities", without)

    def server_slot(self, method: Algorithm, x: PyTree, y: PyTree) -> Known:
        curvature, zero = ServerCurvature.unknown(), jnp.zeros(())
        return Known(curvature, AdaGrad.begin(x), zero, zero)

    def client_slot(self, method: Algorithm, problem: Problem, x: PyTree, y: PyTree) -> PowerMethod:
        return PowerMethod.begin(y, self.remember)

    def before_round(self, method: Algorithm, kept: Known) -> tuple[Algorithm, Known]:
        """Return the method with the steps of this round, from the curvature measured so far."""
        open_ = {(step.kind, step.of) for step in open_steps(method).values()}
        drifts = all(("drift", of) in open_ for kind, of in open_ if kind == "shared" and of != "x")
        agreement = kept.curvature.agreement if drifts else jnp.zeros(())
        kept = kept._replace(agreement=agreement)
        inner, _ = self._steps(kept)
        begun = with_steps(method, lambda open_: LONG if open_.of == "x" else inner)
        return begun, kept._replace(inner=inner)

    def _steps(self, kept: Known) -> tuple[Array, Array]:
        """Return the step sizes of the server and of a client on y and v, from the curvature measured so far."""
        return kept.curvature._replace(agreement=kept.agreement).steps(self.y_lr)

    def exchange(self, asked: Asked, kept: Known, ask: Ask) -> tuple[Total, Known]:
        """Send the steps with the message, and scale the mean reply down to the steps that the curvature allows."""
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
        if clients_move_x(asked.method, asked.phase):
            mean = rescaled(phase, mean, "x", [LONG / SHORT])
        return Total.of_mean(mean), kept

    def reply(self, asked: Asked, kept: PowerMethod | None, client: Client, run: Inside) -> tuple[Reply, Kept]:
        """Measure the client's curvature, and run the phase with the steps that this curvature allows."""
        method, (message, steps) = asked.method, asked.message
        power = PowerMethod.begin(None, keep=False) if kept is None else kept  # None in a fresh cohort
        phase, products = method.phases[asked.phase], None
        if measures(method, phase):
            x, y = measured_at(phase, method, client, message, asked.key)
            added = added_curvature(method)
            power, products = power.measured(client, x, y, steps.seed, method.batch_size, asked.key, added)
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
        """Return a client's step size for a field that is None.

        It is the step size of all clients, bounded by the client's curvature.

        Args:
            client: the client.
            steps: the steps in the message.
            own: L_i, the client's curvature; 0 if it is not known, which means that it does not bound the step.
            open_: the field.
        """
        if open_.of == "x":
            return 0.0 if open_.kind == "drift" else SHORT
        step, bears = steps.inner, jnp.where(own > 0, 1 / jnp.where(own > 0, own, 1), jnp.inf)
        if open_.kind == "alone":
            alone = self.y_lr * bears
            return jnp.where(own > 0, jnp.where(step > 0, jnp.minimum(alone, step), alone), step)
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
        """Return the reply with the entries of the client's own leaves of y and v scaled to the client's own step.

        If the server's step adapts, the client's own step is c/(a_i L_i), where c is `y_lr`, a_i the number of
        directions in the reply, and L_i the client's curvature. If the client's step adapts, it is bounded by 1/L_i.
        """
        if (own := client.problem.own) is None or isinstance(asked.method.allows.own_y, No):
            return reply
        of_server = over(self.y_lr, largest * directions_of(asked.method, client))
        of_client = jnp.where(largest > 0, allowed(over(1, largest), steps.inner), 1)
        adapts = {step.of for step in open_steps(asked.method).values() if step.kind in ("local", "total")}
        given = own_parts(asked.method, asked.phase).gives
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
        """Move x by AdaGrad along the hypergradient, which is the round's change of x divided by −LONG."""
        if "x" not in adapted(method):
            return after, kept
        h = scaled(1 / LONG, optax.tree.sub(before.x, after.x))
        slower, couples, project = kept.curvature.slower, problem.couples_x, problem.project_x
        x, outer = kept.outer.moved(before.x, h, self.x_lr, slower, couples, project)
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
    """Return the method, with AdaptiveSteps around it if it uses step sizes that are None on this problem.

    Args:
        algorithm: the method.
        problem: the problem.
        remember: as in `AdaptiveSteps`.

    Raises:
        ConfigurationError: another layer, or a wrapper, does not allow adapted steps.
    """
    solved = problem.implicit_term == "inverse"  # there is a linear system for v
    used = any(solved or "hypergradient" not in path.split(".") for path in open_steps(algorithm))
    has = any(isinstance(layer, AdaptiveSteps) for layer in layers_at(algorithm))
    return layered(algorithm, AdaptiveSteps(remember=remember)) if used and not has else algorithm


def adapted(method: Algorithm) -> set[str]:
    """Return the names of the variables, among "x", "y" and "v", whose step sizes are adapted."""
    return {step.of for step in open_steps(method).values()}


def measures(method: Algorithm, phase: Phase) -> bool:
    """Return whether clients measure their curvature when they run a phase."""
    return adapted(method) != {"x"} and bool(getattr(phase, "__measures__", False))


def measured_at(phase: Phase, method: Algorithm, client: Client, message: PyTree, key: Array) -> tuple[PyTree, PyTree]:
    """Return the (x, y) at which a client measures its curvature.

    A phase may declare a function that returns this point (`measures`). Otherwise the message contains the point.
    """
    choose: Any = getattr(phase, "__measures__", True)
    if callable(choose):
        x, y = choose(method, client, message, key)
    else:
        x, y = (next(parts_like(kind, takes_and_gives(phase)[0], message)) for kind in "xy")
    return x, y


def added_curvature(method: Algorithm) -> Added:
    """Return the terms that a method adds to the inner loss in its steps on y: its `added_curvature`, if it has one."""
    added: Added = getattr(method, "added_curvature", Added())
    return added


def clients_move_x(method: Algorithm, phase: str) -> bool:
    """Return whether clients step on x themselves in the phase of this name, so that replies contain changes of x.

    A phase of a part, such as one that estimates a hypergradient, makes only the steps of this part.
    """
    owner, dot, _ = phase.rpartition(".")
    return any(
        step.of == "x" and step.kind in ("local", "local x") and path.startswith(owner + dot)
        for path, step in open_steps(method).items()
    )


def shared_steps(method: Algorithm) -> set[str]:
    """Return the names of the parts of replies that are multiplied by an adapted step which all clients share.

    The names are among "y", "v" and "product"; "product" are the products with the Hessian in the linear system for v.
    """

    def one(part: Any) -> bool:
        return part.local_steps == 1 and getattr(part, "local_epochs", None) is None

    return {
        "product" if "hypergradient" in path.split(".") else step.of
        for path, step in open_steps(method).items()
        if step.kind == "shared" or (step.kind in ("total", "local") and one(step.part))
    }


def directions_of(method: Algorithm, client: Client) -> Array:
    """Return a_i, the number of directions in the sum with which a client replies; 1 if the reply is a mean."""
    own = as_client(method, client.own)
    if not isinstance(own, JointSteps):
        return jnp.ones(())
    return jnp.asarray(getattr(own, "local_optimizer", Plain()).total(client.local_steps(own.local_steps)))


def allowed(most: Array, step: Array) -> Array:
    """Return the factor, at most 1, that makes a move with the step size `step` no longer than one with `most`."""
    return jnp.minimum(over(most, step), 1)


def parts_like(kind: str, declared: PyTree, tree: PyTree) -> Iterator[PyTree]:
    """Yield the parts of a message or update that are declared to have the shape of `kind`, "x" or "y", in order."""
    parts: list[PyTree] = []
    jax.tree.map(lambda one, part: parts.append(part) if one == kind else None, declared, tree)
    return iter(parts)


def square_of_y(phase: Phase, update: PyTree) -> Array:
    """Return the squared norm of the part of an update that is for y: the first part with the shape of y."""
    return jnp.asarray(optax.tree.norm([*parts_like("y", takes_and_gives(phase)[1], update)][:1], squared=True))


def rescaled(phase: Phase, update: PyTree, kind: str, factors: Sequence[Any]) -> PyTree:
    """Multiply the first parts of the update that have the shape of `kind`, "x" or "y", each by one of the factors."""
    in_order = iter(factors)

    def one(declared: str, part: PyTree) -> PyTree:
        return scaled(next(in_order, 1), part) if declared == kind else part

    return jax.tree.map(one, takes_and_gives(phase)[1], update)


def with_steps(method: Algorithm, size: Callable[[OpenStep], Any]) -> Any:
    """Return the method with a number in place of each step size that is None; `size` returns the number."""
    changed: Any = method
    for path, open_ in open_steps(method).items():
        changed = replaced(changed, path.split("."), size(open_))
    return changed

"""ADBO and SDBO: cutting planes approximate the inner problem, and clients reach consensus on x and y.

Yang Jiao, Kai Yang, Tiancheng Wu, Dongjin Song, Chengtao Jian. "Asynchronous Distributed Bilevel Optimization".
ICLR 2023, arXiv:2212.10048. Algorithm 1.

Client i has the weight p_i, the losses f_i and g_i, and its own x_i and y_i. The server has x and z. Constraints make
them agree:

    min Σ p_i f_i(x_i, y_i)    so that    x_i = x,    h(x, {y_i}, z) ≤ ε
    h(x, {y_i}, z) = Σ p_i ‖y_i − φ_i(x)‖² + ‖z − φ_z(x)‖²

Here φ_i(x) and φ_z(x) are the y'_i and the z' after K steps towards the minimum of Σ p_i g_i(x, y'_i) under the
constraints y'_i = z'. The steps start from y'_i = y_i, z' = z and ψ_i = 0, where ψ_i is the multiplier of y'_i = z':

    y'_i ← y'_i − η [∇y g_i(x, y'_i) + ψ_i + μ (y'_i − z')]    z' ← Σ p_i y'_i    ψ_i ← ψ_i + μ (y'_i − z')

A round begins by linearising h ≤ ε at the present point, with φ as a function of x alone. This gives a new plane:

    a = ∂h/∂x,   b_i = 2(y_i − φ_i),   c = 2(z − φ_z),   κ = h − ε − a·x − Σ p_i b_i·y_i − c·z

The server then drops the older planes whose multiplier λ_l is 0. Then T steps on the Lagrangian follow, in which the
planes a_l·x + Σ p_i b_il·y_i + c_l·z + κ_l ≤ 0 replace h ≤ ε. The multiplier of x_i = x is θ_i. In each step, the
server sends (x, λ), and client i computes

    θ_i ← θ_i + η_θ (x_i − x − c_θ θ_i)
    (x_i, y_i) ← (x_i − η_x [∇x f_i(x_i, y_i) + θ_i],  y_i − η_y [∇y f_i(x_i, y_i) + Σ_l λ_l b_il])

and replies with θ_i and its products b_il·y_i. In SDBO the server waits for all clients. In ADBO it waits for the first
S replies, and for clients that were asked τ or more steps ago. Then the server computes

    x ← x − γ_x [Σ_l λ_l a_l − Σ p_i θ_i]       z ← z − γ_z Σ_l λ_l c_l
    λ_l ← max(0, λ_l + γ_λ [(a_l·x + Σ p_i b_il·y_i + c_l·z + κ_l)/n_l − c_λ λ_l])

where n_l is the value of 4 max(h, ε) when plane l was made.

Messages: a new plane takes 2K exchanges, in which the server sends x and z'. In the first K of them clients reply with
y'_i, and in the others with their shares of ∂h/∂x and ∂h/∂z'. In each of the T steps on the Lagrangian, the server
sends x and λ, and clients reply with θ_i and the products b_il·y_i. For a plane a client computes K gradients of g_i
and K backward passes. A backward pass gives a product with ∇²xy g_i and a product with ∇²yy g_i.

Departures from the paper:

1. Where the paper has sums over the M clients, this method has means with the weights p_i. For equal weights this is
   the paper's Lagrangian divided by M, except for the term ‖z − φ_z‖². Here this term weighs as much as the mean of the
   clients' terms. In the paper it weighs as much as the term of one client.
2. The steps on z' and ψ_i are those of ADMM: an exact minimisation over z', and a step of size μ on ψ_i. In the paper,
   each of the two has a step size.
3. ∂h/∂x is computed exactly, by differentiating backwards through all K steps, in K exchanges. The published code
   differentiates each step with the points of the other steps held fixed. For K = 1 this makes no difference. The
   points at which the code differentiates are one step beyond the points at which it computes h and b.
4. The server never gets values of a single client. A client keeps θ_i, and moves it by a step when it gets the next x.
   In ADBO, Σ p_i θ_i therefore lacks the last step of clients that are still computing. Without delays this is the
   paper's method. ADBO's clients send the changes of θ_i and of b_il·y_i, and Σ p_i θ_i is a sum over the clients that
   have replied at least once. All available clients make a plane together, and the server knows their total weight from
   the second plane on. Before the second plane, a client that is never available counts as a client that does not move.
   From the second plane on, this client is left out.
5. The step on λ_l is divided by n_l, since Σ p_i ‖b_il‖² + ‖c_l‖² = 4h is the squared length of a plane. The paper's
   step is not divided. So its effect on a plane falls with h, by orders of magnitude in a run.
6. The number of planes is bounded. If there would be more, the oldest plane is dropped.
7. Planes are made until the end of the run, as in the published code. The paper stops making planes at some iteration.

Checked in tests/algorithms/test_adbo.py and test_cutting_planes.py.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedbilevel.algorithms.parts.memory import ROUNDING
from fedbilevel.core.algorithm import Algorithm, Part, phase
from fedbilevel.core.client import Client, Clients, RemoteClients
from fedbilevel.core.config import positive, positive_integer, step_sizes
from fedbilevel.core.errors import UnsupportedError, require
from fedbilevel.core.facts import Allows, Asks, Facts, Findings, No
from fedbilevel.core.fed import FLAG, Fed, Public, PublicRange, Reply
from fedbilevel.core.field_types import Number, StepSizes
from fedbilevel.core.own import refuse_local_steps
from fedbilevel.core.problem import Minimax, Problem
from fedbilevel.core.tree import XYV, PyTree, move, scaled

FREE = -1  # the serial number that marks a slot without a plane
STEPS = "the number of its steps is `iterations`, and each step is an exchange"
WHOLE = No("each client keeps its own x, y and planes between rounds, and these contain all units")
APART = No("each client moves its own x, and planes are also made at points outside of the set")


class Cut(NamedTuple):
    """Hold the linearisation of the constraint h ≤ ε at a point (x, {y_i}, z), from which a plane is made.

    The value h measures how far the y_i and z are from the estimated inner solution.
    """

    height: Array  # h at the point
    outer: PyTree  # a = ∂h/∂x
    consensus: PyTree  # c = ∂h/∂z
    inner: Array  # Σ p_i b_i·y_i


class Planes(NamedTuple):
    """Hold the server's part of the planes a_l·x + Σ p_i b_il·y_i + c_l·z + κ_l ≤ 0, which approximate h ≤ ε.

    The constraint h ≤ ε keeps the y_i and z near the estimated inner solution. A plane is the linearisation of h − ε at
    a point. If h is convex, the linearisation is nowhere above h − ε, so that a plane cuts off no point where h ≤ ε.
    The server keeps a_l, c_l, the offset κ_l and the multiplier λ_l of each plane. Each client keeps its own b_il, and
    the server knows only the mean Σ p_i b_il·y_i.

    Planes are stored in slots, one more than the largest number of planes that are kept. So there is always a free
    slot for a new plane, and it has been free since the last plane was made. A late reply, which was computed with
    earlier planes, therefore has no value for this slot. All tables have a leading axis of slots, and the values of
    free slots are ignored.
    """

    serial: Array  # an array of shape (slots,): a different number for every plane of the run, or FREE
    outer: PyTree  # a_l: arrays of x's shapes, with a leading axis of slots
    consensus: PyTree  # c_l: arrays of z's shapes, with a leading axis of slots
    start: Array  # an array of shape (slots,): the mean of b_il·y_i when the plane was made
    changes: Array  # an array of shape (slots,): in ADBO, the sum of p_i b_il·(change of y_i) since the plane was made
    inner: Array  # an array of shape (slots,): the mean of b_il·y_i, as far as the server knows it
    offset: Array  # κ_l, an array of shape (slots,)
    length: Array  # n_l = Σ p_i ‖b_il‖² + ‖c_l‖², an array of shape (slots,); 1 in slots that were never used
    multiplier: Array  # λ_l ≥ 0, an array of shape (slots,); 0 in free slots

    @classmethod
    def none(cls, x: PyTree, y: PyTree, capacity: int) -> Planes:
        """Return an empty set of planes with room for `capacity` planes."""
        slots = capacity + 1
        zero = jnp.zeros(slots)
        return cls(
            serial=jnp.full(slots, FREE, jnp.int32),
            outer=empty(x, slots),
            consensus=empty(y, slots),
            start=zero,
            changes=zero,
            inner=zero,
            offset=zero,
            length=jnp.ones(slots),
            multiplier=zero,
        )

    @property
    def active(self) -> Array:
        """Return which slots have a plane, as an array of shape (slots,)."""
        return self.serial != FREE

    def values(self, x: PyTree, z: PyTree) -> Array:
        """Return the value of each plane, a_l·x + Σ p_i b_il·y_i + c_l·z + κ_l, in shape (slots,); 0 for free slots."""
        total = products(self.outer, x) + self.inner + products(self.consensus, z) + self.offset
        return jnp.where(self.active, total, 0)

    def free_slot(self) -> Array:
        """Return the index of the first free slot, which the next plane takes."""
        return jnp.argmax(~self.active)

    def ascended(self, x: PyTree, z: PyTree, size: Array | float, damping: Array | float) -> Planes:
        """Return the planes after a step on the multipliers λ_l, where n_l is the squared length of plane l.

        The step is λ_l ← max(0, λ_l + size·[value_l/n_l − damping·λ_l]).
        """
        direction = self.values(x, z) / self.length - damping * self.multiplier
        return self._replace(multiplier=jnp.maximum(self.multiplier + size * direction, 0))

    def with_cut(self, cut: Cut, tolerance: Array | float, x: PyTree, z: PyTree, serial: Array) -> Planes:
        """Return the planes together with a new plane, made from the cut, whose multiplier is 0.

        The offset κ of the new plane is chosen so that the plane has the value h − ε at the point of the cut.

        Args:
            cut: the linearisation of h ≤ ε at (x, {y_i}, z).
            tolerance: ε.
            x, z: the server's part of this point.
            serial: the serial number of the new plane.
        """
        slot = self.free_slot()
        flat = optax.tree.vdot(cut.outer, x) + cut.inner + optax.tree.vdot(cut.consensus, z)
        return Planes(
            serial=self.serial.at[slot].set(serial),
            outer=put(self.outer, slot, cut.outer),
            consensus=put(self.consensus, slot, cut.consensus),
            start=self.start.at[slot].set(cut.inner),
            changes=self.changes.at[slot].set(0),
            inner=self.inner.at[slot].set(cut.inner),
            offset=self.offset.at[slot].set(cut.height - tolerance - flat),
            length=self.length.at[slot].set(4 * jnp.maximum(cut.height, tolerance)),
            multiplier=self.multiplier.at[slot].set(0),
        )

    def without_idle(self, newest: Array) -> Planes:
        """Drop all planes with multiplier 0, except the newest. Then, if no slot is free, drop the oldest plane."""
        kept = self.active & ((self.serial == self.serial[newest]) | (self.multiplier > 0))
        kept &= ~(jnp.all(kept) & (self.serial == jnp.min(self.serial)))
        return self._replace(
            serial=jnp.where(kept, self.serial, FREE),
            inner=jnp.where(kept, self.inner, 0),
            multiplier=jnp.where(kept, self.multiplier, 0),
        )


class Totals(NamedTuple):
    """Hold sums over the clients that have replied to at least one step."""

    weight: Array  # Σ p_i, the total weight of these clients
    theta: PyTree  # Σ p_i θ_i over these clients
    excluded: Array  # the largest total weight, in any step so far, of clients that have no part in some plane
    complete: Array  # whether all clients that made the last plane had replied to a step before they made this plane


class State(NamedTuple):
    """Hold the server's state."""

    x: PyTree
    y: PyTree  # z, the inner variable on which all clients should agree
    planes: Planes
    made: Array  # the number of planes made so far
    totals: Totals


class Point(NamedTuple):
    """Hold a client's variables in the estimate of the inner solution φ(x)."""

    y: PyTree  # y'_i, the client's inner variable in the estimate
    psi: PyTree  # ψ_i, the multiplier of y'_i = z'


class ClientState(NamedTuple):
    """Hold a client's state, which it keeps between rounds."""

    x: PyTree
    y: PyTree
    theta: PyTree  # θ_i, the multiplier of x_i = x
    replied: Array  # 1 after the first reply to a step
    serial: Array  # an array of shape (slots,): the serial number of the plane to which each row of b belongs
    b: PyTree  # b_il: a row for each slot
    path: Point  # a row for each step towards φ_i: the point where the step began
    end: Point  # the point after the last of these steps, where the next step begins; φ_i after all K steps
    adjoint: Point  # (1/p_i) ∂h/∂(y'_i, ψ_i) at the start of the step that was differentiated last


class LinearizedADMM(Part):
    """Estimate the inner solution, as a function φ of x, by K steps of all clients.

    Each step takes an exchange, and another exchange for its derivatives.

    Args:
        steps: K, the number of steps for each plane.
        lr: η, a client's step on y'_i. It should be below 1/(ℓ + μ), where ℓ is the largest eigenvalue of any
            ∇²yy g_i.
        penalty: μ, the weight of the penalty on y'_i − z'.
    """

    kind: ClassVar[str] = "admm"

    steps: int = positive_integer(default=10)
    lr: Number = positive(default=0.5, own=True)
    penalty: Number = positive(default=0.3, own=True)

    def step(
        self, client: Client, x: PyTree, z: PyTree, start: Point, k: Array | int, key: Array
    ) -> tuple[Array, Point]:
        """Take the k-th step from `start`, at x and z' = `z`; return (g_i at the start, the point after the step).

        The client first moves ψ_i, the multiplier of y'_i = z', and then y'_i. If k is 0, it moves only y'_i.
        """
        apart = optax.tree.sub(start.y, z)
        psi = move(start.psi, jnp.where(k == 0, 0.0, self.penalty), apart)
        loss, gradient = jax.value_and_grad(client.problem.inner, 1)(x, start.y, client.inner_batch(key))
        direction = move(optax.tree.add(gradient, psi), self.penalty, apart)
        return loss, Point(move(start.y, -self.lr, direction), psi)


class Lagrangian(Part):
    """Set how the Lagrangian enforces its two constraints: h ≤ ε, by planes, and x_i = x.

    Args:
        planes: the largest number of planes that are kept. If there would be more, the oldest is dropped.
        tolerance: ε, the bound on h, which is the weighted mean squared distance of the y_i from the estimated inner
            solution, plus the squared distance of z from it.
        plane_damping: c_λ > 0, how strongly the multipliers λ of planes are pulled towards 0. The undamped Lagrangian
            has c_λ = 0.
        consensus_damping: c_θ > 0, how strongly θ_i, the multiplier of x_i = x, is pulled towards 0. The undamped
            Lagrangian has c_θ = 0.
    """

    kind: ClassVar[str] = "lagrangian"

    planes: int = positive_integer(default=20)
    tolerance: Number = positive(default=1e-4)
    plane_damping: Number = positive(default=0.01)
    consensus_damping: Number = positive(default=1e-3)


class CuttingPlanes(Algorithm):
    """Base class of ADBO and SDBO, with their fields and rounds: make a plane, then take steps on the Lagrangian.

    Args:
        batch_size: the number of samples that a client draws for each loss, with replacement; None: all samples.
        iterations: T, the number of the server's steps between two planes.
        client_lr: a client's step sizes: `x` is η_x for x_i, `y` is η_y for y_i, and `v` is η_θ for θ_i, the multiplier
            of x_i = x. Each is a number or a schedule over rounds, and a single value serves all three.
        server_lr: the server's step sizes: `x` is γ_x for x, `y` is γ_z for z, the inner variable on which all clients
            should agree, and `v` is γ_λ for the multipliers of planes. Each is a number or a schedule over rounds, and
            a single value serves all three.
        lagrangian: the planes, and the damping of multipliers.
        estimate: the steps towards the inner solution, from which planes are made.
    """

    batch_size: int | None = positive_integer(default=32, optional=True)
    iterations: int = positive_integer(default=10)
    client_lr: StepSizes = step_sizes(default=XYV(x=0.1, y=0.1, v=0.1), own=True)
    server_lr: StepSizes = step_sizes(default=XYV(x=0.05, y=0.05, v=0.5))
    lagrangian: Lagrangian = Lagrangian()
    estimate: LinearizedADMM = LinearizedADMM()

    def init(self, x: PyTree, y: PyTree) -> State:
        totals = Totals(jnp.zeros(()), optax.tree.zeros_like(x), jnp.zeros(()), jnp.zeros((), bool))
        return State(x, y, Planes.none(x, y, self.lagrangian.planes), jnp.zeros((), jnp.int32), totals)

    def init_client(self, x: PyTree, y: PyTree) -> ClientState:
        none = Planes.none(x, y, self.lagrangian.planes)
        origin = Point(optax.tree.zeros_like(y), optax.tree.zeros_like(y))
        return ClientState(
            x=x,
            y=y,
            theta=optax.tree.zeros_like(x),
            replied=jnp.zeros(()),
            serial=none.serial,
            b=none.consensus,
            path=empty(origin, self.estimate.steps),
            end=origin,
            adjoint=origin,
        )

    def findings(self, state: State) -> Findings:
        """Return two columns: `planes`, the number of planes, and `multipliers`, the sum of their multipliers, Σ_l λ_l.

        If some clients have no part in a plane, also return a warning.
        """
        planes = state.planes
        columns = {"planes": int(jnp.sum(planes.active)), "multipliers": float(jnp.sum(planes.multiplier))}
        apart = (
            "some clients were not asked, or did not reply, when a plane was made. They have no part in this plane, "
            "so that the inner problem does not constrain them: this method needs all clients in every round"
        )
        return Findings(warning=apart if float(state.totals.excluded) else "", columns=columns)

    @phase
    def consensus_step(self, client: Client, at: tuple[PyTree, PyTree, Array], key: Array) -> Reply:
        """Take the k-th of the K steps on y'_i that end at φ_i, and reply with y'_i, in the structure of y.

        The message is (x, z', k). Here z' is z before the first step, and then the mean of the clients' y'_i. From the
        second step on, the client also takes a step on ψ_i, the multiplier of the constraint y'_i = z'.
        """
        x, z, k = at
        own: ClientState = client.state
        start = optax.tree.where(k == 0, Point(own.y, optax.tree.zeros_like(own.y)), own.end)
        loss, end = self.estimate.step(client, x, z, start, k, key)
        kept = own._replace(path=put(own.path, k, start), end=end)
        return Reply(end.y, kept, metrics={"inner_loss": loss}, gradients=1)

    @phase
    def consensus_adjoint(self, client: Client, at: tuple[PyTree, ...], key: Array) -> Reply:
        """Differentiate backwards through the k-th of the K steps on y'_i; the last step, k = K − 1, comes first.

        The message is (x, z', ∂h/∂z' after the step, k, the slot of the new plane, its serial number). The reply has
        this client's shares of ∂h/∂x and of ∂h/∂z' before the step, ‖y_i − φ_i‖², b_i·y_i, and a public number, which
        the server knows anyway: 1 if the client has replied to an earlier step on the Lagrangian, otherwise 0.
        """
        x, z, behind, k, slot, serial = at
        own: ClientState = client.state
        b = optax.tree.scale(2, optax.tree.sub(own.y, own.end.y))  # b_i = 2(y_i − φ_i) = −(1/p_i) ∂h/∂φ_i
        at_end = Point(optax.tree.scale(-1, b), optax.tree.zeros_like(own.y))
        after = optax.tree.where(k == self.estimate.steps - 1, at_end, own.adjoint)
        step = lambda x, z, start: self.estimate.step(client, x, z, start, k, key)[1]  # noqa: E731
        _, back = jax.vjp(step, x, z, row(own.path, k))
        to_x, to_z, before = back(after._replace(y=optax.tree.add(after.y, behind)))
        gap = optax.tree.vdot(b, b) / 4
        kept = own._replace(b=put(own.b, slot, b), serial=own.serial.at[slot].set(serial), adjoint=before)
        update = to_x, to_z, gap, optax.tree.vdot(b, own.y), Public(own.replied, FLAG)
        return Reply(update, kept, {"inner_gap": gap}, gradients=1, hvps=2)

    @phase
    def local_step(self, client: Client, at: tuple[PyTree, Array, Array], key: Array) -> Reply:
        """Take a step on θ_i, then a step on x_i and y_i together. Reply with θ_i and the products b_il·y_i.

        Planes in which this client has no part are left out. Two numbers of the reply are public: whether the client
        has replied before, and whether there are planes in which it has no part. Both follow from the messages that the
        client got, and not from its data.
        """
        x, multiplier, serial = at
        own: ClientState = client.state
        violated = move(optax.tree.sub(own.x, x), -self.lagrangian.consensus_damping, own.theta)
        theta = move(own.theta, self.client_lr.v, violated)
        batch = client.outer_batch(key)
        loss, (to_x, to_y) = jax.value_and_grad(client.problem.outer, (0, 1))(own.x, own.y, batch)
        shared = own.serial == serial
        force = combined(jnp.where(shared, multiplier, 0), own.b)
        new = own._replace(
            x=move(own.x, -self.client_lr.x, optax.tree.add(to_x, theta)),
            y=move(own.y, -self.client_lr.y, optax.tree.add(to_y, force)),
            theta=theta,
            replied=jnp.ones_like(own.replied),
        )
        values = theta, products(own.b, new.y), new.replied
        if self.asks.asynchronous:
            values = optax.tree.sub(values, (own.theta, products(own.b, own.y), own.replied))
        theta, inner, replied = values
        excluded = jnp.any(~shared & (serial != FREE)).astype(replied.dtype)
        of_replied = FLAG if self.asks.asynchronous else PublicRange(1, 1)  # in ADBO, 1 in the first reply, and then 0
        update = theta, jnp.where(shared, inner, 0), Public(replied, of_replied), Public(excluded, FLAG)
        return Reply(update, new, {"outer_loss": loss}, gradients=1)

    def with_new_plane(self, fed: Fed, state: State, key: Array) -> State:
        """Estimate φ, compute h and its gradient, add the new plane, and drop planes with multiplier 0."""
        x, z, planes, last = state.x, state.y, state.planes, self.estimate.steps - 1
        slot = planes.free_slot()

        def forward(fed: Fed, carry: tuple[PyTree, PyTree, Array], _: Array) -> tuple[PyTree, PyTree, Array]:
            path, z, k = carry
            end = fed.mean(self.consensus_step, (x, z, k), jax.random.fold_in(key, k))
            return put(path, k, z), end, k + 1

        path = empty(z, self.estimate.steps)
        path, end, _ = fed.repeat(last + 1, forward, (path, z, jnp.zeros((), jnp.int32)), key)
        apart = optax.tree.sub(z, end)

        def backward(fed: Fed, carry: tuple[Cut, PyTree, Array, Array], _: Array) -> tuple[Cut, PyTree, Array, Array]:
            cut, behind, k, _ = carry
            message = (x, row(path, k), behind, k, slot, state.made)
            to_x, before, gap, inner, asked = fed.mean(self.consensus_adjoint, message, jax.random.fold_in(key, k))
            height = gap + optax.tree.vdot(apart, apart)
            height, inner = (new.astype(old.dtype) for new, old in ((height, cut.height), (inner, cut.inner)))
            return Cut(height, optax.tree.add(cut.outer, to_x), cut.consensus, inner), before, k - 1, asked.public

        flat = Cut(jnp.zeros(()), optax.tree.zeros_like(x), optax.tree.scale(2, apart), jnp.zeros(()))
        start = (flat, optax.tree.scale(-2, apart), jnp.asarray(last, jnp.int32), jnp.zeros(()))
        cut, _, _, asked = fed.repeat(last + 1, backward, start, key)
        planes = planes.with_cut(cut, self.lagrangian.tolerance, x, z, state.made).without_idle(slot)
        totals = state.totals._replace(complete=asked > 1 - ROUNDING)
        return state._replace(planes=planes, made=state.made + 1, totals=totals)

    def step(self, fed: Fed, state: State, key: Array) -> State:
        """Let clients, and then the server, take a step on the Lagrangian; return the server's new state."""
        message = (state.x, state.planes.multiplier, state.planes.serial)
        totals, theta, planes = self.exchange(fed, state, message, key)
        lr, multiplier = self.server_lr, planes.multiplier
        x = move(state.x, -lr.x, optax.tree.sub(combined(multiplier, planes.outer), theta))
        z = move(state.y, -lr.y, combined(multiplier, planes.consensus))
        planes = planes.ascended(x, z, lr.v, self.lagrangian.plane_damping)
        return state._replace(x=x, y=z, planes=planes, totals=totals)

    @abstractmethod
    def exchange(self, fed: Fed, state: State, message: PyTree, key: Array) -> tuple[Totals, PyTree, Planes]:
        """Ask clients for a step on the Lagrangian.

        Returns:
            The new totals, the mean of the θ_i, and the planes with the new means of the products b_il·y_i.
        """

    def round(self, fed: Fed, state: State, key: Array) -> State:
        plane_key, step_key = jax.random.split(key)
        return fed.repeat(self.iterations, self.step, self.with_new_plane(fed, state, plane_key), step_key)


def empty(tree: PyTree, rows: int) -> PyTree:
    """Return a table of zeros with this number of rows, each with the shapes of `tree`."""
    return jax.tree.map(lambda leaf: jnp.zeros((rows, *jnp.shape(leaf)), leaf.dtype), tree)


def put(table: PyTree, row: Array, tree: PyTree) -> PyTree:
    """Return the table with one row replaced by `tree`."""
    return jax.tree.map(lambda rows, leaf: rows.at[row].set(leaf.astype(rows.dtype)), table, tree)


def row(table: PyTree, index: Array) -> PyTree:
    """Return the row of a table at an index."""
    return jax.tree.map(lambda rows: rows[index], table)


def products(table: PyTree, tree: PyTree) -> Array:
    """Return the inner product of each row with `tree`, as an array of shape (rows,)."""
    parts = jax.tree.map(lambda rows, leaf: jnp.tensordot(rows, leaf, leaf.ndim), table, tree)
    return jax.tree.reduce(jnp.add, parts)


def combined(weights: Array, table: PyTree) -> PyTree:
    """Return the sum of the rows of a table, row l multiplied by weights[l]."""
    return jax.tree.map(lambda rows: jnp.tensordot(weights.astype(rows.dtype), rows, 1), table)


FACTS = Facts(
    paper="Jiao et al. 2023, arXiv:2212.10048",
    good_for="clients of unequal speed; only new planes wait for the slowest client",
    exchanges="T + 2K",
    up="T + K like x, 2K like y",
    hvps="2K",
    cost="a gradient of f",
    client_state="x_i, y_i, θ_i, b_il for each plane, and K times y'_i and ψ_i",
    bias="y is kept near an estimate φ of the y that minimises g, and φ is inaccurate if K is small; the constraint "
    "that y is near φ is replaced by cutting planes, which are inaccurate if they are few",
)
"""The facts of ADBO. Those of SDBO differ in `needs` and `good_for`."""


def refuse_unsuitable(method: CuttingPlanes, problem: Problem, clients: Clients | RemoteClients) -> None:
    """Refuse clients' own numbers of local steps, and a minimax problem, which planes cannot bound.

    The loss of a minimax problem is strongly concave in y. So no y_i minimises f_i plus multiples of finitely many
    planes, which are linear in y_i, and each step of a client leads further away from the only point at rest.
    """
    refuse_local_steps(method.label, clients.own, STEPS)
    if isinstance(problem, Minimax):
        why = f"clients of {method.label} lower the outer loss in y, and in a minimax problem this loss is concave in y"
        allowed = f"a problem whose outer loss has a minimum in y: {why}"
        raise UnsupportedError(path="problem", got=type(problem).__name__, allowed=allowed)


class SDBO(CuttingPlanes):
    """Replace the inner problem by cutting planes, and wait for all clients in every step."""

    name = "sdbo"
    facts = replace(
        FACTS,
        needs="all clients in every round",
        good_for="comparison with ADBO, which computes the same if no client is late",
    )
    allows = Allows(
        late=No("it is meant for comparison with ADBO, which is the same method without waiting for all clients"),
        submodels=WHOLE,
        project_x=APART,
    )
    asks = Asks(everyone=True)

    def check(self, problem: Problem, clients: Clients | RemoteClients, x: PyTree, y: PyTree) -> None:
        refuse_unsuitable(self, problem, clients)

    def exchange(self, fed: Fed, state: State, message: PyTree, key: Array) -> tuple[Totals, PyTree, Planes]:
        theta, inner, weight, excluded = fed.mean(self.local_step, message, key)
        excluded = jnp.maximum(state.totals.excluded, excluded.public)
        totals = state.totals._replace(weight=weight.public, theta=theta, excluded=excluded)
        return totals, theta, state.planes._replace(inner=inner)


class ADBO(CuttingPlanes):
    """Replace the inner problem by cutting planes, and wait only for the first replies in every step.

    Args:
        wait_for: S, the number of replies for which a step waits. If S is below the number of clients, steps do not
            wait for stragglers. With 1, the server moves at every reply.
        max_staleness: τ. A step also waits for every client that was asked τ or more steps ago. None: no bound.
    """

    name = "adbo"
    facts = FACTS
    allows = Allows(
        late=No("it already continues after the first replies: set its field wait_for"),
        submodels=WHOLE,
        project_x=APART,
        noise=No("its clients send changes of θ_i and b_i·y_i, whose noise would add up; SDBO's clients send values"),
    )

    wait_for: int = positive_integer(default=1)
    max_staleness: int | None = positive_integer(default=None, optional=True)

    @property
    def asks(self) -> Asks:
        return Asks(first=self.wait_for, differences=True)

    def check(self, problem: Problem, clients: Clients | RemoteClients, x: PyTree, y: PyTree) -> None:
        refuse_unsuitable(self, problem, clients)
        few = f"at most {len(clients)}, the number of clients"
        require(self.wait_for <= len(clients), "ADBO.wait_for", self.wait_for, few)

    def exchange(self, fed: Fed, state: State, message: PyTree, key: Array) -> tuple[Totals, PyTree, Planes]:
        theta, changes, new, excluded = fed.sum_first(
            self.wait_for, self.local_step, message, key, max_staleness=self.max_staleness
        )
        last, planes = state.totals, state.planes
        totals = last._replace(
            weight=last.weight + new.public,
            theta=optax.tree.add(last.theta, theta),
            excluded=jnp.maximum(last.excluded, excluded.public),
        )
        share = 1 / totals.weight
        changes = planes.changes + changes
        # `changes` are sums over all available clients. Until all of these have replied, their weight is taken as 1.
        inner = planes.start + changes * jnp.where(totals.complete, share, 1)
        return totals, scaled(share, totals.theta), planes._replace(changes=changes, inner=inner)

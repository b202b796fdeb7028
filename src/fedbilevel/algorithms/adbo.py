"""ADBO and SDBO: the inner problem as a constraint, held by cutting planes, and consensus among clients.

Yang Jiao, Kai Yang, Tiancheng Wu, Dongjin Song, Chengtao Jian. "Asynchronous Distributed Bilevel Optimization".
ICLR 2023, arXiv:2212.10048. Algorithm 1.

Each client has its own x_i and y_i, the server x and z, and they are to agree:

    min Σ p_i f_i(x_i, y_i)    so that    x_i = x,    h(x, {y_i}, z) ≤ ε
    h(x, {y_i}, z) = Σ p_i ‖y_i − φ_i(x)‖² + ‖z − φ_z(x)‖²

where φ(x) are K steps towards min Σ p_i g_i(x, y'_i) under y'_i = z', from y'_i = y_i, z' = z, ψ_i = 0:

    y'_i ← y'_i − η [∇y g_i(x, y'_i) + ψ_i + μ (y'_i − z')]    z' ← Σ p_i y'_i    ψ_i ← ψ_i + μ (y'_i − z')

A round first makes a plane of h ≤ ε at the present point, whose φ(x) is then a function of x alone:

    a = ∂h/∂x,   b_i = 2(y_i − φ_i),   c = 2(z − φ_z),   κ = h − ε − a·x − Σ p_i b_i·y_i − c·z

and drops those with λ_l = 0. Then it steps on the Lagrangian, with planes a_l·x + Σ p_i b_il·y_i + c_l·z + κ_l ≤ 0
for h ≤ ε. The server sends (x, λ). Client i

    θ_i ← θ_i + η_θ (x_i − x − c_θ θ_i)
    (x_i, y_i) ← (x_i − η_x [∇x f_i(x_i, y_i) + θ_i],  y_i − η_y [∇y f_i(x_i, y_i) + Σ_l λ_l b_il])

and replies with θ_i and its b_il·y_i. The server, which waits for all clients (SDBO), or for the first S and for those
that were asked τ steps ago or earlier (ADBO),

    x ← x − γ_x [Σ_l λ_l a_l − Σ p_i θ_i]       z ← z − γ_z Σ_l λ_l c_l
    λ_l ← max(0, λ_l + γ_λ [(a_l·x + Σ p_i b_il·y_i + c_l·z + κ_l)/n_l − c_λ λ_l]),    n_l = 4 max(h, ε) at its making

Messages: the server sends x and λ (T times), x and z' (2K times); clients reply with θ_i and the b_il·y_i, then with
y'_i, or K times the shares of ∂h/∂x and ∂h/∂z'. A plane costs K gradients of g and K passes for both products with ∇²g.

Departures from the paper:
1. What the paper sums over clients are means with weights p_i. With equal ones that is the paper's Lagrangian over M,
   but for ‖z − φ_z‖², which weighs as much as the mean of the other terms here, and as much as each in the paper.
2. Steps on z' and ψ_i are those of ADMM, exact for z' and μ for ψ_i; the paper has a step size for each.
3. ∂h/∂x goes through all K steps exactly, backwards in K exchanges. The published code differentiates each step with
   the points of all steps held fixed (which agrees for K = 1), at points one step beyond those that its h and b are of.
4. No values of single clients reach the server. θ_i is kept and stepped by the client, when it is sent the next x, so
   that Σ p_i θ_i lacks the last step of clients that are still computing; without delays this is the paper's. ADBO's
   clients send changes of θ_i and b_il·y_i, and Σ p_i θ_i runs over those that have ever replied. A plane is made by
   all available clients. Their weight is known from the second plane on: before it, a client that is never available
   counts as a client that does not move; later it does not count.
5. The step on λ_l is that of a plane divided by its length, Σ p_i ‖b_il‖² + ‖c_l‖² = 4h; the paper divides by nothing,
   and what its γ_λ does to a plane then falls with h, by orders of magnitude in a run.
6. The number of planes is bounded; beyond the bound the oldest is dropped.
7. Planes are made to the end (so does the published code); the paper stops at some iteration.

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
from fedbilevel.core.errors import require
from fedbilevel.core.facts import Allows, Asks, Facts, Findings, No
from fedbilevel.core.fed import Fed, Public, Reply
from fedbilevel.core.own import refuse_local_steps
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import XYV, PyTree, move, scaled

FREE = -1  # no plane
STEPS = "its steps are `iterations`, each an exchange"
WHOLE = No("each client keeps an x, a y and planes of its own between rounds, of all units")
APART = No("each client moves an x of its own, and planes are made at points outside of the set, too")


class Cut(NamedTuple):
    """What a plane is made of: h ≤ ε linearised at (x, {y_i}, z)."""

    height: Array  # h at that point
    outer: PyTree  # a = ∂h/∂x
    consensus: PyTree  # c = ∂h/∂z
    inner: Array  # Σ p_i b_i·y_i


class Planes(NamedTuple):
    """A polytope a_l·x + Σ p_i b_il·y_i + c_l·z + κ_l ≤ 0, l = 1..L, that stands for the constraint h ≤ ε.

    A plane is h's linearisation at a point: below h, so that it cuts off no point where h ≤ ε. The server keeps a_l,
    c_l, κ_l and the multipliers λ_l; each client keeps its own b_il, and the server knows Σ p_i b_il·y_i alone.

    Planes have slots, one more than planes are kept, so that a new plane always finds a slot that was free since the
    last plane came: a late reply, computed with the earlier planes, then has no value for the new plane's slot. Tables
    have a leading axis of slots; what stands in a free slot counts for nothing.
    """

    serial: Array  # (slots,) a number of its own for each plane ever made, or FREE
    outer: PyTree  # a_l, like x
    consensus: PyTree  # c_l, like z
    start: Array  # (slots,) the mean of b_il·y_i when the plane was made
    changes: Array  # (slots,) Σ p_i b_il·(y_i − y_i then), of the replies so far; of ADBO, whose clients send changes
    inner: Array  # (slots,) the mean of b_il·y_i, as the server knows it
    offset: Array  # (slots,) κ_l
    length: Array  # (slots,) n_l, the squared length of (b_l, c_l), weighted; 1 in slots never used
    multiplier: Array  # (slots,) λ_l ≥ 0, and 0 in free slots

    @classmethod
    def none(cls, x: PyTree, y: PyTree, capacity: int) -> Planes:
        """Begin without planes, with room for so many."""
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
        """(slots,) which slots hold a plane."""
        return self.serial != FREE

    def values(self, x: PyTree, z: PyTree) -> Array:
        """Return the left-hand sides, (slots,); 0 in free slots."""
        total = products(self.outer, x) + self.inner + products(self.consensus, z) + self.offset
        return jnp.where(self.active, total, 0)

    def free_slot(self) -> Array:
        """Find the index of the first free slot, which the next plane takes."""
        return jnp.argmax(~self.active)

    def ascended(self, x: PyTree, z: PyTree, size: Array | float, damping: Array | float) -> Planes:
        """Take a step on all multipliers: λ_l ← max(0, λ_l + size·[value_l/n_l − damping·λ_l])."""
        direction = self.values(x, z) / self.length - damping * self.multiplier
        return self._replace(multiplier=jnp.maximum(self.multiplier + size * direction, 0))

    def with_cut(self, cut: Cut, tolerance: Array | float, x: PyTree, z: PyTree, serial: Array) -> Planes:
        """Put the cut into a free slot; κ makes its value at the point of the cut h − ε. Its multiplier is 0."""
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
        """Drop planes whose multiplier is 0, but for the newest; and if no slot is free then, the oldest."""
        kept = self.active & ((self.serial == self.serial[newest]) | (self.multiplier > 0))
        kept &= ~(jnp.all(kept) & (self.serial == jnp.min(self.serial)))
        return self._replace(
            serial=jnp.where(kept, self.serial, FREE),
            inner=jnp.where(kept, self.inner, 0),
            multiplier=jnp.where(kept, self.multiplier, 0),
        )


class Totals(NamedTuple):
    """Sums over the clients that have ever replied to a step."""

    weight: Array  # Σ p_i
    theta: PyTree  # Σ p_i θ_i
    excluded: Array  # the largest Σ p_i, in one step so far, of clients without a part in some plane
    complete: Array  # whether all clients that made the last plane had been asked for a step before


class State(NamedTuple):
    """The server's state."""

    x: PyTree
    y: PyTree  # z, the inner variable that all are to agree on
    planes: Planes
    made: Array  # planes ever made
    totals: Totals


class Point(NamedTuple):
    """A client's variables in the estimate of φ."""

    y: PyTree  # y'_i
    psi: PyTree  # ψ_i, the multiplier of y'_i = z'


class ClientState(NamedTuple):
    """A client's state, kept between rounds."""

    x: PyTree
    y: PyTree
    theta: PyTree  # θ_i, the multiplier of x_i = x
    replied: Array  # 1 after the first reply to a step
    serial: Array  # (slots,) which plane of the server's each row of b belongs to
    b: PyTree  # a row for each slot
    path: Point  # a row for each step towards φ_i: where it began
    end: Point  # of the last of these steps: where the next begins, and φ_i after all of them
    adjoint: Point  # on the way back, ∂h/∂(y'_i, ψ_i) over p_i where the last step that was gone back began


class LinearizedADMM(Part):
    """The steps towards φ(x), all clients' estimate of the inner solution: an exchange each, and another back.

    Args:
        steps: K, for each plane.
        lr: η; below 1/(ℓ + μ) for ℓ the largest eigenvalue of any ∇²yy g_i.
        penalty: μ, the penalty on y'_i − z'.
    """

    kind: ClassVar[str] = "admm"

    steps: int = positive_integer(default=10)
    lr: float = positive(default=0.5, own=True)
    penalty: float = positive(default=0.3, own=True)

    def step(
        self, client: Client, x: PyTree, z: PyTree, start: Point, k: Array | int, key: Array
    ) -> tuple[Array, Point]:
        """Take a step; return g_i where it begins, and its end. ψ_i moves first, but not in the first step."""
        apart = optax.tree.sub(start.y, z)
        psi = move(start.psi, jnp.where(k == 0, 0.0, self.penalty), apart)
        loss, gradient = jax.value_and_grad(client.problem.inner, 1)(x, start.y, client.inner_batch(key))
        direction = move(optax.tree.add(gradient, psi), self.penalty, apart)
        return loss, Point(move(start.y, -self.lr, direction), psi)


class Lagrangian(Part):
    """The constraints that all clients' steps are to keep to, h ≤ ε by planes and x_i = x, and their multipliers.

    Args:
        planes: the largest number of planes that are kept; beyond it the oldest goes.
        tolerance: ε, the bound on h, the weighted mean squared distance of the y_i from the inner solution.
        plane_damping: c_λ, how strongly λ is drawn to 0; 0 would be the plain Lagrangian.
        consensus_damping: c_θ, how strongly θ_i is drawn to 0; 0 would be the plain Lagrangian.
    """

    kind: ClassVar[str] = "lagrangian"

    planes: int = positive_integer(default=20)
    tolerance: float = positive(default=1e-4)
    plane_damping: float = positive(default=0.01)
    consensus_damping: float = positive(default=1e-3)


class CuttingPlanes(Algorithm):
    """Base of ADBO and SDBO: cutting planes for the inner problem, and steps on the Lagrangian.

    Args:
        batch_size: samples per draw for each loss, with replacement; None: all.
        iterations: T, the server's steps from one plane to the next.
        client_lr: a client's step sizes: η_x for x_i, η_y for y_i, and as v η_θ, of the multiplier θ_i of x_i = x;
            numbers or schedules over rounds; a single value serves all three.
        server_lr: the server's step sizes: γ_x for x, as y γ_z, of the inner variable z that all are to agree on, and
            as v γ_λ, of the planes' multipliers; numbers or schedules over rounds; a single value serves all three.
        lagrangian: the planes, and how multipliers are damped.
        estimate: the steps towards the inner solution of which planes are made.
    """

    batch_size: int | None = positive_integer(default=32, optional=True)
    iterations: int = positive_integer(default=10)
    client_lr: XYV = step_sizes(default=XYV(x=0.1, y=0.1, v=0.1), own=True)
    server_lr: XYV = step_sizes(default=XYV(x=0.05, y=0.05, v=0.5))
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
        """Count the planes, add up Σ_l λ_l; warn of clients without a part in some plane."""
        planes = state.planes
        columns = {"planes": int(jnp.sum(planes.active)), "multipliers": float(jnp.sum(planes.multiplier))}
        apart = (
            "clients that were not asked, or did not reply, when a plane was made have no part in it, and the inner "
            "problem does not hold for them: this method needs all clients in every round"
        )
        return Findings(warning=apart if float(state.totals.excluded) else "", columns=columns)

    @phase
    def consensus_step(self, client: Client, at: tuple[PyTree, PyTree, Array], key: Array) -> Reply:
        """Take the k-th step towards φ_i, given x and z'; reply with y'_i."""
        x, z, k = at
        own: ClientState = client.state
        start = chosen(k == 0, Point(own.y, optax.tree.zeros_like(own.y)), own.end)
        loss, end = self.estimate.step(client, x, z, start, k, key)
        kept = own._replace(path=put(own.path, k, start), end=end)
        return Reply(end.y, kept, metrics={"inner_loss": loss}, gradients=1)

    @phase
    def consensus_adjoint(self, client: Client, at: tuple[PyTree, ...], key: Array) -> Reply:
        """Go back through the k-th step, `behind` being ∂h/∂z' after it; from k = K − 1, at φ_i, to 0.

        The reply has this client's share of ∂h/∂x and of ∂h/∂z' before that step, ‖y_i − φ_i‖² and b_i·y_i, and 1 if
        the client was ever asked for a step, which is no secret to the server.
        """
        x, z, behind, k, slot, serial = at
        own: ClientState = client.state
        b = optax.tree.scale(2, optax.tree.sub(own.y, own.end.y))  # b_i = 2(y_i − φ_i) = −∂h/∂φ_i over p_i
        at_end = Point(optax.tree.scale(-1, b), optax.tree.zeros_like(own.y))
        after = chosen(k == self.estimate.steps - 1, at_end, own.adjoint)
        step = lambda x, z, start: self.estimate.step(client, x, z, start, k, key)[1]  # noqa: E731
        _, back = jax.vjp(step, x, z, row(own.path, k))
        to_x, to_z, before = back(after._replace(y=optax.tree.add(after.y, behind)))
        gap = optax.tree.vdot(b, b) / 4
        kept = own._replace(b=put(own.b, slot, b), serial=own.serial.at[slot].set(serial), adjoint=before)
        update = to_x, to_z, gap, optax.tree.vdot(b, own.y), Public(own.replied)
        return Reply(update, kept, {"inner_gap": gap}, gradients=1, hvps=2)

    @phase
    def local_step(self, client: Client, at: tuple[PyTree, Array, Array], key: Array) -> Reply:
        """Take a step on θ_i, then on x_i and y_i at once. Planes that this client has no part in are left out.

        Whether there are such planes, and whether the client has replied before, follows from what it was asked, not
        from its data.
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
        update = theta, jnp.where(shared, inner, 0), Public(replied), Public(excluded)
        return Reply(update, new, {"outer_loss": loss}, gradients=1)

    def with_new_plane(self, fed: Fed, state: State, key: Array) -> State:
        """Estimate φ, find h and its gradient, add the plane and drop those whose multiplier is 0."""
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
        """Take a step of all clients and of the server on the Lagrangian."""
        message = (state.x, state.planes.multiplier, state.planes.serial)
        totals, theta, planes = self.exchange(fed, state, message, key)
        lr, multiplier = self.server_lr, planes.multiplier
        x = move(state.x, -lr.x, optax.tree.sub(combined(multiplier, planes.outer), theta))
        z = move(state.y, -lr.y, combined(multiplier, planes.consensus))
        planes = planes.ascended(x, z, lr.v, self.lagrangian.plane_damping)
        return state._replace(x=x, y=z, planes=planes, totals=totals)

    @abstractmethod
    def exchange(self, fed: Fed, state: State, message: PyTree, key: Array) -> tuple[Totals, PyTree, Planes]:
        """Ask for a step; return the totals after it, the mean of θ_i, and the planes with the means of b_il·y_i."""

    def round(self, fed: Fed, state: State, key: Array) -> State:
        plane_key, step_key = jax.random.split(key)
        return fed.repeat(self.iterations, self.step, self.with_new_plane(fed, state, plane_key), step_key)


def chosen(condition: Array, yes: PyTree, no: PyTree) -> PyTree:
    """Return `yes` where the condition holds, else `no`."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def empty(tree: PyTree, rows: int) -> PyTree:
    """Make a table of zeros, whose rows are like `tree`."""
    return jax.tree.map(lambda leaf: jnp.zeros((rows, *jnp.shape(leaf)), leaf.dtype), tree)


def put(table: PyTree, row: Array, tree: PyTree) -> PyTree:
    """Return the table with that row replaced."""
    return jax.tree.map(lambda rows, leaf: rows.at[row].set(leaf.astype(rows.dtype)), table, tree)


def row(table: PyTree, index: Array) -> PyTree:
    """Return a row of a table."""
    return jax.tree.map(lambda rows: rows[index], table)


def products(table: PyTree, tree: PyTree) -> Array:
    """Return the inner product of each row with `tree`, (rows,)."""
    parts = jax.tree.map(lambda rows, leaf: jnp.tensordot(rows, leaf, leaf.ndim), table, tree)
    return jax.tree.reduce(jnp.add, parts)


def combined(weights: Array, table: PyTree) -> PyTree:
    """Return Σ_l weights_l · row l."""
    return jax.tree.map(lambda rows: jnp.tensordot(weights.astype(rows.dtype), rows, 1), table)


FACTS = Facts(
    paper="Jiao et al. 2023, arXiv:2212.10048",
    good_for="clients of unequal speed; only the making of a plane waits for the slowest",
    exchanges="T + 2K",
    up="T + K like x, 2K like y",
    hvps="2K",
    cost="a gradient of f",
    client_state="x_i, y_i, θ_i, b_il for each plane, and K times y'_i and ψ_i",
    bias="φ in place of y*, unless K is large; what few planes leave open",
)
"""ADBO's, and SDBO's but for what the latter needs and is good for."""


class SDBO(CuttingPlanes):
    """Cutting planes for the inner problem, in steps that wait for all clients."""

    name = "sdbo"
    facts = replace(
        FACTS,
        needs="all clients in every round",
        good_for="comparison with ADBO, which computes the same where no client is late",
    )
    allows = Allows(
        late=No("it is there to compare ADBO with, which is the same without waiting for everyone"),
        submodels=WHOLE,
        project_x=APART,
    )
    asks = Asks(everyone=True)

    def check(self, problem: Problem, clients: Clients | RemoteClients, x: PyTree, y: PyTree) -> None:
        refuse_local_steps(self.label, clients.own, STEPS)

    def exchange(self, fed: Fed, state: State, message: PyTree, key: Array) -> tuple[Totals, PyTree, Planes]:
        theta, inner, weight, excluded = fed.mean(self.local_step, message, key)
        excluded = jnp.maximum(state.totals.excluded, excluded.public)
        totals = state.totals._replace(weight=weight.public, theta=theta, excluded=excluded)
        return totals, theta, state.planes._replace(inner=inner)


class ADBO(CuttingPlanes):
    """Cutting planes for the inner problem, in steps that wait for the first replies.

    Args:
        wait_for: S, how many replies a step waits for, and not for stragglers; with 1 the server moves at every reply.
        max_staleness: τ; a step also waits for every client that was asked so many steps ago, or more; None: no bound.
    """

    name = "adbo"
    facts = FACTS
    allows = Allows(
        late=No("it goes on with the first replies by itself: set its own field wait_for"),
        submodels=WHOLE,
        project_x=APART,
        noise=No("its clients send how θ_i and b_i·y_i have changed, and noise would add up; SDBO's send them whole"),
    )

    wait_for: int = positive_integer(default=1)
    max_staleness: int | None = positive_integer(default=None, optional=True)

    @property
    def asks(self) -> Asks:
        return Asks(first=self.wait_for)

    def check(self, problem: Problem, clients: Clients | RemoteClients, x: PyTree, y: PyTree) -> None:
        refuse_local_steps(self.label, clients.own, STEPS)
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
        # A plane is of all available clients. Their weight is known when all have replied to a step; before, it is 1.
        inner = planes.start + changes * jnp.where(totals.complete, share, 1)
        return totals, scaled(share, totals.theta), planes._replace(changes=changes, inner=inner)

"""FedNest, FedNest-SGD and LFedNest: alternating inner and outer optimization with federated variance reduction.

Davoud Ataee Tarzanagh, Mingchen Li, Christos Thrampoulidis, Samet Oymak. "FedNest: Federated Bilevel, Minimax, and
Compositional Optimization". ICML 2022, arXiv:2205.02215. Algorithms 1-4.

An epoch is T times FedInn, then FedOut.

    FedInn   q = mean_i ∇y g_i(x, y; ζ_i)                                                              one exchange
             y_{i,ν+1} = y_{i,ν} − (β/τ_i) [∇y g_i(x, y_{i,ν}; ζ_ν) − ∇y g_i(x, y; ζ_ν) + q]
             y ← mean_i y_{i,τ_i}                                                                      one exchange
    FedIHGP  v = (N/ℓ) (I − H/ℓ)^N' ∇y F, N' uniform on {0..N−1}, every factor from fresh clients      1 + N'
    FedOut   h = mean_i [∇x f_i(x, y; ξ_i) − ∇²xy g_i(x, y; ζ_i) v]                                    one exchange
             x_{i,ν+1} = x_{i,ν} − (α/τ) [∇x f_i(x_{i,ν}, y; ξ_ν) − ∇x f_i(x, y; ξ_ν) + h]
             x ← mean_i x_{i,τ}                                                                        one exchange

FedNest-SGD takes FedAvg's local steps on y, without q and the correction. LFedNest does so too, and its clients step
on x along their own hypergradients, with their own Hessians, which saves all exchanges of FedIHGP and is biased where
clients differ. On a `Minimax` problem ∇y F = 0 at y*(x) and FedIHGP is left out; on a `Compositional` one H = I, so
that v = ∇y F, and T = 1 with β = 1 and τ = 1 gives y = mean_i r_i(x).

Departures from the paper:
1. Server and clients exchange changes, Σ p̃_i (y_{i,τ} − y) with p̃_i = (M/P) p_i, which for equal weights or full
   participation is the paper's mean of y_{i,τ}, and is unbiased for unequal weights too. Of corrected steps the
   common part −βq (or −αh) is taken by the server, once, and only what clients drift beyond it is averaged,
   Σ p_i d_i / Σ p_i: q and the weights of one cohort are not independent, and their product would be biased.
2. The first corrected step is along q (or h) itself, its correction being zero whatever is drawn.
3. The default is the expectation of FedIHGP's v, the series v = (1/ℓ) Σ_{n<N} (I − H/ℓ)^n ∇y F: N exchanges, and none
   of the variance, which grows with N. Neumann(sampling="random") is the paper's; v may also be found by conjugate
   gradient, or locally (LocalImplicit).
4. `merged` makes the exchanges fewer, and with full batches the numbers no others: see parts/hypergradients.py.
   The drift of one step is zero, and its exchange is left out: of x for τ = 1, of y for inner.local_steps = 1 where
   clients bring no numbers of their own. Whether loops go on is decided without asking clients: those that did
   not reply may want to, and noise on replies would decide at random. Each exchange that is left depends on the mean
   before it: q on y, the drift on q, ∇y F on y, h on v, x's drift on h.

Checked in tests/algorithms/test_fednest.py (closed forms, exchanges) and tests/engines/test_agreement.py.
"""

from abc import abstractmethod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedbilevel.algorithms.parts.hypergradients import Implicit, LocalImplicit
from fedbilevel.algorithms.parts.inner import SVRG, LocalSGD
from fedbilevel.algorithms.parts.linear_solvers import SolveInfo
from fedbilevel.algorithms.parts.local_steps import corrected_drift
from fedbilevel.core.algorithm import Algorithm, phase
from fedbilevel.core.client import Client, Clients
from fedbilevel.core.config import positive, positive_integer, static
from fedbilevel.core.errors import require
from fedbilevel.core.fed import Fed, Reply, Withheld
from fedbilevel.core.problem import Problem
from fedbilevel.core.submodel import NUMBER
from fedbilevel.core.tree import PyTree, move, scaled


class State(NamedTuple):
    """The server's state."""

    x: PyTree
    y: PyTree
    info: SolveInfo  # of the last v; the first negative curvature stays noted
    v: PyTree = None  # what the hypergradient keeps: a v kept by the server (AFBO)


class Nested(Algorithm):
    """Base of methods that step on y, then on x by a hypergradient, whose checks and warnings are theirs.

    Args:
        batch_size: samples per draw for each loss, with replacement; None takes all samples.
        outer_lr: α, the server's step on x.
    """

    trains_submodels = True

    hypergradient: Any
    batch_size: int | None = positive_integer(default=32, optional=True)
    outer_lr: float = positive(default=0.1)

    @property
    @abstractmethod
    def merges(self) -> bool:
        """Whether an estimate of the hypergradient merges exchanges."""

    @property
    def extra_cohorts(self) -> int:
        return int(self.hypergradient.extra_cohorts)

    def check_problem(self, problem: Problem, population: int, x: PyTree) -> None:
        self.hypergradient.check_problem(population)

    def check_start(self, problem: Problem, clients: Clients, x: PyTree, y: PyTree) -> None:
        self.hypergradient.check_start(problem, clients, x, y, self.batch_size)

    def init(self, x: PyTree, y: PyTree) -> State:
        return State(x, y, SolveInfo.unknown(), self.hypergradient.start(y))

    def hypergradient_at(self, fed: Fed, x: PyTree, y: PyTree, key: Array) -> PyTree:
        return self.hypergradient.estimate(fed, x, y, key, self.merges).h

    def noise_objection(self) -> str:
        return str(self.hypergradient.noise_objection())

    def submodels_objection(self) -> str:
        return str(self.hypergradient.submodels_objection())

    def complaint(self, state: State) -> str:
        return str(self.hypergradient.complaint(state.info))

    def warning(self, state: State) -> str:
        return str(self.hypergradient.warning(state.info))

    def moved(self, state: State, change: PyTree, y: PyTree, info: SolveInfo) -> State:
        """The next state. Where negative curvature ends the run, x stays from then on."""
        before = state.info.negative_curvature
        first = jnp.where(before >= 0, before, info.negative_curvature)
        stays = (first >= 0) & self.hypergradient.stops
        x = jax.tree.map(lambda old, d: jnp.where(stays, old, old + d), state.x, change)
        return state._replace(x=x, y=y, info=info._replace(negative_curvature=first))


class OneStep(Nested):
    """FedAvg on y, then one step on x.

    Args:
        inner: the rounds on y: FedAvg's local steps.
    """

    inner: LocalSGD = LocalSGD()

    @property
    def asynchronous_phases(self) -> tuple[str, ...]:
        return () if self.asynchronous_objection() else tuple(sorted(self.phases))

    def asynchronous_objection(self) -> str:
        return str(self.hypergradient.asynchronous_objection())

    def round(self, fed: Fed, state: State, key: Array) -> State:
        inner_key, outer_key = jax.random.split(key)
        y = self.inner.descend(fed, state.x, state.y, inner_key)
        h, info = self.hypergradient.estimate(fed, state.x, y, outer_key, self.merges)
        return self.moved(state, scaled(-self.outer_lr, h), y, info)


class Epochs(Nested):
    """FedNest and FedNest-SGD: rounds on y, h from the federation, then corrected local steps on x (FedOut).

    Args:
        inner: the rounds on y.
        hypergradient: how h is found: by products that are means over all clients, or by each client alone.
        outer_lr: α; a client's step on x is α/τ.
        outer_steps: τ, a client's local steps on x in a round; more than one is an exchange more where `merged`.
        merged: as few exchanges as give the same numbers, with full batches (drawn samples: the same expectation): two
            quantities at the same point come in one reply, and exchanges whose result is known to be zero are left out.
            Refused where nothing can be left out.
    """

    inner: Any
    outer_steps: int = positive_integer(default=1)
    merged: bool = static(default=False)

    def validate(self) -> None:
        able = self.hypergradient.mergeable or self.inner.leaves_out() or self.outer_steps == 1
        allowed = "False: with the other fields as they are it leaves out no exchange"
        require(able or not self.merged, f"{self.label}.merged", True, allowed)

    @property
    def merges(self) -> bool:
        return self.merged

    @property
    def asynchronous_phases(self) -> tuple[str, ...]:
        return () if self.asynchronous_objection() else tuple(sorted(self.phases))

    def asynchronous_objection(self) -> str:
        left_out = "with merged = True not all of its phases are asked" if self.merged else ""
        return self.hypergradient.asynchronous_objection() or left_out

    def round(self, fed: Fed, state: State, key: Array) -> State:
        inner_key, outer_key = jax.random.split(key)
        y = self.inner.descend(fed, state.x, state.y, inner_key, merged=self.merged)
        estimate_key, descent_key = jax.random.split(outer_key)
        h, info = self.hypergradient.estimate(fed, state.x, y, estimate_key, self.merged)
        drift = optax.tree.zeros_like(state.x)
        if not (self.merged and self.outer_steps == 1):
            drift = fed.mean(self.outer_descent, (state.x, y, h), descent_key)
        return self.moved(state, move(drift, -self.outer_lr, h), y, info)

    @phase(takes=("x", "y", "x"), gives="x")
    def outer_descent(self, client: Client, at: tuple[PyTree, PyTree, PyTree], key: Array) -> Reply:
        """The change of x by τ corrected steps, less −αh, which all clients have in common."""
        x, y, h = at

        def gradient(x: PyTree, key: Array) -> PyTree:
            return jax.grad(client.problem.outer, 0)(x, y, client.outer_batch(key))

        drift = corrected_drift(gradient, x, h, self.outer_steps, self.outer_lr, key)
        return Reply(drift, gradients=2 * (self.outer_steps - 1))


class FedNest(Epochs):
    """Alternating federated SVRG on y and x, with a global hypergradient.

    Exchanges per round: 2T + N + 2; merged: 2T + N + 1, by conjugate gradient with K products 2T + K + 1, all T fewer
    with inner.local_steps = 1 for everyone.
    Needs: a bilevel, minimax or compositional problem; g strongly convex in y.
    Good for: clients that differ much and an exact hypergradient, where exchanges are cheap.
    Vectors up per client: 2 like x, 2T + N like y. Hvps per client: N. Bias: truncation (1 − sμ)^N; none with `CG`.
    Cost per local step: two gradients of g (on x: of f); a product with ∇²g per exchange of FedIHGP.
    Client state: none.
    """

    name = "fednest"

    inner: SVRG = SVRG()
    hypergradient: Implicit | LocalImplicit = Implicit()


class FedNestSGD(Epochs):
    """FedNest with FedAvg's plain local steps on y.

    Exchanges per round: T + N + 2; merged: T + N + 1, by conjugate gradient with K products T + K + 1.
    Needs: a bilevel, minimax or compositional problem; g strongly convex in y.
    Good for: clients that are alike, with a global hypergradient.
    Vectors up per client: 2 like x, T + N like y. Hvps per client: N. Bias: truncation; drift of y where τ > 1.
    Cost per local step: a gradient of g (on x: two of f); a product with ∇²g per exchange of FedIHGP.
    Client state: none.
    """

    name = "fednest-sgd"

    inner: LocalSGD = LocalSGD()
    hypergradient: Implicit | LocalImplicit = Implicit()


class LFedNest(Nested):
    """FedNest made light: FedAvg's steps on y, local hypergradients on x.

    Args:
        inner: the rounds on y: FedAvg's local steps.
        hypergradient: how each client finds its own.
        outer_lr: α; a client's step on x is α/τ.
        outer_steps: τ, a client's local steps on x in a round.

    Exchanges per round: T + 1.
    Needs: a bilevel, minimax or compositional problem; g_i strongly convex in y for every client.
    Good for: clients that are alike, where exchanges are expensive; biased where clients differ.
    Vectors up per client: 1 like x, T like y. Hvps per client: N for each of its steps on x.
    Bias: clients' own hypergradients, which no step size mends; drift of y.
    Cost per local step: a gradient of g; on x: one of f and the products with the client's own ∇²g.
    Client state: none.
    """

    name = "lfednest"

    inner: LocalSGD = LocalSGD()
    hypergradient: LocalImplicit = LocalImplicit()
    outer_steps: int = positive_integer(default=1)

    asynchronous_phases = ("inner.descent", "outer_descent")

    @property
    def merges(self) -> bool:
        return False

    @phase(takes=("x", "y"), gives=("x", Withheld((NUMBER, NUMBER))))
    def outer_descent(self, client: Client, at: tuple[PyTree, PyTree], key: Array) -> Reply:
        """The change of x by τ steps, each along the client's own hypergradient at its starting point."""
        x, y = at

        def step(k: Array, carry: tuple[PyTree, Array, Withheld, Array, Array]) -> tuple[Any, ...]:
            change, loss, info, gradients, hvps = carry
            own = self.hypergradient.own(client, optax.tree.add(x, change), y, jax.random.fold_in(key, k))
            change = move(change, -self.outer_lr / self.outer_steps, own.estimate.h)
            info = jax.tree.map(jnp.maximum, info, own.estimate.info.to_average())
            return change, loss + own.loss, info, gradients + own.gradients, hvps + own.hvps

        first = jax.eval_shape(lambda key: self.hypergradient.own(client, x, y, key), key)
        none = jnp.asarray(0)
        unmet = optax.tree.zeros_like(SolveInfo.unknown().to_average())
        start = (optax.tree.zeros_like(x), jnp.zeros((), first.loss.dtype), unmet, none, none)
        change, loss, info, gradients, hvps = jax.lax.fori_loop(0, self.outer_steps, step, start)
        metrics = {"outer_loss": loss / self.outer_steps}
        reply = Reply((change, info), metrics=metrics, gradients=gradients, hvps=hvps)
        return self.hypergradient.second_order.counted(reply)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        inner_key, outer_key = jax.random.split(key)
        y = self.inner.descend(fed, state.x, state.y, inner_key)
        change, means = fed.mean(self.outer_descent, (state.x, y), outer_key, unbiased=True)
        return self.moved(state, change, y, SolveInfo.of_clients(means))

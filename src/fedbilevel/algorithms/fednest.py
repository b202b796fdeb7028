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
   of the variance, which grows with N. `inverse` = "random" is the paper's; v may also be found by conjugate gradient,
   or locally (`hypergradient`).
4. `merged` makes the exchanges fewer, and with full batches the numbers no others: see hypergradient.py for v and h.
   The drift of one step is zero and not asked for: of x for τ = 1, of y for `local_steps` = 1 where the population does
   not give clients numbers of their own. No reply is asked whether anyone goes on: those who did not answer may, and
   noise on replies would answer at random. What is left depends on what was just averaged: q on y, the drift on q,
   ∇y F on y, h on v, x's drift on h.

Checked in tests/algorithms/test_fednest.py (closed forms, exchanges) and tests/engines/test_agreement.py.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from fedbilevel.algorithms.parts.hypergradient import Hypergradient, Quality
from fedbilevel.algorithms.parts.inner_descent import InnerDescent
from fedbilevel.algorithms.parts.local_descent import corrected_drift
from fedbilevel.core.algorithm import phase
from fedbilevel.core.answers import Withheld
from fedbilevel.core.client import Client
from fedbilevel.core.config import positive, static
from fedbilevel.core.errors import require, require_count
from fedbilevel.core.fed import Fed, Reply
from fedbilevel.core.submodel import NUMBER
from fedbilevel.core.tree import PyTree, move, scaled


class State(NamedTuple):
    """What the server keeps."""

    x: PyTree
    y: PyTree
    quality: Quality  # of the last v; the first negative curvature stays noted


class Alternating(InnerDescent, Hypergradient):
    """What FedNest's family and FedMBO share: steps on y, then on x by a hypergradient, and a guard for it.

    Args: those of `InnerDescent`, where `inner_rounds` is T, those of `Hypergradient`, and
        outer_lr: α.
        inner_server_lr: the server takes so many times the mean change of y: 1 in the papers, up to M where each client
            has inner unknowns of its own, which all others leave as they are. Of submodels the mean is over the clients
            who hold an entry, and the fewest of these are the bound.
    """

    outer_lr: float = positive(default=0.1)
    inner_server_lr: float = positive(default=1.0)

    def init(self, x: PyTree, y: PyTree) -> State:
        return State(x, y, Quality.unknown())

    def inner_rounds_of_fedavg(self, fed: Fed, state: State, key: Array) -> PyTree:
        """y after `inner_rounds` of FedAvg."""
        return self.plain_inner(fed, state.x, state.y, key, self.inner_rounds, self.inner_server_lr)

    def noise_objection(self) -> str:
        if self.hypergradient == "local" or self.inverse != "cg":
            return ""
        return (
            "conjugate gradient by noised products meets negative curvature that is none; inverse = 'series' bears it"
        )

    def complaint(self, state: State) -> str:
        return self._negative_curvature(state) if self.inverse == "cg" else ""

    def warning(self, state: State) -> str:
        if self.inverse != "cg":
            return self._negative_curvature(state)
        residual = float(state.quality.residual)
        if residual <= 1.01 * float(np.max(self.cg_tolerance)):
            return ""
        return (
            f"conjugate gradient ended at a relative residual of {residual:.2g}, above cg_tolerance: cg_iterations = \
{self.cg_iterations} are too few"
        )

    def _negative_curvature(self, state: State) -> str:
        met = int(state.quality.negative_curvature)
        if met < 0:
            return ""
        unit = "iteration" if self.inverse == "cg" else "product"
        shared = self.hypergradient == "global"
        where = f"{unit} {met}" if shared else "a client's own system"
        doubt = "; where clients noise their replies it may be of the noise's making" if shared else ""
        return (
            f"negative curvature at {where}: the inner Hessian is not positive definite there, and v is not defined; \
the hypergradient may point anywhere (a ridge on the inner loss in y mends that){doubt}"
        )

    def moved(self, state: State, change: PyTree, y: PyTree, quality: Quality) -> State:
        """The next state. After conjugate gradient has met negative curvature x stays, until the run is stopped."""
        before = state.quality.negative_curvature
        first = jnp.where(before >= 0, before, quality.negative_curvature)
        stays = (first >= 0) & (self.inverse == "cg")
        x = jax.tree.map(lambda old, d: jnp.where(stays, old, old + d), state.x, change)
        return State(x, y, quality._replace(negative_curvature=first))


class Nested(Alternating):
    """What the three share.

    Args: those of `Alternating`, where a client's step on x is α/τ, and
        outer_steps: τ on x; more than one is an exchange more where `merged`.
    """

    outer_steps: int = static(default=1)

    def validate(self) -> None:
        super().validate()
        require_count(f"{self.label}.outer_steps", self.outer_steps)


class GlobalOuter(Nested):
    """FedOut: h from the whole federation, then corrected local steps on x."""

    @phase
    def outer_descent(self, client: Client, at: tuple[PyTree, PyTree, PyTree], key: Array) -> Reply:
        """τ corrected steps on x, less what all clients have in common."""
        x, y, h = at

        def gradient(x: PyTree, key: Array) -> PyTree:
            return jax.grad(client.problem.outer, 0)(x, y, client.outer_batch(key, self.batch_size))

        drift = corrected_drift(gradient, x, h, self.outer_steps, self.outer_lr, key)
        return Reply(drift, gradients=2 * (self.outer_steps - 1))

    @property
    def mergeable(self) -> bool:
        return super().mergeable or self.outer_steps == 1

    def fed_out(self, fed: Fed, state: State, y: PyTree, key: Array) -> State:
        estimate_key, descent_key = jax.random.split(key)
        estimate = self.estimate(fed, state.x, y, estimate_key)
        if self.merged and self.outer_steps == 1:
            drift = optax.tree.zeros_like(state.x)
        else:
            drift = fed.mean(self.outer_descent, (state.x, y, estimate.h), descent_key)
        return self.moved(state, move(drift, -self.outer_lr, estimate.h), y, estimate.quality)


class FedNest(GlobalOuter):
    """Alternating federated SVRG on y and x, with a global hypergradient. Fields: see `Nested`.

    Exchanges per round: 2T + N + 2; merged: 2T + N + 1, by conjugate gradient with K products 2T + K + 1, all T fewer
    with `local_steps` = 1 for everyone.
    Needs: a bilevel, minimax or compositional problem; g strongly convex in y.
    Good for: clients that differ much and an exact hypergradient, where exchanges are cheap.
    Cost per local step: two gradients of g (on x: of f); a product with ∇²g per exchange of FedIHGP.
    Client state: none.
    """

    name = "fednest"

    def round(self, fed: Fed, state: State, key: Array) -> State:
        inner_key, outer_key = jax.random.split(key)
        y = fed.repeat(self.inner_rounds, lambda fed, y, key: self.fed_inn(fed, state.x, y, key), state.y, inner_key)
        return self.fed_out(fed, state, y, outer_key)

    @property
    def mergeable(self) -> bool:
        return super().mergeable or self.local_steps == 1

    def fed_inn(self, fed: Fed, x: PyTree, y: PyTree, key: Array) -> PyTree:
        first, second = jax.random.split(key)
        q = fed.mean(self.inner_gradient, (x, y), first, unbiased=True)
        change = scaled(-self.inner_lr, q)
        if not (
            self.merged and self.local_steps == 1 and not fed.has_client_steps
        ):  # where the one step is along q, for everyone
            change = optax.tree.add(change, fed.mean(self.corrected_inner_descent, (x, y, q), second))
        return move(y, self.inner_server_lr, change)

    @phase
    def inner_gradient(self, client: Client, at: tuple[PyTree, PyTree], key: Array) -> Reply:
        """∇y g_i, to be averaged into q."""
        batch = client.inner_batch(key, self.batch_size)
        loss, gradient = jax.value_and_grad(client.problem.inner, 1)(*at, batch)
        return Reply(gradient, metrics={"inner_loss": loss}, gradients=1)

    @phase
    def corrected_inner_descent(self, client: Client, at: tuple[PyTree, PyTree, PyTree], key: Array) -> Reply:
        """τ_i corrected steps on y, less what all clients have in common."""
        x, y, q = at
        tau = client.local_steps(self.local_steps)
        drift = corrected_drift(self.inner_gradient_at(client, x, y), y, q, tau, self.inner_lr, key)
        return Reply(drift, gradients=2 * (tau - 1))


class FedNestSGD(GlobalOuter):
    """FedNest with FedAvg's plain local steps on y. Fields: see `Nested`.

    Exchanges per round: T + N + 2; merged: T + N + 1, by conjugate gradient with K products T + K + 1.
    Needs: a bilevel, minimax or compositional problem; g strongly convex in y.
    Good for: clients that are alike, with a global hypergradient.
    Cost per local step: a gradient of g (on x: two of f); a product with ∇²g per exchange of FedIHGP.
    Client state: none.
    """

    name = "fednest-sgd"

    def round(self, fed: Fed, state: State, key: Array) -> State:
        inner_key, outer_key = jax.random.split(key)
        y = self.inner_rounds_of_fedavg(fed, state, inner_key)
        return self.fed_out(fed, state, y, outer_key)


class LFedNest(Nested):
    """FedNest made light: FedAvg's steps on y, local hypergradients on x. Fields: see `Nested`.

    Exchanges per round: T + 1, which `merged` cannot make fewer.
    Needs: a bilevel, minimax or compositional problem; g_i strongly convex in y for every client.
    Good for: clients that are alike, where exchanges are dear; biased where clients differ.
    Cost per local step: a gradient of g; on x: one of f and the products with the client's own ∇²g.
    Client state: none.
    """

    name = "lfednest"

    @property
    def asynchronous_phases(self) -> tuple[str, ...]:
        return "inner_descent", "own_outer_descent"

    hypergradient: Literal["global", "local"] = static(default="local")

    def validate(self) -> None:
        super().validate()
        only = self.hypergradient == "local"
        require(
            only, "LFedNest.hypergradient", self.hypergradient, "'local'; FedNest and FedNestSGD have the global one"
        )

    @phase(takes=("x", "y"), gives=("x", Withheld((NUMBER, NUMBER))))
    def own_outer_descent(self, client: Client, at: tuple[PyTree, PyTree], key: Array) -> Reply:
        """τ steps on x, each along the client's own hypergradient there."""
        x, y = at

        def step(k: Array, carry: tuple[PyTree, Array, Withheld, Array, Array]) -> tuple[Any, ...]:
            change, loss, quality, gradients, products = carry
            own = self.own_hypergradient(client, optax.tree.add(x, change), y, jax.random.fold_in(key, k))
            change = move(change, -self.outer_lr / self.outer_steps, own.estimate.h)
            quality = jax.tree.map(jnp.maximum, quality, own.estimate.quality.to_average())
            return change, loss + own.loss, quality, gradients + own.gradients, products + own.products

        first = jax.eval_shape(lambda key: self.own_hypergradient(client, x, y, key), key)
        none = jnp.asarray(0)
        unmet = optax.tree.zeros_like(Quality.unknown().to_average())
        start = (optax.tree.zeros_like(x), jnp.zeros((), first.loss.dtype), unmet, none, none)
        change, loss, quality, gradients, products = jax.lax.fori_loop(0, self.outer_steps, step, start)
        metrics = {"outer_loss": loss / self.outer_steps}
        return Reply((change, quality), metrics=metrics, gradients=gradients, hvps=products)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        inner_key, outer_key = jax.random.split(key)
        y = self.inner_rounds_of_fedavg(fed, state, inner_key)
        change, means = fed.mean(self.own_outer_descent, (state.x, y), outer_key, unbiased=True)
        return self.moved(state, change, y, Quality.of_clients(means))

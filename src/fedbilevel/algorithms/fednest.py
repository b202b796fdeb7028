"""FedNest, FedNest-SGD and LFedNest: alternating inner and outer optimization with federated variance reduction.

Davoud Ataee Tarzanagh, Mingchen Li, Christos Thrampoulidis, Samet Oymak. "FedNest: Federated Bilevel, Minimax, and
Compositional Optimization". ICML 2022, arXiv:2205.02215. Algorithms 1-4.

An epoch is T times FedInn, then FedOut.

    FedInn   q = mean_i ∇y g_i(x, y; ζ_i)                                                              one exchange
             y_{i,ν+1} = y_{i,ν} − (β/τ_i) [∇y g_i(x, y_{i,ν}; ζ_ν) − ∇y g_i(x, y; ζ_ν) + q]
             y ← mean_i y_{i,τ_i}                                                                      one exchange
    FedIHGP  v = (N/ℓ) (I − H/ℓ)^N' ∇y F, N' uniform on {0..N−1}, every factor from fresh clients      1 + N'
    FedOut   h = mean_i [∇x f_i(x, y; ξ_i) − ∇²xy g_i(x, y; ζ_i) v]                                    one exchange
             x_{i,ν+1} = x_{i,ν} − (α/τ_i) [∇x f_i(x_{i,ν}, y; ξ_ν) − ∇x f_i(x, y; ξ_ν) + h]
             x ← mean_i x_{i,τ_i}                                                                      one exchange

FedNest-SGD takes FedAvg's local steps on y, without q and the correction. LFedNest does so too, and its clients step
on x along their own hypergradients, with their own Hessians, which saves all exchanges of FedIHGP and is biased where
clients differ. Appendix A has four variants. In the joint ones, to which the paper's experiments compare alternating
steps, a client begins its steps on x at its own y_{i,τ_i}, and one exchange averages x and y:

    variant                 call                                  steps on x            on y    exchanges
    FedNest                 FedNest()                             FedOut                SVRG    2T + N + 2
    FedNest_SGD             FedNestSGD()                          FedOut                SGD     T + N + 2
    LFedNest                LFedNest()                            own hypergradients    SGD     T + 1
    LFedNest_SVRG           LFedNest(inner=SVRG())                own hypergradients    SVRG    2T + 1
    LFedNest, joint         LFedNest(joint=True)                  from their own y      SGD     1
    LFedNest_SVRG, joint    LFedNest(joint=True, inner=SVRG())    from their own y      SVRG    2

FedNest(hypergradient=LocalImplicit()) is none of these: FedOut, h being the mean of own hypergradients.

On a `Minimax` problem ∇y F = 0 at y*(x) and FedIHGP is left out; on a `Compositional` one H = I, so that v = ∇y F, and
T = 1 with β = 1 and τ = 1 gives y = mean_i r_i(x).

With full batches and one step on x, LFedNest is RABO on whole models, and FedNest-SGD is FedMBO with an exchange more,
in which nobody drifts: the same numbers to rounding.

FedInn is `SVRG` below; FedIHGP, with h, is `Implicit.estimate` of parts/hypergradients.py, and what LFedNest's clients
do alone `LocalImplicit.own` of parts/hypergradients.py.

Departures from the paper:
1. Server and clients exchange changes, Σ p̃_i (y_{i,τ} − y) with p̃_i = (M/P) p_i, which for equal weights or full
   participation is the paper's mean of y_{i,τ}, and is unbiased for unequal weights too. Of corrected steps the
   common part −βq (or −αh) is taken by the server, once, and only what clients drift beyond it is averaged,
   Σ p_i d_i / Σ p_i: q and the weights of the same cohort are not independent, and their product would be biased.
2. The first corrected step is along q (or h) itself, its correction being zero whatever is drawn.
3. The default is the expectation of FedIHGP's v, the series v = (1/ℓ) Σ_{n<N} (I − H/ℓ)^n ∇y F: N exchanges, and none
   of the variance, which grows with N. Neumann(sampling="random") is the paper's; v may also be found by conjugate
   gradient, or locally (LocalImplicit).
4. Joint steps are what the authors' code makes of them, for T = 1. Changes y_{i,τ} − y are then averaged whole, by
   p̃_i, and q is Σ p_i ∇y g_i / Σ p_i over the cohort: what they have in common sums to −β Σ p̃_i ∇y g_i all the same.

Checked in tests/algorithms/test_fednest.py (closed forms, exchanges) and tests/engines/test_agreement.py.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedbilevel.algorithms.parts.hypergradients import Implicit, LocalImplicit
from fedbilevel.algorithms.parts.inner import InnerSteps, LocalSGD
from fedbilevel.algorithms.parts.linear_solvers import SolveInfo
from fedbilevel.algorithms.parts.local_steps import LocalSteps, corrected_drift
from fedbilevel.algorithms.parts.nested import ALL_BILEVEL, Nested, State, allowed_by, own_alone
from fedbilevel.core.algorithm import phase
from fedbilevel.core.client import Client, Draw
from fedbilevel.core.config import positive, positive_integer, static
from fedbilevel.core.errors import require
from fedbilevel.core.facts import Allows, Facts, No
from fedbilevel.core.fed import Fed, Reply, Withheld
from fedbilevel.core.submodel import NUMBER
from fedbilevel.core.tree import PyTree, move, scaled


class SVRG(InnerSteps):
    """FedNest's FedInn: local steps corrected for the difference between clients. Two exchanges a round.

    q = mean_i ∇y g_i(x, y; ζ_i)
    y_{i,ν+1} = y_{i,ν} − (β/τ_i) [∇y g_i(x, y_{i,ν}; ζ_ν) − ∇y g_i(x, y; ζ_ν) + q],   y ← mean_i y_{i,τ_i}

    Args:
        lr: β; a client's step is β/τ_i; None adapts it (`AdaptiveSteps`).
    """

    kind: ClassVar[str] = "svrg"

    lr: float = positive(default=None, adaptive="shared")

    def once(self, fed: Fed, x: PyTree, y: PyTree, key: Array) -> PyTree:
        first, second = jax.random.split(key)
        q = fed.mean(self.gradient, (x, y), first, unbiased=True)
        drift = fed.mean(self.corrected_descent, (x, y, q), second)
        return move(y, self.server_lr, optax.tree.add(scaled(-self.lr, q), drift))

    @phase(takes=("x", "y"), gives="y", measures=True)
    def gradient(self, client: Client, at: tuple[PyTree, PyTree], key: Array) -> Reply:
        """Reply with ∇y g_i, whose mean is q."""
        loss, gradient = jax.value_and_grad(client.problem.inner, 1)(*at, client.inner_batch(key))
        return Reply(gradient, metrics={"inner_loss": loss}, gradients=1)

    @phase(takes=("x", "y", "y"), gives="y")
    def corrected_descent(self, client: Client, at: tuple[PyTree, PyTree, PyTree], key: Array) -> Reply:
        """Reply with the change of y by τ_i corrected steps, less −βq, which all clients have in common."""
        x, y, q = at
        steps = self.steps(client, key)
        drift = corrected_drift(self.gradient_at(client, x, y), y, q, steps, self.lr)
        return Reply(drift, gradients=2 * (steps.tau - 1))


class Epochs(Nested):
    """FedNest and FedNest-SGD: rounds on y, h from the federation, then corrected local steps on x (FedOut).

    Args:
        inner: the rounds on y.
        hypergradient: how h is found: by products that are means over all clients, or by each client alone.
        outer_lr: α; a client's step on x is α/τ_i; None adapts it (`AdaptiveSteps`).
        outer_steps: τ_i, a client's local steps on x in a round, which may be its own (`Clients.own`).
    """

    outer_lr: float = positive(default=None, adaptive="x")
    inner: Any
    outer_steps: int = positive_integer(default=1, own=True)

    @property
    def allows(self) -> Allows:
        apart = No("its steps on x follow a mean hypergradient from an exchange of its own; LFedNest's are alone")
        return allowed_by(self)._replace(own_y=self.hypergradient.allows.own_y and apart)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        inner_key, outer_key = jax.random.split(key)
        estimate_key, descent_key = jax.random.split(outer_key)
        x, y = state.x, self.inner.descend(fed, state.x, state.y, inner_key)  # T times FedInn
        h, info = self.hypergradient.estimate(fed, x, y, estimate_key)  # FedIHGP, then h
        drift = fed.mean(self.outer_descent, (x, y, h), descent_key)
        return self.next_state(state, move(drift, -self.outer_lr, h), y, info)

    @phase(takes=("x", "y", "x"), gives="x")
    def outer_descent(self, client: Client, at: tuple[PyTree, PyTree, PyTree], key: Array) -> Reply:
        """Reply with the change of x by τ_i corrected steps (FedOut), less −αh, which all clients have in common."""
        x, y, h = at

        def gradient(x: PyTree, draw: Draw) -> PyTree:
            return jax.grad(client.problem.outer, 0)(x, y, client.outer_batch(draw))

        drift = corrected_drift(gradient, x, h, LocalSteps.drawn(self.outer_steps, key), self.outer_lr)
        return Reply(drift, gradients=2 * (self.outer_steps - 1))


class FedNest(Epochs):
    """Alternating federated SVRG on y and x, with a global hypergradient."""

    name = "fednest"
    solves = ALL_BILEVEL
    facts = Facts(
        paper="Tarzanagh et al. 2022, arXiv:2205.02215",
        needs="g strongly convex in y",
        good_for="clients that differ much and an exact hypergradient, where exchanges are cheap",
        exchanges="2T + N + 2; by conjugate gradient with K products 2T + K + 3",
        up="2 like x, 2T + N like y",
        hvps="N",
        cost="two gradients of g (on x of f); a product with ∇²g per exchange of FedIHGP",
        bias="truncation (1 − sμ)^N; none with `CG`",
    )

    inner: SVRG = SVRG()
    hypergradient: Implicit | LocalImplicit = Implicit()


class FedNestSGD(Epochs):
    """FedNest with FedAvg's plain local steps on y."""

    name = "fednest-sgd"
    solves = ALL_BILEVEL
    facts = Facts(
        paper="Tarzanagh et al. 2022, arXiv:2205.02215",
        needs="g strongly convex in y",
        good_for="clients that are alike, with a global hypergradient",
        exchanges="T + N + 2; by conjugate gradient with K products T + K + 3",
        up="2 like x, T + N like y",
        hvps="N",
        cost="a gradient of g (on x two gradients of f); a product with ∇²g per exchange of FedIHGP",
        bias="truncation; drift of y where τ > 1",
    )

    inner: LocalSGD = LocalSGD()
    hypergradient: Implicit | LocalImplicit = Implicit()


class LFedNest(Nested):
    """FedNest made light: FedAvg's steps on y, local hypergradients on x.

    Args:
        inner: the rounds on y: FedAvg's local steps, or corrected ones.
        hypergradient: how each client finds its own.
        outer_lr: α; a client's step on x is α/τ_i; None adapts it (`AdaptiveSteps`).
        outer_steps: τ_i, a client's local steps on x in a round, which may be its own (`Clients.own`).
        joint: whether clients begin their steps on x at their own y, in the exchange that averages y too; T is 1 then.
    """

    name = "lfednest"
    solves = ALL_BILEVEL
    facts = Facts(
        paper="Tarzanagh et al. 2022, arXiv:2205.02215",
        needs="g_i strongly convex in y for every client",
        good_for="clients that are alike, where exchanges are expensive; biased where clients differ",
        exchanges="T + 1; with `SVRG` 2T + 1; joint one less",
        up="1 like x, T like y; with `SVRG` 2T like y",
        hvps="N for each of its steps on x",
        cost="a gradient of g; on x a gradient of f and the products with the client's own ∇²g",
        bias="clients' own hypergradients, which no step size mends; drift of y (not with `SVRG`)",
    )

    inner: LocalSGD | SVRG = LocalSGD()
    hypergradient: LocalImplicit = LocalImplicit()
    outer_lr: float = positive(default=None, own=True, adaptive="local x")
    outer_steps: int = positive_integer(default=1, own=True)
    joint: bool = static(default=False)

    def validate(self) -> None:
        """Refuse several rounds on y between two on x where both move at once."""
        rounds = self.inner.rounds
        require(not self.joint or rounds == 1, "LFedNest.inner.rounds", rounds, "1 where joint = True")

    @property
    def allows(self) -> Allows:
        q = ("inner.gradient",) if isinstance(self.inner, SVRG) else ()
        steps = "inner.corrected_descent" if q else "inner.descent"
        asked = (*q, "joint_descent") if self.joint else (*q, steps, "outer_descent")
        joint = No("its joint steps begin at the y of a client's own steps; joint=False has them apart")
        own_y = joint if self.joint else own_alone(self, "outer_descent")
        return self.hypergradient.allows._replace(late=asked, own_y=own_y)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        inner_key, outer_key = jax.random.split(key)
        x, y = state.x, state.y
        if self.joint:
            q = fed.mean(self.inner.gradient, (x, y), inner_key) if isinstance(self.inner, SVRG) else None
            moved, (change, means) = fed.mean(self.joint_descent, (x, y, q), outer_key, unbiased=True)
            y = move(y, self.inner.server_lr, moved)
        else:
            y = self.inner.descend(fed, x, y, inner_key)
            change, means = fed.mean(self.outer_descent, (x, y), outer_key, unbiased=True)
        return self.next_state(state, change, y, SolveInfo.of_clients(means))

    @phase(takes=("x", "y", "y"), gives=("y", ("x", Withheld((NUMBER, NUMBER)))), measures=True)
    def joint_descent(self, client: Client, at: tuple[PyTree, PyTree, PyTree], key: Array) -> Reply:
        """Reply with the changes of y by τ_i steps, and of x by steps that begin where those end."""
        x, y, q = at
        inner_key, outer_key = jax.random.split(key)
        if isinstance(self.inner, SVRG):
            inner = self.inner.corrected_descent(client, at, inner_key)
            moved = move(inner.update, -self.inner.lr, q)
        else:
            inner = self.inner.descent(client, (x, y), inner_key)
            moved = inner.update
        outer = self.outer_descent(client, (x, optax.tree.add(y, moved)), outer_key)
        return outer._replace(update=(moved, outer.update), gradients=inner.gradients + outer.gradients)

    @phase(takes=("x", "y"), gives=("x", Withheld((NUMBER, NUMBER))))
    def outer_descent(self, client: Client, at: tuple[PyTree, PyTree], key: Array) -> Reply:
        """Reply with the change of x by τ_i steps, each along the client's own hypergradient where the step begins."""
        x, y = at

        def step(k: Array, carry: tuple[PyTree, Array, Withheld, Array, Array]) -> tuple[Any, ...]:
            change, loss, info, gradients, hvps = carry
            own = self.hypergradient.own(client, optax.tree.add(x, change), y, jax.random.fold_in(key, k))
            change = move(change, -self.outer_lr / self.outer_steps, own.h)
            info = jax.tree.map(jnp.maximum, info, own.info.to_average())
            return change, loss + own.loss, info, gradients + own.gradients, hvps + own.hvps

        first = jax.eval_shape(lambda key: self.hypergradient.own(client, x, y, key), key)
        none = jnp.asarray(0)
        unmet = optax.tree.zeros_like(SolveInfo.unknown().to_average())
        start = (optax.tree.zeros_like(x), jnp.zeros((), first.loss.dtype), unmet, none, none)
        change, loss, info, gradients, hvps = jax.lax.fori_loop(0, self.outer_steps, step, start)
        metrics = {"outer_loss": loss / self.outer_steps}
        reply = Reply((change, info), metrics=metrics, gradients=gradients, hvps=hvps)
        return self.hypergradient.second_order.counted(reply)

"""FedNest, FedNest-SGD and LFedNest: alternate steps on y and on x; FedNest corrects both for clients' differences.

Davoud Ataee Tarzanagh, Mingchen Li, Christos Thrampoulidis, Samet Oymak. "FedNest: Federated Bilevel, Minimax, and
Compositional Optimization". ICML 2022, arXiv:2205.02215. Algorithms 1-4.

A round, which the paper calls an epoch, consists of three procedures of the paper. First FedInn, which moves y, runs T
times. Then FedIHGP computes v ≈ H⁻¹ ∇y F. Then FedOut moves x, along the hypergradient ∇x F − ∇²xy G v. Here F is the
mean of f_i, G is the mean of g_i, and H = ∇²yy G.

The right column of this listing has the number of exchanges. An exchange is one message from the server to the clients,
with their replies. The step sizes for y and x are β and α. Client i makes τ_i local steps, counted by ν, and draws
samples ξ for f_i and ζ for g_i. The number ℓ is an upper bound of H's largest eigenvalue, and N is the number of terms
of a series for H⁻¹:

    FedInn   q = mean_i ∇y g_i(x, y; ζ_i)                                                              1
             y_{i,ν+1} = y_{i,ν} − (β/τ_i) [∇y g_i(x, y_{i,ν}; ζ_ν) − ∇y g_i(x, y; ζ_ν) + q]
             y ← mean_i y_{i,τ_i}                                                                      1
    FedIHGP  v = (N/ℓ) (I − H/ℓ)^N' ∇y F, N' uniform on {0..N−1}, a fresh cohort for each factor       1 + N'
    FedOut   h = mean_i [∇x f_i(x, y; ξ_i) − ∇²xy g_i(x, y; ζ_i) v]                                    1
             x_{i,ν+1} = x_{i,ν} − (α/τ_i) [∇x f_i(x_{i,ν}, y; ξ_ν) − ∇x f_i(x, y; ξ_ν) + h]
             x ← mean_i x_{i,τ_i}                                                                      1

A cohort is the set of clients that take part in an exchange. Each factor I − H/ℓ of FedIHGP is estimated by a fresh
cohort, which is drawn independently of all other cohorts of the round. The estimates of the factors are therefore
independent (docs/explanation/exchanges.md).

In FedInn the brackets contain a client's gradient and its correction, q − ∇y g_i(x, y; ζ_ν). FedNest-SGD makes steps on
y without the correction, as FedAvg does, and so needs no q. LFedNest's steps on y have no correction either, and its
clients step on x along their own hypergradients, which they compute with their own Hessians. This saves all exchanges
of FedIHGP, but the result is biased if clients differ.

Appendix A of the paper has four variants. The paper's experiments compare them with two joint variants. In a joint
variant, a client makes its local steps on y, and then its steps on x at its own y_{i,τ_i}. One exchange averages both x
and y. In this table, SVRG is FedInn, and SGD is FedInn without the correction. The numbers of exchanges are for the
default, a series for v that takes N exchanges (departure 3):

    variant                 call                                  steps on x            on y    exchanges
    FedNest                 FedNest()                             FedOut                SVRG    2T + N + 2
    FedNest_SGD             FedNestSGD()                          FedOut                SGD     T + N + 2
    LFedNest                LFedNest()                            own hypergradients    SGD     T + 1
    LFedNest_SVRG           LFedNest(inner=SVRG())                own hypergradients    SVRG    2T + 1
    LFedNest, joint         LFedNest(joint=True)                  from their own y      SGD     1
    LFedNest_SVRG, joint    LFedNest(joint=True, inner=SVRG())    from their own y      SVRG    2

FedNest(hypergradient=LocalImplicit()) is none of these variants: it runs FedOut, where h is the mean of the clients'
own hypergradients.

On a `Minimax` problem ∇y F is 0 at y*(x), and FedIHGP is left out. On a `Compositional` problem g_i is ½‖y − r_i(x)‖².
Then H = I, and so v = ∇y F. FedInn with T = 1, β = 1 and τ = 1 gives the exact inner solution, y = mean_i r_i(x).

RABO is a method for clients that hold parts of a model. If every client holds the whole model, LFedNest computes the
same numbers as RABO with full batches and one step on x, up to rounding. With full batches and one step on x,
FedNest-SGD also computes the same numbers as FedMBO, but makes one more exchange, the second exchange of FedOut. In
this exchange each client replies with its drift on x: the part of its change that differs between clients (see
departure 1 below). After one step the drift is 0, so the exchange changes nothing.

In the code, the class `SVRG` is FedInn, `Implicit.estimate` in parts/hypergradients.py is FedIHGP together with h, and
`LocalImplicit.own` in parts/hypergradients.py is the hypergradient that a client of LFedNest computes on its own.

Departures from the paper:
1. Clients send changes of y and x, and not the new values. Let p_i be client i's weight, let P of M clients take part
   in the round, and let p̃_i = (M/P) p_i.
   - After steps without a correction (SGD on y, own hypergradients on x), the server adds Σ p̃_i (y_{i,τ} − y) to y, or
     Σ p̃_i (x_{i,τ} − x) to x. For equal weights or full participation this gives the paper's mean of the y_{i,τ} or
     x_{i,τ}. For unequal weights the sum is unbiased too.
   - After corrected steps (SVRG on y, FedOut on x), the change of client i has two parts. One part is the same for all
     clients: −βq on y, and −αh on x. The server adds this part once. The rest is the client's drift d_i, and the server
     adds the mean of the drifts, Σ p_i d_i / Σ p_i. Weights p̃_i would multiply the common part −βq by Σ p̃_i. Both
     this sum and q = Σ p̃_i ∇y g_i depend on the cohort that was drawn, so that their product would be biased.
2. A client makes its first corrected step along q (or h) and computes no gradient for it. The paper's bracket has two
   gradients on the same samples, which are equal in the first step, and so cancel. The numbers do not change.
3. The default is the expectation of FedIHGP's v, the series v = (1/ℓ) Σ_{n<N} (I − H/ℓ)^n ∇y F. It takes N exchanges.
   The paper's method is Neumann(sampling="random"). The random length of its product causes a variance that grows with
   N, and the series does not have this variance. There are two more ways to compute v: with CG() by conjugate gradient,
   and with LocalImplicit() by each client on its own.
4. Joint steps follow the authors' code, with T = 1. The server adds Σ p̃_i (y_{i,τ} − y), in which the common part −βq
   is multiplied by Σ p̃_i. In joint steps, q is therefore the mean Σ p_i ∇y g_i / Σ p_i over the clients that take
   part. Then −βq times Σ p̃_i is −β Σ p̃_i ∇y g_i, which is unbiased, and is the same as without joint steps.

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
from fedbilevel.core.field_types import Step
from fedbilevel.core.submodel import NUMBER
from fedbilevel.core.tree import PyTree, move, scaled


class SVRG(InnerSteps):
    """Run FedNest's FedInn: local steps on y with a correction for the differences between clients.

    A round takes two exchanges:

    q = mean_i ∇y g_i(x, y; ζ_i)
    y_{i,ν+1} = y_{i,ν} − (β/τ_i) [∇y g_i(x, y_{i,ν}; ζ_ν) − ∇y g_i(x, y; ζ_ν) + q],   y ← mean_i y_{i,τ_i}

    Args:
        lr: β, the total size of a client's τ_i steps; each has the size β/τ_i. None: β adapts during the run
            (`AdaptiveSteps`).
        all_samples: whether q is the mean gradient of all samples, as in the published code. False: of a batch of each
            client, ζ_i.
    """

    kind: ClassVar[str] = "svrg"

    lr: Step = positive(default=None, adaptive="shared")
    all_samples: bool = static(default=False)

    def once(self, fed: Fed, x: PyTree, y: PyTree, key: Array) -> PyTree:
        first, second = jax.random.split(key)
        q = fed.mean(self.gradient, (x, y), first, unbiased=True)
        drift = fed.mean(self.corrected_descent, (x, y, q), second)
        return move(y, self.server_lr, optax.tree.add(scaled(-self.lr, q), drift))

    @phase(takes=("x", "y"), gives="y", measures=True)
    def gradient(self, client: Client, at: tuple[PyTree, PyTree], key: Array) -> Reply:
        """Reply with the client's gradient ∇y g_i(x, y), in the shape of y; the mean of these replies is q."""
        batch = client.inner_batch(key, None if self.all_samples else client.batch_size)
        loss, gradient = jax.value_and_grad(client.problem.inner, 1)(*at, batch)
        return Reply(gradient, metrics={"inner_loss": loss}, gradients=1)

    @phase(takes=("x", "y", "y"), gives="y")
    def corrected_descent(self, client: Client, at: tuple[PyTree, PyTree, PyTree], key: Array) -> Reply:
        """Reply with d_i, the change of y after τ_i corrected steps without the part −βq, which all clients share."""
        x, y, q = at
        steps = self.steps(client, key)
        drift = corrected_drift(self.gradient_at(client, x, y), y, q, steps, self.lr)
        return Reply(drift, gradients=2 * (steps.tau - 1))


class Epochs(Nested):
    """Base class of FedNest and FedNest-SGD: rounds on y, then the hypergradient h, then corrected local steps on x.

    Args:
        inner: how y is trained in a round: T, the steps and their sizes.
        hypergradient: how h is computed: with products that are means over all clients, or by each client on its own.
        outer_lr: α, the total size of a client's τ_i steps on x; each has the size α/τ_i. None: α adapts during the run
            (`AdaptiveSteps`).
        outer_steps: τ_i, the number of a client's local steps on x in a round, which may differ between clients
            (`Clients.own`).
    """

    outer_lr: Step = positive(default=None, adaptive="x")
    inner: Any
    outer_steps: int = positive_integer(default=1, own=True)

    @property
    def allows(self) -> Allows:
        apart = No("its clients step on x along a mean hypergradient; those of LFedNest use their own hypergradients")
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
        """Reply with the change of x after τ_i corrected steps without the part −αh, which all clients share."""
        x, y, h = at
        sampled = self.hypergradient.sampled(client)

        def gradient(x: PyTree, draw: Draw) -> PyTree:
            return jax.grad(client.problem.outer, 0)(x, y, sampled.outer_batch(draw))

        drift = corrected_drift(gradient, x, h, LocalSteps.drawn(self.outer_steps, key), self.outer_lr)
        return Reply(drift, gradients=2 * (self.outer_steps - 1))


class FedNest(Epochs):
    """Alternate federated SVRG on y and on x, with the hypergradient of all clients."""

    name = "fednest"
    solves = ALL_BILEVEL
    facts = Facts(
        paper="Tarzanagh et al. 2022, arXiv:2205.02215",
        needs="g strongly convex in y",
        good_for="very different clients and an exact hypergradient, if exchanges are cheap",
        exchanges="2T + N + 2; with `CG` in C iterations, 2T + C + 3",
        up="2 like x, 2T + N like y",
        hvps="N",
        cost="two gradients of g (on x, two of f); a product with ∇²g for each exchange of FedIHGP",
        bias="truncation (1 − sμ)^N; none with `CG`",
    )

    inner: SVRG = SVRG()
    hypergradient: Implicit | LocalImplicit = Implicit()


class FedNestSGD(Epochs):
    """Run FedNest with FedAvg's plain local steps on y."""

    name = "fednest-sgd"
    solves = ALL_BILEVEL
    facts = Facts(
        paper="Tarzanagh et al. 2022, arXiv:2205.02215",
        needs="g strongly convex in y",
        good_for="similar clients, with the hypergradient of all clients",
        exchanges="T + N + 2; with `CG` in C iterations, T + C + 3",
        up="2 like x, T + N like y",
        hvps="N",
        cost="a gradient of g (on x, two gradients of f); a product with ∇²g for each exchange of FedIHGP",
        bias="truncation; drift of y if τ > 1",
    )

    inner: LocalSGD = LocalSGD()
    hypergradient: Implicit | LocalImplicit = Implicit()


class LFedNest(Nested):
    """Run the light variant of FedNest: FedAvg's steps on y, and steps on x along clients' own hypergradients.

    Args:
        inner: how y is trained in a round: by FedAvg's local steps, or by corrected steps (`SVRG`).
        hypergradient: how each client computes its own hypergradient.
        outer_lr: α, the total size of a client's τ_i steps on x; each has the size α/τ_i. None: α adapts during the run
            (`AdaptiveSteps`).
        outer_steps: τ_i, the number of a client's local steps on x in a round, which may differ between clients
            (`Clients.own`).
        joint: whether clients begin their steps on x at their own y, in the exchange that also averages y. Then T must
            be 1.
    """

    name = "lfednest"
    solves = ALL_BILEVEL
    facts = Facts(
        paper="Tarzanagh et al. 2022, arXiv:2205.02215",
        needs="g_i strongly convex in y for every client",
        good_for="similar clients and expensive exchanges; biased if clients differ",
        exchanges="T + 1; with `SVRG` 2T + 1; one less if steps are `joint`",
        up="1 like x, T like y; with `SVRG` 2T like y",
        hvps="N for each step on x",
        cost="a gradient of g; on x, a gradient of f and the products with the client's own ∇²g",
        bias="clients' own hypergradients, an error that smaller steps do not reduce; drift of y (not with `SVRG`)",
    )

    inner: LocalSGD | SVRG = LocalSGD()
    hypergradient: LocalImplicit = LocalImplicit()
    outer_lr: Step = positive(default=None, own=True, adaptive="local x")
    outer_steps: int = positive_integer(default=1, own=True)
    joint: bool = static(default=False)

    def validate(self) -> None:
        """Refuse several inner rounds with joint steps, which move y and x in one exchange."""
        rounds = self.inner.rounds
        require(not self.joint or rounds == 1, "LFedNest.inner.rounds", rounds, "1 with joint = True")

    @property
    def allows(self) -> Allows:
        q = ("inner.gradient",) if isinstance(self.inner, SVRG) else ()
        steps = "inner.corrected_descent" if q else "inner.descent"
        asked = (*q, "joint_descent") if self.joint else (*q, steps, "outer_descent")
        joint = No("its joint steps on x begin at a client's own y; with joint=False they begin at the server's y")
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
        """Reply with the change of y after τ_i steps, and with the change of x after steps that use the new y."""
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
        """Reply with the change of x after τ_i steps, each along the client's own hypergradient at the present x."""
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

"""FISM and IR-IG: incremental subgradient steps towards the solution that is preferred among many.

Sudkobfa Boontawee, Mootta Prangprakhon, Nimit Nimana. "Federated Incremental Subgradient Method for Convex Bilevel
Optimization Problems". 2025. Algorithm 1, Theorems 9 and 11. IR-IG, its equation (1): Mostafa Amini, Farzad Yousefian.
"An Iterative Regularized Incremental Projected Subgradient Method for a Class of Bilevel Optimization Problems". ACC
2019.

    min H(x) over the minimisers of F over X,     F the mean of f_ij over the samples j of clients i

Round k: the server picks 𝓗_k ∈ ∂H(x_k) and sends it with x_k; client i walks once through its n_i samples, and

    z ← P_X[z − γ_k (g_ij(z) + λ_k 𝓗_k)],   g_ij ∈ ∂f_ij,   j = 1..n_i, from z = x_k      (line 9)
    x_{k+1} = mean of the z_i,     x̂_k = Σ γ_k x_k / Σ γ_k     γ_k = γ₁/k^a, λ_k = λ₁/k^b

H stays on the server. With `refresh` the clients have H too, and take 𝓗 at z: IR-IG is that with a single client that
holds all samples.

Messages: the server sends x, a vector of its shape (𝓗) and two numbers; clients reply with a vector of x's shape and a
number (with `tolerance` another).

Departures from the paper:
1. λ is relative to the mean of the f_ij: the paper's is m times ours, for m samples in all. Nothing else changes, and
   no client has to know m.
2. The paper takes the plain mean of the z_i. Here it is weighted by p_i/n_i, for which F is the weighted mean of the
   clients' means, as everywhere in this library: x_{k+1} = x_k + Σ p̃_i (z_i − x_k)/n_i over the mean of Σ p̃_i/n_i in
   the rounds so far, p̃_i = (M/P) p_i for cohorts of P out of M, which leaves no bias; where everyone is asked, over
   that of the round. With p_i in proportion to n_i,
   Clients(weights="size"), that is the plain mean, and every sample counts alike, as in the paper; where it is not, a
   warning at the start says so.
3. Beyond the paper: a walk may be over fewer samples, drawn anew in every round (`local_steps`). Clients reply with
   (z_i − x)/γ_k, so that replies of earlier rounds count with the step of this one, and the server may go on with the
   first replies: see `Asynchronous`.
4. The sign of λ in the paper's estimate (2) is a slip of the pen; it does not enter the algorithm.

Checked in tests/algorithms/test_fism.py (against the formulas in NumPy, solutions known in closed form or by SciPy, the
rate of Theorem 11) and tests/engines/test_agreement.py.
"""

from abc import abstractmethod
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from fedbilevel.algorithms.parts.iterative_regularization import DecreasingSteps, State
from fedbilevel.core.algorithm import phase
from fedbilevel.core.client import Client, Clients, RemoteClients
from fedbilevel.core.config import positive_integer, static
from fedbilevel.core.errors import NumericalWarning, require, unknown, warn
from fedbilevel.core.facts import Allows, Facts, No
from fedbilevel.core.fed import Fed, Reply
from fedbilevel.core.problem import Problem
from fedbilevel.core.submodel import NUMBER
from fedbilevel.core.tree import PyTree, move, scaled

ORDERS = ("given", "random")
SHARES = No("its server divides by the mean of 1/n_i, of how many samples a client has, which noise would spoil")


class Incremental(DecreasingSteps):
    """Walks of clients through their own samples, and a server that averages where they end.

    Args:
        lr: γ₁, the first step on one sample's loss; a number or a schedule over rounds. A walk over n samples with the
            same 𝓗 moves by n γ_k λ_k 𝓗: keep that below the size of X in the first rounds, too.
        order: in which a client visits its samples: "given", or "random", drawn anew in every round.
        local_steps: how many samples a client visits in a round, drawn at random, all of them where it has fewer; a
            number that the clients bring themselves (`Clients.local_steps`) takes precedence. None: all of them.
    """

    order: Literal["given", "random"] = static(default="given")
    local_steps: int | None = positive_integer(default=None, optional=True)

    def validate(self) -> None:
        if self.order not in ORDERS:
            raise unknown(f"{self.label}.order", self.order, ORDERS)

    @property
    @abstractmethod
    def anew(self) -> bool:
        """True if clients evaluate 𝓗 at z at every local step; False if once, at the server's point."""

    def init_own(self, x: PyTree) -> Array:
        return jnp.zeros(())

    @phase(takes="whole", gives=("x", NUMBER))
    def walk(self, client: Client, message: PyTree, key: Array) -> Reply:
        """Walk to z over n of the client's own samples; reply with (z − x)/(γn), 1/n and, with a tolerance, F_i."""
        x, h, gamma, penalty = message
        problem: Any = client.problem
        known = not self.anew or problem.known
        require(known, "SimpleBilevel.outer", None, "a function (x) on clients too, which take 𝓗 anew at every step")
        steps = client.local_steps(self.local_steps)
        drawn = self.order == "random" or steps is not None
        sample, bound, n = client.inner.in_turn(key if drawn else None, steps)
        full = client.inner.equal and not isinstance(steps, Array)  # everyone takes as many

        def step(j: Array, z: PyTree) -> PyTree:
            g = jax.grad(problem.inner, 0)(z, None, sample(j))
            at = scaled(penalty, problem.preference(z)[1]) if self.anew else h
            new = problem.project(move(z, -gamma, optax.tree.add(g, at)))
            return new if full else jax.tree.map(lambda a, b: jnp.where(j < n, a, b), new, z)

        z = lax.fori_loop(0, bound, step, x)
        update: Any = scaled(1 / (n * unit(gamma)), optax.tree.sub(z, x)), 1.0 / n
        return Reply((*update, *self.inner_sum(client, x, key)), gradients=2 * n if self.anew else n)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        problem: Any = fed.problem
        gamma, penalty = self.step_sizes(state)
        outer, h = problem.preference(state.x)
        message = state.x, None if self.anew else scaled(penalty, h), gamma, penalty
        walked, share, *inner = fed.mean(self.walk, message, key, unbiased=True)
        if fed.sampled:  # Σ p_i/n_i of everyone: the mean over the cohorts so far, which differ in it
            share = state.own + (share - state.own) / (state.k + 1)
        x = problem.project(move(state.x, unit(gamma) / share, walked))
        return self.next_state(state, x, gamma, inner, outer, share)


def unit(gamma: Array) -> Array:
    """Return the unit of walks in replies: γ, or 1 where a schedule begins or ends at 0."""
    return jnp.where(gamma > 0, gamma, 1)


class FISM(Incremental):
    """Federated incremental subgradient method: every client walks through its own samples, the server averages.

    Args:
        refresh: whether clients take the subgradient 𝓗 of H anew at every step, at z. Their problem has to have H then.
            False: the server takes it, once in a round.
    """

    name = "fism"
    facts = Facts(
        paper="Boontawee et al. 2025",
        good_for="losses with kinks, and a preference among many solutions",
        exchanges="one",
        up="1 like x",
        cost="a subgradient of a sample's f and a projection; with `refresh` a subgradient of H too",
        bias="drift of clients, which goes with γ_k; λ_k",
    )

    refresh: bool = static(default=False)

    @property
    def anew(self) -> bool:
        return self.refresh

    @property
    def allows(self) -> Allows:
        return self.allows_with("walk")._replace(noise=SHARES)

    def check(self, problem: Problem, clients: Clients | RemoteClients, x: PyTree, y: PyTree) -> None:
        self.check_convexity(problem, x, anywhere=True)
        if (
            isinstance(clients, Clients)
            and np.ptp(shares := clients.inner.size / clients.weights) > 1e-9 * shares.max()
        ):
            text = "FISM weighs a client's walk by p_i/n_i, where its paper takes the plain mean of all walks: that is "
            warn(NumericalWarning(f"{text}Clients(weights='size')"))


class IRIG(Incremental):
    """Iteratively regularized incremental subgradient method: a single client walks, with 𝓗 taken anew at every step.

    Mostafa Amini, Farzad Yousefian. "An Iterative Regularized Incremental Projected Subgradient Method for a Class of
    Bilevel Optimization Problems". ACC 2019.
    """

    name = "irig"
    facts = Facts(
        paper="Amini et al. 2019",
        needs="all samples with one client",
        good_for="a yardstick for FISM",
        exchanges="one",
        up="1 like x",
        cost="a subgradient of a sample's f, a subgradient of H, and a projection",
        bias="steps along single samples in place of their mean, which goes with γ_k; λ_k",
    )

    @property
    def anew(self) -> bool:
        return True

    @property
    def allows(self) -> Allows:
        alone = No("a single client holds all samples, and there is nobody to go on without")
        return self.allows_with("walk")._replace(late=alone, noise=SHARES)

    def check(self, problem: Problem, clients: Clients | RemoteClients, x: PyTree, y: PyTree) -> None:
        pooled = "1, which holds all samples: clients.pooled(), on the command line run.pooled=true"
        require(len(clients) == 1, "IRIG: clients", len(clients), pooled)
        self.check_convexity(problem, x, anywhere=True)

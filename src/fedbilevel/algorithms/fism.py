"""FISM and IR-IG: incremental subgradient steps towards the preferred solution among many.

Sudkobfa Boontawee, Mootta Prangprakhon, Nimit Nimana. "Federated Incremental Subgradient Method for Convex Bilevel
Optimization Problems". 2025. Algorithm 1, Theorems 9 and 11. IR-IG is its equation (1), from: Mostafa Amini, Farzad
Yousefian. "An Iterative Regularized Incremental Projected Subgradient Method for a Class of Bilevel Optimization
Problems". ACC 2019.

    min H(x) over the minimisers of F over X,     where F is the mean of f_ij over the samples j of all clients i

In round k, the server computes a subgradient 𝓗_k ∈ ∂H(x_k) and sends it with x_k. Client i goes once through its n_i
samples j = 1..n_i, from z = x_k to a last point z_i, with a projected step for each sample:

    z ← P_X[z − γ_k (g_ij(z) + λ_k 𝓗_k)],   g_ij(z) ∈ ∂f_ij(z)                            (line 9)
    x_{k+1} = mean of the z_i,     x̂_k = Σ γ_k x_k / Σ γ_k,     γ_k = γ₁/k^a,     λ_k = λ₁/k^b

P_X is the projection onto X. Only the server has H. With `refresh` the clients have H too, and compute 𝓗 at z. IR-IG is
FISM with `refresh` and a single client that has all samples.

Messages: the server sends x, 𝓗, of x's shape, and two numbers. Clients reply with a vector of x's shape and a number,
and with a second number if `tolerance` is set.

Departures from the paper:
1. The weight λ is relative to the mean of the f_ij. The paper's λ is m times as large, where m is the number of samples
   of all clients together. Nothing else changes, and no client has to know m.
2. The paper takes the plain mean of the z_i. Here the mean has the weights p_i/n_i, where p_i is client i's weight, so
   that F is the weighted mean of the clients' means, as everywhere in this library. If all clients take part in every
   round, the server adds Σ p_i (z_i − x_k)/n_i, divided by Σ p_i/n_i, to x_k. For p_i proportional to n_i, as with
   Clients(weights="size"), this is the paper's plain mean, and every sample has the same weight. With other weights,
   FISM warns at the start. If P of the M clients take part in a round, the server uses p̃_i = (M/P) p_i in the sum, and
   divides by the mean of Σ p̃_i/n_i over the rounds so far, so that the step is unbiased.
3. Two things are possible here and not in the paper. A client may use fewer samples, drawn anew in every round
   (`local_steps`). And the server may continue with the first replies (`Asynchronous`): clients reply with
   (z_i − x)/(γ_k n_i), and the server multiplies a reply by the γ of the round in which it uses the reply.
4. The paper's estimate (2) has the wrong sign of λ, which does not matter for the algorithm.

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
SHARES = No("its server divides by the mean of 1/n_i, where n_i is a client's number of samples; noise would spoil it")


class Incremental(DecreasingSteps):
    """Let every client go through its own samples with a step for each, and average the clients' last points.

    Args:
        lr: γ₁, the first step size, for the loss of one sample; a number or a schedule over rounds. If 𝓗, a subgradient
            of H, is computed once per round, it moves x by n γ_k λ_k 𝓗 in the n steps of round k. The length of this
            move should be less than the size of X, also in the first rounds.
        order: the order in which a client visits its samples: "given", or "random", drawn anew in every round.
        local_steps: the number of samples that a client visits in a round. They are drawn at random. A client that has
            fewer samples visits all of them. `Clients.local_steps` takes precedence. None: all samples.
    """

    order: Literal["given", "random"] = static(default="given")
    local_steps: int | None = positive_integer(default=None, optional=True)

    def validate(self) -> None:
        if self.order not in ORDERS:
            raise unknown(f"{self.label}.order", self.order, ORDERS)

    @property
    @abstractmethod
    def anew(self) -> bool:
        """Return whether clients compute 𝓗, a subgradient of H, in every step; otherwise the server does so, at x."""

    def init_own(self, x: PyTree) -> Array:
        return jnp.zeros(())

    @phase(takes="whole", gives=("x", NUMBER))
    def walk(self, client: Client, message: PyTree, key: Array) -> Reply:
        """Take a projected step for each of n samples of the client, from x to z.

        The reply has (z − x)/(γn), in the shape of x; the number 1/n; and, if there is a tolerance, a multiple of
        F_i(x).
        """
        x, h, gamma, penalty = message
        problem: Any = client.problem
        known = not self.anew or problem.known
        require(known, "SimpleBilevel.outer", None, "a function (x) on clients too, which compute 𝓗 in every step")
        steps = client.local_steps(self.local_steps)
        drawn = self.order == "random" or steps is not None
        sample, bound, n = client.inner.in_turn(key if drawn else None, steps)
        full = client.inner.equal and not isinstance(steps, Array)  # all clients take the same number of steps

        def step(j: Array, z: PyTree) -> PyTree:
            g = jax.grad(problem.inner, 0)(z, None, sample(j))
            at = scaled(penalty, problem.preference(z)[1]) if self.anew else h
            new = problem.project(move(z, -gamma, optax.tree.add(g, at)))
            return new if full else optax.tree.where(j < n, new, z)

        z = lax.fori_loop(0, bound, step, x)
        update: Any = scaled(1 / (n * unit(gamma)), optax.tree.sub(z, x)), 1.0 / n
        return Reply((*update, *self.inner_sum(client, x, key)), gradients=2 * n if self.anew else n)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        problem: Any = fed.problem
        gamma, penalty = self.step_sizes(state)
        outer, h = problem.preference(state.x)
        message = state.x, None if self.anew else scaled(penalty, h), gamma, penalty
        walked, share, *inner = fed.mean(self.walk, message, key, unbiased=True)
        if fed.sampled:  # estimate Σ p_i/n_i over all clients by the mean over the cohorts so far
            share = state.own + (share - state.own) / (state.k + 1)
        x = problem.project(move(state.x, unit(gamma) / share, walked))
        return self.next_state(state, x, gamma, inner, outer, share)


def unit(gamma: Array) -> Array:
    """Return γ, by which the changes of x in replies are divided; 1 if γ is 0, as in schedules that begin at 0."""
    return jnp.where(gamma > 0, gamma, 1)


class FISM(Incremental):
    """Run the federated incremental subgradient method: clients take a step for each sample, and the server averages.

    Args:
        refresh: whether clients compute the subgradient 𝓗 of H at z in every step. Then the clients' problem must have
            H. False: the server computes 𝓗 once in a round.
    """

    name = "fism"
    facts = Facts(
        paper="Boontawee et al. 2025",
        good_for="losses with kinks, and a preference among many solutions",
        exchanges="one",
        up="1 like x",
        cost="a subgradient of a sample's f and a projection; with `refresh`, also a subgradient of H",
        bias="drift of clients, and the weight λ_k of H; both vanish as γ_k and λ_k fall",
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
            text = "FISM gives a client's change of x the weight p_i/n_i, but its paper takes the plain mean of all "
            warn(NumericalWarning(f"{text}changes, as Clients(weights='size') does"))


class IRIG(Incremental):
    """Run the iteratively regularized incremental subgradient method: a single client takes a step for each sample.

    Mostafa Amini, Farzad Yousefian. "An Iterative Regularized Incremental Projected Subgradient Method for a Class of
    Bilevel Optimization Problems". ACC 2019.
    """

    name = "irig"
    facts = Facts(
        paper="Amini et al. 2019",
        needs="a single client that has all samples",
        good_for="comparison with FISM",
        exchanges="one",
        up="1 like x",
        cost="a subgradient of a sample's f, a subgradient of H, and a projection",
        bias="steps along single samples in place of their mean, and the weight λ_k of H; both errors vanish as γ_k "
        "and λ_k fall",
    )

    @property
    def anew(self) -> bool:
        return True

    @property
    def allows(self) -> Allows:
        alone = No("a single client has all samples, so that a round has only one reply")
        return self.allows_with("walk")._replace(late=alone, noise=SHARES)

    def check(self, problem: Problem, clients: Clients | RemoteClients, x: PyTree, y: PyTree) -> None:
        pooled = "1 client with all samples: clients.pooled(), or run.pooled=true on the command line"
        require(len(clients) == 1, "IRIG: clients", len(clients), pooled)
        self.check_convexity(problem, x, anywhere=True)

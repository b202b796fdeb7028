"""IRG and BiFISTA: solve simple bilevel problems with one plain or accelerated step per round on all samples.

    min H(x) over the minimisers of F over X,     where F is the mean of the clients' losses F_i

IRG: Mikhail V. Solodov. "An Explicit Descent Method for Bilevel Convex Optimization". Journal of Convex Analysis 14,
2007. It has the decreasing steps of Amini and Yousefian (see fism.py) in place of Solodov's line search.

    x_{k+1} = P_X[x_k − γ_k (g + λ_k 𝓗_k)],     where g ∈ ∂F(x_k) is the mean of clients' g_i, and 𝓗_k ∈ ∂H(x_k)

P_X is the projection onto X.

BiFISTA: Radu I. Boţ, Enis Chenchene, Robert Csetnek, David Hulett. "Accelerating Diagonal Methods for Bilevel
Optimization: Unified Convergence via Continuous-Time Dynamics". 2025, arXiv:2505.14389. It is similar to FBi-PG of
Merchav, Sabach and Teboulle (2024).

    z_k = x_k + (1 − α/(k + α)) (x_k − x_{k−1}),     x_{k+1} = P_X[z_k − γ (∇F(z_k) + λ_k ∇H(z_k))]

Messages: the server sends a vector of x's shape, and clients reply with a vector of x's shape. If `tolerance` is set,
clients also reply with a number, and BiFISTA's server sends two vectors.

Departures from the papers:
1. F is the mean over samples with the weights of clients, and λ is relative to this mean.
2. BiFISTA's paper has smooth losses and proximal steps. Here X is a set, given by its projection. If H is not smooth,
   its subgradient replaces the proximal step, which the proof does not cover.

Checked in tests/algorithms/test_regularized_gradient.py (against NumPy, closed forms) and
tests/engines/test_agreement.py.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedbilevel.algorithms.parts.iterative_regularization import DecreasingSteps, IterativeRegularization, State
from fedbilevel.core.algorithm import phase
from fedbilevel.core.client import Client, Clients, RemoteClients
from fedbilevel.core.config import positive, positive_integer
from fedbilevel.core.errors import is_number, require
from fedbilevel.core.facts import Allows, Facts, No
from fedbilevel.core.fed import Fed, Reply
from fedbilevel.core.field_types import Number
from fedbilevel.core.own import refuse_local_steps
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree, move


class WholeSubgradient(IterativeRegularization):
    """Take one step in a round, along the mean subgradient over the samples of all clients.

    Args:
        batch_size: the number of samples that a client draws, with replacement; None: all samples.
    """

    batch_size: int | None = positive_integer(default=None, optional=True)

    def check(self, problem: Problem, clients: Clients | RemoteClients, x: PyTree, y: PyTree) -> None:
        refuse_local_steps(self.label, clients.own, "its server makes one step in a round")
        self.check_convexity(problem, x)

    @property
    def noise(self) -> Literal[True] | No:
        """Return whether replies may have noise: not with a tolerance for sums, which noise would hide."""
        hidden = f"tolerance = {self.tolerance} compares sums over all samples, which noise would hide: leave it out"
        return True if self.tolerance is None else No(hidden)

    @phase(takes=("x", "whole"), gives=("x",))
    def inner_subgradient(self, client: Client, at: tuple[PyTree, PyTree], key: Array) -> Reply:
        """Reply with g_i, a subgradient of the client's mean loss F_i at z, in the shape of x.

        If there is a tolerance, the reply also has a multiple of F_i, at x if the message has an x, and otherwise at z.
        """
        z, x = at
        problem: Any = client.problem
        loss, g = jax.value_and_grad(problem.inner, 0)(z, None, client.inner_batch(key))
        update = g, *self.inner_sum(client, z if x is None else x, key)
        return Reply(update, metrics={"inner_loss": loss}, gradients=1)

    def step_from(self, fed: Fed, state: State, z: PyTree, own: Any, key: Array) -> State:
        """Take a projected step from z, and return the new state, with `own` as its field `own`."""
        problem: Any = fed.problem
        gamma, penalty = self.step_sizes(state)
        other = None if self.tolerance is None or z is state.x else state.x
        g, *inner = fed.mean(self.inner_subgradient, (z, other), key, unbiased=True)
        outer, h = problem.preference(z)
        x = problem.project(move(z, -gamma, optax.tree.add_scale(g, penalty, h)))
        outer = outer if other is None else problem.outer(other, None, None)
        return self.next_state(state, x, gamma, inner, outer, own)


class IRG(WholeSubgradient, DecreasingSteps):
    """Run the iteratively regularized subgradient method: one step per round, along the subgradient of all clients.

    Mikhail V. Solodov. "An Explicit Descent Method for Bilevel Convex Optimization". Journal of Convex Analysis, 2007.
    """

    name = "irg"
    facts = Facts(
        paper="Solodov 2007",
        good_for="few samples; comparison with incremental methods",
        exchanges="one",
        up="1 like x",
        cost="a subgradient of f on the whole batch, once per round",
        bias="the weight λ_k of H, which falls",
    )

    @property
    def allows(self) -> Allows:
        return self.allows_with("inner_subgradient")._replace(noise=self.noise)

    def init_own(self, x: PyTree) -> None:
        return None

    def round(self, fed: Fed, state: State, key: Array) -> State:
        return self.step_from(fed, state, state.x, None, key)


class BiFISTA(WholeSubgradient):
    """Run the accelerated regularized gradient method: Nesterov's momentum, with steps of constant size.

    Args:
        lr: γ, a number or a schedule over rounds. It should be at most 1/(L_F + λ₁ L_H), where L_F and L_H are the
            Lipschitz constants of ∇F and ∇H.
        momentum: α, a number above 3. In round k the momentum x_k − x_{k−1} is multiplied by 1 − α/(k + α).

    Radu I. Boţ, Enis Chenchene, Robert Csetnek, David Hulett. "Accelerating Diagonal Methods for Bilevel Optimization:
    Unified Convergence via Continuous-Time Dynamics". 2025, arXiv:2505.14389.
    """

    name = "bi-fista"
    facts = Facts(
        paper="Boţ et al. 2025, arXiv:2505.14389",
        needs="smooth losses",
        good_for="smooth losses, many exchanges",
        exchanges="one",
        up="1 like x",
        cost="a subgradient of f on the whole batch, once per round",
        bias="the weight λ_k of H, which falls",
    )

    momentum: Number = positive(default=4.0)

    def validate(self) -> None:
        steep = not is_number(self.momentum) or self.momentum > 3
        require(steep, "BiFISTA.momentum", self.momentum, "above 3")

    @property
    def allows(self) -> Allows:
        late = No("its momentum tends to 1, so that its iterates diverge with gradients that are only one round late")
        return self.allows_with("inner_subgradient")._replace(late=late, noise=self.noise)

    def init_own(self, x: PyTree) -> PyTree:
        return x  # x of the round before

    def step_size(self, k: Array) -> Array:
        return jnp.asarray(self.lr, float)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        k = state.k.astype(float)
        z = move(state.x, 1 - self.momentum / (k + self.momentum), optax.tree.sub(state.x, state.own))
        return self.step_from(fed, state, z, state.x, key)

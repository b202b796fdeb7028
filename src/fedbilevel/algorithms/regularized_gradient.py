"""IRG and BiFISTA: simple bilevel problems by one step a round along the whole subgradient, plain or accelerated.

IRG: Mikhail V. Solodov. "An Explicit Descent Method for Bilevel Convex Optimization". Journal of Convex Analysis 14,
2007; with the decreasing steps of Amini and Yousefian (see fism.py) where Solodov searches along the line.

    x_{k+1} = P_X[x_k − γ_k (g + λ_k 𝓗_k)],     g ∈ ∂F(x_k) the mean of clients' g_i, 𝓗_k ∈ ∂H(x_k)

BiFISTA: Radu I. Boţ, Enis Chenchene, Robert Csetnek, David Hulett. "Accelerating Diagonal Methods for Bilevel
Optimization: Unified Convergence via Continuous-Time Dynamics". 2025, arXiv:2505.14389; much like Merchav, Sabach and
Teboulle's FBi-PG (2024).

    z_k = x_k + (1 − α/(k + α)) (x_k − x_{k−1}),     x_{k+1} = P_X[z_k − γ (∇F(z_k) + λ_k ∇H(z_k))]

Exchanges per round: one. The server sends a vector of x's shape (BiFISTA with `tolerance` two); clients reply with one
(with `tolerance` and a number).
Client state: none.
Cost per local step: a subgradient of f on the whole batch, once in a round.

Departures from the papers:
1. F is the mean over samples, weighted by client; λ is relative to that.
2. BiFISTA's paper has smooth losses and proximal steps. Here X is a set and its projection; an H with kinks has its
   subgradient in the place of a proximal step, with which the proof says nothing.

Checked in tests/algorithms/test_regularized_gradient.py (against NumPy, closed forms) and
tests/engines/test_agreement.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedbilevel.algorithms.parts.iterative_regularization import IterativeRegularization, State
from fedbilevel.core.algorithm import phase
from fedbilevel.core.client import Client
from fedbilevel.core.config import positive, static
from fedbilevel.core.errors import is_number, require, require_count
from fedbilevel.core.fed import Fed, Reply
from fedbilevel.core.tree import PyTree, move


class WholeSubgradient(IterativeRegularization):
    """What the two share.

    Args: those of `IterativeRegularization`, and
        batch_size: samples per draw, with replacement; None takes all samples.
    """

    batch_size: int | None = static(default=None)

    def validate(self) -> None:
        super().validate()
        require_count(f"{type(self).__name__}.batch_size", self.batch_size, optional=True)

    @phase(takes=("x", "whole"), gives=("x",))
    def inner_subgradient(self, client: Client, at: tuple[PyTree, PyTree], key: Array) -> Reply:
        """g_i at z, and with a tolerance what F needs: at x, where that is another point."""
        z, x = at
        problem: Any = client.problem
        loss, g = jax.value_and_grad(problem.inner, 0)(z, None, client.inner_batch(key, self.batch_size))
        answer = g, *self.told(client, z if x is None else x, key)
        return Reply(answer, metrics={"inner_loss": loss}, gradients=1)

    def step_from(self, fed: Fed, state: State, z: PyTree, own: Any, key: Array) -> State:
        """One projected step from z."""
        problem: Any = fed.problem
        gamma, penalty = self.step_sizes(state)
        other = None if self.tolerance is None or z is state.x else state.x
        g, *told = fed.mean(self.inner_subgradient, (z, other), key, unbiased=True)
        outer, h = problem.preference(z)
        x = problem.project(move(z, -gamma, optax.tree.add_scale(g, penalty, h)))
        outer = outer if other is None else problem.outer(other, None, None)
        return self.moved(state, x, gamma, told, outer, own)


class IRG(WholeSubgradient):
    """Iteratively regularized subgradient method: one step of all clients together in a round.

    Args: those of `IterativeRegularization`, and
        batch_size: samples per draw, with replacement; None takes all samples.

    Mikhail V. Solodov. "An Explicit Descent Method for Bilevel Convex Optimization". Journal of Convex Analysis, 2007.

    Needs: a simple bilevel problem.
    Good for: few samples; a yardstick for incremental methods.
    Vectors up per client: 1 like x. Hvps per client: none. Bias: λ_k.
    """

    name = "irg"

    @property
    def asynchronous_phases(self) -> tuple[str, ...]:
        return ("inner_subgradient",) if self.tolerance is None else ()

    def round(self, fed: Fed, state: State, key: Array) -> State:
        return self.step_from(fed, state, state.x, None, key)


class BiFISTA(WholeSubgradient):
    """Accelerated regularized gradient method: Nesterov's momentum, steps of constant size.

    Args: those of `IterativeRegularization`, of which lr is γ, at most 1/(L_F + λ₁ L_H), and lr_decay has no part, and
        momentum: α, above 3.
        batch_size: samples per draw, with replacement; None takes all samples.

    Radu I. Boţ, Enis Chenchene, Robert Csetnek, David Hulett. "Accelerating Diagonal Methods for Bilevel Optimization:
    Unified Convergence via Continuous-Time Dynamics". 2025, arXiv:2505.14389.

    Needs: a simple bilevel problem with smooth losses.
    Good for: smooth losses, many exchanges.
    Vectors up per client: 1 like x. Hvps per client: none. Bias: λ_k.
    """

    name = "bi-fista"

    momentum: float = positive(default=4.0)

    def validate(self) -> None:
        super().validate()
        steep = not is_number(self.momentum) or self.momentum > 3
        require(steep, "BiFISTA.momentum", self.momentum, "above 3")

    def check_decay(self) -> None:
        """Steps have a constant size: λ_k → 0 is all that is asked."""

    def init_own(self, x: PyTree) -> PyTree:
        return x  # of the round before

    def step_sizes(self, state: State) -> tuple[Array, Array]:
        return jnp.asarray(self.lr, float), super().step_sizes(state)[1]

    def round(self, fed: Fed, state: State, key: Array) -> State:
        k = state.k.astype(float)
        z = move(state.x, 1 - self.momentum / (k + self.momentum), optax.tree.sub(state.x, state.own))
        return self.step_from(fed, state, z, state.x, key)

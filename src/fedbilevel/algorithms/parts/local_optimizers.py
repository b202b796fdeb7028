"""Local coefficients a_0..a_{τ−1}: how a client's gradients d_0..d_{τ−1} make up its τ local steps.

Jianyu Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization" (FedNova),
NeurIPS 2020, section 4: local optimizers whose total update is a linear combination of their gradients,

    z_0 − z_τ = η Σ_{k<τ} a_k d_k,   d_k taken at z_k.

The a_k depend on τ, but for plain steps: on its way the iterate is z_k = z_0 − η Σ_{j<k} a_j d_j with the a_j of k
steps. So a client carries the sum q of the steps so far and what its optimizer remembers, and no a_k. Their sum ‖a‖₁
depends on τ alone, whatever η and the gradients are; q/‖a‖₁ is a weighted mean of the d_k.
"""

from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedbilevel.core.config import config, fraction
from fedbilevel.core.tree import PyTree, move, scaled

Count = int | Array


class LocalOptimizer(Protocol):
    """A local optimizer whose iterate is z_0 − ηq, q = Σ a_k d_k with a_k ≥ 0."""

    def begin(self, like: PyTree) -> PyTree:
        """The optimizer's memory before the first step; q and d have the shapes of `like`."""
        ...

    def step(self, q: PyTree, memory: PyTree, d: PyTree) -> tuple[PyTree, PyTree]:
        """The next q and the next memory, d being the gradient at z_0 − ηq."""
        ...

    def total(self, tau: Count) -> Array:
        """‖a‖₁ = Σ_{k<τ} a_k, the sum of the coefficients of `tau` steps."""
        ...


@config
class Plain:
    """Gradient steps: a_k = 1."""

    kind: ClassVar[str] = "plain"

    def begin(self, like: PyTree) -> PyTree:
        """Nothing is remembered between steps."""
        return None

    def step(self, q: PyTree, memory: PyTree, d: PyTree) -> tuple[PyTree, PyTree]:
        """q + d, and no memory: the next sum of directions after the gradient d."""
        return optax.tree.add(q, d), None

    def total(self, tau: Count) -> Array:
        """‖a‖₁ = τ, the sum of the coefficients of τ steps."""
        return jnp.asarray(tau, float)


@config
class Momentum:
    """Heavy ball from rest: m ← μm + d, z ← z − ηm; a_k = (1 − μ^{τ−k}) / (1 − μ).

    Args:
        decay: μ, the factor of the earlier directions in each step, strictly between 0 and 1.
    """

    kind: ClassVar[str] = "momentum"

    decay: float = fraction(default=0.9)

    def begin(self, like: PyTree) -> PyTree:
        """The momentum m before the first step: zeros in the shapes of `like`."""
        return optax.tree.zeros_like(like)

    def step(self, q: PyTree, memory: PyTree, d: PyTree) -> tuple[PyTree, PyTree]:
        """(q + m, m) with m = μ·memory + d: the next sum of steps, and the momentum after the gradient d."""
        m = move(d, self.decay, memory)
        return optax.tree.add(q, m), m

    def total(self, tau: Count) -> Array:
        """‖a‖₁, the sum of the coefficients of τ steps."""
        return added_up(self, tau)


@config
class Proximal:
    """FedProx: z ← z − ηd − α(z − z_0), the loss having (α/2η)‖z − z_0‖² added; a_k = (1 − α)^{τ−1−k}.

    Args:
        pull: α, the part of the way back to z_0 in each step, strictly between 0 and 1.
    """

    kind: ClassVar[str] = "proximal"

    pull: float = fraction(default=0.1)

    def begin(self, like: PyTree) -> PyTree:
        """Nothing is remembered between steps."""
        return None

    def step(self, q: PyTree, memory: PyTree, d: PyTree) -> tuple[PyTree, PyTree]:
        """((1 − α) q + d, no memory): the next sum of steps after the gradient d."""
        return optax.tree.add(scaled(1 - self.pull, q), d), None

    def total(self, tau: Count) -> Array:
        """‖a‖₁, the sum of the coefficients of τ steps."""
        return added_up(self, tau)


def added_up(optimizer: LocalOptimizer, tau: Count) -> Array:
    """Σ_{k<τ} a_k, as the q of τ gradients that are all 1: sums of positive numbers, exact to rounding.

    Closed forms, such as (1 − (1 − α)^τ)/α, lose all digits in float32 where α or 1 − μ is small.
    """
    one = jnp.ones(())

    def step(k: Array, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        return optimizer.step(*carry, one)

    total, _ = jax.lax.fori_loop(0, tau, step, (jnp.zeros(()), optimizer.begin(one)))
    return jnp.asarray(total)

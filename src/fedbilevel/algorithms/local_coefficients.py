"""Local coefficients a_0..a_{τ−1}: how a client weighs the gradients of its τ local steps.

Jianyu Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization" (FedNova),
NeurIPS 2020, section 4: local optimizers whose total update is a linear combination Σ a_k d_k of their gradients.
"""

from typing import Any, Protocol

import jax.numpy as jnp
from jax import Array

from fedbilevel.core.config import config, fraction

Count = int | Array


class Coefficients(Protocol):
    """a_k ≥ 0 for 0 ≤ k < τ."""

    def at(self, k: Count, tau: Count) -> Any:
        """a_k."""
        ...

    def total(self, tau: Count) -> Array:
        """‖a‖₁ = Σ_{k<τ} a_k."""
        ...


@config
class Plain:
    """Gradient steps: a_k = 1."""

    def at(self, k: Count, tau: Count) -> Any:
        return 1

    def total(self, tau: Count) -> Array:
        return jnp.asarray(tau, float)


@config
class Momentum:
    """Heavy-ball momentum μ = `decay`: a_k = (1 − μ^{τ−k}) / (1 − μ)."""

    decay: float = fraction(0.9)

    def at(self, k: Count, tau: Count) -> Any:
        return (1 - jnp.power(self.decay, tau - k)) / (1 - self.decay)

    def total(self, tau: Count) -> Array:
        mu = self.decay
        return (tau - mu * (1 - jnp.power(mu, tau)) / (1 - mu)) / (1 - mu)


@config
class Proximal:
    """Steps on the loss plus a pull to the start, of strength α = `pull` per step: a_k = (1 − α)^{τ−1−k}."""

    pull: float = fraction(0.1)

    def at(self, k: Count, tau: Count) -> Any:
        return jnp.power(1 - self.pull, tau - 1 - k)

    def total(self, tau: Count) -> Array:
        return (1 - jnp.power(1 - self.pull, tau)) / self.pull

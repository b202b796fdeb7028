"""The local steps of a client on one variable: plain ones, and ones corrected for the difference between clients."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax import Array

from fedbilevel.core.tree import PyTree, move

Gradient = Callable[[PyTree, Array], PyTree]
"""(point, key) -> the client's own gradient at that point, on samples that the key draws."""


def local_descent(gradient: Gradient, start: PyTree, tau: int | Array, lr: Any, key: Array) -> PyTree:
    """FedAvg's local steps: the change of `start` after τ gradient steps of size lr/τ."""

    def step(k: Array, change: PyTree) -> PyTree:
        return move(change, -lr / tau, gradient(optax.tree.add(start, change), jax.random.fold_in(key, k)))

    return jax.lax.fori_loop(0, tau, step, optax.tree.zeros_like(start))


def corrected_drift(
    gradient: Gradient, start: PyTree, mean_gradient: PyTree, tau: int | Array, lr: Any, key: Array
) -> PyTree:
    """Federated SVRG's local steps, of size lr/τ along ∇(point; ζ_ν) − ∇(start; ζ_ν) + q, with q the mean gradient.

    Returns what they change beyond −lr·q, the part that all clients have in common: nothing for τ = 1.

    Jakub Konečný et al., arXiv:1610.02527; as FedLin: Aritra Mitra et al., NeurIPS 2021.
    """

    def step(k: Array, drift: PyTree) -> PyTree:
        point = move(optax.tree.add(start, drift), -lr * k / tau, mean_gradient)
        step_key = jax.random.fold_in(key, k)
        return move(drift, -lr / tau, optax.tree.sub(gradient(point, step_key), gradient(start, step_key)))

    return jax.lax.fori_loop(1, tau, step, optax.tree.zeros_like(start))  # the first step is along q itself

"""The local steps of a client on one variable: plain ones, and ones corrected for the difference between clients."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax import Array

from fedbilevel.core.tree import PyTree, move

Gradient = Callable[[PyTree, Array], PyTree]
"""(point, key) -> the client's own gradient there, on samples that the key draws."""


def local_descent(gradient: Gradient, start: PyTree, tau: int | Array, lr: Any, key: Array) -> PyTree:
    """FedAvg's local steps: the change of `start` after τ gradient steps of size lr/τ."""
    return _steps(gradient, start, optax.tree.zeros_like(start), 0, tau, lr, key)


def corrected_descent(
    gradient: Gradient, start: PyTree, mean_gradient: PyTree, tau: int | Array, lr: Any, key: Array
) -> PyTree:
    """Federated SVRG's local steps: the change of `start` after τ steps of size lr/τ along

        ∇(point; ζ_ν) − ∇(start; ζ_ν) + q        with q the mean gradient of all clients at `start`.

    Jakub Konečný et al., arXiv:1610.02527; as FedLin: Aritra Mitra et al., NeurIPS 2021. The first step is along q
    itself, whatever is drawn.
    """

    def corrected(point: PyTree, key: Array) -> PyTree:
        change = optax.tree.sub(gradient(point, key), gradient(start, key))
        return optax.tree.add(change, mean_gradient)

    first = move(optax.tree.zeros_like(start), -lr / tau, mean_gradient)
    return _steps(corrected, start, first, 1, tau, lr, key)


def _steps(
    direction: Gradient, start: PyTree, change: PyTree, begin: int, tau: int | Array, lr: Any, key: Array
) -> PyTree:
    def step(k: Array, change: PyTree) -> PyTree:
        d = direction(optax.tree.add(start, change), jax.random.fold_in(key, k))
        return move(change, -lr / tau, d)

    return jax.lax.fori_loop(begin, tau, step, change)

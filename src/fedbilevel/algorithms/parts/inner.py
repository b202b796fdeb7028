"""How a method brings y near y*(x): rounds of local steps on y at a fixed x, each with exchanges of its own."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import jax
import optax
from jax import Array

from fedbilevel.algorithms.parts.local_steps import Gradient, corrected_drift, local_descent
from fedbilevel.core.algorithm import Part, phase
from fedbilevel.core.client import Client
from fedbilevel.core.config import positive, positive_integer
from fedbilevel.core.fed import Fed, Reply
from fedbilevel.core.tree import PyTree, move, scaled
from fedbilevel.oracles.fixed_x import inner_loss_at


class InnerRounds(Part):
    """Rounds of local steps on y, each with exchanges of its own.

    Args:
        rounds: T, rounds of steps on y for each step on x.
        local_steps: τ_i, a client's local steps in each of these rounds; a number that the clients bring themselves
            (`Clients.local_steps`) takes precedence.
    """

    rounds: int = positive_integer(default=1)
    local_steps: int = positive_integer(default=5)

    @abstractmethod
    def once(self, fed: Fed, x: PyTree, y: PyTree, key: Array, merged: bool) -> PyTree:
        """y after one round of steps from y at a fixed x; `merged=True` omits exchanges that are known to give 0."""

    def descend(
        self, fed: Fed, x: PyTree, y: PyTree, key: Array, *, rounds: int | Array | None = None, merged: bool = False
    ) -> PyTree:
        """y after so many rounds of steps from y at a fixed x; None: as many as the field `rounds` says."""
        number = self.rounds if rounds is None else rounds
        return fed.repeat(number, lambda fed, y, key: self.once(fed, x, y, key, merged), y, key)

    def gradient_at(self, client: Client, x: PyTree, y: PyTree) -> Gradient:
        """(y, key) -> ∇y g_i(x, y) on drawn samples."""
        return inner_loss_at(client, x, y, client.batch_size, self.local_steps).gradient


class InnerSteps(InnerRounds):
    """Rounds of local steps on y. The server changes y by the mean of the clients' changes.

    Args:
        lr: β; a client's step is β/τ_i.
        server_lr: factor on the mean change of y. Papers use 1. Up to M is possible where each client has inner
            unknowns of its own; with submodels, up to the smallest number of clients that hold an entry.
    """

    lr: float = positive(default=0.5)
    server_lr: float = positive(default=1.0)

    @abstractmethod
    def leaves_out(self) -> bool:
        """True if these rounds make fewer exchanges with `merged=True` than without."""


class LocalSGD(InnerSteps):
    """FedAvg on y: τ_i plain steps, then the mean. One exchange a round."""

    kind: ClassVar[str] = "sgd"

    def once(self, fed: Fed, x: PyTree, y: PyTree, key: Array, merged: bool) -> PyTree:
        return move(y, self.server_lr, fed.mean(self.descent, (x, y), key, unbiased=True))

    def leaves_out(self) -> bool:
        return False

    @phase(takes=("x", "y"), gives="y")
    def descent(self, client: Client, at: tuple[PyTree, PyTree], key: Array) -> Reply:
        """The change of y by τ_i plain steps."""
        x, y = at
        tau = client.local_steps(self.local_steps)
        return Reply(local_descent(self.gradient_at(client, x, y), y, tau, self.lr, key), gradients=tau)


class SVRG(InnerSteps):
    """FedNest's FedInn: local steps corrected for the difference between clients. Two exchanges a round.

    q = mean_i ∇y g_i(x, y; ζ_i)
    y_{i,ν+1} = y_{i,ν} − (β/τ_i) [∇y g_i(x, y_{i,ν}; ζ_ν) − ∇y g_i(x, y; ζ_ν) + q],   y ← mean_i y_{i,τ_i}
    """

    kind: ClassVar[str] = "svrg"

    def once(self, fed: Fed, x: PyTree, y: PyTree, key: Array, merged: bool) -> PyTree:
        first, second = jax.random.split(key)
        q = fed.mean(self.gradient, (x, y), first, unbiased=True)
        change = scaled(-self.lr, q)
        if not (merged and self.local_steps == 1 and not fed.has_client_steps):  # the drift of a single step is zero
            change = optax.tree.add(change, fed.mean(self.corrected_descent, (x, y, q), second))
        return move(y, self.server_lr, change)

    def leaves_out(self) -> bool:
        return self.local_steps == 1

    @phase(takes=("x", "y"), gives="y")
    def gradient(self, client: Client, at: tuple[PyTree, PyTree], key: Array) -> Reply:
        """∇y g_i, to be averaged into q."""
        loss, gradient = jax.value_and_grad(client.problem.inner, 1)(*at, client.inner_batch(key))
        return Reply(gradient, metrics={"inner_loss": loss}, gradients=1)

    @phase(takes=("x", "y", "y"), gives="y")
    def corrected_descent(self, client: Client, at: tuple[PyTree, PyTree, PyTree], key: Array) -> Reply:
        """The change of y by τ_i corrected steps, less −βq, which all clients have in common."""
        x, y, q = at
        tau = client.local_steps(self.local_steps)
        drift = corrected_drift(self.gradient_at(client, x, y), y, q, tau, self.lr, key)
        return Reply(drift, gradients=2 * (tau - 1))


def mean_gradient(gradient: Gradient, y: PyTree, count: int | Array, lr: Any, key: Array) -> PyTree:
    """(1/E) Σ_e ∇g(y_e), along E local steps y_{e+1} = y_e − lr ∇g(y_e) from y."""

    def step(e: Array, total: PyTree) -> PyTree:
        return optax.tree.add(total, gradient(move(y, -lr, total), jax.random.fold_in(key, e)))

    total = jax.lax.fori_loop(0, count, step, optax.tree.zeros_like(y))
    return jax.tree.map(lambda leaf: leaf / count, total)


class MeanGradient(InnerRounds):
    """AFBO's inner rounds: clients reply with the mean gradient along their local steps, the server steps along it.

    Args:
        client_lr: η, a client's step.
        lr: β, the server's step.
    """

    kind: ClassVar[str] = "mean-gradient"

    client_lr: float = positive(default=0.01)
    lr: float = positive(default=0.5)

    def once(self, fed: Fed, x: PyTree, y: PyTree, key: Array, merged: bool) -> PyTree:
        return move(y, -self.lr, fed.mean(self.gradients, (x, y), key, unbiased=True))

    @phase(takes=("x", "y"), gives="y")
    def gradients(self, client: Client, at: tuple[PyTree, PyTree], key: Array) -> Reply:
        """G_i, the mean of the gradients along E_i local steps on y."""
        x, y = at
        count = client.local_steps(self.local_steps)
        return Reply(mean_gradient(self.gradient_at(client, x, y), y, count, self.client_lr, key), gradients=count)

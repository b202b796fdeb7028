"""Run the inner loop, which brings y near y*(x): rounds of local steps on y at a fixed x, with their exchanges."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from jax import Array

from fedbilevel.algorithms.parts.local_steps import Gradient, LocalWork, local_descent
from fedbilevel.core.algorithm import phase
from fedbilevel.core.client import Client
from fedbilevel.core.config import positive, positive_integer
from fedbilevel.core.fed import Fed, Reply
from fedbilevel.core.field_types import Count, Number, Step
from fedbilevel.core.tree import PyTree, move
from fedbilevel.oracles.fixed_x import inner_loss_at


class InnerRounds(LocalWork):
    """Run rounds of local steps on y, each with its own exchanges.

    Args:
        rounds: T, the number of rounds on y for each step on x; a number, or a function of the round, such as
            `lambda k: 1 + k // 100`.
        local_steps: τ_i, the number of a client's local steps in each of these rounds; `Clients.local_steps` takes
            precedence.
    """

    steps_on = "inner"

    rounds: Count = positive_integer(default=1, scheduled=True)

    @abstractmethod
    def once(self, fed: Fed, x: PyTree, y: PyTree, key: Array) -> PyTree:
        """Return y after a round of steps that start from `y` at a fixed x."""

    def descend(self, fed: Fed, x: PyTree, y: PyTree, key: Array, rounds: int | Array | None = None) -> PyTree:
        """Return y after `rounds` rounds of steps that start from `y` at a fixed x; None: the field `rounds`."""
        number = self.rounds if rounds is None else rounds
        return fed.repeat(number, lambda fed, y, key: self.once(fed, x, y, key), y, key)

    def gradient_at(self, client: Client, x: PyTree, y: PyTree) -> Gradient:
        """Return the function (y, draw) -> ∇y g_i(x, y), in the shape of y, on the samples of a draw."""
        return inner_gradient(self, client, x, y)


class InnerSteps(InnerRounds):
    """Run rounds of local steps on y, in which the server changes y by the mean of the clients' changes.

    Args:
        server_lr: the factor by which the mean change of y is multiplied. In papers it is 1. If each entry of y appears
            in the loss of only one client, the mean over M clients divides the change of this entry by M, and the
            factor can be up to M. With submodels it can be up to the smallest number of clients that hold an entry.
    """

    server_lr: Number = positive(default=1.0)


class LocalSGD(InnerSteps):
    """Run FedAvg on y: τ_i plain local steps, then the mean over clients. A round takes one exchange.

    y_{i,ν+1} = y_{i,ν} − (β/τ_i) ∇y g_i(x, y_{i,ν}; ζ_ν),   y ← mean_i y_{i,τ_i}

    Args:
        lr: β, the total size of a client's τ_i steps; each has the size β/τ_i. None: β adapts during the run
            (`AdaptiveSteps`).
    """

    kind: ClassVar[str] = "sgd"

    lr: Step = positive(default=None, own=True, adaptive="total")

    def once(self, fed: Fed, x: PyTree, y: PyTree, key: Array) -> PyTree:
        return move(y, self.server_lr, fed.mean(self.descent, (x, y), key, unbiased=True))

    @phase(takes=("x", "y"), gives="y", measures=True)
    def descent(self, client: Client, at: tuple[PyTree, PyTree], key: Array) -> Reply:
        """Reply with the change of y after τ_i plain gradient steps, in the shape of y."""
        x, y = at
        steps = self.steps(client, key)
        change = local_descent(self.gradient_at(client, x, y), y, steps, self.lr / steps.tau)
        return Reply(change, gradients=steps.tau)


def inner_gradient(work: LocalWork, client: Client, x: PyTree, y: PyTree) -> Gradient:
    """Return a function (y, draw) -> ∇y g_i(x, y) for the local steps of client i, in the shape of y.

    `draw` selects the samples of a batch. The number of steps, which is in the fields of `work`, decides whether values
    that do not depend on y are computed once, before the steps.
    """
    steps = work.local_steps
    if work.local_epochs is not None and client.batch_size is not None:
        steps = work.local_epochs * (client.inner.longest // client.batch_size)
    return inner_loss_at(client, x, y, client.batch_size, steps).gradient

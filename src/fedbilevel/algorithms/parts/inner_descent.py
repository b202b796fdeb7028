"""FedAvg on the inner variable: what methods share that first bring y near y*(x), by exchanges of its own."""

from typing import Any

from jax import Array

from fedbilevel.algorithms.parts.batches import Batches
from fedbilevel.algorithms.parts.local_descent import Gradient, local_descent
from fedbilevel.core.algorithm import phase
from fedbilevel.core.client import Client
from fedbilevel.core.config import positive, static
from fedbilevel.core.errors import require_count
from fedbilevel.core.fed import Fed, Reply
from fedbilevel.core.tree import PyTree, move
from fedbilevel.oracles.fixed_x import inner_loss_at


class InnerDescent(Batches):
    """The fields of the steps on y, and one round of FedAvg.

    Args: that of `Batches`, and
        inner_rounds: rounds of steps on y for each step of x.
        local_steps: τ_i on y, where the population does not give each client its own.
        inner_lr: β; a client's step is β/τ_i.
    """

    inner_rounds: int = static(default=1)
    local_steps: int = static(default=5)
    inner_lr: float = positive(default=0.5)

    def validate(self) -> None:
        super().validate()
        name = self.label
        for field in ("inner_rounds", "local_steps"):
            require_count(f"{name}.{field}", getattr(self, field))

    @phase(takes=("x", "y"), gives="y")
    def inner_descent(self, client: Client, at: tuple[PyTree, PyTree], key: Array) -> Reply:
        """FedAvg: τ_i plain steps on y."""
        x, y = at
        tau = client.local_steps(self.local_steps)
        change = local_descent(self.inner_gradient_at(client, x, y), y, tau, self.inner_lr, key)
        return Reply(change, gradients=tau)

    def inner_gradient_at(self, client: Client, x: PyTree, y: PyTree) -> Gradient:
        """(y, key) -> ∇y g_i(x, y) on drawn samples."""
        return inner_loss_at(client, x, y, self.batch_size, self.local_steps).gradient

    def plain_inner(
        self, fed: Fed, x: PyTree, y: PyTree, key: Array, rounds: int | Array, server_lr: Any = 1.0
    ) -> PyTree:
        """That many rounds of FedAvg on y, one exchange each; the server goes `server_lr` times the mean change."""

        def once(fed: Fed, y: PyTree, key: Array) -> PyTree:
            return move(y, server_lr, fed.mean(self.inner_descent, (x, y), key, unbiased=True))

        return fed.repeat(rounds, once, y, key)

"""Write a method of your own as one class: federated averaging of y, then one step on x.

Run: python examples/own_algorithm.py

A round has two exchanges. First, clients train y on their own samples, and the server averages the results. Then each
client computes a hypergradient with its own Hessian, and the server makes a step against the mean of these
hypergradients. The method is naive on purpose: if clients differ, the mean of their own hypergradients is not the
hypergradient of the mean problem. So the method ends at a distance from the solution. The task has a closed form, which
shows how large this distance is.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

import fedbilevel as fb
from fedbilevel.authoring import (
    Algorithm,
    Client,
    Fed,
    Reply,
    conjugate_gradient,
    cross_v,
    hess_v,
    phase,
    positive,
    static,
)
from fedbilevel.tasks import quadratic


class State(NamedTuple):
    """Hold the server's state between rounds."""

    x: Any
    y: Any


class AveragedSteps(Algorithm):
    """Average y over clients, then step on x along the mean of the clients' own hypergradients.

    The fields are hyperparameters. The values of `static` fields are fixed in the compiled program. `positive` fields
    are numbers or schedules.
    """

    local_steps: int = static(default=5)
    batch_size: int | None = static(default=None)
    inner_lr: float = positive(default=0.1)
    outer_lr: float = positive(default=0.02)

    def init(self, x: Any, y: Any) -> State:
        return State(x, y)

    @phase
    def train(self, client: Client, message: State, key: jax.Array) -> Reply:
        """Take gradient steps on the client's inner loss, and reply with the y at their end."""
        steps = client.local_steps(self.local_steps)

        def step(k: jax.Array, y: Any) -> Any:
            batch = client.inner_batch(jax.random.fold_in(key, k), self.batch_size)
            gradient = jax.grad(client.problem.inner, argnums=1)(message.x, y, batch)
            return jax.tree.map(lambda a, g: a - self.inner_lr * g, y, gradient)

        return Reply(jax.lax.fori_loop(0, steps, step, message.y), gradients=steps)

    @phase
    def hypergradient(self, client: Client, message: State, key: jax.Array) -> Reply:
        """Reply with ∇x f_i − ∇²xy g_i v_i, where v_i solves ∇²yy g_i v_i = ∇y f_i on the client's own samples."""
        problem, (x, y) = client.problem, message
        outer, inner = client.outer_batch(key, None), client.inner_batch(key, None)
        loss, (grad_x, grad_y) = jax.value_and_grad(problem.outer, argnums=(0, 1))(x, y, outer)
        solved = conjugate_gradient(lambda v: hess_v(problem, x, y, v, inner), grad_y, iterations=20)
        update = jax.tree.map(lambda a, b: a - b, grad_x, cross_v(problem, x, y, solved.v, inner))
        metrics = {"outer_loss": loss, "residual": solved.residual}
        return Reply(update, metrics=metrics, gradients=1, hvps=solved.iterations + 1)

    def round(self, fed: Fed, state: State, key: jax.Array) -> State:
        train_key, outer_key = jax.random.split(key)
        y = fed.mean(self.train, state, train_key)
        direction = fed.mean(self.hypergradient, State(state.x, y), outer_key)
        return State(jax.tree.map(lambda a, d: a - self.outer_lr * d, state.x, direction), y)


def main() -> None:
    jax.config.update("jax_enable_x64", True)

    def run(algorithm: Any, task: Any, rounds: int, engine: Any = None) -> fb.Result:
        return fb.solve(algorithm, task.problem, task.clients, task.x0, task.y0,
                        rounds=rounds, engine=engine, metrics=task.metrics)  # fmt: skip

    for heterogeneity in (0.0, 1.0):
        task = quadratic(heterogeneity=heterogeneity, condition=3)
        own = run(AveragedSteps(), task, 2000)
        sim = run(fb.SimFBO(local_steps=1, batch_size=None, server_lr=fb.XYV(x=0.02, y=0.5, v=0.5)), task, 2000)
        errors = [result.history["relative_error"][-1] for result in (own, sim)]
        print(f"heterogeneity {heterogeneity}: relative error of x {errors[0]:.1e}, SimFBO {errors[1]:.1e}")

    task = quadratic(clients=2)
    compiled, plain = (run(AveragedSteps(local_steps=2), task, 1, engine) for engine in (fb.Local(), fb.Reference()))
    print(f"compiled and plain Python differ by {np.max(np.abs(compiled.x - plain.x)):.1e}")
    print(f"exchanges by phase: {compiled.ledger.exchanges_by_phase}")


if __name__ == "__main__":
    main()

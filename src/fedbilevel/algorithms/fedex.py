"""FedEx: hyperparameter tuning by exponentiated gradient over random configurations, without hypergradients.

Mikhail Khodak, Renbo Tu, Tian Li, Liam Li, Maria-Florina Balcan, Virginia Smith, Ameet Talwalkar. "Federated
Hyperparameter Tuning: Challenges, Baselines, and Connections to Weight-Sharing". NeurIPS 2021, arXiv:2106.04502.
Algorithm 2.

The outer variable x contains the hyperparameters. A configuration is a value of x. There are k configurations
c_1 … c_k, and θ is a distribution over them, which is uniform at first. All configurations share one y. The server
sends y, c_1 … c_k, θ and λ. Client i draws the number J_i of a configuration from θ. It makes τ_i local steps on y at
x = c_{J_i}, on inner samples. Then it computes the outer loss at its last iterate y_i, on all its outer samples:

    y_{i,ν+1} = y_{i,ν} − β ∇y g_i(c_{J_i}, y_{i,ν}; ζ_ν) from y,   ν < τ_i
    y ← y + s mean_i (y_i − y),  s = `server_lr`, 1 in FedAvg
    ∇̃_j = mean_i (f_i(c_{J_i}, y_i) − λ) 1[J_i = j] / θ_j          an estimate of the mean loss's gradient in θ
    θ_j ← θ_j exp(−η ∇̃_j) / Σ_l θ_l exp(−η ∇̃_l)                       the exponentiated gradient

A round takes one exchange. Means are Σ p_i u_i / Σ p_i over the cohort. The baseline λ is a weighted mean of the
earlier rounds' mean losses: a loss that is j rounds older has γ^j times the weight. In the first round λ is 0. The
field `step_rule` determines the step size η:

    aggressive   √(2 log k) / ‖∇̃‖_∞
    adaptive     √(2 log k) / (the root of the sum of ‖∇̃‖²_∞ over the rounds so far)
    constant     √(2 log k)

The server's x is the configuration with the largest θ_j, and the first one if there are several.

Departures from the paper:
1. Both means have the weights p_i of the problem. The paper's weights are the numbers of validation samples and of
   training samples.
2. Configurations are an input of Algorithm 2. Here c_1 is x0. Every entry of the other configurations is drawn
   uniformly between `low` and `high`, in the first round, by the seed of the run.
3. Configurations are sent with every message, since clients keep no state between rounds.
4. The paper's tuned method runs FedEx inside a random search, or inside successive halving, over other
   hyperparameters. Here FedEx runs without such a search. The authors' code also stops moving θ when the entropy of θ
   is small. This implementation does not.

Checked in tests/algorithms/test_fedex.py (rounds written out in NumPy) and tests/engines/test_agreement.py.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedbilevel.algorithms.parts.inner import inner_gradient
from fedbilevel.algorithms.parts.local_steps import LocalWork, local_descent
from fedbilevel.core.algorithm import Algorithm, phase
from fedbilevel.core.client import Client, Clients, RemoteClients
from fedbilevel.core.config import positive, positive_integer, share, static
from fedbilevel.core.errors import UnsupportedError, is_number, require
from fedbilevel.core.facts import Allows, Facts, No
from fedbilevel.core.fed import Fed, Reply
from fedbilevel.core.field_types import Number, Step
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree, move, over


class State(NamedTuple):
    """Hold the server's state.

    Args:
        x: the configuration with the largest θ_j.
        y: the inner variable, which all configurations share.
        configurations: c_1 … c_k, as arrays of x's shapes with a leading axis of length k.
        theta: θ, an array of shape (k,).
        losses: the sum of the earlier rounds' mean losses, each multiplied by the field `discount` for every round
            since then.
        rounds: the same sum with 1 in place of each loss; 0 before the first round.
        squares: the sum of the squares ‖∇̃‖²_∞ over the rounds so far.
    """

    x: PyTree
    y: PyTree
    configurations: PyTree
    theta: Array
    losses: Array
    rounds: Array
    squares: Array


class Message(NamedTuple):
    """Hold the server's message: y, the configurations c_1 … c_k, their probabilities θ, and the baseline loss λ."""

    y: PyTree
    configurations: PyTree
    theta: Any
    baseline: Any


class TrainingAtX(LocalWork, Algorithm):
    """Base class of methods whose clients train y at random values of x, by FedAvg's local steps on the inner loss.

    Args:
        low: the lower bound of the random entries of x.
        high: the upper bound of the random entries of x.
        lr: β, the size of a client's local step; None: it adapts during the run (`AdaptiveSteps`).
        server_lr: s, the factor by which the server multiplies the mean change of y.
        batch_size: the number of samples for a step on y. They are drawn with replacement, but without replacement
            if the client makes `local_epochs`. None: all samples.
    """

    steps_on = "inner"

    low: float | None = static(default=None)
    high: float | None = static(default=None)
    lr: Step = positive(default=None, own=True, adaptive="local")
    server_lr: Number = positive(default=1.0)
    batch_size: int | None = positive_integer(default=32, optional=True)

    def validate(self) -> None:
        both = is_number(self.low) and is_number(self.high) and self.low < self.high  # type: ignore[operator]
        fits, allowed = both or self.low is self.high is None, "two numbers, low < high, or both None"
        require(fits, f"{type(self).__name__}.low, high", (self.low, self.high), allowed)

    def trained(self, client: Client, x: PyTree, y: PyTree, key: Array) -> Reply:
        """Return a reply with the change of y after τ_i local steps on the inner loss from `y`, at a fixed x."""
        steps = self.steps(client, key)
        change = local_descent(inner_gradient(self, client, x, y), y, steps, self.lr)
        return Reply(change, gradients=steps.tau)

    def bounds(self, start: Array) -> tuple[Array, Array]:
        """Return the lower and upper bounds of a leaf of x: `low` and `high`, or `start` − 1 and `start` + 1."""
        if self.low is None or self.high is None:
            return start - 1, start + 1
        return jnp.full_like(start, self.low), jnp.full_like(start, self.high)

    def check(self, problem: Problem, clients: Clients | RemoteClients, x: PyTree, y: PyTree) -> None:
        """Refuse bounds of x if the point of all lower bounds, or of all upper bounds, is outside the problem's set."""
        for side in (0, 1):
            corner = jax.tree.map(lambda leaf, side=side: self.bounds(leaf)[side], x)
            nearest = corner if problem.project_x is None else problem.project_x(corner)
            inside = all(map(jnp.allclose, jax.tree.leaves(nearest), jax.tree.leaves(corner)))
            allowed = "in the set to which the problem restricts x (project_x; in a spec, run.x_bounds)"
            if not inside:
                path = f"{type(self).__name__}.{('low', 'high')[side]}"
                raise UnsupportedError(path=path, got=(self.low, self.high)[side], allowed=allowed)


class FedEx(TrainingAtX):
    """Let clients train y at random configurations, and learn from their losses which configuration is best.

    Args:
        low: the lower bound of every entry of a random configuration; None: 1 less than the same entry of x0.
        high: the upper bound of every entry of a random configuration; None: 1 more than the same entry of x0.
        configurations: k, the number of configurations. The first is x0.
        discount: γ, at least 0 and below 1: the weight of a round's loss in λ, relative to the round after it. With 0,
            λ is the mean loss of the round before.
        step_rule: the rule for η: "aggressive", which is the default of the authors' code, "adaptive" or "constant".
    """

    name = "fedex"
    facts = Facts(
        paper="Khodak et al. 2021, arXiv:2106.04502",
        needs="x of few numbers, with bounds between which to draw it; no derivative in x",
        good_for="hyperparameters for which a few draws probably contain good values; a baseline for bilevel methods",
        exchanges="one",
        up="1 like y, k + 1 numbers",
        cost="a gradient of g",
        bias="x can only be one of the k configurations, which may all be far from the solution; all configurations "
        "share one y, so no configuration is measured at a y that was trained with this configuration alone",
    )

    configurations: int = positive_integer(default=10)
    discount: Number = share(default=0.5)
    step_rule: Literal["aggressive", "adaptive", "constant"] = static(default="aggressive")

    def validate(self) -> None:
        rules = "aggressive", "adaptive", "constant"
        require(self.step_rule in rules, "FedEx.step_rule", self.step_rule, " or ".join(map(repr, rules)))

    @property
    def allows(self) -> Allows:
        return Allows(
            late=No("it divides each loss by this round's θ, and a late reply has a draw from an earlier θ"),
            submodels=No("its clients draw whole configurations of x"),
            local_x=No("it needs x on the server, which draws the configurations"),
        )

    def init(self, x: PyTree, y: PyTree) -> State:
        k, zero = self.configurations, jnp.zeros(())
        configurations = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (k, *leaf.shape)), x)
        return State(x, y, configurations, jnp.full(k, 1 / k), zero, zero, zero)

    def draw_configurations(self, start: PyTree, key: Array) -> PyTree:
        """Draw c_1 … c_k, as arrays of the shapes of `start` with a leading axis of length k; c_1 is `start` itself."""
        leaves, structure = jax.tree.flatten(start)

        def several(leaf: Array, key: Array) -> Array:
            others = jax.random.uniform(key, (self.configurations - 1, *leaf.shape), leaf.dtype, *self.bounds(leaf))
            return jnp.concatenate([leaf[None], others])

        keys = jax.random.split(key, len(leaves))
        return jax.tree.unflatten(structure, [several(*both) for both in zip(leaves, keys, strict=True)])

    def drawn(self, message: Message, key: Array) -> tuple[Array, PyTree]:
        """Draw a client's configuration from θ; return its number, and the configuration in the shape of x."""
        number = jax.random.categorical(jax.random.fold_in(key, 0), jnp.log(message.theta))
        return number, jax.tree.map(lambda rows: rows[number], message.configurations)

    def measured_at(self, client: Client, message: Message, key: Array) -> tuple[PyTree, PyTree]:
        """Return the (x, y) at which `AdaptiveSteps` measures a client's curvature: x is the client's configuration."""
        return self.drawn(message, key)[1], message.y

    @phase(takes=Message("y", "whole", "whole", "number"), gives=("y", "whole", "number"), measures=measured_at)
    def train_and_measure(self, client: Client, message: Message, key: Array) -> Reply:
        """Train y at a configuration that the client draws, and measure the outer loss there.

        The reply has three parts: y_i − y, the change of y; the client's term of the gradient ∇̃ in θ, as an array of
        shape (k,); and the client's outer loss.
        """
        number, x = self.drawn(message, key)
        descent_key, outer_key = jax.random.split(jax.random.fold_in(key, 1))
        trained = self.trained(client, x, message.y, descent_key)
        end = optax.tree.add(message.y, trained.update)
        loss = client.problem.outer(x, end, client.outer_batch(outer_key, None))
        term = (loss - message.baseline) / message.theta[number]
        gradient = jnp.zeros_like(message.theta).at[number].set(term)
        return trained._replace(update=(trained.update, gradient, loss), metrics={"outer_loss": loss})

    def round(self, fed: Fed, state: State, key: Array) -> State:
        draw_key, exchange_key = jax.random.split(key)
        configurations = jax.tree.map(
            lambda drawn, known: jnp.where(state.rounds == 0, drawn, known),
            self.draw_configurations(state.x, draw_key),
            state.configurations,
        )
        message = Message(state.y, configurations, state.theta, over(state.losses, state.rounds))
        change, gradient, loss = fed.mean(self.train_and_measure, message, exchange_key)
        largest = jnp.max(jnp.abs(gradient))
        squares = state.squares + largest**2
        theta = jax.nn.softmax(jnp.log(state.theta) - self.step(largest, squares) * gradient)
        return State(
            x=jax.tree.map(lambda rows: rows[jnp.argmax(theta)], configurations),
            y=move(state.y, self.server_lr, change),
            configurations=configurations,
            theta=theta,
            losses=self.discount * state.losses + loss,
            rounds=self.discount * state.rounds + 1,
            squares=squares,
        )

    def step(self, largest: Array, squares: Array) -> Array:
        """Return η, the size of the step on θ, by the rule `step_rule`.

        `largest` is ‖∇̃‖_∞, and `squares` is the sum of ‖∇̃‖²_∞ over the rounds so far.
        """
        most = jnp.sqrt(2 * jnp.log(self.configurations))
        divisors = {"aggressive": largest, "adaptive": jnp.sqrt(squares), "constant": jnp.ones_like(largest)}
        return over(most, divisors[self.step_rule])

"""F2SA: SimFBO's round without second derivatives, by gradients at two points y ± w/λ.

Jeongyeol Kwon, Dohyun Kwon, Stephen Wright, Robert Nowak. "A Fully First-Order Method for Stochastic Bilevel
Optimization". ICML 2023, arXiv:2301.10945. Here in the central form, F2SA-2 of "Faster Gradient Methods for
Highly-smooth Stochastic Bilevel Optimization", ICLR 2026, arXiv:2509.02937.

With ε = 1/λ the total loss min_y [G(x, y) + εF(x, y)] has the slope F(x, y*(x)) in ε at 0. Its central difference

    Φ_λ(x) = (λ/2) (min_y [G(x, y) + εF(x, y)] − min_y [G(x, y) − εF(x, y)])

needs first derivatives alone, and its minimiser x_λ is off by O(1/λ²). Its two minimisers are written y₊ = y − εv and
y₋ = y + εv, so that y is near y*(x), v is near SimFBO's v, and no step size depends on λ. A client's step on all three
is then along the derivatives of one function of its own losses,

    s_i(x, y, v) = ½ [f_i(x, y₊) + f_i(x, y₋)] + (λ/2) [g_i(x, y₊) − g_i(x, y₋)]

    d_x = ∂s_i/∂x = (λ/2) [∇x g_i(x, y₊) − ∇x g_i(x, y₋)] + ½ [∇x f_i(x, y₊) + ∇x f_i(x, y₋)]
    d_y = −∂s_i/∂v = ½ [∇y g_i(x, y₊) + ∇y g_i(x, y₋)] + (ε/2) [∇y f_i(x, y₊) − ∇y f_i(x, y₋)]
    d_v = −∂s_i/∂y = (λ/2) [∇y g_i(x, y₋) − ∇y g_i(x, y₊)] − ½ [∇y f_i(x, y₊) + ∇y f_i(x, y₋)]

which are SimFBO's directions with products by central differences along v, and ∇f as a mean of two points. All else is
SimFBO's: the local steps, the server's step, the messages.

Departures from the papers:
1. They are not federated, and make a loop of steps on y₊ and y₋ for each step on x. Here clients step on x, y and v at
   once, as in SimFBO's round. A federated method of this kind is MemFBO (Yang, Xiao, Ma, Ji, "First-Order Federated
   Bilevel Learning", AAAI 2025), whose text was not at hand: this file does not claim to be it.
2. `multiplier` = None chooses λ at every step, so that ‖v‖/λ balances what the difference leaves out against rounding
   (`Differences`). The papers let λ grow, or choose it by the accuracy that is wanted.

Checked in tests/algorithms/test_f2sa.py (x_λ in closed form, slope −2 in λ) and tests/engines/test_agreement.py.
"""

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedbilevel.algorithms.simfbo import OneExchange
from fedbilevel.core.client import Client
from fedbilevel.core.config import positive
from fedbilevel.core.facts import Facts
from fedbilevel.core.tree import XYV, PyTree, move
from fedbilevel.oracles.differences import Differences
from fedbilevel.oracles.products import Directions


class F2SA(OneExchange):
    """SimFBO by first derivatives alone: for losses that cannot be differentiated twice, or for which it is dear.

    Args:
        multiplier: λ, at least the ratio of f's smoothness in y to g's strong convexity; x is off by O(1/λ²), and
            rounding by O(λ). None: chosen at every step by the precision of the numbers.
    """

    name = "f2sa"
    facts = Facts(
        paper="Kwon et al. 2023, arXiv:2301.10945",
        needs="g strongly convex in y; first derivatives alone",
        good_for="losses without second derivatives, such as some attention kernels; as few exchanges as SimFBO",
        exchanges="one",
        up="1 like x, 2 like y",
        cost="two gradients of g and two of f, at two points y on the same samples",
        bias="as SimFBO's, and 1/λ²",
    )

    multiplier: float | None = positive(default=None, optional=True)

    def directions(self, client: Client, local: XYV, key: Array) -> Directions:
        """Return the three directions at `local`, on the samples that the key draws."""
        draws = 3 if self.independent_batches else 1
        keys = jax.random.split(key, 2 * draws)
        found = [self.slopes(client, local, outer, inner) for outer, inner in zip(keys[::2], keys[1::2], strict=True)]
        d_x, d_y, d_v = (found[k % draws].step[k] for k in range(3))
        return found[0]._replace(step=XYV(d_x, d_y, d_v))

    def slopes(self, client: Client, local: XYV, outer_key: Array, inner_key: Array) -> Directions:
        """Return the derivatives of s_i, with the signs of the steps, and the mean losses of the two points."""
        problem, (x, y, v) = client.problem, local
        outer_batch, inner_batch = client.outer_batch(outer_key), client.inner_batch(inner_key)
        epsilon = Differences().step(y, v) if self.multiplier is None else 1 / self.multiplier

        def s(x: PyTree, y: PyTree, v: PyTree) -> tuple[Array, tuple[Array, Array]]:
            def losses(sign: Array) -> tuple[Array, Array]:
                point = move(y, sign * epsilon, v)
                return problem.outer(x, point, outer_batch), problem.inner(x, point, inner_batch)

            f, g = jax.vmap(losses)(jnp.array([-1.0, 1.0]))
            return f.mean() + (g[0] - g[1]) / (2 * epsilon), (f.mean(), g.mean())

        (s_x, s_y, s_v), means = jax.grad(s, (0, 1, 2), has_aux=True)(x, y, v)
        return Directions(XYV(s_x, optax.tree.scale(-1, s_v), optax.tree.scale(-1, s_y)), *means)

    @property
    def costs(self) -> tuple[int, int]:
        return 12 if self.independent_batches else 4, 0

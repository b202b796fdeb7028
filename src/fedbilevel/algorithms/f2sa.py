"""F2SA: a round of SimFBO without second derivatives, which takes gradients at two points y ± v/λ instead.

Jeongyeol Kwon, Dohyun Kwon, Stephen Wright, Robert Nowak. "A Fully First-Order Method for Stochastic Bilevel
Optimization". ICML 2023, arXiv:2301.10945. This class has the form with central differences, which is F2SA-2 of "Faster
Gradient Methods for Highly-smooth Stochastic Bilevel Optimization", ICLR 2026, arXiv:2509.02937.

The symbols are those of SimFBO (docs/reference/algorithms/simfbo.md). F and G are the means of the clients' losses f_i
and g_i. Let ε = 1/λ. At ε = 0, the derivative of min_y [G(x, y) + εF(x, y)] with respect to ε is F(x, y*(x)). It is
approximated by the central difference

    Φ_λ(x) = (λ/2) (min_y [G(x, y) + εF(x, y)] − min_y [G(x, y) − εF(x, y)])

The gradient of Φ_λ needs only first derivatives of F and G, and the minimiser x_λ of Φ_λ has an error of O(1/λ²). The
minimiser of G + εF is written as y₊ = y − εv, and the minimiser of G − εF as y₋ = y + εv. Their indices + and − are the
signs of εF. Then y is near y*(x), v is near SimFBO's v (the solution of ∇²yy G v = ∇y F), and step sizes need not
depend on λ. A client steps on x, y and v along the derivatives of one function of its own losses,

    s_i(x, y, v) = ½ [f_i(x, y₊) + f_i(x, y₋)] + (λ/2) [g_i(x, y₊) − g_i(x, y₋)]

    d_x = ∂s_i/∂x = (λ/2) [∇x g_i(x, y₊) − ∇x g_i(x, y₋)] + ½ [∇x f_i(x, y₊) + ∇x f_i(x, y₋)]
    d_y = −∂s_i/∂v = ½ [∇y g_i(x, y₊) + ∇y g_i(x, y₋)] + (ε/2) [∇y f_i(x, y₊) − ∇y f_i(x, y₋)]
    d_v = −∂s_i/∂y = (λ/2) [∇y g_i(x, y₋) − ∇y g_i(x, y₊)] − ½ [∇y f_i(x, y₊) + ∇y f_i(x, y₋)]

These directions are those of SimFBO with two changes: central differences along v replace the products of second
derivatives with v, and ∇f is a mean over two points. The local steps, the server's step and the messages are those of
SimFBO.

Departures from the papers:
1. The papers' methods are not federated, and make a loop of steps on y₊ and y₋ for each step on x. Here clients step on
   x, y and v together, as in SimFBO's round. A federated method of this kind is MemFBO (Yang, Xiao, Ma, Ji,
   "First-Order Federated Bilevel Learning", AAAI 2025). We could not read that paper, and F2SA is not an implementation
   of MemFBO.
2. With `multiplier` = None, λ is chosen at every step, so that at the length ‖v‖/λ the truncation error of the
   difference is about as large as its rounding error (`Differences`). The papers let λ grow, or choose it by the
   desired accuracy.

Checked in tests/algorithms/test_f2sa.py (x_λ in closed form, slope −2 in λ) and tests/engines/test_agreement.py.
"""

import jax
import optax
from jax import Array

from fedbilevel.algorithms.parts.local_steps import FirstDerivatives
from fedbilevel.algorithms.simfbo import OneExchange
from fedbilevel.core.client import Client
from fedbilevel.core.config import positive
from fedbilevel.core.facts import Facts
from fedbilevel.core.tree import XYV, PyTree, move
from fedbilevel.oracles.differences import Differences
from fedbilevel.oracles.fixed_x import loss_at_points
from fedbilevel.oracles.products import Directions


class F2SA(OneExchange, FirstDerivatives):
    """Run SimFBO with first derivatives only, for losses whose second derivatives do not exist or cost too much.

    Args:
        multiplier: λ. It should be at least the ratio of f's smoothness in y to g's strong convexity. The error of x is
            O(1/λ²), and the rounding error grows as O(λ). None: λ is chosen at every step from the precision of the
            numbers.
    """

    name = "f2sa"
    facts = Facts(
        paper="Kwon et al. 2023, arXiv:2301.10945",
        needs="g strongly convex in y; only first derivatives",
        good_for="losses without second derivatives, such as some attention kernels; as few exchanges as SimFBO",
        exchanges="one",
        up="1 like x, 2 like y",
        cost="two gradients of g and two of f, at two points y on the same samples",
        bias="SimFBO's bias, and an error in proportion to 1/λ²",
    )

    gradients = 4

    multiplier: float | None = positive(default=None, optional=True, finite=True)

    def slopes(self, client: Client, local: XYV, outer_key: Array, inner_key: Array) -> Directions:
        """Return the directions (d_x, d_y, d_v), and for each loss the mean of its values at the two points y ± v/λ."""
        problem, (x, y, v) = client.problem, local
        outer_batch, inner_batch = client.outer_batch(outer_key), client.inner_batch(inner_key)
        epsilon = Differences().step(y, v) if self.multiplier is None else 1 / self.multiplier

        outer = loss_at_points(problem.outer, x, y, outer_batch)
        inner = loss_at_points(problem.inner, x, y, inner_batch)

        def s(x: PyTree, y: PyTree, v: PyTree) -> tuple[Array, tuple[Array, Array]]:
            points = move(y, -epsilon, v), move(y, epsilon, v)
            f, g = outer(x, points), inner(x, points)
            mean = (f[0] + f[1]) / 2
            return mean + (g[0] - g[1]) / (2 * epsilon), (mean, (g[0] + g[1]) / 2)

        (s_x, s_y, s_v), means = jax.grad(s, (0, 1, 2), has_aux=True)(x, y, v)
        return Directions(XYV(s_x, optax.tree.scale(-1, s_v), optax.tree.scale(-1, s_y)), *means)

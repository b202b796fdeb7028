"""FedBiO and FedBiOAcc: local steps on x, y and v together, plain or along momenta with reduced variance.

Junyi Li, Feihu Huang, Heng Huang. "Communication-Efficient Federated Bilevel Optimization with Global and Local Lower
Level Problems". NeurIPS 2023, arXiv:2302.06701. By default all clients share y, as in the paper's problem with a global
lower level. If all of y stays with the clients (`Bilevel(own=…)`), the problem is the paper's problem with local lower
levels: client i keeps its own y_i and v_i, and only x is exchanged.

Let z = (x, y, v), and let d_i(z; B) be the client's three directions on samples B:

    d_x = ∇x f_i − ∇²xy g_i v        d_y = ∇y g_i        d_v = ∇²yy g_i v − ∇y f_i

    FedBiO      z ← z − η d_i(z; B)                                                        τ_i times
    FedBiOAcc   z' = z − η_t m                                                             τ_i times
                m ← d_i(z'; B) + (1 − a_t)(m − d_i(z; B)),  z ← z'                         the same samples B in both
                η_t = η / (1 + t/u)^{1/3},  a_t = a / (1 + t/u)^{2/3}                      t: rounds so far × τ

Then the server averages z, and in FedBiOAcc also m. The paper writes α_t = δ/(u + t)^{1/3}. Its step sizes are α_t
times a constant, and its factor of the old momentum is 1 − c α_t² in place of 1 − a_t. Both forms are the same if
η = δ u^{-1/3} times the constant, and a = c δ² u^{-2/3}. With u = ∞ both η_t and a_t are constant. If the noise of d
does not depend on z, the variance of m tends to a/(2 − a) times the variance of d.

Messages: the server sends x, y and v, and clients reply with their changes. In FedBiOAcc the server also sends m and t,
and clients also reply with the change of m.

Departures from the paper:
1. Server and clients exchange changes: the server adds Σ p̃_i (z_{i,τ} − z) to z, with p̃_i = (M/P) p_i, and the same
   holds for m. Here p_i is the client's weight, and P of M clients take part in the round. For equal weights or full
   participation this gives the mean of the z_{i,τ}. For unequal weights, the sum is unbiased too.
2. A client of FedBiOAcc evaluates its momentum at its own last z', in the same exchange. In the paper it does so at the
   server's average of all z', in another exchange. With τ = 1 both points are the same, since all clients step along
   the server's m. With τ > 1 the drift of clients remains in m for about 1/a steps, and m may diverge if clients are
   very different: then choose a near ½, or fewer local steps.
3. In the beginning m is 0 and a_0 is 1. The first local step of a run therefore does not move z, and gives
   m = d_i(z; B).
4. A single draw of inner and of outer samples serves all three directions. `independent_batches` draws samples for each
   direction.
5. v is not projected onto a ball.

Checked in tests/algorithms/test_fedbio.py (closed forms, the recursion), test_own_leaves.py and
tests/engines/test_agreement.py.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedbilevel.algorithms.parts.local_steps import LIKE_XYV, LocalDirections, Plain, descend
from fedbilevel.core.algorithm import phase
from fedbilevel.core.client import Client
from fedbilevel.core.config import fraction, positive, step_sizes
from fedbilevel.core.facts import Allows, Facts, No, OwnParts
from fedbilevel.core.fed import Fed, Reply
from fedbilevel.core.field_types import Number, StepSizes
from fedbilevel.core.submodel import NUMBER, UnitPolicy
from fedbilevel.core.tree import XYV, PyTree, move
from fedbilevel.oracles.products import Directions


def own_changes(*variables: str) -> OwnParts:
    """Declare that a reply has the changes of these variables. A client adds them to its own leaves of y and v."""
    return OwnParts(variables, tuple((name, lambda method: -1.0) for name in variables))


class FedBiO(LocalDirections):
    """Run FedAvg on x, y and v together: local steps as in SimFBO, after which the server takes the clients' mean."""

    name = "fedbio"
    facts = Facts(
        paper="Li et al. 2023, arXiv:2302.06701",
        needs="g strongly convex in y, with products of its second derivatives",
        good_for="a single set of step sizes, for similar clients or τ = 1",
        exchanges="one",
        up="1 like x, 2 like y",
        hvps="2τ",
        cost="a gradient of g, and a joint pass for f's gradient and both products with ∇²g",
        bias="drift of clients, which grows with their step sizes (the server has no step size); clients that "
        "make more local steps count more",
    )
    allows = Allows(late=("local_descent",), submodels=UnitPolicy(), own_y={"local_descent": own_changes("y", "v")})

    client_lr: StepSizes = step_sizes(default=None, own=True, adaptive="local")

    def init(self, x: PyTree, y: PyTree) -> XYV:
        return XYV(x, y, optax.tree.zeros_like(y))

    @phase(takes=LIKE_XYV, gives=LIKE_XYV, measures=True)
    def local_descent(self, client: Client, start: XYV, key: Array) -> Reply:
        """Take τ_i simultaneous steps on x, y and v. Reply with the change of (x, y, v)."""
        tau = client.local_steps(self.local_steps)
        reply = self.counted(self.local_sum(client, start, tau, key, Plain()), tau)
        return reply._replace(update=descend(optax.tree.zeros_like(start), self.client_lr, reply.update))

    def round(self, fed: Fed, state: XYV, key: Array) -> XYV:
        return optax.tree.add(state, fed.mean(self.local_descent, state, key, unbiased=True))


class State(NamedTuple):
    """Hold the state of FedBiOAcc's server, which is also its message to clients."""

    iterate: XYV
    momentum: XYV
    steps: Array  # t: the number of rounds so far times the field `local_steps`

    @property
    def x(self) -> PyTree:
        return self.iterate.x

    @property
    def y(self) -> PyTree:
        return self.iterate.y


class FedBiOAcc(LocalDirections):
    """Run FedBiO along momenta whose variance is reduced as in STORM.

    Args:
        forgetting: a, the weight of the newest samples in the momentum, strictly between 0 and 1.
        horizon: u, the number of local steps after which step sizes are 2^{-1/3} times the first step size; infinity:
            step sizes are constant.
    """

    name = "fedbioacc"
    facts = Facts(
        paper="Li et al. 2023, arXiv:2302.06701",
        needs="g strongly convex in y, with products of its second derivatives",
        good_for="small batches: the momenta average out their noise, and do not lag behind",
        exchanges="one",
        up="2 like x, 4 like y",
        hvps="4τ",
        cost="two gradients of g, and two joint passes, each for f's gradient and both products with ∇²g",
        bias="drift of clients; clients that make more local steps count more",
    )
    allows = Allows(
        late=No(
            "its momenta add up the changes of gradients along the clients' last steps; if an earlier reply counted "
            "again, the same change would be added twice"
        ),
        submodels=UnitPolicy(),
        own_y={"accelerated_descent": own_changes("y", "v", "momentum of y", "momentum of v")},
    )

    client_lr: StepSizes = step_sizes(default=None, own=True, adaptive="local")
    forgetting: Number = fraction(default=0.1, own=True)
    horizon: Number = positive(default=float("inf"), own=True)

    def init(self, x: PyTree, y: PyTree) -> State:
        start = XYV(x, y, optax.tree.zeros_like(y))
        return State(start, optax.tree.zeros_like(start), jnp.zeros((), jnp.int32))

    @phase(  # `takes` is a State with words in place of arrays
        takes=State(LIKE_XYV, LIKE_XYV, NUMBER),  # type: ignore[arg-type]
        gives=(LIKE_XYV, LIKE_XYV),
        measures=True,
    )
    def accelerated_descent(self, client: Client, at: State, key: Array) -> Reply:
        """Take τ_i steps along the momentum. Reply with the changes of (x, y, v) and of the momentum."""
        tau = client.local_steps(self.local_steps)

        def step(k: Array, carry: tuple[XYV, Directions]) -> tuple[XYV, Directions]:
            change, momentum = carry
            t, samples = at.steps + k, jax.random.fold_in(key, k)
            fading = (1 + t / self.horizon) ** (-1 / 3)
            old = optax.tree.add(at.iterate, change)
            change = descend(change, XYV(*(size * fading for size in self.client_lr)), momentum.step)
            before = self.directions(client, old, samples)
            now = self.directions(client, optax.tree.add(at.iterate, change), samples)
            kept = jnp.where(t == 0, 0, 1 - self.forgetting * fading**2)
            m = move(now.step, kept, optax.tree.sub(momentum.step, before.step))
            return change, Directions(m, momentum.outer_loss + now.outer_loss, momentum.inner_loss + now.inner_loss)

        begin = self.no_directions(client, at.iterate, key)._replace(step=at.momentum)
        change, end = jax.lax.fori_loop(0, tau, step, (optax.tree.zeros_like(at.iterate), begin))
        update = (change, optax.tree.sub(end.step, at.momentum))
        return self.counted(end, tau, evaluations=2)._replace(update=update)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        change = fed.mean(self.accelerated_descent, state, key, unbiased=True)
        iterate, momentum = optax.tree.add((state.iterate, state.momentum), change)
        return State(iterate, momentum, state.steps + self.local_steps)
